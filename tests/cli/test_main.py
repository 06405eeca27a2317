"""The command line (20 s)."""

import errno
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from kvquant import LatentKVCache, __version__
from kvquant import __main__ as entry
from kvquant.cli import console
from kvquant.cli import main as cli
from kvquant.io import atomic as writing
from kvquant.io.checkpoint import load_cache

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "llama-demo-5m"
needs_hf = pytest.mark.extra("hf")


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


def ok(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def as_command(*args: object, **given: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in the project's folder."""
    command = [sys.executable, "-m", "kvquant", *map(str, args)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES.parent, **given)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text((EXAMPLES / "unseen.txt").read_text(encoding="utf-8")[:2000], encoding="utf-8")
    return path


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "raw.safetensors"
    names = [f"layers.{layer}.{side}" for layer in range(2) for side in "kv"]
    save_file({name: torch.randn(1, 2, 20, 128).bfloat16() for name in names}, path)
    return path


@pytest.mark.parametrize("command", [[], *([name] for name in cli.main.commands)], ids=str)
def test_help_has_an_example(command: list[str]) -> None:
    text = ok(*command, "--help")
    assert "Example:\n" in text
    assert f"kvquant {' '.join(command)}".strip() in text.split("Example:")[1]
    assert ok(*command, "-h") == text


@needs_hf
def test_a_prompt_becomes_a_cache_that_can_be_inspected_and_exported(
    tmp_path: Path, prompt: Path
) -> None:
    path, out = tmp_path / "cache.safetensors", tmp_path / "kv.safetensors"
    options = ["--k-format", "int3", "--format", "int2", "--sink-len", 2, "--recent-len", 16]
    options += ["--tokens", 400]
    refused = run("quantize", MODEL, "--prompt", prompt, *options, "-o", path)
    assert refused.exit_code == 2 and "K rows of int3 without a plan" in refused.stderr
    assert not path.exists()
    options += ["--accept-loss"]
    text = ok("quantize", MODEL, "--prompt", prompt, *options, "--chunk", 200, "-o", path)
    assert "int3" in text and "int2" in text
    assert ok("inspect", path) == text

    cache = load_cache(path)
    length = int(cache.seq_lens)
    assert length == 400
    assert [cache.num_layers, cache.sink_len, cache.recent_len] == [4, 2, 16]
    assert [str(cache.layers[3].k_format), str(cache.layers[3].v_format)] == ["int3", "int2"]
    described = json.loads(ok("inspect", path, "--json"))
    assert described["seq_lens"] == [length]
    assert described["creation"]["source"] == "prompt.txt"

    ok("export", path, "--to", "bf16", "-o", out)
    exported = load_file(out)
    assert exported["layers.0.k"].shape == (1, 1, length, 128)
    torch.testing.assert_close(exported["layers.2.v"], cache.dequantized(2, torch.bfloat16)[1])


@needs_hf
def test_a_model_with_latent_attention_gives_latent_rows(tmp_path: Path, prompt: Path) -> None:
    from hf_cases import LATENT_SIZES, hands_latents, random_module

    from kvquant.io.plan import CachePlan

    if not hands_latents:
        pytest.skip("needs transformers 5.17")
    model, path = tmp_path / "deepseek", tmp_path / "cache.safetensors"
    sizes = LATENT_SIZES | {"vocab_size": 8192}
    random_module("deepseek_v3", sizes).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model)
    given = "quantize", model, "--prompt", prompt, "--tokens", 200, "-o", path
    small = "int4-g8+fp8-g4"
    for fmt, options in ("int8-g4", []), (small, ["--format", small]):
        text = ok(*given, *options)
        assert ok("inspect", path) == text and fmt in text
        cache = load_cache(path)
        assert isinstance(cache, LatentKVCache) and cache.seq_lens.tolist() == [200]
        assert {str(one) for one in cache.formats} == {fmt}
    for option in (["--k-format", "int8"], ["--accept-loss"]):
        refused = run(*given, *option)
        assert refused.exit_code == 2 and "this model keeps latent rows" in refused.stderr
    refused = run(*given, "--format", "fp8")
    assert refused.exit_code == 2 and "fp8 is FlashMLA's layout, of 512" in refused.stderr
    texts: list[list[object]] = [["--zero-data"], ["--text", prompt]]  # one that is too short, too
    for chosen in texts:
        reach: list[object] = ["--observed", 256, "--length", 64]
        if "--text" in chosen:
            reach += ["--windows", 2, "--context", 32, "--scored", 4]
        plan = tmp_path / "plan.safetensors"
        told = ok("calibrate", model, *chosen, *reach, "--format", "int4-g4", "-o", plan)
        assert "\nlayers  latents " in told and "\n0-1     int4-g4" in told
    assert "latent rows always to the nearest" in " ".join(ok("calibrate", "--help").split())
    assert "latent rows int4-g4" in ok(*given, "--plan", plan)
    assert load_cache(path, plan=CachePlan.load(plan)).bases
    refused = run("demo", model, "--text", prompt)
    assert refused.exit_code == 2
    assert f"{model} keeps latent rows: the demo compares formats of K and V" in refused.stderr


@pytest.mark.parametrize(
    ("words", "before"),
    [
        ("quantize --format", ""),
        ("quantize --format", "int4-g8+"),
        ("quantize --k-format", ""),
        ("warmup --format", "int8/"),
        ("warmup --format", "int4-g8+"),
    ],
)
def test_formats_are_completed(words: str, before: str) -> None:
    shell = ShellComplete(cli.main, {}, "kvquant", "_KVQUANT_COMPLETE")
    items = shell.get_completions(words.split(), f"{before}int8-g")
    assert [item.value for item in items] == [f"{before}int8-g{groups}" for groups in (2, 4, 8)]


def test_raw_tensors_become_a_cache(tmp_path: Path, raw: Path) -> None:
    path = tmp_path / "cache.safetensors"
    path.write_text("old")
    text = ok("quantize", "--from", raw, "--v-format", "fp8", "--max-seq-len", 64, "-o", path)
    assert "warning: no token is packed: the first 4 and the last 128" in text
    cache = load_cache(path)
    assert [str(cache.layers[1].k_format), str(cache.layers[1].v_format)] == ["int8-g4", "fp8"]
    assert [cache.max_seq_len, cache.seq_lens.tolist()] == [64, [20]]


def test_exports_to_other_layouts_say_what_was_lost(tmp_path: Path, raw: Path) -> None:
    path = tmp_path / "cache.safetensors"
    ok("quantize", "--from", raw, "--format", "int4", "-o", path)
    out = tmp_path / "fb.safetensors"
    first, *notes = ok("export", path, "--to", "fbgemm", "-o", out).splitlines()
    assert first == f"{out}: fbgemm, {out.stat().st_size / 1024:.4g} KiB"
    assert "16-bit rows" in notes[0]


SMALL = ("--observed", 256, "--windows", 2, "--context", 32, "--scored", 4)


def test_calibration_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run("calibrate", MODEL, "-o", "plan.safetensors")
    assert result.exit_code == 2 and "start it without torchrun" in result.output


@needs_hf
def test_calibration_prints_a_table_and_writes_a_plan(tmp_path: Path) -> None:
    from kvquant.io.plan import CachePlan

    path, figures = tmp_path / "plan.safetensors", tmp_path / "plan.json"
    text = EXAMPLES / "unseen.txt"
    printed = ok("calibrate", MODEL, "--text", text, *SMALL, "-o", path, "--json", figures)
    words = " ".join(printed.split())
    assert "256 tokens observed. 8 others scored after 32 tokens of context in 2 passages:" in words
    assert "Too little text for a verdict. The cache is 3.8 times smaller" in words
    assert "Only 8 tokens of 2 passages were scored" in words and "100.0 %" not in words
    assert f"see it: kvquant report {path} \\ -o " in words  # a long name breaks the line
    for name in ("16 bit", "int4, plain", "this plan", "layers  K ", "0  "):
        assert any(line.startswith(name) for line in printed.splitlines()), name
    plan = CachePlan.load(path)
    assert plan.formats == [("int4", "int4")] * 4
    told = json.loads(figures.read_text())
    assert told["verdict"]["kind"] == "notice" and len(told["next"]) == 4
    assert told["measured"] == plan.facts["measured"]
    assert {file.name for file in tmp_path.iterdir()} == {path.name, figures.name}


@needs_hf
def test_what_is_wrong_goes_to_stderr_and_a_limit_that_cannot_be_met_is_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquant.hf.model import CachedModel

    monkeypatch.setattr(CachedModel, "max_positions", 35)
    path = tmp_path / "plan.safetensors"
    given = ("--text", EXAMPLES / "unseen.txt", *SMALL, "--max-kl", 1e-9, "-o", path)
    result = run("calibrate", MODEL, *given)
    assert result.exit_code == 3
    assert "Not met: the limit of 1e-09 nats per token. The best plan has a KL of " in result.stderr
    assert "Limit not met." in result.stdout and path.is_file()
    assert "Most of it comes from layer" in " ".join(result.stdout.split())
    assert "Warning: a passage has 36 tokens, the model was made for 35" in result.stderr
    assert "Warning" not in result.stdout


@needs_hf
def test_a_cache_of_a_plan_is_made_inspected_and_exported(tmp_path: Path, prompt: Path) -> None:
    from kvquant.io.plan import CachePlan

    plan, cache, out = (tmp_path / f"{name}.safetensors" for name in ("plan", "cache", "out"))
    ok("calibrate", MODEL, "--zero-data", "--observed", 512, "--dtype", "bfloat16", "-o", plan)
    assert CachePlan.load(plan).facts["settings"]["dtype"] == "bfloat16"
    table = ok("quantize", MODEL, "--prompt", prompt, "--plan", plan, "-o", cache)
    assert "rows are stored in the bases of a plan" in table
    ok("export", cache, "--to", "bf16", "--plan", plan, "-o", out)
    assert load_file(out)["layers.0.k"].dtype == torch.bfloat16
    result = run("export", cache, "--to", "bf16", "-o", out)
    assert result.exit_code == 2 and "in the bases of a plan" in result.stderr
    assert "(--plan FILE)" in result.stderr
    result = run("export", cache, "--to", "fbgemm", "--plan", plan, "-o", out)
    assert "which fbgemm does not know" in result.stderr


@needs_hf
def test_the_demo_prints_and_writes_its_figures(
    tmp_path: Path, prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquant.cli import demo

    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "SCHEMES", demo.SCHEMES[:2])
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, scored=4, continued=2))
    path = tmp_path / "demo.json"
    text = ok("demo", MODEL, "--text", prompt, "--context", 100, "--json", path)
    assert "KL" in text
    found = [row["name"] for row in json.loads(path.read_text())["caches"]]
    assert found[1:] == ["bf16", "default + window", "int4-g4 + window"]


READ, TAKE = "quantize {model} --prompt {prompt}", "quantize --from {raw}"
OUT = "-o {tmp}/x.safetensors"
BAD = [  # the command, and the error
    ("nope", "No such command"),
    (READ, "Missing option '-o'"),
    ("inspect nope.safetensors", "File 'nope.safetensors' does not exist"),
    ("quantize {tmp}/nope --prompt {prompt} -o x.safetensors", "does not exist"),
    ("quantize {model} -o x.safetensors", "give either MODEL and --prompt"),
    ("quantize {model} --from {raw} -o x.safetensors", "give either MODEL and --prompt"),
    (f"{READ} --format int5 -o x.safetensors", "'int5' is not one of 'int2', 'int3', 'int4', "),
    (f"{READ} {OUT} --k-format q8_0", "'fp16'; the nearest here is 'int8'"),
    (f"{READ} {OUT} --format int4+int4+int4", "'int4+int4+int4' is not FORMAT or FORMAT+FORMAT"),
    (f"{READ} {OUT} --format int8+fp8", "int8+fp8 is of latent rows, and {model} has K and V"),
    (f"{TAKE} {OUT} --format int8+fp8", "int8+fp8 is of latent rows, and {raw} has K and V: give"),
    (f"{READ} --plan {{raw}} --format fp8 {OUT}", "--plan says the formats"),
    (f"{TAKE} --format int4 --k-format int8 --v-format int8 {OUT}", "leave nothing to --format"),
    (f"{TAKE} --chunk 512 {OUT}", "--chunk is for MODEL"),
    (f"{TAKE} --tokens 5 {OUT}", "--tokens is for MODEL"),
    (f"{TAKE} --accept-loss {OUT}", "--accept-loss is for MODEL"),
    (f"{READ} --plan {{raw}} --accept-loss {OUT}", "leave --from, formats and --accept-loss out"),
    (f"calibrate {{model}} --zero-data --device meta {OUT}", "no kernel serves device 'meta'"),
    (f"calibrate {{model}} --zero-data --device tpu {OUT}", "use 'cpu' or 'cuda'"),
    ("evaluate {model} --cache int8 --device cuda:7", "device 'cuda:7' cannot be used: "),
    ("check {model} --device cuda:7", "device 'cuda:7' cannot be used: "),
    (f"calibrate {{model}} --zero-data --windows 2 {OUT}", "--windows needs a text to score"),
    (f"calibrate {{model}} --zero-data --sink-len 2 {OUT}", "--sink-len needs a text to score"),
    (f"calibrate {{model}} --zero-data --budget 4.2 {OUT}", "asks for rows of 2 and 3 bits, which"),
    (f"calibrate {{model}} --text {{prompt}} --max-kl nan {OUT}", "nan is not a finite number"),
    (f"{TAKE} -o {{tmp}}/nope/x.safetensors", "is not a folder"),
    ("inspect ''", "File '' does not exist"),
    (f"{TAKE} -o ''", "a file without a name cannot be written: name it NAME.safetensors"),
    ("report {raw} -o {tmp}/x.pdf", "x.pdf cannot be written: name it NAME.html or NAME.htm"),
    ("inspect {prompt}", "is no safetensors file"),
    ("inspect {raw}", "raw.safetensors"),
    (f"calibrate {{tmp}}/folder --text {{prompt}} {OUT}", "it has no config.json"),
    (f"calibrate {{model}} --zero-data --max-kl 1 {OUT}", "--max-kl needs a text to score"),
    (f"calibrate {{model}} --format int4 --budget 5 {OUT}", "give a format, or --max-kl and --bud"),
    (f"calibrate {{model}} --text {{prompt}} {OUT}", "tokens are too few"),
    (f"{READ} --max-seq-len 9 {OUT}", "tokens, --max-seq-len is 9: use "),
    (f"{TAKE} --max-seq-len 5 {OUT}", "use max_seq_len (--max-seq-len) 20 or more"),
    (f"{TAKE} --max-seq-len 100000000000 -o {{tmp}}/x", "100000000000 is not in the range"),
    (f"{TAKE} --max-seq-len 2147483647 {OUT}", "GiB, more than there is: use a smaller"),
    (f"{TAKE} -o {{tmp}}/./raw.safetensors", "raw.safetensors is read: give another name to write"),
    ("export {raw} --to bf16 -o {raw}", "raw.safetensors is read: give another name to write to"),
    ("export {raw} --to bf16 -o {raw}.index.json", "name it NAME.safetensors"),
    ("calibrate {model} --text {raw} -o {raw}", "raw.safetensors is read"),
    ("calibrate {model} --text {prompt} --held {raw} -o {raw}", "raw.safetensors is read"),
    (f"{READ} --plan {{raw}} -o {{raw}}", "raw.safetensors is read"),
    ("export {prompt} --to bf16 --plan {raw} -o {raw}", "raw.safetensors is read"),
    (f"{READ} -o {{model}}/model.safetensors", "model.safetensors is in {model}, which is read"),
    ("calibrate {model} --zero-data -o {model}/plan.safetensors", "plan.safetensors is in"),
    (f"{TAKE} -o {{model}}/model.safetensors", "holds a model, which is left as it is"),
    ("bench --json {model}/config.json", "holds a model, which is left as it is"),
    ("demo {model} --text {prompt} --json {tmp}/link.json", "link.json is in {model}, which is"),
    ("demo --text {prompt} --json {prompt}", "name it NAME.json"),
    (f"{TAKE} -o {{tmp}}/full.safetensors", "full.safetensors cannot be written, it is a device"),
    ("bench --json {tmp}/pipe.json", "pipe.json cannot be written, it is a device, a pipe or the"),
    (f"{READ} -o {{tmp}}/loop.safetensors", "loop.safetensors cannot be written: Too many levels"),
    (f"calibrate {{model}} --zero-data --budget 2.2 {OUT}", "a budget of 2.2 bits is below 2.25"),
    (f"{TAKE} -o {{tmp}}/{{long}}.safetensors", "File name too long"),
    (f"quantize {{model}} --prompt /dev/zero {OUT}", "/dev/zero has more than 1 MiB: give a part"),
    ("bench --seconds -1", "-1.0 is not in the range x>0"),
    ("inspect {tmp}", "is a directory"),
    (f"quantize {{model}} --prompt {{tmp}}/empty.txt {OUT}", "no text"),
    (f"quantize {{model}} --prompt {{tmp}}/binary.txt {OUT}", "UTF-8"),
]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _refuse_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a system does whose memory is short; others would swap."""
    zeros = torch.zeros

    def limited(*shape: Any, **options: Any) -> torch.Tensor:
        x = zeros(*shape, **{**options, "device": "meta"})
        if x.nbytes > 1 << 32:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", limited)


@needs_hf
@pytest.mark.parametrize("command, message", BAD, ids=[message for _, message in BAD])
def test_mistakes_are_one_line_on_stderr_and_exit_code_2(
    command: str,
    message: str,
    tmp_path: Path,
    prompt: Path,
    raw: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(MODEL / "config.json")
    (tmp_path / "full.safetensors").symlink_to("/dev/full")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(tmp_path / "pipe.json")
    monkeypatch.setattr(console, "MAX_TEXT", 1 << 20)
    names: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "raw": raw,
        "tmp": tmp_path,
        "long": 240 * "x",
    }
    _refuse_large_tensors(monkeypatch)
    before = _contents(tmp_path), _contents(MODEL)
    result = run(*(word.format(**names) for word in shlex.split(command)))
    assert result.exit_code == 2
    assert result.stdout == ""
    *usage, error = result.stderr.splitlines()
    assert error.startswith("Error: ") and message.format(**names) in error
    if usage:  # of the command line itself
        assert usage[0].startswith("Usage: main ") and "Try 'main " in usage[1]
    assert (_contents(tmp_path), _contents(MODEL)) == before


FAILED, OVERFLOW = "DefaultCPUAllocator: can't allocate memory", "size calculation overflowed with"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(FAILED), RuntimeError(OVERFLOW)])
def test_a_bench_beyond_memory_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquant.bench import measure
    from kvquant.bench.timer import Timer

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Timer, "read_bandwidth", lambda timer: 1.0)
    monkeypatch.setattr(measure, "measure", fail)
    result = run("bench", "--device", "cpu", "--seq-len", 2_000_000_000)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "Error: these sizes take more memory than there is: use a smaller --seq-len or --batch"
    )
    monkeypatch.setattr(Timer, "read_bandwidth", lambda timer: 1 / 0)
    assert isinstance(run("bench", "--device", "cpu").exception, ZeroDivisionError)


def test_python_runs_the_package_as_the_command() -> None:
    assert __version__ in as_command("--version", stdout=subprocess.PIPE).stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["inspect", "--help"]], ids=" ".join)
def test_help_that_cannot_be_written_is_told(args: list[str]) -> None:
    with open("/dev/full", "wb") as file:
        done = as_command(*args, stdout=file)
    assert (done.returncode, done.stderr) == (2, "Error: No space left on device\n")


def test_interrupts_are_no_tracebacks_and_bugs_keep_theirs(
    monkeypatch: pytest.MonkeyPatch, raw: Path
) -> None:
    command = "quantize", "--from", raw, "-o", raw.parent / "x.safetensors"
    saves = "kvquant.io.checkpoint.save_cache"
    monkeypatch.setattr(saves, lambda *_, **__: 1 / 0)
    assert isinstance(run(*command).exception, ZeroDivisionError)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saves, interrupt)
    result = run(*command)
    assert result.exit_code == 130
    assert result.stderr.strip() == "Aborted."


@pytest.fixture
def _default_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_interrupts")
def test_interrupts_at_any_time_are_no_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def translated() -> None:
        try:
            interrupted()
        except KeyboardInterrupt:
            raise ImportError("a library could not be loaded") from None

    def told() -> None:  # as click does it
        try:
            interrupted()
        except KeyboardInterrupt:
            sys.exit(1)

    for command, printed in ((interrupted, "Aborted.\n"), (translated, "Aborted.\n"), (told, "")):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setattr(cli, "main", command)
        with pytest.raises(SystemExit) as caught:
            entry.main()
        assert caught.value.code == 130
        assert capsys.readouterr() == ("", printed)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # while Python ends
    monkeypatch.setattr(cli, "main", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        entry.main()


@pytest.mark.usefixtures("_default_interrupts")
@pytest.mark.filterwarnings("default")
def test_warnings_of_libraries_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(cli, "main", lambda: warnings.warn("no lock\n  here", stacklevel=1))
    entry.main()
    assert capsys.readouterr().err == "Warning: no lock here\n"


def test_readers_that_have_seen_enough_are_no_error(raw: Path) -> None:
    path = raw.parent / "c.safetensors"
    ok("quantize", "--from", raw, "-o", path)
    read, write = os.pipe()
    os.close(read)
    done = as_command("inspect", path, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_figures_are_kept_where_nobody_reads_the_table(
    tmp_path: Path, prompt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvquant.cli import demo

    def closed(_: object) -> str:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(demo, "run_demo", lambda *_, **__: {"kl": math.nan, "ms": 1.5})
    monkeypatch.setattr(demo, "render_demo", closed)
    path = tmp_path / "demo.json"
    path.write_text("old")
    assert run("demo", "--text", prompt, "--json", path).exit_code == 1
    assert json.loads(path.read_text()) == {"kl": None, "ms": 1.5}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo, "render_demo", lambda _: "the table")
    monkeypatch.setattr(writing, "save_text", full)
    result = run("demo", "--text", prompt, "--json", path)
    assert result.exit_code == 2
    assert result.stdout == "the table\n" and "No space left on device" in result.stderr
    assert json.loads(path.read_text()) == {"kl": None, "ms": 1.5}
