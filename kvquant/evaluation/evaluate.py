"""Whether a model still answers, reasons and finds things with a quantized cache.

Every task decodes from the packed cache. The 16-bit cache is the first row, and every other row is
a paired difference to it: the same prompts, the same questions, the same random numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvquant.calibration.fidelity import Planned, Scheme, options_of, stored_bits
from kvquant.calibration.windows import spread
from kvquant.errors import ConfigError
from kvquant.rehearsal import rehearse
from kvquant.rows.arguments import is_whole
from kvquant.version import __version__

from . import divergence, generation
from .caches import parse_cache
from .decoding import Choice, Reading, ask_all
from .generation import Sampling
from .prompts import Prompt, Writer
from .records import Records
from .retrieval import TASKS
from .statistics import FAILS, paired

if TYPE_CHECKING:
    from kvquant.hf.model import CachedModel

KINDS = ("kl", "generation", "retrieval")
HELD_OUT = Path(__file__).with_name("held_out.txt")
MARGIN = 64  # tokens behind the context of a prompt that a model has positions for
LENGTH = 4096  # of contexts, or as many as the model has
READING = Reading()
Progress = Callable[[str, int], None]  # what is done, and of how many such parts


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        lengths: tokens of contexts; 4,096, or as many as the model has, when empty.
        prompts: of each retrieval task, and of generation.
        questions: of each prompt, at most.
        passages, scored: of `kl`: how many passages, and decoded tokens of each.
        new_tokens: of each generated text.
        batch: prompts that are decoded together.
        seed: of everything that is drawn.
    """

    lengths: tuple[int, ...] = ()
    prompts: int = 8
    questions: int = 8
    passages: int = 8
    scored: int = 128
    new_tokens: int = 128
    batch: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {name: value for name, value in vars(self).items() if name != "lengths"}
        for name, value in [*counts.items(), *(("lengths", one) for one in self.lengths)]:
            if not is_whole(value) or value < (0 if name == "seed" else 1):
                raise ConfigError(f"{name} has {value!r:.40}: use whole numbers from 1 on")


@dataclass(frozen=True)
class Example:
    """A prompt of a user.

    Attributes:
        tokens: of the prompt, with the chat template applied.
        answer: that is right, or None.
    """

    tokens: list[int]
    answer: str | None = None


@dataclass(frozen=True)
class Task:
    """What is evaluated.

    Attributes:
        kinds: some of KINDS.
        retrieval: some of TASKS.
        pattern: a regular expression; the last place where it holds in a text is the answer.
        temperature: of sampled texts, which come beside greedy ones.
        chat: whether retrieval applies the chat template; where there is one, when None.
    """

    kinds: tuple[str, ...] = KINDS
    retrieval: tuple[str, ...] = tuple(TASKS)
    pattern: str = r"[-+]?[\d.,]*\d"
    temperature: float = 1.0
    chat: bool | None = None

    def __post_init__(self) -> None:
        for name, given, known in (
            ("tasks", self.kinds, KINDS),
            ("retrieval", self.retrieval, tuple(TASKS)),
        ):
            wrong = [one for one in given if one not in known]
            if wrong or not given:
                words = f"{wrong[0]!r:.40} is none of them" if wrong else "nothing is named"
                raise ConfigError(f"{name}: {words}; there are {', '.join(known)}")
        generation.answer_of("", self.pattern)


TASK, SIZES = Task(), Sizes()


def evaluate(
    model: CachedModel,
    caches: Sequence[str | Choice],
    *,
    task: Task = TASK,
    sizes: Sizes = SIZES,
    text: str | None = None,
    examples: Sequence[Example] = (),
    reading: Reading = READING,
    state: Path | None = None,
    progress: Progress = lambda what, parts: None,
) -> dict[str, Any]:
    """Compare caches with the 16-bit cache of the same model.

    Args:
        model: decodes; on a CPU or a GPU.
        caches: settings, as kvquant/evaluation/caches.py has them: "int4-g4,recent=64".
        task: what is evaluated.
        sizes: how much.
        text: held-out text, for kl and generation; a packaged one when None.
        examples: prompts of generation in place of the text.
        reading: how prompts come into caches.
        state: a file that keeps what is measured; the caller removes it when results are safe.
        progress: called after each part.

    Returns:
        Plain data, for json: "caches" (what each costs), "kl", "generation" and "retrieval", each
        by the length of contexts. The same seed gives the same data on one machine.

    Raises:
        ConfigError: caches, sizes or a text that cannot be evaluated, before work begins.
        UnsupportedModelError: no KVCache serves the model.
    """
    run = _Run(model, caches, task, sizes, text, examples, reading, state, progress)
    return run.all()


@dataclass
class _Run:
    model: CachedModel
    given: Sequence[str | Choice]
    task: Task
    sizes: Sizes
    text: str | None
    examples: Sequence[Example]
    reading: Reading
    state: Path | None
    progress: Progress
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        if not self.given:
            raise ConfigError("no cache is named: give one or more, such as int4-g4")
        latent = self.model.has_latents
        self.choices = [
            parse_cache(one, latent=latent) if isinstance(one, str) else one for one in self.given
        ]
        self._check_examples()
        self._choose_lengths()
        self._check_packed()
        needs_text = bool({"kl", "retrieval"} & {*self.task.kinds}) or not self.examples
        self.tokens = self._encoded() if needs_text else []
        self._check_text()
        self.written = {length: self._written(length) for length in self.lengths}
        self.costs = [self._cost("16 bit", self._exact)]
        self.costs += [self._cost(str(choice), choice) for choice in self.choices]
        self._check_memory()
        self.records = Records(self.state, self._settings() | self._inputs())
        self.ends = generation.ends_of(self.model)

    @property
    def _exact(self) -> Scheme:
        return Scheme(self.model.exact_format, self.model.exact_format)

    @property
    def _behind(self) -> int:
        """Tokens that the tasks decode behind a context."""
        of_kind = {"kl": self.sizes.scored, "generation": self.sizes.new_tokens}
        return max(MARGIN, *(of_kind.get(kind, 0) for kind in self.task.kinds))

    def _check_examples(self) -> None:
        """Raise unless the model has positions for each prompt and the text behind it."""
        most, new = self.model.max_positions, self.sizes.new_tokens
        if self.examples and "generation" not in self.task.kinds:
            raise ConfigError("prompts are for generation, which tasks do not name")
        for number, one in enumerate(self.examples, 1):
            count = len(one.tokens)
            if not count:
                raise ConfigError(f"prompt {number} is empty: give one or more tokens")
            if most is not None and count + new > most:
                raise ConfigError(
                    f"prompt {number} has {count} tokens, and {new} behind them are beyond the "
                    f"{most} positions of the model: give a shorter prompt or fewer --new-tokens"
                )

    def _check_packed(self) -> None:
        """Raise if a cache would keep a whole prompt in 16 bit: nothing would be measured."""
        counts = [len(one.tokens) for one in self.examples] or [*self.lengths]
        counts += self.lengths if {"kl", "retrieval"} & {*self.task.kinds} else ()
        for choice in self.choices:
            if choice.sink_len + choice.recent_len >= min(counts):
                raise ConfigError(
                    f"the cache {choice} keeps a prompt of {min(counts)} tokens in 16 bit: give a "
                    "longer --length or longer prompts, or a smaller recent"
                )

    def _choose_lengths(self) -> None:
        most, behind = self.model.max_positions, self._behind
        default = LENGTH if most is None else min(LENGTH, most - behind)
        if default < 1:
            raise ConfigError(
                f"{behind} tokens behind a context leave no room for one in the {most} positions "
                "of the model: give fewer --scored or --new-tokens"
            )
        self.lengths = self.sizes.lengths or (default,)
        for length in self.lengths:
            if most is not None and length + behind > most:
                raise ConfigError(
                    f"contexts of {length} tokens and {behind} behind them are beyond the "
                    f"{most} positions of the model: give a --length of {most - behind} or less"
                )

    def _encoded(self) -> list[int]:
        """The text, without the tokens that a tokenizer puts before one."""
        text = HELD_OUT.read_text(encoding="utf-8") if self.text is None else self.text
        self.before = self.model.encode("")  # such as BOS
        tokens = self.model.encode(text)
        count = len(self.before)
        return tokens[count:] if tokens[:count] == self.before else tokens

    def _windows(self, count: int, size: int) -> torch.Tensor:
        """[count, size]: passages of the text, each with what the tokenizer puts before a text."""
        before = torch.tensor(self.before, dtype=torch.int64, device="cpu").expand(count, -1)
        return torch.cat([before, spread(self.tokens, count, size - before.shape[1])], 1)

    def _check_text(self) -> None:
        needed = 0
        for length in self.lengths:
            if "kl" in self.task.kinds:
                needed = max(needed, length + self.sizes.scored)
            if "generation" in self.task.kinds and not self.examples:
                needed = max(needed, length)
        if len(self.tokens) < needed:
            name = "the packaged text" if self.text is None else "the text"
            raise ConfigError(
                f"{name} has {len(self.tokens)} tokens, and one passage needs {needed}: give a "
                "longer --text, or a shorter --length"
            )

    def _written(self, length: int) -> dict[str, list[Prompt]]:
        """The prompts of each retrieval task, before work begins: what has no room is refused."""
        if "retrieval" not in self.task.kinds:
            return {}
        writer = Writer(
            self.model.tokenizer,
            length,
            self.tokens,
            window=max(one.recent_len for one in self.choices),
            sinks=max(one.sink_len for one in self.choices),
            num_questions=self.sizes.questions,
            chat=self.task.chat,
        )
        return {
            name: [
                writer.write(name, f"{self.sizes.seed} {name} {at}")
                for at in range(self.sizes.prompts)
            ]
            for name in self.task.retrieval
        }

    def _cost(self, name: str, choice: Choice) -> dict[str, Any]:
        """What a cache costs, by one on no device."""
        capacity = max(self.lengths) + self._behind
        meta = torch.device("meta")
        latent = self.model.has_latents
        with rehearse(None):  # caches on the meta device have sizes and no memory
            made, exact = (
                self.model.new_cache(1, capacity, device=meta, **options_of(one, is_latent=latent))
                for one in (choice, self._exact)
            )
        a_token = made.nbytes / capacity
        return {
            "cache": name,
            "bits": stored_bits(made, exact),
            "bytes_a_token": a_token,
            "tokens_per_gib": int(2**30 / a_token),
        }

    def _check_memory(self) -> None:
        device = self.model.model.device
        if device.type != "cuda":
            return
        capacity = max(self.lengths) + self._behind
        exact, *others = (one["bytes_a_token"] * capacity * self.sizes.batch for one in self.costs)
        needed, free = exact + max(others), torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise ConfigError(
                f"caches of {self.sizes.batch} prompts need {needed / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free on {device}: give a smaller --batch or --length"
            )

    def _settings(self) -> dict[str, Any]:
        return {
            "model": str(getattr(self.model.config, "model_type", "")),
            "config": {key: str(value) for key, value in self.model.config_dict.items()},
            "dtype": str(self.model.dtype),
            "caches": [one["cache"] for one in self.costs],
            "task": asdict(self.task),
            "sizes": asdict(replace(self.sizes, lengths=tuple(self.lengths))),
            "reading": asdict(self.reading),
            "text": "packaged" if self.text is None else hash_of(self.text),
            "examples": len(self.examples),
        }

    def _inputs(self) -> dict[str, Any]:
        """What else a run that goes on must have in common: prompts, plans, weights, device."""
        plans = [one.plan for one in self.choices if isinstance(one, Planned)]
        tensors = [x.double().sum().item() for plan in plans for x in plan.tensors.values()]
        weights = [x.flatten()[:64].double().sum().item() for x in self.model.model.parameters()]
        given = [(one.tokens, one.answer) for one in self.examples]
        return {
            "version": __version__,
            "device": str(self.model.model.device),
            "inputs": hash_of(json.dumps([given, [str(one.facts) for one in plans], tensors])),
            "weights": hash_of(json.dumps(weights)),
        }

    def all(self) -> dict[str, Any]:
        """Run what is asked for."""
        measures: Mapping[str, Callable[[int], Any]] = {
            "kl": self._kl,
            "generation": self._generation,
            "retrieval": self._retrieval,
        }
        kinds = [kind for kind in KINDS if kind in self.task.kinds]
        parts = self._parts()
        found: dict[str, Any] = {"settings": self._settings(), "caches": self.costs}
        for kind in kinds:
            found[kind] = {}
            lengths = self.lengths
            if kind == "generation" and self.examples:
                lengths = (0,)  # the prompts' own
            for length in lengths:
                found[kind][str(length)] = measures[kind](length)
                if kind != "retrieval":
                    self.progress(kind, parts)
        return found

    def _parts(self) -> int:
        """Calls of progress: each length of kl and generation, each task of retrieval."""
        tasks = {"retrieval": len(self.task.retrieval)}
        return sum(tasks.get(kind, 1) for kind in self.task.kinds) * len(self.lengths)

    def _batches(self, count: int) -> list[range]:
        step = self.sizes.batch
        return [range(at, min(at + step, count)) for at in range(0, count, step)]

    def _kl(self, length: int) -> list[dict[str, Any]]:
        size = length + self.sizes.scored
        count = min(self.sizes.passages, len(self.tokens) // size)
        windows = self._windows(count, size)
        scores: list[divergence.Scores] = [{"kl": [], "top1": []} for _ in self.choices]
        for batch in self._batches(count):

            def measure(batch: range = batch) -> list[divergence.Scores]:
                part = windows[batch.start : batch.stop]
                found = divergence.diverge(self.model, part, length, self.choices, self.reading)
                return list(found)

            parts = self.records.get(f"kl {length} {batch.start}", measure)
            for whole, part in zip(scores, parts, strict=True):
                for name in whole:
                    whole[name] += part[name]
        return [divergence.summary(one) for one in scores]

    def _retrieval(self, length: int) -> dict[str, Any]:
        found = {}
        for name, prompts in self.written[length].items():
            answers: list[list[list[bool]]] = [[] for _ in self.costs]
            for batch in self._batches(len(prompts)):

                def measure(batch: range = batch, prompts: Any = prompts) -> Any:
                    part = prompts[batch.start : batch.stop]
                    return list(ask_all(self.model, part, self.choices, self.reading))

                parts = self.records.get(f"{name} {length} {batch.start}", measure)
                for whole, part in zip(answers, parts, strict=True):
                    whole += part
            exact, *others = answers
            pairs = [paired(exact, one) for one in others]
            distances = [one.distance for each in prompts for one in each.asked]
            found[name] = {
                "exact": pairs[0].exact,
                "fails": pairs[0].exact < FAILS,
                "least_distance": min(distances),
                "caches": [asdict(one) for one in pairs],
            }
            self.progress(f"retrieval, {name}", self._parts())
        return found

    def _generation(self, length: int) -> dict[str, Any]:
        if self.examples:
            groups = [[one] for one in self.examples]
        else:
            count = min(self.sizes.prompts, len(self.tokens) // length)
            windows = self._windows(count, length).tolist()
            each = [Example(tokens) for tokens in windows]
            groups = [[each[at] for at in batch] for batch in self._batches(count)]
        ways = {"greedy": Sampling(), "sampled": Sampling(self.task.temperature, self.sizes.seed)}
        found: dict[str, Any] = {}
        for way, sampling in ways.items():
            texts: list[list[list[int]]] = [[] for _ in self.costs]
            first = 0
            for place, group in enumerate(groups):
                sampling = replace(sampling, first=first)
                first += len(group)

                def measure(group: Any = group, sampling: Sampling = sampling) -> Any:
                    tokens = torch.tensor([one.tokens for one in group], device="cpu")
                    count, model = self.sizes.new_tokens, self.model
                    return list(
                        generation.free_run(
                            model, tokens, count, self.choices, self.reading, sampling
                        )
                    )

                parts = self.records.get(f"{way} {length} {place}", measure)
                for whole, part in zip(texts, parts, strict=True):
                    whole += part
            texts = [[generation.ended(one, self.ends) for one in each] for each in texts]
            exact, *others = texts
            found[way] = [generation.summary(exact, one) for one in others]
            prompts = [one for group in groups for one in group]
            if way == "greedy":
                found["accepted"] = [
                    sum(map(generation.accepted, [one.tokens for one in prompts], text)) / len(text)
                    for text in texts
                ]
            if any(one.answer is not None for one in prompts):
                right = [
                    [
                        [self._is_right(one, text)]
                        for one, text in zip(prompts, each, strict=True)
                        if one.answer is not None
                    ]
                    for each in texts
                ]
                pairs = [asdict(paired(right[0], one)) for one in right[1:]]
                share = pairs[0]["exact"]
                told = {"exact": share, "fails": share < FAILS, "caches": pairs}
                found[f"{way}_answers"] = told
        return found

    def _is_right(self, example: Example, text: Sequence[int]) -> bool:
        assert example.answer is not None
        text = [token for token in text if token not in self.ends]
        found = generation.answer_of(self.model.decode(text), self.task.pattern)
        return found.strip() == example.answer.strip()


def hash_of(text: str) -> str:
    """Which text it was."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
