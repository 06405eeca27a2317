"""Gives kernels/cuda/device their instructions under numba's simulator.

A process of the simulator imports this module before any kernel.
"""

from __future__ import annotations

import floats  # noqa: F401  # it registers stand-ins
import instructions
import products

from kvquant.kernels.cuda.device.jit import stand_ins

stand_ins.instruction = instructions.stand_in
stand_ins.shared_address = instructions.shared_address
stand_ins.products = products.stand_in
