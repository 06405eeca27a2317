"""vLLM in processes of its own: its server with an OpenAI client, and two tensor-parallel ranks
(3 minutes)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import MODEL, ROOT

pytestmark = pytest.mark.filterwarnings("default")
ROWS = {"kvquant": {"k_format": "int4-g4"}}
PROMPTS = ["The city of Manila was founded", "The river is one of the longest in"]
PATIENCE = 300  # seconds for a server to start, on slow cores
ENV = {
    **os.environ,
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    options, prompts = json.loads(sys.argv[1])
    llm = LLM(dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, **options)
    params = SamplingParams(max_tokens=16, temperature=0)
    print("TOKENS", json.dumps([o.outputs[0].token_ids for o in llm.generate(prompts, params)]))
"""


def generated(tmp_path: Path, **options: Any) -> list[list[int]]:
    """The tokens of the prompts, by an engine in processes of its own."""
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    given = {"model": str(MODEL), "additional_config": ROWS, **options}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([given, PROMPTS])],
        capture_output=True,
        text=True,
        env=ENV,
        cwd=ROOT,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "kvquant: K rows int4-g4, V rows int4-g4" in done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "TOKENS" in line]
    found: list[list[int]] = json.loads(line.partition("TOKENS ")[2])
    return found


@contextmanager
def server(*options: str, log: Path) -> Iterator[str]:
    """Run vLLM's server, and stop it as Ctrl-C does; the address of its API.

    `vllm serve` runs this module. That command asks for the version of a package "vllm", though,
    and this one is "vllm-cpu".
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", *options]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=ENV, cwd=ROOT)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(PATIENCE):
                assert process.poll() is None, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=1)
                    break
                except OSError:
                    time.sleep(1)
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
    assert code in (0, -signal.SIGINT), log.read_text()[-3000:]


def test_the_server_streams_to_two_clients_at_once(tmp_path: Path) -> None:
    import openai

    rows = ["--attention-backend", "CUSTOM", "--additional-config", json.dumps(ROWS)]
    size = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
    log = tmp_path / "log"
    with server(*rows, *size, log=log) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")

        def stream(prompt: str) -> list[str]:
            given = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0}
            parts = client.completions.create(**given, stream=True)
            return [part.choices[0].text for part in parts]

        alone = [stream(prompt) for prompt in PROMPTS]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(stream, PROMPTS))
        models = [model.id for model in client.models.list()]
    assert ["".join(parts) for parts in together] == ["".join(parts) for parts in alone]
    assert all(len(parts) > 8 and "".join(parts).strip() for parts in together)
    assert models == ["demo"]
    assert "kvquant: K rows int4-g4, V rows int4-g4" in log.read_text()


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    one = generated(tmp_path)
    assert generated(tmp_path, tensor_parallel_size=2) == one
