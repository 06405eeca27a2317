"""The benchmark of what latent rows keep, with a random model in place of a trained one (30 s)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fidelity_latents
from hf_cases import LATENT_SIZES, hands_latents, random_model

from kvquant.hf.model import CachedModel

pytestmark = pytest.mark.skipif(not hands_latents, reason="needs transformers 5.17")


def random_latents(**changes: Any) -> CachedModel:
    sizes = {"head_dim": 64, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
    return random_model(
        "deepseek_v3", {**LATENT_SIZES, "first_k_dense_replace": 2, **sizes, **changes}
    )


@pytest.mark.slow
@pytest.mark.parametrize("latents", [512, 256])
def test_a_line_is_printed_for_each_format(
    latents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a model is not trained anew."""
    model = random_latents(kv_lora_rank=latents)
    (tmp_path / "config.json").touch()
    (tmp_path / "text.txt").write_text("any", encoding="utf-8")
    torch.manual_seed(0)
    monkeypatch.setattr(CachedModel, "from_pretrained", lambda *args, **options: model)
    vocabulary = model.config_dict["vocab_size"]
    monkeypatch.setattr(
        model, "encode", lambda text: torch.randint(vocabulary, (900,)).tolist(), raising=False
    )
    sizes = ["--length", 128, "--windows", 4, "--context", 40, "--scored", 8]
    given = [tmp_path, "--text", tmp_path / "text.txt", *sizes]
    done = CliRunner().invoke(fidelity_latents.main, [str(x) for x in given])
    assert done.exit_code == 0, done.output
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| `")]
    names = [line[0].strip("|` ") for line in lines]
    assert names == [
        "bf16",
        *(name for name in fidelity_latents.FORMATS if latents == 512 or name != "fp8"),
    ]
    for name, line in zip(names, lines, strict=True):
        without, planned = (cell.split(" ± ") for cell in line[2:])
        assert 0 <= float(without[0]) < 0.2 and float(without[1].split()[0]) >= 0
        assert (planned[0].strip("| ") == "-") == (name == "bf16")
    exact = float(lines[0][2].split()[0])
    assert exact < float(lines[names.index("int4-g4+int8-g4")][2].split()[0])
