"""Models that draft tokens for the demo model, in vLLM's engine on the CPU (1 minute)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_engines import (
    BF16,
    MODEL,
    MOST_MOVE,
    TOKENS,
    counter,
    engine,
    generate,
    noisy_draft_model,
)
from vllm_texts import check_alike, check_same_rows

from kvquant import CachePlan
from kvquant.engine.step import FEW, Step, describe_step

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Not here: vLLM reads what it has not written, and throws it away."""


def weights() -> dict[str, torch.Tensor]:
    return {k: x for path in MODEL.glob("*.safetensors") for k, x in load_file(path).items()}


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo model with noise in its weights."""
    return noisy_draft_model(tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An EAGLE head: the demo model's first layer, which sees tokens alone. Its drafts are bad."""
    folder = tmp_path_factory.mktemp("eagle")
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    first = "model.layers.0."
    own = {k.removeprefix("model."): x for k, x in weights().items() if k.startswith(first)}
    del own["layers.0.input_layernorm.weight"]
    one = torch.eye(config["hidden_size"])
    own["fc.weight"] = torch.cat([one, 0 * one], 1).to(own["layers.0.mlp.up_proj.weight"].dtype)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}


def bases_of(llm: Any) -> dict[str, Any]:
    """Of each layer the fingerprints of its bases, or None."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    bases = {name: layer.impl.rows.basis for name, layer in layers.items()}
    return {
        name: None if basis is None else [side.fingerprint for side in basis]
        for name, basis in bases.items()
    }


def test_a_draft_model_changes_no_output(
    own: Any, draft_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of up to 100 tokens, whose past is dequantized, and drafts beside them."""
    prompts, wanted = own
    pasts: list[int] = []

    def note(*given: Any) -> Step:
        step = describe_step(*given)
        for chunk in step.chunks:  # the draft model has a token more than vLLM says on the CPU
            assert int(step.seq_lens[chunk.sequence]) == chunk.past + chunk.end - chunk.first
            pasts.extend([chunk.past] * (chunk.end - chunk.first > FEW))
        return step

    monkeypatch.setattr("kvquant.vllm.backend.describe_step", note)
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 100}
    with engine(BF16, speculative_config=draft_model, **options) as llm:
        found = generate(llm, prompts, TOKENS)
        drafted = counter(llm, "spec_decode_num_draft_tokens")
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
    check_alike(found, wanted, MOST_MOVE)
    assert 0.5 * drafted < accepted < drafted
    assert 0 in pasts and max(pasts) > FEW


def test_drafts_beside_a_plan_have_no_basis(
    own: Any, plan: str, draft_model: Any, eagle: Any
) -> None:
    """A plan is of the model that is served: its layers 0 to 3 are not those of a draft model, and
    EAGLE's is layer 4."""
    prompts = own[0][-6:]
    options = {"enable_prefix_caching": False}
    with engine({"plan": plan}, **options) as llm:
        wanted, known = generate(llm, prompts, TOKENS), bases_of(llm)
    layers = CachePlan.load(plan).layers
    assert [*known.values()] == [[side.fingerprint for side in layer] for layer in layers]
    for config, count in ((draft_model, 4), (eagle, 1)):
        with engine({"plan": plan}, speculative_config=config, **options) as llm:
            check_same_rows(generate(llm, prompts, TOKENS), wanted)
            assert counter(llm, "spec_decode_num_accepted_tokens") > 0
            found = bases_of(llm)
        assert {name: found.pop(name) for name in known} == known
        assert [*found.values()] == [None] * count
