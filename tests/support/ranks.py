"""Run a script as the ranks of torch.distributed on this machine's CPU, over a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, world: int, folder: Path, *args: object) -> list[str]:
    """Run `python script FILE RANK WORLD_SIZE *args` for each rank.

    Args:
        script: prints what is returned; a rank that fails is an AssertionError with its errors.
        world: ranks.
        folder: where the file is, in which they meet.

    Returns:
        What each rank has printed.
    """
    command = [sys.executable, str(script), str(folder / "meeting")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env["WORLD_SIZE"] = str(world)  # as torchrun does
    env["CUDA_VISIBLE_DEVICES"] = ""  # transformers' tp_plan takes GPUs where there are any
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), *map(str, args)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    printed = []
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=300)
            assert rank.returncode == 0, error
            printed.append(out)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return printed
