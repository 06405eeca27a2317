"""Which bases are candidates for the rows of a KV head, and the one that is best in theory.

A row x is stored as x' = M^-1 (x - mean). If rounding errors are alike and independent in all
stored channels, their weighted size is proportional to

    tr(Mᵀ W M) · tr(M^-1 C M^-T)        W the weights of an error, C the covariance of the rows

W is the second moment of the queries for K, of the output projection for V. The least value is (sum
of the singular values)² of W^½ C^½ = U S Vᵀ, reached by M = W^-½ U S^½ R with any rotation R; one
with elements of one size, as a Hadamard matrix, makes all channels alike. The scale of M is free:
stored rows keep the variance that the rows have about their mean.

Rounding with feedback (kvquant/rows/quantize.py) makes of the first trace tr(sqrt(Mᵀ W M))² / dim,
for channels that a rotation has made alike (theorem 1 of https://arxiv.org/abs/2307.13304). With M
= W^-½ U S^a R the product is then mean(s^(2 - 2a)) · mean(s^a)², whose weighted exponents add up to
2: it is least if they are equal, at a = 2/3.
"""

from __future__ import annotations

import math

import torch

from kvquant.rows.basis import Basis
from kvquant.rows.quantize import feedback_matrix

from .moments import LayerMoments

RIDGE = 1e-3  # of the mean diagonal is added to moments: few tokens leave directions unseen
NOISE = 1e-12  # of the mean square of rows: what float32 leaves of rows that are all alike


def regularized(moment: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """A moment [heads, dim, dim], float64, plus a little identity (at least noise [heads])."""
    diagonal = moment.diagonal(dim1=-2, dim2=-1).mean(-1)
    tiny = torch.finfo(torch.float32).tiny
    ridge = (RIDGE * diagonal).clamp(min=tiny if noise is None else noise.clamp(min=tiny))
    ridge = ridge[:, None, None]
    return moment + ridge * torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)


def output_moment(weight: torch.Tensor | None, num_kv_heads: int, dim: int) -> torch.Tensor:
    """W of V's errors: the sum of W_oᵀ W_o over the query heads of each KV head.

    Args:
        weight: [hidden, num_q_heads * dim] of the output projection; None if unknown.
        num_kv_heads: KV heads.
        dim: channels of a value.

    Returns:
        [num_kv_heads, dim, dim], float64; the identity if weight is None.
    """
    if weight is None or weight.shape[1] % (num_kv_heads * dim):
        eye = torch.eye(dim, dtype=torch.float64, device="cpu")
        return eye.expand(num_kv_heads, dim, dim).clone()
    heads = weight.double().unflatten(1, (num_kv_heads, -1, dim))
    return torch.einsum("ohgd,ohge->hde", heads, heads)


def spreading(dim: int) -> torch.Tensor:
    """R of the module's docstring, [dim, dim], float64: orthonormal, elements of like size.

    Hadamard's matrix if dim is a power of two. Else Hartley's, (cos + sin)(2 pi i j / dim) /
    sqrt(dim): singular values are sorted, so blocks of Hadamard's would mix directions of like size
    only.
    """
    if dim & -dim == dim:
        hadamard = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        while len(hadamard) < dim:
            above = torch.cat([hadamard, hadamard], 1)
            hadamard = torch.cat([above, torch.cat([hadamard, -hadamard], 1)])
        return (hadamard * (1 / math.sqrt(dim))).double()
    place = torch.arange(dim, dtype=torch.float64, device="cpu")
    angles = (place[:, None] * place % dim) * (2 * math.pi / dim)
    return (angles.cos() + angles.sin()) / math.sqrt(dim)


def mixing(dim: int) -> torch.Tensor:
    """spreading with its rows in random order and of random signs, always the same ones.

    Errors of rows are seldom as independent as in theory, and V's are mostly smaller so.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (dim, 1), generator=generator, device="cpu") * 2 - 1
    order = torch.randperm(dim, generator=generator, device="cpu")
    return signs * spreading(dim)[order]


def optimal_matrix(
    weights: torch.Tensor,
    covariance: torch.Tensor,
    *,
    feedback: bool = False,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """M of the module's docstring, [heads, dim, dim], float64.

    Args:
        weights: [heads, dim, dim], float64: W.
        covariance: of the same shape: C.
        feedback: whether rows will be rounded with feedback.
        noise: [heads], float64: a channel's variance from rounding; none when None.
    """
    # W^½ C^½
    root = _power(regularized(weights), 0.5) @ _power(regularized(covariance, noise), 0.5)
    u, s, _ = torch.linalg.svd(root)
    inverse_root = _power(regularized(weights), -0.5)
    power = 2 / 3 if feedback else 1 / 2
    matrix = inverse_root @ (u * s.pow(power)[:, None]) @ spreading(s.shape[-1]).to(s.device)
    variance = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    stored = s.pow(2 - 2 * power).sum(-1)
    tiny = torch.finfo(torch.float32).tiny
    least = tiny if noise is None else (noise * covariance.shape[-1]).clamp(min=tiny)
    ratio = variance.clamp(min=least) / stored
    scaled: torch.Tensor = matrix * ratio.rsqrt()[:, None, None]
    return scaled


def candidates(
    moments: LayerMoments, weights: dict[str, torch.Tensor], side: str
) -> dict[str, Basis]:
    """The bases to compare for one side of a layer, by name; "+feedback" rounds with feedback."""
    mean, covariance = moments.mean(side), moments.covariance(side)
    offset = mean.float()
    noise = NOISE * (covariance.diagonal(dim1=-2, dim2=-1) + mean.square()).mean(-1)
    matrix = optimal_matrix(weights[side], covariance, noise=noise).float()
    fed_matrix = optimal_matrix(weights[side], covariance, feedback=True, noise=noise)
    dim = offset.shape[-1]
    mixed = fed_matrix @ (spreading(dim) @ mixing(dim)).to(mean.device)  # another R; Rᵀ is R
    nearest = {
        "plain": Basis(torch.zeros_like(offset)),
        "offset": Basis(offset),
        "matrix": Basis(offset, matrix),
    }
    fed = {
        "offset": nearest["offset"],
        "matrix": Basis(offset, fed_matrix.float()),
        "mixed": Basis(offset, mixed.float()),
    }
    return nearest | {
        f"{name}+feedback": with_feedback(basis, weights[side]) for name, basis in fed.items()
    }


def with_feedback(basis: Basis, weights: torch.Tensor) -> Basis:
    """The same basis, rounded with feedback against weights [heads, dim, dim] of the errors."""
    weights = regularized(weights)
    if basis.matrix is not None:
        matrix = basis.matrix.double()
        weights = matrix.mT @ weights @ matrix
    return Basis(basis.offset, basis.matrix, basis.clip, feedback_matrix(weights).float())


def _power(moment: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=torch.finfo(torch.float32).tiny)
    found: torch.Tensor = (vectors * values.pow(exponent)[:, None]) @ vectors.mT
    return found
