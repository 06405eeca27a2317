"""What the tests of Hugging Face models share: tiny models, and what they are compared with.

fp16 rows, and transformers' own cache with K and V rounded to float16: sums are in another order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
import transformers
from example_plan import example_plan
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from kvquant.hf.argument import ARGUMENT
from kvquant.hf.model import CachedModel
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan

# Of logits of size 1. A float32 sum in another order, or on another processor, rounds a few keys
# and values to the neighbouring fp16 number; that all are rounded moves logits by 2.5e-3, and a
# token more or less by 0.2 or more.
TOLERANCE = 5e-3
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
FP16: dict[str, Any] = {
    "k_format": "fp16",
    "v_format": "fp16",
    "sink_len": 0,
    "recent_len": 0,
    "exact_format": "fp16",
}
FP16_LATENTS: dict[str, Any] = {
    "fmt": "fp16",
    "sink_len": 0,
    "recent_len": 0,
    "exact_format": "fp16",
}
# a cache of transformers before 5.17 gets keys and values of all heads, made of latents
hands_latents = hasattr(DeepseekV3Attention, "expand_kv")
needs_latents = pytest.mark.skipif(not hands_latents, reason="needs transformers 5.17")
LATENT_SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,  # what is rotated
    "qk_nope_head_dim": 48,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_local_experts": 8,  # other names of them
    "num_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
# two layers with keys of their own, and two that attend to theirs
SHARING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
}
GEMMA3N = SHARING | {"laurel_rank": 8, "altup_num_inputs": 2}


# models with rows for all tokens, a window, and layers that read the rows of others
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 16},
    "Gemma3nText": GEMMA3N,
    "Gemma4Text": SHARING | {"global_head_dim": 64},  # layers that share take the last token only
}
# of generate: no token ends a text
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 999}


M = TypeVar("M")
# of any family: what its config does not know is left out
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 96,
    "d_model": 128,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "moe_topk": 1,
    "top_k_experts": 1,
    "sliding_window": 12,
    # of models with a vision encoder
    "depth": 1,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 128,
    "vision_output_dim": 128,
}


def tiny(kind: str, *, bias: float = 1.0, **changes: Any) -> CachedModel:
    """A random model with logits of size 1 or so, and biases so large; no token ends its texts."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif "bias" in name:
                weight.normal_(std=bias)
    return CachedModel(_with_caps(model).eval())


def by_kvquant(model: M) -> M:
    """The same model, of transformers or a CachedModel, set to attend by "kvquant"."""
    inner: Any = model.model if isinstance(model, CachedModel) else model
    inner.set_attn_implementation("kvquant")
    return model


def random_model(kind: str, changes: dict[str, Any]) -> CachedModel:
    """As random_module, of a family that CachedModel takes."""
    return CachedModel(random_module(kind, changes))


def random_module(kind: str, changes: dict[str, Any]) -> Any:
    """A random model of any family, as small as its config allows; skipped where there is none."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **_sizes_of(CONFIG_MAPPING[kind](), changes))
    with torch.device("meta"):
        large = transformers.AutoModelForCausalLM.from_config(config).num_parameters() > 1e8
    if large:  # its sizes have other names
        pytest.skip(f"{kind} of transformers {transformers.__version__} is too large")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return _with_caps(model)


def _sizes_of(usual: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """SIZES, as far as a config has these fields, and the changes. Sub-configs get a dict each."""
    known = set(vars(usual)) | set(usual.attribute_map)  # no properties
    sizes = {name: value for name, value in SIZES.items() if name in known}
    parts = {name: one for name, one in vars(usual).items() if hasattr(one, "attribute_map")}
    of_parts = {name: _sizes_of(one, changes.get(name, {})) for name, one in parts.items()}
    return sizes | changes | of_parts


def _with_caps(model: Any) -> Any:
    """Before transformers 5.21 models with caps attend by SDPA, which leaves them out."""
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def caching(cache: Any) -> dict[str, Any]:
    """A cache, of transformers or ours, as generate and models of this transformers take it."""
    return {ARGUMENT: cache}


# of generate: its answers come with the logits of which each token was chosen
WITH_LOGITS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


@torch.no_grad()
def assert_answers(
    model: Any, found: Any, mask: torch.Tensor | None = None, tolerance: float = 4 * TOLERANCE
) -> torch.Tensor:
    """Compare the logits of which generate chose its tokens with those of the model without a
    cache, which reads each text alone, in one call.

    No text is compared with another one: where two tokens are as likely but for a rounding, either
    may come, and the text goes on otherwise.

    Args:
        found: of generate with WITH_LOGITS, by any search.
        mask: the prompts' attention_mask, [sequences, tokens]; left out: no padding.
        tolerance: of logits. Those of 4 layers move by 7e-3 where all rows are rounded to fp16.

    Returns:
        The texts as generate gives them.
    """
    ids: torch.Tensor = found.sequences
    logits, steps = _logits_of(found), len(found.logits)
    prompt = ids.shape[1] - steps
    mask = torch.ones_like(ids[:, :prompt]) if mask is None else mask
    seen = torch.nn.functional.pad(mask, (0, steps), value=1).bool()
    for b, text in enumerate(ids):
        wanted = model(text[None, seen[b]][:, :-1], use_cache=False).logits[0, -steps:]
        torch.testing.assert_close(logits[b], wanted, atol=tolerance, rtol=0)
    return ids


def sure_text(found: Any) -> torch.Tensor:
    """Assert that a text of float32 logits is the same on any processor and with fp16 rows.

    Args:
        found: of greedy generate with WITH_LOGITS.

    Returns:
        The text, [sequences, tokens].
    """
    for logits in found.logits:
        first, second = logits.topk(2).values.unbind(-1)
        assert float((first - second).min()) > 10 * TOLERANCE, "give a prompt that goes on surely"
    ids: torch.Tensor = found.sequences
    return ids


def assert_likeliest(logits: torch.Tensor, chosen: torch.Tensor) -> None:
    """Assert that these tokens, [batch], are the likeliest, or as likely but for roundings."""
    lacking = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
    assert float(lacking.max()) < 8 * TOLERANCE  # twice that of assert_answers


def assert_alike(one: Any, other: Any, *, limit: float = TOLERANCE) -> None:
    """Compare the logits of two calls of generate with WITH_LOGITS, of a sequence up to where its
    tokens differ: where logits tie, that takes no more than a rounding.

    Args:
        limit: of |one - other| / |one|, of the logits of a step.
    """
    ours, theirs = _logits_of(one), _logits_of(other)
    steps = ours.shape[1]
    same = (one.sequences == other.sequences)[:, -steps:].long().cumprod(1).bool()
    for i in range(steps):
        known = same[:, i - 1] if i else torch.ones_like(same[:, 0])
        error = (ours - theirs)[known, i].norm() / ours[known, i].norm().clamp(min=1e-30)
        assert error < limit, f"step {i}: {error}"


def _logits_of(found: Any) -> torch.Tensor:
    """Of each token that generate has chosen, [sequences, tokens, vocabulary]."""
    logits = torch.stack(found.logits, dim=1)
    beams = getattr(found, "beam_indices", None)
    if beams is None:
        return logits
    return logits[beams, torch.arange(logits.shape[1])]  # the sequence that a token went on


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def int8_plan(model: CachedModel, kind: str = "matrix") -> CachePlan:
    """A plan of a model with 2 KV heads of 64 elements: offsets and one kind of basis, in INT8."""
    layers = model.config.num_hidden_layers
    made = example_plan(layers, 2, 64)
    numbers = torch.Generator().manual_seed(1)
    side = {"format": "int8", "basis": kind, "rounding": "nearest"}
    facts, tensors = dict(made.facts), dict(made.tensors)
    facts["layers"] = [{"k": side, "v": side, "kept": None} for _ in range(layers)]
    facts["model"] = model_identity(model.config_dict)
    for name in "kv":
        tensors[f"{name}.offset"] = torch.randn(layers, 2, 64, generator=numbers)
        mixed = 0.05 * torch.randn(layers, 2, 64, 64, generator=numbers)
        tensors[f"{name}.matrix"] = torch.eye(64) + mixed * (kind == "matrix")
    return CachePlan(facts, tensors)


class RoundedCache(transformers.DynamicCache):
    """transformers' own cache with K and V rounded to float16 on their way in."""

    dtype = torch.float16

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        keys, values = (x.to(self.dtype).float() for x in (key_states, value_states))
        return super().update(keys, values, layer_idx, *args, **kwargs)
