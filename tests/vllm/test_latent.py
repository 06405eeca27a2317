"""Models with latent attention in vLLM's engine on the CPU, compared with transformers whose cache
rounds latents as rows do (1 minute)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_reference import check_answers
from latent_plans import latent_plan
from transformers import AutoModelForCausalLM, DeepseekV3Config
from vllm_engines import NGRAM, begun_of, counter, engine, generate, random_prompts

from kvquant import LatentFormat
from kvquant.engine.settings import LatentSettings

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
LATENT, ROPE, TOKENS = 512, 64, 12
SIZES: Any = {"head_dim": ROPE}  # which transformers' config has, and its signature has not
CONFIG = DeepseekV3Config(
    **SIZES,
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=2,  # no router's choice hangs on a rounding
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=LATENT,
    qk_rope_head_dim=ROPE,
    qk_nope_head_dim=32,
    v_head_dim=32,
    max_position_embeddings=1024,
)
# vLLM's own kernel of the CPU for RoPE is wrong for queries of three axes, as these are
TORCH_ROPE = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model in a folder."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIG)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5 * (3 if "lm_head" in name else 1))
    folder = tmp_path_factory.mktemp("deepseek") / "model"
    module.float().save_pretrained(folder)
    return str(folder)


def latent_engine(model: str, rows: dict[str, str], **options: Any) -> Any:
    return engine(rows, model=model, skip_tokenizer_init=True, **TORCH_ROPE, **options)


def plan_of(path: Path) -> str:
    """A plan of the model, with a random basis for each layer."""
    plan = latent_plan(2, CONFIG.to_dict(), fmt=("int4-g8", "int8-g4"))
    plan.facts["layers"][-1] = plan.facts["layers"][0]  # none is kept in 16 bit
    plan.save(path)
    return str(path)


@pytest.mark.parametrize("name", ["fp8", "int4-g8+int8-g4"])
def test_pages_hold_latent_rows(name: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without AMX, where vLLM has pages of another size, and no chunks."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    rows, prompts = {"format": name}, random_prompts(60, 17, 250)
    row_bytes = LatentFormat.parse(name).row_bytes
    with latent_engine(model, rows) as llm:
        texts = generate(llm, prompts, TOKENS, detokenize=False)
        cache = llm.llm_engine.vllm_config.cache_config
        size = cache.block_size
        assert {(x.shape[1:], x.dtype) for x in _pages(llm)} == {((size, row_bytes), torch.uint8)}
        assert cache.num_gpu_blocks == (64 << 20) // (size * row_bytes * CONFIG.num_hidden_layers)
    check_answers(LatentSettings.parse(rows), prompts, texts, model)


def _pages(llm: Any) -> list[torch.Tensor]:
    (found,) = llm.apply_model(
        lambda model: [layer.self_attn.mla_attn.mla_attn.kv_cache for layer in model.model.layers]
    )
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("from_rows", [False, True], ids=["16-bit", "rows"])
def test_chunks_the_prefix_cache_plans_and_drafts(
    from_rows: bool, model: str, tmp_path: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM allows chunks of prompts and prefix caching beside MLA on processors with AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    rows, options = {"format": "int8-g4"}, {"max_num_batched_tokens": 100}
    if from_rows:  # then it does not matter what chunks prompts came in
        rows = {"plan": plan_of(tmp_path / "plan"), "prompts": "rows"}
    drafts = {"speculative_config": {**NGRAM, "prompt_lookup_min": 1}} if from_rows else {}
    prompts = [([*range(3, 12)] * 28)[:250]]
    with latent_engine(model, rows, **options, **drafts) as llm:
        assert {one.kind for one in begun_of(llm, monkeypatch)} == {one.kind for one in told}
        assert llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        texts = [text for _ in "12" for text in generate(llm, prompts, TOKENS, detokenize=False)]
        size = llm.llm_engine.vllm_config.cache_config.block_size
        assert [text.found for text in texts] == [0, 249 // size * size]
        if from_rows:
            many = random_prompts(130, 60, 210, 90, 33, 1)
            texts += generate(llm, many, TOKENS, detokenize=False)
            assert counter(llm, "spec_decode_num_draft_tokens") > 20
    given = 2 * prompts + (many if from_rows else [])
    check_answers(LatentSettings.parse(rows), given, texts, model, chunk=100)
