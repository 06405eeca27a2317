"""Run a script as the ranks of torch.distributed on this machine, over a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(
    script: Path, world: int, folder: Path, *args: object, device: str = "cpu"
) -> list[str]:
    """Run `python script DEVICE FILE RANK WORLD_SIZE *args` for each rank.

    Args:
        script: prints what is returned; a rank that fails is an AssertionError with its errors.
        world: ranks.
        folder: where the file is, in which they meet.
        device: "cpu", or "cuda": a GPU for each.

    Returns:
        What each rank has printed.
    """
    command = [sys.executable, str(script), device, str(folder / "meeting")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env["WORLD_SIZE"] = str(world)  # as torchrun does
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # transformers' tp_plan takes GPUs where there are any
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), *map(str, args)],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
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


def join(device: str, file: str, rank: int, world: int) -> torch.device:
    """Meet the other ranks, by gloo or by NCCL, and make the rank's device torch's default."""
    torch.set_num_threads(1)
    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own)
        torch.set_default_device(own)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    return own
