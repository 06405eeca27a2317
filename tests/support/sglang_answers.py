"""What SGLang's engine gives on the CPU with kvquant's rows: a script, told by JSON on stdin.

    {"model": folder, "rounds": [{"prompts": [[token, ...], ...], "sampling": {...}}, ...],
     "options": {...}}

KVQUANT_SGLANG names the rows. A round with "abort" takes its first request back after the first
token. The last line of its output is JSON: the answers of each round, and what the engine is.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


async def answers_of(engine: Any, number: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of a round, n for each prompt, in the order of the prompts."""
    sampling = {"temperature": 0, "ignore_eos": True, **asked["sampling"]}

    async def answer(i: int, prompt: list[int]) -> Any:
        rid = f"{number}-{i}"
        stream = await engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling,
            return_logprob=True,
            rid=None if "n" in sampling else rid,  # each of several has one of its own
            stream=True,
        )
        latest: dict[int, Any] = {}
        async for found in stream:
            latest[found.get("index", 0)] = found
            if asked.get("abort") and i == 0:
                engine.tokenizer_manager.abort_request(rid)
        return [latest[j] for j in sorted(latest)]

    found = await asyncio.gather(*(answer(i, one) for i, one in enumerate(asked["prompts"])))
    return [facts_of(one) for several in found for one in several]


def facts_of(answer: dict[str, Any]) -> dict[str, Any]:
    """New tokens and their log probabilities, how many tokens of the prompt were in the radix
    cache, how often the request lost its place in the pool, and why it ended."""
    info = answer["meta_info"]
    return {
        "tokens": [token for _, token, _ in info["output_token_logprobs"]],
        "logprobs": [logprob for logprob, _, _ in info["output_token_logprobs"]],
        "found": info["cached_tokens"],
        "retractions": info["num_retractions"],
        "end": info["finish_reason"]["type"],
    }


def main() -> None:
    import sglang

    asked = json.load(sys.stdin)
    options = {
        "device": "cpu",
        "attention_backend": "kvquant",
        "dtype": "float32",
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "mem_fraction_static": 0.3,
        "random_seed": 0,
        "skip_tokenizer_init": True,
        "log_level": "error",
    }
    engine = sglang.Engine(model_path=asked["model"], **{**options, **asked["options"]})
    rounds = [
        engine.loop.run_until_complete(answers_of(engine, number, one))
        for number, one in enumerate(asked["rounds"])
    ]
    told = engine.get_server_info()
    overlaps = not engine.server_args.disable_overlap_schedule
    engine.shutdown()
    memory = told["internal_states"][0]["memory_usage"]
    print(json.dumps({"rounds": rounds, "overlaps": overlaps, "memory": memory}), flush=True)


if __name__ == "__main__":
    main()
