"""The manifest: what a cache file says of itself, as JSON, read with every value checked.

The keys are told in checkpoint.py, which owns the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from .cache import KVCache
from .errors import CheckpointError, ConfigError, ShapeError
from .identity import model_identity
from .layout import EXACT_CODECS, RowFormat

FORMAT = "kvquant-cache"
VERSION = 1
KINDS = ("sinks", "packed", "recent")
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True)
class Part:
    """The rows of K or of V of one layer in one kind of segment: one tensor of the file.

    Attributes:
        name: of the tensor.
        layer: index of the layer.
        side: "k" or "v".
        kind: "sinks", "packed" or "recent".
        fmt: format of the rows.
        counts: rows of each sequence.
        firsts: the token that the first row of each sequence holds.
    """

    layer: int
    side: str
    kind: str
    fmt: RowFormat
    counts: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def attribute(self) -> str:
        """The attribute of LayerCache that holds the rows."""
        return f"{self.side}_{self.kind}"

    @property
    def name(self) -> str:
        """Name of the tensor in the file."""
        return f"layers.{self.layer}.{self.attribute}"

    @cached_property
    def num_rows(self) -> int:
        """Tokens of all sequences."""
        return sum(self.counts)

    def locate(self, row: int) -> tuple[int, int]:
        """Sequence and token of a row of the tensor."""
        for sequence, count in enumerate(self.counts):
            if row < count:
                return sequence, self.firsts[sequence] + row
            row -= count
        raise IndexError(row)


@dataclass(frozen=True)
class LayerEntry:
    """Formats of one layer and the packed tokens of each of its sequences."""

    k_format: RowFormat
    v_format: RowFormat
    packed_lens: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """All of a cache but its rows; attributes as in KVCache."""

    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    sink_len: int
    recent_len: int
    exact_format: str
    seq_lens: tuple[int, ...]
    start_positions: tuple[int, ...]
    layers: tuple[LayerEntry, ...]
    model: Mapping[str, str] | None
    creation: Mapping[str, Any]

    @classmethod
    def of(
        cls, cache: KVCache, model: Mapping[str, Any] | None, creation: Mapping[str, Any] | None
    ) -> Manifest:
        """Describe a cache.

        Raises:
            ShapeError: the layers hold different numbers of tokens.
            ConfigError: model or creation is not plain data.
        """
        seq_lens = cache.seq_lens
        for i, layer in enumerate(cache.layers):
            if not layer.seq_lens.equal(seq_lens):
                raise ShapeError(
                    f"layer {i} holds {layer.seq_lens.tolist()} tokens, another one "
                    f"{seq_lens.tolist()}: append this step's tokens to every layer, then save"
                )
        try:
            copied = json.loads(json.dumps(dict(creation or {}), allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"creation is not plain data ({error}): use strings, finite numbers, lists, dicts"
            ) from None
        return cls(
            cache.num_kv_heads,
            cache.head_dim,
            cache.max_seq_len,
            cache.sink_len,
            cache.recent_len,
            cache.exact_format,
            tuple(seq_lens.tolist()),
            tuple(cache.start_positions.tolist()),
            tuple(
                LayerEntry(layer.k_format, layer.v_format, tuple(layer.packed_lens.tolist()))
                for layer in cache.layers
            ),
            None if model is None else model_identity(model),
            copied,
        )

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.seq_lens)

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of the next token of each sequence."""
        return tuple(map(sum, zip(self.start_positions, self.seq_lens, strict=True)))

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The tensors of the file by name, in their order; empty ones have none."""
        found = {}
        for i, entry in enumerate(self.layers):
            sinks = tuple(min(n, self.sink_len) for n in self.seq_lens)
            packed = entry.packed_lens
            recent = tuple(map(lambda n, s, p: n - s - p, self.seq_lens, sinks, packed))
            zeros = (0,) * self.batch
            spans = {
                "sinks": (sinks, zeros),
                "packed": (packed, sinks),
                "recent": (recent, tuple(map(sum, zip(sinks, packed, strict=True)))),
            }
            for side, fmt in (("k", entry.k_format), ("v", entry.v_format)):
                exact = RowFormat(self.exact_format, 1, fmt.head_dim)
                for kind, (counts, firsts) in spans.items():
                    rows = fmt if kind == "packed" else exact
                    part = Part(i, side, kind, rows, counts, firsts)
                    if part.num_rows:
                        found[part.name] = part
        return found

    def shape(self, part: Part) -> tuple[int, int, int]:
        """Shape of a part's tensor."""
        return part.num_rows, self.num_kv_heads, part.fmt.row_bytes

    def rooms(self, max_seq_len: int) -> dict[str, int]:
        """Rows of each kind that a sequence has room for in a cache of max_seq_len."""
        sinks = min(self.sink_len, max_seq_len)
        recent = min(self.recent_len, max_seq_len - sinks)
        return {"sinks": sinks, "packed": max_seq_len - sinks - recent, "recent": recent}

    def cache_bytes(self, max_seq_len: int) -> int:
        """Bytes of the rows of a cache of max_seq_len."""
        rooms, total = self.rooms(max_seq_len), 0
        for entry in self.layers:
            for fmt in (entry.k_format, entry.v_format):
                exact = RowFormat(self.exact_format, 1, fmt.head_dim).row_bytes
                total += rooms["packed"] * fmt.row_bytes
                total += (rooms["sinks"] + rooms["recent"]) * exact
        return total * self.batch * self.num_kv_heads

    def to_json(self, digests: Mapping[str, str], writer: str) -> str:
        """The manifest as it stands in a file."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "writer": writer,
                "num_kv_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "max_seq_len": self.max_seq_len,
                "sink_len": self.sink_len,
                "recent_len": self.recent_len,
                "exact_format": self.exact_format,
                "seq_lens": self.seq_lens,
                "start_positions": self.start_positions,
                "positions": self.positions,
                "layers": [
                    {
                        "k": {"format": str(entry.k_format), "head_dim": entry.k_format.head_dim},
                        "v": {"format": str(entry.v_format), "head_dim": entry.v_format.head_dim},
                        "packed_lens": entry.packed_lens,
                    }
                    for entry in self.layers
                ],
                "model": self.model,
                "creation": self.creation,
                "transforms": [],
                "sha256": dict(digests),
            },
            separators=(",", ":"),
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> tuple[Manifest, dict[str, str]]:
        """Read a manifest and the SHA-256 of each tensor, and check every value.

        Raises:
            CheckpointError: the manifest is not one that this version writes.
        """
        try:
            top = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"the manifest is no JSON ({error})") from None
        if type(top) is not dict or top.get("format") != FORMAT:
            raise CheckpointError(f"the manifest is not that of a {FORMAT} file")
        if top.get("version") != VERSION:
            raise CheckpointError(
                f"the file has version {top.get('version')!r:.40}, this kvquant reads {VERSION}: "
                "take the kvquant that wrote it, or save it anew"
            )
        _keys(top, _TOP_KEYS, "the manifest")
        if top["transforms"] != []:
            raise CheckpointError(
                f"the rows were transformed by {top['transforms']!r:.80}, which this kvquant does "
                "not know: take a newer one"
            )
        manifest = cls(
            _whole(top["num_kv_heads"], "num_kv_heads", low=1),
            _whole(top["head_dim"], "head_dim", low=1),
            _whole(top["max_seq_len"], "max_seq_len"),
            _whole(top["sink_len"], "sink_len"),
            _whole(top["recent_len"], "recent_len"),
            _choice(top["exact_format"], "exact_format", EXACT_CODECS),
            _wholes(top["seq_lens"], "seq_lens"),
            _wholes(top["start_positions"], "start_positions", low=-_INT64, high=_INT64),
            tuple(
                _layer_entry(entry, f"layers[{i}]")
                for i, entry in enumerate(_list(top["layers"], "layers"))
            ),
            _model(top["model"]),
            _dict(top["creation"], "creation"),
        )
        manifest._check(_wholes(top["positions"], "positions", low=-_INT64, high=_INT64))
        digests = _dict(top["sha256"], "sha256")
        if digests.keys() != manifest.parts.keys():
            names = sorted(digests.keys() ^ manifest.parts.keys())
            raise CheckpointError(
                f"the tensors listed do not fit the lengths: see {names[0]!r:.80}"
            )
        for name, digest in digests.items():
            _digest(digest, f"sha256 of {name}")
        return manifest, digests

    def _check(self, positions: tuple[int, ...]) -> None:
        """Raise unless the values fit one another."""
        if not self.batch or not self.layers:
            raise CheckpointError("seq_lens and layers must not be empty")
        if len(self.start_positions) != self.batch or positions != self.positions:
            raise CheckpointError("start_positions, seq_lens and positions do not fit one another")
        if max(self.seq_lens) > self.max_seq_len:
            raise CheckpointError(
                f"a sequence has {max(self.seq_lens)} tokens, max_seq_len is {self.max_seq_len}"
            )
        for i, entry in enumerate(self.layers):
            if len(entry.packed_lens) != self.batch:
                raise CheckpointError(
                    f"layers[{i}].packed_lens has {len(entry.packed_lens)} numbers for "
                    f"{self.batch} sequences"
                )
            for seq_len, packed in zip(self.seq_lens, entry.packed_lens, strict=True):
                most = max(seq_len - self.sink_len, 0)
                if not max(most - self.recent_len, 0) <= packed <= most:
                    raise CheckpointError(
                        f"layers[{i}].packed_lens has {packed} for a sequence of {seq_len} tokens "
                        f"with sink_len {self.sink_len} and recent_len {self.recent_len}"
                    )


_TOP_KEYS = set(
    "format version writer num_kv_heads head_dim max_seq_len sink_len recent_len exact_format "
    "seq_lens start_positions positions layers model creation transforms sha256".split()
)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _keys(value: dict[str, Any], expected: set[str], what: str) -> None:
    if value.keys() != expected:
        names = sorted(value.keys() ^ expected)
        raise CheckpointError(f"{what} has no key {names[0]!r:.80}, or should have none")


def _dict(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise CheckpointError(f"{what} is {value!r:.80}: it must be an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise CheckpointError(f"{what} is {value!r:.80}: it must be a list")
    return value


def _whole(value: Any, what: str, *, low: int = 0, high: int = _INT32) -> int:
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(
            f"{what} is {value!r:.80}: it must be a whole number from {low} to {high}"
        )
    return value


def _wholes(values: Any, what: str, *, low: int = 0, high: int = _INT32) -> tuple[int, ...]:
    return tuple(_whole(value, what, low=low, high=high) for value in _list(values, what))


def _choice(value: Any, what: str, choices: tuple[str, ...]) -> str:
    if type(value) is not str or value not in choices:
        raise CheckpointError(f"{what} is {value!r:.80}: it must be one of {', '.join(choices)}")
    return value


def _row_format(value: Any, what: str) -> RowFormat:
    _keys(_dict(value, what), {"format", "head_dim"}, what)
    name, head_dim = value["format"], value["head_dim"]
    if type(name) is not str:
        raise CheckpointError(f"{what}.format is {name!r:.80}: it must be a format's name")
    try:
        return RowFormat.parse(name, _whole(head_dim, f"{what}.head_dim"))
    except ValueError as error:  # ConfigError, or a number of groups too long for int()
        raise CheckpointError(f"{what}: {str(error)[:200]}") from None


def _layer_entry(value: Any, what: str) -> LayerEntry:
    _keys(_dict(value, what), {"k", "v", "packed_lens"}, what)
    return LayerEntry(
        _row_format(value["k"], f"{what}.k"),
        _row_format(value["v"], f"{what}.v"),
        _wholes(value["packed_lens"], f"{what}.packed_lens"),
    )


def _model(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    model = _dict(value, "model")
    _keys(model, {"type", "sha256"}, "model")
    if type(model["type"]) is not str:
        raise CheckpointError("model.type must be a string")
    _digest(model["sha256"], "model.sha256")
    return model


def _digest(value: Any, what: str) -> None:
    if type(value) is not str or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise CheckpointError(f"{what} is {value!r:.80}: it must be 64 hexadecimal digits")
