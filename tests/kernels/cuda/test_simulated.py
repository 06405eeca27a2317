"""The decode kernel's own code in numba's simulator, against the reference; and on a GPU.

pytest -m "" tests/kernels/cuda/test_simulated.py    # all cases
"""

from __future__ import annotations

from typing import Any

import pytest
from cuda_cases import check_on_gpu
from decode_cases import Case
from simulator_cases import of, run_selected
from slow_cases import mark_slow

pytestmark = pytest.mark.extra("cuda")
LIMITS = {"bf16": 3e-3, "fp16": 8e-4}  # of the output, by its dtype
LSE_LIMIT = 2e-3  # sums of P, in bf16 where V is; else far less

FORMATS = "int4 int4-g2 int4-g4 int4-g8 int8 int8-g2 int8-g4 int8-g8 fp8 fp8-g4 bf16 fp16".split()
FORMATS += "int2", "int3"
PAIRS = "int8 int4-g4, int4 bf16, fp16 fp8-g4, bf16 int4, int4-g8 int8".split(", ")
PAIRS += "int3 int2", "int2 int3", "int3 int4-g4", "int8-g8 int2", "int2 bf16", "fp16 int3"

# name -> what differs from the defaults of simulated_cases.Case
CASES: dict[str, dict[str, Any]] = {}
case: dict[str, Any]
for name in FORMATS:
    CASES[name] = {"k": name, "lens": [33, 100]}
    CASES[f"{name}, fp16 query"] = {"k": name, "lens": [31, 34], "query": "fp16"}
for pair in PAIRS:
    k, v = pair.split()
    CASES[f"{k} and {v}"] = {"k": k, "v": v, "lens": [40]}
for head_dim in (64, 80, 96, 112, 192, 256):
    for k in ("int4", "int8", "bf16"):
        CASES[f"{k}, head_dim {head_dim}"] = {"k": k, "head_dim": head_dim, "lens": [35]}
for head_dim in (64, 80, 96, 112, 192, 256):
    for k in ("int2", "int3") if head_dim not in (80, 112) else ("int2",):  # int3 is refused
        for place in ("linear", "ring"):
            case = {"k": k, "head_dim": head_dim, "place": place, "heads": [4, 2], "lens": [35]}
            CASES[f"{k}, {place}, head_dim {head_dim}"] = case
for k, head_dim in (("int8-g2", 96), ("int4-g2", 192), ("fp8-g8", 256)):
    CASES[f"{k}, head_dim {head_dim}"] = {"k": k, "head_dim": head_dim, "lens": [35]}
# queries in shared memory; loops in pieces; of one group, rows realigned in pieces
for k in FORMATS:
    CASES[f"{k}, head_dim 512"] = {"k": k, "head_dim": 512, "lens": [35]}
CASES |= {
    "head_dim 512, a ring of int8": of("k=int8 head_dim=512 place=ring layout=tokens lens=[33,40]"),
    "head_dim 512, sums promoted twice": of("k=int4-g8 v=int8 head_dim=512 lens=[1060]"),
    "head_dim 512, three segments": of(
        "head_dim=512 exact=bf16 query=fp16 splits=[2,1,1] warps=2 place=paged lens=[70,0,33]"
    ),
    "head_dim 512, 17 on 1 heads": of(
        "k=int4-g8 head_dim=512 heads=[17,1] sharers=3 warps=6 lens=[70]"
    ),
    "head_dim 512, balanced": of("head_dim=512 lens=[300,0,40] workers=4 heads=[4,2]"),
}
for heads in ([1, 1], [5, 1], [10, 2], [10, 1]):
    CASES[f"{heads[0]} on {heads[1]} heads"] = {"heads": heads, "lens": [33, 5]}
for k in ("int4-g4", "int4"):
    CASES[f"{k}, lengths"] = {"k": k, "lens": [0, 1, 31, 33, 100]}
    for place in ("linear", "ring", "paged"):
        for layout in ("heads", "tokens") if place == "paged" else ("heads", "odd heads", "tokens"):
            case = {"k": k, "place": place, "layout": layout, "heads": [4, 2], "lens": [33, 70]}
            if (k, place, layout) != ("int4", "paged", "tokens"):  # refused: heads are not aligned
                CASES[f"{k}, {place}, {layout}"] = case
    for page_size in (1, 2, 4, 8, 32, 64, 128, 256):
        if k == "int4" and page_size < 4:  # refused: pages are not aligned
            continue
        case = {"k": k, "place": "paged", "page_size": page_size, "lens": [0, 129, 47]}
        CASES[f"{k}, pages of {page_size}"] = case
for k in ("int3", "int2"):
    for place in ("linear", "ring", "paged"):
        for layout in ("heads",) if place == "paged" else ("heads", "odd heads", "tokens"):
            case = {"k": k, "place": place, "layout": layout, "heads": [4, 2], "lens": [33, 70]}
            CASES[f"{k}, {place}, {layout}"] = case
    CASES |= {
        f"{k}, lengths": {"k": k, "lens": [0, 1, 31, 33, 100], "stages": 3},
        f"{k}, sums promoted twice": {"k": k, "lens": [1060]},
        f"{k}, sinks and recent rows, pages, a window": of(
            f"k={k} exact=bf16 sinks=4 place=paged lens=[70,0,20] exact_lens=[[40,3,8],[]] "
            "splits=[2,1,0] warps=2 heads=[4,2]"
        )
        | {"variant": {"window": 90}},
        f"{k}, balanced": {"k": k, "lens": [300, 0, 1, 40], "workers": 4, "heads": [4, 2]},
        f"{k}, warps that share a ring": of(
            f"k={k} q_len=5 heads=[7,1] columns=16 sharers=3 warps=3 lens=[34,3] q_lens=[5,2]"
        ),
    }
for k, v in (("int8-g8", "int4-g4"), ("int4", "int3"), ("int8", "int4-g4")):
    case = {"k": k, "v": v, "place": "paged", "layout": "planes"}
    CASES |= {
        f"pages of an engine, {k} and {v}": {**case, "heads": [4, 2], "lens": [33, 0, 70]},
        f"pages of an engine, {k} and {v}, head_dim 64": {**case, "head_dim": 64, "lens": [33]},
        f"pages of an engine, {k} and {v}, 16-bit rows": of(
            "exact=bf16 sinks=16 seated=True lens=[70,3,40] exact_lens=[[44,3,36],[]] "
            "splits=[2,2,0] page_size=64"
        )
        | case,
    }
for place in ("linear", "ring", "paged"):
    for layout in ("heads", "tokens"):
        case = {"k": "int4", "place": place, "layout": layout, "lens": [33, 64], "overlong": True}
        CASES[f"{place}, {layout}, lengths beyond the room"] = case
for head_dim in (80, 112):  # rows whose last window of 16 bytes may lie behind them
    case = {"k": "int4", "head_dim": head_dim, "place": "ring", "lens": [64], "overlong": True}
    CASES[f"ring up to its last row, head_dim {head_dim}"] = case
CASES |= {
    "a made-up codec": {"k": "int5-g4", "v": "int5", "lens": [33, 100]},
    "3 splits": {"lens": [0, 1, 33, 97], "splits": [3]},
    "3 splits of int4": {"k": "int4", "lens": [70], "splits": [3], "heads": [12, 1]},
    "12 splits": {"lens": [0, 350], "splits": [12]},
    "sums promoted twice": {"lens": [1060]},
    "2 warps": {"lens": [0, 1, 33, 100], "warps": 2},
    "2 warps and splits": {"k": "int4", "lens": [0, 1, 65, 150], "warps": 2, "splits": [2]},
    "4 warps": {"k": "int8", "lens": [0, 5, 200], "warps": 4, "splits": [2]},
    "4 stages": {"lens": [0, 1, 33, 200], "stages": 4},
    "3 stages of int4": {"k": "int4", "lens": [0, 1, 33, 170], "stages": 3},
    "sinks before a ring": {"place": "ring", "sinks": 4, "lens": [0, 3, 4, 5, 70]},
    "sinks before a ring of int4": {"k": "int4", "place": "ring", "sinks": 33, "lens": [30, 70]},
    "seq_slots": of("place=ring sinks=4 seated=True lens=[70,3,40] heads=[4,2]"),
    "sinks and recent rows at their sequence slots": of(
        "exact=bf16 sinks=4 seated=True exact_lens=[[44,3,36],[]] splits=[2,2,0]"
    ),
    "three segments": {"exact": "bf16", "splits": [1, 1, 1]},
    "three segments, fp16": {"k": "int4", "exact": "fp16", "query": "fp16", "splits": [2, 1, 2]},
    "three segments, bf16 and an fp16 query": of(
        "exact=bf16 query=fp16 splits=[1,1,1] place=paged"
    ),
    "three segments, 2 warps": {"exact": "bf16", "splits": [2, 1, 1], "warps": 2},
    "no sinks": {"exact": "bf16", "splits": [1, 0, 2]},
    "an empty second segment": of("exact=bf16 exact_lens=[[0,0],[]] splits=[2,1,0] lens=[33,5]"),
    "no recent rows": {"exact": "fp16", "splits": [2, 1, 0]},
    "K and V of unlike head_dims": {"head_dim": 128, "v_head_dim": 64, "lens": [50]},
    "without lse": {"want_lse": False, "lens": [0, 40]},
    "without lse, splits": {"want_lse": False, "lens": [0, 70], "splits": [2]},
    "large queries": {"q_scale": 3e3, "lens": [64]},
    "peaked scores": {"q_scale": 30.0, "lens": [200]},
}
RAGGED = [350, 0, 1, 40, 33]
CASES |= {
    "balanced": {"lens": RAGGED, "workers": 5, "heads": [4, 2]},
    "balanced, one worker": {"lens": RAGGED, "workers": 1},
    "balanced, more workers than work": {"lens": [200, 5], "workers": 40, "splits": [20]},
    "balanced, 2 warps": {"k": "int4", "lens": RAGGED, "workers": 4, "warps": 2, "splits": [2]},
    "balanced, pages": {"place": "paged", "lens": RAGGED, "workers": 3},
    "balanced, many sequences": {"lens": [40] * 33 + [0, 300, 9], "workers": 7},
    "balanced, three segments": of(
        "exact=bf16 sinks=4 lens=[0,500,20] splits=[1,1,1] workers=4 heads=[4,2]"
    ),
    "balanced, no sinks": of("exact=bf16 lens=[0,500,20] splits=[1,0,2] workers=7"),
    "balanced, many parts": {"lens": [900, 5], "workers": 30, "splits": [20]},
    "far below the room": {"lens": [20, 18, 0], "workers": 2, "splits": [3]},
    "lengths alike for workers": {"lens": [70, 66], "workers": 3, "splits": [2]},
}
# a warp with more columns, and warps that share a ring: rows are read once for all heads
WIDE: dict[str, dict[str, Any]] = {
    "9 on 1 heads": {"columns": 16, "lens": [33, 5]},
    "16 on 1 heads": {"columns": 16, "lens": [0, 1, 100]},
    "17 on 1 heads": {"columns": 16, "sharers": 2, "warps": 2, "lens": [65, 3]},
    "32 on 1 heads": {"columns": 16, "sharers": 2, "warps": 4, "lens": [130], "stages": 3},
    "64 on 1 heads": {"columns": 16, "sharers": 4, "warps": 4, "lens": [40], "splits": [2]},
    "71 on 1 heads": {"columns": 16, "sharers": 5, "warps": 5, "lens": [70], "splits": [3]},
    "48 on 1 heads": {"columns": 16, "sharers": 3, "warps": 9, "lens": [250], "splits": [2]},
    "34 on 2 heads": {"columns": 8, "sharers": 3, "warps": 3, "lens": [70]},
}
# the merge of as many parts as a plan has, where a block has little shared memory for them
WIDE["128 on 1 heads"] = of(
    "k=fp8 head_dim=64 columns=16 sharers=8 warps=8 stages=5 exact=bf16 lens=[32] "
    "exact_lens=[[512],[512]] splits=[1,16,16]"
)
for name, case in WIDE.items():
    heads = [int(word) for word in name.split() if word.isdecimal()]
    CASES[f"wide, {name}"] = {"heads": heads, **case}
for k in FORMATS:
    CASES[f"wide, {k}"] = {"k": k, "heads": [16, 1], "columns": 16, "lens": [33, 70]}
    CASES[f"wide, {k}, fp16 query"] = {**CASES[f"wide, {k}"], "query": "fp16"}
# pages of which a tile has more than two: the lane of a row looks its page up
SMALL: dict[str, dict[str, Any]] = {
    "tokens": {"page_size": 1, "layout": "tokens", "heads": [4, 2], "lens": [33, 70]},
    "bf16": {"page_size": 1, "k": "bf16", "lens": [40, 1], "query": "fp16"},
    "realigned": of("k=int4 page_size=4 heads=[4,2] lens=[35,0,70] overlong=True"),
    "wide": of("page_size=2 heads=[20,1] columns=8 sharers=3 warps=3 lens=[33,70]"),
    "balanced": of("page_size=1 lens=[300,0,1,40,33] workers=5 heads=[4,2]"),
    "splits, 2 warps": of("page_size=8 lens=[0,1,65,150] warps=2 splits=[2] stages=3"),
    "a window": {"page_size": 1, "lens": [33, 0, 170, 1, 100], "variant": {"window": 20}},
    "a window of int4": of("k=int4 page_size=4 lens=[50,7]") | {"variant": {"window": 9}},
    "queries, sinks and recent rows": of(
        "page_size=1 q_len=2 heads=[8,1] columns=16 exact=fp16 sinks=2 lens=[33,16,0] "
        "exact_lens=[[2,12,1],[]] splits=[1,1,0] warps=2"
    ),
}
CASES |= {f"small pages, {name}": {**case, "place": "paged"} for name, case in SMALL.items()}
for place in ("ring", "paged"):
    for layout in ("heads", "tokens"):
        case = {"k": "int4", "heads": [20, 1], "columns": 8, "sharers": 3, "warps": 3}
        CASES[f"wide, {place}, {layout}"] = {
            **case,
            "place": place,
            "layout": layout,
            "lens": [33, 70],
        }
CASES |= {
    "wide, sums promoted twice": {"heads": [16, 1], "columns": 16, "lens": [1060]},
    "wide, three segments": of(
        "heads=[32,1] columns=16 sharers=2 warps=4 exact=bf16 splits=[1,1,1]"
    ),
    "wide, balanced": of("heads=[34,2] columns=8 sharers=3 warps=3 lens=[300,0,40] workers=4"),
    "wide, balanced, three segments": of(
        "heads=[17,1] columns=16 sharers=2 warps=4 exact=bf16 lens=[0,300,20] splits=[1,1,1] "
        "workers=4"
    ),
}
# several queries a sequence (queries.py): a column is a query head of a query
QUERIES: dict[str, dict[str, Any]] = {
    "2 of 4 on 1 heads": {"q_len": 2, "heads": [4, 1], "lens": [0, 1, 2, 33, 64]},
    "8 of 1 on 1 heads": {"q_len": 8, "heads": [1, 1], "lens": [3, 8, 35, 65]},
    "3 of 5 on 1 heads": {"q_len": 3, "heads": [5, 1], "columns": 16, "lens": [2, 32, 34]},
    "ragged": of("q_len=3 heads=[8,2] columns=16 lens=[40,66,31,0,33] q_lens=[0,1,3,2,2]"),
    "fp16 query": {"q_len": 2, "heads": [4, 1], "query": "fp16", "lens": [33, 70], "k": "bf16"},
    "pages": of("k=int4 q_len=2 heads=[8,2] place=paged lens=[17,49,64] q_lens=[2,1,2]"),
    "a ring": {"q_len": 4, "heads": [2, 1], "place": "ring", "sinks": 4, "lens": [3, 5, 33, 66]},
    "sinks and recent rows": of(
        "q_len=5 heads=[1,1] exact=bf16 sinks=4 seated=True lens=[70,0,2,33,1] "
        "exact_lens=[[36,3,6,4,7],[]] q_lens=[5,4,5,5,3] splits=[2,1,0]"
    ),
    "sinks and recent rows after pages": of(
        "q_len=2 heads=[8,1] columns=16 place=paged exact=fp16 sinks=2 lens=[33,16,0] "
        "exact_lens=[[2,12,1],[]] splits=[1,1,0] warps=2"
    ),
    "splits": {"q_len": 4, "heads": [4, 2], "lens": [0, 2, 33, 97], "splits": [3]},
    "splits, 2 warps": of(
        "q_len=4 heads=[4,1] columns=16 lens=[2,66,130] q_lens=[4,3,4] splits=[2] warps=2 stages=3"
    ),
    "balanced": of(
        "q_len=3 heads=[4,2] columns=16 lens=[300,0,1,40,33] q_lens=[3,2,3,0,1] workers=4"
    ),
    "balanced, sinks and recent rows": of(
        "q_len=2 heads=[4,1] exact=bf16 sinks=4 lens=[0,260,20] exact_lens=[[1,40,4],[]] "
        "splits=[1,1,0] workers=4"
    ),
    "warps that share a ring": of(
        "q_len=5 heads=[7,1] columns=16 sharers=3 warps=3 lens=[34,3] q_lens=[5,2]"
    ),
    "blocks that share a KV head": of("k=int4 q_len=9 heads=[4,2] lens=[37,2] splits=[2]"),
    "sums promoted": {"q_len": 2, "heads": [4, 1], "lens": [520, 514]},
    "no lse": {"q_len": 2, "heads": [4, 1], "want_lse": False, "lens": [0, 1, 33], "splits": [2]},
    "zeros": {"q_len": 3, "heads": [2, 1], "q_scale": 0.0, "lens": [1, 33]},
}
CASES |= {f"queries, {name}": case for name, case in QUERIES.items()}
# ragged queries (ragged.py): q is [total, ...], and a piece stands for a sequence
PIECES: dict[str, dict[str, Any]] = {
    "chunks and single ones": of(
        "heads=[4,2] columns=16 lens=[40,66,31,0,33] q_lens=[9,1,0,2,1] rest=3"
    ),
    "one of each": of("k=int4 heads=[8,1] lens=[33,0,70] q_lens=[1,1,1]"),
    "three kinds": of("heads=[8,1] lens=[33,40,1,70,0,9] q_lens=[1,9,1,3,2,0] rest=2 columns=16"),
    "three kinds, balanced": of(
        "heads=[16,2] columns=16 lens=[3,300,1,40,33,0,200] q_lens=[1,9,1,3,2,5,1] workers=3"
    ),
    "three kinds, pages, splits": of(
        "heads=[8,1] place=paged lens=[1,33,97,66] q_lens=[1,2,9,1] splits=[3] rest=1"
    ),
    "no large ones": of("heads=[4,1] lens=[0,33,70] q_lens=[2,1,2] splits=[2] rest=4"),
    "no small ones": of("heads=[4,1] lens=[33,0,70] q_lens=[9,0,3] workers=4 splits=[2]"),
    "a chunk of a whole prompt": of("heads=[2,1] lens=[35,3] q_lens=[35,5] columns=16"),
    "fp16 query": of("heads=[4,1] k=bf16 query=fp16 lens=[33,70] q_lens=[5,1]"),
    "pages": of("heads=[8,2] k=int4 place=paged lens=[17,49,64,0] q_lens=[7,1,2,0] rest=2"),
    "a ring": of("heads=[2,1] place=ring sinks=4 seated=True lens=[3,5,33,66] q_lens=[5,3,9,0]"),
    "sinks and recent rows": of(
        "heads=[1,1] exact=bf16 sinks=4 seated=True lens=[70,0,2,33,1] "
        "exact_lens=[[36,3,6,4,7],[]] q_lens=[50,4,9,0,3] splits=[2,1,0]"
    ),
    "sinks and recent rows after pages": of(
        "heads=[8,1] columns=16 place=paged exact=fp16 sinks=2 lens=[33,5,0] "
        "exact_lens=[[2,3,1],[]] q_lens=[3,5,1] splits=[1,1,0] warps=2"
    ),
    "splits": of("heads=[4,2] lens=[0,2,33,97] q_lens=[2,2,1,6] splits=[3] rest=1"),
    "balanced": of("heads=[4,2] columns=16 lens=[300,0,1,40,33] q_lens=[1,2,3,9,0] workers=4"),
    "warps that share a ring": of(
        "heads=[7,1] columns=16 sharers=3 warps=3 lens=[34,3] q_lens=[12,1]"
    ),
    "blocks that share a KV head": of("k=int4 heads=[10,1] lens=[37,2] q_lens=[2,1] splits=[2]"),
    "no lse": of("heads=[4,1] want_lse=False lens=[0,1,33] q_lens=[2,1,4] splits=[2] rest=1"),
}
CASES["the largest values, direct rows"] = of(
    "k=int8 v=int4 lens=[70,200] k_scale=1e5 v_scale=1e5 q_scale=1e-5"
)
CASES |= {f"pieces, {name}": {**case, "ragged": True} for name, case in PIECES.items()}
# variants (variant.py): the tensors of a field that is True are random
TREE = {"q_len": 4, "q_lens": [4, 2, 0, 4, 3, 4], "lens": [33, 1, 40, 66, 0, 2]}
ALL = dict.fromkeys(("alibi_slopes", "score_offsets", "sink_logits", "tree_mask"), True) | of(
    "soft_cap=3.0 window=40"
)
LINEAR = {name: value for name, value in ALL.items() if name != "tree_mask"}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"lens": [33, 0, 70, 1], "variant": {name: LINEAR[name]}} for name in LINEAR},
    "tree_mask": {**TREE, "heads": [2, 1], "variant": {"tree_mask": True}},
    "all": {**TREE, "heads": [4, 2], "columns": 16, "variant": ALL},
    "all, direct rows": {**TREE, "k": "int4", "heads": [4, 2], "columns": 16, "variant": ALL},
    "all, one query": {"lens": [33, 0, 370, 1], "splits": [3], "variant": LINEAR, "query": "fp16"},
    "without positions, three segments in any order": of("exact=bf16 splits=[1,1,1]")
    | {"variant": {"sink_logits": True, "soft_cap": 2.0, "score_offsets": True}},
    "sinks, splits": {"lens": [70, 0, 33], "splits": [3], "variant": {"sink_logits": True}},
    "sinks, balanced": of("workers=5 heads=[4,2]")
    | {"lens": RAGGED, "variant": {"sink_logits": True}},
    "sinks and recent rows": QUERIES["sinks and recent rows"]
    | {"q_len": 3, "heads": [4, 1], "q_lens": [3, 2, 1, 2, 3], "variant": ALL},
    "a window across sinks, packed and recent rows": of(
        "q_len=2 heads=[2,1] exact=bf16 sinks=40 lens=[50,0,20,3] exact_lens=[[45,42,70,12],[]] "
        "splits=[1,2,0]"
    )
    | {"variant": {"window": 60}},
    "a window of pages": of("k=int4 place=paged lens=[33,0,170,1,100]")
    | {"variant": {"window": 20}},
    "a window of large pages, several queries": of(
        "q_len=3 heads=[2,1] place=paged page_size=64 lens=[200,130,2,66] q_lens=[3,1,3,0]"
    )
    | {"variant": {"window": 1}},
    "a window, balanced": of(
        "place=paged lens=[700,0,1,40,33] workers=5 q_len=2 heads=[4,2] exact=bf16 sinks=4 "
        "exact_lens=[[8,3,4,2,1],[]] splits=[1,1,0]"
    )
    | {"variant": {"window": 500, "sink_logits": True}},
    "a window in a ring": of("place=ring sinks=4 lens=[3,66,40]")
    | {"variant": {"window": 30, "alibi_slopes": True}},
    "warps that share a ring": QUERIES["warps that share a ring"]
    | {"q_lens": None, "variant": ALL},
    "pieces": PIECES["sinks and recent rows"]
    | {"q_lens": [5, 2, 1, 0, 3], "heads": [4, 1], "ragged": True, "rest": 1, "variant": LINEAR},
    "a window of pieces": PIECES["pages"] | {"ragged": True, "variant": {"window": 5}},
}
CASES |= {f"variant, {name}": case for name, case in VARIANTS.items()}

# one of each kind, of which a user's change breaks most; all others are slow
USUAL = (
    "int4-g4",
    "int3 and int2",
    "pages of an engine, int4 and int3",
    "small pages, wide",
    "on Hopper",
    "on Hopper, a window, queries",
    "sinks and recent rows at their sequence slots",
    "variant, all, direct rows",
    "the largest values, direct rows",
)

Results = dict[str, dict[str, Any]]

# the kernel for wide groups, as a launch has it: up to 64 columns, and more
HOPPER: dict[str, dict[str, Any]] = {
    "on Hopper": of("lens=[33,0,300] heads=[20,1]"),
    "on Hopper, 71 on 1 heads": of("lens=[70,130,270] heads=[71,1]"),
    "on Hopper, few stages": of("lens=[33,64,400] heads=[64,1] wide={'stages':2,'landings':2}"),
    "on Hopper, one feeder": of("lens=[33,0,300] heads=[20,1] wide={'warps':12,'feeders':1}"),
    "on Hopper, 130 on 1 heads": of("lens=[70] heads=[130,1]"),
    "on Hopper, splits": of("lens=[0,300,70] heads=[34,2] splits=[2]"),
    "on Hopper, balanced": of("lens=[350,0,1,40,133] heads=[40,2] workers=4"),
    "on Hopper, pages, splits": of("place=paged lens=[0,129,300] heads=[34,1] splits=[2]"),
    "on Hopper, pages of an engine": of(
        "k=int8-g8 v=int4-g4 place=paged layout=planes lens=[0,129,300] heads=[34,1] splits=[2]"
    ),
    "on Hopper, pages of 1": of("place=paged page_size=1 lens=[0,129] heads=[34,1]"),
    "on Hopper, int4 in pages of 64": of(
        "k=int4 place=paged page_size=64 lens=[3,200] heads=[34,1]"
    ),
    "on Hopper, a ring": of("place=ring sinks=4 seated=True lens=[70,33] heads=[40,2]"),
    "on Hopper, int4, odd heads": {
        **of("k=int4 lens=[70,33] heads=[40,2]"),
        "layout": "odd heads",
    },
    "on Hopper, rows of tokens": of("layout=tokens lens=[200] heads=[40,2]"),
    "on Hopper, int8 and int4-g8": of("k=int8 v=int4-g8 lens=[33,150] heads=[17,1]"),
    "on Hopper, int2 and int8-g4": of("k=int2 v=int8-g4 lens=[33,150] heads=[17,1]"),
    "on Hopper, fp8 and int2": of("k=fp8 v=int2 lens=[33,150] heads=[17,1] query=fp16"),
    "on Hopper, fp8-g4": of("k=fp8-g4 lens=[33,150] heads=[17,1]"),
    "on Hopper, head_dim 64": of("head_dim=64 lens=[70,200] heads=[40,2]"),
    "on Hopper, queries": of("lens=[100,3,200] heads=[20,2] q_len=4 q_lens=[4,2,3]"),
    "on Hopper, queries of two consumers": of("lens=[70,2] heads=[16,2] q_len=9 q_lens=[9,8]"),
    "on Hopper, ragged": of("lens=[100,7,200] heads=[16,1] ragged=True q_lens=[4,0,9]"),
    "on Hopper, large queries": of("q_scale=3e3 lens=[70,200] heads=[40,1]"),
    "on Hopper, enormous queries": of("q_scale=1e34 lens=[70] heads=[40,1]"),
    "on Hopper, the largest values": of(
        "k_scale=1e5 v_scale=1e5 q_scale=1e-5 lens=[70,200] heads=[40,1]"
    ),
    "on Hopper, the largest values of fp8": of(
        "k=fp8 k_scale=1e5 v_scale=1e5 q_scale=1e-5 lens=[70] heads=[71,1]"
    ),
    "on Hopper, small values": of("k_scale=1e-3 v_scale=1e-3 q_scale=1e3 lens=[70] heads=[40,1]"),
    "on Hopper, small values of int8": of("k=int8-g4 v_scale=1e-3 lens=[70] heads=[71,1]"),
    "on Hopper, small values of fp8": of("k=fp8-g4 v_scale=1e-3 lens=[70] heads=[71,1]"),
    "on Hopper, peaked scores": of("q_scale=30. lens=[200] heads=[40,1]"),
}
# and 16-bit rows after the packed ones: both are one line of tiles
WINDOWS: dict[str, dict[str, Any]] = {
    "sinks and recent rows": of(
        "lens=[70,0,64,3] exact_lens=[[132,3,64,0],[]] sinks=4 seated=True heads=[40,2]"
    ),
    "no tokens": of("lens=[0,70,0] exact_lens=[[0,0,33],[]] heads=[20,1]"),
    "71 on 1 heads": of("lens=[150,33] exact_lens=[[132,70],[]] sinks=4 heads=[71,1]"),
    "one feeder": of(
        "lens=[70,300] exact_lens=[[132,3],[]] heads=[20,1] wide={'warps':12,'feeders':1}"
    ),
    "splits": of("lens=[0,300,70] exact_lens=[[150,132,3],[]] heads=[34,2] splits=[3,1,0]"),
    "balanced": of(
        "lens=[350,0,1,40,133] exact_lens=[[132,70,0,3,5],[]] sinks=4 heads=[40,2] workers=4"
    ),
    "pages, splits": of(
        "place=paged lens=[0,129,300] exact_lens=[[5,132,64],[]] heads=[34,1] splits=[2,1,0] "
        "query=fp16"
    ),
    "pages of 1": of("place=paged page_size=1 lens=[33,129] exact_lens=[[5,70],[]] heads=[34,1]"),
    "int8 and int4-g8, fp16 rows": of(
        "k=int8 v=int4-g8 exact=fp16 query=fp16 lens=[33,150] exact_lens=[[70,3],[]] heads=[17,1]"
    ),
    "int2 and fp8": of("k=int2 v=fp8 lens=[33,150] exact_lens=[[70,3],[]] heads=[17,1]"),
    "head_dim 64": of("k=int8-g4 head_dim=64 lens=[70,200] exact_lens=[[70,3],[]] heads=[40,2]"),
    "queries": of(
        "lens=[100,0,1,62] exact_lens=[[70,3,1,4],[]] sinks=2 heads=[20,2] q_len=4 q_lens=[4,2,3,4]"
    ),
    "queries of two consumers": of(
        "lens=[70,2,60] exact_lens=[[66,7,3],[]] sinks=4 heads=[16,2] q_len=9 q_lens=[9,8,5] "
        "splits=[2,1,0]"
    ),
    "ragged": of(
        "lens=[100,7,200] exact_lens=[[3,0,70],[]] sinks=2 heads=[16,1] ragged=True q_lens=[9,0,9]"
    ),
    "the largest values": of(
        "k_scale=1e5 v_scale=1e5 q_scale=1e-5 lens=[70] exact_lens=[[40],[]] heads=[40,1]"
    ),
}
HOPPER |= {
    f"on Hopper, a window, {name}": of("exact=bf16 splits=[1,1,0]") | case
    for name, case in WINDOWS.items()
}
CASES |= {name: {"wide": {}, **case} for name, case in HOPPER.items()}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """What the selected cases gave."""
    return run_selected(request, "simulated_cases.py", CASES)


@pytest.mark.parametrize("name", mark_slow(CASES, USUAL))
def test_the_kernel_in_the_simulator(results: Results, name: str) -> None:
    case, result = CASES[name], results[name]
    assert "problem" not in result, result["problem"]
    assert result["out"] <= LIMITS[case.get("query", "bf16")]
    assert result["lse"] <= LSE_LIMIT * max(1.0, case.get("q_scale", 1.0))


# On a GPU products and differences are fused: scores above 1e8 give NaN (kernels/FACTS.md).
NOT_ON_A_GPU = "made-up", "enormous"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [name for name in CASES if not any(word in name for word in NOT_ON_A_GPU)]
)
def test_the_kernel_on_a_gpu(case: str) -> None:
    check_on_gpu(Case(**CASES[case]))
