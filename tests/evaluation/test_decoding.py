"""Questions are decoded from the cache one token after another, and leave no trace in it. At the
peak two caches are there: the 16-bit one and another one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kvquant import KVCache
from kvquant.calibration.fidelity import Scheme, predict
from kvquant.errors import ConfigError
from kvquant.evaluation.decoding import Caches, Reading, ask_all, score
from kvquant.evaluation.evaluate import HELD_OUT
from kvquant.evaluation.generation import Sampling, answer_of, ended, first_divergence, free_run
from kvquant.evaluation.generation import summary as texts_agree
from kvquant.evaluation.prompts import Asked, Prompt
from kvquant.hf.hybrid import HybridModel
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.warmup import kernels_of

pytest.importorskip("transformers")
from families import CHANGES
from hf_cases import TOLERANCE, random_module, tiny

from kvquant.cache.layer import SPARE
from kvquant.calibration.fidelity import options_of
from kvquant.cli.demo import MODEL
from kvquant.evaluation import evaluate as module
from kvquant.evaluation.divergence import diverge
from kvquant.evaluation.evaluate import Example, Sizes, Task, evaluate
from kvquant.hf.hybrid import decoder_of
from kvquant.hf.model import CachedModel

VOCABULARY, DIM = 50, 64


class Counting:
    """A model whose next token is one more than the last, while its cache holds int8 or better.

    The keys of a token are its number; with int4 rows each step answers two more.
    """

    exact_format, has_latents, dtype = "bf16", False, torch.float32

    def __init__(self) -> None:
        self.read: list[int] = []  # lengths of caches before each step

    def new_cache(self, batch: int, max_seq_len: int, accept_loss: bool, **options: Any) -> KVCache:
        return KVCache(1, batch, 1, DIM, max_seq_len, **options)

    def prefill(self, cache: KVCache, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        rows = tokens[:, None, :, None].expand(-1, -1, -1, DIM).float()
        cache.append(0, rows, rows)
        return self._logits(cache, tokens[:, -1])

    def windows(self) -> dict[int, int]:
        return {}

    def stepper(self, cache: KVCache, num_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(tokens: torch.Tensor) -> torch.Tensor:
            self.read.append(int(cache.seq_lens.max()))
            return self.prefill(cache, tokens[:, None])

        return step

    def generate(
        self,
        cache: KVCache,
        logits: torch.Tensor,
        num_tokens: int,
        *,
        eos_token_id: Any,
        choose: Any,
    ) -> torch.Tensor:
        assert eos_token_id == ()
        step, found = self.stepper(cache, num_tokens), [choose(logits)]
        while len(found) < num_tokens:
            found.append(choose(step(found[-1])))
        return torch.stack(found, 1)

    def past_of(self, cache: KVCache) -> KVCache:
        return cache

    def call(self, cache: KVCache, tokens: torch.Tensor, keep: list[int]) -> torch.Tensor:
        step = self.stepper(cache, len(keep))
        return torch.stack([step(one) for one in tokens.unbind(1)], 1)[:, keep]

    def _logits(self, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
        more = 2 if cache.layers[0].k_format.row_bytes < DIM else 1
        return torch.nn.functional.one_hot((tokens + more) % VOCABULARY, VOCABULARY).float()


def asked(question: list[int], answer: list[int]) -> Asked:
    return Asked(question, answer, 100)


PROMPTS = [
    Prompt([1] * 200, [asked([4], [5, 6]), asked([4, 9], [10]), asked([7], [9])]),
    Prompt([2] * 200, [asked([8, 8, 8], [9]), asked([3], [5, 7])]),
]
CHOICES = [Scheme("int8", "int8", 4, 32), Scheme("int4", "int4", 4, 32)]


def test_prompts_from_rows_come_in_chunks() -> None:
    with pytest.raises(ConfigError, match="need --chunk"):
        Reading(from_rows=True)


class Replayed(Counting, HybridModel):  # type: ignore[misc]  # a stand-in for its methods
    """As a graph on a GPU: each step writes its logits into one tensor. Layers have states, which a
    call of several tokens would forget."""

    def call(self, *given: Any) -> torch.Tensor:
        raise AssertionError("states are forgotten")

    def stepper(self, cache: KVCache, num_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
        step, logits = super().stepper(cache, num_tokens), torch.empty(len(PROMPTS), VOCABULARY)
        return lambda tokens: logits.copy_(step(tokens))

    def copy_states(self, source: KVCache, target: KVCache) -> None:
        pass


def test_answers_of_each_cache() -> None:
    models: list[Any] = [Counting(), Counting(), Replayed()]
    for model, chunk in zip(models, (None, 64, None), strict=True):
        reading = Reading(chunk, from_rows=chunk is not None)
        exact, int8, int4 = ask_all(model, PROMPTS, CHOICES, reading)
        assert exact == int8 == [[True, True, False], [True, False]]
        assert int4 == [[False, False, True], [False, True]]
        # each question begins behind the context alone
        assert set(model.read) == {200, 201, 202} and model.read.count(200) == 3 * 3


def test_a_question_longer_than_crop_can_take_back_gets_a_new_copy() -> None:
    """Cropping it would leave tokens packed that were in the 16-bit window."""
    model: Any = Counting()
    long = asked([4] * 70, [5])
    prompts = [Prompt([*range(20)] * 10, [long, long])]
    made: list[KVCache] = []

    def new_cache(batch: int, max_seq_len: int, accept_loss: bool, **options: Any) -> KVCache:
        assert accept_loss, "losses are what is measured"
        made.append(KVCache(1, batch, 1, DIM, max_seq_len, **options))
        return made[-1]

    model.new_cache = new_cache
    exact, int8 = ask_all(model, prompts, CHOICES[:1], Reading())
    assert exact == int8 == [[True, True]]
    assert len(made) > 2 and {one.recent_len for one in made[1:]} == {32}
    contents = [one.dequantized(0)[0][0, 0, :200, 0] for one in made[1:]]
    assert all(torch.equal(one, contents[0]) for one in contents)


@pytest.mark.extra("hf")
def test_tokens_of_a_question_read_one_another_as_the_cache_has_them() -> None:
    """In one call they would read one another in 16 bit, and no window would look like a long one:
    of this model a ninth of the KL."""
    model = CachedModel.from_pretrained(MODEL)
    windows = torch.tensor(model.encode(HELD_OUT.read_text())[:400]).view(2, 200)
    fed = windows[:, 160:]
    caches = Caches(model, windows[:, :160], 40, Reading())
    losses = []
    for scheme in (Scheme("int4", "int4"), Scheme("int4", "int4", 4, 64)):
        expected = predict(model, caches.copy(scheme), fed).transpose(0, 1)
        every = torch.arange(expected.shape[-1]).expand(2, 40, -1)
        ((found, _),) = score(model, partial(caches.copy, scheme), [(fed, every)])
        losses.append((expected.exp() * (expected - found)).sum(-1).mean())
    assert losses[0].abs() < 1e-6 and losses[1] < 1e-4


@pytest.mark.extra("hf")
@pytest.mark.parametrize("packs", [False, True])
def test_rounds_behind_layers_that_forget_begin_behind_the_prompt(packs: bool) -> None:
    """Cropping a long round could not bring back what a window has lost."""
    model = tiny("Mistral", sliding_window=16, max_position_embeddings=1024)
    prompts = torch.arange(200).reshape(2, 100) % 97
    scheme = Scheme("fp16", "fp16") if packs else Scheme(model.exact_format, model.exact_format)
    caches = Caches(model, prompts, 700, Reading())
    make = partial(caches.copy, scheme) if packs else caches.original
    fed = torch.arange(1400).reshape(2, 700) % 89
    rounds = [(fed, fed[..., None]), (fed[:, :9], fed[:, :9, None])]
    both = [scores for scores, _ in score(model, make, rounds)]
    ((alone, _),) = score(model, make, rounds[1:])
    assert (both[1] - alone).abs().max() < TOLERANCE
    assert (both[0][:, :9] - alone).abs().max() < TOLERANCE


def test_texts_run_freely_from_each_cache() -> None:
    model: Any = Counting()
    tokens = torch.tensor([[1] * 20, [2] * 20])
    caches = free_run(model, tokens, 5, CHOICES, Reading(), [Sampling()])
    exact, int8, int4 = (greedy for (greedy,) in caches)
    assert exact == int8 == [[2, 3, 4, 5, 6], [3, 4, 5, 6, 7]]
    # the first token is the prompt's, which every cache shares
    assert int4 == [[2, 4, 6, 8, 10], [3, 5, 7, 9, 11]]
    found = texts_agree(exact, int4)
    assert found["first_divergence"] == [1, 1] and found["agreement"]["5"]["share"] == 0


def test_samples_of_all_caches_use_the_same_numbers() -> None:
    model: Any = Counting()
    tokens = torch.tensor([[1] * 20] * 4)
    warm = Sampling(temperature=20.0, seed=3)
    first, again = free_run(model, tokens, 9, CHOICES[:1], Reading(), [warm, warm])
    assert first == again and first[0] == first[1]
    assert len({tuple(one) for one in first[0]}) == 4
    # a prompt has numbers of its own, whichever batch it is in
    ways = [Sampling(20.0, 3, first=2), Sampling(20.0, 4)]
    ((part, other),) = free_run(model, tokens[2:], 9, [], Reading(), ways)
    assert part == first[0][2:] != other


def test_texts_part_and_end_and_answers_are_found_by_a_pattern() -> None:
    assert first_divergence([1, 2], [1, 2]) is None and first_divergence([1, 2], [3, 2]) == 0
    assert ended([5, 2, 7, 8], [2, 3]) == [5, 2, 2, 2] and ended([5, 6], [2]) == [5, 6]
    assert answer_of("so 3 and 4, thus 1,234.5.", r"[-+]?[\d.,]*\d") == "1,234.5"
    assert answer_of("#### 17 done", r"#### (\d+)") == "17" and answer_of("none", r"\d") == ""
    with pytest.raises(ConfigError, match="no regular expression"):
        answer_of("", "(")


@pytest.mark.extra("cuda")
def test_kernels_of_all_copies_are_compiled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the soft cap that the model used with its 16-bit cache."""
    told: list[list[Any]] = []
    monkeypatch.setattr(
        "kvquant.kernels.cuda.runtime.warmup.warm_up",
        lambda device, calls, kind: told.append(kernels_of(calls, GPUS["sm_90"])),
    )
    model = tiny("Gemma2")
    make = model.new_cache

    def make_cold(*args: Any, **options: Any) -> KVCache:
        cache = make(*args, **options)
        cache.is_cold = cache.device.type != "meta"
        return cache

    monkeypatch.setattr(model, "new_cache", make_cold)
    schemes = [Scheme("int8", "int8"), Scheme("int4", "int4")]
    caches = Caches(model, torch.arange(200).reshape(2, 100) % 97, 4, Reading(), schemes)
    _, copies = told
    decodes = [[spec for spec in specs if isinstance(spec, DecodeSpec)] for specs in told]
    assert {spec.first.k_format.codec for spec in decodes[0]} == {"bf16"}
    assert {spec.first.k_format.codec for spec in decodes[1]} == {"int8", "int4"}
    assert {spec.variant for specs in decodes for spec in specs} == {("soft_cap",)}
    for scheme in schemes:
        caches.copy(scheme)
        assert {*told[-1]} <= {*copies}, "the copy compiles nothing"
    assert len(told) == 4


SCHEMES = [Scheme("int8", "int8", 4, 16), Scheme("int4-g4", "int4-g4")]
LENGTH = 48


class Live:
    """The caches that are there, and the most bytes of them at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._caches: list[weakref.ref[KVCache]] = []
        self.peak, self.most, self.largest = 0, 0, 0
        make = KVCache.__init__

        def noted(cache: KVCache, *args: Any, **options: Any) -> None:
            make(cache, *args, **options)
            if cache.device.type != "meta":
                self._caches.append(weakref.ref(cache))
                there = [one for ref in self._caches if (one := ref()) is not None]
                self.peak = max(self.peak, sum(one.nbytes for one in there))
                self.most = max(self.most, len(there))

        monkeypatch.setattr(KVCache, "__init__", noted)


def run_freely(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    tokens = torch.arange(LENGTH)[None] % 90
    list(free_run(model, tokens, new_tokens, SCHEMES, reading, [Sampling()] * 2))


def score_freely(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    windows = torch.arange(LENGTH + new_tokens)[None] % 90
    list(diverge(model, windows, LENGTH, SCHEMES, reading))


def go_far(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    """Layers with a window have then forgotten what the prompt's end saw, so that the prompt is
    read again; its first cache is gone by then."""
    tokens = torch.arange(LENGTH)[None] % 90
    more = torch.arange(new_tokens)[None] % 90
    caches = Caches(model, tokens, new_tokens, reading)
    before = [x.clone() for x in caches.exact.dequantized(0)]
    model.prefill(caches.original(), more, append=True)
    assert all(map(torch.equal, before, caches.original().dequantized(0)))
    for choice in SCHEMES:
        assert caches.copy(choice).seq_lens.tolist() == [LENGTH]


def ask(model: CachedModel, new_tokens: int, reading: Reading) -> None:
    asked = Asked([5] * new_tokens, [6, 7], LENGTH)  # beyond what a crop takes back exactly
    prompts = [Prompt([*range(5, 5 + LENGTH)], [asked, asked, asked])]
    list(ask_all(model, prompts, SCHEMES, reading))


MODELS: dict[str, Callable[[], CachedModel]] = {
    "whole": lambda: tiny("Llama"),
    "windowed": lambda: tiny("Mistral", sliding_window=16, max_position_embeddings=2048),
    "hybrid": lambda: decoder_of(random_module("qwen3_next", CHANGES["qwen3_next"])),
}
FROM_ROWS = Reading(chunk=16, from_rows=True)


@pytest.mark.parametrize(
    ("kind", "reading", "task", "new_tokens"),
    [
        ("whole", Reading(), run_freely, 8),
        ("whole", FROM_ROWS, run_freely, 8),
        ("whole", Reading(), score_freely, 8),
        ("whole", Reading(), ask, 70),
        ("windowed", Reading(), run_freely, 8),
        ("windowed", Reading(), ask, 70),
        ("windowed", Reading(), go_far, SPARE + 2),
        ("hybrid", Reading(), run_freely, 8),
        ("hybrid", FROM_ROWS, score_freely, 8),
        pytest.param("hybrid", Reading(), ask, 70, marks=pytest.mark.slow),
    ],
)
def test_two_caches_are_there_at_a_time(
    kind: str, reading: Reading, task: Any, new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[kind]()
    live = Live(monkeypatch)
    task(model, new_tokens, reading)
    size = LENGTH + new_tokens + (2 if task is ask else 0)
    exact, *others = (
        model.new_cache(1, size, **options_of(one, is_latent=False)).nbytes
        for one in (Scheme(model.exact_format, model.exact_format), *SCHEMES)
    )
    assert live.most == 2
    assert live.peak <= exact + max(others)


def test_the_memory_that_is_asked_for_is_what_caches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachedModel.from_pretrained(MODEL)
    live = Live(monkeypatch)
    sizes = Sizes((160,), 2, 1, (0,), passages=2, scored=8, new_tokens=64, batch=2)
    found = evaluate(
        model, ["int8", "int4,recent=0"], task=Task(kinds=("kl", "generation")), sizes=sizes
    )
    assert live.most == 2
    assert 0.9 * found["cache_bytes"] < live.peak <= found["cache_bytes"]


def test_long_prompts_of_a_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CachedModel.from_pretrained(MODEL)
    few = Sizes(new_tokens=8)
    kind = Task(kinds=("generation",))
    prompts = [Example([5] * 200), Example([5] * 400)]
    found = evaluate(model, ["int8"], task=kind, sizes=few, examples=prompts)
    cache = model.new_cache(1, 408, k_format="bf16", v_format="bf16", sink_len=0, recent_len=0)
    assert cache.nbytes < found["cache_bytes"] < 2.2 * cache.nbytes

    monkeypatch.setattr(module, "free_bytes", lambda device: found["cache_bytes"] - 1)
    with pytest.raises(ConfigError, match=r"two caches, 16 bit and packed, need .* shorter --pro"):
        evaluate(model, ["int8"], task=kind, sizes=few, examples=prompts)
