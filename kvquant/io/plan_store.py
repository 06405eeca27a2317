"""Plans that are kept for plan="auto", in the folder of kernels/disk_cache.py.

A file is named by the fingerprint of the model's weights and by its config, so a fine-tune has a
plan of its own, and so has a model with other RoPE. Nothing is written into a model's folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ..errors import KVQuantError
from ..kernels.disk_cache import cache_folder
from .plan import CachePlan

# nats per token: up to SAFE no answer of HumanEval was lost beyond the noise of 16 bit, from RUINED
# on many: kvquant/evaluation/README.md
SAFE, RUINED = 0.01, 0.1
log = logging.getLogger("kvquant")


def place_of(identity: Mapping[str, str]) -> Path:
    """Where the plan of a model stands, by its model_identity with the fingerprint of its weights.

    Raises:
        OSError: the user has no folder for cached files.
    """
    name = f"{identity['weights'][:32]}-{identity['sha256'][:8]}.safetensors"
    return cache_folder() / "plans" / name


def stored_plan(identity: Mapping[str, str]) -> CachePlan | None:
    """The kept plan of a model; None if there is none that this kvquant reads."""
    try:
        plan = CachePlan.load(place_of(identity))
    except FileNotFoundError:
        return None
    except (OSError, KVQuantError) as error:
        log.warning("kvquant: a kept plan cannot be read (%s): another one is made", error)
        return None
    kept = plan.facts["model"]
    return plan if all(kept.get(key) == identity[key] for key in ("weights", "sha256")) else None


def make_folder() -> None:
    """Make the folder of kept plans; OSError where that is not possible."""
    (cache_folder() / "plans").mkdir(mode=0o700, parents=True, exist_ok=True)


def keep_plan(plan: CachePlan) -> Path:
    """Write a plan to its place, and return it; OSError where that is not possible."""
    path = place_of(plan.facts["model"])
    make_folder()
    plan.save(path)
    return path


def costs_too_much(plan: CachePlan) -> str:
    """Why "auto" does not take a plan; "" if it does.

    With the 16-bit window, if the plan was measured with it, the limit is SAFE. Engines keep no
    window: without it the limit is RUINED.
    """
    bare = plan.facts["measured"]["kl"]
    used = (plan.facts.get("windowed") or plan.facts["measured"])["kl"]
    for kl, limit in ((used, SAFE), (bare, RUINED)):
        if not kl <= limit:  # NaN too
            return f"the plan costs a KL of {kl:.2g} nats per token, more than {limit:g}"
    return ""
