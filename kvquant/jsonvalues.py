"""Values of a manifest, which is JSON that anybody may have written: each is checked when read."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .errors import CheckpointError
from .layout import RowFormat

INT32, INT64 = 2**31 - 1, 2**63 - 1


def parse(text: str) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: it is none; NaN and Infinity are none.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest is no JSON ({error})") from None


def parse_manifest(
    text: str, file_format: str, versions: tuple[int, ...], keys: set[str]
) -> dict[str, Any]:
    """Read the object of a manifest of one of the versions, with exactly these keys.

    Raises:
        CheckpointError: it is another one.
    """
    top = parse(text)
    if type(top) is not dict or top.get("format") != file_format:
        raise CheckpointError(f"the manifest is not that of a {file_format} file")
    if top.get("version") not in versions:
        raise CheckpointError(
            f"the file has version {top.get('version')!r:.40}, this kvquant reads "
            f"{' and '.join(map(str, versions))}: take the kvquant that wrote it, or save it anew"
        )
    check_keys(top, keys, "the manifest")
    return top


def check_keys(value: dict[str, Any], expected: set[str], what: str) -> None:
    """Raise CheckpointError unless an object has exactly these keys."""
    if value.keys() != expected:
        names = sorted(value.keys() ^ expected)
        raise CheckpointError(f"{what} has no key {names[0]!r:.80}, or should have none")


def as_dict(value: Any, what: str) -> dict[str, Any]:
    """An object, or CheckpointError."""
    if type(value) is not dict:
        raise CheckpointError(f"{what} is {value!r:.80}: it must be an object")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """A list, or CheckpointError."""
    if type(value) is not list:
        raise CheckpointError(f"{what} is {value!r:.80}: it must be a list")
    return value


def whole(value: Any, what: str, *, low: int = 0, high: int = INT32) -> int:
    """A whole number within bounds, or CheckpointError."""
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(
            f"{what} is {value!r:.80}: it must be a whole number from {low} to {high}"
        )
    return value


def wholes(values: Any, what: str, *, low: int = 0, high: int = INT32) -> tuple[int, ...]:
    """A list of whole numbers within bounds, or CheckpointError."""
    return tuple(whole(value, what, low=low, high=high) for value in as_list(values, what))


def choice(value: Any, what: str, choices: tuple[str, ...]) -> str:
    """One of some strings, or CheckpointError."""
    if type(value) is not str or value not in choices:
        raise CheckpointError(f"{what} is {value!r:.80}: it must be one of {', '.join(choices)}")
    return value


def row_format(value: Any, what: str) -> RowFormat:
    """A format, from {"format", "head_dim"}, or CheckpointError."""
    check_keys(as_dict(value, what), {"format", "head_dim"}, what)
    name, head_dim = value["format"], value["head_dim"]
    if type(name) is not str:
        raise CheckpointError(f"{what}.format is {name!r:.80}: it must be a format's name")
    try:
        return RowFormat.parse(name, whole(head_dim, f"{what}.head_dim"))
    except ValueError as error:  # ConfigError, or a number of groups too long for int()
        raise CheckpointError(f"{what}: {str(error)[:200]}") from None


def identity(value: Any) -> dict[str, str] | None:
    """A model's identity or none, or CheckpointError."""
    if value is None:
        return None
    found = as_dict(value, "model")
    check_keys(found, {"type", "sha256"}, "model")
    if type(found["type"]) is not str:
        raise CheckpointError("model.type must be a string")
    check_digest(found["sha256"], "model.sha256")
    return found


def transforms(value: Any, num_layers: int) -> tuple[dict[str, str], ...]:
    """What a manifest says of the bases of its rows: {"k", "v"} for each layer, or nothing.

    Raises:
        CheckpointError: it says something else.
    """
    if value == []:
        return ()
    try:
        for i, entry in enumerate(as_list(value, "transforms")):
            check_keys(as_dict(entry, f"transforms[{i}]"), {"k", "v"}, f"transforms[{i}]")
            for side in "kv":
                check_digest(entry[side], f"transforms[{i}].{side}")
        if len(value) != num_layers:
            raise CheckpointError(f"{len(value)} transforms for {num_layers} layers")
    except CheckpointError as error:
        raise CheckpointError(
            f"the rows were transformed by {value!r:.80}, which this kvquant does not know: take a "
            f"newer one ({error})"
        ) from None
    return tuple(value)


def check_digest(value: Any, what: str) -> None:
    """Raise CheckpointError unless this is a SHA-256 in hexadecimal digits."""
    if type(value) is not str or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise CheckpointError(f"{what} is {value!r:.80}: it must be 64 hexadecimal digits")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
