"""JSON of any origin, and the manifest of every file that kvquant writes.

Each file is a safetensors file, whose metadata has two strings:

    kvquant_file          the manifest, a JSON object
    kvquant_file_sha256   the SHA-256 of the manifest's UTF-8 bytes, hexadecimal digits

Every manifest has "format", one of KINDS; "version", 1; and "sha256" of each tensor. From the first
release on, later versions read the files of earlier ones; files from before it are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ..errors import CheckpointError, ConfigError
from ..rows.format import RowFormat

INT32, INT64 = 2**31 - 1, 2**63 - 1
MAX_LISTS = 1 << 20  # lists and objects of a text, each of which takes a hundred bytes of memory
MAX_LAYERS, MAX_SEQUENCES = 1 << 12, 1 << 20  # of a file

Length = Annotated[int, Meta(ge=0, le=INT32)]
Count = Annotated[int, Meta(ge=1, le=INT32)]
Wide = Annotated[int, Meta(ge=-INT64 - 1, le=INT64)]
_DIGITS = r"\A[0-9a-f]{64}\Z"
Digest = Annotated[str, Meta(pattern=_DIGITS)]
ExactCodec = Annotated[str, Meta(pattern=r"\A(bf16|fp16)\Z")]
T = TypeVar("T")
CACHE, SEQUENCES, PLAN = "kvquant.cache", "kvquant.sequences", "kvquant.plan"
KINDS = {  # the formats of files; what a reader of another kind says of them
    CACHE: "a kvquant cache: load_cache reads it, `kvquant inspect` shows it",
    SEQUENCES: "a file of sequences of a paged cache: load_sequences reads it",
    PLAN: "a plan, not a cache: CachePlan.load reads it, `kvquant report` shows it",
}
KEY, VERSION = "kvquant_file", 1
_BEFORE = {"kvquant", "kvquant_cache", "kvquant_pages", "kvquant_moments"}
_SHORT = Repr()  # of values that may be long or deep
_SHORT.maxstring = _SHORT.maxlong = 80


class Object(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object with exactly these keys."""


class FormatName(Object):
    """A row format as files name it."""

    format: str
    head_dim: Length

    @classmethod
    def of(cls, fmt: RowFormat) -> FormatName:
        """The name of a format."""
        return cls(str(fmt), fmt.head_dim)

    def row_format(self, what: str) -> RowFormat:
        try:
            return RowFormat.parse(self.format, self.head_dim)
        except ValueError as error:  # ConfigError, or a number of groups too long for int()
            raise CheckpointError(f"{what}: {str(error)[:200]}") from None


class ModelName(Object, omit_defaults=True):
    """The model of a file: model_identity of its config."""

    type: str
    sha256: Digest
    weights: Digest | None = None


class Fingerprints(Object):
    """The fingerprints of the bases of a layer."""

    k: Digest
    v: Digest


def parse(text: str | bytes, what: str, *, surrogates: bool = False) -> Any:
    """Read JSON, also with the NaN and Infinity of Python; `what` names it in errors.

    With surrogates strings may hold halves of characters, as odd file names do. It raises
    CheckpointError for no JSON, a key twice in an object, or more than MAX_LISTS lists and objects.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        check_lists(text)
        value = json.loads(text, object_pairs_hook=_object)
        if not surrogates and re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no JSON that is read here ({error!s:.200})") from None
    return value


def check_lists(text: str) -> None:
    """Raise ValueError if a text has more lists and objects than MAX_LISTS."""
    if text.count("[") + text.count("{") > MAX_LISTS:  # those in strings are none, but may count
        raise ValueError(f"it has more than {MAX_LISTS} lists and objects")


def checked(value: Any, schema: type[T], what: str) -> T:
    """A JSON value with the types of a schema.

    Raises:
        CheckpointError: it does not fit; the error says where, what came, and what may come.
    """
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise CheckpointError(_explained(str(error), value, what)) from None
    except UnicodeError as error:
        raise CheckpointError(f"{what} has half a character in it ({error})") from None


def sealed(manifest: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file: its manifest with the SHA-256 of each tensor, and the checksum."""
    top = {**manifest, "version": VERSION, "sha256": dict(digests)}
    text = json.dumps(top, separators=(",", ":"), sort_keys=True)
    return {KEY: text, f"{KEY}_sha256": hashlib.sha256(text.encode()).hexdigest()}


def unsealed(metadata: Mapping[str, str], *kinds: str) -> dict[str, Any]:
    """The manifest of a file of one of these KINDS; its other values are not checked.

    Raises:
        CheckpointError: the file is of another kind or version, or its manifest is damaged.
    """
    text = metadata.get(KEY)
    if text is None:
        if metadata.keys() & _BEFORE or metadata.get("format") == "kvquant-cache-shard":
            raise CheckpointError(
                "this file was written by kvquant before its first release: write it again"
            )
        raise CheckpointError(
            "this file has no manifest of kvquant; `kvquant quantize --from` reads K and V tensors "
            "that are named layers.0.k, layers.0.v and so on"
        )
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get(f"{KEY}_sha256"):
        raise CheckpointError(
            "the manifest is damaged (its checksum differs): take another copy of the file"
        )
    # pages show the text of plans, and have whole characters
    top = parse(text, "the manifest", surrogates=PLAN not in kinds)
    found = top.get("format") if type(top) is dict else None
    if type(found) is not str or found not in KINDS:
        raise CheckpointError(f"the manifest has no format of kvquant, but {_SHORT.repr(found)}")
    if found not in kinds:
        raise CheckpointError(f"this is {KINDS[found]}")
    version = top.get("version")
    if type(version) is not int or version != VERSION:
        raise CheckpointError(
            f"the file has version {version!r:.40}, this kvquant reads {VERSION}: take the kvquant "
            "that wrote it"
        )
    return dict(top)


def plain_data(value: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """A copy of a dict; ConfigError unless it has only strings, finite numbers, lists, dicts."""
    try:
        text = json.dumps(dict(value or {}), allow_nan=False)
        copied = parse(text, what, surrogates=True)
    except (TypeError, ValueError, RecursionError) as error:  # CheckpointError is a ValueError
        raise ConfigError(
            f"{what} is not plain data ({error}): use strings, finite numbers, lists, dicts"
        ) from None
    return dict(copied)


def _explained(problem: str, value: Any, what: str) -> str:
    """msgspec's words for the problem, with the value."""
    text, _, path = problem.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    text = text.replace(f"`str` matching regex {_DIGITS!r}", "64 hexadecimal digits")
    text = text.replace("Expected ", "it must be ").replace("`", "")
    if text.startswith("Object "):  # it lacks a key, or has another one
        return f"{path or what} has another key or lacks one: {text[0].lower()}{text[1:]}"
    if "..." in path:  # some value of a dict
        return f"{path}: {text}"
    for key, index in re.findall(r"([^.\[\]]*[a-z_][^.\[\]]*)|\[(\d+)\]", path):
        value = value[key] if key else value[int(index)]
    return f"{path or what} is {_SHORT.repr(value):.80}: {text}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found
