"""One rank of a model under tensor parallelism: `python hf_rank.py FILE RANK WORLD_SIZE FOLDER`.

FOLDER holds a model and plan.safetensors. It prints "right" at the end.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from kvquant import CachedModel, CachePlan, QuantizedCache, load_cache, save_cache
from kvquant.errors import UnsupportedModelError

TEXT = torch.arange(5, 45).view(2, 20)
MASK = torch.ones_like(TEXT)
MASK[0, :7] = 0


def run(model: Any, cache: QuantizedCache, beams: int) -> list[list[int]]:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 999}
    given = {"attention_mask": MASK, "past_key_values": cache, "num_beams": beams}
    found: list[list[int]] = model.generate(TEXT, **given, **options).tolist()
    return found


def compare(spread: QuantizedCache, whole: QuantizedCache, heads: slice) -> None:
    """The rows of a rank are those of its heads: in a basis of others they would not be."""
    assert spread.kv is not None and whole.kv is not None
    assert spread.kv.num_kv_heads == heads.stop - heads.start < whole.kv.num_kv_heads
    assert spread.kv.num_q_heads == 8 * spread.kv.num_kv_heads // whole.kv.num_kv_heads
    for layer in range(spread.kv.num_layers):
        pairs = zip(spread.kv.dequantized(layer), whole.kv.dequantized(layer), strict=True)
        for found, wanted in pairs:
            found, wanted = found.double(), wanted[:, heads].double()
            assert float((found - wanted).norm() / wanted.norm()) < 5e-3


def main(file: str, rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    load = transformers.AutoModelForCausalLM.from_pretrained
    alone = load(folder, attn_implementation="kvquant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers has DistributedConfig
        model = load(folder, attn_implementation="kvquant", tp_plan="auto")
    share = alone.config.num_key_value_heads // world
    heads = slice(rank * share, (rank + 1) * share)
    plan = CachePlan.load(folder / "plan.safetensors")
    for options in ({"k_format": "int8", "v_format": "int4-g4"}, {"plan": plan}):
        for beams in (1, 2):
            spread, whole = (QuantizedCache(one, recent_len=8, **options) for one in (model, alone))
            assert run(model, spread, beams) == run(alone, whole, beams)
            compare(spread, whole, heads)
    assert spread.kv is not None and whole.kv is not None
    save_cache(spread.kv, folder / f"cache-{rank}.safetensors")
    again = QuantizedCache(
        load_cache(folder / f"cache-{rank}.safetensors", plan=plan.of_heads(range(8)[heads]))
    )
    places = whole.kv.positions[:, None]
    step = {"position_ids": places, "use_cache": True}
    with torch.no_grad():
        found = model(TEXT[:, :1].repeat(2, 1), past_key_values=again, **step).logits
        wanted = alone(TEXT[:, :1].repeat(2, 1), past_key_values=whole, **step).logits
    assert torch.allclose(found, wanted, atol=1e-2)
    with pytest.raises(UnsupportedModelError, match=f"over {world} ranks"):
        CachedModel(model)
    dist.barrier()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
