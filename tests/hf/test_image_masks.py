"""Masks told by their values: Gemma 3 and 4 that take images, whose prompts come with token types.

Their processors give token types with every prompt. Those of a text are zeros: the mask is then
causal, made by other code than that of a model of text.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    FP16,
    WITH_LOGITS,
    RoundedCache,
    assert_alike,
    by_kvquant,
    caching,
)

from kvquant.errors import UnsupportedModelError  # noqa: E402
from kvquant.hf.cache import QuantizedCache  # noqa: E402

WINDOW, IMAGE = 8, 90
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False} | WITH_LOGITS


def gemma(kind: str) -> Any:
    """A random model; no token ends its texts."""
    torch.manual_seed(0)
    names = {"boi_token_id": 91, "eoi_token_id": 92}
    if kind == "Gemma3":
        names = {"image_token_index": IMAGE, "boi_token_index": 91, "eoi_token_index": 92}
        config = transformers.Gemma3Config(
            text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, **names
        )
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 64}
        text = TEXT | own | {"use_bidirectional_attention": "vision"}
        vision = VISION | {"pooling_kernel_size": 2, "position_embedding_size": 16}
        towers: dict[str, Any] = {
            "text_config": text,
            "vision_config": vision,
            "audio_config": None,
        }
        config = transformers.Gemma4Config(**towers, image_token_id=IMAGE, **names)
        model = transformers.Gemma4ForConditionalGeneration(config)
    model.generation_config.eos_token_id = None
    for weight in model.parameters():
        if weight.ndim > 1:  # so large that masks matter
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
    return model.eval()


def prompt(kind: str, columns: int, *, with_image: bool = False, pads: int = 0) -> dict[str, Any]:
    """What the processor of a model makes of a text: token types, and pixels of an image."""
    torch.manual_seed(columns)
    ids = torch.randint(3, 80, (1 + (pads > 0), columns))
    mask = torch.ones_like(ids)
    if pads:
        mask[1, :pads] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if with_image:
        ids[:, 3:7] = IMAGE
        found["pixel_values"] = torch.randn(1, 3, 28, 28)
        if kind == "Gemma4":
            x, y = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")
            found["pixel_values"] = torch.randn(1, 16, 3 * 14 * 14)
            found["image_position_ids"] = torch.stack([x, y], dim=-1).reshape(1, 16, 2)
    types = "token_type_ids" if kind == "Gemma3" else "mm_token_type_ids"
    return found | {types: (ids == IMAGE).long()}


@pytest.fixture(scope="module", params=["Gemma3", "Gemma4"])
def model(request: pytest.FixtureRequest) -> Any:
    return gemma(request.param)


def kind_of(model: Any) -> str:
    return type(model).__name__.removesuffix("ForConditionalGeneration")


def answers(model: Any, given: dict[str, Any], past: Any, **more: Any) -> Any:
    return model.generate(**given, **caching(past), **OPTIONS, **more)


@pytest.mark.parametrize("columns", [WINDOW - 2, 3 * WINDOW])
@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}], ids=["", "chunks"])
def test_a_text_with_token_types_is_causal(
    columns: int, pads: int, options: dict[str, Any], model: Any
) -> None:
    given = prompt(kind_of(model), columns, pads=pads)
    model.set_attn_implementation("sdpa")
    wanted = answers(model, given, RoundedCache())
    by_kvquant(model)
    past = QuantizedCache(model, **FP16)
    assert_alike(answers(model, given, past, **options), wanted)
    assert past.kv is not None and past.kv.windows == [WINDOW, None]


def test_a_later_turn_has_token_types_too(model: Any) -> None:
    by_kvquant(model)
    past, given = QuantizedCache(model, **FP16), prompt(kind_of(model), 12)
    found = answers(model, given, past).sequences
    again = prompt(kind_of(model), 30)
    again["input_ids"][:, : found.shape[1]] = found
    alone = QuantizedCache(model, **FP16)
    assert_alike(answers(model, again, past), answers(model, again, alone))


def test_an_image_is_refused_and_dequantized_rows_serve_it(model: Any) -> None:
    """Its tokens see each other, later ones too. A refused prompt leaves the cache empty."""
    given = prompt(kind_of(model), WINDOW + 2, with_image=True)
    model.set_attn_implementation("sdpa")
    wanted = answers(model, given, RoundedCache())
    by_kvquant(model)
    past = QuantizedCache(model, **FP16)
    with pytest.raises(
        UnsupportedModelError, match=r"tokens of an image .*dequantize=True\) serves"
    ):
        answers(model, given, past)
    assert past.get_seq_length() == 0
    answers(model, prompt(kind_of(model), 12), past)
    assert_alike(answers(model, given, QuantizedCache(model, **FP16, dequantize=True)), wanted)
    types = [name for name in given if name.endswith("token_type_ids")]
    causal = answers(model, given | {types[0]: torch.zeros_like(given[types[0]])}, RoundedCache())
    assert (causal.logits[0] - wanted.logits[0]).abs().max() > 0.02  # what the mask is worth


def test_steps_behind_a_text_with_token_types_are_compiled(model: Any) -> None:
    """A graph asks for masks of plain functions, which the prompt has not made."""
    by_kvquant(model)
    torch._dynamo.reset()
    columns = 3 * WINDOW if kind_of(model) == "Gemma3" else WINDOW - 2
    given, logits = prompt(kind_of(model), columns), []
    for step in (model, torch.compile(model.forward, fullgraph=True, backend="eager")):
        past = QuantizedCache(model, **FP16, max_seq_len=40)
        model(**given, **caching(past))
        for token in range(5, 5 + WINDOW):
            found = step(torch.tensor([[token]]), **caching(past), use_cache=True).logits
        logits.append(found)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    torch._dynamo.reset()


def test_masks_of_ones_own_are_compared_by_value_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other code, and causal or not in a single place of the last block."""
    from kvquant.hf import masks

    monkeypatch.setattr(masks, "BLOCK", 5)
    ids = torch.randint(3, 80, (1, 13))
    types = torch.zeros_like(ids)
    own = by_kvquant(gemma("Gemma3"))
    for changed in ([], [0], [11], [11, 12], [4, 5]):
        types.zero_()
        types[0, changed] = 1
        past = QuantizedCache(own, **FP16)
        if len(changed) < 2:  # one token alone sees no later one
            own(ids, token_type_ids=types, **caching(past))
            continue
        with pytest.raises(UnsupportedModelError, match="neither causal"):
            own(ids, token_type_ids=types, **caching(past))
