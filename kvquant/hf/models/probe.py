"""Refuse K rows of few bits that ruin a model, before it decodes from them.

The model reads 512 random ids of its vocabulary once, and rows/probe.py compares what its attention
reads. Random ids give the figures that texts give, within a quarter, and need no tokenizer. Figures
are kept in the folder of kernels/disk_cache.py, by the fingerprint of the weights.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...cache.contiguous import KVCache
from ...debug import is_recorded
from ...errors import AccuracyError, UnsupportedModelError
from ...rows.format import RowFormat
from ...rows.probe import FEW_BITS, MEASURE, REFUSED, TOKENS, WARNED, combined, divergence
from .configs import CacheLayers, input_device
from .fingerprint import fingerprint
from .observe import observe

log = logging.getLogger("kvquant")
_figures: WeakKeyDictionary[Any, dict[tuple[str, ...], float | None]] = WeakKeyDictionary()


def check_accuracy(model: Any, cache: KVCache, layers: CacheLayers) -> None:
    """Raise if K rows of few bits ruin what a model's attention reads, and warn if they may.

    Rows of more than 4 bits are not looked at, which costs nothing. Latent rows and models that
    are spread over ranks are not probed.

    Args:
        model: of transformers.
        cache: one for it, made without a plan; its formats are looked at.
        layers: of the cache.

    Raises:
        AccuracyError: the figure is over the limit.
    """
    formats = [layer.k_format for layer in cache.layers]
    if layers.are_latent or min(fmt.bits for fmt in formats) > FEW_BITS or layers.ranks > 1:
        return
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    device, names = input_device(model), tuple(map(str, formats))
    if device.type == "meta" or is_recorded(torch.empty(0, device=device)):
        return
    known = _figures.setdefault(model, {})
    is_new = names not in known
    if is_new:
        known[names] = _figure(model, formats, layers)
    figure = known[names]
    if figure is None or figure < WARNED:
        return
    rows = ", ".join(dict.fromkeys(names))
    found = (
        f"K rows of {rows} without a plan change what attention reads in this "
        f"{type(model).__name__}: its weights move by a KL divergence of {figure:.2g}"
    )
    ways = 'give plan="auto", or leave k_format out: the default has 8 bits'
    if figure >= REFUSED:
        raise AccuracyError(
            f"{found}, and from {REFUSED:g} on texts are ruined. To keep the answers, {ways}. "
            "accept_loss=True makes the cache all the same"
        )
    if is_new:
        log.warning("kvquant: %s. Expect a loss; texts are ruined from %g on: %s", found, REFUSED, ways)


def _figure(model: Any, formats: list[RowFormat], layers: CacheLayers) -> float | None:
    """The kept figure of a model and K formats, or a new one; None if the model is not probed."""
    path = None
    with suppress(OSError, UnsupportedModelError):  # no folder, or offloaded weights: keep nothing
        path = _place(model, formats)
        if (kept := _read(path)) is not None:
            return kept
    try:
        figure = _measured(model, formats, layers)
    except Exception as error:  # of any model's code: some take no ids alone (images, encoders)
        log.warning(
            "kvquant: %s was not probed with K rows of few bits, since it does not run on token "
            "ids alone (%s): compare texts before you rely on it",
            *(type(model).__name__, error),
        )
        return None
    if figure is not None and path is not None:
        from ...kernels.disk_cache import replace_file, seal

        with suppress(OSError):  # a folder that cannot be written: the next process probes again
            replace_file(path, seal(repr(figure).encode()))
    return figure


def _measured(model: Any, formats: list[RowFormat], layers: CacheLayers) -> float | None:
    """Read random ids, and compare; None where a format cannot hold the keys."""
    config = model.config.get_text_config(decoder=True)
    limits = getattr(config, "max_position_embeddings", None), layers.turn and layers.turn.positions
    tokens = min([TOKENS, *(one for one in limits if isinstance(one, int) and one > 1)])
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator, device="cpu")
    rows = dict(zip(layers.places, zip(formats, layers.windows, strict=True), strict=True))
    found: list[torch.Tensor] = []

    def observer(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        if layer in rows:
            fmt, window = rows[layer]
            found.append(divergence(q, k, fmt, scale, window))

    stance = getattr(torch.compiler, "set_stance", None)  # a compiled model would be compiled again
    with stance("force_eager") if stance else nullcontext():
        observe(model, ids, observer)
    figure = combined(found)
    return figure if figure == figure else None  # NaN: appending such keys raises


def _place(model: Any, formats: list[RowFormat]) -> Path:
    """The file of the figure of a model with K formats."""
    from ...kernels.disk_cache import cache_folder

    key = repr((MEASURE, fingerprint(model), [str(fmt) for fmt in formats]))
    return cache_folder() / "probes" / hashlib.sha256(key.encode()).hexdigest()


def _read(path: Path) -> float | None:
    from ...kernels.disk_cache import read_file, unseal

    body = unseal(read_file(path) or b"")
    return None if body is None else float(body)
