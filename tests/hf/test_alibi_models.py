"""ALiBi beside models that have it: BLOOM and MPT, whose attention is computed by themselves.

CachedModel refuses them, so what their layers attend with is taken on the way, rounded to 16 bit,
and what their own eager attention makes of it, in float64, is compared with a KVCache of the same
values. Slopes are those of each model's own formula: 2^(-8 i / n) for n heads, a power of two;
6 heads have those of 4, then every second of 8. transformers leaves out MPT's alibi_bias_max: it
takes 8.

The other variants stand beside whole models in test_model_families.py: soft caps in gemma2, sink
logits in gpt_oss, windows in mistral.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from relative_l2 import relative_l2
from torch.nn.utils.rnn import pad_sequence

from kvquant import AttentionVariant, KVCache

transformers = pytest.importorskip("transformers")
from hf_cases import caching, random_module  # noqa: E402
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor  # noqa: E402

HEADS = 6
LENS = (25, 9)
CALLS = (1, 1, 4)  # tokens of the calls after the prompt
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 8e-4}


class Family(NamedTuple):
    """Where a model's layers have what attention takes and gives.

    Attributes:
        fused: the module that gives q, k and v as one.
        output: the module that gets the result.
        shape: of the last axis of what fused gives, and what brings q, k and v to its front.
        slopes: the model's own.
    """

    fused: str
    output: str
    shape: tuple[int, ...]
    slopes: Callable[[], torch.Tensor]


FAMILIES = {
    "bloom": Family(
        "query_key_value",
        "dense",
        (HEADS, 3, 64),
        lambda: build_alibi_tensor(torch.ones(1, 2).long(), HEADS, torch.float32)[:, 0, 1],
    ),
    "mpt": Family(
        "Wqkv", "out_proj", (3, HEADS, 64), lambda: -build_mpt_alibi_tensor(HEADS, 2)[:, 0, 0]
    ),
}


class Taken(NamedTuple):
    """Of one call: q, k, v and the result of each layer, [layers, tokens, heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


def attention_of(model: Any, family: Family, dtype: torch.dtype, length: int) -> list[Taken]:
    """What a sequence's prompt and the calls after it attend with, and get."""
    fused: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def round_fused(_module: object, _args: object, x: torch.Tensor) -> torch.Tensor:
        x = x.to(dtype).double()
        parts = x[0].unflatten(-1, family.shape)
        fused.append(parts.movedim(family.shape.index(3) + 1, 0))
        return x

    def take_result(_module: object, args: tuple[torch.Tensor]) -> None:
        given.append(args[0][0].unflatten(-1, (HEADS, 64)))

    hooks = []
    for name, module in model.named_modules():
        if name.endswith(family.fused):
            hooks.append(module.register_forward_hook(round_fused))
        elif name.endswith(f".{family.output}"):
            hooks.append(module.register_forward_pre_hook(take_result))
    past, found = transformers.DynamicCache(), []
    for count in (length, *CALLS):
        model(torch.randint(5, 97, (1, count)), **caching(past), use_cache=True)
        q, k, v = torch.stack(fused, 1)
        found.append(Taken(q, k, v, torch.stack(given)))
        fused.clear()
        given.clear()
    for hook in hooks:
        hook.remove()
    return found


def batch_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[layers, batch, tokens, heads, head_dim] of sequences; NaN where they have no token."""
    padded = pad_sequence([x.transpose(0, 1) for x in parts], padding_value=torch.nan)
    return padded.permute(2, 1, 0, 3, 4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "rows"), [*zip(FAMILIES, DTYPES, strict=True)])
def test_alibi_is_that_of_the_model(kind: str, rows: str, device: str) -> None:
    """A prompt, steps of one token and one of four, of sequences of unequal lengths."""
    family, dtype = FAMILIES[kind], DTYPES[rows]
    sizes = {"num_attention_heads": HEADS, "hidden_size": 64 * HEADS, "d_model": 64 * HEADS}
    model = random_module(kind, sizes).double()
    calls = list(zip(*(attention_of(model, family, dtype, n) for n in LENS), strict=True))
    variant = AttentionVariant(alibi_slopes=family.slopes().to(device))
    formats: dict[str, Any] = {"k_format": rows, "v_format": rows, "exact_format": rows}
    for q_dtype in (dtype,) if device == "cuda" else (dtype, torch.float32):
        cache = KVCache(2, 2, HEADS, 64, 64, sink_len=2, recent_len=8, device=device, **formats)
        for call, taken in enumerate(calls):
            counts = torch.tensor([one.q.shape[1] for one in taken], dtype=torch.int32)
            q, k, v, wanted = (batch_of(parts) for parts in zip(*taken, strict=True))
            for layer in range(2):
                new_k, new_v = (x[layer].to(device, dtype).transpose(1, 2) for x in (k, v))
                queries = q[layer].to(device, q_dtype)
                if call == 0:
                    cache.append(layer, new_k, new_v, counts)
                    out = cache.attend(layer, queries, counts.to(device), variant=variant)
                else:
                    out = cache.step(layer, queries, new_k, new_v, variant=variant)
                seen = ~wanted[layer].isnan()
                error = relative_l2(out.cpu()[seen], wanted[layer][seen])
                assert error < LIMITS[q_dtype], (call, layer)
        assert relative_l2(cache.attend(1, queries).cpu(), wanted[1]) > 0.1  # without slopes
