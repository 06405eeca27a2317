"""plan="auto": the kept plan of a model's weights, or a new one."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from kvquant.errors import ConfigError, UnsupportedModelError
from kvquant.hf.model import as_cached_model
from kvquant.hf.models.fingerprint import FOLDED, fingerprint
from kvquant.io.model_id import WEIGHTS, model_identity
from kvquant.io.plan import CachePlan
from kvquant.io.plan_store import costs_too_much, keep_plan, place_of, stored_plan
from kvquant.kernels.disk_cache import locked
from kvquant.text import progress

from .calibrate import calibrate

log = logging.getLogger("kvquant")


def auto_plan(model: Any) -> CachePlan | None:
    """Take the kept plan of a model, or make one from the packaged texts and keep it.

    The log "kvquant" has a line on which of the two, and what the plan costs.

    Args:
        model: as of calibrate.

    Returns:
        The plan; None, with a warning, if the model cannot have one, or only one that costs too
        much: take the default formats.

    Raises:
        ConfigError: no plan is kept, and the model's tokenizer is not found, or this process is one
            of several (torch.distributed); or bases of V were folded into the model.
    """
    told = "taken from the user's folder"
    try:
        model = as_cached_model(model)
        if hasattr(model.model, FOLDED):
            raise ConfigError(
                "a plan's bases of V were folded into this model, so plan 'auto' is not for it: "
                "give the plan that fold_values returned"
            )
        config = {**model.model.config.to_dict(), WEIGHTS: fingerprint(model.model)}
        identity = model_identity(config)
        plan = stored_plan(identity)
        if plan is None:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise ConfigError(
                    "plan 'auto' finds no kept plan, and processes of torch.distributed make none: "
                    "run `kvquant calibrate MODEL` once, before them"
                )
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(place_of(identity)))
                except OSError as error:
                    log.warning("kvquant: the plan will not be kept: %s", error)
                plan = stored_plan(identity)  # another process may have made it meanwhile
                if plan is None:
                    with progress(400, "Making a plan") as update:
                        plan = calibrate(model, progress=lambda stage, share: update(share, stage))
                    told = f"made, {_kept(plan)}"
    except UnsupportedModelError as error:
        log.warning("kvquant: no plan is possible, the default formats are taken: %s", error)
        return None
    if reason := costs_too_much(plan):
        log.warning("kvquant: %s: the default formats are taken", reason)
        return None
    used = plan.facts.get("windowed") or plan.facts["measured"]
    log.info("kvquant: plan %s: KL %.2g nats per token", told, used["kl"])
    return plan


def _kept(plan: CachePlan) -> str:
    """Keep a plan, and say where, or why not."""
    try:
        return f"kept in {keep_plan(plan)}"
    except OSError as error:
        return f"not kept ({error})"
