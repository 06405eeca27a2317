"""Folders, GGUF files, names of models: nothing in them runs, failures are one line (4 s)."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvquant import CheckpointError, UnsupportedError
from kvquant.cli.main import main
from kvquant.errors import ConfigError
from kvquant.io.inspect import describe

transformers = pytest.importorskip("transformers")
import huggingface_hub  # noqa: E402
from hf_cases import SHAPE  # noqa: E402
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from kvquant.hf.model import CachedModel  # noqa: E402
from kvquant.hf.models.fingerprint import fingerprint_of  # noqa: E402
from kvquant.hf.models.loading import load_config, tokenizer_of  # noqa: E402

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

    for name in ("socket.getaddrinfo", "socket.socket.connect", "builtins.input"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("the network was asked"))

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


NOT_GIVEN: dict[type[Exception], str] = {
    GatedRepoError: "is gated .*hf auth login",
    RepositoryNotFoundError: "no model on the Hugging Face hub: .* OWNER/NAME",
}


@pytest.mark.parametrize("kind, said", NOT_GIVEN.items())
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
def test_names_of_models_are_told_what_to_do() -> None:
    for name, said in (
        ("meta-llama/Llama-3.2-1B", "no folder or GGUF file here, .*hf download .*give FOLDER"),
        ("/no/such/folder", "does not exist: give the folder of a model, a GGUF file, or"),
        (__file__, "is no GGUF file: give the folder"),
    ):
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


TEXT = "The city of Manila is the capital"
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a Llama's K or Q as llama.cpp has them, with the channels of RoPE side by side."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, path: Path, *, quantized: bool, merges: bool = True) -> Path:
    """Write the Llama of a folder as a GGUF file, in float32, or with matrices in Q8_0.

    Without merges, its tokenizer splits words into bytes.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(config["num_hidden_layers"])
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_key_length(config["head_dim"])
    file.add_value_length(config["head_dim"])
    file.add_rope_dimension_count(config["head_dim"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_freq_base(config["rope_theta"])
    file.add_vocab_size(config["vocab_size"])
    file.add_tokenizer_model("gpt2")
    file.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__))
    file.add_token_types([3] + [1] * (config["vocab_size"] - 1))  # the first one is a control
    file.add_token_merges([" ".join(pair) for pair in tokenizer["merges"][: None if merges else 1]])
    file.add_bos_token_id(config["bos_token_id"])
    file.add_eos_token_id(config["eos_token_id"])
    names = {"token_embd": "embed_tokens", "output_norm": "norm"}
    for layer in range(config["num_hidden_layers"]):
        names |= {f"blk.{layer}.{a}": f"layers.{layer}.{b}" for a, b in OF_LAYER.items()}
    weights = load_file(folder / "model.safetensors")
    for name, ours in names.items():
        weight = weights[f"model.{ours}.weight"].float()
        if name.endswith(("attn_q", "attn_k")):
            weight = _paired(weight, heads if name.endswith("q") else kv_heads)
        kind, data = None, weight.numpy()
        if quantized and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
        file.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@pytest.mark.extra("gguf")
@pytest.mark.filterwarnings("default")  # of what gguf and transformers use
def test_a_gguf_file_is_the_model_it_was_made_of(tmp_path: Path) -> None:
    """Files beside it are none of its model."""
    path = write_gguf(BUNDLED, tmp_path / "model.gguf", quantized=False)
    for name in ("tokenizer.json", "config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    model, same = CachedModel.from_pretrained(path), CachedModel.from_pretrained(BUNDLED)
    assert model.config_dict["_weights"] == same.config_dict["_weights"] == fingerprint_of(path)
    assert "quantization_config" not in model.config_dict
    assert load_config(path).num_hidden_layers == 4
    assert model.model.name_or_path == load_config(path).name_or_path == str(path)
    again, ids = tokenizer_of(model.model), same.encode(TEXT)
    assert model.encode(TEXT) == again.encode(TEXT) == ids
    assert again.model_max_length == sys.maxsize
    found, expected = (
        one.prefill(one.new_cache(1, 64, k_format="int8", v_format="int8"), torch.tensor([ids]))
        for one in (model, same)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.extra("gguf")
@pytest.mark.filterwarnings("default")
def test_a_tokenizer_that_splits_the_words_of_its_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_gguf(BUNDLED, tmp_path / "model.gguf", quantized=False, merges=False)
    with pytest.raises(ConfigError, match=r"splits \d+ of \d+ words .* transformers>=5.18"):
        CachedModel.from_pretrained(path)


@pytest.mark.extra("gguf")
@pytest.mark.filterwarnings("default")
def test_a_quantized_gguf_file_and_the_folder_made_of_it_agree(tmp_path: Path) -> None:
    path = write_gguf(BUNDLED, tmp_path / "model.gguf", quantized=True)
    model = CachedModel.from_pretrained(path, dtype=torch.bfloat16)
    model.model.save_pretrained(tmp_path / "folder")
    model.tokenizer.save_pretrained(tmp_path / "folder")
    same = CachedModel.from_pretrained(tmp_path / "folder")
    known = fingerprint_of(path)
    assert known == fingerprint_of(tmp_path / "folder") != fingerprint_of(BUNDLED)
    assert same.config_dict["_weights"] == model.config_dict["_weights"] == known
    (tmp_path / "text.txt").write_text(50 * TEXT)
    for source in (path, tmp_path / "folder"):
        output = tmp_path / f"{source.stem}.safetensors"
        command = ["quantize", source, "--prompt", tmp_path / "text.txt", "-o", output]
        result = CliRunner().invoke(main, list(map(str, command)))
        assert result.exit_code == 0, result.output
        assert f"weights {known[:12]}" in result.output


def test_what_is_no_model_is_told_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "no-ending"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(24))
    with pytest.raises(CheckpointError, match=r"this is a GGUF file: .* `kvquant check MODEL`"):
        describe(path)
    output = str(tmp_path / "out.safetensors")
    for command in (["inspect", str(path)], ["quantize", "--from", str(path), "-o", output]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2
        assert "this is a GGUF file" in " ".join(result.output.split())


def test_a_damaged_gguf_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, module, sys)  # as if it were installed
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(24))
    for read in (CachedModel.from_pretrained, load_config):
        with pytest.raises(ConfigError, match=r"model.gguf could not be loaded: "):
            read(path)


def test_the_extra_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(24))
    with pytest.raises(UnsupportedError, match=r"install the extra 'gguf': .*\[gguf\]"):
        CachedModel.from_pretrained(path)
