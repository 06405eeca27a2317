"""What a config says of the layers that a cache holds."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import assert_refused

from kvquant.errors import UnsupportedModelError
from kvquant.hf.models.configs import CacheLayers, Turn, cache_layers, layer_windows


def config(**changes: Any) -> SimpleNamespace:
    usual = {"model_type": "tiny", "num_hidden_layers": 3, "num_attention_heads": 4}
    return SimpleNamespace(**(usual | {"hidden_size": 256} | changes))


def test_a_plain_config_holds_all_layers() -> None:
    found = cache_layers(config())
    assert found == CacheLayers((0, 1, 2), 4, (64,) * 3, (64,) * 3, (None,) * 3, 3)
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
    assert found.k_dims == found.v_dims == (64, 128, 64) and not found.others
    found.check_whole()
    parts[1].num_key_value_heads = 4
    found = cache_layers(config(per_layer_config=parts))
    assert (found.places, found.num_kv_heads, found.k_dims) == ((0, 2), 2, (64, 64))
    assert found.others == {1: "has 4 KV heads, where a KVCache has one number for all, 2"}
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has 4 KV heads, .* does not serve"):
        found.check_whole()
    assert cache_layers(config(num_key_value_heads=[2, 2, 2])).num_kv_heads == 2
    # layers that keep all tokens decide
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    mixed = config(num_key_value_heads=[4, 4, 2], layer_types=kinds, sliding_window=9)
    assert (cache_layers(mixed).places, cache_layers(mixed).num_kv_heads) == ((2,), 2)


def test_layers_that_no_kv_cache_holds_are_told_with_the_reason() -> None:
    types = ["full_attention", "linear_attention", "full_attention"]
    chunks = {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}
    rows = [config(head_dim=dim) for dim in (64, 72, 64)]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layer_types": types}, "is 'linear_attention', which keeps"),
        ({"cross_attention_layers": [1]}, "attends to an image or an encoder"),
        ({"per_layer_config": rows}, "has rows that no format has: head_dim 72 is not supported"),
        (chunks | {"attention_chunk_size": 32}, "attends to chunks of 32 tokens: with max_seq_len"),
    ]
    for changes, reason in cases:
        found = cache_layers(config(**changes), longest=None)
        assert found.places == (0, 2), reason
        assert list(found.others) == [1] and found.others[1].startswith(reason)


def test_chunks_that_hold_the_longest_sequence_are_held() -> None:
    chunked = config(layer_types=["chunked_attention"] * 3, attention_chunk_size=32)
    assert cache_layers(chunked, longest=32).places == (0, 1, 2)
    with pytest.raises(UnsupportedModelError, match="layer 0 attends to chunks of 32 tokens"):
        cache_layers(chunked, longest=33)


def test_models_without_a_layer_that_a_kv_cache_holds_are_refused_in_one_line() -> None:
    latent: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    no_rows = "0 has latent rows that no format has, of 512 latents and 48 RoPE elements"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"is_encoder_decoder": True}, "tiny models have an encoder before the decoder"),
        ({"num_hidden_layers": None}, "does not tell its layers"),
        ({"num_attention_heads": None}, "tiny model has no attention heads"),
        (latent | {"qk_rope_head_dim": 48}, no_rows),
        (latent | {"index_topk": 8}, "layer 0 attends to tokens that an indexer chooses"),
        (latent | {"sliding_window": 8}, "layer 0 has latent rows and a sliding window"),
        ({"head_dim": 72}, "layer 0 has rows .*: head_dim 72 is not supported"),
        ({"v_head_dim": 320}, "layer 0 has rows .*: head_dim 320 is not supported"),
        ({"layer_types": ["indexed_attention"] * 3}, "layer 0 is 'indexed_attention'"),
    ]
    for changes, message in cases:
        call = partial(cache_layers, config(**changes))
        assert_refused(UnsupportedModelError, (call, rf"\A.*{message}.*\Z"))


def test_latent_rows_are_those_of_one_head() -> None:
    found = cache_layers(config(kv_lora_rank=512, qk_rope_head_dim=64))
    assert found.are_latent and found.num_kv_heads == 1
    assert (found.k_dims, found.v_dims) == ((512,) * 3, (64,) * 3)
    assert not cache_layers(config()).are_latent


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
