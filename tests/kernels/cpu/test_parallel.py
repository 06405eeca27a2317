"""Kernels in forked processes, and in the threads of the caller."""

from __future__ import annotations

import contextlib
import os
import signal

import numba
import numpy as np
import pytest
import torch

from kvquant import RowFormat, decode_attention, quantize_rows
from kvquant.kernels.cpu import parallel

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


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_number_of_threads_stays(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's is for the caller's own functions, torch's is what kernels take."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba has one thread")
    used = []

    def run_parallel(kernel: int, arguments: object, items: int, threads: int) -> None:
        used.append((numba.get_num_threads(), threads))
        if fails:
            raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "_run_parallel", run_parallel)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(parallel, "_has_run_parallel", False)
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
            parallel.run(0, np.zeros(1, np.int64), 9)
        assert used == [(2, 2)]
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(before)
