"""PageReader: a file of sequences of a paged cache open for reading; its seals and checks.

The format is told in pagedfile.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .cachefile import PAGES, check_values
from .errors import CheckpointError
from .files import open_safetensors, read_tensor, sha256
from .manifest import Part
from .pagedmanifest import PageManifest, PagePart

MANIFEST, MANIFEST_SHA256 = PAGES, f"{PAGES}_sha256"


class PageReader:
    """A file of sequences of a paged cache open for reading, its manifest checked.

    Args:
        path: what was given to save_sequences.

    Attributes:
        path: the file.
        manifest: all of the sequences but their rows.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged or foreign.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with ExitStack() as stack:
            self._file: Any = stack.enter_context(open_safetensors(self.path))
            try:
                self.manifest, self._digests = _unsealed(self._file.metadata() or {})
                self._check_tensors()
            except CheckpointError as error:
                raise self._error(error) from None
            self._stack = stack.pop_all()

    def __enter__(self) -> PageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file = None
        self._stack.close()

    def rows(self, part: Part, *, check: bool = True) -> torch.Tensor:
        """Read one tensor, uint8, of the shape manifest.shape(part).

        Args:
            part: one of manifest.parts.
            check: False where it has been checked before.

        Raises:
            CheckpointError: its checksum is another one, or a row would decode to NaN.
        """
        try:
            rows = read_tensor(self._file, part.name)
            if not check:
                return rows
            if sha256(rows) != self._digests[part.name]:
                raise CheckpointError(
                    f"tensor {part.name!r} is damaged (its checksum differs): take another copy "
                    "of the file"
                )
            check_values(by_token(rows, part), part)
        except CheckpointError as error:
            raise self._error(error) from None
        return rows

    def _check_tensors(self) -> None:
        names, parts = set(self._file.keys()), self.manifest.parts
        if names != parts.keys():
            name = min(names ^ parts.keys())
            problem = "is missing" if name in parts else "should not be there"
            raise CheckpointError(f"tensor {name!r:.80} {problem}: take another copy of the file")
        for name, part in parts.items():
            view, shape = self._file.get_slice(name), list(self.manifest.shape(part))
            if view.get_dtype() != "U8" or list(view.get_shape()) != shape:
                raise CheckpointError(
                    f"tensor {name!r} is {view.get_dtype()} {list(view.get_shape())}: the "
                    f"sequences and formats ask for U8 {shape}"
                )

    def _error(self, error: CheckpointError) -> CheckpointError:
        text = str(error)
        return error if text.startswith(str(self.path)) else CheckpointError(f"{self.path}: {text}")


def holds_pages(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that it holds sequences of a paged cache, be it damaged.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    path = Path(path)
    if not path.is_file() or path.name.endswith(".index.json"):
        return False
    with open_safetensors(path) as file:
        return MANIFEST in (file.metadata() or {})


def by_token(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """A part's tensor as [tokens, num_kv_heads, row_bytes]: pages one after another."""
    return rows.transpose(1, 2).flatten(0, 1) if isinstance(part, PagePart) else rows


def _unsealed(metadata: Mapping[str, Any]) -> tuple[PageManifest, dict[str, str]]:
    """The manifest and the checksums of the tensors from a file's metadata."""
    text, digest = metadata.get(MANIFEST), metadata.get(MANIFEST_SHA256)
    if type(text) is not str:
        raise CheckpointError(
            "this is no file of a paged cache: caches of save_cache are read by load_cache"
        )
    if hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() != digest:
        raise CheckpointError(
            "the manifest is damaged (its checksum differs): take another copy of the file"
        )
    return PageManifest.from_json(text)
