"""Plans that are kept for plan="auto", in the folder of kernels/disk_cache.py.

A file is named by the fingerprint of the model's weights and by what the plan had to reach, so a
fine-tune has a plan of its own. Nothing is written into a model's folder.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import KVQuantError
from ..kernels.disk_cache import cache_folder
from .plan import CachePlan

log = logging.getLogger("kvquant")


def place_of(weights: str, goal: str = "") -> Path:
    """The file of a plan, whether or not it is there.

    Args:
        weights: the fingerprint of the model's weights.
        goal: what the plan had to reach; "" for what is reached when nothing is asked for.

    Raises:
        OSError: the user has no folder for cached files.
    """
    return cache_folder() / "plans" / f"{weights[:32]}{goal and f'-{goal}'}.safetensors"


def stored_plan(weights: str, goal: str = "") -> CachePlan | None:
    """The kept plan of these weights; None if there is none that this kvquant reads."""
    try:
        plan = CachePlan.load(place_of(weights, goal))
    except FileNotFoundError:
        return None
    except (OSError, KVQuantError) as error:
        log.warning("kvquant: a kept plan cannot be read (%s): another one is made", error)
        return None
    return plan if plan.facts["model"].get("weights") == weights else None


def keep_plan(plan: CachePlan, goal: str = "") -> Path:
    """Keep a plan of weights that it names; an older one of this goal is replaced.

    Returns:
        Its file.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path = place_of(plan.facts["model"]["weights"], goal)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan.save(path)
    return path
