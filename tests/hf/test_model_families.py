"""Families of models: right to rounding, or refused by name; none wrong, none crashing (8 s).

Each is a tiny random model of transformers' own code. Sequences of unequal lengths are read in
chunks and decoded, and compared with each sequence alone on transformers' own cache, K and V
rounded alike. A wrong position, row or window shows as an error of the size of the logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvquant.errors import UnsupportedModelError

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    FP16,
    FP16_LATENTS,
    GEMMA3N,
    LATENT_SIZES,
    SHARING,
    RoundedCache,
    caching,
    hands_latents,
    random_model,
    random_module,
)

from kvquant.hf.argument import ARGUMENT  # noqa: E402
from kvquant.hf.model import CachedModel  # noqa: E402

LENS = [25, 9]
CHUNK, STEPS = 7, 3
# a rounded key or value may fall to the neighbouring number; what is wrong is wrong by 0.1 and more
TOLERANCE = 0.02

GEMMA4: dict[str, Any] = SHARING | {"vocab_size_per_layer_input": 97}
RIGHT: dict[str, dict[str, Any]] = {
    kind: {}
    for kind in """
    afmoe aria_text bert bert-generation biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm electra
    ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe
    gpt2 gpt_neox granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum
    minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roc_bert
    seed_oss smollm3 solar_open stablelm starcoder2 whisper
    """.split()
}
RIGHT |= {
    "apertus": {"sliding_window": None},
    "arcee": {"sliding_window": None},
    "flint": {},
    "gemma2": {"attn_logit_softcapping": 0.5},
    "gemma3n_text": GEMMA3N | {"vocab_size_per_layer_input": 97, "sliding_window": 12},
    "gemma4_text": GEMMA4 | {"global_head_dim": 512, "sliding_window": 12},
    "gemma4_unified_text": {},  # rows of 64 elements, and of 512 in the layer without a window
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_oss": {},
    "vaultgemma": {"attn_logit_softcapping": 0.5},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "llama4_text": {"attention_chunk_size": 64, "intermediate_size_mlp": 96},
}
LATENT: dict[str, dict[str, Any]] = {
    kind: LATENT_SIZES for kind in ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
}
LATENT |= {
    "longcat_flash": LATENT_SIZES
    | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    "minicpm3": LATENT_SIZES,
}
RIGHT |= LATENT

ITSELF = "computes attention by itself"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart models count the positions of all sequences alike", {}),
    "big_bird": (ITSELF, {}),
    "bloom": (ITSELF, {}),
    "camembert": (r"count positions from padding_idx \+ 1", {}),
    "data2vec-text": (r"count positions from padding_idx \+ 1", {}),
    "deepseek_v32": (r"layer 0 is '\w+_attention'", {}),
    "diffllama": (r"layer 0 \(DiffLlamaAttention\) attends to other values", {}),
    "doge": (r"layer 0 \(DogeAttention\) got an attention mask that is not", {}),
    "falcon": (ITSELF, {}),
    "falcon_h1": ("layer 0 has a state beside its attention", {}),
    "granitemoehybrid": ("layer 0 is 'linear_attention'", {}),
    "jamba": ("layer 0 is 'linear_attention'", {}),
    "jetmoe": (r"layer 0 \(JetMoeAttention\) attends to other (keys|values)", {}),
    "gemma4_text, rows of 320": (
        "layer 1 has rows that no format has: head_dim 320 is not supported: use 64, 80",
        GEMMA4 | {"global_head_dim": 320},
    ),
    "gemma4_text, unlike heads": (
        "layer 0 has 2 KV heads, where a KVCache has one number for all, 1",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "llama4_text": (
        r"layer 0 \(Llama4TextAttention\) attends to chunks of",
        {"attention_chunk_size": 16, "intermediate_size_mlp": 96},
    ),
    "lfm3": ("layer 0 is 'conv'", {}),
    "mamba": ("layer 0 is 'linear_attention'|mamba models have no attention heads", {}),
    "mbart": ("mbart models count the positions of all sequences alike", {}),
    "megatron-bert": (ITSELF, {}),
    "mimo_v2_flash": ("layer 1 has 4 KV heads, where a KVCache has one number for all, 2", {}),
    "mpt": (ITSELF, {}),
    "nemotron_h": ("layer 0 is 'linear_attention'", {}),
    "openai-gpt": ("no part of OpenAIGPTLMHeadModel takes a cache", {}),
    "qwen3_next": ("layer 0 is 'linear_attention'", {}),
    "roberta": (r"count positions from padding_idx \+ 1", {}),
    "rwkv": ("this rwkv model has no attention heads", {}),
    "xglm": (ITSELF, {}),
    "xlm-roberta": (r"count positions from padding_idx \+ 1", {}),
    "zaya": ("layer 0 has a state beside its attention", {}),
    "xlstm": ("this xlstm model has no attention heads", {}),
}
for kind in ("codegen", "gptj"):
    if ARGUMENT == "cache":  # transformers 5.24
        RIGHT[kind] = {"n_embd": 128, "n_head": 2, "n_layer": 2, "rotary_dim": 32}
    else:
        REFUSED[kind] = ITSELF, {}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("kind", RIGHT)
def test_right_to_rounding(kind: str) -> None:
    if kind in LATENT and not hands_latents:
        pytest.skip("needs transformers 5.17, which hands a cache latents")
    model = random_model(kind, RIGHT[kind])
    rows = FP16_LATENTS if kind in LATENT else FP16
    text = torch.randint(5, 97, (2, LENS[0] + STEPS), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(2, LENS[0] + STEPS, **rows)
    given = [model.prefill(cache, text[:, : LENS[0]], LENS, chunk=CHUNK)]
    given += [model.step(cache, column) for column in text[:, LENS[0] :].unbind(1)]
    for b, length in enumerate(LENS):
        past = RoundedCache()
        parts = [text[b : b + 1, :length], *text[b : b + 1, LENS[0] :].split(1, dim=1)]
        for part, got in zip(parts, given, strict=True):
            wanted = model.model(part, **caching(past), use_cache=True).logits[0, -1]
            error = (got[b] - wanted).abs().max() / wanted.std()
            assert float(error) < TOLERANCE
    assert {tuple(at.seq_lens.tolist()) for at in cache.layers} == {(28, 12)}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str) -> None:
    message, changes = REFUSED[kind]
    module = random_module(kind.split(",")[0], changes)
    with pytest.raises(UnsupportedModelError, match=message) as told:
        model = CachedModel(module)
        model.prefill(model.new_cache(2, 32), torch.randint(5, 97, (2, 25)), LENS)
    assert len(str(told.value).splitlines()) == 1
