"""Models that draft tokens for the demo model, in vLLM's engine on the CPU (1 minute)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_reference import check_answers
from safetensors.torch import load_file, save_file
from vllm_engines import MODEL, TOKENS, counter, engine, generate, mixed_prompts, noisy_draft_model

from kvquant import CachePlan
from kvquant.engine.settings import Settings
from kvquant.engine.step import FEW, Step, describe_step

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


def weights() -> dict[str, torch.Tensor]:
    return {k: x for path in MODEL.glob("*.safetensors") for k, x in load_file(path).items()}


def eagle(folder: Path) -> dict[str, Any]:
    """An EAGLE head: the demo model's first layer, which sees tokens alone. Its drafts are bad."""
    folder.mkdir()
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


@pytest.mark.parametrize(
    ("make", "layers", "least"),
    [(noisy_draft_model, 4, 0.5), (eagle, 1, 0)],
    ids=["model", "eagle"],
)
def test_drafts_change_no_output_and_have_no_basis(
    make: Any, layers: int, least: float, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is of the model that is served: its layers 0 to 3 are not those of a draft model, and
    EAGLE's is layer 4. Prompts come in chunks of up to 100 tokens, whose past is dequantized, and
    drafts beside them."""
    pasts: list[int] = []

    def note(*given: Any) -> Step:
        step = describe_step(*given)
        for chunk in step.chunks:  # the draft model has a token more than vLLM says on the CPU
            assert int(step.seq_lens[chunk.sequence]) == chunk.past + chunk.end - chunk.first
            pasts.extend([chunk.past] * (chunk.end - chunk.first > FEW))
        return step

    monkeypatch.setattr("kvquant.vllm.backend.describe_step", note)
    rows, prompts = {"plan": plan, "prompts": "rows"}, mixed_prompts()
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 100}
    with engine(rows, speculative_config=make(tmp_path / "drafts"), **options) as llm:
        texts, found = generate(llm, prompts, TOKENS), bases_of(llm)
        drafted = counter(llm, "spec_decode_num_draft_tokens")
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
    check_answers(Settings.parse(rows), prompts, texts, MODEL, most=0.15)
    assert least * drafted < accepted < drafted
    assert max(pasts) > FEW and (0 in pasts or make is eagle)
    known = [[side.fingerprint for side in layer] for layer in CachePlan.load(plan).layers]
    assert [*found.values()] == [*known, *[None] * layers]
