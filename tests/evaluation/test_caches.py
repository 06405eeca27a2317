"""The one grammar of caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_plan import example_plan
from refusals import assert_refused

from kvquant.calibration.fidelity import Planned, Scheme
from kvquant.errors import CheckpointError, ConfigError
from kvquant.evaluation.caches import parse_cache


def test_caches_of_heads_and_of_latents() -> None:
    for text, wanted in (
        ("int8", Scheme("int8", "int8", 4, 128)),
        ("int8/int4-g4", Scheme("int8", "int4-g4", 4, 128)),
        (" int4-g4 , recent=0, sinks=0", Scheme("int4-g4", "int4-g4")),
        ("bf16,recent=64", Scheme("bf16", "bf16", 4, 64)),
    ):
        assert parse_cache(text) == wanted, text
    assert parse_cache("int4-g8+int8-g4", latent=True) == Scheme("int4-g8", "int8-g4", 4, 128)
    for text in ("int4-g8+int8-g4", "int4-g8+int4-g8"):
        assert str(parse_cache(text, latent=True)).startswith(f"{text} + 4 sinks")
    assert parse_cache("int4-g8,sinks=1", latent=True) == Scheme("int4-g8", "bf16", 1, 128)


def test_a_plan_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    example_plan(2, 2, 64).save(path)
    found = parse_cache(f"{path},recent=16")
    assert isinstance(found, Planned)
    assert (found.name, found.sink_len, found.recent_len) == ("mine", 4, 16)
    path.write_bytes(b"no plan")
    with pytest.raises(CheckpointError):
        parse_cache(str(path))


def test_what_is_no_cache_is_refused() -> None:
    nearest = "'q4_1' is no format: .*; the nearest here is 'int4-g4'"
    assert_refused(
        ConfigError,
        (lambda: parse_cache("int5"), r"'int5' is no format: write K\[/V\].*int4-g4"),
        (lambda: parse_cache(""), "'' is no format"),
        (lambda: parse_cache("int8/q4_1"), nearest),
        (lambda: parse_cache("int4/int8/int8"), "has 3 formats"),
        (lambda: parse_cache("int4,last=3"), "'last=3' is no option"),
        (lambda: parse_cache("int4,recent=-1"), "'recent=-1' is no option"),
        (lambda: parse_cache("int4,recent"), "'recent' is no option"),
        (lambda: parse_cache("int4,sinks=1,sinks=2"), "has sinks= twice"),
        (lambda: parse_cache("int4+int8"), r"this model keeps K and V of heads \(K/V\)"),
        (lambda: parse_cache("int4/int8", latent=True), "keeps latents and RoPE parts"),
    )
