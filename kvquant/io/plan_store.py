"""Plans kept for plan="auto" in the folder of kernels/disk_cache.py, by weights and config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ..errors import KVQuantError
from ..kernels.disk_cache import cache_folder
from .plan import CachePlan

# nats per token: up to SAFE no answer of HumanEval was lost beyond the noise of 16 bit, from RUINED
# on many: kvquant/evaluation/README.md. Answers of 1,300 tokens lost nothing at 0.0022, at 0.0061 a
# seventh of their right lines: calibration/FIDELITY.md
SAFE, RUINED = 0.01, 0.1
SAFE_FOR_LONG = 0.003
log = logging.getLogger("kvquant")


def place_of(identity: Mapping[str, str]) -> Path:
    """The path of a model's plan, by its model_identity with weights; OSError without a folder."""
    name = f"{identity['weights'][:32]}-{identity['sha256'][:8]}.safetensors"
    return cache_folder() / "plans" / name


def stored_plan(identity: Mapping[str, str]) -> CachePlan | None:
    """The kept plan of a model; None without one that this kvquant reads."""
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
    """Make the folder of kept plans; raises OSError."""
    (cache_folder() / "plans").mkdir(mode=0o700, parents=True, exist_ok=True)


def keep_plan(plan: CachePlan) -> Path:
    """Write a plan to its place, and return the path; raises OSError."""
    path = place_of(plan.facts["model"])
    make_folder()
    plan.save(path)
    return path


def costs_too_much(plan: CachePlan) -> str:
    """Why "auto" refuses a plan (over SAFE with the 16-bit window, else RUINED), or ""."""
    bare = plan.facts["measured"]["kl"]
    used = (plan.facts.get("windowed") or plan.facts["measured"])["kl"]
    for kl, limit in ((used, SAFE), (bare, RUINED)):
        if not kl <= limit:  # NaN too
            return f"the plan costs a KL of {kl:.2g} nats per token, more than {limit:g}"
    return ""
