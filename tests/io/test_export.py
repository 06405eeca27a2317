"""Raw tensors in and out, and the bytes for FBGEMM and xFormers by decoders of our own (3 s)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused
from safetensors.torch import load_file, save_file

from kvquant import (
    KVCache,
    LatentFormat,
    LatentKVCache,
    RowFormat,
    dequantize_rows,
    quantize_rows,
    save_cache,
)
from kvquant.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    ShapeError,
    UnsupportedError,
)
from kvquant.io.export import RawFile, export_cache, quantize_raw

LENS = [13, 6]
ROWS: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4"}


def make_raw(
    dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, layers: int = 2, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{i}.{side}": (torch.randn(2, 3, 13, head_dim, generator=generator) * scale).to(
            dtype
        )
        for i in range(layers)
        for side in "kv"
    }
    for x in tensors.values():
        x[1, :, 6:] = 0
    return tensors | {"seq_lens": torch.tensor(LENS, dtype=torch.int32)}


def quantize(tmp_path: Path, raw: dict[str, torch.Tensor], **options: Any) -> KVCache:
    save_file(raw, tmp_path / "raw.safetensors")
    return quantize_raw(tmp_path / "raw.safetensors", **options)


def export(tmp_path: Path, cache: KVCache, to: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    notes = export_cache(cache, tmp_path / "out.safetensors", to)
    return load_file(tmp_path / "out.safetensors"), notes


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_exact_rows_go_out_as_they_came_in(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    raw = make_raw(dtype)
    cache = quantize(tmp_path, raw, k_format=name, v_format=name, sink_len=2, recent_len=3)
    assert cache.exact_format == name
    assert cache.seq_lens.tolist() == LENS and cache.max_seq_len == 13
    tensors, notes = export(tmp_path, cache, name)
    assert notes == []
    assert tensors.keys() == raw.keys()
    assert all(tensors[key].equal(raw[key]) for key in raw)


def test_quantize_raw_appends_what_the_file_holds(tmp_path: Path) -> None:
    raw = make_raw(torch.float32)
    raw["layers.1.v"] = raw["layers.1.v"][..., :64].contiguous()
    options: dict[str, Any] = {"sink_len": 1, "recent_len": 2, "max_seq_len": 20}
    cache = quantize(tmp_path, raw, k_format=["int4", "fp8"], v_format="int4-g2", **options)
    assert cache.max_seq_len == 20 and cache.exact_format == "bf16"
    v_formats = [RowFormat("int4", 2, 128), RowFormat("int4", 2, 64)]
    other = KVCache(2, 2, 3, 128, k_format=["int4", "fp8"], v_format=v_formats, **options)
    for i in range(2):
        other.append(i, raw[f"layers.{i}.k"], raw[f"layers.{i}.v"], LENS)
        for a, b in zip(cache.dequantized(i), other.dequantized(i), strict=True):
            assert a.equal(b)


@pytest.mark.parametrize("size", ["13", 13.5, True, 2**31])
def test_a_size_that_is_no_whole_number_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len .* is not possible"):
        quantize(tmp_path, make_raw(), max_seq_len=size)


def test_tokens_before_heads_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "raw.safetensors"
    for tokens, heads in ((40, 2), (129, 2), (8, 8)):
        x = torch.randn(1, tokens, heads, 64)
        save_file({"layers.0.k": x, "layers.0.v": x.clone()}, path)
        read = (
            rf"layers\.0\.k is \[1, {tokens}, {heads}, 64\], read as 1 sequences, {tokens} KV heads"
        )
        if tokens > 128:
            with pytest.raises(CheckpointError, match=rf"{read}.*so many.*transpose\(1, 2\)"):
                quantize_raw(path)
        elif tokens > heads:
            with pytest.warns(RuntimeWarning, match=rf"{read}.* 40 tokens of 2 heads, write"):
                quantize_raw(path)
        else:
            quantize_raw(path)


def test_raw_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(message: str, error: type[Exception] = CheckpointError, **changes: Any) -> None:
        raw = make_raw() | {name.replace("_", ".", 2): x for name, x in changes.items()}
        raw = {name: x for name, x in raw.items() if x is not None}
        raw = {name.replace("seq.lens", "seq_lens"): x for name, x in raw.items()}
        with pytest.raises(error, match=message):
            quantize(tmp_path, raw)

    refused(r"'layers\.0\.v' is missing", layers_0_v=None)
    refused(r"'layers\.7\.k' is missing or should not", layers_7_k=torch.zeros(2, 3, 13, 128))
    refused("'x' is missing or should not", x=torch.zeros(1))
    refused(r"layers\.1\.k is torch\.int32", layers_1_k=torch.zeros(2, 3, 13, 128).int())
    refused(r"layers\.1\.k is \[2, 3, 128\]", layers_1_k=torch.zeros(2, 3, 128))
    refused(r"layers\.1\.v is \[2, 3, 12, 128\]", layers_1_v=torch.zeros(2, 3, 12, 128))
    refused("seq_lens is torch.float32", seq_lens=torch.zeros(2))
    refused(r"seq_lens is \[14, 0\]", seq_lens=torch.tensor([14, 0]))
    refused(
        "head_dim 100", ConfigError, **{f"layers_{i}_k": torch.zeros(2, 3, 13, 100) for i in (0, 1)}
    )
    bad = make_raw()["layers.1.v"].clone()
    bad[1, 2, 3, 4] = float("nan")
    refused(r"layers\.1\.v\[1, 2, 3, 4\] is nan", NonFiniteError, layers_1_v=bad)
    latents = {"layers.0.latent": torch.zeros(1, 1, 5, 512), "layers.0.rope": torch.zeros(1)}
    save_file(latents, tmp_path / "latents")
    save_cache(KVCache(1, 1, 1, 64, 8), tmp_path / "cache.safetensors")
    (tmp_path / "text").write_text("not a safetensors file")
    with pytest.raises(FileNotFoundError):
        RawFile(tmp_path / "none")
    told = "a kvquant cache.*kvquant export FILE --to bf16"
    assert_refused(
        CheckpointError,
        (lambda: RawFile(tmp_path / "latents"), "latents and RoPE parts, which are not read back"),
        (lambda: RawFile(tmp_path / "cache.safetensors"), told),
        (lambda: RawFile(tmp_path / "text"), "no safetensors file"),
    )


# Decoders after the layouts' descriptions: FBGEMM's rows are bytes, xFormers' 32-bit words.


def fbgemm_int4(row: np.ndarray[Any, Any], groups: int) -> list[float]:
    """Values of one uint8 row: (scale, shift) fp16 pairs of all groups, then nibbles, low first."""
    params = row[: 4 * groups].view("<f2").astype(float)
    codes = [code for byte in row[4 * groups :] for code in (byte & 15, byte >> 4)]
    size = len(codes) // groups
    return [c * params[2 * (j // size)] + params[2 * (j // size) + 1] for j, c in enumerate(codes)]


def xformers_int4(words: np.ndarray[Any, Any], groups: int) -> list[float]:
    """Values of one int32 row: a word per group (low half scale), then words of 8 codes."""
    unsigned = [int(word) & 0xFFFFFFFF for word in words]
    halves = [np.array([w & 0xFFFF, w >> 16], "<u2").view("<f2") for w in unsigned[:groups]]
    codes = [word >> 4 * i & 15 for word in unsigned[groups:] for i in range(8)]
    size = len(codes) // groups
    return [
        c * float(halves[j // size][0]) + float(halves[j // size][1]) for j, c in enumerate(codes)
    ]


def e4m3(byte: int) -> float:
    """Value of an E4M3 number: 1 sign, 4 exponent (bias 7), 3 mantissa bits."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


LAYOUTS = [("fbgemm", 128, 1), ("fbgemm", 128, 8), ("xformers", 64, 4), ("xformers", 512, 2)]


@pytest.mark.parametrize("to, dim, groups", LAYOUTS)
def test_int4_export_decodes_by_the_other_layout(
    tmp_path: Path, to: str, dim: int, groups: int
) -> None:
    raw = make_raw(head_dim=dim)
    name = RowFormat("int4", groups, dim)
    cache = quantize(tmp_path, raw, k_format=name, v_format=name, sink_len=2, recent_len=3)
    packed = quantize(tmp_path, raw, k_format=name, v_format=name, sink_len=0, recent_len=0)
    tensors, notes = export(tmp_path, cache, to)
    assert "16-bit rows (up to 2 first and 3 last tokens) were quantized" in notes[0]
    if to == "fbgemm":
        assert tensors["seq_positions"].tolist() == [12, 5]
        assert "3 KV heads" in notes[1]
    else:
        assert tensors["seq_lens"].tolist() == LENS
    decode = fbgemm_int4 if to == "fbgemm" else xformers_int4
    for side, values in zip("KV", packed.dequantized(1), strict=True):
        rows = tensors[f"layers.1.cache_{side}"]
        width = dim // 2 + 4 * groups if to == "fbgemm" else dim // 8 + groups
        assert rows.shape == (2, 13, 3, width)
        assert rows.dtype == (torch.uint8 if to == "fbgemm" else torch.int32)
        assert not rows[1, 6:].any()
        for b, token, head in ((0, 0, 0), (0, 5, 2), (0, 12, 1), (1, 0, 1), (1, 5, 2)):
            # a token that was still exact is quantized from the same 16-bit values: the same bytes
            expected = values[b, head, token].tolist()
            assert decode(rows[b, token, head].numpy(), groups) == pytest.approx(expected, rel=1e-6)


def test_fp8_export_decodes_by_the_other_layouts(tmp_path: Path) -> None:
    cache = quantize(tmp_path, make_raw(), k_format="fp8", v_format="fp8", sink_len=0, recent_len=0)
    inside, notes = export(tmp_path, cache, "fbgemm")
    assert not any("16-bit" in note for note in notes)
    outside, notes = export(tmp_path, cache, "xformers")
    assert notes == []
    assert inside["layers.0.cache_V"].shape == (2, 13, 3, 132)
    assert outside["layers.0.cache_V"].shape == (2, 13, 3, 32)
    assert outside["layers.0.scale_shift_V"].shape == (2, 13, 3)
    values = cache.dequantized(0)[1]
    for b, token, head in ((0, 0, 0), (0, 12, 2), (1, 5, 1)):
        row = inside["layers.0.cache_V"][b, token, head].numpy()
        scale, shift = row[:4].view("<f2").astype(float)
        expected = values[b, head, token].tolist()
        assert [e4m3(c) * scale + shift for c in row[4:].tolist()] == pytest.approx(
            expected, rel=1e-6
        )
        words = outside["layers.0.cache_V"][b, token, head].tolist()
        word = int(outside["layers.0.scale_shift_V"][b, token, head]) & 0xFFFFFFFF
        scale, shift = np.array([word & 0xFFFF, word >> 16], "<u2").view("<f2").astype(float)
        codes = [(w & 0xFFFFFFFF) >> 8 * i & 255 for w in words for i in range(4)]
        assert [e4m3(c) * scale + shift for c in codes] == pytest.approx(expected, rel=1e-6)


def test_rows_without_an_equivalent_are_refused(tmp_path: Path) -> None:
    default = "K in int8-g4 and V in int4-g4.*takes one format for both, int4, int4-g2,"
    for to, k, v, dim, message in (
        ("fbgemm", "int8", "int8", 128, "K in int8 and V in int8.*int4-g8 or"),
        ("fbgemm", "int3", "int3", 128, "K in int3 and V in int3.*takes one"),
        ("xformers", "int2", "int2", 128, "K in int2 .* export to bf16"),
        ("fbgemm", "fp8-g4", "fp8-g4", 128, "K in fp8-g4"),
        ("xformers", "bf16", "bf16", 128, "export to bf16"),
        ("xformers", "int4", "fp8", 128, "one format for both"),
        ("fbgemm", None, None, 128, default),
        ("fbgemm", "int4-g4", "int4-g4", 96, "head_dim 96 and 96: fbgemm takes one"),
        ("xformers", "int4-g4", "int4-g4", 96, "96 and 96: .* head_dim 64, 128, 256 or 512"),
        ("fbgemm", "int4-g4", "int4-g4", 512, "512 and 512: .* head_dim 128; quantize anew"),
    ):
        cache = quantize(tmp_path, make_raw(head_dim=dim), k_format=k, v_format=v)
        assert_refused(UnsupportedError, (partial(export, tmp_path, cache, to), message))
        assert not (tmp_path / "out.safetensors").exists()


def test_values_that_overflow_elsewhere_are_refused(tmp_path: Path) -> None:
    large = make_raw(scale=3e4)
    cache = quantize(tmp_path, large, k_format="bf16", v_format="bf16")
    export(tmp_path, cache, "bf16")
    with pytest.raises(NonFiniteError, match=r"layer 0, K, sequence 0, .* too large for fp16"):
        export(tmp_path, cache, "fp16")
    wide = make_raw(scale=1000.0)
    for name, targets in (("int4", ["fbgemm", "xformers"]), ("fp8", [])):
        cache = quantize(tmp_path, wide, k_format=name, v_format=name)
        for to in targets:
            with pytest.raises(NonFiniteError, match=r"scale .* is over 127\.9.* overflows"):
                export(tmp_path, cache, to)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "out.safetensors",
        "raw.safetensors",
    ]


@pytest.mark.parametrize("to", ["bf16", "fp16", "fbgemm", "xformers"])
@pytest.mark.parametrize("fmt", ["int4-g4", "fp8"])
def test_rows_with_nan_do_not_go_out(tmp_path: Path, fmt: str, to: str) -> None:
    cache = KVCache(1, 2, 2, 128, 12, k_format=fmt, v_format=fmt, sink_len=2, recent_len=3)
    cache.append(0, torch.randn(2, 2, 10, 128), torch.randn(2, 2, 10, 128))
    words = r"layer 0, V, sequence 1, token {}, KV head 1: .*this row came with NaN, Inf or"
    at = cache.layers[0]
    for rows, place, token in ((at.v_packed, 2, 4), (at.v_exact_rows, 0, 0)):
        kept = rows[1, 1, place].clone()
        is_packed = rows is at.v_packed
        bad = torch.full((128,), torch.nan)
        bad_fmt = at.v_format if is_packed else RowFormat.parse("bf16", 128)
        rows[1, 1, place] = quantize_rows(bad, bad_fmt, check=False)  # as CUDA appends it
        with pytest.raises(NonFiniteError, match=words.format(token)):
            export_cache(cache, tmp_path / "out.safetensors", to)
        rows[1, 1, place] = kept
    export_cache(cache, tmp_path / "out.safetensors", to)


def test_export_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    cache = quantize(tmp_path, make_raw())
    with pytest.raises(ConfigError, match="'gguf': use bf16, fp16, fbgemm, xformers"):
        export(tmp_path, cache, "gguf")
    x = torch.zeros(2, 3, 1, 128)
    cache.crop(5)
    cache.append(0, x, x)
    with pytest.raises(ShapeError, match="append this step's tokens to every layer"):
        export(tmp_path, cache, "bf16")


def test_empty_cache_is_exported(tmp_path: Path) -> None:
    tensors, _ = export(tmp_path, KVCache(1, 2, 1, 128, 8, **ROWS), "fbgemm")
    assert tensors["layers.0.cache_K"].shape == (2, 0, 1, 80)
    assert tensors["seq_positions"].tolist() == [-1, -1]


def latents(fmt: str, dims: tuple[int, int] = (512, 64), **options: Any) -> LatentKVCache:
    """Two sequences of latent rows, of 150 tokens and of 9."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"latent_dim": dims[0], "rope_dim": dims[1], **options}
    cache = LatentKVCache(2, 2, 200, fmt=fmt, **sizes)
    lens = torch.tensor([150, 9], dtype=torch.int32)
    for layer in range(2):
        latent, rope = (torch.randn(2, 1, 150, dim).bfloat16() for dim in dims)
        cache.append(layer, latent, rope, lens)
    return cache


@pytest.mark.parametrize("to, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_latent_rows_go_out_as_the_values_of_their_parts(
    tmp_path: Path, to: str, dtype: torch.dtype
) -> None:
    cache = latents("int4-g4+int8-g4", (256, 64), sink_len=2, recent_len=5)
    tensors, notes = export(tmp_path, cache, to)
    assert notes == [] and tensors["seq_lens"].tolist() == [150, 9]
    for i in range(2):
        latent, rope = (x[:, 0] for x in cache.dequantized(i, dtype))
        assert tensors[f"layers.{i}.latent"].equal(latent)
        assert tensors[f"layers.{i}.rope"].equal(rope)
    assert len(tensors) == 5


@pytest.mark.parametrize("lens", [(0, 0), (4, 16)], ids=str)
def test_flash_mla_gets_its_pages(tmp_path: Path, lens: tuple[int, int]) -> None:
    """Of 64 tokens; the 16-bit rows are quantized, and stand where their tokens do."""
    cache = latents("fp8", sink_len=lens[0], recent_len=lens[1])
    tensors, notes = export(tmp_path, cache, "flashmla")
    assert len(notes) == (lens != (0, 0)) and all("quantized for this export" in x for x in notes)
    assert tensors["block_table"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["block_table"].dtype == torch.int32
    fmt = LatentFormat.parse("fp8")
    for i in range(2):
        pages = tensors[f"layers.{i}.kv"]
        assert pages.shape == (6, 64, 1, 656) and pages.dtype == torch.uint8
        wanted = torch.cat(cache.dequantized(i, torch.bfloat16), -1)[:, 0]
        for b, count in enumerate((150, 9)):
            rows = pages[3 * b : 3 * b + 3].flatten(0, 2)
            assert not rows[count:].any()
            direct = quantize_rows(wanted[b, :count], fmt)
            assert dequantize_rows(rows[:count], fmt).equal(dequantize_rows(direct, fmt))


def test_layouts_are_those_of_the_rows_that_a_cache_holds(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    cache, heads, other = latents("fp8"), quantize(tmp_path, make_raw()), latents("int8-g4")
    words = "keys and values, and the cache holds latent"
    assert_refused(
        UnsupportedError,
        (lambda: export_cache(cache, path, "fbgemm"), words),
        (lambda: export_cache(cache, path, "xformers"), words),
        (lambda: export_cache(heads, path, "flashmla"), "use bf16, fp16, fbgemm, xformers"),
        (lambda: export_cache(other, path, "flashmla"), "has rows of int8-g4: flashmla takes fp8"),
    )
    cache = latents("fp8", sink_len=0, recent_len=0)
    cache.layers[0].k_packed[1, 0, 7] = 0xFF
    with pytest.raises(NonFiniteError, match="layer 0, K, sequence 1, token 7"):
        export_cache(cache, path, "flashmla")
