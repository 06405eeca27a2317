"""The rows that an engine was asked for: formats and bases of all layers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError, ShapeError, UnsupportedError, shown
from ..io.plan import CachePlan
from ..rows.basis import LayerBasis
from ..rows.format import RowFormat, check_head_dims
from .contract import PageLayout

KEYS = ("k_format", "v_format", "plan", "prompts")
PROMPTS = ("16-bit", "rows")  # what tokens of a prompt attend to, of those that come with them


@dataclass(frozen=True, eq=False)
class Settings:
    """The rows that were asked for: one format of K and one of V, and bases for each layer.

    Attributes:
        k_format: short name of K's format ("int4-g4").
        v_format: of V's.
        plan: bases, clip ratios and rounding of each layer and KV head; None for none.
        prompts_from_rows: whether tokens of a prompt attend to the rows of those that come with
            them, as later ones will, rather than to 16 bit.
    """

    k_format: str
    v_format: str
    plan: CachePlan | None = None
    prompts_from_rows: bool = False

    @classmethod
    def parse(cls, given: object, name: str = "settings") -> Settings:
        """Read what a user of an engine gives.

        Args:
            given: a dict with "k_format", "v_format" (that of K when left out), "plan", the path of
                a plan file, and "prompts", one of PROMPTS; with a plan formats may be left out, if
                its layers have one in common.
            name: what errors call it: where the user wrote it.

        Raises:
            ConfigError: a key or a format does not exist, formats are missing, or the plan's
                layers would need several.
            FileNotFoundError: there is no such plan.
            CheckpointError: the file is damaged, or no plan.
        """
        if not isinstance(given, Mapping) or not given.keys() <= set(KEYS):
            raise ConfigError(f"{name} is {shown(given)}: give a dict with {', '.join(KEYS)}")
        prompts = given.get("prompts", PROMPTS[0])
        if prompts not in PROMPTS:
            raise ConfigError(f'"prompts" is {shown(prompts)}: it may be one of {PROMPTS}')
        path, k_format = given.get("plan"), given.get("k_format")
        v_format = given.get("v_format", k_format)
        try:
            plan = None if path is None else CachePlan.load(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f'there is no plan {path!r} in {os.getcwd()}: give "plan" the path of a file of '
                "`kvquant calibrate`"
            ) from None
        if plan is not None:
            plan.check_of_heads("this backend")
        if k_format is None:
            if plan is None or v_format is not None:
                raise ConfigError(f'{name} lacks k_format: give {{"k_format": "int4-g4"}}')
        else:
            for one in (k_format, v_format):
                RowFormat.parse(one, 128)
            plan = plan and plan.with_formats(k_format, v_format)
        if plan is not None:
            k_format, v_format = _common_formats(plan, asked=k_format is not None)
        return cls(str(k_format), str(v_format), plan, prompts == "rows")

    def layout(self, num_kv_heads: int, head_dim: int, v_head_dim: int) -> PageLayout:
        """Where the rows of a layer lie in its pages.

        Raises:
            ConfigError: no format has such a head_dim.
        """
        k_format = RowFormat.parse(self.k_format, head_dim)
        v_format = RowFormat.parse(self.v_format, v_head_dim)
        check_head_dims(k_format, v_format)
        return PageLayout(k_format, v_format, num_kv_heads)

    def basis(self, layer: int, heads: Sequence[int], head_dim: int) -> LayerBasis | None:
        """The basis of the KV heads that a rank has of a layer, on the CPU.

        Args:
            layer: index in the model.
            heads: of all KV heads of the layer, those of this rank.
            head_dim: of K.

        Returns:
            None without a plan.

        Raises:
            UnsupportedError: the plan has no such layer.
            ShapeError: its heads are others.
        """
        plan = self.plan
        if plan is None:
            return None
        if layer not in plan.places:
            raise UnsupportedError(f"the plan has no layer {layer}: leave it out, or calibrate it")
        if max(heads) >= plan.num_kv_heads or head_dim != plan.head_dim:
            raise ShapeError(
                f"layer {layer} has KV head {max(heads)} of head_dim {head_dim}, the plan "
                f"{plan.num_kv_heads} heads of {plan.head_dim}: calibrate this model"
            )
        return _share(plan, tuple(heads)).layers[plan.places.index(layer)]


def rank_heads(total: int, rank: int, ranks: int) -> list[int]:
    """The KV heads that a rank has of a layer: its share, or one that other ranks have too."""
    if total < ranks:
        return [rank * total // ranks]
    share = total // ranks
    return list(range(rank * share, (rank + 1) * share))


@lru_cache(maxsize=1)  # all layers of a rank ask for the same
def _share(plan: CachePlan, heads: tuple[int, ...]) -> CachePlan:
    return plan.of_heads(heads)


def _common_formats(plan: CachePlan, *, asked: bool) -> tuple[str, str]:
    """The formats that all layers of a plan have."""
    pairs = plan.formats
    if len(set(pairs)) == 1:
        return pairs[0]
    layers = zip(plan.places, plan.facts["layers"], strict=True)
    kept = [place for place, entry in layers if entry["kept"]]
    if asked and kept:
        raise ConfigError(
            f"the plan keeps layers {kept} in 16 bit, and pages have one format for all: "
            'give {"k_format": "bf16"} without a plan, or serve another model'
        )
    raise ConfigError(
        f"the plan has {len(set(pairs))} pairs of formats, and pages have one for all layers: "
        "give k_format and v_format beside the plan"
    )
