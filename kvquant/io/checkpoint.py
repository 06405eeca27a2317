"""Caches as files: save_cache and load_cache, and the format, versions 1 to 5.

A cache is one safetensors file. Its metadata has two strings:

    kvquant_cache          the manifest, JSON
    kvquant_cache_sha256   the SHA-256 of the manifest's UTF-8 bytes, hexadecimal digits

The manifest is an object with exactly these keys; every number is whole:

    format            "kvquant-cache"
    version           1; 2 if a layer has a window; 3 if rollback_len is given; 4 if latent is; 5 if
                      latent is, and there are transforms
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
                      the reader must have. A reader that meets another entry must refuse the file
    sha256            for every tensor the SHA-256 of its bytes

The tensors hold the rows in use, of layer I and of K and V each:

    layers.I.k_sinks    tokens 0 to sink_len, in exact_format
    layers.I.k_packed   the next packed_lens tokens, in the layer's k format
    layers.I.k_recent   the rest, in exact_format
    layers.I.v_...      the same of V

each uint8 [tokens of all sequences, num_kv_heads, row_bytes]: sequence after sequence, tokens in
their order. A tensor without rows is left out; no other tensor may be there. Row bytes are those of
kvquant/rows/format.py. K's and V's head_dim may differ and formats may differ by layer.

A larger cache is cut into shards NAME-XXXXXXXX-00001-of-00003.safetensors (X: eight random digits,
new with each save) and an index NAME.safetensors.index.json:

    {"metadata": {"total_size", "kvquant_cache", "kvquant_cache_sha256"},
     "weight_map": {tensor: file name of its shard, in the same folder}}

A shard's own metadata is {"format": "kvquant-cache-shard"}. Where both NAME.safetensors and its
index exist, the index counts, unless NAME.safetensors is whole and no cache: files are put in place
by a rename and removed afterwards, so that at every moment exactly one complete cache is found, the
old one or the new one. A reader opens all files before it reads rows, and begins again if they were
replaced before it had them all. Writers wait for one another (atomic.py). An index without
kvquant_cache is another program's: it does not count, and nothing is saved beside it. Of a name
that is a link the file that it leads to is replaced, and shards stand beside that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ..cache.checks import Devices, devices_of
from ..cache.contiguous import KVCache
from ..cache.latent import LatentKVCache
from ..cache.layer import LayerCache
from ..errors import CheckpointError, ConfigError, ShapeError, shown
from ..rows.arguments import check_kind, check_size, is_whole
from ..rows.basis import LayerBasis, fingerprints
from ..rows.latent import LatentFormat
from .atomic import Place, named, sync_folder, token, writing
from .container import RowsFile, check_values, seal
from .manifest import CacheLayer, CacheManifest, common_keys
from .parts import Part
from .plan import CachePlan, Plan, as_plan
from .schema import FormatName
from .shards import (
    SHARD,
    check_name,
    content,
    found_at,
    index_path,
    is_cache_index,
    remove_old_shards,
)
from .tensor_files import TensorSource, header_text, write_safetensors

MAX_SHARDS = 512  # a reader opens all of them at once, and a process often may open 1,024 files


def save_cache(
    cache: KVCache,
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Any] | None = None,
    creation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 4 << 30,
) -> list[Path]:
    """Write a cache to a file, in one step: after a crash there is the old file or the new one.

    Only tokens in use are written, and no second copy of the cache is made: nobody may append to it
    meanwhile, or rows are mixed. A file that is replaced keeps its mode, and a link leads where it
    did. Another process that saves to this path is waited for; one that loads from it finds the old
    cache or the new one, whole.

    Args:
        cache: whose layers all hold the same tokens.
        path: NAME.safetensors, in a folder that exists.
        model: the model's config as a dict (config_dict of a CachedModel); load_cache then refuses
            another model.
        creation: how the cache came about, to be read by people: strings, numbers, lists, dicts.
        max_shard_bytes: bytes of rows above which the cache is cut into shards with an index.

    Returns:
        The files written; with shards the index is the last.

    Raises:
        ShapeError: the layers hold different numbers of tokens.
        ConfigError: cache is no KVCache, model or creation is not plain data, max_shard_bytes is no
            whole number from 1, path has another ending or leads to what is no file, or the index
            of its name is another program's.
        CheckpointError: it could not be loaded again: a row holds NaN, or a value that it cannot be
            packed with, or what the file says of the cache is too long.
        OSError: the file cannot be written, or what it replaces cannot be removed: then the error
            says which of the two counts.

    Example:
        >>> from kvquant import KVCache, save_cache
        >>> cache = KVCache(num_layers=1, batch=1, num_kv_heads=8, head_dim=128, max_seq_len=64)
        >>> [path.name for path in save_cache(cache, "cache.safetensors")]
        ['cache.safetensors']
    """
    how = (
        "give a KVCache, of a QuantizedCache (from kvquant import QuantizedCache) its kv; "
        "save_sequences saves those of a PagedKVCache"
    )
    check_kind("cache", cache, KVCache, how)
    if not is_whole(max_shard_bytes) or max_shard_bytes < 1:
        raise ConfigError(
            f"max_shard_bytes {shown(max_shard_bytes)} is not possible: use a whole number from 1"
        )
    path = check_name(path)
    if path.is_symlink() and not index_path(path).exists():
        path = Path(os.path.realpath(path))
    index = index_path(path)
    if os.path.lexists(index) and not is_cache_index(index):
        raise ConfigError(f"{index} is not an index of kvquant: choose another name")
    manifest = _manifest_of(cache, model, creation)
    sources = {
        part.name: TensorSource(torch.uint8, part.shape, _reader(cache, part))
        for part in manifest.parts.values()
    }
    manifest.check_readable()
    shards = _cut(sources, int(max_shard_bytes))
    if len(shards) > MAX_SHARDS:
        raise ConfigError(
            f"max_shard_bytes {max_shard_bytes} would make {len(shards)} shards, {MAX_SHARDS} are "
            "possible: use a larger number"
        )
    with writing(path) as place:
        old = None if place.is_locked else content(index)
        try:
            if len(shards) == 1:
                with place.replaced(path, like=index if index.exists() else None) as file:
                    write_safetensors(file, sources, lambda digests: seal(manifest, digests))
                written, replaced = [path], index
            else:
                written, replaced = _write_shards(place, manifest, path, shards), path
            if os.path.lexists(replaced):
                os.unlink(replaced)
                sync_folder(path.parent)
        except OSError as error:
            new = path if len(shards) == 1 else index
            if new not in place.written:
                if not place.written:
                    raise
                cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
                told = "the cache was not saved, and what stood there before still counts"
                raise named(cause, new, told) from error
            counts = found_at(path)
            told = "the new cache is whole, and counts"
            if counts != new:
                told = f"the new cache is whole, but {counts.name} still counts: remove it"
            raise named(error, error.filename or new, told) from error
        remove_old_shards(path, {file.name for file in written}, old)
    return written


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
        path: what was given to save_cache, or the index of its shards.
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
        >>> files = save_cache(cache, "cache.safetensors")
        >>> load_cache("cache.safetensors").max_seq_len
        64
    """
    devices_of(device)  # before the file is read
    if plan is not None:
        plan = as_plan(plan)
    with RowsFile(path, CacheManifest) as file:
        manifest = file.manifest
        manifest.check_model(file.path, model)
        size = manifest.max_seq_len
        if max_seq_len is not None:
            size = check_size("max_seq_len", max_seq_len)
        if rollback_len is not None:
            manifest = replace(manifest, rollback_len=check_size("rollback_len", rollback_len))
        _check_plan(file.path, manifest, plan)
        _check_room(file.path, manifest, size)
        cache = _allocate(file.path, manifest, size, device, plan)
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
    manifest = CacheManifest(
        **common_keys(CacheManifest, cache, model, creation),
        version=0,
        head_dim=cache.head_dim,
        max_seq_len=cache.max_seq_len,
        seq_lens=lens,
        start_positions=starts,
        positions=tuple(map(sum, zip(starts, lens, strict=True))),  # may be beyond int64
        rollback_len=cache.rollback_len,
        latent=isinstance(cache, LatentKVCache),
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
    return replace(manifest, version=manifest.first_version)


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


def _cut(sources: Mapping[str, TensorSource], limit: int) -> list[dict[str, TensorSource]]:
    """Tensors in their order, as many to a shard as the limit allows, at least one."""
    shards: list[dict[str, TensorSource]] = [{}]
    size = 0
    for name, source in sources.items():
        if shards[-1] and size + source.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = source
        size += source.nbytes
    return shards


def _write_shards(
    place: Place, manifest: CacheManifest, path: Path, shards: list[dict[str, TensorSource]]
) -> list[Path]:
    """Write shards under names never used before, then put the index in place."""
    stem, mark = path.name.removesuffix(".safetensors"), token()
    files = [
        path.with_name(f"{stem}-{mark}-{i:05}-of-{len(shards):05}.safetensors")
        for i in range(1, len(shards) + 1)
    ]
    index = index_path(path)
    like = next((old for old in (index, path) if old.exists()), None)  # for its mode
    digests: dict[str, str] = {}
    try:
        for name, shard in zip(files, shards, strict=True):
            with place.replaced(name, like) as file:
                digests |= write_safetensors(file, shard, lambda _: SHARD)
        total = sum(source.nbytes for shard in shards for source in shard.values())
        weight_map = {
            name: file.name for file, shard in zip(files, shards, strict=True) for name in shard
        }
        metadata = {"total_size": total, **seal(manifest, digests)}
        text = header_text({"metadata": metadata, "weight_map": weight_map}, "the index")
        with place.replaced(index, like) as file:
            file.write(text)
    except BaseException:
        if mark.encode() not in content(index):  # else they are in use already
            for name in files:
                name.unlink(missing_ok=True)
        raise
    return [*files, index]


def _check_plan(path: Path, manifest: CacheManifest, plan: CachePlan | None) -> None:
    """Raise unless the plan has the bases that the rows are stored in."""
    ours = list(manifest.transforms)
    if plan is None and ours:
        raise CheckpointError(
            f"{path} was made with a plan, whose bases its rows are stored in: give it, "
            "plan=FILE (--plan FILE)"
        )
    if plan is None:
        return
    theirs = fingerprints(plan.layers)
    if ours != theirs:
        differ = [i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]]
        where = f" (layer {differ[0]} differs)" if differ else ""
        raise CheckpointError(
            f"{path} was made {'with another plan' if ours else 'without a plan'}{where}: its rows "
            "cannot be read in the bases of this one; take the plan that it was made with"
        )
    heads = manifest.num_kv_heads  # zeros of other shapes have the same fingerprint
    for i, (entry, basis) in enumerate(zip(manifest.layers, plan.layers, strict=True)):
        for fmt, side in zip(entry.formats, basis, strict=True):
            if side.offset.shape != (heads, fmt.head_dim):
                raise CheckpointError(
                    f"layer {i} of {path} has {[heads, fmt.head_dim]} heads and channels, that of "
                    f"the plan {list(side.offset.shape)}: take the plan that it was made with"
                )


def _check_room(path: Path, manifest: CacheManifest, max_seq_len: int) -> None:
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
            f"{path} does not fit max_seq_len {max_seq_len}: use at least {least}"
        )


def _allocate(
    path: Path,
    manifest: CacheManifest,
    max_seq_len: int,
    device: Devices,
    plan: CachePlan | None,
) -> KVCache:
    """An empty cache with the counters of the manifest."""
    try:
        cache = _empty(manifest, max_seq_len, device, plan)
    except ConfigError as error:
        if "more than there is" not in str(error):
            raise
        gib = manifest.cache_bytes(max_seq_len) / 2**30
        raise CheckpointError(
            f"{path}: a cache of max_seq_len {max_seq_len} takes {gib:,.1f} GiB, more than there "
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
