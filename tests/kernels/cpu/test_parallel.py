"""Kernels in forked processes, and in the threads of the caller."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvquant import RowFormat, decode_attention, quantize_rows
from kvquant.kernels.cpu import parallel
from kvquant.kernels.cpu.compile import compile_kernel
from kvquant.kernels.cpu.simd import argument, store_int

FORMAT = RowFormat.parse("int4-g4", 128)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_and_gives_the_same() -> None:
    rows = quantize_rows(torch.randn(2, 8, 4096, 128), FORMAT)
    q = torch.randn(2, 32, 128)
    lens = torch.tensor([4096, 4000], dtype=torch.int32)

    def attend() -> torch.Tensor:
        return decode_attention(q, rows, rows, lens, k_format=FORMAT, v_format=FORMAT)

    expected = attend()
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that hangs fails
        os._exit(0 if torch.equal(attend(), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"


def test_work_is_shared_by_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runtimes of OpenMP in a process wait on the same cores, and each delays the other."""

    def note(args, item):  # type: ignore[no-untyped-def]
        store_int(argument(args, 0) + 8 * item, item + 1)

    items, kernel = 1000, compile_kernel(note)
    before, mine = torch.get_num_threads(), threading.get_native_id()
    tasks = Path("/proc/self/task")
    torch.set_num_threads(3)
    try:
        torch.ones(1 << 18).add(1)  # torch has its threads now
        others = {*os.listdir(tasks)}
        for _ in range(3):
            found = np.zeros(items, np.int64)
            parallel.run(kernel, np.array([found.ctypes.data]), items)
            assert (found == np.arange(1, items + 1)).all()
        assert {*os.listdir(tasks)} == others and str(mine) in others
        assert parallel.team()[:1] == (3,) and parallel.team()[1] != parallel.ALONE
        monkeypatch.setattr(parallel, "_forks", [1])
        assert parallel.team() == (3, parallel.ALONE, 0)
    finally:
        torch.set_num_threads(before)


def test_a_torch_without_openmp_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    with pytest.warns(RuntimeWarning, match="no GOMP_parallel: kvquant's CPU kernels run in one"):
        assert parallel._find_team.__wrapped__()[0] == parallel.ALONE
