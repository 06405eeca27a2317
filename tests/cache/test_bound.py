"""Launches that are bound to a cache: what is launched, when others are, frames of a warm call."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from entered import calls_of
from fake_cuda import STREAM, FakeDriver, arguments_of, install_for_caches
from paged_cases import DIM as PAGED_DIM
from paged_cases import begin, extend, new_rows
from paged_cases import make as make_paged
from slow_cases import mark_slow
from small_caches import BATCH, DIM, HEADS, assert_same, make, tokens
from torch_operations import Operations

from kvquant import debug
from kvquant.cache.checks import check_options
from kvquant.cache.layer import LayerCache
from kvquant.errors import ConfigError, DeviceError, ShapeError
from kvquant.kernels.cpu import append
from kvquant.kernels.cuda.append.spec import AppendSpec
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.slots.launch import SlotSpec
from kvquant.ops import slots as slot_ops
from kvquant.ops.append import bind_append
from kvquant.paged.batch import PagedBatch
from kvquant.rows.basis import Basis, LayerBasis
from kvquant.rows.call import AppendCall
from kvquant.rows.rotation import Rope
from kvquant.rows.variant import AttentionVariant

# operations of torch that launch nothing
WITHOUT_KERNEL = "detach empty empty_strided slice squeeze transpose unbind view"
ROOM = ("room", "packed", "exact", "evicted")  # what they share


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The CPU as a GPU whose driver takes notes."""
    return install_for_caches(monkeypatch)


def launched(cuda: FakeDriver, call: Callable[..., None], *given: Any) -> list[dict[str, Any]]:
    """The arguments of what a call launches, but for what is new in every call."""
    cuda.launched.clear()
    call(*given)
    specs = [spec for spec, _ in runtime._kernels]
    found = []
    for note in cuda.launched:
        assert note.stream == STREAM
        spec = next(spec for spec in specs if isinstance(spec, SlotSpec) == (note.block[0] == 512))
        arguments = arguments_of(spec, note.arguments)
        found.append({name: value for name, value in arguments.items() if name not in ROOM})
        found[-1]["grid"] = note.grid
    return found


@contextmanager
def counted(at: LayerCache) -> Iterator[list[bool]]:
    """Whether each append was by bound launches."""
    find, found = at.bound.find, list[bool]()

    def note(*new: torch.Tensor) -> Any:
        launches = find(*new)
        found.append(launches is not None)
        return launches

    at.bound.find = note  # type: ignore[method-assign, assignment]
    yield found
    del at.bound.find


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"windows": [8, None]},
        {"sink_len": 0, "recent_len": 0},
        {"bases": [LayerBasis(Basis(torch.ones(HEADS, DIM)), Basis(torch.ones(HEADS, DIM)))] * 2},
    ],
    ids=["plain", "window", "no 16-bit rows", "basis"],
)
def test_an_append_like_the_last_one_is_the_same_two_launches(
    cuda: FakeDriver, options: dict[str, Any]
) -> None:
    cache = make(**options)
    at = cache.layers[0]
    cache.append(0, *tokens(1))
    given = [tokens(1) for _ in range(3)]
    with counted(at) as again, Operations() as calls:
        made = [launched(cuda, cache.append, 0, *new) for new in given]
    assert again == [True] * 3 and not calls.names and at.longest == 4
    assert made[0] != made[1], "they come from elsewhere"
    for new, found in zip(given, made, strict=True):
        at.bound.clear()
        with Operations() as calls:
            assert launched(cuda, cache.append, 0, *new) == found
        assert len(found) == 2 and {*calls.names} <= {*WITHOUT_KERNEL.split()}


def test_new_rows_of_another_kind_are_looked_at(cuda: FakeDriver) -> None:
    cache, (k, v) = make(), tokens(1)
    at = cache.layers[0]
    wide = torch.zeros(BATCH, HEADS, 1, 2 * DIM).bfloat16()
    crooked = torch.zeros(k.numel() + 1).bfloat16()[1:].view(k.shape)
    kinds = [
        (k, v),
        (k.half(), v.half()),
        (k.float(), v),
        (wide[..., :DIM], v),
        (wide[..., ::2], v),
        (crooked, v),
        (k, crooked),
        (k.transpose(0, 2).contiguous().transpose(0, 2), v),
        tokens(2),
        (torch.nn.Parameter(k), v),
        (torch._neg_view(k), v),
    ]
    for new in kinds:
        with counted(at) as again:
            first = launched(cuda, cache.append, 0, *new)
            second = launched(cuda, cache.append, 0, *new)
        assert not again[0]
        for one, two in zip(first, second, strict=True):
            moved = {name for name in one if one[name] != two[name]}
            assert moved <= {"k.x", "v.x"}, "but for copies that are made of it"
        assert not again[1] or not moved
        cache.crop(0)
    with counted(at) as again:
        cache.append(0, *tokens(1), torch.ones(BATCH, dtype=torch.int32))
    assert again == []


def test_new_rows_that_changed_in_place_are_refused(cuda: FakeDriver) -> None:
    cache, (k, v) = make(), tokens(1)
    for _ in range(2):
        cache.append(0, k, v)
    cuda.launched.clear()
    k.transpose_(0, 1)
    for _ in range(2):
        with pytest.raises(ShapeError):
            cache.append(0, k, v)
    assert not cuda.launched and cache.layers[0].longest == 2


class Noted:
    """Stands for a bound launch."""

    def __init__(self, launch: Callable[[], None] = lambda: None) -> None:
        self.launched, self._launch = 0, launch

    def at(self, addresses: Any) -> None:
        self.launched += 1
        self._launch()


@mock.patch.object(torch.Tensor, "is_cuda", True)
def test_not_in_a_graph_nor_in_debug_mode_nor_without_room(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, (k, v) = make(), tokens(1)
    at, noted = cache.layers[0], Noted()
    cache.append(0, k, v)
    ((kind, bound),) = at.bound.items()
    bound = bound._replace(place=noted, write=noted)
    for module, name, value in (
        (torch.cuda, "is_current_stream_capturing", lambda: True),
        (debug, "enabled", True),
        (at, "longest", None),
    ):
        at.bound[kind] = bound
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            cache.append(0, k, v)
        assert not noted.launched
    at.bound[kind], at.longest = bound, at.max_seq_len - 1
    cache.append(0, k, v)
    assert noted.launched == 2 and at.longest == at.max_seq_len
    at.seq_lens.fill_(at.max_seq_len)
    with pytest.raises(ShapeError, match="would grow to 25 tokens"):
        cache.append(0, k, v)
    assert noted.launched == 2


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_lengths_are_taken_back_if_rows_cannot_be_written(
    window: int | None, is_bound: bool, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, (k, v) = make(windows=[window, None]), tokens(1)
    at = cache.layers[0]

    def place(room: torch.Tensor) -> None:
        """Every length is another one afterwards."""
        lens = [at.seq_lens, at.packed_lens, at.seq_lens if at.window is None else at.firsts]
        room[:, -BATCH:] = torch.stack(lens)
        for one in at.lens:
            if one is not None:
                one += 3

    if is_bound:
        cache.append(0, k, v)
        ((kind, bound),) = at.bound.items()
        at.bound[kind] = bound._replace(place=Noted(lambda: place(bound.room)))
    launcher = SimpleNamespace(place_tokens=lambda *given: place(given[-1]))
    monkeypatch.setattr(slot_ops, "_launcher", lambda room: launcher)
    at.begin(torch.tensor([20, 13, 0]), torch.tensor([15, 6, 0]))
    before = {name: tensor.clone() for name, tensor in at.tensors().items()}
    cuda.fails["cuLaunchKernelEx"] = [700]
    with pytest.raises(DeviceError, match="launch"):
        cache.append(0, k, v)
    assert at.longest == 20
    for name, tensor in at.tensors().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's own graphs
@pytest.mark.parametrize("window", mark_slow([None, 8], [8]))
def test_compiled_steps_launch_the_same(cuda: FakeDriver, window: int | None) -> None:
    cache = make(windows=[window, None])

    def step(k: torch.Tensor, v: torch.Tensor, new_lens: torch.Tensor) -> None:
        for index in range(2):
            cache.append(index, k, v, new_lens)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for count in (2, 2, 5, 7):
        cuda.launched.clear()
        with torch.compiler.set_stance("fail_on_recompile" if count == 7 else "default"):
            compiled(*tokens(count), torch.ones(BATCH, dtype=torch.int64))
        assert [launched.block[0] == 512 for launched in cuda.launched] == [True, False] * 2
    cache.append(0, *tokens(2))
    assert [at.longest for at in cache.layers] == [None, None], "the host cannot know"


@mock.patch.object(torch.Tensor, "is_cuda", True)
def test_a_step_that_was_taken_before_is_three_launches(cuda: FakeDriver) -> None:
    cache, (k, v), q = make(), tokens(1), torch.zeros(BATCH, 2 * HEADS, DIM).bfloat16()
    at, calls = cache.layers[0], list[Any]()
    at.check_query = calls.append  # type: ignore[method-assign, assignment]
    for steps in range(1, 4):
        cuda.launched.clear()
        cache.step(0, q, k, v)
        assert len(calls) == 1 and len(cuda.launched) == 3 and at.longest == steps
    cache.step(0, q[:, :HEADS], k, v)
    cache.step(0, q, k, v, variant=AttentionVariant(soft_cap=30.0))
    assert len(calls) == 3
    for _ in range(2):  # the options of a step are looked at once, too
        cache.step(0, q, k, v, sm_scale=0.5)
        assert len(calls) == 4
    for options in ({"return_lse": 1}, {"sm_scale": math.inf}, {"num_splits": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} (is )?"):
            cache.step(0, q, k, v, **options)
    assert at.longest == 7 and len(cuda.launched) == 15


# Functions of kvquant that a warm call on the CPU enters


def test_a_warm_call_on_the_cpu_enters_few_functions() -> None:
    cache, (k, v), q = make(), tokens(1), torch.zeros(BATCH, 2 * HEADS, DIM).bfloat16()
    for most, call in (
        (14, partial(cache.append, 0, k, v)),
        (18, partial(cache.attend, 0, q)),
        (20, partial(cache.step, 0, q, k, v)),
    ):
        call()
        call()  # the first time that there are packed rows, say, a kernel is compiled
        assert calls_of(call) <= most
    batch, q = PagedBatch(make_paged(), 4, 60), torch.zeros(2, 4, PAGED_DIM).bfloat16()
    for name in "ab":
        begin(batch, name, 30)
    for warm in (False, False, True):
        with batch.extend(["a", "b"]):
            for layer in range(batch.cache.num_layers):
                count = calls_of(partial(batch.step, layer, q, *new_rows(2)))
                assert count <= 38 or not warm


# A paged cache


def paged_batch(**options: Any) -> PagedBatch:
    batch = PagedBatch(make_paged(**options), 4, 60)
    batch._on_cuda = True
    return batch


def step(batch: PagedBatch, rows: torch.Tensor) -> None:
    extend(batch, ["a", "b"], 1, rows=rows)


def test_a_step_of_a_paged_cache_appends_again(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = paged_batch()
    for name in "ab":
        begin(batch, name, 30)
    step(batch, new_rows(2))
    prepared: list[Any] = []

    def note(call: AppendCall) -> Any:
        prepared.append(call)
        return bind_append(call)

    monkeypatch.setattr("kvquant.paged.batch.bind_append", note)
    for _ in range(3):
        rows = new_rows(2)
        with Operations() as calls:
            found = launched(cuda, step, batch, rows)
        assert not prepared and {*calls.names} <= {"clone", "unbind"}, "once a step"
        for kinds in batch._bound:
            kinds.clear()
        assert [write["k.x"] for write in found] == [rows[0].data_ptr()] * 2
        assert launched(cuda, step, batch, rows) == found
        assert len(prepared) == 2
        prepared.clear()


def test_a_step_is_checked_as_the_first_one(cuda: FakeDriver) -> None:
    batch = paged_batch()
    for name in "ab":
        begin(batch, name, 30)
    rows = new_rows(2)
    step(batch, rows)
    cuda.launched.clear()
    with pytest.raises(ConfigError, match="no step of this batch is open"):
        batch.append(0, *rows)
    with pytest.raises(ConfigError, match="layer 2 does not exist"):
        batch.append(2, *rows)
    with pytest.raises(ShapeError, match="k has 2 tokens, the step 3"):
        with batch.extend(["a", "b"], [1, 2]):
            batch.append(0, *rows)
    assert not cuda.launched
    for name in "ab":  # of a step that has failed
        batch.cache.free(name)
        batch.cache.allocate(name)
    with pytest.raises(ConfigError, match="layer 0 was appended to in this step"):
        with batch.extend(["a", "b"]):
            batch.append(0, *rows)
            batch.append(0, *rows)
    assert len(cuda.launched) == 1


def test_rotary_embeddings_are_applied_every_time(cuda: FakeDriver) -> None:
    batch = paged_batch(num_layers=1)
    begin(batch, "a", 30)
    rows, table = new_rows(1), torch.randn(1, PAGED_DIM // 2)
    extend(batch, ["a"], 1, rows=rows)
    for _ in range(2):
        cuda.launched.clear()
        with batch.extend(["a"]):
            batch.append(0, *rows, rope=Rope(table, table))
        spec = next(reversed([spec for spec, _ in runtime._kernels]))
        assert isinstance(spec, AppendSpec) and spec.rotary_dim == PAGED_DIM
        (note,) = cuda.launched
        assert arguments_of(spec, note.arguments)["cos"] == table.data_ptr()


def test_tensors_that_move_are_found_where_they_are() -> None:
    cache, other = make(), make()
    q = torch.randn(BATCH, 2 * HEADS, DIM).bfloat16()
    for move in (False, False, True, False):
        if move:  # as when a cache is sent to another process
            for at in cache.layers:
                for tensor in at.tensors().values():
                    tensor.share_memory_()
        for layer, _ in enumerate(cache.layers):
            given = layer, q, *tokens(1)
            assert torch.equal(cache.step(*given), other.step(*given))
    assert_same(cache, other)


def test_bound_appends_keep_no_new_rows() -> None:
    cache, kept = make(), list[weakref.ref[Any]]()
    for _ in range(3):
        arrays = [x.float().numpy().copy() for x in tokens(1)]
        kept += map(weakref.ref, arrays)
        cache.append(0, *map(torch.from_numpy, arrays))
        del arrays
    gc.collect()
    assert cache.layers[0].bound and not any(one() is not None for one in kept)


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("is_warm", [False, True])
def test_an_interrupted_append_leaves_no_tokens(
    is_warm: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises what came during compiled code behind it."""
    if when == "behind" and not is_warm:
        pytest.skip("a first append places tokens by itself")
    cache, other = make(), make()
    for one in (cache, other):
        for _ in range(3 * is_warm):
            torch.manual_seed(len(one.layers))
            one.append(0, *tokens(1))
    new, longest = tokens(1), cache.layers[0].longest
    written = append._append

    def interrupted(*given: Any) -> bool:
        if when == "behind":
            written(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(append, "_append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.append(0, *new)
    at, expected = cache.layers[0], other.layers[0]
    assert at.longest == longest and torch.equal(at.seq_lens, expected.seq_lens)
    for one in (cache, other):
        one.append(0, *new)
    assert_same(cache, other)


def test_an_option_of_no_kind_is_refused_behind_bound_steps() -> None:
    cache, (k, v), q = make(), tokens(1), torch.zeros(BATCH, 2 * HEADS, DIM).bfloat16()
    for _ in range(2):
        cache.step(0, q, k, v)
    with pytest.raises(ConfigError, match="sm_scale"):
        cache.step(0, q, k, v, sm_scale=[0.1])  # type: ignore[call-overload]
    assert cache.layers[0].longest == 2


def test_scales_that_cuda_refuses_are_refused_before_a_step_appends() -> None:
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    with mock.patch("kvquant.cache.checks.kernels_for", return_value="cuda"):
        check_options(q, 0.125, False, None, None)
        for scale in (-1.0, 0.0, 1e30):
            with pytest.raises(ConfigError, match="use a positive number below 1e\\+30"):
                check_options(q, scale, False, None, None)
