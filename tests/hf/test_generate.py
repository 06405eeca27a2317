"""What a user of transformers' generate and pipelines does with a QuantizedCache (8 s)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from hf_cases import FP16  # noqa: E402

from kvquant.errors import ConfigError  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402

BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
TEXT = "The city of Manila was founded"


@pytest.fixture(scope="module")
def model() -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED)
    found.set_attn_implementation("kvquant")
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(BUNDLED)


def test_generation_ends_at_strings(model: Any, tokenizer: Any) -> None:
    prompt = tokenizer(TEXT, return_tensors="pt")
    options = {"max_new_tokens": 60, "do_sample": False, "tokenizer": tokenizer}
    wanted = model.generate(**prompt, stop_strings=["."], **options)
    cache = QuantizedCache(model, **FP16)
    found = model.generate(**prompt, **cache.argument, stop_strings=["."], **options)
    assert torch.equal(found, wanted) and tokenizer.decode(found[0]).endswith(".")
    assert found.shape[1] < prompt.input_ids.shape[1] + 60


@pytest.mark.parametrize("options", [{}, {"stop_sequence": "."}], ids=["", "stop_sequence"])
def test_a_pipeline_takes_the_cache(options: dict[str, Any], model: Any, tokenizer: Any) -> None:
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = options | {"max_new_tokens": 30, "do_sample": False}
    wanted = pipe(TEXT, **options)[0]["generated_text"]
    cache = QuantizedCache(model, **FP16)
    assert pipe(TEXT, **cache.argument, **options)[0]["generated_text"] == wanted
    assert cache.kv is not None and int(cache.kv.seq_lens) == cache.get_seq_length() > 6
    assert not options.get("stop_sequence") or wanted.endswith(".")


def test_a_loss_of_several_batches_is_that_without_a_cache(model: Any) -> None:
    ids = torch.randint(5, 97, (1, 12))
    given = {"labels": ids, "num_items_in_batch": 24}
    with torch.no_grad():
        wanted = model(ids, **given, use_cache=False).loss
        found = model(ids, **given, **QuantizedCache(model, **FP16).argument).loss
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


def test_prompts_padded_on_the_right_are_told(model: Any, tokenizer: Any) -> None:
    batch = tokenizer([TEXT, "Nero"], padding=True, padding_side="right", return_tensors="pt")
    with pytest.raises(ConfigError, match=r"For generate pad prompts on the left \(tokenizer"):
        model.generate(**batch, **QuantizedCache(model).argument, max_new_tokens=3)


@pytest.mark.parametrize("drafts", ["prompt_lookup_num_tokens", "assistant_model"])
def test_drafts_with_a_cache_that_holds_tokens_are_told(drafts: str, model: Any) -> None:
    ids, cache = torch.arange(5, 15)[None], QuantizedCache(model)
    with torch.no_grad():
        model(ids[:, :6], **cache.argument)
    options = {drafts: 3 if drafts == "prompt_lookup_num_tokens" else model}
    with pytest.raises(ConfigError, match=r"6 tokens .* drafts .*: draft with an empty cache"):
        model.generate(ids, **cache.argument, max_new_tokens=5, **options)
    assert cache.kv is not None and cache.kv.seq_lens.tolist() == [6]
