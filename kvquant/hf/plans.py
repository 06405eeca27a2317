"""The plan of a cache whose model is there: a plan, a path, or "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..io.plan import AUTO, CachePlan, ModelPlan, as_plan
from .models.fingerprint import identified


def plan_of_model(
    plan: ModelPlan, model: Any, options: Mapping[str, object] | None = None
) -> CachePlan | None:
    """The plan that the user wants; None for none.

    Args:
        plan: a plan, the path of one, "auto", or False or None for none.
        model: a CachedModel or a model of transformers, if there is one.
        options: of the cache; formats among them contradict a plan.

    Raises:
        ConfigError: "auto" without a model or with formats; or as as_plan, or as auto_plan.
        CheckpointError: the plan was made for other weights.
    """
    if plan is None or plan is False:
        return None
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    has_weights = isinstance(model, torch.nn.Module) or hasattr(model, "config_dict")
    if not (isinstance(plan, str) and plan == AUTO):
        found = as_plan(plan)
        weights = found.facts["model"].get("weights")
        known: set[str] = getattr(model, "known_weights", set())
        if has_weights and weights is not None and weights not in known:
            found.check_model(getattr(model, "config_dict", None) or identified(model))
            known.add(weights)
        return found
    if not has_weights:
        raise ConfigError(
            f"plan 'auto' needs the model, and {type(model).__name__} is none: give the model, or "
            "the path of a plan"
        )
    names = ("k_format", "v_format", "fmt")
    if given := [name for name in names if (options or {}).get(name) is not None]:
        raise ConfigError(f"{' and '.join(given)} with plan 'auto': a plan says the formats")
    from ..calibration.auto import auto_plan

    return auto_plan(model)
