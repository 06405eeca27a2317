"""Packed rows: their formats, the quantizers, calibrated transforms, and what attention reads.

Everything here has a plain torch version, which is the reference of the kernels.
"""
