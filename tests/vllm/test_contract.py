"""All of vLLM that kvquant builds on, in one place: what fails here has moved in a new vLLM."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tomllib
from engine_contract import Hook, calls_of, fits, hooks_of

from kvquant.engine.hooks import ENGINES, check_version
from kvquant.vllm import entries, plugin

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own, while it is imported
ROOT = Path(__file__).parents[2]
WHAT_TO_DO = "vLLM moved this: adapt kvquant/vllm/backend.py (or plugin.py), then this table"

# name -> parameters that are given or taken, in this order where vLLM gives them by position
CALLED = {
    "vllm.config:get_current_vllm_config": "",
    "vllm.config:get_current_vllm_config_or_none": "",
    "vllm.config:get_layers_from_vllm_config": "vllm_config layer_type",
    "vllm.distributed:get_tensor_model_parallel_rank": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    "vllm.logger:init_logger": "name",
    "vllm.model_executor.models.utils:extract_layer_index": "layer_name",
    "vllm.utils.import_utils:resolve_obj_by_qualname": "qualname",
    "vllm.v1.attention.backends.registry:register_backend": "backend class_path",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.is_overridden": "self",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.get_path": "self",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.__init__": (
        "self kv_cache_spec layer_names vllm_config device"
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder._init_reorder_batch_threshold": (
        "self reorder_batch_threshold supports_spec_as_decode"
    ),
    "vllm.config:ModelConfig.get_total_num_kv_heads": "self",
}
CALLED |= {
    f"vllm.model_executor.layers.attention.mla_attention:{name}": names
    for name, names in {
        "MLACommonMetadataBuilder.__init__": (
            "self kv_cache_spec layer_names vllm_config device metadata_cls"
        ),
        "init_mla_context_partial": ("chunked_context attn_output attn_softmax_lse num_tokens"),
        "accumulate_mla_context_chunk": ("chunk attn_output attn_softmax_lse output output_lse"),
        "MLACommonImpl._concat_k_nope_k_pe": "self k_nope k_pe",
    }.items()
}
PREFILL = "vllm.v1.attention.backends.mla.prefill.base:MLAPrefillBackend"
CALLED[f"{PREFILL}.run_prefill_context_chunk"] = "self chunk q k v"
# further arguments of vLLM's methods, that kvquant's do not name: why vLLM gives neutral values
FURTHER = {
    # None, unless AttentionImpl.fused_output_quant_supported() is true, and of ours it is not
    "KVQuantImpl.forward": ("output_scale", "output_block_scale"),
    # False, unless the cache dtype is an fp8 one of vLLM's own, which kvquant refuses
    "KVQuantLatentImpl.do_kv_cache_update": ("skip_scale",),
    # given by subclasses, of which ours is one: vLLM gives those of its interface
    "LatentStepBuilder.__init__": ("metadata_cls", "supports_dcp_with_varlen"),
}
FOLDERS = "compilation", "config", "model_executor/layers/attention", "platforms", "v1"
MLA = "vllm.model_executor.layers.attention.mla_attention"
FIELDS = {
    f"{MLA}:MLACommonMetadata": "num_decode_tokens slot_mapping prefill decode",
    f"{MLA}:MLACommonPrefillMetadata": "block_table chunked_context prefill_backend",
    f"{MLA}:MLACommonPrefillMetadata.ContextChunk": (
        "index request_slice token_slice cu_seq_lens starts token_to_seq"
    ),
    f"{MLA}:MLACommonPrefillMetadata.ChunkedContextMetadata": "workspace chunks empty_token_slices",
    "vllm.config:ParallelConfig": "decode_context_parallel_size prefill_context_parallel_size",
    "vllm.v1.kv_cache_interface:AttentionSpec": (
        "num_kv_heads head_size head_size_v dtype num_head_slots state_content_bytes"
    ),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound block_table_tensor "
        "num_actual_tokens causal"
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "non_causal",
    "vllm.config:VllmConfig": (
        "additional_config attention_config cache_config load_config model_config "
        "scheduler_config speculative_config"
    ),
    "vllm.config:CacheConfig": "block_size num_gpu_blocks",
    "vllm.config:LoadConfig": "download_dir load_format",
    "vllm.config:AttentionConfig": "backend backend_per_kind",
    "vllm.config:ModelConfig": "dtype hf_config max_model_len model revision",
    "vllm.config:SchedulerConfig": "max_num_batched_tokens max_num_seqs",
}
MEMBERS = {
    f"{MLA}:QueryLenSupport": "VARLEN",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase": "get_attn_backend",
    "vllm.v1.attention.backend:AttentionBackend": (
        "forward_includes_kv_cache_update supported_dtypes supported_kv_cache_dtypes "
        "full_cls_name is_ssm"
    ),
    "vllm.v1.attention.backend:AttentionCGSupport": "UNIFORM_BATCH",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "_cudagraph_support",
    "vllm.v1.attention.backend:AttentionType": "DECODER",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": " ".join(
        entries.OURS + plugin.DIFFKV
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "get_impl_cls",
    "vllm.v1.kv_cache_interface:AttentionSpec": "unpadded_page_size_bytes",
    "vllm.v1.kv_cache_interface:KVCacheLayout": "LBHNC",
}


def found(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split(".") if path else []:
        assert hasattr(value, part), f"{name}: {WHAT_TO_DO}"
        value = getattr(value, part)
    return value


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_one_that_was_tried() -> None:
    check_version("vllm")
    _, first, end = ENGINES["vllm"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"vllm>={first},<{end}" in project["optional-dependencies"]["vllm"], (
        "run make test-vllm with another version, then widen ENGINES and pyproject.toml"
    )


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_takes_what_it_is_given(name: str) -> None:
    wanted = CALLED[name].split()
    assert parameters(found(name))[: len(wanted)] == wanted, f"{name}: {WHAT_TO_DO}"


@cache
def hooks() -> list[Hook]:
    """Methods of kvquant that vLLM calls. vLLM's warnings are filtered in tests only."""
    modules = (found(f"kvquant.vllm.{name}") for name in ("backend", "latent"))
    return hooks_of("vllm", *modules, more=("do_kv_cache_update",))


def test_hooks_take_further_arguments() -> None:
    """Those that vLLM's own method has are known here, with the reason why they are neutral."""
    for hook in hooks():
        assert hook.takes_all or hasattr(hook.ours, "__wrapped__"), f"decorate {hook.name}"
        assert hook.further() <= {*FURTHER.get(hook.name, ())}, f"{hook.name}: {WHAT_TO_DO}"
    assert len(hooks()) > 20


def test_calls_in_vllm_fit_hooks() -> None:
    """As vLLM's sources write them out, not only as its base classes declare them."""
    by_name: dict[str, list[Hook]] = {}
    for hook in hooks():
        if hook.takes:
            by_name.setdefault(hook.name.partition(".")[2], []).append(hook)
    del by_name["__init__"]
    seen = set()
    for call in calls_of("vllm", {*by_name}, FOLDERS):
        seen.add(call.name)
        assert any(fits(call, hook, FURTHER.get(hook.name, ())) for hook in by_name[call.name]), (
            f"{call}: {WHAT_TO_DO}"
        )
    # supports_compute_capability is called with a name that is looked up
    assert {*by_name} - seen <= {"supports_compute_capability"}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_there(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(found(name))}
    assert set(FIELDS[name].split()) <= fields, f"{name}: {WHAT_TO_DO}"


@pytest.mark.parametrize("name", MEMBERS)
def test_members_are_there(name: str) -> None:
    for member in MEMBERS[name].split():
        found(f"{name}.{member}")


def test_attention_layers_say_what_they_are() -> None:
    """Set in __init__, which no class shows."""
    source = inspect.getsource(found("vllm.model_executor.layers.attention:Attention"))
    for name in (
        "attn_backend attn_type head_size head_size_v impl kv_cache_dtype "
        "kv_sharing_target_layer_name num_heads num_kv_heads use_mm_prefix"
    ).split():
        assert f"self.{name} = " in source or f"self.{name}:" in source, f"{name}: {WHAT_TO_DO}"
    local = "vllm.model_executor.layers.attention.chunked_local_attention:ChunkedLocalAttention"
    assert "self.attention_chunk_size = " in inspect.getsource(found(local)), WHAT_TO_DO


def test_layers_with_latent_attention_say_what_they_are() -> None:
    source = inspect.getsource(found(f"{MLA}:MLAAttention"))
    for name in (
        "attn_backend impl kv_cache_dtype kv_lora_rank non_causal_multi_token_decode num_heads "
        "qk_rope_head_dim sliding_window"
    ).split():
        assert f"self.{name} = " in source or f"self.{name}:" in source, f"{name}: {WHAT_TO_DO}"
    assert "if fp8_attention and self.impl.supports_quant_query_input:" in source, WHAT_TO_DO
    impl = inspect.getsource(found(f"{MLA}:MLACommonBaseImpl"))
    assert "self._compute_prefill_context(" in impl, WHAT_TO_DO


DRAFTS = (
    "vllm.v1.spec_decode.draft_model",
    "vllm.v1.spec_decode.llm_base_proposer",
    "vllm.v1.worker.gpu.spec_decode.dflash.utils",
    "vllm.v1.worker.gpu.spec_decode.dspark.utils",
    "vllm.v1.worker.gpu.spec_decode.eagle.utils",
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
)


@pytest.mark.parametrize("module", DRAFTS)
def test_draft_models_are_made_under_a_tag(module: str) -> None:
    """By which their layers know that they are none of the model that is served, and the plugin
    that they may have another backend."""
    backends = found("vllm.compilation.backends")
    assert backends.model_tag == "backbone", WHAT_TO_DO
    with backends.set_model_tag("draft"):
        assert backends.model_tag == "draft", WHAT_TO_DO
    spec = find_spec(module)  # not imported: it may need a GPU
    assert spec is not None and spec.origin is not None, WHAT_TO_DO
    assert "with set_model_tag(" in Path(spec.origin).read_text(encoding="utf-8"), WHAT_TO_DO


def test_vllm_finds_the_plugin() -> None:
    (point,) = entry_points(group="vllm.general_plugins", name="kvquant")
    assert point.value == "kvquant.vllm.plugin:register"
