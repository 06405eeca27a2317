"""Other projects' caches in the form that they ship, for transformers' models and for `evaluate`.

peer_schemes.py has how each project rounds. Here is when: which tokens stay in 16 bit, which leave
together, and which layers are left out. A cache holds 16-bit values and puts the rounded ones in
their place as tokens leave, generated ones too. The prompt is read with exact attention, as in
kvquant; what follows it reads the rounded values.

The facts were read in 2026-11 in the repositories named. Bits are counted as in memory:

    KIVI        jy-yuan/KIVI, models/llama_kivi.py: groups of 32; the keys of up to 128 tokens stay
                in 16 bit until they are 128 and leave together, for what comes next; the values of
                the last 128 tokens beside the newest stay. 128 is the default of
                utils/process_args.py, for groups too; example.py has 32 of both. The paper's
                setting: not checked
    TurboQuant  vLLM, quantization/turboquant/config.py, ops/triton_turboquant_store.py,
                backends/turboquant_attn.py; presets "4bit_nc" and "3bit_nc". K: Hadamard over the
                head, codebook, fp16 norm. V: no rotation, from the least to the greatest of a
                token's head, fp16 pairs. Every token at once; the first and the last two layers in
                16 bit, and those with a sliding window, which it does not take (vllm#54599). vLLM's
                codebook is that of a normal distribution, here it is of the coordinate's own one
    OSCAR       FutureMLS-Lab/OSCAR, rotation/eval_oscar_gpqa.sh: the first 64 and the last 256
                tokens in 16 bit; scales and zeros in float32 (fp16 values here; its README counts
                16 bits of them: 2.28). Its recipes in rotation/run now have other windows for some
                models (Qwen3-8B: 128 and 2,048) and a codebook there: not here
    KVarN       the README of huawei-csl/KVarN; its backend was read in ytwang13/KVarN-FP, a fork
                (kvarn/config.py, backends/kvarn_attn.py): the first 128 tokens stay in 16 bit; a
                tile of 128 tokens leaves when it is full, for what comes next. Layers with a
                sliding window stay in 16 bit (vllm#46812; vllm/platforms/cuda.py in copies)
    SAW-INT4    togethercomputer/saw-int4 and its fork of SGLang, branch jinda_rotation_fast
                (fused_hadamard_int4_kv.py, memory_pool.py): K in a Hadamard basis, rounded to
                bfloat16 there, in blocks of 128 as its README runs it (16 when no size is given), V
                as it comes; 4 bits from the least to the greatest of a token's head; scale and zero
                in float32 (OSCAR's README counts 16 bits of them: 4.25); every token at once. The
                commit that it names and the paper, arXiv 2604.19157: not checked
    llama.cpp   q8_0 and q4_0 of ggml/src/ggml-quants.c, blocks of 32 with an fp16 scale, behind a
                Hadamard rotation (llama.cpp#21038; src/llama-kv-cache.cpp was read in copies): for
                every quantized type, if head_dim is a multiple of 64; of K over the largest power
                of two that divides it, of V over blocks of 64; every token at once
    vLLM fp8    vLLM's page quantized_kvcache: e4m3 with scales of 1 where the checkpoint has none;
                every token at once. Queries, which FlashAttention 3 rounds too, are exact here

Batches may be padded on the left: `starts` says how much. Tokens are counted from each sequence's
own first one, so a sequence forms the groups that it would form alone. Padding takes part in none.
Layers with a sliding window keep all tokens too; the model's mask hides them. Where nothing above
says otherwise they are rounded as the others are: for llama.cpp and SAW-INT4 not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peer_schemes import (
    FP16,
    Pair,
    Read,
    codebook,
    from_codebook,
    kivi,
    kvarn,
    oscar,
    rotate,
    rounded,
)
from transformers.cache_utils import Cache, DynamicLayer

from kvquant.calibration.fidelity import compare_passages, standard_errors
from kvquant.hf.model import CachedModel
from kvquant.rows.quantize import EXACT_DTYPES

PREFILL = 4096  # tokens that are read at a time
BATCH = 8  # passages that are decoded together


@dataclass(frozen=True)
class Leave:
    """When tokens leave the 16-bit part: all but the last `recent`, in groups of so many."""

    recent: int = 0
    group: int = 1

    def end(self, first: int, tokens: int) -> int:
        """The first token that stays, of so many, where `first` is the first that may leave."""
        return first + max(tokens - self.recent - first, 0) // self.group * self.group


@dataclass(frozen=True)
class Shipped:
    """A project's cache.

    Attributes:
        name: for tables.
        packed_bits: of an element of K and V in the layers that are rounded.
        read: as of peer_schemes.PeerCache.
        keys, values: when they leave.
        sinks: first tokens that stay in 16 bit.
        layers: of the model.
        exact: these layers stay in 16 bit.
        sink_len, recent_len: none, for evaluate: apply itself knows which tokens stay.
    """

    name: str
    packed_bits: float
    read: Read
    keys: Leave = Leave()
    values: Leave = Leave()
    sinks: int = 0
    layers: int = 0
    exact: frozenset[int] = frozenset()
    sink_len = recent_len = 0

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> float:
        """Of an element of K and V, the layers in 16 bit included, tokens in 16 bit not."""
        share = len(self.exact) / max(self.layers, 1)
        return self.packed_bits + (FP16 - self.packed_bits) * share

    def stored_bits(self, tokens: int) -> float:
        """Of an element in a sequence of so many tokens, those in 16 bit included."""
        ends = (leave.end(self.sinks, tokens) for leave in (self.keys, self.values))
        share = sum(max(end - self.sinks, 0) for end in ends) / (2 * tokens)
        return FP16 + (self.bits - FP16) * share

    def apply(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """A prompt as `evaluate` has it read; see kvquant.evaluation.decoding.Simulated."""
        held = PeerLayer(self, layer, keys.dtype)
        held.update(keys, values)
        held.settle()
        return held.keys, held.values


class PeerLayer(DynamicLayer):
    """A layer of a project's cache.

    Args:
        peer: whose.
        layer: which.
        exact: the 16-bit dtype that keys and values are rounded to as they come.
        starts: padding before each sequence; none when empty.
    """

    keys: Any  # tensors, once there are some
    values: Any

    def __init__(
        self, peer: Shipped, layer: int, exact: torch.dtype, starts: Sequence[int] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types
        self.peer, self.layer, self.exact = peer, layer, exact
        self.starts = list(starts)
        self.done: dict[tuple[int, int], int] = {}  # by rule and sequence: what has left

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        """Add tokens; give back what attention reads, [batch, num_kv_heads, tokens, head_dim]."""
        is_prompt = not self.is_initialized
        new = (x.to(self.exact).to(x.dtype) for x in (key_states, value_states))
        super().update(*new)
        if not is_prompt:
            self.settle()
        return self.keys, self.values

    def settle(self) -> None:
        """Round what has left; `update` has made tensors of its own."""
        if self.layer in self.peer.exact:
            return
        peer = self.peer
        both = peer.keys == peer.values
        rules = [(peer.keys, (True, both))] + [(peer.values, (False, True))] * (not both)
        for at, (leave, sides) in enumerate(rules):
            for rows, span in self._left(leave, at):
                parts = [
                    x[rows, :, span] if wanted else x[rows, :, :0]
                    for x, wanted in zip((self.keys, self.values), sides, strict=True)
                ]
                found = peer.read(self.layer, *(x.float() for x in parts))
                stays = self._stays(rows, span)
                for x, part, now, wanted in zip(
                    (self.keys, self.values), parts, found, sides, strict=True
                ):
                    if wanted:
                        x[rows, :, span] = torch.where(stays, part, now.to(part.dtype))

    def _left(self, leave: Leave, at: int) -> Iterator[tuple[slice, slice]]:
        """The sequences and tokens that have left since the last call, tokens as they lie."""
        batch, tokens = self.keys.shape[0], self.keys.shape[2]
        starts = self.starts or [0] * batch
        if len(set(starts)) == 1 or leave.group == 1:
            # tokens that leave alone lie at the same places in all sequences, but for the first
            places = [(slice(None), min(starts))]
        else:
            places = [(slice(row, row + 1), start) for row, start in enumerate(starts)]
        for row, (rows, start) in enumerate(places):
            first = start + self.peer.sinks
            end, begun = leave.end(first, tokens), self.done.get((at, row), first)
            if end > begun:
                self.done[at, row] = end
                yield rows, slice(begun, end)

    def _stays(self, rows: slice, span: slice) -> torch.Tensor:
        """[sequences, 1, tokens, 1]: padding, and sinks of sequences that begin later."""
        starts = torch.tensor(self.starts or [0], device=self.keys.device)[rows]
        place = torch.arange(span.start, span.stop, device=self.keys.device)
        return (place < starts[:, None] + self.peer.sinks)[:, None, :, None]


def new_cache(
    peer: Shipped, num_layers: int, exact: torch.dtype, starts: Sequence[int] = ()
) -> Cache:
    """An empty cache for a model of so many layers; see PeerLayer."""
    return Cache(layers=[PeerLayer(peer, layer, exact, starts) for layer in range(num_layers)])


EXACT = Shipped("16 bit", FP16, lambda layer, keys, values: (keys, values))


class PeerReference:
    """Passages decoded token by token from 16-bit values, and from peers' caches.

    As fidelity.Reference, of which single_pass.PassReference tells the same. The prompt is read
    once and its 16-bit keys and values are given to each cache; scored tokens are fed one by one.

    Args:
        model: decodes, by transformers' own attention.
        windows: [passages, context + scored + 1], int64.
        context: tokens of the prompt.
    """

    def __init__(self, model: CachedModel, windows: torch.Tensor, context: int) -> None:
        self.model, self.exact = model, EXACT_DTYPES[model.exact_format]
        self.num_layers = model.model.config.get_text_config(decoder=True).num_hidden_layers
        self.scored = windows.shape[1] - context - 1
        self._parts = []
        for part in windows.split(BATCH):
            cache: Any = new_cache(EXACT, self.num_layers, self.exact)
            for chunk in part[:, :context].split(max(PREFILL // len(part), 1), dim=1):
                model.plain(chunk, cache)
            held = [(layer.keys, layer.values) for layer in cache.layers]
            expected = self._predict(EXACT, held, part[:, context:-1])
            self._parts.append((part, held, expected))

    def _predict(self, peer: Shipped, held: Sequence[Pair], fed: torch.Tensor) -> torch.Tensor:
        """[scored, passages, vocabulary], float32: log probabilities after each fed token."""
        cache = new_cache(peer, self.num_layers, self.exact)
        for layer, pair in enumerate(held):
            cache.update(*pair, layer)
        steps = (self.model.plain(one[:, None], cache) for one in fed.unbind(1))
        return torch.stack([one.float().log_softmax(-1) for one in steps])

    def measure(self, peer: Shipped) -> dict[str, float | None]:
        """ "kl", "top1" and their standard errors, over passages."""
        found = []
        for part, held, expected in self._parts:
            context = part.shape[1] - self.scored - 1
            given = self._predict(peer, held, part[:, context:-1])
            targets = part[:, context + 1 :].t()[..., None].to(given.device)
            found.append(compare_passages(expected, given, targets))
        parts = torch.cat(found, 1)
        kl, top1, _ = parts.mean(1).tolist()
        kl_error, top1_error = standard_errors(parts, self.scored)
        return {"kl": kl, "kl_error": kl_error, "top1": top1, "top1_error": top1_error}


def one_by_one(side: Callable[[str, torch.Tensor], torch.Tensor]) -> Read:
    """A reading of both sides by one function of "k" or "v" and its rows."""
    return lambda layer, keys, values: (side("k", keys), side("v", values))


def turned(x: torch.Tensor, size: int) -> torch.Tensor:
    """Rotate blocks of so many elements by a Hadamard matrix; undoes itself."""
    return rotate(x.unflatten(-1, (-1, size))).flatten(-2)


def vllm_turboquant(bits: int, head_dim: int) -> tuple[str, float, Read]:
    """The name, bits and reading of TurboQuant in vLLM."""
    levels = codebook(bits, head_dim).float()

    def side(which: str, x: torch.Tensor) -> torch.Tensor:
        return rotate(from_codebook(rotate(x), levels)) if which == "k" else rounded(x, bits, -1)

    return f"TurboQuant of vLLM, {bits} bits", bits + 1.5 * FP16 / head_dim, one_by_one(side)


def saw_int4(head_dim: int) -> tuple[str, float, Read]:
    """SAW-INT4's name, bits and reading."""
    size = min(head_dim, 128)

    def side(which: str, x: torch.Tensor) -> torch.Tensor:
        x = turned(x.bfloat16(), size).float() if which == "k" else x
        found = rounded(x, 4, -1, torch.float)
        return turned(found, size) if which == "k" else found

    return "SAW-INT4", 4 + 4 * FP16 / head_dim, one_by_one(side)


def ggml(x: torch.Tensor, bits: int) -> torch.Tensor:
    """q4_0 or q8_0: codes from the float32 scale, which is stored in fp16."""
    parts = x.unflatten(-1, (-1, 32))
    largest = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    # q4_0 gives the largest element, whatever its sign, the code -8
    scale = largest / -8 if bits == 4 else largest.abs() / 127
    x = parts / torch.where(scale != 0, scale, 1)
    away = (x.abs() + 0.5).floor().copysign(x)  # roundf: halves go away from zero
    codes = (x + 0.5).floor().clamp(max=7) if bits == 4 else away
    return torch.flatten(codes * scale.half().float(), -2)


def llama_cpp(bits: int) -> tuple[str, float, Read]:
    """llama.cpp's q8_0 or q4_0, of heads of a multiple of 64: the same of either."""

    def side(which: str, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] & -x.shape[-1] if which == "k" else 64
        return turned(ggml(turned(x, size), bits), size)

    return f"llama.cpp q{bits}_0", bits + FP16 / 32, one_by_one(side)


def fp8(_: str, x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3; what goes beyond it becomes the greatest."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).float()


def shipped(model: CachedModel, windows: torch.Tensor) -> list[Shipped]:
    """All of them, for a model.

    Args:
        model: of heads of equal size, which OSCAR observes.
        windows: [windows, tokens], int64, of a text for that.
    """
    exact = model.exact_format
    head_dim = model.new_cache(1, 1, k_format=exact, v_format=exact).head_dim
    config = model.model.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    sliding = frozenset(layer for layer, kind in kinds if kind == "sliding_attention")
    outer = sliding | {0, 1, layers - 2, layers - 1}
    full = Leave(1, 128)
    found = []
    for bits in (4, 2):
        one = kivi(bits, 32, head_dim)
        name = f"KIVI-{bits}, residual of 128"
        found.append(Shipped(name, one.bits, one.read, full, Leave(129), 0, layers))
    for bits in (4, 3):
        found.append(Shipped(*vllm_turboquant(bits, head_dim), layers=layers, exact=outer))
    one = oscar(model, windows, head_dim)
    name = "OSCAR-2, 64 sinks, 256 recent"
    packed = one.bits + 2 * FP16 / head_dim
    found.append(Shipped(name, packed, one.read, Leave(256), Leave(256), 64, layers))
    one = kvarn(4, 2, head_dim)
    name = f"{one.name}, 128 sinks"
    found.append(Shipped(name, one.bits, one.read, full, full, 128, layers, sliding))
    fixed = saw_int4(head_dim), llama_cpp(8), llama_cpp(4), ("vLLM fp8", 8.0, one_by_one(fp8))
    return [*found, *(Shipped(*plain, layers=layers) for plain in fixed)]
