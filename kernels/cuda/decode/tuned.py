"""The table of measured plans: the fastest splits, warps and stages for a shape on a GPU.

JSON files: the user's, which tests/benchmarks/bench_tune.py writes to the cache folder, and those
of the folder plans, one for each GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from kvquant.errors import shown, warn

from ...disk_cache import cache_folder, read_file
from .spec import MMA_COLUMNS

TABLE_VERSION = 1
MOST = 2**63 - 1  # of any number in it
NEAR_UNITS, NEAR_CAPACITY = 1.2, 2.0  # times a measured plan's, at which it still counts
SHIPPED = Path(__file__).parent / "plans"


@dataclass(frozen=True)
class Tuned:
    """The fastest plan that was measured for a shape with one segment.

    Attributes:
        gpu: its name.
        k, v: formats with their head_dim, such as "int4-g4/128".
        units: sequences times KV heads times blocks of query heads that share one.
        capacity: tokens.
        columns: query heads of a block.
    """

    gpu: str
    k: str
    v: str
    units: int
    capacity: int
    splits: int
    warps: int
    stages: int
    columns: int = MMA_COLUMNS

    @property
    def shape(self) -> tuple[str, str, str, int, int, int]:
        return self.gpu, self.k, self.v, self.columns, self.units, self.capacity


def lookup(
    rows: Iterable[Tuned],
    gpu: str,
    k: str,
    v: str,
    units: int,
    capacity: int,
    columns: int = MMA_COLUMNS,
) -> Tuned | None:
    """Find the row that is nearest to a shape, by the logarithms of units and capacity.

    Returns the first of equally near ones; None if there is none within a factor of NEAR_UNITS of
    the units and one of NEAR_CAPACITY of the capacity.
    """
    best, least = None, math.inf
    for row in rows:
        if (row.gpu, row.k, row.v, row.columns) == (gpu, k, v, columns):
            apart = abs(math.log2(row.units / units)), abs(math.log2(row.capacity / capacity))
            is_near = apart[0] <= math.log2(NEAR_UNITS) and apart[1] <= math.log2(NEAR_CAPACITY)
            if is_near and sum(apart) < least:
                best, least = row, sum(apart)
    return best


def table_path() -> Path:
    """Where the user's table lies; OSError without a cache folder."""
    return cache_folder() / "tuned.json"


def load_table(path: Path | None = None) -> tuple[Tuned, ...]:
    """The rows of a table, the user's for None; a damaged one is warned of and has none."""
    try:
        path = path or table_path()
        version, rows = read_table(path)
        if version != TABLE_VERSION:
            raise ValueError(f"it is of version {version}, this kvquant reads {TABLE_VERSION}")
        return rows
    except (OSError, ValueError) as error:
        how = "Let KVQUANT_CACHE_DIR name a folder of your own"
        if isinstance(error, ValueError):
            how = "Move it away (kvquant's repository measures: tests/benchmarks/bench_tune.py)"
        table = f"the table of measured plans {path}" if path else "a table of measured plans"
        warn(f"{table} cannot be used ({error}): CUDA kernels are planned by a formula. {how}")
        return ()


def measured_plans() -> tuple[Tuned, ...]:
    """The rows of the user's table, then those that are shipped."""
    shipped = [_parse_table(path.read_bytes())[1] for path in sorted(SHIPPED.glob("*.json"))]
    return sum(shipped, load_table())


def read_table(path: Path) -> tuple[int, tuple[Tuned, ...]]:
    """The version of a table and its rows: none of another version; ValueError if it is damaged."""
    text = read_file(path)
    return (TABLE_VERSION, ()) if text is None else _parse_table(text)


def _parse_table(text: bytes) -> tuple[int, tuple[Tuned, ...]]:
    try:
        table = json.loads(text.decode())
        version = table["version"]
        if type(version) is not int:
            raise ValueError(f"its version is {shown(version)}")
        rows = table["rows"] if version == TABLE_VERSION else ()
        return version, tuple(_parse(row) for row in rows)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error!r}") from None


def _parse(row: dict[str, object]) -> Tuned:
    parsed = Tuned(**row)  # type: ignore[arg-type]
    for field in fields(parsed):
        value = getattr(parsed, field.name)
        if field.type == "str":
            good = isinstance(value, str)
        else:
            good = type(value) is int and 0 < value <= MOST
        if not good:
            raise ValueError(f"{field.name} is {shown(value)} in one of its rows")
    return parsed
