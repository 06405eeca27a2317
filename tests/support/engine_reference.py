"""What an engine of the contract should answer: transformers in float32, whose attention is given
rows where the engine's is, and 16 bit, that is the model's own dtype, elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from vllm_texts import Text

from kvquant import dequantize_rows, quantize_rows
from kvquant.engine.settings import LatentSettings, Settings
from kvquant.engine.step import FEW
from kvquant.ops.quantize import quantize_calibrated

# Log probabilities are as exact as float32 until an element lies so near a rounding boundary that
# the other order of a sum gives it another code. A few answers of a test have such codes: measured
# were .006 at most. Other rows, or rows of other tokens, move most answers by .01 and more.
MOST, MEDIAN = 0.05, 5e-4


class RowsLayer(DynamicLayer):
    """Keeps each token as its row gives it back: K and V, or a latent and its RoPE part."""

    def __init__(self, settings: Settings | LatentSettings, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = settings.of_layer(layer) if isinstance(settings, Settings) else settings
        self.settings, self.place = own, layer
        self.decodes = False  # new tokens are of an answer, which attend to rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        past, new = self.get_seq_length(), key_states.shape[-2]
        found = super().update(*self._through_rows(key_states, value_states))
        few = 1 if isinstance(self.settings, LatentSettings) or not past else FEW
        if self.decodes or self.settings.prompts_from_rows or new <= few:
            return found
        k, v = (x.clone() for x in found)
        k[..., past:, :], v[..., past:, :] = key_states, value_states
        return k, v

    def _through_rows(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        heads, sizes = k.shape[1], (k.shape[-1], v.shape[-1])
        is_latent = isinstance(self.settings, LatentSettings)
        if isinstance(self.settings, LatentSettings):
            # engines leave the pairs of RoPE side by side, transformers has their halves apart
            v = v.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            basis = self.settings.basis(self.place)
            formats: Sequence[Any] = self.settings.layout(*sizes).parts
        else:
            layout = self.settings.layout(heads, *sizes)
            basis, formats = self.settings.basis(self.place, range(heads), layout), layout[:2]
        found = []
        for x, fmt, one in zip((k, v), formats, basis or (None, None), strict=True):
            if one is None:
                found.append(dequantize_rows(quantize_rows(x, fmt), fmt))
                continue
            rows = quantize_calibrated(one.encode(x), fmt, clip=one.clip, feedback=one.feedback)
            found.append(one.decode(dequantize_rows(rows, fmt)))
        if is_latent:
            found[1] = found[1].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return found


def check_answers(
    settings: Settings | LatentSettings,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Text],
    model: Any,
    *,
    chunk: int = 4096,
    keeps_old: bool = False,
    most: float = MOST,
) -> None:
    """Assert that texts are those of transformers which attends to the same rows.

    Args:
        settings: of the engine.
        prompts: token ids of each text's prompt.
        texts: what the engine gave.
        model: its folder.
        chunk: most tokens of a chunk that prompts came in.
        keeps_old: where all of a prompt was in the cache its last token is read again, for its
            logits, and its new row gives way to the old one a step later.
        most: how far a log probability may be off.
    """
    exact = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    off = []
    for prompt, text in zip(prompts, texts, strict=True):
        chunks = [prompt[: text.found]] if text.found else []
        chunks += [prompt[i : i + chunk] for i in range(text.found, len(prompt), chunk)]
        old = [prompt] if keeps_old and text.found == len(prompt) - 1 else []
        wanted = log_probabilities(exact, chunks, text.ids, settings, old)
        given = [known[token] for token, known in zip(text.ids, text.known, strict=True)]
        off.append((torch.tensor(given) - wanted).abs())
    assert torch.cat(off).max() < most and torch.cat(off).median() < MEDIAN, off


@torch.no_grad()
def log_probabilities(
    model: Any,
    chunks: Sequence[Sequence[int]],
    tokens: Sequence[int],
    settings: Settings | LatentSettings,
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
    cache = _cache(model, chunks[:-1], settings)
    found = [_read(model, chunks[-1], cache)[-1:]]
    for layer in cache.layers:
        layer.decodes = True
    rest = [*tokens[:-1]]
    if old and rest:
        found.append(_read(model, [rest.pop(0)], cache))
        length = sum(map(len, old))
        for layer, earlier in zip(cache.layers, _cache(model, old, settings).layers, strict=True):
            layer.keys[..., :length, :] = earlier.keys
            layer.values[..., :length, :] = earlier.values
    if rest:
        found.append(_read(model, rest, cache))
    return torch.cat(found)[range(len(tokens)), list(tokens)]


def _cache(model: Any, chunks: Sequence[Sequence[int]], settings: Settings | LatentSettings) -> Any:
    """A cache of these tokens."""
    layers = range(model.config.get_text_config().num_hidden_layers)
    cache = Cache(layers=[RowsLayer(settings, layer) for layer in layers])
    for chunk in chunks:
        _read(model, chunk, cache)
    return cache


def _read(model: Any, chunk: Sequence[int], cache: Any) -> torch.Tensor:
    """The log probabilities behind each token of a chunk, [tokens, vocabulary]."""
    out = model(torch.tensor([list(chunk)]), past_key_values=cache, use_cache=True)
    found: torch.Tensor = out.logits[0].log_softmax(-1)
    return found
