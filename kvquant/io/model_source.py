"""Sources of a model: a folder, a GGUF file, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ConfigError

# a name, or OWNER/NAME; a path that begins with a dot or a slash is none
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def check_source(source: str | Path) -> Path:
    """The path of a folder or GGUF file, or a possible name on the hub; ConfigError for others."""
    path = Path(source)
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise ConfigError(
            f"{path} is no GGUF file: give the folder of a model with safetensors files, a GGUF "
            "file, or a model's name on the Hugging Face hub"
        )
    if not _HUB_NAME.fullmatch(str(source)):
        raise ConfigError(
            f"{path} does not exist: give the folder of a model, a GGUF file, or a model's name on "
            "the Hugging Face hub (OWNER/NAME)"
        )
    return path
