"""Measurements that the pages show: kept as JSON in results/, and the tables made of them.

    python tests/benchmarks/results.py                      # prints the tables
    python tests/benchmarks/results.py keep h200-decode bench.json
    python tests/benchmarks/results.py keep code ours.json peers.json    # runs of two files

Each file in results/ is what a script of the repository wrote with --json, with the commit that was
measured and the date:

    h200-decode, h200-mla, h200-variants    kvquant bench, with --mla, with --variants
    h200-more                               the cases of four such calls, one after another, with
                                            --format int4-g4, int3 and int2, --exact, --page-size
    h200-wide                               kvquant bench --wide
    h200-ragged                             tests/benchmarks/bench_ragged.py --queries
    h200-lengths                            kvquant bench --ragged
    h200-uneven                             tests/benchmarks/bench_uneven.py
    h200-512                                kvquant bench --head-dim 512 --q-heads 16 --kv-heads 4
                                            --format int4-g4 --format int8
    h200-tune                               tests/benchmarks/bench_tune.py --quick --format int2
                                            --format int3
    h200-peers                              tests/benchmarks/peers.py
    h200-small                              tests/benchmarks/bench_small.py, in a form that also
                                            measured two experiments, tiles by bulk copies and
                                            launches that begin early. We left these out. The other
                                            kernels are those of the commit, byte for byte
    h200-evaluate                           tests/benchmarks/bench_evaluate.py, interrupted once
    h200-step, h200-latent-step             tests/benchmarks/bench_model.py, with --latent
    h200-captured                           bench_model.py --layers 8 --batch 1 --tokens 8192. We
                                            shortened the names of kernels
    zen4-decode                             kvquant bench --device cpu
    xeon-decode                             the same --format int4-g4 --format int8, on the GPU's
                                            host, with other jobs on its other cores
    vllm, vllm-load, vllm-32, vllm-again    tests/benchmarks/bench_vllm.py, with --part load and
                                            --requests 100, with --layers 32, and as for vllm again,
                                            beside jobs on the machine's other GPUs and cores
    sglang                                  tests/benchmarks/bench_sglang.py; we removed "graphs",
                                            which the script took from a log without such lines.
                                            "tokens" tells the memory of graphs
    sglang-answers                          tests/support/sglang_compared.py: its compared.json,
                                            merged from two calls
    fidelity, few-bits                      tests/benchmarks/fidelity.py; the second of plans from
                                            kvquant calibrate --budget 3.25, named MODEL-3
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
    code-again                              bench_code.py with a third training of the model:
                                            generated texts. We added "third training" to its name
                                            by hand. We left out the 4 questions and the passage
                                            that these runs had, too
    code-sinks, code-latent                 bench_code.py with models of train_code_lm.py --kind
                                            sinks and --kind latent: kvquant's caches alone, with
                                            the default window. We wrote the commit of the run
                                            into code-latent.json by hand
    probe                                   tests/benchmarks/bench_probe.py, a call for each model
    public-NAME                             tests/benchmarks/public_models.py, which writes there
                                            itself. A row has the torch and the device of its run
    defaults                                bench_defaults.py, which public_models.py has replaced,
                                            on four models and two texts. We merged the files of six
                                            runs, named the texts, and left out a pair that was
                                            measured twice
    humaneval                               bench_humaneval.py, likewise: the files of four runs,
                                            two of which ended before plans of 2 and 3 bits
    h200-defaults                           kvquant bench --batch 64 --seq-len 8192 --q-heads 32
                                            --kv-heads 8, with the two default pairs as --format
    row-formats, row-bases, row-graded      tests/benchmarks/bench_formats.py, bench_bases.py,
                                            bench_graded.py

zen4-decode is the one of two runs, one after the other, whose ratios to torch are less favourable.
Its record of the machine was added by hand: the command did not write one yet.

tests/test_readme.py compares the READMEs with the tables and sentences made here. To change a
figure, measure again: keep the file, print the tables and put them into the pages.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import subprocess
import textwrap
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluations import TEST, Evaluations, of_models, read_runs, text_of

from kvquant import KVCache, RowFormat
from kvquant.bench import cpu
from kvquant.bench.cases import ROOM
from kvquant.io.plan_store import RUINED, SAFE
from kvquant.rows.defaults import default_format

KL_NOTICE = 0.05  # a KL above it is in bold
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
            *(memory(), public(), SAFE_UP_TO, public_measured(), speed()),
        ],
        "calibration/README.md": [
            *(fidelity_about(), fidelity(CACHES)),
            *(fidelity_about("few-bits"), fidelity(FEW_BITS, "few-bits")),
        ],
        "calibration/FIDELITY.md": fidelity_page(),
        "kernels/FACTS.md": [
            *(peers(), ran("variants"), variants()),
            *(ran("mla", "torch 2.11, one run of "), latent_rows(), latent_peers()),
            *(gpu_about("h200-small"), few_sequences()),
            *(gpu_about("h200-512"), heads_of_512()),
        ],
        "kvquant/bench/README.md": [
            *(cpu_about(), cpu_decode(), cpu_rows(), xeon(), gpu_about(), decode_cases()),
            *(gpu_about("h200-defaults"), default_times()),
            *(gains(), gpu_about("h200-more"), few_bits_times(), page_times()),
            *(gpu_about("h200-wide"), wide_groups(), ragged_queries()),
            *(gpu_about("h200-lengths"), unequal_lengths()),
            *(gpu_about("h200-uneven"), spare_capacity()),
        ],
        "kvquant/evaluation/README.md": [evaluation(), answers()],
        "kvquant/cache/README.md": [settings()],
        "kvquant/hf/README.md": [
            probed(),
            steps_about(),
            steps(),
            captured_step(),
            *latent_steps(),
        ],
        "kvquant/hf/decode_step.svg": step_labels(),
        "kvquant/lmcache/README.md": [DEFAULT_ROOM],
        "kvquant/sglang/README.md": [answers_of_sglang(), served_by_sglang()],
        "kvquant/vllm/README.md": [room(), room("int4", "int4"), DEFAULT_ROOM, *served()],
    }


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    head, *lines = [f"| {' | '.join(cells)} |" for cells in (titles, *rows)]
    return "\n".join([head, "|---" * len(titles) + "|", *lines])


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


def decode_cases() -> str:
    """All cases, of all formats."""
    rows = [
        [f"`{one['k_format']}`", *cells(one), f"{one['error']:.1e}"]
        for one in read("h200-decode")["decode"]
    ]
    return table(["format", *TITLES, "error"], rows)


TITLES = [
    *("batch", "heads", "tokens", "one call: us", "one call, 16 bit: us", "one call: ratio"),
    *("in a row: us", "GB/s", "of the read peak", "in a row, 16 bit: us", "in a row: ratio"),
]


def cells(case: Figures) -> list[str]:
    """A row of the table above."""
    peer = of_peer(case)
    return [
        *(f"{case['batch']}", f"{case['num_q_heads']}:{case['num_kv_heads']}"),
        *(f"{case['seq_len']:,}", f"{case['us']:.1f}", f"{peer['us']:.1f}"),
        *(f"{peer['ratio']:.2f}", f"{case['in_a_row_us']:.1f}"),
        *(f"{case['in_a_row_gb_per_s']:,.0f}", f"{case['in_a_row_roof_percent']:.0f} %"),
        *(f"{peer['in_a_row_us']:.1f}", f"{peer['in_a_row_ratio']:.2f}"),
    ]


def few_bits_times() -> str:
    """Rows of 2 and 3 bits beside INT4 of the same shape and window."""
    cases = [one for one in read("h200-more")["decode"] if not one["page_size"]]
    usual: dict[Any, Figures] = {}
    rows = []
    for one in cases:
        window = one["sink_len"], one["recent_len"]
        int4 = usual.setdefault((shape(one), window), one)
        assert int4["k_format"] == "int4-g4"
        rows.append(
            [
                *(f"`{one['k_format']}`", f"{one['batch']}"),
                *(f"{one['num_q_heads']}:{one['num_kv_heads']}", "{} + {}".format(*window)),
                *(f"{one['nbytes'] / 1e6:.0f}", f"{one['us']:.1f}", f"{one['in_a_row_us']:.1f}"),
                f"{one['in_a_row_us'] / int4['in_a_row_us']:.2f}",
                f"{of_peer(one)['in_a_row_ratio']:.2f}",
            ]
        )
    titles = ["rows", "batch", "heads", "tokens in 16 bit", "MB", "one call: us", "in a row: us"]
    return table([*titles, "to `int4-g4`", "16 bit: ratio"], rows)


def heads_of_512() -> str:
    """Heads of 512 elements: 64 sequences of 8,192 tokens, 16:4 heads."""
    rows = [
        [
            *(f"`{one['k_format']}`", f"{one['us']:.1f}", f"{one['in_a_row_us']:.1f}"),
            *(f"{one['in_a_row_gb_per_s']:,.0f}", f"{one['in_a_row_roof_percent']:.0f} %"),
            f"{of_peer(one)['in_a_row_ratio']:.2f}",
        ]
        for one in read("h200-512")["decode"]
    ]
    titles = ["rows", "one call: us", "in a row: us", "GB/s", "of the read peak", "16 bit: ratio"]
    return table(titles, rows)


def wide_groups() -> str:
    """Many query heads on a KV head: 64 sequences of 8,192 tokens."""
    cases = read("h200-wide")["wide"]
    rows = [
        [
            *(f"{one['num_q_heads']}:{one['num_kv_heads']}", f"{one['us']:.1f}"),
            *(f"{of_peer(one)['us']:.1f}", f"{of_peer(one)['ratio']:.2f}"),
            *(f"{one['in_a_row_us']:.1f}", f"{of_peer(one)['in_a_row_us']:.1f}"),
            f"{of_peer(one)['in_a_row_ratio']:.2f}",
        ]
        for one in cases
    ]
    titles = ["heads", "one call: us", "torch, 16 bit", "ratio", "in a row: us", "torch, 16 bit"]
    return table([*titles, "ratio"], rows)


def ragged_queries() -> str:
    """Ragged queries in one call, padded, and in a call for each number of queries."""
    rows = [
        [
            *(name, f"{one['ragged']:,.0f}", f"{one['padded']:,.0f}" if "padded" in one else "-"),
            *(f"{one['apart']:,.0f}", f"{one['ragged'] / one['apart']:.2f}"),
        ]
        for name, one in read("h200-ragged").items()
        if isinstance(one, dict)
    ]
    return table(["new tokens", "ragged", "padded", "apart", "ragged to apart"], rows)


def unequal_lengths() -> str:
    """`kvquant bench --ragged`: sequences of unequal lengths beside as many tokens evenly."""
    figures = read("h200-lengths")
    rows = []
    for one in figures["ragged"]:
        lens = Counter(one["lens"])
        name = ", ".join(f"{n} x {length:,}" for length, n in sorted(lens.items(), reverse=True))
        if len(lens) > 2:
            name = f"{one['batch']} of {min(lens)} to {max(lens):,}"
        us, even, torch = one["us"], one["even"]["us"], one["sdpa"]
        at_peak = one["nbytes"] / figures["machine"]["read_gb_per_s"] / 1e3
        cells = f"{us:.1f}", f"{even:.1f}", f"{us / even:.2f}", f"{at_peak:.1f}"
        rows.append([name, *cells, f"{torch['us']:,.0f} ({torch['name'].partition(',')[0]})"])
    titles = ["sequences x tokens", "us", "evenly, us", "us / evenly"]
    titles += ["bytes at peak, us", "torch, 16 bit, us"]
    return table(titles, rows)


def spare_capacity() -> str:
    """Sequences shorter than their capacity, beside as many tokens without spare capacity."""
    figures = read("h200-uneven")
    (times,) = figures["us"].values()
    rows = []
    for name, us in times.items():
        lengths, _, room = name.partition(", room for ")
        if int(room) != ROOM:  # those are in unequal_lengths
            named = [re.sub(r"\d+", lambda m: f"{int(m[0]):,}", text) for text in (lengths, room)]
            cells = f"{us['now']:.1f}", f"{us['evenly']:.1f}", f"{us['now'] / us['evenly']:.2f}"
            rows.append([*named, *cells])
    return table(["sequences x tokens", "capacity", "us", "evenly, us", "us / evenly"], rows)


def few_sequences() -> str:
    """Usual plans of few sequences beside the fastest other ones in a row, and what bounds them."""
    figures = read("h200-small")
    row_bytes = RowFormat.parse("int4-g4", 128).row_bytes
    rows = []
    for name, variants in figures["found"].items():
        if name == "uneven":  # checked only
            continue
        batch, _, tokens, heads = name.replace(",", "").split()
        others = [
            one for key, one in variants.items() if key.startswith(("splits x", "half the warps x"))
        ]
        cells = [name]
        for one in (variants["usual"], min(others, key=lambda one: one["in_a_row"])):
            cells.append(f"{one['splits']} x {one['warps']}")
            cells += [f"{one[key]:.2f}" for key in ("alone", "in_a_row", "priced")]
        nbytes = 2 * int(batch) * int(tokens) * int(heads.split(":")[1]) * row_bytes
        empty = variants["empty kernel"]
        cells.append(f"{nbytes / figures['machine']['read_gb_per_s'] / 1e3:.1f}")
        rows.append([*cells, f"{empty['alone']:.2f}", f"{empty['in_a_row']:.2f}"])
    of_each = "one call: us", "in a row: us", "priced: us"
    titles = ["batch x tokens, heads", "usual: splits x warps", *of_each, "fastest other", *of_each]
    return table([*titles, "rows at the read peak: us", "empty kernel: us", "in a row: us"], rows)


def page_times() -> str:
    """Pages of several sizes."""
    rows = [
        [f"{one['page_size']}", f"{one['us']:.1f}", f"{one['in_a_row_us']:.1f}"]
        for one in read("h200-more")["decode"]
        if one["page_size"]
    ]
    return table(["tokens of a page", "one call: us", "in a row: us"], rows)


def gains() -> str:
    """How much faster INT4 is with many rows."""
    many = [
        of_peer(one)
        for one in int4_cases().values()
        if one["batch"] * one["seq_len"] * one["num_kv_heads"] >= 10**6
    ]
    least, most = (
        [f"{end(one[key] for one in many):.1f}" for key in ("in_a_row_ratio", "ratio")]
        for end in (min, max)
    )
    return (
        f"INT4 is {least[0]} to {most[0]} times as fast as 16 bit in a row, and {least[1]} to "
        f"{most[1]} times in single calls"
    )


def cpu_about() -> str:
    """Where and when it was measured."""
    machine = read("zen4-decode")["machine"]
    return (
        f"`kvquant bench --device cpu` measured this on {machine['threads']} cores of an "
        f"{machine['cpu']}, Zen 4 with AVX-512, on {day(machine)} with torch {release(machine)}. "
        f"The memory there reads {machine['read_gb_per_s']:.0f} GB/s"
    )


def xeon() -> str:
    """How much faster INT4 is on a CPU with matrix units."""
    found = read("xeon-decode")
    machine, case = found["machine"], found["decode"][0]
    assert case["format"] == "int4-g4"
    return (
        f"On {machine['threads']} cores of an {machine['cpu']} with AMX, {day(machine)}, torch "
        f"{release(machine)}, `int4-g4` took {case['ms']:.2f} ms: {case['sdpa_ratio']:.1f} times "
        f"as fast as torch's fastest SDPA, {case['matmul_ratio']:.1f} times as fast as two matmuls"
    )


def gpu_about(name: str = "h200-decode") -> str:
    """Where and when decode was measured on a GPU."""
    machine = read(name)["machine"]
    return (
        f"{machine['gpu']}, {day(machine)}, torch {release(machine)}, peak of plain reads "
        f"{machine['read_gb_per_s']:,.0f} GB/s"
    )


def steps_about() -> str:
    """Where and when whole models were measured."""
    found = read("h200-step")
    (batch,) = {case["batch"] for case in found["cases"]}
    return (
        f"a Llama of {found['layers']} layers as wide as an 8B, random weights, BF16, "
        f"`{found['format']}` rows, batch {batch}, one {found['gpu']}, {day(found)}, transformers "
        f"{found['transformers']}, torch {release(found)}"
    )


def latent_steps() -> list[str]:
    """A decode step of layers with latent attention: where it was measured, and milliseconds."""
    found = read("h200-latent-step")
    (case,) = found["cases"]
    about = (
        f"{found['layers']} layers of DeepSeek V3 without experts, random weights, BF16, "
        f"`{found['format']}` rows, batch {case['batch']}, {case['tokens']:,} tokens, one "
        f"{found['gpu']}, {day(found)}, transformers {found['transformers']}, torch "
        f"{release(found)}"
    )
    cells = [f"{case['ms'][name]:.1f}" for name in WAYS]
    return [about, table([*WAYS.values()], [cells])]


def captured_step() -> str:
    """The time of a captured step, and of one that torch.compile compiled first."""
    found = read("h200-captured")
    (case,) = found["cases"]
    ms = {name: f"{taken:.2f} ms" for name, taken in case["ms"].items()}
    return (
        f"With {found['layers']} layers, batch {case['batch']} and {case['tokens']:,} tokens "
        f"`CapturedStep` takes {ms['captured']}, with `compile=True` {ms['captured, compiled']}, "
        f"and a compiled `QuantizedCache` {ms['compiled']} ({found['gpu']}, {day(found)})"
    )


def evaluation() -> str:
    """How long kvquant evaluate takes with a model as wide as one of 8B."""
    found = read("h200-evaluate")
    return (
        f"retrieval in contexts of {found['tokens']:,} tokens, with {found['prompts']} prompts for "
        f"each of {len(found['tasks'])} tasks and {len(found['caches']) - 1} caches, took "
        f"{found['minutes']:.1f} minutes ({found['device']}, {day(found)})"
    )


def ran(mode: str, what: str = "") -> str:
    """When a mode of kvquant bench ran on a GPU."""
    name = f"h200-{mode}"
    return f"H200, {day(read(name))}, {what}`kvquant bench --{mode}` (`results/{name}.json`)"


def day(figures: Figures) -> str:
    """When it was measured: 2026-11-25."""
    return str(figures["date"])[:10]


def release(figures: Figures) -> str:
    """torch's version without its build: 2.11.0."""
    return str(figures["torch"]).partition("+")[0]


def cpu_decode() -> str:
    """What `kvquant bench --device cpu` printed of decode attention."""
    return textwrap.indent(cpu.render_decode(read("zen4-decode")["decode"]), "    ")


def cpu_rows() -> str:
    """What it printed of rows."""
    return textwrap.indent(cpu.render_rows(read("zen4-decode")["rows"]), "    ")


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
WAYS = {
    "compiled": "`QuantizedCache`, compiled",
    "captured": "`CapturedStep`",
    "eager": "from Python",
    "DynamicCache": "`DynamicCache`",
    "StaticCache, compiled": "`StaticCache`, compiled",
}


def steps() -> str:
    """A decode step of a whole model."""
    rows = [
        [f"{case['tokens']:,}", *(f"{case['ms'][name]:.1f}" for name in WAYS)]
        for case in read("h200-step")["cases"]
    ]
    return table(["tokens", *WAYS.values()], rows)


def step_labels() -> list[str]:
    """The labels of the picture that bench_model.py draws of them."""
    drawn = [name for name in WAYS if name != "eager"]
    times = [case["ms"][name] for case in read("h200-step")["cases"] for name in drawn]
    return [f">{ms:.1f} ms</text>" for ms in times]


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


SERVED = {
    "kvquant": "kvquant `int4-g4`",
    "flash": "FLASH_ATTN (FlashAttention 3), bf16",
    "flash-fp8": "FLASH_ATTN, fp8",
    "triton": "TRITON_ATTN, bf16",
}


def served() -> list[str]:
    """Engines of vLLM with equal batch, in equal memory and under load."""
    found = []
    for name in ("vllm", "vllm-32"):
        if (RESULTS / f"{name}.json").exists():  # nobody has measured 32 layers yet
            figures = read(name)
            found += [engines_about(figures), throughput(figures)]
    figures = read("vllm-load")
    return [
        *found,
        again(figures),
        again(read("vllm-again")),
        saturated(figures),
        under_load(figures),
    ]


def again(figures: Figures) -> str:
    """Tokens a second in equal batch, in a run beside other jobs."""
    ours, theirs = (
        [run["tokens_per_s"] for run in figures["engines"][name]["decode"]]
        for name in ("kvquant", "flash")
    )
    told = [f"{min(rates):,.0f} to {max(rates):,.0f}" for rates in (ours, theirs)]
    return f"kvquant decoded {told[0]} tokens a second, and FLASH_ATTN in bf16 {told[1]}"


def saturated(figures: Figures) -> str:
    """The rate at which FLASH_ATTN in bf16 answers requests that all come at once."""
    (found,) = figures["engines"]["flash"]["saturated"]
    return (
        f"FLASH_ATTN in bf16 answers {found['requests']} requests that come at once in "
        f"{found['seconds']:.1f} s, which is {found['requests_per_s']:.1f} a second"
    )


def engines_about(figures: Figures) -> str:
    """Where, when and with what engines were measured."""
    machine, settings = figures["machine"], figures["settings"]
    return (
        f"one {machine['gpu']}, {day(machine)}, vLLM {machine['vllm']}, torch {release(machine)}, "
        f"{settings['layers']} layers of a Llama 3 8B with random weights, "
        f"{settings['context']:,} tokens in each sequence"
    )


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


def under_load(figures: Figures) -> str:
    """Waiting times by the mean rate of arrivals."""
    rows = []
    for name, title in SERVED.items():
        runs = figures["engines"].get(name, {}).get("load", [])
        for share in dict.fromkeys(run["share"] for run in runs):
            same = [run for run in runs if run["share"] == share]
            keys = ["first_token_ms_p50", "first_token_ms_p99", "between_ms_p50", "between_ms_p99"]
            cells = [spread(same, key) for key in keys]
            rows.append([title, f"{same[0]['rate']:.1f}", *cells])
    titles = ["engine", "requests a second", "first token, ms: p50", "p99"]
    return table([*titles, "between tokens, ms: p50", "p99"], rows)


SGLANG_ENGINES = {  # rows and pages, by the names of sglang_compared.py
    "own": ("SGLang's own, bf16", 1),
    "bf16": ("`bf16`", 1),
    "bf16-pages": ("`bf16`", 64),
    "int8": ("`int8`", 1),
    "plan": ("`int4-g4` with a plan", 16),
    "int4-tokens": ("`int4-g4`", 1),
    "int4": ("`int4-g4`", 64),
    "int4-rows": ("`int4-g4`, prompts read rows", 16),
    "int4-short-chunks": ("`int4-g4`, chunks of 64 tokens", 1),
    "gemma2-own": ("Gemma 2: SGLang's own, bf16", 1),
    "gemma2": ("Gemma 2: `bf16`", 1),
    "gemma2-int8": ("Gemma 2: `int8`", 16),
    "gemma3-own": ("Gemma 3: SGLang's own, bf16", 1),
    "gemma3": ("Gemma 3: `bf16`", 64),
    "gemma3-int8": ("Gemma 3: `int8`", 1),
}


def answers_of_sglang() -> str:
    """KL of SGLang's engines to transformers in float32."""
    engines = read("sglang-answers")["engines"]
    rows = []
    for name, (title, page) in SGLANG_ENGINES.items():
        kls = (f"{engines[name][kind]:.4f}" for kind in ("generated", "prompts"))
        rows.append([title, str(page), *kls])
    return table(["rows", "tokens of a page", "generated", "prompts"], rows)


def served_by_sglang() -> str:
    """Tokens a second of SGLang's engines, in three rounds."""
    engines = read("sglang")["engines"]
    rows = []
    for name, title in (
        ("kvquant", "kvquant `int4-g4`"),
        ("triton", "SGLang's `triton`, bf16"),
    ):
        rounds = engines[name]["decode"]
        assert not any(one["ended_too_early"] for one in rounds)
        rows.append(
            [title, *(spread(rounds, key) for key in ("tokens_per_s", "prompt_tokens_per_s"))]
        )
    return table(["engine", "tokens/s", "prompts: tokens/s"], rows)


CACHES = {
    "int4-g4": "plain `int4-g4`",
    "int8": "plain `int8`",
    "int8-g4": "plain `int8-g4`",
    "plan {}": "plan, `int4`",
    "plan {}, int4-g4": "plan, `int4-g4`",
    "plan {}, int8": "plan, `int8`",
    "int4-g4 + 4 sinks, 128 recent": "`int4-g4` with the default 16-bit window",
    "int8 + 4 sinks, 128 recent": "`int8` with it",
    "plan {} + 4 sinks, 128 recent": "plan, `int4`, with it",
    "plan {}, int4-g4 + 4 sinks, 128 recent": "plan, `int4-g4`, with it",
    "KIVI, last 128 in 16 bit": "KIVI's scheme, the last 128 tokens in 16 bit",
}
FEW_BITS = {
    "plan {}-3, int2": "plan, `int2`",
    "plan {}-3, int3": "plan, `int3`",
    "plan {}-3": "plan, `--budget 3.25`",
    "plan {}-3, int4": "plan, `int4`",
    "plan {}-3, int2 + 4 sinks, 128 recent": "plan, `int2`, with the default 16-bit window",
    "plan {}-3, int3 + 4 sinks, 128 recent": "plan, `int3`, with it",
    "plan {}-3 + 4 sinks, 128 recent": "plan, `--budget 3.25`, with it",
    "plan {}-3, int4 + 4 sinks, 128 recent": "plan, `int4`, with it",
}
MODELS = {
    "llama-demo-5m": "Llama type",
    "qwen2-biased-10m": "Qwen2 type, biased keys",
}
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
PLAIN = "int8", "int4-g4"
PUBLIC_CACHES = {  # of README.md: kvquant's, and peers in the form that they ship
    "default": "the default",
    "plan int4": '`plan="auto"`',
    "int8": "`int8`",
    "int4-g4": "`int4-g4`, no plan",
    "KIVI-4, residual of 128": "KIVI-4",
    "TurboQuant, 4 bits, 4 layers in 16 bit": "TurboQuant",
    "llama.cpp q4_0": "llama.cpp `q4_0`",
}
SAFE_UP_TO = f"Up to {SAFE} `kvquant check` calls a cache safe"
CONTEXT, PLACE = 4096, "behind"  # of public_models.py
PUBLIC = {  # name in results/, and its head_dim
    "SmolLM2-135M": ("smollm2-135m", 64),
    "Gemma 3 270M": ("gemma3-270m", 256),
    "Qwen2.5-Coder-0.5B": ("qwen2.5-coder-0.5b", 64),
    "Qwen2.5-Coder-1.5B": ("qwen2.5-coder-1.5b", 128),
}
ANSWERED = {
    "16 bit": "16 bit",
    "default + 4 sinks, 128 recent": "the default",
    "plan int4 + 4 sinks, 128 recent": "plan, `int4`",
    "plan int3 + 4 sinks, 128 recent": "plan, `int3`",
    "default": "the default, without 16-bit tokens",
    "int4-g4 + 4 sinks, 128 recent": "`int4-g4`",
}


def settings() -> str:
    """Which setting to take: bits with the default window, and when."""
    rows = [
        [name, how, *(f"{bits(fmt, tokens):.2f}" for tokens in LENGTHS), when]
        for name, fmt, how, when in SETTINGS
    ]
    titles = ["setting", "arguments", *(f"bits at {tokens:,} tokens" for tokens in LENGTHS)]
    return table([*titles, "take it when"], rows)


def public() -> str:
    """Public models: bits of rows, KL with the default window and without, HumanEval."""
    kl, lost, bits_of = measured_public()
    coders = [name for name in PUBLIC if "Coder" in name]
    rows = []
    for cache, title in PUBLIC_CACHES.items():
        if cache in bits_of:
            cells = []
            for name in PUBLIC:
                found = [kl.get((name, cache, window)) for window in WINDOWS]
                known = [kl_of({"kl": one}) for one in found if one is not None]
                cells.append(", ".join(known) or "-")
            pairs = (lost.get((name, cache)) for name in coders)
            losses = ("{} / {}".format(*pair) if pair else "-" for pair in pairs)
            rows.append([title, f"{bits_of[cache]:.2f}", *cells, *losses])
    titles = (f"HumanEval, {name.rpartition('-')[2]}: lost / won" for name in coders)
    return table(["cache", "bits, head_dim 128", *PUBLIC, *titles], rows)


Public = tuple[
    dict[tuple[str, str, tuple[int, ...]], float],  # KL by model, cache and window
    dict[tuple[str, str], tuple[int, int]],  # answers lost and won
    dict[str, float],  # bits at head_dim 128
]
WINDOWS = (4, 128), (0, 0), ()  # peers have their own


def public_files() -> dict[str, list[Figures]]:
    """The rows of public_models.py by model; none where it has not measured all of them."""
    paths = {name: RESULTS / f"public-{key}.json" for name, (key, _) in PUBLIC.items()}
    if not all(path.exists() for path in paths.values()):
        return {}
    return {name: read(path.stem)["rows"] for name, path in paths.items()}


def measured_public() -> Public:
    """What public_models.py found; until it has measured all models, what others did before."""
    files = public_files()
    if not files:
        return measured_before()
    kl, lost, bits_of = dict[Any, float](), dict[Any, tuple[int, int]](), dict[str, float]()
    for name, rows in files.items():
        passed: dict[tuple[str, int], str] = {}
        for row in rows:
            key = row["key"]
            window = tuple(key.get("window", ()))
            if key["measure"] == "kl" and key["context"] == CONTEXT:
                kl[name, key["cache"], window] = row["kl"]
                if PUBLIC[name][1] == 128:
                    bits_of.setdefault(key["cache"], row["packed_bits"])
            elif key["measure"] == "humaneval" and key["place"] == PLACE and window != WINDOWS[1]:
                passed[key["cache"], key["sample"]] = row["passed"]
        for (cache, sample), given in passed.items():
            exact = passed.get(("16 bit", sample))
            if exact is not None and cache != "16 bit":
                pairs = Counter(zip(exact, given, strict=True))
                before = lost.get((name, cache), (0, 0))
                lost[name, cache] = before[0] + pairs["1", "0"], before[1] + pairs["0", "1"]
    return kl, lost, bits_of


def measured_before() -> Public:
    """What bench_defaults.py and bench_humaneval.py found: no plan's KL, and no peers."""
    kl = {}
    for row in read("defaults")["rows"]:
        if row["context"] == 1024:
            formats = row["k"], row["v"]
            for name, (key, dim) in PUBLIC.items():
                default = tuple(default_format(side, dim, *row["window"]) for side in "kv")
                for cache, wanted in (("default", default), *((f, (f, f)) for f in PLAIN)):
                    if row["model"] == key and formats == wanted:
                        kl[name, cache, tuple(row["window"])] = row["kl"]
    lost = {
        (name, row["cache"].removesuffix(" + 4 sinks, 128 recent")): (row["lost"], row["won"])
        for row in read("humaneval")["rows"]
        if row["cache"].endswith("recent")
        for name, (key, _) in PUBLIC.items()
        if row["model"] == key
    }
    pairs = {"default": [default_format(side, 128, 4, 128) for side in "kv"]}
    pairs |= {cache: [cache.removeprefix("plan ")] * 2 for cache in ("plan int4", *PLAIN)}
    bits_of = {
        cache: sum(RowFormat.parse(one, 128).bits_per_element for one in pair) / 2
        for cache, pair in pairs.items()
    }
    return kl, lost, bits_of


def public_about() -> str:
    """What was scored on public models, and when."""
    found = read("defaults")
    row = found["rows"][0]
    return (
        f"{row['scored']:,} tokens of WikiText-2's test text, each behind {row['context']:,} "
        f"others or more, in float32, on one NVIDIA H200 ({day(found)}, "
        "`tests/benchmarks/public_models.py`)"
    )


def public_measured() -> str:
    """How the table of public models was measured."""
    keys = [row["key"] for rows in public_files().values() for row in rows]
    if not keys:
        asked = [one for one in read("humaneval")["rows"] if one["cache"] == "16 bit"]
        solved = {one["model"]: one["passed"] for one in reversed(asked)}
        few, many = sorted(solved.values())
        return (
            f"KL: {public_about().rpartition(', `')[0]}). HumanEval: greedy, in bfloat16, with the "
            f"window; of {asked[0]['problems']} problems 16 bit solved {few} and {many}"
        )
    kl = next(one for one in keys if one["measure"] == "kl" and one["context"] == CONTEXT)
    samples = {one["sample"] for one in keys if one["measure"] == "humaneval"}
    return (
        f"KL: {kl['passages']} passages of {kl['scored']} tokens, each behind {CONTEXT:,} others, "
        "in float32. HumanEval: each problem behind 6,000 tokens of other code, "
        f"{len(samples)} generations, in bfloat16, with the window. Peers have the form that they "
        "ship (`tests/benchmarks/public_models.py`)"
    )


def speed() -> str:
    """How many times as fast as named peers."""
    cases, steps = int4_cases(), read("h200-step")["cases"][-1]
    (default,) = [one for one in read("h200-defaults")["decode"] if one["k_format"] == "int8-g4"]
    found = []
    many = "64 sequences of 8,192 tokens"
    for rows, case, what in (
        ("default", default, many),
        ("`int4-g4`", cases[64, 32, 8192], many),
        ("`int4-g4`", cases[1, 32, 1024], "1 sequence of 1,024 tokens"),
    ):
        assert "cudnn" in of_peer(case)["name"]
        peer = "cuDNN in torch, 16 bit"
        found.append((f"attention, {what}, H200", rows, peer, of_peer(case)["ratio"]))
    for name, where in (("zen4", "2 cores, AMD Zen 4"), ("xeon", "2 cores, Intel Xeon with AMX")):
        ratio = read(f"{name}-decode")["decode"][0]["sdpa_ratio"]
        found.append((f"attention, {where}", "`int4-g4`", "torch's fastest SDPA", ratio))
    what = f"model step, {steps['batch']} sequences of {steps['tokens']:,} tokens, H200"
    ratio = steps["ms"]["DynamicCache"] / steps["ms"]["compiled"]
    found.append((what, "`int4-g4`", "transformers' `DynamicCache`", ratio))
    for name, file in (("flash", "vllm-32"), ("flash-fp8", "vllm")):
        figures = read(file)
        rates = [
            statistics.median(run["tokens_per_s"] for run in figures["engines"][engine]["decode"])
            for engine in ("kvquant", name)
        ]
        layers, batch = figures["settings"]["layers"], figures["settings"]["batch"]
        what = f"vLLM, {layers} layers, {batch} sequences of 8,192 tokens, H200"
        found.append((what, "`int4-g4`", SERVED[name], rates[0] / rates[1]))
    cells = [[what, rows, peer, f"{ratio:.2f}"] for what, rows, peer, ratio in found]
    return table(["what", "rows", "beside", "times as fast"], cells)


def answers() -> str:
    """Right answers of HumanEval, and the KL that kvquant check measures."""
    models = {name: key for name, (key, _) in PUBLIC.items() if "Coder" in name}
    rows = []
    for key, name in ANSWERED.items():
        cells = []
        for model in models.values():
            row = next(
                (x for x in read("humaneval")["rows"] if (x["model"], x["cache"]) == (model, key)),
                None,
            )
            if row is None:
                cells += ["-", "-", "-"]
                continue
            share = f"{row['passed'] / row['problems']:.1%}".replace("%", " %")
            cells += [f"{row['kl']:.4f}", share, f"{row['lost']} / {row['won']}"]
        rows.append([name, *cells])
    titles = [f"{name}: {what}" for name in models for what in ("KL", "right", "lost / won")]
    return table(["cache", *titles], rows)


def default_times() -> str:
    """Decode attention with the default pairs at 64 sequences of 8,192 tokens, on an H200."""
    rows = []
    for case, what in zip(read("h200-defaults")["decode"], ("kept beside", "none"), strict=True):
        cells = []
        for which in ("", "in_a_row_"):
            cells += [f"{case[which + 'us']:.0f}", f"{case[which + 'roof_percent']:.0f} %"]
        rows.append([f"K `{case['k_format']}`, V `{case['v_format']}`", what, *cells])
    titles = ["one call: us", "of the read peak", "in a row: us", "of the read peak"]
    return table(["default rows", "16-bit tokens", *titles], rows)


def mean_of(model: str, key: str, name: str = "fidelity") -> dict[str, float]:
    """Mean figures of a cache of a model, at a context of 2,048 tokens."""
    parts = read(name)["caches"][f"{model}, context 2048"][key.format(model)]
    return {one: statistics.fmean(part[one] for part in parts) for one in parts[0]}


def kl_of(mean: Mapping[str, float]) -> str:
    """Four digits behind the point, or one that counts; in bold where the loss is worth a look."""
    kl = f"{mean['kl']:.4f}" if mean["kl"] >= 1e-4 else f"{mean['kl']:.5f}"
    return f"**{kl}**" if mean["kl"] > KL_NOTICE else kl


def fidelity_about(name: str = "fidelity") -> str:
    """What was scored, and when."""
    found = read(name)
    tokens, scored = (found["settings"][name] for name in ("tokens", "scored"))
    return (
        f"{tokens:,} tokens of WikiText-2's test text were decoded one by one, each behind "
        f"{2048 - scored:,} to 2,047 others ({day(found)}, `tests/benchmarks/fidelity.py`)"
    )


def fidelity(caches: Mapping[str, str], name: str = "fidelity") -> str:
    """Bits, KL and top-1 agreement of caches of two models."""
    rows = []
    for key, shown_as in caches.items():
        means = [mean_of(model, key, name) for model in MODELS]
        found = [f"{kl_of(mean)} ({100 * mean['top1']:.1f} %)" for mean in means]
        rows.append([shown_as, f"{means[-1]['bits']:.2f}", *found])
    return table(["cache", "bits per element", *MODELS.values()], rows)


PROBED = "int8", "int8-g4", "int4-g8", "int4-g4", "int4", "int3", "int2"


def probed() -> str:
    """What the probe of K rows finds, and what the rows cost."""
    found = read("probe")
    limits = {found["limits"]["refused"]: "refused", found["limits"]["warned"]: "warning"}
    rows = []
    for name, model in found["models"].items():
        for fmt in (one for one in PROBED if one in model["rows"]):
            one = model["rows"][fmt]
            verdicts = [word for limit, word in limits.items() if one["figure"] >= limit]
            verdict = (verdicts or ["-"])[0] if "int8" not in fmt else "not probed"
            numbers = [f"{one[key]:.2g}" for key in ("figure", "figure_of_text", "kl")]
            rows.append([name, f"`{fmt}`", *numbers, f"{100 * one['top1']:.1f}", verdict])
    return table(["model", "K rows", "figure", "of a text", "KL", "top-1 %", "result"], rows)


WINDOWED = 4, 128  # first and last tokens in 16 bit
CASES = {"the default": "default", "`int8`": "int8", "`int4-g4`": "int4-g4"}
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
    "K int8, V int4-g4": "K `int8`, V `int4-g4`",
    "fp8": "`fp8`",
    "int4-g8": "`int4-g8`",
    "int4-g4": "`int4-g4`",
    "int4": "`int4`",
    "plan int4-g4": "plan, `int4-g4`",
    "plan int4": "plan, `int4`",
    "plan int3": "plan, `int3`",
    "plan int2": "plan, `int2`",
    "KIVI-4, groups of 128": "KIVI-4, groups of 128",
    "KVarN K4V2": "KVarN K4V2",
}
ASKED_OF_LATENTS = {
    "int8-g4+bf16": "`int8-g4+bf16`",
    "int4-g8+bf16": "`int4-g8+bf16`",
    "int4-g4+bf16": "`int4-g4+bf16`",
    "plan int4-g4": "plan, `int4-g4+bf16`",
}


def fidelity_page() -> list[str]:
    """Tables and sentences of calibration/FIDELITY.md."""
    return [
        *(public_about().rpartition(", `")[0], cells_about(), public_models(), public_code()),
        *(answers(), answers_again(), limits(), *shipped()),
        *(home_made(), counted(), foreign_plans(), oscar(), same_texts()),
        *(declined_choices(), declined_bases(), declined_grades()),
    ]


def pairs_of_formats(text: str) -> dict[tuple[str, str], dict[Any, Figures]]:
    """Figures by model and cache, of a text; then by context and window, shortest context first.

    The name is that of a format for K and V, or "default".
    """
    found: dict[tuple[str, str], dict[Any, Figures]] = {}
    for row in read("defaults")["rows"]:
        (dim,) = (dim for model, dim in PUBLIC.values() if model == row["model"])
        window = tuple(row["window"])
        defaults = tuple(default_format(side, dim, *window) for side in "kv")
        names = ["default"] * ((row["k"], row["v"]) == defaults)
        names += [row["k"]] * (row["k"] == row["v"])
        for name in names if row["text"].startswith(text) else []:
            found.setdefault((row["model"], name), {})[row["context"], window] = row
    return found


def public_models() -> str:
    """KL and top-1 of public models by context, with the default window and without one."""
    found, rows = pairs_of_formats("WikiText"), []
    for name, (model, _) in PUBLIC.items():
        for title, cache in CASES.items():
            cases = found[model, cache]
            contexts = sorted({context for context, _ in cases})
            places = [(context, window) for window in (WINDOWED, (0, 0)) for context in contexts]
            bits = [f"{cases[place]['packed_bits']:g}" for place in places[::2]]
            figures = [cases[place] for place in places]
            cells = [f"{kl_of(one)} ({100 * one['top1']:.1f})" for one in figures]
            rows.append([name, title, " / ".join(dict.fromkeys(bits)), *cells])
    lengths = "1,024", "16,384"
    titles = [f"{what}, {n}" for what in ("window", "no window") for n in lengths]
    return table(["model", "cache", "bits", *titles], rows)


def public_code() -> str:
    """KL of the default on source code."""
    found = pairs_of_formats("scikit-learn")
    coders = {name: model for name, (model, _) in PUBLIC.items() if "Coder" in name}
    costs = {
        name: [found[model, "default"][4096, window]["kl"] for window in (WINDOWED, (0, 0))]
        for name, model in coders.items()
    }
    said = " and ".join(f"{a:.4f} ({b:.4f} without a window)" for a, b in costs.values())
    return f"On scikit-learn's code, behind 4,096 tokens, the default costs the two Coders {said}."


def shipped() -> list[str]:
    """What other projects' caches cost public models in the form that they ship, beside ours: KL
    behind the longest context, then HumanEval. Nothing before tests/benchmarks/public_models.py has
    measured one of them."""
    scored: dict[str, dict[str, str]] = {}
    lost: dict[str, dict[str, str]] = {}
    theirs = 0
    for name, (model, _) in PUBLIC.items():
        path = RESULTS / f"public-{model}.json"
        rows = read(path.stem)["rows"] if path.exists() else []
        rows = [row for row in rows if row["key"].get("window", [*WINDOWED]) == [*WINDOWED]]
        theirs += sum("window" not in row["key"] and _is_compared(row) for row in rows)
        kl = [row for row in rows if row["key"]["measure"] == "kl"]
        longest = max((row["key"]["context"] for row in kl), default=0)
        for row in kl:
            if row["key"]["context"] == longest and _is_compared(row):
                cell = f"{row['packed_bits']:.3g}: {kl_of(row)} ({100 * row['top1']:.1f})"
                scored.setdefault(row["key"]["cache"], {})[name] = cell
        for cache, places in _paired(rows).items():
            for place, (first, second) in places.items():
                lost.setdefault(cache, {})[f"{name}, {place}"] = f"{first} / {second}"
    found = []
    for cells in (scored, lost) if theirs else ():
        titles = [*dict.fromkeys(title for row in cells.values() for title in row)]
        rows_of = [[cache, *(row.get(one, "-") for one in titles)] for cache, row in cells.items()]
        found += [table(["cache", *titles], rows_of)] * bool(cells)
    return found


def _is_compared(row: Figures) -> bool:
    """Whether a cache rounds anything: no check of the script, nor 16 bit itself."""
    name = row["key"]["cache"]
    return not name.startswith("16 bit") and name != "peers' 16 bit"


def _paired(rows: Sequence[Figures]) -> dict[str, dict[str, list[int]]]:
    """Answers of HumanEval lost and won by cache and place, all generations together."""
    answers = {
        (row["key"]["place"], row["key"]["sample"], row["key"]["cache"]): row["passed"]
        for row in rows
        if row["key"]["measure"] == "humaneval"
    }
    found: dict[str, dict[str, list[int]]] = {}
    for (place, sample, cache), passed in answers.items():
        exact = answers.get((place, sample, "16 bit"))
        if exact is not None and cache != "16 bit":
            pair = found.setdefault(cache, {}).setdefault(place, [0, 0])
            for at, which in enumerate((("1", "0"), ("0", "1"))):
                pair[at] += [*zip(exact, passed, strict=True)].count(which)
    return found


def answers_again() -> str:
    """What another run of the 16-bit cache answers."""
    model = PUBLIC["Qwen2.5-Coder-1.5B"][0]
    rows = [one for one in read("humaneval")["rows"] if one["model"] == model]
    solved = [str(one["passed"]) for one in rows if one["cache"] == "16 bit"]
    return (
        f"Two runs of the 16-bit cache of Qwen2.5-Coder-1.5B solved {' and '.join(solved)} "
        f"of {rows[0]['problems']} problems"
    )


def limits() -> str:
    """The limits of the verdicts."""
    return (
        f"`kvquant check` calls a KL of at most {SAFE:g} safe, and one of {RUINED:g} or more "
        "a reason not to use the cache"
    )


def cells_about() -> str:
    """How to read the table of public models."""
    return f"A cell has KL and, in parentheses, top-1; a KL above {KL_NOTICE:g} is bold"


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


def oscar() -> str:
    """What OSCAR's rows cost with the window that its authors use."""
    (one,) = (one for one in asked_models() if one.name == "llama-recall-5m")
    mean, worst = one.lost((64, 256))["OSCAR-2"]
    return (
        f"With that window OSCAR-2 ({one.bits['OSCAR-2']:.2f} bits) costs `{one.name}` "
        f"{mean:.1f} points in the mean and {worst:.1f} in the worst task"
    )


FOREIGN = {
    "wikipedia": "plan, `int4`, from Wikipedia",
    "random": "plan, `int4`, from random tokens (`--zero-data`)",
}


def foreign_plans() -> str:
    """Right answers that plans from other texts cost the model that finds facts."""
    found = read("recall-texts")
    rows = []
    for at, cache in enumerate(found["caches"][1:]):
        pairs = [task["caches"][at] for task in found["retrieval"]["1024"].values()]
        name = str(cache["cache"]).partition(" + ")[0]
        rows.append([FOREIGN.get(name, f"`{name}`"), *(_points(pair) for pair in pairs)])
    return table(["cache", *(f"`{task}`" for task in found["retrieval"]["1024"])], rows)


def _points(pair: Figures) -> str:
    """Points won or lost, with the standard error."""
    return f"{100 * (pair['given'] - pair['exact']):+.1f} ± {100 * pair['error']:.1f}"


def same_texts() -> str:
    """How many texts stay those of the 16-bit cache."""
    (one,) = of_models(read_runs(RESULTS / "code-again.json"))
    shares = {
        (name, way): f"{100 * figures['agreement']['2048']['share']:.0f} %"
        for (window, name, way), figures in one.texts.items()
        if window == WINDOWED
    }
    greedy = [shares[name, "greedy"] for name in ("int8", "plan int4", "int4-g4")]
    sampled = max(share for (_, way), share in shares.items() if way == "sampled")
    count = one.runs[0]["settings"]["sizes"]["prompts"]
    return (
        f"In {greedy[0]} of {count} greedy texts `int8` wrote the same 2,048 tokens as the 16-bit "
        f"cache. `int4` with a plan did so in {greedy[1]}, and `int4-g4` in {greedy[2]}. Of "
        f"sampled texts at most {sampled} were the same"
    )


def declined_choices() -> str:
    """Whether a search of all formats finds better ones than step by step."""
    budgets = read("row-formats")["models"]["llama-demo-5m"]["budgets"]
    pairs = [
        f"{one['allocate']['kl']:.4f} and {one['exhaustive']['kl']:.4f} at {bits} bits"
        for bits, one in budgets.items()
    ]
    return f"Their KL by steps and by search is {', and '.join(pairs)}"


def declined_bases() -> str:
    """The KL in OSCAR's bases by that in the plan's."""
    rows = [one for each in read("row-bases")["models"].values() for one in each["bases"]]

    def span(basis: str, side: str) -> str:
        found = [one for one in rows if one["basis"] == basis and one["side"] == side]
        factors = [one["kl"] / one["of"] for one in found]
        return f"{min(factors):.2f} to {max(factors):.2f}"

    return (
        f"multiplies the KL of K by {span('oscar', 'k')} and that of V by {span('oscar', 'v')}. "
        f"Its weights of values multiply the KL of V by {span('weighted', 'v')}"
    )


def declined_grades() -> str:
    """The KL of both sides with graded rows by that with the plan's."""
    models = read("row-graded")["models"]
    bits = RowFormat.parse("int3", 128).bits_per_element
    found = [
        f"{row['kl']['chosen']['kl'] / row['kl']['chosen']['of']:.2f} on `{name}`"
        for name, figures in models.items()
        for row in figures["rows"]
        if row["format"] == "int3"
    ]
    return f"At {bits:g} bits they multiply the KL by {', '.join(found)}"


def asked_models() -> list[Evaluations]:
    """The models that answered questions about their contexts."""
    names = "recall", "recall-few", "code", "code-few", "kinds", "code-sinks", "code-latent"
    return of_models(run for name in names for run in read_runs(RESULTS / f"{name}.json"))


if __name__ == "__main__":
    main()
