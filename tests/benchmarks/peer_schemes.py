"""Other projects' ways to keep keys and values, written out: what attention would read from them.

`evaluate` takes a PeerCache as it takes a cache of kvquant's (kvquant/evaluation/decoding.py,
Simulated): the prompt's tokens between the first and the last ones are read as below, those in 16
bit, and so are all that are decoded behind the prompt. Bits are of an element of K and V, codes and
all scales; a last group or tile with fewer tokens is counted as a whole one.

    KIVI        arXiv 2402.02750 and its repository (quant/new_pack.py): K per channel in groups of
                tokens, V per token in groups of channels; scale and minimum in the model's fp16. 32
                is the group of its example.py, 128 that of utils/process_args.py.
                A real cache holds the keys of the group that is filling in 16 bit; here they are
                quantized as they stand
    TurboQuant  arXiv 2504.19874, its quantizer for the squared error: a random rotation, and the
                best scalar codebook for coordinates of a random direction; the norm in fp16, of
                what was read, too (vLLM's "nc"). K and V alike, in all layers. vLLM's form, which
                rounds V in another way, is in peer_caches.py
    OSCAR       arXiv 2605.17757 and its repository: K in the eigenvectors of the queries' second
                moment, V in those of values weighted by their scores, both times a Hadamard matrix;
                magnitudes above a quantile of the row are clipped (.96 of K, .92 of V), then 2 bits
                from the least to the greatest, fp16 pairs, one group a row. Its permutation moves
                elements between groups, of which there is one. One rotation for each KV head, not
                for each layer: better by OSCAR#20
    KVarN       arXiv 2606.03458 and its repository, K 4 bits and V 2 (its README's preset): a
                Hadamard rotation; tiles of 128 tokens, whose tokens and channels are scaled in turn
                to a standard deviation of 1; then from the least to the greatest, K per channel, V
                per token. Its files kvarn/config.py, ops/kvarn_store.py and
                ops/triton_kvarn_sinkhorn.py, read in a fork (ytwang13/KVarN-FP): all scales and
                minimums fp16; 8 passes (16 in the first release); the deviation divides by n - 1;
                scales of tokens and channels are at least e^-.3. The padding of its records at 256
                elements a head is not counted
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvquant.calibration.fidelity import with_window
from kvquant.hf.model import CachedModel

FP16 = 16
OSCAR_CLIP = {"k": 0.96, "v": 0.92}
TILE, ROUNDS = 128, 8  # of KVarN: tokens, and passes over both axes
STDS = 1e-3, 1e3
LOGS = -0.3, 10.0  # least and greatest of its scales, natural logarithms
Pair = tuple[torch.Tensor, torch.Tensor]
Read = Callable[[int, torch.Tensor, torch.Tensor], Pair]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last axis by Hadamard's matrix, in blocks of the largest power of two in it.

    In float32: butterflies of stride 1, 2, 4 and so on, then one product. It undoes itself.
    """
    rows = x.float()
    size, stride = x.shape[-1] & -x.shape[-1], 1
    while stride < size:
        lower, upper = rows.unflatten(-1, (-1, 2, stride)).unbind(-2)
        rows = torch.stack((lower + upper, lower - upper), -2).flatten(-3)
        stride *= 2
    return (rows * (1 / math.sqrt(size))).to(x.dtype)


@dataclass(frozen=True)
class PeerCache:
    """A cache of another project.

    Attributes:
        name: for tables.
        bits: of an element of K and V.
        read: gives, for a layer's K and V [batch, num_kv_heads, tokens, head_dim], float32, the
            values that they are stored as.
        sink_len, recent_len: tokens in 16 bit, as in KVCache.
    """

    name: str
    bits: float
    read: Read
    sink_len: int = 0
    recent_len: int = 0

    def __str__(self) -> str:
        return with_window(self.name, self.sink_len, self.recent_len)

    def apply(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """As read, in the dtype of the keys."""
        if not keys.shape[2]:
            return keys, values
        k, v = self.read(layer, keys.float(), values.float())
        return k.to(keys.dtype), v.to(values.dtype)


def rounded(x: torch.Tensor, bits: int, dim: int, kept: torch.dtype = torch.half) -> torch.Tensor:
    """Round the elements along an axis to 2^bits levels from their least to their greatest.

    The least one and the distance of levels are kept in fp16, or another dtype.
    """
    if not x.numel():
        return x
    least, greatest = x.aminmax(dim=dim, keepdim=True)
    most = 2**bits - 1
    least, scale = least.to(kept).to(x), ((greatest - least) / most).to(kept).to(x)
    steps = ((x - least) / torch.where(scale > 0, scale, 1)).round().clamp(0, most)
    found: torch.Tensor = steps * scale + least
    return found


def in_tiles(
    x: torch.Tensor, size: int, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Change [..., tokens, channels] by [..., tiles, size, channels]; the last may be shorter."""
    if not x.numel():
        return x
    whole = x.shape[-2] // size * size
    tiles = change(x[..., :whole, :].unflatten(-2, (-1, size))).flatten(-3, -2)
    rest = x[..., whole:, :]
    return torch.cat([tiles, change(rest[..., None, :, :])[..., 0, :, :]], dim=-2)


def kivi_keys(x: torch.Tensor, bits: int = 4, group: int = 32) -> torch.Tensor:
    """Quantize and dequantize [..., tokens, channels] per channel, by groups of tokens."""
    return in_tiles(x, group, partial(rounded, bits=bits, dim=-2))


def kivi_values(x: torch.Tensor, bits: int = 4, group: int = 32) -> torch.Tensor:
    """Quantize and dequantize [..., tokens, channels] per token, by groups of channels."""
    return rounded(x.unflatten(-1, (-1, min(group, x.shape[-1]))), bits, dim=-1).flatten(-2)


def kivi(bits: int, group: int, head_dim: int) -> PeerCache:
    """KIVI with groups of so many tokens of K, and channels of V."""

    def read(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        return kivi_keys(keys, bits, group), kivi_values(values, bits, group)

    parameters = 2 * FP16 / group + 2 * FP16 / min(group, head_dim)
    return PeerCache(f"KIVI-{bits}, groups of {group}", bits + parameters / 2, read)


def codebook(bits: int, dim: int) -> torch.Tensor:
    """The levels of least squared error for a coordinate of a random unit vector of so many.

    By Lloyd's and Max's rule on a fine grid: a level is the mean of what is nearest to it.
    """
    edge = min(1.0, 8 / math.sqrt(dim))  # beyond is nothing that counts
    grid = torch.linspace(-edge, edge, 20001, dtype=torch.float64, device="cpu")
    density = (1 - grid**2).clamp(min=0) ** ((dim - 3) / 2)
    share = (density.cumsum(0) / density.sum()).contiguous()
    count = 2**bits
    middles = (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count
    levels = grid[torch.searchsorted(share, middles).clamp(max=len(grid) - 1)]
    for _ in range(500):
        nearest = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        weights = torch.zeros_like(levels).index_add(0, nearest, density)
        levels = torch.zeros_like(levels).index_add(0, nearest, density * grid) / weights
    return levels


def from_codebook(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Rows as their norm, fp16, and the nearest level of each coordinate of their direction."""
    known, norm = levels.to(x.device), x.norm(dim=-1, keepdim=True)
    unit = x / torch.where(norm > 0, norm, 1)
    found = known[torch.bucketize(unit, (known[1:] + known[:-1]) / 2)]
    return torch.mul(norm.half().float(), found / found.norm(dim=-1, keepdim=True))


def turboquant(bits: int, head_dim: int) -> PeerCache:
    """TurboQuant with a rotation that is drawn once."""
    drawn = torch.randn(
        head_dim, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    rotation, levels = torch.linalg.qr(drawn)[0].float(), codebook(bits, head_dim).float()

    def read_side(x: torch.Tensor) -> torch.Tensor:
        turn = rotation.to(x.device)
        return torch.matmul(from_codebook(x @ turn, levels), turn.T)

    name = f"TurboQuant, {bits} bits"
    return PeerCache(name, bits + FP16 / head_dim, lambda _, k, v: (read_side(k), read_side(v)))


def oscar(model: CachedModel, windows: torch.Tensor, head_dim: int) -> PeerCache:
    """OSCAR-2, its rotations from a text.

    Args:
        model: is observed.
        windows: [windows, tokens], int64, of the text.
        head_dim: of the model.
    """
    rotations = oscar_rotations(model, windows)

    def read_side(side: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        turn = rotations[layer][side].to(x.device)
        y = x @ turn  # [batch, num_kv_heads, tokens, head_dim]
        place = math.ceil(OSCAR_CLIP[side] * y.shape[-1])
        most = y.abs().kthvalue(place, dim=-1, keepdim=True).values
        return rounded(y.clamp(-most, most), 2, dim=-1) @ turn.mT

    def read(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        return read_side("k", layer, keys), read_side("v", layer, values)

    return PeerCache("OSCAR-2", 2 + 2 * FP16 / head_dim, read)


def oscar_rotations(model: CachedModel, windows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The rotations of K and V of each layer, [num_kv_heads, head_dim, head_dim] float32."""
    queries: dict[int, torch.Tensor] = {}  # q qᵀ, summed, of each KV head
    values: dict[int, torch.Tensor] = {}  # v vᵀ, each times k·(q qᵀ)·k: its mean squared score

    def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
        rows: torch.Tensor = x.double().unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3)
        return rows

    def see_queries(layer: int, q: torch.Tensor, k: torch.Tensor, *_: object) -> None:
        rows = by_head(q, k.shape[1])
        queries[layer] = queries.get(layer, 0) + rows.mT @ rows

    def see_values(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
    ) -> None:
        keys, rows = by_head(k, k.shape[1]), by_head(v, v.shape[1])
        weights = (keys @ queries[layer] * keys).sum(-1, keepdim=True)
        values[layer] = values.get(layer, 0) + (weights * rows).mT @ rows

    for see in (see_queries, see_values):
        for window in windows:
            model.observe(window[None], see)
    return [{"k": _turned(queries[at]), "v": _turned(values[at])} for at in sorted(queries)]


def _turned(moment: torch.Tensor) -> torch.Tensor:
    """Eigenvectors times a Hadamard matrix: the moment has an even diagonal there."""
    return rotate(torch.linalg.eigh(moment)[1].float())


def kvarn(k_bits: int, v_bits: int, head_dim: int) -> PeerCache:
    """KVarN with tiles of 128 tokens."""

    def read(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        k = in_tiles(rotate(keys), TILE, lambda tile: balanced_rounded(tile.mT, k_bits).mT)
        v = in_tiles(rotate(values), TILE, lambda tile: balanced_rounded(tile, v_bits))
        return rotate(k), rotate(v)

    of_k = k_bits + 2 * FP16 / TILE + FP16 / head_dim
    of_v = v_bits + 2 * FP16 / head_dim + FP16 / TILE
    return PeerCache(f"KVarN K{k_bits}V{v_bits}", (of_k + of_v) / 2, read)


def balanced_rounded(tile: torch.Tensor, bits: int) -> torch.Tensor:
    """Round the rows of [..., rows, columns] when rows and columns have even deviations."""
    if not tile.numel():
        return tile
    rows, columns = balance(tile)
    least, greatest = (tile / columns / rows).aminmax(dim=-1, keepdim=True)
    most = 2**bits - 1
    step = ((greatest - least) / most).clamp(min=1e-10)
    codes = ((tile / columns / rows - least) / step).round().clamp(0, most)
    scale, shift, other = (x.half().float() for x in (rows * step, rows * least, columns))
    found: torch.Tensor = (codes * scale + shift) * other
    return found


def balance(tile: torch.Tensor) -> Pair:
    """Scales of the rows [..., rows, 1] and of the columns [..., 1, columns] of a tile.

    Each pass divides the columns by their standard deviations, then the rows. The scales are those
    of the pass after which the largest and the smallest deviations are nearest to one another.
    """
    logs = [torch.zeros_like(tile[..., :1]), torch.zeros_like(tile[..., :1, :])]
    now, best = tile, [one.exp() for one in logs]
    least = _unevenness(now)
    for _ in range(ROUNDS):
        for at, dim in ((1, -2), (0, -1)):
            std = now.std(dim=dim, keepdim=True, correction=min(1, now.shape[dim] - 1))
            logs[at] = (logs[at] + std.clamp(*STDS).log()).clamp(*LOGS)
            now = tile / logs[1].exp() / logs[0].exp()
        found = _unevenness(now)
        better = found <= least
        best = [torch.where(better, new.exp(), old) for new, old in zip(logs, best, strict=True)]
        least = torch.where(better, found, least)
    return best[0], best[1]


def _unevenness(tile: torch.Tensor) -> torch.Tensor:
    """[..., 1, 1]: ratios of largest to smallest deviation, of columns and of rows, added."""
    ratios = torch.zeros_like(tile[..., 0, 0])
    for dim in (-2, -1):
        least, greatest = tile.std(dim=dim, correction=0).aminmax(dim=-1)
        ratios += greatest / least.clamp(min=1e-8)
    return ratios[..., None, None]


def peers(model: CachedModel, windows: torch.Tensor) -> list[PeerCache]:
    """All of them, without 16-bit tokens.

    Args:
        model: of heads of equal size, which OSCAR observes.
        windows: [windows, tokens], int64, of a text for that.
    """
    cache = model.new_cache(1, 1, k_format=model.exact_format, v_format=model.exact_format)
    dim = cache.head_dim
    made = [kivi(bits, group, dim) for bits in (4, 2) for group in (32, 128)]
    made += [turboquant(bits, dim) for bits in (4, 3)]
    return [*made, kvarn(4, 2, dim), oscar(model, windows, dim)]
