"""What vLLM's FlashAttention is given for prompts, and when; a stand-in takes it, without a GPU."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvquant.engine.contract import Lengths

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
HEADS, DIM = 4, 64
PLAIN = {"alibi_slopes": None, "sinks": None, "soft_cap": None, "sliding_window": None}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window and a soft cap": {"sliding_window": 20, "soft_cap": 3.0},
    "sink logits": {"sinks": torch.linspace(-1, 2, HEADS)},
}


class Stand:
    """In place of vLLM's module: takes notes."""

    def __init__(self, version: int | None) -> None:
        self.version, self.asked, self.given = version, dict[str, Any](), dict[str, Any]()

    def get_flash_attn_version(self, **asked: Any) -> int | None:
        self.asked = asked
        return self.version

    def flash_attn_varlen_func(self, *heads: torch.Tensor, **given: Any) -> None:
        self.given = {**dict(zip("qkv", heads, strict=True)), **given}


def causal_of(
    monkeypatch: pytest.MonkeyPatch, stand: Any, device: str = "cuda", **layer: Any
) -> Any:
    from kvquant.vllm import flash

    name = "vllm.v1.attention.backends.fa_utils"
    monkeypatch.setitem(sys.modules, name, stand)
    flash._tell.cache_clear()
    impl = SimpleNamespace(**{**PLAIN, "head_size": DIM, "scale": 0.11, **layer})
    return flash.causal_attention_of(impl, impl.head_size, torch.device(device))


@pytest.mark.parametrize("name", LAYERS)
def test_flash_attention_is_given_the_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand, layer = Stand(3), LAYERS[name]
    causal = causal_of(monkeypatch, stand, **layer)
    assert stand.asked == {
        "requires_alibi": False,
        "head_size": DIM,
        "has_sinks": "sinks" in layer,
        "requires_softcap": "soft_cap" in layer,
    }
    q, k, v, out = (torch.zeros(count) for count in range(4))
    lengths = Lengths((30, 7), (30, 50), torch.tensor([0, 30, 37]), torch.tensor([0, 30, 80]))
    causal(q, k, v, lengths, out)
    wanted = {
        **{"q": q, "k": k, "v": v, "out": out},
        "cu_seqlens_q": lengths.query_starts,
        "max_seqlen_q": 30,
        "cu_seqlens_k": lengths.key_starts,
        "max_seqlen_k": 50,
        "softmax_scale": 0.11,
        "causal": True,
        "window_size": [19, 0] if "sliding_window" in layer else None,  # before a token; after it
        "softcap": layer.get("soft_cap", 0.0),
        "alibi_slopes": None,
        "fa_version": 3,
        "s_aux": layer.get("sinks"),
    }
    assert stand.given.keys() == wanted.keys()
    for key, one in wanted.items():
        assert one is stand.given[key] or one == stand.given[key], key


@pytest.mark.parametrize(
    ("version", "layer", "told"),
    [
        (3, {}, "prompts attend by FlashAttention 3 of vLLM"),
        (2, {}, "prompts attend by FlashAttention 2 of vLLM"),
        (
            2,
            LAYERS["sink logits"],
            "by torch's kernels: vLLM's FlashAttention for some layers is 2",
        ),
        (4, {}, "by torch's kernels: vLLM's FlashAttention for some layers is 4"),
        (None, {}, "by torch's kernels: vLLM's FlashAttention for some layers is None"),
    ],
)
def test_the_log_says_what_prompts_attend_by(
    version: int | None,
    layer: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm"):
        found = [causal_of(monkeypatch, Stand(version), **layer) is not None]
        assert found == ["of vLLM" in told]
    lines = [record.getMessage() for record in caplog.records]  # vLLM logs other things, too
    (line,) = {line for line in lines if "kvquant: prompts attend" in line}
    assert told in line


def test_torch_serves_where_vllm_has_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert causal_of(monkeypatch, ModuleType("without")) is None
    assert causal_of(monkeypatch, Stand(3), "cpu") is None
