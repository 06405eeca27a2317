"""`pytest --jitter SEED`: matrix products as another processor would round them.

Libraries add up products in an order that depends on the processor (AMX, AVX-512, AVX2) and on the
shapes. So last bits differ between machines, and on one machine between calls of unlike shapes.
Here the results of torch's products, convolutions and fused attention on the CPU move by as much:
one element in 16 by one unit in the last place where results have 16 bits, and every element by up
to 3e-7 of its row's root mean square where they are float32. float64 is left alone: it is the
reference.

The movement depends on the operator, its shapes and the seed alone, so a call gives the same result
each time, as on a real machine. A test that fails with a seed has a limit fitted to one processor,
or compares what two machines need not agree on.

torch's CPU kernels themselves are replaced, so every way to a product is covered: `@`, linear,
einsum, SDPA, calls of torch.compile's graphs (tests/test_jitter.py). Not covered are the sums that
inductor writes itself (a matrix times a vector), numba's kernels, and processes that a test starts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

FLOAT32 = 3e-7  # of the root mean square of a row
SUMS = ("addmm", "addmv", "baddbmm", "addbmm")  # of a tensor and a product
PRODUCTS = ("mm", "bmm", "mv", "dot", *SUMS, "_addmm_activation")
IN_PLACE = tuple(f"{name}_" for name in SUMS)
WITH_OUT = tuple(f"{name}.out" for name in PRODUCTS)
OTHERS = ("convolution", "_scaled_dot_product_flash_attention_for_cpu")


def replace_kernels(seed: int) -> torch.library.Library:
    """Let products move as this seed says, while what is returned lives.

    Example:
        >>> import torch
        >>> ones = torch.ones(2, 64)
        >>> exact = ones @ ones.T
        >>> library = replace_kernels(seed=5)
        >>> moved = ones @ ones.T
        >>> library._destroy()
        >>> bool((moved != exact).any()), bool((moved - exact).abs().max() < 64 * 1e-6)
        (True, True)
    """
    library = torch.library.Library("aten", "IMPL")
    for name in (*PRODUCTS, *IN_PLACE, *WITH_OUT, *OTHERS):
        _replace(library, name, seed)
    return library


def _replace(library: torch.library.Library, name: str, seed: int) -> None:
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *args: Any, **options: Any) -> Any:
        shapes = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]
        result = original.call_boxed(keys, *args, **options)
        moved = result[0] if isinstance(result, Sequence) else result
        exact = _is_exact(*args) if name in ("mm", "bmm") else None
        _move(moved, f"{seed} {name} {shapes}", exact)
        return result

    library.impl(name, kernel, "CPU", with_keyset=True)


def _is_exact(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Whether every sum has one product at most, as of a permutation: no order changes that.

    A tensor, as tests note who reads one.
    """
    return ((right != 0).sum(-2) <= 1).all() | ((left != 0).sum(-1) <= 1).all()


def _move(result: torch.Tensor, key: str, exact: torch.Tensor | None) -> None:
    """Move the last bits of a result, in place, unless it is exact."""
    if result.dtype == torch.float32:
        rms = result.norm(dim=-1, keepdim=True) / result.shape[-1] ** 0.5 if result.ndim else result
        moved = result + _pattern(key, result.shape, result.dtype) * rms
    elif result.dtype in (torch.bfloat16, torch.float16):
        moved = (result.float() * _pattern(key, result.shape, result.dtype)).to(result.dtype)
    else:
        return
    stays = ~moved.isfinite() if exact is None else ~moved.isfinite() | exact
    result.copy_(torch.where(stays, result, moved))


@lru_cache(maxsize=1024)
def _pattern(key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Of float32 results what is added, in root mean squares; of others a factor. (float32.)"""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(key.encode()))
    if dtype == torch.float32:
        return (torch.rand(shape, generator=generator) * 2 - 1) * FLOAT32
    choice = torch.randint(0, 32, shape, generator=generator)
    # 3/4 eps is between 3/4 and 3/2 units in the last place, which rounds to one
    return 1 + 0.75 * torch.finfo(dtype).eps * ((choice == 0).float() - (choice == 1).float())
