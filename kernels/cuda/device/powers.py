"""Powers of two as float32, by their bits: numbers are multiplied by them without rounding."""

from numba import int32, uint32

from .jit import device_function
from .ptx import bits_float, float_bits


@device_function
def power_of(exponent):
    """2**exponent, for -126 to 127."""
    return bits_float(uint32(exponent + int32(127)) << uint32(23))


@device_function
def inverse_of(power):
    return bits_float(uint32(254 << 23) - float_bits(power))
