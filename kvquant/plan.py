"""CachePlan: how a model's keys and values are kept, as `kvquant calibrate` chose it; its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from .basis import KINDS, Basis, LayerBasis
from .errors import CheckpointError, ConfigError
from .files import SafetensorsFile, TensorSource, save_safetensors, sha256
from .identity import model_identity
from .layout import RowFormat

FORMAT, VERSION = "kvquant-plan", 1
ROUNDINGS = ("nearest", "feedback")
_FACTS = "kvquant"  # the metadata entry


@dataclass(frozen=True, eq=False)
class CachePlan:
    """How a model's keys and values are kept: formats, transforms, and what they cost, measured.

    A plan file is safetensors: the tensors below, and the metadata entry "kvquant", which is JSON
    (`facts`). Layers L, KV heads H, query heads Q, head_dim D; all tensors float32. "k" stands for
    "v" too. Errors are weighted, K's by the queries that meet the head (root of E[(q·e)^2] over
    E[(q·(k - mean))^2]), V's by the output projection likewise: 0.02 is 2 % of the spread.

    Transforms, what a cache needs (basis.py, rounding.py):
        k.offset          [L, H, D]     subtracted from every row (zeros: none)
        k.matrix          [L, H, D, D]  M, for layers whose basis is "matrix" (identity for others);
                                        there where any layer has one
        k.clip.FORMAT     [L, H]        share of the range that rows of FORMAT keep, 1 or less
        k.feedback        [L, H, D, D]  L of rounding.py, for the rounding "feedback"

    Statistics, for people; all but k.mean may be absent (zero data):
        k.mean, k.std, k.min, k.max, k.absmax    [L, H, D]  of each channel, K after RoPE
        k.stored.std                             [L, H, D]  of the rows that are stored
        k.error.STEP        [L, H]  of "int4" rows after each of facts["steps"]: "plain", "offset",
                                    "hadamard" (with offset), "matrix" (with offset and Hadamard),
                                    each with nearest rounding and full range; then of the basis
                                    chosen with "feedback" (if that was better), and "clip" on top
        k.format_error.FORMAT, k.format_error_plain.FORMAT   [L, H]  of every candidate format, as
                                    the plan does it, and as a cache without a plan does it
        scores.min, scores.max, scores.mean, scores.std   [L, Q]  sm_scale * q·(k - offset)
        scores.edges [B + 1], scores.histogram [L, B]   share of all scores in each bin
        scores.phi [L], scores.phi_overflow [L]   a reference maximum for all queries of a layer,
                                    and the share of queries whose own maximum is too far from it

    facts, plain data:
        format "kvquant-plan", version 1
        model           {"type", "sha256"}: model_identity of the config
        places          L numbers: the layer of the model at each place of the cache
        others          [{"layer", "why"}]: layers of the model that the cache has none of
        layers          L objects {"k": side, "v": side, "kept": null or why this layer stays in 16
                        bit}; a side is {"format": "int4", "basis": "none" | "hadamard" | "matrix",
                        "rounding": "nearest" | "feedback"}
        bits            per element of K and V, of the packed rows, headers included
        observed_tokens, steps, candidates (formats), zero_data (true: no text was observed)
        measured        {"kl", "top1", "perplexity", "exact_perplexity", "context", "scored",
                        "sink_len", "recent_len"} or null: the whole plan, decoding token by token
                        on held text, against the 16-bit cache; kl in nats per token, top1 a share,
                        scored in tokens; "in_one_pass": null, or why the model could not decode
                        from a KVCache
        limit           {"max_kl": number or null, "budget": bits or null, "met": bool}
        blamed          layers that cost the most, where the limit is not met; else empty
        sensitivity     [{"layer", "k_format", "v_format", "kl"}]: only K or only V of this layer
                        quantized, all else in 16 bit: two for each layer
        comparison      [{"format", "plan": bool, "bits", "kl", "top1", "perplexity"}]: one format
                        for all, with and without the plan's transforms, on the same held text
        settings        how it was measured

    Attributes:
        facts: as above.
        tensors: as above, on the CPU.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: Mapping[str, Any] | None = None
    ) -> CachePlan:
        """Read a plan, checked.

        Args:
            path: the file.
            model: the config, as a dict, of the model that is to use it; None to take any plan.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the file is damaged, no plan, or made for another model.
        """
        path = Path(path)
        try:
            with SafetensorsFile(path) as file:
                facts = _facts(file.metadata.get(_FACTS))
                tensors = {name: file.read(name) for name in file.shapes}
            _check_digests(facts.pop("sha256"), tensors)
            plan = cls(facts, tensors)
            _ = plan.layers, plan.formats  # every value that a cache needs is looked at
        except (CheckpointError, ConfigError) as error:
            text = str(error)
            known = text.startswith(str(path))
            raise CheckpointError(text if known else f"{path}: {text}") from None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: the plan is damaged ({type(error).__name__}: {error}): calibrate again"
            ) from None
        if model is not None:
            plan.check_model(model, str(path))
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file; an old one is replaced when the new one is whole."""
        tensors = {name: tensor.float().contiguous() for name, tensor in self.tensors.items()}
        sources = {
            name: TensorSource(tensor.dtype, tuple(tensor.shape), partial(iter, (tensor,)))
            for name, tensor in tensors.items()
        }

        def metadata(digests: Mapping[str, str]) -> dict[str, str]:
            return {_FACTS: json.dumps({**self.facts, "sha256": dict(digests)}, sort_keys=True)}

        save_safetensors(path, sources, metadata)

    def check_model(self, config: Mapping[str, Any], name: str = "the plan") -> None:
        """Raise unless the plan was made for the model of this config.

        Raises:
            CheckpointError: it was made for another one.
        """
        ours, theirs = self.facts["model"], model_identity(config)
        if ours["sha256"] != theirs["sha256"]:
            raise CheckpointError(
                f"{name} was made for a {ours['type']!r:.40} model with config "
                f"{ours['sha256'][:12]}, not for this {theirs['type']!r:.40} model with config "
                f"{theirs['sha256'][:12]}: calibrate this model"
            )

    def with_formats(self, k_format: str, v_format: str | None = None) -> CachePlan:
        """The same transforms with one format for all layers that are quantized.

        Args:
            k_format: short name of K's format; one of facts["candidates"] has clip ratios, another
                format keeps the whole range.
            v_format: of V's; K's when None.

        Returns:
            A plan whose "measured" is null.
        """
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
        """The same transforms with other formats for some layers and sides ("k" or "v").

        Returns:
            A plan whose "measured" is null.
        """
        layers = [
            entry
            | {
                side: entry[side] | {"format": formats.get((i, side), entry[side]["format"])}
                for side in "kv"
            }
            for i, entry in enumerate(self.facts["layers"])
        ]
        changed = CachePlan({**self.facts, "layers": layers, "measured": None}, self.tensors)
        return CachePlan({**changed.facts, "bits": changed.bits}, self.tensors)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.facts["layers"])

    @property
    def places(self) -> list[int]:
        """The model's layer at each place of the cache; not the same in a hybrid model."""
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
        formats = [*self.k_formats, *self.v_formats]
        return 8 * sum(f.row_bytes for f in formats) / sum(f.head_dim for f in formats)

    @cached_property
    def layers(self) -> list[LayerBasis]:
        """The bases of each layer, on the CPU.

        Raises:
            CheckpointError: a tensor is missing or does not fit.
        """
        return [
            LayerBasis(self._basis(i, "k"), self._basis(i, "v")) for i in range(self.num_layers)
        ]

    def _formats(self, side: str) -> list[RowFormat]:
        head_dim = self.tensors[f"{side}.offset"].shape[2]
        return [RowFormat.parse(entry[side]["format"], head_dim) for entry in self.facts["layers"]]

    def _basis(self, layer: int, side: str) -> Basis:
        entry = self.facts["layers"][layer][side]
        if entry["basis"] not in KINDS or entry["rounding"] not in ROUNDINGS:
            raise CheckpointError(f"layer {layer} has an unknown basis or rounding: {entry!r:.80}")

        def tensor(name: str) -> torch.Tensor:
            found = self.tensors.get(f"{side}.{name}")
            if found is None or found.shape[:2] != (self.num_layers, self.num_kv_heads):
                raise CheckpointError(f"tensor {side}.{name!r:.80} is missing or does not fit")
            return found[layer].contiguous()

        clip = f"clip.{entry['format']}"
        return Basis(
            tensor("offset"),
            entry["basis"],
            tensor("matrix") if entry["basis"] == "matrix" else None,
            tensor(clip) if f"{side}.{clip}" in self.tensors else None,
            tensor("feedback") if entry["rounding"] == "feedback" else None,
        )


def _facts(text: Any) -> dict[str, Any]:
    """The facts of a file's metadata, checked as far as they say what the file is."""
    try:
        facts = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        facts = None
    if type(facts) is not dict or facts.get("format") != FORMAT:
        raise CheckpointError("this is no plan of `kvquant calibrate`")
    if facts.get("version") != VERSION:
        raise CheckpointError(
            f"the plan has version {facts.get('version')!r:.40}, this kvquant reads {VERSION}: "
            "calibrate again, or take the kvquant that wrote it"
        )
    return facts


def _check_digests(digests: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    if digests.keys() != tensors.keys():
        name = min(digests.keys() ^ tensors.keys())
        raise CheckpointError(f"tensor {name!r:.80} is missing, or should not be there")
    for name, tensor in tensors.items():
        if sha256(tensor) != digests[name]:
            raise CheckpointError(
                f"tensor {name!r:.80} is damaged (its checksum differs): take another copy"
            )
