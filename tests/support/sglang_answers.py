"""What SGLang's engine gives on the CPU with kvquant's rows: a script, told by JSON on stdin.

    {"model": folder, "rounds": [[prompt, ...], ...], "tokens": 8, "options": {...}}

The last line of its output is JSON: of each round and prompt the new tokens, the log probabilities
of those, and how many tokens of the prompt were found in the radix cache; and what the pool is.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def pool_facts() -> dict[str, Any]:
    """A pool of its own: bytes of a token, and whether what moves tokens moves their rows."""
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.radix_attention import AttentionType

    from kvquant import dequantize_rows
    from kvquant.sglang.pool import RowsPool

    found: dict[str, Any] = {}
    for page_size in (1, 16):
        pool = RowsPool(64, page_size, torch.float32, 2, 64, 1, "cpu", False)
        layer = SimpleNamespace(
            layer_id=0, is_cross_attention=False, attn_type=AttentionType.DECODER, logit_cap=0.0,
            sliding_window_size=-1, scaling=0.125, qk_head_dim=64, logit_capping_method="tanh",
        )  # fmt: skip
        k, v = torch.randn(2, 3, 2, 64)
        pool.set_kv_buffer(layer, torch.tensor([5, 40, 6]), k, v)
        copy = pool.get_cpu_copy(torch.tensor([5, 40, 6]))
        pool.load_cpu_copy(copy, torch.tensor([20, 21, 22]))
        errors = []
        for pages, fmt, x in zip(pool.pages(0), pool.layout[:2], (k, v), strict=True):
            by_slot = pages.transpose(1, 2).flatten(0, 1)[[20, 21, 22], :, : fmt.row_bytes]
            errors.append(float((dequantize_rows(by_slot.contiguous(), fmt) - x).abs().max()))
        bytes_of_token = int(sum(pool.get_kv_size_bytes())) // (64 + page_size)
        found[str(page_size)] = {"bytes": bytes_of_token, "error": max(errors)}
    return found


def main() -> None:
    import sglang

    asked = json.load(sys.stdin)
    facts = pool_facts()
    engine = sglang.Engine(
        model_path=asked["model"], device="cpu", attention_backend="kvquant", dtype="float32",
        disable_cuda_graph=True, max_total_tokens=4096, mem_fraction_static=0.3, random_seed=0,
        log_level="error", **asked["options"],
    )  # fmt: skip
    sampling = {"temperature": 0, "max_new_tokens": asked["tokens"], "ignore_eos": True}
    rounds = []
    for prompts in asked["rounds"]:
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        told = [one["meta_info"] for one in answers]
        rounds.append(
            [
                {
                    "tokens": [token for _, token, _ in info["output_token_logprobs"]],
                    "logprobs": [logprob for logprob, _, _ in info["output_token_logprobs"]],
                    "found": info["cached_tokens"],
                }
                for info in told
            ]
        )
    overlaps = not engine.server_args.disable_overlap_schedule
    engine.shutdown()
    print(json.dumps({"rounds": rounds, "pool": facts, "overlaps": overlaps}), flush=True)


if __name__ == "__main__":
    main()
