"""When vLLM gets kvquant's backend, and when it is told why not (10 seconds)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_plan import example_plan
from vllm_engines import INT4

from kvquant import CachePlan, ConfigError, UnsupportedError
from kvquant.vllm import entries, plugin

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
ROWS = {"additional_config": {"kvquant": INT4}}


@contextmanager
def current(**given: Any) -> Iterator[Any]:
    """The config of an engine, current."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(config := VllmConfig(**given)):
        yield config


def entry(name: str) -> Any:
    """Of vLLM's registry."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    return AttentionBackendEnum[name]


def test_the_plugin_does_nothing_until_it_is_asked() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    plugin.register()
    assert entry("CPU_ATTN").get_class() is CPUAttentionBackend
    with pytest.raises(ConfigError, match="give --attention-backend CUSTOM or --additional-config"):
        entry("CUSTOM").get_class()
    with (
        current(additional_config={"kvquant": {"k_format": "int5"}}),
        pytest.raises(ConfigError, match="format 'int5' does not exist"),
    ):
        entry("CPU_ATTN").get_class()


def test_the_backend_alone_takes_the_default_rows() -> None:
    from vllm.config import AttentionConfig

    from kvquant.vllm.backend import check_request

    asked = AttentionConfig(backend=entry("CUSTOM"))
    cases: list[dict[str, Any]] = [
        {"additional_config": {}},
        {"additional_config": {"another": {"k_format": 1}}},
    ]
    for options in cases:
        with current(attention_config=asked, **options) as config:
            for name in ("CUSTOM", "CPU_ATTN"):
                found = entry(name).get_class()
                assert str(found.settings) == "K rows default, V rows default"
            check_request(found.request, config)
    with current(attention_config=asked, additional_config={"kvquant": INT4}) as config:
        assert "int4-g4" in str(entry("CUSTOM").get_class().settings)
        with pytest.raises(ConfigError, match="holds the backend of an earlier engine"):
            check_request(found.request, config)
    with current() as config, pytest.raises(ConfigError, match="asks for no rows of kvquant"):
        check_request(found.request, config)


def test_weights_are_downloaded_for_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM takes the memory of the GPU."""
    from vllm.config import AttentionConfig

    from kvquant.vllm import backend

    judged: list[Any] = []
    monkeypatch.setattr(plugin, "accuracy_of", lambda asked, of: judged.append(of(True)))
    monkeypatch.setattr(backend, "weights_of", lambda *given: given)
    with current(attention_config=AttentionConfig(backend=entry("CUSTOM"))) as config:
        config.model_config = SimpleNamespace(use_mla=False, model="owner/name")
        entry("CUSTOM").get_class()
    assert judged == [(config, True)]


def test_cache_dtypes_name_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hook of vLLM 0.33, for which another stands in vLLM 0.32."""
    from vllm.config import cache

    known, handlers = ["auto", "fp8"], []

    def hook(name: str) -> Any:
        known.append(name)
        return lambda kind: handlers.append(kind())

    monkeypatch.setattr(cache, "KV_CACHE_DTYPES", known, raising=False)
    monkeypatch.setattr(cache, "register_kv_cache_dtype", hook, raising=False)
    for _ in range(2):  # vLLM warns of names that are there
        plugin.register()
    assert len(known) == 2 + len(entries.DTYPES) == len({*known}) == 2 + len(handlers)
    assert {(one.torch_dtype(), one.quant_mode().name) for one in handlers} == {
        (torch.bfloat16, "NONE")
    }
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("kvquant_default", {}, "K rows default, V rows default"),
        ("kvquant_int4-g4", {}, "K rows int4-g4, V rows int4-g4"),
        ("kvquant_int4-g4", {"kvquant": {"k_format": "int8"}}, "K rows int8, V rows int4-g4"),
    ]
    for name, more, rows in cases:
        with current(additional_config=more) as config:
            config.cache_config.cache_dtype = name
            found = entry("CPU_ATTN").get_class()
            assert str(found.settings) == rows and found.supports_kv_cache_dtype(name)
            with pytest.raises(ConfigError, match="give --attention-backend CUSTOM"):
                entry("TRITON_ATTN").get_class()
    config.cache_config.cache_dtype = "kvquant_auto"
    assert entries.asked_of(config) == {"plan": "auto", "k_format": "int8"}


def test_settings_that_are_misspelt_or_misplaced_are_refused() -> None:
    """Nothing else would read them: there would be other rows than were asked for, or none."""
    message = r'has the key \'\w+\', not "kvquant": put what is kvquant\'s into "kvquant", {"kvq'
    found: list[dict[str, Any]] = [INT4, {"plan": "plan.safetensors"}, {"kformat": "int4-g4"}]
    found += [{"format": "int4-g8+int8-g4"}, {"kv_quant": INT4}, {"KVQuant": INT4}]
    for given in (*found, {"kvquant": INT4, "v_format": "int8"}):
        for name in ("CPU_ATTN", "CUSTOM"):
            with current(additional_config=given), pytest.raises(ConfigError, match=message):
                entry(name).get_class()
                pytest.fail(f"{given}")


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_vllms_log_has_what_kvquant_logs(level: int) -> None:
    """Such as how far compiling is: else nobody prints it, or beside vLLM's log."""
    import kvquant.vllm.backend  # noqa: F401

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    told: list[str] = []
    note, ours, theirs = Note(), logging.getLogger("kvquant"), logging.getLogger("vllm")
    before = theirs.level
    theirs.setLevel(level)
    theirs.addHandler(note)
    try:
        ours.info("compiling kernels: 20 %")
        ours.warning("another process compiles")
    finally:
        theirs.removeHandler(note)
        theirs.setLevel(before)
    wanted = ["compiling kernels: 20 %", "another process compiles"]
    assert told == (wanted if level == logging.INFO else wanted[1:])


def test_settings_of_other_plugins_are_left_to_them() -> None:
    others = {"quant": "int8", "format": 1, "kv_cache": {}, "prompts": 2, "planner": None, "x": 3}
    for own in ({}, {"format": "json"}):
        with current(additional_config=others | own):
            assert plugin.CPU_ATTN.get_name() == "CPU_ATTN"


def test_a_plan_is_read_again_where_its_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(folder: str, offset: float) -> str:
        plan = example_plan(2, 4, 64)
        plan.facts["layers"][-1] = plan.facts["layers"][0]  # none is kept in 16 bit
        plan.tensors["k.offset"][:] = offset
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / "plan"
        path.unlink(missing_ok=True)
        CachePlan(plan.facts, plan.tensors).save(path)
        return str(path)

    def served(path: str) -> Any:
        rows = {"kvquant": {"plan": path, "k_format": "int8", "v_format": "int8"}}
        with current(additional_config=rows):
            backend = plugin.CPU_ATTN
            assert plugin.CPU_ATTN is backend  # of the same file there is one
        return backend.settings.plan.tensors["k.offset"].unique().tolist()

    path = save("one", 1.0)
    save("other", 3.0)
    assert served(path) == [1.0]
    save("one", 2.0)
    assert served(path) == [2.0]
    for folder, wanted in (("one", [2.0]), ("other", [3.0])):
        monkeypatch.chdir(tmp_path / folder)
        assert served("plan") == wanted


LATENT_ROWS = {"additional_config": {"kvquant": {"format": "fp8"}}}


def test_models_with_latent_attention_have_a_backend_of_their_own() -> None:
    from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend

    plugin.register()
    for given in (LATENT_ROWS, {}):
        _cached_get_attn_backend.cache_clear()
        with current(**given):
            found = get_attn_backend(576, torch.bfloat16, "auto", use_mla=True)
            assert found.get_name() in entries.LATENT and found.is_mla()
            assert hasattr(found, "request") == bool(given)


def test_which_kind_of_rows_custom_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model that is made: the draft model may be of the other kind."""
    from vllm.compilation.backends import set_model_tag

    given = {"model": "a folder", "revision": None}
    heads, latents = (SimpleNamespace(use_mla=mla, **given) for mla in (False, True))
    for model, drafts, rows in ((latents, heads, LATENT_ROWS), (heads, latents, ROWS)):
        other = LATENT_ROWS if rows is ROWS else ROWS
        with current(**rows) as config:
            config.model_config = model
            config.speculative_config = SimpleNamespace(draft_model_config=drafts)
            assert plugin.CUSTOM.is_mla() == model.use_mla
            config.additional_config = other["additional_config"]
            with set_model_tag("draft_model"):
                assert plugin.CUSTOM.is_mla() == drafts.use_mla
            with pytest.raises(ConfigError, match=r"give a dict with (k_)?format"):
                plugin.CUSTOM  # noqa: B018


@pytest.mark.parametrize("name", ["FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4", "TRITON_MSA"])
def test_sparse_attention_is_refused(name: str) -> None:
    message = f"sparse attention, whose backend is {name}"
    with current(**LATENT_ROWS), pytest.raises(UnsupportedError, match=message):
        entry(name).get_class()


def test_models_that_take_a_backend_of_their_own_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As MiMo-V2 does, whose K and V differ in head_dim."""
    from vllm.config import AttentionConfig, VllmConfig

    asked = AttentionConfig(backend=entry("CUSTOM"))
    for name in plugin.DIFFKV:
        one = entry(name)
        monkeypatch.setattr(one, "_value_", "vllm.config.VllmConfig")  # whose module needs no GPU
        with (
            current(**ROWS, attention_config=asked),
            pytest.raises(UnsupportedError, match=f"this model takes the backend {name}"),
        ):
            one.get_class()
        with current():
            assert one.get_class() is VllmConfig


def test_a_vllm_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    message = r"vLLM 0\.31\.2 was not tried.*pip install 'vllm>=0.32,<0.34'"
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    with current(**ROWS), pytest.raises(UnsupportedError, match=message):
        plugin.CPU_ATTN  # noqa: B018
    with current():  # without rows it is none of our business
        plugin.CPU_ATTN  # noqa: B018
