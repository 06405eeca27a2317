"""The task kl: how far a cache moves a model's predictions of a held-out text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from kvquant.calibration.fidelity import divergence, predict

from .decoding import Caches, Choice, Reading
from .statistics import least_error, quantile, standard_error

if TYPE_CHECKING:
    from kvquant.hf.model import CachedModel

Scores = dict[str, list[list[float]]]  # "kl" and "top1", [passages][scored tokens]
TAIL = 0.999  # the share of tokens whose KL stays below kl_tail
PARTS = 4  # that the scored tokens of a passage are cut into, for KL by position


def diverge(
    model: CachedModel,
    windows: torch.Tensor,
    context: int,
    choices: Sequence[Choice],
    reading: Reading,
) -> Iterator[Scores | None]:
    """Decode the tokens of passages from each cache one by one, and compare the predictions.

    Args:
        model: decodes.
        windows: [passages, context + scored] token ids, int64.
        context: how many tokens of each passage are its prompt.
        choices: the quantized caches.
        reading: how prompts come into caches.

    Yields:
        None for the 16-bit cache, then for each choice the KL divergence of each prediction from
        the 16-bit cache's, in nats, and whether both have the same likeliest token (1 or 0).
    """
    fed = windows[:, context:]
    caches = Caches(model, windows[:, :context], fed.shape[1], reading, choices)
    expected = predict(model, caches.original(), fed)  # [scored, passages, vocabulary]
    yield None
    for choice in choices:
        cache = caches.copy(choice)
        given = predict(model, cache, fed)
        cache.check()
        kl = [divergence(p, q) for p, q in zip(expected, given, strict=True)]
        same = (expected.argmax(-1) == given.argmax(-1)).double()
        found = {"kl": torch.stack(kl, 1).tolist(), "top1": same.t().tolist()}
        del cache, given  # before the next one is made
        yield found


def summary(scores: Scores) -> dict[str, Any]:
    """The scores of one cache as plain data.

    "kl", "top1": means over all tokens. "kl_error", "top1_error": their standard errors, with a
    passage as one observation; None for one passage. "kl_tail": the KL that a share TAIL of the
    tokens stays below. "by_position": the mean KL in PARTS parts of a passage. "tokens",
    "passages": numbers.
    """
    kl, top1 = scores["kl"], scores["top1"]
    flat = [one for passage in kl for one in passage]
    means = {name: [sum(one) / len(one) for one in scores[name]] for name in scores}
    top1_error = standard_error(means["top1"])
    least = least_error(round(len(flat) - sum(map(sum, top1))), len(flat))
    edges = [round(len(kl[0]) * part / PARTS) for part in range(PARTS + 1)]
    return {
        "kl": sum(flat) / len(flat),
        "kl_error": standard_error(means["kl"]),
        "kl_tail": quantile(flat, TAIL),
        "top1": sum(means["top1"]) / len(top1),
        "top1_error": None if top1_error is None else max(top1_error, least),
        "by_position": [
            sum(sum(one[a:b]) for one in kl) / (len(kl) * (b - a))
            for a, b in pairwise(edges)
            if b > a
        ],
        "tokens": len(flat),
        "passages": len(kl),
    }
