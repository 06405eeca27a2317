"""The examples run (40 s)."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import mark_slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_every_example_is_tested_and_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    names = {name.removeprefix("test_").removesuffix("_runs") for name in globals()}
    assert {path.stem for path in scripts} <= names
    for path in scripts:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path


def test_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    said = r"([\d,]+) bytes in place of ([\d,]+); the last output is (\d+)% off\n"
    taken, in_16_bit, error = re.fullmatch(said, capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert 0.4 < int(taken.replace(",", "")) / int(in_16_bit.replace(",", "")) < 0.5
    # of V: 32 normal numbers span 4.1, in 15 steps, an error of 8 %; K has 8 bits
    assert 5 < int(error) < 12


@pytest.mark.extra("hf")
def test_generate_hf_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "generate_hf.py"))["main"](120)
    *turns, memory = capsys.readouterr().out.strip().splitlines()
    assert len(turns) == 2 and turns[1].startswith("…") and "The city |" in turns[1]
    took, in_16_bit = map(int, re.findall(r"(\d+) bytes, in 16 bit (\d+)", memory)[0])
    assert took < in_16_bit


def check_surely(prompt: str, new_tokens: int, *, question: str = "", **rows: Any) -> None:
    """Check that the demo model in float32 goes on from these words alike on any processor."""
    from hf_cases import WITH_LOGITS, sure_text
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvquant import QuantizedCache

    folder = EXAMPLES / "llama-demo-5m"
    options = {"attn_implementation": "kvquant", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, more = (tokenizer(x, return_tensors="pt").input_ids.long() for x in (prompt, question))
    cache = QuantizedCache(model, **rows)
    if question:  # the prompt is read before it
        with torch.no_grad():
            model(ids, **cache.argument, logits_to_keep=1)
    given = {"max_new_tokens": new_tokens, **cache.argument, **WITH_LOGITS}
    sure_text(model.generate(torch.cat([ids, more], dim=1), **given))


@pytest.mark.extra("hf")
def test_batch_decode_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLES / "batch_decode.py"), run_name="__main__")
    *_, short, _, alone = capsys.readouterr().out.strip().splitlines()
    check_surely(found["PROMPTS"][1], 16, k_format="int8", v_format="int8")
    assert short == alone and found["PROMPTS"][1] in alone


@pytest.mark.extra("hf")
@pytest.mark.slow
def test_prompt_cache_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLES / "prompt_cache.py"))
    found["main"]()
    counts, memory, file = capsys.readouterr().out.strip().splitlines()
    check_surely(found["TEXT"], 16, question=found["QUESTION"])
    assert " tokens in " in counts
    assert memory.removeprefix("in memory: ") == file.removeprefix("from the file: ")


@pytest.mark.extra("hf")
@pytest.mark.slow
def test_speculative_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "speculative.py"), run_name="__main__")
    check_surely(example["TEXT"], 40, k_format="int8", v_format="int8")
    found = [line.split(": ", 1) for line in capsys.readouterr().out.strip().splitlines()]
    (alone, text), (drafted, same) = found
    assert text == same
    assert int(drafted.split()[1]) < int(alone.split()[1]) == 40


@pytest.mark.extra("hf")
@pytest.mark.parametrize("latents", mark_slow([256, 512], [256]))
def test_train_mla_runs(
    latents: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few steps of a small one; the model is one whose caches keep latent rows."""
    from hf_cases import hands_latents

    from kvquant import CachedModel, LatentKVCache

    if not hands_latents:
        pytest.skip("needs transformers 5.17")
    sizes = ["--steps", "12", "--layers", "2", "--batch", "4", "--length", "64"]
    sizes += ["--latents", str(latents)]
    monkeypatch.setattr(sys, "argv", ["train_mla.py", str(tmp_path), *sizes])
    runpy.run_path(str(EXAMPLES / "train_mla.py"), run_name="__main__")
    first, last = re.findall(r"loss ([\d.]+) nats", capsys.readouterr().out)
    assert float(last) < float(first) - 0.1
    model = CachedModel.from_pretrained(tmp_path)
    cache = model.new_cache(1, 16, fmt="int4-g8+int8-g4")
    assert isinstance(cache, LatentKVCache)
    assert (cache.formats[0].latent_dim, cache.formats[0].rope_dim) == (latents, 64)
    model.prefill(cache, torch.tensor([model.encode("The city of Manila")]))


@pytest.mark.extra("hf")
def test_serve_requests_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "serve_requests.py"), run_name="__main__")
    counts, *answers = capsys.readouterr().out.strip().splitlines()
    found, swaps = map(int, re.findall(r"(\d+) (?:tokens|were)", counts)[:2])
    assert found > 0 < swaps, "prefixes are shared, and the memory is too small for all"
    prompts, cache = example["prompts"], example["cache"]
    assert cache.nbytes <= 800_000 and max(map(len, prompts)) > 2 * example["STEP"]
    assert len(answers) == len(prompts) > len(cache.state.lengths)
    for answer in answers:
        # INT8 rows move a logit of these texts by up to 0.13, and each of the two may move
        assert float(re.findall(r"at most ([\d.]+) below", answer)[0]) < 0.4


def test_decode_paged_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "decode_paged.py"), run_name="__main__")
    first, second, last = capsys.readouterr().out.strip().splitlines()
    assert first == "a: 0 of 501 tokens were there"
    assert second == "b: 324 of 502 tokens were there"
    assert last == "{'a': 520, 'b': 521, 'c': 521} 53 free pages"


@pytest.mark.slow
def test_long_context_ranks_runs(tmp_path: Path) -> None:
    found = []
    for world in (1, 2):
        script = [str(EXAMPLES / "long_context_ranks.py"), "2048", "3"]
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        done = subprocess.run([sys.executable, *ranks, *script], capture_output=True, text=True)
        assert not done.returncode, done.stderr
        counts, times = done.stdout.splitlines()
        assert counts.startswith(f"[2051] tokens on {world} ranks")
        found.append(float(times.rpartition(" ")[2]))
    assert abs(found[0] - found[1]) < 0.2  # other tokens are in 16 bit


def test_the_bundled_model_and_text_name_their_sources() -> None:
    attribution = (EXAMPLES / "llama-demo-5m" / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "CC BY-SA 3.0" in attribution
    assert (EXAMPLES / "llama-demo-5m" / "wikipedia_articles.tsv.xz").is_file()
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert "unseen.txt" in readme and "CC BY-SA" in readme
