"""Stand-ins of the PTX instructions that compute with floats, in numba's simulator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_simulator import SIMULATED, in_simulator, lanes, word

from kvquant import RowFormat, quantize_rows
from kvquant.rows.quantize import parameters

pytestmark = pytest.mark.extra("cuda")
if SIMULATED:
    from kvquant.kernels.cuda.device import ptx
    from kvquant.kernels.cuda.device.quantize import power_of_two

f32, u32 = np.float32, np.uint32


@in_simulator
def test_floats_become_16_bits_by_rounding_to_even() -> None:
    random = torch.randn(512) * torch.logspace(-9, 9, 512)
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65519.0, 65520.0])
    rare = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, 2.0**-25, 3 * 2.0**-25, 1e-40])
    x = torch.cat([random, ties, rare])
    for pack, dtype in ((ptx.pack_f16, torch.float16), (ptx.pack_bf16, torch.bfloat16)):
        wanted = x.to(dtype).view(torch.int16).numpy().view(np.uint16)
        with np.errstate(over="ignore"):
            got = np.array([pack(f32(1), value) for value in x.numpy()], u32).view(np.uint16)
        np.testing.assert_array_equal(got[0::2], wanted)
        assert set(got[1::2].tolist()) == {0x3C00 if dtype == torch.float16 else 0x3F80}
        assert pack(f32(np.nan), f32(0)) >> 16 & 0x7FFF > 0x7C00


@in_simulator
def test_floats_become_fp16_by_rounding_up_down_or_to_nearest() -> None:
    x = torch.cat([torch.randn(300) * torch.logspace(-9, 4, 300), torch.tensor([0.0, 65504.0])])
    x = torch.cat([x, x.half().float(), torch.tensor([1e-30, -1e-30])])
    half = x.half()
    bits = half.view(torch.int16)
    up = torch.where(half >= 0, bits + 1, bits - 1).to(torch.int16).view(torch.float16)
    down = torch.where(half > 0, bits - 1, bits + 1).to(torch.int16).view(torch.float16)
    down[half == 0] = -(2.0**-24)
    up = torch.where(half.float() < x, up, half)
    down = torch.where(half.float() > x, down, half)
    for convert, wanted in ((ptx.half_nearest, half), (ptx.half_up, up), (ptx.half_down, down)):
        got = np.array([convert(value) for value in x.numpy()]).view(np.float16)
        np.testing.assert_array_equal(got, wanted.numpy())


@in_simulator
def test_e4m3() -> None:
    random = torch.randn(2000) * torch.logspace(-6, 3, 2000)
    ties = torch.tensor([i / 2**10 for i in range(40)] + [17.0, 19.0, 25.0, 27.0, 448.0, -0.0])
    x = torch.cat([random, ties, -ties]).clamp(-448, 448)
    wanted = x.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    got = np.array([ptx.pack_e4m3(f32(2), value) for value in x.numpy()])
    np.testing.assert_array_equal(got & 0xFF, wanted)
    assert set((got >> 8).tolist()) == {0x40}
    assert ptx.pack_e4m3(f32(1e9), f32(-1e9)) == 0x7EFE
    assert ptx.pack_e4m3(f32(np.nan), f32(0)) & 0x7F00 == 0x7F00
    codes = torch.arange(256).to(torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).half().numpy()
    got = np.array([ptx.unpack_e4m3(np.uint16(0x3800 + code)) for code in range(256)])
    np.testing.assert_array_equal(got.view(np.float16)[0::2], wanted)
    assert set(got.view(np.float16)[1::2].tolist()) == {1.0}


@in_simulator
def test_arithmetic_rounds_each_result() -> None:
    x, z = f32(1 + 2**-12), f32(-1 - 2**-11)
    assert (ptx.multiply(x, x), ptx.multiply_add(x, x, z)) == (-z, 2.0**-24)
    assert (ptx.add(x, f32(2**-24)), ptx.subtract(x, f32(1))) == (x, 2.0**-12)
    with np.errstate(divide="ignore"):
        assert [ptx.reciprocal(f32(i)) for i in (4, 0, 1e-40)] == [0.25, np.inf, np.inf]
    assert [ptx.minimum_or_nan(f32(i), f32(1)) for i in (2, 0)] == [1, 0]
    assert [ptx.maximum_or_nan(f32(i), f32(1)) for i in (2, 0)] == [2, 1]
    assert np.isnan(ptx.minimum_or_nan(f32(np.nan), f32(1)))
    assert np.isnan(ptx.maximum_or_nan(f32(1), f32(np.nan)))
    results = ptx.add(x, z), ptx.multiply_add(x, x, z), ptx.reciprocal(x)
    assert {type(result) for result in results} == {f32}


@in_simulator
def test_16_bits_become_floats() -> None:
    halves = word(np.float16(-1.5), np.float16(2.0**-24))
    assert (ptx.low_f16(halves), ptx.high_f16(halves)) == (-1.5, 2.0**-24)
    brains = u32(0x3FC0C000)
    assert (ptx.low_bf16(brains), ptx.high_bf16(brains)) == (-2, 1.5)
    assert {type(f(brains)) for f in (ptx.low_f16, ptx.high_f16, ptx.low_bf16)} == {f32}


@in_simulator
def test_pairs_of_f16() -> None:
    x = word(np.float16(3), np.float16(np.nan))
    y = word(np.float16(1 / 3), np.float16(2))
    product = np.float16(3) * np.float16(1 / 3)
    assert ptx.multiply_f16(x, y) & 0xFFFF == product.view(np.uint16)
    third = ptx.multiply_f16(y, y)
    lost = np.array([ptx.lost_f16(y, y, third)], np.uint32).view(np.float16).astype(np.float64)
    kept = np.array([third], np.uint32).view(np.float16).astype(np.float64)
    exact = np.array([y], np.uint32).view(np.float16).astype(np.float64) ** 2
    assert lost[0] != 0 and list(kept + lost) == list(exact)
    minus = third ^ u32(0x80008000)
    assert ptx.multiply_add_f16(y, y, minus) == ptx.lost_f16(y, y, third)
    assert ptx.maximum_f16(x, y) == word(np.float16(3), np.float16(2))
    numbers = [word(np.float16(1), np.float16(2)), word(np.float16(2), np.float16(3))]
    assert [ptx.reaches_f16(a, b) for a in numbers for b in numbers] == [1, 0, 1, 1]
    assert [ptx.reaches_f16(a, b) for a in (x, y) for b in (x, y)] == [1, 1, 0, 1]


@in_simulator
def test_functions_of_floats() -> None:
    assert [ptx.exp2(f32(x)) for x in (-2, 0.5, -130, -np.inf)] == [0.25, f32(2) ** f32(0.5), 0, 0]
    with np.errstate(divide="ignore"):
        logs = [ptx.log2(f32(x)) for x in (8, 0, 1e-40)]
    assert logs == [3, -np.inf, -np.inf]
    assert [ptx.maximum(f32(x), f32(1)) for x in (2, 0, np.nan)] == [2, 1, 1]
    for x, wanted in ((-1, 0), (np.nan, 0), (0.25, 0.5), (0.5, 1), (9, 1), (np.inf, 1)):
        assert ptx.multiply_clamped(f32(x), f32(2)) == ptx.add_clamped(f32(x), f32(x)) == wanted
    assert type(ptx.exp2(f32(1))) is type(ptx.log2(f32(1))) is f32


@in_simulator
def test_bits_are_kept() -> None:
    assert ptx.float_bits(f32(1)) == 0x3F800000 and type(ptx.float_bits(f32(1))) is u32
    assert ptx.bits_float(u32(0x40000000)) == 2 and type(ptx.bits_float(u32(0))) is f32
    assert ptx.permute(u32(0x33221100), u32(0x77665544), u32(0x7250)) == 0x77225500


@in_simulator
def test_scales_that_are_powers_of_two() -> None:
    borders = 448 * 2.0 ** torch.arange(-16, 20)
    fmt = RowFormat.parse("fp8_ds_mla", 512)
    rare = torch.tensor([0.0, 1e-45, 1e-38, 0.0448, fmt.max_abs])
    x = torch.cat([borders, borders.nextafter(torch.tensor(0.0)), rare])
    x = torch.cat([x, borders.nextafter(torch.tensor(1e30)), torch.rand(60).exp2() * 100])
    wanted = parameters(quantize_rows(x[:, None].expand(-1, 512), fmt), fmt)[0][:, 0]

    def scales(lane: int) -> list[tuple[int, float, float]]:
        found = []
        for value in x.numpy():  # the least or the greatest element of a group tells
            pair = (-value, value / 2) if lane else (-value / 2, value)
            found.append(power_of_two(f32(pair[0]), f32(pair[1])))
        return found

    for found in lanes(scales)[:2]:
        words, shifts, inverses = (np.array(one) for one in zip(*found, strict=True))
        np.testing.assert_array_equal(words.astype(u32).view(f32), wanted.numpy())
        np.testing.assert_array_equal(inverses * wanted.numpy(), 1.0)
        assert not shifts.any()
