"""tests/benchmarks/peers.py on the CPU, where no other project is installed: its checks, and what
it gives to the others, whose functions are plain torch here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvquant import LatentFormat, RowFormat, dequantize_rows
from kvquant.bench.timer import Call, Machine
from kvquant.kernels.cuda.runtime.launch import GPUS
from kvquant.kernels.cuda.runtime.warmup import kernels_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import peers

CPU = torch.device("cpu")


class FakeTimer:
    """Runs every call once; it takes 10 us."""

    device = CPU

    def alone(self, call: Any, limit: float) -> float:
        call()
        return 10.0


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Of q [batch, heads, d] to k and v [batch, T, KV heads, d], as torch does it."""
    grouped = q.double().view(len(q), k.shape[2], -1, q.shape[-1])
    scores = torch.einsum("bhgd,bthd->bhgt", grouped, k.double()) * scale
    out = torch.einsum("bhgt,bthd->bhgd", scores.softmax(-1), v.double())
    return out.flatten(1, 2).to(torch.bfloat16)


def gather(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[pages, size, ...] to [batch, T, ...]."""
    return pages[table].flatten(1, 2)


class FakeWrapper:
    """FlashInfer's, of K and V or of latents."""

    def __init__(self, workspace: torch.Tensor, layout: str = "", **options: Any) -> None:
        assert not workspace.any() and layout in ("HND", "")

    def plan(self, *args: Any, metadata: tuple[torch.Tensor, ...] = (), **given: Any) -> None:
        if metadata:
            starts, firsts, indices, lens = metadata
            assert starts.tolist() == [0, 1, 2, 3] and lens.tolist() == [128] * 3
            assert (given["head_dim_ckv"], given["head_dim_kpe"]) == (512, 64)
            self.scale = given["sm_scale"]
        else:
            firsts, indices, last, q_heads, kv_heads, head_dim, page = args
            assert last.tolist() == [page] * 3 and (q_heads, kv_heads, head_dim) == (8, 2, 128)
            self.scale = head_dim**-0.5
        assert firsts.tolist() == [0, 2, 4, 6] and all(x.device == CPU for x in metadata)
        self.table = indices.view(3, 2)

    def run(
        self,
        q: Any = None,
        kv: Any = None,
        query: Any = None,
        kv_cache: Any = None,
        **scales: float,
    ) -> torch.Tensor:
        if query is None:
            k, v = (gather(pages.transpose(1, 2), self.table) for pages in kv)
            return attend(q, k, v, self.scale)
        assert set(scales.values()) == ({1.0} if kv_cache.dtype == peers.FP8 else set())
        rows = gather(kv_cache, self.table)[:, :, None]
        return attend(query, rows, rows[..., :512], self.scale)


def xqa(
    q: torch.Tensor,
    kv: Any,
    workspace: Any,
    table: torch.Tensor,
    lens: torch.Tensor,
    t: int,
    **of: Any,
) -> torch.Tensor:
    """FlashInfer's xqa_batch_decode_with_kv_cache."""
    assert of["kv_layout"] == "HND" and lens.dtype == torch.uint32 and lens.tolist() == [t] * 3
    k, v = (gather(pages.transpose(1, 2), table) for pages in kv)
    return attend(q, k, v, of["bmm1_scale"])


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **given: Any
) -> torch.Tensor:
    """vLLM's flash_attn_varlen_func."""
    queries, starts, tokens = args
    assert (queries, starts.tolist(), tokens) == (1, [0, 1, 2, 3], 128)
    assert given["fa_version"] == 3 and given["scheduler_metadata"] == "splits"
    if (table := given.get("block_table")) is not None:
        k, v = gather(k, table), gather(v, table)
    return attend(q, k, v, given["softmax_scale"])


def flash_mla(q: torch.Tensor, pages: torch.Tensor, table: Any, *args: Any, **of: Any) -> Any:
    """FlashMLA's flash_mla_with_kvcache."""
    assert args[1:] == (512, "plan")
    if table is None:
        chosen = pages.flatten(0, 1)[of["indices"][:, 0].long()]
        rows = dequantize_rows(chosen, LatentFormat.parse("fp8"))
    else:
        rows = gather(pages, table)
    return attend(q[:, 0], rows, rows[..., :512], of["softmax_scale"])[:, None], "lse"


def flash_mla_fp8(q: torch.Tensor, pages: torch.Tensor, dim: int, *args: Any) -> Any:
    """What vLLM adds to FlashMLA."""
    lens, table, scale, *rest = args
    rows = gather(pages, table)
    assert (
        dim == 512
        and lens.tolist() == [rows.shape[1]] * len(q)
        and rest == [False, "plan", "splits", 1, 1]
    )
    return attend(q[:, 0], rows, rows[..., :512], scale)[:, None], "lse"


class FakeBitDecoding:
    """Keeps K and V as they are."""

    def kvcache_pack_int(
        self, k: torch.Tensor, k_pack: Any, k_params: Any, v: torch.Tensor, *args: Any
    ) -> None:
        v_pack, v_params, table, starts, tokens, *options = args
        self.parts, self.options = (k_pack, k_params, v_pack, v_params, table), options
        assert starts.tolist() == [0, tokens, 2 * tokens, 3 * tokens]
        assert 4 * k_pack[0].numel() == k[0].numel() == 4 * v_pack[0].numel()
        assert k_params.shape == (3, tokens // 128, 2, 128) and v_params.shape == (3, 1, 2, tokens)
        self.k, self.v = k, v

    def fwd_kvcache_int(self, q: torch.Tensor, *args: Any) -> torch.Tensor:
        *parts, scale, mode, group_size, bits = args
        assert all(one is other for one, other in zip(parts, self.parts, strict=True))
        assert [mode, group_size, bits] == self.options == ["k-channel", 128, 4]
        return attend(q[:, 0], self.k, self.v, scale)[:, None]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the other projects."""
    monkeypatch.setattr(peers, "WORKSPACE", 64)
    bit_decoding = FakeBitDecoding()
    mla_wrapper = {"BatchMLAPagedAttentionWrapper": FakeWrapper}
    contents: dict[str, dict[str, Any]] = {
        "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": FakeWrapper},
        "flashinfer.decode": {"xqa_batch_decode_with_kv_cache": xqa},
        "flashinfer.mla": {
            "MLAPlanMetadata": SimpleNamespace(csr=lambda *lists: lists),
            **mla_wrapper,
        },
        peers.FLASH_ATTENTION: {
            "get_scheduler_metadata": lambda *args, **given: "splits",
            "flash_attn_varlen_func": flash_attention,
        },
        peers.FLASH_MLA: {
            "get_mla_metadata": lambda: ("plan", None),
            "flash_mla_with_kvcache": flash_mla,
        },
        "vllm._flashmla_extension_C": {},
        "bit_decode": {
            name: getattr(bit_decoding, name) for name in ("kvcache_pack_int", "fwd_kvcache_int")
        },
    }
    for name, functions in contents.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    added = SimpleNamespace(
        get_mla_decoding_metadata_dense_fp8=lambda lens, heads, kv_heads: ("plan", "splits"),
        fwd_kvcache_mla_fp8=flash_mla_fp8,
    )
    monkeypatch.setattr(torch.ops, "_flashmla_extension_C", added, raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["4:2x70x2", "4:mlax70x2"])
def test_what_is_installed_is_checked_and_timed(shape: str) -> None:
    at = peers.make_inputs(shape, CPU)
    found = {
        (peer.project, peer.cache): peers.measure(peer, at, FakeTimer())  # type: ignore[arg-type]
        for peer in peers.takers(shape, peers.PEERS)
        if peer.module in ("kvquant", "torch")
    }
    assert len(found) == (4 if "mla" in shape else 6)
    for one in found.values():
        assert one is not None and one["us"] == 10 and 0 < one["error"] < 3e-3
    if "mla" not in shape:
        torchs = found["torch", "BF16"]
        assert torchs is not None and torchs["gb_per_s"] == 2 * at.k.nbytes / 10 / 1e3


@pytest.mark.parametrize("shape", ["8:2x128x3", "64:mlax128x3"])
def test_the_other_projects_get_what_they_take(
    shape: str, others: None, capsys: pytest.CaptureFixture[str]
) -> None:
    at = peers.make_inputs(shape, CPU)
    names = set()
    for peer in peers.takers(shape, peers.PEERS):
        if peer.project.startswith(("Flash", "BitDecoding")):
            found = peers.measure(peer, at, FakeTimer())  # type: ignore[arg-type]
            assert found is not None and 0 < found["error"] < 8e-2, (peer, capsys.readouterr().out)
            in_fp8 = peer.cache == "FP8" and peer.project in ("FlashAttention 3", "FlashMLA")
            assert in_fp8 or found["error"] < 3e-3
            names.add((peer.project, peer.cache))
    assert len(names) == (5 if "mla" in shape else 7)
    assert capsys.readouterr().out == ""  # no kernel failed


def test_flashmla_takes_its_rows_of_64_and_128_heads(others: None) -> None:
    at = peers.make_inputs("16:mlax64x1", CPU)
    with pytest.raises(ValueError, match="64 or 128 heads"):
        peers.prepare_flashmla_rows(at)


def test_wrong_results_are_named_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    at = peers.make_inputs("4:2x70x2", CPU)

    def prepare(at: peers.Inputs) -> peers.Ready:
        right = peers.prepare_torch(at).calls["math, folded"]
        zeros = partial(torch.zeros_like, at.q)
        calls: dict[str, Call] = {"wrong": zeros, "right": right}
        return peers.Ready(calls, peers.ends(at.k), peers.ends(at.v), at.k.nbytes)

    found = peers.measure(replace(peers.PEERS[0], prepare=prepare), at, FakeTimer())  # type: ignore[arg-type]
    assert found is not None and found["kernel"] == "right"
    assert "wrong: AssertionError: relative error 1.0e+00 is over 0.005" in capsys.readouterr().out


def test_rows_of_ours_are_those_of_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fbgemm_gpu.experimental.gen_ai"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    at = peers.make_inputs("8:1x64x2", CPU)
    monkeypatch.setattr(torch.ops.fbgemm, "gqa_attn_splitk", print, raising=False)
    ready = peers.prepare_fbgemm("int4-g4", at)
    given = ready.calls["4 splits"].args[0].args  # type: ignore[attr-defined]
    assert given[0].shape == (2, 1, 8, 128) and given[1].shape == (2, 64, 1, 80)
    assert given[3].tolist() == [63, 63] and given[5] == 4
    with pytest.raises(ValueError, match="one KV head"):
        peers.prepare_fbgemm("int4-g4", peers.make_inputs("4:2x64x1", CPU))


def test_pages_hold_the_tokens_in_order() -> None:
    at = peers.make_inputs("4:2x128x3", CPU)
    pages, table = peers.to_pages(at.k)
    assert pages.shape == (6, 2, 64, 128) and table.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert torch.equal(pages[3, 1, 5], at.k[1, 1, 64 + 5])
    with pytest.raises(ValueError, match="no multiple"):
        peers.to_pages(at.k[:, :, :70].contiguous())


def test_many_sequences_are_quantized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at = peers.make_inputs("4:2x8x5", CPU)
    fmt = RowFormat.parse("int8", 128)
    whole = peers.pack(at.k, fmt)
    monkeypatch.setattr(peers, "BLOCK", 2 * at.k[0].numel() + 1)
    assert torch.equal(peers.pack(at.k, fmt), whole)


@pytest.mark.extra("cuda")
def test_our_kernels_are_compiled_before_anything_is_timed() -> None:
    shapes = ("8:1x8192x64", "128:mlax8192x64")
    calls = [
        partial(peers.rehearse, peer, shape)
        for shape in shapes
        for peer in peers.takers(shape, peers.PEERS)
        if peer.project == "kvquant"
    ]
    kernels = {type(spec).__name__ for spec in kernels_of(calls, GPUS["sm_90"])}
    assert kernels >= {"DecodeSpec", "WideMlaSpec"}


def test_json_says_what_was_measured_and_where(
    others: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine("a GPU", "CUDA 13.0", "2.11", "0.1", "2026", 132, 60 << 20, 4350.0, 4.7)
    compiled: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peers, "GraphTimer", FakeTimer)
    monkeypatch.setattr(peers, "describe_machine", lambda timer, version: machine)
    monkeypatch.setattr(peers, "gpu_of", lambda index: GPUS["sm_90"])
    monkeypatch.setattr(peers, "compile_kernels", lambda specs, arch: compiled.extend(specs))
    monkeypatch.setattr(peers, "commit", lambda: "0123abc")
    file = tmp_path / "peers.json"
    shapes = ["--shape", "4:2x8x2", "--shape", "16:mlax64x1"]
    projects = ["--project", "torch", "--project", "FlashMLA", "--project", "FBGEMM"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *shapes, *projects, "--json", str(file)])
    peers.main()
    found = json.loads(file.read_text())
    assert found["machine"]["gpu"] == "a GPU" and found["commit"] == "0123abc"
    assert found["versions"] == {"vllm": "unknown"} and compiled == []
    assert [(one["shape"], one["project"], one["cache"]) for one in found["peers"]] == [
        ("4:2x8x2", "torch", "BF16"),
        ("16:mlax64x1", "FlashMLA", "BF16"),
        ("16:mlax64x1", "FlashMLA", "FP8"),
    ]
    for one in found["peers"]:
        assert one["us"] == 10 and one["gb_per_s"] > 0 and 0 < one["error"] < 8e-2 and one["kernel"]
    out = capsys.readouterr().out
    assert "FBGEMM, BF16: not measured (No module named 'fbgemm_gpu'): pip install" in out
    assert "16:mlax64x1, FlashMLA, FP8, 4 scales: ValueError: it takes 64 or 128 heads" in out


def test_a_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    with pytest.raises(SystemExit, match="no GPU"):
        peers.main()
