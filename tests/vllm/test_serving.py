"""vLLM's server with rows and an OpenAI client: what clients do to it, what its operator does. On a
GPU where there is one (2 minutes), else on the CPU."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from vllm_engines import TEXT
from vllm_server import PATIENCE, server
from vllm_texts import Text, check_alike

pytestmark = pytest.mark.filterwarnings("default")
ON_GPU = torch.cuda.is_available()
# all tokens attend to rows: what is found in a cache gives the same as what was computed
# in 8-bit rows a code that rounds to its neighbour changes little
ROWS = {"kvquant": {"k_format": "int8", "v_format": "int8", "prompts": "rows"}}
OPTIONS = ["--attention-backend", "CUSTOM", "--additional-config", json.dumps(ROWS)]
OPTIONS += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 30)]
if ON_GPU:
    OPTIONS += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.2"]
else:
    OPTIONS += ["--dtype", "float32", "--enforce-eager"]
PROMPT = TEXT.read_text(encoding="utf-8")[-2000:]  # of some 600 tokens
# How far log-probabilities of the same rows may move. In bfloat16 logits of up to 16 are rounded by
# 2**-8 of them, those of the likeliest tokens and the sum. In float32 codes may round to their
# neighbours: an int8 row's are 17 times nearer than an int4 row's, for which check_same_rows allows
# 0.15.
MOST_MOVE = 0.15 if ON_GPU else 0.01
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20}
    | ({} if ON_GPU else {"spec_name": "HostSpec", "spec_module_path": "host_offloading"}),
}
CONNECTOR = ["--kv-transfer-config", json.dumps(OFFLOADING)]


class Served:
    """A server, as a client sees it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=PATIENCE)

    def stream(self, prompt: str = PROMPT, tokens: int = 24, **options: Any) -> Any:
        """The parts of a greedy text, as they come."""
        given = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return self.client.completions.create(**given, logprobs=5, stream=True, **options)

    def text(self, prompt: str = PROMPT) -> Text:
        """A greedy text."""
        parts = [part.choices[0] for part in self.stream(prompt)]
        found = [part.logprobs for part in parts if part.logprobs]
        text = Text(
            [token for one in found for token in one.tokens],
            [step for one in found for step in one.top_logprobs],
        )
        assert len(parts) > 8 and "".join(part.text for part in parts) == "".join(text.ids)
        return text

    def post(self, path: str) -> Any:
        """Ask for what an operator asks for."""
        request = urllib.request.Request(f"{self.address}/{path}", method="POST")
        return json.load(urllib.request.urlopen(request, timeout=PATIENCE))

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        page = urllib.request.urlopen(f"{self.address}/metrics", timeout=PATIENCE).read().decode()
        found = re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", page, flags=re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def wait_until_idle(self) -> None:
        """Until no request runs and no page is in use."""
        wait(lambda: not self.metric("num_requests_running") + self.metric("kv_cache_usage_perc"))


def wait(until: Callable[[], bool], seconds: float = 60) -> None:
    last = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < last
        time.sleep(0.2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log"
    with server(*OPTIONS, *(["--enable-sleep-mode"] if ON_GPU else CONNECTOR), log=log) as address:
        yield Served(address)
    assert "kvquant: K rows int8, V rows int8" in log.read_text()


def test_a_completion_and_a_stream_are_the_same(served: Served) -> None:
    given = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = served.client.completions.create(**given, logprobs=5)
    told = whole.choices[0].logprobs
    assert told is not None and whole.usage.completion_tokens == 24
    streamed = served.text()
    check_alike([streamed], [Text(told.tokens, told.top_logprobs)], MOST_MOVE, least_sure=0)
    assert len(streamed.ids) == 24


def test_two_clients_at_once_get_what_each_gets_alone(served: Served) -> None:
    prompts = ["The city of Manila was founded", "The river is one of the longest in"]
    alone = [served.text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(served.text, prompts))
    # near ties come early in these texts: 10 of 48 tokens stand before the first one
    check_alike(together, alone, MOST_MOVE, least_sure=0 if ON_GPU else 1 / 6)
    assert [model.id for model in served.client.models.list()] == ["demo"]


def test_a_stop_text_ends_a_stream_before_its_end(served: Served) -> None:
    whole = "".join(part.choices[0].text for part in served.stream())
    stop = whole[len(whole) // 2 :][:6]
    parts = [part.choices[0] for part in served.stream(stop=[stop])]
    text = "".join(part.text for part in parts)
    assert stop not in text and parts[-1].finish_reason in ("stop", "length")
    # in another text, which a near tie may begin, that text may not come
    assert parts[-1].finish_reason == "stop" or whole[: len(text)] != text
    served.wait_until_idle()


def test_a_client_that_hangs_up_leaves_no_pages(served: Served) -> None:
    stream = served.stream("The city of", tokens=900, extra_body={"ignore_eos": True})
    for _ in zip(range(5), stream, strict=False):
        pass
    before = served.metric("generation_tokens_total")
    stream.close()
    served.wait_until_idle()
    assert served.metric("generation_tokens_total") < before + 850
    assert len(served.text("The city of").ids) == 24


@pytest.mark.gpu
def test_a_server_sleeps_and_wakes_up(served: Served) -> None:
    """At level 1 vLLM moves the weights to the host's memory, and gives up its pages."""
    wanted = served.text()
    free, _ = torch.cuda.mem_get_info()
    served.post("sleep?level=1")
    assert torch.cuda.mem_get_info()[0] - free > 0.9 * (1 << 30)
    served.post("wake_up")
    served.post("reset_prefix_cache")
    check_alike([served.text()], [wanted], MOST_MOVE, least_sure=0)


def test_offloaded_pages_come_back_to_a_server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if ON_GPU:  # a server of its own; the other one need not start for this test
            log = tmp_path / "log"
            served = Served(stack.enter_context(server(*OPTIONS, *CONNECTOR, log=log)))
        else:
            served = request.getfixturevalue("served")
        wanted = served.text()
        assert served.metric("external_prefix_cache_hits_total") == 0
        wait(lambda: bool(served.post("reset_prefix_cache")["success"]))
        check_alike([served.text()], [wanted], MOST_MOVE, least_sure=0)
        assert served.metric("external_prefix_cache_hits_total") > 400
