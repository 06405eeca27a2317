"""Engines of vLLM in this process, on the demo model; only where vLLM is installed."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_texts import Text, as_tokens

from kvquant import CachePlan
from kvquant.calibration.windows import spread

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "llama-demo-5m"
TEXT = ROOT / "examples" / "unseen.txt"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
# without tokens in 16 bit, except in test_window.py
INT4: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4", "recent_len": 0}
LENGTHS = [1, 2, 5, 17, 31, 32, 33, 60, 64, 65, 90, 128, 150, 200, 257, 300]  # of prompts
TOKENS = 16  # that are generated
WINDOWS, CONTEXT, SCORED = 8, 256, 64  # of a text, and their tokens
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process: vLLM is imported once
    "VLLM_NO_USAGE_STATS": "1",
}


SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
}


def random_model(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> str:
    """Save a small model with random weights. It has no tokenizer: give prompts as token ids.

    Experts give zeros. Sink logits are numbers of bfloat16, in which SGLang keeps them.

    Args:
        folder: where the model is saved.
        config: of the model, for example with SIZES.
        dtype: of the saved weights; the saved config names it.

    Returns:
        The folder.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "sinks" in name:
            weight.data = torch.randn_like(weight).bfloat16().to(weight.dtype)
        if "experts.down_proj" in name:
            torch.nn.init.zeros_(weight)
    model.to(dtype).save_pretrained(folder)
    return str(folder)


@contextmanager
def engine(rows: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    """Make an LLM, and leave its memory.

    Args:
        rows: what additional_config says under "kvquant"; None for vLLM's own attention.
        options: of vllm.LLM.
    """
    from vllm import LLM
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    # vLLM has one engine a process in mind: backends are remembered
    selector._cached_get_attn_backend.cache_clear()
    if current_platform.is_cpu():
        _replace_triton_kernels(type(current_platform))
    given = {
        "model": str(MODEL),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "disable_log_stats": False,
    }
    config = {"additional_config": {"kvquant": rows}} if rows else {}
    # vLLM collects garbage ten times an engine. freeze keeps modules out of these collections, and
    # the patch keeps vLLM from undoing that
    gc.freeze()
    with patch.multiple(gc, freeze=lambda: None, unfreeze=lambda: None):
        llm = LLM(**{**given, **config, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


def _replace_triton_kernels(platform: Any) -> None:
    """Let vLLM replace them, once: its search of all modules fails at llvmlite's, numba's own."""
    hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name[:8] == "llvmlite"}
    try:
        platform.register_triton_kernel_overrides()
    finally:
        sys.modules.update(hidden)
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def generate(
    llm: Any, prompts: Sequence[list[int]], tokens: int = 24, **options: Any
) -> list[Text]:
    """The texts of prompts that are given at once, greedy unless options say otherwise."""
    from vllm import SamplingParams

    given = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 5, **options}
    done = llm.generate(as_tokens(prompts), SamplingParams(**given), use_tqdm=False)
    return [text for request in done for text in Text.all_of(request)]


def counter(llm: Any, name: str) -> int:
    """A metric of the engine since it was made."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def begun_of(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What layers would begin to compile on a GPU, when they are made."""
    from kvquant.vllm import backend

    begun: list[Any] = []
    config = llm.llm_engine.vllm_config
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        patched.setattr(backend, "begin_warm_up", lambda device, calls: begun.append(calls))
        for layer in config.compilation_config.static_forward_context.values():
            backend.begin_to_compile(config, layer.impl)
    return begun


def mixed_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Prompts from a text that the demo model has not seen; no two of them begin alike."""
    ids = held_out(AutoTokenizer.from_pretrained(MODEL))
    step = (len(ids) - max(lengths)) // len(lengths)
    return [ids[i * step :][:length] for i, length in enumerate(lengths)]


def random_prompts(*lengths: int) -> list[list[int]]:
    """Prompts for a model with random weights, which begin alike."""
    return [[7 * i * i % 256 for i in range(n)] for n in lengths]


def held_out(tokenizer: Any) -> list[int]:
    """The last quarter of that text, which `kvquant calibrate` scores on."""
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    return ids[len(ids) - len(ids) // 4 :]


def held_out_windows() -> torch.Tensor:
    """Windows of it that do not overlap, [WINDOWS, CONTEXT + SCORED + 1], as calibrate has them."""
    ids = held_out(AutoTokenizer.from_pretrained(MODEL))
    return spread(ids, WINDOWS, CONTEXT + SCORED + 1)


def logits_of(llm: Any, prompts: Sequence[list[int]], scored: int, **options: Any) -> torch.Tensor:
    """Logits of the last tokens of prompts, [prompts, scored, vocabulary]."""
    return torch.stack([rows[-scored:] for rows in all_logits_of(llm, prompts, **options)])


def all_logits_of(llm: Any, prompts: Sequence[list[int]], **options: Any) -> list[torch.Tensor]:
    """Logits of the tokens of each prompt, [tokens, vocabulary].

    Prompts are read by the engine as everywhere, in chunks; it computes logits of all their tokens
    where it is asked for their log-probabilities. Some engines leave the last token out.
    """
    kept: list[torch.Tensor] = []

    def keep(model: Any) -> None:
        compute = model.compute_logits

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = compute(hidden)
            if len(logits) > 1:  # those of one row are sampled from
                kept.append(logits.float())
            return logits

        model.compute_logits = computed

    llm.apply_model(keep)
    found = []
    for prompt in prompts:
        kept.clear()
        generate(llm, [prompt], 1, prompt_logprobs=1, **options)
        found.append(torch.cat(kept))
    return found


def noisy_draft_model(folder: Path) -> dict[str, Any]:
    """A speculative_config with the demo model as draft model, with noise in its weights, so that
    some of its drafts are wrong."""
    shutil.copytree(MODEL, folder)
    torch.manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = load_file(path)
        noisy = {k: x + 0.05 * x.std() * torch.randn_like(x) for k, x in weights.items()}
        save_file(noisy, path, metadata={"format": "pt"})
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


def with_layer_formats(plan: CachePlan, names: Sequence[str], path: Path) -> str:
    """Save a plan with a pair of formats for each layer ("int8 int4"); its path."""
    pairs = [name.split() for name in names]
    formats = {(i, side): pair[j] for i, pair in enumerate(pairs) for j, side in enumerate("kv")}
    plan.with_layer_formats(formats).save(path)
    return str(path)


def make_plan(path: Path, by_layer: Sequence[str] = (), observed: int = 1024) -> str:
    """A plan of the demo model, made without text, in 20 seconds; its path.

    by_layer has the formats of K and V of each layer; without it all are int4-g4.
    observed is how many tokens it observes: with a quarter it is made in 5 seconds, and is worse.
    """
    from click.testing import CliRunner

    from kvquant.cli.main import main

    sizes = ["--observed", str(observed), "--length", str(observed // 2), "--rounding", "nearest"]
    given = [str(MODEL), "--zero-data", *sizes, "--format", "int4-g4", "-o", str(path)]
    done = CliRunner().invoke(main, ["calibrate", *given], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    if by_layer:
        return with_layer_formats(CachePlan.load(path), by_layer, path)
    return str(path)
