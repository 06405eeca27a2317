"""Caches as files: save_cache, load_cache, and the format.

Beside the keys of every file of rows (manifest.py) a manifest of "kvquant.cache" has

    head_dim          KVCache's head_dim; of latent rows the elements of a latent
    max_seq_len       capacity of a sequence, in tokens
    rollback_len      KVCache's; left out if it is 64
    seq_lens          [batch], tokens of each sequence
    start_positions   [batch], the position of each sequence's first token
    positions         [batch], the position of the next one: start_positions + seq_lens
    layers            of each also
        packed_lens   [batch], how many tokens after the sinks are packed
        window        how many tokens attention sees, the last ones; left out where it sees all. A
                      layer with one has no sinks, and of its packed tokens those in the window

The tensors hold the rows in use, of layer I and of K and V each:

    layers.I.k_sinks    tokens 0 to sink_len, in exact_format
    layers.I.k_packed   the next packed_lens tokens, in the layer's k format
    layers.I.k_recent   the rest, in exact_format

each uint8 [tokens of all sequences, num_kv_heads, row_bytes] (kvquant/rows/format.py): sequence
after sequence, tokens in their order. A tensor without rows is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ..cache.checks import Devices, devices_of
from ..cache.contiguous import KVCache
from ..cache.latent import LatentKVCache
from ..cache.layer import LayerCache
from ..errors import CheckpointError, ConfigError, ShapeError
from ..rows.arguments import check_kind, check_size
from ..rows.basis import LayerBasis
from ..rows.latent import LatentFormat
from .container import RowsFile, check_values
from .manifest import CacheLayer, CacheManifest, common_keys
from .parts import Part
from .plan import CachePlan, Plan, as_plan
from .schema import FormatName, sealed
from .tensor_files import TensorSource, check_name, save_safetensors


def save_cache(
    cache: KVCache,
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Any] | None = None,
    creation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a cache to a file: after a crash the old file or the new one is there, whole.

    The call reads the cache while it writes: do not append meanwhile. A replaced file keeps its
    mode; links are followed. A process that loads this path meanwhile gets the old or the new
    cache.

    Args:
        cache: whose layers all hold the same tokens.
        path: NAME.safetensors, in a folder that exists.
        model: the model's config as a dict (config_dict of a CachedModel); load_cache then refuses
            another model.
        creation: how the cache came about, for people: strings, numbers, lists, dicts.

    Returns:
        The file.

    Raises:
        ShapeError: the layers hold different numbers of tokens.
        ConfigError: cache is no KVCache, model or creation is not plain data, or path has
            another ending or leads to no file.
        CheckpointError: load_cache would refuse the file: a row holds NaN or a value beyond its
            packed format, or the manifest is too long.
        OSError: the file cannot be written.

    Example:
        >>> from kvquant import KVCache, save_cache
        >>> cache = KVCache(num_layers=1, batch=1, num_kv_heads=8, head_dim=128, max_seq_len=64)
        >>> save_cache(cache, "cache.safetensors").name
        'cache.safetensors'
    """
    how = (
        "give a KVCache, of a QuantizedCache (from kvquant import QuantizedCache) its kv; "
        "save_sequences saves those of a PagedKVCache"
    )
    check_kind("cache", cache, KVCache, how)
    path = check_name(path)
    manifest = _manifest_of(cache, model, creation)
    sources = {
        part.name: TensorSource(torch.uint8, part.shape, partial(_chunks, cache, part))
        for part in manifest.parts.values()
    }
    save_safetensors(path, sources, partial(sealed, manifest.plain()))
    return path


def load_cache(
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    max_seq_len: int | None = None,
    rollback_len: int | None = None,
    device: Devices = "cpu",
) -> KVCache:
    """Read a cache, bit for bit as it was saved, and check every value and every byte.

    Args:
        path: of the file.
        model: the config, as a dict, of the model that continues; None to take any file.
        plan: the plan that the cache was made with, or the path of its file, for the bases of
            the rows; None without one. Formats are those of the cache's file.
        max_seq_len: capacity of a sequence, in tokens; as saved when None.
        rollback_len: as of KVCache; as saved when None. A file lacks 16-bit rows before the
            recent ones.
        device: of the cache: one device, or a list of one for each layer.

    Returns:
        The cache.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, foreign, of another model or plan, or the cache does
            not fit max_seq_len or the memory.
        ConfigError: an argument is not possible.
        DeviceError: the device is not here, or no kernels serve it.

    Example:
        >>> from kvquant import KVCache, load_cache, save_cache
        >>> cache = KVCache(num_layers=1, batch=1, num_kv_heads=8, head_dim=128, max_seq_len=64)
        >>> path = save_cache(cache, "cache.safetensors")
        >>> load_cache(path).max_seq_len
        64
    """
    devices_of(device)  # before the file is read
    if plan is not None:
        plan = as_plan(plan)
    with RowsFile(path, CacheManifest) as file:
        manifest = file.contents
        manifest.check_model(model)
        devices_of(device, len(manifest.layers))
        size = manifest.max_seq_len
        if max_seq_len is not None:
            size = check_size("max_seq_len", max_seq_len)
        if rollback_len is not None:
            manifest = replace(manifest, rollback_len=check_size("rollback_len", rollback_len))
        how = "load it with the plan that it was made with, plan=FILE (--plan FILE)"
        manifest.check_bases(None if plan is None else plan.layers, how)
        _check_room(manifest, size)
        cache = empty_cache(manifest, size, device, plan)
        cache.start_positions.copy_(torch.tensor(manifest.start_positions, device="cpu"))
        for layer, entry in zip(cache.layers, manifest.layers, strict=True):
            lens = manifest.seq_lens, entry.packed_lens
            layer.begin(*(torch.tensor(numbers, device="cpu") for numbers in lens))
        for part in manifest.parts.values():
            layer = cache.layers[part.layer]
            target = getattr(layer, part.attribute)
            for b, rows in enumerate(file.rows(part).split(part.counts)):
                chunk = rows.transpose(0, 1).to(layer.device)
                target[b][:, _slots(layer, part, b)] = chunk
        for i, layer in enumerate(cache.layers):
            layer.pack_recent(cache.counters_of(i)[0])
    return cache


def common_lens(cache: KVCache, then: str) -> torch.Tensor:
    """Tokens of each sequence, [batch] on the CPU; ShapeError if layers differ."""
    seq_lens = cache.seq_lens.cpu()
    for i, layer in enumerate(cache.layers):
        if not layer.seq_lens.cpu().equal(seq_lens):
            raise ShapeError(
                f"layer {i} holds {layer.seq_lens.tolist()} tokens, another one "
                f"{seq_lens.tolist()}: append this step's tokens to every layer, then {then}"
            )
    return seq_lens


def _manifest_of(
    cache: KVCache, model: Mapping[str, Any] | None, creation: Mapping[str, Any] | None
) -> CacheManifest:
    lens = tuple(common_lens(cache, "save").tolist())
    starts = tuple(cache.start_positions.tolist())
    return CacheManifest(
        **common_keys(CacheManifest, cache, model, creation),
        head_dim=cache.head_dim,
        max_seq_len=cache.max_seq_len,
        seq_lens=lens,
        start_positions=starts,
        positions=tuple(map(sum, zip(starts, lens, strict=True))),  # may be beyond int64
        rollback_len=cache.rollback_len,
        layers=tuple(
            CacheLayer(
                FormatName.of(layer.k_format),
                FormatName.of(layer.v_format),
                tuple(layer.packed_lens.tolist()),
                layer.window,
            )
            for layer in cache.layers
        ),
    )


def _chunks(cache: KVCache, part: Part) -> Iterator[torch.Tensor]:
    """A part's rows in file order, one sequence at a time."""
    layer = cache.layers[part.layer]
    rows = getattr(layer, part.attribute)
    for b in range(cache.batch):
        chunk = rows[b][:, _slots(layer, part, b)].transpose(0, 1)
        check_values(chunk, part, part.starts[b])
        yield chunk


def _slots(layer: LayerCache, part: Part, sequence: int) -> slice | torch.Tensor:
    """Where a part's rows are in memory, in token order."""
    count = part.counts[sequence]
    if part.kind == "sinks" or (part.kind == "packed" and layer.window is None):
        return slice(0, count)
    first = part.firsts[sequence] - layer.sink_len
    index = torch.arange(first, first + count, device="cpu")
    return layer.split.page_row(index) if part.kind == "packed" else layer.split.ring_row(index)


def _check_room(manifest: CacheManifest, max_seq_len: int) -> None:
    least = max(manifest.seq_lens)
    for part in manifest.parts.values():
        if part.kind == "packed":  # 16-bit rows keep their capacity, used or not
            window, exact = manifest.layers[part.layer].window, manifest.recent_len
            exact = exact + manifest.sink_len if window is None else min(exact, window)
            least = max(least, exact + 1)
    if max_seq_len < least:
        raise CheckpointError(
            f"the cache does not fit max_seq_len {max_seq_len}: use at least {least}"
        )


def empty_cache(
    manifest: CacheManifest, max_seq_len: int, device: Devices, plan: CachePlan | None = None
) -> KVCache:
    """An empty cache for a manifest; CheckpointError without enough memory."""
    options: dict[str, Any] = {
        "sink_len": manifest.sink_len,
        "recent_len": manifest.recent_len,
        "rollback_len": manifest.rollback_len,
        "exact_format": manifest.exact_format,
        "device": device,
        "bases": None if plan is None else _bases(plan, manifest),
    }
    sizes = manifest.num_kv_heads, manifest.head_dim, max_seq_len
    k_formats, v_formats = (list(formats) for formats in zip(*manifest.formats, strict=True))
    num_layers, batch = len(k_formats), len(manifest.seq_lens)
    try:
        if manifest.latent:
            dims = {"latent_dim": k_formats[0].head_dim, "rope_dim": v_formats[0].head_dim}
            fmt = [LatentFormat(*pair) for pair in manifest.formats]
            return LatentKVCache(num_layers, batch, max_seq_len, fmt=fmt, **dims, **options)
        options |= {"k_format": k_formats, "v_format": v_formats}
        options["windows"] = [entry.window for entry in manifest.layers]
        return KVCache(num_layers, batch, *sizes, **options)
    except ConfigError as error:
        raise CheckpointError(
            f"{error}; max_seq_len {max(manifest.seq_lens)} or more is possible"
        ) from None


def _bases(plan: CachePlan, manifest: CacheManifest) -> list[LayerBasis]:
    """The bases of a plan with the clip ratios of the file's formats."""
    formats = {
        (i, side): str(fmt)
        for i, pair in enumerate(manifest.formats)
        for side, fmt in zip("kv", pair, strict=True)
    }
    return plan.with_layer_formats(formats).layers
