"""Plans, and caches that are made and saved with one (5 s)."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_plan import example_plan
from forged import GONE, Edit, forge, put
from latent_plans import latent_plan
from refusals import assert_refused
from relative_l2 import relative_l2
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvquant import CachedModel, KVCache, LatentKVCache, QuantizedCache, load_cache, save_cache
from kvquant.calibration.fidelity import Planned
from kvquant.errors import CheckpointError, ConfigError
from kvquant.io.plan import CachePlan
from kvquant.paged.cache import PagedKVCache
from kvquant.paged.latent import LatentPagedKVCache
from kvquant.rows.basis import fingerprints

DATA = Path(__file__).parents[1] / "data"
CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture
def plan() -> CachePlan:
    return example_plan(config=CONFIG)


@pytest.fixture
def path(plan: CachePlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "plan.safetensors")
    return tmp_path / "plan.safetensors"


def filled(plan: CachePlan, **options: Any) -> KVCache:
    cache = KVCache.from_plan(plan, 2, 30, **({"sink_len": 2, "recent_len": 4} | options))
    torch.manual_seed(4)
    for layer in range(3):
        k, v = torch.randn(2, 2, 2, 21, 64)
        cache.append(layer, k, v, [21, 9])
    return cache


class Lazy(CachePlan):
    """Computes no bases."""

    layers = property(lambda self: pytest.fail("bases are computed before they are wanted"))


@pytest.mark.parametrize("option", ["k_format", "v_format", "bases", "num_layers"])
def test_options_that_a_plan_decides_are_refused(plan: CachePlan, option: str) -> None:
    options: Any = {option: "int8"}
    lazy, words = Lazy(plan.facts, plan.tensors), f"{option} with a plan: .* use plan.with_formats"
    with pytest.raises(ConfigError, match=words):
        KVCache.from_plan(lazy, 2, 30, **options)
    with pytest.raises(ConfigError, match=words):
        PagedKVCache.from_plan(lazy, 4, **options)


def test_a_plan_is_read_as_it_was_written(plan: CachePlan, path: Path) -> None:
    again = CachePlan.load(path, model=CONFIG)
    assert again.facts == json.loads(json.dumps(plan.facts))
    assert again.tensors.keys() == plan.tensors.keys()
    for name, tensor in plan.tensors.items():
        assert torch.equal(again.tensors[name], tensor.float()), name
    assert again.formats == [("int4", "int8"), ("int4", "int4"), ("bf16", "bf16")]
    assert [again.num_layers, again.num_kv_heads, again.head_dim] == [3, 2, 64]


def test_bits_are_those_of_the_rows(plan: CachePlan) -> None:
    assert plan.bits == pytest.approx((3 * 4.5 + 8.5 + 2 * 16) / 6)
    uniform = plan.with_formats("int8")
    assert uniform.formats[:2] == [("int8", "int8")] * 2
    assert uniform.formats[2] == ("bf16", "bf16")  # it is kept
    assert uniform.facts["measured"] is None
    assert uniform.facts["bits"] == uniform.bits != plan.bits
    clip = uniform.layers[0].k.clip
    assert clip is not None and torch.equal(clip, plan.tensors["k.clip.int8"][0])
    assert plan.with_formats("int8", "int4").formats[0] == ("int8", "int4")
    with pytest.raises(ConfigError, match="'int5' does not exist"):
        plan.with_formats("int5")


def test_a_layer_that_is_kept_in_16_bit_stays_so(plan: CachePlan) -> None:
    odd: list[Any] = [{(0, "q"): "int8"}, {(3, "k"): "int8"}, {0: "int8"}, None]
    for formats in odd:
        with pytest.raises(ConfigError, match=r"by \(layer, side\), layers from 0 to 2"):
            plan.with_layer_formats(formats)
    kept = [i for i, entry in enumerate(plan.facts["layers"]) if entry["kept"]]
    assert kept
    with pytest.raises(ConfigError, match=rf"layer {kept[0]} cannot be kept in int8: .*16 bit"):
        plan.with_layer_formats({(kept[0], "v"): "int8"})
    assert plan.with_layer_formats({(kept[0], "v"): "fp16"}).formats[kept[0]] == ("bf16", "fp16")


def test_the_plan_of_some_heads_stores_their_rows_as_the_whole_one(
    plan: CachePlan, tmp_path: Path
) -> None:
    """But for codes that last bits of the products with a matrix move: .01 is one code in 1,000."""
    tensors = dict(plan.tensors) | {f"{s}.offset": torch.randn(3, 2, 64) for s in "kv"}
    plan = CachePlan(plan.facts, tensors)
    plan.of_heads([1]).save(tmp_path / "one.safetensors")
    one = CachePlan.load(tmp_path / "one.safetensors")
    assert one.num_kv_heads == 1 and one.formats == plan.formats
    whole, part = (KVCache.from_plan(p, 2, 32, recent_len=0, sink_len=0) for p in (plan, one))
    for layer in range(3):
        k, v = torch.randn(2, 2, 2, 20, 64)
        whole.append(layer, k, v)
        part.append(layer, k[:, 1:], v[:, 1:])
        for rows, wanted in zip(part.dequantized(layer), whole.dequantized(layer), strict=True):
            assert relative_l2(rows, wanted[:, 1:]) < 0.01
    wrong: list[Any] = [[], [0, 2], [-1], [True, False], [True], [[0]], [1.0]]
    for heads in wrong:
        with pytest.raises(ConfigError, match="give some of 0 to 1"):
            plan.of_heads(heads)
    with pytest.raises(ConfigError, match="heads are 0: give a list"):
        plan.of_heads(0)  # type: ignore[arg-type]


def edited(path: Path, edit: Edit) -> None:
    """Edit a plan, as a hostile writer would: checksums and shapes are made to fit."""

    def shaped(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        edit(facts, tensors)
        facts["shapes"] = {name: list(tensor.shape) for name, tensor in tensors.items()}

    forge(path, shaped)


def at(place: str, value: Any) -> Edit:
    """Put a value at a place of the facts."""
    return lambda facts, _: put(place, value, facts)


def of(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Edit:
    """Change a tensor, in place or by another one."""

    def edit(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        changed = change(tensors[name])
        if changed is not None:
            tensors[name] = changed.contiguous()

    return edit


CONTRADICTIONS: dict[str, tuple[Edit, str]] = {
    "format": (at("format", "x"), "has no format of kvquant, but 'x'"),
    "version": (at("version", 4), "version 4, this kvquant reads 1"),
    "truth": (at("version", True), "version True"),
    "no layers": (at("layers", GONE), "lacks one: .* layers"),
    "empty": (at("layers", []), "layers is .*: it must be array of length >= 1"),
    "no model": (at("model", GONE), "lacks one: .* model"),
    "model": (at("model", 3), "model is 3"),
    "basis": (
        at("layers.0.k.basis", "hadamard"),
        r"layers\[0\].k.basis is 'hadamard': .*matrix",
    ),
    "rounding": (at("layers.0.k.rounding", "up"), "k.rounding is 'up': .*nearest"),
    "codec": (at("layers.0.k.format", "int5"), "'int5' does not exist"),
    "no format": (at("layers.0.k.format", 4), r"k.format is 4: .* str"),
    "feedback": (at("layers.0.k.rounding", "feedback"), "k.'feedback' is missing"),
    "other basis": (of("v.matrix", lambda x: x.mul_(2)), r"layers\[1\].v.basis is 'none', and"),
    "kept": (at("layers.2.k.format", "int4"), r"layers\[2\] is kept in 16 bit"),
    "kept basis": (at("layers.2.v.basis", "matrix"), "is kept in 16 bit"),
    "bits": (at("bits", 4.25), "bits is 4.25: the formats have 9.0"),
    "no bits": (at("bits", float("nan")), "bits is nan"),
    "missing": (lambda _, tensors: tensors.pop("k.offset"), "k.offset and v.offset of .* missing"),
    "count": (at("layers.2", GONE), "do not fit 2 layers"),
    "heads": (of("v.offset", lambda x: x[:, :1]), "do not fit 3 layers"),
    "no heads": (of("k.offset", lambda x: x[:, :0]), "do not fit 3 layers"),
    "axes": (of("k.offset", lambda x: x[0]), "do not fit 3 layers"),
    "head_dim": (of("k.offset", lambda x: x.repeat(1, 1, 2)), r"'k\.\w+' is .*it must be"),
    "no matrix": (lambda _, tensors: tensors.pop("k.matrix"), "k.'matrix' is missing"),
    "matrix": (of("k.matrix", lambda x: x[..., :63]), "'k.matrix' is"),
    "clip": (of("v.clip.int4", lambda x: x.T), "'v.clip.int4' is"),
    "heads of others": (lambda _, x: x.update({"k.old": torch.zeros(3)}), "'k.old' is .* must be"),
    "dtype": (of("k.offset", lambda x: x.int()), "torch.int32 .*: it must be torch.float32"),
    "nan": (of("v.offset", lambda x: x.fill_(torch.nan)), "'v.offset' has values that are not"),
    "inf": (of("k.offset", lambda x: x.fill_(torch.inf)), "'k.offset' has values that are not"),
    "share": (of("k.clip.int4", lambda x: x.fill_(1.5)), r"shares that are not in \(0, 1\]"),
    "no share": (of("k.clip.int4", lambda x: x.fill_(0)), r"shares that are not in \(0, 1\]"),
    "singular": (of("k.matrix", lambda x: x.fill_(0)), "must have an inverse"),
    "nearly singular": (of("k.matrix", lambda x: x.mul_(1e-39)), "must have an inverse"),
    "places": (at("places", [0, 1]), "do not say where 3 layers are"),
    "one place": (at("places", [0, 1, 1]), "do not say where 3 layers are"),
    "taken": (at("others", [{"layer": 2, "why": ""}]), "do not say where 3 layers are"),
    "negative": (at("places", [0, 1, -1]), r"places\[2\] is -1"),
    "kl": (at("measured.kl", "x"), "measured.kl is 'x'"),
    "window": (at("windowed", 5), "windowed is 5"),
    "limit": (at("limit.met", None), "limit.met is None"),
    "words": (at("settings", {"text": "\ud800"}), "surrogates not allowed"),
    "others": (at("others", [3]), r"others\[0\] is 3"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_plans_that_contradict_themselves_are_refused(path: Path, name: str) -> None:
    edit, words = CONTRADICTIONS[name]
    edited(path, edit)
    with pytest.raises(CheckpointError, match=words) as raised:
        CachePlan.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("name", sorted(CONTRADICTIONS.keys() - {"format", "version", "truth"}))
def test_plans_that_contradict_themselves_are_not_saved(
    plan: CachePlan, tmp_path: Path, name: str
) -> None:
    edit, _ = CONTRADICTIONS[name]
    facts, tensors = json.loads(json.dumps(plan.facts)), dict(plan.tensors)
    edit(facts, tensors)
    changed, path = CachePlan(facts, tensors), tmp_path / "new.safetensors"
    if "bits" in name or name == "dtype":
        changed.save(path)  # these are computed anew
        assert CachePlan.load(path).facts["bits"] == plan.bits
        return
    with pytest.raises(CheckpointError):
        changed.save(path)
    assert not path.exists()


def test_golden_files_still_load(path: Path) -> None:
    golden = CachePlan.load(DATA / "plan.safetensors")
    assert golden.formats == [("int8", "int8")] and golden.num_kv_heads == 1
    assert golden.facts["measured"]["scored"] == 8
    golden.save(path)
    again = CachePlan.load(path)
    assert again.facts == golden.facts
    assert all(torch.equal(x, again.tensors[name]) for name, x in golden.tensors.items())
    cache = KVCache.from_plan(again, 1, 8, sink_len=0, recent_len=0)
    cache.append(0, *torch.randn(2, 1, 1, 8, 64))

    latent = CachePlan.load(DATA / "plan-latent.safetensors")
    assert latent.is_latent and latent.formats == [("int4-g8", "int8-g4")]
    basis = latent.layers[0]
    assert (basis.k.kind, basis.v.kind) == ("none", "matrix")
    assert torch.equal(basis.k.offset, torch.arange(256)[None] / 64 - 2.0)


def test_a_large_plan_of_no_head_dim_is_refused_before_it_costs_memory(path: Path) -> None:
    side = {"format": "int4", "basis": "none", "rounding": "nearest"}

    def edit(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        tensors |= {f"{side}.offset": torch.zeros(1, 1, 30_000) for side in "kv"}
        facts["layers"] = [{"k": side, "v": side, "kept": None}]
        facts |= {"sensitivity": [], "blamed": []}

    edited(path, edit)
    with pytest.raises(CheckpointError, match="head_dim 30000 is not supported"):
        CachePlan.load(path)


def test_other_files_are_no_plans(tmp_path: Path, plan: CachePlan) -> None:
    path = save_cache(filled(plan), tmp_path / "cache.safetensors")
    with pytest.raises(CheckpointError, match=r"a kvquant cache: .* `kvquant inspect`"):
        CachePlan.load(path)
    with pytest.raises(ConfigError, match=r"path is '\.': give the path of a file"):
        CachePlan.load(".")


def test_a_saved_cache_goes_on_with_its_plan(plan: CachePlan, tmp_path: Path) -> None:
    cache, path = filled(plan), tmp_path / "cache.safetensors"
    save_cache(cache, path)
    again = load_cache(path, plan=plan.with_formats("int8"))  # formats are the file's
    k, v = torch.randn(2, 2, 2, 5, 64)
    q = torch.randn(2, 4, 64)
    for layer in range(3):
        for one in (cache, again):
            one.append(layer, k, v)
        for mine, theirs in zip(cache.segments(layer), again.segments(layer), strict=True):
            for b, side in itertools.product(range(2), "kv"):
                assert torch.equal(mine.rows(b, side), theirs.rows(b, side))
        packed = int(cache.layers[layer].seq_lens.min()) - cache.sink_len  # recent ones, too
        assert torch.equal(
            cache.layers[layer].k_packed[:, :, :packed], again.layers[layer].k_packed[:, :, :packed]
        )
        out, given = cache.attend(layer, q), again.attend(layer, q)
        assert isinstance(out, torch.Tensor) and isinstance(given, torch.Tensor)
        assert torch.equal(out, given)


def test_rows_of_one_basis_are_not_read_in_another(plan: CachePlan, tmp_path: Path) -> None:
    path, plain = tmp_path / "cache.safetensors", tmp_path / "plain.safetensors"
    save_cache(filled(plan), path)
    save_cache(KVCache(3, 1, 2, 64, 8), plain)
    moved = plan.tensors["v.offset"].clone()
    moved[1, 0, 0] += 1
    other = CachePlan(plan.facts, {**plan.tensors, "v.offset": moved})
    assert_refused(
        CheckpointError,
        (lambda: load_cache(path), "stored in the bases of a plan: load it with"),
        (lambda: load_cache(path, plan=other), r"of another plan \(layer 1 differs\)"),
        (lambda: load_cache(plain, plan=plan), "without a plan: use none"),
    )


SIZES: dict[str, Any] = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 32, "num_attention_heads": 4}


def saved_and_loaded(plan: Any, tmp_path: Path) -> Any:
    file = save_cache(KVCache.from_plan(plan, 1, 8), tmp_path / "cache.safetensors")
    return load_cache(file, plan=plan).bases


DOORS: dict[str, Callable[[Any, LlamaForCausalLM, Path], Any]] = {
    "KVCache": lambda plan, model, _: KVCache.from_plan(plan, 1, 8).bases,
    "PagedKVCache": lambda plan, model, _: PagedKVCache.from_plan(plan, 4).bases,
    "for_model": lambda plan, model, _: PagedKVCache.for_model(model, 4, plan=plan).bases,
    "for_memory": lambda plan, model, _: PagedKVCache.for_memory(2**26, plan=plan).bases,
    "load_cache": lambda plan, model, folder: saved_and_loaded(plan, folder),
    "new_cache": lambda plan, model, _: CachedModel(model).new_cache(1, 8, plan=plan).bases,
    "QuantizedCache": lambda plan, model, _: QuantizedCache(model, plan=plan)._outline.bases,
    "fold_values": lambda plan, model, _: CachedModel(model).fold_values(plan).layers,
    "Planned": lambda plan, model, _: Planned(plan).plan.layers,
    "LatentKVCache": lambda plan, model, _: LatentKVCache.from_plan(plan, 1, 8).bases,
    "LatentPagedKVCache": lambda plan, model, _: LatentPagedKVCache.from_plan(plan, 4).bases,
}


@pytest.mark.parametrize("name", DOORS)
def test_a_path_is_taken_wherever_a_plan_is(name: str, tmp_path: Path) -> None:
    config, door = LlamaConfig(**SIZES), DOORS[name]
    plan, path = example_plan(config=config.to_dict()), tmp_path / "plan.safetensors"
    plan = latent_plan() if "Latent" in name else plan.with_formats("int8")
    plan.save(path)
    make = partial(AutoModelForCausalLM.from_config, config, attn_implementation="kvquant")
    models = [make() for _ in "abc"]
    given = plan, path, str(path)
    found = [door(one, model, tmp_path) for one, model in zip(given, models, strict=True)]
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        door("none.safetensors", models[0], tmp_path)
    assert found[0]
    assert fingerprints(found[0]) == fingerprints(found[1]) == fingerprints(found[2])


def test_a_plan_of_latent_rows_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan, path = latent_plan(), tmp_path / "plan.safetensors"
    plan.save(path)
    again = CachePlan.load(path)
    assert again.is_latent
    assert [again.num_kv_heads, again.head_dim] == [1, 256]
    assert again.formats == [("int4-g8", "bf16"), ("bf16", "bf16")]
    assert again.bits == pytest.approx(8 * (160 + 64 + 512 + 64) / (2 * 288))
    assert "latents bf16/int4-g8, RoPE parts bf16, " in repr(again)
    for name, tensor in plan.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    other = again.with_formats("int8-g4+fp8-g4")
    assert other.formats[0] == again.with_formats("int8-g4", "fp8-g4").formats[0]
    assert other.formats == [("int8-g4", "fp8-g4"), ("bf16", "bf16")]
    assert again.with_formats("int8-g4").formats[0] == ("int8-g4", "bf16")
    with pytest.raises(ConfigError, match="fp8 is FlashMLA's layout"):
        again.with_formats("fp8")
    with pytest.raises(ConfigError, match=r"plan is of latent rows.*CachedModel\.new_cache"):
        again.without_v_bases()


def test_latent_plans_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    plan, path = latent_plan(), tmp_path / "plan.safetensors"
    facts, tensors = dict(plan.facts), dict(plan.tensors)
    layers = json.loads(json.dumps(facts["layers"]))
    assert plan.formats[0][1] == "bf16"  # a basis that is not used is looked at, too
    layers[0]["k"]["rounding"] = "feedback"
    eyes = {f"{side}.feedback": tensors[f"{side}.matrix"] for side in "kv"}
    singular = {"v.matrix": torch.zeros_like(tensors["v.matrix"])}
    heads = {name: tensor.repeat_interleave(2, 1) for name, tensor in tensors.items()}
    missing = {name: x for name, x in tensors.items() if name != "v.matrix"}
    feedback = r"layers\[0\] rounds latent rows with feedback"
    assert_refused(
        CheckpointError,
        (lambda: CachePlan(facts, heads).save(path), "rows have one KV head, the plan is of 2"),
        (lambda: CachePlan(facts, tensors | singular).save(path), "must have an inverse"),
        (lambda: CachePlan(facts, missing).save(path), r"v\.'matrix' is missing"),
        (lambda: CachePlan(facts | {"layers": layers}, tensors | eyes).save(path), feedback),
        (
            lambda: CachePlan(facts | {"latent": False}, tensors).save(path),
            "head_dim 32 is that of",
        ),
    )


def test_plans_of_other_formats_share_the_bases() -> None:
    plan = example_plan(2, 2, 64)
    other = plan.with_formats("int8", "int4-g4")
    for mine, theirs in zip(plan.layers, other.layers, strict=True):
        assert mine.k.matrix is theirs.k.matrix and mine.v.feedback is theirs.v.feedback
