"""The classes that SGLang instantiates, on the CPU, with SGLang's own pools and layers and without
its engine: pools of two parts, sink logits, CUDA graphs' tables, refusals.

A CUDA graph reads the same tensors at each replay. So does a step that was described once: here it
stands for the graph.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_plan import example_plan
from refusals import assert_refused
from transformers import AutoConfig, LlamaConfig

from kvquant import dequantize_rows
from kvquant.engine.settings import Settings
from kvquant.errors import CheckpointError, ConfigError, UnsupportedError
from kvquant.sglang import environment, plugin

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 64, 24
SETTINGS = Settings.parse({"k_format": "int8", "v_format": "int4-g4", "recent_len": 0})
EXACT = "bf16", "bf16"
LENS = (70, 33, 1)
ROOM = 512  # tokens of a pool
PARTS = {"Full": [0], "SWA": [1]}  # layers of a pool of two parts

pytestmark = pytest.mark.usefixtures("sglang")


class Mixed(Settings):
    """As SETTINGS, but that the second layer is in 16 bit."""

    def of_layer(self, layer: int) -> Settings:
        return Settings(*EXACT, recent_len=self.recent_len) if layer else self


MIXED = Mixed(SETTINGS.k_format, SETTINGS.v_format)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, sglang: None) -> None:
    from kvquant.sglang import backend, layers, pool

    for module in (backend, layers, pool):
        monkeypatch.setattr(module, "settings", lambda: SETTINGS)
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))
    found = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs))
    monkeypatch.setattr(backend, "get_exec", lambda: found)


class Attention(torch.nn.Module):
    """A layer of a model, with its sink logits."""

    def __init__(self, layer: Any, sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.attn, self.sinks = layer, sinks


def make_layer(place: int, **changes: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    given = {"logit_cap": 20.0, "sliding_window_size": WINDOW - 1} if place else {}
    layer = RadixAttention(
        HEADS, DIM, DIM**-0.5, KV_HEADS, place, **{k: changes.pop(k, v) for k, v in given.items()}
    )
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


@dataclass
class Served:
    """A model of two layers, the second with a window and a soft cap, and its pools."""

    runner: Any
    mapping: torch.Tensor | None
    asked: Settings = SETTINGS

    def batch(self, lens: Any, counts: list[int] | None = None, rows: Any = None) -> Any:
        """A batch: decoding sequences, or prompts with as many new tokens."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        rows = torch.arange(1, 1 + len(lens)) if rows is None else torch.tensor(rows)
        lens = torch.tensor(lens)
        table = self.runner.req_to_token_pool.req_to_token
        new = [
            table[row, length - count : length]
            for row, length, count in zip(rows, lens, counts or [1] * len(lens), strict=True)
        ]
        return SimpleNamespace(
            batch_size=len(lens),
            forward_mode=ForwardMode.DECODE if counts is None else ForwardMode.EXTEND,
            seq_lens=lens,
            seq_lens_cpu=lens,
            req_pool_indices=rows,
            out_cache_loc=torch.cat(new).long(),
            extend_seq_lens_cpu=counts,
        )

    def slots(self, row: int, length: int, place: int) -> torch.Tensor:
        """Of a sequence's tokens in a layer."""
        found = self.runner.req_to_token_pool.req_to_token[row, :length].long()
        return found if self.mapping is None or not place else self.mapping[found]


def served(page_size: int, *, parts: int, layers: Any = None, **options: Any) -> Served:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from kvquant.sglang.layers import MOVING
    from kvquant.sglang.pool import RowsPool

    torch.manual_seed(page_size)
    dtype, mapping = options.pop("dtype", torch.float32), None
    pages = 1 + torch.randperm(ROOM // page_size)

    def slots_of(pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None] * page_size + torch.arange(page_size)).flatten()

    if parts == 1:
        pool: Any = RowsPool(ROOM, page_size, dtype, KV_HEADS, DIM, 2, "cpu", False, **options)
    else:
        pool = SWAKVPool(
            ROOM, ROOM, page_size, dtype, KV_HEADS, DIM, [1], [0], "cpu",
            token_to_kv_pool_class=type("RowsPool", (RowsPool,), {"layers": PARTS}), **options,
        )  # fmt: skip
        mapping = torch.zeros(ROOM + page_size + 1, dtype=torch.int64)
        mapping[-1] = -1
        mapping[slots_of(pages)] = slots_of(1 + torch.randperm(ROOM // page_size))
        pool.register_mapping(mapping)
    table = torch.zeros(1 + len(LENS), 128, dtype=torch.int32)
    table[1:] = slots_of(pages)[: 128 * len(LENS)].view(-1, 128)
    model = torch.nn.ModuleList(
        Attention(
            layer, torch.nn.Parameter(torch.randn(HEADS).bfloat16()) if layer.layer_id else None
        )
        for layer in layers or (make_layer(0), make_layer(1))
    )
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=len(LENS)),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        model=model,
        model_config=SimpleNamespace(
            context_len=128,
            revision=None,
            model_path="a folder",
            get_total_num_kv_heads=lambda: KV_HEADS,
        ),
        server_args=SimpleNamespace(
            model_path="a folder",
            load_format="dummy",
            revision=None,
            download_dir=None,
            chunked_prefill_size=64,
            tp_size=1,
            max_prefill_tokens=128,
            trust_remote_code=False,
            enable_two_batch_overlap=False,
            **dict.fromkeys(MOVING, False) | {"disaggregation_mode": "null"},
        ),
        dtype=torch.float32,
        device="cpu",
        page_size=page_size,
    )
    return Served(runner, mapping)


def of_rows(one: Served, q: torch.Tensor, row: int, length: int, place: int) -> torch.Tensor:
    """Attention of a sequence's last query [HEADS, DIM] to its rows, in float64."""
    from kvquant.sglang.pool import pages_of

    slots = one.slots(row, length, place)
    layout = one.asked.of_layer(place).layout(KV_HEADS, DIM, DIM)
    k, v = (
        dequantize_rows(
            pages.transpose(1, 2).flatten(0, 1)[slots][..., : fmt.row_bytes].contiguous(), fmt
        )
        .double()
        .repeat_interleave(HEADS // KV_HEADS, 1)
        for pages, fmt in zip(pages_of(one.runner.token_to_kv_pool, place), layout[:2], strict=True)
    )
    scores = torch.einsum("hd,thd->ht", q.double(), k) * DIM**-0.5
    sinks = one.runner.model[place].sinks
    if place:
        scores = 20 * torch.tanh(scores / 20)
        scores[:, : max(length - WINDOW, 0)] = -torch.inf
        scores = torch.cat([scores, sinks.detach().double()[:, None]], 1)
    return torch.einsum("ht,thd->hd", scores.softmax(-1)[:, :length], v)


def run(one: Served, backend: Any, batch: Any, seed: int) -> list[torch.Tensor]:
    """The outputs of both layers for a batch, with queries [tokens, HEADS, DIM] of a seed."""
    torch.manual_seed(seed)
    found, tokens = [], len(batch.out_cache_loc)
    for layer in one.runner.model:
        q, k, v = (torch.randn(tokens, heads * DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        given = {} if layer.sinks is None else {"sinks": layer.sinks}
        found.append(backend.forward(q, k, v, layer.attn, batch, **given).view(tokens, HEADS, DIM))
    return found


def queries(tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Those of run, layer by layer."""
    torch.manual_seed(seed)
    while True:
        yield torch.randn(tokens, HEADS * DIM).view(tokens, HEADS, DIM)
        torch.randn(2, tokens, KV_HEADS * DIM)


@pytest.fixture(
    params=[(1, 1), (16, 1, MIXED), (1, 2, MIXED), (16, 2)], ids=lambda given: str(given[:2])
)
def filled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Served, Any]:
    """A backend, and sequences whose prompts are in the pool: page sizes, parts of the pool, and
    settings."""
    from kvquant.sglang import pool
    from kvquant.sglang.backend import RowsAttention

    page_size, parts, *others = request.param
    asked = others[0] if others else SETTINGS
    monkeypatch.setattr(pool, "settings", lambda: asked)
    one = replace(served(page_size, parts=parts), asked=asked)
    backend = RowsAttention(one.runner)
    batch = one.batch(LENS, list(LENS))
    backend.init_forward_metadata(batch)
    run(one, backend, batch, 0)
    return one, backend


@torch.no_grad()
def check_decoding(
    one: Served, lens: list[int], found: list[torch.Tensor], seed: int, tokens: int = 3
) -> None:
    """Outputs for sequences of these lengths; other tokens may be behind them."""
    for place, (q, out) in enumerate(zip(queries(tokens, seed), found)):  # noqa: B905
        for row, length in enumerate(lens):
            expected = of_rows(one, q[row], row + 1, length, place)
            assert (out[row].double() - expected).abs().max() < 1e-5


def test_rows_of_windows_sinks_and_caps(filled: tuple[Served, Any]) -> None:
    """Of the call: a layer's sink logits may change between steps, as weights do."""
    one, backend = filled
    for step, length in enumerate(range(71, 74)):
        lens = [length, length - 37, 2 + step]
        batch = one.batch(lens)
        backend.init_forward_metadata(batch)
        with torch.no_grad():
            one.runner.model[1].sinks.normal_()
        check_decoding(one, lens, run(one, backend, batch, step), step)


def test_a_graphs_steps_read_what_replays_write(filled: tuple[Served, Any]) -> None:
    """Captured for 4 sequences of one token, replayed for 3 longer ones and one that fills up."""
    one, backend = filled
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = one.batch([fill] * 4, rows=[0] * 4)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    captured = backend._steps
    eager = one.batch(LENS)  # between a capture and its replay
    backend.init_forward_metadata(eager)
    for seed, lens in enumerate(([71, 34, 2], [90, 35, 3])):
        batch = one.batch([*lens, fill], rows=[1, 2, 3, 0])
        static.out_cache_loc.copy_(batch.out_cache_loc)
        backend.init_forward_metadata_out_graph(batch)
        backend._steps = captured
        backend.init_forward_metadata_in_graph(static)
        check_decoding(one, lens, run(one, backend, static, seed), seed, tokens=4)


@pytest.mark.parametrize("parts", [1, 2])
@torch.no_grad()
def test_first_pages_and_last_tokens_are_in_16_bit(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of a graph and without one."""
    from kvquant.sglang import backend as home
    from kvquant.sglang import layers, pool

    found = []
    for fmt, recent_len in (("fp16", 0), ("int4", 0), ("int4", 24)):
        asked = Settings.parse({"k_format": fmt, "v_format": fmt, "recent_len": recent_len})
        for module in (home, layers, pool):
            monkeypatch.setattr(module, "settings", lambda asked=asked: asked)
        one = served(16, parts=parts)
        backend = home.RowsAttention(one.runner)
        batch = one.batch(LENS, list(LENS))
        backend.init_forward_metadata(batch)
        run(one, backend, batch, 0)
        outputs = []
        for step in range(2):
            batch = one.batch([length + 1 + step for length in LENS])
            backend.init_forward_metadata(batch)
            outputs += run(one, backend, batch, step)
        backend.init_cuda_graph_state(3, 3)
        static = one.batch([1] * 3, rows=[0] * 3)
        backend.init_forward_metadata_out_graph(static, in_capture=True)
        batch = one.batch([length + 3 for length in LENS])
        static.out_cache_loc.copy_(batch.out_cache_loc)
        backend.init_forward_metadata_out_graph(batch)
        backend.init_forward_metadata_in_graph(static)
        outputs += run(one, backend, static, 9)
        found.append(torch.stack(outputs))
    exact, bare, kept = found
    assert (kept - exact).norm() < (bare - exact).norm() / 1.5
    short = slice(2, 3)  # of a few tokens, all in 16 bit
    assert (kept - exact)[:, short].abs().max() < 0.05 < (bare - exact)[:, short].abs().max()


def test_a_layer_in_16_bit_keeps_no_tokens_beside_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvquant.sglang import backend, layers, pool

    asked = replace(MIXED, recent_len=24)
    for module in (backend, layers, pool):
        monkeypatch.setattr(module, "settings", lambda: asked)
    told: list[str] = []
    monkeypatch.setattr(layers, "tell_settings", lambda *given: told.append(given[2]))
    for parts, kept in ((1, [True]), (2, [True, False])):
        found = backend.RowsAttention(served(16, parts=parts).runner)
        assert [found._rows[layer].window is not None for layer in range(2)] == [True, False]
        assert [window is not None for window in found._windows] == kept
    assert told == 2 * ["512 tokens, 11.6 bits an element"]  # 8 * (68 + 48 + 256) / 256


def test_where_first_pages_cannot_be_in_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquant.sglang import layers
    from kvquant.sglang.backend import RowsAttention

    asked = Settings.parse({"k_format": "int8", "v_format": "int4-g4", "recent_len": 8})
    for name, value, words in (
        ("page_size", 2, "hold less than 4 first tokens"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache writes pages without"),
        ("enable_lmcache", True, "--enable-lmcache writes pages without 16-bit rows"),
        ("enable_two_batch_overlap", True, "runs two steps at a time"),
    ):
        runner = served(2 if name == "page_size" else 16, parts=1).runner
        setattr(runner.server_args, name, value)
        assert RowsAttention(runner)._windows == [None]  # it was not asked for
        with monkeypatch.context() as patch:
            patch.setattr(layers, "settings", lambda: asked)
            words = rf'"recent_len" is 8, and .*{words}'
            assert_refused(ConfigError, (partial(RowsAttention, runner), words))


@pytest.mark.parametrize(
    ("page_size", "k_bytes", "v_bytes"), [(16, 68, 40), (4, 68, 40), (1, 80, 48)]
)
def test_pages_cost_the_bytes_of_their_rows(
    page_size: int, k_bytes: int, v_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads of 128 and 64 elements in int4 and int4-g2, of 68 and 40 bytes."""
    from kvquant.sglang import pool

    asked = Settings.parse({"k_format": "int4", "v_format": "int4-g2"})
    monkeypatch.setattr(pool, "settings", lambda: asked)
    made = pool.RowsPool(
        ROOM, page_size, torch.float32, KV_HEADS, 128, 2, "cpu", False, v_head_dim=64
    )
    size = plugin._bytes_of_head(range(2), 128, 64, page_size)
    assert size == k_bytes + v_bytes
    assert sum(made.get_kv_size_bytes()) == (ROOM + page_size) * 2 * KV_HEADS * size
    for pages, row_bytes in zip(pool.pages_of(made, 1), (k_bytes, v_bytes), strict=True):
        assert pages.shape == (ROOM // page_size + 1, KV_HEADS, page_size, row_bytes)
        assert not any(stride % 16 for stride in pages.stride()[:2])  # as CUDA kernels want pages


def set_plan(monkeypatch: pytest.MonkeyPatch, name: str = "int4") -> None:
    """A plan of three layers, of which the last is in 16 bit, and the others have this format."""
    from kvquant.sglang import backend, pool

    formats = {(layer, side): name for layer in range(2) for side in "kv"}
    plan = example_plan(3, KV_HEADS, DIM).with_layer_formats(formats)
    asked = Settings.parse({"plan": plan})
    for module in (backend, pool):
        monkeypatch.setattr(module, "settings", lambda: asked)


def test_layers_of_a_pipelines_stage_have_their_own_sizes(
    monkeypatch: pytest.MonkeyPatch, backends: list[str]
) -> None:
    """The stage has layers 1, in int4, and 2, in 16 bit."""
    from kvquant.sglang.pool import RowsPool, pages_of

    set_plan(monkeypatch)
    given = ROOM, 16, torch.float32, KV_HEADS, DIM, 2, "cpu", False
    pool = RowsPool(*given, start_layer=1, end_layer=3)
    size = KV_HEADS * 2 * (36 + 2 * DIM)
    for layer, row_bytes in ((1, 36), (2, 2 * DIM)):
        for pages in pages_of(pool, layer):
            assert pages.shape == (ROOM // 16 + 1, KV_HEADS, 16, row_bytes)
    assert sum(pool.get_kv_size_bytes()) == (ROOM + 16) * size
    info = SimpleNamespace(start_layer=1)
    in_16_bit = lambda *_: 2 * KV_HEADS * (64 + 64) * 2  # noqa: E731
    assert plugin._cell_size(in_16_bit, None, configurator(layer_info=info), 2) == size
    pointers, lens, items = pool.get_contiguous_buf_infos()
    assert items == [16 * KV_HEADS * row_bytes for row_bytes in 2 * (36, 2 * DIM)]
    for buffer, start, length in zip((*pool.k_buffer, *pool.v_buffer), pointers, lens, strict=True):
        assert (buffer.data_ptr(), buffer.nbytes) == (start, length)


@pytest.mark.parametrize("parts", [1, 2])
def test_whole_pages_keep_their_rows_in_host_memory(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's copy to host memory and back, of layers whose rows differ in size."""
    from kvquant.sglang import pool as home

    monkeypatch.setattr(home, "settings", lambda: MIXED)
    one = served(16, parts=parts)
    pool = one.runner.token_to_kv_pool
    for part in home.parts_of(pool):
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer.random_(0, 256)
    before, after = (16 * torch.tensor(at)[:, None] + torch.arange(16) for at in ([5, 9], [20, 3]))

    def pages(slots: torch.Tensor) -> list[torch.Tensor]:
        places = [slots, slots if one.mapping is None else one.mapping[slots]]
        return [
            found[places[layer][:, 0] // 16]
            for layer in range(2)
            for found in home.pages_of(pool, layer)
        ]

    kept = [found.clone() for found in pages(before)]
    pool.load_cpu_copy(pool.get_cpu_copy(before.flatten()), after.flatten())
    for found, rows in zip(pages(after), kept, strict=True):
        assert torch.equal(found, rows)


def test_what_moves_rows_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquant.sglang import backend, layers

    given = served(1, parts=1).runner.server_args
    for name in layers.MOVING:
        args = SimpleNamespace(**{**vars(given), name: "prefill" if "mode" in name else True})
        for fmt in ("int4", "bf16"):
            set_plan(monkeypatch, fmt)
            runner = served(1, parts=1).runner
            runner.server_args = args
            told = list(backend._problems(runner, [runner.token_to_kv_pool]))
            flag = "--" + name.replace("_", "-")
            assert [flag in one and "leave it out" in one for one in told] == [True] * (
                fmt == "int4"
            )


def test_disaggregation_moves_tokens_out_of_pages() -> None:
    from kvquant.sglang.backend import RowsAttention

    for page_size in (1, 16):
        runner = served(page_size, parts=1).runner
        runner.server_args.disaggregation_mode = "decode"
        if page_size == 1:
            RowsAttention(runner)
            continue
        words = "disaggregation moves single tokens.* give --page-size 1"
        assert_refused(UnsupportedError, (partial(RowsAttention, runner), words))


def test_layers_are_refused_at_the_start() -> None:
    from kvquant.sglang.backend import RowsAttention

    encoder, cap = SimpleNamespace(value="encoder_only"), {"logit_cap": 20.0}
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([{"use_irope": True}], "0.attn: it attends within local"),
        ([{"xai_temperature_len": 8}], "queries' temperature"),
        ([{"pos_encoding_mode": "ALIBI"}], "positions by ALIBI"),
        ([cap | {"logit_capping_method": "sin"}], "scores by sin, not tanh"),
        ([{"is_cross_attention": True}], "of type cross attention"),
        ([{"attn_type": encoder}], "of type encoder_only"),
        ([{}, {}], "1.attn: it shares layer_id 0 with another layer"),
        ([{"tp_k_head_num": 4}], "it has 4 KV heads (head_dim 64 of K, 64 of V)"),
        ([{"layer_id": 2}], "SGLang's pool has no layer 2"),
    ]
    for changes, words in cases:
        runner = served(1, parts=1, layers=[make_layer(0, **one) for one in changes]).runner
        assert_refused(UnsupportedError, (partial(RowsAttention, runner), re.escape(words)))


def test_engines_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvquant.sglang import backend

    one = served(1, parts=1).runner
    one.spec_algorithm = SimpleNamespace(is_none=lambda: False)
    with pytest.raises(UnsupportedError, match="no backend for drafted tokens"):
        backend.RowsAttention(one)
    one.token_to_kv_pool = type("HybridLinearKVPool", (), {})()
    with pytest.raises(UnsupportedError, match="of this model in HybridLinearKVPool, and kvquant"):
        backend.RowsAttention(one)
    for options in ({"dtype": torch.float8_e5m2}, {"quant_method": "fp4"}):
        with pytest.raises(UnsupportedError, match="give --kv-cache-dtype bfloat16"):
            served(1, parts=1, **options)
    with pytest.raises(UnsupportedError, match="has the layout hnd"):
        served(1, parts=1, kv_cache_layout="hnd")
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    found = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=graphs))
    monkeypatch.setattr(backend, "get_exec", lambda: found)
    with pytest.raises(UnsupportedError, match="--cuda-graph-backend-prefill breakable"):
        backend.RowsAttention(served(1, parts=1).runner)


def test_plans_of_other_models_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan's model is told by its config as it was saved: SGLang writes into its own."""
    from kvquant.sglang import backend, layers

    LlamaConfig(head_dim=DIM).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path).to_dict()
    plan = example_plan(3, KV_HEADS, DIM, config=config)
    asked = Settings("int8", "int4-g4", plan.with_formats("int8", "int4-g4"))
    monkeypatch.setattr(backend, "settings", lambda: asked)
    parallel = SimpleNamespace(attn_tp_rank=0, attn_tp_size=1)
    monkeypatch.setattr(layers, "get_parallel", lambda: parallel)
    one = served(1, parts=1).runner
    one.model_config.model_path = str(tmp_path)
    rows = backend.RowsAttention(one)._rows
    assert all(one.basis is not None for one in rows.values())
    LlamaConfig(head_dim=DIM, hidden_size=512).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="calibrate this model"):
        backend.RowsAttention(one)


def test_calls_that_have_no_rows_are_refused(filled: tuple[Served, Any]) -> None:
    one, backend = filled
    batch, layer = one.batch([71, 34, 2]), one.runner.model[0].attn
    backend.init_forward_metadata(batch)
    q, k = torch.randn(3, HEADS * DIM), torch.randn(3, KV_HEADS * DIM)
    pool, forward = one.runner.token_to_kv_pool, backend.forward
    write = pool.set_kv_buffer
    rope = "calls RowsAttention.forward_extend with k_rope="
    assert_refused(
        UnsupportedError,
        (lambda: forward(q, None, None, layer, batch), "0 attends to another layer's K and V"),
        (lambda: forward(q, k, k, layer, batch, k_rope=k), rope),
        (lambda: write(layer, batch.out_cache_loc, k, k), "by kvquant's attention backend alone"),
        (
            lambda: pool.move_kv_cache(*2 * [batch.out_cache_loc]),
            "single tokens do not move: leave",
        ),
        (lambda: backend.init_cuda_graph_state(4, 8), "graphs of one token for each sequence"),
        (lambda: backend.init_cpu_graph_state(4, 4), "leave --enable-torch-compile out"),
    )


def test_kernels_are_compiled_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: before the first request, and with the sinks that a layer gets with its queries."""
    from kvquant.sglang import backend

    told: list[Any] = []
    monkeypatch.setattr(backend, "warm_up_layers", lambda *given: told.extend(given))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    one = served(16, parts=2).runner
    one.device = "cuda"
    backend.RowsAttention(one)
    device, calls = told
    assert device == torch.device("cuda", 3)
    assert [call.layer.variant is None for call in calls] == [True, False]
    variant = calls[1].layer.variant
    assert variant.sink_logits.dtype == torch.float32 and variant.window == WINDOW
    for call in calls:
        assert (call.num_q_heads, call.page_size, call.max_model_len) == (HEADS, 16, 128)
        assert (call.max_num_seqs, call.max_num_tokens) == (len(LENS), 64)


def configurator(**changes: Any) -> Any:
    model = SimpleNamespace(
        head_dim=64,
        v_head_dim=64,
        swa_head_dim=128,
        swa_v_head_dim=128,
        get_num_kv_heads=lambda ranks: 8 // ranks,
        get_swa_num_kv_heads=lambda ranks: 4 // ranks,
    )
    given = {"is_draft_worker": False, "use_mla_backend": False, "kv_cache_dtype": torch.bfloat16}
    given["page_size"] = 16
    given["layer_info"] = SimpleNamespace(
        start_layer=0, full_attention_layer_ids=[0], swa_attention_layer_ids=[1]
    )
    return SimpleNamespace(model_config=model, **{**given, **changes})


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine was asked for: the backends of prompts and of decoding sequences."""
    from sglang.srt import runtime_context

    found = ["kvquant", "kvquant"]
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: tuple(found))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=2))
    return found


def test_bytes_of_tokens(backends: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """K int8 and V int4-g4: 68 and 48 bytes with 64 elements, 132 and 80 with 128."""
    from kvquant.sglang import pool

    def in_16_bit(sizes: Any, configurator: Any, num_layers: int) -> int:
        return num_layers * 4 * (64 + 64) * 2

    assert plugin._cell_size(in_16_bit, None, configurator(), 3) == 3 * 4 * (68 + 48)
    sizes = SimpleNamespace(_full_per_token=0, _swa_per_token=0, _recompute_cell_size=list)
    plugin._window_sizes(lambda *_: None, sizes, configurator())
    assert sizes._full_per_token == 4 * (68 + 48) and sizes._swa_per_token == 2 * (132 + 80)
    info = SimpleNamespace(full_attention_layer_ids=[0, 2, 4], swa_attention_layer_ids=[1, 3])
    monkeypatch.setattr(pool, "settings", lambda: MIXED)  # 16 bit from the second layer on
    plugin._window_sizes(lambda *_: None, sizes, configurator(layer_info=info))
    assert sizes._full_per_token == math.ceil(4 * (68 + 48 + 2 * 256) / 3)  # whole, as SGLang's
    assert sizes._swa_per_token == 2 * 512
    monkeypatch.setattr(pool, "settings", lambda: SETTINGS)
    for others in ({"is_draft_worker": True}, {"use_mla_backend": True}):
        assert plugin._cell_size(in_16_bit, None, configurator(**others), 3) == 3072
        plugin._window_sizes(lambda *_: None, sizes, configurator(**others))
    backends[:] = ["triton", "triton"]
    assert plugin._cell_size(in_16_bit, None, configurator(), 3) == 3072


def test_the_choice_of_the_pool(backends: list[str]) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.memory_pool import PageMajorMHATokenToKVPool as PageMajor

    from kvquant.sglang.pool import RowsPool

    def own(_: Any, *, kind: str, default: type) -> type:
        return default

    chosen = plugin._pool_class
    found = chosen(own, configurator(), kind="mha", default=MHATokenToKVPool)
    assert issubclass(found, RowsPool) and found.layers == PARTS
    assert chosen(own, configurator(), kind="mla", default=MLATokenToKVPool) is MLATokenToKVPool
    with pytest.raises(UnsupportedError, match="leave --enable-page-major-kv-layout out"):
        chosen(own, configurator(), kind="mha", default=PageMajor)
    backends[1] = "triton"
    with pytest.raises(ConfigError, match=re.escape("backends ['kvquant', 'triton']")):
        chosen(own, configurator(), kind="mha", default=MHATokenToKVPool)
    backends[0] = "triton"
    assert chosen(own, configurator(), kind="mha", default=MHATokenToKVPool) is MHATokenToKVPool


def test_hooks_take_further_arguments(
    backends: list[str], filled: tuple[Served, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang
    from engine_contract import hooks_of

    from kvquant.sglang import backend

    for hook in hooks_of("sglang", backend, more=("init_cpu_graph_state",)):
        assert hook.takes_all or hasattr(hook.ours, "__wrapped__"), f"decorate {hook.name}"
        assert not hook.further(), hook.name

    def in_16_bit(sizes: Any, configurator: Any, num_layers: int, more: object = None) -> int:
        return 1024

    assert plugin._cell_size(in_16_bit, None, configurator(), 1, more=None) == 4 * (68 + 48)
    with pytest.raises(UnsupportedError, match="with more=2, which kvquant does not serve"):
        plugin._cell_size(in_16_bit, None, configurator(), 1, more=2)
    one, rows = filled
    assert rows.get_cuda_graph_seq_len_fill_value(None, other=False) == 1
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    for asked in (lambda: plugin._cell_size(in_16_bit, None, configurator(), 1),
                  lambda: plugin._make_backend(one.runner)):  # fmt: skip
        with pytest.raises(UnsupportedError, match=r"SGLang 0\.5\.24 was not tried.*pip install"):
            asked()
    backends[:] = ["triton", "triton"]
    assert plugin._cell_size(in_16_bit, None, configurator(), 1, more=2) == 1024


def test_what_sglang_lists_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss and Gemma 4 are adjusted as with Triton's backend, and the rest as before."""
    from sglang.srt.arg_groups import model_hook

    told: list[Any] = []
    judged: list[Any] = []
    monkeypatch.setattr(model_hook, "attention_backends_of", lambda view: view.backends)
    monkeypatch.setattr(
        plugin, "with_kept_plan", lambda given, source: given | {"k_format": source}
    )
    monkeypatch.setattr(plugin, "accuracy_of", lambda asked, of: judged.append((asked, of(True))))
    monkeypatch.setattr(plugin, "weights_of", lambda *given: given)
    monkeypatch.setenv(environment.VARIABLE, '{"prompts": "rows"}')
    for name in ("fa3", "kvquant"):
        assert os.environ[environment.VARIABLE] == '{"prompts": "rows"}'
        given = {"model_path": "int4", "load_format": "dummy", "revision": None}
        view = SimpleNamespace(backends=(name, name), download_dir=None, **given)
        plugin._admit(view, lambda view: told.append(model_hook.attention_backends_of(view)))
    assert told == [("fa3", "fa3"), ("triton", "triton")]
    assert model_hook.attention_backends_of(view) == ("kvquant", "kvquant")
    # SGLang's other processes find the kept plan in their environment
    assert json.loads(os.environ[environment.VARIABLE]) == {"prompts": "rows", "k_format": "int4"}
    ((asked, weights),) = judged
    assert asked.k_format == "int4" and weights == (view, True), "they are downloaded first"
