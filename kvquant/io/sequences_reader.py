"""PageReader: a file of sequences of a paged cache open for reading; its seals and checks.

The format is told in sequences.py.
"""

from __future__ import annotations

import os

import torch

from ..errors import CheckpointError
from .atomic import as_path
from .container import PAGES, RowsFile, named
from .sequences_manifest import PageManifest
from .tensor_files import SafetensorsFile, unsealed


class PageReader(RowsFile[PageManifest]):
    """A file of sequences of a paged cache open for reading, its manifest checked.

    Args:
        path: what was given to save_sequences.

    Attributes:
        path: the file.
        num_bytes: of the file.
        manifest: all of the sequences but their rows.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged or foreign.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = as_path(path)
        try:
            file = self._open(self.path)
            self.num_bytes = file.num_bytes
            if PAGES not in file.metadata:
                raise CheckpointError(
                    "this is no file of a paged cache: caches of save_cache are read by load_cache"
                )
            text = unsealed(PAGES, file.metadata)
            self.manifest, self._digests = PageManifest.from_json(text, self._numbers)
            self._check_tensors()
        except CheckpointError as error:
            self._opened.close()
            raise named(self.path, error) from None
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> PageReader:
        return self

    def _numbers(self, name: str, dtype: torch.dtype, count: int, digest: str) -> list[int]:
        """Read a tensor that is no rows."""
        file = self._files.pop(name, None)
        if file is None:
            raise CheckpointError(f"tensor {name!r} is missing: take another copy of the file")
        if (file.dtypes[name], file.shapes[name]) != (dtype, (count,)):
            raise CheckpointError(
                f"tensor {name!r} is {file.dtypes[name]} {list(file.shapes[name])!s:.80}: the "
                f"sequences ask for {dtype} {[count]}"
            )
        numbers: list[int] = file.read(name, digest).tolist()
        return numbers


def holds_pages(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that it holds sequences of a paged cache, be it damaged.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    path = as_path(path)
    if not path.is_file() or path.name.endswith(".index.json"):
        return False
    try:
        with SafetensorsFile(path) as file:
            return PAGES in file.metadata
    except FileNotFoundError:  # a cache in shards has taken its place
        return False
