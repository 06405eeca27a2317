"""Whether a model is a decoder that takes a cache, by its modules, not its config."""

from __future__ import annotations

import inspect
from typing import Any

from ...errors import UnsupportedModelError
from ..argument import NAMES
from .configs import SERVED


def check_decoder(model: Any, *, gives_logits: bool = False) -> None:
    """Raise UnsupportedModelError for a model without a cache, or (gives_logits) without a head."""
    for module in model.modules():  # a wrapper may stand around what peft has made
        check_adapter(module)
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


def check_adapter(model: Any) -> None:
    """Raise UnsupportedModelError if a PEFT model's active adapter learns a prompt."""
    # Prompt tuning, prefix tuning and P-tuning put virtual tokens before the text. LoRA, IA3 and
    # other adapters of weights pass.
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False) is True:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise UnsupportedModelError(
            f"the active adapter of this {type(model).__name__} is PEFT's {kind}, which puts "
            "virtual tokens in front of those of each call: a step would put them into the cache "
            "once more, or leave them out. Take an adapter of weights (LoRA, IA3), or a cache of "
            "transformers"
        )
