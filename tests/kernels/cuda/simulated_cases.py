"""Run decode kernels in numba's simulator: cases from stdin, see tests/support/simulator_cases.py.

A process of its own, because numba reads NUMBA_ENABLE_CUDASIM once, when it is imported.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from decode_cases import Case, make_call
from forced_plan import forced
from simulated_launches import orders_of, simulated
from simulator_cases import answer

from kvquant.kernels.cuda.decode import launch as launching
from kvquant.kernels.cuda.decode.plan import Plan
from kvquant.kernels.cuda.decode.ragged import Kind
from kvquant.kernels.cuda.decode.spec import DecodeSpec
from kvquant.kernels.cuda.decode.wide.spec import widened
from kvquant.kernels.cuda.runtime.launch import GPU
from kvquant.rows.call import AttentionCall

A_GPU = GPU("H200", (9, 0), 132, 233472, 232448)


def run_case(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Errors against the reference: of out, relative, in L2, and of the lse, absolute."""
    case = Case(**options)
    made = make_call(case)
    q, segments, expected, expected_lse = made.q, made.segments, made.out, made.lse

    def with_columns(spec: DecodeSpec, gpu: GPU) -> DecodeSpec:
        return replace(spec, columns=case.columns, sharers=case.sharers)

    def as_told(spec: DecodeSpec, count: int) -> DecodeSpec | None:
        if case.wide is None:
            return None
        found = widened(spec, count)
        assert found is not None
        return replace(found, **case.wide)

    kinds = launching._kinds_of

    def one_kind(call: AttentionCall) -> tuple[Kind, ...]:
        return (kinds(call)[-1]._replace(least=1, room=len(call.q)),)

    splits = tuple(n for n in case.splits if n)[: 1 if case.wide is not None else 3]
    chosen = Plan(splits, case.warps, case.stages, case.workers)
    want_lse = case.want_lse and case.wide is None  # it moves the lse
    call = AttentionCall(q, segments, None, None, want_lse, made.q_lens, made.variant)
    call = call._replace(q_indptr=made.q_indptr)
    outs = []
    # These cases are about blocks that take parts of one sequence. Other cases may have such
    # blocks, but they differ in what comes before.
    for backwards in orders_of(name, both=name.endswith(("splits", "balanced"))):
        with (
            simulated(call, gpu=A_GPU, backwards=backwards) as simulation,
            mock.patch.object(launching, "narrow", with_columns),
            mock.patch.object(launching, "widened", as_told),
            mock.patch.object(launching, "_kinds_of", one_kind if case.wide is not None else kinds),
            mock.patch.object(launching, "pays", lambda *_: True),
        ):
            if case.wide is not None:  # its warps and stages are those of its spec
                spec = launching.describe(call).spec
                assert spec.is_wide
                chosen = replace(chosen, warps=spec.warps, stages=spec.stages)
            with forced(chosen, may_widen=True):
                out, lse = launching.attend(call)
        assert not any(one.any() for one in simulation.counters), "not 0 after the launch"
        outs.append(out)
    assert torch.equal(outs[0], outs[-1]), "the result depends on the order of blocks and lanes"
    empty = expected_lse == -math.inf
    assert not out[empty].any(), "no tokens, but the output is not 0"
    error = (out.double() - expected).norm() / expected.norm()
    if lse is None:
        return {"out": float(error), "lse": 0.0}
    assert bool((lse[empty] == -math.inf).all()), "no tokens, but the lse is not -inf"
    return {"out": float(error), "lse": float((lse.double() - expected_lse)[~empty].abs().max())}


if __name__ == "__main__":
    answer(run_case)
