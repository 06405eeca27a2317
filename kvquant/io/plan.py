"""CachePlan: how a model's keys and values are kept, as `kvquant calibrate` chose it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch

from ..errors import CheckpointError, ConfigError, ShapeError, shown
from ..rows.arguments import check_kind, is_whole
from ..rows.basis import Basis, LayerBasis
from ..rows.format import RowFormat, mean_bits
from ..rows.latent import LatentFormat
from .atomic import as_path
from .model_id import check_identity
from .plan_file import check_facts, check_pair, check_values, read_facts
from .schema import PLAN, parse, sealed
from .tensor_files import SafetensorsFile, TensorSource, naming, save_safetensors


@dataclass(frozen=True, eq=False)
class CachePlan:
    """How a model's keys and values are kept: formats, transforms, and what they cost, measured.

    A plan's file has the tensors below and, as its manifest, the facts and the "shapes" of the
    tensors. Layers L, KV heads H, head_dim D; all tensors are float32. "k" stands for "v" too.

    Transforms (rows/basis.py, rows/quantize.py); files may have others, which nobody reads:
        k.offset          [L, H, D]     subtracted from every row (zeros: none)
        k.matrix          [L, H, D, D]  M, for layers whose basis is "matrix" (identity for others);
                                        there where any layer has one
        k.clip.FORMAT     [L, H]        share of the range that rows of FORMAT keep, 1 or less
        k.feedback        [L, H, D, D]  L of error feedback, for the rounding "feedback"

    A plan of latent rows (multi-head latent attention) has one KV head: "k" is the latent and "v"
    the RoPE part, of another D. Rounding is "nearest". A side in 16 bit is stored as it comes.

    facts, plain data; what may be absent or null says so:
        latent          true: of latent rows; else absent
        model           {"type", "sha256", "weights"}: model_identity of the config
        places          L numbers: the layer of the model at each index of the cache
        others          [{"layer", "why"}]: layers of the model without a cache
        layers          L objects {"k": side, "v": side, "kept": null or why this layer stays in 16
                        bit}; a side is {"format": "int4", "basis": "none" | "matrix",
                        "rounding": "nearest" | "feedback"}
        bits            per element of K and V, of the packed rows, headers included
        observed_tokens, candidates (formats), zero_data (true: no text was observed)
        measured        null, or figures of the plan on held-out text against the 16-bit cache:
                        {"kl" (nats per token), "top1" (a share), "perplexity", "exact_perplexity",
                        "context", "scored" (tokens), "sink_len", "recent_len"}, and if known
                        "passages", "kl_passages", standard errors "kl_error" and "top1_error", and
                        "in_one_pass", why the model could not decode from a KVCache
        windowed        null, or these figures with first and last tokens in 16 bit, and "bits"
        limit           {"max_kl": number or null, "budget": bits or null, "met": bool}
        blamed          layers that cost the most, where the limit is not met
        sensitivity     [{"layer", "k_format", "v_format", "kl"}]: one side of one layer quantized,
                        with these first and last tokens in 16 bit
        comparison      [{"format", "plan": bool, "bits", "kl", "top1", "perplexity"}]: one format
                        for all layers, with and without the plan's transforms
        settings        how it was measured

    Attributes:
        facts: as above.
        tensors: as above, on the CPU.

    Example:
        >>> from kvquant import CachePlan, KVCache
        >>> plan = CachePlan.load("plan.safetensors")  # as kvquant calibrate writes it
        >>> cache = KVCache.from_plan(plan, batch=1, max_seq_len=64)
        >>> cache = KVCache.from_plan("plan.safetensors", batch=1, max_seq_len=64)  # the same
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def __repr__(self) -> str:
        formats = (sorted({pair[side] for pair in self.formats}) for side in (0, 1))
        k, v = map("/".join, formats)
        sides = f"latents {k}, RoPE parts {v}" if self.is_latent else f"K {k}, V {v}"
        model, measured = self.facts.get("model", {}), self.facts.get("measured")
        fidelity = f"KL {measured['kl']:.2g} nats per token" if measured else "not measured"
        return (
            f"CachePlan({model.get('type')}, {self.num_layers} layers, {sides}, "
            f"{self.bits:.2f} bits per element, {fidelity})"
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: Mapping[str, Any] | None = None
    ) -> CachePlan:
        """Read and check a plan.

        Args:
            path: of the file.
            model: the config, as a dict, of the model that uses the plan; None to take any
                plan.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the file is damaged, no plan, or made for another model.
        """
        path = as_path(path)
        kinds = CheckpointError, ConfigError, ShapeError
        with naming(path, kinds), SafetensorsFile(path) as file:
            facts = read_facts(file)
            check_facts(facts, file.shapes)
            plan = cls(facts, {name: file.read(name) for name in file.shapes})
            if not abs(facts["bits"] - plan.bits) <= 1e-6:  # NaN is not
                raise CheckpointError(f"bits is {facts['bits']}: the formats have {plan.bits}")
            check_values(facts, plan.tensors)
            _ = plan.layers  # every matrix has an inverse
        if model is not None:
            plan.check_model(model, str(path))
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            ConfigError: facts are no plain data.
            CheckpointError: the plan contradicts itself, so that load would refuse it.
            OSError: the file cannot be written.
        """
        tensors = {name: tensor.float().contiguous() for name, tensor in self.tensors.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        facts = {**self.facts, "bits": 0}
        try:
            written = parse(json.dumps(facts), "the plan")
        except TypeError as error:
            raise ConfigError(f"the facts of the plan are not plain data ({error})") from None
        try:
            check_facts(written, shapes)
            check_values(written, tensors)
            plan = CachePlan(written, tensors)
            _ = plan.layers
        except (ConfigError, ShapeError) as error:
            raise CheckpointError(str(error)) from None
        sources = {name: TensorSource.of(tensor) for name, tensor in tensors.items()}
        top = {**facts, "bits": plan.bits, "format": PLAN, "shapes": shapes}
        save_safetensors(path, sources, partial(sealed, top))

    def check_model(self, config: Mapping[str, Any], name: str = "the plan") -> None:
        """Raise CheckpointError unless the plan was made for the model of this config."""
        what = f"{name} was made for"
        check_identity(self.facts["model"], config, what, "for", "calibrate this model")

    def check_of_heads(self, what: str) -> None:
        """Raise ConfigError if the plan is of latent rows; `what` takes K and V of heads."""
        if self.is_latent:
            raise ConfigError(
                f"the plan is of latent rows, and {what} has keys and values of heads: give it to "
                "LatentKVCache.from_plan, or to CachedModel.new_cache of its model"
            )

    def with_formats(self, k_format: str, v_format: str | None = None) -> CachePlan:
        """The same transforms with one format for all quantized layers; not measured.

        Args:
            k_format: short name of K's format; only facts["candidates"] have clip ratios. With
                latent rows that of the latent, or of both parts ("int4-g8+int8-g4").
            v_format: of V; K's when None (of RoPE parts LatentFormat's default).
        """
        if self.is_latent and v_format is None:
            rope_dim = self.tensors["v.offset"].shape[2]
            whole = LatentFormat.parse(k_format, self.head_dim, rope_dim)
            k_format, v_format = str(whole.latent), str(whole.rope)
        names = {"k": k_format, "v": v_format or k_format}
        return self.with_layer_formats(
            {
                (i, side): names[side]
                for i, entry in enumerate(self.facts["layers"])
                for side in "kv"
                if not entry["kept"]
            }
        )

    def with_layer_formats(self, formats: Mapping[tuple[int, str], str]) -> CachePlan:
        """The same transforms with other formats by (layer, "k" or "v"); not measured.

        Raises:
            ConfigError: a layer, a side or a format does not exist, or a layer has to stay in
                16 bit.
        """
        places = {(i, side) for i in range(self.num_layers) for side in "kv"}
        if not isinstance(formats, Mapping) or not formats.keys() <= places:
            raise ConfigError(
                f"formats are {shown(formats)}: give a dict of them by (layer, side), layers from "
                f'0 to {self.num_layers - 1} and sides "k" or "v"'
            )
        layers = [
            entry
            | {
                side: entry[side] | {"format": formats.get((i, side), entry[side]["format"])}
                for side in "kv"
            }
            for i, entry in enumerate(self.facts["layers"])
        ]
        unmeasured = {"layers": layers, "measured": None, "windowed": None}
        changed = CachePlan({**self.facts, **unmeasured}, self.tensors)
        for i, side in formats:
            fmt = (changed.k_formats if side == "k" else changed.v_formats)[i]
            check_pair(self.is_latent, changed.k_formats[i], changed.v_formats[i])
            if layers[i]["kept"] is not None and not fmt.is_exact:
                raise ConfigError(
                    f"layer {i} cannot be kept in {fmt}: {shown(layers[i]['kept'])}; leave it in "
                    "16 bit"
                )
        found = CachePlan({**changed.facts, "bits": changed.bits}, self.tensors)
        vars(found)["_unclipped"] = self._unclipped
        return found

    def without_v_bases(self) -> CachePlan:
        """The same plan for CachedModel.fold_values, which puts the bases of V into the model.

        Raises:
            ConfigError: the plan is of latent rows, which have no V.
        """
        self.check_of_heads("a model with bases of V folded in")
        layers = [
            entry | {"v": entry["v"] | {"basis": "none"}} if not entry["kept"] else entry
            for entry in self.facts["layers"]
        ]
        tensors = {name: tensor for name, tensor in self.tensors.items() if name != "v.matrix"}
        tensors["v.offset"] = torch.zeros_like(tensors["v.offset"])
        return CachePlan({**self.facts, "layers": layers}, tensors)

    def of_heads(self, heads: Sequence[int]) -> CachePlan:
        """The plan of some KV heads, in this order, as a rank needs it (tensor parallelism).

        Raises:
            ConfigError: the plan has no such heads.

        Example:
            >>> from kvquant import CachePlan, KVCache
            >>> plan = CachePlan.load("plan.safetensors")
            >>> cache = KVCache.from_plan(plan.of_heads([0]), batch=1, max_seq_len=64)
            >>> cache.num_kv_heads
            1
        """
        if not isinstance(heads, Iterable):
            raise ConfigError(f"heads are {shown(heads)}: give a list of KV heads")
        heads = list(heads)
        known = range(self.num_kv_heads)
        if not heads or not all(is_whole(head) and head in known for head in heads):
            raise ConfigError(
                f"heads are {shown(heads)}: give some of 0 to {self.num_kv_heads - 1}, the KV "
                "heads of the plan"
            )
        tensors = {name: tensor[:, list(map(int, heads))] for name, tensor in self.tensors.items()}
        return CachePlan(self.facts, tensors)

    @property
    def is_latent(self) -> bool:
        """Whether k are latents and v RoPE parts."""
        return bool(self.facts.get("latent"))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.facts["layers"])

    @property
    def places(self) -> list[int]:
        """The model's layer at each index of the cache; not the same in a hybrid model."""
        return self.facts.get("places") or list(range(self.num_layers))

    @property
    def num_kv_heads(self) -> int:
        """KV heads of each layer."""
        return self.tensors["k.offset"].shape[1]

    @property
    def head_dim(self) -> int:
        """Elements of a row of K."""
        return self.tensors["k.offset"].shape[2]

    @cached_property
    def k_formats(self) -> list[RowFormat]:
        """The format of K of each layer."""
        return self._formats("k")

    @cached_property
    def v_formats(self) -> list[RowFormat]:
        """The format of V of each layer."""
        return self._formats("v")

    @property
    def formats(self) -> list[tuple[str, str]]:
        """Short names of the formats of K and V of each layer."""
        pairs = zip(self.k_formats, self.v_formats, strict=True)
        return [(str(k), str(v)) for k, v in pairs]

    @property
    def bits(self) -> float:
        """Bits per element of the packed rows, headers included."""
        return mean_bits([*self.k_formats, *self.v_formats])

    @cached_property
    def layers(self) -> list[LayerBasis]:
        """The bases of each layer, on the CPU; CheckpointError if a tensor is missing or unfit."""
        return [
            LayerBasis(self._basis(i, "k"), self._basis(i, "v")) for i in range(self.num_layers)
        ]

    @cached_property
    def _unclipped(self) -> dict[tuple[int, str], Basis]:
        """Bases without clip ratios; plans of other formats share them, because they take long."""
        return {}

    def has_basis(self, layer: int, side: str) -> bool:
        """Whether a side of a layer has a basis; 16-bit parts of latent rows have none."""
        name = self.facts["layers"][layer][side]["format"]
        dim = self.tensors[f"{side}.offset"].shape[2]
        return not (self.is_latent and RowFormat.parse(name, dim).is_exact)

    def _formats(self, side: str) -> list[RowFormat]:
        head_dim = self.tensors[f"{side}.offset"].shape[2]
        return [RowFormat.parse(entry[side]["format"], head_dim) for entry in self.facts["layers"]]

    def _basis(self, layer: int, side: str) -> Basis:
        entry = self.facts["layers"][layer][side]

        def tensor(name: str) -> torch.Tensor:
            found = self.tensors.get(f"{side}.{name}")
            if found is None or found.shape[:2] != (self.num_layers, self.num_kv_heads):
                raise CheckpointError(f"tensor {side}.{name!r:.80} is missing or does not fit")
            return found[layer].contiguous()

        chosen = self._unclipped.get((layer, side))
        if chosen is None:
            matrix = tensor("matrix") if entry["basis"] == "matrix" else None
            feedback = tensor("feedback") if entry["rounding"] == "feedback" else None
            chosen = Basis(tensor("offset"), matrix, None, feedback)
            self._unclipped[layer, side] = chosen
        clip = f"clip.{entry['format']}"
        if f"{side}.{clip}" in self.tensors:
            chosen = chosen.with_clip(tensor(clip))
        # made even where it is not used: with_formats may use what a file has there
        return chosen if self.has_basis(layer, side) else Basis(torch.zeros_like(chosen.offset))


Plan = CachePlan | str | os.PathLike[str]  # what every plan= takes: a plan, or the path of its file
AUTO = "auto"  # where there is a model, too: its kept plan, or a new one
ModelPlan = Plan | Literal[False] | None  # there False and None are no plan


def as_plan(plan: Plan) -> CachePlan:
    """A given plan, or the plan of the file at a given path.

    It raises ConfigError for neither, and for "auto", which needs a model; else as CachePlan.load.
    """
    if isinstance(plan, str) and plan == AUTO:
        raise ConfigError(
            "plan 'auto' needs the model, which is not here: give the path of a plan's file "
            "('./auto' for a file of that name), or a CachePlan. In a Python program "
            "QuantizedCache(model) and CachedModel.new_cache have the model, and take plan='auto'"
        )
    if isinstance(plan, str | os.PathLike):
        return CachePlan.load(plan)
    check_kind("plan", plan, CachePlan, "give a CachePlan, or the path of its file")
    return plan
