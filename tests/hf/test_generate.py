"""What a user of transformers' generate and pipelines does with a QuantizedCache (8 s)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from hf_cases import FP16, WITH_LOGITS, sure_text  # noqa: E402

from kvquant.errors import ConfigError  # noqa: E402
from kvquant.hf.cache import DRAFTS, QuantizedCache  # noqa: E402

BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
TEXT = "The first ship"


@pytest.fixture(scope="module")
def model() -> Any:
    """In float32: of 16-bit logits many are the largest."""
    found = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    found.set_attn_implementation("kvquant")
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BUNDLED)


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 20}, {"max_new_tokens": 60, "stop_sequence": "."}],
    ids=["", "stop_sequence"],
)
def test_a_pipeline_takes_the_cache(options: dict[str, Any], model: Any, tokenizer: Any) -> None:
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = tokenizer(TEXT, return_tensors="pt")
    sentence: dict[str, Any] = {"stop_strings": ["."], "tokenizer": tokenizer, "do_sample": False}
    sure_text(model.generate(**prompt, max_new_tokens=60, **sentence, **WITH_LOGITS))
    wanted = pipe(TEXT, do_sample=False, **options)[0]["generated_text"]
    cache = QuantizedCache(model, **FP16)
    found = pipe(TEXT, do_sample=False, **cache.argument, **options)[0]["generated_text"]
    assert found == wanted
    assert cache.kv is not None and int(cache.kv.seq_lens) == cache.get_seq_length() > 6
    assert not options.get("stop_sequence") or wanted.endswith(".")


def test_prompts_padded_on_the_right_are_told(model: Any, tokenizer: Any) -> None:
    batch = tokenizer([TEXT, "Nero"], padding=True, padding_side="right", return_tensors="pt")
    with pytest.raises(ConfigError, match=r"For generate pad prompts on the left \(tokenizer"):
        model.generate(**batch, **QuantizedCache(model).argument, max_new_tokens=3)


def test_kernels_of_drafts_are_compiled_where_drafts_will_come(model: Any) -> None:
    """By the first append, which is that of the prompt (tests/cache/test_warmup.py)."""
    ids, found = torch.arange(5, 15)[None], []
    kinds: list[dict[str, Any]] = [{}, {"drafts": False}, {"dequantize": True}]
    for options in kinds:
        for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
            cache = QuantizedCache(model, **options)
            model.generate(ids, **cache.argument, max_new_tokens=3, **drafts)
            assert cache.kv is not None
            found.append(cache.kv.step_lens)
    assert found == [(1,), (*range(1, DRAFTS + 1),), (1,), (1,), (), ()]
