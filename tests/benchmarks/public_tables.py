"""What pages show of public models: tables and sentences of results/public-NAME.json.

public_models.py writes those files. A row of them has a "key" that says what was measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from kvquant.evaluation.statistics import Paired, paired

KL_NOTICE = 0.05  # a KL above it is in bold
RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]  # of each model
PUBLIC = {  # name in results/
    "SmolLM2-135M": "smollm2-135m",
    "Gemma 3 270M": "gemma3-270m",
    "Qwen2.5-Coder-0.5B": "qwen2.5-coder-0.5b",
    "Qwen2.5-Coder-1.5B": "qwen2.5-coder-1.5b",
}
CODERS = [name for name in PUBLIC if "Coder" in name]
HEADS_OF_128 = "Qwen2.5-Coder-1.5B"
OWN = {
    "default": "the default",
    "plan int4": "plan, `int4`",
    "plan int3": "plan, `int3`",
    "plan int2": "plan, `int2`",
    "plan int4-g4": "plan, `int4-g4`",
    "plan, bits of int4": "plan by layer, bits of `int4`",
    "plan, bits of int3": "plan by layer, bits of `int3`",
    "plan, bits of int3 and int2": "plan by layer, between `int3` and `int2`",
    "int8": "`int8`",
    "int4-g4": "`int4-g4`, no plan",
}
SHOWN = "default", "plan int4", "int8", "int4-g4"  # in README.md, and peers
PEERS = {"KIVI-4, residual of 128": "KIVI-4", "TurboQuant of vLLM, 4 bits": "TurboQuant"}
PEERS |= {"llama.cpp q4_0": "llama.cpp `q4_0`"}
SHIPPED = *PEERS, "KIVI-2, residual of 128", "KVarN K4V2, 128 sinks"  # in FIDELITY's HumanEval
ENGINES = {  # of vllm_models.py, in kvquant/vllm/README.md
    "16 bit, TRITON_ATTN": "TRITON_ATTN, bf16",
    "default, rows alone": "kvquant, the default",
    "default, window": "kvquant, the default with `recent_len` 128",
    "plan, rows alone": 'kvquant, `"plan": "auto"`',
    "plan, window": 'kvquant, `"plan": "auto"` with `recent_len` 128',
    "FLASH_ATTN fp8": "FLASH_ATTN, fp8",
    "int4-g4, window": "kvquant, `int4-g4` without a plan, `recent_len` 128",
}
AGAIN = "16 bit, kvquant's rows"  # what another order of sums does to 16 bit
EXACT = "16 bit", "peers' 16 bit", AGAIN
WINDOW, NONE = [4, 128], [0, 0]
CONTEXT = 4096  # of README.md
Z = 1.645  # of a one-sided bound of 95 %
PLACES = {"alone": "alone", "behind": "behind code"}


def read_public(folder: Path | None = None) -> Rows:
    """Rows of all models, and none of a model without a file."""
    paths = {name: (folder or RESULTS) / f"public-{model}.json" for name, model in PUBLIC.items()}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))["rows"]
        for name, path in paths.items()
        if path.exists()
    }


def losses(rows: Sequence[Row]) -> Iterator[tuple[dict[str, Any], Paired]]:
    """What each cache loses of answers in each place, of the generations that 16 bit has, too.

    16 bit is transformers' own cache, and kvquant's 16-bit rows for generations that it lacks.
    """
    groups: dict[str, dict[int, str]] = {}
    for row in rows:
        if "sample" in row["key"]:  # answers
            key = {name: one for name, one in row["key"].items() if name != "sample"}
            groups.setdefault(json.dumps(key), {})[row["key"]["sample"]] = row["passed"]
    for text, found in groups.items():
        key = json.loads(text)
        plain = {name: one for name, one in key.items() if name != "window"}
        names = ["16 bit"] if key["cache"] == AGAIN else [AGAIN, "16 bit"]
        exact: dict[int, str] = {}
        for name in names:
            exact |= groups.get(json.dumps(plain | {"cache": name}), {})
        both = sorted(exact.keys() & found.keys())
        if both and key["cache"] != "16 bit":
            samples = ([one[at] for at in both] for one in (exact, found))
            problems = (zip(*one, strict=True) for one in samples)  # of each, its generations
            yield key, paired(*([[x == "1" for x in each] for each in one] for one in problems))


def at_most(pair: Paired) -> float:
    """The one-sided 95 % bound on the loss, in points."""
    return 100 * (pair.drop + Z * pair.error)


def kl_of(row: Row) -> str:
    """Four digits behind the point, or one that counts; in bold where the loss is worth a look."""
    kl = f"{row['kl']:.4f}" if row["kl"] >= 1e-4 else f"{row['kl']:.5f}"
    return f"**{kl}**" if row["kl"] > KL_NOTICE else kl


def kl_rows(rows: Sequence[Row]) -> dict[tuple[str, Any, int], Row]:
    """Rows of KL by cache, window (None of a peer) and context."""
    found = {}
    for row in rows:
        key = row["key"]
        if key["measure"] == "kl" and key["device"] == "cuda":
            window = key.get("window")
            found[key["cache"], None if window is None else tuple(window), key["context"]] = row
    return found


def lost_by(rows: Sequence[Row], place: str, window: Sequence[int] = WINDOW) -> dict[str, Paired]:
    """Losses of HumanEval in a place by cache; of kvquant's with this window."""
    return {
        key["cache"]: one
        for key, one in losses(rows)
        if key["place"] == place and key.get("window", window) == window
    }


def overview(public: Rows) -> list[list[str]]:
    """README's table: bits, KL of each model with the window and without, answers lost and won."""
    kl = {name: kl_rows(rows) for name, rows in public.items()}
    lost = {name: lost_by(public[name], "alone") for name in CODERS}
    lines = [["cache", "bits, Coder-1.5B", *public]]
    lines[0] += [f"HumanEval, {name.rpartition('-')[2]}: lost / won" for name in CODERS]
    for cache, title in (OWN | PEERS).items():
        windows = (tuple(WINDOW), tuple(NONE)) if cache in OWN else (None,)
        of_128 = kl[HEADS_OF_128].get((cache, windows[0], CONTEXT))
        if of_128 is None or cache not in (*SHOWN, *PEERS):
            continue
        shown = [kl[HEADS_OF_128][cache, window, CONTEXT] for window in windows]
        bits = dict.fromkeys(f"{row['packed_bits']:.2f}" for row in shown)
        cells = [title, ", ".join(bits)]
        for name in public:
            rows = [kl[name].get((cache, window, CONTEXT)) for window in windows]
            cells.append(", ".join(kl_of(row) for row in rows if row) or "-")
        pairs = [lost[name].get(cache) for name in CODERS]
        lines.append(cells + [f"{one.lost} / {one.won}" if one else "-" for one in pairs])
    return lines


def overview_about(public: Rows) -> str:
    """How that table was measured."""
    keys = (row["key"] for row in public[HEADS_OF_128])
    key = next(one for one in keys if one.get("context") == CONTEXT)
    asked = [row["key"] for row in public[HEADS_OF_128] if row["key"]["measure"] == "humaneval"]
    solved = [
        row["passed"].count("1")
        for name in CODERS
        for row in public[name]
        if row["key"].get("place") == "alone" and row["key"]["cache"] == "16 bit"
    ]
    return (
        f"KL: {key['passages'] * key['scored']:,} tokens of WikiText-2's test text, each behind "
        f"{CONTEXT:,} others or more, in float32, on one NVIDIA H200. HumanEval: greedy, in "
        f"bfloat16, with the window; of {asked[0]['problems']} problems 16 bit solved "
        f"{' and '.join(map(str, solved))}"
    )


def chains(public: Rows) -> str:
    """Right lines of long answers, and what caches change, with the errors of differences."""
    rows = [row for row in public[HEADS_OF_128] if row["key"]["measure"] == "chains"]
    steps = {row["key"]["cache"]: row["right_steps"] for row in rows}
    exact, told = steps[AGAIN], list[str]()
    for cache, title in (
        ("default", "The default added"),
        ("plan int4", "a plan of `int4`"),
        ("plan, bits of int3", "one by layer with the bits of `int3`"),
        ("plan, bits of int3 and int2", "between `int3` and `int2`"),
        ("plan int2", "`int2` in all layers"),
    ):
        more = [one - other for one, other in zip(steps[cache], exact, strict=True)]
        error = stdev(more) / len(more) ** 0.5
        told.append(f"{title} {fmean(more):.1f} ± {error:.1f}")
    return (
        f"Coder-1.5B wrote {len(exact)} {rows[0]['key']['place']} sums. With 16-bit rows it wrote "
        f"{fmean(exact):.1f} right lines before a wrong one. {told[0]} lines, "
        f"{', '.join(told[1:])}"
    )


def by_context(public: Rows) -> list[list[str]]:
    """KL with the default window and without one, behind few and many tokens."""
    lines = []
    for name, rows in public.items():
        found = kl_rows(rows)
        contexts = sorted({context for _, _, context in found})
        for cache in ("default", "plan int4", "plan int3", "int8"):
            places = [(tuple(w), context) for w in (WINDOW, NONE) for context in contexts]
            each = [found[cache, window, context] for window, context in places]
            bits = dict.fromkeys(f"{row['packed_bits']:.4g}" for row in each)
            lines.append([name, OWN[cache], " / ".join(bits), *map(kl_of, each)])
    lengths = "1,024", "4,096", "16,384"
    titles = [f"{what}, {n}" for what in ("window", "no window") for n in lengths]
    return [["model", "cache", "bits", *titles], *lines]


def humaneval(public: Rows) -> list[list[str]]:
    """KL behind 1,024 tokens, and answers lost and won, alone and behind other code."""
    titles = ["cache"]
    titles += [f"{n}: {what}" for n in CODERS for what in ("KL", *PLACES.values())]
    lines = [titles]
    kl = {name: kl_rows(public[name]) for name in CODERS}
    lost = {
        (name, place, tuple(window)): lost_by(public[name], place, window)
        for name in CODERS
        for place in PLACES
        for window in (WINDOW, NONE)
    }
    kinds = [(AGAIN, NONE, "16 bit again"), *((one, WINDOW, title) for one, title in OWN.items())]
    kinds.append(("default", NONE, "the default, no window"))
    kinds += [(one, WINDOW, one.partition(",")[0]) for one in SHIPPED]
    for cache, window, title in kinds:
        cells = [title]
        for name in CODERS:
            of_row = None if cache in SHIPPED else tuple(window)
            row = kl[name].get((cache, of_row, 1024))
            cells.append(kl_of(row) if row else "-")
            for place in PLACES:
                one = lost[name, place, tuple(window)].get(cache)
                cells.append(
                    f"{one.lost} / {one.won} of {one.answers:,}: {at_most(one):.1f}" if one else "-"
                )
        if any(" / " in cell for cell in cells):
            lines.append(cells)
    return lines


def served(rows: Sequence[Row]) -> list[list[str]]:
    """Answers that each of vLLM's engines loses and wins, alone and behind other code."""
    found = {place: lost_by(rows, place) for place in PLACES}
    lines = [["engine"]]
    for title in PLACES.values():
        lines[0] += [f"{title}: right", "lost / won: at most"]
    for engine, title in ENGINES.items():
        cells = [title]
        for place in PLACES:
            one = found[place].get(engine)
            right = f"{one.given:.1%}" if one else "-"
            bound = f"{max(at_most(one), 0):.1f}" if one else ""
            told = f"{one.lost} / {one.won} of {one.answers}: {bound}" if one else "-"
            cells += [right, told]
        lines.append(cells)
    return lines


def shipped(public: Rows) -> list[list[str]]:
    """KL of other projects' caches in the form that they ship, beside ours.

    Of each model in the context where most of them were measured, rather in README's.
    """
    columns: dict[str, dict[str, str]] = {}
    caches: dict[str, None] = {}
    for name, rows in public.items():
        found = {
            (cache, context): row
            for (cache, window, context), row in kl_rows(rows).items()
            if window in (None, tuple(WINDOW)) and cache not in (*EXACT, "plan int4-g4")
        }
        theirs = Counter(context for cache, context in found if cache not in OWN)
        if not theirs:
            continue
        place = max(theirs, key=lambda context: (theirs[context], context == CONTEXT))
        column = columns.setdefault(f"{name}, {place:,}", {})
        for (cache, context), row in found.items():
            if context == place:
                caches[cache] = None
                column[cache] = f"{row['packed_bits']:.4g}: {kl_of(row)}"
    ordered = [*(one for one in OWN if one in caches), *(one for one in caches if one not in OWN)]
    lines = [["cache", *columns]]
    for cache in ordered:
        lines.append([OWN.get(cache, cache), *(one.get(cache, "-") for one in columns.values())])
    return lines if columns else []


def retrieved(public: Rows) -> list[list[str]]:
    """Answers of retrieval tests that caches with the default window lost and won.

    The tests are the tasks that 16 bit answers; the last row names them.
    """
    columns: dict[str, dict[str, str]] = {}
    for name, rows in public.items():
        for row in rows:
            key = row["key"]
            if key["measure"] != "retrieval" or key["window"] != WINDOW:
                continue
            asked = {task: one["caches"][0] for task, one in row["found"].items() if one["caches"]}
            column = columns.setdefault(f"{name}, {key['context']:,}", {})
            lost, won, answers = (
                sum(one[what] for one in asked.values()) for what in ("lost", "won", "answers")
            )
            column[key["cache"]] = f"{lost} / {won} of {answers}" if asked else "-"
            column["tests"] = ", ".join(asked)
    caches = [one for one in OWN if any(one in column for column in columns.values())]
    lines = [[OWN[one], *(column.get(one, "-") for column in columns.values())] for one in caches]
    lines.append(["**tests**", *(column["tests"] or "-" for column in columns.values())])
    return [["cache", *columns], *lines] if columns else []
