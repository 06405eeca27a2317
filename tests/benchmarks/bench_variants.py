"""What each field of AttentionVariant costs on a GPU: calls in a row, beside plain attention.

Run by hand: python tests/benchmarks/bench_variants.py --json FILE. 64 sequences of 8,192 tokens,
32 query heads on 8 KV heads, int4-g4; a tree mask has 4 queries, and is beside 4 plain queries.
Each output is compared with the float64 reference first.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from measuring import begin, relative_error

from kvquant import AttentionVariant
from kvquant.bench.cases import Case, Inputs, make_inputs, parse_formats, take_sequences
from kvquant.kernels.cuda.runtime.warmup import warm_up
from kvquant.ops.attention import attend
from kvquant.rows.call import AttentionCall
from kvquant.rows.reference import reference_over_segments

CASE = Case(*parse_formats("int4-g4", 128), 64, 32, 8, 8192)
NAMES = "", "soft_cap", "sink_logits", "alibi_slopes", "window", "tree_mask"
CASES = [(name, 4 if name == "tree_mask" else 1) for name in NAMES] + [("", 4)]


def variant_of(name: str, case: Case, device: torch.device) -> AttentionVariant | None:
    """A variant with one field, whose values change results by more than rounding does."""
    heads, several = case.num_q_heads, torch.eye(4, dtype=torch.bool, device=device)
    several[:, 0] = True  # a root, and all others are its children
    values: dict[str, Any] = {
        "soft_cap": 1.0,  # scores have size 1
        "sink_logits": torch.randn(heads, device=device) + math.log(case.seq_len),
        "alibi_slopes": 2 ** (-8 / heads * torch.arange(1.0, heads + 1, device=device)),
        "window": -(-case.seq_len // 2),
        "tree_mask": several.expand(case.batch, -1, -1).contiguous(),
    }
    return AttentionVariant(**{name: values[name]}) if name else None


def call_of(name: str, q_len: int, case: Case, inputs: Inputs) -> AttentionCall:
    """The call of a variant on rows of a case."""
    q = inputs.q if q_len == 1 else inputs.q[:, None].expand(-1, q_len, -1, -1).contiguous()
    return AttentionCall(q, inputs.segments, variant=variant_of(name, case, q.device))


def rehearse(name: str, q_len: int) -> None:
    """Attend without values, for a rehearsal: see kvquant/rehearsal.py."""
    (inputs,) = make_inputs(CASE, 1, torch.device("meta"))
    attend(call_of(name, q_len, CASE, inputs))


def error_of(call: AttentionCall) -> float:
    """Of the first sequence."""
    variant = call.variant
    if variant is not None:
        tree = variant.tree_mask
        variant = variant if tree is None else variant._replace(tree_mask=tree[:1])
    segments = [take_sequences(one, 0, 1) for one in call.segments]
    wanted, _ = reference_over_segments(call.q[:1], segments, variant=variant)
    return relative_error(attend(call)[0][:1], wanted)


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(json_file: Path | None) -> None:
    """Print a line per field."""
    timer, found = begin(), []
    warm_up(timer.device, [partial(rehearse, *one) for one in CASES])
    inputs = make_inputs(CASE, timer.rotation(CASE.nbytes) or 1, timer.device)
    for name, q_len in CASES:
        calls = [call_of(name, q_len, CASE, one) for one in inputs]
        error = error_of(calls[0])
        assert error < 3e-3, (name, error)
        us = timer.in_a_row([partial(attend, one) for one in calls])
        print(f"{name or 'plain':14}{q_len:3} queries{us:9.1f} us{error:9.1e}", flush=True)
        found.append({"variant": name, "q_len": q_len, "in_a_row_us": us, "error": error})
    if json_file is not None:
        json_file.write_text(json.dumps({"variants": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
