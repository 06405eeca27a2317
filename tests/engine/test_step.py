"""Steps of an engine on hand-made pages, compared with float64 attention. Without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_pages import (
    DEVICES,
    DIM,
    HEADS,
    Q_HEADS,
    SCALE,
    KeyValuePages,
    LatentPages,
    SequencePages,
    exact,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from relative_l2 import relative_l2
from torch_operations import Operations

from kvquant import AttentionVariant, Basis, LatentFormat
from kvquant.engine.contract import LayerRows, Lengths, NewTokens
from kvquant.engine.latent import LatentRows
from kvquant.engine.settings import Settings
from kvquant.engine.step import FEW, append, attend, describe_step
from kvquant.rows.basis import LayerBasis

# Rows in a basis have elements of about 2.3, because of the basis's offset. Rows leave the basis in
# the model's dtype, rounded three times, or queries enter it. So a score moves by
# SCALE * sqrt(DIM) * 2.3 * sqrt(3) roundings, as much as the error above.
IN_BASIS = 1.5


def bases() -> LayerBasis:
    matrix = torch.eye(DIM) + 0.05 * torch.randn(HEADS, DIM, DIM)
    offset = 3 * torch.arange(DIM).cos().expand(HEADS, DIM)
    return LayerBasis(Basis(offset), Basis(torch.zeros(HEADS, DIM), matrix))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gemma": {"soft_cap": 5.0, "window": 30},
    "gpt-oss": {"sink_logits": torch.linspace(-2, 2, Q_HEADS), "window": 70},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.2, Q_HEADS)},
}
CASES = [
    ("int4-g4", "int4-g4", False, "plain"),
    ("int4-g4", "int4-g4", True, "plain"),
    ("int8", "int4-g4", True, "plain"),
    ("bf16", "bf16", False, "gemma"),
    ("int4-g4", "int4-g4", True, "gpt-oss"),
    ("int8", "int8", False, "alibi"),
    ("int3", "int2", True, "plain"),
    ("int8-g8", "int4-g4", False, "gpt-oss"),
]


@pytest.mark.parametrize("drafted", [0, 3])
def test_the_host_hardly_calls_torch_where_all_sequences_decode(drafted: int) -> None:
    """Calls for a few numbers are most of the time that a step's description takes."""
    starts = torch.arange(65, dtype=torch.int32) * (1 + drafted)
    lens, table = torch.full_like(starts[1:], 99), torch.zeros(64, 8, dtype=torch.int32)
    with Operations() as counted:
        new = NewTokens(table, lens, starts, lens, 64 * (1 + drafted), 1 + drafted)
        step = describe_step(new)
    assert (step.decodes, step.q_len, step.chunks) == (64, 1 + drafted, ())
    assert len(counted.names) <= 5


@pytest.mark.parametrize(("device", "dtype", "error"), DEVICES)
@pytest.mark.parametrize(("k_format", "v_format", "has_basis", "name"), CASES)
@pytest.mark.parametrize("from_rows", [False, True], ids=["", "prompts from rows"])
def test_a_step_of_all_kinds_of_sequences(
    k_format: str,
    v_format: str,
    has_basis: bool,
    name: str,
    from_rows: bool,
    device: str,
    dtype: torch.dtype,
    error: float,
) -> None:
    # decoding: with a drafted token or three, and one that has just come; no tokens; then chunks:
    # a few tokens and many behind a past, whole prompts, and one whose past ends inside a page
    past_lens = [33, 1, 0, 16, 0, 37, 50, 0, 95, 0]
    counts = [1, 4, 1, 2, 0, FEW, FEW + 1, 90, 70, 3]
    changed: dict[str, Any] = {
        key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in VARIANTS[name].items()
    }
    layer = LayerRows(
        Settings(k_format, v_format).layout(HEADS, DIM, DIM),
        SCALE,
        bases().to(device) if has_basis else None,
        AttentionVariant(**changed) if changed else None,
        from_rows,
    )
    cache = KeyValuePages(layer, past_lens, max(counts), device, dtype)
    past = [cache.values(i) for i in range(len(counts))]
    k, v = cache.append(counts)
    new_tokens = cache.new_tokens(counts, padding=1, most_queries=4)
    step, starts = describe_step(new_tokens), new_tokens.starts
    assert (step.decodes, step.num_tokens, len(step.chunks)) == (5, 8, 5)
    q = cache.queries(len(k))
    out = torch.full_like(q, torch.nan)
    attend(layer, step, q, k, v, cache.pages, out)
    variant = AttentionVariant(**VARIANTS[name])
    limit = error * (IN_BASIS if has_basis else 1)
    for i, count in enumerate(counts):
        new = slice(int(starts[i]), int(starts[i + 1]))
        keys, values = cache.values(i)
        is_first = past_lens[i] == 0 and count > 1
        if not from_rows and (count > FEW or is_first):  # its own tokens are not read from rows
            keys, values = torch.cat([past[i][0], k[new]]), torch.cat([past[i][1], v[new]])
        if count:
            wanted = exact(q[new], keys, values, variant)
            assert relative_l2(out[new].cpu(), wanted) < limit, f"sequence {i}"
    assert out[-1].isnan().all()  # of no sequence


@pytest.mark.parametrize("from_rows", [False, True], ids=["", "prompts from rows"])
def test_an_engines_kernel_attends_with_prompts(from_rows: bool) -> None:
    """With neighbours that have no past in one call, and each of the others behind its own."""
    past_lens, counts, asked = [9, 0, 0, 30, 0], [1, 70, 5, 80, 90], []

    def attend_causally(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, out: torch.Tensor
    ) -> None:
        asked.append((lengths.queries, lengths.keys))
        starts = [lengths.query_starts.tolist(), lengths.key_starts.tolist()]
        for i in range(len(lengths.queries)):
            queries, keys = (slice(one[i], one[i + 1]) for one in starts)
            out[queries] = exact(q[queries], k[keys], v[keys])

    layout = Settings("int8", "int8").layout(HEADS, DIM, DIM)
    layer = LayerRows(layout, SCALE, None, None, from_rows)
    cache = KeyValuePages(layer, past_lens, max(counts))
    k, v = cache.append(counts)
    step, q = describe_step(cache.new_tokens(counts)), cache.queries(sum(counts))
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    attend(layer, step, q, k, v, cache.pages, wanted)
    for _ in range(2):  # the second layer finds what the first one made
        attend(layer._replace(causal=attend_causally), step, q, k, v, cache.pages, found)
        assert relative_l2(found, wanted) < 2e-5
    calls = [((70, 5), (70, 5)), ((80,), (110,)), ((90,), (90,))]
    if from_rows:
        calls = [((70,), (70,)), *calls[1:]]
    assert asked == 2 * calls


@pytest.mark.parametrize("queries", [1, 3])
def test_a_step_that_a_graph_pads(queries: int) -> None:
    layer = LayerRows(Settings("int8", "int8").layout(HEADS, DIM, DIM), SCALE, bases())
    cache = KeyValuePages(layer, [20, 31, 0], room=queries)
    cache.append([queries, queries, 0])
    step = describe_step(cache.new_tokens([queries, queries, 0], queries, queries))
    assert step.q_lens is None and step.places is None  # no tensor is made: it would not be fixed
    q = cache.queries(3 * queries)
    out = cache.attended(step, q)
    for i in range(2):
        new = slice(i * queries, (i + 1) * queries)
        assert relative_l2(out[new], cache.exact(q[new], i)) < 2e-5
    assert not out[2 * queries :].any()


# past and new tokens of each sequence, tokens that a graph pads, most queries of one that decodes
STEPS = st.tuples(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), min_size=1, max_size=5),
    st.integers(0, 5),
    st.integers(1, 4),
)


@settings(max_examples=60)
@given(case=STEPS)
@example(case=([(9, 2), (9, 1)], 1, 2))  # as many with the padding as two of each sequence
@example(case=([(9, 1), (9, 0), (9, 1)], 1, 1))  # an idle sequence before another one
@example(case=([(9, 1), (9, 1)], 3, 1))  # padding for which there is no sequence
@example(case=([(9, 0), (9, 0)], 3, 1))  # nothing but padding
@example(case=([(9, 2), (9, 0), (0, 3)], 2, 2))  # a prompt behind an idle sequence
@pytest.mark.parametrize("kind", [KeyValuePages, LatentPages])
def test_each_query_sees_its_own_sequence(
    kind: type[SequencePages], case: tuple[list[tuple[int, int]], int, int]
) -> None:
    """Any number of tokens of each sequence, idle ones too, and any padding behind them."""
    sequences, padding, most_queries = case
    pasts, counts = zip(*sequences, strict=True)
    layer: Any = LayerRows(
        Settings("int8", "int8").layout(HEADS, DIM, DIM), SCALE, prompts_from_rows=True
    )
    if kind is LatentPages:  # with the tokens of prompts the engine attends by itself
        layer, most_queries = LatentRows(LatentFormat.parse("int8-g4"), 192**-0.5), 4
        pasts = tuple(past + 1 for past in pasts)
    cache = kind(layer, pasts, room=4)
    cache.append(counts)
    step = describe_step(cache.new_tokens(counts, padding, most_queries))
    q = cache.queries(sum(counts) + padding)
    q[sum(counts) :] = torch.nan  # nothing reads the padding
    out = cache.attended(step, q)
    assert len(out) == len(q)
    for i, (queries, found) in enumerate(
        zip(*(x[: sum(counts)].split(counts) for x in (q, out)), strict=True)
    ):
        wanted = cache.exact(queries, i) if len(queries) else queries
        assert not len(queries) or relative_l2(found, wanted) < 2e-5, f"sequence {i}"


@pytest.mark.gpu
@pytest.mark.parametrize("has_basis", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_cuda_graph_serves_steps_of_other_lengths(queries: int, has_basis: bool) -> None:
    """As vLLM captures: lengths are made up and no token has a slot."""
    layout = Settings("int8", "int8").layout(HEADS, DIM, DIM)
    layer = LayerRows(layout, SCALE, bases().to("cuda") if has_basis else None)
    steps, batch = 20, 4
    cache = KeyValuePages(layer, [20, 31, 200, 0], steps * queries, "cuda", torch.bfloat16)
    starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32)
    tokens = batch * queries
    made_up = starts.diff() + 1
    step = describe_step(NewTokens(cache.table, cache.lens, starts, made_up, tokens, queries))
    q = torch.zeros(tokens, Q_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.zeros(2, tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    slots, out = torch.full((tokens,), -1, device="cuda"), torch.zeros_like(q)

    def run() -> None:
        append(layer, k, v, cache.pages, slots)
        attend(layer, step, q, k, v, cache.pages, out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(steps):
        slots.copy_(cache.slots([queries] * batch))
        cache.lens += queries
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        for i in range(batch):
            new = slice(i * queries, (i + 1) * queries)
            keys, values = cache.values(i)
            assert relative_l2(keys[-queries:].float(), k[new].float()) < 0.05
            wanted = exact(q[new], keys, values)
            assert relative_l2(out[new].cpu(), wanted) < 6.3e-3 * (IN_BASIS if has_basis else 1)


def test_a_step_without_tokens_writes_nothing() -> None:
    layer = LayerRows(Settings("int8", "int8").layout(HEADS, DIM, DIM), SCALE)
    cache = KeyValuePages(layer, [20, 0], room=1)
    step = describe_step(cache.new_tokens([0, 0]))
    assert cache.attended(step, cache.queries(2)).isnan().all()
