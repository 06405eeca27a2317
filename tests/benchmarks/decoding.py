"""How fast an engine decodes: what bench_vllm.py and bench_sglang.py both measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

Figures = dict[str, Any]
Finish = Callable[[Sequence[int], int], Awaitable[Any]]
Stream = Callable[[Sequence[int], int], AsyncIterator[int]]
WATCHED = 200  # steps that are timed while all sequences decode
BEFORE, BEHIND = 10, 256  # steps that are not timed: the first ones, and room until a sequence ends
ROOM = BEFORE + WATCHED + BEHIND  # tokens that a sequence gets at most while it is measured


async def measure_decode(
    finish: Finish, stream: Stream, batch: int, context: int, seed: int
) -> Figures:
    """Rates of reading prompts of random tokens, and of steps in which all sequences decode.

    Args:
        finish: waits until the engine has generated so many tokens for a prompt. The engine must
            have a prefix cache, and nothing of the prompts may be in it.
        stream: does the same, and yields how many tokens came whenever some come.
        batch: prompts.
        context: tokens of each.
        seed: of the tokens.
    """
    random = np.random.default_rng(seed)
    prompts = random.integers(10, 250, (batch, context)).tolist()
    begun = time.perf_counter()

    async def first_token(ids: Sequence[int]) -> float:
        """Milliseconds until it comes, of prompts that come at once."""
        await finish(ids, 1)
        return 1e3 * (time.perf_counter() - begun)

    firsts = await asyncio.gather(*(first_token(ids) for ids in prompts))
    taken = time.perf_counter() - begun
    # now the prompts are in the prefix cache
    begun = time.perf_counter()
    await asyncio.gather(*(finish(ids, 1) for ids in prompts))
    until_all_run = 1.2 * (time.perf_counter() - begun)
    others = [asyncio.ensure_future(finish(ids, ROOM)) for ids in prompts[:-1]]
    await asyncio.sleep(until_all_run)
    times = [0.0]
    async for count in stream(prompts[-1], BEFORE + WATCHED + 1):
        times += [time.perf_counter()] * count
    ended = sum(task.done() for task in others)
    await asyncio.gather(*others)
    seconds = times[BEFORE + WATCHED] - times[BEFORE]
    each = np.diff(times[BEFORE : BEFORE + WATCHED + 1])
    return {
        "batch": batch,
        "prompt_tokens_per_s": batch * context / taken,
        "first_token_ms_p50": float(np.median(firsts)),
        "first_token_ms_p99": float(np.quantile(firsts, 0.99)),
        "tokens_per_s": batch * WATCHED / seconds,
        "step_ms": 1e3 * seconds / WATCHED,
        "step_ms_p50": 1e3 * float(np.median(each)),
        "step_ms_p99": 1e3 * float(np.quantile(each, 0.99)),
        "ended_too_early": ended,
    }
