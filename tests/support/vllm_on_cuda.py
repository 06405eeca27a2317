"""vLLM's CUDA platform where there is no GPU: run by a test, which gives it cases as JSON.

vLLM chooses and starts attention backends as it does on a GPU, up to the first kernel: the model is
made on the CPU and nothing runs. The compiled parts of vLLM's CUDA build are empty here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import tempfile
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # before vLLM is imported
CAPABILITY = "nvmlDeviceGetCudaComputeCapability"
NVML: dict[str, Any] = {  # what the driver of one H200 says
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    CAPABILITY: (9, 0),
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-0",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=140 << 30, free=140 << 30, used=0),
}
COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C")


def pretend() -> None:
    """Let vLLM find an H200. Called where this module is imported: in spawned processes, too."""
    import triton.backends
    import vllm.third_party.pynvml as nvml

    for name, value in NVML.items():
        setattr(nvml, name, lambda *_, value=value: value)
    sys.modules |= {name: ModuleType(name) for name in COMPILED}
    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["nvidia"] = SimpleNamespace(driver=driver, compiler=None)
    from vllm import platforms

    assert platforms._current_platform is None
    platforms.vllm_version_matches_substr = lambda substr: False  # of "cpu", in vLLM's version
    assert platforms.current_platform.is_cuda()
    import torch
    import vllm._custom_ops  # noqa: F401  # it asks which operators there are

    known = torch.ops._C

    class Operators:  # modules of compiler passes name those of the CUDA build
        def __getattr__(self, name: str) -> Any:
            return getattr(known, name) if hasattr(known, name) else MagicMock()

    torch.ops._C = Operators()  # type: ignore[attr-defined]


def config_of(options: dict[str, Any]) -> Any:
    """The config of an engine with these options of vllm.LLM; nothing is remembered of another."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()
    usual = {"dtype": "bfloat16", "max_model_len": 1024, "skip_tokenizer_init": True}
    return EngineArgs(**{**usual, **options}).create_engine_config()


def choose(config: Any, layer: dict[str, Any]) -> dict[str, Any]:
    """The backend that vLLM chooses for a layer of 16-bit K and V with head_dim 128; layer may have
    the "capability" of the GPU."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import get_attn_backend

    given = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", **layer}
    if isinstance(given["dtype"], str):
        given["dtype"] = getattr(torch, given["dtype"])
    capability = DeviceCapability(*given.pop("capability", NVML[CAPABILITY]))
    with (
        set_current_vllm_config(config),
        patch.object(type(current_platform), "get_device_capability", lambda *_, **__: capability),
    ):
        found = get_attn_backend(**given)
        name = ".".join(found.full_cls_name())
        assert resolve_obj_by_qualname(name) is found
        assert pickle.loads(pickle.dumps(found)) is found
    request = getattr(found, "request", None)
    return {"name": name, "rows": request and json.loads(request.given)}


def choose_in_vision(config: Any) -> str:
    """The backend of an image encoder, which holds no tokens."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    with set_current_vllm_config(config):
        return str(current_platform.get_vit_attn_backend(64, torch.bfloat16).name)


def choose_in_another_process(config: Any) -> dict[str, Any]:
    """As choose, in a spawned process that gets the config by pickle, as vLLM's workers do."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_choose_here, (config,))


def _choose_here(config: Any) -> dict[str, Any]:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as each worker does first
    return choose(config, {})


def start(config: Any) -> dict[str, Any]:
    """Make a model and all that an engine's start asks of its backends, in the order of vLLM."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.engine import core
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec, init_attn_backend

    drafts = config.speculative_config
    with _one_rank(config), set_current_vllm_config(config):
        initialize_model(config)
        if drafts is not None:
            _load_draft_model(config)
        for layer in config.compilation_config.static_forward_context.values():
            if type(getattr(layer, "impl", None)).__name__ == "KVQuantImpl":  # behind its weights
                layer.process_weights_after_loading(config.model_config.dtype)
        current_platform.update_block_size_for_backend(config)
        specs = get_kv_cache_spec(config)
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        layout = resolve_kv_cache_layout(config, [[one.name for one in layouts]], specs.values())
        given = [config, [specs], [1 << 28]]
        if hasattr(core, "get_global_kv_cache_groups"):  # since vLLM 0.33
            given.append(core.get_global_kv_cache_groups(config, [specs]))
        (pages,) = core.get_kv_cache_configs(*given)
        cpu = torch.device("cpu")
        groups, support, kernel_sizes = init_attn_backend(pages, config, cpu)  # StepBuilder
        graphs = config.compilation_config.resolve_cudagraph_mode_and_sizes(
            support.min_cg_support,
            support.min_cg_attn_backend,
            1 + (drafts.num_speculative_tokens if drafts is not None else 0),
            config.use_v2_model_runner,
            pages,
            config.scheduler_config.max_num_seqs,
        )
    return {
        "runner": 2 if config.use_v2_model_runner else 1,
        "pages": [config.cache_config.block_size, *kernel_sizes],
        "rows": sorted({_rows_of(spec) for spec in specs.values() if _rows_of(spec) is not None}),
        "layout": layout.name,
        "graphs": graphs.name,
        "layers": {one.backend.__name__: len(one.layer_names) for x in groups for one in x},
    }


def serve(config: Any) -> int:
    """Make the application of vLLM's server; how many routes it has."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    given = parser.parse_args(["serve", config.model_config.model])
    return len(build_app(given, ("generate",), config.model_config).routes)


def _rows_of(spec: Any) -> tuple[int, int, str] | None:
    """KV heads, and bytes of a token in each, that a layer has in its pages."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    if not isinstance(spec, AttentionSpec):
        return None
    return spec.num_heads, spec.state_content_size_bytes, str(spec.dtype)


@contextmanager
def _one_rank(config: Any) -> Any:
    """vLLM's groups of processes, and its models' dtype."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        with set_current_vllm_config(config):
            path = os.path.join(tempfile.mkdtemp(), "store")
            init_distributed_environment(1, 0, f"file://{path}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1, backend="gloo")
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    yield
    torch.set_default_dtype(before)


def _load_draft_model(config: Any) -> None:
    """As the model runner that vLLM chose does; without weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.spec_decode import draft_model as first
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as second

    def get_model(vllm_config: Any, prefix: str, model_config: Any = None) -> Any:
        with set_current_vllm_config(vllm_config):
            return initialize_model(vllm_config, model_config=model_config, prefix=prefix)

    first.get_model = second.get_model = get_model
    drafts = config.speculative_config
    runner: Any = second.StandaloneARSpeculator
    if not config.use_v2_model_runner:
        runner = first.DraftModelProposer
    one = runner.__new__(runner)
    one.vllm_config, one.speculative_config = config, drafts
    one.draft_model_config = drafts.draft_model_config
    if config.use_v2_model_runner:
        one.load_draft_model(None, set())
    else:
        one._get_model()


def main() -> None:
    """Print for each case what was found, or the error.

    A case is [function, options, layer]: the name of a function above, what vllm.LLM is given, and
    what `choose` is given; options may have "env".
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for name, options, *layer in json.loads(sys.argv[1]):
        env = options.pop("env", {})
        os.environ |= env
        try:
            found = globals()[name](config_of(options), *layer)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        for key in env:
            del os.environ[key]
        print("FOUND", json.dumps(found), flush=True)


pretend()
if __name__ == "__main__":
    main()
