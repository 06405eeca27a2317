"""First pages and last tokens in 16 bit in vLLM's engine, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import INT4, TOKENS, counter, engine, generate, logits_of, window_prompts
from vllm_texts import Text

from kvquant import ConfigError

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Not here: vLLM reads what it has not written, and throws it away."""


def test_first_pages_and_last_tokens_keep_logits(of_own_attention: Any) -> None:
    """In prompts in chunks, in generated tokens, and behind pages of earlier requests."""
    windows, scored = window_prompts()
    exact = of_own_attention["logits"].log_softmax(-1)
    prompts, wanted = (of_own_attention["own"][i][-5:] for i in (0, 1))
    found = []
    for recent_len in (0, 64):
        with engine({**INT4, "recent_len": recent_len}, max_num_batched_tokens=96) as llm:
            logits = logits_of(llm, windows, scored).log_softmax(-1)
            kl = float((exact.exp() * (exact - logits)).sum(-1).mean())
            moves = [_moved(generate(llm, prompts, TOKENS), wanted) for _ in range(2)]
            hits = sum((len(one["prompt_token_ids"]) - 1) // 32 * 32 for one in prompts)
            assert counter(llm, "prefix_cache_hits") >= hits
        found.append([kl, *moves])
    bare, kept = found
    assert kept[0] < bare[0] / 2
    assert max(kept[1:]) < min(bare[1:]) / 1.4  # as the square root of KL


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


def test_a_connector_writes_no_16_bit_rows(own: Any, tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    storage = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    with (
        pytest.raises(ConfigError, match="recent_len.* a connector .*leave it out"),
        engine({**INT4, "recent_len": 64}, kv_transfer_config=storage) as llm,
    ):
        generate(llm, own[0][:1], 1)
