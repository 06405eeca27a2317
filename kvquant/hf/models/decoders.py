"""Whether a model is a decoder that takes a cache, as its modules tell, not its config."""

from __future__ import annotations

import inspect
from typing import Any

from ...errors import UnsupportedModelError
from ..argument import NAMES
from .configs import SERVED


def check_decoder(model: Any, *, gives_logits: bool = False) -> None:
    """Raise UnsupportedModelError for encoders, models of images, and what else takes no cache.

    Args:
        model: of transformers, compiled or not.
        gives_logits: it has to predict a next token, so a decoder without a head will not do.
    """
    modules, kind = list(model.modules()), type(getattr(model, "_orig_mod", model)).__name__
    known = getattr(model, "can_generate", None)
    generates = True if known is None else bool(known())  # models of one's own may not tell
    # as for transformers' SDPA what does not tell is causal; towers of images stand beside others
    told = [module.is_causal for module in modules if hasattr(module, "is_causal")]
    if told and not any(told):
        is_choice = generates and getattr(model.config, "is_decoder", None) is False
        hint = " (as a decoder it is loaded with is_decoder=True)" * is_choice
        raise UnsupportedModelError(
            f"{kind} attends in both directions, as encoders of texts and images do, so it has no "
            f"past that stays as it is{hint}: {SERVED}"
        )
    forwards = {type(module).forward for module in modules}
    if all(inspect.signature(one).parameters.keys().isdisjoint(NAMES) for one in forwards):
        raise UnsupportedModelError(f"no part of {kind} takes a cache: {SERVED}")
    if gives_logits and not generates:
        raise UnsupportedModelError(
            f"{kind} predicts no next token: load it by AutoModelForCausalLM, as CachedModel "
            "serves causal language models"
        )
