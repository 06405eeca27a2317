"""Every door has the same formats by default, and equal arguments mean equal formats."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvquant
from kvquant import KVCache, LatentKVCache, PagedKVCache
from kvquant.cli.main import main
from kvquant.engine.settings import Settings
from kvquant.errors import ConfigError
from kvquant.evaluation.caches import parse_cache
from kvquant.io.export import quantize_raw
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.rehearsal import rehearse
from kvquant.rows.defaults import default_format
from kvquant.rows.format import HEAD_DIMS

pytest.importorskip("transformers")
from safetensors.torch import save_file
from tiny_models import tiny_model

from kvquant import ContextParallelCache, QuantizedCache
from kvquant.calibration.fidelity import Scheme, options_of

DIM = 64  # head_dim of the tiny model
Names = tuple[str, str]
GIVEN: list[dict[str, Any]] = [{}, {"k_format": "int8"}, {"v_format": "int8"}]
GIVEN += [{"k_format": "int4", "v_format": "int4-g2"}]
WINDOWS = [{}, {"sink_len": 0, "recent_len": 0}, {"sink_len": 4, "recent_len": 64}]


def expected(given: dict[str, Any], sink_len: int = 4, recent_len: int = 128) -> Names:
    k, v = (default_format(side, DIM, sink_len, recent_len) for side in "kv")
    return given.get("k_format", k), given.get("v_format", v)


def of_cache(cache: Any) -> Names:
    first = cache.layers[0]
    return str(first.k_format), str(first.v_format)


def of_pages(cache: PagedKVCache) -> Names:
    first = cache.rows.layers[0]
    return str(first.k_format), str(first.v_format)


def contiguous(given: dict[str, Any]) -> Names:
    return of_cache(KVCache(1, 1, 2, DIM, 256, **given))


def paged(given: dict[str, Any]) -> Names:
    return of_pages(PagedKVCache(1, 2, DIM, num_pages=4, max_seq_len=256, **given))


def paged_for_model(given: dict[str, Any]) -> Names:
    cache = PagedKVCache.for_model(tiny_model("Llama").model, 4, max_seq_len=128, **given)
    return of_pages(cache)


def transformers_cache(given: dict[str, Any]) -> Names:
    model = tiny_model("Llama").model
    model.set_attn_implementation("kvquant")
    cache = QuantizedCache(model, accept_loss=True, **given)
    model(torch.arange(4)[None], **cache.argument)
    return of_cache(cache.kv)


def cached_model(given: dict[str, Any]) -> Names:
    return of_cache(tiny_model("Llama").new_cache(1, 256, accept_loss=True, **given))


def of_a_text(given: dict[str, Any]) -> Names:
    """As kvquant evaluate, check and lm-eval make them."""
    names = [given.get(name, "default") for name in ("k_format", "v_format")]
    text = "/".join(names)
    for name, option in (("sink_len", "sinks"), ("recent_len", "recent")):
        text += f",{option}={given[name]}" if name in given else ""
    scheme = parse_cache(text)
    return of_cache(tiny_model("Llama").new_cache(1, 256, **options_of(scheme, is_latent=False)))


def of_files(given: dict[str, Any], folder: Path) -> Names:
    path = folder / "raw.safetensors"
    k, v = torch.randn(2, 1, 2, 3, DIM).bfloat16()
    save_file({"layers.0.k": k, "layers.0.v": v}, path)
    return of_cache(quantize_raw(path, **given))


DOORS: dict[str, Callable[[dict[str, Any]], Names]] = {
    one.__name__: one
    for one in (contiguous, paged, paged_for_model, transformers_cache, cached_model, of_a_text)
}


@pytest.mark.parametrize("window", WINDOWS, ids=["window", "none", "small"])
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "+".join(given) or "nothing")
@pytest.mark.parametrize("door", DOORS)
def test_equal_arguments_mean_equal_formats(
    door: str, given: dict[str, Any], window: dict[str, Any]
) -> None:
    assert DOORS[door]({**given, **window}) == expected(given, **window)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "+".join(given) or "nothing")
def test_raw_tensors_get_them_too(given: dict[str, Any], tmp_path: Path) -> None:
    assert of_files(given, tmp_path) == expected(given)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "+".join(given) or "nothing")
def test_engines_have_no_window(given: dict[str, Any]) -> None:
    layout = Settings.parse(given).layout(2, DIM, DIM)
    assert (str(layout.k_format), str(layout.v_format)) == expected(given, 0, 0)


def test_ranks_have_the_cache_that_they_are_given() -> None:
    parameters = inspect.signature(ContextParallelCache).parameters
    assert not {"k_format", "v_format"} & set(parameters)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_there_is_a_kernel_for_the_default(head_dim: int, arch: str) -> None:
    """But of 16-bit rows of 512, which the cache of GPUs with less shared memory cannot hold."""
    for window in ({}, {"sink_len": 0, "recent_len": 0}):
        if head_dim == 512 and arch == "sm_89" and not window:
            continue
        with rehearse(GPUS[arch]) as noted:
            cache = KVCache(1, 2, 2, head_dim, 512, device="meta", **window)  # type: ignore[arg-type]
            k, v, q = (
                torch.empty(2, *shape, head_dim, dtype=torch.bfloat16, device="meta")
                for shape in ((2, 1), (2, 1), (8,))
            )
            cache.step(0, q, k, v)
        assert noted.kernels


def test_no_signature_has_a_format_of_its_own() -> None:
    """Functions and classes that take formats have None by default, or ask for them."""
    found = {}
    for name in kvquant.__all__:
        one = getattr(kvquant, name)
        if not callable(one) or (isinstance(one, type) and issubclass(one, Exception)):
            continue
        for parameter in inspect.signature(one).parameters.values():
            if parameter.name in ("k_format", "v_format"):
                found[name] = parameter.default
    assert {"KVCache", "PagedKVCache", "QuantizedCache"} <= found.keys()
    assert set(found.values()) == {None, inspect.Parameter.empty}


def test_no_command_has_a_format_of_its_own() -> None:
    for name, command in main.commands.items():
        for option in command.params:
            if option.name in ("formats", "both", "k_format", "v_format", "caches", "fmt"):
                default = option.to_info_dict()["default"]
                assert default in (None, (), ("default",)), (name, option.name, default)


def test_plugins_need_no_format() -> None:
    sglang = (Path(kvquant.__file__).parent / "sglang" / "environment.py").read_text()
    assert 'DEFAULT = "{}"' in sglang
    example = json.loads(importlib.import_module("kvquant.vllm.plugin").EXAMPLE)
    assert str(Settings.parse(example["kvquant"])) == "K rows default, V rows default"


def test_latent_rows_have_their_own() -> None:
    cache = LatentKVCache(num_layers=1, batch=1, max_seq_len=64)
    assert str(cache.formats[0]) == "int8-g4"  # and RoPE parts in 16 bit
    assert options_of(Scheme("default", "default", 0, 0, True), is_latent=True).keys() == {
        "sink_len",
        "recent_len",
        "accept_loss",
    }


BAD_WINDOWS: list[dict[str, Any]] = [{"recent_len": None}, {"recent_len": "3"}, {"sink_len": "a"}]


@pytest.mark.parametrize("window", BAD_WINDOWS, ids=str)
def test_a_window_of_no_size_is_refused_at_every_door(
    window: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model("Llama").model
    model.set_attn_implementation("kvquant")
    path = tmp_path / "raw.safetensors"
    save_file({f"layers.0.{side}": torch.zeros(1, 2, 4, DIM) for side in "kv"}, path)
    doors: list[Callable[[], object]] = [
        lambda: KVCache(1, 1, 2, DIM, 256, **window),
        lambda: kvquant.CachedModel(model).new_cache(1, 16, **window),
        lambda: PagedKVCache.for_model(model, 4, **window),
        lambda: quantize_raw(path, **window),
    ]
    if None not in window.values():  # its own default
        doors.append(lambda: QuantizedCache(model, **window))
    for door in doors:
        with pytest.raises(ConfigError, match="is not possible: use a whole number"):
            door()
