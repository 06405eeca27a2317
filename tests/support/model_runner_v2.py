"""Requests of vLLM's second model runner, its choice on GPUs, on the CPU: run by a test.

Its kernels are Triton's. Triton's interpreter runs them where vLLM believes that there is a driver.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # before all imports


def main() -> None:
    """Print the rows, the prompts, the runner, the texts, and how many tokens were drafted and
    accepted."""
    import triton.backends
    import vllm_engines
    from vllm_engines import MODEL, counter, engine, generate, mixed_prompts

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    vllm_engines._replace_triton_kernels = lambda platform: None
    rows = {"k_format": "int8", "v_format": "int8", "prompts": "rows"}
    prompts = mixed_prompts((1, 5, 33, 90, 150))
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 100, "enable_prefix_caching": False}
    drafts = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 3}
    with engine(rows, **options, speculative_config=drafts) as llm:
        texts = generate(llm, prompts, 12)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        kinds = [kind.__module__ for kind in type(worker.model_runner).__mro__]
        names = "draft_tokens", "accepted_tokens"
        counts = [counter(llm, f"spec_decode_num_{name}") for name in names]
        print("FOUND", json.dumps([rows, prompts, kinds, texts, counts]), flush=True)


if __name__ == "__main__":
    main()
