"""The server of kvquant/lmcache/README.md, and vLLM beside it (30 seconds); only where both are."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")  # LMCache's own
for name in ("vllm", "aiofiles", "lmcache.cli.main"):
    pytest.importorskip(name, exc_type=ModuleNotFoundError)
README = Path(__file__).parents[2] / "kvquant" / "lmcache" / "README.md"
PATIENCE = 300  # seconds, on slow cores that others use too


@pytest.fixture(autouse=True)
def _poisoned_memory() -> None:
    """Not here: vLLM reads what it has not written, and throws it away."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command_of(text: str, storage: Path) -> list[str]:
    """The README's command, with another storage, and int8 for the demo model."""
    found = re.search(r"^    (python -c .*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    words = shlex.split(found[1].replace("\\\n", " "))
    adapter = words[words.index("--l2-adapter") + 1]
    assert '"base_path": "/cache"' in adapter and '"type": "kvquant"' in adapter
    changed = adapter.replace("/cache", str(storage))
    changed = changed.replace('"kvquant"', '"kvquant", "k_format": "int8", "v_format": "int8"')
    words[words.index(adapter)] = changed
    words[words.index("--l1-size-gb") + 1] = "1"
    return [sys.executable, *words[1:]]


def test_what_one_engine_stored_as_rows_another_reads(tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig
    from vllm_engines import counter, engine, generate, mixed_prompts
    from vllm_texts import check_alike

    storage, log, port = tmp_path / "storage", tmp_path / "log", free_port()
    storage.mkdir()
    command = command_of(README.read_text(encoding="utf-8"), storage)
    # vLLM on the CPU moves its pages itself; nothing stays in memory, where objects have 16 bit
    command += ["--supported-transfer-mode", "engine_driven", "--l2-store-policy", "skip_l1"]
    command += ["--port", str(port), "--http-port", str(free_port())]
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    config = KVTransferConfig(
        kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    found: list[Any] = []
    env = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}  # it tells its makers otherwise
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=env) as server,
    ):
        try:
            last = time.monotonic() + PATIENCE
            while "Uvicorn running" not in log.read_text():
                assert server.poll() is None and time.monotonic() < last, log.read_text()[-3000:]
                time.sleep(0.2)
            for _ in range(2):
                with engine(kv_transfer_config=config, dtype="bfloat16") as llm:
                    found.append(generate(llm, mixed_prompts([900]), 12))
                    while len([*storage.glob("*.data")]) < 3:  # of 256 tokens each
                        assert time.monotonic() < last, log.read_text()[-3000:]
                        time.sleep(0.2)
                    hits = counter(llm, "external_prefix_cache_hits")
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(timeout=PATIENCE)
            finally:
                server.kill()
    assert hits == 768
    # Logits of 8 to 16 have a unit of 2**-4 in bfloat16, and two of them differ by some units. So
    # the text may part at once: for sure the log-probabilities of its first step are compared.
    check_alike(found[1], found[0], 6 * 2**-4, least_sure=0)
    # 4 layers with one KV head, whose K and V have rows of 132 bytes
    assert {path.stat().st_size for path in storage.glob("*.data")} == {32 + 256 * 4 * 2 * 132}
