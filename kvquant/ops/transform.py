"""Rows and queries into a basis, outputs back out of it.

    torch.ops.kvquant.turn_rows    gives new rows

As a custom op of torch it is called inside torch.compile only, which takes it with fullgraph=True.
The meaning, which other devices and float32 take, is Basis.turn_query and Basis.restore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..errors import ConfigError, DeviceError, ShapeError
from ..rows.basis import Basis
from .dispatch import torch_op

TURN_ROWS = "(Tensor x, Tensor? matrix, Tensor? offset, Tensor? seq_lens) -> Tensor"
DTYPES = (torch.bfloat16, torch.float16)


def encode_rows(x: torch.Tensor, basis: Basis) -> torch.Tensor:
    """Change rows into what a basis stores: Basis.encode, on the CPU by a kernel where it can.

    Args:
        x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16.
        basis: of the rows.

    Returns:
        The same shape, float32; of both ways the same bits.
    """
    is_plain = basis.kind != "matrix" and x.shape[-1] % 16 == 0
    if not is_plain or not x.is_cpu or torch.compiler.is_compiling():
        return basis.encode(x)
    from ..kernels.cpu.transform import transform

    encoded: torch.Tensor = transform(x, basis.offset, basis.kind == "hadamard")
    return encoded


def takes_one_launch(x: torch.Tensor, backend: str | None) -> bool:
    """Whether rows are turned by turn_rows: 16 bit on CUDA, and no reference is asked for."""
    return x.is_cuda and x.dtype in DTYPES and backend != "reference"


def turn_rows(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Multiply rows by the matrix of their KV head and add its offset, in float32.

    Args:
        x: [batch, num_q_heads, head_dim], bfloat16 or float16, on CUDA.
        matrix: [num_kv_heads, head_dim, head_dim], float32, contiguous but for the first axis; a
            row is multiplied from the left. None for none, then there is an offset.
        offset: [num_kv_heads, head_dim], float32, contiguous; None for none.
        seq_lens: [batch or more], int32: rows of a sequence of length 0 become zeros, whatever they
            hold; None if there are none.
        check: raises unless the arguments fit one another; called only before calls that have not
            been seen; check_turn when None.

    Returns:
        The same shape and dtype, rounded once, contiguous.

    Raises:
        ShapeError, ConfigError, DeviceError: the arguments do not fit one another.
        UnsupportedError: the GPU is too old, or what is installed cannot do it.
        DeviceError: CUDA refuses the launch.
    """
    if torch.compiler.is_compiling():
        turned: torch.Tensor = turn_rows_op(x.detach(), matrix, offset, seq_lens)
        return turned
    return _launch(x, matrix, offset, seq_lens, check)


def check_turn(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
) -> None:
    """Raise unless turn_rows can take its arguments; the values in the tensors are not read."""
    if x.ndim != 3 or x.dtype not in DTYPES:
        raise ConfigError(
            f"x is {list(x.shape)} {x.dtype}: it must be [batch, num_q_heads, head_dim], bfloat16 "
            "or float16"
        )
    batch, num_heads, dim = x.shape
    first = offset if matrix is None else matrix
    if first is None:
        raise ConfigError("neither a matrix nor an offset is given: rows stay as they are")
    if dim % 8:
        raise ShapeError(f"head_dim {dim} is not supported: it must be a multiple of 8")
    heads = first.shape[0]
    if not heads or num_heads % heads:
        raise ShapeError(
            f"{num_heads} query heads do not fit the {heads} KV heads of the basis: their number "
            "must be a multiple"
        )
    for name, tensor, shape in (
        ("matrix", matrix, (heads, dim, dim)),
        ("offset", offset, (heads, dim)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != torch.float32:
            raise ShapeError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}: it must be {list(shape)}, float32"
            )
        if not (tensor if tensor is offset else tensor[0]).is_contiguous():
            raise ConfigError(f"the rows of {name} must be contiguous: call contiguous() first")
    if seq_lens is not None and (
        seq_lens.ndim != 1 or seq_lens.shape[0] < batch or seq_lens.dtype != torch.int32
    ):
        raise ShapeError(
            f"seq_lens is {list(seq_lens.shape)} {seq_lens.dtype}: it must be [{batch}] or longer, "
            "int32"
        )
    for tensor in (matrix, offset, seq_lens):
        if tensor is not None and tensor.device != x.device:
            raise DeviceError(f"x is on {x.device}, what turns it on {tensor.device}")


def _launch(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    check = check or functools.partial(check_turn, x, matrix, offset, seq_lens)
    return _launcher()(x, matrix, offset, seq_lens, check)


@functools.cache
def _launcher() -> Callable[..., torch.Tensor]:
    from ..kernels.cuda.affine.launch import turn_rows

    return turn_rows


def _fake(
    x: torch.Tensor,
    matrix: torch.Tensor | None,
    offset: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
) -> torch.Tensor:
    check_turn(x, matrix, offset, seq_lens)
    return x.new_empty(x.shape)


turn_rows_op = torch_op("turn_rows", TURN_ROWS, _launch, _fake)
