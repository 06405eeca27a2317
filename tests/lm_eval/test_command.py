"""The harness's own command, with tasks of our own and nothing from elsewhere (30 s)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="needs the lm-eval extra")
from lm_eval.api.registry import get_model

from kvquant.cli.demo import MODEL, TEXT
from kvquant.lm_eval.__main__ import main
from kvquant.lm_eval.model import KvquantLM

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}<answer>"
TASKS = {
    "choosing": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_target: right
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "reading": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with a chat template, and tasks with data of their own."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "model").mkdir()
    for path in MODEL.iterdir():
        (folder / "model" / path.name).symlink_to(path)
    config = folder / "model" / "tokenizer_config.json"
    told = json.loads(config.read_text()) | {"chat_template": TEMPLATE}
    config.unlink()
    config.write_text(json.dumps(told))
    text = TEXT.read_text(encoding="utf-8")
    documents = [
        {"text": text[at * 300 :][:250], "choices": [" the", " of the city"], "right": at % 2}
        for at in range(3)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\ntarget_delimiter: ''\n"
            f"dataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}\n{task}"
        )
    return folder


def run(folder: Path, model_args: str, *options: str) -> subprocess.CompletedProcess[str]:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "kvquant.lm_eval", "--model", "kvquant"]
    command += ["--model_args", model_args, "--include_path", "tasks", "--tasks", *TASKS, *options]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=os.environ | offline
    )


def test_tasks_of_all_kinds_run_by_the_command(folder: Path) -> None:
    given = "pretrained=model,k_format=int8,v_format=int4-g4,recent_len=16"
    options = ["--device", "cpu", "--batch_size", "2", "--output_path", "out", "--log_samples"]
    done = run(folder, given, *options, "--apply_chat_template")
    assert done.returncode == 0, done.stderr
    assert all(f"|{name}" in done.stdout.replace(" ", "") for name in TASKS)
    (file,) = folder.glob("out/*/results*.json")
    found = json.loads(file.read_text())
    assert found["chat_template"] == TEMPLATE
    assert found["config"]["kvquant"] == {
        "cache": "K int8, V int4-g4 + 4 sinks, 16 recent",
        "requests": 6 + 3 + 3,
        "beyond_window": 12,
        "cut": 0,
    }
    samples = {
        path.name.split("_")[1]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("out/*/samples_*")
    }
    lm = get_model("kvquant").create_from_arg_string(
        given.replace("=model", f"={folder / 'model'}"), {"device": "cpu", "batch_size": 1}
    )
    assert isinstance(lm, KvquantLM)
    for sample in samples["choosing"]:
        asked = [(one["arg_0"], one["arg_1"]) for one in sample["arguments"].values()]
        assert asked[0][0].startswith("<user>") and asked[0][0].endswith("<answer>")
        again = lm.loglikelihood([SimpleNamespace(args=one) for one in asked], True)
        for (score, _), told in zip(again, sample["filtered_resps"], strict=True):
            assert float(told[0]) == pytest.approx(score, abs=0.1)
    for sample in samples["writing"]:
        assert "." not in sample["filtered_resps"][0]
    assert 1 < found["results"]["reading"]["bits_per_byte,none"] < 3


def test_what_is_wrong_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    given = "--model kvquant --model_args pretrained=model,kformat=int8 --include_path tasks"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *given.split(), "--tasks", "reading"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("Error: model_args of kvquant have no kformat: there are pretrained")
