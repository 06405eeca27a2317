"""Kernels in several processes: forked ones, and those that compile at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvquant import RowFormat, decode_attention, quantize_rows

FORMAT = RowFormat.parse("int4-g4", 128)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_and_gives_the_same() -> None:
    rows = quantize_rows(torch.randn(2, 8, 4096, 128), FORMAT)
    q = torch.randn(2, 32, 128)
    lens = torch.tensor([4096, 4000], dtype=torch.int32)

    def attend() -> torch.Tensor:
        out = decode_attention(q, rows, rows, lens, k_format=FORMAT, v_format=FORMAT)
        assert isinstance(out, torch.Tensor)
        return out

    expected = attend()
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that hangs fails
        os._exit(0 if torch.equal(attend(), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}"


def test_every_kernel_has_files_of_its_own(tmp_path: Path) -> None:
    """Processes that compile at the same time must not take the same file for two kernels."""
    code = (
        "import torch, kvquant as k\n"
        "for name in ('int8', 'bf16'): k.quantize_rows(torch.ones(1, 1, 1, 80), "
        "k.RowFormat.parse(name, 80))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    indices, kernels = (list(tmp_path.rglob(f"rows.*.{kind}")) for kind in ("nbi", "nbc"))
    assert len(indices) == len(kernels) == 2
    assert len({path.name.split("-")[0] for path in kernels}) == 2
