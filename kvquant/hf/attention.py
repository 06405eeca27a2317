"""The attention registered as "kvquant": it reads marked keys and values, and rows of a KVCache.

    one new token      append it, then KVCache.attend: the fused call, without dequantizing
    drafted tokens     the same, where generate tries tokens of an assistant or a lookup
    a prompt's chunk   attend to the layer's dequantized past and causally to the chunk, then append

So the cache quantizes a prompt chunk by chunk, and only one layer at a time has a 16-bit copy.
Latent rows work likewise (models/latent.py); the keys that a model makes of them bear no mark. A
layer that gets another layer's marked keys (Gemma 4) attends to the same rows and appends nothing.

The layer's mask says whether its window is the cache's; masks and weights that kvquant cannot
compute raise. Calls without a QuantizedCache go to SDPA, or to the model's eager attention for soft
caps and sink logits: so a model may stay set to "kvquant".
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from ..cache.latent import LatentKVCache
from ..errors import UnsupportedModelError
from ..ops.causal import causal_attention
from ..rows.variant import PLAIN, AttentionVariant, moved
from .call import ATTENTION, HANDED
from .compile.tracing import outside_of_graphs
from .continuation import check_positions
from .gradients import without_gradient
from .handed import Handed, running
from .masks import window_of
from .models.latent import LatentHeads, heads_of
from .single_pass import added_mask, exact_attention
from .switch import DEQUANTIZE

# what models pass that does not change the result here: positions are in the keys already, windows
# are looked at apart, and some is for other parts of generate (stop strings) or of a loss
HARMLESS = {
    "assistant_tokenizer",
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "sliding_window",
    "tokenizer",
    "use_cache",
}
VARIANT = {"softcap", "s_aux"}  # what the soft_cap and sink_logits of AttentionVariant are there
_KNOWN = HARMLESS | VARIANT


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do, and append the new tokens."""
    handed = getattr(key, "kvquant_keys", None)
    if torch.compiler.is_compiling() and _is_outside(module, handed):
        outside: tuple[torch.Tensor, None] = outside_of_graphs(
            _attention, module, query, key, value, attention_mask, scaling, dropout, **options
        )
        return outside
    layer = getattr(module, "layer_idx", getattr(handed, "layer", None))
    if handed is None and (cache := running.take()) is not None:
        handed = cache.take_latents(layer)
    name = f"layer {layer} ({type(module).__name__})"
    if options.get("output_attentions"):
        raise UnsupportedModelError(
            f"{name} is asked for its attention weights, which kvquant's attention does not have: "
            "leave output_attentions out, or set another attention implementation"
        )
    if not isinstance(handed, Handed):
        _check_plain(module, name, attention_mask, options)
        attend, mask = exact_attention(module, options), attention_mask
        if any(options.get(option) is not None for option in VARIANT):  # by eager attention
            mask = _eager_mask(mask, query, key, _is_causal(module, options))
        options |= {"scaling": scaling, "dropout": dropout}
        return attend(module, query, key, value, mask, **options)[0], None
    try:
        heads, rows = None, handed.latents if isinstance(handed.kv, LatentKVCache) else None
        if rows is None:
            rows = key, value
        else:
            heads = heads_of(module, *(x.shape[-1] for x in rows))
            heads.check(query, key, value)
        for why in _not_served(handed, module, query, rows, heads, dropout, options):
            raise UnsupportedModelError(f"{name} {why}")
        if not handed.at:
            config = getattr(module, "config", None)
            if config is not None:
                handed.to.check_model(config)
            if not handed.appended:
                check_positions(handed.to, options.get("position_ids"), handed.is_traced)
        if handed.appended:
            attention_mask = _whole_mask(handed.mask, attention_mask, query.shape[2])
        else:
            handed.mask = attention_mask
        window, told = window_of(attention_mask, name, handed.to), options.get("sliding_window")
        if handed.kv.layers[handed.at].window != window or told not in (None, window):
            _check_window(handed, window, told, name)
        cap, sinks = options.get("softcap"), options.get("s_aux")
        sinks = None if sinks is None else sinks.detach().float()
        variant = None if cap is None is sinks else AttentionVariant(cap, sinks)
        if heads is not None and variant is not None:
            raise UnsupportedModelError(f"{name} has latent rows, and a cap or sink logits as well")
        if heads is not None:
            assert isinstance(handed.kv, LatentKVCache)
            heads.read_in_basis(handed.kv, handed.at)
        return _attend(handed, query, key, value, rows, scaling, variant, heads), None
    except BaseException:
        if not handed.is_traced:  # nothing has run yet
            handed.to.take_back()
        raise


def _is_outside(module: torch.nn.Module, handed: Any) -> bool:
    """Whether torch.compile meets attention outside of its graph."""
    if isinstance(handed, Handed):
        return not handed.is_traced
    return hasattr(module, "kv_b_proj") and running.traced is None


def _not_served(
    handed: Handed,
    module: torch.nn.Module,
    query: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    heads_of_latents: LatentHeads | None,
    dropout: float,
    options: dict[str, Any],
) -> list[str]:
    """What a layer asks for that a KVCache cannot compute, or has that its cache has not."""
    found, (key, value) = [], new  # no generator: torch.compile traces this
    if heads_of_latents is None and getattr(value, "kvquant_values", None) is not handed:
        found.append(
            "attends to other values than it gave to the cache (split, scaled or repeated): a "
            f"KVCache holds keys and values as attention meets them. {DEQUANTIZE}"
        )
    asked, tokens = query.shape[2], key.shape[2]
    if asked != tokens and not (handed.appended and asked < tokens):
        found.append("attends with other tokens than those of its keys")
    rows, held = handed.kv.layers[handed.at].seq_lens.device, handed.kv.num_kv_heads
    heads = key.shape[1]
    if key.device != rows:
        found.append(
            f"is on {key.device}, its rows on {rows}: make the cache of the model "
            "(QuantizedCache(model), not of its config) once the model is where it runs, or give a "
            "KVCache with device=[...], one for each layer"
        )
    if heads != held:
        found.append(
            f"has {heads} KV heads, its cache {held}: a KVCache has one number for all layers"
        )
    if dropout:
        found.append(f"has dropout {dropout}: call model.eval()")
    if not _is_causal(module, options):
        found.append("is not causal")
    for option, given in options.items():
        if option not in _KNOWN and given is not None and given is not False:
            found.append(f"asks for {option}, which no KVCache can compute")
    return found


def _is_causal(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """As SDPA of transformers takes it."""
    told = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told)


def _check_plain(
    module: torch.nn.Module, name: str, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> None:
    """Raise UnsupportedModelError where a call has a QuantizedCache, and attends to other keys."""
    # a graph cannot guard what the thread has noted; the next layer tells what has not attended
    cache = None if torch.compiler.is_compiling() else running.take()
    is_kept = cache is not None and cache.keeps(getattr(module, "layer_idx", None))
    if cache is not None and not cache.call.is_open:  # this is another call, which makes no masks
        cache = None
    is_handed = cache is not None and cache.call.state == HANDED
    is_ours = is_handed or (cache is not None and _is_causal(module, options))
    if is_kept and not is_handed:
        pass  # the layer attends to what transformers' own layer of the cache has given
    elif is_ours or hasattr(attention_mask, "kvquant_mask"):
        if cache:
            cache.take_back()
        raise UnsupportedModelError(
            f"{name} attends to other keys than those it gave to the cache, made of them "
            "(multi-head latent attention, repeated or scaled heads) or of none (as gradient "
            "checkpointing does): a KVCache holds keys and values as attention meets them. "
            f"{DEQUANTIZE}. If the layer's call before has failed, that is taken back now: call "
            "again"
        )


def _eager_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> torch.Tensor | None:
    """The mask of SDPA as eager attention takes it, which adds it to scores."""
    if mask is None and is_causal and query.shape[2] > 1:  # SDPA makes it, from the first key on
        new, columns = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, new, columns, dtype=torch.bool, device=query.device).tril()
    return None if mask is None else added_mask(mask, query.dtype)


def _attend(
    handed: Handed,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
    variant: AttentionVariant | None,
    heads: LatentHeads | None,
) -> torch.Tensor:
    """Attend to the past and the new tokens; the first layer that attends appends them."""
    kv, padding = handed.kv, handed.padding
    asked, new = query.shape[2], key.shape[2]
    if not handed.is_traced and kv.is_cold:  # the first append compiles the kernels of steps
        kv.step_variant = None if variant is None else moved(variant, "meta")
    if not handed.appended:
        handed.reads_rows = new == 1 or handed.to.takes_drafts()
    if handed.reads_rows:
        given = query.squeeze(2) if asked == 1 else query.transpose(1, 2)
        queries: tuple[torch.Tensor, ...] = (given,) if heads is None else heads.absorb(given)
        if query.is_cuda and query.dtype == torch.float32:  # the kernel there takes 16-bit queries
            queries = tuple(q.bfloat16() for q in queries)  # of any size, where fp16 ends at 65504
        if handed.appended:
            out = kv.attend(handed.at, queries[0], variant=variant, in_step=True, sm_scale=scaling)
        else:
            options: dict[str, Any] = {"variant": variant, "sm_scale": scaling}
            if heads is not None:
                folded = heads.folded is not None
                options = {"in_basis": folded, "sm_scale": heads.scale_of(scaling)}
            out = handed.to.step(handed, queries, rows, **options)
        out = out.unsqueeze(1) if asked == 1 else out
        out = out.to(query.dtype)
        out = out if heads is None else heads.values(out)
        return without_gradient(out, query, key, value) if torch.is_grad_enabled() else out
    if not handed.appended:
        rows = rows if padding is None else (padding.pack(rows[0]), padding.pack(rows[1]))
        handed.seen = _seen(handed, *rows)
    keys, values, lens = handed.seen or (key, value, [new] * len(key))
    window = kv.layers[handed.at].window
    if window is not None:
        variant = (variant or PLAIN)._replace(window=window)
    if padding is not None and padding.order is not None:
        query = padding.pack(torch.nn.functional.pad(query, (0, 0, new - asked, 0)))
    if heads is not None and handed.seen:
        out = heads.attend(query, keys, values, lens, scaling)
    else:
        out = causal_attention(query, keys, values, lens, scaling, variant)
    if padding is not None:
        out = padding.unpack(out)[:, :, -asked:]
    if not handed.appended:
        handed.to.append(handed, *rows)
    return out.transpose(1, 2).contiguous()  # as transformers' own: some models view it


def _seen(
    handed: Handed, key: torch.Tensor, value: torch.Tensor
) -> tuple[()] | tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What a chunk attends to, before it is appended."""
    layer, new = handed.kv.layers[handed.at], key.shape[2]
    past_lens = layer.held_lens.tolist()
    if not any(past_lens):
        is_packed = handed.padding is not None and handed.padding.order is not None
        return (key, value, [new] * len(key)) if is_packed else ()
    keys, values = layer.dequantized(key.dtype, room=new)
    for b, past in enumerate(past_lens):
        keys[b, :, past : past + new], values[b, :, past : past + new] = key[b], value[b]
    return keys, values, [past + new for past in past_lens]


def _whole_mask(
    whole: torch.Tensor | None, mask: torch.Tensor | None, asked: int
) -> torch.Tensor | None:
    """The mask that the first attention got, where a layer that shares keys got its last rows."""
    if mask is not None and whole is not None and not hasattr(mask, "kvquant_mask"):
        is_part = mask.shape[2:] == (asked, whole.shape[3])
        before = (whole.shape[2] - asked) * whole.stride(2) * whole.element_size()
        if is_part and mask.data_ptr() == whole.data_ptr() + before:
            return whole
    return mask


def _check_window(handed: Handed, window: int | None, option: int | None, name: str) -> None:
    """Raise unless a layer of the cache sees what the model's does."""
    at = handed.kv.layers[handed.at]
    given = [w for w in (at.window, window, option) if w is not None]
    if handed.to.columns > min(given):
        wanted, has = (f"the last {w} tokens" if w else "all tokens" for w in (window, at.window))
        told = "" if option in (None, window) else f" (and speaks of {option})"
        raise UnsupportedModelError(
            f"{name} attends to {wanted}{told}, its layer of the cache to {has}: make the cache by "
            "QuantizedCache(model), or CachedModel.new_cache"
        )


AttentionInterface.register(ATTENTION, _attention)
