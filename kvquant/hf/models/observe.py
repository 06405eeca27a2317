"""Watch a Hugging Face decoder attend: queries, keys and values, and output projections.

With latent attention the observer sees latents, RoPE parts and absorbed queries. Every module that
calls transformers' attention function is a layer with attention; names of models do not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ...errors import UnsupportedError, UnsupportedModelError
from ..argument import as_argument
from ..single_pass import exact_attention, owner_of
from ..switch import attending, hooked, linears
from .configs import input_device
from .latent import LatentHeads, hands_latents, heads_of

# layer, queries, keys and values as attention meets them, and its factor on q·k
Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
OBSERVED = "kvquant-observed"


class _Latents(DynamicCache):
    """Shows each layer's latent rows, and keeps none."""

    rows: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows = layer_idx, key_states, value_states
        return key_states, value_states


class _Watch(threading.local):
    """The observer of attention in this thread."""

    owners: dict[int, int]
    observer: Observer | None = None
    last: torch.nn.Module | None = None
    out: torch.Tensor | None = None
    latents: _Latents | None = None

    def show(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedError(f"{type(module).__name__} does not say which layer it is")
        self.owners[layer] = owner_of(key, layer)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if hands_latents(module) and self.latents is not None and self.latents.rows is not None:
            owner, key, value = self.latents.rows
            assert owner == layer
            heads = heads_of(module, key.shape[-1], value.shape[-1])
            query = torch.cat(heads.absorb(query.transpose(1, 2)), dim=-1).transpose(1, 2)
        self.last = module  # only now: heads_of has tried kv_b_proj, which is none behind attention
        if self.observer:
            self.observer(layer, query.detach(), key.detach(), value.detach(), scale)


_watch = _Watch()


def _observed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend exactly, after showing queries, keys and values."""
    _watch.show(module, query, key, value, scaling)
    found: tuple[torch.Tensor, None] = exact_attention(module, options)(
        module, query, key, value, attention_mask, scaling=scaling, **options
    )
    _watch.out = found[0]
    return found


AttentionInterface.register(OBSERVED, _observed_attention)
AttentionMaskInterface.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def observe(model: Any, tokens: torch.Tensor, observer: Observer | None, first: int = 0) -> None:
    """Run a model over tokens with exact attention, and show what its layers attend with.

    Args:
        model: attends through transformers' attention interface.
        tokens: [batch, tokens], int64.
        observer: as of CachedModel.observe. A layer that attends to another one's keys shows those.
        first: the position of the first token.

    Raises:
        UnsupportedError: the model, or a layer, does not attend through that interface.
    """
    _watch.observer, _watch.owners, _watch.last = observer, {}, None
    options: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
    if any(map(hands_latents, model.modules())):
        # of the config: layers beside them (linear attention) ask for their own states there
        _watch.latents = _Latents(config=model.config)
        options |= as_argument(model, _watch.latents)
    tokens = tokens.to(input_device(model))
    if first:
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        options["position_ids"] = places.expand(len(tokens), -1)
    try:
        with attending(model, OBSERVED), torch.no_grad():
            model(tokens, **options)
    finally:
        _watch.observer, _watch.last, _watch.out, _watch.latents = None, None, None, None
    if not _watch.owners:
        raise UnsupportedError(f"no layer of {type(model).__name__} has attention")


def output_weights(model: Any) -> dict[int, torch.Tensor]:
    """The output projection of each layer: [hidden, num_q_heads * head_dim].

    It is the weight of the first linear layer that runs in the module after attention; a layer
    without one is left out. For latent attention it is LatentHeads.output_factor of that weight.

    Raises:
        UnsupportedModelError: weights are offloaded, or a layer with latent attention has none.
    """
    found: dict[int, torch.Tensor] = {}
    for layer, seen in observe_linears(model).items():
        linear, _ = seen.after
        check_here(linear, f"layer {layer} of {type(model).__name__}")
        weight = linear.weight.detach()
        is_latent = hands_latents(seen.module)
        found[layer] = _latent_heads(seen.module).output_factor(weight) if is_latent else weight
    for module in filter(hands_latents, model.modules()):
        index: Any = module.layer_idx
        if index in _watch.owners and index not in found:
            raise UnsupportedModelError(
                f"layer {index} ({type(module).__name__}) has no torch.nn.Linear behind attention "
                "that takes what all heads give, and errors of latents are weighed by it: load the "
                "model without quantization"
            )
    return found


def check_here(linear: torch.nn.Linear, name: str) -> None:
    """Raise UnsupportedModelError if the weight of a linear layer, in `name`, is offloaded."""
    if linear.weight.is_meta:
        raise UnsupportedModelError(
            f"{name} has its weights elsewhere (offloaded by device_map), and calibration and "
            "fold_values read them: load the model with all weights on devices"
        )


def _latent_heads(module: Any) -> LatentHeads:
    """The heads of a module, of the sizes that it tells itself."""
    return heads_of(module, int(module.kv_lora_rank), int(module.qk_rope_head_dim))


@dataclass
class Linears:
    """What passes through the linear layers of an attention layer.

    Attributes:
        module: that attends.
        owner: the layer whose keys and values it attends to.
        value: [batch, num_kv_heads, tokens, head_dim], as attention meets them.
        before: the linear layers that have run in its module, and their outputs.
        out: [batch, tokens, num_q_heads, head_dim], of attention.
        after: the first one that ran there after attention and takes what all heads give, and its
            input.
    """

    module: torch.nn.Module
    owner: int
    value: torch.Tensor
    before: list[tuple[torch.nn.Linear, torch.Tensor]]
    out: torch.Tensor
    after: tuple[torch.nn.Linear, torch.Tensor]


def observe_linears(model: Any) -> dict[int, Linears]:
    """The linear layers of every layer with attention, and what passes through them."""
    found: dict[int, Linears] = {}
    given: dict[torch.nn.Module, torch.Tensor] = {}
    values: dict[int, torch.Tensor] = {}

    def note(linear: torch.nn.Module, _: Any, result: torch.Tensor) -> None:
        given[linear] = result

    def see(linear: torch.nn.Module, taken: tuple[torch.Tensor, ...]) -> None:
        last = _watch.last
        if last is None or not any(child is linear for child in last.modules()):
            return
        assert isinstance(linear, torch.nn.Linear) and isinstance(last.layer_idx, int)
        assert _watch.out is not None
        if hands_latents(last) and linear.weight.shape[1] != _latent_heads(last).output_dim:
            return  # a gate (Ling 3)
        layer, own = last.layer_idx, list(last.modules())
        before = [(one, x) for one, x in given.items() if isinstance(one, torch.nn.Linear)]
        before = [(one, x) for one, x in before if any(child is one for child in own)]
        out, after = _watch.out, (linear, taken[0])
        found[layer] = Linears(last, _watch.owners[layer], values[layer], before, out, after)
        _watch.last = None

    def observer(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> None:
        values[layer] = v

    hooks = [linear.register_forward_pre_hook(see) for linear in linears(model)]
    hooks += [linear.register_forward_hook(note) for linear in linears(model)]
    with hooked(hooks):
        observe(model, torch.arange(4, device="cpu")[None], observer)
    return found
