"""The manifest of a CachePlan's file: checks of the facts and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from ..errors import CheckpointError, refuse
from ..rows.format import RowFormat, check_head_dims
from ..rows.latent import LatentFormat
from .schema import MAX_LAYERS, PLAN, Length, ModelName, checked
from .tensor_files import SafetensorsFile


class _Side(msgspec.Struct):
    """How K or V of a layer is kept."""

    format: str
    basis: Annotated[str, Meta(pattern=r"\A(none|matrix)\Z")]
    rounding: Annotated[str, Meta(pattern=r"\A(nearest|feedback)\Z")]

    @property
    def words(self) -> tuple[str, str]:
        """Basis and rounding; some name the tensors that they need."""
        return self.basis, self.rounding


class _Layer(msgspec.Struct):
    """How a layer is kept."""

    k: _Side
    v: _Side
    kept: str | None

    @property
    def sides(self) -> tuple[tuple[str, _Side], tuple[str, _Side]]:
        return ("k", self.k), ("v", self.v)


class _Figures(msgspec.Struct):
    """A measurement; the KL of a broken plan is NaN."""

    kl: float


class _Limit(msgspec.Struct):
    """The limit of the plan."""

    max_kl: float | None
    met: bool


class _Other(msgspec.Struct):
    """A layer of the model that has no cache."""

    layer: Length
    why: str


class _Facts(msgspec.Struct):
    """The facts that caches and engines read; the others are for people, and their report."""

    model: ModelName
    layers: Annotated[tuple[_Layer, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    bits: float
    limit: _Limit
    measured: _Figures | None
    windowed: _Figures | None = None
    places: tuple[Length, ...] = ()
    others: tuple[_Other, ...] = ()
    latent: bool = False


def read_facts(file: SafetensorsFile) -> dict[str, Any]:
    """The facts of a file, whose tensors fit its manifest."""
    facts = file.manifest(PLAN)
    del facts["format"], facts["version"]
    shapes = checked(facts.pop("shapes", None), dict[str, tuple[Length, ...]], "shapes")
    file.check_tensors(torch.float32, shapes)
    return facts


def check_facts(facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless facts fit the shapes of the tensors."""
    given = checked(dict(facts), _Facts, "the plan")
    refuse(CheckpointError, _odd_shapes(given, shapes))
    pairs = [
        [RowFormat.parse(side.format, shapes[f"{name}.offset"][2]) for name, side in layer.sides]
        for layer in given.layers
    ]
    for pair in pairs:
        check_pair(given.latent, *pair)
    refuse(CheckpointError, _contradictions(given, pairs))


def _contradictions(given: _Facts, pairs: list[list[RowFormat]]) -> Iterator[str]:
    """What facts say otherwise elsewhere."""
    layers = len(given.layers)
    for i, (layer, pair) in enumerate(zip(given.layers, pairs, strict=True)):
        for (_, side), fmt in zip(layer.sides, pair, strict=True):
            if given.latent and side.rounding != "nearest":
                yield f"layers[{i}] rounds latent rows with feedback: no cache does"
            if layer.kept is not None and not (fmt.is_exact and side.words == ("none", "nearest")):
                yield f"layers[{i}] is kept in 16 bit, and is {side!s:.120}"
    places = given.places or range(layers)
    others = [other.layer for other in given.others]
    if len(places) != layers or len({*places, *others}) != layers + len(others):
        yield f"places and others do not say where {layers} layers are"


def check_pair(is_latent: bool, k: RowFormat, v: RowFormat) -> None:
    if is_latent:
        LatentFormat(k, v)
    else:
        check_head_dims(k, v)


READ = ["offset"], ["matrix"], ["feedback"], ["clip"]  # what stands after "k." and "v."


def check_values(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless tensors hold possible values; facts are checked."""
    refuse(CheckpointError, _odd_values(facts, tensors))


def _odd_values(facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        is_read = name.split(".")[1:2] in READ
        if is_read and not bool(tensor.isfinite().all()):
            yield f"tensor {name!r:.80} has values that are not finite"
        if ".clip." in name and not bool(((tensor > 0) & (tensor <= 1)).all()):
            yield f"tensor {name!r:.80} has shares that are not in (0, 1]"
    for side, (name, kind) in product("kv", (("matrix", "basis"), ("feedback", "rounding"))):
        matrices = tensors.get(f"{side}.{name}")
        if matrices is None:
            continue
        eye = torch.eye(matrices.shape[-1], dtype=torch.float32, device="cpu")
        for i, entry in enumerate(facts["layers"]):
            is_used = entry[side][kind] == name or entry["kept"] is not None
            if not is_used and not bool((matrices[i] == eye).all()):
                yield (
                    f"layers[{i}].{side}.{kind} is {entry[side][kind]!r}, and tensor "
                    f"{side}.{name} has something for it"
                )


def _odd_shapes(given: _Facts, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    layers, heads = len(given.layers), shapes.get("k.offset", (0, 0))[1:2]
    offsets = [shapes.get(f"{side}.offset", ()) for side in "kv"]
    if any(len(shape) != 3 or shape[:2] != (layers, *heads) or 0 in shape for shape in offsets):
        yield (
            f"tensors k.offset and v.offset of {[list(shape) for shape in offsets]!s:.80} are "
            f"missing or do not fit {layers} layers"
        )
    if given.latent and heads != (1,):
        yield f"latent rows have one KV head, the plan is of {heads[0]}"
    for side in "kv":
        chosen = {word for layer in given.layers for word in getattr(layer, side).words}
        for name in sorted(chosen & {"matrix", "feedback"}):
            if f"{side}.{name}" not in shapes:
                yield f"tensor {side}.{name!r} is missing"
    for name, shape in shapes.items():
        side, _, what = name.partition(".")
        dim = shapes[f"{'v' if side == 'v' else 'k'}.offset"][2]
        known = {"matrix": (dim, dim), "feedback": (dim, dim), "clip": (), "offset": (dim,)}
        own = known.get(what.partition(".")[0], shape[2:])  # of any shape, where nobody reads it
        if shape != (expected := (layers, *heads, *own)):
            yield f"tensor {name!r:.80} is {list(shape)!s:.80}: it must be {list(expected)}"
