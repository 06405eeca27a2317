"""What an engine of the contract should answer: transformers in float32, whose attention is given
rows where the engine's is, and 16 bit, that is the model's own dtype, elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvquant import dequantize_rows
from kvquant.engine.contract import LayerRows
from kvquant.engine.settings import Settings
from kvquant.engine.step import FEW, append


class RowsLayer(DynamicLayer):
    """Keeps each token as its row gives it back."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.settings, self.place = settings, layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        past, new = self.get_seq_length(), key_states.shape[-2]
        found = super().update(*self._through_rows(key_states, value_states))
        in_16_bit = new > FEW if past else new > 1
        if self.settings.prompts_from_rows or not in_16_bit:
            return found
        k, v = (x.clone() for x in found)
        k[..., past:, :], v[..., past:, :] = key_states, value_states
        return k, v

    def _through_rows(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        heads, tokens, dim = k.shape[1:]
        layout = self.settings.layout(heads, dim, v.shape[-1])
        basis = self.settings.basis(self.place, range(heads), layout)
        pages = torch.zeros(1, layout.slots, tokens, layout.slot_bytes, dtype=torch.uint8)
        rows = LayerRows(layout, 1.0, basis)
        by_token = [x[0].transpose(0, 1).contiguous() for x in (k, v)]
        append(rows, by_token[0], by_token[1], pages, torch.arange(tokens))
        found = []
        for stored, fmt, one in zip(
            layout.views(pages), layout[:2], basis or (None, None), strict=True
        ):
            elements = dequantize_rows(stored[0].contiguous(), fmt)
            found.append((elements if one is None else one.decode(elements))[None])
        return found


@torch.no_grad()
def log_probabilities(
    model: Any,
    chunks: Sequence[Sequence[int]],
    tokens: Sequence[int],
    settings: Settings,
    old: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """Of an answer's tokens, [len(tokens)].

    Args:
        model: of transformers, in float32.
        chunks: of the prompt, as the engine read them.
        tokens: of the answer.
        settings: of the engine.
        old: of the same prompt in an earlier request, whose rows replace those of this one once
            the first token of the answer was read.
    """
    cache, logits = _read(model, [*chunks, *([token] for token in tokens[:1])], settings)
    if old:
        length = sum(map(len, old))
        for layer, earlier in zip(cache.layers, _read(model, old, settings)[0].layers, strict=True):
            layer.keys[..., :length, :] = earlier.keys
            layer.values[..., :length, :] = earlier.values
    for token in tokens[1:-1]:
        logits.append(_logits(model, [token], cache))
    found = logits[len(chunks) - 1 :]
    return torch.stack([x[token] for x, token in zip(found, tokens)])  # noqa: B905


def _read(
    model: Any, chunks: Sequence[Sequence[int]], settings: Settings
) -> tuple[Any, list[torch.Tensor]]:
    """A cache of these tokens, and the log probabilities behind each chunk."""
    layers = range(model.config.get_text_config().num_hidden_layers)
    cache = Cache(layers=[RowsLayer(settings, layer) for layer in layers])
    return cache, [_logits(model, chunk, cache) for chunk in chunks]


def _logits(model: Any, chunk: Sequence[int], cache: Any) -> torch.Tensor:
    out = model(torch.tensor([list(chunk)]), past_key_values=cache, use_cache=True)
    found: torch.Tensor = out.logits[0, -1].log_softmax(-1)
    return found
