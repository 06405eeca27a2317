"""plan="auto": the kept plan of a model's weights, or a new one."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from kvquant.errors import UnsupportedModelError
from kvquant.hf.model import as_cached_model
from kvquant.hf.models.fingerprint import fingerprint
from kvquant.io.plan import CachePlan
from kvquant.io.plan_store import keep_plan, place_of, stored_plan
from kvquant.kernels.disk_cache import locked
from kvquant.text import progress

from .calibrate import calibrate

MOST_KL = 0.01  # nats per token with the window
log = logging.getLogger("kvquant")


def auto_plan(model: Any) -> CachePlan | None:
    """Take the kept plan of a model, or make one from the packaged texts and keep it.

    One line of the log "kvquant" says which, and what the plan costs.

    Args:
        model: as of calibrate.

    Returns:
        The plan; None, with a warning, if the model cannot have one, or one that costs more than
        MOST_KL with its window: the default formats are to be taken.

    Raises:
        ConfigError: a plan must be made, and the model's tokenizer is not found.
    """
    model = as_cached_model(model)
    told = "taken from the user's folder"
    try:
        weights = fingerprint(model.model)
        plan = stored_plan(weights)
        if plan is None:
            with ExitStack() as stack:
                try:
                    stack.enter_context(locked(place_of(weights)))
                except OSError as error:
                    log.warning("kvquant: the plan will not be kept: %s", error)
                plan = stored_plan(weights)  # another process may have made it meanwhile
                if plan is None:
                    with progress(400, "Making a plan") as update:
                        plan = calibrate(model, progress=lambda stage, share: update(share, stage))
                    assert plan is not None
                    told = f"made, {_kept(plan)}"
    except UnsupportedModelError as error:
        log.warning("kvquant: no plan is possible, the default formats are taken: %s", error)
        return None
    used = plan.facts.get("windowed") or plan.facts["measured"]
    if not used["kl"] <= MOST_KL:  # NaN too
        log.warning(
            "kvquant: the plan costs a KL of %.2g nats per token, more than %g: the default "
            "formats are taken",
            *(used["kl"], MOST_KL),
        )
        return None
    log.info("kvquant: plan %s: KL %.2g nats per token", told, used["kl"])
    return plan


def _kept(plan: CachePlan) -> str:
    """Keep a plan, and say where, or why not."""
    try:
        return f"kept in {keep_plan(plan)}"
    except OSError as error:
        return f"not kept ({error})"
