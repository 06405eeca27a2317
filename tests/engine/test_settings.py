"""What pages of an engine hold: settings, where rows lie, bases of a rank's heads. Without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan

from kvquant import CachePlan, ConfigError, ShapeError, UnsupportedError, append_rows
from kvquant.engine.settings import LatentSettings, Settings, rank_heads, tell_settings


@pytest.mark.parametrize(
    "names", [("int4-g4", "int4-g4"), ("int8", "int4-g4"), ("int4", "bf16"), ("int3", "int2")]
)
@pytest.mark.parametrize("page_size", [16, 128])
def test_pages_hold_the_rows_of_both_sides_aligned_and_apart(
    names: tuple[str, str], page_size: int
) -> None:
    layout = Settings(*names).layout(2, 128, 64)
    pages = torch.full((5, 2, page_size, layout.token_bytes), 255, dtype=torch.uint8)
    k_rows, v_rows = layout.views(pages)
    assert k_rows.shape == (5, 2, page_size, layout.k_format.row_bytes)
    assert v_rows.shape == (5, 2, page_size, layout.v_format.row_bytes)
    assert k_rows.numel() + v_rows.numel() == pages.numel(), "no byte is of neither"
    for rows, fmt in ((k_rows, layout.k_format), (v_rows, layout.v_format)):
        assert rows.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
        starts = rows.data_ptr() - pages.data_ptr(), rows.stride(0), rows.stride(1)
        assert not any(start % 16 for start in starts)  # as the CUDA kernels want pages
        assert rows.stride(2) == fmt.row_bytes  # without gaps, as they copy them fastest
    k_rows.fill_(0)
    assert bool((v_rows == 255).all()) and not k_rows.any(), "they share no byte"


@pytest.mark.parametrize(
    "names", [("int4-g4", "int4-g4"), ("int8", "int4-g4"), ("int3", "int3"), ("int3", "int2")]
)
def test_a_part_of_a_page_is_the_page_of_a_part_of_the_heads(names: tuple[str, str]) -> None:
    """vLLM moves pages between engines of unlike tensor parallelism by cutting their heads."""
    page_size, heads = 16, 4
    whole = Settings(*names).layout(heads, 128, 128)
    pages = torch.zeros(3, heads, page_size, whole.token_bytes, dtype=torch.uint8)
    k, v = torch.randn(2, 3 * page_size, heads, 128)
    slots = torch.arange(len(k))
    append_rows(k, v, *whole.views(pages), slots, whole.k_format, whole.v_format)
    for ranks in (2, 4):
        for rank in range(ranks):
            own = rank_heads(heads, rank, ranks)
            part = Settings(*names).layout(len(own), 128, 128)
            cut = pages.unflatten(1, (ranks, -1))[:, rank].contiguous()
            wanted = torch.zeros_like(cut)
            own_k, own_v = k[:, own].contiguous(), v[:, own].contiguous()
            rows = part.views(wanted)
            append_rows(own_k, own_v, *rows, slots, part.k_format, part.v_format)
            assert torch.equal(cut, wanted), f"rank {rank} of {ranks}"


@pytest.mark.parametrize("names", [("int8", "int3"), ("int8", "int2"), (None, None)])
def test_rows_of_2_bits_are_warned_of(
    names: tuple[str | None, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="kvquant"):
        tell_settings(Settings(*names), None, "")
    k_name, v_name = (name or "default" for name in names)
    assert f"K rows {k_name}, V rows {v_name}" in caplog.text
    assert ("rows of 2 bits change" in caplog.text) == ("int2" in names)
    assert len(caplog.records) == 1 + ("int2" in names)


@pytest.mark.parametrize(
    ("names", "token_bytes"),
    [
        ((None, None), 240),
        (("int4-g4", "int4-g4"), 160),
        (("int8", "int4-g4"), 212),
        (("int4", "int3"), 120),
    ],
)
def test_the_bytes_are_those_of_the_rows(
    names: tuple[str | None, str | None], token_bytes: int
) -> None:
    layout = Settings(*names).layout(8, 128, 128)
    assert layout.token_bytes == token_bytes
    assert sum(layout.row_bytes(16)) == token_bytes
    for heads, room in ((8, token_bytes - 4), (9, token_bytes)):
        with pytest.raises(ShapeError, match=rf"8, page_size, {token_bytes} or more\]"):
            layout.views(torch.zeros(3, heads, 16, room, dtype=torch.uint8))
    longer = layout.views(torch.zeros(3, 8, 16, 256, dtype=torch.uint8))
    assert [rows.stride(2) for rows in longer] == list(layout.row_bytes(16)), "still dense"


def test_pages_of_no_format_are_refused() -> None:
    for dims in ((32, 64), (64, 320), (72, 64)):
        with pytest.raises(ConfigError, match=r"head_dim (32|320|72) is"):
            Settings("int8", "int4-g4").layout(8, *dims)


def test_pages_whose_heads_are_not_contiguous_are_refused() -> None:
    layout = Settings("int8", "int8").layout(2, 128, 128)
    tokens_first = torch.zeros(3, 16, 2, layout.token_bytes, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="the last two axes contiguous"):
        layout.views(tokens_first.transpose(1, 2))


PROMPTS = "'8-bit': it may be one of ('16-bit', 'rows')"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Settings, None, "the config is None: give a dict with k_format, v_format, plan, prompts"),
        (Settings, {"k_fromat": "int8"}, "give a dict with k_format"),
        (Settings, {"v_format": "int5"}, "format 'int5' does not exist"),
        (Settings, {"k_format": "int5"}, "format 'int5' does not exist"),
        (Settings, {"k_format": "int8", "v_format": 4}, "format 4 is not possible"),
        (Settings, {"k_format": "int8", "prompts": "8-bit"}, PROMPTS),
        (Settings, {"recent_len": -1}, "recent_len -1 is not possible"),
        (Settings, {"accept_loss": 1}, '"accept_loss" is 1: give true or false'),
        (Settings, {"recent_len": 8, "prompts": "rows"}, "leave one of them out"),
        (LatentSettings, None, "the config, for a model with latent attention, is None: give a"),
        (LatentSettings, {"k_format": "int8"}, "give a dict with format, plan, prompts"),
        (LatentSettings, {}, 'lacks format: give {"format": "int4-g8+int8-g4"}'),
        (LatentSettings, {"format": "int5"}, "format 'int5' does not exist"),
        (LatentSettings, {"format": "int4-g8", "prompts": "8-bit"}, PROMPTS),
    ],
)
def test_settings_that_are_not_possible(kind: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind.parse(given, "the config")
    assert message in str(caught.value)


def test_a_plan_that_is_not_there_is_told_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"no plan 'p' in {tmp_path}: give \"plan\" the"):
        Settings.parse({"plan": "p"})


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, ("int8-g8", "int4-g4")),
        ({"k_format": "int8"}, ("int8", "int4-g4")),
        ({"v_format": "int8"}, ("int8-g8", "int8")),
    ],
)
def test_a_format_that_is_not_given_is_the_default(
    given: dict[str, str], rows: tuple[str, str]
) -> None:
    settings = Settings.parse(given)
    assert (settings.k_format, settings.plan) == (given.get("k_format"), None)
    layout = settings.layout(2, 128, 128)
    assert (str(layout.k_format), str(layout.v_format)) == rows
    assert not settings.prompts_from_rows
    assert Settings.parse({"k_format": "int8", "prompts": "rows"}).prompts_from_rows


def save_plan(path: Path, *, kept: bool) -> str:
    """A plan of 3 layers and 4 KV heads, whose last layer is kept in 16 bit or not."""
    plan = example_plan(num_kv_heads=4)
    layers = plan.facts["layers"]
    if not kept:
        layers[-1] = layers[1]
    plan.tensors["k.offset"][:] = torch.randn(plan.tensors["k.offset"].shape)
    plan.save(path / "plan.safetensors")
    return str(path / "plan.safetensors")


def test_a_plan_gives_each_rank_the_bases_of_its_heads(tmp_path: Path) -> None:
    path = save_plan(tmp_path, kept=False)
    with pytest.raises(ConfigError, match="has one format beside a plan: give both, or none"):
        Settings.parse({"plan": path, "v_format": "int8"})
    settings = Settings.parse({"plan": path, "k_format": "int4", "v_format": "int8"})
    assert (settings.k_format, settings.v_format) == ("int4", "int8")
    assert settings.plan is not None
    whole, layout = settings.plan.layers[1], settings.layout(2, 64, 64)
    for rank in range(2):
        heads = rank_heads(4, rank, 2)
        basis = settings.basis(1, heads, layout)
        assert basis is not None
        for ours, all_heads in zip(basis, whole, strict=True):
            assert ours.kind == all_heads.kind
            torch.testing.assert_close(ours.offset, all_heads.offset[2 * rank : 2 * rank + 2])
            assert all_heads.clip is not None
            torch.testing.assert_close(ours.clip, all_heads.clip[2 * rank : 2 * rank + 2])
    with pytest.raises(UnsupportedError, match="the plan has no layer 3"):
        settings.basis(3, [0, 1], layout)
    with pytest.raises(ShapeError, match="layer 1 has KV head 4 of head_dim 64, the plan 4 heads"):
        settings.basis(1, [3, 4], layout)
    with pytest.raises(UnsupportedError, match="it has 2 KV heads on this rank, other layers 1: l"):
        settings.basis(1, [3], layout)


def test_layers_have_the_formats_of_a_plan(tmp_path: Path) -> None:
    """Pages without formats of a layer, those of a draft model too, hold the longest rows."""
    settings = Settings.parse({"plan": save_plan(tmp_path, kept=True)})
    assert [settings.of_layer(i).layout(2, 64, 64).token_bytes for i in range(3)] == [
        36 + 68,
        36 + 36,
        128 + 128,
    ]
    assert settings.layout(2, 64, 64).token_bytes == 256
    assert "K rows int4, V rows int8 in 1 layers; " in str(settings)
    with pytest.raises(UnsupportedError, match="the plan has no layer 3"):
        settings.of_layer(3)


def test_layers_get_longer_rows_where_a_plan_has_too_many_pairs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pairs become one where that adds the fewest bytes; no layer gets shorter rows than asked."""
    plan = example_plan(7)
    names = ["int4 int4", *3 * ["int4 int4-g4"], "int4-g4 int4", "int4 int8"]
    pairs = [tuple(name.split()) for name in names]
    formats = {(i, side): pair[j] for i, pair in enumerate(pairs) for j, side in enumerate("kv")}
    settings = Settings.parse({"plan": plan.with_layer_formats(formats)})
    assert settings.plan is not None
    wanted = 4 * [("int4", "int4-g4")] + 2 * [("int4-g4", "int8")] + [("bf16", "bf16")]
    assert settings.plan.formats == wanted
    assert "the plan has 5 pairs of formats, and pages have 3" in caplog.text


def test_pairs_become_one_with_the_more_accurate_rows() -> None:
    """Rows of fp8 are as long as those of int8, or longer with groups, and less accurate."""
    for fp8 in ("fp8", "fp8-g8"):
        names = [("int8", fp8), (fp8, "int8"), ("int4", "int4"), ("int4-g4", "int4-g4")]
        formats = {
            (i, side): pair[j] for i, pair in enumerate(names) for j, side in enumerate("kv")
        }
        settings = Settings.parse({"plan": example_plan(4 + 1).with_layer_formats(formats)})
        assert settings.plan is not None
        assert settings.plan.formats[:2] == 2 * [("int8", "int8")]


def test_heads_are_shared_out_as_vllm_does() -> None:
    assert [rank_heads(8, rank, 4) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [rank_heads(2, rank, 4) for rank in range(4)] == [[0], [0], [1], [1]]
    assert rank_heads(3, 0, 1) == [0, 1, 2]


def test_a_plan_whose_formats_were_chosen_for_a_window_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = example_plan()  # with a limit
    seen = made.facts["measured"] | {"sink_len": 4, "recent_len": 128, "bits": 5.0}
    plan = CachePlan({**made.facts, "windowed": seen}, made.tensors)
    for given in ({"recent_len": 128}, {"k_format": "int4", "v_format": "int4"}):
        Settings.parse({"plan": plan, **given})
        assert not caplog.records
    Settings.parse({"plan": plan, "recent_len": 64})
    free = {**plan.facts, "limit": plan.facts["limit"] | {"max_kl": None}}
    Settings.parse({"plan": CachePlan(free, made.tensors)})  # of one format
    (told,) = caplog.messages
    assert "128 recent tokens in 16 bit, and recent_len is 64: KL 0.0066" in told
