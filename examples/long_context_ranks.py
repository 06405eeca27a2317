"""A long sequence spread over ranks: `torchrun --nproc-per-node 2 examples/long_context_ranks.py`,
with the numbers of tokens (a multiple of 2,048) and of steps behind it if you like.

Every rank runs this. With GPUs each rank takes one, and NCCL; else they are processes on the CPU.
"""

import sys
import time

import torch
import torch.distributed as dist

from kvquant import ContextParallelCache, KVCache

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, CHUNK = 2, 32, 8, 128, 2048


def main(tokens: int = 8192, steps: int = 20) -> None:
    """Read tokens, decode some more, and print the time of a step."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # every rank gets the same tokens, as from the same model

    room = ContextParallelCache.tokens_of(tokens + steps, 0, world)  # of the fullest rank
    own = KVCache(LAYERS, 1, KV_HEADS, HEAD_DIM, room, device=device)
    cache = ContextParallelCache(own)
    for _ in range(0, tokens, CHUNK):
        for layer in range(LAYERS):
            cache.append(layer, *torch.randn(2, 1, KV_HEADS, CHUNK, HEAD_DIM, device=device))

    start = time.perf_counter()
    for _ in range(steps):
        for layer in range(LAYERS):
            q = torch.randn(1, Q_HEADS, HEAD_DIM, device=device)
            k, v = torch.randn(2, 1, KV_HEADS, 1, HEAD_DIM, device=device)
            out = cache.step(layer, q, k, v)  # the same on every rank
    cache.check()  # waits for the GPU
    taken = 1e3 * (time.perf_counter() - start) / steps / LAYERS
    if not rank:
        print(f"{cache.seq_lens.tolist()} tokens on {world} ranks, {own.seq_lens.tolist()} on this")
        print(f"{taken:.2f} ms for a layer's step, sum of the last output {float(out.sum()):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
