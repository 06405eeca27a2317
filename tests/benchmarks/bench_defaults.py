"""Which formats are safe without a plan: KL of pairs on models.

    python tests/benchmarks/bench_defaults.py FOLDER... --text TEXT --json defaults.json

Each model reads passages of the text, in all 1,024 scored tokens behind contexts of each length, in
float32 and with 16-bit rows of bfloat16. Every pair is compared with the 16-bit cache on the same
passages. First the script checks itself: 16-bit rows cost nothing, and one pair costs what it costs
where a cache of it is decoded token by token. kvquant/rows/defaults.py has what was chosen.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from kvquant.calibration.fidelity import Reference, Scheme
from kvquant.calibration.single_pass import PassReference
from kvquant.calibration.windows import spread
from kvquant.cli.console import COUNT, NEW_FILE, SOURCE, write_json
from kvquant.errors import KVQuantError
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import cache_layers
from kvquant.rows.format import RowFormat

K = "int8", "int8-g4", "int8-g8"
V = "int4", "int4-g2", "int4-g4", "int4-g8", "int8"
PAIRS = (
    *((k, v) for k in K for v in V),
    ("int4-g4", "int4-g4"),
    ("int4", "int4"),
)
WINDOWS = (4, 128), (0, 0)
SCORED = 1024  # tokens of each figure


@click.command()
@click.argument("folders", type=SOURCE, nargs=-1, required=True)
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--length", "lengths", type=COUNT, multiple=True, default=(1024, 16384))
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--json", "json_file", type=NEW_FILE)
def main(
    folders: tuple[Path, ...],
    text: Path,
    lengths: tuple[int, ...],
    device: str,
    json_file: Path | None,
) -> None:
    """Measure the pairs on models."""
    rows: list[dict[str, Any]] = []
    words = text.read_text(encoding="utf-8")
    for folder in folders:
        began = time.perf_counter()
        model = CachedModel.from_pretrained(folder, device=device, dtype=torch.float32)
        tokens = model.encode(words)
        for length in lengths:
            passages = 16 if length <= 4096 else 8
            scored = SCORED // passages
            most = model.max_positions or length + scored + 1
            context = min(length, most - scored - 1)
            windows = spread(tokens, passages, context + scored + 1)
            layers = cache_layers(model.config)
            dim, places = layers.k_dims[0], list(layers.places)
            reference = PassReference(model, windows, context, places, keeps_context=True)
            if length == lengths[0]:
                check(model, reference, windows, context)
            for pair in PAIRS:
                for window in WINDOWS:
                    found = reference.measure(Scheme(*pair, *window))
                    rows_of = [RowFormat.parse(name, dim) for name in pair]
                    packed = sum(fmt.bits_per_element for fmt in rows_of) / 2
                    rows.append(
                        {
                            "model": folder.name,
                            "text": text.name,
                            "context": context,
                            "scored": passages * scored,
                            "k": pair[0],
                            "v": pair[1],
                            "window": list(window),
                            "packed_bits": packed,
                            "kl": found.kl,
                            "kl_error": found.kl_error,
                            "top1": found.top1,
                        }
                    )
            show([row for row in rows if row["model"] == folder.name and row["context"] == context])
            write_json(json_file, {"torch": torch.__version__, "device": device, "rows": rows})
            del reference
        click.echo(f"{folder.name}: {time.perf_counter() - began:.0f} s", err=True)
        del model


def check(
    model: CachedModel, reference: PassReference, windows: torch.Tensor, context: int
) -> None:
    """Exit unless the measurement is right."""
    exact = reference.exact_format
    if abs(reference.measure(Scheme(exact, exact)).kl) > 1e-9:
        sys.exit("16-bit rows cost something")
    scheme = Scheme("int4", "int4")  # GPUs decode with 16-bit queries, which little KLs would show
    passed, decoded = (
        one.measure(scheme) for one in (reference, Reference(model, windows, context))
    )
    click.echo(f"check: {scheme}: {passed.kl:.5f} in one pass, {decoded.kl:.5f} decoded")
    if abs(passed.kl - decoded.kl) > 2 * (decoded.kl_error or 0):
        sys.exit("one pass and decoding differ")


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table of one model and length."""
    first = rows[0]
    click.echo(f"\n{first['model']}, {first['text']}, {first['context']} tokens of context")
    for k, v in PAIRS:
        cells = []
        for row in rows:
            if (row["k"], row["v"]) == (k, v):
                bits = row["packed_bits"]
                cells.append(f"{row['kl']:.5f} +- {row['kl_error']:.5f} ({row['top1']:.1%})")
        click.echo(f"  K {k:8} V {v:8} {bits:5.2f} bits  window {cells[0]}  none {cells[1]}")


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
