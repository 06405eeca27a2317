"""Load and launch kernels through ctypes and the CUDA driver, with little Python a launch.

torch has initialized CUDA: tensors lie on the device, whose primary context torch uses.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvquant.errors import DeviceError, UnsupportedError

PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may have without asking
# numbers of cuda.h
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
PROGRAMMATIC_STREAM_SERIALIZATION = 6
MEMORY_CLOCK_RATE, GLOBAL_MEMORY_BUS_WIDTH = 36, 37  # kHz, bits
PARAM_END, PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE = 0, 1, 2
RELAXED = 2  # a capture mode that allows memory to be allocated meanwhile
INVALID_CONTEXT = 201
MOST_CONFIGS = 256  # streams that a launch is ready for
# the machine code, not the call, is refused
INVALID_IMAGE, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION = 200, 209, 222


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; its value is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int * 16),
    )


# a launch may begin once the one before it on the stream lets it, or has ended
OVERLAPS = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", (ctypes.c_int * 16)(1))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """A kernel on a device: its handle, the device's context, threads and shared memory of a block,
    registers of a thread."""

    def __init__(
        self,
        code: bytes,
        name: str,
        device: int,
        *,
        threads: int,
        shared: int,
        most_shared: int = 0,
        registers: int = 0,
    ) -> None:
        """Load the kernel `name` of a cubin.

        most_shared: bytes that a launch may ask for, if more than `shared`. registers: for those
        who plan launches. DeviceError if there is no driver or the device is in error,
        UnsupportedError if the driver or the GPU does not fit the machine code.
        """
        cuda = _library()
        self.context = _primary_context(device)
        self.threads, self.shared, self.registers = threads, shared, registers
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(cuda.cuCtxPushCurrent_v2(self.context), "make the device current")
        try:
            with uncaptured():
                _check(cuda.cuModuleLoadData(ctypes.byref(module), code), "load the kernel")
                _check(
                    cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
                    f"find {name} in the cubin",
                )
                most = max(shared, most_shared)
                if most > PLAIN_SHARED:
                    _check(
                        cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_SIZE_BYTES, most),
                        f"have {most} bytes of shared memory a block",
                    )
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        self.function = function


class Launcher:
    """A kernel with its grid, ready to be launched by any thread."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        arguments: str,
        shared: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Prepare launches of a kernel.

        grid: blocks along x, y and z. arguments: all as a struct format, each naturally aligned.
        shared: bytes of a block, if more than the kernel's. overlaps: whether it may begin before
        the launch before it is complete; sm_90 and newer.
        """
        self._kernel, self._grid, self._overlaps = kernel, grid, overlaps
        self._shared = max(shared, kernel.shared)
        layout = struct.Struct(arguments)
        self._pack, self._size = layout.pack_into, layout.size
        self._function = kernel.function
        self._cuda = _library()
        # ctypes takes 0.3 us longer for the 11 arguments of cuLaunchKernel
        self._launch = self._cuda.cuLaunchKernelEx
        self._configs: dict[int, Any] = {}  # of each stream, never changed: threads share them

    def __call__(self, stream: int, values: Sequence[float | bytes]) -> None:
        """Launch on a stream (raw handle) of the current device; DeviceError if refused."""
        config = self._configs.get(stream) or self._configure(stream)
        buffer, size, extra = _local.arguments
        self._pack(buffer, 0, *values)
        size.value = self._size
        error = self._launch(config, self._function, None, extra)
        if error == INVALID_CONTEXT:  # a thread that has not called CUDA yet
            _check(self._cuda.cuCtxSetCurrent(self._kernel.context), "make the device current")
            error = self._launch(config, self._function, None, extra)
        if error:
            _check(error, f"launch {self._grid} blocks of {self._kernel.threads} threads")

    def _configure(self, stream: int) -> Any:
        if len(self._configs) >= MOST_CONFIGS:
            self._configs.clear()
        kernel = self._kernel
        config = LaunchConfig(self._grid, (kernel.threads, 1, 1), self._shared, stream)
        if self._overlaps:
            config.attributes, config.num_attributes = ctypes.addressof(OVERLAPS), 1
        reference = self._configs[stream] = ctypes.byref(config)
        return reference


def peak_bandwidth(device: int) -> float:
    """GB/s of a device's memory by clock and bus; 0.0 if the driver does not know them."""
    told = []
    for attribute in (MEMORY_CLOCK_RATE, GLOBAL_MEMORY_BUS_WIDTH):
        value = ctypes.c_int()
        if _library().cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return 0.0
        told.append(value.value)
    clock, bus = told
    return 2 * clock * bus / 8e6


@contextmanager
def uncaptured() -> Iterator[None]:
    """Let this thread load kernels and allocate memory beside captures of CUDA graphs."""
    exchange = _library().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class _Local(threading.local):
    """The argument buffer of a thread; the driver copies it during the launch."""

    def __init__(self) -> None:
        buffer = ctypes.create_string_buffer(4096)  # what a kernel may have
        size = ctypes.c_size_t()
        extra = (ctypes.c_void_p * 5)(
            PARAM_BUFFER_POINTER,
            ctypes.addressof(buffer),
            PARAM_BUFFER_SIZE,
            ctypes.addressof(size),
            PARAM_END,
        )
        self.arguments = buffer, size, extra


_local = _Local()


@functools.cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver is installed: {error}") from None
    _check(library.cuInit(0), "start the driver", library)
    if not hasattr(library, "cuLaunchKernelEx"):
        raise UnsupportedError("the NVIDIA driver is older than CUDA 12: install a newer one")
    return library


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    error = _library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    _check(error, f"use device {device}")
    return context


def _check(error: int, task: str, library: Any = None) -> None:
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
