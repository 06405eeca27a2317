"""kvquant bench with a fake timer on the CPU: cases, checks, torch's attention, the command; and
its stopwatches."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import torch
from click.testing import CliRunner
from fake_timer import CPU, H200, MACHINE, FakeTimer, small
from relative_l2 import relative_l2

from kvquant import RowFormat
from kvquant.bench import measure as measuring
from kvquant.bench import timer as timer_module
from kvquant.bench.cases import (
    LATENT_DIM,
    Case,
    check,
    list_cases,
    make_inputs,
    parse_formats,
    rehearse_case,
)
from kvquant.bench.measure import BACKENDS, measure, render_machine, render_results, torch_calls
from kvquant.bench.timer import Call, GraphTimer, Timer, describe_machine
from kvquant.cli import bench as command
from kvquant.cli import main as cli
from kvquant.errors import ConfigError, KVQuantError
from kvquant.kernels.cuda.runtime import launch as runtime
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.warmup import kernels_of
from kvquant.ops.attention import Result, attend
from kvquant.ops.mla import attend_latents

EXAMPLES = Path(__file__).parents[2] / "examples"


def latents(name: str, **sizes: Any) -> Case:
    return Case(*parse_formats(name, LATENT_DIM), 2, 4, 1, 70, **sizes)


def test_all_combinations_are_made() -> None:
    names = "int8-g4/int4-g4", "int4-g8+fp8-g4"
    cases = list_cases(names, batches=(1, 3), seq_lens=(16, 32), num_q_heads=4, num_kv_heads=2)
    assert [(one.seq_len, one.batch, one.name) for one in cases] == [
        (seq_len, batch, name) for seq_len in (16, 32) for batch in (1, 3) for name in names
    ]
    assert [one.heads for one in cases[:2]] == ["4:2", "4:1"]
    (one,) = list_cases(["int4"])
    assert (one.batch, one.heads, one.seq_len, one.head_dim) == (64, "32:8", 8192, 128)
    assert one.dtype == torch.bfloat16
    (one,) = list_cases(["fp8"], head_dim=576)
    assert one.is_latent and one.head_dim == 576 and one.heads == "32:1"


def test_a_call_reads_the_rows_of_all_tokens() -> None:
    assert small("int8/int4-g4").nbytes == 2 * 2 * 70 * (68 + 48)
    assert small("int8/int4-g4").exact.nbytes == 2 * 2 * 70 * 2 * 128
    fmt, _ = parse_formats("int8-g4", 576)
    assert latents("int8-g4").nbytes == 2 * 70 * fmt.row_bytes
    assert latents("int8-g4").exact == latents("bf16")


def test_formats_are_named_once_or_apart() -> None:
    assert parse_formats("fp8", 128) == (RowFormat("fp8", 1, 128),) * 2
    assert [str(f) for f in parse_formats("int8-g4/int4", 64)] == ["int8-g4", "int4"]
    for head_dim in (64, 576):
        k, v = parse_formats("int4-g8+int8-g4", head_dim)
        assert (str(k), k.head_dim, str(v), v.head_dim) == ("int4-g8+int8-g4", 576, "int4-g8", 512)
    k, v = parse_formats("int8-g4", 288)  # of a model
    assert (k.head_dim, v.head_dim) == (288, 256)
    for name, head_dim, words in (
        ("int8/int4", 576, "int8/int4"),
        ("int8", 100, "100"),
        ("int8+bf17", 64, "bf17"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_formats(name, head_dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_have_memory_of_their_own_and_results_pass_the_check(dtype: torch.dtype) -> None:
    first, second = make_inputs(small("int8-g4/int4-g4", dtype=dtype), 2, CPU)
    assert first.q.shape == (2, 4, 64) and first.q.dtype == dtype
    (one,), (two,) = first.segments, second.segments
    assert [str(one.k_format), str(one.v_format)] == ["int8-g4", "int4-g4"]
    assert one.seq_lens.tolist() == [70, 70]
    assert one.capacity == 72  # see rows/spacing.py
    assert not torch.equal(first.q, second.q)
    assert len({x.data_ptr() for s in (one, two) for x in (s.k_rows, s.v_rows)}) == 4
    k, v = one.dequantized(0)
    assert k.std() == pytest.approx(1, abs=0.1) and not torch.equal(k, v)
    error = check(small("int8-g4/int4-g4", dtype=dtype), first)
    assert 0 < error < (3e-3 if dtype == torch.bfloat16 else 8e-4)


@pytest.mark.parametrize("wrong", ["first", "last", "nan", "latents"])
def test_wrong_results_are_an_error_and_nothing_is_timed(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(call: Any) -> Result:
        if wrong == "latents":
            return attend_latents(call._replace(sm_scale=1.1 * call.sm_scale))
        out, lse = attend(call)
        out[-1 if wrong == "last" else 0, 0, 0] += math.nan if wrong == "nan" else 0.1
        return out, lse

    case = latents("int8-g4") if wrong == "latents" else small("int8-g4")
    for name in ("attend", "attend_latents"):
        monkeypatch.setattr(f"kvquant.bench.cases.{name}", spoiled)
    timer, message = FakeTimer(), f"int8-g4, batch 2, {case.heads} heads, T 70: .* not timed"
    with pytest.raises(KVQuantError, match=message):
        measure(case, timer, MACHINE)
    assert timer.calls == []


@pytest.mark.parametrize("case", [small("bf16"), latents("bf16")], ids=lambda case: case.title)
def test_all_calls_of_torch_compute_the_same(case: Case) -> None:
    inputs = make_inputs(case, 1, CPU)
    ours, calls = inputs[0].attend(), torch_calls(case, inputs)
    forms = ["folded"] if case.is_latent else ["folded", "gqa"]
    names = {f"{dtype}, {form}" for dtype in ("16 bit", "float32") for form in forms}
    assert set(calls) == names | {"matmul"}
    for (call,) in calls.values():
        found: Any = call()
        # bfloat16 rounds scores (4 at most), weights and both results, each by 2**-9 of itself
        assert relative_l2(found.reshape(ours.shape), ours) < (4 + 3) * 2**-9


def test_torch_attention_is_taken_at_its_best() -> None:
    def times(call: Any) -> float:
        if getattr(call, "__name__", "") == "attend":
            return 10.0
        if call.func is measuring.matmul_attention:
            return 40.0
        return 20.0 if call.args[1].shape[2] == 2 else 30.0  # folded: two queries of a KV head

    found = measure(small("int8/int4-g4"), FakeTimer(times), MACHINE)
    assert (found["name"], found["batch"], found["seq_len"]) == ("int8/int4-g4", 2, 70)
    assert (found["us"], found["in_a_row_us"]) == (10, 8)
    assert found["gb_per_s"] == pytest.approx(2 * 2 * 70 * (68 + 48) / 10e3)
    assert found["in_a_row_roof_percent"] == pytest.approx(found["gb_per_s"] / 0.8 / 40)
    peer = found["sdpa"]
    assert (peer["name"], peer["in_a_row_name"]) == ("16 bit, folded", "16 bit, folded")
    assert (peer["us"], peer["in_a_row_us"]) == (20, 16)
    assert (peer["ratio"], peer["in_a_row_ratio"]) == (2, 2)


def test_caches_that_stay_in_l2_have_no_time_in_a_row() -> None:
    found = measure(small(), FakeTimer(copies=0), MACHINE)
    assert found["in_a_row_us"] is None and found["sdpa"]["in_a_row_us"] is None
    text = render_results([found])
    assert "in a row" not in text and "int4-g4" in text
    assert "in a row" in render_results([found, measure(small(), FakeTimer(), MACHINE)])


@pytest.mark.parametrize("cause", ["memory", "error", "graph", "rows", "our graph"])
def test_torch_attention_that_cannot_run_is_said(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError if cause == "memory" else RuntimeError

    def limited(case: Case, *rest: Any) -> Any:
        if case.name == "bf16" and cause == "rows":
            raise torch.OutOfMemoryError
        return make_inputs(case, *rest)

    def times(call: Any) -> float:
        whose = "our graph" if getattr(call, "__name__", "") == "attend" else "graph"
        return math.inf if whose == cause else 10.0

    for name in ("sdpa", "matmul_attention") if cause in ("memory", "error") else ():
        monkeypatch.setattr(measuring, name, fail)
    monkeypatch.setattr(measuring, "make_inputs", limited)
    if cause == "our graph":
        with pytest.raises(torch.OutOfMemoryError):
            measure(small(), FakeTimer(times, copies=0), MACHINE)
        return
    found = measure(small(), FakeTimer(times, copies=0), MACHINE)
    assert found["sdpa"] == {} and found["us"] == 10
    assert "none runs" in render_results([found])


@pytest.mark.extra("cuda")
def test_cases_are_rehearsed() -> None:
    cases = [small(), replace(small(), num_q_heads=64, num_kv_heads=1), latents("int8-g4")]
    told = kernels_of([partial(rehearse_case, case) for case in cases], GPUS["sm_90"])
    assert {type(spec).__name__ for spec in told} >= {"DecodeSpec", "MlaSpec"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command find a GPU: the CPU, with a fake timer."""

    class OfGpu(FakeTimer):
        device = torch.device("cuda", 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timer_module, "GraphTimer", lambda seconds: OfGpu())
    monkeypatch.setattr(timer_module, "describe_machine", lambda timer, version: MACHINE)
    monkeypatch.setattr(measuring, "make_inputs", lambda case, n, _: make_inputs(case, n, CPU))
    monkeypatch.setattr(runtime, "gpu_of", lambda index: H200)
    monkeypatch.setattr(command, "compile_kernels", lambda kernels, arch: len(kernels))


def run(*args: object) -> click.testing.Result:
    return CliRunner().invoke(cli.main, ["bench", *map(str, args)])


SMALL = ["--batch", 2, "--seq-len", 40, "--head-dim", 64, "--q-heads", 4, "--kv-heads", 2]


@pytest.mark.extra("cuda")
def test_the_command_measures_checks_and_writes(gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    names = "int4-g4", "int8/int4", "int4-g8+fp8-g4"
    done = run(*(x for name in names for x in ("--format", name)), *SMALL, "--json", path)
    assert done.exit_code == 0, done.output
    first, second, _, *lines = done.stdout.splitlines()
    assert [first, second] == ["GPU, CUDA 13.0, torch 2.11:", "peak bandwidth 4000 GB/s"]
    assert max(map(len, lines)) <= 80
    heads = [i for i, line in enumerate(lines) if line.startswith("format ")]
    assert len(heads) == 2  # our times, then torch's
    for head in heads:
        rows = [line.split()[:4] for line in lines[head + 2 :] if line.startswith("int")]
        wanted = [[name, "2", "4:1" if "+" in name else "4:2", "40"] for name in names]
        assert rows[:3] == wanted
    assert "Timing: int8/int4, batch 2, 4:2 heads, T 40, 66 %" in done.stderr
    found = json.loads(path.read_text())
    assert found["machine"]["read_gb_per_s"] == 4000
    assert [one["name"] for one in found["decode"]] == [*names]


@pytest.mark.extra("hf")
def test_a_model_says_the_shape(tmp_path: Path) -> None:
    """Of latent rows, too."""
    latent = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_attention_heads": 4}
    latent |= {"num_key_value_heads": 4, "kv_lora_rank": 256, "qk_rope_head_dim": 32}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(latent))
    demo, path = EXAMPLES / "llama-demo-5m", tmp_path / "bench.json"
    given = "--device", "cpu", "--format", "int4-g8", "--seq-len", 40, "--seconds", 0.01
    config = json.loads((demo / "config.json").read_text())
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    for model, shape in ((demo, (*heads, 128)), (tmp_path / "model", (4, 1, 288))):
        done = run(model, *given, "--json", path)
        assert done.exit_code == 0, done.output
        (one,) = json.loads(path.read_text())["decode"]
        assert (one["num_q_heads"], one["num_kv_heads"], one["head_dim"]) == shape
    done = run(demo, "--kv-heads", 2)
    assert done.exit_code == 2 and "--kv-heads is the model's: leave it out" in done.stderr


@pytest.mark.parametrize("head_dim", [64, 80, 112, 128, 256])
def test_default_formats_have_the_default_pair_first(head_dim: int) -> None:
    names = command._formats(head_dim)
    assert names[0] == {64: "int8-g4/int4-g4", 80: "int8", 112: "int8", 128: "int8-g4/int4-g4"}.get(
        head_dim, "int8-g4/int4-g8"
    )
    assert len(names) == len(set(names)) == (2 if head_dim in (80, 112) else 8)
    assert all(parse_formats(name, head_dim) for name in names)
    assert all(parse_formats(name, 576) for name in command._formats(576))


@pytest.mark.extra("cuda")
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_what_was_measured_is_printed_and_kept(
    error: type[BaseException], gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(case: Case, *rest: Any) -> dict[str, Any]:
        if case.name == "int8":
            raise error
        return measure(case, *rest)

    monkeypatch.setattr(measuring, "measure", limited)
    path = tmp_path / "bench.json"
    done = run("--format", "int4-g4", "--format", "int8", *SMALL, "--json", path)
    assert [line for line in done.stdout.splitlines() if line.startswith("int4-g4")]
    assert [one["name"] for one in json.loads(path.read_text())["decode"]] == ["int4-g4"]
    if error is KeyboardInterrupt:
        assert done.exit_code == 130 and done.stderr.splitlines()[-1] == "Aborted."
        return
    assert done.exit_code == 0
    named = "int8, batch 2, 4:2 heads, T 40: 0.0 GB of rows are more than fits"
    assert named in done.stderr.splitlines()
    done = run("--format", "int8", *SMALL)
    assert done.exit_code == 2 and "none of the cases fits the GPU" in done.stderr


def test_mistakes_are_named_before_anything_runs(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in (
        (("--format", "int4/int5"), "'int5' is not one of 'int2', 'int3', 'int4', "),
        (("--format", "int4/int4/int4"), "is not FORMAT or FORMAT/FORMAT"),
        (("--json", "x.txt"), "name it NAME.json"),
        (("--q-heads", 7), "--q-heads 7 is not a multiple of --kv-heads 8"),
        (("no-such-model",), "no-such-model"),
    ):
        done = run(*options)
        assert (done.exit_code, done.stdout) == (2, "") and message in done.stderr, options
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--device", "cuda")
    assert done.exit_code == 2
    assert done.stderr == "Error: --device cuda: torch finds no GPU here; use --device cpu\n"


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    given = "--batch", 8, "--seq-len", 1000, "--format", "int4-g4", "--format", "int8-g4+bf16"
    done = run(*given, "--json", path)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["machine"]["read_gb_per_s"] > 100
    backends = {one["sdpa"]["name"].partition(",")[0] for one in found["decode"]}
    assert backends <= {*BACKENDS, "matmul"}
    assert all(one["in_a_row_us"] > 0 and one["us"] > 0 for one in found["decode"])


@pytest.mark.gpu
def test_no_call_of_torch_is_timed_on_a_gpu_that_refuses_it() -> None:
    case = small("bf16", dtype=torch.float16)
    timer = GraphTimer(0.01)
    calls: dict[str, list[Call]] = torch_calls(case.exact, make_inputs(case.exact, 1, timer.device))
    assert measuring.running(calls)


@pytest.mark.parametrize(
    ("nbytes", "copies"), [(1 << 30, 1), (60 << 20, 4), (1 << 20, 240), (1 << 10, 0)], ids=str
)
def test_inputs_outgrow_the_l2_cache(nbytes: int, copies: int) -> None:
    timer = GraphTimer.__new__(GraphTimer)
    timer.l2_bytes = 60 << 20
    assert timer.rotation(nbytes) == copies


def test_l2_is_overwritten_outside_of_the_time_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def noting(what: str) -> Callable[[], None]:
        return lambda: log.append(what)

    @contextmanager
    def capture(graph: object) -> Iterator[None]:
        log.append("capture")
        yield
        log.append("captured")

    event = SimpleNamespace(record=noting("event"), elapsed_time=lambda end: 0.012)  # ms
    graph = SimpleNamespace(replay=noting("replay"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: enable_timing and event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", noting("synchronize"))
    timer: Any = GraphTimer.__new__(GraphTimer)
    timer.scratch, timer.microseconds = SimpleNamespace(zero_=noting("overwrite")), 240.0
    replay = ["overwrite", "event", "replay", "event"]

    assert timer.alone(noting("call")) == pytest.approx(12.0)
    begin = ["call", "synchronize", "capture", "call", "captured"]
    assert log == [*begin, *3 * replay, "synchronize", *20 * replay, "synchronize"]
    log.clear()
    assert timer.alone(lambda: None, limit=11.0) == pytest.approx(12.0)
    assert log.count("replay") == 3
    log.clear()
    assert timer.in_a_row([*map(noting, "01234")]) == 1.0
    assert log[:5] == [str(i) for i in range(5)]  # each once before the capture
    assert log[7:19] == [str(i % 5) for i in range(12)]


def test_calls_of_a_cpu_take_turns() -> None:
    log: list[str] = []
    times = Timer(0.01).alone_each([lambda: log.append("a"), lambda: log.append("b")])
    assert len(times) == 2 and min(times) > 0
    assert log[::2] == ["a"] * (len(log) // 2) and log[1::2] == ["b"] * (len(log) // 2)


def test_a_call_much_slower_than_an_earlier_one_is_timed_roughly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    def alone(timer: object, call: Callable[[], float], limit: float) -> float:
        limits.append(limit)
        return call()

    monkeypatch.setattr(GraphTimer, "alone", alone)

    def large() -> float:
        raise torch.OutOfMemoryError

    timer = GraphTimer.__new__(GraphTimer)
    inf = float("inf")
    assert timer.alone_each([large, lambda: 3.0, lambda: 9.0, lambda: 2.0]) == [inf, 3, 9, 2]
    assert limits == [inf, inf, 6, 6]


AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC

processor\t: 1
model name\t: AMD EPYC
"""
ARM = """processor\t: 0
BogoMIPS\t: 2000.00
CPU part\t: 0xd4f
"""


def test_a_record_of_the_machine_names_processor_versions_and_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Timer, "read_bandwidth", lambda timer: 34.71)
    monkeypatch.setattr(timer_module, "CPUINFO", tmp_path / "cpuinfo")
    named = {"": platform.machine(), AMD: "AMD EPYC (family 25, model 17)"}
    for text, name in (named | {ARM: platform.machine()}).items():
        if text:
            timer_module.CPUINFO.write_text(text)
        machine = describe_machine(Timer(), "0.1.0")
        assert machine.device == name
    assert machine.backend == f"{torch.get_num_threads()} threads"
    assert machine.torch == torch.__version__
    assert machine.kvquant == "0.1.0" and machine.date.endswith("+00:00")
    first, second = render_machine(machine).splitlines()
    assert first.startswith(machine.device) and second == "peak bandwidth 35 GB/s"
