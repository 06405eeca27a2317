"""CapturedStep: a decode step of a whole model as one CUDA graph.

From Python a layer's step takes the host longer than the GPU, whatever the cache holds. A graph is
launched once for all layers. Lengths lie on the device and the kernels cut their work from them, so
one graph serves every step: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.contiguous import KVCache
from ..errors import ConfigError, DeviceError, ShapeError, UnsupportedModelError

if TYPE_CHECKING:
    from .model import CachedModel


class CapturedStep:
    """CachedModel.step for one cache, as a CUDA graph.

    The cache may be cropped, reordered, reset and prefilled between steps, and stepped from Python,
    which reads lengths from then on. Nothing is read in a step but where others changed the cache
    since the last: call cache.check() at times, which raises what came with NaN.

    While it is made no other thread may capture a graph or use the cache.

    Args:
        model: on CUDA.
        cache: of the model; its tensors are part of the graph.

    Raises:
        DeviceError: the cache is not on CUDA.
        UnsupportedModelError: the model looks at the positions on the host in each step, or has
            fewer of them than the cache has room for.

    Example (on a GPU):
        logits = model.prefill(cache, tokens)
        step = CapturedStep(model, cache)
        for _ in range(100):
            logits = step(logits.argmax(-1))
        cache.check()
    """

    @torch.inference_mode(False)  # else the tokens could not be changed outside
    def __init__(self, model: CachedModel, cache: KVCache) -> None:
        if cache.device.type != "cuda":
            raise DeviceError(f"the cache is on {cache.device}: a step is captured on CUDA only")
        if why := model.not_captured(cache):
            raise UnsupportedModelError(f"this model's step cannot be captured: {why}")
        self.cache = cache
        # the graph reads all of these in each step, so they must live as long as it
        self._model, self._layers = model, list(cache.layers)
        self._past = model.past_of(cache)
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.device)
        self._last = torch.zeros(1, dtype=torch.int64, device=cache.device)
        self._room, self._changes = 0, cache.changes  # steps that surely fit, if none came between
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(cache.device)  # of the cache's GPU, which may not be the current
        with torch.cuda.device(cache.device):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries make themselves ready: no graph may hold it
                model.plain(self._tokens)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self._graph, stream=side):
                self._logits = model.call(self._past, self._tokens, self._last)[:, 0]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one token of each sequence.

        Args:
            tokens: [batch], whole numbers on the cache's device.

        Returns:
            [batch, vocabulary]: the logits of the next token; the next call writes them anew.

        Raises:
            ShapeError: tokens of another batch, or no room is left for them.
            ConfigError: the cache has grown, so its rows lie elsewhere.
        """
        cache = self.cache
        if tokens.shape != (cache.batch,):
            raise ShapeError(f"tokens are {list(tokens.shape)}: give [{cache.batch}]")
        if any(now is not then for now, then in zip(cache.layers, self._layers, strict=True)):
            raise ConfigError("the cache has grown since its step was captured: capture it again")
        if not self._room or cache.changes != self._changes:
            longest = int(cache.seq_lens.max())  # waits, once in as many steps as fitted
            self._room = cache.max_seq_len - longest
            if not self._room:
                raise ShapeError(
                    f"a sequence has all {longest} tokens that there is room for: crop the cache, "
                    "or make a larger one"
                )
        self._room -= 1
        cache.changes += 1
        self._changes = cache.changes
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        return self._logits
