"""Basis: what the rows of K or of V of one layer are stored as, and how attention undoes it.

    stored row      x' = M^-1 (x - offset)
    K    multiply queries:  q' = M^T q,  so that q'·k' = q·(k - offset) = q·k - q·offset
    V    multiply outputs:  sum_t p_t v_t = M (sum_t p_t v'_t) + offset,  as sum_t p_t = 1

Softmax does not see q·offset, which is the same for every token; a log-sum-exp gets it back. Both
are one small product per step. M is the identity or a matrix for each KV head. Products are
float32, also inside torch.autocast, without gradients.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from ..errors import ConfigError, ShapeError
from .arguments import check_readable, check_tensor
from .quantize import full_precision
from .rotation import Rope, apply_rope


class Basis:
    """How the rows of K or of V of one layer are transformed before they are stored.

    Args:
        offset: [num_kv_heads, head_dim], float32: subtracted from every row.
        matrix: [num_kv_heads, head_dim, head_dim], float32: M; None for the identity.
        clip: [num_kv_heads], float32: share of its range that each group keeps; None for all of it.
        feedback: [num_kv_heads, head_dim, head_dim], float32: see quantize.py; None for none.

    Attributes:
        encoding: what an append does to new rows.
        kind: "matrix", or "none" without one.
        is_identity: whether rows are stored as they come: no matrix, and an offset of zeros.
        transposed: [num_kv_heads, head_dim, head_dim], M^T, contiguous; None without a matrix.
        fp16_matrix, fp16_factor: M for fp16 queries on CUDA, and the factor of their scores.

    Raises:
        ConfigError: a value is not finite, or the matrix has no inverse.
        ShapeError: the tensors do not fit one another.

    Example:
        >>> import torch
        >>> from kvquant import Basis, RowFormat, append_rows, dequantize_pages
        >>> int8, slots = RowFormat.parse("int8", 64), torch.arange(3)
        >>> k, v = torch.randn(2, 3, 2, 64)  # three tokens of two KV heads
        >>> k_rows, v_rows = torch.zeros(2, 1, 2, 16, int8.row_bytes, dtype=torch.uint8)
        >>> basis = Basis(k.mean(0))
        >>> append_rows(k, v, k_rows, v_rows, slots, int8, int8, k_transform=basis)
        >>> stored = dequantize_pages(k_rows, int8, slots, torch.float32)
        >>> restored = basis.decode(stored.transpose(0, 1)[None])[0].transpose(0, 1)
        >>> bool((restored - k).abs().max() < 0.1)
        True
    """

    def __init__(
        self,
        offset: torch.Tensor,
        matrix: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
        feedback: torch.Tensor | None = None,
    ) -> None:
        check_readable(offset=offset)
        if offset.ndim != 2 or not offset.shape[1]:
            raise ShapeError(f"offset is {list(offset.shape)}: give [num_kv_heads, head_dim]")
        heads, dim = offset.shape
        square = (heads, dim, dim)
        _check("offset", offset, (heads, dim))
        _check("matrix", matrix, square)
        _check("feedback", feedback, square)
        self.kind = "none" if matrix is None else "matrix"
        self.offset = offset.detach().contiguous()
        self.clip = _checked_clip(clip, heads)
        self.matrix, self.feedback = (
            None if x is None else x.detach().contiguous() for x in (matrix, feedback)
        )
        self.transposed: torch.Tensor | None = None
        inverse: torch.Tensor | None = None
        if self.matrix is not None:
            inverse, failed = torch.linalg.inv_ex(self.matrix.cpu().double())
            inverse = inverse.mT.float().contiguous()
            if bool(failed.any()) or not bool(inverse.isfinite().all()):
                raise ConfigError("the matrix of a basis must have an inverse")
            inverse = inverse.to(self.matrix.device)
            self.transposed = self.matrix.mT.contiguous()
        # what an append does; it checks no values again
        has_offset = bool(offset.any())
        self.is_identity = self.matrix is None and not has_offset
        moved = self.offset if has_offset else None
        self.encoding = Encoding(moved, inverse, self.clip, self.feedback)
        self._set_fp16(offset.is_cuda)
        self._origin: Basis | None = None  # of which with_clip made this one

    def __repr__(self) -> str:
        heads, dim = self.offset.shape
        parts = [self.kind, f"{heads} KV heads of {dim}"]
        parts += ["clip"] * (self.clip is not None) + ["feedback"] * (self.feedback is not None)
        return f"Basis({', '.join(parts)})"

    def to(self, device: torch.device | str) -> Basis:
        """A copy on a device; all callers share it while one of them holds it."""
        device = torch.device(device)
        if device.type == "meta":  # where nothing can be looked at again
            return self._moved(device)
        with torch.inference_mode(False):  # the next caller may be outside of inference mode
            offset = self.offset.to(device)
            if offset is self.offset:  # "cuda" is the current one, "cuda:0"
                return self
            twins = _twins.setdefault(self, WeakValueDictionary())
            found = twins.get(offset.device)
            if found is None:
                if self._origin is None:
                    found = self._moved(offset.device)
                else:  # share the origin's copy there
                    clip = None if self.clip is None else self.clip.to(device)
                    found = self._origin.to(device).with_clip(clip)
                twins[offset.device] = found
            return found

    def _moved(self, device: torch.device) -> Basis:
        seen: dict[int, torch.Tensor] = {}

        def moved(x: object) -> object:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in seen:
                seen[id(x)] = x.to(device)
            return seen[id(x)]

        twin, on_cuda = copy.copy(self), device.type == "cuda"
        if self.matrix is not None and on_cuda != self.offset.is_cuda:
            twin._set_fp16(on_cuda)
        vars(twin).update({name: moved(x) for name, x in vars(twin).items()})
        twin.encoding = Encoding(*map(moved, self.encoding))  # type: ignore[arg-type]
        if twin._origin is not None:
            twin._origin = twin._origin._moved(device)
        return twin

    def _set_fp16(self, on_cuda: bool) -> None:
        self.fp16_matrix, self.fp16_factor = self.matrix, 1.0
        if self.matrix is not None and on_cuda:
            self.fp16_matrix, self.fp16_factor = for_fp16(self.matrix)

    def with_clip(self, clip: torch.Tensor | None) -> Basis:
        """A copy with other clip ratios."""
        twin = copy.copy(self)
        twin.clip = _checked_clip(clip, self.offset.shape[0])
        twin.encoding = self.encoding._replace(clip=twin.clip)
        twin._origin = self._origin or self
        return twin

    @property
    def fingerprint(self) -> str:
        """A hexadecimal digest; rows of one basis can be read in another of the same digest."""
        digest = hashlib.sha256(self.kind.encode())
        for tensor in (self.offset, self.matrix):
            if tensor is not None:
                digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Transform rows for storage.

        Args:
            x: [batch, num_kv_heads, tokens, head_dim], float32, bfloat16 or float16.

        Returns:
            The same shape, float32.
        """
        x = x.detach().float() - self.offset[:, None]
        with full_precision(x):
            inverse = self.encoding.matrix
            return x if inverse is None else x @ inverse

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Undo encode: [batch, num_kv_heads, tokens, head_dim], float32."""
        x = stored.float()
        if self.matrix is not None:
            with full_precision(x):
                x = x @ self.matrix.mT
        return x + self.offset[:, None]

    def transform_query(self, q: torch.Tensor) -> torch.Tensor:
        """M^T q of queries [..., num_q_heads, head_dim], in float32: fp16 may not hold it."""
        return q.float() if self.matrix is None else _per_head(q, self.matrix)

    def missing_score(self, q: torch.Tensor) -> torch.Tensor:
        """q·offset of queries [..., num_q_heads, head_dim]: [..., num_q_heads], float32."""
        rows: torch.Tensor = q.unflatten(-2, (len(self.offset), -1)) * self.offset[:, None]
        return rows.sum(-1).flatten(-2)

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """M out + offset of outputs [..., num_q_heads, head_dim], in float32."""
        if self.transposed is not None:
            return _per_head(out, self.transposed, self.offset)
        rows: torch.Tensor = out.unflatten(-2, (len(self.offset), -1)) + self.offset[:, None]
        return rows.flatten(-3, -2)


_twins: WeakKeyDictionary[Basis, WeakValueDictionary[torch.device, Basis]] = WeakKeyDictionary()


class Encoding(NamedTuple):
    """How an append transforms and rounds new rows; see Basis.encoding and transform_rows.

    Attributes:
        offset: [num_kv_heads, head_dim], float32, subtracted; None for none.
        matrix: [num_kv_heads, head_dim, head_dim], float32, the right factor then; None for
            none.
        clip, feedback: as in ops.quantize.quantize_calibrated.
    """

    offset: torch.Tensor | None = None
    matrix: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    feedback: torch.Tensor | None = None


class Queries(NamedTuple):
    """Queries [num_tokens, num_q_heads, head_dim], 16 bit on CUDA, for an append's launch."""

    x: torch.Tensor
    matrix: torch.Tensor


def transform_rows(
    x: torch.Tensor, encoding: Encoding | None, rope: Rope | None = None
) -> torch.Tensor:
    """Apply RoPE, offset and matrix to new rows, in float32; x itself if none applies.

    Every product, sum and difference is rounded to float32 by itself; kernels fuse no multiply-add,
    so all of them give the same bits. Only products with a matrix differ in the last places:
    torch's may depend on the number of rows, those of kernels/cuda/affine/launch.py do not.
    """
    if rope is not None:
        x = apply_rope(x, rope)
    if encoding is None:
        return x
    if encoding.offset is not None:
        x = x.float() - encoding.offset
    if encoding.matrix is not None:
        with full_precision(x):
            x = (x.float().transpose(0, 1) @ encoding.matrix).transpose(0, 1)
    return x


class LayerBasis(NamedTuple):
    """The bases of K and of V of one layer."""

    k: Basis
    v: Basis

    @property
    def is_identity(self) -> bool:
        return self.k.is_identity and self.v.is_identity

    def to(self, device: torch.device | str) -> LayerBasis:
        return LayerBasis(self.k.to(device), self.v.to(device))


def fingerprints(bases: Sequence[LayerBasis] | None) -> list[dict[str, str]]:
    """The fingerprints of each layer's K and V for a saved cache; an empty list without bases."""
    return [{"k": basis.k.fingerprint, "v": basis.v.fingerprint} for basis in bases or ()]


def _checked_clip(clip: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """The clip ratios of so many heads, checked."""
    _check("clip", clip, (heads,))
    if clip is None:
        return None
    if not bool((clip > 0).all()):
        raise ConfigError("the clip of a basis must be positive: a share of the range to keep")
    return clip.detach().contiguous()


def _check(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is None:
        return
    check_readable(**{name: tensor})
    check_tensor(name, tensor, [torch.float32], shape)
    if not bool(tensor.isfinite().all()):
        raise ConfigError(f"the {name} of a basis must be finite")


def for_fp16(matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The matrix scaled for fp16 queries, and the factor that undoes it on their scores.

    The divisor is the least power of two over the sums of a column's magnitudes. Only products
    below 2**-14 lose digits, in queries without large elements.
    """
    largest = float(matrix.abs().sum(-2).amax()) if matrix.numel() else 0.0
    if largest <= 1:
        return matrix, 1.0
    factor = 2.0 ** math.ceil(math.log2(largest))
    return matrix / factor, factor


def _per_head(
    x: torch.Tensor, matrices: torch.Tensor, offset: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., num_q_heads, D] times the matrix [num_kv_heads, D, E] of each KV head, float32."""
    batch, (heads, dim, width) = x.shape[:-2].numel(), matrices.shape
    ratio = x.shape[-2] // heads  # torch finds none for -1 where there is no query
    rows = x.float().reshape(batch, heads, ratio, dim).transpose(0, 1)
    rows = rows.reshape(heads, batch * ratio, dim)
    with full_precision(x):
        if offset is None:
            found = torch.bmm(rows, matrices)
        else:
            found = torch.baddbmm(offset[:, None], rows, matrices)
    found = found.view(heads, batch, ratio, width)
    return found.transpose(0, 1).reshape(*x.shape[:-1], width)
