"""Layers and steps that vLLM's engine would ask for, and that are refused with the reason; what its
FlashAttention is given for prompts, and when: a stand-in takes it, without a GPU."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from example_plan import example_plan
from latent_plans import latent_plan
from refusals import assert_refused
from transformers import LlamaConfig

from kvquant import AttentionVariant, CachePlan, KVQuantError
from kvquant.engine.contract import Lengths
from kvquant.io.model_id import model_identity

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
CONFIG = LlamaConfig(num_hidden_layers=2, num_key_value_heads=4, head_dim=64)
OTHER = LlamaConfig(num_hidden_layers=2, num_key_value_heads=4, head_dim=64, hidden_size=512)


def layer(given: dict[str, Any], **options: Any) -> Any:
    """An attention layer of vLLM, as far as it is asked."""
    from vllm.v1.attention.backend import AttentionType

    from kvquant.vllm.backend import KVQuantBackend, Request, backend_of

    impl = SimpleNamespace(is_draft=False, scale=0.1, variant=lambda device: AttentionVariant())
    usual = {
        "attn_backend": backend_of(KVQuantBackend, "CPU_ATTN", Request.of(given)),
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        "kv_cache_dtype": "auto",
        "use_mm_prefix": False,
        "num_kv_heads": 4,
        "head_size": 64,
        "head_size_v": 64,
        "impl": impl,
    }
    return SimpleNamespace(**{**usual, **options})


def rows_of(
    monkeypatch: pytest.MonkeyPatch, one: Any, *, index: int = 1, config: Any = CONFIG
) -> Any:
    from kvquant.vllm import backend

    monkeypatch.setattr(backend, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(backend, "get_tensor_model_parallel_world_size", lambda: 1)
    model = SimpleNamespace(hf_config=config, get_total_num_kv_heads=lambda: 4)
    name, cpu = f"model.layers.{index}.self_attn.attn", torch.device("cpu")
    return backend._rows_of(name, one, SimpleNamespace(model_config=model), cpu)


def test_layers_that_rows_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"k_format": "int8", "v_format": "int8"}
    assert rows_of(monkeypatch, layer(given)).layout.num_kv_heads == 4
    cases: list[tuple[dict[str, Any], str]] = [
        ({"attn_type": "encoder_only"}, "it is of type encoder_only, and rows serve decoders only"),
        ({"attn_type": "encoder_decoder"}, "it is of type encoder_decoder"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "it attends to the rows of layers.0"),
        ({"kv_cache_dtype": "fp8"}, "asks for fp8, and .*: give --kv-cache-dtype bfloat16"),
        ({"use_mm_prefix": True}, "it attends to whole images, not to the tokens before"),
        ({"head_size": 32}, "head_dim 32 is"),
        ({"head_size_v": 520}, "head_dim 520 is"),
    ]
    for options, message in cases:
        call = partial(rows_of, monkeypatch, layer(given, **options))
        assert_refused(KVQuantError, (call, message))


def test_plans_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = example_plan(2, 4, 64, config=CONFIG.to_dict()), tmp_path / "plan.safetensors"
    plan.facts["layers"][-1] = plan.facts["layers"][0]  # none is kept in 16 bit
    plan.save(path)
    given = {"plan": str(path), "k_format": "int8", "v_format": "int8"}
    assert rows_of(monkeypatch, layer(given)).basis is not None
    draft, rows = layer(given, num_kv_heads=3), partial(rows_of, monkeypatch)
    assert_refused(
        KVQuantError,
        (lambda: rows(layer(given), config=OTHER), "made for a 'llama' model with config"),
        (lambda: rows(layer(given), index=2), "the plan has no layer 2: leave it out, or cal"),
        (lambda: rows(draft), "has 3 KV heads on this rank, other layers 4: leave"),
    )
    draft.impl.is_draft = True  # whose model a plan does not know
    assert rows_of(monkeypatch, draft, index=2, config=OTHER).basis is None


def test_attention_that_is_not_causal() -> None:
    from kvquant.vllm.backend import StepBuilder

    builder = object.__new__(StepBuilder)
    builder.is_draft, builder.most_queries, builder._has_pages = False, 1, True
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    step: Any = SimpleNamespace(
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=None,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        num_actual_tokens=1,
        is_prefilling=None,
        causal=True,
    )
    assert builder.build(0, step).decodes == 1
    step.causal = False
    with pytest.raises(KVQuantError, match="attention is not causal, which rows do not serve"):
        builder.build(0, step)


def latent_rows_of(**options: Any) -> Any:
    """What a layer with latent attention gets."""
    from kvquant.engine.settings import LatentSettings
    from kvquant.vllm import latent

    usual = {
        "attn_backend": SimpleNamespace(settings=LatentSettings("fp8")),
        "impl": SimpleNamespace(is_draft=False, scale=0.1),
        "kv_cache_dtype": "auto",
        "sliding_window": None,
        "non_causal_multi_token_decode": False,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "decode": 1,
        "prefill": 1,
        "config": CONFIG,
    }
    one = SimpleNamespace(**{**usual, **options})
    parallel = SimpleNamespace(
        decode_context_parallel_size=one.decode, prefill_context_parallel_size=one.prefill
    )
    model = SimpleNamespace(hf_config=one.config, dtype=torch.bfloat16)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    return latent._rows_of("model.layers.1.self_attn.attn", one, config, torch.device("cpu"))


def test_layers_that_latent_rows_do_not_serve() -> None:
    from kvquant.vllm.latent import KVQuantLatentImpl

    assert latent_rows_of().fmt.row_bytes == 656
    parallel = "context parallelism, which rows do not serve"
    fp8 = "asks for fp8_ds_mla, and rows have formats of their"
    assert_refused(
        KVQuantError,
        (lambda: latent_rows_of(kv_cache_dtype="fp8_ds_mla"), fp8),
        (lambda: latent_rows_of(decode=2), parallel),
        (lambda: latent_rows_of(prefill=2), parallel),
        (lambda: latent_rows_of(sliding_window=128), "it has a window of 128 tokens"),
        (lambda: latent_rows_of(non_causal_multi_token_decode=True), "tokens attend to later ones"),
        (lambda: latent_rows_of(qk_rope_head_dim=0), "rope_dim 0 is not supported"),
        (lambda: latent_rows_of(kv_lora_rank=256), "fp8 is FlashMLA's layout, of 512 latents"),
        (lambda: KVQuantLatentImpl(indexer=object()), "an indexer chooses tokens"),
        (lambda: KVQuantLatentImpl(topk_indices_buffer=None), "an indexer chooses tokens"),
    )


def test_latent_plans_that_do_not_fit() -> None:
    from kvquant.engine.settings import LatentSettings

    plan = latent_plan(2, {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    plan = CachePlan({**plan.facts, "model": model_identity(CONFIG.to_dict())}, plan.tensors)
    backend = SimpleNamespace(settings=LatentSettings("int4-g8", plan))
    found = latent_rows_of(attn_backend=backend)
    assert found.basis is not None
    with pytest.raises(KVQuantError, match="the plan was made for a 'llama' model with config"):
        latent_rows_of(attn_backend=backend, config=OTHER)
    draft = SimpleNamespace(is_draft=True, scale=0.1)
    assert latent_rows_of(attn_backend=backend, impl=draft, config=OTHER).basis is None


HEADS, DIM = 4, 64
PLAIN = {"alibi_slopes": None, "sinks": None, "soft_cap": None, "sliding_window": None}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window and a soft cap": {"sliding_window": 20, "soft_cap": 3.0},
    "sink logits": {"sinks": torch.linspace(-1, 2, HEADS)},
}


class Stand:
    """In place of vLLM's module: takes notes."""

    def __init__(self, version: int | None) -> None:
        self.version, self.asked, self.given = version, dict[str, Any](), dict[str, Any]()

    def get_flash_attn_version(self, **asked: Any) -> int | None:
        self.asked = asked
        return self.version

    def flash_attn_varlen_func(self, *heads: torch.Tensor, **given: Any) -> None:
        self.given = {**dict(zip("qkv", heads, strict=True)), **given}


def causal_of(
    monkeypatch: pytest.MonkeyPatch, stand: Any, device: str = "cuda", **layer: Any
) -> Any:
    from kvquant.vllm import flash

    name = "vllm.v1.attention.backends.fa_utils"
    monkeypatch.setitem(sys.modules, name, stand)
    flash._tell.cache_clear()
    impl = SimpleNamespace(**{**PLAIN, "head_size": DIM, "scale": 0.11, **layer})
    return flash.causal_attention_of(impl, impl.head_size, torch.device(device))


@pytest.mark.parametrize("name", LAYERS)
def test_flash_attention_is_given_the_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand, layer = Stand(3), LAYERS[name]
    causal = causal_of(monkeypatch, stand, **layer)
    assert stand.asked == {
        "requires_alibi": False,
        "head_size": DIM,
        "has_sinks": "sinks" in layer,
        "requires_softcap": "soft_cap" in layer,
    }
    q, k, v, out = (torch.zeros(count) for count in range(4))
    lengths = Lengths((30, 7), (30, 50), torch.tensor([0, 30, 37]), torch.tensor([0, 30, 80]))
    causal(q, k, v, lengths, out)
    wanted = {
        **{"q": q, "k": k, "v": v, "out": out},
        "cu_seqlens_q": lengths.query_starts,
        "max_seqlen_q": 30,
        "cu_seqlens_k": lengths.key_starts,
        "max_seqlen_k": 50,
        "softmax_scale": 0.11,
        "causal": True,
        "window_size": [19, 0] if "sliding_window" in layer else None,  # before a token; after it
        "softcap": layer.get("soft_cap", 0.0),
        "alibi_slopes": None,
        "fa_version": 3,
        "s_aux": layer.get("sinks"),
    }
    assert stand.given.keys() == wanted.keys()
    for key, one in wanted.items():
        assert one is stand.given[key] or one == stand.given[key], key


def test_the_log_says_what_prompts_attend_by(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    without = "by torch's kernels: vLLM's FlashAttention for some layers is"
    cases: list[tuple[int | None, dict[str, Any], str]] = [
        *((n, {}, f"prompts attend by FlashAttention {n} of vLLM") for n in (3, 2)),
        (2, LAYERS["sink logits"], f"{without} 2"),
        *((n, {}, f"{without} {n}") for n in (4, None)),
    ]
    for version, layer, told in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO, "vllm"), monkeypatch.context() as patch:
            is_theirs = causal_of(patch, Stand(version), **layer) is not None
        assert is_theirs == ("of vLLM" in told)
        lines = [record.getMessage() for record in caplog.records]  # vLLM logs other things, too
        (line,) = {line for line in lines if "kvquant: prompts attend" in line}
        assert told in line


def test_torch_serves_where_vllm_has_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert causal_of(monkeypatch, ModuleType("without")) is None
    assert causal_of(monkeypatch, Stand(3), "cpu") is None
