"""Of a log of vLLM the error is told that came first."""

from __future__ import annotations

from pathlib import Path

from vllm_log import LAST, what_failed

LOG = """\
WARNING [cuda.py:22] Failed to import from vllm._C: ModuleNotFoundError("No module 'vllm._C'")
(EngineCore pid=7) ERROR Traceback (most recent call last):
(EngineCore pid=7) ERROR   File "helpers.py", line 22, in <module>
(EngineCore pid=7) ERROR     from loguru import logger
(EngineCore pid=7) ERROR ModuleNotFoundError: No module named 'loguru'
"""
OTHER = "RuntimeError: Engine core initialization failed. See root cause above."


def test_the_first_error_is_told_before_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text(LOG + "INFO waiting\n" * 2 * LAST + OTHER)
    first, last = what_failed(log).split("--- last lines of own.log\n")
    assert first.splitlines()[-1].endswith("ModuleNotFoundError: No module named 'loguru'")
    assert "helpers.py" in first
    assert last.splitlines() == ["INFO waiting"] * (LAST - 1) + [OTHER]


def test_a_log_without_an_error_has_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text("INFO waiting\n")
    assert what_failed(log) == "--- last lines of own.log\nINFO waiting"
