"""Models under torch.compile: one graph for all decode steps, and what has none."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kvquant.errors import ConfigError, ShapeError, UnsupportedError

transformers = pytest.importorskip("transformers")
from hf_cases import (  # noqa: E402
    GEMMA3N,
    GREEDY,
    LATENT_SIZES,
    TOLERANCE,
    WITH_LOGITS,
    assert_alike,
    caching,
    hands_latents,
    needs_latents,
    tiny,
    tokens,
)
from latent_plans import latent_plan  # noqa: E402
from slow_cases import mark_slow  # noqa: E402

from kvquant.hf.cache import QuantizedCache  # noqa: E402
from kvquant.hf.compile import tracing  # noqa: E402
from kvquant.io.plan import CachePlan  # noqa: E402

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 16},
    "Gemma3nText": GEMMA3N,
}
if hands_latents:
    FAMILIES["DeepseekV3"] = LATENT_SIZES
pytestmark = pytest.mark.usefixtures("fresh")
DENSE = {"first_k_dense_replace": 2}  # that no expert's choice hangs on a rounding
ROWS: dict[str, Any] = {"max_seq_len": 64, "sink_len": 2, "recent_len": 6}
OPTIONS = GREEDY | {"max_new_tokens": 6}
PADS = torch.tensor([0, 15, 7])


def model_of(family: str, **changes: Any) -> Any:
    model = tiny(family, **(FAMILIES[family] | changes)).model
    model.set_attn_implementation("kvquant")
    return model


@pytest.fixture(scope="module")
def short() -> Any:
    """Of one layer: half the time of torch.compile, where layers are not the point."""
    return model_of("Llama", num_hidden_layers=1)


def text(padded: bool) -> dict[str, torch.Tensor]:
    """Three prompts, padded on the left or not."""
    mask = (torch.arange(24) >= PADS[:, None] * padded).long()
    places = mask.cumsum(1).sub(1).clamp(min=0)
    return {"input_ids": tokens(3, 24), "attention_mask": mask, "position_ids": places}


def compiling(backend: str, fullgraph: bool = True) -> dict[str, Any]:
    """Options that let generate compile by itself on the CPU, too."""
    config = transformers.CompileConfig(fullgraph=fullgraph, backend=backend, mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def generated(
    model: Any, padded: bool, plan: CachePlan | None = None, **options: Any
) -> tuple[Any, QuantizedCache]:
    """Two turns of a conversation, with one cache."""
    cache, batch = QuantizedCache(model, plan=plan, **ROWS), text(padded)
    for _ in range(2):
        ids = model.generate(**batch, **caching(cache), **OPTIONS, **options)
        more = ids.shape[1] - batch["attention_mask"].shape[1]
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, more), value=1)
        places = mask.cumsum(1).sub(1).clamp(min=0)
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    cache.check()
    return ids.tolist(), cache


IN_BASES = "DeepseekV3 in bases"


@pytest.mark.parametrize(
    "family", [*mark_slow(FAMILIES, ["Mistral"]), pytest.param(IN_BASES, marks=needs_latents)]
)
def test_generate_compiles_one_graph_by_itself(family: str) -> None:
    if family == "Gemma3nText" and tracing.LOSES_MARKS:
        pytest.skip("its layers share keys: compiled from torch 2.13 on")
    model, plan = model_of(family.split()[0], **DENSE if family == IN_BASES else {}), None
    if family == IN_BASES:
        plan = latent_plan(2, model.config.to_dict(), fmt=("int8-g4", "bf16"))
    expected, plain = generated(model, padded=True, plan=plan)
    found, cache = generated(model, padded=True, plan=plan, **compiling("eager"))
    assert found == expected
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert cache.get_seq_length() == plain.get_seq_length() == 24 + 2 * 6 - 1
    assert cache.kv is not None and cache.kv.seq_lens.tolist() == (35 - PADS).tolist()
    assert (cache.kv.bases is not None) == (family == IN_BASES)


def test_layers_that_share_keys_are_not_compiled_by_older_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvquant.hf.cache.LOSES_MARKS", True)
    assert QuantizedCache(model_of("Llama"), **ROWS).is_compileable
    model = model_of("Gemma3nText")
    expected, cache = generated(model, padded=True)
    assert not cache.is_compileable
    assert generated(model, padded=True, **compiling("eager"))[0] == expected
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_drafts_give_the_same_where_generate_compiles_their_calls(llama: Any) -> None:
    """As transformers does from 5.24 on: they run outside of graphs."""
    ids = tokens(1, 6).repeat(1, 4)
    options = OPTIONS | {"max_new_tokens": 20, "prompt_lookup_num_tokens": 4}
    caches = [QuantizedCache(llama, **ROWS) for _ in range(2)]
    wanted = llama.generate(ids, **caching(caches[0]), **options, disable_compile=True)
    found = llama.generate(ids, **caching(caches[1]), **options, **compiling("eager", False))
    assert torch.equal(found, wanted)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == wanted.shape[1] - 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "changes", "dtype", "rows"),
    [
        ("Mistral", {}, torch.bfloat16, None),
        pytest.param("DeepseekV3", DENSE, torch.float32, None, marks=needs_latents),
        pytest.param(
            "DeepseekV3", DENSE, torch.bfloat16, ("int8-g4", "bf16"), marks=needs_latents
        ),  # in the bases of a plan
    ],
)
def test_generate_on_cuda_replays_a_cuda_graph(
    family: str, changes: dict[str, Any], dtype: torch.dtype, rows: tuple[str, str] | None
) -> None:
    model = model_of(family, **changes).cuda().to(dtype)
    plan = rows and latent_plan(2, model.config.to_dict(), fmt=rows)
    batch = {name: value.cuda() for name, value in text(padded=True).items()}
    found = []
    for options in ({"disable_compile": True}, {}):
        cache = QuantizedCache(model, plan=plan, **ROWS)
        given = OPTIONS | {"max_new_tokens": 20} | WITH_LOGITS | options
        found.append(model.generate(**batch, **caching(cache), **given))
        cache.check()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]
    assert_alike(found[0], found[1], limit=5e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
def test_generate_compiles_by_inductor(llama: Any) -> None:
    found = []
    for options in ({}, compiling("inductor")):
        cache = QuantizedCache(llama, **ROWS)
        given = text(True) | caching(cache) | options | WITH_LOGITS
        found.append(llama.generate(**given, **OPTIONS))
        cache.check()
    del llama._compiled_call
    assert_alike(found[0], found[1], limit=0.02)  # last bits move a few int4 codes
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_a_loop_of_ones_own_has_one_graph(llama: Any, padded: bool) -> None:
    found = []
    for forward in (llama, torch.compile(llama.forward, fullgraph=True, backend="eager")):
        cache, batch, logits = QuantizedCache(llama, **ROWS), text(padded), []
        mask, places = batch["attention_mask"], batch["position_ids"][:, -1:]
        out = llama(**batch, **caching(cache))
        for _ in range(6):
            places = places + 1
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            given = {"attention_mask": mask, "position_ids": places} if padded else {}
            token = out.logits[:, -1:].argmax(-1)
            out = forward(input_ids=token, **caching(cache), use_cache=True, **given)
            logits.append(out.logits)
        cache.check()
        assert cache.get_seq_length() == 30
        assert cache.kv is not None
        cache.kv.crop(cache.kv.seq_lens - 4)  # its owner may change it in between
        assert cache.mask_sizes(1) == (27, 0)
        found.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(*found)
    graphs = 1 + padded  # a mask that grows takes a second one
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


def test_texts_of_other_lengths_have_the_same_graphs(short: Any) -> None:
    """Padded or not."""
    compiled: Any = torch.compile(short.forward, fullgraph=True, backend="eager")
    cache, graphs = QuantizedCache(short, **ROWS), []
    for columns in (24, 9, 17):
        for padded in (True, False):
            batch = {name: given[:, -columns:] for name, given in text(padded).items()}
            short(**batch, **caching(cache))
            mask = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
            given = {"attention_mask": mask, "position_ids": batch["position_ids"][:, -1:] + 1}
            compiled(input_ids=tokens(3, 1), **caching(cache), use_cache=True, **given)
            cache.check()
            cache.reset()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2], graphs  # a mask of another length takes a second one


FOLLOW = {"batch_select_indices": [1], "reorder_cache": [2, 0, 1]}


@pytest.mark.parametrize("follow", mark_slow(FOLLOW, ["reorder_cache"]))
def test_sequences_follow_behind_compiled_steps(short: Any, follow: str) -> None:
    """Padded ones, whose lengths differ."""
    places = FOLLOW[follow]
    compiled: Any = torch.compile(short.forward, fullgraph=True, backend="eager")
    cache, batch = QuantizedCache(short, **ROWS), text(True)
    short(**batch, **caching(cache))
    mask, position = batch["attention_mask"], batch["position_ids"][:, -1:]
    for step in range(3):
        mask, position = torch.nn.functional.pad(mask, (0, 1), value=1), position + 1
        given = {"attention_mask": mask, "position_ids": position}
        if step == 2:
            getattr(cache, follow)(torch.tensor(places))
            given = {name: x[places] for name, x in given.items()}
            assert cache.get_seq_length() == 26
        token = tokens(len(given["attention_mask"]), 1)
        compiled(input_ids=token, **caching(cache), use_cache=True, **given)
    cache.check()
    cache.crop(-2)
    assert cache.kv is not None
    assert cache.kv.seq_lens.tolist() == (25 - PADS[places]).tolist()


@pytest.mark.slow
def test_beams_of_a_compiled_model(llama: Any) -> None:
    """The prompt and the growing cache end graphs, and are read as they are uncompiled."""
    found = []
    for room in (None, 64):
        for compiled in (False, True):
            cache = QuantizedCache(llama, **ROWS | {"max_seq_len": room})
            if compiled:
                llama.forward = torch.compile(llama.forward, backend="eager")
            ids = llama.generate(**text(True), **caching(cache), num_beams=2, **OPTIONS)
            cache.check()
            found.append(ids.tolist())
            if compiled:
                del llama.forward
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", pytest.param("DeepseekV3", marks=needs_latents)])
def test_graphs_read_rows_where_they_lie(family: str) -> None:
    """Else each step of a CUDA graph would copy them; and of inputs that share memory, of which one
    is written, torch makes no CUDA graph."""
    model = model_of(family)
    sizes: list[int] = []
    storages: list[int] = []

    def note(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            value, marks = node.meta["example_value"], node.meta.get("tensor_dict", {})
            is_weight = isinstance(value, torch.nn.Parameter) or value.is_floating_point()
            if not is_weight:
                storages.append(value.untyped_storage()._cdata)
                if "_dynamo_static_input_type" not in marks:
                    sizes.append(value.numel())
        return graph.forward

    cache = QuantizedCache(model, **ROWS)
    model(**text(True), **caching(cache))
    step: Any = torch.compile(model.forward, fullgraph=True, backend=note)
    step(tokens(3, 1), **caching(cache), position_ids=24 - PADS[:, None])
    cache.check()
    assert sizes == [3, 3]  # tokens and positions
    assert len(storages) == len(set(storages)) > 10


@needs_latents
@pytest.mark.parametrize(
    "planned", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["format", "plan"]
)
def test_graphs_of_latent_rows_come_behind_a_call_without(planned: bool) -> None:
    """It compares what each layer expands with what is absorbed, which a graph cannot."""
    model = model_of("DeepseekV3", **DENSE)
    rows = ROWS | ({"plan": latent_plan(2, model.config.to_dict())} if planned else {})
    step: Any = torch.compile(model.forward, fullgraph=True, backend="eager")
    first, cache = (QuantizedCache(model, **rows) for _ in range(2))
    for one in (first, cache):
        model(tokens(3, 24), **caching(one))
    assert first.kv is not None
    again = QuantizedCache(first.kv, max_seq_len=first.kv.max_seq_len)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="steps of one token"):
        step(tokens(3, 1), **caching(again))
    found = [model(tokens(3, 1), **caching(one)).logits for one in (again, cache)]
    assert torch.equal(*found)
    for _ in range(2):
        found = [
            run(tokens(3, 1), **caching(one)).logits for run, one in ((step, again), (model, cache))
        ]
        # last bits may move a few codes of rows by one; a token more or less would be 0.2
        assert float((found[0] - found[1]).norm() / found[1].norm()) < TOLERANCE
    again.check()
    assert again.get_seq_length() == cache.get_seq_length() == 27


@pytest.mark.slow
def test_what_is_not_compiled_is_told(llama: Any) -> None:
    step: Any = torch.compile(llama.forward, fullgraph=True, backend="eager")
    static, growing = (QuantizedCache(llama, **ROWS | {"max_seq_len": n}) for n in (26, None))
    assert static.is_compileable and not growing.is_compileable
    error = torch._dynamo.exc.Unsupported
    with pytest.raises(error, match="steps of one token"):
        step(tokens(3, 24), **caching(static))
    llama(tokens(3, 24), **caching(growing))
    with pytest.raises(error, match="is_compileable"):
        step(tokens(3, 1), **caching(growing))
    assert growing.get_seq_length() == 24
    llama(**text(True), **caching(static))
    step(tokens(3, 1), **caching(static), position_ids=torch.full((3, 1), 24))
    with pytest.raises(ConfigError, match="other positions"):
        static.check()
    short = torch.zeros(3, 25, dtype=torch.int64)
    step(tokens(3, 1), short, **caching(static), position_ids=25 - PADS[:, None])
    with pytest.raises(ConfigError, match="shows other tokens"):
        static.check()
    with pytest.raises(ShapeError, match="would grow to 27 tokens"):
        llama(tokens(3, 1), **caching(static))
    step(tokens(3, 1), **caching(static), position_ids=26 - PADS[:, None])
    with pytest.raises(ShapeError, match="found no room"):
        static.check()


def test_a_mask_of_another_attention_is_noticed_in_a_graph(short: Any) -> None:
    cache, row = QuantizedCache(short, **ROWS), torch.zeros(1, 2, 1, 64)
    short(tokens(1, 9), **caching(cache))

    def call(row: torch.Tensor) -> Any:
        return cache.get_mask_sizes(1, 0), cache.update(row, row, 0)

    with pytest.raises(UnsupportedError, match=r"layer 0 got .* Call model\.set_attn_impl"):
        torch.compile(call, backend="eager")(row)
    assert cache.get_seq_length() == 9 and not cache.call.is_open
    short(tokens(1, 3))  # a call without a cache finds nothing of that one
    assert cache.get_seq_length() == 9 and not cache.call.is_open


@pytest.mark.slow
def test_chunks_of_one_column_of_a_prompt_are_no_steps() -> None:
    """A column may be padding there; a graph would append it."""
    own, found = model_of("Llama"), []
    for compiled in (False, True):
        cache, batch = QuantizedCache(own, **ROWS), text(True)
        call: Any = torch.compile(own.forward, backend="eager") if compiled else own
        for column in range(24):
            place = slice(column, column + 1)
            out = call(
                batch["input_ids"][:, place],
                attention_mask=batch["attention_mask"][:, : column + 1],
                position_ids=batch["position_ids"][:, place],
                **caching(cache),
            )
        cache.check()
        found.append(out.logits)
        assert cache.kv is not None and cache.kv.seq_lens.tolist() == (24 - PADS).tolist()
    torch.testing.assert_close(*found, atol=1e-3, rtol=0)
