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
        basis = self.settings.basis(self.place, range(heads), dim)
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
    model: Any, chunks: Sequence[Sequence[int]], tokens: Sequence[int], settings: Settings
) -> torch.Tensor:
    """Of an answer's tokens, [len(tokens)].

    Args:
        model: of transformers, in float32.
        chunks: of the prompt, as the engine read them.
        tokens: of the answer.
        settings: of the engine.
    """
    layers = range(model.config.get_text_config().num_hidden_layers)
    cache = Cache(layers=[RowsLayer(settings, layer) for layer in layers])
    found = []
    for chunk in [*chunks, *([token] for token in tokens[:-1])]:
        out = model(torch.tensor([list(chunk)]), past_key_values=cache, use_cache=True)
        found.append(out.logits[0, -1].log_softmax(-1))
    return torch.stack(
        [x[token] for x, token in zip(found[len(chunks) - 1 :], tokens, strict=True)]
    )
