"""The whole of calibration: moments, bases, formats, and the proof by decoding."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch

from kvquant.errors import ConfigError, NonFiniteError, UnsupportedModelError, refuse, shown
from kvquant.hf.model import CachedModel, as_cached_model
from kvquant.hf.models.configs import CacheLayers, cache_layers
from kvquant.hf.models.loading import tokenizer_of
from kvquant.hf.switch import linears
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan
from kvquant.rows.arguments import check_kind, check_size
from kvquant.rows.codec import FP8_DS_MLA, FP16_MAX
from kvquant.rows.format import HEAD_DIMS, RowFormat, mean_bits
from kvquant.rows.latent import LatentFormat

from .basis_search import BASE_FORMAT, BATCH, Chosen, choose
from .fidelity import Fidelity, Planned, Reference, Scheme
from .format_search import Costs, Side, allocate, worst_layers
from .layer_selection import HeldLayers, left_out, renumbered
from .moments import Moments
from .single_pass import BATCH as SCORED_AT_ONCE
from .single_pass import PassReference, reference_of
from .windows import Sizes as Sizes
from .windows import (
    Text,
    begin_of,
    observed_windows,
    packaged_texts,
    random_tokens,
    token_ids,
    too_little,
)
from .windows import spread as spread

log = logging.getLogger("kvquant")
HELD_OUT = 4  # the last quarter of a text is held out for scoring
CANDIDATES = ("int4", "int4-g2", "int4-g4", "int4-g8", "int8")  # cheapest first
# before them, where formats are chosen by what they cost on a text
FEW_BITS = ("int2", "int3")
ROUNDINGS = ("feedback", "nearest")
COMPARED = ("int4", "int4-g4", "int8")
# of latents, and of RoPE parts by their elements: what the kernel on CUDA reads, and 16 bit
LATENT_CANDIDATES = ("int4-g4", "int4-g8", "int8-g4")
ROPE_CANDIDATES = {64: ("int8-g4",), 32: ()}
LATENT_FORMAT = "int4-g8"
LATENT_COMPARED = ("int4-g4", "int4-g8", "int4-g8+int8-g4", "int8-g4", "fp8-g4")
WINDOW = 4, 128  # sink_len and recent_len of caches by default
NOISE = 2e-4  # of a KL in bfloat16, nats per token
ROUNDS = 6  # plans that are measured to meet a limit, at most
Report = Callable[[str, int], None]  # a stage and how much of it was done, in hundredths


@dataclass(frozen=True)
class Goal:
    """What the plan has to reach; contradictions and impossible goals raise ConfigError.

    Attributes:
        max_kl: KL to the 16-bit cache, nats per token.
        budget: bits per element of the packed rows.
        format: of all layers; with neither of the others. Of latent rows as LatentFormat takes it.
    """

    max_kl: float | None = None
    budget: float | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        if self.format is not None:
            check_kind("format", self.format, str, "give its short name")
        refuse(ConfigError, self._problems())
        for name in (self.format or BASE_FORMAT).split("+"):
            RowFormat.parse(name, HEAD_DIMS[0])  # an unknown one is refused before all work

    def _problems(self) -> Iterator[str]:
        for what, number in (("max_kl", self.max_kl), ("budget", self.budget)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, Real)):
                yield f"{what} is {shown(number)}: use a number, or None"
        if self.format is not None and (self.max_kl, self.budget) != (None, None):
            yield "give a format, or --max-kl and --budget to have formats chosen"
        if self.max_kl is not None and not (0 < self.max_kl < math.inf):
            yield f"a KL of {self.max_kl} cannot be kept: use more than 0, as 0.01"
        if self.budget is not None and not self.budget < math.inf:
            yield f"a budget of {self.budget} bits is not possible: use 2.25 or more"


@dataclass(frozen=True)
class _Rows:
    """The rows of a model's cache, and the formats that they are given a choice of."""

    k_dim: int
    v_dim: int
    are_latent: bool
    exact: str
    budget: float | None = None
    in_16_bit: float = 0.0
    are_chosen: bool = False

    @property
    def left(self) -> float | None:
        """Bits of the budget for an element of the packed layers, after those in 16 bit."""
        if self.budget is None or self.in_16_bit == 1:
            return None
        return (self.budget - 16 * self.in_16_bit) / (1 - self.in_16_bit)

    @property
    def few_bits(self) -> tuple[str, ...]:
        """Formats below 4 bits, for a choice by a text, or a budget that needs them."""
        least = self.bits(BASE_FORMAT, BASE_FORMAT)
        needed = self.left is not None and self.left < least - 1e-9
        if self.are_latent or not (self.are_chosen or needed):
            return ()
        # GPUs read rows of whole words: not INT3 of 80 and 112 elements
        return tuple(n for n in FEW_BITS if all(x.row_bytes % 4 == 0 for x in self.pair(n, n)))

    @property
    def offered(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Formats of K and of V, cheapest first."""
        if not self.are_latent:
            return ((*self.few_bits, *CANDIDATES),) * 2
        return (*LATENT_CANDIDATES, self.exact), (*ROPE_CANDIDATES[self.v_dim], self.exact)

    @property
    def _told(self) -> str:
        """The facts in the error about a budget."""
        share = f"{self.in_16_bit:.0%} of the layers stay in 16 bit, which the budget counts"
        return f" ({share})" if self.in_16_bit else ""

    def check_text(self, is_there: bool) -> None:
        """Raise ConfigError if few bits are offered and no text says what they cost."""
        if self.few_bits and not is_there:
            raise ConfigError(
                f"a budget of {self.budget:g} bits asks for rows of 2 and 3 bits, which are chosen "
                "by what they cost on a text: give a text, or a format in place of the budget"
                + self._told
            )

    def pair(self, k_name: str, v_name: str) -> tuple[RowFormat, RowFormat]:
        return RowFormat.parse(k_name, self.k_dim), RowFormat.parse(v_name, self.v_dim)

    def bits(self, k_name: str, v_name: str) -> float:
        return mean_bits(self.pair(k_name, v_name))

    def names_of(self, name: str) -> tuple[str, str]:
        """The formats of K and of V that a format of all layers stands for."""
        if not self.are_latent:
            return name, name
        whole = name if "+" in name or name == "fp8" else f"{name}+{self.exact}"
        fmt = LatentFormat.parse(whole, self.k_dim, self.v_dim)
        if fmt.latent.codec == FP8_DS_MLA:
            raise ConfigError(
                "fp8 is FlashMLA's layout, for which nothing is chosen: calibrate fp8-g4, and "
                "plan.with_formats('fp8') has its bases"
            )
        return str(fmt.latent), str(fmt.rope)

    @property
    def compared(self) -> dict[str, tuple[str, str]]:
        """The formats of all layers that a plan is compared in, and those of K and of V then."""
        if not self.are_latent:
            return {name: self.names_of(name) for name in (*self.few_bits, *COMPARED)}
        names = [name for name in LATENT_COMPARED if "+" not in name or ROPE_CANDIDATES[self.v_dim]]
        pairs = map(self.names_of, names)
        dims = self.k_dim, self.v_dim
        return {str(LatentFormat.parse("+".join(pair), *dims)): pair for pair in pairs}

    @property
    def least_bits(self) -> float:
        """Bits per element with the cheapest formats, and with the layers that stay in 16 bit."""
        of_k, of_v = self.offered
        cheapest = self.bits(of_k[0], of_v[0])
        return cheapest + (16 - cheapest) * self.in_16_bit

    def check_budget(self, bits: float | None = None) -> None:
        """Raise if formats of so many bits, the cheapest when None, take more than there are."""
        least = self.least_bits if bits is None else bits
        if self.budget is not None and least > self.budget + 1e-9:
            raise ConfigError(
                f"a budget of {self.budget} bits is below {least:.2f}, which the cheapest formats "
                "take: use as many or more" + self._told
            )


def calibrate(
    model: Any,
    tokens: Text | None = None,
    held: Text | None = None,
    *,
    sizes: Sizes | None = None,
    goal: Goal | None = None,
    rounding: str = "feedback",
    zero_data: bool = False,
    progress: Report = lambda stage, share: None,
    window: tuple[int, int] = WINDOW,
    tokenizer: Any = None,
) -> CachePlan:
    """Make the plan of a model's caches, and measure what it keeps of the predictions.

    Args:
        model: a CachedModel, a model of transformers, or what CachedModel.from_pretrained loads.
        tokens: token ids of the text to observe. None: a packaged text of encyclopedia, code and
            dialogue, and another one to score unless held is given. With zero_data calibrate
            observes random tokens, and scores held only.
        held: another text to score; the last quarter of tokens when None.
        sizes: how much to read; Sizes(), within the model's positions, when None.
        goal: what to reach; Goal(format="int4") when None, or "int4-g8" of latent rows.
        rounding: "feedback", where it is better, or "nearest", as latent rows always have.
        zero_data: observe random tokens in place of the text.
        progress: called with the stage and its new progress in hundredths.
        window: sink_len and recent_len of the caches that the plan is for; (0, 0) for an engine
            without them. calibrate chooses formats with this window, and measures with and
            without it. Without it alone if a passage's context is not longer.
        tokenizer: of a model of transformers, for the packaged text; None for the one beside its
            weights (name_or_path).

    Returns:
        The plan, also if it misses the goal.

    Raises:
        ConfigError: a text is no text or too short for the sizes, or an option is not possible.
        UnsupportedModelError: the model has latent rows and cannot decode from them, layers with
            unlike head_dim, or layers that run several times.

    Example:
        >>> from kvquant import CachedModel, calibrate
        >>> from kvquant.calibration.windows import Sizes
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> model = CachedModel.from_pretrained(MODEL)
        >>> small = Sizes(observed=1024, length=256, windows=2, context=64, scored=8)
        >>> plan = calibrate(model, sizes=small)  # without sizes: a minute or two
        >>> plan.formats[0]
        ('int4', 'int4')
        >>> cache = model.new_cache(batch=1, max_seq_len=64, plan=plan)
    """
    model = as_cached_model(model, tokenizer)
    for name, given, kind in (("sizes", sizes, Sizes), ("goal", goal, Goal)):
        if given is not None:
            check_kind(name, given, kind, f"give a {kind.__name__}, or None")
    how = "give a CachedModel, a model of transformers, or a folder"
    check_kind("model", model, CachedModel, how)
    layers = cache_layers(model.config)
    window = check_size("sink_len", window[0]), check_size("recent_len", window[1])
    if rounding not in ROUNDINGS:
        raise ConfigError(
            f"rounding {shown(rounding)} does not exist: use {' or '.join(ROUNDINGS)}"
        )
    goal = goal or Goal(format=LATENT_FORMAT if layers.are_latent else BASE_FORMAT)
    _check_goal(model, goal, layers, not zero_data or tokens is not None or held is not None)
    if sizes is None:
        longest = Sizes.context + Sizes.scored + 1
        beyond = max(longest - (model.max_positions or longest), 0)
        sizes = Sizes(context=max(Sizes.context - beyond, 1))
    if tokens is None and not zero_data:
        if model.tokenizer is None:
            model = copy(model)
            model.tokenizer = tokenizer_of(model.model)
        tokens, scored = map(model.encode, packaged_texts())
        held = scored if held is None else held
    observed, fitted, passages = _windows(model, tokens, held, sizes, zero_data)
    if goal.max_kl is not None and passages is None:
        raise ConfigError("a KL is measured on a text: give tokens or held, or no max_kl")
    model.output_weights()  # a model that does not show them is refused before it is observed
    moments = observe(model, observed, progress)
    others, moments = left_out(moments, layers), renumbered(moments, layers)
    kept = _kept(moments)
    share = len(kept) / len(moments.layers)
    are_chosen = goal.format is None and passages is not None
    rows = _Rows(*_row_of(layers), model.exact_format, goal.budget, share, are_chosen)
    of_k, of_v = rows.offered
    start = (of_k[0], of_v[0]) if goal.format is None else rows.names_of(goal.format)
    formats = {name: rows.pair(name, name) for name in dict.fromkeys((*of_k, *of_v, *start))}
    rows.check_budget()
    rows.check_text(passages is not None)
    if layers.are_latent:
        rounding = "nearest"
    chosen = choose(
        HeldLayers(model, layers),
        fitted,
        moments,
        {name: pair for name, pair in formats.items() if not pair[0].is_exact},
        base_format=LATENT_CANDIDATES[0] if layers.are_latent else BASE_FORMAT,
        rounding=rounding,
        progress=_shares(progress, "choose", len(moments.layers) * (1 + -(-len(fitted) // BATCH))),
    )
    facts = {
        "model": model_identity(model.config_dict),
        "observed_tokens": moments.count,
        "zero_data": zero_data,
        "settings": {
            **vars(sizes),
            "rounding": rounding,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "places": list(layers.places),
        "others": [{"layer": layer, "why": why} for layer, why in others.items()],
        **({"latent": True} if layers.are_latent else {}),
    }
    plan = _assembled(chosen, start, model.exact_format, kept, facts)
    if passages is None:
        limit = {"max_kl": None, "budget": goal.budget, "met": True}
        rest = {"limit": limit, "blamed": [], "sensitivity": [], "comparison": []}
        return CachePlan({**plan.facts, **rest, "windowed": None}, plan.tensors)
    why = ""
    try:
        model.new_cache(1, 1, plan=plan)
    except UnsupportedModelError as error:
        why = str(error)
    reads = -(-len(passages) // SCORED_AT_ONCE) * (len(linears(model.model)) + plan.num_layers)
    tick = partial(_shares(progress, "read", reads), 1)
    reference = reference_of(model, passages, sizes.context, layers, why=why, tick=tick)
    return _decided(reference, plan, rows, chosen, formats, goal, sizes, progress, window)


def _windows(
    model: CachedModel, tokens: Text | None, held: Text | None, sizes: Sizes, zero_data: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Windows to observe and to choose on, and passages to score, if there is a text."""
    given = {"tokens": tokens, "held": held}
    texts = {name: token_ids(name, text) for name, text in given.items() if text is not None}
    for name, text in texts.items():
        if not len(text):
            raise ConfigError(f"{name} is empty: give a longer text")
    if "tokens" in texts and held is None:
        cut = len(texts["tokens"]) - len(texts["tokens"]) // HELD_OUT
        texts["tokens"], texts["held"] = texts["tokens"].tensor_split([cut])
    passages = None
    if "held" in texts:
        passages = spread(texts["held"], sizes.windows, sizes.context + sizes.scored + 1)
    seen: Text | None = None if zero_data else texts.get("tokens")
    if seen is None:
        seen = random_tokens(model.config_dict, sizes.observed)
    observed, fitted = observed_windows(seen, sizes, model.max_positions)
    if little := too_little(observed.numel(), sizes, is_scored=passages is not None):
        log.warning("kvquant: too little text: %s", little)
    return observed, fitted, passages


def observe(
    model: CachedModel, windows: torch.Tensor, progress: Report = lambda stage, share: None
) -> Moments:
    """The moments of a text, window by window; see calibrate."""
    moments = Moments()
    step = _shares(progress, "observe", len(windows) * model.config.num_hidden_layers)

    def see(layer: int, *shown: Any) -> None:
        moments.observe(layer, *shown)
        step(1)

    for number, window in enumerate(windows):
        model.observe(window[None], see, begin_of(number))
    for layer, at in moments.layers.items():
        if not all(bool(tensor.isfinite().all()) for tensor in at.tensors.values()):
            raise NonFiniteError(
                f"layer {layer} attends with NaN or Inf: fix the model, or run it in float32"
            )
    return moments


def _assembled(
    chosen: Mapping[int, Mapping[str, Chosen]],
    start: tuple[str, str],
    exact: str,
    kept: Mapping[int, str],
    facts: Mapping[str, Any],
) -> CachePlan:
    """Make the plan, with the same formats for all layers and nothing measured yet."""
    order = sorted(chosen)
    tensors: dict[str, torch.Tensor] = {}
    names = [*chosen[order[0]]["k"].clips]
    for side in "kv":
        each = [chosen[layer][side] for layer in order]
        parts: dict[str, list[torch.Tensor | None]] = {
            "offset": [one.basis.offset for one in each],
            "matrix": [one.basis.matrix for one in each],
            "feedback": [one.basis.feedback for one in each],
            **{f"clip.{name}": [one.clips[name] for one in each] for name in names},
        }
        eye = torch.eye(each[0].basis.offset.shape[1], dtype=torch.float32, device="cpu")
        eyes = eye.expand(len(each[0].basis.offset), -1, -1)  # of the layers without a matrix
        for name, of_layers in parts.items():
            if any(part is not None for part in of_layers):
                whole = [eyes if part is None else part.cpu().float() for part in of_layers]
                tensors[f"{side}.{name}"] = torch.stack(whole)
    layers = []
    for layer in order:
        entry: dict[str, Any] = {"kept": kept.get(layer)}
        for side, name in zip("kv", start, strict=True):
            basis = chosen[layer][side].basis
            rounding = "nearest" if basis.feedback is None else "feedback"
            entry[side] = {"format": name, "basis": basis.kind, "rounding": rounding}
            if layer in kept:
                entry[side] = {"format": exact, "basis": "none", "rounding": "nearest"}
        layers.append(entry)
    found = {**facts, "layers": layers, "candidates": names, "measured": None}
    return CachePlan(found | {"bits": CachePlan(found, tensors).bits}, tensors)


def _decided(
    reference: Reference | PassReference,
    plan: CachePlan,
    rows: _Rows,
    chosen: dict[int, dict[str, Chosen]],
    formats: Mapping[str, tuple[RowFormat, RowFormat]],
    goal: Goal,
    sizes: Sizes,
    progress: Report,
    window: tuple[int, int],
) -> CachePlan:
    """The plan with its formats chosen and its fidelity measured."""
    exact = reference.exact_format
    free = [i for i, entry in enumerate(plan.facts["layers"]) if not entry["kept"]]
    # what a side costs is asked only where formats are to be chosen
    sides: list[Side] = [(layer, side) for layer in free for side in "kv"]
    asked = sides if goal.format is None else []
    start = {side: plan.facts["layers"][side[0]][side[1]]["format"] for side in sides}
    compared = rows.compared
    if goal.format is not None and not plan.is_latent:  # what was asked for, and the safe one
        compared = {name: rows.names_of(name) for name in dict.fromkeys((goal.format, "int8"))}
    by_layers = isinstance(reference, PassReference)
    unit = -(-sizes.windows // SCORED_AT_ONCE) * plan.num_layers if by_layers else 1
    times = 2 + len(asked) + (2 if asked else 1) * len(compared) + (ROUNDS if asked else 0)
    step = _shares(progress, "score", unit * times)
    if isinstance(reference, PassReference):
        reference.seen = partial(step, 1)

    def measure(scheme: Scheme | Planned) -> Fidelity:
        measured = reference.measure(scheme)
        if not by_layers:
            step(1)
        return measured

    # formats are chosen for caches with the window, if the passages are long enough to have one
    at = window if 0 < sum(window) < sizes.context else (0, 0)
    found = measure(Planned(plan, "the plan", *at))
    of_k, of_v = rows.offered
    alone: dict[Side, float] = {}
    for side in asked:
        only = {other: start[other] if other == side else exact for other in sides}
        one = Planned(plan.with_layer_formats(only), "one side", *at)
        alone[side] = max(measure(one).kl, 1e-12)
    # what 16-bit arithmetic adds to each
    noise = 0.0 if plan.facts["settings"]["dtype"] == "float32" else NOISE
    noise = min([noise, *alone.values()])
    costs = Costs(
        {
            side: _costs(
                chosen[side[0]][side[1]], max(alone[side] - noise, 1e-12), start[side], formats
            )
            for side in asked
        },
        bits={name: formats[name][0].bits_per_element for name in of_k},
        v_bits={name: formats[name][1].bits_per_element for name in of_v},
        v_width=rows.v_dim / rows.k_dim,
    )
    used, limit = start, goal.max_kl
    for _ in range(ROUNDS if asked else 0):
        if limit is not None and found.kl <= limit:
            break
        factor = found.kl / max(costs.total(used), 1e-12)
        target = None if limit is None else 0.95 * limit / factor
        wanted = allocate(costs, max_kl=target, budget=rows.left)
        if wanted == used:
            break
        used, plan = wanted, plan.with_layer_formats(wanted)
        found = measure(Planned(plan, "the plan", *at))
    bare = measure(Planned(plan)) if any(at) else found
    windowed = {"sink_len": at[0], "recent_len": at[1], "bits": found.bits}
    is_met = limit is None or found.kl <= limit
    comparison: list[dict[str, Any]] = []
    for name, pair in compared.items():
        for scheme in (Scheme(*pair), Planned(plan.with_formats(*pair), f"{name}, plan")):
            entry = {"format": name, "plan": isinstance(scheme, Planned), "bits": rows.bits(*pair)}
            with suppress(NonFiniteError):  # layers that a plan keeps cannot be quantized without
                if isinstance(scheme, Planned) and scheme.plan.formats == plan.formats:
                    comparison.append(entry | _fidelity_facts(bare))
                elif asked or plan.is_latent or isinstance(scheme, Scheme):
                    comparison.append(entry | _fidelity_facts(measure(scheme)))
    facts = {
        **plan.facts,
        "measured": {
            **_fidelity_facts(bare),
            "exact_perplexity": reference.perplexity,
            "context": sizes.context,
            "scored": reference.num_tokens,
            "passages": sizes.windows,
            "sink_len": 0,
            "recent_len": 0,
            "in_one_pass": getattr(reference, "why", "") or None,
        },
        "windowed": {**_fidelity_facts(found), **windowed} if any(at) else None,
        "limit": {"max_kl": limit, "budget": goal.budget, "met": is_met},
        "blamed": [] if is_met else worst_layers(costs, used),
        "sensitivity": [
            {
                "layer": layer,
                "k_format": start[layer, side] if side == "k" else exact,
                "v_format": start[layer, side] if side == "v" else exact,
                "kl": kl,
            }
            for (layer, side), kl in alone.items()
        ],
        "comparison": comparison,
    }
    return CachePlan(facts, plan.tensors)


def _row_of(layers: CacheLayers) -> tuple[int, int, bool]:
    """Elements of a row of K and of V, alike in all layers, and whether they are latent rows."""
    return layers.k_dims[0], layers.v_dims[0], layers.are_latent


def _check_goal(model: CachedModel, goal: Goal, layers: CacheLayers, has_text: bool) -> None:
    """Raise unless a model can have plans that reach the goal."""
    is_latent = layers.are_latent
    if goal.format is not None and "+" in goal.format and not is_latent:
        raise ConfigError(f"format {goal.format} is of latent rows, and this model has K and V")
    shapes = dict.fromkeys(zip(layers.k_dims, layers.v_dims, strict=True))
    if len(shapes) > 1:
        told = ", ".join(f"{k}/{v}" for k, v in shapes)
        raise UnsupportedModelError(
            f"layers of this model have unlike head_dim (K/V {told}), and a plan has one. A cache "
            "refuses a plan that lacks any of its layers. Use a cache without a plan, for example "
            "with int8-g4 rows; kvquant evaluate --cache int8-g4 measures its KL"
        )
    if is_latent:
        model.new_cache(1, 1)  # what cannot decode is told now
    elif layers.others:
        return  # the model cannot decode from a KVCache alone
    are_chosen = goal.format is None and has_text
    rows = _Rows(*_row_of(layers), model.exact_format, goal.budget, are_chosen=are_chosen)
    rows.check_budget(rows.bits(*(names[0] for names in rows.offered)))
    rows.check_text(has_text)
    # and a format without a kernel
    options: dict[str, Any] = {}
    if is_latent and goal.format is not None:
        options = {"fmt": "+".join(rows.names_of(goal.format))}
    elif not is_latent and (goal.format is not None or rows.few_bits):
        names = rows.names_of(goal.format or FEW_BITS[0])
        options = dict(zip(("k_format", "v_format"), names, strict=True))
    if options:
        model.new_cache(1, 1, accept_loss=True, **options)


def _costs(
    chosen: Chosen, alone: float, start: str, formats: Mapping[str, tuple[RowFormat, RowFormat]]
) -> dict[str, float]:
    """The KL of one side in every format, from that in the one it was measured in."""
    errors = {
        name: float(chosen.errors[name].square().mean())
        for name, pair in formats.items()
        if not pair[0].is_exact
    }
    least = torch.finfo(torch.float32).tiny
    costs = {
        name: alone * error / max(errors.get(start, 0.0), least) for name, error in errors.items()
    }
    exact = {name: 0.0 for name, pair in formats.items() if pair[0].is_exact}
    return {start: alone} | costs | exact


def _fidelity_facts(found: Fidelity) -> dict[str, Any]:
    """The facts of a measurement for a plan."""
    names = ("kl", "kl_error", "top1", "top1_error", "perplexity")
    facts = {name: getattr(found, name) for name in names}
    return {**facts, "kl_passages": list(found.kl_passages)}


def _kept(moments: Moments) -> dict[int, str]:
    found = {}
    for layer, at in moments.layers.items():
        for side in "kv":
            largest = float(at.absmax(side).amax())
            if not largest <= FP16_MAX:
                words = ("latents", "RoPE parts") if at.is_latent else ("keys", "values")
                what = words["kv".index(side)]
                found[layer] = f"its {what} go up to {largest:g}, rows hold {FP16_MAX:g}"
    return found


def _shares(progress: Report, stage: str, total: int) -> Callable[[int], None]:
    """Turn amounts into hundredths of a total."""
    done = 0

    def step(amount: int) -> None:
        nonlocal done
        before, done = done, min(done + amount, total)
        progress(stage, 100 * done // max(total, 1) - 100 * before // max(total, 1))

    return step
