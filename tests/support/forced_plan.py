"""Attention on CUDA by a launch plan of one's own, to measure or to test it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kvquant.kernels.cuda.decode import launch
from kvquant.kernels.cuda.decode.plan import Plan
from kvquant.kernels.cuda.runtime.workspace import Lease
from kvquant.rows.call import AttentionCall


@contextmanager
def forced(plan: Plan, *, may_widen: bool = False) -> Iterator[None]:
    """Let all calls, of all threads, follow a plan.

    plan: its splits are of the segments in Work.order. may_widen: as of launch.describe. Do not
    replay graphs that were captured meanwhile: others get their counters.
    """

    def prepare(call: AttentionCall, kind: Any = None) -> launch.Launch:
        work = launch.describe(call, kind, may_widen=may_widen)
        loaded = launch._load(work, plan, call.q.get_device())
        return launch._made(call, work, plan, *loaded)

    # FixedSegments: no launch that is bound to a cache
    changes: dict[str, Any] = {"_launches": {}, "FixedSegments": None, "_prepare_launch": prepare}
    with mock.patch.multiple(launch, **changes), Lease():
        yield
