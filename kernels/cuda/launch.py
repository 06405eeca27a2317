"""Launch the CUDA kernels: compile, choose the splits, merge.

numba compiles a kernel at the first call with its formats, which takes about 5 seconds, and its
dispatcher launches it, at about 50 microseconds a call outside CUDA graphs.
"""

import functools
import math
import warnings
from collections.abc import Sequence

import torch
from numba import cuda

from kvquant.errors import ConfigError, UnsupportedError
from kvquant.segments import Segment

from .decode import HEADS, SIGNATURE, TILE, make_decode_kernel
from .staging import StagedRow

MAX_SHARED = 160 << 10  # bytes of a block; more leaves too little of an SM for its neighbours
BLOCKS_PER_SM = 2  # that the number of splits aims at


@functools.cache
def compile_decode(k_format, v_format, q_is_bf16, device):
    """A kernel ready to launch on a device, its warps and its bytes of shared memory."""
    from cuda.bindings import driver

    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    for warps, stages in ((4, 3), (4, 2), (2, 2), (1, 2)):
        function, shared = make_decode_kernel(k_format, v_format, warps, stages, q_is_bf16)
        if shared <= min(limit, MAX_SHARED):
            break
    else:
        raise UnsupportedError(
            f"K in {k_format} and V in {v_format} take {shared} bytes of shared memory in the "
            f"smallest kernel, this GPU has {limit}"
        )
    with cuda.gpus[device]:
        kernel = cuda.jit(SIGNATURE, fastmath=True)(function)
        compiled = kernel.overloads[SIGNATURE]._codelibrary.get_cufunc()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = driver.CUkernel(int(compiled.handle))
        (error,) = driver.cuKernelSetAttribute(attribute, shared, handle, driver.CUdevice(device))
    if int(error):
        raise UnsupportedError(f"this GPU refuses {shared} bytes of shared memory: {error}")
    return kernel, warps, shared


def attend(
    q: torch.Tensor, segments: Sequence[Segment], sm_scale: float, num_splits: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all segments and merge; see attention.attend_segments, which checks the input."""
    if q.dtype == torch.float32:
        raise ConfigError("q is torch.float32: on CUDA use bfloat16 or float16")
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        raise UnsupportedError("the CUDA kernels need compute capability 8.0 or newer")
    batch, num_q_heads, _ = q.shape
    v_dim = segments[0].v_format.head_dim
    num_kv_heads = segments[0].k_rows.shape[1]
    ratio = num_q_heads // num_kv_heads
    head_blocks = -(-ratio // HEADS)
    blocks = batch * num_kv_heads * head_blocks
    used = [segment for segment in segments if segment.capacity]
    if not blocks or not used:
        out = q.new_zeros(batch, num_q_heads, v_dim, dtype=torch.float32)
        return out, out.new_full((batch, num_q_heads), -math.inf)
    q = q.contiguous()
    device = q.device.index
    splits = [num_splits or plan_splits(blocks, segment.capacity, device) for segment in used]
    out = q.new_empty(sum(splits), batch, num_q_heads, v_dim, dtype=torch.float32)
    lse = out.new_empty(sum(splits), batch, num_q_heads)
    stream = cuda.external_stream(torch.cuda.current_stream(q.device).cuda_stream)
    kept = []  # alive until everything is launched
    done = 0
    for segment, count in zip(used, splits, strict=True):
        kernel, warps, shared = compile_decode(
            segment.k_format, segment.v_format, q.dtype == torch.bfloat16, device
        )
        _check_alignment(segment)
        lens = segment.seq_lens.contiguous()
        starts = None if segment.starts is None else segment.starts.contiguous()
        kept += [lens, starts]
        with cuda.gpus[device], warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Grid size .* under-utilization")
            kernel[(count, num_kv_heads * head_blocks, batch), 32 * warps, stream, shared](
                q.data_ptr(),
                segment.k_rows.data_ptr(),
                segment.v_rows.data_ptr(),
                lens.data_ptr(),
                0 if starts is None else starts.data_ptr(),
                out[done].data_ptr(),
                lse[done].data_ptr(),
                *segment.k_rows.stride()[:3],
                *segment.v_rows.stride()[:3],
                segment.capacity,
                num_q_heads,
                ratio,
                head_blocks,
                count,
                sm_scale * math.log2(math.e),
            )
        done += count
    return merge_splits(out, lse)


def merge_splits(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge [splits, ...] by lse, base 2; the merged lse is base e."""
    top = lse.amax(0)
    weights = (lse - top.nan_to_num(neginf=0.0)).exp2()  # all empty: 2**(-inf - 0) = 0
    total = weights.sum(0)
    merged = (weights[..., None] * out).sum(0) / total[..., None].clamp(min=1e-30)
    return merged, (top + total.log2()) * math.log(2)


def plan_splits(blocks: int, capacity: int, device: int) -> int:
    """Parts to cut sequences into, so that every SM has its blocks, of at least four tiles each."""
    wanted = BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(wanted // blocks, capacity // (4 * TILE)))


def _check_alignment(segment: Segment) -> None:
    for name, rows, fmt in (
        ("k_rows", segment.k_rows, segment.k_format),
        ("v_rows", segment.v_rows, segment.v_format),
    ):
        granule = StagedRow(fmt).granule
        if any(number % granule for number in (rows.data_ptr(), *rows.stride()[:3])):
            raise ConfigError(
                f"{name} starts at {rows.data_ptr():#x} with strides {list(rows.stride())}: "
                f"rows of {fmt} must be aligned to {granule} bytes on CUDA"
            )
