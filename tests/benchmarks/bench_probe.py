"""The figure of the probe of K rows (kvquant/hf/models/probe.py) beside what the rows cost.

    python tests/benchmarks/bench_probe.py FOLDER... --json probe.json

For each model and K format: the figure from random ids, as the doors take it; the same from a text;
and the KL divergence and top-1 agreement of predictions where every layer attends to rounded keys
and exact values, without a window, on 512 tokens of the packaged text. --factor 20 makes keys as
Qwen3's: in each head two pairs of channels are so many times larger, and those of queries smaller.
The model computes the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvquant import RowFormat, __version__
from kvquant.evaluation.evaluate import HELD_OUT
from kvquant.hf.models.configs import cache_layers
from kvquant.hf.models.probe import figures
from kvquant.hf.single_pass import exact_attention
from kvquant.hf.switch import attending
from kvquant.rows.probe import MEASURE, REFUSED, TOKENS, WARNED
from kvquant.rows.quantize import dequantize, quantize

FORMATS = "int8", "int8-g4", "int4-g8", "int4-g4", "int4", "int3", "int2"
LENGTH = 512  # tokens of the text
FIRST, STRIDE = 64, 4  # the first prediction that is compared, and from one to the next
ROUNDED = "kvquant-rounded-keys"
_format = ""  # that ROUNDED rounds keys to


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    fmt = RowFormat.parse(_format, key.shape[-1])
    key = dequantize(quantize(key, fmt)[0], fmt).to(key.dtype)
    return exact_attention(module, options)(module, query, key, value, mask, **options)


AttentionInterface.register(ROUNDED, _attend)
AttentionMaskInterface.register(ROUNDED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def with_large_channels(model: Any, factor: float) -> None:
    """Make two pairs of channels of each head's keys larger, and of its queries smaller."""
    half = model.config.head_dim // 2
    for layer in model.model.layers:
        for linear, by in (
            (layer.self_attn.k_proj, factor),
            (layer.self_attn.q_proj, 1 / factor),
        ):
            heads = linear.weight.data.view(-1, 2, half, linear.weight.shape[1])
            heads[:, :, half - 3 : half - 1] *= by


def seconds_of(model: Any, name: str) -> float:
    """The CPU's time for a probe of one format: other work on the machine does not count."""
    layers = cache_layers(model.config)
    start = time.process_time()
    figures(model, layers, [[RowFormat.parse(name, dim) for dim in layers.k_dims]])
    return time.process_time() - start


def losses(model: Any, formats: Sequence[str], ids: torch.Tensor) -> dict[str, Any]:
    """KL divergence and top-1 agreement of predictions from rounded keys."""
    global _format
    scored = torch.arange(FIRST, ids.shape[1], STRIDE)

    def predict() -> torch.Tensor:
        logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=scored).logits[0].float()
        return logits.log_softmax(-1)

    found = {}
    with torch.no_grad():
        exact = predict()
        for _format in formats:
            with attending(model, ROUNDED):
                rounded = predict()
            kl = float((exact.exp() * (exact - rounded)).sum(-1).mean())
            found[_format] = kl, float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
    return found


def measure(
    folder: Path, factor: float, formats: Sequence[str], tell: Callable[[str], object]
) -> dict[str, Any]:
    """All figures of a model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if factor != 1:
        with_large_channels(model, factor)
    text = HELD_OUT.read_text(encoding="utf-8")[:6000]
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :LENGTH]
    layers, rows = cache_layers(model.config), {}
    choices = [[RowFormat.parse(name, dim) for dim in layers.k_dims] for name in formats]
    random, known = (figures(model, layers, choices, one) for one in (None, ids[:, :TOKENS]))
    tell(f"{folder.name} {factor:g}: {random}, {known}")
    lost = losses(model, formats, ids)
    for name, *of_ids in zip(formats, random, known, strict=True):
        kept = *of_ids, *lost[name]
        rows[name] = dict(zip(("figure", "figure_of_text", "kl", "top1"), kept, strict=True))
        tell(f"{folder.name} {name}: {rows[name]}")
    return {"rows": rows, "cpu_seconds": seconds_of(model, "int4-g4")}


@click.command(help=__doc__)
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--formats", default=",".join(FORMATS), show_default=True)
@click.option("--factor", default=1.0, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(
    folders: Sequence[Path], formats: str, factor: float, threads: int, json_file: Path
) -> None:
    """See the module."""
    torch.set_num_threads(threads)
    known = json.loads(json_file.read_text()) if json_file.exists() else {"models": {}}
    known |= {
        "kvquant": __version__,
        "measure": MEASURE,
        "limits": {"warned": WARNED, "refused": REFUSED},
        "machine": {"device": "cpu", "torch": torch.__version__, "threads": threads},
    }
    for folder in folders:
        name = folder.name if factor == 1 else f"{folder.name}, keys x {factor:g}"
        known["models"][name] = measure(folder, factor, formats.split(","), click.echo)
        json_file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
