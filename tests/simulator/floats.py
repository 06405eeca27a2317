"""Stand-ins for the PTX instructions that compute with floats; see instructions.py."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from instructions import Name, Operation, operation


@operation(r"ex2\.approx\.ftz\.f32")
def _exp2(name: Name) -> Operation:
    return lambda x: _flush(np.exp2(_flush(x)))


@operation(r"lg2\.approx\.ftz\.f32")
def _log2(name: Name) -> Operation:
    return lambda x: np.log2(_flush(x))


def _flush(x: Any) -> Any:
    """Subnormal numbers become 0."""
    return x * np.float32(0) if abs(x) < np.finfo(np.float32).tiny else x


@operation(r"rcp\.approx\.ftz\.f32")
def _reciprocal(name: Name) -> Operation:
    return lambda x: _flush(np.float32(1) / _flush(x))


@operation(r"(min|max)(\.NaN)?\.f32")
def _extremum(name: Name) -> Operation:
    if name[2]:  # NaN, if one of the two is
        return np.minimum if name[1] == "min" else np.maximum
    return np.fmin if name[1] == "min" else np.fmax


@operation(r"(add|mul)\.rn\.sat\.f32")
def _clamped(name: Name) -> Operation:
    combine = operator.add if name[1] == "add" else operator.mul
    return lambda x, y: np.clip(np.nan_to_num(combine(x, y), nan=0), np.float32(0), np.float32(1))


@operation(r"(add|sub|mul|fma)\.rn\.f32")
def _float32(name: Name) -> Operation:
    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        exact = np.longdouble(x) * np.longdouble(y) + np.longdouble(z)
        return np.float32(exact)  # 64 digits: rounded twice only in far-fetched cases

    operations: dict[str, Operation] = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "fma": multiply_add,
    }
    return operations[name[1]]


def _halves(word: Any) -> Any:
    """The two numbers of a register."""
    return np.frombuffer(word, np.float16)


@operation(r"(neg|fma\.rn)\.f16x2")
def _f16x2_of_one_or_three(name: Name) -> Operation:
    def negate(x: Any) -> Any:
        return np.uint32(x) ^ np.uint32(0x80008000)

    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        a, b, c = (_halves(word).astype(np.float64) for word in (x, y, z))
        return (a * b + c).astype(np.float16).view(np.uint32)[0]

    return negate if name[1] == "neg" else multiply_add


@operation(r"(mul\.rn|max)\.f16x2")
def _f16x2(name: Name) -> Operation:
    combine = np.fmax if name[1] == "max" else np.multiply

    def halves(x: Any, y: Any) -> Any:
        return combine(_halves(x), _halves(y)).view(np.uint32)[0]

    return halves


@operation(r"cvt\.rn\.f16x2\.f32")
def _pack_f16(name: Name) -> Operation:
    return lambda high, low: np.array([low, high], np.float16).view(np.uint32)[0]


@operation(r"cvt\.rn\.bf16x2\.f32")
def _pack_bf16(name: Name) -> Operation:
    def pack(high: Any, low: Any) -> Any:
        pair = np.array([low, high], np.float32)
        bits = pair.view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # halves to even
        return np.where(np.isnan(pair), 0x7FFF, nearest).astype(np.uint16).view(np.uint32)[0]

    return pack


@operation(r"cvt\.(rn|rm|rp)\.f16\.f32")
def _round_f16(name: Name) -> Operation:
    def convert(x: Any) -> Any:
        half = np.float16(x)
        if name[1] == "rm" and half > x:
            half = np.nextafter(half, np.float16(-np.inf))
        if name[1] == "rp" and half < x:
            half = np.nextafter(half, np.float16(np.inf))
        return half.view(np.uint16)

    return convert


@operation(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def _pack_e4m3(name: Name) -> Operation:
    def one(x: Any) -> int:
        if np.isnan(x):
            return 0x7F
        sign, size = 0x80 * bool(np.signbit(x)), min(float(abs(x)), 448.0)
        exponent = max(int(np.floor(np.log2(size))) if size else -6, -6)
        steps = int(np.rint(size * 2.0 ** (3 - exponent)))  # of an eighth: halves to even
        return sign + (exponent + 6) * 8 + steps

    return lambda high, low: np.uint16(one(high) << 8 | one(low))


@operation(r"cvt\.rn\.f16x2\.e4m3x2")
def _unpack_e4m3(name: Name) -> Operation:
    def one(code: int) -> Any:
        if code & 0x7F == 0x7F:
            return np.float16(np.nan)
        bits = np.uint16((code & 0x80) << 8 | (code & 0x7F) << 7)
        return bits.view(np.float16) * np.float16(2**8)

    def both(codes: Any) -> Any:
        return np.array([one(int(codes) & 0xFF), one(int(codes) >> 8)]).view(np.uint32)[0]

    return both


@operation(r"cvt\.f32\.f16")
def _widen(name: Name) -> Operation:
    return lambda half: np.float32(half.view(np.float16))


@operation(r"setp\.ge\.f16x2")
def _reach_f16(name: Name) -> Operation:
    def reach(x: Any, y: Any) -> Any:
        return tuple(map(bool, _halves(x) >= _halves(y)))

    return reach
