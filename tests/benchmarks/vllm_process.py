"""An engine of vLLM in a process of its own, and what bench_vllm.py measures of it."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from decoding import Figures, measure_decode
from vllm_log import what_failed

LIKELIEST = 20  # tokens whose log-probabilities answers have
NAMES = itertools.count()  # of requests


class EngineProcess:
    """An engine that starts at once, and answers one question after another.

    Args:
        options: of vLLM's engine.
        log: the file that gets what vLLM prints.
    """

    def __init__(self, options: Figures, log: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.log, (self.pipe, theirs) = log, spawn.Pipe()
        self.process = spawn.Process(target=_run, args=(theirs, options, log))
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """The next answer; the first is how long the start took, and how many tokens have room.

        Raises:
            RuntimeError: the engine failed; with the first error of its log, and its end.
        """
        try:
            failure, found = self.pipe.recv()
        except EOFError:
            failure, found = "the process ended", None
        if failure:
            raise RuntimeError(f"{failure}\n{what_failed(self.log)}")
        return found

    def ask(self, measure: str, **given: Any) -> Any:
        """What a function of MEASURES returns in that process."""
        self.pipe.send((measure, given))
        return self.answer()

    def close(self) -> None:
        """End the engine."""
        self.pipe.close()
        self.process.join(30)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def _run(pipe: Any, options: Figures, log: Path) -> None:
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    asyncio.run(_serve(pipe, options))


async def _serve(pipe: Any, options: Figures) -> None:
    engine = None
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        begun = time.perf_counter()
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
        cache = engine.vllm_config.cache_config
        tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        pipe.send((None, {"start_s": time.perf_counter() - begun, "tokens": tokens}))
        while True:
            measure, given = await asyncio.to_thread(pipe.recv)
            pipe.send((None, await MEASURES[measure](engine, **given)))
    except EOFError:
        pass  # it was closed
    except BaseException as error:
        pipe.send(("".join(traceback.format_exception(error)), None))
    finally:
        if engine is not None:
            engine.shutdown()


async def generate(engine: Any, ids: Sequence[int], tokens: int, **options: Any) -> Any:
    """The outputs of a prompt, one after another, in DELTA or whatever options say."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    usual = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    usual |= {"max_tokens": tokens, "output_kind": RequestOutputKind.DELTA}
    given, name = {"prompt_token_ids": list(ids)}, str(next(NAMES))
    async for output in engine.generate(given, SamplingParams(**usual | options), name):
        yield output.outputs[0]


async def finish(engine: Any, ids: Sequence[int], tokens: int, **options: Any) -> Any:
    """The whole output of a prompt."""
    from vllm.sampling_params import RequestOutputKind

    last = None
    async for output in generate(
        engine, ids, tokens, output_kind=RequestOutputKind.FINAL_ONLY, **options
    ):
        last = output
    return last


async def answers(
    engine: Any, prompts: Sequence[Sequence[int]], tokens: int
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Greedy texts: their tokens, and of each step the likeliest ones' log-probabilities."""
    done = await asyncio.gather(
        *(finish(engine, ids, tokens, logprobs=LIKELIEST) for ids in prompts)
    )
    return [
        (
            list(one.token_ids),
            [{token: x.logprob for token, x in step.items()} for step in one.logprobs],
        )
        for one in done
    ]


async def texts(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    temperature: float,
    first_seed: int,
) -> list[list[int]]:
    """Tokens of a text for each prompt, up to its end; prompts have seeds of their own."""
    options = {"temperature": temperature, "ignore_eos": False}
    seeds = [first_seed + i if temperature else None for i in range(len(prompts))]
    done = await asyncio.gather(
        *(
            finish(engine, ids, tokens, seed=seed, **options)
            for ids, seed in zip(prompts, seeds, strict=True)
        )
    )
    return [list(one.token_ids) for one in done]


async def decode(engine: Any, batch: int, context: int, seed: int) -> Figures:
    """Rates of reading prompts of random tokens, and of steps in which all sequences decode."""

    async def stream(ids: Sequence[int], tokens: int) -> Any:
        async for output in generate(engine, ids, tokens):
            yield len(output.token_ids)

    await engine.reset_prefix_cache()
    return await measure_decode(partial(finish, engine), stream, batch, context, seed)


async def load(
    engine: Any,
    rate: float | None,
    count: int,
    prompts: tuple[int, int],
    outputs: tuple[int, int],
    seed: int,
) -> Figures:
    """Requests that arrive at random, so many a second in the mean, or all at once.

    Args:
        engine: of vLLM.
        rate: requests a second, arrivals of a Poisson process; None for all at once.
        count: of requests.
        prompts: the shortest and the longest; the logarithm of a length is uniform.
        outputs: the same, where lengths are uniform.
        seed: of arrivals, lengths and tokens.
    """
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, count)) if rate else np.zeros(count)
    lengths = np.exp(random.uniform(np.log(prompts[0]), np.log(prompts[1]), count)).astype(int)
    wanted = random.integers(outputs[0], outputs[1] + 1, count)
    texts = [random.integers(10, 250, length).tolist() for length in lengths]
    await engine.reset_prefix_cache()
    begun = time.perf_counter()

    async def ask(i: int) -> list[float]:
        """When each token came."""
        await asyncio.sleep(max(begun + arrivals[i] - time.perf_counter(), 0))
        came: list[float] = []
        async for output in generate(engine, texts[i], int(wanted[i])):
            came += [time.perf_counter() - begun] * len(output.token_ids)
        return came

    came = await asyncio.gather(*map(ask, range(count)))
    seconds = max(one[-1] for one in came)
    waits = [one[0] - arrival for one, arrival in zip(came, arrivals, strict=True)]
    gaps = [after - before for one in came for before, after in itertools.pairwise(one)]
    return {
        "rate": rate,
        "requests": count,
        "seconds": seconds,
        "requests_per_s": count / seconds,
        **{f"first_token_ms_{name}": value for name, value in _quantiles(waits).items()},
        **{f"between_ms_{name}": value for name, value in _quantiles(gaps).items()},
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": 1e3 * statistics.median(seconds),
        "p99": 1e3 * float(np.quantile(seconds, 0.99)),
    }


MEASURES: dict[str, Callable[..., Any]] = {
    "answers": answers,
    "texts": texts,
    "decode": decode,
    "load": load,
}
