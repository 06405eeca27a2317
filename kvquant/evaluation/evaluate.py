"""kvquant.evaluate: compare what a model does with quantized caches and with its 16-bit cache.

Every task decodes from the packed cache. All caches get the same prompts, questions and random
numbers. The 16-bit cache comes first; the result of every other cache is its difference to it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvquant.calibration.fidelity import Planned, Scheme, sized_cache, stored_bits
from kvquant.calibration.windows import spread
from kvquant.errors import ConfigError, refuse
from kvquant.io.model_id import WEIGHTS
from kvquant.rows.arguments import is_whole
from kvquant.rows.format import mean_bits
from kvquant.version import __version__

from . import divergence, generation
from .caches import parse_cache
from .decoding import Choice, Reading, ask_all, check_simulated
from .generation import BOTH, WAYS, Sampling
from .models import notes
from .prompts import Prompt, Writer
from .records import Records
from .retrieval import TASKS
from .statistics import FAILS, chosen, paired, share_of

if TYPE_CHECKING:
    from kvquant.hf.model import CachedModel

KINDS = ("kl", "generation", "retrieval")
HELD_OUT = Path(__file__).with_name("held_out.txt")
SEEDS = 2**40  # with the number of a text behind it a seed is below 2**64
MARGIN = 64  # positions behind a context that are kept free for a question and its answer
LENGTHS = {"cpu": 1024}  # tokens of a context by default, where the model has positions for them
LENGTH = 4096  # elsewhere
CHOSEN = "keys", "values", "overwritten", "phonebook", "copy", "tools"  # retrieval, by default
READING = Reading()
TRIAL = 2  # prompts that a number of facts is tried on
ANSWERS = 0.8  # the share that the 16-bit cache must answer of them
Progress = Callable[[str, int], None]  # of a finished part's task, and how many parts there are


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        lengths: of contexts, in tokens. When empty, one length: 1,024 on a CPU and 4,096 on a GPU,
            or less if the model has fewer positions.
        prompts: of each retrieval task, and of generation.
        questions: how many questions a retrieval prompt has, at most.
        facts: how many facts a retrieval prompt has; 0, the largest number, for as many as fit.
            With several numbers the 16-bit cache tries them from the fewest on, and each task takes
            the last before one fails. A model that knows sheets of facts and no text may answer
            more: give (0,).
        passages: how many passages of the text kl has.
        scored: how many tokens of a passage kl compares.
        new_tokens: how many tokens of text generation adds to a prompt.
        batch: how many prompts are decoded together.
        seed: from 0 and below 2**40. The same seed makes the same retrieval prompts and samples the
            same random numbers.
    """

    lengths: tuple[int, ...] = ()
    prompts: int = 4
    questions: int = 8
    facts: tuple[int, ...] = (4, 16, 64, 0)
    passages: int = 4
    scored: int = 128
    new_tokens: int = 128
    batch: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.facts:
            raise ConfigError("facts has no number: give (0,) for as many facts as fit")
        for name, given in vars(self).items():
            is_seed, least = name == "seed", int(name not in ("seed", "facts"))
            for value in given if isinstance(given, tuple) else (given,):
                if not is_whole(value) or value < least or (is_seed and value >= SEEDS):
                    allowed = f"from 0 on and below {SEEDS}" if is_seed else f"from {least} on"
                    raise ConfigError(f"{name} has {value!r:.40}: use whole numbers {allowed}")


@dataclass(frozen=True)
class Example:
    """A prompt of your own, for generation.

    Attributes:
        tokens: token ids of the prompt, with the chat template applied if the model needs one.
        answer: the right answer, as Task.pattern finds it in the generated text, or None.
    """

    tokens: list[int]
    answer: str | None = None


@dataclass(frozen=True)
class Task:
    """What is evaluated.

    Attributes:
        kinds: of tasks: "kl", "generation", "retrieval", or some of them.
        retrieval: names of retrieval tasks, which kvquant/evaluation/retrieval.py defines.
        pattern: a regular expression. Its last match in a generated text is the answer; if it has
            a group, the first group. By default it matches numbers.
        temperature: at which texts are sampled. Greedy texts are generated as well.
        chat: whether retrieval applies the tokenizer's chat template; when None, if there is one.
    """

    kinds: tuple[str, ...] = ("kl", "retrieval")
    retrieval: tuple[str, ...] = CHOSEN
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
    model: CachedModel | torch.nn.Module | str | Path,
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
    """Compare what a model does with quantized caches and with its 16-bit cache.

    Args:
        model: a CachedModel, on a CPU or a GPU. Or a folder, which kvquant.hf.hybrid.load_decoder
            loads on the CPU in float32. Or a model of transformers, if neither a text nor retrieval
            needs a tokenizer: else give CachedModel(model, tokenizer).
        caches: settings as text, K[/V][,sinks=N][,recent=N] or a plan's file in place of K/V:
            "int8/int4-g4,recent=64".
        task: what is evaluated.
        sizes: how much is measured.
        text: held-out text for kl and generation, and the filler of retrieval contexts; a packaged
            one when None.
        examples: prompts for generation, in place of passages of the text.
        reading: how prompts come into caches.
        state: a file that keeps the results so far. A run with the same settings continues from it.
            Remove the file when you have saved the result.
        progress: called after each part (one cache, one batch of prompts), with the name of its
            task and the number of all parts.

    Returns:
        Plain data that json can write. The same seed gives the same data on one machine, apart from
        "seconds".

        "settings": of the run. "caches": what each cache costs, the 16-bit cache first; "bits" of
        an element in a full cache with its 16-bit tokens, "packed_bits" without them, and more.
        "cache_bytes": of the 16-bit cache and the largest other one, which exist together. "notes":
        sentences on layers that no cache holds, if the model has any. "kl", "generation",
        "retrieval": results by the length of the context, in lists of the quantized caches.
        "seconds": of each task with each cache; the 16-bit cache's include reading the prompts.

    Raises:
        ConfigError: a cache, size or text that cannot be evaluated, raised before work begins.
        UnsupportedModelError: no cache of kvquant serves the model.

    Example:
        >>> from kvquant import evaluate
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> from kvquant.evaluation import Sizes, Task
        >>> sizes = Sizes(lengths=(128,), passages=2, scored=8)
        >>> found = evaluate(MODEL, ["int8,recent=16"], task=Task(kinds=("kl",)), sizes=sizes)
        >>> [one["cache"] for one in found["caches"]]
        ['16 bit', 'int8 + 4 sinks, 16 recent']
        >>> found["kl"]["128"][0]["kl"] < 0.01  # nats a token
        True
    """
    from kvquant.hf.hybrid import decoder_of, load_decoder
    from kvquant.hf.model import CachedModel

    if isinstance(model, (str, Path)):
        model = load_decoder(model, dtype=torch.float32)
    elif not isinstance(model, CachedModel):
        model = decoder_of(model)
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
    notes: list[str] = field(default_factory=list)  # sentences of the result

    def __post_init__(self) -> None:
        refuse(ConfigError, self._odd_caches())
        latent = self.model.has_latents
        parsed = [
            parse_cache(one, latent=latent, model=self.model) if isinstance(one, str) else one
            for one in self.given
        ]
        self.choices = [
            replace(one, is_latent=latent) if isinstance(one, Scheme) else one for one in parsed
        ]
        if not all(isinstance(one, Scheme | Planned) for one in self.choices):
            check_simulated(self.model, self.reading)
            if self.state is not None:  # a run that continues could not know them again
                raise ConfigError("state serves kvquant's own caches: leave it out for others")
        odd = chain(self._odd_examples(), self._odd_lengths(), self._odd_windows())
        refuse(ConfigError, odd)
        self.tokens = self._encoded() if self._needs_text else []
        refuse(ConfigError, self._odd_text())
        self.written = {length: self._written(length) for length in self.lengths}
        refuse(ConfigError, self._odd_questions())
        self.costs = [self._cost("16 bit", self._exact)]
        self.costs += [self._cost(str(choice), choice) for choice in self.choices]
        refuse(ConfigError, self._odd_memory())
        self.records = Records(self.state, self._settings() | self._inputs())
        self.ends = self.model.end_tokens

    @property
    def _exact(self) -> Scheme:
        return Scheme(self.model.exact_format, self.model.exact_format)

    @property
    def _needs_text(self) -> bool:
        """Whether a task has contexts of the text, of the lengths to measure."""
        return not self.examples or bool({"kl", "retrieval"} & {*self.task.kinds})

    @property
    def _contexts(self) -> list[int]:
        """Tokens of each context: of the user's prompts, of the lengths to measure, or of both."""
        return [len(one.tokens) for one in self.examples] + [*self.lengths] * self._needs_text

    @property
    def _behind(self) -> int:
        """Tokens that the tasks decode after a context."""
        of_kind = {"kl": self.sizes.scored, "generation": self.sizes.new_tokens}
        return max(MARGIN, *(of_kind.get(kind, 0) for kind in self.task.kinds))

    def _odd_caches(self) -> Iterator[str]:
        if not self.given or isinstance(self.given, str):
            yield f"caches is {self.given!r:.40}: give a list of one or more, such as ['int4-g4']"
        for one in self.given:
            if not isinstance(one, str | Scheme | Planned) and not hasattr(one, "apply"):
                yield (
                    f"caches has {one!r:.40}: give texts such as 'int4-g4', a Scheme, a Planned or "
                    "what has the members of Simulated"
                )

    def _odd_examples(self) -> Iterator[str]:
        """Prompts that say nothing, or for which and the text after it there are no positions."""
        most, new = self.model.max_positions, self.sizes.new_tokens
        if self.examples and "generation" not in self.task.kinds:
            yield "prompts are for generation, which tasks do not name"
        for number, one in enumerate(self.examples, 1):
            count = len(one.tokens)
            if not count:
                yield f"prompt {number} is empty: give one or more tokens"
            if one.answer is not None and not one.answer.strip():
                yield (
                    f"prompt {number} has an empty answer, so a text without any answer would "
                    "count as right: write the answer, or leave it out"
                )
            if most is not None and count + new > most:
                yield (
                    f"prompt {number} has {count} tokens, and {new} behind them are beyond the "
                    f"{most} positions of the model: give a shorter prompt or fewer --new-tokens"
                )

    def _odd_windows(self) -> Iterator[str]:
        """Caches that would keep whole prompts in 16 bit: that measures nothing."""
        counts, chunk = self._contexts, self.reading.chunk
        if self.reading.from_rows and chunk is not None and chunk >= min(counts):
            yield (
                f"a chunk of {chunk} tokens holds a prompt of {min(counts)}, which then reads "
                f"no rows: give a --chunk below {min(counts)}"
            )
        for choice in self.choices:
            window = choice.sink_len + choice.recent_len
            if window >= max(counts):
                yield (
                    f"the cache {choice} keeps all prompts of up to {max(counts)} tokens in 16 "
                    "bit: give a longer --length or longer prompts, or a smaller recent"
                )
            if whole := sum(count <= window for count in counts):
                self.notes.append(
                    f"The cache {choice} keeps {whole} of {len(counts)} prompts whole in 16 bit, "
                    f"those of {window} tokens and fewer: their texts say little of it."
                )

    def _odd_lengths(self) -> Iterator[str]:
        """Choose the lengths; give those for which there are no positions."""
        most, behind = self.model.max_positions, self._behind
        default = LENGTHS.get(self.model.model.device.type, LENGTH)
        default = default if most is None else min(default, most - behind)
        if default < 1:
            yield (
                f"{behind} tokens behind a context leave no room for one in the {most} positions "
                "of the model: give fewer --scored or --new-tokens"
            )
        self.lengths = self.sizes.lengths or (default,)
        for length in self.lengths:
            if most is not None and length + behind > most:
                yield (
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

    def _odd_text(self) -> Iterator[str]:
        needed = 0
        if "kl" in self.task.kinds:
            needed = max(self.lengths) + self.sizes.scored
        elif "generation" in self.task.kinds and not self.examples:
            needed = max(self.lengths)
        if len(self.tokens) < needed:
            name = "the packaged text" if self.text is None else "the text"
            yield (
                f"{name} has {len(self.tokens)} tokens, and one passage needs {needed}: give a "
                "longer --text, or a shorter --length"
            )

    def _written(self, length: int) -> dict[str, list[list[Prompt]]]:
        """The rungs of each retrieval task, before work begins; raise if one has no room."""
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
        return {name: self._rungs(writer, name) for name in self.task.retrieval}

    def _rungs(self, writer: Writer, name: str) -> list[list[Prompt]]:
        """The prompts of a task with each number of facts that fits, the fewest first."""
        seeds = [f"{self.sizes.seed} {name} {at}" for at in range(self.sizes.prompts)]
        facts = sorted(self.sizes.facts, key=lambda one: one or math.inf)  # 0: as many as fit
        found, why = [], ConfigError("no facts")
        for count in facts:
            try:
                found.append([writer.write(name, seed, count) for seed in seeds])
            except ConfigError as error:
                why = error
        if not found:
            raise why
        return found

    def _odd_questions(self) -> Iterator[str]:
        """Tasks whose questions find no positions: tokens may be single letters."""
        most = self.model.max_positions
        for length, tasks in self.written.items():
            for name, rungs in tasks.items():
                asked = [one for prompts in rungs for each in prompts for one in each.asked]
                longest = max(len(one.question) + len(one.answer) for one in asked)
                if most is not None and length + longest > most:
                    yield (
                        f"contexts of {length} tokens and a question of {longest} ({name}) are "
                        f"beyond the {most} positions of the model: give a --length of "
                        f"{most - longest} or less"
                    )

    def _cost(self, name: str, choice: Choice) -> dict[str, Any]:
        """What a cache costs, computed from one on the meta device."""
        capacity = max(self._contexts) + self._behind
        stored = choice if isinstance(choice, Scheme | Planned) else self._exact
        made, exact = (sized_cache(self.model, one, capacity) for one in (stored, self._exact))
        if isinstance(choice, Scheme | Planned):
            packed = mean_bits(fmt for at in made.layers for fmt in (at.k_format, at.v_format))
            bits, a_token = stored_bits(made, exact), made.nbytes / capacity
        else:
            packed = choice.bits
            bits = packed + (16 - packed) * (choice.sink_len + choice.recent_len) / capacity
            a_token = exact.nbytes / capacity * bits / 16
        return {
            "cache": name,
            "bits": bits,
            "packed_bits": packed,
            "sink_len": choice.sink_len,
            "recent_len": choice.recent_len,
            "bytes_a_token": a_token,
            "tokens_per_gib": int(2**30 / a_token),
        }

    def _odd_memory(self) -> Iterator[str]:
        """Two caches exist at a time, and must fit."""
        device = self.model.model.device
        free = free_bytes(device)
        if free is not None and self.cache_bytes > free:
            yield (
                f"two caches, 16 bit and packed, need {self.cache_bytes / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} GiB are free on {device}: give a smaller --batch or --length, "
                "or shorter --prompts"
            )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the 16-bit cache and the largest other one, which exist together."""
        new = self.sizes.new_tokens
        tokens = [len(one.tokens) + new for one in self.examples]  # alone in a batch
        if self._needs_text:
            tokens.append(self.sizes.batch * (max(self.lengths) + self._behind))
        exact, *others = (one["bytes_a_token"] for one in self.costs)
        if any(not isinstance(one, Scheme | Planned) for one in self.choices):
            others.append(exact)  # what is simulated lies in 16 bit
        return int((exact + max(others)) * max(tokens))

    def _settings(self) -> dict[str, Any]:
        return {
            "model": str(getattr(self.model.config, "model_type", "")),
            "config": {
                name: str(value)
                for name, value in self.model.model.config.to_dict().items()
                if not name.startswith("_")  # the folder's path
            },
            "dtype": str(self.model.dtype),
            "caches": [one["cache"] for one in self.costs],
            "task": asdict(self.task),
            "sizes": asdict(replace(self.sizes, lengths=tuple(self.lengths))),
            "reading": asdict(self.reading),
            "text": "packaged" if self.text is None else hash_of(self.text),
            "examples": len(self.examples),
        }

    def _inputs(self) -> dict[str, Any]:
        """What else must be the same for a run to continue: prompts, plans, weights, device."""
        plans = [one.plan for one in self.choices if isinstance(one, Planned)]
        tensors = [x.double().sum().item() for plan in plans for x in plan.tensors.values()]
        given: list[Any] = [(one.tokens, one.answer) for one in self.examples]
        given.append(self.tokens)
        for tasks in self.written.values():
            given += [asdict(one) for rungs in tasks.values() for each in rungs for one in each]
        return {
            "version": __version__,
            "device": str(self.model.model.device),
            "inputs": hash_of(json.dumps([given, [str(one.facts) for one in plans], tensors])),
            "weights": self.model.config_dict.get(WEIGHTS),
        }

    def all(self) -> dict[str, Any]:
        found: dict[str, Any] = {"settings": self._settings(), "caches": self.costs}
        found["cache_bytes"] = self.cache_bytes
        found |= {"notes": told} if (told := [*notes(self.model), *self.notes]) else {}
        for kind, measure in zip(KINDS, (self._kl, self._generation, self._retrieval), strict=True):
            if kind in self.task.kinds:
                own = kind == "generation" and self.examples  # lengths of the prompts
                lengths = (0,) if own else self.lengths
                found[kind] = {str(length): measure(length) for length in lengths}
        return found | {"seconds": self.records.seconds()}

    def _measured(self, what: str, name: str, measure: Callable[[], Iterable[Any]]) -> list[Any]:
        """The results of a name, see Records.get; progress counts each."""
        left = len(self.costs)

        def told() -> Iterator[Any]:
            nonlocal left
            for one in measure():
                yield one
                if left > 1:  # the last one is told when all are kept
                    left -= 1
                    self.progress(what, self.parts)

        found = self.records.get(name, told)
        for _ in range(left):
            self.progress(what, self.parts)
        return found

    @cached_property
    def parts(self) -> int:
        """How often progress is called, tries of numbers of facts included even if the search ends
        early."""
        kinds = self.task.kinds
        rungs = [one for tasks in self.written.values() for one in tasks.values()]
        counts = [self.sizes.prompts] * len(rungs)
        trials = sum(len(one) for one in rungs if len(one) > 1)
        if "kl" in kinds:
            counts += map(self._passages, self.lengths)
        if "generation" in kinds:  # of the user's prompts each is alone
            counts += [1] * len(self.examples) or map(self._prompts, self.lengths)
        return trials + len(self.costs) * sum(len(self._batches(count)) for count in counts)

    def _passages(self, length: int) -> int:
        """Passages of kl that the text has room for."""
        return min(self.sizes.passages, len(self.tokens) // (length + self.sizes.scored))

    def _prompts(self, length: int) -> int:
        """Prompts of generation that the text has room for."""
        return min(self.sizes.prompts, len(self.tokens) // length)

    def _batches(self, count: int) -> list[slice]:
        return [slice(at, at + self.sizes.batch) for at in range(0, count, self.sizes.batch)]

    def _kl(self, length: int) -> list[dict[str, Any]]:
        count = self._passages(length)
        windows = self._windows(count, length + self.sizes.scored)
        scores: list[divergence.Scores] = [{"kl": [], "top1": []} for _ in self.choices]
        for batch in self._batches(count):
            given = windows[batch], length, self.choices, self.reading
            measure = partial(divergence.diverge, self.model, *given)
            _, *parts = self._measured("kl", f"kl {length} {batch.start}", measure)
            for whole, part in zip(scores, parts, strict=True):
                for name in whole:
                    whole[name] += part[name]
        return [divergence.summary(one) | {"asked": self.sizes.passages} for one in scores]

    def _retrieval(self, length: int) -> dict[str, Any]:
        found = {}
        for name, rungs in self.written[length].items():
            what = f"retrieval, {name}"
            prompts, failed = self._hardest(name, length, rungs)
            answers: list[list[list[bool]]] = [[] for _ in self.costs]
            for batch in self._batches(len(prompts)):
                given = prompts[batch], self.choices, self.reading
                measure: Callable[[], Any] = partial(ask_all, self.model, *given)
                if failed:
                    measure = partial(list[Any], [[]] * len(self.costs))
                parts = self._measured(what, f"{name} {length} {batch.start}", measure)
                for whole, part in zip(answers, parts, strict=True):
                    whole += part
            exact, *others = [failed] if failed else answers
            pairs = [paired(exact, one) for one in others]
            distances = [one.distance for each in prompts for one in each.asked]
            found[name] = {
                "exact": share_of(exact),
                "fails": bool(failed) or share_of(exact) < FAILS,
                "least_distance": min(distances),
                "facts": min(one.facts for one in prompts),
                "caches": [asdict(one) for one in pairs],
            }
            lines = [[one.lines for one in each.asked] for each in prompts]
            if len(counts := sorted({one for each in lines for one in each})) > 1:
                found[name]["by_lines"] = {
                    str(count): [
                        asdict(paired(chosen(exact, lines, count), chosen(one, lines, count)))
                        for one in others
                    ]
                    for count in counts
                }
        return found

    def _hardest(
        self, name: str, length: int, rungs: list[list[Prompt]]
    ) -> tuple[list[Prompt], list[list[bool]]]:
        """The most facts among which the 16-bit cache finds ANSWERS of TRIAL prompts' answers."""
        tried: list[list[list[bool]]] = []  # the answers of each trial
        passed = int(len(rungs) == 1)  # how many
        for at, prompts in enumerate(rungs if len(rungs) > 1 else ()):
            if passed == at:
                tried.append(self._asked_exact(f"{name} {length} rung {at}", prompts[:TRIAL]))
                passed += share_of(tried[at]) >= ANSWERS
            self.progress(f"retrieval, {name}", self.parts)
        if passed:
            return rungs[passed - 1], []
        # two prompts may be harder than the others
        rest = self._asked_exact(f"{name} {length} rung 0 rest", rungs[0][TRIAL:])
        answers = [*tried[0], *rest]
        return rungs[0], answers if share_of(answers) < ANSWERS else []

    def _asked_exact(self, name: str, prompts: list[Prompt]) -> list[list[bool]]:
        """[prompts][questions], right or not: the 16-bit cache alone; name as in Records.get."""

        def measure() -> Any:
            batches = self._batches(len(prompts))
            parts = [ask_all(self.model, prompts[one], (), self.reading) for one in batches]
            return [[each for (found,) in parts for each in found]]

        found: list[list[bool]] = self.records.get(name, measure)[0]
        return found

    def _generation(self, length: int) -> dict[str, Any]:
        if self.examples:
            groups = [[one] for one in self.examples]
        else:
            count = self._prompts(length)
            each = [Example(tokens) for tokens in self._windows(count, length).tolist()]
            groups = [each[batch] for batch in self._batches(count)]
        parts, first = [], 0
        for place, group in enumerate(groups):
            ways = Sampling(), Sampling(self.task.temperature, self.sizes.seed, first)
            first += len(group)
            tokens = torch.tensor([one.tokens for one in group], device="cpu")
            given = self.sizes.new_tokens, self.choices, self.reading, ways
            measure = partial(generation.free_run, self.model, tokens, *given)
            parts.append(self._measured("generation", f"generation {length} {place}", measure))
        found: dict[str, Any] = {}
        right: dict[str, list[list[list[bool]]]] = {}
        for at, way in enumerate(WAYS):
            texts = [
                [generation.ended(one, self.ends) for part in parts for one in part[cache][at]]
                for cache in range(len(self.costs))
            ]
            exact, *others = texts
            prompts = [one for group in groups for one in group]
            asked = len(self.examples) or self.sizes.prompts
            found[way] = [generation.summary(exact, one) | {"asked": asked} for one in others]
            if any(one.answer is not None for one in prompts):
                right[way] = [
                    [
                        [self._is_right(one, text)]
                        for one, text in zip(prompts, each, strict=True)
                        if one.answer is not None
                    ]
                    for each in texts
                ]
        if right:  # the texts of a prompt are alike: together they are one observation
            passed = [one for one in right.values() if share_of(one[0]) >= FAILS]
            both: list[list[list[bool]]] = [
                [[*chain(*texts)] for texts in zip(*each, strict=True)]
                for each in zip(*(passed or right.values()), strict=True)
            ]
            for name, (exact_right, *others_right) in {**right, BOTH: both}.items():
                share = share_of(exact_right)
                pairs = [asdict(paired(exact_right, one)) for one in others_right]
                told = {"exact": share, "fails": share < FAILS, "caches": pairs}
                found[f"{name}_answers"] = told
        return found

    def _is_right(self, example: Example, text: Sequence[int]) -> bool:
        assert example.answer is not None
        text = [token for token in text if token not in self.ends]
        found = generation.answer_of(self.model.decode(text), self.task.pattern)
        return found.strip() == example.answer.strip()


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a GPU; None for a CPU, which is not asked."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def hash_of(text: str) -> str:
    """A text's hash, for the settings."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
