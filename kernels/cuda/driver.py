"""Load and launch kernels through ctypes and the CUDA driver: 1 us of Python a launch.

torch has initialized CUDA: tensors lie on the device, whose primary context torch uses.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from kvquant.errors import DeviceError, UnsupportedError

PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may have without asking
# numbers of cuda.h
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
PARAM_END, PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE = 0, 1, 2
RELAXED = 2  # a capture mode that allows memory to be allocated meanwhile
INVALID_CONTEXT = 201
# the machine code, not the call, is refused
INVALID_IMAGE, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION = 200, 209, 222


class Kernel:
    """A kernel on a device, ready to be launched by any thread."""

    def __init__(
        self, code: bytes, name: str, device: int, *, arguments: str, threads: int, shared: int
    ) -> None:
        """Load a cubin.

        Args:
            code: the cubin.
            name: of the kernel in it.
            device: index, as torch counts.
            arguments: all arguments as a struct format, each naturally aligned.
            threads: of a block.
            shared: bytes of dynamic shared memory of a block.

        Raises:
            DeviceError: no driver, or the device is in error.
            UnsupportedError: the driver or the GPU does not fit the machine code.
        """
        cuda = self._cuda = _library()
        self._context = _primary_context(device)
        self._block = threads, 1, 1, shared
        layout = struct.Struct(arguments)
        self._pack, self._size = layout.pack_into, layout.size
        # ctypes passes an int as a C int: pointers are wrapped, once
        self._launch = cuda.cuLaunchKernel
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        mode = ctypes.c_int(RELAXED)
        _check(cuda.cuCtxPushCurrent_v2(self._context), "make the device current")
        try:
            # if a CUDA graph is being captured, loading is no part of it
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            _check(cuda.cuModuleLoadData(ctypes.byref(module), code), "load the kernel")
            _check(
                cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
                f"find {name} in the cubin",
            )
            if shared > PLAIN_SHARED:
                _check(
                    cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
                    f"have {shared} bytes of shared memory a block",
                )
        finally:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        self._function = function

    def launch(self, grid: tuple[int, int, int], stream: int, values: Sequence[float]) -> None:
        """Launch on a stream of the device, which must be the current one.

        Args:
            grid: blocks along x, y and z.
            stream: raw handle.
            values: every argument.

        Raises:
            DeviceError: the driver refuses.
        """
        local = _local
        self._pack(local.buffer, 0, *values)
        local.size.value = self._size
        handle = ctypes.c_void_p(stream)
        error = self._launch(self._function, *grid, *self._block, handle, None, local.extra)
        if error == INVALID_CONTEXT:  # a thread that has not called CUDA yet
            _check(self._cuda.cuCtxSetCurrent(self._context), "make the device current")
            error = self._launch(self._function, *grid, *self._block, handle, None, local.extra)
        if error:
            _check(error, f"launch {grid} blocks of {self._block[0]} threads")


class _Local(threading.local):
    """The argument buffer of a thread; the driver copies it during the launch."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(4096)  # what a kernel may have
        self.size = ctypes.c_size_t()
        self.extra = (ctypes.c_void_p * 5)(
            PARAM_BUFFER_POINTER,
            ctypes.addressof(self.buffer),
            PARAM_BUFFER_SIZE,
            ctypes.addressof(self.size),
            PARAM_END,
        )


_local = _Local()


@functools.cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver is installed: {error}") from None
    _check(library.cuInit(0), "start the driver", library)
    return library


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    error = _library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check(error, f"use device {device}")
    return context


def _check(error: int, task: str, library: Any = None) -> None:
    """Raise what a driver's error means."""
    if not error:
        return
    library = library or _library()
    name, text, version = ctypes.c_char_p(), ctypes.c_char_p(), ctypes.c_int()
    library.cuGetErrorName(error, ctypes.byref(name))
    library.cuGetErrorString(error, ctypes.byref(text))
    what = f"{(name.value or b'error %d' % error).decode()} ({(text.value or b'').decode()})"
    if error in (INVALID_IMAGE, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION):
        library.cuDriverGetVersion(ctypes.byref(version))
        major, minor = divmod(version.value // 10, 100)
        raise UnsupportedError(
            f"the driver, for CUDA {major}.{minor}, cannot {task}: {what}. Install a newer driver, "
            f"or the compilers of its version, pip install 'numba-cuda[cu{major}]'"
        )
    raise DeviceError(
        f"CUDA cannot {task}: {what}. If an earlier kernel failed, it shows here: run with "
        "CUDA_LAUNCH_BLOCKING=1 to see which"
    )
