"""What a config says of the layers that a cache holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvquant.errors import UnsupportedModelError
from kvquant.hf.configs import CacheLayers, Turn, cache_layers, layer_windows


def config(**changes: Any) -> SimpleNamespace:
    usual = {"model_type": "tiny", "num_hidden_layers": 3, "num_attention_heads": 4}
    return SimpleNamespace(**(usual | {"hidden_size": 256} | changes))


def test_a_plain_config_holds_all_layers() -> None:
    found = cache_layers(config())
    assert found == CacheLayers((0, 1, 2), 4, (64,) * 3, (64,) * 3, (None,) * 3)
    found = cache_layers(config(num_key_value_heads=2, head_dim=192, v_head_dim=128))
    assert (found.num_kv_heads, found.k_dims, found.v_dims) == (2, (192,) * 3, (128,) * 3)


def test_layers_that_share_own_no_place() -> None:
    modes = ["store", "reuse", None, "reuse_but_more"]
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    found = config(num_hidden_layers=4, kv_sharing_modes=modes, layer_types=kinds, sliding_window=9)
    assert cache_layers(found).places == (0, 2)
    assert cache_layers(found).windows == (9, None)
    assert layer_windows(found) == [9, 9, None, None]
    assert cache_layers(config(num_kv_shared_layers=1)).places == (0, 1)
    mixed = config(layer_types=["full_attention"] * 2 + ["sliding_attention"], global_head_dim=128)
    assert cache_layers(mixed).k_dims == (128, 128, 64)


def test_layers_may_differ_in_head_dim_but_not_in_heads() -> None:
    parts = [config(head_dim=dim, num_key_value_heads=2) for dim in (64, 128, 64)]
    found = cache_layers(config(per_layer_config=parts))
    assert found.k_dims == found.v_dims == (64, 128, 64)
    parts[1].num_key_value_heads = 4
    with pytest.raises(UnsupportedModelError, match="layer 0 has 2 and layer 1 4: a KVCache has"):
        cache_layers(config(per_layer_config=parts))
    listed = config(num_key_value_heads=[2, 2, 2])
    assert cache_layers(listed).num_kv_heads == 2
    with pytest.raises(UnsupportedModelError, match="layer 0 has 1 and layer 2 2"):
        cache_layers(config(num_key_value_heads=[1, 1, 2]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder": ({"is_encoder_decoder": True}, "tiny models have an encoder before the decoder"),
    "no layers": ({"num_hidden_layers": None}, "does not tell its layers"),
    "no heads": ({"num_attention_heads": None}, "tiny models have no attention heads"),
    "latent": ({"kv_lora_rank": 512}, "tiny models have multi-head latent attention"),
    "head_dim": ({"head_dim": 72}, "layer 0 of this tiny model: head_dim 72 is not supported"),
    "values": ({"v_head_dim": 512}, "layer 0 of this tiny model: head_dim 512 is not supported"),
    "states": (
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer 1 is 'linear_attention'",
    ),
    "images": (
        {"cross_attention_layers": [2, 1]},
        "layer 1 of this tiny model attends to an image",
    ),
    "index": ({"layer_types": ["indexed_attention"] * 3}, "layer 0 is 'indexed_attention'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_cache_holds_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message) as told:
        cache_layers(config(**changes))
    assert "\n" not in str(told.value)


def test_angles_that_depend_on_the_length_are_known() -> None:
    long = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    assert cache_layers(config(rope_parameters=long)).turn == Turn("longrope", 32, False)
    dynamic: dict[str, Any] = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}
    found = config(rope_parameters=dynamic, max_position_embeddings=64)
    assert cache_layers(found).turn == Turn("dynamic", 64, True)
    for rope in (None, {}, {"rope_type": "default"}, {"full_attention": {"rope_type": "yarn"}}):
        assert cache_layers(config(rope_parameters=rope)).turn is None


def test_queries_that_are_scaled_by_their_position_are_known() -> None:
    tuned: dict[str, Any] = {"attn_temperature_tuning": True, "floor_scale": 8192}
    assert cache_layers(config(**tuned, no_rope_layers=[1, 0, 1])).scaled_from == 8191
    for other in (
        tuned | {"no_rope_layers": [1, 1, 1]},
        {"attn_temperature_tuning": False, "floor_scale": 8192, "no_rope_layers": [0, 0, 0]},
    ):
        assert cache_layers(config(**other)).scaled_from is None
