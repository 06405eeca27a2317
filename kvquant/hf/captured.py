"""CapturedStep: a decode step of a whole model as one CUDA graph.

From Python a layer's step takes the host longer than the GPU, whatever the cache holds. A graph is
launched once for all layers. Lengths lie on the device and the kernels cut their work from them, so
one graph serves every step: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..cache.contiguous import KVCache
from ..errors import DeviceError, ShapeError, UnsupportedModelError

if TYPE_CHECKING:
    from .model import CachedModel


class CapturedStep:
    """CachedModel.step for one cache, as a CUDA graph.

    The cache may be cropped, reordered, reset and prefilled between steps; to grow it makes a new
    capture necessary. Nothing is read in a step: call cache.check() at times, which raises what
    came with NaN.

    Args:
        model: on CUDA.
        cache: of the model; its tensors are part of the graph.

    Raises:
        DeviceError: the cache is not on CUDA.
        UnsupportedModelError: the model looks at the positions on the host in each step, or has
            fewer of them than the cache has room for.

    Example (on a GPU):
        step = CapturedStep(model, cache)
        logits = model.prefill(cache, tokens)
        for _ in range(100):
            logits = step(logits.argmax(-1))
        cache.check()
    """

    def __init__(self, model: CachedModel, cache: KVCache) -> None:
        if cache.device.type != "cuda":
            raise DeviceError(f"the cache is on {cache.device}: a step is captured on CUDA only")
        if why := model.not_captured(cache):
            raise UnsupportedModelError(f"this model's step cannot be captured: {why}")
        self.cache = cache
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.device)
        self._room = 0  # steps that surely fit
        # the graph reads all of these in each step, so they must live as long as it
        self._past = past = model.past_of(cache)
        self._last = last = torch.zeros(1, dtype=torch.int64, device=cache.device)
        side = torch.cuda.Stream(cache.device)
        side.wait_stream(torch.cuda.current_stream(cache.device))
        with torch.cuda.stream(side):  # libraries make themselves ready, which no graph may hold
            model.plain(self._tokens)
        torch.cuda.current_stream(cache.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = model.call(past, self._tokens, last)[:, 0]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one token of each sequence.

        Args:
            tokens: [batch], whole numbers on the cache's device.

        Returns:
            [batch, vocabulary]: the logits of the next token; the next call writes them anew.

        Raises:
            ShapeError: tokens of another batch, or no room is left for them.
        """
        if tokens.shape != (self.cache.batch,):
            raise ShapeError(f"tokens are {list(tokens.shape)}: give [{self.cache.batch}]")
        if not self._room:
            longest = int(self.cache.seq_lens.max())  # waits, once in as many steps as fitted
            self._room = self.cache.max_seq_len - longest
            if not self._room:
                raise ShapeError(
                    f"a sequence has all {longest} tokens that there is room for: crop the cache, "
                    "or make a larger one"
                )
        self._room -= 1
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        return self._logits
