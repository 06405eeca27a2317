"""kvquant bench on a GPU, with a fake timer on the CPU: checks, choices, the command."""

from __future__ import annotations

import errno
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from click.testing import CliRunner
from fake_timer import CPU, H200, MACHINE, FakeTimer, small
from relative_l2 import relative_l2

from kvquant.bench import gpu as gpu_bench
from kvquant.bench import report as report_module
from kvquant.bench import timer as timer_module
from kvquant.bench.cases import (
    TABLES,
    Case,
    Shape,
    Table,
    check,
    make_inputs,
    parse_latents,
)
from kvquant.bench.cases import VARIANTS as VARIANT_NAMES
from kvquant.bench.gpu import Peer, Times, best_sdpa, measure
from kvquant.bench.timer import Call, GraphTimer, Machine
from kvquant.cli import bench as command
from kvquant.cli import main as cli
from kvquant.errors import KVQuantError
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.ops.attention import Result, attend
from kvquant.ops.mla import attend_latents
from kvquant.rows.call import LatentCall


def latents(name: str, **sizes: Any) -> Case:
    return Case(*parse_latents(name), 2, 4, 1, 70, **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_right_results_pass_the_check(dtype: torch.dtype) -> None:
    for case in (small("int8/int4-g4", dtype=dtype), small(sink_len=4, recent_len=16, dtype=dtype)):
        error = check(case, make_inputs(case, 1, CPU)[0])
        assert 0 < error < (3e-3 if dtype == torch.bfloat16 else 8e-4)


@pytest.mark.parametrize("wrong", ["first", "last", "nan"])
def test_wrong_results_are_an_error_and_nothing_is_timed(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*args: Any, **options: Any) -> Result:
        out, lse = attend(*args, **options)
        out[{"first": 0, "last": -1, "nan": 0}[wrong], 0, 0] += math.nan if wrong == "nan" else 0.1
        return out, lse

    monkeypatch.setattr("kvquant.bench.cases.attend", spoiled)
    timer = FakeTimer()
    with pytest.raises(KVQuantError, match=r"int4-g4, batch 2, 4:2 heads, T 70: .* not timed"):
        measure(small(), timer, {})
    assert timer.calls == []


def test_torch_attention_is_taken_at_its_best_and_measured_once() -> None:
    def times(call: Any) -> float:
        if getattr(call, "__name__", "") == "attend":
            return 10.0
        return 20.0 if torch.backends.cuda.flash_sdp_enabled() else 30.0

    timer, peers = FakeTimer(times), dict[Case, Peer | str]()
    found = measure(small(), timer, peers)
    assert found.times == Times(10.0, 8.0, 15.0)
    assert isinstance(found.sdpa, Peer)
    assert found.sdpa == Peer("flash, enable_gqa", "flash, enable_gqa", Times(20.0, 16.0, 30.0))
    assert measure(small("int8", page_size=0), timer, peers).sdpa is found.sdpa
    assert list(peers) == [small("bf16")]


@pytest.mark.parametrize("lens", [(), (3, 70)], ids=["equal", "ragged"])
def test_all_forms_of_torch_attention_compute_the_same(lens: tuple[int, ...]) -> None:
    case = small("bf16", lens=lens)
    ours = gpu_bench.rotated_inputs(case, FakeTimer())[0].attend()
    forms = gpu_bench._torch_calls(case, FakeTimer())
    assert ("varlen_attn" in forms) == ("flex_attention" in forms) == bool(lens)
    for form in ("enable_gqa", "folded"):
        _, make = forms[f"math, {form}"]
        found = make()[0]()
        assert isinstance(ours, torch.Tensor) and isinstance(found, torch.Tensor)
        torch.testing.assert_close(found.flatten(), ours.flatten(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("q_len", [2, 5])
def test_several_queries_see_the_same_tokens_in_all_forms(q_len: int) -> None:
    case = small("bf16", q_len=q_len)
    ours = gpu_bench.rotated_inputs(case, FakeTimer())[0].attend()
    forms = gpu_bench._torch_calls(case, FakeTimer())
    names = "math, enable_gqa", "flash, lower right", "math, folded"
    grouped, lower_right, folded = (forms[name][1]()[0]() for name in names)
    assert isinstance(lower_right, torch.Tensor)
    assert isinstance(grouped, torch.Tensor) and isinstance(folded, torch.Tensor)
    folded = folded.unflatten(2, (q_len, -1)).transpose(2, 3).flatten(1, 2)
    for found in (grouped, lower_right, folded):  # [batch, num_q_heads, q_len, head_dim]
        torch.testing.assert_close(found.transpose(1, 2), ours, atol=0.01, rtol=0.01)


def test_flex_attention_sees_the_tokens_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small("bf16", lens=(3, 70))
    monkeypatch.setattr(gpu_bench, "_compiled", lambda function: function)  # seconds otherwise
    ours = gpu_bench.rotated_inputs(case, FakeTimer())[0].attend()
    _, make = gpu_bench._torch_calls(case, FakeTimer())["flex_attention"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        found = make()[0]()
    assert isinstance(ours, torch.Tensor) and isinstance(found, torch.Tensor)
    torch.testing.assert_close(found.flatten(), ours.flatten(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("variant", [*VARIANT_NAMES, "tree_mask"])
def test_variants_are_the_same_in_all_forms(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "_compiled", lambda function: function)  # seconds otherwise
    case = small("bf16", variant=variant, q_len=3 if variant == "tree_mask" else 1)
    inputs = gpu_bench.rotated_inputs(case, FakeTimer())[0]
    ours = inputs.attend().view(2, case.q_len, 4, 64)
    plain = replace(inputs, variant=None).attend().view_as(ours)
    assert float((plain - ours).norm() / ours.norm()) > 0.05
    forms = gpu_bench._torch_calls(case, FakeTimer())
    masked = set() if variant in ("soft_cap", "sink_logits") else {"enable_gqa", "folded"}
    backends = product(gpu_bench.BACKENDS, masked)
    assert set(forms) == {"flex_attention", *(f"{name}, {form}" for name, form in backends)}
    for form in ("flex_attention", *(f"math, {form}" for form in sorted(masked))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that flex_attention is not compiled
            found: Any = forms[form][1]()[0]()
        if "folded" in form:
            found = found.unflatten(2, (case.q_len, -1)).transpose(2, 3).flatten(1, 2)
        torch.testing.assert_close(found.transpose(1, 2), ours, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("page_size", [0, 16])
def test_latent_rows_are_checked_and_torch_computes_the_same(page_size: int, q_len: int) -> None:
    """Of one query or drafted ones, with first and last tokens in 16 bit too."""
    int4, bf16 = (
        latents(name, page_size=page_size, q_len=q_len) for name in ("int4-g8+fp8-g4", "bf16")
    )
    for case in (int4, replace(int4, sink_len=4, recent_len=16)):
        assert 0 < check(case, make_inputs(case, 1, CPU)[0]) < 3e-3
    assert bf16.exact == int4.exact == latents("bf16", q_len=q_len)
    ours = make_inputs(bf16.exact, 2, CPU)[0].attend()
    forms = gpu_bench._torch_calls(bf16.exact, FakeTimer())
    assert set(forms) == {"bmm", *(f"{name}, folded" for name in gpu_bench.BACKENDS)}
    for form in ("bmm", "math, folded"):
        found: Any = forms[form][1]()[0]()
        # bfloat16 rounds scores (4 at most), weights and both results, each by 2**-9 of itself
        assert relative_l2(found.view_as(ours), ours) < (4 + 3) * 2**-9


def test_wrong_latents_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(call: LatentCall) -> Result:
        return attend_latents(call._replace(sm_scale=1.1 * call.sm_scale))

    monkeypatch.setattr("kvquant.bench.cases.attend_latents", spoiled)
    with pytest.raises(KVQuantError, match=r"int8-g4, batch 2, 4:1 heads, T 70: .* not timed"):
        measure(latents("int8-g4"), FakeTimer(), {})


def test_varlen_attention_gets_tokens_without_padding() -> None:
    case = small("bf16", lens=(3, 70))
    one = gpu_bench.rotated_inputs(case, FakeTimer())[0]
    k, v = (rows.view(case.dtype) for rows in (one.segments[0].k_rows, one.segments[0].v_rows))
    call: Any = gpu_bench.varlen_call(one.q[:, :, None], k, v, one.segments[0].seq_lens)
    q, k_tokens, v_tokens, counts, ends, most_queries, most_tokens = call.args
    assert [counts.tolist(), ends.tolist(), most_queries, most_tokens] == [
        [0, 2, 4],
        [0, 3, 73],
        2,
        70,
    ]
    assert torch.equal(q[3, 1], one.q[1, 3]) and q.shape == (4, 2, 64)
    assert torch.equal(k_tokens[3 + 5], k[1, :, 5]) and torch.equal(v_tokens[2], v[0, :, 2])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "0.0 GB leave no memory to work in"),
        (RuntimeError("No available kernel"), "no backend takes it"),
    ],
    ids=["memory", "backend"],
)
def test_torch_attention_that_cannot_run_is_told(error: Exception, words: str) -> None:
    def fail(call: Call) -> float:
        raise error

    assert best_sdpa(small(), FakeTimer(fail)) == words


def test_a_16_bit_cache_beyond_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_bench, "make_inputs", fail)
    assert best_sdpa(small(seq_len=1 << 20), FakeTimer()) == "1.1 GB do not fit"


def test_caches_that_stay_in_l2_have_no_time_in_a_row() -> None:
    found = measure(small(), FakeTimer(copies=0), {})
    assert found.times == Times(10.0, None, 15.0)
    assert isinstance(found.sdpa, Peer) and found.sdpa.times.in_a_row is None


@pytest.mark.parametrize(
    ("nbytes", "copies"), [(1 << 30, 1), (60 << 20, 4), (1 << 20, 240), (1 << 10, 0)], ids=str
)
def test_inputs_outgrow_the_l2_cache(nbytes: int, copies: int) -> None:
    timer = GraphTimer.__new__(GraphTimer)
    timer.l2_bytes = 60 << 20
    assert timer.rotation(nbytes) == copies


def test_l2_is_overwritten_outside_of_the_time_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.012  # ms

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Scratch:
        def zero_(self) -> None:
            log.append("overwrite")

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    timer: Any = GraphTimer.__new__(GraphTimer)
    timer.scratch, timer.microseconds = Scratch(), 240.0
    replay = ["overwrite", "event", "replay", "event"]

    assert timer.alone(lambda: log.append("call")) == pytest.approx(12.0)
    begin = ["call", "synchronize", "capture", "call", "captured"]
    assert log == [*begin, *3 * replay, "synchronize", *20 * replay, "synchronize"]
    log.clear()
    assert timer.alone(lambda: None, limit=11.0) == pytest.approx(12.0)
    assert log.count("replay") == 3
    log.clear()
    assert timer.in_a_row([lambda i=i: log.append(str(i)) for i in range(5)]) == 1.0
    assert log[:5] == [str(i) for i in range(5)]  # each once before the capture
    assert log[7:19] == [str(i % 5) for i in range(12)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command find a GPU: the CPU, with a fake timer."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timer_module, "GraphTimer", lambda seconds: FakeTimer())
    monkeypatch.setattr(timer_module, "describe_machine", lambda timer, version: MACHINE)

    def cannot_compile(function: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gpu_bench, "_compiled", cannot_compile)
    monkeypatch.setattr(runtime, "gpu_of", lambda index: H200)
    monkeypatch.setattr(command, "compile_kernels", lambda kernels, arch: len(kernels))


def run(*args: object) -> click.testing.Result:
    return CliRunner().invoke(cli.main, ["bench", *map(str, args)])


SMALL = ["--batch", 2, "--seq-len", 40, "--head-dim", 64, "--q-heads", 4, "--kv-heads", 2]


@pytest.mark.extra("cuda")
def test_the_command_measures_checks_and_writes(gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run("--format", "int4-g4", "--format", "int8/int4", *SMALL, "--json", path)
    assert done.exit_code == 0, done.output
    first, _, *lines = done.stdout.splitlines()
    assert first == "GPU, CUDA 13.0, torch 2.11: peak bandwidth 4000 GB/s, empty graph 4.7 us"
    assert max(map(len, lines)) <= 80
    heads = [i for i, line in enumerate(lines) if line.startswith("format     batch")]
    assert len(heads) == 2  # our times, then torch's
    for head in heads:
        assert [line.split()[:4] for line in lines[head + 2 : head + 4]] == [
            [name, "2", "4:2", "40"] for name in ("int4-g4", "int8/int4")
        ]
    assert done.stderr.splitlines()[-1] == "Timing: int8/int4, batch 2, 4:2 heads, T 40, 100 %"
    found = json.loads(path.read_text())
    assert found["machine"]["read_gb_per_s"] == 4000
    assert [one["k_format"] for one in found["decode"]] == ["int4-g4", "int8"]


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("table", ["ragged", "wide", "short", "queries", "variants"])
def test_tables_of_hard_cases(
    table: str, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [Shape(4, 2, 70, 2, (3, 70)), Shape(4, 2, 40, 2, (9, 40))]
    if table != "ragged":
        shapes = [Shape(2, 2, 40, 2), Shape(4, 2, 40, 2)]
    if table == "queries":
        shapes = [Shape(4, 2, 40, 2), Shape(4, 2, 40, 2, q_len=3)]
    if table == "variants":
        shapes = [Shape(4, 2, 40, 2), Shape(4, 2, 40, 2, variant="window")]
    monkeypatch.setitem(TABLES, table, TABLES[table]._replace(shapes=tuple(shapes)))
    path = tmp_path / "bench.json"
    done = run(f"--{table}", "--format", "int4-g4", "--head-dim", 64, "--json", path)
    assert done.exit_code == 0, done.output
    rows = [line for line in done.stdout.splitlines() if line.startswith("int4-g4")]
    assert len(rows) == (6 if table == "short" else 4)  # each part of the table has two
    found = json.loads(path.read_text())[table]
    assert [one["eager_us"] for one in found] == [15.0, 15.0]
    if table == "ragged":
        assert "1 x 70, 1 x 3" in rows[0] and "1.00x" in rows[0]
        assert [one["lens"] for one in found] == [[3, 70], [9, 40]]
        assert [one["even"]["us"] for one in found] == [10.0, 10.0]
        assert found[0]["in_a_row_us"] is None
    else:
        assert {one["dtype"] for one in found} == {"float16" if table == "short" else "bfloat16"}


@pytest.mark.extra("cuda")
def test_the_command_measures_latent_rows(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = ("int4-g8+fp8-g4", "bf16")
    shapes = Shape(4, 1, 40, 2), Shape(2, 1, 70, 1, q_len=2)
    monkeypatch.setitem(TABLES, "mla", Table(formats, shapes))
    path = tmp_path / "bench.json"
    done = run("--mla", "--json", path)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())["mla"]
    assert [one["k_format"] for one in found] == 2 * list(formats)
    first = found[0]
    assert (first["nbytes"], first["head_dim"], first["us"]) == (2 * 40 * 368, 576, 10.0)
    assert first["sdpa"]["gb_per_s"] == pytest.approx(2 * 40 * 1152 / 10e-6 / 1e9)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("int4-g8+fp8-g4")]
    assert len(rows) == 4 and rows[0][1:6] == ["2", "4:1", "40", "10.0", "0"]
    assert rows[1][1:6] == ["1", "2", "x", "2:1", "70"]
    done = run("--mla", "--page-size", 16, "--exact", 4, 16)
    assert done.exit_code == 0 and "4+16" in done.stdout


@pytest.mark.extra("cuda")
def test_what_was_measured_is_told_after_an_interrupt(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(case: Case, *rest: Any) -> gpu_bench.Result:
        if case.name == "int8":
            raise KeyboardInterrupt
        return measure(case, *rest)

    monkeypatch.setattr(gpu_bench, "measure", interrupted)
    path = tmp_path / "bench.json"
    done = run("--format", "int4-g4", "--format", "int8", *SMALL, "--json", path)
    assert done.exit_code == 130 and done.stderr.splitlines()[-1] == "Aborted."
    assert [line for line in done.stdout.splitlines() if line.startswith("int4-g4")]
    assert not path.exists()


@pytest.mark.extra("cuda")
def test_cases_beyond_memory_are_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(case: Case, *rest: Any) -> gpu_bench.Result:
        if case.name != "int8":
            raise torch.OutOfMemoryError
        return measure(case, *rest)

    monkeypatch.setattr(gpu_bench, "measure", limited)
    done = run("--format", "int4-g4", "--format", "int8", *SMALL)
    assert done.exit_code == 0 and "int8" in done.stdout and "int4-g4" not in done.stdout
    named = "int4-g4, batch 2, 4:2 heads, T 40: 0.0 GB of rows are more than fits"
    assert named in done.stderr.splitlines()
    done = run("--format", "int4-g4", *SMALL)
    assert done.exit_code == 2 and done.stdout.count("int4-g4") == 0
    assert "none of the cases fits the GPU" in done.stderr


@pytest.mark.extra("report")
@pytest.mark.parametrize("full", [False, True], ids=["disk", "full disk"])
def test_a_picture_is_the_last_thing(
    full: bool, gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plot(results: Sequence[gpu_bench.Result], machine: Machine, path: Path) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_text(str(len(results)))

    monkeypatch.setattr(report_module, "plot", plot)
    files = {"--json": tmp_path / "bench.json", "--plot": tmp_path / "roof.png"}
    done = run("--format", "int8", *SMALL, *(part for pair in files.items() for part in pair))
    assert done.exit_code == (2 if full else 0)
    assert "int8" in done.stdout and len(json.loads(files["--json"].read_text())["decode"]) == 1
    assert files["--plot"].exists() != full


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu", "--plot", "x.png"], "--plot is for GPUs"),
        (["--device", "cpu", "--exact", 4, 128], "--exact is for GPUs"),
        (["--seconds", 1], "--seconds is for the CPU"),
        (["--format", "int5"], "'int5' is not one of 'int2', 'int3', 'int4', "),
        (["--format", "int4/int5"], "'int5' is not one of 'int2', 'int3', 'int4', "),
        (["--format", "int4/int4/int4"], "is not FORMAT or FORMAT/FORMAT"),
        (["--head-dim", 100], "'100' is not one of"),
        (["--seconds", "nan"], "nan is not a finite number"),
        (["--seconds", "inf", "--device", "cpu"], "inf is not a finite number"),
        (["--json", "x.txt"], "name it NAME.json"),
        (["--q-heads", 7], "--q-heads 7 is not a multiple of --kv-heads 8"),
        (["--page-size", 7], "--page-size 7: use 1, 2, 4"),
        (["--dtype", "float32"], "'float32' is not one of"),
        (["--plot", "x.svg"], "name it NAME.png"),
        (["--ragged", "--wide"], "--ragged or --wide"),
        (["--short", "--batch", 3], "--short has shapes of its own"),
        (["--wide", "--plot", "x.png"], "--plot does not go with --wide"),
        (["--device", "cpu", "--ragged"], "--ragged is for GPUs"),
        (["--device", "cpu", "--mla"], "--mla is for GPUs"),
        (["--variants", "--mla"], "--variants or --mla"),
        (["--variants", "--seq-len", 99], "--variants has shapes of its own"),
        (["--mla", "--format", "int4-g8"], "--format does not go with --mla"),
        (["--mla", "--head-dim", 64], "--head-dim does not go with --mla"),
        (["--mla", "--dtype", "float16"], "--dtype float16 does not go with --mla"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told_before_anything_runs(
    gpu: None, options: list[object], message: str
) -> None:
    done = run(*options)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--device", "cuda")
    assert done.exit_code == 2
    assert done.stderr == "Error: --device cuda: torch finds no GPU here; use --device cpu\n"
    done = run("--mla")
    assert done.exit_code == 2
    assert "--mla is for GPUs: torch finds none here, and without it the CPU" in done.stderr
    done = run("--mla", "--device", "cpu")
    assert "--mla is for GPUs: leave it out with --device cpu" in done.stderr


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    done = run("--quick", "--json", path)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["machine"]["read_gb_per_s"] > 100
    assert all(one["in_a_row_us"] > 0 and one["us"] > 0 for one in found["decode"])
    assert all(one["sdpa"]["name"] for one in found["decode"])


@pytest.mark.gpu
@pytest.mark.parametrize("table", ["variants", "mla"])
def test_tables_are_right_on_a_gpu(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = tuple(one._replace(seq_len=1000, batch=2) for one in TABLES[table].shapes)
    monkeypatch.setitem(TABLES, table, TABLES[table]._replace(shapes=shapes))
    path = tmp_path / "bench.json"
    done = run(f"--{table}", "--quick", "--json", path)
    assert done.exit_code == 0, done.output
    for one in json.loads(path.read_text())[table]:
        assert one["us"] > 0 and one["sdpa"]["us"] > 0
