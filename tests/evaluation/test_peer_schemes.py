"""Other projects' schemes as written out, `evaluate` reading prompts from them (20 s), and the
model of examples/ that finds facts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from peer_schemes import PeerCache, codebook, kivi, kvarn, oscar_rotations, peers, turboquant
from tiny_models import tiny_model

from kvquant import evaluate
from kvquant.errors import ConfigError
from kvquant.evaluation import Sizes, Task
from kvquant.evaluation.decoding import Caches, Choice, Reading, check_simulated
from kvquant.hf.model import CachedModel
from kvquant.ops.quantize import dequantize_rows, quantize_rows
from kvquant.rows.format import RowFormat

DIM = 128
BITS = {
    "KIVI-4, groups of 32": 5.0,
    "KIVI-4, groups of 128": 4.25,
    "KIVI-2, groups of 32": 3.0,
    "KIVI-2, groups of 128": 2.25,
    "TurboQuant, 4 bits": 4.125,
    "TurboQuant, 3 bits": 3.125,
    "KVarN K4V2": 3.375,
    "OSCAR-2": 2.25,
}


@pytest.fixture(scope="module")
def windows(text: list[int]) -> torch.Tensor:
    return torch.tensor(text[:384]).view(3, 128)


@pytest.fixture(scope="module")
def every(model: CachedModel, windows: torch.Tensor) -> dict[str, PeerCache]:
    return {one.name: one for one in peers(model, windows)}


def errors(peer: PeerCache, keys: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """Mean squared errors, as shares of the mean squares."""
    found = peer.apply(0, keys, values)
    return tuple(  # type: ignore[return-value]
        float((a - b).square().mean() / b.square().mean())
        for a, b in zip(found, (keys, values), strict=True)
    )


def test_bits_are_those_of_codes_and_parameters(every: dict[str, PeerCache]) -> None:
    assert {name: one.bits for name, one in every.items()} == BITS  # of 128 elements a head
    halved = [kivi(2, 128, 64), turboquant(3, 64), kvarn(4, 2, 64)]  # fewer share a parameter
    assert [one.bits for one in halved] == [2.375, 3.25, 3.5625]


@pytest.mark.parametrize("tokens", [0, 1, 100, 128, 300])
def test_shapes_and_dtypes_stay(every: dict[str, PeerCache], tokens: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 1, tokens, DIM).bfloat16()
    for peer in every.values():
        for given, found in zip((keys, values), peer.apply(1, keys, values), strict=True):
            assert found.shape == given.shape and found.dtype == torch.bfloat16
            assert bool(found.isfinite().all())


def test_kivi_keeps_keys_with_large_channels() -> None:
    """A large channel has scales of its own; of a row it takes the levels of all others."""
    torch.manual_seed(0)
    keys, _ = torch.randn(2, 1, 1, 256, DIM)
    plain, _ = errors(kivi(4, 32, DIM), keys, keys)
    keys[..., 5] *= 100
    per_channel = kivi(4, 32, DIM).apply(0, keys, keys)[0] - keys
    others = [at for at in range(DIM) if at != 5]
    assert float(per_channel[..., others].square().mean()) < 1.1 * plain
    per_token = kivi(4, 128, DIM).apply(0, keys, keys)[1] - keys
    assert float(per_token[..., others].square().mean()) > 10 * plain


@pytest.mark.parametrize(("bits", "error"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_turboquant_has_the_error_that_its_paper_proves(bits: int, error: float) -> None:
    """Theorem 1 of arXiv 2504.19874, of unit vectors, whatever they are; given to 1 or 2 digits.

    The paper decodes by the codebook alone; with the norm put right the error is larger by no more
    than its own square.
    """
    levels = codebook(bits, DIM)
    assert len(levels) == 2**bits and torch.allclose(levels, -levels.flip(0), atol=1e-4)
    spiky = torch.zeros(1, 1, 64, DIM)
    spiky[0, 0, torch.arange(64), torch.arange(64)] = 7.0
    found, _ = errors(turboquant(bits, DIM), spiky, spiky)
    assert 0.85 * error < found < 1.15 * error + error**2
    norms = turboquant(bits, DIM).apply(0, spiky, spiky)[0].norm(dim=-1)
    assert torch.allclose(norms, torch.full_like(norms, 7.0), rtol=1e-3)


def test_oscar_spreads_what_attention_asks_for(model: CachedModel, windows: torch.Tensor) -> None:
    """A Hadamard matrix of eigenvectors: no element of a turned row is asked for more than another,
    of K by queries, of V by how much its token's scores weigh."""
    seen: dict[int, list[torch.Tensor]] = {}

    def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> None:
        assert k.shape[1] == 1  # the demo's model has one KV head
        rows = [x[0].flatten(0, 1).double() for x in (q, k, v)]
        known = seen.get(layer, [x[:0] for x in rows])
        seen[layer] = [torch.cat(both) for both in zip(known, rows, strict=True)]

    for window in windows:
        model.observe(window[None], see)
    for layer, turns in enumerate(oscar_rotations(model, windows)):
        q, k, v = seen[layer]
        weights = (k @ q.T).square().sum(1)  # of a token by all queries
        moments = {"k": q.T @ q, "v": (v.T * weights) @ v}
        for side, (turn,) in turns.items():
            assert torch.allclose(turn @ turn.T, torch.eye(DIM), atol=1e-5)
            diagonal = (turn.double().T @ moments[side] @ turn.double()).diagonal()
            assert torch.allclose(diagonal, diagonal.mean().expand(DIM), rtol=1e-3)
            plain = moments[side].diagonal()
            assert float(plain.max() / plain.mean()) > 1.5  # as it comes it is uneven


def test_oscar_clips_what_few_elements_of_a_row_exceed(
    model: CachedModel, windows: torch.Tensor, every: dict[str, PeerCache]
) -> None:
    """Two elements of 128, far above all others of a row, are given up for them."""
    (turn, *_) = oscar_rotations(model, windows)
    torch.manual_seed(0)
    rows = torch.randn(1, 1, 50, DIM)
    rows[..., :2] += 1000
    for side, given in zip(
        "kv", every["OSCAR-2"].apply(0, *(rows @ turn[s].mT for s in "kv")), strict=True
    ):
        error = given @ turn[side] - rows
        assert float(error[..., 2:].square().mean()) < 0.4
        assert float(error[..., :2].abs().min()) > 900


def test_kvarn_keeps_tokens_beside_larger_ones() -> None:
    """K per channel alone: the largest token of a group sets the levels of all others."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 256, DIM) * torch.logspace(0, 2, 256)[:, None]
    kept, lost = (
        (peer.apply(0, x, x)[0] - x).square().sum(-1) / x.square().sum(-1)
        for peer in (kvarn(4, 2, DIM), kivi(4, 128, DIM))
    )
    assert float(kept.max()) < 0.03 and float(lost.max()) > 0.3


def test_the_prompt_is_read_as_the_scheme_gives_it(
    model: CachedModel, windows: torch.Tensor
) -> None:
    tokens = windows[:2]
    seen: list[tuple[int, torch.Size]] = []

    def read(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        seen.append((layer, keys.shape))
        return torch.full_like(keys, 3.0), torch.zeros_like(values)

    caches = Caches(model, tokens, 4, Reading())
    cache = caches.copy(PeerCache("none", 2.0, read, sink_len=4, recent_len=20))
    assert [layer for layer, _ in seen] == [*range(cache.num_layers)]
    assert seen[0][1] == (2, cache.num_kv_heads, 128 - 24, cache.head_dim)
    for layer in range(cache.num_layers):
        exact, found = caches.exact.dequantized(layer), cache.dequantized(layer)
        for side, value in enumerate((3.0, 0.0)):
            assert bool((found[side][:, :, 4:-20] == value).all())
            assert torch.equal(found[side][:, :, :4], exact[side][:, :, :4])
            assert torch.equal(found[side][:, :, -20:], exact[side][:, :, -20:])


def test_our_own_rows_written_out_answer_as_the_cache(model: CachedModel) -> None:
    """The hook is no other harness: of the same values come the same predictions."""
    fmt = RowFormat.parse("int4-g4", model.new_cache(1, 1).head_dim)

    def read(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        return tuple(dequantize_rows(quantize_rows(x, fmt), fmt) for x in (keys, values))

    ours = PeerCache("written out", 8 * fmt.row_bytes / fmt.head_dim, read, 4, 32)
    sizes = Sizes((160,), passages=2, scored=8, batch=2)
    caches: list[str | Choice] = ["int4-g4,sinks=4,recent=32", ours]
    caches.append(replace(ours, sink_len=0, recent_len=0))
    found = evaluate(model, caches, task=Task(kinds=("kl",)), sizes=sizes)
    real, written, all_packed = (one["kl"] for one in found["kl"]["160"])
    # the copy rounds to bf16, and 8 tokens leave the real cache's window meanwhile
    assert written == pytest.approx(real, rel=0.4) and all_packed > 2 * written
    exact, *costs = found["caches"]
    assert exact["packed_bits"] == 16
    assert [one["packed_bits"] for one in costs] == [ours.bits] * 3
    assert [(one["sink_len"], one["recent_len"]) for one in costs] == [(4, 32), (4, 32), (0, 0)]
    assert costs[2]["bits"] == ours.bits < costs[1]["bits"] <= costs[0]["bits"]
    assert costs[1]["cache"] == "written out + 4 sinks, 32 recent"


@pytest.mark.slow
def test_all_peers_are_evaluated(model: CachedModel, every: dict[str, PeerCache]) -> None:
    sizes = Sizes((160,), 2, 2, (0,), passages=1, scored=4, new_tokens=6, batch=2)
    task = Task(retrieval=("keys", "variables"))
    found = evaluate(model, [*every.values()], task=task, sizes=sizes)
    assert [one["cache"] for one in found["caches"]] == ["16 bit", *every]
    kl = dict(zip(every, (one["kl"] for one in found["kl"]["160"]), strict=True))
    assert 0 < kl["TurboQuant, 4 bits"] < kl["TurboQuant, 3 bits"] < kl["KIVI-2, groups of 128"]
    assert 0 < kl["KIVI-4, groups of 32"] < kl["KIVI-2, groups of 32"]
    task_of_keys, variables = (found["retrieval"]["160"][name] for name in ("keys", "variables"))
    assert 5 < task_of_keys["facts"] < 20 and "by_lines" not in task_of_keys
    for at, one in enumerate(variables["caches"]):
        # chains of one length alone have no parts
        of_chains = [pairs[at] for pairs in variables.get("by_lines", {}).values()]
        assert not of_chains or sum(part["answers"] for part in of_chains) == one["answers"]


def test_what_cannot_be_simulated_is_refused() -> None:
    sliding, llama = tiny_model("Mistral", sliding_window=64), tiny_model("Llama")
    from_rows = Reading(64, from_rows=True)
    with pytest.raises(ConfigError, match="sliding windows"):
        check_simulated(sliding, Reading())
    with pytest.raises(ConfigError, match="prompts from rows"):
        check_simulated(llama, from_rows)


MODEL = Path(__file__).parents[2] / "examples" / "llama-recall-5m"
FINDS = ("single", "keys", "values", "overwritten", "phonebook", "copy", "frequent")


@pytest.mark.slow
def test_the_bundled_model_finds_facts_and_two_bits_do_not() -> None:
    two_bits = kivi(2, 128, 128)
    found = evaluate(
        MODEL,
        ["int8,sinks=0,recent=0", two_bits],
        task=Task(kinds=("retrieval",), retrieval=FINDS),
        sizes=Sizes(lengths=(512,), prompts=4, facts=(0,)),
    )
    for name, task in found["retrieval"]["512"].items():
        assert task["exact"] > 0.9, name  # it answers 99 % and more, of 1,000 questions
        int8, bad = task["caches"]
        assert int8["given"] > 0.9, name
        if name in ("keys", "values", "phonebook"):  # which lose 25 points and more
            assert bad["given"] < task["exact"] - 0.1, name
