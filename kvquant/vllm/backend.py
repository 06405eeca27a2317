"""The classes of an attention backend for vLLM: its pages, its steps, its layers."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from ..errors import missing_extra

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise missing_extra("the attention backend of vLLM needs vLLM", "vllm", error) from error

from vllm.compilation import backends as parts
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from ..engine.contract import LayerRows, NewTokens
from ..engine.hooks import hook
from ..engine.settings import (
    LatentSettings,
    Settings,
    folder_of,
    rank_heads,
    rows_of_each,
    tell_settings,
    with_kept_plan,
)
from ..engine.step import Step, append, attend, describe_step
from ..engine.warmup import StepCalls, begin_warm_up, runs_on, warm_up_layers
from ..engine.window import Window, WindowRows, slots_for
from ..errors import ConfigError, UnsupportedError, refuse, shown
from ..rows.basis import LayerBasis
from ..rows.format import HEAD_DIMS
from ..rows.segment import PAGE_SIZES, RUN
from ..rows.slots import Split
from ..rows.variant import AttentionVariant, names_of
from .entries import DTYPES, OURS, PLUGIN, asked_of
from .flash import causal_attention_of

logger = init_logger(f"vllm.{__name__}")  # of vLLM's tree, which it prints
LONGEST_PAGE = 128  # in tokens
WITHOUT = 'without "kvquant" in --additional-config'


Backend = TypeVar("Backend", bound="RowsBackend")
Calls = TypeVar("Calls")


# kvquant's log, for example on compiling kernels, goes where vLLM's goes, at vLLM's level
logging.getLogger("kvquant").parent = logger


class Request(NamedTuple):
    """The rows that an engine's config names; each request has a backend of its own.

    Attributes:
        given: what Settings.parse takes, as JSON.
        plan: path from the root, time of change and bytes of the plan's file, as the file may
            change; None without such a file.
    """

    given: str
    plan: tuple[str, int, int] | None

    @classmethod
    def of(cls, given: object) -> Request:
        """From "kvquant" in additional_config, which may be anything."""
        path = given.get("plan") if isinstance(given, dict) else None
        plan = None
        if isinstance(path, str):
            with suppress(OSError, ValueError):  # Settings.parse says what is wrong
                state = os.stat(path)
                plan = os.path.realpath(path), state.st_mtime_ns, state.st_size
        return cls(json.dumps(given, sort_keys=True), plan)


@hook("vllm")
class RowsBackend(AttentionBackend):
    """What vLLM must know of a backend with rows; backend_of makes one for an engine's settings."""

    request: ClassVar[Request]
    name: ClassVar[str]
    kind_of_settings: ClassVar[Any]
    settings: ClassVar[Any]  # of that kind
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *DTYPES]

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Let a page hold rows instead of 16-bit elements."""
        if spec.state_content_bytes is not None:
            return spec
        try:
            room = cls.room_of_rows(spec)
        except ConfigError:  # of the head_dim: refused with the name of the layer, see _rows_of
            return spec
        return replace(spec, dtype=torch.uint8, **room)

    @classmethod
    def room_of_rows(cls, spec: AttentionSpec) -> dict[str, int]:
        """Fields of a spec that make room for rows; ConfigError if there are none."""
        raise NotImplementedError

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # rows of a head follow one another

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
        return [size for size in PAGE_SIZES if RUN <= size <= LONGEST_PAGE]  # tried ones

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return runs_on(capability)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # steps are shared out by the lengths that the CPU knows


@hook("vllm")
class KVQuantBackend(RowsBackend):
    """Attention to rows of keys and values; see backend_of."""

    kind_of_settings = Settings
    forward_includes_kv_cache_update = False
    own: ClassVar[Settings | None] = None  # of layers with pages of their own size

    @staticmethod
    def get_impl_cls() -> type[KVQuantImpl]:
        return KVQuantImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def room_of_rows(cls, spec: AttentionSpec) -> dict[str, int]:
        settings = cls.own or cls.settings
        layout = settings.layout(spec.num_kv_heads, spec.head_size, spec.head_size_v)
        return {"state_content_bytes": layout.token_bytes}

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


@lru_cache
def backend_of(kind: type[Backend], name: str, request: Request) -> type[Backend]:
    """A subclass of a backend that holds an engine's settings, under this name in vLLM's registry.

    vLLM calls some methods while no engine's config is current, so settings belong to the class.
    Each worker looks the class up by module and name: plugin.__getattr__ finds it for the current
    config.
    """
    asked = kind.kind_of_settings.parse(json.loads(request.given), 'additional_config["kvquant"]')
    known = {"request": request, "settings": asked, "name": name}
    known |= {"__module__": PLUGIN, "__qualname__": name}  # else of its metaclass: "abc"
    return type(kind.__name__, (kind,), known)


@lru_cache
def with_pages_of(backend: type[Backend], k_format: str, v_format: str) -> type[Backend]:
    """A backend whose pages have room for rows of these formats alone."""
    own = replace(backend.settings, k_format=k_format, v_format=v_format)
    known = {"own": own, "__module__": backend.__module__, "__qualname__": backend.__qualname__}
    return type(backend.__name__, (backend,), known)


@hook("vllm")
class StepBuilder(AttentionMetadataBuilder[Step]):
    """Describes steps to the layers of a group; made once, when the model is loaded."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    _window: Window | None = None
    _has_pages = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        assert self.reorder_batch_threshold is not None
        layers = {
            name: layer
            for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items()
            if issubclass(layer.attn_backend, KVQuantBackend)
        }
        for name in layer_names:
            check_request(layers[name].attn_backend.request, vllm_config)
        refused = []
        if getattr(kv_cache_spec, "non_causal", False):  # a field of some kinds of specs
            refused = [f"{name}: tokens of a prompt attend to later ones" for name in layer_names]
        rows_of = partial(_rows_of, vllm_config=vllm_config, device=device)
        found = rows_of_each(layers, rows_of, WITHOUT, refused)
        for name in layer_names:
            layers[name].impl.rows = found[name]
        self._layers = [layers[name] for name in layer_names]
        # vLLM makes a builder for a draft model alone, beside one for all layers
        self.is_draft = all(layers[name].impl.is_draft for name in layer_names)
        # a draft model reads verified tokens, and the one that came after them
        self.most_queries = self.reorder_batch_threshold + self.is_draft
        warm_up_layers(device, [self._calls(layers[name]) for name in layer_names])
        held = [one.layout for one in found.values()]
        size = sum(one.num_kv_heads * one.token_bytes for one in held)
        bits = 8 * size / sum(one.elements for one in held)
        tell_rows(self._layers[0].attn_backend.settings, vllm_config, bits)
        self._tell_padding()

    def _calls(self, layer: Attention) -> StepCalls:
        given = layer.impl.rows, layer.num_heads, self.most_queries
        calls = calls_of(StepCalls, self.vllm_config, *given)
        # where a layer has local chunks, each is a sequence of its own
        longest = getattr(layer, "attention_chunk_size", calls.max_model_len)
        recent_len = layer.impl.recent_len if self._reserve(layer) else 0
        sizes = {"page_size": self.kv_cache_spec.block_size, "max_model_len": longest}
        return replace(calls, **sizes, recent_len=recent_len)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        lens = common_attn_metadata.seq_lens_cpu_upper_bound
        if self.is_draft:
            lens = self._draft_lens(common_attn_metadata)
        if lens is None:
            lens = common_attn_metadata.seq_lens.cpu()
        return self._describe(common_attn_metadata, lens)

    def _tell_padding(self) -> None:
        """Log what pages cost that are as large as the largest of the model."""
        spec, rows = self.kv_cache_spec, [layer.impl.rows for layer in self._layers]
        used = sum(one.layout.num_kv_heads * one.layout.token_bytes for one in rows)
        share = 1 - used * spec.block_size / (len(rows) * spec.page_size_bytes)
        if share > 0:
            logger.info_once(
                "kvquant: pages of %d layers are as large as the model's largest: %.0f %% of their "
                "bytes hold no rows",
                *(len(rows), 100 * share),
            )

    def _reserve(self, layer: Attention) -> bool:
        """Whether a layer has 16-bit rows; those with local chunks have none."""
        found: bool = not hasattr(layer, "attention_chunk_size") and layer.impl.reserve(self.device)
        return found

    def _begin_window(self, max_pages: int) -> Window | None:
        """Give the layers, which have pages now, their 16-bit rows."""
        impls = [layer.impl for layer in self._layers if self._reserve(layer)]
        if not impls:  # layers of 16-bit rows have none, nor those with local chunks
            return None
        scheduler, size = self.vllm_config.scheduler_config, self.kv_cache_spec.block_size
        window = Window(
            Split(size, impls[0].recent_len, size, self.most_queries - 1),
            len(impls[0].room[0]),
            self._layers[0].kv_cache.shape[0],
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            max_pages,
            self.device,
        )
        dtype = self.vllm_config.model_config.dtype
        for impl in impls:
            rows = WindowRows.of(window, impl.rows.layout, dtype, impl.room)
            impl.rows = impl.rows._replace(window=rows)
        return window

    def _draft_lens(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """Lengths of a draft model's sequences; None if the host has to read them."""
        # vLLM adds tokens to those that the CPU's lengths count; how many depends on the kind of
        # draft. Decoding sequences need no lengths; for prompts the host waits.
        starts = common.query_start_loc_cpu.numpy()
        counts = starts[1:] - starts[:-1]
        return torch.from_numpy(counts + 1) if counts.max() <= self.most_queries else None

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        # whatever lengths vLLM makes up: a graph is replayed for sequences that have a past
        lens = common_attn_metadata.query_start_loc_cpu.diff() + 1
        return self._describe(common_attn_metadata, lens)

    def _describe(self, common: CommonAttentionMetadata, lens: torch.Tensor) -> Step:
        if common.causal is not True:
            raise UnsupportedError(
                "attention is not causal, which rows do not serve: leave kvquant out"
            )
        if not self._has_pages:  # a graph may be captured before any step
            self._window = self._begin_window(common.block_table_tensor.shape[1])
            self._has_pages = True
        return describe_step(
            NewTokens(
                common.block_table_tensor,
                common.seq_lens,
                common.query_start_loc_cpu,
                lens,
                common.num_actual_tokens,
                self.most_queries,
                common.is_prefilling,
            ),
            self._window,
        )


def calls_of(
    kind: Callable[..., Calls],
    vllm_config: VllmConfig,
    rows: object,
    num_heads: int,
    most_queries: int,
) -> Calls:
    """The calls (StepCalls or LatentCalls) that a layer will make, known before its pages.

    Args:
        kind: of calls.
        rows: of the layer.
        num_heads: query heads on this rank.
        most_queries: of a decoding sequence.
    """
    config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return kind(
        rows,
        num_heads,
        config.dtype,
        RUN,  # larger pages have the same kernels
        config.max_model_len,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        most_queries,
    )


def check_request(held: Request, vllm_config: VllmConfig) -> None:
    """Raise ConfigError unless a backend is of the engine with this config."""
    # vLLM remembers backends without their config: a second engine in a process gets the first's.
    asked = None if asked_of(vllm_config) is None else request_of(vllm_config)
    if asked != held:
        told = "no rows of kvquant" if asked is None else f'"kvquant": {shown(asked.given)}'
        if asked is not None and asked.given == held.given:
            told = "a plan whose file has changed since"
        raise ConfigError(
            f"--additional-config asks for {told}, and vLLM holds the backend of an earlier engine "
            f'in this process, "kvquant": {shown(held.given)}: start one process for each setting '
            "(leave VLLM_ENABLE_V1_MULTIPROCESSING at 1)"
        )


def _rows_of(
    name: str, layer: Attention, vllm_config: VllmConfig, device: torch.device
) -> LayerRows:
    """The rows of a layer on this rank."""
    settings, impl = layer.attn_backend.settings, layer.impl
    refuse(UnsupportedError, _problems(layer))
    impl.own = settings_of(name, layer)
    layout = impl.own.layout(layer.num_kv_heads, layer.head_size, layer.head_size_v)
    basis = basis_of(name, layer, vllm_config, _heads_of(vllm_config), layout)
    basis = basis and basis.to(device)
    causal = causal_attention_of(impl, layer.head_size_v, device)
    rest = impl.variant(device), settings.prompts_from_rows, causal
    return LayerRows(layout, impl.scale, basis, *rest)


def settings_of(name: str, layer: Any) -> Settings:
    """The settings with a layer's own formats; UnsupportedError if the plan has no such layer."""
    settings: Settings = layer.attn_backend.settings
    if settings.plan is None or layer.impl.is_draft:  # plans are of the model that is served
        return settings
    return settings.of_layer(extract_layer_index(name))


def takes_unlike_pages(vllm_config: VllmConfig) -> bool:
    """Whether pages of layers may differ: vLLM takes them where all layers attend alike."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values()
    return len({(type(layer), getattr(layer, "sliding_window", None)) for layer in layers}) == 1


def basis_of(name: str, layer: Any, vllm_config: VllmConfig, *given: Any) -> LayerBasis | None:
    """The basis of a layer, on the CPU; given: what settings.basis takes beside the layer."""
    settings = layer.attn_backend.settings
    if settings.plan is None or layer.impl.is_draft:
        return None
    settings.plan.check_model(vllm_config.model_config.hf_config.to_dict())
    found: LayerBasis | None = settings.basis(extract_layer_index(name), *given)
    return found


def probable_places(settings: Any, impl: Any) -> Sequence[int | None]:
    """The layers of the plan that a layer, which does not know its name yet, may be."""
    places: list[int] | None = None if impl.is_draft or not settings.plan else settings.plan.places
    return places or [None]


def _problems(layer: Attention) -> Iterator[str]:
    """Why a layer cannot have rows."""
    if layer.attn_type != AttentionType.DECODER:
        yield f"it is of type {layer.attn_type}, and rows serve decoders only"
    if layer.kv_sharing_target_layer_name is not None:
        yield f"it attends to the rows of {layer.kv_sharing_target_layer_name}"
    yield from odd_cache_dtype(layer.kv_cache_dtype)
    if layer.use_mm_prefix:
        yield "it attends to whole images, not to the tokens before"


def _without_window(config: VllmConfig) -> str | None:
    """Why an engine's first pages and last tokens cannot be in 16 bit."""
    if config.kv_transfer_config is not None:
        return "a connector (--kv-transfer-config) writes pages without 16-bit rows"
    if config.parallel_config.use_ubatching:
        return "--enable-dbo runs two steps at a time"
    return None


def odd_cache_dtype(name: str) -> Iterator[str]:
    """Why a layer with one of vLLM's own cache dtypes cannot have rows."""
    if name not in RowsBackend.supported_kv_cache_dtypes:
        yield (
            f"--kv-cache-dtype or the checkpoint asks for {name}, and rows have formats of their "
            "own: give --kv-cache-dtype bfloat16"
        )


def _heads_of(vllm_config: VllmConfig) -> Sequence[int]:
    return rank_heads(
        vllm_config.model_config.get_total_num_kv_heads(),
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )


def tell_rows(settings: Settings | LatentSettings, config: VllmConfig, bits: float) -> None:
    """Log once which rows an engine has, in how many pages, and which layers have none.

    bits: an element, in all layers with rows.
    """
    if pages := config.cache_config.num_gpu_blocks:  # else a trial of CUDA graphs, with other ones
        room = f"{pages:,} pages, {bits:.3g} bits an element"
        if takes_unlike_pages(config):  # else each kind of layers takes pages of its own
            room = f"{pages * config.cache_config.block_size:,} tokens in {room}"
        tell_settings(settings, weights_of(config), room)
    for name, layers in _without_rows(config).items():
        _tell_without_rows(name, tuple(layers))


def weights_of(config: VllmConfig, downloads: bool = False) -> str | None:
    """The folder of the served model's weights, as folder_of."""
    model, load = config.model_config, config.load_config
    hub = model.revision, load.download_dir, downloads
    return folder_of(model.model, load.load_format, *hub)


def _without_rows(vllm_config: VllmConfig) -> dict[str, list[str]]:
    """Layers whose K and V a backend of vLLM's own holds, by the name of that backend."""
    found: dict[str, list[str]] = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
        backend, kind = layer.get_attn_backend(), getattr(layer, "attn_type", AttentionType.DECODER)
        holds_tokens = kind == AttentionType.DECODER and not backend.is_ssm()
        if holds_tokens and not issubclass(backend, RowsBackend):
            found.setdefault(backend.get_name(), []).append(name)
    return found


@lru_cache
def _tell_without_rows(backend: str, layers: tuple[str, ...]) -> None:
    """Warn once of layers that another backend serves."""
    logger.warning(
        "kvquant: %d layers have no rows, their backend is %s: %s%s. For a draft model give "
        '"attention_backend": "CUSTOM" in --speculative-config',
        len(layers),
        backend,
        ", ".join(layers[:3]),
        f" and {len(layers) - 3} more" if len(layers) > 3 else "",
    )


def is_draft() -> bool:
    """Whether vLLM is making the layers of a draft model (EAGLE, MTP, too)."""
    part: str = parts.model_tag  # of the model, which is being made
    return part != "backbone"


def begin_to_compile(vllm_config: VllmConfig, impl: Any) -> None:
    """Begin to compile a layer's kernels on a GPU while vLLM makes the model."""
    # Cores are idle while vLLM loads and compiles. The builder needs the same kernels, and reports
    # errors.
    if not torch.cuda.is_available():
        return
    device, drafts = torch.device("cuda", torch.cuda.current_device()), 0
    if vllm_config.speculative_config is not None:
        drafts = vllm_config.speculative_config.num_speculative_tokens or 0
    with suppress(Exception):  # the builder makes the same calls again, and reports what fails
        for calls in impl.probable_calls(vllm_config, 1 + drafts):
            begin_warm_up(device, calls)


def request_of(vllm_config: VllmConfig) -> Request:
    """What an engine asks for."""
    given, model = asked_of(vllm_config), vllm_config.model_config
    return Request.of(given if model is None else with_kept_plan(given, model.model))


@hook("vllm", "do_kv_cache_update")
class KVQuantImpl(AttentionImpl[Step]):
    """Attention of a layer.

    Attributes:
        rows: of the layer, from the builder, once the model is loaded.
        own: the settings with the layer's own formats, once the model is loaded.
        is_draft: whether the layer is of a draft model (EAGLE and MTP heads, too).
    """

    rows: LayerRows
    own: Settings | None = None
    room: list[torch.Tensor] | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.sliding_window, self.soft_cap = sliding_window, logits_soft_cap
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.is_draft = is_draft()
        config = get_current_vllm_config()
        self.longest = config.model_config.max_model_len
        self.config, self.room = config, None
        self.recent_len = 0
        if attn_type == AttentionType.DECODER:
            begin_to_compile(config, self)

    def probable_calls(self, vllm_config: VllmConfig, queries: int) -> Iterator[StepCalls]:
        """The layer's calls for each layer of the plan that it may be.

        queries is the most that a decoding sequence has: 1, and its drafted tokens.
        """
        settings = backend_of(KVQuantBackend, OURS[0], request_of(vllm_config)).settings
        variant, heads = self.variant(torch.device("cpu")), _heads_of(vllm_config)
        for place in probable_places(settings, self):
            own = settings if place is None else settings.of_layer(place)
            layout = own.layout(self.num_kv_heads, self.head_size, self.head_size)
            basis = None if place is None else own.basis(place, heads, layout)
            rows = LayerRows(layout, self.scale, basis, variant, own.prompts_from_rows)
            calls = calls_of(StepCalls, vllm_config, rows, self.num_heads, queries + self.is_draft)
            yield replace(calls, recent_len=self.window_len(own))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer, which has a name now, pages as large as its own rows if vLLM takes them.

        It makes pages after this.
        """
        for name, layer in get_layers_from_vllm_config(self.config, Attention).items():
            if layer.impl is not self:
                continue
            backend = layer.attn_backend
            self.own = backend.settings
            with suppress(UnsupportedError):  # the builder names the layer, and the reason
                self.own = settings_of(name, layer)
            if backend.own is None and self.own is not backend.settings:
                if takes_unlike_pages(self.config):
                    formats = self.own.k_format, self.own.v_format
                    layer.attn_backend = with_pages_of(backend, *formats)

    def window_len(self, settings: Settings) -> int:
        """How many last tokens the layer keeps in 16 bit."""
        if self.is_draft:
            return 0
        layout = settings.layout(self.num_kv_heads, self.head_size, self.head_size)
        return settings.window_len(layout, _without_window(self.config))

    def reserve(self, device: torch.device) -> bool:
        """Take the memory of the layer's 16-bit rows, if it has any; whether it has.

        vLLM calls the layers once before it sees how much memory is left for pages.
        """
        if self.room is not None:
            return True
        config = self.config  # some loaders process no weights
        own = self.own or backend_of(KVQuantBackend, OURS[0], request_of(config)).settings
        self.recent_len = self.window_len(own)
        if not self.recent_len:
            return False
        tokens = min(config.cache_config.block_size, LONGEST_PAGE) + self.recent_len
        if config.speculative_config is not None:
            tokens += config.speculative_config.num_speculative_tokens or 0
        layers = get_layers_from_vllm_config(config, Attention).values()
        others = sum(issubclass(one.attn_backend, KVQuantBackend) for one in layers)
        size = self.num_kv_heads * tokens * 2 * self.head_size
        count = slots_for(config.scheduler_config.max_num_seqs, 2 * others * size, device)
        shape = 2, count, self.num_kv_heads, size // self.num_kv_heads
        self.room = list(torch.zeros(shape, dtype=torch.uint8, device=device))
        return True

    def variant(self, device: torch.device) -> AttentionVariant | None:
        """What the model changes in attention, if anything; needs loaded weights."""
        found = AttentionVariant(soft_cap=self.soft_cap or None, window=self.sliding_window)
        if self.sinks is not None:
            found = found._replace(sink_logits=self.sinks.detach().float().to(device))
        if self.alibi_slopes is not None:
            slopes = torch.tensor(self.alibi_slopes, dtype=torch.float32, device=device)
            found = found._replace(alibi_slopes=slopes)
        return found if names_of(found) else None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        append(self.rows, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if attn_metadata is None:
            # vLLM measures what is needed beside the pages: the longest past, dequantized
            past = [x.new_empty(self.longest, *x.shape[1:]) for x in (key, value)]
            del past
            if not hasattr(layer, "attention_chunk_size"):
                self.reserve(query.device)
            return output.zero_()
        attend(self.rows, attn_metadata, query, key, value, kv_cache, output)
        return output
