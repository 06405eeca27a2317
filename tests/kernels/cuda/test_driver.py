"""The driver's errors, threads, streams and CUDA graphs: without a GPU, and on one (-m gpu)."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from attend import launch_attention
from fake_cuda import FakeDriver, loaded_specs, make_query, make_segment, unpack
from threads import run_in_threads

from kvquant import RowFormat, decode_attention, quantize_rows
from kvquant.errors import DeviceError, UnsupportedError
from kvquant.kernels.cuda.decode import arrange
from kvquant.kernels.cuda.runtime import driver


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
        scale = round(common["score_scale"] / arrange.LOG2_E)
        assert common["q"] == queries[scale].data_ptr()


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


@pytest.mark.gpu
def test_a_cached_launch_on_other_devices_is_refused() -> None:
    fmt = RowFormat.parse("int4-g4", 128)
    rows = quantize_rows(torch.randn(4, 2, 100, 128, device="cuda"), fmt)
    given = rows, rows.clone(), torch.full((4,), 100, dtype=torch.int32, device="cuda")
    q = torch.randn(4, 16, 128, device="cuda", dtype=torch.bfloat16)
    decode_attention(q, *given, k_format=fmt, v_format=fmt)
    for i, name in enumerate(("k_rows", "v_rows", "seq_lens")):
        mixed = [tensor.cpu() if i == j else tensor for j, tensor in enumerate(given)]
        with pytest.raises(DeviceError, match=rf"q is on cuda:0, {name} on cpu"):
            decode_attention(q, *mixed, k_format=fmt, v_format=fmt)
