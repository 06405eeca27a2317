"""What identifies an object in LMCache, as kvquant/lmcache/README.md says; only where both are."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")  # LMCache's own
for name in ("vllm", "lmcache"):
    pytest.importorskip(name, exc_type=ModuleNotFoundError)


def of_key(adapter: int | None = None, salt: str | None = None, image: str | None = None) -> Any:
    """What vLLM's connector gives LMCache of a request: token ids and a salt, no more."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_mp_connector as connector
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    images = []
    if image is not None:
        at = PlaceholderRange(offset=0, length=8)
        images = [MultiModalFeatureSpec(None, "image", image, at)]
    tracker = connector.LMCacheMPRequestTracker(
        Request(
            "id",
            [7] * 8,
            SamplingParams(),
            None,
            lora_request=adapter and LoRARequest(f"adapter {adapter}", adapter, f"/{adapter}"),
            cache_salt=salt,
            mm_features=images,
        )
    )
    return list(tracker.all_token_ids), tracker.cache_salt


def test_only_a_salt_parts_adapters_and_images() -> None:
    """Should a later vLLM tell them apart itself, the page is to be changed."""
    assert of_key(1) == of_key(2) == of_key() == of_key(image="a") == of_key(image="b")
    assert of_key(1, "adapter 1") != of_key(2, "adapter 2") != of_key()


def test_objects_of_two_salts_have_two_keys() -> None:
    from lmcache.v1.distributed.api import ObjectKey

    one, two = (ObjectKey(b"chunk", "model", 0, cache_salt=salt) for salt in ("one", "two"))
    assert one != two and one == ObjectKey(b"chunk", "model", 0, cache_salt="one")
    with pytest.raises(ValueError, match="cache_salt must not contain"):
        ObjectKey(b"chunk", "model", 0, cache_salt="some/adapter")


def test_sglang_makes_a_salt_of_the_adapter() -> None:
    connector = pytest.importorskip("lmcache.integration.sglang.unified_lmcache_mp_connector")
    kinds: list[Any] = [kind for kind in vars(connector).values() if isinstance(kind, type)]
    salt = next(kind.build_cache_salt for kind in kinds if hasattr(kind, "build_cache_salt"))
    assert len({salt(None, "adapter 1"), salt(None, "adapter 2"), salt(None, None)}) == 3
