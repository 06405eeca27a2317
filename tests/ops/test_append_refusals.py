"""What append_rows and dequantize_pages refuse, and where they look; 1 s."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from append_cases import angles
from refusals import refused

from kvquant import Basis, RowFormat, Slots, append_rows, debug, dequantize_pages
from kvquant.errors import ConfigError, ShapeError
from kvquant.ops import append as append_ops
from kvquant.ops import rows_at
from kvquant.rows.call import AppendCall

HEADS, PAGES, PAGE_SIZE = 2, 5, 7
SEQ_SLOTS, EXACT_LEN = 3, 6


def storage(fmt: RowFormat) -> torch.Tensor:
    return torch.zeros(PAGES, HEADS, PAGE_SIZE, fmt.row_bytes, dtype=torch.uint8)


def arguments() -> dict[str, Any]:
    """A call that is right, of 4 tokens."""
    k_format, v_format = RowFormat.parse("int4-g4", 64), RowFormat.parse("fp8", 96)
    exact = [
        torch.zeros(SEQ_SLOTS, HEADS, EXACT_LEN, 2 * dim, dtype=torch.uint8) for dim in (64, 96)
    ]
    return {
        "k": torch.randn(4, HEADS, 64),
        "v": torch.randn(4, HEADS, 96),
        "k_rows": storage(k_format),
        "v_rows": storage(v_format),
        "slots": Slots(
            torch.tensor([0, 34, -1, -1]), torch.tensor([-1, -1, 2, 17]), torch.full((4,), -1)
        ),
        "k_format": k_format,
        "v_format": v_format,
        "exact_k": exact[0],
        "exact_v": exact[1],
        "k_transform": Basis(torch.zeros(HEADS, 64)),
        "rope": angles(4, 64),
        "bad": torch.zeros(2, dtype=torch.int32),
    }


def at(**changes: torch.Tensor | list[int] | None) -> dict[str, Any]:
    new = {name: x if x is None else torch.as_tensor(x) for name, x in changes.items()}
    return {"slots": arguments()["slots"]._replace(**new)}


BYTES = torch.uint8
BAD = torch.zeros(2, dtype=torch.int32)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def byte(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BYTES)


def basis(heads: int, dim: int = 64) -> Basis:
    return Basis(zeros(heads, dim))


def both(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, byte(5, 2, 7, 100))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"k": zeros(4, 128)}, "ShapeError: both must be [num_tokens, num_kv_heads, head_dim]"),
    ({"v": zeros(3, 2, 96)}, "ShapeError: alike but for head_dim"),
    ({"k": zeros(4, 2, 64).double()}, "ConfigError: k is torch.float64: use"),
    ({"k": zeros(4, 2, 64).half()}, "ConfigError: v is torch.float32: use float16"),
    ({"k": zeros(4, 2, 128)[..., ::2]}, "ShapeError: the elements of a row must be contiguous"),
    ({"k": zeros(4, 2, 80)}, "ConfigError: int4-g4 has head_dim 64, not 80"),
    ({"v_format": "int5"}, "ConfigError: format 'int5' does not exist"),
    ({"k_format": "int8"}, "ShapeError: the 68 bytes of a row of int8"),
    ({"k_rows": byte(5, 7, 48)}, "ShapeError: it must be [num_pages"),
    ({"v_rows": byte(5, 2, 8, 100)}, "ShapeError: must be alike"),
    ({"k": zeros(4, 3, 64), "v": zeros(4, 3, 96)}, "ShapeError: have 3 KV heads, k_rows has 2"),
    (at(packed=torch.zeros(4).int()), "ConfigError: slots.packed is torch.int32: use int64"),
    (at(packed=[0]), "ShapeError: slots.packed is [1] with strides [1]: it must be [4]"),
    (
        at(exact=torch.full((8,), -1)[::2]),
        "ShapeError: slots.exact is [4] with strides [2]: it must be [4], contiguous",
    ),
    (at(evicted=None), "ConfigError: slots.evicted missing: exact_k, exact_v, slots.exact,"),
    ({"exact_k": None, "exact_v": None}, "ConfigError: exact_k and exact_v missing"),
    ({"slots": torch.arange(4)}, "ConfigError: slots.exact and slots.evicted missing"),
    ({"exact_format": "int8"}, "ConfigError: exact_format 'int8' does not exist"),
    ({"exact_v": byte(4, 2, 6, 192)}, "ShapeError: exact_v [4, 2, 6, 192] must be alike"),
    ({"k_transform": basis(1)}, "ShapeError: k_transform.offset is [1, 64]"),
    ({"v_transform": basis(2)}, "ShapeError: v_transform.offset is [2, 64]"),
    ({"rope": angles(4, 66)}, "ShapeError: rotary_dim at most the head_dim 64 of K"),
    ({"rope": angles(5, 64)}, "ShapeError: rope.cos is [5, 32] with strides [32, 1]: it must be"),
    ({"bad": BAD[:1]}, "ShapeError: bad is [1]"),
    ({"bad": zeros(2)}, "ConfigError: bad is torch.float32: use int32"),
    ({"bad": BAD.to("meta")}, "DeviceError: k is on cpu, bad on meta"),
    ({"backend": "numba"}, "ConfigError: use cpu, cuda or reference"),
    ({"backend": "cuda"}, "DeviceError: backend 'cuda' takes CUDA tensors, not cpu"),
    (both("k_rows", "v_rows"), "ConfigError: k_rows and v_rows are one tensor"),
    (both("exact_k", "exact_v"), "ConfigError: exact_k and exact_v are one tensor"),
    ({"rope": tuple(angles(4, 64))[:2]}, "ConfigError: rope is of type tuple: give Rope"),
    ({"k_transform": True}, "ConfigError: k_transform is of type bool: give a Basis"),
    ({"slots": [0, 1, 2, 3]}, "ConfigError: slots is of type list: give a tensor"),
    ({"bad": [0, 0]}, "ConfigError: bad is of type list: give a tensor"),
    ({"k_rows": None}, "ConfigError: k_rows is of type NoneType: give a tensor"),
    (at(packed=[0, 35, -1, -1]), "ShapeError: slots.packed[1] is 35: there are slots 0 to 3"),
    (at(exact=[-1, -1, 18, 0]), "ShapeError: slots.exact[2] is 18: there are slots 0 to 17"),
    (at(evicted=[-1, -1, -1, 99]), "ShapeError: slots.evicted[3] is 99: there are slots 0 to"),
    (at(packed=[9, 9, -1, -1]), "ShapeError: slot 9 is given twice in slots.packed (places 0"),
    (at(exact=[-1, 3, 2, 3]), "ShapeError: slot 3 is given twice"),
    (at(evicted=[-1, -1, 34, -1]), "ShapeError: slot 34 is given twice in slots.packed and "),
    (
        at(evicted=[-1, 5, -1, -1]),
        "ShapeError: slots.evicted[1] is 5, but slots.exact[1] is -1: give the exact slot",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    changes: dict[str, Any], text: str
) -> None:
    call = arguments() | changes
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor) and not x.is_meta]
    before = [x.clone() for x in tensors]
    with refused(text):
        append_rows(**call)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)


def test_the_call_that_the_refusals_change_is_right() -> None:
    append_rows(**arguments())
    packed_too = at(packed=[0, 34, 99, 33], evicted=[-1, -1, 32, -1])  # 99 is ignored
    append_rows(**arguments() | packed_too)


INT8 = RowFormat.parse("int8", 64)
ROWS, SLOTS = storage(INT8), torch.arange(4)
READ: dict[str, Any] = {"rows": ROWS, "fmt": INT8, "slots": SLOTS, "dtype": torch.float16}
NOT_THERE: list[tuple[dict[str, Any], str]] = [
    ({"fmt": 8}, "ConfigError: the format is 8: give"),
    ({"fmt": "int4-g8"}, "ShapeError: bytes of a row of"),
    ({"slots": [0]}, "ConfigError: slots is of type list"),
    ({"rows": ROWS[0]}, "ShapeError: must be [num_pages"),
    ({"slots": SLOTS[None]}, "ShapeError: [num_tokens]"),
    ({"rows": ROWS[..., 1:]}, "ShapeError: 68 bytes"),
    ({"slots": SLOTS.int()}, "ConfigError: slots is torch.int32: use int64"),
    ({"dtype": torch.int8}, "ConfigError: dtype torch.int8"),
    ({"slots": SLOTS + 32}, "ShapeError: there are slots 0 to 34"),
    ({"out": torch.empty(4, 2, 64)}, "ConfigError: out is torch.float32, dtype torch.float16"),
    ({"out": torch.empty(4, 2, 80).half()}, "ShapeError: it must be [4, 2, 64], contiguous"),
    ({"rows": ROWS.to("meta"), "slots": SLOTS.to("meta")}, "DeviceError: no kernel serves meta"),
]


@pytest.mark.parametrize(("changes", "text"), NOT_THERE, ids=[text for _, text in NOT_THERE])
def test_dequantizing_what_is_not_there_is_refused(changes: dict[str, Any], text: str) -> None:
    with refused(text):
        dequantize_pages(**READ | changes)


def test_values_on_a_gpu_are_read_in_debug_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.zeros(1, device="meta")
    monkeypatch.setattr(debug, "enabled", False)
    assert debug.may_read(torch.zeros(1)) and not debug.may_read(elsewhere)
    monkeypatch.setattr(debug, "enabled", True)
    assert debug.may_read(torch.zeros(1)) and debug.may_read(elsewhere)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Launches on CUDA, which take place nowhere: arguments and their check."""
    found: list[tuple[Any, Any]] = []

    def launch(*args: Any, check: Any = None, **options: Any) -> None:
        found.append((args, check))

    for module, launcher in ((append_ops, "_append_cuda"), (rows_at, "_dequantize_cuda")):
        monkeypatch.setattr(module, "kernels_for", lambda *_: "cuda")
        monkeypatch.setattr(module, launcher, lambda: launch)
    monkeypatch.setattr(debug, "enabled", False)
    return found


def test_on_cuda_the_launcher_decides_whether_shapes_are_checked(launches: list[Any]) -> None:
    append_rows(**arguments())
    (call,), check = launches.pop()
    assert isinstance(call, AppendCall)
    check()
    append_rows(**arguments() | at(packed=[0]))
    with pytest.raises(ShapeError, match=r"slots.packed is \[1\]"):
        launches.pop()[1]()
    fmt = RowFormat.parse("int8", 64)
    dequantize_pages(storage(fmt), fmt, torch.arange(4).int(), torch.float16)
    with pytest.raises(ConfigError, match=r"slots is torch\.int32"):
        launches.pop()[1]()


def test_in_debug_mode_values_are_read_before_a_launch(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "enabled", True)
    fmt = RowFormat.parse("int8", 64)
    with pytest.raises(ShapeError, match="slot 9 is given twice"):
        append_rows(**arguments() | at(packed=[9, 9, -1, -1]))
    with pytest.raises(ShapeError, match=r"slots\[1\] is 35: there are slots 0 to 34"):
        dequantize_pages(storage(fmt), fmt, torch.tensor([0, 35]), torch.float16)
    assert not launches
    append_rows(**arguments())
    dequantize_pages(storage(fmt), fmt, torch.tensor([0, 34]), torch.float16)
    assert [check for _, check in launches] == [None, None], "they are checked already"


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["k_rows", "v_rows", "exact_k", "exact_v"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_that_share_memory_are_refused(axis: int, name: str, backend: str) -> None:
    call = arguments()
    whole = call[name]
    shape = list(whole.shape)
    shape[axis] = 1
    call[name] = torch.zeros(shape, dtype=BYTES).expand_as(whole)
    with pytest.raises(ShapeError, match=f"{name} has strides .* its rows share memory"):
        append_rows(**call, backend=backend)
    sliding = torch.zeros(whole.numel(), dtype=BYTES)
    _, heads, page_size, size = whole.shape
    step = size - 1  # rows begin before others end, by a byte
    strides = [page_size * heads * step, page_size * step, step, 1]
    call[name] = sliding.as_strided(whole.shape, strides)
    with pytest.raises(ShapeError, match="its rows share memory"):
        append_rows(**call, backend=backend)
    assert not any(bool(call[rows].any()) for rows in ("k_rows", "v_rows", "exact_k", "exact_v"))


@pytest.mark.parametrize("names", [("k_rows", "v_rows"), ("exact_k", "exact_v")])
def test_k_and_v_that_overlap_are_refused(names: tuple[str, str]) -> None:
    call = arguments() | {"v": torch.randn(4, HEADS, 64), "v_format": "int4-g4"}
    whole = call[names[0]]
    seq_slots = call["exact_k"].shape
    for name, shape in (("v_rows", call["k_rows"].shape), ("exact_v", seq_slots)):
        call[name] = torch.zeros(shape, dtype=BYTES)
    memory = torch.zeros(2 * whole.numel(), dtype=BYTES)
    call[names[0]] = memory[: whole.numel()].view(whole.shape)
    call[names[1]] = memory[whole.shape[-1] :][: whole.numel()].view(whole.shape)  # a row further
    with pytest.raises(ConfigError, match=f"{names[0]} and {names[1]} share memory"):
        append_rows(**call)
    assert not memory.any()


def test_k_and_v_of_one_pool_are_apart() -> None:
    """Pages that hold K and V in turn, whose bytes lie between one another."""
    call = arguments() | {"v": torch.randn(4, HEADS, 64), "v_format": "int4-g4"}
    call["exact_v"] = torch.zeros_like(call["exact_k"])
    expected = {name: call[name].clone() for name in ("k_rows", "v_rows")}
    expected["v_rows"] = torch.zeros_like(call["k_rows"])
    for axis in range(4):
        pool = torch.zeros(2, *call["k_rows"].shape, dtype=BYTES).movedim(0, axis).contiguous()
        k_rows, v_rows = pool.unbind(axis)
        append_rows(**call | {"k_rows": k_rows, "v_rows": v_rows})
        append_rows(**call | expected)
        assert torch.equal(k_rows, expected["k_rows"]) and torch.equal(v_rows, expected["v_rows"])


def test_what_was_made_in_inference_mode_is_refused_outside_of_it() -> None:
    for name in ("k_rows", "exact_v", "bad"):
        call = arguments()
        with torch.inference_mode():
            call[name] = call[name].clone()
        for backend in ("cpu", "reference"):
            with pytest.raises(ConfigError, match=r"made in torch.inference_mode\(\), outside"):
                append_rows(**call, backend=backend)
        with torch.inference_mode():
            append_rows(**call)
