"""The entry point: vLLM finds kvquant's backend here, in every process, and uses it where asked.

vLLM looks a backend up by the name of its class, while the config of the engine is current: that is
when additional_config decides. So the names of this module are made when they are asked for.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import ConfigError

OURS = ("CUSTOM", "CPU_ATTN")  # of vLLM's registry: its CPU platform knows the second one alone
# One of these is among vLLM's candidates on any GPU where it may choose: a place to say that rows
# were asked for, and would not be there.
AUTOMATIC = ("FLASH_ATTN", "TRITON_MLA")


def register() -> None:
    """Put the backend into vLLM's registry; vLLM calls this in every process, even twice.

    An entry that another plugin has taken is left to it.
    """
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in OURS + AUTOMATIC:
        entry, path = AttentionBackendEnum[name], f"{__name__}.{name}"
        if not entry.is_overridden():
            register_backend(entry, path)
        elif entry.get_path() != path:
            init_logger(f"vllm.{__name__}").warning(
                "kvquant is not in reach: %s is the attention backend %s. Say which plugins to "
                "load: VLLM_PLUGINS=kvquant",
                entry.get_path(),
                name,
            )


def __getattr__(name: str) -> Any:  # a type[AttentionBackend]
    """The backend of an entry, for the engine whose config is current.

    Raises:
        ConfigError: --attention-backend CUSTOM was asked for, and no rows, or rows alone.
    """
    if name not in OURS + AUTOMATIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = get_current_vllm_config_or_none()
    given: Any = None if config is None else config.additional_config
    if isinstance(given, dict) and "kvquant" in given:
        if name in OURS:
            from .backend import backend_of

            return backend_of(name, json.dumps(given["kvquant"], sort_keys=True))
        attention = config.attention_config
        asked = (attention.backend, *attention.backend_per_kind.values())
        # a draft model has a config of its own, in which nobody asks for a backend
        if AttentionBackendEnum.CUSTOM not in asked and config.speculative_config is None:
            raise ConfigError(
                f"--additional-config asks for rows of kvquant, and {name} would hold 16-bit ones: "
                'give --attention-backend CUSTOM, or leave "kvquant" out'
            )
    if name == "CUSTOM":
        raise ConfigError(
            "--attention-backend CUSTOM is kvquant's, which lacks its rows: give "
            '--additional-config \'{"kvquant": {"k_format": "int4-g4", "v_format": "int4-g4"}}\''
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
