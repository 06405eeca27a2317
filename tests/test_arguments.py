"""What public calls are given by mistake: always an error of ours, which says what to give."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attend import attend_segments, attend_shared
from refusals import assert_refused
from torch._subclasses.fake_tensor import FakeTensorMode

from kvquant import (
    KVCache,
    LatentKVCache,
    LatentPagedKVCache,
    PagedBatch,
    PagedKVCache,
    Rope,
    RowFormat,
    Slots,
    append_rows,
    decode_attention,
    dequantize_pages,
    dequantize_rows,
    load_cache,
    merge_states,
    quantize_rows,
    reference_attention,
    slots_of,
)
from kvquant.errors import ConfigError, KVQuantError, ShapeError
from kvquant.rows.arguments import check_size
from kvquant.rows.basis import Basis
from kvquant.rows.segment import Segment

INT4 = RowFormat.parse("int4-g4", 64)
BOTH: dict[str, Any] = {"k_format": INT4, "v_format": INT4}


LENS = torch.tensor([5, 3], dtype=torch.int32)
INDPTR = torch.tensor([0, 0, 2], dtype=torch.int32)


def untyped(value: Any) -> Any:
    return value


def rows(batch: int = 2, heads: int = 2, tokens: int = 5) -> torch.Tensor:
    return quantize_rows(torch.randn(batch, heads, tokens, 64), INT4)


def call(**changes: Any) -> Any:
    """decode_attention of 2 sequences, with other arguments."""
    given: dict[str, Any] = {"q": torch.randn(2, 4, 64), "k_rows": rows(), "v_rows": rows()}
    return decode_attention(**{**given, "seq_lens": LENS, **BOTH, **changes})


def cache() -> KVCache:
    made = KVCache(2, 2, 2, 64, 16, sink_len=1, recent_len=2)
    made.append(0, *torch.randn(2, 2, 2, 5, 64))
    return made


# the calls as who does not check types sees them
attend: Any = attend_segments
shared: Any = attend_shared
merge: Any = merge_states
append: Any = KVCache.append
REFERENCE: Any = reference_attention
ARRAY = r"ndarray: give a tensor \(torch.from_numpy makes one of an array\)"
Q, X = torch.zeros(2, 4, 64), torch.zeros(2, 2, 1, 64)
PAGES = {"k_rows": rows(tokens=16), "v_rows": rows(tokens=16)}


def segment(batch: int = 2, **changes: Any) -> Segment:
    lens = torch.full((batch,), 5, dtype=torch.int32)
    return Segment(rows(batch), rows(batch), lens, INT4, INT4)._replace(**changes)


def test_what_is_no_tensor_is_told() -> None:
    states = [(torch.zeros(1, 4), torch.zeros(1))] * 2
    assert_refused(
        ConfigError,
        (lambda: call(q=[1.0]), "q is of type list: give a tensor"),
        (lambda: call(q=Q.numpy()), f"q is of type {ARRAY}"),
        (lambda: call(q=None), "q is of type NoneType"),
        (lambda: call(k_rows=rows().numpy()), f"k_rows is of type {ARRAY}"),
        (lambda: call(v_rows=[0]), "v_rows is of type list"),
        (lambda: call(seq_lens=[5, 3]), "seq_lens is of type list: give a tensor"),
        (lambda: call(seq_lens=LENS.numpy()), f"seq_lens is of type {ARRAY}"),
        (lambda: call(**PAGES, block_table=[[0], [1]]), "block_table is of type list"),
        (lambda: call(q=Q[:, None], q_lens=[1, 1]), "q_lens is of type list"),
        (lambda: call(q_lens=LENS.numpy()), f"q_lens is of type {ARRAY}"),
        (lambda: call(q_indptr=INDPTR.numpy()), f"q_indptr is of type {ARRAY}"),
        (lambda: REFERENCE(Q, rows(), rows(), [5, 3], **BOTH), "seq_lens is of type list"),
        (lambda: KVCache.attend(cache(), 0, untyped([[1.0]])), "q is of type list"),
        (lambda: append(cache(), 0, X.numpy(), X), f"k is of type {ARRAY}"),
        (lambda: quantize_rows(untyped([1.0]), INT4), "x is of type list"),
        (lambda: dequantize_rows(untyped(b""), INT4), "rows is of type bytes"),
        (lambda: merge(torch.zeros(2)), "a state is a Tensor and no pair"),
        (lambda: merge(states), r"a state is a list .* a list as"),
    )


def test_lengths_are_those_of_int32() -> None:
    most = torch.iinfo(torch.int32).max
    assert check_size("length", most) == most
    with pytest.raises(ConfigError, match=f"{most + 1} is not possible.* to {most}"):
        check_size("length", most + 1)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_numbers_of_numpy_are_numbers(backend: str) -> None:
    plain = call(num_splits=3, sm_scale=0.5, backend=backend)
    torch.manual_seed(0)
    expected = call(num_splits=3, sm_scale=0.5, backend=backend)
    torch.manual_seed(0)
    given = call(num_splits=np.int64(3), sm_scale=np.float32(0.5), backend=backend)
    assert torch.equal(given, expected) and given.shape == plain.shape


FLAGS: dict[str, Callable[[Any], Any]] = {
    "return_lse": lambda flag: call(return_lse=flag),
    "return_lse of segments": lambda flag: attend(Q, [segment()], return_lse=flag),
    "return_lse of a prefix": lambda flag: shared(Q, segment(1), [segment()], return_lse=flag),
    "return_lse of the reference": lambda flag: REFERENCE(
        Q, rows(), rows(), LENS, return_lse=flag, **BOTH
    ),
    "return_lse of a cache": lambda flag: cache().attend(0, Q, return_lse=flag),
    "check": lambda flag: quantize_rows(Q, INT4, check=flag),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, None, "no", np.True_], ids=str)
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name.split()[0]} is .*: use True or False"):
        FLAGS[name](value)
    FLAGS[name](True)


def test_a_truth_value_is_no_number_in_a_graph_either() -> None:
    for options in ({"sm_scale": True}, {"num_splits": True}):
        compiled = torch.compile(lambda given=options: call(**given), backend="eager")
        with pytest.raises((ConfigError, torch._dynamo.exc.TorchDynamoException)):
            compiled()


def test_lengths_come_as_lists_arrays_and_tensors() -> None:
    kinds: list[Any] = [list, np.array, torch.tensor, tuple, lambda x: np.array(x, np.uint8)]
    for kind in kinds:
        one = cache()
        x = torch.zeros(2, 2, 8, 64)
        one.append(0, x[:, :, :3], x[:, :, :3], kind([1, 3]))
        one.append(1, x, x)
        assert one.seq_lens.tolist() == [6, 8]
        one.crop(kind([4, 8]))
        one.reorder(kind([1, 0]))
        assert one.seq_lens.tolist() == [8, 4]
    one.crop(10**30)
    assert one.seq_lens.tolist() == [8, 4]


def test_a_cache_of_other_things_is_refused() -> None:
    sizes = {"num_layers": 1, "batch": 1, "num_kv_heads": 2, "head_dim": 64, "max_seq_len": 16}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"bases": [None]}, r"bases is \[None\]: give a LayerBasis for each layer"),
        ({"bases": 5}, "bases is 5: give a LayerBasis for each layer"),
        ({"bases": [Basis(torch.zeros(2, 64))]}, "give a LayerBasis for each layer"),
        ({"windows": 4}, "windows is 4: give a list"),
        ({"windows": "4"}, "windows is '4': give a list"),
        ({"windows": [True]}, "a window True is not possible"),
        ({"k_format": 4}, "format 4 is not possible: give a name"),
        ({"k_format": "int6"}, "format 'int6' does not exist"),
        ({"v_format": ["int4", None]}, "v_format lists 2 formats for 1 layers"),
        ({"v_format": [None]}, "format None is not possible"),
        ({"exact_format": "fp32"}, "exact_format 'fp32' does not exist: use 'bf16' or 'fp16'"),
        ({"sink_len": -1}, "sink_len -1 is not possible: use a whole number from 0"),
        ({"recent_len": True}, "recent_len True is not possible"),
        ({"sink_len": 2**31}, "use a whole number from 0 to 2147483647"),
        ({"device": ["cpu", "cpu"]}, "device lists 2 devices for 1 layers"),
        ({"device": []}, "device lists 0 devices for 1 layers"),
        ({"device": ["elsewhere"]}, "device 'elsewhere' does not exist"),
        ({"num_layers": 0}, "num_layers 0 is not possible: use a whole number from 1"),
        ({"v_format": 0}, "format 0 is not possible"),
        ({"recent_len": 1e3}, "recent_len 1000.0 is not possible"),
    ]
    for options, message in cases:
        assert_refused(ConfigError, (partial(KVCache, **{**sizes, **options}), message))


def test_what_is_no_plan_and_no_path_of_one_is_refused() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (5, ConfigError, "plan is of type int: give a CachePlan, or the path of its file"),
        ("auto", ConfigError, r"plan 'auto' needs the model.* \('\./auto' for a file of that"),
        ("./auto", FileNotFoundError, "auto"),
        (Path("auto"), FileNotFoundError, "auto"),
        ("", ConfigError, "give the path of a file"),
    ]
    for plan, error, message in cases:
        assert_refused(
            error,
            (partial(KVCache.from_plan, plan, 1, 16), message),
            (partial(LatentKVCache.from_plan, plan, 1, 16), message),
            (partial(PagedKVCache.from_plan, plan, 4), message),
            (partial(load_cache, "none", plan=plan), message),
        )


def test_names_of_formats_are_formats_everywhere() -> None:
    x = torch.randn(6, 2, 64)
    made = quantize_rows(x, "int4-g4")
    assert torch.equal(made, quantize_rows(x, INT4))
    assert torch.equal(dequantize_rows(made, "int4-g4"), dequantize_rows(made, INT4))
    pages = [torch.zeros(1, 2, 6, INT4.row_bytes, dtype=torch.uint8) for _ in range(2)]
    append_rows(x, x, pages[0], pages[1], torch.arange(6), "int4-g4", INT4)
    assert torch.equal(*pages)
    slots = torch.arange(6)
    found = dequantize_pages(pages[0], "int4-g4", slots, torch.float32)
    assert torch.equal(found, dequantize_pages(pages[0], INT4, slots, torch.float32))

    q, by_name = torch.randn(2, 4, 64), untyped({"k_format": "int4-g4", "v_format": "int4-g4"})
    one = segment()
    named = one._replace(**by_name)
    assert torch.equal(attend_segments(q, [named, one]), attend_segments(q, [one, one]))
    compiled = torch.compile(lambda q: attend_segments(q, [named]), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q), attend_segments(q, [one]))


def test_rows_of_another_width_are_told_which_there_are() -> None:
    with pytest.raises(ShapeError, match="row of int4-g4, one of 32, 48, 56, 64, 72"):
        dequantize_rows(torch.zeros(2, 50, dtype=torch.uint8), "int4-g4")


def test_things_are_shown_short() -> None:
    assert eval(repr(INT4)) == INT4 and repr(INT4) == "RowFormat.parse('int4-g4', 64)"
    one = KVCache(2, 3, 2, 64, 16, k_format=["int8", "int4"], v_format="fp8", windows=[4, None])
    assert repr(one) == (
        "KVCache(2 layers, 3 sequences, 2 KV heads of 64, K int8 or int4, V fp8, max_seq_len 16, "
        "bf16 sinks and recent tokens: 4 and 128, windows, on cpu)"
    )


ODD: dict[str, Any] = {
    "None": None,
    "True": True,
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "huge": 10**5000,  # of which Python makes no text
    "str": "x",
    "long": "9" * 6000,
    "bytes": b"a",
    "list": [None],
    "dict": {"a": 1},
    "object": object(),
    "array": np.array([1]),
    "scalar": torch.tensor(1),
    "fractions": torch.tensor([1.5]),
    "empty": torch.zeros(0),
    "complex": torch.zeros(2, 3, dtype=torch.complex64),
    "meta": torch.zeros(1, device="meta"),
    "function": len,
    "sparse": torch.zeros(2, 4, 64).to_sparse(),
}


Arguments = dict[str, Any]


def doors() -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Public calls, and arguments with which they are right."""
    attention: Arguments = {"q": Q, "k_rows": rows(), "v_rows": rows(), "seq_lens": LENS, **BOTH}
    queries = {"q": torch.zeros(2, 3, 4, 64), "q_lens": torch.tensor([3, 0], dtype=torch.int32)}
    x, pages = torch.randn(2, 1, 64), torch.zeros(1, 1, 4, INT4.row_bytes, dtype=torch.uint8)
    exact = torch.zeros(1, 1, 4, 128, dtype=torch.uint8)
    slots = {name: torch.arange(2) for name in Slots._fields[:2]}
    slots["evicted"] = torch.full((2,), -1)
    new: Arguments = {"k": x, "v": x, "k_rows": pages, "v_rows": pages.clone(), **BOTH}
    new |= {"slots": Slots(**slots), "exact_k": exact, "exact_v": exact.clone()}
    new |= {"exact_format": "bf16"}
    new |= {"k_transform": None, "rope": None, "bad": torch.zeros(2, dtype=torch.int32)}
    rope: Arguments = {"cos": torch.zeros(2, 32), "sin": torch.zeros(2, 32), "interleaved": False}
    sizes: Arguments = {"num_layers": 1, "batch": 2, "num_kv_heads": 2, "head_dim": 64}
    sizes["max_seq_len"] = 16
    given = {"k_format": INT4, "v_format": INT4, "sink_len": 1, "recent_len": 2, "windows": None}
    filled = cache()
    options = {"sm_scale": None, "num_splits": None, "backend": None}
    lens: Arguments = {"seq_lens": LENS, "packed_lens": LENS * 0, "new_lens": None, "new_tokens": 2}
    split = {"page_size": 8, "sink_len": 4, "recent_len": 4, "block_table": None, "seq_slots": None}
    basis: Arguments = {"offset": torch.zeros(2, 64)}
    basis |= {"matrix": None, "clip": None, "feedback": None}
    paged = {"rows": pages, "fmt": INT4, "slots": torch.arange(2), "dtype": torch.half, "out": None}
    nothing = X[:, :, :0]
    return {
        "decode_attention": (decode_attention, {**attention, "block_table": None, **options}),
        "reference_attention": (reference_attention, attention),
        "queries": (decode_attention, {**attention, **queries}),
        "ragged queries": (decode_attention, {**attention, "q_indptr": INDPTR}),
        "ragged reference": (reference_attention, {**attention, "q_indptr": INDPTR}),
        "reference of queries": (reference_attention, {**attention, **queries}),
        "quantize": (quantize_rows, {"x": x, "fmt": INT4, "backend": None}),
        "dequantize": (dequantize_rows, {"rows": pages, "fmt": INT4, "dtype": torch.float32}),
        "append_rows": (append_rows, new),
        "slots": (lambda **of: append_rows(**{**new, "slots": Slots(**of)}), slots),
        "rope": (lambda **of: append_rows(**{**new, "rope": Rope(**of)}), rope),
        "pages": (dequantize_pages, paged),
        "slots_of": (slots_of, {**lens, **split}),
        "KVCache": (KVCache, {**sizes, **given, "device": "cpu", "bases": None}),
        "append": (filled.append, {"layer": 0, "k": nothing, "v": nothing, "new_lens": None}),
        "attend": (filled.attend, {"layer": 0, "q": Q, **options}),
        "attend queries": (filled.attend, {"layer": 0, **queries, **options}),
        "dequantized": (filled.dequantized, {"layer": 0, "dtype": torch.float32}),
        "crop": (filled.crop, {"seq_lens": 5}),
        "fork": (filled.fork, {"index": None}),
        "repeat": (filled.repeat, {"times": 1}),
        "reorder": (filled.reorder, {"index": [0, 1]}),
        "Basis": (Basis, basis),
        "RowFormat": (RowFormat, {"codec": "int4", "groups": 4, "head_dim": 64}),
        "parse": (RowFormat.parse, {"name": "int4", "head_dim": 64}),
        "merge": (lambda out, lse: merge_states((out, lse)), {"out": Q, "lse": Q[..., 0]}),
    }


@pytest.mark.parametrize("door", doors())
def test_anything_else_is_taken_or_refused_in_words_of_ours(door: str) -> None:
    """Each argument in turn is something odd: never another error, never a crash."""
    call, good = doors()[door]
    call(**good)
    for name in good:
        for odd, value in ODD.items():
            try:
                call(**{**good, name: value})
            except KVQuantError as error:
                assert len(str(error)) < 600, f"{name}={odd}"
            except Exception as error:
                raise AssertionError(f"{door}({name}={odd}) raises {error!r}") from error


SIZES: dict[Any, Arguments] = {
    KVCache: {"num_layers": 1, "batch": 64, "num_kv_heads": 8, "head_dim": 64, "max_seq_len": 16},
    LatentKVCache: {"num_layers": 1, "batch": 64, "max_seq_len": 16},
    PagedKVCache: {"num_layers": 1, "num_kv_heads": 8, "head_dim": 64, "num_pages": 4},
    LatentPagedKVCache: {"num_layers": 1, "num_pages": 4, "max_num_seqs": 2},
}


@pytest.mark.parametrize("number", [2**31 - 1, 2**31, 2**63 - 1, 2**63], ids=hex)
@pytest.mark.parametrize("kind", SIZES)
def test_a_cache_larger_than_all_memory_is_refused(kind: Any, number: int) -> None:
    for name in SIZES[kind]:
        with pytest.raises(ConfigError):
            kind(**{**SIZES[kind], name: number})


def contiguous_steps(**options: Any) -> list[Any]:
    torch.manual_seed(0)
    options = {"sink_len": 2, "recent_len": 4, "rollback_len": 2, **options}
    one, (k, v) = KVCache(1, 1, 2, 64, 64, **options), torch.randn(2, 1, 2, 44, 64)
    q = torch.randn(1, 4, 4, 64)
    one.append(0, k[:, :, :40], v[:, :, :40])
    found = [one.attend(0, q[:, 0]), one.step(0, q, k[:, :, 40:], v[:, :, 40:]), one.attend(0, q)]
    one.crop(30)
    return [*found, one.attend(0, q)]


def latent_steps(**options: Any) -> list[Any]:
    torch.manual_seed(0)
    options = {"sink_len": 2, "recent_len": 4, "rollback_len": 2, **options}
    one = LatentKVCache(1, 1, 64, **options)
    q, rows = (torch.randn(1, 4, 4, 512), torch.randn(1, 4, 4, 64)), torch.randn(1, 1, 44, 576)
    latent, rope = rows[..., :512], rows[..., 512:]
    one.append(0, latent[:, :, :40], rope[:, :, :40])
    found = [one.step(0, *q, latent[:, :, 40:], rope[:, :, 40:], sm_scale=0.1)]
    one.crop(30)
    return [*found, one.attend(0, *q, sm_scale=0.1)]


def paged_steps(**options: Any) -> list[Any]:
    torch.manual_seed(0)
    options = {"sink_len": 2, "recent_len": 4, "page_size": 16, "max_seq_len": 64, **options}
    one = PagedKVCache(1, 2, 64, 8, max_num_seqs=2, **options)
    batch, (k, v), q = PagedBatch(one, 2, 40), torch.randn(2, 40, 2, 64), torch.randn(1, 4, 4, 64)
    one.allocate("a")
    with batch.extend(["a"], 40):
        found = [batch.step(0, q[:, 0], k, v)]
    with batch.extend(["a"], 4):
        found += [batch.step(0, q, k[:4], v[:4])]
    one.truncate("a", 42)
    with batch.extend(["a"]):
        return [*found, batch.step(0, q[:, 0], k[:1], v[:1])]


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        *((contiguous_steps, (name,)) for name in ("sink_len", "recent_len", "rollback_len")),
        *((latent_steps, (name,)) for name in ("sink_len", "recent_len", "rollback_len")),
        *((paged_steps, names) for names in (("sink_len",), ("recent_len", "rollback_len"))),
        *((steps, ("windows",)) for steps in (contiguous_steps, paged_steps)),
    ],
)
def test_a_length_beyond_max_seq_len_is_all_of_it(
    steps: Callable[..., list[Any]], names: tuple[str, ...]
) -> None:
    """The largest that can be given, beside max_seq_len."""
    expected, found = (
        steps(**{name: [number] if name == "windows" else number for name in names})
        for number in (64, 2**31 - 1)
    )
    assert all(map(torch.equal, found, expected))


def test_tokens_beyond_what_int64_holds_are_refused() -> None:
    one = PagedKVCache(1, 2, 64, 8, page_size=16, max_num_seqs=2, max_seq_len=64)
    batch, rows = PagedBatch(one, 2, 10), torch.randn(10, 2, 64)
    one.allocate("a")
    with batch.extend(["a"], 10):
        batch.append(0, rows, rows)
    for count in (2**63 - 1, 2**63 - 10, 2**63):
        for use in (lambda ids, n: batch.extend(ids, n).__enter__(), one.can_append):
            with pytest.raises(KVQuantError):
                use(["a"], [count])
    assert one.length("a") == 10


def fake(value: torch.Tensor) -> torch.Tensor:
    """A part of one, which does not begin at address 0 but at its offset."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return mode.from_tensor(torch.stack([value, value]))[1]


def zero(value: torch.Tensor) -> torch.Tensor:
    """As forward-mode derivatives are where there are none."""
    made: torch.Tensor = torch._efficientzerotensor(value.shape, dtype=value.dtype)
    return made


@pytest.mark.parametrize("unreadable", [fake, zero])
@pytest.mark.parametrize("door", doors())
def test_tensors_without_values_in_memory_are_refused(
    door: str, unreadable: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The kernels would end the process, at address 0."""
    if door in ("merge", "rope"):
        pytest.skip("arithmetic of torch")
    call, good = doors()[door]
    for name, value in good.items():
        if isinstance(value, torch.Tensor) and value.numel() and name != "bad":
            with warnings.catch_warnings(), pytest.raises(KVQuantError):
                warnings.simplefilter("ignore")  # of torch: a fake tensor has no address
                call(**{**good, name: unreadable(value)})
            call(**good)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_values_in_memory_are_named() -> None:
    wrapped = (r"q is a Tensor whose values lie nowhere in memory: .*vmap", "k is a Tensor whose")
    filled = cache()
    with pytest.raises(ConfigError, match=wrapped[0]):
        torch.vmap(lambda q: call(q=q), randomness="same")(torch.zeros(3, 2, 4, 64))
    with pytest.raises(ConfigError, match=wrapped[1]):
        torch.vmap(lambda k: filled.append(1, k, X))(torch.zeros(3, *X.shape))
    assert filled.layers[1].seq_lens.tolist() == [0, 0]
    freed = rows()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"k_rows is a Tensor .* freed"):
        call(k_rows=freed)
    nested = torch.nested.nested_tensor([torch.zeros(4, 64)])
    with pytest.raises(ConfigError, match="q is a nested tensor"):
        call(q=nested)
