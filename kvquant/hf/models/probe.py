"""Refuse K rows of few bits that ruin a model, before it decodes from them.

The model reads 256 random ids once, and rows/probe.py compares what its attention reads. Random ids
give the figures of texts, within a quarter, without a tokenizer. kernels/disk_cache.py keeps the
figures by the fingerprint of the weights.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from math import isnan
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...debug import is_recorded
from ...errors import AccuracyError, UnsupportedModelError
from ...rows.format import RowFormat
from ...rows.probe import FEW_BITS, MEASURE, REFUSED, TOKENS, WARNED, combined, divergence, loss_of
from .configs import CacheLayers, cache_layers, input_device, layers_of_rank
from .fingerprint import fingerprint, fingerprint_of
from .observe import observe

log = logging.getLogger("kvquant")
_figures: WeakKeyDictionary[Any, dict[tuple[str, ...], float | None]] = WeakKeyDictionary()


def check_accuracy(model: Any, cache: Any, layers: CacheLayers) -> None:
    """Raise AccuracyError if K rows of few bits ruin what attention reads, or warn.

    Rows of more than 4 bits, latent rows and models that are spread over ranks pass at no cost.

    Args:
        model: of transformers.
        cache: one for it, made without a plan, or the rows of a paged one: only formats matter.
        layers: of the cache.
    """
    if layers.are_latent or layers.ranks > 1:
        return
    formats = [layer.k_format for layer in cache.layers]
    if min(fmt.bits for fmt in formats) > FEW_BITS:
        return
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    device, names = input_device(model), tuple(map(str, formats))
    if device.type == "meta" or is_recorded(torch.empty(0, dtype=torch.uint8, device=device)):
        return
    known = _figures.setdefault(model, {})
    is_new = names not in known
    if is_new:
        try:
            known[names] = _figure(model, formats, layers)
        except Exception as error:  # of any model's code: no memory, or no ids alone (encoders)
            log.warning(
                "kvquant: K rows of few bits in this %s could not be probed: %s: run kvquant "
                "check, or compare texts before you rely on it",
                *(type(model).__name__, error),
            )
            return  # the next cache probes again
    figure = known[names]
    if figure is None or figure < WARNED:
        return
    rows = f"K rows of {', '.join(dict.fromkeys(names))} without a plan"
    found = f"{rows} would, in this {type(model).__name__}, {loss_of(figure)}"
    ways = 'To keep the answers give plan="auto", or leave k_format out: the default has 8 bits'
    if figure >= REFUSED:
        raise AccuracyError(f"{found}. {ways}. accept_loss=True makes the cache all the same")
    if is_new:
        log.warning("kvquant: %s. %s", found, ways)


def check_paged(model: Any, paged: Any) -> None:
    """As check_accuracy, for a paged cache of a model; a config passes."""
    if isinstance(model, torch.nn.Module) and paged.bases is None:
        layers = cache_layers(model.config, longest=paged.max_seq_len)
        check_accuracy(model, paged.rows, layers_of_rank(model, layers))


def figure_path(folder: str | Path, k_format: str) -> Path:
    """The file of the figure of a folder's model with one K format in all layers.

    It raises as fingerprint_of, and OSError without a place for files.
    """
    return _place(fingerprint_of(folder), [k_format])


def kept_figure(path: Path) -> float | None:
    """The figure in a file; None without one. It raises OSError."""
    from ...kernels.disk_cache import read_file, unseal

    body = unseal(read_file(path) or b"")
    return None if body is None else float(body)


def _figure(model: Any, formats: list[RowFormat], layers: CacheLayers) -> float | None:
    """The kept figure of a model and K formats, or a new one; None if it is NaN."""
    path = None
    with suppress(OSError, UnsupportedModelError):  # no folder, or offloaded weights: keep nothing
        path = _place(fingerprint(model), list(map(str, formats)))
        if (kept := kept_figure(path)) is not None:
            return kept
    (figure,) = figures(model, layers, [formats])
    if isnan(figure):
        return None  # appending such keys raises
    if path is not None:
        from ...kernels.disk_cache import replace_file, seal

        with suppress(OSError):  # a folder that cannot be written: the next process probes again
            replace_file(path, seal(repr(figure).encode()))
    return figure


def figures(
    model: Any,
    layers: CacheLayers,
    formats: Sequence[Sequence[RowFormat]],
    ids: torch.Tensor | None = None,
) -> list[float]:
    """The figures of several choices of K formats, of one pass of the model.

    Args:
        model: of transformers, without its compiled version.
        layers: that a cache of it holds.
        formats: of each choice, those of the layers.
        ids: [1, tokens] to read; random ones when None.

    Returns:
        Of each choice, see rows/probe.py; NaN if a format cannot hold the keys.
    """
    if ids is None:
        config = model.config.get_text_config(decoder=True)
        ends: list[Any] = [getattr(config, "max_position_embeddings", None)]
        if layers.turn is not None:
            ends.append(layers.turn.positions)
        tokens = min([TOKENS, *(one for one in ends if isinstance(one, int) and one > 1)])
        generator = torch.Generator("cpu").manual_seed(0)
        ids = torch.randint(config.vocab_size, (1, tokens), generator=generator, device="cpu")
    found: list[list[torch.Tensor]] = [[] for _ in formats]

    def observer(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        if (at := layers.at.get(layer)) is not None:
            for one, rows in zip(found, formats, strict=True):
                one.append(divergence(q, k, rows[at], scale, layers.windows[at]))

    stance = getattr(torch.compiler, "set_stance", None)  # else it would be compiled for these ids
    with stance("force_eager") if stance else nullcontext():
        observe(model, ids, observer)
    return list(map(combined, found))


def _place(weights: str, formats: list[str]) -> Path:
    """The file of the figure of weights with K formats."""
    from ...kernels.disk_cache import cache_folder

    names = formats[:1] if len(set(formats)) == 1 else formats
    key = repr((MEASURE, weights, names))
    return cache_folder() / "probes" / hashlib.sha256(key.encode()).hexdigest()
