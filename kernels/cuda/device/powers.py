"""Powers of two as float32, by their bits: numbers are multiplied by them without rounding."""

from numba import int32, uint32

from .jit import device_function
from .ptx import bits_float, float_bits


@device_function
def power_of(exponent):
    """2**exponent, for -126 to 127."""
    return bits_float(uint32(exponent + int32(127)) << uint32(23))


@device_function
def norm_of(largest):
    """The power of two that brings a query's largest element to 2**14 to 2**15, and one over it."""
    exponent = max(float_bits(largest) >> uint32(23), uint32(64))
    norm = bits_float((uint32(268) - exponent) << uint32(23))  # 2**(141 - exponent)
    return norm, bits_float((exponent - uint32(14)) << uint32(23))


@device_function
def inverse_of(power):
    return bits_float(uint32(254 << 23) - float_bits(power))
