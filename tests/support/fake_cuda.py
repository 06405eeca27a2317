"""A CUDA driver that only takes notes, and calls for it: launches are tested without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from kvquant import RowFormat, debug
from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.runtime import driver, warmup, workspace
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.compile import Cubin, Report
from kvquant.kernels.cuda.runtime.spec import Spec, fields_of, layout_of
from kvquant.ops import append as append_ops
from kvquant.ops import attention, mla, rows_at, transform
from kvquant.ops import slots as slot_ops
from kvquant.rows.segment import Segment

empty_strided = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
STREAM = 0x7F00_1234_5678_9AB0
CPU = -1  # get_device() of a CPU tensor


class Launched(NamedTuple):
    """What a fake driver was asked to launch."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    arguments: bytes
    overlaps: bool = False


class FakeDriver:
    """libcuda.so.1 that loads anything and notes what it would launch."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.calls: list[str] = []
        self.fails: dict[str, list[int]] = {}  # name -> results of its next calls

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self.result(name)

    def result(self, name: str) -> int:
        self.calls.append(name)
        return self.fails[name].pop(0) if self.fails.get(name) else 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: None, extra: Any) -> int:
        error = self.result("cuLaunchKernelEx")
        assert parameters is None
        assert (extra[0], extra[2], extra[4]) == (1, 2, None)  # buffer, size, end; of cuda.h
        size = ctypes.c_size_t.from_address(extra[3]).value
        data = ctypes.string_at(extra[1], size)
        how = config._obj
        overlaps = False
        if how.num_attributes:
            attribute = driver.LaunchAttribute.from_address(how.attributes)
            assert (how.num_attributes, attribute.id, attribute.value[0]) == (1, 6, 1)  # of cuda.h
            overlaps = True
        note = Launched(
            tuple(how.grid), tuple(how.block), how.shared, how.stream or 0, data, overlaps
        )
        if not error:
            self.launched.append(note)
        return error

    def cuGetErrorName(self, error: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_FAKE"
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {36: 3_201_000, 37: 6016}[attribute]  # kHz and bits, of an H200
        return self.result("cuDeviceGetAttribute")

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12040
        return 0


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Let the CPU be an H200, on which kernels are launched by a fake driver."""
    fake = FakeDriver()
    facts = SimpleNamespace(
        name="NVIDIA H200",
        multi_processor_count=132,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
    )
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(driver, "_primary_context", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    cubin = Cubin("f", b"", Report(128, 0))
    monkeypatch.setattr(runtime, "load_cubin", lambda spec, arch: cubin)
    for name in ("_gpus", "_kernels", "_launches"):
        monkeypatch.setattr(runtime, name, {})
    for module in (runtime, launch):
        monkeypatch.setattr(module, "current_device", lambda: CPU)
        monkeypatch.setattr(module, "empty_strided", empty_strided)
        monkeypatch.setattr(module, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(launch, "_launches", {})
    monkeypatch.setattr(launch, "_measured_plans", lambda: ())
    monkeypatch.setattr(workspace, "_workspaces", {})
    return fake


def install_for_caches(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The same, for caches that lie on the CPU: values are not read, and CUDA appends."""
    fake = install(monkeypatch)
    monkeypatch.setattr(debug, "may_read", lambda values: False)
    for module in (append_ops, slot_ops):
        monkeypatch.setattr(module, "kernels_for", lambda *_: "cuda")
    return fake


def install_for_steps(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The same for whole steps: CUDA attends and dequantizes, too."""
    for module in (attention, mla, rows_at):
        monkeypatch.setattr(module, "kernels_for", lambda *_: "cuda")
    for module in (transform, mla):
        monkeypatch.setattr(
            module, "takes_one_launch", lambda x, backend: x.dtype in transform.DTYPES
        )
    return install_for_caches(monkeypatch)


def note_compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Let no kernel be there, and none be compiled; note those of each call that would."""
    found: list[list[Any]] = []

    def compile_all(specs: list[Any], arch: str, report: Callable[[Any], object]) -> None:
        found.append(list(specs))
        for spec in specs:
            report(spec)

    monkeypatch.setattr(warmup, "missing", lambda specs, arch: list(specs))
    monkeypatch.setattr(warmup, "compile_all", compile_all)
    monkeypatch.setattr(warmup, "_warm", set())
    return found


def note_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let another device be the current one, and note which ones are made current."""
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for module in (runtime, launch):
        monkeypatch.setattr(module, "current_device", lambda: 3)
    return entered


def make_segment(
    name: str = "int4-g4",
    capacity: int = 1000,
    *,
    batch: int = 2,
    heads: int = 2,
    head_dim: int = 128,
    starts: bool = False,
    page_size: int = 0,
) -> Segment:
    """Rows of zeros; with a page size, in a pool of pages and a block table."""
    k_name, _, v_name = name.partition("/")
    k, v = (RowFormat.parse(one, head_dim) for one in (k_name, v_name or k_name))
    lens = torch.full((batch,), capacity, dtype=torch.int32)
    table = None
    shape: tuple[int, ...] = (batch, heads, capacity)
    if page_size:
        pages = -(-capacity // page_size)
        table = torch.zeros(batch, pages, dtype=torch.int32)
        shape = (batch * pages, heads, page_size)
    k_rows, v_rows = (torch.zeros(*shape, fmt.row_bytes, dtype=torch.uint8) for fmt in (k, v))
    return Segment(k_rows, v_rows, lens, k, v, torch.zeros_like(lens) if starts else None, table)


def make_query(
    batch: int = 2, heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A query of zeros."""
    return torch.zeros(batch, heads, head_dim, dtype=dtype)


def arguments_of(spec: Spec, data: bytes) -> dict[str, Any]:
    """The arguments of a launch by name; those in a tuple by dotted names."""
    names = [name for name, _ in fields_of(spec.arguments)]
    return dict(zip(names, struct.unpack(layout_of(spec.arguments), data), strict=True))


def unpack(spec: DecodeSpec, data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The arguments of a decode kernel: the common ones, and those of each segment."""
    given = arguments_of(spec, data)
    parts = [(name.partition("."), value) for name, value in given.items()]
    common = {field: value for (of, _, field), value in parts if of == "common"}
    segments = []
    for segment in ("one", "two", "three")[: spec.segments]:
        segments.append({field: value for (of, _, field), value in parts if of == segment})
    return common, segments


def loaded_specs() -> list[Any]:
    """The kernels that were loaded, the last one last."""
    return [spec for spec, _ in runtime._kernels]


class OnCuda(torch.Tensor):
    """A tensor on the CPU that says that it is on CUDA."""

    is_cuda = True
