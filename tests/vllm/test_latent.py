"""Models with latent attention in vLLM's engine on the CPU, compared with transformers whose cache
rounds latents as rows do (1 minute)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_plans import latent_plan
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache
from vllm_engines import begun_of, counter, engine, generate

from kvquant import CachePlan, LatentFormat, dequantize_rows, quantize_rows
from kvquant.io.model_id import model_identity
from kvquant.rows.basis import LayerBasis, transform_rows

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
LATENT, ROPE, TOKENS = 512, 64, 12
LENGTHS = (60, 17, 250)  # of prompts
SIZES: Any = {"head_dim": ROPE}  # which transformers' config has, and its signature has not
CONFIG = DeepseekV3Config(
    **SIZES,
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    first_k_dense_replace=2,  # no router's choice hangs on a rounding
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=LATENT,
    qk_rope_head_dim=ROPE,
    qk_nope_head_dim=32,
    v_head_dim=32,
    max_position_embeddings=1024,
)
# vLLM's own kernel of the CPU for RoPE is wrong for queries of three axes, as these are
TORCH_ROPE = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


class Rows(DynamicCache):
    """transformers' cache, whose latents are rounded as rows; the tokens of a prompt attend to
    their own as they are, unless prompts are to come from rows."""

    def __init__(self, fmt: str, *, from_rows: bool, bases: Sequence[LayerBasis] | None) -> None:
        super().__init__()
        self.fmt, self.from_rows, self.bases = LatentFormat.parse(fmt), from_rows, bases

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rounded(key_states, value_states, layer_idx)
        latent, rope = super().update(*rows, layer_idx, *args, **kwargs)
        past = latent.shape[2] - key_states.shape[2]
        if key_states.shape[2] > 1 and not self.from_rows:
            latent = torch.cat([latent[:, :, :past], key_states], 2)
            rope = torch.cat([rope[:, :, :past], value_states], 2)
        return latent, rope

    def rounded(self, latent: Any, rope: Any, layer: int) -> tuple[Any, Any]:
        parts = [latent, rope]
        basis = None if self.bases is None else self.bases[layer]
        if basis is not None:
            parts = [
                transform_rows(x[0].transpose(0, 1), side.encoding).transpose(0, 1)[None]
                for x, side in zip(parts, basis, strict=True)
            ]
        values = dequantize_rows(quantize_rows(torch.cat(parts, -1), self.fmt), self.fmt)
        found = values[..., :LATENT], values[..., LATENT:]
        return found if basis is None else (basis.k.decode(found[0]), basis.v.decode(found[1]))


class Model:
    """A small random model in a folder, and transformers' answers."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.path = str(folder)
        self.module = AutoModelForCausalLM.from_config(CONFIG).float().eval()
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(std=weight.shape[-1] ** -0.5 * (3 if "lm_head" in name else 1))
        self.module.save_pretrained(folder)

    @torch.no_grad()
    def answers(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        fmt: str,
        *,
        chunks: Sequence[int] = (),
        cached: int | None = None,
        from_rows: bool = False,
        bases: Sequence[LayerBasis] | None = None,
    ) -> torch.Tensor:
        """Log-probabilities of the tokens of a text behind a prompt, [tokens, vocabulary].

        Args:
            chunks: tokens of the chunks that the prompt came in; all at once where left out.
            cached: its first tokens, which were there already: the others come once more.
        """
        past = Rows(fmt, from_rows=from_rows, bases=bases)
        given = torch.tensor([[*prompt, *ids[:-1]]])
        parts = [*given[:, : len(prompt)].split(list(chunks or [len(prompt)]), 1)]
        if cached is not None:
            for part in parts:
                self.module(part, past_key_values=past)
            past.crop(cached - len(prompt))
            parts = [given[:, cached : len(prompt)]]
        parts += given[:, len(prompt) :].split(1, 1)
        logits = [self.module(part, past_key_values=past).logits[0, -1] for part in parts]
        return torch.stack(logits[-len(ids) :]).log_softmax(-1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("deepseek") / "model")


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for which vLLM allows chunks of prompts and prefix caching beside MLA."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [7 * i * i % 256 for i in range(n)]} for n in lengths]


def latent_engine(model: Model, rows: dict[str, str] | None, **options: Any) -> Any:
    given = {"model": model.path, "skip_tokenizer_init": True, **TORCH_ROPE}
    return engine(rows, **{**given, **options})


def texts(llm: Any, given: Sequence[Any]) -> Any:
    return generate(llm, given, TOKENS, detokenize=False)


def moved(text: Any, wanted: torch.Tensor) -> float:
    """By how much log-probabilities that vLLM gives differ, on average."""
    pairs = zip(wanted, text.known, strict=True)
    errors = [abs(float(row[token]) - x) for row, known in pairs for token, x in known.items()]
    return float(sum(errors) / len(errors))


# A code of a row falls to its neighbour where sums are in another order, which moves few steps by a
# little; a wrong row, slot, length or scale moves all of them as much as a format's own error does.
PART = 1 / 3


@pytest.mark.parametrize(
    ("fmt", "prompts_read", "processor"),
    [("fp16", "16-bit", "AMX"), ("fp8", "16-bit", "no AMX"), ("int4-g8+int8-g4", "rows", "AMX")],
    ids=["fp16", "fp8", "int4-g8+int8-g4"],
)
def test_engines_answer_as_transformers_does_with_such_rows(
    fmt: str, prompts_read: str, processor: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has pages of other sizes where the processor has AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: processor == "AMX")
    from_rows = prompts_read == "rows"
    given = prompts(*LENGTHS, *[1] * from_rows)
    row_bytes = LatentFormat.parse(fmt).row_bytes
    with latent_engine(model, {"format": fmt, "prompts": prompts_read}) as llm:
        found = texts(llm, given)
        cache = llm.llm_engine.vllm_config.cache_config
        size = cache.block_size
        assert {(x.shape[1:], x.dtype) for x in _pages(llm)} == {((size, row_bytes), torch.uint8)}
        assert cache.num_gpu_blocks == (64 << 20) // (size * row_bytes * CONFIG.num_hidden_layers)
    for prompt, text in zip(given, found, strict=True):
        ids = prompt["prompt_token_ids"]
        own = moved(text, model.answers(ids, text.ids, fmt, from_rows=from_rows))
        if fmt == "fp16":
            assert own < 4e-4
        else:
            assert own < PART * moved(text, model.answers(ids, text.ids, "fp16"))


def _pages(llm: Any) -> list[torch.Tensor]:
    (found,) = llm.apply_model(
        lambda model: [layer.self_attn.mla_attn.mla_attn.kv_cache for layer in model.model.layers]
    )
    return found  # type: ignore[no-any-return]


@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("from_rows", [False, True], ids=["16-bit", "rows"])
def test_prompts_in_chunks_and_in_the_prefix_cache(from_rows: bool, model: Model) -> None:
    rows = {"format": "int8-g4", "prompts": "rows" if from_rows else "16-bit"}
    (prompt,) = prompts(250)
    ids = prompt["prompt_token_ids"]
    options: Any = {"chunks": (100, 100, 50), "from_rows": from_rows}
    with latent_engine(model, rows, max_num_batched_tokens=100) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        (first,), (second,) = texts(llm, [prompt]), texts(llm, [prompt])
        size = llm.llm_engine.vllm_config.cache_config.block_size
        cached = (len(ids) - 1) // size * size  # the last token is always computed
        assert counter(llm, "prefix_cache_hits") == cached
        many = texts(llm, prompts(130, 60, 210, 90, 33))
    wanted = model.answers(ids, first.ids, "int8-g4", **options)
    assert moved(first, wanted) < 2e-3
    again = model.answers(ids, second.ids, "int8-g4", cached=cached, **options)
    assert moved(second, again) < 2e-3
    if from_rows:  # then it does not matter what chunks they came in
        for text, one in zip(many, prompts(130, 60, 210, 90, 33), strict=True):
            wanted = model.answers(one["prompt_token_ids"], text.ids, "int8-g4", from_rows=True)
            assert moved(text, wanted) < 2e-3


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls that builders of engines ask for, while this is on."""
    from kvquant.vllm import latent

    found: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(latent, "warm_up_layers", lambda _, calls: found.extend(calls))
        yield found


def test_drafted_tokens_attend_to_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [{"prompt_token_ids": ([*range(k, k + 9)] * 9)[: 40 + k]} for k in range(3)]
    with (
        asked(monkeypatch) as calls,
        latent_engine(model, {"format": "int8-g4"}, speculative_config=DRAFTS) as llm,
    ):
        assert {one.kind for one in begun_of(llm, monkeypatch)} == {one.kind for one in calls}
        found = texts(llm, given)
        assert counter(llm, "spec_decode_num_draft_tokens") > 20
    for prompt, text in zip(given, found, strict=True):
        wanted = model.answers(prompt["prompt_token_ids"], text.ids, "int8-g4")
        assert moved(text, wanted) < 2e-3


def make_plan(path: Path) -> CachePlan:
    """A plan of the model, with a random basis for each layer."""
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
    plan = latent_plan(2, sizes, fmt=("int8-g4", "bf16"))
    layers = plan.facts["layers"]
    layers[-1] = layers[0]  # none is kept in 16 bit
    plan = CachePlan({**plan.facts, "model": model_identity(CONFIG.to_dict())}, plan.tensors)
    plan.save(path)
    return plan


def test_plans(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.safetensors"
    plan = make_plan(path)
    given = prompts(60, 17)
    with asked(monkeypatch) as calls, latent_engine(model, {"plan": str(path)}) as llm:
        assert {one.kind for one in begun_of(llm, monkeypatch)} == {one.kind for one in calls}
        found = texts(llm, given)
    for prompt, text in zip(given, found, strict=True):
        ids = prompt["prompt_token_ids"]
        wanted = model.answers(ids, text.ids, "int8-g4", bases=plan.layers)
        other = model.answers(ids, text.ids, "int8-g4")
        assert moved(text, wanted) < PART * moved(text, other)
