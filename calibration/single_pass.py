"""Fidelity of models that cannot decode from a KVCache: passages in one pass, by the rows kept.

Reference in fidelity.py decodes; here the scored tokens are computed at once, and each attends to
the rows that a cache would hold of the tokens up to it (kvquant/hf/single_pass.py). Both tell the
same but for the rounding of sums. Layers that no cache holds stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvquant.errors import NonFiniteError
from kvquant.ops.quantize import dequantize_rows, quantize_calibrated, quantize_rows
from kvquant.ops.transform import encode_rows
from kvquant.rows.format import RowFormat
from kvquant.rows.quantize import EXACT_DTYPES

from .fidelity import (
    Fidelity,
    Planned,
    Scheme,
    compare,
    compare_passages,
    perplexity_of,
    scored_tokens,
)

RowsOf = Callable[[int, str, torch.Tensor], torch.Tensor]  # place, side, rows: what is read of them


class PassingModel(Protocol):
    """What PassReference needs of a model; kvquant.CachedModel is one."""

    exact_format: str  # its 16-bit rows
    model: Any  # transformers' own


class PassReference:
    """As fidelity.Reference.

    Args:
        model: reads.
        windows: [batch, context + scored + 1], int64.
        context: tokens of the prompt.
        places: the model's layer at each place of the cache.
        why: the model cannot decode from a KVCache.
    """

    def __init__(
        self,
        model: PassingModel,
        windows: torch.Tensor,
        context: int,
        places: list[int],
        *,
        why: str = "",
    ) -> None:
        scored = scored_tokens(windows, context)
        self.exact_format, self.num_tokens = model.exact_format, len(windows) * scored
        self.why, self._model, self._context = why, model, context
        self._at = {layer: at for at, layer in enumerate(places)}
        self._fed = windows[:, :-1]
        self._dims: dict[tuple[int, str], int] = {}  # head_dim of each side of each place

        def as_given(place: int, side: str, x: torch.Tensor) -> torch.Tensor:
            self._dims[place, side] = x.shape[-1]
            return x

        self._expected = self._predict(as_given)
        self._targets = windows[:, context + 1 :].t()[..., None].to(self._expected.device)
        _, _, nll = compare(self._expected, self._expected, self._targets)
        self.perplexity = perplexity_of(nll)

    def measure(self, scheme: Scheme | Planned) -> Fidelity:
        """Compare the predictions by the rows of a scheme, which keeps none in 16 bit.

        Raises:
            NonFiniteError: keys or values are NaN, Inf or what a format cannot hold.
        """
        assert not scheme.sink_len and not scheme.recent_len
        if isinstance(scheme, Planned):
            plan = scheme.plan
            formats = list(zip(plan.k_formats, plan.v_formats, strict=True))
            bits, layers = plan.bits, list(self._at)

            def rows_of(place: int, side: str, x: torch.Tensor) -> torch.Tensor:
                fmt = formats[place]["kv".index(side)]
                basis = getattr(plan.layers[place], side).to(x.device)
                stored = quantize_calibrated(
                    encode_rows(x, basis), fmt, clip=basis.clip, feedback=basis.feedback
                )
                read: torch.Tensor = basis.decode(dequantize_rows(stored, fmt))
                if not bool(read.isfinite().all()):
                    raise NonFiniteError(
                        f"{side.upper()} of layer {layers[place]} is NaN, Inf or goes beyond what "
                        f"{fmt} rows hold in the plan's basis: keep the layer in 16 bit"
                    )
                return read
        else:
            names = {"k": scheme.k_format, "v": scheme.v_format}
            rows = [RowFormat.parse(names[side], dim) for (_, side), dim in self._dims.items()]
            elements = sum(fmt.head_dim for fmt in rows)  # none where no layer is held
            bits = 8 * sum(fmt.row_bytes for fmt in rows) / elements if rows else 16.0

            def rows_of(place: int, side: str, x: torch.Tensor) -> torch.Tensor:
                fmt = RowFormat.parse(names[side], x.shape[-1])
                return dequantize_rows(quantize_rows(x, fmt), fmt)

        given = self._predict(rows_of)
        parts = compare_passages(self._expected, given, self._targets)
        return Fidelity.of(scheme, bits, 0, parts, len(self._expected))

    def _predict(self, rows_of: RowsOf) -> torch.Tensor:
        """[scored, batch, vocabulary], float32: log probabilities."""
        from kvquant.hf.single_pass import predict_from_rows

        def store(
            layer: int, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            place = self._at.get(layer)
            if place is None:
                return k, v
            return rows_of(place, "k", k).to(k.dtype), rows_of(place, "v", v).to(v.dtype)

        exact = EXACT_DTYPES[self.exact_format]
        found = predict_from_rows(self._model.model, self._fed, self._context, exact, store)
        return found.transpose(0, 1).float().log_softmax(-1)
