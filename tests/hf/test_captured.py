"""CapturedStep: what single steps give, from one graph."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hf_cases import LATENT_SIZES, int8_plan, needs_latents, random_module
from latent_plans import latent_plan
from threads import run_in_threads
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvquant import CachedModel, CapturedStep, KVCache
from kvquant.errors import (
    ConfigError,
    DeviceError,
    KVQuantError,
    NonFiniteError,
    ShapeError,
    UnsupportedModelError,
)
from kvquant.hf.compile import captured
from kvquant.hf.model import LEAST_CAPTURED
from kvquant.hf.models.configs import Turn
from kvquant.kernels.cuda.runtime.workspace import Lease, workspaces_of

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
LENS = [70, 300, 1]


def make(device: str, windows: bool = False, **config: Any) -> CachedModel:
    torch.manual_seed(0)
    model: Any
    if windows:
        model = MistralForCausalLM(MistralConfig(**(SHAPE | {"sliding_window": 160} | config)))
    else:
        model = LlamaForCausalLM(LlamaConfig(**(SHAPE | config)))
    return CachedModel(model.to(torch.bfloat16).to(device).eval())


def make_latent(device: str, **changes: Any) -> CachedModel:
    """A layer of a dense MLP, and one of experts."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 512}
    model = random_module("deepseek_v3", LATENT_SIZES | heads | changes)
    return CachedModel(model.to(torch.bfloat16).to(device))


def filled(model: CachedModel, **options: Any) -> tuple[KVCache, torch.Tensor]:
    cache = model.new_cache(len(LENS), 512, **options)
    tokens = torch.randint(512, (len(LENS), max(LENS)), generator=torch.Generator().manual_seed(1))
    return cache, model.prefill(cache, tokens.to(cache.device), LENS).argmax(-1)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits are those; work may be cut otherwise: a graph is planned for all lengths."""
    return bool((found - expected).float().norm() < 1e-2 * expected.float().norm())


def near(found: torch.Tensor, expected: torch.Tensor, limit: float = 2.4e-2) -> bool:
    """Whether logits agree, where Inductor leaves out some roundings to bfloat16.

    A layer rounds 17 times (2 for each of the two norms, 3 projections, 3 for rotary embeddings,
    attention, 4 in the MLP, 2 sums). Three layers, the last norm and the logits round 54 times. In
    the worst case the two ways share no rounding, which makes 108. The error of one is uniform
    within 2^-8 of the number at most, so 2^-8 / sqrt(3) in the mean. 108 independent ones add up to
    2.4e-2. On the CPU Inductor's logits differ by 6e-3. Logits of a text that is one token shorter
    differ by 3.3e-2.
    """
    return bool((found - expected).float().norm() < limit * expected.float().norm())


# The limit of near for latent rows. Rounding errors of 1e-3 in attention's output move the logits
# by 1e-2 (emulated on the CPU). So one rounding to bfloat16 moves them by 2.2e-2, and the
# roundings of two layers, in both ways of computing, by 4.5e-2. With the 2.4e-2 of all other
# roundings that is 5.1e-2. On the CPU Inductor's logits differ by 1.9e-2, those of a text one
# token shorter by 0.2.
NEAR_LATENT = 5.1e-2


def compile_by(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Make torch.compile use another backend than Inductor, and keep its other arguments."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **given: compile(f, backend=backend, **given))


class StandIn:
    """torch.cuda for a capture, on the CPU: nothing of the block has run when it has ended.

    Attributes:
        stream: the current one.
        is_capturing: what runs is captured.
        is_ended: CUDA ends the capture, as where the block waits for the GPU.
        taken_back: memory pools of such captures that were ended and released in torch's place.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def stream() -> Any:
            waits: list[Any] = []
            return SimpleNamespace(wait_stream=waits.append, waits=waits, device_index=0)

        self.stream, self.is_ended, self.taken_back = stream(), False, list[Any]()
        self.is_capturing = False
        self._tensors: list[torch.Tensor] = []
        self._replay: Callable[[], object] = lambda: None
        stand_ins = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self._replay()),
            "Stream": lambda device=None: stream(),
            "current_stream": lambda: self.stream,
            "device": contextlib.nullcontext,
            "graph": self._graph,
            "graph_pool_handle": lambda: (0, 1),
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "stream": contextlib.nullcontext,
        }
        for name, value in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, value)
        assert any(hasattr(torch._C, name) for name in captured._ENDINGS)
        # before torch 2.8 there is only the older name
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *pool: None)
        monkeypatch.setattr(captured, "_check", lambda model, cache: None)
        monkeypatch.setattr(captured, "_failed", [])

    def follow(self, monkeypatch: pytest.MonkeyPatch, model: CachedModel, cache: KVCache) -> None:
        """Let a replay be the call of a model that was captured, compiled or not."""

        def noting(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def noted(*given: Any) -> torch.Tensor:
                logits = call(*given)

                def replay() -> None:
                    longest = [layer.longest for layer in cache.layers]  # the host sees none of it
                    logits.copy_(call(*given))
                    for layer, known in zip(cache.layers, longest, strict=True):
                        layer.longest = known

                if self.is_capturing:
                    self._replay = replay
                return logits

            return noted

        compiled = model.compiled
        monkeypatch.setattr(model, "call", noting(model.call))
        monkeypatch.setattr(model, "compiled", lambda: noting(compiled()))
        self._tensors = [x for layer in cache.layers for x in layer.tensors().values()]

    @contextlib.contextmanager
    def _graph(self, graph: Any, *, capture_error_mode: str, **given: Any) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before, self.stream, self.is_capturing = self.stream, given["stream"], True
        kept = [x.clone() for x in self._tensors]
        try:
            yield
        finally:
            self.is_capturing = False
            for x, earlier in zip(self._tensors, kept, strict=True):
                x.copy_(earlier)
            if self.is_ended:
                raise RuntimeError("CUDA error: operation failed due to a previous error")
            self.stream = before

    def _end(self, index: int, pool: Any) -> None:
        if not self.is_ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.taken_back.append(pool)


class Stood(NamedTuple):
    """A model and a cache of LENS on the CPU, whose captures the stand-in follows."""

    model: CachedModel
    cache: KVCache
    token: torch.Tensor
    cuda: StandIn


def stand_for(monkeypatch: pytest.MonkeyPatch, model: CachedModel) -> Stood:
    cache, token = filled(model)
    cuda = StandIn(monkeypatch)
    cuda.follow(monkeypatch, model, cache)
    return Stood(model, cache, token, cuda)


@pytest.fixture
def stood(monkeypatch: pytest.MonkeyPatch) -> Stood:
    return stand_for(monkeypatch, make("cpu"))


@pytest.mark.parametrize("maker", [make, pytest.param(make_latent, marks=needs_latents)])
def test_single_steps_between_know_the_lengths(
    maker: Callable[[str], CachedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache, token, _ = stand_for(monkeypatch, maker("cpu"))
    other = cache.fork()
    step = CapturedStep(model, cache)
    for take in (step, step, model.step, step):
        expected = model.step(other, token)
        found = take(token) if take is step else model.step(cache, token)
        assert close(found, expected)
        token = expected.argmax(-1)
        assert {layer.longest for layer in cache.layers} == {int(cache.seq_lens.max())}
    assert cache.seq_lens.tolist() == [n + 4 for n in LENS]
    cache.crop(10)
    step(token)
    assert {layer.longest for layer in cache.layers} == {11}
    cache.layers[1].longest = None  # another graph appends, too
    step(token)
    assert [layer.longest for layer in cache.layers] == [12, None, 12][: cache.num_layers]


MAKERS: dict[str, Callable[[str], CachedModel]] = {
    "full": make,
    "windows": partial(make, windows=True),
    "latent": partial(make_latent, first_k_dense_replace=2),
}


def held(cache: KVCache) -> list[torch.Tensor]:
    """The lengths of a cache's sequences, how many tokens are packed, positions and counters."""
    lens = [one for layer in cache.layers for one in (layer.seq_lens, layer.packed_lens)]
    more = cache.start_positions, cache.bad_rows, cache.overflow_tokens
    return [one.clone() for one in (*lens, *more)]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", ["windows", "plan", pytest.param("latent", marks=needs_latents)])
def test_a_compiled_step_is_one_graph_for_all_caches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Inductor: the operators are those of single steps."""
    compile_by(monkeypatch, "aot_eager")
    model = MAKERS.get(kind, make)("cpu")
    plan = int8_plan(model) if kind == "plan" else None
    if kind == "latent":
        plan = latent_plan(2, model.config_dict)
    stand_in = StandIn(monkeypatch)
    for first in (True, False):  # the second step is made for an empty cache
        cache = model.new_cache(3, 512, plan=plan)
        other = cache.fork()
        more = torch.randint(512, (3, 300), generator=torch.Generator().manual_seed(1))
        if first:
            model.prefill(cache, more, LENS)
            model.prefill(other, more, LENS)
        before, longest = held(cache), [layer.longest for layer in cache.layers]
        with monkeypatch.context() as patch:
            stand_in.follow(patch, model, cache)
            step = CapturedStep(model, cache, compile=True)
            assert all(map(torch.equal, held(cache), before))
            assert [layer.longest for layer in cache.layers] == longest
            if not first:
                model.prefill(cache, more, LENS)
                model.prefill(other, more, LENS)
            token = torch.tensor([1, 2, 3])
            for turn in range(3):
                for _ in range(3):
                    expected = model.step(other, token)
                    assert close(step(token), expected)
                    token = expected.argmax(-1)
                    most = int(cache.seq_lens.max())
                    assert all((layer.longest or 0) >= most for layer in cache.layers)
                for one in (cache, other):
                    if turn == 0:
                        one.crop([LENS[0], LENS[1] - 20, 1])
                    else:
                        model.prefill(one, more[:, :9], [9, 1, 5], append=True)
            cache.check()
            assert cache.seq_lens.equal(other.seq_lens)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_a_step_by_inductor_gives_what_the_model_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("cpu")
    text = torch.randint(512, (1, 204), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(1, 512, k_format="bf16", v_format="bf16")
    model.prefill(cache, text[:, :200])
    StandIn(monkeypatch).follow(monkeypatch, model, cache)
    step = CapturedStep(model, cache, compile=True)
    for place in range(200, 204):
        found = step(text[:, place])
        assert near(found, model.plain(text[:, : place + 1]))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.usefixtures("fresh")
def test_what_is_not_compiled_is_told(stood: Stood, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, token, cuda = stood
    before, longest = held(cache), [layer.longest for layer in cache.layers]

    def fail(*given: Any) -> Any:
        raise RuntimeError("no Triton here")

    def refuses(
        told: str, error: type[Exception] = UnsupportedModelError, compile: Any = True
    ) -> None:
        if error is UnsupportedModelError:
            told = rf"cannot be compiled: {told}.* Leave com"
        with pytest.raises(error, match=told):
            CapturedStep(model, cache, compile=compile)
        assert all(map(torch.equal, held(cache), before))
        assert [layer.longest for layer in cache.layers] == longest

    with monkeypatch.context() as patch:
        compile_by(patch, fail)
        refuses("BackendCompilerFailed.*RuntimeError: no Triton here")
    compile_by(monkeypatch, "eager")
    mlps = [layer.mlp for layer in model.model.model.layers]
    hook = mlps[1].register_forward_hook(
        lambda module, given, out: out if float(out.sum()) else None
    )
    refuses(r"\w+: ")  # torch has several names for it
    assert len(cuda.stream.waits) == 2  # for the streams where the cache was cropped
    hook.remove()
    hook = mlps[2].register_forward_hook(lambda *_: dict[str, Any]()["of theirs"])
    refuses("of theirs", KeyError)  # before it is compiled
    hook.remove()
    refuses("compile", ConfigError, "inductor")
    for changes, told in (
        ({"shared": {2: 1}}, "some of its layers attend to the keys of other ones"),
        ({"scaled_from": 8191}, "it scales queries by the length of the text"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(model, "_layers", dataclasses.replace(model._layers, **changes))
            patch.setattr("kvquant.hf.cache.LOSES_MARKS", True)
            refuses(told)
    for layer in range(3):  # one place is enough
        cache.append(layer, *torch.randn(2, 3, 2, 512 - 301, 64))
    expected = model.step(cache.fork(), token)
    assert close(CapturedStep(model, cache, compile=True)(token), expected)
    cache.check()
    before, longest = held(cache), [layer.longest for layer in cache.layers]
    refuses("would grow to 513 tokens", ShapeError)


def test_generate_steps_by_a_graph_where_it_pays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("cpu")
    cache, token = filled(model)
    other = cache.fork()
    logits = torch.nn.functional.one_hot(token, 512).float()
    with pytest.raises(DeviceError, match="on CUDA only"):
        CapturedStep(model, cache)
    with caplog.at_level(logging.INFO, "kvquant"):
        expected = model.generate(other, logits, 12)
    assert "steps come from Python: the cache is on cpu" in caplog.text
    StandIn(monkeypatch).follow(monkeypatch, model, cache)
    assert isinstance(model.stepper(cache, LEAST_CAPTURED), CapturedStep)
    assert not isinstance(model.stepper(cache, LEAST_CAPTURED - 1), CapturedStep)
    with monkeypatch.context() as patch:
        patch.setattr(model, "step", lambda *given: pytest.fail("from Python"))
        assert model.generate(cache, logits, 12).equal(expected)
    assert cache.seq_lens.equal(other.seq_lens)
    cache.crop(LENS)

    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr("kvquant.hf.model.CapturedStep", fail)
    with caplog.at_level(logging.INFO, "kvquant"):
        assert model.generate(cache, logits, 12).equal(expected)
    assert "steps come from Python: no memory is left" in caplog.text


def test_generate_takes_back_what_came_with_nan(stood: Stood) -> None:
    model, cache, token, _ = stood
    logits = torch.nn.functional.one_hot(token, 512).float()
    weight = model.model.model.layers[1].self_attn.v_proj.weight
    weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError):
        model.generate(cache, logits, 12)
    assert cache.seq_lens.tolist() == LENS and not cache.bad_rows.any()


def test_calls_that_a_step_refuses_change_nothing(stood: Stood) -> None:
    model, cache, token, _ = stood
    step = CapturedStep(model, cache)

    def refuses(given: Any, told: str) -> None:
        lens = cache.seq_lens.tolist()
        with pytest.raises(KVQuantError, match=told):
            step(given)
        assert cache.seq_lens.tolist() == lens

    for lacks in (1, 0):  # the last place is taken by the step, or by somebody else
        step(token)
        for layer in range(3):
            cache.append(layer, *torch.randn(2, 3, 2, 512 - lacks - 301, 64))
        if lacks:
            step(token)
        refuses(token, "all 512 tokens")
        cache.crop(LENS)
    step(token)
    refuses(token + 0.9, "tokens are torch.float32")
    refuses(token.tolist(), "tokens are list")
    refuses(token[:2], r"tokens are \[2\]: give \[3\]")
    cache.grow(1024)
    refuses(token, "has grown, or got other sequences, since")


@needs_latents
def test_changed_weights_are_told_where_others_were_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the bases of a plan: a graph reads the weights themselves otherwise."""
    model = make_latent("cpu")
    weight = model.model.model.layers[0].self_attn.kv_b_proj.weight
    stand_in = StandIn(monkeypatch)
    for options in ({"plan": latent_plan(2, model.config_dict)}, {"fmt": "int8-g4"}):
        cache, token = filled(model, **options)
        with monkeypatch.context() as patch:
            stand_in.follow(patch, model, cache)
            step = CapturedStep(model, cache)
            step(token)
            with torch.no_grad():
                weight.mul_(-1)
            if "plan" in options:
                with pytest.raises(ConfigError, match=r"weights .* have changed .* capture it aga"):
                    step(token)
                step = CapturedStep(model, cache)
            expected = model.step(cache.fork(), token)
            assert close(step(token), expected)
        assert cache.seq_lens.tolist() == [n + 2 for n in LENS]


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "goes on"])
@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (RuntimeError("CUDA error: no waiting\nhere"), UnsupportedModelError, r"no waiting\. If"),
        (torch.OutOfMemoryError("too much"), torch.OutOfMemoryError, "too much"),
        (ShapeError("of ours"), ShapeError, "of ours"),
        (KeyError("of theirs"), KeyError, "of theirs"),
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
    ],
    ids=["RuntimeError", "OutOfMemoryError", "ShapeError", "KeyError", "KeyboardInterrupt"],
)
def test_a_capture_that_fails_tells_why(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    told: str,
    is_ended: bool,
) -> None:
    cuda = StandIn(monkeypatch)
    if isinstance(error, KeyboardInterrupt):  # older torch names its function otherwise
        monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
        older = "_cuda_endAllocateCurrentStreamToPool"
        monkeypatch.setattr(torch._C, older, cuda._end, raising=False)
    stream, side, graph = cuda.stream, torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with pytest.raises(raised, match=told), captured._captured(graph, side):
        assert cuda.stream is side
        cuda.is_ended = is_ended
        raise error
    assert cuda.stream is stream
    assert cuda.taken_back == [(0, 1)] * is_ended
    assert captured._failed == [graph] * is_ended


def test_a_capture_that_fails_leaves_the_cache_as_it_was(stood: Stood) -> None:
    model, cache, token, cuda = stood
    before = cache.fork()

    def wait(*given: Any) -> None:
        cuda.is_ended = cuda.is_capturing
        if cuda.is_ended:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    hook = model.model.model.layers[1].mlp.register_forward_hook(wait)
    with pytest.raises(UnsupportedModelError, match="not permitted when stream is capturing"):
        CapturedStep(model, cache)
    hook.remove()
    assert {layer.longest for layer in cache.layers} == {300}
    with pytest.raises(UnsupportedModelError, match=r"previous error\. .* CachedModel\.generate"):
        with captured._captured(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
            cuda.is_ended = True  # in silence
    cuda.is_ended = False
    assert close(CapturedStep(model, cache)(token), model.step(before, token))
    assert cache.seq_lens.tolist() == [n + 1 for n in LENS]


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("fmt", ["bf16", "int8", "int4-g4"])
def test_it_gives_what_single_steps_give(fmt: str, windows: bool) -> None:
    model = make("cuda", windows)
    cache, first = filled(model, k_format=fmt, v_format=fmt)
    other = cache.fork()
    step = CapturedStep(model, cache)
    for _ in range(2):  # the second time after a crop, and from other lengths
        token = first
        for _ in range(20):
            found, expected = step(token).clone(), model.step(other, token)
            assert close(found, expected)
            token = expected.argmax(-1)
        cache.check()
        assert cache.seq_lens.tolist() == other.seq_lens.tolist() == [n + 20 for n in LENS]
        cache.crop(LENS)
        other.crop(LENS)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore")  # of torch's own code
@pytest.mark.parametrize(
    "kind", ["full", "windows", "plan", pytest.param("latent", marks=needs_latents)]
)
def test_compiled_it_gives_what_single_steps_give(kind: str) -> None:
    model = MAKERS.get(kind, make)("cuda")
    plan = int8_plan(model) if kind == "plan" else None
    limit = 2.4e-2
    if kind == "latent":
        plan, limit = latent_plan(2, model.config_dict), NEAR_LATENT
    cache, first = filled(model, plan=plan)
    other = cache.fork()
    step = CapturedStep(model, cache, compile=True)
    assert cache.seq_lens.tolist() == LENS
    more = torch.randint(512, (3, 9), generator=torch.Generator().manual_seed(2)).cuda()
    for turn in range(3):  # behind a prompt, a crop, and a later turn
        token = first
        for _ in range(20):
            found, expected = step(token).clone(), model.step(other, token)
            assert near(found, expected, limit)
            token = expected.argmax(-1)
        cache.check()
        assert cache.seq_lens.equal(other.seq_lens)
        for one in (cache, other):
            one.crop(LENS)
            if turn == 1:
                model.prefill(one, more, [9, 1, 5], append=True)
    torch.compiler.reset()  # a graph keeps its kernels
    gc.collect()
    torch.cuda.empty_cache()
    found, expected = step(first).clone(), model.step(other, first)
    assert near(found, expected, limit)
    with torch.no_grad():  # and reads the weights where they lie
        model.model.lm_head.weight.mul_(-1)
    assert near(step(first), model.step(other, first), limit)
    cache.check()


@needs_latents
@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["bf16", "int8-g4", "int4-g8", None])
def test_graph_of_latent_rows_gives_what_single_steps_give(fmt: str | None) -> None:
    """None: in the format and the bases of a plan.

    Attention that is rounded otherwise, by 1e-3, moves logits of this model by 1e-2 (emulated on
    the CPU), and now and then another expert is chosen in its last layer, which moves one step's
    by 0.4.
    """
    model = make_latent("cuda")
    plan = None if fmt else latent_plan(2, model.config_dict)
    other, token = filled(model, fmt=fmt, plan=plan)
    cache = other.fork()  # the model has not read its bases before
    step = CapturedStep(model, cache)
    errors = []

    def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
        errors.append(float((found - expected).float().norm() / expected.float().norm()))

    for _ in range(20):
        found, expected = step(token).clone(), model.step(other, token)
        compare(found, expected)
        token = expected.argmax(-1)
    cache.check()
    assert cache.seq_lens.tolist() == other.seq_lens.tolist() == [n + 20 for n in LENS]
    cache.crop(LENS)  # and in Python, behind a graph
    other.crop(LENS)
    compare(model.step(cache, token), model.step(other, token))
    errors.sort()
    assert errors[10] < 2e-2 and errors[-3] < 3e-2, errors


@pytest.mark.gpu
def test_nan_is_told_by_check() -> None:
    model = make("cuda")
    cache, token = filled(model)
    step = CapturedStep(model, cache)
    step(token)
    cache.check()
    with torch.no_grad():
        model.model.model.layers[1].self_attn.k_proj.weight.fill_(float("nan"))
    step(token)
    with pytest.raises(NonFiniteError):
        cache.check()


def test_models_that_read_positions_on_the_host_are_refused() -> None:
    model = make("cpu")
    cache, layers = model.new_cache(1, 512), model._layers
    cases: list[tuple[dict[str, Any], str]] = [
        ({"turn": Turn("dynamic", 2048, True)}, "length of the text in each step .*'dynamic'"),
        ({"scaled_from": 510}, "scales queries from position 510 on, the cache ends at 512"),
        ({"scaled_from": 513}, "^$"),
    ]
    for changes, why in cases:
        vars(model)["_layers"] = dataclasses.replace(layers, **changes)
        assert re.search(why, model.not_captured(cache) or ""), changes
    vars(model)["_positions"] = 512
    cache.start_positions += 1
    assert model.not_captured(cache) == "it has 512 positions, the cache ends at 513"


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_is_refused() -> None:
    model = make("cuda")
    cache, token = filled(model)
    other, stream = cache.fork(), torch.cuda.current_stream()
    hook = model.model.model.layers[1].mlp.register_forward_hook(
        lambda module, given, out: out if float(out.sum()) else None
    )
    with pytest.raises(UnsupportedModelError, match=r"captur.* decode from Python"):
        CapturedStep(model, cache)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert close(model.step(cache, token), model.step(other, token))
    hook.remove()
    # else memory that another stream has used would never be free again
    side = torch.cuda.Stream()
    held = torch.cuda.memory_stats()["active_bytes.all.current"]
    x = torch.zeros(1 << 20, device="cuda")
    x.record_stream(side)
    del x
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] < held + (1 << 20)
    step = CapturedStep(model, cache)
    for _ in range(2):
        assert close(step(token), model.step(other, token))
    assert cache.seq_lens.tolist() == other.seq_lens.tolist() == [n + 3 for n in LENS]
    cache.check()


@pytest.mark.gpu
def test_dropped_steps_give_their_counters_back() -> None:
    model = make("cuda")
    cache, token = filled(model)
    spaces = workspaces_of(cache.device)

    def free() -> int:
        gc.collect()
        with Lease():
            return sum(map(len, spaces._free))

    model.step(cache.fork(), token)
    before = free()
    step = CapturedStep(model, cache)
    step(token)
    assert free() < before, "a graph has counters of its own"
    del step
    assert free() == before
    CapturedStep(model, cache)(token)
    cache.check()
    assert cache.seq_lens.tolist() == [n + 2 for n in LENS]


@pytest.mark.gpu
def test_threads_capture_side_by_side() -> None:
    model = make("cuda")
    caches = [filled(model)[0] for _ in range(4)]
    token = torch.tensor([1, 2, 3], device="cuda")
    expected = model.step(caches[0].fork(), token)
    found: list[torch.Tensor] = []

    def run(cache: KVCache) -> None:
        step = CapturedStep(model, cache)
        logits = step(token).clone()
        torch.cuda.current_stream().synchronize()
        found.append(logits)

    run_in_threads(run, caches)
    assert len(found) == 4 and all(close(one, expected) for one in found)
    for cache in caches:
        cache.check()
        assert cache.seq_lens.tolist() == [n + 1 for n in LENS]


@pytest.mark.gpu
def test_other_threads_go_on_meanwhile() -> None:
    model = make("cuda")
    cache, token = filled(model)
    other, sums = cache.fork(), list[float]()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(float(torch.ones(1 << 22, device="cuda").sum()))

    def fork(*given: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    work()  # its kernels are loaded
    hook = model.model.model.layers[1].mlp.register_forward_hook(fork)
    step = CapturedStep(model, cache)
    hook.remove()
    assert sums == [1 << 22] * 2
    assert close(step(token), model.step(other, token))
    cache.check()
