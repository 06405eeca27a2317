"""Measurements that the pages show: kept as JSON in results/, and the tables made of them.

    python tests/benchmarks/results.py                      # prints the tables
    python tests/benchmarks/results.py keep h200-decode bench.json
    python tests/benchmarks/results.py keep code ours.json peers.json    # runs of two files

Each file in results/ is what a script of the repository wrote with --json, with the commit that was
measured and the date:

    h200-decode, h200-more, h200-wide,      kvquant bench before commit d73287f9, whose options
    h200-mla, h200-variants, h200-lengths   --wide, --mla, --variants, --ragged, --exact and
                                            --page-size it has lost. Today --q-heads, --format and
                                            --batch say the cases; bench_variants.py and
                                            bench_ragged.py measure the others
    h200-ragged                             tests/benchmarks/bench_ragged.py --queries
    h200-512                                kvquant bench --head-dim 512 --q-heads 16 --kv-heads 4
                                            --format int4-g4 --format int8
    h200-ablated                            tests/benchmarks/bench_ablated.py
    h200-windows                            tests/benchmarks/bench_wide.py
    h200-few                                kvquant bench with int4-g4 and pairs of int2, int3 and
                                            int4, for 512 x 8:1 x 8,192 and 64 x 32:8 x 32,768, with
                                            fewer measured plans; addresses of K were folded later
                                            (621a3d1e). We joined the files
    h200-plan-step                          tests/benchmarks/bench_step.py
    h200-tune                               tests/benchmarks/bench_tune.py --quick --format int2
                                            --format int3
    h200-peers, h200-int4-peers             tests/benchmarks/peers.py, with --project kvquant,
                                            --project FBGEMM and --project MSLK
    h200-small                              tests/benchmarks/bench_small.py, in a form that also
                                            measured two experiments, tiles by bulk copies and
                                            launches that begin early. We left these out. The other
                                            kernels are those of the commit, byte for byte
    h200-evaluate                           tests/benchmarks/bench_evaluate.py, interrupted once
    h200-step, h200-latent-step             tests/benchmarks/bench_model.py, with --latent
    cpu-step                                tests/benchmarks/bench_cpu_step.py, on the machine of
                                            zen4-decode, with other tests stopped
    h200-coder-step                         bench_model.py --model, a call for each case, beside
                                            tests that were stopped while it timed: 8 x 4,096 of the
                                            commit, 64 x 4,096 of 14282171, 64 x 32,768 of 27b4d922,
                                            the others of 96590c7b, with DynamicCache from a call of
                                            b333259e. We joined them and kept the 12 longest kernels
    zen4-decode                             kvquant bench --device cpu
    xeon-decode                             the same --format int4-g4 --format int8, on the GPU's
                                            host, with other jobs on its other cores
    vllm-32                                 tests/benchmarks/bench_vllm.py with --layers 32
    vllm-batches                            the same with --model and --part decode, two engines on
                                            each of two GPUs of one host; we joined the two files
    ranks                                   tests/benchmarks/bench_ranks.py
    vllm-ranks                              tests/benchmarks/bench_vllm.py --part decode, of one and
                                            two ranks, with --model and with --width 8192; we joined
                                            the four files by hand
    vllm-window                             the same with and without first pages and last tokens in
                                            16 bit, beside jobs on the machine's other GPU
    vllm-kl                                 tests/benchmarks/bench_window.py, a call for each model,
                                            beside other jobs, with kvquant of commit 5b164be3;
                                            smollm2-135m with the next change of engine/window.py.
                                            We joined the calls, wrote model and commit by hand, and
                                            took "seconds" out of the rows
    vllm-qwen2.5-coder-1.5b                 tests/benchmarks/vllm_models.py, four calls at a time
                                            and beside tests, of a working tree between the commit
                                            that we wrote by hand and 84d5bdc2, which has the
                                            script. torch, not yet a kernel, found slots. We joined
                                            the calls and took "seconds" out of the rows. The plan's
                                            rows alone, and its window behind code, are of
                                            2026-11-30, commit d1a4f485
    sglang                                  tests/benchmarks/bench_sglang.py --model; we left out
                                            what SGLang tells of the memory of graphs
    sglang-answers                          tests/support/sglang_compared.py: its compared.json,
                                            merged from two calls
    recall, recall-few, code, kinds         tests/benchmarks/bench_recall.py, the same with rows of
                                            2 and 3 bits, bench_code.py, the same with models of
                                            other kinds (train_code_lm.py --kind)
    recall-texts                            kvquant evaluate examples/llama-recall-5m of int4-g4,
                                            int4 and two plans: of examples/unseen.txt, made with
                                            --length 1024 --context 512 --scored 16 --windows 2, and
                                            of --zero-data. On a CPU. We left out the times, which
                                            other jobs made longer, and the model's config
    code-few                                bench_code.py with a second training of the model: rows
                                            of 2 and 3 bits, KVarN K4V2 and TurboQuant with 3 bits.
                                            We added "second training" to the model's name by hand
    code-sinks, code-latent                 bench_code.py with models of train_code_lm.py --kind
                                            sinks and --kind latent: kvquant's caches alone, with
                                            the default window. We wrote the commit of the run
                                            into code-latent.json by hand
    defaults                                a script that is gone (bench_defaults.py of commit
                                            d73287f9). Its Gemma read single letters, by a wrong
                                            tokenizer of transformers 5.17; public-gemma3-270m has
                                            the default again, with the right one
    probe                                   tests/benchmarks/bench_probe.py, a call for each model
    bound                                   tests/benchmarks/bench_bound.py, on a CPU
    public-NAME                             tests/benchmarks/public_models.py, which writes there
                                            itself. A row has the torch and the device of its run.
                                            We wrote commit and date by hand: those of the last
                                            run, which made all plans anew. Plans by layer and
                                            chains are of 2026-11-30, commits 80c79c51 (SmolLM2) and
                                            14282171; 16 bit in chains and a sample of HumanEval of
                                            27b4d922; int2 in chains and behind code, and the last
                                            samples of plans by layer behind code, of 96590c7b.
                                            Calibrations of one model shared what they had in
                                            common. We joined the calls
    defaults                                pairs of formats, of which kvquant/rows/defaults.py
                                            took the default: bench_defaults.py at commit d73287f9.
                                            We merged the files of six runs, named the texts, and
                                            left out a pair that was measured twice
    h200-defaults                           kvquant bench --batch 64 --seq-len 8192 --q-heads 32
                                            --kv-heads 8, with the two default pairs as --format

zen4-decode is the one of two runs, one after the other, whose ratios to torch are less favourable.
Its record of the machine was added by hand: the command did not write one yet. A script brought it
and xeon-decode into the form that the command writes now. Of torch's calls the fastest was kept.

tests/test_readme.py compares the READMEs with the tables and sentences made here. To change a
figure, measure again: keep the file, print the tables and put them into the pages.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluations import TEST, Evaluations, of_models, read_runs, text_of
from public_tables import (
    KL_NOTICE,
    by_context,
    chains,
    humaneval,
    overview,
    overview_about,
    read_public,
    retrieved,
    shipped,
)
from public_tables import (
    served as answers_served,
)

from kvquant import KVCache, RowFormat
from kvquant.io.plan_store import RUINED, SAFE, SAFE_FOR_LONG
from kvquant.rows.defaults import default_format

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
Figures = Mapping[str, Any]


def main() -> None:
    """Print the tables, or keep a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("keep", nargs="*", metavar="keep NAME FILE")
    given = parser.parse_args().keep
    if len(given) > 2 and given[0] == "keep":
        keep(given[1], *map(Path, given[2:]))
    elif given:
        parser.error("write: keep NAME FILE")
    for page, texts in shown().items():
        print(f"# {page}\n", *texts, sep="\n\n", end="\n\n")


def keep(name: str, path: Path, *more: Path) -> None:
    """Copy what a script has written to results/, with the commit of this checkout and the date.

    Args:
        name: of the file in results/.
        path: what the script has written.
        more: files of the same script, whose runs are added: other models, caches or seeds.
    """
    figures = json.loads(path.read_text(encoding="utf-8"))
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    facts = {"commit": subprocess.check_output(head, text=True).strip()}
    facts["date"] = figures.get("machine", {}).get("date") or written.isoformat(timespec="seconds")
    runs = figures.pop("runs", None)
    if more and runs is None:
        raise SystemExit(f"{path} has no runs, which other files could add to: give one file")
    for other in more:
        runs += read_runs(other)
    text = json.dumps(facts | figures, indent=1) + "\n"
    text = text if runs is None else text_of(facts | figures, runs)
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")


def read(name: str) -> Figures:
    """A file of results/."""
    figures: Figures = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return figures


def shown() -> dict[str, list[str]]:
    """Tables and sentences by the page that shows them."""
    return {
        "README.md": [
            *(memory(), *public_overview(), SAFE_UP_TO, speed(), with_few()),
        ],
        "calibration/FIDELITY.md": fidelity_page(),
        "kernels/FACTS.md": [
            *(ablated(), with_window()[1]),
            *(peers(), *int4_peers(), said("variants"), variants()),
            *(said("latent rows"), latent_rows(), latent_peers()),
            *(said("few sequences"), few_sequences()),
            *(said("heads of 512"), tabled("heads of 512")),
        ],
        "kvquant/bench/README.md": [
            *(bench(), *bench_about(), with_window()[0], unequal_lengths(), ragged_queries())
        ],
        "kvquant/evaluation/README.md": [evaluation()],
        "kvquant/cache/README.md": [settings(), tabled("ranks"), tabled("ranks of a model")],
        "kvquant/hf/README.md": [
            *(probed(), said("steps"), tabled("steps"), said("coder steps")),
            *(tabled("coder steps"), cpu_steps()),
            *(said("latent steps"), tabled("latent steps")),
        ],
        "kvquant/lmcache/README.md": [DEFAULT_ROOM],
        "kvquant/sglang/README.md": [answers_of_sglang(), served_by_sglang()],
        "kvquant/vllm/README.md": [
            *(room(), room("int4", "int4"), DEFAULT_ROOM),
            *(*served(), *answers_in_vllm(), *windowed(), served_by_ranks()),
            windowed_kl(),
        ],
    }


# sentences of pages: the file, and a format string of its figures (see facts)
GPU = "{gpu}, {day}, torch {release}, peak of plain reads {read_gb_per_s:,.0f} GB/s"
ENGINES = (
    "one {gpu}, {day}, vLLM {vllm}, torch {release}, {layers} layers of a Llama 3 8B with random "
    "weights, {context:,} tokens in each sequence"
)
SENTENCES = {
    "variants": (
        "h200-variants",
        "H200, {day}, `kvquant bench --variants` (`results/h200-variants.json`)",
    ),
    "latent rows": (
        "h200-mla",
        "H200, {day}, torch 2.11, one run of `kvquant bench --mla` (`results/h200-mla.json`)",
    ),
    "few sequences": ("h200-small", GPU),
    "heads of 512": ("h200-512", GPU),
    "steps": (
        "h200-step",
        "a Llama of {layers} layers as wide as an 8B, random weights, BF16, `{format}` rows, batch "
        "{cases[0][batch]}, one {gpu}, {day}, transformers {transformers}, torch {release}",
    ),
    "latent steps": (
        "h200-latent-step",
        "{layers} layers of DeepSeek V3 without experts, random weights, BF16, `{format}` rows, "
        "batch {cases[0][batch]}, {cases[0][tokens]:,} tokens, one {gpu}, {day}, transformers "
        "{transformers}, torch {release}",
    ),
    "coder steps": (
        "h200-coder-step",
        "Qwen2.5-Coder-1.5B, the default, one {gpu}, {day}",
    ),
    "vllm-32": ("vllm-32", ENGINES),
}
WAYS = {
    "compiled": "`QuantizedCache`, compiled",
    "captured": "`CapturedStep`",
    "eager": "from Python",
    "DynamicCache": "`DynamicCache`",
    "StaticCache, compiled": "`StaticCache`, compiled",
}
MS = {title: f"{{ms[{name}]:.1f}}" for name, title in WAYS.items()}
STATES = {
    "preempted": "after preemption",
    "chunks": "chunks of 256",
    "prefix hit": "prefix hit",
    "slots taken": "slots taken",
}
# tables of pages: the file, the list of its rows, and a format string for each column
TABLES: dict[str, tuple[str, str, dict[str, str]]] = {
    "heads of 512": (
        "h200-512",
        "decode",
        {
            "rows": "`{k_format}`",
            "one call: us": "{us:.1f}",
            "in a row: us": "{in_a_row_us:.1f}",
            "GB/s": "{in_a_row_gb_per_s:,.0f}",
            "of the read peak": "{in_a_row_roof_percent:.0f} %",
            "16 bit: ratio": "{sdpa[in_a_row_ratio]:.2f}",
        },
    ),
    "steps": ("h200-step", "cases", {"tokens": "{tokens:,}"} | MS),
    "latent steps": ("h200-latent-step", "cases", MS),
    "coder steps": (
        "h200-coder-step",
        "cases",
        {
            "batch": "{batch}",
            "tokens": "{tokens:,}",
            **MS,
            "compiled, plan": "{ms[compiled, plan]:.1f}",
            "`CapturedStep`, plan": "{ms[captured, plan]:.1f}",
        },
    ),
    "ranks": (
        "ranks",
        "attention",
        {
            "tokens": "{tokens:,}",
            "rows": "{rows}",
            "one GPU: us": "{attend_us[one]:.0f}",
            "two GPUs: us": "{attend_us[exchange]:.0f}",
            "times as fast": "{times:.2f}",
            "half the tokens on one GPU: us": "{attend_us[own]:.0f}",
            "two GPUs by all-gather: us": "{attend_us[all-gather]:.0f}",
            "GB on a GPU": "{gb:.2f}",
        },
    ),
    "ranks of a model": (
        "ranks",
        "model",
        {
            "way": "{way}",
            "GPUs": "{ranks}",
            "ms a step": "{step_ms:.1f}",
            "tokens/s": "{tokens_per_s:.0f}",
            "GB of weights on a GPU": "{gb_of_weights:.1f}",
            "GB of rows on a GPU": "{gb:.1f}",
        },
    ),
}


def said(key: str) -> str:
    """One of SENTENCES. Besides a file's figures its string may name those of the machine and the
    settings, the day, and torch's version without its build (release)."""
    name, form = SENTENCES[key]
    found = read(name)
    inner = {**found.get("settings", {}), **found.get("machine", {}), **found}
    dated = found.get("machine", {}) if "date" in found.get("machine", {}) else found
    return form.format(**inner, day=day(dated), release=release({"torch": "", **inner}))


def tabled(key: str) -> str:
    """One of TABLES."""
    name, rows, columns = TABLES[key]
    return formatted(columns, read(name)[rows])


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([head, "|---" * len(titles) + "|", *lines])


def served_by_ranks() -> str:
    """Tokens a second of the default beside FLASH_ATTN in bf16, by model and ranks: medians."""
    rows = []
    for run in read("vllm-ranks")["served"]:
        asked = run["settings"]
        model = {"": f"{asked['layers']} layers as wide as a 70B"}.get(asked["model"], "Coder-1.5B")
        rate = {
            name: statistics.median(one["tokens_per_s"] for one in found["decode"])
            for name, found in run["engines"].items()
        }
        ratio = rate["default"] / rate["flash"]
        figures = (f"{rate[name]:,.0f}" for name in ("flash", "default"))
        rows.append([model, f"{asked['ranks']}", *figures, f"{ratio:.2f}"])
    titles = "model", "GPUs", "FLASH_ATTN bf16: tokens/s", "default: tokens/s", "ratio"
    return table(titles, rows)


def of_peer(case: Figures) -> Figures:
    """The fastest of torch's attention beside a case."""
    peer: Figures = case["sdpa"]
    return peer


def shape(case: Figures) -> tuple[int, int, int]:
    """Sequences, query heads and tokens."""
    return case["batch"], case["num_q_heads"], case["seq_len"]


def int4_cases() -> dict[tuple[int, int, int], Figures]:
    """Cases of int4-g4 on an H200, by shape."""
    return {
        shape(one): one for one in read("h200-decode")["decode"] if one["k_format"] == "int4-g4"
    }


SHOWN = {(1, 1024), (1, 8192), (64, 8192), (64, 32768)}
# what the page of `kvquant bench` shows: the file, and what is true of its rows
BENCHED: tuple[tuple[str, Callable[[Figures], bool]], ...] = (
    ("h200-defaults", lambda one: True),
    ("h200-decode", lambda one: one["num_q_heads"] == 32 and shape(one)[::2] in SHOWN),
    ("h200-decode", lambda one: one["batch"] == 256 and one["k_format"] in ("fp8", "bf16")),
    ("h200-few", lambda one: one["batch"] == 512 and one["k_format"] == one["v_format"]),
    ("h200-wide", lambda one: one["num_q_heads"] == 64),
    ("zen4-decode", lambda one: one["k_format"] in ("int4-g4", "int8", "bf16")),
    ("xeon-decode", lambda one: one["k_format"] == "int4-g4"),
)
DEVICES = {"h200": "H200", "zen4": "Zen 4", "xeon": "Xeon, AMX"}
BENCH = {
    "where": "{where}",
    "rows": "{rows}",
    "sequences x tokens, heads": "{batch} x {seq_len:,}, {num_q_heads}:{num_kv_heads}",
    "us": "{us:,.1f}",
    "ratio": "{sdpa[ratio]:.2f}",
    "in a row: us": "{row}",
    "ratio in a row": "{row_ratio}",
    "peak": "{peak:.0f} %",
}


def bench() -> str:
    """The measured cases of `kvquant bench`."""
    rows: dict[object, Figures] = {}
    for name, wanted in BENCHED:
        for one in filter(wanted, cases(name)):
            k, v = one["k_format"], one["v_format"]
            row = {"row": "-", "row_ratio": "-", "peak": one["roof_percent"]}
            if one["in_a_row_us"]:
                row["row"] = f"{one['in_a_row_us']:,.1f}"
                row["row_ratio"] = f"{one['sdpa']['in_a_row_ratio']:.2f}"
                row["peak"] = one["in_a_row_roof_percent"]
            row["rows"] = f"`{k}`" if k == v else f"`{k}/{v}`"
            row["where"] = DEVICES[name.partition("-")[0]]
            rows.setdefault(json.dumps(one), {**one, **row})
    return formatted(BENCH, rows.values())


def bench_about() -> list[str]:
    """Where, when and with what the cases ran."""
    by_device: dict[str, list[Figures]] = {}
    for name in dict.fromkeys(name for name, _ in BENCHED):
        machine = read(name)["machine"]
        where = machine.get("gpu") or f"{machine['device']}, {machine['backend']}"
        where = where.partition(", CUDA")[0]
        by_device.setdefault(where, []).append(machine)
    found = []
    for where, machines in by_device.items():
        spans = [
            " to ".join(dict.fromkeys(form.format(end(values)) for end in (min, max)))
            for form, values in (
                ("{}", [day(one) for one in machines]),
                ("{:,.0f}", [one["read_gb_per_s"] for one in machines]),
            )
        ]
        found.append(f"{where}, {spans[0]}, torch {release(machines[0])}: {spans[1]} GB/s")
    return found


def cases(name: str) -> list[Figures]:
    """The cases of a file that `kvquant bench` wrote."""
    return next(one for one in read(name).values() if isinstance(one, list))


def formatted(columns: Mapping[str, str], rows: Iterable[Figures]) -> str:
    """A table whose columns are format strings of a row's figures."""
    return table([*columns], ([form.format(**one) for form in columns.values()] for one in rows))


def unequal_lengths() -> str:
    """What sequences of unequal lengths cost."""
    found = [one["us"] / one["even"]["us"] for one in cases("h200-lengths")]
    return f"take {min(found):.2f} to {max(found):.2f} times as long as as many tokens evenly"


def with_window() -> list[str]:
    """What the default pair's window costs, and the cases with many columns."""
    every = read("h200-windows")["wide"]
    pair = [one for one in every if one["shape"][4] == 1 and "/" in one["shape"][0]]
    peaks = " and ".join(f"{one['peak']:.0%}".replace("%", " %") for one in pair)
    times = [one["in_a_row_us"] for one in pair]
    told = " and ".join(f"{one['torch'] / one['window']:.2f}" for one in times)
    more = [one["ratio"] - 1 for one in every]
    return [
        f"reads at {peaks} of the peak, {told} times as fast as torch",
        f"add {100 * min(more):.0f} to {100 * max(more):.0f} %",
    ]


def cpu_steps() -> str:
    """How many times as fast a step of SmolLM2 is on a CPU, by dtype and tokens."""
    steps = read("cpu-step")["steps"]
    told = {
        dtype: ", ".join(f"{one['times']:.2f}" for one in steps if one["dtype"] == dtype)
        for dtype in ("float32", "bfloat16")
    }
    return f"{told['float32']} times as fast in float32, {told['bfloat16']} in bfloat16"


def ragged_queries() -> str:
    """What unequal numbers of queries cost."""
    found = [
        one["ragged"] / one["apart"]
        for one in read("h200-ragged").values()
        if isinstance(one, dict)
    ]
    return f"takes {min(found):.2f} to {max(found):.2f} times as long as a call for each number"


def ablated() -> str:
    """How many times as long the decode kernel takes without each technique, in a row, by shape;
    and the accesses to shared memory that bank conflicts repeat, with padding and without."""
    titles = "unrolled loads", "V prefetch", "padded shared memory", "lazy rescale"
    found: dict[str, dict[str, list[Figures]]] = {}
    for one in read("h200-ablated")["kernels"]:
        of_rows = found.setdefault(f"`{one['name']}`, head_dim {one['head_dim']}", {})
        of_rows.setdefault(one["kernel"], []).append(one)
    rows = []
    for case, kernels in found.items():
        whole, without = kernels["all techniques"], [kernels.get(f"without {x}") for x in titles]
        us = [one["in_a_row_us"] for one in whole]
        cells = [
            ", ".join(f"{one['in_a_row_us'] / x:.2f}" for one, x in zip(some, us, strict=True))
            if some
            else "-"
            for some in without
        ]
        of_banks = [conflicts(some[0]) if some else "-" for some in (whole, without[2])]
        rows.append([case, *cells, *of_banks])
    heads = ["rows", *(f"without {name}" for name in titles)]
    return table([*heads, "conflicts", "conflicts without padding"], rows)


def conflicts(kernel: Figures) -> str:
    """The share of bank conflicts in the accesses that ncu counted."""
    counted = kernel["counted"]
    repeated = counted["l1tex__data_bank_conflicts_pipe_lsu_mem_shared"]
    return f"{100 * repeated / counted['l1tex__data_pipe_lsu_wavefronts_mem_shared']:.0f} %"


def few_sequences() -> str:
    """Usual plans of few sequences beside the fastest other ones in a row, and an empty kernel."""
    rows = []
    for name, variants in read("h200-small")["found"].items():
        if name == "uneven":  # checked only
            continue
        usual = variants["usual"]
        others = [
            one for key, one in variants.items() if key.startswith(("splits x", "half the warps x"))
        ]
        other = min(others, key=lambda one: one["in_a_row"])
        cells = [name, *(f"{one['splits']} x {one['warps']}" for one in (usual, other))]
        cells[2:2] = [f"{usual[key]:.2f}" for key in ("alone", "in_a_row")]
        empty = variants["empty kernel"]["in_a_row"]
        rows.append([*cells, f"{other['in_a_row']:.2f}", f"{empty:.2f}"])
    titles = ["batch x tokens, heads", "usual: splits x warps", "one call", "in a row"]
    return table([*titles, "fastest other", "in a row", "empty kernel, in a row"], rows)


def evaluation() -> str:
    """How long kvquant evaluate takes with a model as wide as one of 8B."""
    found = read("h200-evaluate")
    return (
        f"retrieval in contexts of {found['tokens']:,} tokens, with {found['prompts']} prompts for "
        f"each of {len(found['tasks'])} tasks and {len(found['caches']) - 1} caches, took "
        f"{found['minutes']:.1f} minutes ({found['device']}, {day(found)})"
    )


def day(figures: Figures) -> str:
    """When it was measured: 2026-11-25."""
    return str(figures["date"])[:10]


def release(figures: Figures) -> str:
    """torch's version without its build: 2.11.0."""
    return str(figures["torch"]).partition("+")[0]


def bits(fmt: str | None, tokens: int) -> float:
    """Bits of an element of K and V in a KVCache of the default window, as it is allocated."""
    cache = KVCache(1, 1, 8, 128, tokens, k_format=fmt, v_format=fmt, device="meta")
    return 8 * cache.nbytes / (2 * 8 * 128 * tokens)


def memory() -> str:
    """How much less memory the default takes, and a plan."""
    plain, planned = (16 / bits(fmt, LENGTHS[1]) for fmt in (None, "int4"))
    return (
        f"{plain:.1f} times less memory than 16 bit at {LENGTHS[1]:,} tokens, and with a plan "
        f"{planned:.1f} times less"
    )


def room(k_format: str = "int4-g4", v_format: str = "int4-g4") -> str:
    """How many more tokens fit in rows without padding and without a window."""
    taken = sum(RowFormat.parse(fmt, 128).row_bytes for fmt in (k_format, v_format))
    return f"{4 * 128 / taken:.1f} times"


DEFAULT_ROOM = room(*(default_format(side, 128) for side in "kv"))


LENGTHS = 4096, 32768


def latent_rows() -> str:
    """MLA decode of all cases of one query: one call, and its share of the read peak in a row."""
    names = ["int4-g8+int8-g4", "int8-g4", "fp8", "bf16"]
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


def int4_peers() -> list[str]:
    """INT4 of FBGEMM and MSLK, beside ours in the same run."""
    found: dict[str, dict[str, str]] = {}
    for one in read("h200-int4-peers")["peers"]:
        if "int4" in one["cache"].lower() and one["shape"].startswith("8:1x8192"):
            cells = found.setdefault(f"{one['project']}, {one['cache']}", {})
            cells[one["shape"].rpartition("x")[2]] = f"{one['us']:.1f}"
    batches = list(dict.fromkeys(batch for cells in found.values() for batch in cells))
    rows = [[name, *(cells.get(batch, "-") for batch in batches)] for name, cells in found.items()]
    return [table(["batch", *batches], rows)]


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


SERVED = {
    "default": "kvquant, the default",
    "plan": 'kvquant, `"plan": "auto"`',
    "kvquant": "kvquant `int4-g4`",
    "flash": "FLASH_ATTN (FlashAttention 3), bf16",
    "flash-fp8": "FLASH_ATTN, fp8",
}


def served() -> list[str]:
    """Engines of vLLM with equal batch, and in equal memory."""
    return [batches(), said("vllm-32"), throughput(read("vllm-32"))]


def rate_of(engine: Figures, batch: int, key: str = "tokens_per_s") -> float:
    """The median of an engine's rounds with so many sequences."""
    return float(statistics.median(one[key] for one in engine["decode"] if one["batch"] == batch))


def batches() -> str:
    """A public model with growing batches: tokens a second, and waiting times of the largest."""
    found, rows = read("vllm-batches"), []
    sizes = [*found["settings"]["fewer"], most := found["settings"]["batch"]]
    for name, title in SERVED.items():
        if name in found["engines"]:
            one = found["engines"][name]
            room = one["tokens"] / found["engines"]["flash"]["tokens"]
            rates = [f"{rate_of(one, size):,.0f}" for size in sizes]
            waits = [rate_of(one, most, f"step_ms_{part}") for part in ("p50", "p99")]
            waits += [rate_of(one, most, f"first_token_ms_{part}") / 1e3 for part in ("p50", "p99")]
            rows.append([title, f"{room:.2f}x", *rates, *(f"{ms:.1f}" for ms in waits)])
    titles = ["engine", "tokens that fit", *(f"{size} sequences: tokens/s" for size in sizes)]
    waits_of = f"{most}: ms a step, p50", "p99", "s to the first token, p50", "p99"
    return table([*titles, *waits_of], rows)


def answers_in_vllm() -> list[str]:
    """HumanEval through vLLM: the table, and what 16 bit answers."""
    found = read("vllm-qwen2.5-coder-1.5b")
    head, *lines = answers_served(found["rows"])
    right = {"alone": 0, "behind": 0}
    answers = dict(right)
    for row in found["rows"]:
        if row["key"]["cache"] == "16 bit":
            right[row["key"]["place"]] += row["passed"].count("1")
            answers[row["key"]["place"]] += len(row["passed"])
    told = [f"{right[place]} of {answers[place]}" for place in right]
    return [
        table(head, lines),
        f"FLASH_ATTN in bf16 answers {told[0]} right alone and {told[1]} behind other code",
    ]


def windowed() -> list[str]:
    """What first pages and last tokens in 16 bit cost an engine of vLLM."""
    engines = read("vllm-window")["engines"]
    rates = {name: spread(one["decode"], "tokens_per_s") for name, one in engines.items()}
    lost = 1 - rate_of(engines["kvquant-window"], 64) / rate_of(engines["kvquant"], 64)
    return [
        f"`int4-g4` loses {lost:.0%}".replace("%", " %")
        + f"; the default decodes {rates['default']} tokens a second without `recent_len` and "
        f"{rates['default-window']} with it",
    ]


def windowed_kl() -> str:
    """KL in vLLM with 16-bit copies by QuantizedCache's: of the default and of int4-g4."""
    models: dict[str, dict[str, dict[str, str]]] = {}
    for row in read("vllm-kl")["rows"]:
        of = models.setdefault(row["key"]["model"], {})
        for state, ours in row["vllm"].items() if row["key"]["recent_len"] else ():
            theirs = row["transformers"].get(state) or row["transformers"]["plain"]
            ratio = statistics.mean(ours) / statistics.mean(theirs)
            of.setdefault(state, {})[row["key"]["format"]] = f"{ratio:.2f}"
    lines = []
    for name, of in models.items():
        cells = [[of[state].get(fmt, "-") for fmt in ("default", "int4-g4")] for state in STATES]
        lines.append([name, *map(", ".join, cells)])
    return table(["model", *STATES.values()], lines)


def spread(runs: Sequence[Figures], key: str) -> str:
    """The median of some runs, and the least and the most."""
    values = [run[key] for run in runs]
    middle, few = statistics.median(values), len(values) == 1
    digits = 0 if middle >= 100 else 1
    ends = "" if few else f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    return f"{middle:,.{digits}f}{ends}"


def throughput(figures: Figures) -> str:
    """Tokens a second of decoding sequences, and of prompts."""
    rows = []
    for name, title in SERVED.items():
        one = figures["engines"].get(name, {})
        if "decode" in one:
            more = one.get("memory", one["decode"])
            cells = [spread(one["decode"], key) for key in ("tokens_per_s", "prompt_tokens_per_s")]
            rows.append([title, *cells, str(more[0]["batch"]), spread(more, "tokens_per_s")])
    batch = figures["settings"]["batch"]
    titles = ["engine", f"{batch} sequences: tokens/s", "prompts: tokens/s"]
    return table([*titles, "sequences in equal memory", "tokens/s"], rows)


SGLANG = {  # rows and pages, by the names of sglang_compared.py
    "own": ("SGLang's own, bf16", 1),
    "bf16": ("`bf16`", 1),
    "int8": ("`int8`", 1),
    "plan": ("`int4-g4` with a plan", 16),
    "int4": ("`int4-g4`", 64),
    "int4-rows": ("`int4-g4`, prompts read rows", 16),
    "gemma2-int8": ("Gemma 2: `int8`", 16),
    "gemma3-int8": ("Gemma 3: `int8`", 1),
}


def answers_of_sglang() -> str:
    """KL of SGLang's engines to transformers in float32."""
    engines = read("sglang-answers")["engines"]
    kl = {"generated": "{generated:.4f}", "prompts": "{prompts:.4f}"}
    rows = [{"rows": one, "page": page, **engines[name]} for name, (one, page) in SGLANG.items()]
    return formatted({"rows": "{rows}", "tokens of a page": "{page}"} | kl, rows)


def variants() -> str:
    """What each field of AttentionVariant costs, calls in a row."""
    cases = read("h200-variants")["variants"]
    plain = {one["q_len"]: one["in_a_row_us"] for one in cases if not one["variant"]}
    names = {"alibi_slopes": "ALiBi", "window": "window 4,096", "tree_mask": "tree mask, 4 queries"}
    ratios = {
        names.get(one["variant"], one["variant"].replace("_", " ")): (
            f"{one['in_a_row_us'] / plain[one['q_len']]:.2f}"
        )
        for one in cases
        if one["variant"] not in ("", "key_bias")  # which kernels no longer have
    }
    return table([*ratios], [[*ratios.values()]])


def served_by_sglang() -> str:
    """Tokens a second of SGLang's engines, and the milliseconds of a step."""
    rows = []
    for name, one in read("sglang")["engines"].items():
        keys = "tokens_per_s", "step_ms_p50", "step_ms_p99", "prompt_tokens_per_s"
        title = {**SERVED, "triton": "SGLang's `triton`, bf16"}[name]
        rows.append([title, *(spread(one["decode"], key) for key in keys)])
    titles = "engine", "tokens/s", "ms a step, p50", "p99", "prompts: tokens/s"
    return table(titles, rows)


SETTINGS = (
    ("the default", None, "none", "you start: nothing to prepare"),
    ("plan, `int4`", "int4", '`plan="auto"`', "memory is short: a plan takes minutes, once"),
    (
        *("`int8`", "int8", '`k_format="int8", v_format="int8"`'),
        "you compare with other projects",
    ),
    (
        *("`int4-g4`", "int4-g4", '`k_format="int4-g4", v_format="int4-g4"`'),
        "`kvquant check` calls it safe for your model",
    ),
)
SAFE_UP_TO = (
    f"Up to {SAFE} `kvquant check` calls a cache safe, up to {SAFE_FOR_LONG} for long answers"
)


def public_overview() -> list[str]:
    """README's table of public models, and how it was measured."""
    public = read_public(RESULTS)
    head, *lines = overview(public)
    return [table(head, lines), overview_about(public), bold()]


def settings() -> str:
    """Which setting to take: bits with the default window, and when."""
    rows = [
        [name, how, *(f"{bits(fmt, tokens):.2f}" for tokens in LENGTHS), when]
        for name, fmt, how, when in SETTINGS
    ]
    titles = ["setting", "arguments", *(f"bits at {tokens:,} tokens" for tokens in LENGTHS)]
    return table([*titles, "take it when"], rows)


def speed() -> str:
    """How many times as fast as named peers."""
    of_shape, (first, *_, last) = int4_cases(), read("h200-coder-step")["cases"]
    (default,) = [one for one in read("h200-defaults")["decode"] if one["k_format"] == "int8-g4"]
    found = []
    many = "64 sequences of 8,192 tokens"
    for rows, case, what in (
        ("default", default, many),
        ("`int4-g4`", of_shape[1, 32, 1024], "1 sequence of 1,024 tokens"),
    ):
        assert "cudnn" in of_peer(case)["name"]
        peer = "cuDNN in torch, 16 bit"
        found.append((f"attention, {what}, H200", rows, peer, of_peer(case)["ratio"]))
    ratio = of_peer(cases("zen4-decode")[0])["ratio"]
    peer = "torch's fastest attention"
    found.append(("attention, 2 cores, AMD Zen 4", "`int4-g4`", peer, ratio))
    for one in (first, last):
        sequences = "1 sequence" if one["batch"] == 1 else f"{one['batch']} sequences"
        what = f"step of Coder-1.5B, {sequences} of {one['tokens']:,} tokens, H200"
        name = min("StaticCache, compiled", "DynamicCache", key=one["ms"].__getitem__)
        ratio = one["ms"][name] / one["ms"]["compiled"]
        found.append((what, "default", f"transformers' {WAYS[name]}", ratio))
    engines = read("vllm-batches")["engines"]
    what = "vLLM, Coder-1.5B, 256 sequences of 8,192 tokens, H200"
    for name in ("flash", "flash-fp8"):
        ratio = rate_of(engines["default"], 256) / rate_of(engines[name], 256)
        found.append((what, "default", SERVED[name], ratio))
    cells = [[what, rows, peer, f"{ratio:.2f}"] for what, rows, peer, ratio in found]
    return table(["what", "rows", "beside", "times as fast"], cells)


def with_few() -> str:
    """How many times as fast the default is in vLLM with the fewest sequences."""
    engines = read("vllm-batches")["engines"]
    ours, *others = (rate_of(engines[name], 16) for name in ("default", "flash", "flash-fp8"))
    bf16, fp8 = (ours / one for one in others)
    return f"With 16 in vLLM: {bf16:.2f}, beside fp8 {fp8:.2f}"


def probed() -> str:
    """What the probe finds of int4-g4, and what these rows cost."""
    found = read("probe")
    limits = {found["limits"]["refused"]: "refused", found["limits"]["warned"]: "warning"}
    rows = []
    for name, model in found["models"].items():
        one = model["rows"]["int4-g4"]
        verdicts = [word for limit, word in limits.items() if one["figure"] >= limit]
        rows.append([name, f"{one['figure']:.2g}", f"{one['kl']:.2g}", (verdicts or ["-"])[0]])
    return table(["model", "figure", "KL", "result"], rows)


WINDOWED = 4, 128  # first and last tokens in 16 bit
HOME_MADE = {  # a column of the table, and names in results/: of several trainings the first that
    # ran with a cache counts
    "`llama-recall-5m`": ["llama-recall-5m"],
    "`code-lm`": ["code-lm", "code-lm, second training"],
    "`code-biased`": ["code-biased"],
    "`code-sinks`": ["code-sinks"],
    "`code-latent`": ["code-latent"],
}
ASKED_OF = {  # names in results/, and in the table
    "int8": "`int8`",
    "int4-g8": "`int4-g8`",
    "int4-g4": "`int4-g4`",
    "int4": "`int4`",
    "plan int4-g4": "plan, `int4-g4`",
    "plan int4": "plan, `int4`",
    "plan int3": "plan, `int3`",
    "plan int2": "plan, `int2`",
}
ASKED_OF_LATENTS = {
    "int8-g4+bf16": "`int8-g4+bf16`",
    "int4-g8+bf16": "`int4-g8+bf16`",
    "int4-g4+bf16": "`int4-g4+bf16`",
    "plan int4-g4": "plan, `int4-g4+bf16`",
}


def fidelity_page() -> list[str]:
    """Tables and sentences of calibration/FIDELITY.md."""
    public = read_public(RESULTS)
    tables = by_context(public), humaneval(public), retrieved(public), shipped(public)
    return [
        *(table(*parts) for parts in ((head, lines) for head, *lines in tables)),
        *(bold(), bound(), chains(public), limits()),
        *(home_made(), counted()),
    ]


def bound() -> str:
    """How far the rows of plans are from the best code of as many bits."""
    ratios: dict[str, list[float]] = {"k": [], "v": []}
    for of_model in read("bound")["models"].values():
        for name, found in of_model.items():
            ratios[name[-1]].append(found["codes"])
    k, v = (f"{min(each):.1f} to {max(each):.1f}" for each in ratios.values())
    return (
        f"With a plan the squared error of K, weighted by its effect on attention, is {k} times "
        f"the rate-distortion bound of as many bits (Gaussian rows), that of V {v} times"
    )


def limits() -> str:
    """The limits of the verdicts."""
    return (
        f"`kvquant check` calls a KL of at most {SAFE:g} safe, for long answers of at most "
        f"{SAFE_FOR_LONG:g}, and one of {RUINED:g} or more a reason not to use the cache"
    )


def bold() -> str:
    """Which cells of the tables of public models are bold."""
    return f"A KL above {KL_NOTICE:g} is bold"


def counted() -> str:
    """Which tasks count."""
    return f"A task counts only where the 16-bit cache answers {TEST:.0%} of it".replace("%", " %")


def home_made() -> str:
    """Points of right answers that caches cost our own models: the mean of all tasks, the worst."""
    models = {one.name: one for one in asked_models()}
    titles, rows = list[str](), list[list[str]]()
    for title, names in HOME_MADE.items():
        size = models[names[0]].runs[0]["model"]["parameters"] / 1e6
        titles.append(f"{title}, {size:.0f} M")
    for caches, latent in ((ASKED_OF, False), (ASKED_OF_LATENTS, True)):
        columns = [
            [models[name] for name in names if ("latent" in name) is latent]
            for names in HOME_MADE.values()
        ]
        bits = ChainMap(*(one.bits for column in columns for one in column))
        lost_by = [ChainMap(*(one.lost(WINDOWED) for one in column)) for column in columns]
        for name, title in caches.items():
            pairs = [[f"{max(x, 0):.1f}" for x in lost.get(name, ())] for lost in lost_by]
            rows.append([title, f"{bits[name]:.2f}", *(" / ".join(pair) or "-" for pair in pairs)])
    return table(["cache", "bits", *titles], rows)


def asked_models() -> list[Evaluations]:
    """The models that answered questions about their contexts."""
    names = "recall", "recall-few", "code", "code-few", "kinds", "code-sinks", "code-latent"
    return of_models(run for name in names for run in read_runs(RESULTS / f"{name}.json"))


if __name__ == "__main__":
    main()
