"""The append and the dequantize kernel in numba's simulator: equal to the meaning. No GPU.

pytest -m "" tests/kernels/cuda/test_append_simulated.py    # all cases
"""

from __future__ import annotations

from typing import Any

import pytest
from append_cases import LATENTS, Case, check_on_gpu, latent_case
from simulator_cases import of, run_selected
from slow_cases import mark_slow

pytestmark = pytest.mark.extra("cuda")
FORMATS = "int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8 fp8 fp8-g4 bf16 fp16".split()
FORMATS += "int2", "int3"
# name -> what differs from the defaults of append_cases.Case
CASES: dict[str, dict[str, Any]] = {
    name: {"k": name, "tokens": 14, "hostile": True} for name in FORMATS
}
for names in ("int8 int4-g4", "int4 bf16", "fp16 fp8-g4", "fp8-g8 int8", "int3 int2"):
    k, v = names.split()
    CASES[f"{k} and {v}"] = {"k": k, "v": v, "tokens": 5}
for head_dim in (64, 80, 96, 112, 192, 256):
    for k in ("int4", "int8-g8", "bf16"):
        CASES[f"{k}, head_dim {head_dim}"] = {"k": k, "head_dim": head_dim, "offset": "k"}
ODD = ("int4-g8", 80), ("int8-g4", 112), ("int4-g4", 96), ("fp8-g2", 192)
FEW = [("int2", head_dim) for head_dim in (64, 80, 96, 112, 192, 256)]
FEW += [("int3", head_dim) for head_dim in (64, 96, 192, 256)]
for k, head_dim in (*ODD, *FEW):
    CASES[f"{k}, head_dim {head_dim}"] = {"k": k, "head_dim": head_dim, "hostile": True}
CASES |= {
    "a made-up codec": {"k": "int5-g4", "v": "int5", "tokens": 14, "hostile": True},
    "feedback, a made-up codec": {"k": "int5", "feedback": "k", "clip": "k", "head_dim": 64},
    "K and V of unlike head_dims": {"head_dim": 192, "v_head_dim": 128, "v": "int8"},
    "several blocks of tokens and heads": {"tokens": 9, "heads": 3},
    "more heads than stages": {"tokens": 4, "heads": 6},
    "blocks of two heads, the last of one": {"tokens": 48, "heads": 3},
    "fp16": {"source": "fp16", "hostile": True, "tokens": 14},
    "float32": {"source": "fp32", "hostile": True, "tokens": 14, "offset": "v"},
    "heads before tokens": {"layout": "heads", "heads": 2},
    "a part of a wider tensor": {"layout": "fused", "heads": 2},
    "elements that are not aligned": {"layout": "odd", "heads": 2},
    "tokens before heads in a page": {"pages": "tokens", "heads": 2, "k": "int4"},
    "pages of 5": {"page_size": 5},
    "pages of 1": {"page_size": 1},
    "tokens left out": {"skip": True},
    "nothing counted": {"bad": False, "hostile": True},
    "offset": {"offset": "k", "heads": 2},
    "offsets of both": {"offset": "kv", "heads": 2, "hostile": True},
    "RoPE": {"rotary_dim": 128, "heads": 2},
    "RoPE of a part": {"rotary_dim": 64},
    "RoPE of neighbours": {"rotary_dim": 128, "interleaved": True},
    "RoPE of a part of neighbours": {"rotary_dim": 36, "interleaved": True},
    "RoPE of odd halves": {"rotary_dim": 20, "head_dim": 80, "k": "int4"},
    "RoPE of odd halves, float32": of("rotary_dim=20 head_dim=80 k=int4 source=fp32"),
    "RoPE and an offset": {"rotary_dim": 128, "offset": "k", "k": "int8"},
    "16-bit rows": {"exact": "bf16", "tokens": 8, "heads": 2},
    "16-bit rows with NaN": {"exact": "bf16", "tokens": 14, "hostile": True, "offset": "k"},
    "16-bit rows, fp16": {"exact": "fp16", "tokens": 14, "hostile": True, "k": "int4", "v": "fp8"},
    "16-bit rows, tokens left out": {"exact": "bf16", "tokens": 9, "skip": True},
    "16-bit rows, head_dim 80": {"exact": "bf16", "tokens": 8, "head_dim": 80, "k": "int8"},
    "16-bit rows and bf16": {"exact": "fp16", "tokens": 8, "k": "bf16", "hostile": True},
}
CASES |= {
    "clipped": {"clip": "kv", "heads": 2, "hostile": True, "tokens": 14},
    "clipped, int8 and fp8": {"k": "int8-g8", "v": "fp8", "clip": "kv", "head_dim": 80},
    "clipped, 16-bit rows": {"k": "int4-g8", "clip": "k", "exact": "bf16", "tokens": 8},
    "feedback, a lane a row": {"feedback": "k", "head_dim": 64, "heads": 2, "skip": True},
    "feedback of both": {"feedback": "kv", "head_dim": 64, "v_head_dim": 80, "v": "int4-g8"},
    "feedback, hostile rows": of("feedback=k clip=k head_dim=64 tokens=14 hostile=True k=int8"),
    "feedback, 16-bit rows": of(
        "feedback=k clip=k head_dim=64 tokens=9 exact=bf16 k=int4 hostile=True source=fp32"
    ),
    "feedback, 16-bit rows, a lane a row": of(
        "feedback=v v=int8-g4 head_dim=64 tokens=9 exact=fp16 skip=True heads=2"
    ),
    "feedback, RoPE and an offset": of(
        "feedback=k head_dim=64 tokens=4 offset=k clip=v rotary_dim=64 layout=fused "
        "heads=2 pages=tokens page_size=5"
    ),
    "feedback, odd halves": of(
        "feedback=k head_dim=80 tokens=4 rotary_dim=20 source=fp32 k=int4 layout=odd"
    ),
    "matrices": {"matrix": "kv", "feedback": "k", "head_dim": 64, "heads": 2, "v": "fp8"},
    "matrices and offsets": {"matrix": "kv", "offset": "kv", "head_dim": 80, "layout": "fused"},
    "matrices of odd rows": {"matrix": "kv", "offset": "v", "head_dim": 64, "layout": "odd"},
    "matrices, NaN and 16-bit rows": of(
        "matrix=kv head_dim=64 tokens=14 hostile=True source=fp16 exact=bf16"
    ),
    "feedback in a step": {"feedback": "kv", "clip": "k", "tokens": 9, "heads": 2, "k": "int4-g2"},
    "feedback in a step, 16-bit rows": of(
        "feedback=kv exact=bf16 offset=kv tokens=11 hostile=True k=int8-g8 v=int4-g4"
    ),
    "feedback and matrices in a step": of(
        "feedback=kv matrix=k offset=kv exact=fp16 head_dim=80 tokens=5 queries=1 k=int4 v=int8"
    ),
    "feedback and a matrix": {"feedback": "k", "matrix": "kv", "head_dim": 112, "hostile": True},
    "feedback, head_dim 192": {"feedback": "k", "head_dim": 192, "tokens": 3, "k": "int8"},
    "matrices of a prompt": {"matrix": "kv", "feedback": "v", "offset": "k", "head_dim": 64},
    "matrices of unlike head_dims": of("matrix=kv v_head_dim=192 v=int8-g4 tokens=3"),
    "a matrix of V alone": {"matrix": "v", "heads": 2, "rotary_dim": 64, "clip": "kv", "tokens": 9},
    "matrices and queries": {"matrix": "kv", "offset": "k", "tokens": 3, "heads": 2, "queries": 1},
    "queries and offsets": of("offset=kv head_dim=64 queries=2 exact=bf16 skip=True"),
    "queries, head_dim 256": {"head_dim": 256, "queries": 1, "tokens": 2, "source": "fp16"},
    "queries of many tokens": {"matrix": "k", "head_dim": 64, "queries": 2, "tokens": 17},
    "matrices and queries, groups of tokens": of(
        "matrix=kv exact=bf16 head_dim=64 queries=4 tokens=19"
    ),
    "matrices, head_dim 256, few blocks": of("matrix=k head_dim=256 queries=1 tokens=9 k=int8"),
    "queries in a part of a wider tensor": of(
        "matrix=k layout=fused head_dim=80 queries=2 tokens=9"
    ),
    "a matrix after RoPE": {"matrix": "k", "rotary_dim": 64, "head_dim": 64},
    "a matrix of float32": {"matrix": "k", "source": "fp32", "head_dim": 64},
    "feedback of fp8 is none": {"feedback": "kv", "matrix": "k", "k": "fp8", "tokens": 3},
}
for k, v in (("int8-g8", "int4-g4"), ("int4", "int3"), ("int8", "int4-g4")):
    case = {"k": k, "v": v, "pages": "planes", "heads": 2, "tokens": 14, "exact": "bf16"}
    CASES |= {f"pages of an engine, {k} and {v}": case}
    CASES |= {f"dequantize pages of an engine, {k} and {v}": {**case, "exact": ""}}
for k, v in (("int3", "int2"), ("int2", "int3")):
    CASES |= {
        f"few bits, {k}, RoPE, offset, clipped": of(
            f"rotary_dim=64 offset=k clip=kv k={k} v={v} heads=2 tokens=6"
        ),
        f"few bits, {k}, 16-bit rows": of(f"exact=bf16 tokens=14 hostile=True k={k} v={v}"),
        f"feedback, few bits, {k}": of(
            f"feedback=kv clip=k head_dim=64 tokens=9 exact=bf16 k={k} v={v} hostile=True"
        ),
        f"feedback, few bits, {k}, a lane a row": of(
            f"feedback=kv head_dim=96 tokens=4 k={k} v={v} skip=True heads=2"
        ),
        f"feedback and matrices in a step, few bits, {k}": of(
            f"feedback=k matrix=kv offset=kv head_dim=64 tokens=5 queries=1 k={k} v={v} clip=kv"
        ),
        f"dequantize {k}, pages of 5, float32": of(
            f"page_size=5 heads=3 pages=tokens k={k} source=fp32 tokens=5"
        ),
    }
for name in LATENTS:
    CASES[f"latents, {name}"] = latent_case(name)
    CASES[f"latents, {name}, 16-bit rows"] = latent_case(
        name, exact="bf16", tokens=9, source="fp32"
    )
CASES["latents, fp8, before sm_89"] = latent_case("fp8", exact="fp16", skip=True, page_size=5)
for k in ("fp8", "fp8-g8"):
    CASES[f"{k}, before sm_89"] = {"k": k, "tokens": 14, "hostile": True}
for name in FORMATS:
    CASES[f"dequantize {name}"] = {"k": name, "hostile": True, "skip": True}
for head_dim in (64, 80, 96, 112, 192, 256):
    for k in ("int4", "int8-g8", "bf16"):
        CASES[f"dequantize {k}, head_dim {head_dim}"] = {"k": k, "head_dim": head_dim, "tokens": 3}
for k, head_dim in FEW:
    CASES[f"dequantize {k}, head_dim {head_dim}"] = {"k": k, "head_dim": head_dim, "tokens": 3}
CASES |= {
    "dequantize fp8, before sm_89": {"k": "fp8-g2", "hostile": True},
    "dequantize to fp16": {"k": "int8", "source": "fp16", "tokens": 3},
    "dequantize to float32": {"k": "int4-g8", "source": "fp32", "tokens": 3},
    "dequantize to float32, head_dim 80": {"k": "fp8", "source": "fp32", "head_dim": 80},
    "dequantize fp16 to bf16": {"k": "fp16", "tokens": 3},
    "dequantize a made-up codec": {"k": "int5-g4", "tokens": 3},
    "dequantize, blocks of two heads, the last of one": {"tokens": 100, "heads": 3},
    "dequantize pages of 5": {"page_size": 5, "heads": 6, "pages": "tokens", "k": "int4"},
}

# one of each kind, of which a user's change breaks most; all others are slow
USUAL = (
    "int4-g4",
    "RoPE and an offset",
    "feedback, 16-bit rows",
    "feedback, few bits, int3",
    "latents, int4-g8+fp8-g4, 16-bit rows",
    "pages of an engine, int4 and int3",
    "dequantize pages of 5",
)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """What the selected cases gave."""
    return run_selected(request, "simulated_append_cases.py", CASES)


@pytest.mark.parametrize("name", mark_slow(CASES, USUAL))
def test_the_kernel_in_the_simulator(results: Results, name: str) -> None:
    assert not results[name], results[name]["problem"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        name
        for name in CASES
        if not any(word in name for word in ("dequantize", "made-up", "queries", "before sm_89"))
    ],
)
def test_the_kernel_on_a_gpu(case: str) -> None:
    check_on_gpu(Case(**CASES[case]))
