"""The names that kvquant exports."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from forgotten import forget

import kvquant
from kvquant import errors

PUBLIC = """
AttentionVariant Basis CachePlan ContextParallelCache KVCache LatentFormat LatentKVCache
LatentPagedBatch LatentPagedKVCache PagedBatch PagedKVCache Rope RowFormat Slots append_rows
decode_attention dequantize_pages dequantize_rows load_cache load_sequences merge_states
mla_decode_attention quantize_rows reference_attention save_cache save_sequences slots_of
""".split()
# import * takes them where the hf extra is installed
WITH_HF = ["CachedModel", "CapturedStep", "QuantizedCache", "calibrate", "evaluate"]
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
PLAN = Path(__file__).parent / "data" / "plan.safetensors"
RECORDS = ["Rope", "RowTransform", "Slots"]  # arguments of append_rows, where examples show them
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value)]


def test_all_is_sorted_and_complete() -> None:
    with_hf = WITH_HF if HAS_TRANSFORMERS else []
    assert kvquant.__all__ == sorted([*PUBLIC, *ERRORS, *with_hf])
    assert set(dir(kvquant)) >= {*kvquant.__all__, "__all__", "__version__"}
    names: dict[str, object] = {}
    exec("from kvquant import *", names)
    assert {name: names[name] for name in kvquant.__all__} == {
        name: getattr(kvquant, name) for name in kvquant.__all__
    }
    importable = {
        name
        for name, value in vars(kvquant).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert importable == set(kvquant.__all__)
    with pytest.raises(AttributeError, match="module 'kvquant' has no attribute 'KVcache'"):
        kvquant.KVcache  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_are_told_where_each_name_comes_from() -> None:
    assert kvquant.__file__
    tree = ast.parse(Path(kvquant.__file__).read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    values = {ast.unparse(node.targets[0]): node.value for node in assigned}
    assert ast.literal_eval(values["__all__"]) == sorted([*PUBLIC, *ERRORS, *WITH_HF])
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == kvquant._HOMES
    assert set(told) == {*PUBLIC, *WITH_HF}


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs the hf extra")
@pytest.mark.parametrize("name", WITH_HF)
def test_names_that_need_transformers_have_docstrings(name: str) -> None:
    assert inspect.getdoc(getattr(kvquant, name))


NO_TRANSFORMERS = {
    "missing": "sys.modules['transformers'] = None",
    "too old": """
import importlib.metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
names = "transformers", "transformers.cache_utils"
for name in names:
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = ModuleSpec(name, None)
sys.modules[names[0]].__version__ = "4.57.0"
sys.modules[names[1]].CacheLayerMixin = object
importlib.metadata.version = lambda name: "4.57.0"
""",
}


@pytest.mark.parametrize("how", NO_TRANSFORMERS)
def test_a_star_needs_no_extra(how: str) -> None:
    code = f"""
import sys
{NO_TRANSFORMERS[how]}
import kvquant
found = dir(kvquant)
assert "torch" not in sys.modules
from kvquant import *
assert KVCache is kvquant.KVCache and issubclass(ConfigError, KVQuantError)
assert not {{*{WITH_HF}}} & {{*globals()}}
assert kvquant.__all__ == {sorted([*PUBLIC, *ERRORS])}
import pydoc
assert not {{*{WITH_HF}}} & {{*found}}
assert "decode_attention" in pydoc.render_doc(kvquant)  # it asks for all names of dir
try:
    from kvquant import QuantizedCache
except UnsupportedError as error:
    for words in "need transformers 5.14 or newer", "install the extra 'hf'":
        assert words in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_oldest_transformers_is_that_of_the_extra() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f"transformers>={'.'.join(map(str, kvquant._TRANSFORMERS))}" in project


@pytest.mark.parametrize(
    "module", ["vllm.backend", "sglang.pool", "lmcache.serde", "lm_eval.model"]
)
def test_engines_that_are_missing_are_told(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, _ = module.split(".")
    monkeypatch.setitem(sys.modules, package, None)
    forget(monkeypatch, f"kvquant.{module}")
    extra = package.replace("_", "-")
    with pytest.raises(errors.UnsupportedError, match=rf"-m pip install .*\[{extra}\]"):
        importlib.import_module(f"kvquant.{module}")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = getattr(kvquant, name)
    assert value.__module__.startswith("kvquant.")
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if not method.startswith("_") and callable(getattr(value, method)):
                assert inspect.getdoc(getattr(value, method)), f"{name}.{method}"
                assert function


def test_every_error_is_a_kvquant_error_drawn_in_the_docstring() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert len(classes) == 10
    assert errors.__doc__
    for error in classes:
        assert issubclass(error, errors.KVQuantError)
        assert error.__name__ in errors.__doc__
        assert inspect.getdoc(error)


@pytest.mark.parametrize("name", [*PUBLIC, *WITH_HF])
def test_examples_of_docstrings_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each example alone, as it is copied: it imports all that it uses."""
    examples = doctest.DocTestFinder().find(getattr(kvquant, name), name, globs={})
    if name in WITH_HF or any("import transformers" in str(one.docstring) for one in examples):
        pytest.importorskip("transformers", reason="needs the hf extra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.safetensors").write_bytes(PLAN.read_bytes())
    failed: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples:
        runner.run(test, out=failed.append)
    assert not failed, "".join(failed)
    assert runner.tries or name in RECORDS
