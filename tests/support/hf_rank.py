"""One rank of a model under tensor parallelism, started by ranks.py, with a folder that holds a
model and plan.safetensors. It prints "right" at the end."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hf_cases import GREEDY, WITH_LOGITS, assert_alike, assert_likeliest
from ranks import join
from torch._dynamo.utils import counters

from kvquant import CachedModel, CachePlan, QuantizedCache, load_cache, save_cache
from kvquant.errors import ConfigError, ShapeError, UnsupportedModelError

TEXT = torch.arange(5, 45).view(2, 20)
MASK = torch.ones_like(TEXT)
MASK[0, :7] = 0


CODES = 0.02  # that logits are apart by where sums over ranks move a few codes by one


def run(model: Any, cache: QuantizedCache, beams: int, **more: Any) -> Any:
    given = {"attention_mask": MASK.to(model.device), **cache.argument, "num_beams": beams}
    return model.generate(
        TEXT.to(model.device), **given, **GREEDY, max_new_tokens=6, **more, **WITH_LOGITS
    )


def check_compiled(model: Any) -> None:
    """Steps of a rank are one graph, with the sums over ranks in it."""
    config: Any = transformers.CompileConfig(fullgraph=True, backend="eager", mode="default")
    config._compile_all_devices = True
    caches = [QuantizedCache(model, max_seq_len=64) for _ in range(2)]
    found = run(model, caches[0], 1, compile_config=config)
    wanted = run(model, caches[1], 1, disable_compile=True)  # on CUDA generate compiles by itself
    assert_alike(found, wanted, limit=CODES)
    counted = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    assert counted == (1, {}), counted
    caches[0].check()


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


def check_cached_model(folder: Path, rank: int, heads: slice, plan: CachePlan) -> None:
    """CachedModel reads and decodes as in one process, and refuses what it cannot do."""
    spread = CachedModel.from_pretrained(folder, tp_plan="auto")
    alone = CachedModel.from_pretrained(folder, device=spread.model.device)
    text, lens = torch.cat([TEXT, TEXT.flip(1)], dim=1), [40, 9]
    for options in ({"k_format": "int8", "v_format": "int4-g4"}, {"plan": plan}):
        caches = [one.new_cache(2, 64, recent_len=8, **options) for one in (spread, alone)]
        found, wanted = (
            one.prefill(cache, text, lens, chunk=16)
            for one, cache in zip((spread, alone), caches, strict=True)
        )
        assert close(found, wanted)
        for _ in range(6):
            token = wanted.argmax(-1)
            found, wanted = spread.step(caches[0], token), alone.step(caches[1], token)
            assert close(found, wanted)
        assert caches[0].num_kv_heads == heads.stop - heads.start
        assert caches[0].num_q_heads == 8 * caches[0].num_kv_heads // caches[1].num_kv_heads
        fork, logits = caches[1].fork(), wanted
        for token in spread.generate(caches[0].fork(), found, 4).unbind(1):
            assert_likeliest(logits, token)
            logits = alone.step(fork, token)
    path = folder / f"cached-{rank}.safetensors"
    save_cache(caches[0], path, model=spread.config_dict)
    of_rank, device = plan.of_heads(range(8)[heads]), spread.model.device
    again = load_cache(path, plan=of_rank, model=spread.config_dict, device=device)
    token = wanted.argmax(-1)
    assert torch.equal(spread.step(again, token), spread.step(caches[0], token))
    with pytest.raises(ShapeError, match="the cache has 2 layers of 4 KV heads"):
        spread.step(caches[1], token)
    for refused in (
        lambda: spread.observe(TEXT, lambda *_: None),
        spread.output_weights,
        lambda: spread.fold_values(plan),
    ):
        with pytest.raises(UnsupportedModelError, match=r"spread over 2 ranks .* in one process"):
            refused()
    why = str(spread.not_captured(caches[0]))
    assert "over 2 ranks" in why and "Use CachedModel.step" in why
    with pytest.raises(ConfigError, match="device is 'cpu', and with tp_plan each process"):
        CachedModel.from_pretrained(folder, tp_plan="auto", device="cpu")


def check_latents(folder: Path, world: int) -> None:
    """Each rank keeps all latent rows, and attends to them with its heads."""
    spread = CachedModel.from_pretrained(folder, tp_plan="auto")
    alone = CachedModel.from_pretrained(folder, device=spread.model.device)
    caches = [one.new_cache(2, 64, recent_len=8) for one in (spread, alone)]
    assert caches[1].num_q_heads == world * (caches[0].num_q_heads or 0)
    pairs = list(zip((spread, alone), caches, strict=True))
    found, wanted = (one.prefill(cache, TEXT, [20, 9], chunk=16) for one, cache in pairs)
    assert close(found, wanted)
    for _ in range(4):
        token = wanted.argmax(-1)
        found, wanted = (one.step(cache, token) for one, cache in pairs)
        assert close(found, wanted)
    rows = (cache.dequantized(1) for cache in caches)
    for own, whole in zip(*rows, strict=True):
        assert own.shape == whole.shape and close(own, whole)
    for one in (spread, alone):
        one.model.set_attn_implementation("kvquant")
    pasts = [QuantizedCache(one.model) for one in (spread, alone)]
    assert_alike(run(spread.model, pasts[0], 1), run(alone.model, pasts[1], 1), limit=CODES)
    assert pasts[0].kv is not None and pasts[0].kv.num_q_heads == caches[0].num_q_heads


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether logits are those but for sums in another order, and a few rows rounded otherwise."""
    return bool((found - wanted).norm() < 5e-3 * wanted.norm())


def main(device: str, file: str, rank: int, world: int, folder: Path) -> None:
    own = join(device, file, rank, world)
    torch.set_default_device(None)
    load = transformers.AutoModelForCausalLM.from_pretrained
    alone: Any = load(folder, attn_implementation="kvquant")
    alone.to(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer transformers has DistributedConfig
        model = load(folder, attn_implementation="kvquant", tp_plan="auto")
    assert model.device == own
    share = alone.config.num_key_value_heads // world
    heads = slice(rank * share, (rank + 1) * share)
    plan = CachePlan.load(folder / "plan.safetensors")
    for options in ({"k_format": "int8", "v_format": "int4-g4"}, {"plan": plan}):
        for beams in (1, 2):
            spread, whole = (QuantizedCache(one, recent_len=8, **options) for one in (model, alone))
            assert_alike(run(model, spread, beams), run(alone, whole, beams), limit=CODES)
            compare(spread, whole, heads)
    assert spread.kv is not None and whole.kv is not None
    save_cache(spread.kv, folder / f"cache-{rank}.safetensors")
    again = QuantizedCache(
        load_cache(
            folder / f"cache-{rank}.safetensors", plan=plan.of_heads(range(8)[heads]), device=own
        )
    )
    places = whole.kv.positions[:, None]
    step = {"position_ids": places, "use_cache": True}
    with torch.no_grad():
        token = TEXT[:, :1].repeat(2, 1).to(own)
        found = model(token, **again.argument, **step).logits
        wanted = alone(token, **whole.argument, **step).logits
    assert torch.allclose(found, wanted, atol=1e-2)
    check_compiled(model)
    check_cached_model(folder, rank, heads, plan)
    if (folder / "latents").exists():
        check_latents(folder / "latents", world)
    dist.barrier()
    dist.destroy_process_group()
    print("right")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
