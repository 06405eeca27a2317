"""Fidelity of many caches, each in one pass: passages predicted from the rows that a cache keeps.

Reference in fidelity.py decodes token by token. Here one pass computes all scored tokens, and each
attends to the rows that a cache would hold by then (kvquant/hf/single_pass.py). Results agree up to
the rounding of sums, in a fraction of the time. Layers that no cache holds stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from kvquant.errors import NonFiniteError
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import CacheLayers
from kvquant.ops.quantize import dequantize_rows, quantize_rows
from kvquant.rows.defaults import DEFAULT, default_format
from kvquant.rows.format import RowFormat, mean_bits
from kvquant.rows.quantize import EXACT_DTYPES

from .basis_search import stored_rows
from .fidelity import (
    Fidelity,
    Planned,
    Reference,
    Scheme,
    compare_passages,
    perplexity_of,
    scored_tokens,
    sized_cache,
    stored_bits,
)

BATCH = 2  # passages that are read at a time: their logits take memory
RowsOf = Callable[[int, str, torch.Tensor], torch.Tensor]  # place, side, rows: what is read of them


class PassReference:
    """As fidelity.Reference.

    Args:
        model: reads.
        windows: [batch, context + scored + 1], int64.
        context: tokens of the prompt.
        places: the model's layer at each place of the cache.
        why: the model cannot decode from a KVCache; "" if it can.
        keeps_context, tick: as of hf.single_pass.Passages.

    Attributes:
        seen: called for each measured layer of each batch of passages.
    """

    def __init__(
        self,
        model: CachedModel,
        windows: torch.Tensor,
        context: int,
        places: list[int],
        *,
        why: str = "",
        keeps_context: bool = False,
        tick: Callable[[], object] = lambda: None,
    ) -> None:
        from kvquant.hf.single_pass import Passages

        self.seen = tick
        scored = scored_tokens(windows, context)
        self.exact_format, self.num_tokens = model.exact_format, len(windows) * scored
        self.why, self._model, self._tokens = why, model, windows.shape[1]
        self._at = {layer: at for at, layer in enumerate(places)}
        read = partial(
            Passages,
            model.model,
            context=context,
            exact=EXACT_DTYPES[self.exact_format],
            keeps_context=keeps_context,
            tick=tick,
        )
        self._parts = [read(part[:, :-1]) for part in windows.split(BATCH)]
        self._dims: dict[tuple[int, str], int] = {}  # head_dim of each side of each place

        def as_given(place: int, side: str, x: torch.Tensor) -> torch.Tensor:
            self._dims[place, side] = x.shape[-1]
            return x

        self._expected = [*self._predict(as_given)]
        targets = windows[:, context + 1 :].to(self._expected[0].device).split(BATCH)
        self._targets = [part.t()[..., None] for part in targets]
        self.perplexity = perplexity_of(float(self._compared(self._expected)[2].mean()))

    def measure(self, scheme: Scheme | Planned) -> Fidelity:
        """Compare the predictions by a scheme's rows; NonFiniteError if no format holds them."""
        window = scheme.sink_len, scheme.recent_len
        if isinstance(scheme, Planned):
            plan = scheme.plan
            formats = list(zip(plan.k_formats, plan.v_formats, strict=True))
            bits, layers = plan.bits, list(self._at)

            def rows_of(place: int, side: str, x: torch.Tensor) -> torch.Tensor:
                fmt = formats[place]["kv".index(side)]
                if fmt.is_exact:  # what came is rounded to it already
                    return x
                basis = getattr(plan.layers[place], side).to(x.device)
                read: torch.Tensor = basis.decode(dequantize_rows(stored_rows(x, basis, fmt), fmt))
                if not bool(read.isfinite().all()):
                    raise NonFiniteError(
                        f"{side.upper()} of layer {layers[place]} is NaN, Inf or goes beyond what "
                        f"{fmt} rows hold in the plan's basis: keep the layer in 16 bit"
                    )
                return read
        else:

            def format_of(side: str, dim: int) -> RowFormat:
                name = {"k": scheme.k_format, "v": scheme.v_format}[side]
                return RowFormat.parse(
                    default_format(side, dim, *window) if name == DEFAULT else name, dim
                )

            rows = [format_of(side, dim) for (_, side), dim in self._dims.items()]
            bits = mean_bits(rows) if rows else 16.0  # no layer is held

            def rows_of(place: int, side: str, x: torch.Tensor) -> torch.Tensor:
                fmt = format_of(side, x.shape[-1])
                return dequantize_rows(quantize_rows(x, fmt), fmt)

        if any(window) and not self.why:
            exact = Scheme(self.exact_format, self.exact_format)
            whole = (sized_cache(self._model, one, self._tokens) for one in (scheme, exact))
            bits = stored_bits(*whole)
        parts = self._compared(self._predict(rows_of, window))
        return Fidelity.of(bits, parts, len(self._expected[0]))

    def _compared(self, given: Iterable[torch.Tensor]) -> torch.Tensor:
        """As compare_passages, of all batches."""
        each = zip(self._expected, given, self._targets, strict=True)
        return torch.cat([compare_passages(*part) for part in each], dim=1)

    def _predict(self, rows_of: RowsOf, window: tuple[int, int] = (0, 0)) -> Iterator[torch.Tensor]:
        """[scored, passages, vocabulary], float32: log probabilities of each batch of passages."""

        def store(
            layer: int, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen()
            place = self._at.get(layer)
            if place is None:
                return k, v
            return rows_of(place, "k", k).to(k.dtype), rows_of(place, "v", v).to(v.dtype)

        for part in self._parts:
            yield part.predict(store, window).transpose(0, 1).float().log_softmax(-1)


def reference_of(
    model: Any,
    windows: torch.Tensor,
    context: int,
    layers: CacheLayers,
    *,
    why: str = "",
    tick: Callable[[], object] = lambda: None,
) -> Reference | PassReference:
    """The reference of a CachedModel's caches: one pass, or decoding for latent rows.

    Args:
        model: a CachedModel.
        windows: [batch, context + scored + 1], int64.
        context: tokens of the prompt.
        layers: of the model's caches.
        why, tick: as of PassReference; decoding does not call tick.
    """
    if layers.are_latent:
        return Reference(model, windows, context)
    keeps = not (layers.others or layers.states or layers.turn or layers.shared or why)
    places = list(layers.places)
    return PassReference(model, windows, context, places, why=why, keeps_context=keeps, tick=tick)
