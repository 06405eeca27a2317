"""Raw K and V tensors from and for other programs, and other projects' byte layouts.

Raw tensors, read by quantize_raw and written by export_cache to "bf16" and "fp16", are a
safetensors file with, for every layer I from 0,

    layers.I.k, layers.I.v   [batch, num_kv_heads, tokens, head_dim], bfloat16, float16 or float32;
                             keys as attention meets them (after RoPE)
    seq_lens                 int32 [batch], optional: tokens in use, the first ones; all without it

"fbgemm" writes the tensors of FBGEMM's gqa_attn_splitk and mqa_attn, T the longest sequence:

    layers.I.cache_K, layers.I.cache_V   uint8 [batch, T, num_kv_heads, row_bytes]
    seq_positions                        int32 [batch], index of each sequence's last token

"xformers" writes those of xFormers' Triton split-K op, which reads 32-bit words:

    layers.I.cache_K, layers.I.cache_V   int32 [batch, T, num_kv_heads, words]: INT4 rows are
                                         groups + head_dim/8 words, parameters first; FP8 rows
                                         head_dim/4 words, codes only
    layers.I.scale_shift_K, ..._V        FP8 only: int32 [batch, T, num_kv_heads], scale in the low
                                         half and shift in the high half of each word, fp16
    seq_lens                             int32 [batch]

Rows after the end of a sequence are zeros.

Latent rows (LatentKVCache) have targets of their own. "bf16" and "fp16" write, for every layer I,

    layers.I.latent, layers.I.rope   [batch, tokens, 512 or 256], [batch, tokens, 64 or 32]
    seq_lens                         int32 [batch]

"flashmla" writes pages for FlashMLA's flash_mla_with_kvcache and vLLM's fp8_ds_mla caches, from
rows of the format "fp8" only:

    layers.I.kv    uint8 [pages, 64, 1, 656]
    block_table    int32 [batch, pages of the longest sequence], the pages of each sequence
    seq_lens       int32 [batch]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..cache.checks import Formats, row_formats
from ..cache.contiguous import KVCache
from ..cache.latent import LatentKVCache
from ..errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
    refuse,
    warn,
)
from ..ops.quantize import dequantize_rows, quantize_rows
from ..rows.arguments import check_kind, check_size
from ..rows.codec import FP8_DS_MLA, FP16_MAX, one_of
from ..rows.format import HEAD_DIMS, RowFormat
from ..rows.latent import LatentFormat
from ..rows.quantize import EXACT_DTYPES, FLOAT_DTYPES, exact_codec, is_nan_row
from .checkpoint import common_lens
from .schema import INT32, KEY, MAX_LAYERS, MAX_SEQUENCES
from .tensor_files import SafetensorsFile, TensorSource, save_safetensors

# by whether rows are latent
TARGETS = {False: ("bf16", "fp16", "fbgemm", "xformers"), True: ("bf16", "fp16", "flashmla")}
PACKED_DIMS = {"fbgemm": (128,), "xformers": (64, 128, 256, 512)}  # head_dim of these layouts
PAGE = 64  # tokens of a page of FlashMLA's
MOST_HEADS = 128  # that keys and values of a model have
# a reader in fp16 computes scale * 512 for INT4, and code * scale for FP8, before it adds the shift
MAX_SCALE = {"int4": FP16_MAX / 512, "fp8": FP16_MAX / 448}


class RawFile(SafetensorsFile):
    """The raw K and V tensors of another program, open for reading; see the module.

    Args:
        path: a safetensors file.

    Attributes:
        num_layers: layers.
        k_shapes, v_shapes: of each layer [batch, num_kv_heads, tokens, head_dim].
        dtype: of the first layer's K.
        seq_lens: [batch] int32, tokens in use.
    """

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V of a layer; CheckpointError if the file has changed meanwhile."""
        k, v = (self._read(f"layers.{layer}.{side}") for side in "kv")
        return k, v

    def _read(self, name: str) -> torch.Tensor:
        """Read a tensor; the time of the last change stands in for checksums."""
        found, now = self.read(name), os.fstat(self._file.fileno())
        if (now.st_mtime_ns, now.st_size) != (self._opened.st_mtime_ns, self._opened.st_size):
            raise CheckpointError(
                f"{self.path} is being written to: read it when the writer is done"
            )
        return found

    def _check(self) -> None:
        refuse(CheckpointError, self._problems())

    def _problems(self) -> Iterator[str]:
        """What no K and V are; the attributes are set on the way."""
        shapes, dtypes = self.shapes, self.dtypes
        self.num_layers = sum(name.startswith("layers.") for name in shapes) // 2
        expected = [f"layers.{i}.{side}" for i in range(self.num_layers) for side in "kv"]
        if not expected or shapes.keys() - {"seq_lens"} != set(expected):
            if "layers.0.latent" in shapes:
                yield (
                    "the file has latents and RoPE parts, which are not read back: let a model "
                    "make latent rows (`kvquant quantize MODEL --prompt FILE`)"
                )
            if KEY in self.metadata:
                yield (
                    "this is a kvquant cache, of rows: `kvquant export FILE --to bf16 -o OUT` "
                    "makes K and V tensors of it"
                )
            odd = min(shapes.keys() - {"seq_lens"} ^ set(expected), default="layers.0.k")
            yield (
                f"tensor {odd!r:.80} is missing or should not be there: name them layers.0.k, "
                "layers.0.v, layers.1.k and so on, and optionally seq_lens"
            )
        first = shapes["layers.0.k"]
        for name in expected:
            shape = shapes[name]
            if dtypes[name] not in FLOAT_DTYPES:
                yield f"{name} is {dtypes[name]}: use bfloat16, float16 or float32"
            if len(shape) != 4 or shape[:3] != first[:3] or 0 in shape[:2]:
                yield (
                    f"{name} is {list(shape)!s:.80}: all must be [batch, num_kv_heads, tokens, "
                    f"head_dim], alike but for head_dim; layers.0.k is {list(first)!s:.80}"
                )
            if shape[3] not in HEAD_DIMS:
                RowFormat.parse("bf16", shape[3])  # says which there are
        batch, heads, tokens, _ = first
        read = (
            f"layers.0.k is {list(first)}, read as {batch} sequences, {heads} KV heads, {tokens} "
            "tokens and head_dim"
        )
        if heads > MOST_HEADS:
            yield (
                f"{read}: no model has so many heads. If tokens come before heads, write "
                "k.transpose(1, 2).contiguous(), and v so"
            )
        if heads > tokens:
            warn(
                f"{self.path}: {read}. If it has {heads} tokens of {tokens} heads, write "
                "k.transpose(1, 2).contiguous(), and v so"
            )
        sizes = ("sequences", batch, MAX_SEQUENCES), ("layers", self.num_layers, MAX_LAYERS)
        for what, size, most in (*sizes, ("KV heads", heads, INT32), ("tokens", tokens, INT32)):
            if size > most:
                yield f"it has {size} {what}: {most} are possible"
        self.k_shapes = [shapes[name] for name in expected[0::2]]
        self.v_shapes = [shapes[name] for name in expected[1::2]]
        self.dtype = dtypes["layers.0.k"]
        self.seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device="cpu")
        if "seq_lens" not in shapes:
            return
        if dtypes["seq_lens"] not in (torch.int32, torch.int64) or shapes["seq_lens"] != (batch,):
            yield (
                f"seq_lens is {dtypes['seq_lens']} {list(shapes['seq_lens'])!s:.80}: use int32 "
                f"[{batch}]"
            )
        given = self._read("seq_lens")
        if bool(((given < 0) | (given > tokens)).any()):
            yield f"seq_lens is {given.tolist()!s:.80}: use numbers from 0 to {tokens}"
        self.seq_lens = given.int()


def quantize_raw(
    path: str | os.PathLike[str],
    *,
    k_format: Formats | None = None,
    v_format: Formats | None = None,
    sink_len: int = 4,
    recent_len: int = 128,
    exact_format: str | None = None,
    max_seq_len: int | None = None,
) -> KVCache:
    """Make a cache on the CPU from the raw K and V tensors of another program.

    Args:
        path: of a safetensors file.
        k_format, v_format, sink_len, recent_len: as in KVCache.
        exact_format: "bf16" or "fp16"; that of the tensors when None (bf16 for float32).
        max_seq_len: capacity of a sequence, in tokens; those of the tensors when None.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, has other tensors, or is written to at the same time.
        ConfigError: a format or a size that does not exist.
        ShapeError: a sequence is longer than max_seq_len.
        NonFiniteError: NaN, Inf or a value that one of the formats cannot hold, with its place.
    """
    if max_seq_len is not None:
        max_seq_len = check_size("max_seq_len", max_seq_len)
    window = check_size("sink_len", sink_len), check_size("recent_len", recent_len)
    with RawFile(path) as raw:
        batch, num_kv_heads, tokens, head_dim = raw.k_shapes[0]
        longest = int(raw.seq_lens.max())
        if max_seq_len is not None and longest > max_seq_len:
            raise ShapeError(
                f"{path} has sequences of up to {longest} tokens, max_seq_len is {max_seq_len}: "
                f"use max_seq_len (--max-seq-len) {longest} or more"
            )
        cache = KVCache(
            raw.num_layers,
            batch,
            num_kv_heads,
            head_dim,
            tokens if max_seq_len is None else max_seq_len,
            k_format=row_formats("k_format", k_format, [x[3] for x in raw.k_shapes], window),
            v_format=row_formats("v_format", v_format, [x[3] for x in raw.v_shapes], window),
            sink_len=sink_len,
            recent_len=recent_len,
            exact_format=exact_codec(raw.dtype) if exact_format is None else exact_format,
        )
        for i in range(raw.num_layers):
            try:
                cache.append(i, *raw.layer(i), raw.seq_lens)
            except NonFiniteError as error:
                raise NonFiniteError(f"{path}: layers.{i}.{error}") from None
    return cache


def export_cache(cache: KVCache, path: str | os.PathLike[str], to: str) -> list[str]:
    """Write a cache for another program; the module documents the tensors.

    "bf16" and "fp16" write values; the others write packed rows byte for byte, and quantize the
    16-bit rows (sinks, recent tokens). Start positions are not written.

    Args:
        cache: whose layers all hold the same tokens; a LatentKVCache, too.
        path: of the file; it is replaced when the new one is whole.
        to: "bf16", "fp16", "fbgemm" or "xformers"; of latent rows "bf16", "fp16" or "flashmla".

    Returns:
        What the reader has to know, a sentence each.

    Raises:
        ConfigError: `to` does not exist.
        UnsupportedError: the other program has no layout for such rows, or a layer has a window.
        NonFiniteError: a value or a scale is too large for the other program.
        ShapeError: the layers hold different numbers of tokens.
        OSError: the file cannot be written.
    """
    check_kind("cache", cache, KVCache, "give a KVCache")
    possible = ", ".join(TARGETS[cache.latent])
    if not any(to in names for names in TARGETS.values()):
        raise ConfigError(f"cannot export to {to!r}: use {possible}")
    if to not in TARGETS[cache.latent]:
        held, wanted = ("latent rows", "keys and values")[:: 1 if cache.latent else -1]
        raise UnsupportedError(
            f"{to} is a layout of {wanted}, and the cache holds {held}: use {possible}"
        )
    seq_lens = common_lens(cache, "export")
    for i, layer in enumerate(cache.layers):
        if layer.window is not None:
            raise UnsupportedError(
                f"layer {i} has a sliding window of {layer.window} tokens, and rows of no others: "
                "other programs take whole sequences"
            )
    if to in EXACT_DTYPES:
        tensors, notes = _values(cache, EXACT_DTYPES[to]), list[str]()
    elif cache.bases:
        raise UnsupportedError(
            f"the rows are stored in the bases of a plan, which {to} does not know: export to bf16"
        )
    elif isinstance(cache, LatentKVCache):
        tensors, notes = _latent_pages(cache), _notes(cache, to, 0)
    else:
        tensors, notes = _packed(cache, to)
    of_last = to == "fbgemm"
    tensors["seq_positions" if of_last else "seq_lens"] = TensorSource.of(seq_lens - int(of_last))
    save_safetensors(path, tensors, lambda _: {"format": "pt", "kvquant_export": to})
    return notes


def _padded(
    batch: int, shape: tuple[int, ...], dtype: torch.dtype, rows_of: Callable[[int], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Each sequence's values, padded with zeros."""
    for b in range(batch):
        out = torch.zeros(shape, dtype=dtype, device="cpu")
        values = rows_of(b)
        out[tuple(map(slice, values.shape))] = values.cpu()
        yield out


def _values(cache: KVCache, dtype: torch.dtype) -> dict[str, TensorSource]:
    longest = int(cache.seq_lens.max())
    tensors = {}
    for i, layer in enumerate(cache.layers):
        for side, fmt in (("k", layer.k_format), ("v", layer.v_format)):
            shape: tuple[int, ...] = (cache.num_kv_heads, longest, fmt.head_dim)
            own = partial(_values_of, cache, dtype, i, side)
            values = partial(_padded, cache.batch, shape, dtype, own)
            if cache.latent:  # of one KV head, which such rows do not speak of
                side, shape = {"k": "latent", "v": "rope"}[side], shape[1:]
            tensors[f"layers.{i}.{side}"] = TensorSource(dtype, (cache.batch, *shape), values)
    return tensors


def _values_of(
    cache: KVCache, dtype: torch.dtype, layer: int, side: str, sequence: int
) -> torch.Tensor:
    """K or V of a sequence, [num_kv_heads, tokens, head_dim]."""
    rows = _rows(cache, layer, side, sequence)
    whole = torch.cat([dequantize_rows(part, stored) for part, stored in rows], dim=1)
    if cache.bases:
        whole = getattr(cache.bases[layer], side).decode(whole[None])[0]
    values = whole.to(dtype)
    if not bool(values.isfinite().all()):
        head, token, element = (~values.isfinite()).nonzero()[0].tolist()
        value, where = whole[head, token, element].item(), _where(layer, side, sequence, token)
        if value != value:
            raise _is_nan(f"{where}, KV head {head}")
        how = "fp16: export to bf16" if dtype == torch.float16 else "bf16"
        raise NonFiniteError(f"{where}: {value:g} is too large for {how}")
    return values


def _packed(cache: KVCache, to: str) -> tuple[dict[str, TensorSource], list[str]]:
    """Another project's rows, one sequence at a time, and notes for their reader."""
    longest = int(cache.seq_lens.max())
    tensors = {}
    for i, layer in enumerate(cache.layers):
        fmt = layer.k_format
        _check_exportable(i, fmt, layer.v_format, to)
        external = to == "xformers" and fmt.codec == "fp8"
        # the bytes of a row that a tensor takes
        places = {"cache": slice(fmt.header_bytes if external else 0, fmt.row_bytes)}
        if external:
            places["scale_shift"] = slice(0, fmt.header_bytes)
        dtype = torch.int32 if to == "xformers" else torch.uint8
        for name, place in places.items():
            size = longest, cache.num_kv_heads, place.stop - place.start
            words = (size[2] // dtype.itemsize,) if name == "cache" else ()
            shape = cache.batch, *size[:2], *words
            for side in "kv":
                rows = partial(_rows_for, cache, to, place, i, side)
                chunks = partial(_padded, cache.batch, size, torch.uint8, rows)
                tensors[f"layers.{i}.{name}_{side.upper()}"] = TensorSource(dtype, shape, chunks)
    return tensors, _notes(cache, to, longest)


def _rows_for(
    cache: KVCache, to: str, place: slice, layer: int, side: str, sequence: int
) -> torch.Tensor:
    """The bytes at `place` of all rows of a sequence, [tokens, num_kv_heads, bytes]."""
    fmt = cache.layers[layer].k_format
    rows = _packed_rows(cache, layer, side, sequence, fmt)
    _check_scales(rows, fmt, to, layer, side, sequence)
    return rows[..., place]


def _packed_rows(
    cache: KVCache, layer: int, side: str, sequence: int, fmt: RowFormat
) -> torch.Tensor:
    """All rows of a sequence in one format, [tokens, num_kv_heads, row_bytes], on the CPU."""
    parts = [
        rows if stored == fmt else quantize_rows(dequantize_rows(rows, stored), fmt, check=False)
        for rows, stored in _rows(cache, layer, side, sequence)
    ]
    found = torch.cat(parts, dim=1).transpose(0, 1).cpu()
    is_nan = is_nan_row(found, fmt)
    if bool(is_nan.any()):
        token, head = is_nan.nonzero()[0].tolist()
        raise _is_nan(f"{_where(layer, side, sequence, token)}, KV head {head}")
    return found


def _where(layer: int, side: str, sequence: int, token: int) -> str:
    return f"layer {layer}, {side.upper()}, sequence {sequence}, token {token}"


def _latent_pages(cache: LatentKVCache) -> dict[str, TensorSource]:
    """FlashMLA's pages, sequence after sequence, and their block table."""
    count = -(-int(cache.seq_lens.max()) // PAGE)
    tensors = {}
    for i, fmt in enumerate(cache.formats):
        if fmt.latent.codec != FP8_DS_MLA:
            raise UnsupportedError(
                f"layer {i} has rows of {fmt}: flashmla takes fp8; make the cache with fmt='fp8', "
                "or export to bf16"
            )

        def rows(b: int, i: int = i, fmt: LatentFormat = fmt) -> torch.Tensor:
            sides = zip("kv", fmt.parts, strict=True)
            return torch.cat([_packed_rows(cache, i, side, b, part) for side, part in sides], -1)

        size = count * PAGE, 1, fmt.row_bytes
        chunks = partial(_padded, cache.batch, size, torch.uint8, rows)
        shape = cache.batch * count, PAGE, 1, fmt.row_bytes
        tensors[f"layers.{i}.kv"] = TensorSource(torch.uint8, shape, chunks)
    pages = torch.arange(cache.batch * count, dtype=torch.int32, device="cpu")
    tensors["block_table"] = TensorSource.of(pages.view(cache.batch, count))
    return tensors


def _rows(
    cache: KVCache, layer: int, side: str, sequence: int
) -> Iterator[tuple[torch.Tensor, RowFormat]]:
    """Rows [num_kv_heads, tokens, row_bytes] of a sequence and their formats, in token order."""
    for segment in cache.layers[layer].segments_in_order():
        fmt = segment.k_format if side == "k" else segment.v_format
        yield segment.rows(sequence, side), fmt


def _check_exportable(layer: int, k_format: RowFormat, v_format: RowFormat, to: str) -> None:
    known = k_format.codec == "int4" or (k_format.codec == "fp8" and k_format.groups == 1)
    if k_format != v_format or not known or k_format.head_dim not in PACKED_DIMS[to]:
        raise UnsupportedError(
            f"layer {layer} has K in {k_format} and V in {v_format}, head_dim {k_format.head_dim} "
            f"and {v_format.head_dim}: {to} takes one format for both, int4, int4-g2, int4-g4, "
            f"int4-g8 or fp8 with head_dim {one_of(PACKED_DIMS[to])}; quantize anew, or export to "
            "bf16"
        )


def _is_nan(where: str) -> NonFiniteError:
    return NonFiniteError(
        f"{where}: this row came with NaN, Inf or a value that its format cannot hold, and decodes "
        "to NaN: fix the model, or export a cache without it"
    )


def _check_scales(
    rows: torch.Tensor, fmt: RowFormat, to: str, layer: int, side: str, sequence: int
) -> None:
    """Raise if rows [tokens, heads, row_bytes] overflow the other project's fp16 arithmetic."""
    if to == "fbgemm" and fmt.codec == "fp8":
        return  # read in float32
    scales = rows[..., : fmt.header_bytes].contiguous().view(torch.float16)[..., 0::2]
    limit = MAX_SCALE[fmt.codec]
    if bool((scales > limit).any()):
        token, head, group = (scales > limit).nonzero()[0].tolist()
        where, scale = _where(layer, side, sequence, token), scales[token, head, group].item()
        raise NonFiniteError(
            f"{where}, KV head {head}: scale {scale:g} is over {limit:g}, where {to}'s "
            "fp16 arithmetic overflows: export to bf16"
        )


def _notes(cache: KVCache, to: str, longest: int) -> list[str]:
    notes = []
    if cache.sink_len or cache.recent_len:
        notes.append(
            f"the 16-bit rows (up to {cache.sink_len} first and {cache.recent_len} last tokens) "
            "were quantized for this export: their fidelity is now that of the other rows"
        )
    if to == "fbgemm" and cache.num_kv_heads > 1:
        notes.append(
            f"the cache has {cache.num_kv_heads} KV heads, gqa_attn_splitk takes one: call it for "
            "each of cache_K[:, :, h : h + 1].contiguous()"
        )
    if to == "fbgemm" and longest > 16384:
        notes.append(f"{longest} tokens are over the 16384 that gqa_attn_splitk takes")
    if to == "fbgemm" and any(layer.k_format.groups in (2, 8) for layer in cache.layers):
        notes.append("gqa_attn_splitk on tensor cores takes 1 or 4 groups, mqa_attn also 2 and 8")
    return notes
