"""GGUF files of models: loaded, named by their fingerprint, told apart from caches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvquant import CheckpointError, UnsupportedError
from kvquant.cli.main import main
from kvquant.errors import ConfigError
from kvquant.io.inspect import describe

pytest.importorskip("transformers")
from safetensors.torch import load_file

from kvquant.hf.model import CachedModel
from kvquant.hf.models.fingerprint import fingerprint_of
from kvquant.hf.models.loading import load_config, tokenizer_of

BUNDLED = Path(__file__).parents[2] / "examples" / "llama-demo-5m"
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
