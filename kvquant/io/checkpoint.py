"""Caches as files: save_cache, load_cache, and the format.

The manifest (schema.py) of format "kvquant.cache", version 1, has exactly these other keys; every
number is whole:

    writer            the program that wrote the file, for people
    num_kv_heads      KV heads of every layer
    head_dim          KVCache's head_dim
    max_seq_len       capacity of a sequence, in tokens
    sink_len          first tokens of each sequence in 16 bit
    recent_len        last tokens of each sequence in 16 bit
    rollback_len      KVCache's, for the cache that is made of the file; left out if it is 64
    latent            true: of a LatentKVCache, whose latents are k and whose RoPE parts are v of
                      one KV head; left out of all others. Latents of FlashMLA's layout have the
                      format "fp8_ds_mla". No layer has a window
    exact_format      "bf16" or "fp16": the 16-bit rows
    seq_lens          [batch], tokens of each sequence
    start_positions   [batch], the position of each sequence's first token
    positions         [batch], the position of the next one: start_positions + seq_lens
    layers            one object per layer:
        k, v          {"format": a short name as RowFormat.parse takes it, "head_dim": elements}
        packed_lens   [batch], how many tokens after the sinks are packed
        window        how many tokens attention sees, the last ones; left out where it sees all. A
                      layer with one has no sinks, and of its packed tokens those in the window
    model             null, or model_identity: {"type", "sha256"} and, if known, "weights"
    creation          any object: how the cache came about
    transforms        what was done to K and V before they were quantized. []: nothing. Else one
                      object per layer, {"k", "v"}: the fingerprints of the bases of a plan, which
                      the reader must have

The tensors hold the rows in use, of layer I and of K and V each:

    layers.I.k_sinks    tokens 0 to sink_len, in exact_format
    layers.I.k_packed   the next packed_lens tokens, in the layer's k format
    layers.I.k_recent   the rest, in exact_format
    layers.I.v_...      the same of V

each uint8 [tokens of all sequences, num_kv_heads, row_bytes]: sequence after sequence, tokens in
their order. A tensor without rows is left out; no other tensor may be there. Row bytes are those of
kvquant/rows/format.py. K's and V's head_dim may differ and formats may differ by layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
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
    """Write a cache to a file, in one step: after a crash there is the old file or the new one.

    Only tokens in use are written, and no second copy of the cache is made: do not append to the
    cache meanwhile, or rows are mixed. A file that is replaced keeps its mode, and a link leads
    where it did. A process that loads from this path meanwhile finds the old cache or the new one.

    Args:
        cache: whose layers all hold the same tokens.
        path: NAME.safetensors, in a folder that exists.
        model: the model's config as a dict (config_dict of a CachedModel); load_cache then refuses
            another model.
        creation: how the cache came about, to be read by people: strings, numbers, lists, dicts.

    Returns:
        The file.

    Raises:
        ShapeError: the layers hold different numbers of tokens.
        ConfigError: cache is no KVCache, model or creation is not plain data, or path has another
            ending or leads to what is no file.
        CheckpointError: it could not be loaded again: a row holds NaN, or a value that it cannot be
            packed with, or what the file says of the cache is too long.
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
        part.name: TensorSource(torch.uint8, part.shape, _reader(cache, part))
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
    """Read a cache, its rows bit for bit as they were saved, and check every value and every byte.

    Args:
        path: of the file.
        model: the config, as a dict, of the model that is to continue; None to take any file.
        plan: that the cache was made with, if there was one, or the path of its file: it has the
            bases of the rows. Formats are those of the cache's file.
        max_seq_len: capacity of a sequence, in tokens; as it was when None.
        rollback_len: as of KVCache, as it was when None. A file has no 16-bit rows of tokens before
            the recent ones: the cache gathers them again.
        device: where the cache is to lie: one device, or a list of one for each layer. A file does
            not tell where its cache was.

    Returns:
        The cache; appending to it goes on as if it had never been a file.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, foreign, of another model or plan, or the cache does
            not fit max_seq_len or the memory.
        ConfigError: max_seq_len or rollback_len is no whole number, plan is no plan, or device is
            no device.
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
        size = manifest.max_seq_len
        if max_seq_len is not None:
            size = check_size("max_seq_len", max_seq_len)
        if rollback_len is not None:
            manifest = replace(manifest, rollback_len=check_size("rollback_len", rollback_len))
        how = "load it with the plan that it was made with, plan=FILE (--plan FILE)"
        manifest.check_bases(None if plan is None else plan.layers, how)
        _check_room(manifest, size)
        cache = _allocate(manifest, size, device, plan)
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
    """Tokens of each sequence, [batch] on the CPU, which all layers hold; `then` is what follows.

    Raises:
        ShapeError: the layers hold different numbers of tokens.
    """
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
    """Describe a cache.

    Raises:
        ShapeError: the layers hold different numbers of tokens.
        ConfigError: model or creation is not plain data.
    """
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


def _reader(cache: KVCache, part: Part) -> Callable[[], Iterator[torch.Tensor]]:
    """Makes the iterator over a part's rows as they stand in the file, one sequence at a time."""

    def chunks() -> Iterator[torch.Tensor]:
        layer = cache.layers[part.layer]
        rows = getattr(layer, part.attribute)
        for b in range(cache.batch):
            chunk = rows[b][:, _slots(layer, part, b)].transpose(0, 1)
            check_values(chunk, part, part.starts[b])
            yield chunk

    return chunks


def _slots(layer: LayerCache, part: Part, sequence: int) -> slice | torch.Tensor:
    """Where a part's rows stand in memory, in the order of the tokens."""
    count = part.counts[sequence]
    if part.kind == "sinks" or (part.kind == "packed" and layer.window is None):
        return slice(0, count)
    first = part.firsts[sequence] - layer.sink_len
    index = torch.arange(first, first + count, device="cpu")
    return layer.split.page_row(index) if part.kind == "packed" else layer.split.ring_row(index)


def _check_room(manifest: CacheManifest, max_seq_len: int) -> None:
    """Raise unless the rows fit a cache of max_seq_len."""
    rooms = manifest.rooms(max_seq_len)
    least = max(manifest.seq_lens)
    fits = least <= max_seq_len
    for part in manifest.parts.values():
        most = max(part.counts)
        fits = fits and most <= getattr(rooms[part.layer], part.kind)
        if part.kind == "packed":  # 16-bit rows keep their capacity, used or not
            window = manifest.layers[part.layer].window
            ends = manifest.sink_len + manifest.recent_len
            exact = ends if window is None else min(manifest.recent_len, window)
            least = max(least, exact + 1)
    if not fits:
        raise CheckpointError(
            f"the cache does not fit max_seq_len {max_seq_len}: use at least {least}"
        )


def _allocate(
    manifest: CacheManifest, max_seq_len: int, device: Devices, plan: CachePlan | None
) -> KVCache:
    """An empty cache with the counters of the manifest."""
    try:
        cache = _empty(manifest, max_seq_len, device, plan)
    except ConfigError as error:
        if "more than there is" not in str(error):
            raise
        gib = manifest.cache_bytes(max_seq_len) / 2**30
        raise CheckpointError(
            f"a cache of max_seq_len {max_seq_len} takes {gib:,.1f} GiB, more than there "
            f"is: pass a smaller max_seq_len, {max(manifest.seq_lens)} or more"
        ) from None
    for layer, entry in zip(cache.layers, manifest.layers, strict=True):
        lens = manifest.seq_lens, entry.packed_lens
        layer.begin(*(torch.tensor(numbers, device="cpu") for numbers in lens))
    cache.start_positions.copy_(torch.tensor(manifest.start_positions, device="cpu"))
    return cache


def _empty(
    manifest: CacheManifest, max_seq_len: int, device: Devices, plan: CachePlan | None
) -> KVCache:
    """A cache of the kind, the sizes and the formats of the manifest."""
    options: dict[str, Any] = {
        "sink_len": manifest.sink_len,
        "recent_len": manifest.recent_len,
        "rollback_len": manifest.rollback_len,
        "exact_format": manifest.exact_format,
        "device": device,
    }
    bases = None if plan is None else _bases(plan, manifest)
    if manifest.latent:
        formats = [LatentFormat(*pair) for pair in manifest.formats]
        return LatentKVCache(
            len(formats),
            manifest.batch,
            max_seq_len,
            fmt=formats,
            latent_dim=formats[0].latent_dim,
            rope_dim=formats[0].rope_dim,
            bases=bases,
            **options,
        )
    return KVCache(
        len(manifest.layers),
        manifest.batch,
        manifest.num_kv_heads,
        manifest.head_dim,
        max_seq_len,
        k_format=[k_format for k_format, _ in manifest.formats],
        v_format=[v_format for _, v_format in manifest.formats],
        **options,
        bases=bases,
        windows=[entry.window for entry in manifest.layers],
    )


def _bases(plan: CachePlan, manifest: CacheManifest) -> list[LayerBasis]:
    """The bases of a plan, with the clip ratios of the file's formats."""
    formats = {
        (i, side): str(fmt)
        for i, pair in enumerate(manifest.formats)
        for side, fmt in zip("kv", pair, strict=True)
    }
    return plan.with_layer_formats(formats).layers
