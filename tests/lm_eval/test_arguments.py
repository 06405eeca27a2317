"""What --model_args says, and what it may not say."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from example_plan import example_plan
from refusals import assert_refused

from kvquant.calibration.fidelity import Scheme
from kvquant.cli.demo import MODEL
from kvquant.errors import ConfigError, DeviceError
from kvquant.lm_eval.arguments import read_arguments
from kvquant.rows.defaults import DEFAULT


def test_defaults_are_those_of_caches() -> None:
    found = read_arguments({"pretrained": str(MODEL), "plan": False})
    assert found["cache"] == Scheme(DEFAULT, DEFAULT, sink_len=4, recent_len=128)
    assert found["batch_size"] == 1 and "max_length" not in found
    assert found["model"].dtype == torch.float32


def test_everything_that_is_given_counts(tmp_path: Path) -> None:
    given = {"pretrained": MODEL, "k_format": "int8", "v_format": "int4", "sink_len": 0}
    given |= {"recent_len": 16, "dtype": "bfloat16", "batch_size": "3", "max_length": 99}
    found = read_arguments(given | {"device": "cpu"})
    assert found["cache"] == Scheme("int8", "int4", sink_len=0, recent_len=16)
    assert (found["batch_size"], found["max_length"]) == (3, 99)
    assert found["model"].dtype == torch.bfloat16
    plan = tmp_path / "mine.safetensors"
    example_plan(4, 1).save(plan)
    found = read_arguments({"pretrained": MODEL, "plan": plan, "recent_len": 0})
    assert str(found["cache"]) == "mine + 4 sinks, 0 recent"


def test_what_is_not_possible_is_told() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kformat": "int8", "beams": 2}, "have no beams, kformat: there are pretrained, k_format"),
        ({"pretrained": None}, "name no model: give pretrained=MODEL"),
        ({"pretrained": "/nowhere"}, "/nowhere does not exist: give the folder of a model"),
        ({"plan": "x.safetensors"}, "the plan says the formats: leave k_format and v_format out"),
        ({"plan": "x", "k_format": None, "v_format": "int8"}, "the plan says the formats"),
        ({"k_format": ""}, "k_format is empty: give a value, or leave it out"),
        ({"v_format": "", "plan": ""}, "v_format and plan is empty"),
        ({"k_format": False}, "'False' is no format"),
        ({"v_format": 4}, "'4' is no format"),
        ({"k_format": "int4+int8"}, "this model keeps K and V of heads"),
        ({"dtype": "auto"}, "dtype is 'auto': use one of float32, bfloat16, float16"),
        ({"batch_size": "auto"}, "batch_size 'auto' is not possible"),
        ({"recent_len": 1.5}, "recent_len 1.5 is not possible"),
        ({"sink_len": -1}, "sink_len -1 is not possible"),
        ({"max_length": 0}, "max_length 0 is not possible"),
    ]
    for given, words in cases:
        whole = {"pretrained": MODEL, "k_format": "int8"} | given
        assert_refused(ConfigError, (partial(read_arguments, whole), words.replace("+", r"\+")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_the_harness_own_device_is_told_where_there_is_none() -> None:
    with pytest.raises(DeviceError, match=r"lm_eval asks for cuda:0 unless --device names another"):
        read_arguments({"pretrained": MODEL, "k_format": "int8", "device": "cuda:0"})


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(MODEL / name, tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer of .* could not be loaded"):
        read_arguments({"pretrained": tmp_path, "k_format": "int8"})
