"""What latent rows keep of a model's predictions, in each format, with and without a plan.

Run by hand on a GPU, all of it in one go. A small model is trained on a text, unless FOLDER has one
(examples/train_mla.py). A plan is made on the text's first three quarters, and passages of the last
one are decoded token by token from each cache:

    python tests/benchmarks/fidelity_latents.py FOLDER --text FILE --device cuda

    KL     mean over all scored tokens, nats, to the predictions of the 16-bit cache; +- its
           standard error, by the spread of passages. That of 16-bit rows is to the predictions of
           transformers itself with its DynamicCache, in float32
    bytes  of a row

A table in Markdown is printed, for calibration/README.md.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from kvquant.calibration.calibrate import Goal, finish, observe
from kvquant.calibration.fidelity import (
    Fidelity,
    Planned,
    Reference,
    Scheme,
    compare_passages,
    predict,
    read_prompt,
)
from kvquant.calibration.windows import Sizes, observed_windows, spread
from kvquant.cli.console import DEVICE, FILE
from kvquant.cli.demo import TEXT
from kvquant.hf.model import CachedModel
from kvquant.io.plan import CachePlan
from kvquant.rows.latent import LatentFormat

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FORMATS = "fp8", "int8-g4", "int4-g8+int8-g4", "int4-g8+fp8-g4", "int4-g4+int8-g4"
GOAL = Goal(format="int4-g8+int8-g4")  # bases and clip ratios serve all formats


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--text", type=FILE, default=TEXT, show_default=True)
@click.option("--device", type=DEVICE, default="cpu", show_default=True)
@click.option("--latents", type=click.Choice(["256", "512"]), default="512", show_default=True)
@click.option("--steps", default=2000, show_default=True, help="Of training.")
@click.option("--layers", default=4, show_default=True)
@click.option("--length", default=512, show_default=True, help="Tokens of a passage of training.")
@click.option("--windows", default=32, show_default=True, help="Passages that are scored.")
@click.option("--context", default=384, show_default=True, help="Tokens before the scored ones.")
@click.option("--scored", default=128, show_default=True, help="Tokens of a passage.")
def main(
    folder: Path,
    text: Path,
    device: str,
    latents: str,
    steps: int,
    layers: int,
    length: int,
    windows: int,
    context: int,
    scored: int,
) -> None:
    """Train, calibrate, measure and print."""
    torch.manual_seed(0)
    start = time.monotonic()
    if not (folder / "config.json").exists():
        sizes = ["--latents", latents, "--steps", steps, "--layers", layers, "--length", length]
        given = [folder, "--text", text, "--device", device, *sizes]
        subprocess.run([sys.executable, EXAMPLES / "train_mla.py", *map(str, given)], check=True)
        print(f"trained in {time.monotonic() - start:.0f} s", flush=True)
    model = CachedModel.from_pretrained(folder, device=device)
    tokens = model.encode(text.read_text(encoding="utf-8"))
    cut = len(tokens) - len(tokens) // 4
    passages = spread(tokens[cut:], windows, context + scored + 1)
    plan = make_plan(model, tokens[:cut], Sizes(length=length))
    rows = measure(model, plan, passages, context)
    print(f"{len(tokens)} tokens of {text.name}, {windows * scored} scored after {context}\n")
    print("| rows | bytes | without a plan: KL (top-1) | with a plan: KL (top-1) |")
    print("|---|---|---|---|")
    for name, row_bytes, *found in rows:
        cells = ["-" if one is None else cell_of(one) for one in found]
        print(f"| `{name}` | {row_bytes:,} | {' | '.join(cells)} |", flush=True)
    print(
        f"\nperplexity of the text: {rows.perplexity:.1f}; {time.monotonic() - start:.0f} s in all"
    )


def make_plan(model: CachedModel, tokens: list[int], sizes: Sizes) -> CachePlan:
    """A plan of a model's latent rows, on a text; nothing is measured."""
    observed, fitted = observed_windows(tokens, sizes, model.max_positions)
    moments = observe(model, observed, "", None)
    return finish(model, moments, fitted, None, sizes=sizes, goal=GOAL)


class Rows(list[tuple[str, int, Fidelity, "Fidelity | None"]]):
    """Lines of the table: rows, bytes, and what was found without and with a plan."""

    perplexity = 0.0  # of the text, by the predictions of the 16-bit cache


def measure(model: CachedModel, plan: CachePlan, passages: torch.Tensor, context: int) -> Rows:
    """Decode passages [windows, context + scored + 1] from caches in each format."""
    dims = plan.head_dim, plan.tensors["v.offset"].shape[2]
    exact = LatentFormat.parse(model.exact_format, *dims)
    beside = beside_transformers(model, passages, context)
    found = Rows([(str(exact), exact.row_bytes, beside, None)])
    reference = Reference(model, passages, context)
    found.perplexity = reference.perplexity
    for fmt, without, planned in schemes(plan, dims):
        pair = reference.measure(without), reference.measure(planned)
        found.append((str(fmt), fmt.row_bytes, *pair))
    return found


def schemes(
    plan: CachePlan, dims: tuple[int, int]
) -> Iterator[tuple[LatentFormat, Scheme, Planned]]:
    """Each format of such rows, as a cache without a plan and as one with it."""
    for name in FORMATS:
        if name == "fp8" and dims != (512, 64):  # FlashMLA's layout
            continue
        fmt = LatentFormat.parse(name, *dims)
        latent = "fp8" if name == "fp8" else str(fmt.latent)
        scheme = Scheme(latent, str(fmt.rope))
        yield fmt, scheme, Planned(plan.with_formats(name), f"plan, {name}")


def beside_transformers(model: CachedModel, passages: torch.Tensor, context: int) -> Fidelity:
    """What rows of 16 bit keep of the predictions of transformers with its own cache."""
    fed, past = passages[:, context:-1], model.new_plain_cache()
    exact = read_prompt(model, passages[:, :context], fed.shape[1])
    given = predict(model, exact, fed)
    model.plain(passages[:, :context], past)
    steps = [model.plain(token, past).float().log_softmax(-1) for token in fed.split(1, dim=1)]
    expected = torch.stack(steps).to(given.device)
    targets = passages[:, context + 1 :].t()[..., None].to(given.device)
    parts = compare_passages(expected, given, targets)
    return Fidelity.of(
        Scheme(model.exact_format, model.exact_format), 16.0, exact.nbytes, parts, fed.shape[1]
    )


def cell_of(found: Fidelity) -> str:
    """KL with its standard error, and top-1."""
    error = "" if found.kl_error is None else f" ± {found.kl_error:.6f}"
    return f"{found.kl:.6f}{error} ({found.top1:.1%})".replace("%", " %")


if __name__ == "__main__":
    main()
