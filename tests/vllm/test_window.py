"""First pages and last tokens in 16 bit in vLLM's engine, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import (
    CONTEXT,
    INT4,
    SCORED,
    TOKENS,
    counter,
    engine,
    generate,
    held_out_windows,
    logits_of,
    noisy_draft_model,
    with_layer_formats,
)
from vllm_texts import Text

from kvquant import CachePlan, ConfigError
from kvquant.engine.settings import Settings

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


def test_first_pages_and_last_tokens_keep_logits() -> None:
    """In prompts in chunks, in generated tokens, and behind pages of earlier requests."""
    prompts = [window[:-1].tolist() for window in held_out_windows()[:5]]
    found: list[tuple[Any, ...]] = []
    for rows in (None, {**INT4, "recent_len": 0}, {**INT4, "recent_len": 64}):
        with engine(rows, max_num_batched_tokens=96) as llm:
            logits = logits_of(llm, prompts, SCORED).log_softmax(-1)
            texts = [generate(llm, prompts, TOKENS) for _ in range(2)]
            assert counter(llm, "prefix_cache_hits") >= 5 * (CONTEXT - 2) // 32 * 32
        found.append((logits, *texts))
    exact, bare, kept = found

    def errors(of: tuple[Any, ...]) -> list[float]:
        kl = float((exact[0].exp() * (exact[0] - of[0])).sum(-1).mean())
        return [kl**0.5, *(_moved(texts, exact[1]) for texts in of[1:])]

    for less, more in zip(errors(kept), errors(bare), strict=True):
        assert less < more / 1.4


@pytest.mark.parametrize("beside", ["a draft model", "a layer of 16-bit rows"])
def test_layers_that_have_none_do_not_take_them_from_others(
    beside: str, tmp_path: Path, plan: str
) -> None:
    """And layers with pages of other sizes have them too."""
    rows = INT4
    options: dict[str, Any] = {"max_num_batched_tokens": 96}
    if beside == "a draft model":
        options["speculative_config"] = noisy_draft_model(tmp_path / "drafts")
    else:
        names = ["int4-g4 int4-g4", "int4-g4 int4-g4", "bf16 bf16", "int4-g4 int4"]
        path = tmp_path / "plan.safetensors"
        rows = {"plan": with_layer_formats(CachePlan.load(plan), names, path)}
    prompts = [window[:-1].tolist() for window in held_out_windows()[:5]]
    found = []
    for given in (None, {**rows, "recent_len": 0}, {**rows, "recent_len": 64}):
        with engine(given, **options) as llm:
            found.append([generate(llm, prompts, TOKENS) for _ in range(2)])
            layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
            rows_of = [getattr(layer.impl, "rows", None) for layer in layers.values()]
    has_window = [one is not None and one.window is not None for one in rows_of]
    wanted = [True, True, False, True] if "layer" in beside else [True] * 4 + [False] * 4
    assert has_window == wanted
    exact, bare, kept = found
    for less, more in zip(kept, bare, strict=True):
        assert _moved(less, exact[0]) < _moved(more, exact[0]) / 1.4


def _moved(found: Sequence[Text], wanted: Sequence[Text]) -> float:
    """By how much log-probabilities of likely tokens moved, in the mean, while texts are alike."""
    moves = []
    for ours, theirs in zip(found, wanted, strict=True):
        steps = zip(ours.ids, theirs.ids, ours.known, theirs.known, strict=True)
        for token, other, here, there in steps:
            moves += [abs(here[one] - x) for one, x in there.items() if one in here]
            if token != other:
                break
    return sum(moves) / len(moves)


def test_where_tokens_cannot_be_in_16_bit() -> None:
    from kvquant.vllm.backend import _without_window

    def why(connector: Any, ubatching: bool) -> str | None:
        parallel = SimpleNamespace(use_ubatching=ubatching)
        one: Any = SimpleNamespace(kv_transfer_config=connector, parallel_config=parallel)
        return _without_window(one)

    assert why(None, False) is None
    layout, asked = Settings(None, None).layout(2, 64, 64), Settings.parse({"recent_len": 64})
    for refused, words in (
        (why(object(), False), "a connector"),
        (why(None, True), "--enable-dbo"),
    ):
        with pytest.raises(
            ConfigError, match=rf'"recent_len" is 64, and .*{words}.*: leave it out'
        ):
            asked.window_len(layout, refused)
        assert Settings.parse({}).window_len(layout, refused) == 0
