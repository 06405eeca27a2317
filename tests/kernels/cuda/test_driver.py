"""The driver's errors, threads, streams and CUDA graphs: without a GPU, and on one (-m gpu)."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attend import launch_attention
from fake_cuda import FakeDriver, loaded_specs, make_query, make_segment, unpack
from relative_l2 import relative_l2
from threads import run_in_threads

from kvquant import RowFormat, decode_attention, quantize_rows, reference_attention
from kvquant.errors import DeviceError, UnsupportedError
from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.runtime import driver, workspace


def test_the_bandwidth_of_a_gpu_is_told_by_its_driver(cuda: FakeDriver) -> None:
    assert driver.peak_bandwidth(0) == pytest.approx(4814, abs=1)
    cuda.fails["cuDeviceGetAttribute"] = [0, 1]
    assert driver.peak_bandwidth(0) == 0


def test_threads_do_not_mix_their_arguments(cuda: FakeDriver) -> None:
    segment = make_segment()
    queries = {i: make_query() for i in range(1, 9)}

    def work(i: int) -> None:
        for _ in range(200):
            launch_attention(queries[i], [segment], float(i), 1, False)

    run_in_threads(work, queries)
    assert len(cuda.launched) == 200 * len(queries)
    for note in cuda.launched:
        common, _ = unpack(loaded_specs()[-1], note.arguments)
        scale = round(common["score_scale"] / launch.LOG2_E)
        assert common["q"] == queries[scale].data_ptr()


def test_streams_have_workspaces_that_grow(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = workspace.Workspaces(torch.device("cpu"))
    first = spaces.take(1, 100, 1000)
    assert first.counters.dtype == torch.int32 and not first.counters.any()
    assert spaces.take(1, 50, 10) is first
    assert spaces.take(2, 50, 10) is not first
    larger = spaces.take(1, 200, 10)
    assert (larger.counters.numel(), larger.partial.numel()) == (200, 1000)
    assert spaces.take(1, 100, 1000) is larger
    assert larger.counters_address == larger.counters.data_ptr()


def test_captured_launches_have_counters_of_their_own(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = workspace.Workspaces(torch.device("cpu"))
    spaces.take(1, 10, 10)
    assert spaces._slab is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    places = [spaces.take(1, 100, 10).counters_address for _ in range(3)]
    first = spaces._slab.data_ptr()
    assert places == [first, first + 400, first + 800]
    rest = spaces.take(1, workspace.SLAB - 299, 10)  # more than is left
    assert not rest.counters.any()
    assert rest.counters.untyped_storage().data_ptr() != spaces._slab.untyped_storage().data_ptr()
    assert not workspace.Workspaces(torch.device("cpu")).take(1, 10, 10).counters.any()


def test_large_shared_memory_is_asked_for(cuda: FakeDriver) -> None:
    driver.Kernel(b"", "f", 0, threads=32, shared=48 << 10)
    assert "cuFuncSetAttribute" not in cuda.calls
    driver.Kernel(b"", "f", 0, threads=32, shared=(48 << 10) + 1)
    assert "cuFuncSetAttribute" in cuda.calls
    # loaded in the device's context, outside a capture that may be going on
    assert cuda.calls.count("cuCtxPushCurrent_v2") == cuda.calls.count("cuCtxPopCurrent_v2") == 2
    assert cuda.calls.count("cuThreadExchangeStreamCaptureMode") == 4


def test_a_driver_too_old_for_the_code_is_told(cuda: FakeDriver) -> None:
    cuda.fails["cuModuleLoadData"] = [222]
    with pytest.raises(UnsupportedError, match=r"for CUDA 12.4, .*numba-cuda\[cu12\]"):
        launch_attention(make_query(), [make_segment()], 1.0, None)
    assert cuda.calls.count("cuCtxPopCurrent_v2") == 1
    launch_attention(make_query(), [make_segment()], 1.0, None)  # the next one may work
    assert len(cuda.launched) == 1


def test_a_refused_launch_is_told(cuda: FakeDriver) -> None:
    cuda.fails["cuLaunchKernelEx"] = [700]
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_FAKE .*CUDA_LAUNCH_BLOCKING=1"):
        launch_attention(make_query(), [make_segment()], 1.0, None)


def test_a_thread_without_a_context_gets_one(cuda: FakeDriver) -> None:
    cuda.fails["cuLaunchKernelEx"] = [driver.INVALID_CONTEXT]
    launch_attention(make_query(), [make_segment()], 1.0, None)
    assert cuda.calls[-3:] == ["cuLaunchKernelEx", "cuCtxSetCurrent", "cuLaunchKernelEx"]
    assert len(cuda.launched) == 1


def test_launches_of_a_stream_share_what_they_are_launched_with(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MOST_CONFIGS", 4)
    kernel = driver.Kernel(b"", "f", 0, threads=32, shared=100)
    launcher = driver.Launcher(kernel, (3, 2, 1), "=Q4s4x")
    streams = [0, 5, 0, 6, 7, 8, 9, 5]
    for stream in streams:
        launcher(stream, [stream + 1, b"abcd"])
        assert len(launcher._configs) <= 4
    assert [note.stream for note in cuda.launched] == streams
    assert {note[:3] for note in cuda.launched} == {((3, 2, 1), (32, 1, 1), 100)}
    assert cuda.launched[1].arguments == (6).to_bytes(8, "little") + b"abcd" + bytes(4)


def test_a_driver_without_a_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(cuInit=lambda flags: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    with pytest.raises(UnsupportedError, match="older than CUDA 12"):
        driver._library.__wrapped__()


def test_a_machine_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match="no NVIDIA driver is installed"):
        driver._library.__wrapped__()


class Call:
    """A call on a GPU and what it should give."""

    def __init__(self, batch: int = 4, seq_len: int = 4096, device: str = "cuda") -> None:
        fmt = RowFormat.parse("int4-g4", 128)
        k, v = torch.randn(2, batch, 2, seq_len, 128, device=device)
        self.q = torch.randn(batch, 16, 128, device=device, dtype=torch.bfloat16)
        self.rows = quantize_rows(k, fmt), quantize_rows(v, fmt)
        self.lens = torch.full((batch,), seq_len, dtype=torch.int32, device=device)
        self.formats: dict[str, Any] = {"k_format": fmt, "v_format": fmt}
        self.expected = reference_attention(self.q, *self.rows, self.lens, **self.formats)

    def __call__(self) -> torch.Tensor:
        out = decode_attention(self.q, *self.rows, self.lens, **self.formats)
        assert isinstance(out, torch.Tensor)
        return out


@pytest.mark.gpu
def test_graphs_captured_on_one_stream_replay_side_by_side() -> None:
    calls = [Call(), Call()]
    graphs = [torch.cuda.CUDAGraph() for _ in calls]
    outs = []
    for call, graph in zip(calls, graphs, strict=True):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outs.append([call() for _ in range(20)][-1])
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for call, out in zip(calls, outs, strict=True):
        assert relative_l2(out, call.expected) <= 3e-3


@pytest.mark.gpu
def test_new_threads_and_streams_at_once() -> None:
    calls = [Call(batch) for batch in (1, 2, 3, 4)]
    torch.cuda.synchronize()
    outs: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        if i % 2:  # the others keep the default stream
            with torch.cuda.stream(torch.cuda.Stream()):
                outs[i] = [calls[i]() for _ in range(50)][-1]
        else:
            outs[i] = [calls[i]() for _ in range(50)][-1]

    run_in_threads(work, range(len(calls)))
    torch.cuda.synchronize()
    for i, call in enumerate(calls):
        assert relative_l2(outs[i], call.expected) <= 3e-3


@pytest.mark.gpu
def test_a_cached_launch_on_other_devices_is_refused() -> None:
    call = Call()
    call()
    rows = (*call.rows, call.lens)
    for i in range(3):
        mixed = [tensor.cpu() if i == j else tensor for j, tensor in enumerate(rows)]
        with pytest.raises(DeviceError, match=r"q is on cuda:0, rows or lengths on cpu"):
            decode_attention(call.q, *mixed, **call.formats)


@pytest.mark.gpu(2)
def test_tensors_on_another_gpu() -> None:
    call = Call(device="cuda:1")
    out = call()
    assert torch.cuda.current_device() == 0
    assert relative_l2(out, call.expected) <= 3e-3
