"""The settings of kvquant for SGLang, from the environment."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import Any

from ..engine.settings import Settings, folder_of
from ..errors import ConfigError, shown

VARIABLE = "KVQUANT_SGLANG"  # JSON of Settings.parse
DEFAULT = "{}"


@lru_cache
def settings() -> Settings:
    """The environment variable's settings; ConfigError for no JSON or for wrong settings."""
    return Settings.parse(given(), VARIABLE)


def given() -> Any:
    """The environment variable's value; ConfigError if it holds no JSON."""
    text = os.environ.get(VARIABLE, DEFAULT)
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{VARIABLE} is {shown(text)}: give JSON, such as {DEFAULT}") from None


def weights_of(args: Any, downloads: bool = False) -> str | None:
    """The folder of the weights that SGLang's server_args name, as folder_of."""
    hub = args.revision, args.download_dir, downloads
    return folder_of(args.model_path, args.load_format, *hub)
