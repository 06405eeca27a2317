"""HybridModel: a CachedModel of a decoder that a KVCache alone does not serve.

These are hybrids, whose other layers (linear attention, states) transformers keeps, and models that
compute attention by themselves and get dequantized rows. For each KVCache a HybridModel remembers
transformers' layers in two states: after the prompt, and after the last token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..cache.checks import whole_numbers
from ..cache.contiguous import KVCache
from ..errors import ConfigError, KVQuantError, ShapeError, UnsupportedModelError
from .argument import as_argument
from .cache import QuantizedCache
from .call import ATTENTION
from .model import CachedModel, Progress, loaded
from .models.configs import CacheLayers, cache_layers, input_device
from .switch import attending, plain_implementation

# model types whose later chunks transformers 5.24 computes from an empty state
# (tests/hf/test_hybrid_model.py)
_FORGETFUL = {"jamba"}


class _Beside(NamedTuple):
    """The layers that transformers keeps, as of a text's end."""

    length: int
    layers: Sequence[Any]

    def copied(self) -> _Beside:
        """A copy to decode with. It shares keys and values: no code writes into these."""
        kept = [layer for layer in self.layers if isinstance(layer, DynamicLayer)]
        shared = [x for layer in kept if layer.is_initialized for x in (layer.keys, layer.values)]
        return _Beside(self.length, copy.deepcopy(self.layers, {id(x): x for x in shared}))


class HybridModel(CachedModel):
    """A CachedModel of a decoder that QuantizedCache serves, and a KVCache alone does not.

    A KVCache holds the layers that it can. transformers keeps the others, in 16 bit or as states.
    These do not follow `reorder` and `select`, so all sequences of a batch have one length and keep
    their order. Crop a cache to the end of the prompt that prefill read, and to no other length.
    generate therefore fills a text that ends early with its end token in the cache, too.

    Args:
        model, tokenizer, exact_format: as of CachedModel.
        dequantize: dequantize rows in each call, for a model that computes attention by itself, as
            QuantizedCache(dequantize=True).

    Attributes:
        dequantizes: the argument dequantize.

    Raises:
        ConfigError, UnsupportedModelError: as CachedModel, and QuantizedCache.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, FalconH1Config
        >>> from kvquant.hf.hybrid import HybridModel
        >>> sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "vocab_size": 97}
        >>> states = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}
        >>> config = FalconH1Config(**sizes, **states, num_hidden_layers=2, num_key_value_heads=2)
        >>> model = HybridModel(AutoModelForCausalLM.from_config(config))
        >>> cache = model.new_cache(batch=1, max_seq_len=64, k_format="int8", v_format="int4-g4")
        >>> logits = model.prefill(cache, torch.tensor([[5, 6, 7]]))
        >>> model.generate(cache, logits, 5).shape
        torch.Size([1, 5])
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        exact_format: str | None = None,
        dequantize: bool = False,
    ) -> None:
        self.dequantizes = dequantize
        super().__init__(model, tokenizer, exact_format=exact_format)
        self._now: WeakKeyDictionary[KVCache, _Beside] = WeakKeyDictionary()
        self._behind_prompts: WeakKeyDictionary[KVCache, _Beside] = WeakKeyDictionary()

    @property
    def layers(self) -> CacheLayers:
        """Which layers a KVCache holds, and why it does not hold the others."""
        return self._layers

    def prefill(
        self,
        cache: KVCache,
        tokens: torch.Tensor,
        lens: torch.Tensor | Sequence[int] | None = None,
        *,
        append: bool = False,
        chunk: int | None = None,
        progress: Progress | None = None,
    ) -> torch.Tensor:
        """As CachedModel; sequences of unlike lengths raise ShapeError. You can crop to this
        prompt's end."""
        alike = set() if lens is None else {*whole_numbers("lens", lens).flatten().tolist()}
        if len(alike) == 1:
            tokens = tokens[:, : max(*alike, 0)]  # states would read the padding
        if chunk is None and self.config.model_type in _FORGETFUL:
            chunk = tokens.shape[1]
        logits = super().prefill(cache, tokens, lens, append=append, chunk=chunk, progress=progress)
        self._behind_prompts[cache] = self._now[cache].copied()
        return logits

    def copy_states(self, source: KVCache, target: KVCache) -> None:
        """Copy transformers' layers, as of the prompt's end, from one cache to another.

        Args:
            source: the cache that prefill has read the prompt into.
            target: a KVCache with rows of the same prompt.

        Raises:
            ConfigError: this model has not read a prompt into source, or target has another length.
        """
        found = self._behind_prompts.get(source)
        lens = {found.length if found else 0, *target.seq_lens.tolist()}
        if found is None or len(lens) > 1:
            raise ConfigError(
                f"the prompt has {found.length if found else 'no'} tokens, the copy "
                f"{target.seq_lens.tolist()}: give a cache of prefill, and one with its rows"
            )
        self._behind_prompts[target], self._now[target] = found, found.copied()

    def _drop_behind(self, cache: KVCache, lens: torch.Tensor) -> None:
        """Nothing: states cannot forget, and all texts must have one length."""

    def not_captured(self, cache: KVCache) -> str | None:
        """Why a step is no CUDA graph."""
        return "transformers keeps a part of its layers, whose tensors move from step to step"

    def past_of(self, cache: KVCache, new_lens: torch.Tensor | None = None) -> QuantizedCache:
        """As CachedModel, with the layers that transformers keeps."""
        if new_lens is not None and int(new_lens.min()) < int(new_lens.max()):
            raise ShapeError("a HybridModel reads sequences of one length: give them one by one")
        return super().past_of(cache, new_lens)

    def call(self, past: QuantizedCache, tokens: torch.Tensor, keep: list[int]) -> torch.Tensor:
        """As CachedModel; the model counts positions by the cache, as it does in generate."""
        before, kind = past.past.length, self.config.model_type
        if before and tokens.shape[1] > 1 and kind in _FORGETFUL:
            raise UnsupportedModelError(
                f"{kind} models of transformers forget their states where several tokens come "
                "behind others: read a prompt in one call, without chunk and append"
            )
        given = {"logits_to_keep": keep} if self._chooses_logits else {}
        if past.kv is not None:  # layers change in place: behind a call that raises none is known
            self._now.pop(past.kv, None)
        with attending(self.model, self._attention), torch.no_grad():
            out = self.model(tokens, **as_argument(self.model, past), use_cache=True, **given)
        past.check_complete()
        assert past.kv is not None
        self._now[past.kv] = _Beside(before + tokens.shape[1], past.layers)
        logits: torch.Tensor = out.logits
        return logits if given else logits[:, keep]

    def _beside(self, cache: KVCache) -> Sequence[Any]:
        """All layers after a cache's tokens; ConfigError unless it ends at the prompt or last
        token."""
        length = int(cache.seq_lens.max())
        if not length:
            layers = self._layers
            return DynamicCache(config=self.config).layers if layers.others or layers.states else ()
        now, before = self._now.get(cache), self._behind_prompts.get(cache)
        if now is not None and now.length == length:
            return now.layers
        if before is not None and before.length == length:
            return before.copied().layers
        raise ConfigError(
            f"the cache holds {length} tokens, and this model's states are known behind "
            f"{before.length if before else 'no'} (the prompt): crop the cache to these, or read "
            "the text again"
        )

    @property
    def _attention(self) -> str:
        return plain_implementation(self.model) if self.dequantizes else ATTENTION

    @cached_property
    def _chooses_logits(self) -> bool:
        """Whether the model can compute the logits of chosen tokens alone."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @cached_property
    def _positions(self) -> int | None:
        return None  # the model counts them

    @cached_property
    def _layers(self) -> CacheLayers:
        found = self._served(cache_layers(self.config, longest=0 if self.dequantizes else None))
        if self.dequantizes:  # configs of such models tell the heads in several ways
            found = replace(found, windows=(None,) * len(found.places), num_kv_heads=self._heads())
        return found

    def _heads(self) -> int:
        """KV heads that the model gives a cache."""
        past = QuantizedCache(self.model.config, dequantize=True, drafts=False)
        token = torch.zeros(1, 1, dtype=torch.int64, device=input_device(self.model))
        with attending(self.model, self._attention), torch.no_grad():
            self.model(token, **as_argument(self.model, past), use_cache=True)
        assert past.kv is not None
        return past.kv.num_kv_heads


def load_decoder(
    folder: str | Path, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> CachedModel:
    """Load a model and its tokenizer, as CachedModel.from_pretrained, in the form of decoder_of."""
    return decoder_of(**loaded(folder, dtype, device))


def decoder_of(
    model: Any, tokenizer: Any = None, *, exact_format: str | None = None
) -> CachedModel:
    """Make the first form of a model that serves it, after a trial on three tokens.

    The forms are CachedModel, HybridModel and HybridModel(dequantize=True), in this order.

    Raises:
        UnsupportedModelError: no form serves the model; the message has the reason of each.
        ConfigError: as CachedModel.
    """
    reasons: list[str] = []
    for kind in (CachedModel, HybridModel, partial(HybridModel, dequantize=True)):
        try:
            found = kind(model, tokenizer, exact_format=exact_format)
            _try_out(found)
            return found
        except UnsupportedModelError as error:
            reasons.append(str(error))
    raise UnsupportedModelError(
        f"no cache of kvquant serves this model: {'. '.join(dict.fromkeys(reasons))}. Take a model "
        "of a family that kvquant/hf/README.md lists"
    )


def _try_out(model: CachedModel) -> None:
    if not isinstance(model, HybridModel):
        cache_layers(model.config, longest=None).check_whole()  # for texts of any length
    name = model.exact_format
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
    try:
        rows: Any = {"fmt": name} if model.has_latents else {"k_format": name, "v_format": name}
        cache = model.new_cache(1, 3, sink_len=0, recent_len=0, **rows)
        model.prefill(cache, tokens)
        model.step(cache, tokens[:, 0])
    except KVQuantError:
        raise
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{model.config.model_type} models of transformers refuse it: {error}"
        ) from error
