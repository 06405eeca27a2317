"""Sequences of a paged cache as a file: save_sequences, load_sequences, and the format.

Beside the keys of every file of rows (manifest.py) a manifest of "kvquant.sequences" has

    page_size      tokens of a page
    windows        of each layer, how many tokens, the last ones, attention sees; null for all; left
                   out where every layer sees all
    sequences      one object per sequence:
        id            a string or a number
        length        its tokens
        packed_len    how many tokens after the sinks are packed
        pages         their pages, in the order of the tokens; sequences may share the first ones
        tokens        the ids of its first tokens, as far as they are known, of 64 bits
        namespace     a string: with whom it may share rows; left out without one

The tensors, of layer I and of K and V each, uint8; one without rows is left out:

    layers.I.k_pages   [pages, num_kv_heads, page_size, row_bytes], each page once; zeros after the
                       last row in use. Of a layer with a window the pages that sequences see: of
                       each those from the window before its last full page's end on
    layers.I.k_exact   [16-bit rows of all sequences, num_kv_heads, row_bytes]: sequence after
                       sequence, its sinks and then its recent tokens, in their order
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..cache.checks import check_holds
from ..errors import CheckpointError, ConfigError, shown
from ..paged.cache import PagedKVCache
from ..paged.pool import Arrival, SequenceId
from ..paged.state import listed, plain_id
from ..rows.arguments import check_kind
from .container import RowsFile, check_values
from .manifest import LayerEntry, SavedSequence, SequencesManifest, common_keys
from .parts import PagePart, Part
from .schema import FormatName, sealed
from .tensor_files import TensorSource, check_name, save_safetensors

_CHUNK = 64  # pages to copy to the host at a time


def save_sequences(
    cache: PagedKVCache,
    ids: Sequence[SequenceId],
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Any] | None = None,
    creation: Mapping[str, Any] | None = None,
) -> Path:
    """Write sequences to a file: after a crash the old file or the new one is there, whole.

    The file has each page once, also those that several sequences share.

    Args:
        cache: of the sequences.
        ids: at least one sequence.
        path: NAME.safetensors, in a folder that exists.
        model: the model's config as a dict; load_sequences then refuses another model.
        creation: how the sequences came about, for people: strings, numbers, lists, dicts.

    Returns:
        The file.

    Raises:
        ConfigError: a sequence does not live or is given twice, model or creation is not plain
            data, or path has another ending.
        CheckpointError: the file could not be loaded: a row holds NaN or a value that its packed
            format cannot hold, or the manifest is too long.
        OSError: the file cannot be written.

    Example:
        >>> from kvquant import PagedKVCache, save_sequences
        >>> paged = PagedKVCache(1, 8, 128, num_pages=8, max_seq_len=256)
        >>> present = paged.allocate("a")
        >>> save_sequences(paged, ["a"], "sequences.safetensors").name
        'sequences.safetensors'
    """
    check_kind("cache", cache, PagedKVCache, "give a PagedKVCache; save_cache saves a KVCache")
    path, ids = check_name(path), listed(ids)
    cache.prepare(ids)
    if not ids or len(set(ids)) < len(ids):
        raise ConfigError(f"ids are {shown(list(ids))}: give at least one sequence, and each once")
    manifest, pages = _manifest_of(cache, ids, model, creation)
    sources = {
        name: TensorSource(torch.uint8, part.shape, _reader(cache, manifest, part, pages))
        for name, part in manifest.parts.items()
    }
    save_safetensors(path, sources, partial(sealed, manifest.plain()))
    return path


def load_sequences(
    cache: PagedKVCache,
    path: str | os.PathLike[str],
    *,
    ids: Mapping[Any, SequenceId] | None = None,
    model: Mapping[str, Any] | None = None,
) -> list[SequenceId]:
    """Read all sequences of a file into a running cache, bit for bit as they were saved.

    The call checks every value and every byte first. Sequences share the pages that they shared
    before, and later sequences can find their full pages of known tokens.

    Load only files that you trust: the file alone says which tokens its rows belong to, and which
    namespaces (`cache.namespace`) its sequences have.

    Args:
        cache: with the same layers, heads, formats, page_size, sink_len, recent_len, plan and
            windows.
        path: of the file.
        ids: new ids by saved ones; other sequences keep theirs.
        model: the config, as a dict, of the model that continues; None to take any file.

    Returns:
        The ids, in the order in which they were saved.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is damaged, foreign, of another model, or does not fit the cache.
        OutOfPagesError: there are not enough pages or sequence slots.
        ConfigError: an id is in use, or ids names a sequence that the file has not.
        DeviceError: the cache is on "meta".

    Example:
        >>> from kvquant import PagedKVCache, load_sequences, save_sequences
        >>> paged = PagedKVCache(1, 8, 128, num_pages=8, max_seq_len=256)
        >>> present = paged.allocate("a")
        >>> path = save_sequences(paged, ["a"], "sequences.safetensors")
        >>> paged.free("a")
        >>> list(load_sequences(paged, path))
        ['a']
    """
    check_kind("cache", cache, PagedKVCache, "give a PagedKVCache; load_cache reads a KVCache")
    if ids is not None:
        check_kind("ids", ids, Mapping, "give a dict of new ids by saved ones")
    check_holds(cache.device)
    with RowsFile(path, SequencesManifest) as file:
        _check_cache(cache, file.contents)
        file.contents.check_model(model)
        for part in file.contents.parts.values():
            file.rows(part)  # all are looked at before the first is used
        return _place(cache, file, ids or {})


def _manifest_of(
    cache: PagedKVCache,
    ids: Sequence[SequenceId],
    model: Mapping[str, Any] | None,
    creation: Mapping[str, Any] | None,
) -> tuple[SequencesManifest, list[int]]:
    """Describe sequences with pages counted from 0, and list the cache's pages in this order."""
    state = cache.state
    tables = [state.pool.block_table(sequence_id) for sequence_id in ids]
    pages = list(dict.fromkeys(page for table in tables for page in table))
    number = {page: at for at, page in enumerate(pages)}
    sequences = []
    for sequence_id, table in zip(ids, tables, strict=True):
        seq_slot = state.seq_slot(sequence_id)
        lens = int(state.lengths[seq_slot]), int(state.packed_lens[seq_slot])
        numbers = tuple(number[page] for page in table)
        tokens = tuple(map(int, state.tokens(sequence_id)))  # True is one
        namespace = state.pool.namespace(sequence_id)
        plain: Any = plain_id(sequence_id)  # the pool knows it, so it is one
        sequences.append(SavedSequence(plain, *lens, numbers, tokens, namespace))
    manifest = SequencesManifest(
        **common_keys(SequencesManifest, cache, model, creation),
        page_size=state.split.page_size,
        layers=tuple(
            LayerEntry(FormatName.of(rows.k_format), FormatName.of(rows.v_format))
            for rows in cache.rows.layers
        ),
        sequences=tuple(sequences),
        windows=tuple(cache.windows) if any(cache.windows) else (),
    )
    return manifest, pages


def _reader(
    cache: PagedKVCache, manifest: SequencesManifest, part: Part, pages: list[int]
) -> Callable[[], Iterator[torch.Tensor]]:
    if isinstance(part, PagePart):
        return partial(_page_chunks, cache, part, pages)
    return partial(_exact_chunks, cache, manifest, part)


def _page_chunks(cache: PagedKVCache, part: PagePart, pages: list[int]) -> Iterator[torch.Tensor]:
    """Pages of the cache, a few at a time, with zeros for unused rows."""
    rows, size = _storage(cache, part), part.counts[0]
    used = torch.tensor(part.used, device="cpu")
    group = cache.rows.layers[part.layer].group
    places = cache.state.places(group, [pages[number] for number in part.numbers])
    for start in range(0, len(places), _CHUNK):
        index = torch.tensor(places[start : start + _CHUNK], device="cpu").to(rows.device)
        chunk = rows.index_select(0, index).cpu()
        unused = torch.arange(size, device="cpu") >= used[start : start + _CHUNK, None]
        chunk.masked_fill_(unused[:, None, :, None], 0)
        check_values(part.by_token(chunk), part, start * size)
        yield chunk


def _exact_chunks(
    cache: PagedKVCache, manifest: SequencesManifest, part: Part
) -> Iterator[torch.Tensor]:
    rows = _storage(cache, part)
    for i, sequence in enumerate(manifest.sequences):
        own = rows[cache.state.seq_slot(sequence.id)]
        chunk = own.index_select(1, _exact_rows(cache, sequence)).transpose(0, 1).cpu()
        check_values(chunk, part, part.starts[i])
        yield chunk


def _place(
    cache: PagedKVCache, file: RowsFile[SequencesManifest], names: Mapping[Any, SequenceId]
) -> list[SequenceId]:
    sequences = file.contents.sequences
    saved = [sequence.id for sequence in sequences]
    known = set(saved)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"ids names {shown(unknown)}: the file has {shown(saved)}")
    ids = [cache.checked_id(names.get(name, name)) for name in saved]
    if len(set(ids)) < len(ids):
        raise ConfigError(f"ids are {shown(ids)}: give each sequence another one")
    with cache.changing:
        _place_rows(cache, file, ids)
        cache.insert_prefixes(ids)
    return list(ids)


def _place_rows(
    cache: PagedKVCache, file: RowsFile[SequencesManifest], ids: Sequence[SequenceId]
) -> None:
    manifest, sequences = file.contents, file.contents.sequences
    arrivals = {}
    for sequence_id, one in zip(ids, sequences, strict=True):
        dropped = [window.first_seen(one.packed_len) for window in cache.state.pool.windows]
        known = one.tokens, one.namespace, dropped
        arrivals[sequence_id] = Arrival(one.length, one.packed_len, one.pages, *known)
    with cache.swap_space.hinting():
        pages = cache.state.place(arrivals)
    with cache.state.or_free(ids):
        in_groups = range(len(cache.state.groups))
        tables = [cache.state.places(group, pages) for group in in_groups]
        places = [torch.tensor(table, dtype=torch.int64, device="cpu") for table in tables]
        for part in manifest.parts.values():
            rows = file.rows(part).to(cache.device)
            target = _storage(cache, part)
            if isinstance(part, PagePart):
                at = places[cache.rows.layers[part.layer].group][list(part.numbers)]
                target.index_copy_(0, at[at >= 0].to(cache.device), rows[at >= 0])
                continue
            each = zip(ids, sequences, rows.split(list(part.counts)), strict=True)
            for sequence_id, sequence, own in each:
                at = _exact_rows(cache, sequence)
                target[cache.state.seq_slot(sequence_id)].index_copy_(1, at, own.transpose(0, 1))


def _storage(cache: PagedKVCache, part: Part) -> torch.Tensor:
    rows: torch.Tensor = getattr(cache.rows.layers[part.layer], part.attribute)
    return rows


def _exact_rows(cache: PagedKVCache, sequence: SavedSequence) -> torch.Tensor:
    """Where the 16-bit rows of a sequence are in its slot, in token order."""
    rows = cache.state.split.exact_rows(sequence.length, sequence.packed_len)
    return torch.from_numpy(rows).to(cache.device)


def _check_cache(cache: PagedKVCache, manifest: SequencesManifest) -> None:
    """Raise unless the rows of a file fit a cache."""
    ours = common_keys(SequencesManifest, cache, None, None)
    names = "latent", "num_kv_heads", "sink_len", "recent_len", "exact_format"
    each = {name: (getattr(manifest, name), ours[name]) for name in names}
    each["page_size"] = manifest.page_size, cache.state.split.page_size
    each["num_layers"] = len(manifest.formats), cache.num_layers
    each["windows"] = list(manifest.windows), cache.windows if manifest.windows else []
    for i, (pair, rows) in enumerate(zip(manifest.formats, cache.rows.layers, strict=False)):
        both = pair, (rows.k_format, rows.v_format)
        saved, own = (" and ".join(map(str, formats)) for formats in both)
        each[f"layer {i}"] = saved, own
    for name, (saved, own) in each.items():
        if saved != own:
            raise CheckpointError(
                f"{name} is {saved} in the file and {own} in the cache: make a cache like the one "
                "that was saved"
            )
    how = f"make the cache with {type(cache).__name__}.from_plan and the plan of the rows"
    manifest.check_bases(cache.bases, how)
    longest = max(sequence.length for sequence in manifest.sequences)
    if longest > cache.max_seq_len:
        raise CheckpointError(
            f"a sequence has {longest} tokens, max_seq_len is {cache.max_seq_len}: make a cache "
            "for longer ones"
        )
