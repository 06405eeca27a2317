"""A codec that no file of kvquant names, made of words that they know: 5 bits in bytes."""

from __future__ import annotations

from kvquant.rows.codec import FP16_MAX, Codec

INT5 = Codec("int5", 8, "bytes", "integers", "pairs", FP16_MAX, 31.0)
