"""vLLM in processes of its own: its second model runner, and two ranks (2 minutes)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_reference import check_answers
from example_plan import example_plan
from transformers import AutoConfig, LlamaConfig
from vllm_engines import MODEL, ROOT, SIZES, random_model, random_prompts
from vllm_server import PATIENCE, process
from vllm_texts import Text, as_tokens

from kvquant import CachePlan
from kvquant.engine.settings import Settings

pytestmark = pytest.mark.filterwarnings("default")
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm_texts import Text

def bases_of(model):
    rows = [one.impl.rows for one in model.modules() if hasattr(one, "impl")]
    return [[basis.fingerprint for basis in one.basis] for one in rows]

if __name__ == "__main__":
    from generate import bases_of  # this file: vLLM sends functions by their names

    options, prompts = json.loads(sys.argv[1])
    how = dict(max_tokens=8, temperature=0, ignore_eos=True, logprobs=5, detokenize=False)
    llm = LLM(**options)
    done = llm.generate(prompts, SamplingParams(**how))
    texts = [text for request in done for text in Text.all_of(request)]
    print("FOUND", json.dumps([texts, llm.apply_model(bases_of)]))
"""


def found_by(command: list[str], log: Path) -> Any:
    """What a script prints behind FOUND."""
    with process([sys.executable, *command], log) as running:
        code = running.wait(timeout=PATIENCE)
    printed = log.read_text()
    assert code == 0, printed[-3000:]
    (line,) = [line for line in printed.splitlines() if "FOUND" in line]
    return json.loads(line.partition("FOUND ")[2])


def test_the_second_model_runner_gives_what_the_same_rows_give(tmp_path: Path) -> None:
    """vLLM's choice on GPUs; here with prompts in chunks, and a draft model beside them."""
    script = ROOT / "tests" / "support" / "model_runner_v2.py"
    rows, prompts, kinds, texts, counts = found_by([str(script)], tmp_path / "log")
    assert "vllm.v1.worker.gpu.model_runner" in kinds
    check_answers(Settings.parse(rows), prompts, [Text.parse(one) for one in texts], MODEL)
    drafted, accepted = counts
    # the model drafts for itself, and drafts other tokens than it chooses at near ties alone
    assert drafted > 30 and accepted > 0.8 * drafted


def test_two_ranks_have_the_bases_of_their_heads(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", LlamaConfig(**SIZES))
    plan = example_plan(2, 2, 64, config=AutoConfig.from_pretrained(model).to_dict())
    plan.tensors["k.offset"][:] = 0.1 * torch.randn(2, 2, 64)
    plan.facts["layers"][-1] = plan.facts["layers"][0]  # none is kept in 16 bit
    plan.save(tmp_path / "plan")
    rows = {"plan": str(tmp_path / "plan"), "k_format": "int8", "v_format": "int8"}
    options: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }
    prompts, script = random_prompts(90, 33), tmp_path / "generate.py"
    script.write_text(GENERATE)
    options |= {"tensor_parallel_size": 2, "additional_config": {"kvquant": rows}}
    given = json.dumps([options, as_tokens(prompts)])
    texts, bases = found_by([str(script), given], tmp_path / "log")
    check_answers(Settings.parse(rows), prompts, [Text.parse(one) for one in texts], model)
    heads = [CachePlan.load(tmp_path / "plan").of_heads([head]).layers for head in range(2)]
    assert bases == [[[basis.fingerprint for basis in layer] for layer in own] for own in heads]
    assert bases[0] != bases[1]
