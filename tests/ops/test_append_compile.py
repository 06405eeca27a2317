"""torch.compile(fullgraph=True) over append_rows, and the custom ops behind it; 12 s."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from append_cases import angles
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from kvquant import (
    Basis,
    Rope,
    RowFormat,
    Slots,
    append_rows,
    decode_attention,
    dequantize_pages,
    slots_of,
)
from kvquant.errors import ShapeError
from kvquant.ops import append, attention, rows_at

INT4 = RowFormat.parse("int4-g4", 64)
FP8 = RowFormat.parse("fp8", 96)
INDUCTOR = [
    pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # it warns of matters of its own
    pytest.mark.slow,
]
COMPILERS = ["eager", "aot_eager", pytest.param("inductor", marks=INDUCTOR)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def make_storage() -> dict[str, Any]:
    shapes = {"k_rows": (3, 2, 8, 48), "v_rows": (3, 2, 8, 100)}
    shapes |= {"exact_k": (2, 2, 6, 128), "exact_v": (2, 2, 6, 192)}
    rows = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in shapes.items()}
    rows["k_rows"] = torch.zeros(2, 3, 8, 48, dtype=torch.uint8).transpose(0, 1)
    return rows | {"bad": torch.zeros(2, dtype=torch.int32)}


def make_slots(num_tokens: int) -> Slots:
    exact = torch.arange(num_tokens) % 3 == 0
    return Slots(
        torch.randperm(12)[:num_tokens],
        torch.where(exact, torch.randperm(12)[:num_tokens], -1),
        torch.where(exact, 12 + torch.randperm(12)[:num_tokens], -1),
    )


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_projection_and_an_append_make_one_graph_for_all_shapes(compiler: str) -> None:
    weight = torch.randn(32, 2 * (64 + 96), requires_grad=True)
    basis = Basis(torch.randn(2, 64))

    def step(x: torch.Tensor, slots: Slots, rope: Rope, rows: dict[str, Any]) -> Any:
        k, v = (x @ weight).view(-1, 2, 160).split([64, 96], dim=-1)
        append_rows(
            k,
            v,
            **rows,
            slots=slots,
            k_format="int4-g4",
            v_format=FP8,
            k_transform=basis,
            v_transform=None,
            rope=rope,
        )
        return k, v, dequantize_pages(rows["v_rows"], str(FP8), slots.packed, torch.bfloat16)

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    written, expected = make_storage(), make_storage()
    for num_tokens in (2, 5, 7, 11):
        x = torch.randn(num_tokens, 32)
        slots, rope = make_slots(num_tokens), angles(num_tokens, 64)
        k, v, out = compiled(x, slots, rope, written)
        # the same k and v: a compiled projection may differ in its last bits
        append_rows(
            k, v, **expected, slots=slots, k_format=INT4, v_format=FP8, k_transform=basis, rope=rope
        )
        for name, rows in expected.items():
            assert torch.equal(written[name], rows), name
        values = dequantize_pages(expected["v_rows"], FP8, slots.packed, torch.bfloat16)
        assert torch.equal(out, values)
    assert bool(expected["exact_k"].any()) and bool(expected["k_rows"].any())
    assert counter.frame_count <= 2, "one graph for the first shapes, one for all others"


@pytest.mark.parametrize("compiler", COMPILERS[1:])
def test_layers_of_a_pool_are_written_in_place_and_read_in_order(compiler: str) -> None:
    formats: Any = {"k_format": INT4, "v_format": INT4}
    table = torch.tensor([[2], [0]], dtype=torch.int32)

    def step(x: torch.Tensor, pool: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        slots = slots_of(lens, lens, None, 1, 16, block_table=table)
        for layer in range(2):
            k_rows, v_rows = pool[layer, 0], pool[layer, 1]
            append_rows(x, x, k_rows, v_rows, slots, **formats)
            out = decode_attention(x, k_rows, v_rows, lens + 1, block_table=table, **formats)
            x = x + out
        return x

    pool, expected = torch.zeros(2, 2, 2, 3, 2, 16, INT4.row_bytes, dtype=torch.uint8)
    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for length in range(3):
        x, lens = torch.randn(2, 2, 64), torch.tensor([length, length + 9], dtype=torch.int32)
        out, code = run_and_get_code(compiled, x, pool, lens)
        torch.testing.assert_close(out, step(x, expected, lens))
    assert torch.equal(pool[0], expected[0]), "layer 1 may differ in last bits before it"
    assert bool(pool[1].any())
    if compiler == "inductor":
        for shape in (pool.shape, pool.shape[2:]):
            allocation = f"empty_strided_cpu({tuple(shape)}"
            assert not any(allocation in text for text in code), "a copy of the pool"


def test_what_does_not_fit_is_refused_while_a_graph_is_traced() -> None:
    rows, slots = make_storage(), make_slots(4)
    k, v = torch.randn(4, 2, 64), torch.randn(4, 2, 96)
    formats: Any = {"k_format": INT4, "v_format": FP8}
    compiled = torch.compile(append_rows, fullgraph=True, backend="eager")
    for arguments, message in (
        ({"k": k[0], "v": v}, "k is .* both must be .num_tokens, num_kv_heads, head_dim"),
        ({"k": k, "v": v[1:]}, "alike but for head_dim"),
        ({"k": k[1:], "v": v[1:]}, r"slots.packed is .4. .* must be .(3|s\d+)."),
        ({"k": k, "v": v, "exact_k": None}, "exact_k missing"),
        ({"k": k, "v": v, "k_format": "int5"}, "format 'int5' does not exist"),
    ):
        with pytest.raises(Exception, match=message):  # the type is torch's
            compiled(**{"slots": slots} | formats | rows | arguments)
    assert not any(bool(x.any()) for x in rows.values())


def test_values_are_checked_where_a_graph_runs() -> None:
    rows = make_storage()
    k, v = torch.randn(4, 2, 64), torch.randn(4, 2, 96)

    def call(slots: torch.Tensor) -> None:
        append_rows(k, v, rows["k_rows"], rows["v_rows"], slots, INT4, FP8)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    compiled(torch.arange(4))
    with pytest.raises(ShapeError, match=r"slots.packed\[3\] is 24: there are slots 0 to 23"):
        compiled(torch.arange(21, 25))
    with pytest.raises(ShapeError, match="slot 7 is given twice"):
        compiled(torch.tensor([7, -1, 1, 7]))


OPS = {append: "append_rows_op", rows_at: "dequantize_pages_op"}
OPS[attention] = "attend_segments_op"


def no_op(*_: object) -> None:
    raise AssertionError("the dispatcher takes time")


def test_calls_outside_a_graph_do_not_pass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in OPS.items():
        monkeypatch.setattr(module, name, no_op)
    rows, x = make_storage(), torch.randn(4, 2, 64)
    append_rows(x, x, rows["k_rows"], rows["k_rows"].clone(), torch.arange(4), INT4, INT4)
    dequantize_pages(rows["k_rows"], INT4, torch.arange(4), torch.float16)
    q, given, lens = torch.randn(3, 2, 64), rows["k_rows"], torch.ones(3, dtype=torch.int32)
    decode_attention(q, given, given, lens, k_format=INT4, v_format=INT4)


def append_arguments(exact: bool) -> tuple[Any, ...]:
    rows, slots, rope = make_storage(), make_slots(5), angles(5, 64)
    k, v = torch.randn(5, 2, 64), torch.randn(5, 2, 96)
    if not exact:
        slots, rows = Slots(slots.packed), rows | {"exact_k": None, "exact_v": None}
    fitted = torch.randn(2, 96, 96), torch.tensor([0.9, 1.0]), torch.eye(96).repeat(2, 1, 1)
    of_k = k, rows["k_rows"], "int4-g4", rows["exact_k"], torch.randn(2, 64), None, None, None
    of_v = v, rows["v_rows"], "fp8", rows["exact_v"], None, *fitted
    return *of_k, *of_v, *slots, "fp16", *rope, rows["bad"] if exact else None, None


@pytest.mark.filterwarnings("ignore::UserWarning")  # of opcheck's own graphs
@pytest.mark.parametrize("exact", [False, True], ids=["packed", "exact rows"])
def test_torch_finds_nothing_wrong_with_append_rows(exact: bool) -> None:
    torch.library.opcheck(torch.ops.kvquant.append_rows.default, append_arguments(exact))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_finds_nothing_wrong_with_dequantize_pages() -> None:
    rows = torch.randint(0, 60, (3, 2, 8, 48), dtype=torch.uint8)
    arguments = rows, "int4-g4", torch.tensor([3, -1, 20]), torch.zeros(3, 2, 64).half(), None
    torch.library.opcheck(torch.ops.kvquant.dequantize_pages.default, arguments)
