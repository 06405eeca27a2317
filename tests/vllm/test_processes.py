"""vLLM in processes of its own: its second model runner, and two ranks (2 minutes)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan
from transformers import AutoConfig, LlamaConfig
from vllm_engines import MOST_MOVE, ROOT, SIZES, engine, generate, random_model
from vllm_server import PATIENCE, process
from vllm_texts import Text, check_alike

from kvquant import CachePlan
from kvquant.io.model_id import model_identity

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

    options, prompts, tokens = json.loads(sys.argv[1])
    how = dict(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=5, detokenize=False)
    llm = LLM(**options)
    done = [Text.of(request.outputs[0]) for request in llm.generate(prompts, SamplingParams(**how))]
    print("FOUND", json.dumps([done, llm.apply_model(bases_of)]))
"""


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Not here: vLLM reads what it has not written, and throws it away."""


def test_the_second_model_runner_gives_what_its_own_attention_gives(tmp_path: Path) -> None:
    """vLLM's choice on GPUs; here with prompts in chunks, and with a draft model."""
    log = tmp_path / "log"
    script = ROOT / "tests" / "support" / "model_runner_v2.py"
    with process([sys.executable, str(script)], log) as running:
        code = running.wait(timeout=PATIENCE)
    printed = log.read_text()
    assert code == 0, printed[-3000:]
    lines = [line.partition("FOUND ")[2] for line in printed.splitlines() if "FOUND" in line]
    kinds, texts, counts = zip(*map(json.loads, lines), strict=True)
    assert all("vllm.v1.worker.gpu.model_runner" in one for one in kinds)
    wanted, *others = ([Text.parse(one) for one in of_engine] for of_engine in texts)
    for found in others:
        check_alike(found, wanted, MOST_MOVE)
    drafted, accepted = counts[2]
    # the model drafts for itself, and drafts other tokens than it chooses at near ties alone
    assert drafted > 30 and accepted > 0.8 * drafted


def test_two_ranks_have_the_bases_of_their_heads_and_give_what_one_gives(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", LlamaConfig(**SIZES))
    plan = example_plan(2, 2, 64)
    torch.manual_seed(
        1
    )  # with others two tokens may be equally likely, and ranks sum in another order
    plan.tensors["k.offset"][:] = 0.1 * torch.randn(2, 2, 64)
    layers, config = plan.facts["layers"], AutoConfig.from_pretrained(model).to_dict()
    layers[-1] = layers[0]  # none is kept in 16 bit
    CachePlan({**plan.facts, "model": model_identity(config)}, plan.tensors).save(tmp_path / "plan")
    rows = {"plan": str(tmp_path / "plan"), "k_format": "int8", "v_format": "int8"}
    options: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }
    prompts = [{"prompt_token_ids": [7 * i * i % 256 for i in range(n)]} for n in (90, 33)]
    tokens, log, script = 8, tmp_path / "log", tmp_path / "generate.py"
    with engine(rows, **options) as llm:
        one = generate(llm, prompts, tokens, detokenize=False)
    script.write_text(GENERATE)
    options |= {"tensor_parallel_size": 2, "additional_config": {"kvquant": rows}}
    command = [sys.executable, str(script), json.dumps([options, prompts, tokens])]
    with process(command, log) as running:
        code = running.wait(timeout=PATIENCE)
    printed = log.read_text()
    assert code == 0, printed[-3000:]
    (line,) = [line for line in printed.splitlines() if "FOUND" in line]
    found, bases = json.loads(line.partition("FOUND ")[2])
    assert [Text.parse(text).ids for text in found] == [text.ids for text in one]
    heads = [CachePlan.load(tmp_path / "plan").of_heads([head]).layers for head in range(2)]
    assert bases == [[[basis.fingerprint for basis in layer] for layer in own] for own in heads]
    assert bases[0] != bases[1]
