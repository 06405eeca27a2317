"""How much better than the rows of a plan any code of as many bits could be, in squared error.

    python tests/benchmarks/bench_bound.py --json bound.json FOLDER...

Rounding errors of K and V count by the weights of calibration (calibration/bases.py). For Gaussian
rows the rate-distortion function gives the least weighted squared error of a code of so many bits:
reverse water-filling over the singular values of W^½ C^½ (T. Cover and J. Thomas, Elements of
Information Theory, section 10.3.3). Beside it stands the error that the plan's bases have on
passages that they have not seen. Both are shares of the rows' own weighted size. Ratios are
geometric means over layers and KV heads, for the bits of the codes alone and with the header's. A
ratio of 4 is one bit.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

from kvquant import CachedModel, RowFormat
from kvquant.calibration.basis_search import choose, error_weights
from kvquant.calibration.calibrate import observe
from kvquant.calibration.layer_selection import HeldLayers, renumbered
from kvquant.calibration.windows import Sizes, observed_windows, packaged_texts
from kvquant.cli.console import NEW_FILE, write_json
from kvquant.hf.models.configs import cache_layers

FORMATS = "int2", "int3", "int4"


def least_share(variances: torch.Tensor, bits: float) -> torch.Tensor:
    """The least error of a code, as a share of what it encodes.

    Args:
        variances: [..., dim], float64, of independent Gaussian numbers.
        bits: for each number, on the mean.

    Returns:
        [...]: the sum of errors over that of the variances.
    """
    logs = variances.clamp(min=1e-300).log2()
    low, high = torch.full_like(logs[..., :1], -1000), logs.amax(-1, keepdim=True)
    for _ in range(100):  # the level up to which errors rise, by bisection
        level = (low + high) / 2
        is_low = ((logs - level) / 2).clamp(min=0).mean(-1, keepdim=True) > bits
        low, high = torch.where(is_low, level, low), torch.where(is_low, high, level)
    return variances.minimum(level.exp2()).sum(-1) / variances.sum(-1)


def ratios_of(model: CachedModel) -> dict[str, dict[str, float]]:
    """By format and side: how many times the least error the rows have."""
    layers = cache_layers(model.config)
    held = HeldLayers(model, layers)
    texts = model.encode(packaged_texts()[0])
    seen, unseen = observed_windows(texts, Sizes(), model.max_positions)
    moments = renumbered(observe(model, seen), layers)
    weights = error_weights(held, moments)
    formats = {name: (RowFormat.parse(name, layers.k_dims[0]),) * 2 for name in FORMATS}
    chosen = choose(held, unseen, moments, formats)
    logs: dict[str, dict[str, list[torch.Tensor]]] = {}  # by format and side, and by bits
    for layer, at in moments.layers.items():
        for side in "kv":
            values, vectors = torch.linalg.eigh(weights[layer][side].to(at.queries))
            root = vectors * values.clamp(min=0).sqrt()[..., None, :]
            variances = torch.linalg.eigvalsh(root.mT @ at.covariance(side) @ root).clamp(min=0)
            for name, (fmt, _) in formats.items():
                share = chosen[layer][side].errors[name].to(variances).square()
                each = logs.setdefault(f"{name} {side}", {"codes": [], "with headers": []})
                for what, bits in (("codes", fmt.bits), ("with headers", fmt.bits_per_element)):
                    each[what].append((share / least_share(variances, bits)).log2().cpu())
    return {
        name: {what: float(torch.cat(found).mean().exp2()) for what, found in each.items()}
        for name, each in logs.items()
    }


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--json", "json_file", type=NEW_FILE)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
def main(folders: tuple[Path, ...], json_file: Path | None, device: str) -> None:
    """Measure and print."""
    models = {}
    for folder in folders:
        model = CachedModel.from_pretrained(folder, device=device, dtype=torch.float32)
        models[folder.name] = ratios_of(model)
        for name, ratios in models[folder.name].items():
            told = ", ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items())
            click.echo(f"{folder.name:20} {name}: {told}")
        write_json(json_file, {"torch": torch.__version__, "models": models})


if __name__ == "__main__":
    main()
