"""Packed rows: formats, quantizers, transforms, and plain torch references of the kernels."""
