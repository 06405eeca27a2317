"""The entry point: vLLM finds kvquant's backend here, in every process.

vLLM looks a backend up by the name of its class, while the engine's config is current: that is when
additional_config decides. So this module makes its names on request.
"""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch

from ..engine.hooks import check_version, hook
from ..engine.settings import accuracy_of
from ..errors import ConfigError, KVQuantError, UnsupportedError, shown
from .entries import DTYPES, LATENT, OURS, asked_of, chooses_custom

# Models whose K and V differ in head_dim (MiMo-V2) take one of these, whatever is asked for.
DIFFKV = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
SPARSE = ("SPARSE", "DSV4", "MSA")  # in names of backends where an indexer chooses tokens
UNTOUCHED = ("ROCM_", "XPU_")  # entries of GPUs that kvquant has no kernels for
EXAMPLE = '{"kvquant": {}}'
OF_LATENTS = '{"kvquant": {"format": "int4-g8+int8-g4"}}'  # for models with latent attention
LIKENESS = 0.87  # of a misspelt key: "kv_quant" has 0.93, "quant" 0.83


@hook("vllm")
def register() -> None:
    """Put the backend into vLLM's registry; vLLM calls this in every process, even twice.

    The entries of vLLM's own backends lead here, too: their lookup is the place to raise if the
    user wants rows and would get none. An entry of another plugin stays as it is.
    """
    from vllm.config import cache
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import register_backend

    # vLLM 0.33 has such a list and warns of what is there, 0.32 has none
    for name in DTYPES.keys() - {*getattr(cache, "KV_CACHE_DTYPES", DTYPES)}:
        cache.register_kv_cache_dtype(name)(CacheDType)
    for name, entry in _entries().items():
        path = f"{__name__}.{name}"
        if not entry.is_overridden():
            register_backend(entry, path)
        elif name in OURS and entry.get_path() != path:
            init_logger(f"vllm.{__name__}").warning(
                "kvquant is not in reach: %s is the attention backend %s. Say which plugins to "
                "load: VLLM_PLUGINS=kvquant",
                entry.get_path(),
                name,
            )


class CacheDType:
    """What vLLM asks of a cache dtype of kvquant's: all as with a 16-bit cache."""

    # The backend's customize_spec makes bytes of it, as it does without such a name.
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def quant_mode(self) -> Any:
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE


def __getattr__(name: str) -> Any:  # a type[AttentionBackend]
    """The backend of an entry, for the engine whose config is current.

    Raises:
        ConfigError: rows without --attention-backend CUSTOM, or CUSTOM in an engine that does not
            ask for it; or a key of additional_config is misspelt or misplaced.
        UnsupportedError: rows, with an untried version of vLLM, or with a model that has sparse
            attention or chooses its own backend.
    """
    if not name.isupper() or name not in _entries():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = get_current_vllm_config_or_none()
    given: Any = None if config is None else config.additional_config
    if isinstance(given, dict):
        _check_keys(given)
    if config is not None and asked_of(config) is not None:
        check_version("vllm")
        from .backend import KVQuantBackend, backend_of, is_draft, request_of, weights_of

        request = request_of(config)
        if name in LATENT or (name == "CUSTOM" and _has_latents(config, is_draft())):
            from .latent import KVQuantLatentBackend

            return backend_of(KVQuantLatentBackend, name, request)
        if name in OURS:
            backend = backend_of(KVQuantBackend, name, request)
            if config.model_config is not None and not is_draft():
                # before weights are loaded
                accuracy_of(backend.settings, partial(weights_of, config))
            return backend
        if not is_draft():  # a draft model may have another backend: StepBuilder tells which
            _check_choice(name, config.attention_config)
    if name == "CUSTOM":
        raise ConfigError(
            "the backend CUSTOM is kvquant's, for which this engine does not ask: give "
            f"--attention-backend CUSTOM or --additional-config '{EXAMPLE}'"
        )
    return resolve_obj_by_qualname(_entries()[name].value)


def _has_latents(config: Any, is_draft: bool) -> bool:
    """Whether the model that is being made, the draft model or the other, has latent attention."""
    model, drafts = config.model_config, config.speculative_config
    if is_draft and drafts is not None and drafts.draft_model_config is not None:
        model = drafts.draft_model_config
    return model is not None and bool(model.use_mla)


def _entries() -> dict[str, Any]:
    """Entries of vLLM's registry whose lookups lead here, by name: those that have a class."""
    # vLLM imports modules by the path of an entry for other GPUs, so those stay as they are.
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {
        name: entry
        for name, entry in AttentionBackendEnum.__members__.items()
        if name in OURS or (entry.value and not name.startswith(UNTOUCHED))
    }


def _check_choice(name: str, attention: Any) -> None:
    """Raise if the served model, with rows, would take one of vLLM's own backends."""
    if any(part in name for part in SPARSE):
        raise UnsupportedError(
            "--additional-config asks for rows of kvquant, which do not serve this model's sparse "
            f'attention, whose backend is {name}: leave "kvquant" out'
        )
    if name in DIFFKV:
        raise UnsupportedError(
            "--additional-config asks for rows of kvquant, and this model takes the backend "
            f'{name}, whatever is asked for, which holds 16-bit ones: leave "kvquant" out'
        )
    if not chooses_custom(attention):
        raise ConfigError(
            f"this engine asks for rows of kvquant, and {name} would hold 16-bit ones: give "
            '--attention-backend CUSTOM, or leave "kvquant" out'
        )


def _check_keys(given: dict[Any, Any]) -> None:
    """Raise ConfigError for a misplaced kvquant key of additional_config."""
    # Without this check the engine would start with other rows than the user wants, or in 16 bit.
    ours = ["kvquant", "k_format", "v_format", "plan"]
    fmt = given.get("format")
    if isinstance(fmt, str) and "kvquant" not in given:
        from ..rows.latent import LatentFormat

        with suppress(KVQuantError):  # else it is another plugin's
            LatentFormat.parse(fmt)
            ours.append("format")
    for key in given:
        if key != "kvquant" and get_close_matches(str(key).lower(), ours, 1, LIKENESS):
            raise ConfigError(
                f'--additional-config has the key {shown(key)}, not "kvquant": '
                f'put what is kvquant\'s into "kvquant", {EXAMPLE} or, for a model with latent '
                f"attention, {OF_LATENTS}. If that key is of another "
                "plugin, leave kvquant out of those that vLLM loads, which VLLM_PLUGINS names"
            )
