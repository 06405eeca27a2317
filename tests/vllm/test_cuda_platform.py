"""What vLLM's CUDA platform asks of a backend, and its CPU platform does not: the choice and the
start of engines as on an H200, without a GPU (half a minute). vLLM has no more packages and files
than on_gpu/build.py packs, and nothing is missing that an engine or a server imports."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from example_plan import example_plan
from packaging.utils import canonicalize_name
from transformers import AutoConfig, DeepseekV3Config, FalconH1Config, Gemma2Config
from vllm_engines import INT4, MODEL, ROOT, SIZES, with_layer_formats

PACK = runpy.run_path(str(Path(__file__).with_name("on_gpu") / "build.py"))["PACK"]
# what an engine imports later than `start` does, and what it imports for other models
MODULES = """
vllm.compilation.backends vllm.device_allocator.cumem vllm.entrypoints.cli.main
vllm.entrypoints.openai.api_server vllm.model_executor.layers.quantization.auto_gptq
vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
vllm.model_executor.model_loader.dummy_loader vllm.model_executor.models.gemma3
vllm.model_executor.models.gpt_oss vllm.model_executor.warmup.kernel_warmup
vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.executor.multiproc_executor
vllm.v1.executor.uniproc_executor vllm.v1.spec_decode.ngram_proposer
vllm.v1.structured_output.backend_xgrammar vllm.v1.worker.gpu.model_runner
vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu_worker
vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
""".split()
WITHOUT = """
import importlib.util, json, runpy, sys
import stand_ins
from fnmatch import fnmatch
from importlib.machinery import PathFinder

hidden, left_out, script, cases, modules = map(json.loads, sys.argv[1:])

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        file = name.replace(".", "/") + "/"
        if name.partition(".")[0] in hidden or any(fnmatch(file, one) for one in left_out):
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
sys.argv = [script, json.dumps(cases)]
runpy.run_path(script, run_name="__main__")
for name in modules:
    importlib.import_module(name)
if importlib.util.find_spec("torchvision") is None:  # the machine has it
    stand_ins.stand_in_for("torchvision")
importlib.import_module("vllm.model_executor.warmup.minimax_m3_msa_warmup")  # of all models
"""
CUSTOM = {"attention_backend": "CUSTOM"}
ROWS = {**CUSTOM, "additional_config": {"kvquant": INT4}}
INT8 = {**CUSTOM, "additional_config": {"kvquant": {"k_format": "int8", "v_format": "int8"}}}
ALONE = {"additional_config": ROWS["additional_config"]}  # rows, and no backend that holds them
DRAFTS = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 16 << 20},
}
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
FIRST = {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}  # vLLM's first model runner
OURS = "kvquant.vllm.plugin.CUSTOM"
CHOSEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "int4": (ROWS, {}, INT4),
    "no settings": (CUSTOM, {}, {}),
    "other rows in the same process": (INT8, {}, {"k_format": "int8", "v_format": "int8"}),
    "a sliding window": (ROWS, {"has_sliding_window": True}, INT4),
    "sink logits": (ROWS, {"has_sink": True}, INT4),
    **{
        f"a GPU of sm_{major}{minor}": (ROWS, {"capability": (major, minor)}, INT4)
        for major, minor in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0))
    },
    "float16": (ROWS, {"dtype": "float16"}, INT4),
    "a cache of bfloat16": (ROWS, {"kv_cache_dtype": "bfloat16"}, INT4),
    "pages of 64": ({**ROWS, "block_size": 64}, {}, INT4),
    "beside a connector": ({**ROWS, "kv_transfer_config": OFFLOADING}, {}, INT4),
    "beside drafts": ({**ROWS, "speculative_config": DRAFTS}, {}, INT4),
    "by the kind of layer": (
        {**ALONE, "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}},
        {},
        INT4,
    ),
}
OTHERS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT", "FLASHMLA")
LATENT = {"use_mla": True, "head_size": 576}
HIDDEN = r"rows of kvquant, and \w+ would hold 16-bit ones: give --attention-backend CUSTOM"
INVALID = "CUSTOM is not valid for this configuration"  # vLLM's own words
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a format that does not exist": (
        {**CUSTOM, "additional_config": {"kvquant": {"k_format": "int5"}}},
        {},
        "ConfigError: format 'int5' does not exist",
    ),
    "no plan": (
        {**CUSTOM, "additional_config": {"kvquant": {"plan": "nowhere"}}},
        {},
        f"{INVALID}.*there is no plan 'nowhere'",
    ),
    "no backend": (ALONE, {}, HIDDEN),
    "no backend beside drafts": ({**ALONE, "speculative_config": DRAFTS}, {}, HIDDEN),
    **{f"{name} instead": ({**ALONE, "attention_backend": name}, {}, HIDDEN) for name in OTHERS},
    "latent attention": (ROWS, LATENT, f"{INVALID}.*MLA not supported"),
    "latent attention, no backend": (ALONE, LATENT, HIDDEN),
    "a GPU without kernels": (
        ROWS,
        {"capability": (7, 5)},
        f"{INVALID}.*compute capability not supported",
    ),
    "float32": (ROWS, {"dtype": "float32"}, f"{INVALID}.*dtype not supported"),
    "fp8 of vLLM": (ROWS, {"kv_cache_dtype": "fp8"}, f"{INVALID}.*kv_cache_dtype not supported"),
    "head_dim 32": (ROWS, {"head_size": 32}, f"{INVALID}.*head_size not supported"),
    "pages of 8": ({**ROWS, "block_size": 8}, {}, f"{INVALID}.*block_size not supported"),
    "whole images": (ROWS, {"use_mm_prefix": True}, f"{INVALID}.*multimodal token full attention"),
    "an encoder": (ROWS, {"attn_type": "encoder_only"}, f"{INVALID}.*encoder_only not supported"),
    "context parallelism": (
        {**ROWS, **TWO_RANKS, "decode_context_parallel_size": 2},
        {},
        f"{INVALID}.*DCP not supported",
    ),
    "batch invariance": (
        {**ROWS, "env": {"VLLM_BATCH_INVARIANT": "1"}},
        {},
        f"{INVALID}.*batch invariance not supported",
    ),
}
LATENT_ROWS = {**CUSTOM, "additional_config": {"kvquant": {"format": "fp8"}}}
DEEPSEEK = DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4},
    first_k_dense_replace=2,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    architectures=["DeepseekV3ForCausalLM"],
)
# the same of a model with latent attention: what is found, or the error
OF_LATENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "latent rows": (LATENT_ROWS, LATENT, OURS),
    "latent rows in float32": (
        LATENT_ROWS,
        {**LATENT, "dtype": "float32"},
        f"{INVALID}.*dtype not supported",
    ),
    "latent rows beside fp8 of vLLM": (
        LATENT_ROWS,
        {**LATENT, "kv_cache_dtype": "fp8_ds_mla"},
        f"{INVALID}.*kv_cache_dtype not supported",
    ),
    "an indexer": (LATENT_ROWS, {**LATENT, "use_sparse": True}, f"{INVALID}.*sparse not supported"),
    "latent rows and context parallelism": (
        {**LATENT_ROWS, **TWO_RANKS, "decode_context_parallel_size": 2},
        LATENT,
        f"{INVALID}.*DCP not supported",
    ),
    "latent rows, no backend": (
        {"additional_config": LATENT_ROWS["additional_config"]},
        LATENT,
        HIDDEN,
    ),
    "rows of heads for latents": (ROWS, LATENT, "for a model with latent attention, is"),
    "latent rows for heads": (LATENT_ROWS, {}, f"{INVALID}.*non-MLA not supported"),
}
DEMO = [[1, 160, "torch.uint8"]]  # KV heads, bytes of a token in each
NARROW = {"rows": [[2, 96, "torch.uint8"]]}  # two KV heads of head_dim 64
USUAL = {"layout": "LBHNC", "graphs": "FULL_AND_PIECEWISE", "rows": DEMO, "runner": 2}
SERVED = {"pages": [16, 16], "layers": {"KVQuantBackend": 4}}


def graphs(mode: str) -> dict[str, Any]:
    return {**ROWS, "compilation_config": {"cudagraph_mode": mode}}


STARTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the demo model": (ROWS, SERVED),
    "K and V of other lengths": (
        {**CUSTOM, "additional_config": {"kvquant": {"k_format": "int8", "v_format": "int4-g4"}}},
        {**SERVED, "rows": [[1, 212, "torch.uint8"]]},
    ),
    "eagerly": ({**ROWS, "enforce_eager": True}, {**SERVED, "graphs": "NONE"}),
    "graphs of steps that decode": (
        graphs("FULL_DECODE_ONLY"),
        {**SERVED, "graphs": "FULL_DECODE_ONLY"},
    ),
    "graphs of parts": (graphs("PIECEWISE"), {**SERVED, "graphs": "PIECEWISE"}),
    "graphs of whole steps, prompts too": (graphs("FULL"), SERVED),  # which vLLM takes back
    "with a connector": ({**ROWS, "kv_transfer_config": OFFLOADING}, SERVED),
    "a layout by its old name": ({**ROWS, "env": {"VLLM_KV_CACHE_LAYOUT": "HND"}}, SERVED),
    "pages that are split": (
        {**ROWS, "block_size": 48},
        {"pages": [48, 16], "layers": {"KVQuantBackend": 4}},
    ),
    "a draft model": (
        {**ROWS, "speculative_config": DRAFTS},
        {"pages": [16, 16], "layers": {"KVQuantBackend": 8}},
    ),
    "a draft model, first runner": (
        {**ROWS, **FIRST, "speculative_config": DRAFTS},
        {
            "runner": 1,
            "pages": [16, 16],
            "layers": {"KVQuantBackend": 4, "FlashAttentionBackend": 4},
            "rows": [*DEMO, [1, 512, "torch.bfloat16"]],
        },
    ),
    "a draft model with rows, first runner": (
        {**ROWS, **FIRST, "speculative_config": {**DRAFTS, **CUSTOM}},
        {"runner": 1, "pages": [16, 16], "layers": {"KVQuantBackend": 8}},
    ),
}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "a layout that no kernel reads": (
        {**ROWS, "env": {"VLLM_KV_CACHE_LAYOUT": "NHD"}},
        "VLLM_KV_CACHE_LAYOUT=NHD does not satisfy every supported set.*LBHNC",
    )
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek": (
        DEEPSEEK,
        {
            "rows": [[1, 656, "torch.uint8"]],
            "pages": [16, 16],
            "layers": {"KVQuantLatentBackend": 2},
        },
    ),
    "windows in every second layer": (
        Gemma2Config(**SIZES, architectures=["Gemma2ForCausalLM"]),
        {**NARROW, "pages": [16, 16, 16], "layers": {"KVQuantBackend": 1}},  # of each group
    ),
    "a hybrid": (
        FalconH1Config(
            **SIZES,
            mamba_d_ssm=128,
            mamba_n_heads=2,
            mamba_d_head=64,
            mamba_d_state=16,
            architectures=["FalconH1ForCausalLM"],
        ),
        {
            **NARROW,
            "pages": [32, 32, 32],
            "layers": {"KVQuantBackend": 2, "Mamba2AttentionBackend": 2},
        },
    ),
}


BY_LAYER = ["int8 int4", "int4-g4 int4-g4", "int4-g4 int4-g4", "int8 int8"]
PLANNED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "layers with formats of their own": ({}, [160, 200, 264]),
    "beside a draft model": ({"speculative_config": DRAFTS}, [160, 200, 264]),
    "pages that are split, by layer": ({"block_size": 48}, [160, 200, 264]),
}


class Platform:
    """What was found for each case, and all that was printed."""

    def __init__(self, folder: Path) -> None:
        usual = {"model": str(MODEL)}
        cases: dict[str, list[Any]] = {
            "process": ["choose_in_another_process", {**usual, **ROWS}],
            "vision": ["choose_in_vision", {**usual, **ROWS}],
            "serve": ["serve", {**usual, **ROWS}],
            "fp8": ["start", {**usual, "attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"}],
            "triton": ["start", {**usual, "attention_backend": "TRITON_ATTN"}],
        }
        for name, (options, layer, _) in {**CHOSEN, **REFUSED}.items():
            cases[name] = ["choose", {**usual, **options}, layer]
        for name, (options, _) in {**STARTED, **LAYOUTS}.items():
            cases[name] = ["start", {**usual, **options}]
        for name, (config, _) in MODELS.items():
            config.save_pretrained(folder / name)
            rows = LATENT_ROWS if config is DEEPSEEK else ROWS
            cases[name] = ["start", {**rows, "model": str(folder / name)}]
        for name, (options, layer, _) in OF_LATENTS.items():
            cases[name] = ["choose", {"model": str(folder / "deepseek"), **options}, layer]
        plan = example_plan(4, 1, 128, config=AutoConfig.from_pretrained(MODEL).to_dict())
        plan.facts["layers"][-1] = plan.facts["layers"][0]
        given_plan = with_layer_formats(plan, BY_LAYER, folder / "plan.safetensors")
        for name, (options, _) in PLANNED.items():
            rows = {"additional_config": {"kvquant": {"plan": given_plan}}}
            cases[name] = ["start", {**usual, **CUSTOM, **rows, **options}]
        script = ROOT / "tests" / "support" / "vllm_on_cuda.py"
        path = [str(ROOT / "tests" / "support" / "gpu_site"), *filter(None, sys.path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(folder)}
        hidden = [
            name
            for name, of in packages_distributions().items()
            if {canonicalize_name(x) for x in of} & {*PACK.not_needed}
        ]
        assert {"mistral_common", "xgrammar", "anthropic", "mcp"} <= {*hidden}
        assert not {"loguru", "model_hosting_container_standards"} & {*hidden}
        given = hidden, PACK.left_out, str(script), [*cases.values()], MODULES
        command = [sys.executable, "-c", WITHOUT, *map(json.dumps, given)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600
        )
        self.printed = done.stdout + done.stderr
        assert done.returncode == 0, self.printed[-3000:]
        lines = [x.partition("FOUND ")[2] for x in done.stdout.splitlines() if "FOUND " in x]
        self.found = dict(zip(cases, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Platform:
    return Platform(tmp_path_factory.mktemp("cuda_platform"))


@pytest.mark.parametrize("case", ["process", *CHOSEN])
def test_the_backend_is_found_by_its_name(case: str, platform: Platform) -> None:
    """In a spawned worker ("process"), too."""
    rows = INT4 if case == "process" else CHOSEN[case][-1]
    assert platform.found[case] == {"name": OURS, "rows": rows}


def test_engines_without_rows_and_a_server_start(platform: Platform) -> None:
    assert platform.found["serve"] > 20  # routes
    assert all(platform.found[name]["pages"] for name in ("fp8", "triton"))


def test_image_encoders_keep_their_backend(platform: Platform) -> None:
    assert platform.found["vision"] == "FLASH_ATTN"


WORDS = {name: words for name, (*_, words) in {**REFUSED, **OF_LATENTS}.items()}
WORDS |= {name: words for name, (_, words) in LAYOUTS.items()}


@pytest.mark.parametrize("case", WORDS)
def test_what_cannot_be_served_is_refused(case: str, platform: Platform) -> None:
    """And what can be, of models with latent attention."""
    found = str(platform.found[case])
    assert re.search(WORDS[case], found), found


@pytest.mark.parametrize("case", [*STARTED, *MODELS])
def test_an_engine_starts(case: str, platform: Platform) -> None:
    _, wanted = {**STARTED, **MODELS}[case]
    assert platform.found[case] == {**USUAL, **wanted}


@pytest.mark.parametrize("case", PLANNED)
def test_layers_have_pages_of_their_own_size(case: str, platform: Platform) -> None:
    """A draft model's layers have the longest rows."""
    options, sizes = PLANNED[case]
    found = platform.found[case]
    assert found["rows"] == [[1, size, "torch.uint8"] for size in sizes]
    split = options.get("block_size")
    assert found["pages"] == ([split, 16] if split else [16, 16])
    assert found["graphs"] == USUAL["graphs"]


def test_layers_without_rows_are_told(platform: Platform) -> None:
    """vLLM's first model runner gives a draft model a backend of vLLM's choice."""
    told = [line for line in platform.printed.splitlines() if "have no rows" in line]
    assert len(told) == 1
    assert "4 layers have no rows, their backend is FLASH_ATTN: draft_model.model.lay" in told[0]
