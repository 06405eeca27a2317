"""CachedModel: a Hugging Face decoder that keeps its keys and values in a KVCache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .cache import KVCache
from .devices import check_device
from .errors import ConfigError, ShapeError, UnsupportedModelError
from .huggingface import TransformersCache, attend_by, load, plain_cache, windows_of
from .layer import SPARE
from .observation import Observer, observe, output_weights
from .plan import CachePlan
from .quant import exact_codec

Progress = Callable[[int], None]


class CachedModel:
    """A Hugging Face decoder that keeps its keys and values in a KVCache.

    On CUDA the queries and the outputs of attention of a float32 model are rounded to bfloat16 in
    each step: the kernel there takes and gives 16 bit.

    Args:
        model: a causal language model that attends through transformers' attention interface; its
            attention implementation is set as needed.
        tokenizer: its tokenizer; needed by encode and decode only.
        exact_format: its 16-bit rows; "fp16" for a float16 model, else "bf16", when None.

    Attributes:
        config: of the text model.
        exact_format: as above.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, exact_format: str | None = None
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.exact_format = exact_format or exact_codec(model.dtype)
        self.config = model.config.get_text_config(decoder=True)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> CachedModel:
        """Load a model and its tokenizer from a local folder; nothing is downloaded.

        Args:
            folder: what save_pretrained wrote.
            dtype: of weights and arithmetic. float32 is the faster one on CPUs without bfloat16
                units, and keeps rounding noise out of measurements of the cache; on CUDA not that
                of queries and attention's outputs, see CachedModel. 16 bit takes half the memory.
                16-bit rows of caches have this dtype; with float32, that which the model was saved
                in.
            device: where to run.

        Raises:
            ConfigError: no such folder or device, or no model that transformers can load in it.
            DeviceError: the device is not here, or no kernels serve it.
        """
        device = check_device(device)
        model, tokenizer, saved = load(folder, dtype)
        exact = exact_codec(saved if dtype == torch.float32 else dtype)
        return cls(model.to(device), tokenizer, exact_format=exact)

    @property
    def config_dict(self) -> dict[str, Any]:
        """The whole config, as save_cache and model_identity take it."""
        config: dict[str, Any] = self.model.config.to_dict()
        return config

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and arithmetic."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model was made for, None where it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def decode(self, tokens: Sequence[int] | torch.Tensor) -> str:
        """The text of token ids."""
        text: str = self.tokenizer.decode(tokens)
        return text

    def new_cache(
        self, batch: int, max_seq_len: int, *, plan: CachePlan | None = None, **options: Any
    ) -> KVCache:
        """Make an empty KVCache of this model's shape.

        Args:
            batch: sequences.
            max_seq_len: tokens that each has room for.
            plan: of `kvquant calibrate`, for this model: it says the formats.
            options: of KVCache: k_format, v_format (not with a plan), sink_len, recent_len,
                exact_format.

        Raises:
            ConfigError: head_dim or an option is not supported.
            CheckpointError: the plan was made for another model.
            UnsupportedModelError: layers that are not attention, or that differ in their shape.
        """
        config = self.config
        for i, kind in enumerate(getattr(config, "layer_types", None) or []):
            if not kind.endswith("attention") or kind.startswith("linear"):
                raise UnsupportedModelError(
                    f"layer {i} is {kind!r}: KVCache holds attention layers only"
                )
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        if not isinstance(heads, int) or not isinstance(head_dim, int):
            raise UnsupportedModelError(
                f"layers differ in their shape: {heads} KV heads, {head_dim} wide"
            )
        own = {"exact_format": self.exact_format, "device": self.model.device}
        options = own | {"windows": windows_of(config)} | options
        if plan is not None:
            plan.check_model(self.config_dict)
            return KVCache.from_plan(plan, batch, max_seq_len, **options)
        return KVCache(config.num_hidden_layers, batch, heads, head_dim, max_seq_len, **options)

    def prefill(
        self,
        cache: KVCache,
        tokens: torch.Tensor,
        lens: torch.Tensor | Sequence[int] | None = None,
        *,
        chunk: int = 512,
        progress: Progress | None = None,
    ) -> torch.Tensor:
        """Read tokens into a cache in chunks, quantizing as they come.

        Args:
            cache: from new_cache; what it holds already is the past.
            tokens: [batch, new_tokens], int64; padding, if any, last.
            lens: [batch]: tokens of each sequence that are no padding, 1 or more; all when None.
            chunk: tokens computed at a time; 512 at most for a cache with windows.
            progress: called with the number of tokens done after each chunk.

        Returns:
            [batch, vocabulary]: the logits after each sequence's last token.

        Raises:
            ShapeError: tokens or lens do not fit the cache, or not into it.
            NonFiniteError: keys or values that the formats cannot hold, now (these are taken back)
                or in an append before, see KVCache.check.
            UnsupportedModelError: attention that KVCache cannot compute, with the layer.
        """
        counts = self._check_prefill(cache, tokens, lens, chunk)
        cache.check()  # what was appended before is not to be blamed on this call
        if any(cache.windows):
            chunk = min(chunk, SPARE)  # else a call that fails could not be taken back
        logits: torch.Tensor | None = None
        for start in range(0, int(counts.max()), chunk):
            part = tokens[:, start : start + chunk]
            new_lens = (counts - start).clamp(0, part.shape[1])
            keep, place = (new_lens - 1).clamp(min=0).unique(return_inverse=True)
            found = self._run(cache, part, new_lens, keep)[torch.arange(cache.batch), place]
            here = (new_lens > 0).to(found.device)[:, None]  # the others ended in an earlier chunk
            logits = found if logits is None else torch.where(here, found, logits)
            if progress:
                progress(part.shape[1])
        assert logits is not None
        return logits

    def step(self, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one token of each sequence by the fused call.

        Args:
            cache: the past of each sequence, of any lengths.
            tokens: [batch], int64.

        Returns:
            [batch, vocabulary]: the logits of the next token.
        """
        return self._run(cache, tokens[:, None], None, torch.tensor([0]))[:, 0]

    def generate(self, cache: KVCache, logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Continue each sequence greedily.

        Args:
            cache: the past of each sequence.
            logits: [batch, vocabulary] after it, from prefill or step.
            num_tokens: tokens to add, 1 or more.

        Returns:
            [batch, num_tokens], int64. The last one is not in the cache yet.
        """
        tokens = [logits.argmax(-1)]
        while len(tokens) < num_tokens:
            tokens.append(self.step(cache, tokens[-1]).argmax(-1))
        return torch.stack(tokens, dim=1)

    def new_plain_cache(self) -> Any:
        """Make an empty DynamicCache, transformers' own, for plain."""
        return plain_cache()

    def plain(self, tokens: torch.Tensor, past: Any = None) -> torch.Tensor:
        """Run the model as transformers does: SDPA, and a DynamicCache of the model's dtype.

        Args:
            tokens: [batch, new_tokens], int64.
            past: a DynamicCache, which is added to; none is kept when None.

        Returns:
            [batch, vocabulary]: the logits after the last token.
        """
        attend_by(self.model, "sdpa")
        with torch.no_grad():
            out = self.model(
                tokens.to(self.model.device),
                past_key_values=past,
                use_cache=past is not None,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def observe(self, tokens: torch.Tensor, observer: Observer) -> None:
        """Show what every layer attends with, computed with exact attention.

        Args:
            tokens: [batch, new_tokens], int64.
            observer: called with the layer, queries [batch, num_q_heads, new_tokens, head_dim] and
                keys [batch, num_kv_heads, new_tokens, head_dim] (after RoPE), values likewise, and
                sm_scale.
        """
        observe(self.model, tokens, observer)

    def output_weights(self) -> dict[int, torch.Tensor]:
        """The output projection of each layer's attention, [hidden, num_q_heads * head_dim]."""
        return output_weights(self.model)

    def windows(self) -> dict[int, int]:
        """The sliding window of each layer that has one, in tokens."""
        return {i: window for i, window in enumerate(windows_of(self.config)) if window}

    def _run(
        self,
        cache: KVCache,
        tokens: torch.Tensor,
        new_lens: torch.Tensor | None,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        """One call of the model: the logits at the places keep, [batch, len(keep), vocabulary]."""
        before = cache.seq_lens
        past = TransformersCache(cache, new_lens)
        steps = torch.arange(tokens.shape[1], device=cache.device)
        attend_by(self.model, "kvquant")
        try:
            with torch.no_grad():
                out = self.model(
                    tokens.to(self.model.device),
                    past_key_values=past,
                    position_ids=cache.positions[:, None] + steps,
                    use_cache=True,
                    logits_to_keep=keep.to(self.model.device),
                )
            past.check_attended()
            cache.check()
        except BaseException:
            cache.bad_rows.zero_()  # of the rows that are taken back
            cache.lost_tokens.zero_()
            cache.crop(before)  # layers that are through must not be ahead of the others
            raise
        logits: torch.Tensor = out.logits
        return logits if logits.shape[1] == len(keep) else logits[:, keep]

    @staticmethod
    def _check_prefill(
        cache: KVCache,
        tokens: torch.Tensor,
        lens: torch.Tensor | Sequence[int] | None,
        chunk: int,
    ) -> torch.Tensor:
        """[batch] int64: tokens to read of each sequence."""
        if tokens.ndim != 2 or tokens.shape[0] != cache.batch or tokens.shape[1] == 0:
            raise ShapeError(f"tokens are {list(tokens.shape)}: give [{cache.batch}, 1 or more]")
        if chunk < 1:
            raise ConfigError(f"chunk {chunk} is not possible: use 1 or more tokens")
        batch, new_tokens = tokens.shape
        counts = torch.as_tensor([new_tokens] * batch if lens is None else lens).cpu().long()
        if counts.shape != (batch,) or not bool(((counts > 0) & (counts <= new_tokens)).all()):
            raise ShapeError(f"lens are {counts.tolist()}: give [{batch}] of 1 to {new_tokens}")
        longest = int((cache.seq_lens.cpu() + counts).max())
        if longest > cache.max_seq_len:
            raise ShapeError(
                f"{longest} tokens do not fit into a cache with max_seq_len {cache.max_seq_len}"
            )
        return counts
