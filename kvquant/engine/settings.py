"""Settings of an engine's rows: formats and bases of all layers."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..cache.checks import check_no_feedback
from ..cache.memory import available_memory
from ..errors import (
    AccuracyError,
    CheckpointError,
    ConfigError,
    KVQuantError,
    ShapeError,
    UnsupportedError,
    shown,
)
from ..io.model_id import WEIGHTS, model_identity
from ..io.plan import AUTO, CachePlan, as_plan
from ..io.plan_store import costs_too_much, place_of, stored_plan
from ..kernels.disk_cache import locked
from ..rows.arguments import check_size
from ..rows.basis import LayerBasis
from ..rows.defaults import DEFAULT, default_format
from ..rows.format import RowFormat, check_head_dims
from ..rows.latent import LatentFormat
from ..rows.probe import FEW_BITS, REFUSED, WARNED, loss_of
from .contract import PageLayout

log = logging.getLogger("kvquant")
Found = TypeVar("Found")
KEYS = ("k_format", "v_format", "plan", "prompts", "recent_len", "accept_loss")
LATENT_KEYS = ("format", "plan", "prompts")
MOST_PAIRS = 3  # of formats of K and V in a model: each has kernels and pages of its own
PROMPTS = ("16-bit", "rows")  # what tokens of a prompt attend to, of those that come with them


@dataclass(frozen=True, eq=False)
class Settings:
    """The rows that a user asked for: formats of K and V, and bases for each layer.

    Attributes:
        k_format, v_format: short names ("int8-g8"); None for the default of a head_dim. Of the
            layers with the longest rows where they differ: see of_layer.
        plan: bases, clip ratios, rounding and formats of each layer; None for none.
        prompts_from_rows: whether tokens of a prompt attend to rows of one another, not to 16
            bit.
        recent_len: last tokens of a sequence to keep in 16 bit, beside its first page; 0 for none
            of either.
        accept_loss: whether K rows that ruin the model's texts are served all the same.
    """

    k_format: str | None
    v_format: str | None
    plan: CachePlan | None = None
    prompts_from_rows: bool = False
    recent_len: int = 0
    accept_loss: bool = False

    @classmethod
    def parse(cls, given: Any, name: str = "settings") -> Settings:
        """Read what a user of an engine gives.

        Args:
            given: a dict with "k_format", "v_format", "plan" (a plan or the path of its file),
                "prompts" (one of PROMPTS), "recent_len" and "accept_loss". Formats left out are the
                default, or those of the plan. Of a plan with more than MOST_PAIRS pairs some layers
                get longer rows.
            name: what errors call it.

        Raises:
            ConfigError: a key or a format does not exist, or only one of K and V has a format
                beside a plan.
            FileNotFoundError: there is no such plan.
            CheckpointError: the file is damaged, or no plan.
        """
        plan, from_rows = _plan_and_prompts(given, KEYS, name)
        as_chosen = plan  # other formats have no figures
        k_format = given.get("k_format")
        v_format = given.get("v_format")
        if plan is not None:
            plan.check_of_heads("this backend")
        for one in (k_format, v_format):
            if one is not None:
                RowFormat.parse(one, 128)
        if plan is not None:
            if (k_format is None) != (v_format is None):
                raise ConfigError(f"{name} has one format beside a plan: give both, or none")
            plan = plan if k_format is None else plan.with_formats(k_format, v_format)
            plan = _with_few_pairs(plan)
            k_format, v_format = max(plan.formats, key=partial(_bytes_of, plan))
        recent_len = check_size("recent_len", given.get("recent_len", 0))
        if recent_len and from_rows:
            raise ConfigError(
                f'"recent_len" is {recent_len} beside "prompts": "rows", which attend to rows '
                'alone: leave one of them out, or give "recent_len": 0'
            )
        if as_chosen is not None and given.get("k_format") is None:
            _check_window(as_chosen, recent_len)
        accept_loss = given.get("accept_loss", False)
        if type(accept_loss) is not bool:
            raise ConfigError(f'"accept_loss" is {shown(accept_loss)}: give true or false')
        return cls(k_format, v_format, plan, from_rows, recent_len, accept_loss)

    def __str__(self) -> str:
        counts = Counter(self.plan.formats if self.plan else [(self.k_format, self.v_format)])
        return "; ".join(
            f"K rows {k or DEFAULT}, V rows {v or DEFAULT}"
            + (f" in {count} layers" if len(counts) > 1 else "")
            for (k, v), count in counts.most_common()
        )

    def of_layer(self, layer: int) -> Settings:
        """The same with the formats of one layer; UnsupportedError if the plan has no such one."""
        if self.plan is None:
            return self
        place, plan = _place(self.plan, layer), self.plan
        k_format, v_format = str(plan.k_formats[place]), str(plan.v_formats[place])
        if (k_format, v_format) == (self.k_format, self.v_format):
            return self
        return replace(self, k_format=k_format, v_format=v_format)

    def layout(self, num_kv_heads: int, head_dim: int, v_head_dim: int) -> PageLayout:
        """The layout of a layer's pages; ConfigError if no format has this head_dim."""
        k_name = default_format("k", head_dim) if self.k_format is None else self.k_format
        k_format = RowFormat.parse(k_name, head_dim)
        v_name = default_format("v", v_head_dim) if self.v_format is None else self.v_format
        v_format = RowFormat.parse(v_name, v_head_dim)
        check_head_dims(k_format, v_format)
        return PageLayout(k_format, v_format, num_kv_heads)

    def window_len(self, layout: PageLayout, refused: str | None) -> int:
        """How many last tokens are kept in 16 bit; 0 for none, and no first page.

        refused: why an engine cannot keep them; ConfigError then, if they were asked for.
        """
        if refused and self.recent_len:
            raise ConfigError(f'"recent_len" is {self.recent_len}, and {refused}: leave it out')
        is_exact = layout.k_format.is_exact and layout.v_format.is_exact
        return 0 if is_exact else self.recent_len

    def basis(self, layer: int, heads: Sequence[int], layout: PageLayout) -> LayerBasis | None:
        """The basis of a rank's KV heads of a layer, on the CPU; None without a plan.

        Raises:
            UnsupportedError: the plan has no such layer, or the layer has not as many heads.
            ShapeError: its heads are others.
        """
        plan, head_dim = self.plan, layout.k_format.head_dim
        if plan is None:
            return None
        if len(heads) != layout.num_kv_heads:
            raise UnsupportedError(
                f"it has {layout.num_kv_heads} KV heads on this rank, other layers {len(heads)}: "
                "leave the plan out"
            )
        place = _place(plan, layer)
        if max(heads) >= plan.num_kv_heads or head_dim != plan.head_dim:
            raise ShapeError(
                f"layer {layer} has KV head {max(heads)} of head_dim {head_dim}, the plan "
                f"{plan.num_kv_heads} heads of {plan.head_dim}: calibrate this model"
            )
        return _share(plan, tuple(heads)).layers[place]


@dataclass(frozen=True, eq=False)
class LatentSettings:
    """The latent rows that a user asked for: one format, and a basis for each layer.

    Attributes:
        format: short name of a LatentFormat ("int4-g8+int8-g4").
        plan: bases and clip ratios of each layer, or None.
        prompts_from_rows: as in Settings.
    """

    format: str
    plan: CachePlan | None = None
    prompts_from_rows: bool = False

    @classmethod
    def parse(cls, given: Any, name: str = "settings") -> LatentSettings:
        """Read what a user of an engine gives, for a model with latent attention.

        Args:
            given: a dict with "format", "plan" and "prompts", as in Settings.parse.
            name: what errors call it.

        Raises:
            As Settings.parse; ConfigError also for a plan of keys and values of heads.
            UnsupportedError: the plan rounds with feedback.
        """
        what = f"{name}, for a model with latent attention,"
        plan, from_rows = _plan_and_prompts(given, LATENT_KEYS, what)
        fmt = given.get("format")
        if fmt is None and plan is None:
            raise ConfigError(f'{what} lacks format: give {{"format": "int4-g8+int8-g4"}}')
        if fmt is not None:
            LatentFormat.parse(fmt)
        if plan is not None:
            if not plan.is_latent:
                raise ConfigError(
                    "the plan is of keys and values of heads, and this model has latent attention: "
                    "calibrate this model"
                )
            check_no_feedback(plan.layers)
            plan = plan if fmt is None else plan.with_formats(fmt)
            pairs = set(plan.formats)
            if len(pairs) > 1:
                raise ConfigError(
                    f"the plan has {len(pairs)} pairs of formats, and pages of latents have one: "
                    'give format beside it, or, if it keeps layers in 16 bit, {"format": "bf16"} '
                    "without it"
                )
            fmt = "+".join(*pairs)
        return cls(fmt, plan, from_rows)

    def __str__(self) -> str:
        return f"latent rows {self.format}"

    def layout(self, latent_dim: int, rope_dim: int) -> LatentFormat:
        """The format of a layer's rows; ConfigError if there are no latent rows of these sizes."""
        return LatentFormat.parse(self.format, latent_dim, rope_dim)

    def basis(self, layer: int) -> LayerBasis | None:
        """The basis of a layer, on the CPU; None without a plan; UnsupportedError if missing."""
        return None if self.plan is None else self.plan.layers[_place(self.plan, layer)]


def with_kept_plan(given: Any, source: str) -> Any:
    """Replace "plan": "auto" by the path of the model's kept plan.

    Without one, `kvquant calibrate` makes it before the engine loads the model; other processes
    that ask for it wait.

    Args:
        given: as of Settings.parse.
        source: the model's folder, GGUF file or name on the hub.

    Raises:
        ConfigError: no plan could be made, it costs too much, or formats are given, too.
    """
    if not isinstance(given, dict) or given.get("plan") != AUTO:
        return given
    if formats := given.keys() - {"plan", "prompts", "recent_len", "accept_loss"}:
        raise ConfigError(f"{', '.join(sorted(formats))} with plan 'auto': a plan says the formats")
    # a wrong setting raises here, and not after the minutes that a plan takes
    Settings.parse({name: given[name] for name in given.keys() - {"plan"}}, "the settings")
    return {**given, "plan": _kept_plan(source)}


@lru_cache  # every layer asks
def _kept_plan(source: str) -> str:
    from ..hf.models.fingerprint import fingerprint_of
    from ..hf.models.loading import load_config

    identity = model_identity({**load_config(source).to_dict(), WEIGHTS: fingerprint_of(source)})
    path, plan = place_of(identity), stored_plan(identity)
    if plan is None:
        try:
            with locked(path):
                what, kept = "making a plan, which takes minutes", partial(stored_plan, identity)
                plan = _made_apart(what, ["calibrate", source], kept)
        except OSError as error:
            raise ConfigError(
                f'no plan can be kept ({error}): set KVQUANT_CACHE_DIR, or leave "plan" out'
            ) from error
    if plan is None:
        raise ConfigError(
            f'"plan" is "auto", no plan of {source} is kept, and `kvquant calibrate {source}` made '
            "none (its words are above): run it where the model has room, and start the engine "
            "again"
        )
    if reason := costs_too_much(plan):
        raise ConfigError(f'{reason} ({path}): leave "plan" out, which gives the default formats')
    bare = plan.facts["measured"]["kl"]
    log.info("kvquant: plan taken from %s: KL %.2g nats per token without 16-bit rows", path, bare)
    return str(path)


def _made_apart(
    what: str, arguments: Sequence[str], kept: Callable[[], Found | None]
) -> Found | None:
    """What is kept, by now or by a command of kvquant, whose process frees its memory as it ends.

    It runs on the engine's GPU and, if that has no room for the model, on the CPU.
    """
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}  # of the engine: calibrate refuses several
    alone = {name: value for name, value in os.environ.items() if name not in ranks}
    devices, made = ["cpu"], kept()  # another process may have made it meanwhile
    if torch.cuda.is_available():
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        devices.insert(0, f"cuda:{index}")
    for device in devices:
        if made is not None:
            break
        command = [sys.executable, "-m", "kvquant", *arguments, "--device", device]
        log.warning("kvquant: %s: %s", what, shlex.join(command))
        subprocess.run(command, env=alone, stdin=subprocess.DEVNULL, check=False)
        made = kept()
    return made


def folder_of(source: str, load_format: str, *of_hub: Any) -> str | None:
    """The folder of an engine's weights; None if they are random, or in no folder here.

    of_hub: as of folder_here.
    """
    from ..hf.models.loading import folder_here

    if load_format not in ("auto", "hf", "safetensors"):  # others do not read the hub's files
        of_hub = of_hub[:2]
    return None if load_format == "dummy" else folder_here(source, *of_hub)


def accuracy_of(settings: Settings, weights_of: Callable[[bool], str | None]) -> str:
    """What speaks against K rows of few bits without a plan, by the model's probe; "" for nothing.

    If no figure is kept `kvquant check` makes one, once. Engines ask before they load the model,
    too. What fails stops no engine, and the first rank speaks for all.

    Args:
        settings: of the user.
        weights_of: gives the folder of the weights. Its argument says whether to download them for
            a probe: before the engine loads the model, because later the GPU has no room for it.

    Raises:
        AccuracyError: these rows ruin the model's texts, and the user has not accepted that.
    """
    k_format, ranks = settings.k_format, torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_rank():
        return ""
    if settings.plan or k_format is None or RowFormat.parse(k_format, 128).bits > FEW_BITS:
        return ""
    rows = f"K rows of {k_format} without a plan"
    ways = 'To keep the answers, give "plan": "auto", or "k_format": "int8"'
    try:
        accepts = settings.accept_loss  # then no probe is made
        figure = _figure(weights_of(not accepts), k_format, accepts)
    except (KVQuantError, OSError, ValueError) as error:
        return f"{rows} ruin some models, and this one was not probed: {error}. {ways}"
    found = f"{rows}, in this model, {loss_of(figure)}. {ways}"
    if figure >= REFUSED and not settings.accept_loss:
        raise AccuracyError(f'{found}. "accept_loss": true serves them all the same')
    return found if figure >= WARNED else ""


def _figure(folder: str | None, k_format: str, accept_loss: bool) -> float:
    """The kept figure of a model's probe with one K format, or a new one."""
    from ..hf.models.probe import figure_path, kept_figure

    if folder is None:
        raise ConfigError("its weights are random, or in no folder here")
    path = figure_path(folder, k_format)
    figure = kept_figure(path)
    if figure is None and not accept_loss:
        figure = _made_figure(path, folder, k_format)
    if figure is None:
        raise ConfigError(
            f"no figure is kept. `kvquant check {folder} --k-format {k_format}` makes one, where "
            "there is room for a second copy of the model"
        )
    return figure


@lru_cache  # what fails is tried once a process: the next one may have room
def _made_figure(path: Path, folder: str, k_format: str) -> float | None:
    from ..hf.models.probe import kept_figure

    command = ["check", folder, "--k-format", k_format, "--dtype", "bfloat16"]
    nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    with locked(path):
        # the model is loaded there first, for a GPU too: else the system would end processes
        if nbytes > (available_memory() or nbytes):
            return kept_figure(path)
        return _made_apart("probing K rows", command, partial(kept_figure, path))


def rows_of_each(
    layers: Mapping[str, Any],
    rows_of: Callable[[str, Any], Found],
    otherwise: str,
    refused: Sequence[str] = (),
) -> dict[str, Found]:
    """The rows of layers by name.

    Raises:
        UnsupportedError: some layers cannot have rows; it has a line for each, those of `refused`
            first, and says how else (otherwise) to serve the model.
    """
    found, lines = {}, [*refused]
    for name, layer in layers.items():
        try:
            found[name] = rows_of(name, layer)
        except KVQuantError as error:
            lines.append(f"{name}: {error}")
    if lines:
        raise UnsupportedError(
            "kvquant cannot hold the rows of these layers:\n  "
            + "\n  ".join(lines)
            + f"\nDo what these lines say, or serve the model {otherwise}."
        )
    return found


def rank_heads(total: int, rank: int, ranks: int) -> list[int]:
    """The KV heads of a layer on a rank: its share, or one that it shares with other ranks."""
    if total < ranks:
        return [rank * total // ranks]
    share = total // ranks
    return list(range(rank * share, (rank + 1) * share))


def _plan_and_prompts(given: Any, keys: Sequence[str], name: str) -> tuple[CachePlan | None, bool]:
    """The plan, and whether prompts attend to rows. Raises as parse."""
    if not isinstance(given, Mapping) or not given.keys() <= set(keys):
        raise ConfigError(f"{name} is {shown(given)}: give a dict with {', '.join(keys)}")
    prompts = given.get("prompts", PROMPTS[0])
    if prompts not in PROMPTS:
        raise ConfigError(f'"prompts" is {shown(prompts)}: it may be one of {PROMPTS}')
    path = given.get("plan")
    try:
        return None if path in (None, False) else as_plan(path), prompts == "rows"
    except FileNotFoundError:
        raise FileNotFoundError(
            f'there is no plan {path!r} in {os.getcwd()}: give "plan" the path of a file of '
            "`kvquant calibrate`"
        ) from None


def _place(plan: CachePlan, layer: int) -> int:
    if layer not in plan.places:
        raise UnsupportedError(f"the plan has no layer {layer}: leave it out, or calibrate it")
    return plan.places.index(layer)


@lru_cache(maxsize=1)  # all layers of a rank ask for the same
def _share(plan: CachePlan, heads: tuple[int, ...]) -> CachePlan:
    return plan.of_heads(heads)


def _bytes_of(plan: CachePlan, pair: tuple[str, str]) -> int:
    """Of a token in a head, in rows of a pair of formats."""
    dims = plan.head_dim, plan.tensors["v.offset"].shape[2]
    return sum(RowFormat.parse(*one).row_bytes for one in zip(pair, dims, strict=True))


def _accuracy(name: str) -> tuple[int, bool, int]:
    """What the more accurate of two formats has more of: int8 rows are before those of fp8."""
    fmt = RowFormat.parse(name, 128)
    return fmt.bits, fmt.facts.is_integer, fmt.groups


def _check_window(plan: CachePlan, recent_len: int) -> None:
    """Warn if a plan's formats were chosen for caches with more recent tokens in 16 bit."""
    seen, limit = plan.facts.get("windowed"), plan.facts["limit"]
    are_chosen = (limit["max_kl"], limit["budget"]) != (None, None)
    if seen and are_chosen and recent_len < seen["recent_len"]:
        log.warning(
            "kvquant: the formats of this plan were chosen for caches with %d recent tokens in 16 "
            "bit, and recent_len is %d: KL %.2g nats per token without them. Choose again with "
            "kvquant calibrate --sink-len 0 --recent-len %d",
            *(seen["recent_len"], recent_len, plan.facts["measured"]["kl"], recent_len),
        )


def _with_few_pairs(plan: CachePlan) -> CachePlan:
    """The plan with MOST_PAIRS pairs of formats at most: longer rows where it has more.

    Two pairs become one with the more accurate K and V, those first that add the fewest bytes.
    """
    counts = Counter(plan.formats)
    taken = {pair: pair for pair in counts}
    size = partial(_bytes_of, plan)

    def joined(*pairs: tuple[str, str]) -> tuple[str, str]:
        k, v = (max(names, key=_accuracy) for names in zip(*pairs, strict=True))
        return k, v

    def added(pairs: tuple[tuple[str, str], ...]) -> int:
        return sum(counts[pair] * (size(joined(*pairs)) - size(pair)) for pair in pairs)

    while len(counts) > MOST_PAIRS:
        pairs = min(combinations(counts, 2), key=added)
        both, layers = joined(*pairs), sum(counts.pop(pair) for pair in pairs)
        counts[both] += layers
        taken = {asked: both if pair in pairs else pair for asked, pair in taken.items()}
    if all(asked == pair for asked, pair in taken.items()):
        return plan
    found = plan.with_layer_formats(
        {
            (i, side): name
            for i, asked in enumerate(plan.formats)
            for side, name in zip("kv", taken[asked], strict=True)
            if asked != taken[asked]
        }
    )
    log.warning(
        "kvquant: the plan has %d pairs of formats, and pages have %d: some layers get longer "
        "rows, %.2f bits per element in place of %.2f",
        *(len(taken), len(counts), found.bits, plan.bits),
    )
    return found


@lru_cache
def tell_settings(settings: Settings | LatentSettings, folder: str | None, room: str) -> None:
    """Log once which rows an engine has for the model in a folder, and their room.

    It warns of K rows of which the model's probe expects a loss, of rows of 2 bits, and of a plan
    that misses its KL limit. It raises AccuracyError as accuracy_of, and CheckpointError if the
    plan was made for other weights.
    """
    log.info("kvquant: %s: %s", settings, room)
    if isinstance(settings, Settings) and (told := accuracy_of(settings, lambda _: folder)):
        log.warning("kvquant: %s", told)
    if "int2" in str(settings) and not getattr(settings, "recent_len", 0):
        log.warning(
            "kvquant: rows of 2 bits change what a model predicts unless its first and last tokens "
            'stay in 16 bit ("recent_len": 128). Compare texts before you serve, or use int3 or '
            "int4 with a plan. kvquant evaluate measures what a cache costs"
        )
    if settings.plan is None:
        return
    _check_weights(settings.plan, folder)
    log.info("kvquant: %r", settings.plan)
    limit = settings.plan.facts.get("limit") or {}
    if not limit.get("met", True):
        log.warning(
            "kvquant: the plan misses its limit of KL %s: keep last tokens in 16 bit if they are "
            'not ("recent_len": 128), allow more bits, or serve this model without kvquant',
            limit.get("max_kl"),
        )


def _check_weights(plan: CachePlan, folder: str | None) -> None:
    """Raise CheckpointError unless a plan was made for the weights in a model's folder."""
    from ..hf.models.fingerprint import fingerprint_of

    wanted = plan.facts["model"].get("weights")
    if wanted is None or folder is None:
        return
    try:
        found = fingerprint_of(folder)
    except (KVQuantError, OSError, ValueError) as error:
        log.warning("kvquant: the plan was not compared with the weights of %s: %s", folder, error)
        return
    if found != wanted:
        raise CheckpointError(
            f"the plan was made for weights {wanted[:12]}, and {folder} has {found[:12]}: run "
            f"`kvquant calibrate {folder}`"
        )
