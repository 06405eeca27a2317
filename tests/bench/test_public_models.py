"""tests/benchmarks/public_models.py in small: rows, caches of peers, programs, losses (20 s); and
what pages show of them."""

from __future__ import annotations

import gzip
import json
import math
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import programs
import public_models
from click.testing import CliRunner
from peer_caches import EXACT, Leave, PeerLayer, PeerReference, Shipped, ggml, new_cache, shipped
from peer_schemes import kivi, kivi_keys, kivi_values
from public_tables import (
    AGAIN,
    CODERS,
    HEADS_OF_128,
    NONE,
    OWN,
    PUBLIC,
    WINDOW,
    at_most,
    chains,
    humaneval,
    losses,
    overview,
    overview_about,
)
from tiny_models import tiny_model
from transformers import AutoTokenizer

from kvquant.calibration.fidelity import Scheme
from kvquant.calibration.single_pass import reference_of
from kvquant.cli.demo import MODEL
from kvquant.errors import ConfigError
from kvquant.evaluation import Sizes, Task
from kvquant.hf.model import CachedModel
from kvquant.hf.models.configs import cache_layers
from kvquant.ops.quantize import dequantize_rows, quantize_rows
from kvquant.rows.format import RowFormat

PROBLEM = {
    "prompt": "from typing import List\n\n\ndef double(x: int) -> int:\n    '''Twice.'''\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(3) == 6\n",
}
SLIDING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 40,
}
RIGHT = "def double(x):\n    return 2 * x"


def rounding(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
    """To whole numbers, of K, and to halves of V: what has left shows."""
    return keys.round(), (values * 2).round() / 2


@pytest.fixture(scope="module")
def model() -> CachedModel:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 256, (2, 200))


def fed(layer: PeerLayer, keys: torch.Tensor, values: torch.Tensor, prompt: int) -> Any:
    """The layer when it has got a prompt and then token by token."""
    layer.update(keys[:, :, :prompt], values[:, :, :prompt])
    for at in range(prompt, keys.shape[2]):
        found = layer.update(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    return found


SAME = [(one, one, sinks) for one, sinks in ((Leave(), 0), (Leave(40), 6), (Leave(0, 32), 0))]


@pytest.mark.parametrize(("keys", "values", "sinks"), [*SAME, (Leave(1, 32), Leave(33), 0)])
def test_generated_tokens_are_rounded_as_the_whole_text(
    keys: Leave, values: Leave, sinks: int
) -> None:
    torch.manual_seed(0)
    k, v = (3 * torch.randn(2, 2, 2, 150, 64)).bfloat16().float()
    peer = Shipped("one", 4.0, rounding, keys, values, sinks)
    found = fed(PeerLayer(peer, 0, torch.bfloat16), k, v, 70)
    assert all(torch.equal(a, b) for a, b in zip(found, peer.apply(0, k, v), strict=True))
    for given, whole, exact, leave in zip(
        found, rounding(0, k, v), (k, v), (keys, values), strict=True
    ):
        end = leave.end(sinks, 150)
        assert sinks < end
        assert torch.equal(given[:, :, sinks:end], whole[:, :, sinks:end])
        assert torch.equal(given[:, :, end:], exact[:, :, end:])
        assert torch.equal(given[:, :, :sinks], exact[:, :, :sinks])


def test_padded_sequences_are_rounded_as_alone() -> None:
    """Groups, sinks and what stays are counted from each sequence's own first token."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, 220, 64).bfloat16().float()

    def by_channel(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return kivi_keys(keys, 2, 32), kivi_values(values, 2, 32)

    def by_token(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return kivi_values(keys, 2, 32), kivi_values(values, 2, 32)

    starts = [0, 37, 130]
    for read, leaving_keys, leaving_values in (
        (by_channel, Leave(1, 64), Leave(65)),
        (by_token, Leave(20), Leave(20)),
    ):
        peer = Shipped("one", 2.0, read, leaving_keys, leaving_values, sinks=5)
        found = fed(PeerLayer(peer, 0, torch.bfloat16, starts), k, v, 140)
        for row, start in enumerate(starts):
            own = slice(row, row + 1)
            alone = peer.apply(0, k[own, :, start:], v[own, :, start:])
            for both, one in zip(found, alone, strict=True):
                assert torch.equal(both[own, :, start:], one)


def test_exact_layers_stay_and_bits_count_what_stays() -> None:
    x = 3 * torch.randn(1, 2, 8, 64).bfloat16().float()
    peer = Shipped("one", 4.0, rounding, layers=6, exact=frozenset((0, 1, 4, 5)))
    stays = [bool(torch.equal(peer.apply(layer, x, x)[0], x)) for layer in range(6)]
    assert stays == [True, True, False, False, True, True]
    assert peer.bits == (4 * 16 + 2 * 4) / 6
    assert Shipped("one", 4.0, rounding, Leave(0, 64), Leave(50), 0).stored_bits(100) == 16 - 12 * (
        64 + 50
    ) / (2 * 100)


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text"])
def test_a_cache_that_rounds_nothing_gives_the_16_bit_logits(
    kind: str, tokens: torch.Tensor
) -> None:
    """Of sliding windows, too: the cache keeps all tokens, and the mask hides them."""
    model = tiny_model(kind, **(SLIDING if kind == "Gemma3Text" else {}))
    ours = new_cache(EXACT, model.config.num_hidden_layers, torch.float32)
    found = [model.plain(part, ours) for part in (tokens[:, :90], tokens[:, 90:91])]
    plain = model.plain(tokens[:, :91])
    assert torch.allclose(found[1], plain, atol=1e-4)  # the order of sums is another
    reference = PeerReference(model, tokens[:, :120], 100)
    assert reference.measure(EXACT)["kl"] == 0


@pytest.mark.parametrize("window", [(0, 0), (4, 20)])
def test_peers_and_our_caches_are_measured_alike(
    model: CachedModel, tokens: torch.Tensor, window: tuple[int, int]
) -> None:
    """int4 as a peer's cache, decoded, and as kvquant's own, in one pass."""
    fmt = RowFormat.parse("int4", 64)

    def read(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return tuple(dequantize_rows(quantize_rows(x, fmt), fmt) for x in (keys, values))

    leave = Leave(window[1])
    peer = Shipped("int4", 4.5, read, leave, leave, window[0])
    layers = cache_layers(model.config)
    one_pass = reference_of(model, tokens[:, :140], 110, layers)
    own = one_pass.measure(Scheme("int4", "int4", *window))
    found = PeerReference(model, tokens[:, :140], 110).measure(peer)
    assert own.kl > 1e-3
    # GPUs and CPUs add up in other orders: near a boundary of codes or of the likeliest token
    assert found["kl"] == pytest.approx(own.kl, rel=0.05)
    assert found["top1"] == pytest.approx(own.top1, abs=3 / 58)


def test_blocks_of_ggml_have_its_codes() -> None:
    """The scale is exact here: 2 of q4_0, whose largest element is -16, and 1 of q8_0."""
    x = torch.zeros(32)
    x[:6] = torch.tensor([-16, 3, -3, 16, 0.9, -1])
    assert ggml(x, 4)[:6].tolist() == [-16, 4, -2, 14, 0, 0]
    x[:6] = torch.tensor([127, 0.5, -0.5, 2.5, -2.5, 0.4])
    assert ggml(x, 8)[:6].tolist() == [127, 1, -1, 3, -3, 0]


def test_sliding_layers_stay_where_a_project_leaves_them(tokens: torch.Tensor) -> None:
    sliding = tiny_model("Gemma3Text", **SLIDING)
    every = {one.name: one for one in shipped(sliding, tokens)}
    assert every["KVarN K4V2, 128 sinks"].exact == {0, 2, 4}
    assert every["TurboQuant of vLLM, 3 bits"].exact == {0, 1, 2, 4, 5}
    assert not every["llama.cpp q4_0"].exact
    reference = PeerReference(sliding, tokens[:, :180], 170)
    kl = {name: reference.measure(one)["kl"] or 0.0 for name, one in every.items()}
    assert 0 < kl["llama.cpp q8_0"] < kl["llama.cpp q4_0"]


def row(cache: str, sample: int, passed: str, **more: Any) -> dict[str, Any]:
    key = {"measure": "humaneval", "place": "alone", "cache": cache, "sample": sample}
    return {"key": key | more, "passed": passed}


def test_losses_are_paired_and_clustered_by_problem() -> None:
    rows = [row("16 bit", at, passed) for at, passed in enumerate(("1101", "1100", "0000"))]
    rows += [row("int4", at, passed, window=[4, 128]) for at, passed in enumerate(("0101", "1110"))]
    ((key, one),) = losses(rows)  # of the samples that both have
    assert key["cache"] == "int4" and (one.lost, one.won, one.answers) == (1, 1, 8)
    # 1 - 1/2 of problem 0, -1/2 of problem 2: the mean and the deviation of 1/2, 0, -1/2, 0
    error = math.sqrt((0.25 + 0.25) / 3 / 4)
    assert one.drop == 0 and one.error == pytest.approx(max(error, math.sqrt(3 / 10 / 8)))
    assert at_most(one) == pytest.approx(100 * 1.645 * one.error)
    lost = [row("16 bit", 0, "1" * 50), row("int4", 0, "0" * 10 + "1" * 40)]
    ((_, one),) = losses(lost)
    error = math.sqrt(0.2 * 0.8 / 49)  # of 50 independent losses, 10 of them 1
    assert at_most(one) == pytest.approx(100 * (0.2 + 1.645 * max(error, math.sqrt(11 / 52 / 50))))


def isolated() -> bool:
    try:
        return bool(programs.interpreter(True))
    except ConfigError:
        return False


@pytest.fixture(params=[True, False], ids=["alone", "network is off"])
def alone(request: pytest.FixtureRequest) -> bool:
    if request.param and not isolated():
        pytest.skip("this kernel makes no namespaces")
    return bool(request.param)


RIGHT_ONES = [
    RIGHT,
    f"{RIGHT}\nprint('no newline', end='')",
    f"```python\n{RIGHT}\n```\nThis doubles x.\n```python\nprint(1)\n```",
    "    return 2 * x",  # the body alone, behind the prompt
]
WRONG_ONES = [
    "def double(x):\n    return x",
    "def double(x):\n    raise SystemExit(0)",
    "import os\ndef double(x):\n    os._exit(0)",
    "print('0123456789abcdef')\nexit(0)",
    f"{RIGHT}\nimport atexit\natexit.register(print, 'behind')",
    "def double(x):\n    return",
    "def double(x):\n    return bytearray(1 << 32) and 2 * x",
    "def double(x):\n    open('file', 'w').write('a' * (1 << 21))\n    return 2 * x",
    "import os\ndef double(x):\n    for _ in range(40):\n        if not os.fork():\n"
    "            import time\n            time.sleep(20)\n    return 2 * x",
]


@pytest.mark.parametrize("code", RIGHT_ONES + WRONG_ONES)
def test_right_programs_pass_and_other_ones_do_not(code: str, alone: bool) -> None:
    assert programs.passes(code, PROBLEM, alone=alone) == (code in RIGHT_ONES)


def test_no_program_reaches_a_network() -> None:
    if not isolated():
        pytest.skip("this kernel makes no namespaces")
    code = (
        "import socket\ndef double(x):\n    one = socket.create_server(('127.0.0.1', 0))\n"
        "    socket.create_connection(one.getsockname(), 2)\n    return 2 * x"
    )
    assert programs.passes(code, PROBLEM, alone=False)
    assert not programs.passes(code, PROBLEM, alone=True)  # not even itself


def test_a_program_without_an_end_is_killed_with_its_children(alone: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # programs run as another user
        mark = Path(folder, "alive")
        code = (
            "import os\ndef double(x):\n    os.fork()\n    while True:\n"
            f"        open({str(mark)!r}, 'w').close()"
        )
        began = time.monotonic()
        assert not programs.passes(code, PROBLEM, alone=alone, seconds=1.5)
        assert mark.exists() and time.monotonic() - began < 8
        mark.unlink()
        time.sleep(0.3)
        assert not mark.exists()


def measured_twice(given: str, path: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file, and what the second run prints."""
    for _ in range(2):
        done = CliRunner().invoke(public_models.main, given.split(), catch_exceptions=False)
        assert done.exit_code == 0, done.output
    return json.loads(path.read_text())["rows"], done.output


@pytest.mark.slow
def test_the_script_measures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_models, "PLANS", ())
    monkeypatch.setattr(public_models, "FORMATS", ("int8",))
    path = tmp_path / "found.json"
    given = (
        f"smollm2-135m --folder {MODEL} --json {path} --length 160 --passages 2 --scored 8 "
        "--device cpu --only int8 --only SAW* --measure kl --measure retrieval"
    )
    monkeypatch.setattr(public_models, "Task", lambda kinds: Task(kinds, ("keys",)))
    few = partial(Sizes, prompts=1, questions=1)
    monkeypatch.setattr(public_models, "Sizes", few)
    rows, _ = measured_twice(given, path)
    names = [(one["key"]["measure"], one["key"]["cache"]) for one in rows]
    assert names == [
        ("kl", "16 bit"),
        *[("kl", "int8")] * 2,
        *[("retrieval", "int8")] * 2,
        *[("kl", "peers' 16 bit"), ("kl", "SAW-INT4"), ("retrieval", "SAW-INT4")],
    ]
    kl = {(one["key"]["cache"], tuple(one["key"].get("window", ()))): one for one in rows[:3]}
    assert kl["16 bit", (0, 0)]["kl"] == 0
    assert 0 < kl["int8", (4, 128)]["kl"] < kl["int8", (0, 0)]["kl"] < 0.01
    assert kl["int8", (0, 0)]["packed_bits"] == 8.25


@pytest.mark.slow
def test_humaneval_asks_every_cache_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is no coder: what it writes is not run here, the ends of its answers count."""
    data = tmp_path / "problems.jsonl.gz"
    with gzip.open(data, "wt", encoding="utf-8") as file:
        for name in ("double", "a_longer_name_of_the_same"):
            file.write(json.dumps({**PROBLEM, "prompt": f"def {name}():\n"}) + "\n")
    texts = []

    def judged(text: str, problem: Any, *, alone: bool) -> bool:
        assert not alone
        texts.append(problem["prompt"] + text)
        return True

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    ours = Shipped("KIVI", 4.0, kivi(4, 32, 128).read, Leave(1, 32), Leave(33))
    same = Shipped("same", 16, EXACT.read, Leave(1, 32), Leave(33))
    for name, value in (("PLANS", ()), ("BUDGETS", {}), ("FORMATS", ("int8",))):
        monkeypatch.setattr(public_models, name, value)
    monkeypatch.setattr(programs, "passes", judged)
    monkeypatch.setattr(public_models, "OTHER", 150)
    monkeypatch.setattr(public_models.Subject, "tokenizer", tokenizer)
    monkeypatch.setattr(public_models.Subject, "peers", [ours, same])
    path = tmp_path / "found.json"
    given = f"smollm2-135m --folder {MODEL} --json {path} --device cpu --measure humaneval "
    given += f"--run-programs {data} --network-is-off --new-tokens 40 --place behind "
    given += "--sample 0 --sample 1"
    rows, output = measured_twice(given, path)
    names = [one["key"]["cache"] for one in rows]
    own = ["16 bit", AGAIN, "int8", "int8"]
    assert names == [*own, *own, *["KIVI", "same"] * 2]  # 16 bit serves peers, too
    assert len(texts) == 2 * len(rows) and {one["passed"] for one in rows} == {"11"}
    # threads judge the two answers of a row
    pairs = {f"{one} {at}": sorted(texts[2 * at : 2 * at + 2]) for at, one in enumerate(names)}
    greedy, sampled = pairs["16 bit 0"], pairs["16 bit 4"]
    assert greedy != sampled
    # the same numbers for every cache: what rounds nothing writes the same
    assert pairs["same 9"] == greedy and pairs["same 11"] == sampled
    assert "loss at most" in output


CONTEXTS = 1024, 4096, 16384
PEER = "KIVI-4, residual of 128"
CACHES = [*[*OWN][:7], PEER, *[*OWN][7:]]
ASKED = {"measure": "humaneval", "problems": 600}


def scored(model: str, cache: str, context: int, window: list[int] | None = None) -> dict[str, Any]:
    """A row of KL. The digits of its KL are those of model, cache, window and context; its bits
    are those of model and window."""
    of_model, of_window = [*PUBLIC].index(model), (None, WINDOW, NONE).index(window)
    digits = of_model, CACHES.index(cache), of_window, CONTEXTS.index(context)
    key: dict[str, Any] = {"measure": "kl", "passages": 16, "scored": 64, "device": "cuda"}
    key |= {"cache": cache, "context": context} | ({} if window is None else {"window": window})
    kl = float(f"0.{''.join(map(str, digits))}")
    return {"key": key, "kl": kl, "top1": 0.9, "packed_bits": 10.0 * of_model + of_window}


def answered(cache: str, place: str, at: int, passed: str, *window: list[int]) -> dict[str, Any]:
    """A row of HumanEval, of 600 problems: right ("1") or not, in turn."""
    key = ASKED | {"cache": cache, "place": place, "sample": at}
    return {
        "key": key | ({"window": window[0]} if window else {}),
        "passed": passed * (600 // len(passed)),
    }


def test_a_chain_counts_up_to_its_first_wrong_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(subject: Any, prompts: Any, cache: Any, sample: int, amount: Any) -> list[str]:
        answers = []
        for prompt in prompts:
            asked, first, second, rest = prompt.rpartition("\n\n")[2].rsplit("\n", 3)
            assert rest == "" and len(asked.splitlines()) == 6 and second.startswith("x2 = ")
            *_, total = first.split()
            assert f"Write each as `{first}`" in prompt
            added = [int(line.split()[-1]) for line in asked.splitlines()]
            assert first == f"x1 = {added[0]} + {added[1]} = {total}"
            lines, total = [], added[0] + added[1] + added[2]
            for place in range(3, 6):
                lines.append(f"x{place} = {total} + {added[place]} = {total + added[place]}")
                total += added[place]
            answers.append(lines)
        if cache is not None:
            answers[1][1] = answers[1][1] + "0"
            answers[2] = ["none"]
        return ["\n".join(lines) for lines in answers]

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{{ messages[0]['content'] + '\\n' }}"
    monkeypatch.setattr(public_models.Subject, "tokenizer", tokenizer)
    monkeypatch.setattr(public_models, "written", written)
    path = tmp_path / "found.json"
    given = f"smollm2-135m --folder {MODEL} --json {path} --device cpu --measure chains --steps 5 "
    rows, output = measured_twice(given + "--problems 3 --only int8 --only 16* --no-peers", path)
    found = {(one["key"]["cache"], one["key"].get("window") == [4, 128]): one for one in rows}
    exact, packed = found["16 bit", False], found["int8", True]
    assert exact["right_steps"] == [3, 3, 3] and packed["right_steps"] == [3, 1, 0]
    assert exact["passed"] == "111" and packed["passed"] == "100"
    assert "chains of 5" in output and "1.3 right steps" in output
    assert "lost 2, won 0" in output


def public() -> dict[str, list[dict[str, Any]]]:
    rows = {
        model: [
            *(scored(model, one, at, w) for one in OWN for at in CONTEXTS for w in (WINDOW, NONE)),
            *(scored(model, PEER, at) for at in CONTEXTS[:2]),
        ]
        for model in PUBLIC
    }
    for model, found in rows.items():  # a check on another device
        found.append(scored(model, "default", 4096, WINDOW) | {"kl": 0.9})
        found[-1]["key"]["device"] = "cpu"
    for model, alone in zip(CODERS, ("1010", "1000"), strict=True):
        rows[model] += [
            answered("16 bit", "alone", 0, "1101"),
            answered(AGAIN, "alone", 0, "1111"),
            answered("default", "alone", 0, alone, WINDOW),
            answered("default", "alone", 0, "0000", NONE),
            # behind code 16 bit has one sample of transformers' cache, and two of kvquant's
            answered("16 bit", "behind", 0, "1010"),
            *(answered(AGAIN, "behind", at, one) for at, one in enumerate(("0000", "1111"))),
            *(answered("default", "behind", at, "0101", WINDOW) for at in range(3)),
            *(answered("plan int4", "behind", at, "1110", WINDOW) for at in range(2)),
            answered("plan, bits of int3", "behind", 1, "1111", WINDOW),
        ]
    return rows


def test_the_overview_has_both_windows_one_context_and_answers_alone() -> None:
    head, default, *others = overview(public())
    assert head[2:-2] == [*PUBLIC] and head[-1] == "HumanEval, 1.5B: lost / won"
    kl = ["0.0011, 0.0021", *(f"**0.{at}011**, **0.{at}021**" for at in (1, 2, 3))]
    assert default == ["the default", "31.00, 32.00", *kl, "300 / 150", "300 / 0"]
    kl = [f"**0.{at}701**" for at in range(4)]
    assert others[-1] == ["KIVI-4", "30.00", *kl, "-", "-"]
    about = overview_about(public())
    assert about.startswith("KL: 1,024 tokens") and "behind 4,096 others" in about
    assert about.endswith("of 600 problems 16 bit solved 450 and 450")


def test_humaneval_is_compared_in_its_place_and_with_its_16_bit_answers() -> None:
    head, *lines = humaneval(public())
    assert head[1:4] == [f"{CODERS[0]}: {one}" for one in ("KL", "alone", "behind code")]
    cells = {cache: [one.partition(":")[0] for one in found] for cache, *found in lines}
    assert cells["16 bit again"][1:3] == ["0 / 150 of 600", "300 / 0 of 600"]
    # of sample 0 with transformers' cache, of sample 1 with kvquant's, of sample 2 with none
    assert cells["the default"][:3] == ["**0.2010**", "300 / 150 of 600", "600 / 300 of 1,200"]
    assert cells["the default, no window"][:3] == ["**0.2020**", "450 / 0 of 600", "-"]
    # problems lose 1 and -1/2 in turn: 25 points and 1.645 standard errors of 3.06. With a plan
    # they lose 0, -1/2, 0 and 1/2: no points, and 1.645 standard errors of 1.44
    bounds = {cache: found[2].partition(": ")[2] for cache, *found in lines}
    assert bounds["the default"] == "30.0" and bounds["plan, `int4`"] == "2.4"
    assert bounds["plan by layer, bits of `int3`"] == "0.3"  # an error is not 0


def test_chains_are_compared_with_those_of_16_bit() -> None:
    key = {"measure": "chains", "place": "chains of 80"}
    steps = {AGAIN: [30, 20], "default": [29, 20], "plan int4": [31, 21]}
    steps |= {
        "plan, bits of int3": [30, 16],
        "plan, bits of int3 and int2": [0, 0],
        "plan int2": [0, 0],
    }
    rows = [{"key": key | {"cache": one}, "right_steps": found} for one, found in steps.items()]
    told = chains({HEADS_OF_128: rows})
    assert "2 chains of 80 sums" in told and "wrote 25.0 right lines" in told
    assert "default added -0.5 ± 0.5 lines" in told and "`int4` 1.0 ± 0.0" in told
    assert "-2.0 ± 2.0" in told and "-25.0 ± 5.0" in told
