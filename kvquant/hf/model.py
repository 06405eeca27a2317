"""CachedModel: a Hugging Face decoder that keeps its keys and values in a KVCache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from .. import debug
from ..cache.checks import whole_numbers
from ..cache.contiguous import KVCache
from ..cache.latent import LatentFormats, LatentKVCache
from ..cache.layer import SPARE
from ..errors import ConfigError, DeviceError, ShapeError, UnsupportedModelError, shown
from ..io.model_id import WEIGHTS
from ..io.plan import CachePlan, ModelPlan, Plan, as_plan
from ..rows.arguments import (
    check_device,
    check_flag,
    check_kind,
    check_size,
    check_tensors,
    name_of_kind,
)
from ..rows.quantize import exact_codec
from .argument import as_argument
from .cache import QuantizedCache, Told
from .call import ATTENTION
from .compile.captured import CapturedStep
from .models.configs import (
    CacheLayers,
    cache_layers,
    check_has_attention,
    input_device,
    layer_devices,
    layer_windows,
    layers_of_rank,
    new_cache,
)
from .models.decoders import check_decoder
from .models.fingerprint import FOLDED, identified
from .models.fold import fold_values
from .models.latent import hands_latents, heads_of
from .models.loading import TensorPlan, load
from .models.observe import Observer, observe, output_weights
from .models.positions import positions_of
from .models.probe import check_accuracy
from .plans import plan_of_model
from .switch import attending, plain_implementation

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache.contiguous import CacheOptions

Progress = Callable[[int], None]
CHUNK = 16384  # tokens of prompts, of all sequences, that are computed at a time
LEAST = 512  # of each sequence
LEAST_CAPTURED = 8  # steps that are sooner done if the first makes a CUDA graph
_GIVE_CACHE = (
    "give a KVCache, of new_cache or load_cache, or the kv of a QuantizedCache (from kvquant "
    "import QuantizedCache; transformers has another class of that name)"
)
log = logging.getLogger("kvquant")


class CachedModel:
    """A Hugging Face decoder that keeps its keys and values in a KVCache.

    Each call sets the model's attention implementation, and evaluation mode, and sets them back.
    Threads may share it, each with caches of its own. On CUDA, attention of a float32 model takes
    and gives bfloat16 in each step.

    Ranks (tp_plan, torchrun): each process calls the same methods with the same tokens, keeps the
    KV heads of its rank, and saves a file of its own. After an error on one rank the others wait.

    Args:
        model: a causal language model that attends through transformers' attention interface.
        tokenizer: for encode and decode, which raise ConfigError without it.
        exact_format: of 16-bit rows; None for "fp16" with a float16 model, else "bf16".

    Attributes:
        config: of the text model.
        exact_format: as above.

    Raises:
        ConfigError: model is no model of transformers.
        UnsupportedModelError: it is no causal language model, none of its layers attends, or it
            computes attention by itself. new_cache names layers that no KVCache holds.

    Example:
        >>> import torch
        >>> from kvquant import CachedModel
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> model = CachedModel.from_pretrained(MODEL)
        >>> cache = model.new_cache(batch=1, max_seq_len=64)
        >>> logits = model.prefill(cache, torch.tensor([model.encode("The city of Manila")]))
        >>> model.generate(cache, logits, 5).shape
        torch.Size([1, 5])
    """

    dequantizes = False  # see HybridModel

    def __init__(
        self, model: Any, tokenizer: Any = None, *, exact_format: str | None = None
    ) -> None:
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            raise ConfigError(
                f"model is {type(model).__name__}: give a causal language model of transformers, "
                "or its folder to CachedModel.from_pretrained"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.exact_format = exact_format or exact_codec(model.dtype)
        self.config = model.config.get_text_config(decoder=True)
        self.known_weights: set[str] = set()  # of this model's plans, compared once: it takes time
        # what no method serves is refused here; layers that no KVCache holds can be observed
        check_has_attention(self.config)
        check_decoder(model, gives_logits=True)
        with attending(model, self._attention):
            pass

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        tp_plan: TensorPlan | None = None,
    ) -> CachedModel:
        """Load a model and its tokenizer from a folder, a GGUF file, or the Hugging Face hub.

        Code in the model's folder never runs, and weights must be safetensors or GGUF.

        Args:
            folder: of save_pretrained; a GGUF file, which is dequantized (extra gguf); or a name on
                the hub, OWNER/NAME: safetensors, config and tokenizer come from the hub or its
                cache folder.
            dtype: of weights and arithmetic. float32 is faster on CPUs without bfloat16 units; 16
                bit takes half the memory. 16-bit rows of caches have this dtype; with float32, that
                of the saved model.
            device: where to run; the CPU when None.
            tp_plan: "auto", or as transformers' DistributedConfig has it, in each process of
                torchrun: which weights to spread over the processes. transformers chooses the
                devices.

        Raises:
            ConfigError: no such folder, file, name or device, no network, a model that transformers
                cannot load, or lacks weights; a tp_plan with a device, or in one process.
            UnsupportedError: a GGUF file, and the extra gguf is not installed.
            DeviceError: the device is not here, or no kernels serve it.
            UnsupportedModelError: as CachedModel.
        """
        if tp_plan is not None and device is not None:
            raise ConfigError(
                f"device is {shown(device)}, and with tp_plan each process has its own: leave it "
                "out"
            )
        return cls(**loaded(folder, dtype, device, tp_plan))

    @property
    def config_dict(self) -> dict[str, Any]:
        """The config and the weights' fingerprint, for save_cache; all ranks must ask for it."""
        return identified(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and arithmetic."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model was made for; None if its config names none."""
        return getattr(self.config, "max_position_embeddings", None)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; ConfigError without a tokenizer."""
        ids: list[int] = self._known_tokenizer("encode")(text)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int] | torch.Tensor) -> str:
        """The text of token ids; ConfigError without a tokenizer."""
        text: str = self._known_tokenizer("decode").decode(tokens)
        return text

    def _known_tokenizer(self, asked: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(
                f"{asked} needs a tokenizer, and this CachedModel has none: make it by "
                "CachedModel(model, tokenizer=AutoTokenizer.from_pretrained(folder)), or by "
                "CachedModel.from_pretrained(folder), which loads both"
            )
        return self.tokenizer

    def new_cache(
        self,
        batch: int,
        max_seq_len: int,
        *,
        plan: ModelPlan = None,
        fmt: LatentFormats | None = None,
        accept_loss: bool = False,
        **options: Unpack[CacheOptions],
    ) -> KVCache:
        """Make an empty KVCache of this model's layers.

        It holds the layers that own keys and values, in order. Their head_dim may differ, their
        number of KV heads may not. With multi-head latent attention (DeepSeek V2, V3) it is a
        LatentKVCache.

        Args:
            batch: sequences.
            max_seq_len: tokens that each has room for.
            plan, fmt, accept_loss: as of QuantizedCache.
            options: of KVCache: k_format, v_format (not with a plan), sink_len, recent_len,
                exact_format.

        Raises:
            ConfigError: an option is not supported.
            AccuracyError: K rows of 4 bits or fewer, without a plan, ruin the model's texts.
            CheckpointError: the plan was made for another model.
            UnsupportedModelError: a layer is no attention or has an unsupported shape; or the plan
                lacks layers.
        """
        check_flag("accept_loss", accept_loss)
        device = layer_devices(self.model, self._layers.places) or self.model.device
        own = {"exact_format": self.exact_format, "device": device}
        plan = plan_of_model(plan, self, {**options, "fmt": fmt})
        given: dict[str, Any] = own | options | {"plan": plan, "fmt": fmt, "is_probed": True}
        cache = new_cache(self.model.config, self._layers, batch, max_seq_len, **given)
        if plan is None and options.get("bases") is None and not accept_loss:
            check_accuracy(self.model, cache, self._layers)
        return cache

    @property
    def has_latents(self) -> bool:
        """Whether its caches keep latent rows, not keys and values of heads."""
        return self._layers.are_latent

    def fold_values(self, plan: Plan) -> CachePlan:
        """Move the plan's bases of V from caches into the model's weights, in place.

        The value and output projections of each layer change, and get a bias if the plan has
        offsets. The model computes the same as before, with any cache, except for one rounding of
        its weights; decode steps save a multiplication by the basis.

        Args:
            plan: as in new_cache.

        Returns:
            The plan, without bases of V, for all later caches of this model. Caches that you made
            before, and other plans, are for the model as it was.

        Raises:
            CheckpointError: the plan was made for another model.
            ConfigError: bases of V are in this model already, or the plan is of latent rows.
            UnsupportedModelError: a layer's values or outputs do not come straight from, or go
                straight into, a linear layer, or the model is spread over ranks; nothing has
                changed.
        """
        self._check_alone("its weights hold a part of each projection")
        plan = as_plan(plan)
        config = self.config_dict
        plan.check_model(config)
        plan.check_of_heads("fold_values")
        if hasattr(self.model, FOLDED):
            raise ConfigError(
                "a plan's bases of V were folded into this model before: load it again to fold "
                "another plan"
            )
        bases = {
            layer: basis.v
            for layer, basis in zip(plan.places, plan.layers, strict=True)
            if not basis.v.is_identity
        }
        fold_values(self.model, bases)
        setattr(self.model, FOLDED, config.get(WEIGHTS))
        return plan.without_v_bases()

    def prefill(
        self,
        cache: KVCache,
        tokens: torch.Tensor,
        lens: torch.Tensor | Sequence[int] | None = None,
        *,
        append: bool = False,
        chunk: int | None = None,
        progress: Progress | None = None,
    ) -> torch.Tensor:
        """Read a text, or with append more of it, into a cache in chunks.

        A call that raises is undone; with windows at least to the last whole chunk.

        Args:
            cache: from new_cache, empty; with append its tokens are the past.
            tokens: [batch, new_tokens], whole numbers; padding, if any, last.
            lens: [batch], whole numbers: tokens of each sequence without padding, 1 or more; all
                when None.
            append: continue the texts of the cache: a second turn, text after a saved prefix, the
                next part of a prompt. The cache may be empty.
            chunk: tokens of each sequence computed at a time: more are faster, and activations take
                more memory. None: 16,384 of all sequences together; all at once if rotary
                embeddings depend on the length of the text, and the text exceeds it.
            progress: called with the number of tokens done after each chunk.

        Returns:
            [batch, vocabulary]: the logits after each sequence's last token.

        Raises:
            ShapeError: tokens, lens or cache do not fit one another or the model; no room in the
                cache; or a position beyond the model's position embeddings.
            ConfigError: the cache holds tokens, and append is not given; tokens or lens are no
                whole numbers, or not in the vocabulary (checked on CUDA in debug mode only).
            NonFiniteError: keys or values that the formats cannot hold, see KVCache.check.
            UnsupportedModelError: attention that KVCache cannot compute, with the layer.
        """
        check_kind("cache", cache, KVCache, _GIVE_CACHE)
        check_flag("append", append)
        self.check_tokens(tokens, (cache.batch, None))
        counts = _counts(lens, *tokens.shape)
        held = cache.seq_lens.tolist()
        if any(held) and not append:
            raise ConfigError(
                f"the cache holds tokens already ({held} in its sequences), and prefill begins a "
                "text: to go on with those give append=True, and only the tokens that are new. For "
                "another text call cache.reset() first"
            )
        if chunk is None:
            chunk = max(CHUNK // cache.batch, LEAST)
        chunk = check_size("chunk", chunk, at_least=1)
        self._check_room(cache, counts)
        if self._layers.turn is not None and not any(held):
            if int(counts.max()) > self._layers.turn.positions:
                chunk = tokens.shape[1]  # all keys are turned alike
        logits: torch.Tensor | None = None
        cache.check()  # what was appended before is not to be blamed on this call
        with cache.attempt(int(counts.max())):
            for start in range(0, int(counts.max()), chunk):
                part = tokens[:, start : start + chunk]
                new_lens = (counts - start).clamp(0, part.shape[1])
                keep, place = (new_lens - 1).clamp(min=0).unique(return_inverse=True)
                each = torch.arange(cache.batch, device="cpu")
                found = self._run(cache, part, new_lens, keep.tolist())[each, place]
                here = (new_lens > 0).to(found.device)[:, None]  # the others ended before
                logits = found if logits is None else torch.where(here, found, logits)
                if progress:
                    progress(part.shape[1])
        assert logits is not None
        return logits

    def step(self, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one token of each sequence by the fused call; errors as of prefill.

        Args:
            cache: the past of each sequence, of any lengths.
            tokens: [batch], whole numbers.

        Returns:
            [batch, vocabulary]: the logits of the next token.
        """
        check_kind("cache", cache, KVCache, _GIVE_CACHE)
        self.check_tokens(tokens, (cache.batch,))
        if self._positions is not None:  # room alone is checked by the first layer's append
            self._check_room(cache, torch.ones(cache.batch, dtype=torch.int64, device="cpu"))
        return self._run(cache, tokens[:, None], None, [0])[:, 0]

    def stepper(self, cache: KVCache, num_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The fastest way, without torch.compile, to decode tokens of a cache one by one.

        Call cache.check() at the end. Errors are those of prefill.

        Args:
            cache: the past of each sequence.
            num_tokens: how many are to come.

        Returns:
            On CUDA a CapturedStep, for 8 tokens or more, if a graph can hold the model's step and
            memory is left; else step (the log says why, at INFO). Logits last until the next call.
        """
        check_kind("cache", cache, KVCache, _GIVE_CACHE)
        if num_tokens >= LEAST_CAPTURED:
            try:
                return CapturedStep(self, cache)
            except (DeviceError, UnsupportedModelError, torch.OutOfMemoryError) as error:
                log.info("kvquant: steps come from Python: %s", error)
        return partial(self.step, cache)

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a text, from the model's generation_config: none, one or several."""
        ends = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return [ends] if isinstance(ends, int) else list(ends or ())

    def generate(
        self,
        cache: KVCache,
        logits: torch.Tensor,
        num_tokens: int,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Continue each sequence up to an end token, by stepper.

        If a call raises, also in choose, it has added nothing. A text that ends early leaves no
        more in the cache than alone: it takes part in the steps of the others, and generate crops
        what these append, every rollback_len tokens.

        Args:
            cache: the past of each sequence.
            logits: [batch, vocabulary] after its last token, just returned by prefill or step.
                kvquant cannot check that they are of this cache.
            num_tokens: the most tokens to add, 1 or more.
            eos_token_id: the token that ends a text, or several; end_tokens when None. With () no
                text ends before num_tokens, and on CUDA no step waits for the GPU.
            choose: maps logits of a step, [batch, vocabulary], to the next token of each sequence,
                [batch] int64: to sample, or to show tokens as they come. The likeliest tokens when
                None. Ranks (tp_plan) must choose alike.

        Returns:
            [batch, at most num_tokens], int64: up to the longest text; a shorter text repeats its
            end token. The cache does not hold the last token of a text yet: step with it, or put it
            before the tokens of prefill(..., append=True).

        Raises:
            ConfigError: a sequence of the cache is empty, so the logits are of another one; an end
                token or a token of choose is not possible; or choose is no function.
            Else as prefill.

        Example:
            >>> import torch
            >>> from kvquant import CachedModel
            >>> from kvquant.cli.demo import MODEL  # a folder with a model
            >>> model = CachedModel.from_pretrained(MODEL)
            >>> cache = model.new_cache(batch=1, max_seq_len=64)
            >>> logits = model.prefill(cache, torch.tensor([model.encode("The city of Manila")]))
            >>> def sample(logits):
            ...     likely = logits.topk(50).values[:, -1:]
            ...     scores = (logits / 0.8).masked_fill(logits < likely, -torch.inf)
            ...     return torch.multinomial(scores.softmax(-1), 1)[:, 0]
            >>> model.generate(cache, logits, 20, choose=sample).shape
            torch.Size([1, 20])
        """
        num_tokens = check_size("num_tokens", num_tokens, at_least=1)
        check_kind("cache", cache, KVCache, _GIVE_CACHE)
        check_tensors(logits=logits)
        if logits.ndim != 2 or logits.shape[0] != cache.batch:
            raise ShapeError(
                f"logits are {list(logits.shape)}: give [{cache.batch}, vocabulary], of prefill "
                "or step"
            )
        ends = self._ends(eos_token_id).to(logits.device)
        if choose is not None and not callable(choose):
            raise ConfigError(
                f"choose is of type {name_of_kind(choose)}: give a function of a tensor"
            )
        self._check_room(
            cache, torch.full((cache.batch,), num_tokens - 1, dtype=torch.int64, device="cpu")
        )
        cache.check()
        held = cache.seq_lens.cpu().long()
        if not bool(held.all()):
            raise ConfigError(
                f"the cache holds {held.tolist()} tokens in its sequences, so the logits cannot be "
                "those after them: let prefill read a text into each, and give what it returns"
            )
        step = self.stepper(cache, num_tokens - 1)
        # steps that a crop takes back whole, if rows are kept for it
        period = min(max(cache.rollback_len, 1), SPARE) if cache.recent_len else SPARE
        columns: list[torch.Tensor] = []
        is_over = torch.zeros(cache.batch, dtype=torch.bool, device=logits.device)
        lens = held - 1  # of the cache, in the end
        with cache.attempt(num_tokens):
            while len(columns) < num_tokens:
                logits = step(columns[-1]) if columns else logits
                if choose is None:
                    column = logits.argmax(-1)
                else:
                    self.check_tokens(column := choose(logits), (cache.batch,))
                    # a copy: choose may fill the same tensor again
                    column = column.to(logits.device, torch.int64, copy=True)
                columns.append(torch.where(is_over, columns[-1], column) if columns else column)
                if not len(ends):
                    continue
                lens += ~is_over.cpu()
                is_over = torch.isin(columns[-1], ends)
                if bool(is_over.all()):
                    break
                if len(columns) % period == 0:
                    self._drop_behind(cache, lens)
            if len(ends):
                self._drop_behind(cache, lens)
            cache.check()
        return torch.stack(columns, dim=1)

    def _ends(self, eos_token_id: int | Sequence[int] | None) -> torch.Tensor:
        """[ends] int64, on the CPU: the tokens that end a text."""
        if eos_token_id is None:
            return torch.tensor(self.end_tokens, dtype=torch.int64, device="cpu")
        ends = whole_numbers("eos_token_id", eos_token_id).reshape(-1)
        wrong = [end for end in ends.tolist() if not 0 <= end < self._vocabulary]
        if wrong:
            raise ConfigError(
                f"eos_token_id {wrong[0]} is not in the vocabulary of the model: ids are 0 to "
                f"{self._vocabulary - 1}. Give () to let no token end a text"
            )
        return ends

    def _drop_behind(self, cache: KVCache, lens: torch.Tensor) -> None:
        """Crop the texts of a cache that have ended, to lens [batch]; the others are as long."""
        if bool((cache.seq_lens.cpu() > lens).any()):
            cache.crop(lens)

    def new_plain_cache(self) -> Any:
        """Make an empty DynamicCache, transformers' own, for plain."""
        return DynamicCache()

    def plain(self, tokens: torch.Tensor, past: Any = None) -> torch.Tensor:
        """Run the model as transformers does: SDPA, and a DynamicCache of the model's dtype.

        The model's eager attention computes soft caps and sink logits, which SDPA lacks.

        Args:
            tokens: [batch, new_tokens], whole numbers.
            past: a DynamicCache to extend, or None.

        Returns:
            [batch, vocabulary]: the logits after the last token.
        """
        self.check_tokens(tokens, (None, None))
        if past is not None and (not isinstance(past, Cache) or isinstance(past, QuantizedCache)):
            raise ConfigError(
                f"past is of type {name_of_kind(past)}: give a cache of transformers' own, as "
                "new_plain_cache makes it; prefill and step take a KVCache"
            )
        self._check_positions(tokens.shape[1] + (0 if past is None else past.get_seq_length()))
        with attending(self.model, plain_implementation(self.model)), torch.no_grad():
            out = self.model(
                tokens.to(input_device(self.model)),
                **as_argument(self.model, past),
                use_cache=past is not None,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def observe(self, tokens: torch.Tensor, observer: Observer, begin: float = 0.0) -> None:
        """Show what every layer attends with, computed with exact attention.

        Args:
            tokens: [batch, new_tokens], whole numbers.
            observer: called with the layer, queries [batch, num_q_heads, new_tokens, head_dim],
                keys [batch, num_kv_heads, new_tokens, head_dim] (after RoPE), values of that shape,
                and sm_scale. Latent attention: latents [batch, 1, new_tokens, latent_dim] as keys,
                RoPE parts as values, absorbed queries [..., latent_dim + rope_dim].
            begin: where the tokens begin, as a share of the model's positions, 0 to below 1.
                Positions that the model has learned always begin at 0.

        Raises:
            UnsupportedModelError: the model is spread over ranks.
        """
        self._check_alone("each process would see its own heads")
        self.check_tokens(tokens, (None, None))
        self._check_positions(tokens.shape[1])
        most = 0 if self._positions else self.max_positions or 0
        with suppress(UnsupportedModelError):  # no cache serves it, yet it can be observed
            most = min(most, self._layers.turn.positions if self._layers.turn else most)
        first = int(begin * max(most - tokens.shape[1], 0))
        observe(self.model, tokens, observer, first)

    def output_weights(self) -> dict[int, torch.Tensor]:
        """The output projection of each layer's attention, [hidden, num_q_heads * head_dim].

        For latent attention a smaller matrix, [heads * v_dim, latent_dim], which enlarges errors of
        a latent as much as W_UV and the projection do.

        Raises:
            UnsupportedModelError: the model is spread over ranks, weights are offloaded, or a layer
                with latent attention has none.
        """
        self._check_alone("its weights hold a part of each projection")
        return output_weights(self.model)

    def _check_alone(self, why: str) -> None:
        """Raise UnsupportedModelError for a model that is spread over ranks."""
        if self._ranks > 1:
            raise UnsupportedModelError(
                f"this {type(self.model).__name__} is spread over {self._ranks} ranks (tp_plan), "
                f"and {why}: calibrate or fold it in one process. A plan made there serves all "
                "ranks"
            )

    @property
    def _ranks(self) -> int:
        """Processes that the model is spread over."""
        return getattr(self.model, "tp_size", None) or 1

    def windows(self) -> dict[int, int]:
        """The sliding window of each layer that has one, in tokens."""
        return {i: window for i, window in enumerate(layer_windows(self.config)) if window}

    def _run(
        self, cache: KVCache, tokens: torch.Tensor, new_lens: torch.Tensor | None, keep: list[int]
    ) -> torch.Tensor:
        """One call of the model: the logits at the places keep, [batch, len(keep), vocabulary]."""
        past = self.past_of(cache, new_lens)
        before, past.told = past.past.lens, Told(tokens.shape[1], new_lens)
        try:
            logits = self.call(past, tokens.to(input_device(self.model)), keep)
            cache.check()
        except BaseException:
            cache.forget_counts()  # of the rows that are taken back
            with suppress(ShapeError):  # windows that are overwritten: prefill has copies
                cache.crop(before)  # layers that are through must not be ahead of the others
            raise
        return logits

    def not_captured(self, cache: KVCache) -> str | None:
        """Why a step of this model cannot be a CUDA graph (CapturedStep); None if it can."""
        if self._ranks > 1:
            # graphs with sums of ranks ran by NCCL (generate's, of a static cache); not known is
            # what a rank that fails in one leaves of the others
            return (
                f"it is spread over {self._ranks} ranks (tp_plan), whose sums between layers would "
                "be part of the graph: what a rank that fails in it leaves of the others was not "
                "tried. Use CachedModel.step"
            )
        turn, scaled_from, positions = self._layers.turn, self._layers.scaled_from, self._positions
        if turn is not None:
            return f"it looks at the length of the text in each step (rope_type {turn.kind!r})"
        last = cache.max_seq_len + int(cache.start_positions.max())
        if scaled_from is not None and last > scaled_from:
            return f"it scales queries from position {scaled_from} on, the cache ends at {last}"
        if positions is not None and last > positions:
            return f"it has {positions} positions, the cache ends at {last}"
        return None

    def not_compiled(self, past: QuantizedCache) -> str | None:
        """Why torch.compile cannot compile a step with this past; None if no reason is known."""
        if past.is_compileable:
            return None
        if self._layers.scaled_from is not None:
            return "it scales queries by the length of the text"
        return "some of its layers attend to the keys of other ones, which takes torch 2.13"

    def read_in_bases(self, cache: KVCache) -> list[Any]:
        """Fold bases of latent rows for a graph; return what else a step reads."""
        if not isinstance(cache, LatentKVCache):
            return []
        places: dict[Any, int] = {layer: at for at, layer in enumerate(self._layers.places)}
        for module in filter(hands_latents, self.model.modules()):
            at, fmt = places[module.layer_idx], cache.formats[places[module.layer_idx]]
            heads = heads_of(module, fmt.latent_dim, fmt.rope_dim)
            if heads.weight.device == cache.layers[at].device:  # or attention will refuse it
                heads.read_in_basis(cache, at)
        return list(cache.folded)

    def past_of(self, cache: KVCache, new_lens: torch.Tensor | None = None) -> QuantizedCache:
        """A cache as the model takes it for one call; new_lens as Told.lens."""
        size, dequantize = cache.max_seq_len, self.dequantizes
        past = QuantizedCache(
            cache, placed=True, drafts=False, max_seq_len=size, dequantize=dequantize
        )
        past.fit(self._layers, self._beside(cache))
        past.told = Told(None, new_lens)  # some models make masks of their own
        return past

    def _beside(self, cache: KVCache) -> Sequence[Any]:
        """All layers as transformers keeps them, where it keeps some: see QuantizedCache.fit."""
        return ()

    def call(self, past: QuantizedCache, tokens: torch.Tensor, keep: list[int]) -> torch.Tensor:
        """Call the model at the positions after the cache's tokens; the host reads nothing.

        Args:
            past: of past_of; the call appends to it.
            tokens: [batch, new_tokens].
            keep: n places of new tokens; no tensor, as hooks of accelerate would move it.

        Returns:
            [batch, n, vocabulary]: the logits at these places.
        """
        return self._call_by(self.model, past, tokens, keep)

    def compiled(self) -> Callable[[QuantizedCache, torch.Tensor, list[int]], torch.Tensor]:
        """Compile `call` by torch.compile for steps of one token, as one graph (fullgraph).

        Before the first compiled call run `call` itself, with the same past.
        """
        forward = torch.compile(self.model.__call__, fullgraph=True, dynamic=False)
        return partial(self._call_by, forward)

    def _call_by(
        self,
        forward: Callable[..., Any],
        past: QuantizedCache,
        tokens: torch.Tensor,
        keep: list[int],
    ) -> torch.Tensor:
        """Do what `call` does, where forward is the model or its compiled version."""
        cache = past.kv
        assert cache is not None
        steps = torch.arange(tokens.shape[1], device=cache.device)
        held = cache.layers[0].seq_lens  # as of all, or check tells it
        with attending(self.model, self._attention), torch.no_grad():
            out = forward(
                tokens,
                **as_argument(self.model, past),
                position_ids=(cache.start_positions + held)[:, None] + steps,
                use_cache=True,
                logits_to_keep=1 if tokens.shape[1] == 1 else keep,  # 1: no index goes to a GPU
            )
        past.check_complete()
        logits: torch.Tensor = out.logits
        return logits if logits.shape[1] == len(keep) else logits[:, keep]

    @property
    def _attention(self) -> str:
        """The implementation by which the model attends in a call with a KVCache."""
        return ATTENTION

    @cached_property
    def _layers(self) -> CacheLayers:
        """The layers that a cache holds; UnsupportedModelError if it cannot serve the model."""
        layers = self._served(cache_layers(self.config))
        layers.check_whole()
        _ = self._positions
        return layers

    def _served(self, layers: CacheLayers) -> CacheLayers:
        """These layers with this rank's heads; UnsupportedModelError if they make other rows."""
        layers = layers_of_rank(self.model, layers)
        if layers.are_latent:
            for module in self.model.modules():
                if hasattr(module, "kv_b_proj"):  # raises where it decodes from no latent rows
                    heads_of(module, layers.k_dims[0], layers.v_dims[0])
        return layers

    @cached_property
    def _vocabulary(self) -> int:
        """Rows of the token embeddings."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        if weight is None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no table of token embeddings (it reads several "
                "ids at a place, as models of speech do): CachedModel serves models of text"
            )
        rows: int = weight.shape[0]
        return rows

    @cached_property
    def _positions(self) -> int | None:
        """Positions of the model; None for no end."""
        return positions_of(self.model)

    def check_tokens(self, tokens: torch.Tensor, shape: tuple[int | None, ...]) -> None:
        """Raise unless tokens are of a shape (None: 1 or more) and of the vocabulary."""
        if not isinstance(tokens, torch.Tensor):
            raise ConfigError(f"tokens are {type(tokens).__name__}: give a tensor of whole numbers")
        fits = len(tokens.shape) == len(shape) and all(
            own > 0 if wanted is None else own == wanted
            for own, wanted in zip(tokens.shape, shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("1 or more" if one is None else str(one) for one in shape)
            raise ShapeError(f"tokens are {list(tokens.shape)}: give [{sizes}]")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"tokens are {tokens.dtype}: give token ids as int64 or int32")
        if debug.may_read(tokens):
            lowest, highest = (int(token) for token in tokens.aminmax())
            if lowest < 0 or highest >= self._vocabulary:
                raise ConfigError(
                    f"token {lowest if lowest < 0 else highest} is not in the vocabulary of the "
                    f"model: ids are 0 to {self._vocabulary - 1}"
                )

    def _check_room(self, cache: KVCache, counts: torch.Tensor) -> None:
        """Raise unless counts[b] more tokens fit into sequence b, and have positions."""
        longest = int((cache.seq_lens.cpu() + counts).max())
        if longest > cache.max_seq_len:
            raise ShapeError(
                f"{longest} tokens do not fit into a cache with max_seq_len {cache.max_seq_len}"
            )
        if self._positions is not None:
            self._check_positions(int((cache.positions.cpu() + counts).max()))

    def _check_positions(self, count: int) -> None:
        if self._positions is not None and count > self._positions:
            raise ShapeError(
                f"{count} positions are needed, and the model has learned {self._positions}: give "
                "fewer tokens"
            )


def as_cached_model(model: Any, tokenizer: Any = None) -> Any:
    """A CachedModel of a model of transformers or of a folder; else the argument itself."""
    if isinstance(model, str | os.PathLike):
        return CachedModel.from_pretrained(os.fsdecode(model))
    return CachedModel(model, tokenizer) if isinstance(model, torch.nn.Module) else model


def loaded(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device | str | None,
    tp_plan: TensorPlan | None = None,
) -> dict[str, Any]:
    """The parts of a CachedModel; see from_pretrained."""
    device = check_device("cpu" if device is None else device)
    model, tokenizer, saved = load(folder, dtype, tp_plan)
    exact = exact_codec(saved if dtype == torch.float32 else dtype)
    model = model.to(device) if tp_plan is None else model
    return {"model": model, "tokenizer": tokenizer, "exact_format": exact}


def _counts(lens: torch.Tensor | Sequence[int] | None, batch: int, new_tokens: int) -> torch.Tensor:
    """[batch] int64: tokens to read of each sequence."""
    if lens is None:
        return torch.full((batch,), new_tokens, dtype=torch.int64, device="cpu")
    counts = whole_numbers("lens", lens)
    if counts.shape != (batch,) or not bool(((counts > 0) & (counts <= new_tokens)).all()):
        raise ShapeError(f"lens are {counts.tolist()}: give [{batch}] of 1 to {new_tokens}")
    return counts
