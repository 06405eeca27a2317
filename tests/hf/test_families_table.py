"""The table of families in kvquant/hf/README.md: each line is what a small random model shows.

A QuantizedCache is compared with transformers' own DynamicCache: the same prompts, one padded on
the left, and the same next tokens. With 16-bit rows logits agree up to rounding and generate gives
the same tokens; with int8 the KL divergence of the next token is at most what the table says.

The types of the table "More model types" are compared with 16-bit rows only, and evaluated. Those
that CachedModel serves also decode and are calibrated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version

pytest.importorskip("transformers")
import transformers
from families import ALL_LAYERS, CHANGES, COPIES, LATENT, LATENT_ROWS, SOME_LAYERS, lines, others
from hf_cases import (
    FP16,
    FP16_LATENTS,
    WITH_LOGITS,
    assert_alike,
    caching,
    hands_latents,
    random_module,
)
from slow_cases import mark_slow

from kvquant.calibration.calibrate import Goal, Sizes, calibrate
from kvquant.errors import UnsupportedModelError
from kvquant.evaluation.evaluate import Sizes as Amounts
from kvquant.evaluation.evaluate import Task, evaluate
from kvquant.hf.cache import QuantizedCache, QuantizedLayer
from kvquant.hf.hybrid import decoder_of
from kvquant.hf.model import CachedModel

PROMPT, STEPS, PADDING = 20, 6, 5
# that no router's choice hangs on a rounding
TWO_EXPERTS = {"num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2}
LOOSE = 0.08  # of models with large logits
OF_PLAN = 0.5  # of 8-bit rows with a plan; wrong offsets move logits by 2 and more
TOLERANCE = 0.02  # of the logits' deviation; a token more or less moves them by 0.2 and more
# others are slow
USUAL = ["llama4_text", "qwen3_next", "deepseek_v3", "falcon", "diffllama", "mimo_v2_flash"]


def logits_of(model: Any, cache: Any, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of the next token after the prompt and each later column, [columns, batch, vocabulary]."""
    found = []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for part in [slice(0, PROMPT), *(slice(at, at + 1) for at in range(PROMPT, text.shape[1]))]:
        seen = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
        found.append(model(text[:, part], **caching(cache), **seen).logits[:, -1])
    return torch.stack(found)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts and their mask, the first padded on the left."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(5, 97, (2, PROMPT + STEPS), generator=generator)
    mask = torch.ones_like(text)
    text[0, :PADDING] = mask[0, :PADDING] = 0
    return text, mask


def named(kind: str) -> Any:
    """A small random model of a type in the table "More model types"; skipped before 5.24."""
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("needs transformers 5.24, whose model types kvquant/hf/README.md lists")
    try:
        return random_module(kind, TWO_EXPERTS | CHANGES.get(kind, {}))
    except pytest.skip.Exception as error:
        raise AssertionError(f"the page lists {kind}: {error}") from error


def packed(cache: QuantizedCache) -> str:
    """What the table says of a cache: how many layers are packed, and what the others are."""
    own = sum(isinstance(layer, QuantizedLayer) for layer in cache.layers)
    others = {type(x).__name__ for x in cache.layers if not isinstance(x, QuantizedLayer)}
    others |= {"dequantize=True"} if "dequantized" in cache.describe() else set()
    return f"{own} of {len(cache.layers)}" + "".join(f", `{name}`" for name in sorted(others))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("kind", mark_slow(lines(), USUAL))
def test_the_table_says_what_a_model_shows(kind: str) -> None:
    if kind in LATENT and not hands_latents:
        pytest.skip("needs transformers 5.17, which hands a cache latents")
    told, *divergence = lines()[kind]
    model = random_module(kind, CHANGES.get(kind, {}))
    model.generation_config.eos_token_id = None
    text, mask = prompts()
    prompt = {"inputs": text[:, :PROMPT], "attention_mask": mask[:, :PROMPT]}
    options = {"max_new_tokens": STEPS, "do_sample": False} | WITH_LOGITS
    model.generation_config.use_cache = True  # MPT has it off
    rows = FP16_LATENTS if kind in LATENT else FP16
    if told.endswith(", `dequantize=True`"):
        rows = rows | {"dequantize": True}
    else:
        model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model, **rows)
    assert packed(cache) == told
    exact = logits_of(model, cache, text, mask)
    cache.reset()
    answer = model.generate(**prompt, **caching(cache), **options)
    packed_rows = {"fmt": "int8-g4"} if kind in LATENT else {"k_format": "int8", "v_format": "int8"}
    cache = QuantizedCache(model, **rows | packed_rows)
    int8 = logits_of(model, cache, text, mask)

    model.set_attn_implementation("eager")
    wanted = logits_of(model, transformers.DynamicCache(config=model.config), text, mask)
    assert float((exact - wanted).abs().max() / wanted.std()) < TOLERANCE
    assert_alike(answer, model.generate(**prompt, **options), limit=TOLERANCE)
    distance = torch.nn.functional.kl_div(
        int8[1:].log_softmax(-1), wanted[1:].log_softmax(-1), log_target=True, reduction="none"
    )
    kl = float(distance.sum(-1).mean())
    # another processor gives a few keys and values another code
    assert kl <= 1.05 * float(divergence[0]) <= 4.2 * kl, f"KL {kl:.2e}"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", mark_slow(others(), ["gpt2", "qwen3_5", "glm4_moe_lite"]))
def test_models_that_the_page_names_agree(kind: str) -> None:
    kept, model = others()[kind], named(kind)
    text, mask = prompts()
    wanted = logits_of(model, transformers.DynamicCache(config=model.config), text, mask)
    rows = FP16_LATENTS if kept == LATENT_ROWS else FP16
    if kept == COPIES:
        with pytest.raises(UnsupportedModelError, match="dequantize=True"):
            model.set_attn_implementation("kvquant")
            logits_of(model, QuantizedCache(model, **rows), text, mask)
        model.set_attn_implementation("eager")
        rows = rows | {"dequantize": True}
    else:
        model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model, **rows)
    own = sum(isinstance(layer, QuantizedLayer) for layer in cache.layers)
    assert 0 < own
    assert (own < len(cache.layers)) == (kept == SOME_LAYERS)
    exact = logits_of(model, cache, text, mask)
    assert float((exact - wanted).abs().max() / wanted.std()) < LOOSE


@pytest.mark.parametrize("kind", mark_slow(others(), ["qwen3_5"]))
def test_models_that_the_page_names_are_evaluated(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(named(kind))
    monkeypatch.setattr(decoder, "encode", lambda text: [5 + ord(one) % 90 for one in text])
    found = evaluate(
        decoder,
        ["int8-g4,sinks=0,recent=0"],
        task=Task(kinds=("kl",)),
        sizes=Amounts((48,), passages=1, scored=4),
        text="Sixteen bits are kept in eight, and eight in four. " * 20,
    )
    # routers of experts turn at roundings
    assert abs(found["kl"]["48"][0]["kl"]) < 0.2


WITHOUT_PLAN = {
    "gemma4": "unlike head_dim",
    "gemma4_unified_text": "unlike head_dim",
    "hrm_text": "runs its layers several times",
}
DECODED = [kind for kind, kept in others().items() if kept in (ALL_LAYERS, LATENT_ROWS)]


@pytest.mark.parametrize("kind", mark_slow(DECODED, ["olmo3"]))
def test_models_that_the_page_names_decode_and_calibrate(kind: str) -> None:
    model, kept = CachedModel(named(kind)), others()[kind]
    text = torch.randint(5, 97, (1600,), generator=torch.Generator().manual_seed(0))
    few = text[None, : PROMPT + STEPS]
    wanted = model.model(few).logits[0, PROMPT - 1 :]

    def error_of(**options: Any) -> float:
        """Of the logits of a prompt and of steps, in deviations of all logits."""
        cache = model.new_cache(batch=1, max_seq_len=32, **options)
        logits = [model.prefill(cache, few[:, :PROMPT])]
        logits += [model.step(cache, few[:, i]) for i in range(PROMPT, PROMPT + STEPS)]
        return float((torch.cat(logits) - wanted).abs().max() / wanted.std())

    assert error_of(**(FP16_LATENTS if kept == LATENT_ROWS else FP16)) < LOOSE
    sizes = Sizes(observed=512, length=128, windows=2, context=64, scored=8)
    goal = Goal(format="int8-g4" if kept == LATENT_ROWS else "int8")
    if kind in WITHOUT_PLAN:
        with pytest.raises(UnsupportedModelError, match=WITHOUT_PLAN[kind]):
            calibrate(model, text, sizes=sizes, goal=goal)
        return
    plan = calibrate(model, text, sizes=sizes, goal=goal)
    assert error_of(plan=plan, sink_len=0, recent_len=0) < OF_PLAN
