"""vLLM in processes of its own, and its server; only where vLLM is installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_engines import MODEL, ROOT
from vllm_log import what_failed

PATIENCE = 600  # seconds to start, and to stop, on slow cores that others use too


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run vLLM, with its output in a file; none of its processes is left."""
    env = {
        **os.environ,
        "TMPDIR": str(log.parent),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # kvquant and tests/support
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of functions, to processes of the same engine
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # its server lets its caches be emptied, and sleeps
    }
    with log.open("w") as file:
        started = subprocess.Popen(
            command, stdout=file, stderr=file, env=env, cwd=ROOT, start_new_session=True
        )
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@contextmanager
def server(*options: str, log: Path) -> Iterator[str]:
    """Run vLLM's server, and stop it as Ctrl-C does; the address of its API.

    `vllm serve` asks for the version of a package "vllm": the CPU build is "vllm-cpu", and there
    the module runs that this command runs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        version("vllm")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL)]
    except PackageNotFoundError:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", *options]
    address = f"http://127.0.0.1:{port}"
    with process(command, log) as running:
        last = time.monotonic() + PATIENCE
        while True:
            assert running.poll() is None and time.monotonic() < last, what_failed(log)
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=10)
                break
            time.sleep(1)
        yield address
        running.send_signal(signal.SIGINT)
        code = running.wait(timeout=PATIENCE)
        assert code in (0, -signal.SIGINT), what_failed(log)
