"""Measurements that the READMEs show: kept as JSON in results/, and the tables made of them.

    python tests/benchmarks/results.py                      # prints the tables
    python tests/benchmarks/results.py keep h200-decode bench.json

Each file in results/ is what a script of the repository wrote with --json, with the commit that was
measured and the date:

    h200-decode, h200-mla, h200-variants    kvquant bench, with --mla, with --variants
    h200-peers                              tests/benchmarks/peers.py
    h200-step                               tests/benchmarks/bench_model.py
    zen5-decode                             kvquant bench --device cpu
    fidelity                                tests/benchmarks/fidelity.py

tests/test_readme.py compares the READMEs with the tables and sentences made here. To change a
figure, measure again: keep the file, print the tables and put them into the pages.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
Figures = Mapping[str, Any]


def main() -> None:
    """Print the tables, or keep a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("keep", nargs="*", metavar="keep NAME FILE")
    given = parser.parse_args().keep
    if len(given) == 3 and given[0] == "keep":
        keep(given[1], Path(given[2]))
    elif given:
        parser.error("write: keep NAME FILE")
    for page, texts in shown().items():
        print(f"# {page}\n", *texts, sep="\n\n", end="\n\n")


def keep(name: str, path: Path) -> None:
    """Copy what a script has written to results/, with the commit of this checkout and the date."""
    figures = json.loads(path.read_text(encoding="utf-8"))
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    facts = {"commit": subprocess.check_output(head, text=True).strip()}
    facts["date"] = figures.get("machine", {}).get("date") or written.isoformat(timespec="seconds")
    text = json.dumps(facts | figures, indent=1) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def read(name: str) -> Figures:
    """A file of results/."""
    figures: Figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return figures


def shown() -> dict[str, list[str]]:
    """Tables and sentences by the page that shows them."""
    return {
        "README.md": [speed_up(), cpu_speed_up(), decode(), steps(), latents(), fidelity()],
        "kernels/README.md": [peers(), latent_rows(), latent_peers(), variants()],
    }


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([head, "|---" * len(titles) + "|", *lines])


def day(figures: Figures) -> str:
    """When it was measured: 2026-11-25."""
    return str(figures["date"])[:10]


def of_peer(case: Figures) -> Figures:
    """The fastest of torch's attention beside a case."""
    peer: Figures = case["sdpa"]
    return peer


SHOWN = (
    (1, 8, 8192),
    (32, 8, 8192),
    (512, 8, 8192),
    (8, 32, 8192),
    (64, 32, 8192),
    (32, 32, 32768),
)


def shape(case: Figures) -> tuple[int, int, int]:
    """Sequences, query heads and tokens."""
    return case["batch"], case["num_q_heads"], case["seq_len"]


def int4_cases() -> dict[tuple[int, int, int], Figures]:
    """Cases of int4-g4 on an H200, by shape."""
    return {
        shape(one): one for one in read("h200-decode")["decode"] if one["k_format"] == "int4-g4"
    }


def decode() -> str:
    """Decode attention beside torch's on 16 bit."""
    titles = "batch", "heads", "tokens", "one call: us", "16 bit: us", "ratio"
    titles += "in a row: us", "GB/s", "of the read peak", "16 bit: us", "ratio"
    rows = []
    for key, case in int4_cases().items():
        if key not in SHOWN:
            continue
        peer = of_peer(case)
        cells = [f"{key[0]}", f"{key[1]}:{case['num_kv_heads']}", f"{key[2]:,}"]
        cells += [f"{case['us']:.1f}", f"{peer['us']:.1f}", f"{peer['ratio']:.2f}"]
        cells += [f"{case['in_a_row_us']:.1f}", f"{case['in_a_row_gb_per_s']:,.0f}"]
        cells += [f"{case['in_a_row_roof_percent']:.0f} %"]
        cells += [f"{peer['in_a_row_us']:.1f}", f"{peer['in_a_row_ratio']:.2f}"]
        rows.append(cells)
    assert len(rows) == len(SHOWN)
    return table(titles, rows)


def speed_up() -> str:
    """How much faster INT4 is at most."""
    ratios = [of_peer(one)["in_a_row_ratio"] for one in int4_cases().values()]
    return f"On an H200 it decodes up to {max(ratios):.1f} times as fast"


def cpu_speed_up() -> str:
    """How much faster INT4 is on a CPU, beside torch's fastest way."""
    (case,) = (one for one in read("zen5-decode")["decode"] if one["name"].startswith("int4-g4"))
    return f"{case['ms']:.2f}"


def steps() -> str:
    """A decode step of a whole model."""
    case = read("h200-step")["cases"][-1]
    assert (case["batch"], case["tokens"]) == (8, 32768)
    ms = case["ms"]
    return (
        f"takes {ms['captured']:.1f} ms on an H200, {ms['compiled']:.1f} with a compiled "
        f"`QuantizedCache`. transformers' compiled `StaticCache` takes "
        f"{ms['StaticCache, compiled']:.1f}"
    )


LATENTS = {
    "bf16": "`bf16`",
    "fp8": "`fp8` (FlashMLA's, vLLM's `fp8_ds_mla`)",
    "int8-g4": "`int8-g4`",
    "int4-g8+int8-g4": "`int4-g8+int8-g4`",
}


def latents() -> str:
    """MLA decode of four formats."""
    cases = {
        (one["k_format"], one["num_q_heads"]): one
        for one in read("h200-mla")["mla"]
        if (one["batch"], one["seq_len"], one["q_len"]) == (64, 8192, 1)
    }
    rows = []
    for fmt, name in LATENTS.items():
        few, many = cases[fmt, 16], cases[fmt, 128]
        row_bytes = few["nbytes"] // (64 * 8192)
        rows.append([name, f"{row_bytes:,}", f"{few['us']:.0f}", f"{many['us']:.0f}"])
    return table(["rows", "bytes a token", "16 heads: us", "128 heads: us"], rows)


def latent_rows() -> str:
    """MLA decode of all cases of one query: one call, and its share of the read peak in a row."""
    names = ["int4-g8+int8-g4", "int4-g8", "int8-g4", "fp8", "bf16"]
    found: dict[tuple[int, int, int], dict[str, Figures]] = {}
    for one in read("h200-mla")["mla"]:
        if one["q_len"] == 1:
            key = one["batch"], one["seq_len"], one["num_q_heads"]
            found.setdefault(key, {})[one["k_format"]] = one
    rows = []
    for (batch, tokens, heads), cases in found.items():
        cells = [f"{batch}, {tokens:,}, {heads}"]
        for name in names:
            case = cases[name]
            cells.append(f"{case['us']:.1f}, {case['in_a_row_roof_percent']:.0f} %")
        rows.append([*cells, f"{of_peer(cases['bf16'])['us']:.1f}"])
    titles = ["batch, tokens, heads", *(f"`{name}`" for name in names), "torch on 16 bit"]
    return table(titles, rows)


VARIANTS = {
    "soft_cap": "soft cap",
    "sink_logits": "sink logits",
    "alibi_slopes": "ALiBi",
    "key_bias": "key bias",
    "window": "window 4,096",
    "tree_mask": "tree mask, 4 queries",
}


def variants() -> str:
    """What each field of AttentionVariant costs, calls in a row."""
    cases = read("h200-variants")["variants"]
    plain = {one["q_len"]: one["in_a_row_us"] for one in cases if not one["variant"]}
    ratios = {one["variant"]: one["in_a_row_us"] / plain[one["q_len"]] for one in cases}
    return table([*VARIANTS.values()], [[f"{ratios[name]:.2f}" for name in VARIANTS]])


def fastest(cases: Iterable[Figures]) -> str:
    """The least time, and whose it is; a dash where nothing ran."""
    found = sorted((one["us"], one["project"]) for one in cases)
    return f"{found[0][0]:.1f} ({found[0][1]})" if found else "-"


def peers() -> str:
    """Decode attention of other projects, 8:1 heads and 8,192 tokens."""
    rows = []
    every = read("h200-peers")["peers"]
    batches = (1, 8, 32, 64, 128, 256, 512)
    for name, ours, theirs in (
        ("kvquant `int4-g4`", True, "int4-g4"),
        ("kvquant `fp8`", True, "fp8"),
        ("BF16, fastest", False, "BF16"),
        ("FP8, fastest", False, "FP8"),
        ("INT4, BitDecoding, 128 values a scale", False, "INT4, 128 a group"),
    ):
        cells = [name]
        for batch in batches:
            cases = [
                one
                for one in every
                if one["shape"] == f"8:1x8192x{batch}" and one["cache"] == theirs
                if (one["project"] == "kvquant") == ours
            ]
            time = fastest(cases)
            cells.append(time.partition(" ")[0] if ours or "BitD" in name else time)
        rows.append(cells)
    return table(["batch", *map(str, batches)], rows)


def latent_peers() -> str:
    """MLA decode of other projects, 64 sequences."""
    every = [one for one in read("h200-peers")["peers"] if "mla" in one["shape"]]
    shapes = list(dict.fromkeys(one["shape"] for one in every))
    names = dict.fromkeys((one["project"], one["cache"]) for one in every)
    times = {(one["project"], one["cache"], one["shape"]): one["us"] for one in every}
    rows = [
        [
            f"{project} `{cache}`" if project == "kvquant" else f"{project}, {cache}",
            *(
                f"{times[project, cache, one]:.1f}" if (project, cache, one) in times else "-"
                for one in shapes
            ),
        ]
        for project, cache in names
    ]
    titles = [f"{one.split(':')[0]} heads, {int(one.split('x')[1]):,}" for one in shapes]
    return table(["us", *titles], rows)


CACHES = {
    "int4-g4": "plain `int4-g4`",
    "plan {}": "plan, `int4`",
    "plan {}, int4-g4": "plan, `int4-g4`",
    "plan {} + 4 sinks, 128 recent": "plan, `int4`, 4 sinks and the last 128 in 16 bit",
    "KIVI, last 128 in 16 bit": "KIVI's scheme, the last 128 in 16 bit",
    "transformers quanto int4": "transformers, quanto, its last rows in 16 bit",
}
MODELS = {
    "llama-demo-5m": "Llama type",
    "qwen2-biased-10m": "Qwen2 type, biased keys",
}
BAD = 0.1  # nats: shown in bold


def fidelity() -> str:
    """KL and top-1 agreement of caches of two models, at a context of 2,048 tokens."""
    caches = read("fidelity")["caches"]
    rows = []
    for key, name in CACHES.items():
        cells = [name]
        for model in MODELS:
            parts = caches[f"{model}, context 2048"][key.format(model)]
            mean = {one: statistics.fmean(part[one] for part in parts) for one in parts[0]}
            kl = f"{mean['kl']:.4f}"
            kl = f"**{kl}**" if mean["kl"] > BAD else kl
            cells.append(f"{kl} ({100 * mean['top1']:.1f} %)")
        rows.append([cells[0], f"{mean['bits']:.2f}", *cells[1:]])
    return table(["cache", "bits per element", *MODELS.values()], rows)


if __name__ == "__main__":
    main()
