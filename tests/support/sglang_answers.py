"""What SGLang's engine gives with kvquant's rows: a script, told by JSON on stdin.

    {"model": folder, "rounds": [{"prompts": [[token, ...], ...], "sampling": {...}}, ...],
     "options": {...}}

KVQUANT_SGLANG names the rows. A round with "abort" takes its first request back after the first
token. "top" is how many of the likeliest tokens a round gives at each step. With "from" it gives
those of the prompt, too, after its first so many tokens. The last line of the script's output is
JSON: the answers of each round, and what the engine is.

With KVQUANT_WITHOUT_EXPERTS gpt-oss has no experts. The experts of our models give zeros, and some
machines lack SGLang's compiled operators for experts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
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
            top_logprobs_num=asked.get("top", 0),
            logprob_start_len=asked.get("from", -1),
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
    return [facts_of(one, asked) for several in found for one in several]


def facts_of(answer: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """New tokens and their log probabilities, how many tokens of the prompt were in the radix
    cache, how often the request lost its place in the pool, and why it ended."""
    info = answer["meta_info"]
    more = {}
    if asked.get("top"):
        more["known"] = known_of(info, "output")
    if "from" in asked:
        more["scored"] = known_of(info, "input")
    return {
        **more,
        "tokens": [token for _, token, _ in info["output_token_logprobs"]],
        "logprobs": [logprob for logprob, _, _ in info["output_token_logprobs"]],
        "found": info["cached_tokens"],
        "retractions": info["num_retractions"],
        "end": info["finish_reason"]["type"],
    }


def known_of(info: dict[str, Any], side: str) -> list[list[Any]]:
    """The tokens of a prompt ("input") or behind it, each with the log probabilities of the
    likeliest ones at its place and of itself: pairs of tokens and log probabilities."""
    chosen, top = info[f"{side}_token_logprobs"], info[f"{side}_top_logprobs"]
    return [
        [token, [*{token: own, **{other: x for x, other, _ in likeliest}}.items()]]
        for (own, token, _), likeliest in zip(chosen, top, strict=True)
        if own is not None  # the first token of a prompt has none
    ]


def leave_experts_out() -> None:
    """Let gpt-oss's experts give zeros, in SGLang's process of the model. That process imports this
    module before it makes the model."""
    import torch
    from sglang.srt.models.gpt_oss import GptOssSparseMoeBlock

    def forward(self: Any, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)

    GptOssSparseMoeBlock.forward = forward


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
    begun = time.perf_counter()
    engine = sglang.Engine(model_path=asked["model"], **{**options, **asked["options"]})
    started = time.perf_counter() - begun
    rounds = [
        engine.loop.run_until_complete(answers_of(engine, number, one))
        for number, one in enumerate(asked["rounds"])
    ]
    told = engine.get_server_info()
    overlaps = not engine.server_args.disable_overlap_schedule
    engine.shutdown()
    memory = told["internal_states"][0]["memory_usage"]
    facts = {"overlaps": overlaps, "memory": memory, "seconds_to_start": started}
    print(json.dumps({"rounds": rounds, **facts}), flush=True)


if os.environ.get("KVQUANT_WITHOUT_EXPERTS") and __name__ != "__main__":
    leave_experts_out()
if __name__ == "__main__":
    main()
