"""Fold the basis of V into a model's weights: then no product with it is left in a decode step.

    stored      v' = E (W_v x + b_v - offset)             W_v' = E W_v     b_v' = E (b_v - offset)
    attention   y  = W_o (M sum_t p_t v'_t + offset)      W_o' = W_o M     b_o' = b_o + W_o offset

E = M^-1. W_v and b_v are those of a KV head, W_o the columns of each query head that reads it. This
is exact except for rounding: float64 products, rounded once to the dtype of the weights.

The values themselves, not names, identify the two linear layers: values must be the last features
of one layer's output, and attention's output the input of another. A model with anything between (a
norm of values, a gate) raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedModelError
from ...rows.basis import Basis
from ..switch import attending, hooked, plain_implementation
from .configs import input_device
from .observe import check_here, observe_linears

PROBED = 16  # tokens that a model is tried with
# relative error of logits: of bf16, far less; if something else hangs on values, 1 or so
SAME = 0.1


class Projections(NamedTuple):
    """The linear layers of an attention layer around its values.

    Attributes:
        owner: the layer whose values these are.
        value: outputs them as its last features; None if the layer attends to another one's values.
        output: takes what attention gives.
    """

    owner: int
    values: torch.nn.Linear | None
    output: torch.nn.Linear


def fold_values(model: Any, bases: Mapping[int, Basis]) -> None:
    """Move bases of V, by the owning layer, from a cache into the weights of a model, in place.

    Raises:
        UnsupportedModelError: a layer's values or outputs do not come straight from, or go straight
            into, a linear layer of its own, or weights are offloaded; nothing has changed.
    """
    found = find_projections(model)
    missing = sorted(bases.keys() - {at.owner for at in found.values()})
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} were not seen to attend: their values "
            "cannot be folded"
        )
    chosen = {layer: at for layer, at in found.items() if at.owner in bases}
    _check_own(model, chosen)
    _check_same(model, chosen, bases)
    with torch.no_grad():
        for at in chosen.values():
            basis = bases[at.owner].to(at.output.weight.device)
            if at.values is not None:
                _fold_into_values(at.values, basis)
            _fold_into_output(at.output, basis)


def find_projections(model: Any) -> dict[int, Projections]:
    """The linear layers around each layer's values; errors as of fold_values."""
    name, found = type(model).__name__, {}
    for layer, seen in observe_linears(model).items():
        value = seen.value.transpose(1, 2).flatten(2)
        giving = None
        if seen.owner == layer:
            for linear, given in seen.before:
                fits = given.shape[:2] == value.shape[:2]
                if fits and torch.equal(given[..., -value.shape[2] :], value):
                    giving = linear
            if giving is None:
                raise UnsupportedModelError(
                    f"layer {layer} of {name} attends to values that no linear layer of it gives "
                    "as they are (a norm, a rotation, or interleaved heads): they cannot be folded"
                )
        if not torch.equal(seen.after[1], seen.out.flatten(2)):
            raise UnsupportedModelError(
                f"layer {layer} of {name} has no linear layer that takes what attention gives as "
                "it is (a gate or a norm stands between): its values cannot be folded"
            )
        found[layer] = Projections(seen.owner, giving, seen.after[0])
    return found


def _check_own(model: Any, found: Mapping[int, Projections]) -> None:
    """Raise unless every linear layer is of one layer alone, and has plain weights."""
    users: dict[int, int] = {}
    for layer, at in found.items():
        for linear in (at.values, at.output):
            if linear is None:
                continue
            weight = linear.weight
            check_here(linear, f"layer {layer} of {type(model).__name__}")
            if type(linear) is not torch.nn.Linear or not weight.is_floating_point():
                raise UnsupportedModelError(
                    f"layer {layer} of {type(model).__name__} has a {type(linear).__name__} of "
                    f"{weight.dtype}: only the weights of a torch.nn.Linear can be folded into"
                )
            other = users.setdefault(weight.data_ptr(), layer)
            if other != layer:
                raise UnsupportedModelError(
                    f"layers {other} and {layer} of {type(model).__name__} share weights: the "
                    "basis of one cannot be folded into both"
                )


def _check_same(model: Any, found: Mapping[int, Projections], bases: Mapping[int, Basis]) -> None:
    """Raise unless hooks with the bases between these layers leave the model's result the same."""

    def encode(basis: Basis) -> Any:
        def hook(linear: torch.nn.Module, _: Any, given: torch.Tensor) -> torch.Tensor:
            size = basis.offset.numel()
            rows = given[..., -size:].double().unflatten(-1, basis.offset.shape)
            moved = (rows - basis.offset.double())[..., None]
            values = (_matrices(basis)[0] @ moved).flatten(-3).to(given.dtype)
            return torch.cat([given[..., :-size], values], dim=-1)

        return hook

    def decode(basis: Basis) -> Any:
        def hook(linear: torch.nn.Module, taken: tuple[torch.Tensor, ...]) -> Any:
            heads, dim = basis.offset.shape
            rows = taken[0].double().unflatten(-1, (heads, -1, dim))[..., None]
            restored = (_matrices(basis)[1][:, None] @ rows)[..., 0] + basis.offset[:, None]
            return restored.flatten(-3).to(taken[0].dtype), *taken[1:]

        return hook

    def run() -> torch.Tensor:
        tokens = torch.arange(PROBED, device=input_device(model))[None]
        with attending(model, plain_implementation(model)), torch.no_grad():
            logits: torch.Tensor = model(tokens, use_cache=False).logits
        return logits.double()

    wanted, hooks = run(), []
    for at in found.values():
        basis = bases[at.owner].to(at.output.weight.device)
        if at.values is not None:
            hooks.append(at.values.register_forward_hook(encode(basis)))
        hooks.append(at.output.register_forward_pre_hook(decode(basis)))
    with hooked(hooks):
        given = run()
    error = float((given - wanted).norm() / wanted.norm())
    if not error <= SAME:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses its values for more than attention: with them in the "
            f"plan's basis its logits change by {error:.2g}, so they cannot be folded"
        )


def _fold_into_values(linear: torch.nn.Linear, basis: Basis) -> None:
    """Let a linear layer's last features be what the basis stores: E (W x + b - offset)."""
    heads, dim = basis.offset.shape
    weight, bias = linear.weight, linear.bias
    encode, _ = _matrices(basis)
    size = heads * dim
    rows = weight[-size:].double().unflatten(0, (heads, dim))
    weight[-size:] = (encode @ rows).flatten(0, 1).to(weight.dtype)
    before = weight.new_zeros(weight.shape[0]) if bias is None else bias
    own = before[-size:].double().view(heads, dim) - basis.offset.double()
    after = before.clone()
    after[-size:] = (encode @ own[..., None]).flatten().to(weight.dtype)
    _set_bias(linear, after)


def _fold_into_output(linear: torch.nn.Linear, basis: Basis) -> None:
    """Let a linear layer take what attention gives of stored values: W (M x + offset)."""
    heads, dim = basis.offset.shape
    weight = linear.weight
    _, decode = _matrices(basis)
    columns = weight.double().unflatten(1, (heads, -1, dim))  # [out, KV head, its query head, dim]
    shift = torch.einsum("ohgd,hd->o", columns, basis.offset.double())
    weight.copy_(torch.einsum("ohgd,hde->ohge", columns, decode).flatten(1).to(weight.dtype))
    before = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias
    _set_bias(linear, (before.double() + shift).to(weight.dtype))


def _set_bias(linear: torch.nn.Linear, bias: torch.Tensor) -> None:
    if linear.bias is not None:
        linear.bias.copy_(bias)
    elif bool(bias.any()):
        linear.bias = torch.nn.Parameter(bias, requires_grad=linear.weight.requires_grad)


def _matrices(basis: Basis) -> tuple[torch.Tensor, torch.Tensor]:
    """E and M of each KV head, in float64, as they multiply columns."""
    heads, dim = basis.offset.shape
    if basis.matrix is None:
        eye = torch.eye(dim, dtype=torch.float64, device=basis.offset.device)
        return eye.expand(heads, dim, dim), eye.expand(heads, dim, dim)
    matrix = basis.matrix.double()
    return torch.linalg.inv(matrix), matrix
