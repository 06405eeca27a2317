"""One of two ranks that gather moments: python moment_ranks.py RANK MEETING_FILE RESULT."""

from __future__ import annotations

import sys

import torch

from kvquant.calibration.moments import Moments

SCALE = 0.125


def sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys of which some are far off zero, and values."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 4, 40, 64), torch.randn(3, 2, 40, 64), torch.randn(3, 2, 40, 64)
    return q, k * torch.linspace(0.1, 5, 64) + torch.linspace(-9, 9, 64), v


def main(rank: int, meeting: str, result: str) -> None:
    """Observe half of the tokens, then add everybody's sums."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2
    )
    found = Moments()
    q, k, v = (x.chunk(2, dim=2)[rank] for x in sample())
    found.observe(3, q, k, v, SCALE)
    found.all_reduce()
    torch.save(found.layers[3].tensors, result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
