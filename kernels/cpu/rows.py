"""Placeholder until the numba kernels land in this session."""


def quantize(x, fmt):
    from kvquant.quant import _quantize

    return _quantize(x, fmt)


def dequantize(rows, fmt):
    from kvquant.quant import _dequantize

    return _dequantize(rows, fmt)
