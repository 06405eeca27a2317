"""Other quantized caches for transformers' models, to be measured beside kvquant's.

    transformers   QuantizedCache with quanto, HQQ and its own FP8, as installed; 4 bits, groups of
                   64, a 16-bit rest of at most 127 tokens: its defaults; "axis 1" is what HQQ
                   itself recommends. Without the rest it quantizes everything again at every step:
                   hardly a change for quanto, whose groups lie within a token, but too slow to
                   measure with HQQ. quanto's other axis refuses most lengths.
    KIVI           as peer_schemes.py has it, in groups of 32: up to 31 more keys are in 16 bit

Every cache is given keys and values that are rounded to the model's 16-bit format but have the
model's dtype, so with a float32 model a peer's own arithmetic and parameters are float32: its
fidelity is at least that of a 16-bit model. Bits are counted as a 16-bit model would store them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peer_caches import Leave, PeerLayer, Shipped, new_cache
from peer_schemes import kivi
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache

from kvquant.cache.contiguous import KVCache
from kvquant.hf.model import CachedModel
from kvquant.rows.quantize import EXACT_DTYPES

KIVI_GROUP = 32
KIVI_BITS = 4 + 32 / KIVI_GROUP
HF_BITS = 4 + 32 / 64  # codes, and 16 bits each for the scale and the zero point of 64 elements


class SeparateLayer(DynamicLayer):
    """A layer of its own for each sequence: transformers' groups run across the whole batch.

    Args:
        make: a layer of one sequence.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.make = make
        self.layers: list[Any] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; give back what attention reads, [batch, num_kv_heads, tokens, head_dim]."""
        if not self.layers:
            self.is_initialized = True
            self.layers = [remembering(self.make()) for _ in key_states]
        pairs = [
            layer.update(k, v)
            for layer, k, v in zip(
                self.layers, key_states.split(1), value_states.split(1), strict=True
            )
        ]
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys), torch.cat(values)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return int(self.layers[0].get_seq_length()) if self.layers else 0

    @property
    def num_exact(self) -> int:
        """Tokens that the layers keep in 16 bit."""
        rest: torch.Tensor = self.layers[0].keys
        return rest.shape[2] if rest.ndim == 4 else 0


def remembering(layer: Any) -> Any:
    """Let a layer dequantize what it has quantized once, not at every step: the same values."""
    compute = layer._dequantize
    known: list[tuple[Any, torch.Tensor]] = []

    def dequantize(quantized: Any) -> torch.Tensor:
        for one, kept in known:
            if one is quantized:
                return kept
        values: torch.Tensor = compute(quantized)
        known[:] = [*known[-1:], (quantized, values)]  # of keys and of values
        return values

    layer._dequantize = dequantize
    return layer


class RoundedCache(Cache):
    """Rounds keys and values to a 16-bit format before its layers see them.

    Args:
        layers: one for each layer of the model.
        exact: the 16-bit dtype.
    """

    def __init__(self, layers: list[Any], exact: torch.dtype) -> None:
        super().__init__(layers=layers)
        self.exact = exact

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer."""
        keys = key_states.to(self.exact).to(key_states.dtype)
        values = value_states.to(self.exact).to(value_states.dtype)
        found: tuple[torch.Tensor, torch.Tensor] = super().update(keys, values, layer_idx)
        return found


@dataclass(frozen=True)
class Peer:
    """A way to keep the cache.

    Attributes:
        name: for the table.
        bits: of a quantized element, parameters included.
        make_layers: called with the model's config; one layer for each of the model's.
    """

    name: str
    bits: float
    make_layers: Callable[[Any], list[Any]]

    def predict(
        self, model: CachedModel, exact: KVCache, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Feed tokens one by one, after those of a 16-bit cache.

        Args:
            model: decodes, by transformers' own attention.
            exact: the prompt, in 16-bit rows.
            tokens: [batch, tokens], int64.

        Returns:
            [tokens, batch, vocabulary], float32: the log probabilities after each token; and the
            mean bits of an element, of all steps.

        Raises:
            NotImplementedError: the model has sliding windows, which peers' layers here do not.
        """
        if any(exact.windows):
            raise NotImplementedError("sliding windows: only kvquant's caches are measured")
        cache = RoundedCache(self.make_layers(model.config), EXACT_DTYPES[model.exact_format])
        for layer in range(exact.num_layers):
            cache.update(*exact.dequantized(layer, model.model.dtype), layer)
        steps, bits = [], 0.0
        for column in tokens[..., None].unbind(1):
            steps.append(model.plain(column, cache).float().log_softmax(-1))
            bits += self.stored_bits(cache)
        return torch.stack(steps), bits / len(steps)

    def stored_bits(self, cache: Any) -> float:
        """Bits of an element, those in 16 bit included."""
        layer = cache.layers[0]
        if isinstance(layer, PeerLayer):
            return layer.peer.stored_bits(layer.get_seq_length())
        exact = getattr(layer, "num_exact", 0)
        return float(self.bits + (16 - self.bits) * exact / layer.get_seq_length())


def _kivi(name: str, recent_len: int) -> Peer:
    rules = Leave(recent_len, KIVI_GROUP), Leave(recent_len)
    peer = Shipped(name, KIVI_BITS, kivi(4, KIVI_GROUP, KIVI_GROUP).read, *rules)
    return Peer(
        name,
        KIVI_BITS,
        lambda config: new_cache(peer, config.num_hidden_layers, config.dtype).layers,
    )


def _hugging_face(name: str, backend: str, bits: float, **options: Any) -> Peer:
    def make_layers(config: Any) -> list[Any]:
        def make() -> Any:
            return QuantizedCache(backend, config, **options).layers[0]

        make()  # a missing package is told before anything runs
        return [SeparateLayer(make) for _ in range(config.num_hidden_layers)]

    return Peer(name, bits, make_layers)


PEERS = (
    Peer(
        "transformers 16 bit",  # a control: only the order of sums differs from kvquant's
        16,
        lambda config: [DynamicLayer() for _ in range(config.num_hidden_layers)],
    ),
    _kivi("KIVI, no window", 0),
    _kivi("KIVI, last 32 in 16 bit", 32),
    _kivi("KIVI, last 128 in 16 bit", 128),
    _hugging_face("transformers quanto int4", "quanto", HF_BITS),
    _hugging_face(
        "transformers quanto int4, nothing in 16 bit", "quanto", HF_BITS, residual_length=1
    ),
    _hugging_face("transformers HQQ int4", "hqq", HF_BITS),
    _hugging_face("transformers HQQ int4, axis 1", "hqq", HF_BITS, axis_key=1, axis_value=1),
    _hugging_face("transformers fp8", "fp8", 8.0),
)
