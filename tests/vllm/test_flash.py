"""What vLLM's FlashAttention is given for prompts, and when; a stand-in takes it, without a GPU."""

from __future__ import annotations

import logging
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvquant import AttentionVariant
from kvquant.engine.contract import Lengths
from kvquant.ops.causal import causal_attention

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
HEADS, DIM = 4, 64
PLAIN = {"alibi_slopes": None, "sinks": None, "soft_cap": None, "sliding_window": None}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window and a soft cap": {"sliding_window": 20, "soft_cap": 3.0},
    "sink logits": {"sinks": torch.linspace(-1, 2, HEADS)},
}


class Stand:
    """In place of vLLM's module: FlashAttention as its documentation says."""

    def __init__(self, version: int | None) -> None:
        self.version, self.asked = version, dict[str, Any]()

    def get_flash_attn_version(self, **asked: Any) -> int | None:
        self.asked = asked
        return self.version

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        softmax_scale: float,
        window_size: list[int] | None,
        softcap: float,
        s_aux: torch.Tensor | None,
        **others: Any,
    ) -> None:
        assert others.pop("causal") and others.pop("fa_version") == self.version
        starts = [cu_seqlens_q.tolist(), cu_seqlens_k.tolist()]
        longest = [max(b - a for a, b in pairwise(one)) for one in starts]
        assert longest == [others.pop("max_seqlen_q"), others.pop("max_seqlen_k")]
        assert others == {"alibi_slopes": None}
        window = None
        if window_size is not None:
            assert window_size[1] == 0
            window = window_size[0] + 1  # that many before a token, and itself
        variant = AttentionVariant(soft_cap=softcap or None, sink_logits=s_aux, window=window)
        for i in range(len(cu_seqlens_q) - 1):
            queries, keys = (slice(one[i], one[i + 1]) for one in starts)
            heads = (x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys]))
            length = keys.stop - keys.start
            found = causal_attention(*heads, [length], softmax_scale, variant)  # type: ignore[call-arg,arg-type]
            out[queries] = found[0].transpose(0, 1)


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
    counts, lens = (30, 7), (30, 50)
    q = torch.randn(37, HEADS, DIM)
    k, v = torch.randn(2, 80, 2, DIM)
    starts = torch.tensor([0, 30, 37]), torch.tensor([0, 30, 80])
    out = torch.empty_like(q)
    causal(q, k, v, Lengths(counts, lens, *starts), out)
    variant = AttentionVariant(
        layer.get("soft_cap"), layer.get("sinks"), None, layer.get("sliding_window")
    )
    for queries, keys in ((slice(0, 30), slice(0, 30)), (slice(30, 37), slice(30, 80))):
        wanted = causal_attention(
            q[queries].transpose(0, 1)[None],
            k[keys].transpose(0, 1)[None],
            v[keys].transpose(0, 1)[None],
            [keys.stop - keys.start],
            0.11,
            variant,
        )
        torch.testing.assert_close(out[queries], wanted[0].transpose(0, 1))


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
