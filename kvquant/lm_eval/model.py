"""KvquantLM: lm-evaluation-harness on a quantized cache.

A forward pass over a prompt never reads packed rows: its tokens attend to exact keys and values. So
the context is read without its last token, once, and quantized into the cache. The last token and
the continuation are decoded from there, one by one:

    context c0 c1 c2 c3, continuation x0 x1
    read with exact attention, quantized    c0 c1 c2
    fed to decode steps                              c3 x0
    scored after each step                           x0 x1
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from ..errors import missing_extra

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.defaults import DEFAULT_MAX_LENGTH
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import (
        get_rolling_token_windows,
        make_disjoint_window,
        simple_parse_args_string,
    )
except ImportError as error:
    raise missing_extra("the model of lm_eval needs lm_eval 0.4.13", "lm-eval", error) from error

from tqdm import tqdm

from ..calibration.fidelity import Planned, Scheme, options_of
from ..errors import ConfigError, shown
from ..evaluation.caches import parse_cache
from ..evaluation.decoding import Caches, Reading, score_lines
from ..evaluation.generation import Sampling, chooser
from ..hf.model import CachedModel
from ..rows.arguments import check_size
from ..rows.quantize import EXACT_DTYPES
from .arguments import read_arguments
from .batches import Context, Text, Tokens, batches

if TYPE_CHECKING:
    from ..cache.contiguous import KVCache

NEW_TOKENS = 256  # of a generated text, where a task does not say; as of the harness's own models
NO_MATTER = {"top_p", "top_k", "min_p"}  # to the likeliest token
log = logging.getLogger("kvquant")


@register_model("kvquant")
class KvquantLM(TemplateLM):
    """A model of lm-evaluation-harness whose scores and texts are decoded from a quantized cache.

    Args:
        model: decodes; it has a tokenizer.
        cache: as `kvquant evaluate --cache` has it: "int4-g4,recent=0".
        batch_size: contexts of one length that are decoded together.
        max_length: the most tokens of a request; longer requests lose their first tokens. When
            None, the positions of the model's config, or 2,048.

    Raises:
        ConfigError: no tokenizer, or a cache or sizes that are not possible.
        CheckpointError: the plan was made for another model.
        UnsupportedModelError: no KVCache serves the model.

    Example:
        >>> from lm_eval.api.instance import Instance
        >>> from kvquant import CachedModel
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> lm = KvquantLM(CachedModel.from_pretrained(MODEL), "int4-g4,sinks=0,recent=0")
        >>> asked = Instance("loglikelihood", {}, ("The city of Manila", " was"), 0)
        >>> ((log_likelihood, is_likeliest),) = lm.loglikelihood([asked], disable_tqdm=True)
        >>> log_likelihood < 0
        True
    """

    def __init__(
        self,
        model: CachedModel,
        cache: str | Scheme | Planned,
        *,
        batch_size: int = 1,
        max_length: int | None = None,
    ) -> None:
        super().__init__()
        if model.tokenizer is None:
            raise ConfigError(
                "lm_eval needs a tokenizer, and this CachedModel has none: make it by "
                "CachedModel.from_pretrained(folder), which loads both"
            )
        self.model, self.tokenizer, self._device = model, model.tokenizer, model.model.device
        latent = model.has_latents
        if isinstance(cache, str):
            cache = parse_cache(cache, latent=latent, model=model)
        self.choice = cache
        self.batch_size = check_size("batch_size", batch_size, at_least=1)
        most = model.max_positions
        given = most or DEFAULT_MAX_LENGTH if max_length is None else max_length
        self.max_length = check_size("max_length", given, at_least=1)
        if most is not None and self.max_length > most:
            raise ConfigError(
                f"max_length {self.max_length} is beyond the {most} positions of the model"
            )
        self._options = options_of(self.choice, is_latent=latent)
        model.new_cache(1, 1, device=torch.device("meta"), **self._options)  # refuses now
        self._ends = {*model.end_tokens, self.tokenizer.eos_token_id}
        self._counts = dict.fromkeys(("requests", "beyond_window", "cut"), 0)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> KvquantLM:
        """Make it of --model_args; errors are those of read_arguments and of KvquantLM.

        Args:
            arg_dict: as read_arguments has it.
            additional_config: options of lm_eval. model_args of the same names win, since the
                harness always gives a device and a batch size.
        """
        options = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**read_arguments({**options, **arg_dict}))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> KvquantLM:
        """Make it of the text of --model_args; see create_from_arg_obj."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results.

        Returns:
            "kvquant": the cache, and counts of requests: all, those that read packed rows
            ("beyond_window"), and those that lost tokens because they were too long ("cut").
        """
        return {"kvquant": {"cache": str(self.choice), **self._counts}}

    @property
    def eot_token_id(self) -> int | None:
        """See TemplateLM."""
        end: int | None = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: BOS, or EOS where there is none."""
        begin: int | None = self.tokenizer.bos_token_id
        begin = self.eot_token_id if begin is None else begin
        if begin is None:
            raise ConfigError(
                "the tokenizer has neither BOS nor EOS, and a text without a context needs one: "
                "give its tokenizer_config.json a bos_token"
            )
        return begin

    @property
    def tokenizer_name(self) -> str:
        """Of the tokenizer, for names of files."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """See LM; ConfigError if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: leave --apply_chat_template out")
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, without a second BOS after the one of a chat template."""
        begin = self.tokenizer.bos_token or self.tokenizer.eos_token
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer(string, **special)["input_ids"]
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        contexts = sorted(
            self._contexts(requests),
            key=lambda one: (len(one.tokens), len(one.lines[0][0]), len(one.fed)),
            reverse=True,
        )
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Decoding continuations") as bar:
            for batch in batches(contexts, self.batch_size, lambda one: len(one.tokens)):
                new = dict(self._score(batch))
                for number, answer in new.items():
                    if (named := requests[number][0]) is not None:  # None: part of a rolling text
                        self.cache_hook.add_partial("loglikelihood", named, answer)
                found |= new
                bar.update(len(new))
        self._warn()
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each whole text, in windows of max_length tokens; see LM."""
        parts: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(parts)
            parts += [(None, *make_disjoint_window(one)) for one in windows]
            counts.append(len(parts) - before)
        scored = iter(self._loglikelihood_tokens(parts, disable_tqdm=disable_tqdm))
        sums = [sum(one for one, _ in islice(scored, count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts after contexts; see LM. ConfigError for unknown generation_kwargs, or no room."""
        found: dict[int, str] = {}
        texts = [self._text(number, *request.args) for number, request in enumerate(requests)]
        texts.sort(key=lambda one: len(one.tokens), reverse=True)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generating texts") as bar:
            for batch in batches(texts, self.batch_size, lambda one: one.kind):
                for one, text in zip(batch, self._generate(batch, len(found)), strict=True):
                    found[one.request] = text
                    self.cache_hook.add_partial("generate_until", requests[one.request].args, text)
                    bar.update()
        self._warn()
        return [found[number] for number in range(len(requests))]

    def _contexts(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> list[Context]:
        """Requests by their contexts: each of these is read once, and equal tokens are fed once."""
        contexts: dict[Tokens, Context] = {}
        for number, (named, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ConfigError(
                    f"a continuation has {len(continuation)} tokens: 1 to max_length, "
                    f"{self.max_length}, can be scored. It is of {shown(named)}"
                )
            whole = (*(context or [self.prefix_token_id]), *continuation)
            self._counts["cut"] += len(whole) > self.max_length + 1
            whole = whole[-self.max_length - 1 :]  # the last one is not fed
            place = len(whole) - len(continuation) - 1
            own = contexts.setdefault(whole[:place], Context(whole[:place]))
            own.fed.setdefault(whole[place:-1], []).append((number, whole[-1]))
            self._count(len(whole) - 1)
        return [*contexts.values()]

    def _score(self, batch: Sequence[Context]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Number, log-likelihood and "greedy would write it" of each request."""
        lines = [[(fed, [last for _, last in asked]) for fed, asked in one.lines] for one in batch]
        longest = max(len(fed) for own in lines for fed, _ in own)
        make = self._maker([one.tokens for one in batch], longest)
        for one, found in zip(batch, score_lines(self.model, make, lines), strict=True):
            for (_, asked), (scores, likeliest) in zip(one.lines, found, strict=True):
                sums = scores.double().sum(0).tolist()
                for (number, _), total, greedy in zip(
                    asked, sums, likeliest.all(0).tolist(), strict=True
                ):
                    yield number, (total, greedy)

    def _maker(self, contexts: Sequence[Tokens], new_tokens: int) -> Callable[[], KVCache]:
        """What makes a cache of contexts of one length, with room for more tokens."""
        if not contexts[0]:
            return partial(self.model.new_cache, len(contexts), new_tokens, **self._options)
        tokens = torch.tensor(contexts, device="cpu")
        return partial(Caches(self.model, tokens, new_tokens, Reading()).copy, self.choice)

    def _text(self, number: int, context: str, settings: Mapping[str, Any]) -> Text:
        told = dict(normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        until, num_tokens = told.pop("until"), told.pop("max_gen_toks")
        samples, heat = told.pop("do_sample"), told.pop("temperature", 1.0)
        temperature = float(heat) if samples and heat else None
        if told.get("num_beams") == 1:
            del told["num_beams"]
        unknown = sorted(told.keys() - (NO_MATTER if temperature is None else set()))
        if unknown:
            raise ConfigError(
                f"generation_kwargs have {unknown[0]}={shown(told[unknown[0]])}, which kvquant "
                "does not serve: there are until, max_gen_toks, do_sample and temperature; "
                f"{', '.join(sorted(NO_MATTER))} only without sampling (--gen_kwargs "
                "do_sample=False)"
            )
        if not 0 < num_tokens < self.max_length:
            raise ConfigError(
                f"max_gen_toks is {num_tokens}, and max_length {self.max_length} has room for 1 to "
                f"{self.max_length - 1} tokens behind a context: give --gen_kwargs max_gen_toks=N"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        kept = tokens[num_tokens - self.max_length :]
        self._counts["cut"] += len(kept) < len(tokens)
        return Text(number, tuple(kept), tuple(filter(None, until)), num_tokens, temperature)

    def _generate(self, batch: Sequence[Text], first: int) -> list[str]:
        """Texts of one kind; first is the number of texts before them."""
        one = batch[0]
        cache = self._maker([text.tokens[:-1] for text in batch], one.num_tokens)()
        last = torch.tensor([text.tokens[-1] for text in batch], device="cpu")
        sampling = Sampling(one.temperature, torch.initial_seed() % 2**31, first)
        texts: list[list[int]] = [[] for _ in batch]
        over: set[int] = set()
        known = self.tokenizer.get_added_vocab()  # special tokens, which texts leave out
        ends = [*self._ends, *(known[stop] for stop in one.until if stop in known)]
        ends = [end for end in ends if end is not None and end < self.model.config.vocab_size]
        pick = chooser(sampling, len(batch))

        def choose(logits: torch.Tensor) -> torch.Tensor:
            tokens = pick(logits)
            for place, token in enumerate(tokens.tolist()):
                if place in over:
                    continue
                if token not in ends:
                    texts[place].append(token)
                if token in ends or any(stop in self._plain(texts[place]) for stop in one.until):
                    over.add(place)
            if ends:  # for generate an end token, too, ends a text
                tokens[[*over]] = ends[0]
            return tokens

        logits = self.model.step(cache, last)
        self.model.generate(cache, logits, one.num_tokens, eos_token_id=ends, choose=choose)
        for text, new in zip(batch, texts, strict=True):
            self._count(len(text.tokens) + len(new))
        return [
            postprocess_generated_text(self._plain(new), list(one.until), None) for new in texts
        ]

    def _plain(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _count(self, length: int) -> None:
        """Count a request whose cache holds so many tokens in the end."""
        self._counts["requests"] += 1
        self._counts["beyond_window"] += length > self.choice.sink_len + self.choice.recent_len

    def _warn(self) -> None:
        """Say what happened to requests that are too long, or too short for packed rows."""
        count = self._counts["requests"]
        if self._counts["cut"]:
            log.warning(
                f"{self._counts['cut']} of {count} requests are longer than max_length, "
                f"{self.max_length} tokens: their first tokens were left out"
            )
        inside = count - self._counts["beyond_window"]
        formats = [self._options.get(name) for name in ("k_format", "v_format")]
        if inside and not EXACT_DTYPES.keys() >= {*formats}:
            log.warning(
                f"{inside} of {count} requests fit into the 16-bit window of the cache (sink_len "
                f"{self.choice.sink_len}, recent_len {self.choice.recent_len}): no packed row was "
                "read for them. Give sink_len=0,recent_len=0 in --model_args to pack all tokens"
            )
