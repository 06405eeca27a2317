"""A toy engine that serves a small model from quantized rows, by the contract alone.

It does what engines do: continuous batching, prompts in chunks, pages from one pool, and preemption
where the pool is empty. The reference has no pages and no steps: it computes each text in one pass,
in float64, with causal attention to the keys and values that rows would give back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_pages import exact
from relative_l2 import relative_l2
from torch.nn.functional import rms_norm, silu

from kvquant import AttentionVariant, RowFormat, ShapeError, dequantize_rows, quantize_rows
from kvquant.engine.contract import LayerRows, NewTokens
from kvquant.engine.settings import Settings
from kvquant.engine.step import append, attend, describe_step

LAYERS, WIDTH, VOCABULARY = 3, 96, 50
Q_HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 64, 40
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """A decoder of random weights: RoPE, grouped heads, a sliding window in its second layer."""

    windows = (None, WINDOW, None)
    sm_scale = DIM**-0.5

    def __init__(self) -> None:
        sizes = {"q": Q_HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        sizes |= {"up": 2 * WIDTH, "gate": 2 * WIDTH}
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.layers = []
        for _ in range(LAYERS):
            layer = {name: torch.randn(WIDTH, size) / WIDTH**0.5 for name, size in sizes.items()}
            layer["o"] = torch.randn(Q_HEADS * DIM, WIDTH) / (Q_HEADS * DIM) ** 0.5
            layer["down"] = torch.randn(2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5
            self.layers.append(layer)

    def double(self) -> Model:
        """The same weights in float64."""
        model = Model()
        model.embedding = self.embedding.double()
        model.layers = [{name: x.double() for name, x in one.items()} for one in self.layers]
        return model

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [tokens, VOCABULARY]; attend gives the output of a layer's attention for q, k and
        v, [tokens, heads, DIM] each."""
        x = self.embedding[ids]
        for i, layer in enumerate(self.layers):
            normed = rms_norm(x, (WIDTH,))
            q, k, v = ((normed @ layer[name]).unflatten(-1, (-1, DIM)) for name in "qkv")
            out = attend(i, rotated(q, positions), rotated(k, positions), v)
            x = x + out.flatten(1) @ layer["o"]
            normed = rms_norm(x, (WIDTH,))
            x = x + (silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"]
        return rms_norm(x, (WIDTH,)) @ self.embedding.T


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE of [tokens, heads, DIM]."""
    angles = positions[:, None, None] * 10000.0 ** -torch.linspace(0, 1, DIM // 2).double()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


@dataclass
class Request:
    """A text that grows.

    Attributes:
        ids: the prompt, then what was generated.
        end: tokens of the whole text.
        arrival: the step at which it comes.
        pages: that hold its rows.
        rows: tokens that have rows.
        logits: those from which each generated token was chosen.
    """

    ids: list[int]
    end: int
    arrival: int
    pages: list[int] = field(default_factory=list)
    rows: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Engine:
    """Serves requests.

    Args:
        model: what it serves.
        settings: the rows.
        num_pages, page_size: of the pool.
        budget: tokens of a step, at most.
    """

    def __init__(
        self, model: Model, settings: Settings, num_pages: int, page_size: int, budget: int
    ) -> None:
        self.model, self.page_size, self.budget = model, page_size, budget
        layout = settings.layout(KV_HEADS, DIM, DIM)
        self.layers = [
            LayerRows(
                layout,
                model.sm_scale,
                variant=None if window is None else AttentionVariant(window=window),
                prompts_from_rows=settings.prompts_from_rows,
            )
            for window in model.windows
        ]
        shape = LAYERS, num_pages, layout.num_kv_heads, page_size, layout.token_bytes
        self.pages = torch.full(shape, 255, dtype=torch.uint8)  # NaN in all formats
        self.free = torch.randperm(num_pages).tolist()
        self.preempted = self.steps = self.mixed = 0

    def serve(self, requests: Sequence[Request]) -> None:
        """Run until all texts have their ends."""
        waiting = sorted(requests, key=lambda request: request.arrival)
        running: list[Request] = []
        while waiting or running:
            while waiting and waiting[0].arrival <= self.steps:
                running.append(waiting.pop(0))
            self.step(running)
            for request in [one for one in running if len(one.ids) == one.end]:
                running.remove(request)
                self.release(request)
            self.steps += 1
            assert self.steps < 1000, "nothing goes on"

    def schedule(self, running: Sequence[Request]) -> list[tuple[Request, int]]:
        """Requests of a step and their new tokens, decoding ones first; pages are found for them.

        A request that lacks a page takes those of the last one that has some, which begins anew.
        """
        left = self.budget
        found: list[tuple[Request, int]] = []
        for request in sorted(running, key=lambda one: (one.rows == 0, len(one.ids) - one.rows)):
            count = min(left, len(request.ids) - request.rows)
            need = -(-(request.rows + count) // self.page_size) - len(request.pages)
            while need > len(self.free):
                others = [one for one in running if one.pages and one is not request]
                others = [one for one in others if one not in [given for given, _ in found]]
                if not others:
                    break
                self.release(others[-1])
                self.preempted += 1
            if count and need <= len(self.free):
                request.pages += [self.free.pop() for _ in range(need)]
                found.append((request, count))
                left -= count
        return found

    def release(self, request: Request) -> None:
        """Take a request's pages, and spoil what is in them."""
        self.pages[:, request.pages] = 255
        self.free += request.pages
        request.pages, request.rows = [], 0

    def step(self, running: Sequence[Request]) -> None:
        """Compute new tokens of as many requests as the budget and the pool allow."""
        batch = self.schedule(running)
        if not batch:
            return
        counts = torch.tensor([count for _, count in batch])
        self.mixed += len(set(counts.tolist())) > 1 and int(counts[0]) == 1
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
        lens = torch.tensor([one.rows + count for one, count in batch], dtype=torch.int32)
        most = max(len(one.pages) for one, _ in batch)
        table = torch.tensor(
            [one.pages + [-1] * (most - len(one.pages)) for one, _ in batch], dtype=torch.int32
        )
        ids = [x for one, count in batch for x in one.ids[one.rows : one.rows + count]]
        spans = [torch.arange(one.rows, one.rows + count) for one, count in batch]
        slots = torch.cat(
            [
                row[span // self.page_size].long() * self.page_size + span % self.page_size
                for row, span in zip(table, spans, strict=True)
            ]
        )
        step = describe_step(NewTokens(table, lens, starts, lens, len(ids)))

        def by_rows(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            append(self.layers[i], k, v, self.pages[i], slots)
            attend(self.layers[i], step, q, k, v, self.pages[i], out)
            return out

        logits = self.model(torch.tensor(ids), torch.cat(spans), by_rows)
        for (request, count), end in zip(batch, starts[1:].tolist(), strict=True):
            request.rows += count
            if request.rows == len(request.ids):
                request.logits.append(logits[end - 1])
                request.ids.append(int(logits[end - 1].argmax()))


def reference(model: Model, ids: Sequence[int], fmt: RowFormat | None) -> torch.Tensor:
    """Logits of a text in one pass, in the dtype of the model's weights.

    Args:
        model: with its weights.
        ids: the text.
        fmt: of rows through which K and V go; None: they stay as they are.
    """

    def plain(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if fmt is not None:
            rows = (quantize_rows(x.float(), fmt) for x in (k, v))
            k, v = (dequantize_rows(one, fmt, torch.float32).to(q.dtype) for one in rows)
        return exact(q, k, v, AttentionVariant(window=model.windows[i]), model.sm_scale)

    return model(torch.tensor(ids), torch.arange(len(ids)), plain)


def requests() -> list[Request]:
    """Texts of mixed lengths; two come while the first ones are under way."""
    sizes = (5, 20, 0), (190, 12, 0), (70, 30, 0), (1, 25, 3), (90, 8, 6)
    return [
        Request(torch.randint(VOCABULARY, (prompt,)).tolist(), prompt + new, arrival)
        for prompt, new, arrival in sizes
    ]


@pytest.mark.parametrize(
    ("name", "prompts", "limit"),
    [
        # An error of 1e-6, float32 beside float64, now and then rounds to another code: so there is
        # room for a seventh of what the codes themselves change.
        ("int4-g4", "rows", 3e-3),
        # rows round each element by at most 2**-11, after their prompt has attended to it
        ("fp16", "16-bit", 1e-3),
    ],
)
def test_a_toy_engine_serves_what_plain_attention_computes(
    name: str, prompts: str, limit: float
) -> None:
    model, texts = Model(), requests()
    settings = Settings.parse({"k_format": name, "v_format": name, "prompts": prompts})
    engine = Engine(model, settings, num_pages=16, page_size=16, budget=100)
    engine.serve(texts)
    assert engine.preempted and engine.mixed  # a full pool; prompts beside decoding sequences
    assert sorted(engine.free) == list(range(16))
    fmt = RowFormat.parse(name, DIM) if prompts == "rows" else None
    for text in texts:
        found = torch.stack(text.logits)
        wanted, exact = (
            reference(model.double(), text.ids, one)[-len(found) - 1 : -1] for one in (fmt, None)
        )
        assert relative_l2(found, wanted) < limit
        assert fmt is None or relative_l2(found, exact) > 3 * limit  # rows were read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_table": torch.zeros(1, 4).int()}, r"block_table \[1, 4\], torch.int32 on cpu; "),
        (
            {"block_table": torch.zeros(2, 4)},
            r"block_table \[2, 4\], torch.float32 on cpu; .* int32",
        ),
        ({"block_table": torch.zeros(8).int()}, r"block_table \[8\], .* \[2 or more, max_pages\]"),
        ({"seq_lens": torch.tensor([9, 5])}, r"seq_lens \[2\], torch.int64 on cpu; "),
        ({"lens": torch.tensor([9])}, r"lens \[1\], .* Of 2 sequences"),
        ({"starts": torch.zeros(3, device="meta")}, "starts .* on meta; .* starts on the CPU"),
        ({"num_tokens": 3}, "num_tokens 3. Of 2 sequences"),
    ],
)
def test_new_tokens_that_do_not_fit_one_another(changes: dict[str, Any], message: str) -> None:
    starts, lens = torch.tensor([0, 1, 6]).int(), torch.tensor([9, 5]).int()
    new = NewTokens(torch.zeros(2, 4).int(), lens, starts, lens, 6)
    assert describe_step(new).decodes == 1
    with pytest.raises(ShapeError, match=message):
        describe_step(new._replace(**changes))
