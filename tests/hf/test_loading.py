"""Folders, GGUF files, names of models: nothing in them runs, failures are one line (4 s)."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvquant.cli.main import main
from kvquant.errors import ConfigError

transformers = pytest.importorskip("transformers")
import huggingface_hub  # noqa: E402
from hf_cases import SHAPE  # noqa: E402
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models.loading import load_config  # noqa: E402

BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
KERNEL = "kernels-community/flash-attn"
Make = Callable[..., Path]


class Code:
    """A pickle that touches a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    config = transformers.LlamaConfig(**(SHAPE | {"vocab_size": 8192}), dtype="bfloat16")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for path in BUNDLED.glob("token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def make(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A folder like the small one, with other entries in config.json and other files."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("builtins.input", refuse)

    def folder(
        changes: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
        without: str = "",
    ) -> Path:
        ignored = shutil.ignore_patterns(without) if without else None
        shutil.copytree(small, tmp_path / "folder", ignore=ignored)
        config = tmp_path / "folder" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | dict(changes or {})))
        code = f"import os\nos.system('touch {tmp_path / 'ran'}')\n"
        for name, content in (files or {}).items():
            path = tmp_path / "folder" / name
            path.parent.mkdir(exist_ok=True)
            if content == "bytes":
                tensors = {key: tensor.char() for key, tensor in load_file(path).items()}
                save_file(tensors, path, metadata={"format": "pt"})
                continue
            if content == "pickle":
                content = pickle.dumps(Code(tmp_path / "ran"))
            elif content == "code":
                content = code.encode()
            elif not isinstance(content, bytes):
                content = json.dumps(content).encode()
            path.write_bytes(content)
        return tmp_path / "folder"

    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more layers": (
        {"changes": {"num_hidden_layers": 3}},
        r"no weights for 9 tensors .* model\.layers\.2\.",
    ),
    "other sizes": (
        {"changes": {"intermediate_size": 96}},
        r"layers\.0\.mlp\.down_proj\.weight of shape \[128, 256\], where .* asks for \[128, 96\]",
    ),
    "another kind": ({"changes": {"model_type": "bert"}}, r"has no weights for .* tensors"),
    "not the model's weights": (
        {"files": {"model.safetensors": save_file}},
        "has num_hidden_layers 2, and there are 1 tensors of weights",
    ),
    "very many layers": (
        {"changes": {"num_hidden_layers": 10**9}},
        "has num_hidden_layers 1000000000, and there are 21 tensors",
    ),
    "very large layers": (
        {"changes": {"intermediate_size": 10**9}},
        "asks for a model of 768,[0-9,]* numbers, and its weights have 2,",
    ),
    "code of its own": (
        {
            "changes": {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
            "files": {"own.py": "code"},
        },
        "could not be loaded: .* contains custom code",
    ),
    "a tokenizer of its own": (
        {
            "files": {
                "tokenizer_config.json": {
                    "tokenizer_class": "Own",
                    "auto_map": {"AutoTokenizer": ["own.Own", None]},
                },
                "own.py": "code",
            }
        },
        "could not be loaded: .* contains custom code",
    ),
    "pickles": (
        {"without": "*.safetensors", "files": {"pytorch_model.bin": "pickle"}},
        r"pickles \(pytorch_model\.bin\), which can run code: model\.safetensors is needed",
    ),
    "pickles in an index": (
        {
            "without": "*.safetensors",
            "files": {
                "model.safetensors.index.json": {"weight_map": {"a": "x.bin"}, "metadata": {}},
                "x.bin": "pickle",
            },
        },
        r"index\.json names 'x\.bin'",
    ),
    "weights elsewhere": (
        {
            "without": "*.safetensors",
            "files": {"model.safetensors.index.json": {"weight_map": {"a": "../x.safetensors"}}},
        },
        r"index\.json names '\.\./x\.safetensors'",
    ),
    "an index of nothing": (
        {"without": "*.safetensors", "files": {"model.safetensors.index.json": {"weight_map": 3}}},
        r"index\.json names 3",
    ),
    "weights by name": (
        {"changes": {"transformers_weights": "adapter_model.bin"}, "files": {"x": "pickle"}},
        "names its weights itself",
    ),
    "no weights": ({"without": "*.safetensors"}, "its weights are missing"),
    "a distributed checkpoint": (
        {"files": {"shard-00001-model-00001-of-00001.safetensors": b"", ".metadata": "pickle"}},
        "is a distributed checkpoint",
    ),
    "an adapter": (
        {"files": {"adapter_config.json": {"base_model_name_or_path": "some/model"}}},
        "holds an adapter .* which leads to another model",
    ),
    "quantized": (
        {"changes": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
        r"has quantized weights \(gptq\), which need other packages",
    ),
    "quantized without a word": (
        {"files": {"model.safetensors": "bytes"}},
        r"quantized weights \(lm_head\.weight is I8\), and config\.json does not tell",
    ),
    "quantized somehow": ({"changes": {"quantization_config": "x"}}, "has quantized weights"),
    "nonsense": ({"files": {"model.safetensors": b"nonsense"}}, "could not be loaded"),
    "no JSON": ({"files": {"config.json": b"{"}}, r"config\.json could not be read"),
    "deep JSON": ({"files": {"config.json": b"[" * 100_000}}, r"config\.json could not be read"),
    "no object": ({"files": {"config.json": []}}, "holds no JSON object"),
    "a type that is none": (
        {"changes": {"model_type": ["llama"]}},
        "could not be loaded: TypeError.*: give a causal language model",
    ),
    "a size that is none": ({"changes": {"hidden_size": "x"}}, "'hidden_size' expected int"),
    "a dtype that is none": ({"changes": {"dtype": "x"}}, "could not be loaded: AttributeError"),
    "a tokenizer that is none": (
        {"files": {"tokenizer.json": {}}},
        "^the tokenizer of .* could not be loaded: KeyError.*: put its files there",
    ),
    "generation settings": ({"files": {"generation_config.json": [1]}}, "could not be loaded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_are_refused(case: str, make: Make, tmp_path: Path) -> None:
    how, message = REFUSED[case]
    if case == "not the model's weights":
        save_file({"a": torch.zeros(1)}, tmp_path / "a", metadata={"format": "pt"})
        how = {"files": {"model.safetensors": (tmp_path / "a").read_bytes()}}
    folder = make(**how)
    with pytest.raises(ConfigError, match=message) as told:
        CachedModel.from_pretrained(folder)
    assert len(str(told.value).splitlines()) == 1 and len(str(told.value)) < 600
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_no_file_are_not_waited_for(make: Make) -> None:
    folder = make(without="*.safetensors")
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors could not be loaded: it is not a"):
        CachedModel.from_pretrained(folder)


LOADED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "code that transformers has": {
        "changes": {"auto_map": {"AutoModelForCausalLM": "own.Own"}},
        "files": {"own.py": "code"},
    },
    "code to generate": {"files": {"custom_generate/generate.py": "code"}},
    "a kernel for attention": {"changes": {"attn_implementation": KERNEL}},
    "a kernel for attention, hidden": {"changes": {"_attn_implementation": KERNEL}},
    "kernels for experts": {
        "changes": {"experts_implementation": "a/b", "_experts_implementation": "a/b"}
    },
    "another model's name": {"changes": {"_name_or_path": "a/b", "architectures": ["Own"]}},
}


@pytest.mark.parametrize("case", LOADED)
def test_folders_that_are_loaded_run_nothing(case: str, make: Make, tmp_path: Path) -> None:
    model = CachedModel.from_pretrained(make(**LOADED[case]))
    assert model.model.config._attn_implementation == "sdpa" and not model.model.training
    assert model.prefill(model.new_cache(1, 8), torch.tensor([[1, 2]])).shape == (1, 8192)
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_left_over_are_told(make: Make) -> None:
    with pytest.warns(UserWarning, match=r"has 9 tensors that its model does not use, .*layers\.1"):
        model = CachedModel.from_pretrained(make({"num_hidden_layers": 1}))
    assert model.new_cache(1, 8).num_layers == 1


def test_shards_are_read(make: Make) -> None:
    folder = make()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    half = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in half.items():
        save_file({n: tensors[n] for n in part}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: s for s, part in half.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = CachedModel.from_pretrained(folder)
    weight = model.model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(weight, tensors["model.layers.1.mlp.up_proj.weight"].float())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache folder of a hub that cannot be reached."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def _cached(hub: Path, name: str, folder: Path) -> Path:
    """Put the files of a folder into a hub's cache folder, as snapshot_download does."""
    place = hub / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(folder, place / "snapshots" / ("0" * 40)))


def test_a_model_of_the_hub_is_loaded_from_its_cache(hub: Path) -> None:
    _cached(hub, "owner/name", BUNDLED)
    model, same = (CachedModel.from_pretrained(name) for name in ("owner/name", BUNDLED))
    assert model.config_dict["_weights"] == same.config_dict["_weights"]
    assert model.encode("The city") == same.encode("The city")
    assert load_config("owner/name").model_type == "llama"


def test_a_model_of_the_hub_without_safetensors_is_refused(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _cached(hub, "name", BUNDLED)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ConfigError, match=r"weights are not in the hub's cache folder, .*give FOLDER"
    ):
        CachedModel.from_pretrained("name")
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name: None)  # it was reached
    with pytest.raises(ConfigError, match=r"name has no safetensors .* take another"):
        CachedModel.from_pretrained("name")


@pytest.mark.parametrize(
    "kind, said",
    [
        (GatedRepoError, "is gated .*hf auth login"),
        (RepositoryNotFoundError, "no model on the Hugging Face hub: .* OWNER/NAME"),
    ],
)
def test_models_that_the_hub_does_not_give_are_told(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str
) -> None:
    asked: list[Any] = []

    def refuse(*args: Any, **options: Any) -> None:
        asked.extend((*args, options["allow_patterns"]))
        raise kind.__new__(kind)  # they differ in what they are made of, by version

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=rf"owner/name {said}|owner/name is no folder.* {said}"):
        CachedModel.from_pretrained("owner/name")
    name, patterns = asked
    assert name == "owner/name"
    files = "model.py pytorch_model.bin model.gguf model-00001-of-00002.safetensors config.json"
    wanted = [file for file in files.split() if any(fnmatch(file, p) for p in patterns)]
    assert wanted == ["model-00001-of-00002.safetensors", "config.json"]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "name, said",
    [
        ("meta-llama/Llama-3.2-1B", "no folder or GGUF file here, .*hf download .*give FOLDER"),
        ("/no/such/folder", "does not exist: give the folder of a model, a GGUF file, or"),
        (__file__, "is no GGUF file: give the folder"),
    ],
)
def test_names_of_models_are_told_what_to_do(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CachedModel.from_pretrained(name)
    result = CliRunner().invoke(main, ["evaluate", name, "--cache", "int8"])
    assert result.exit_code == 2
    assert re.search(said, " ".join(result.output.split()))


def test_the_command_says_one_line(make: Make, tmp_path: Path) -> None:
    text, output = str(BUNDLED.parent / "unseen.txt"), str(tmp_path / "x.safetensors")
    folder = make({"num_hidden_layers": 3})
    for command in (
        ["quantize", str(folder), "--prompt", text],
        ["calibrate", str(folder), "--text", text],
    ):
        result = CliRunner().invoke(main, [*command, "-o", output])
        assert result.exit_code == 2 and not Path(output).exists()
        assert result.stderr.count("\n") == 1 and "has no weights for 9 tensors" in result.stderr
