"""CapturedStep: a decode step of a whole model as one CUDA graph.

From Python a layer's step takes the host longer than the GPU. One launch of a graph serves all
layers, and every step: the kernels read lengths on the device.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ...cache.contiguous import KVCache
from ...errors import ConfigError, DeviceError, KVQuantError, ShapeError, UnsupportedModelError
from ...rows.arguments import check_flag

Call = Callable[[Any, torch.Tensor, list[int]], torch.Tensor]
_one_at_a_time = threading.Lock()
_WITHOUT = "Leave compile=True out: the graph then has the model's own kernels"
_CLEAR = KVQuantError, torch.OutOfMemoryError  # say what has happened themselves
# torch before 2.8 has it under another name
_ENDINGS = "_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"
_failed: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory still asks them


class _TakeBack(Exception):
    """Raised inside KVCache.attempt, so that attempt drops the tokens that a call has appended."""


class CapturedStep:
    """CachedModel.step for one cache, as a CUDA graph.

    You may crop, reorder, reset, prefill and step the cache from Python between steps. A step reads
    nothing on the host unless others have changed the cache: call cache.check() at times, which
    raises for NaN.

    Threads may make steps at the same time: one waits for another. Meanwhile other threads may run
    models, but not use this cache, capture graphs in other ways, or wait for the whole GPU
    (torch.cuda.synchronize), which CUDA refuses then.

    Args:
        model: a CachedModel on CUDA.
        cache: of the model; its tensors are part of the graph.
        compile: compile the step with torch.compile before the capture, which fuses small kernels
            (norms, rotary embeddings, activations). It needs Triton and a C compiler, and takes a
            minute or more for a model, and for each further batch, max_seq_len or format. To
            compile, CapturedStep decodes one token in the cache twice, and crops the token each
            time.

    Raises:
        ConfigError: compile is no bool.
        DeviceError: the cache is not on CUDA, or on several devices.
        ShapeError: with compile, a sequence has no room for a token.
        UnsupportedModelError: the model is spread over ranks (tp_plan), reads positions on the host
            in each step, has fewer positions than the cache has room for, or waits for the GPU in
            its forward pass, as hooks do that bring weights to the GPU. With compile, also: torch
            cannot compile the model's step. The cache holds the same tokens as before.

    Example:
        >>> import torch
        >>> from kvquant import CachedModel, CapturedStep
        >>> from kvquant.cli.demo import MODEL  # a folder with a model
        >>> if torch.cuda.is_available():
        ...     model = CachedModel.from_pretrained(MODEL, dtype=torch.bfloat16, device="cuda")
        ...     cache = model.new_cache(batch=1, max_seq_len=128)
        ...     logits = model.prefill(cache, torch.tensor([model.encode("The city of Manila")]))
        ...     step = CapturedStep(model, cache)
        ...     for _ in range(100):
        ...         logits = step(logits.argmax(-1))
        ...     cache.check()
    """

    @torch.inference_mode(False)  # else the tokens could not be changed outside
    def __init__(self, model: Any, cache: KVCache, *, compile: bool = False) -> None:
        from ...kernels.cuda.runtime.workspace import Lease

        check_flag("compile", compile)
        _check(model, cache)
        self.cache = cache
        # the graph reads all of these in each step, so they must live as long as it
        self._model, self._layers, self._lease = model, list(cache.layers), Lease()
        self._past = model.past_of(cache)
        if compile and (why := model.not_compiled(self._past)):
            raise UnsupportedModelError(f"this model's step cannot be compiled: {why}. {_WITHOUT}")
        self._folded = model.read_in_bases(cache)
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.device)
        self._room, self._changes = 0, cache.changes  # steps that surely fit, if none came between
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(cache.device)  # of the cache's GPU, which may not be the current
        longest = [layer.longest for layer in self._layers]
        try:
            with _one_at_a_time, self._lease, torch.cuda.device(cache.device):
                side.wait_stream(torch.cuda.current_stream())
                try:
                    with torch.cuda.stream(side):  # libraries make themselves ready: not in a graph
                        if compile:
                            call = _compiled(model, cache, self._past, self._tokens)
                        else:
                            call = model.call
                            model.plain(self._tokens)
                finally:  # where it failed, too: the cache is cropped there
                    torch.cuda.current_stream().wait_stream(side)
                with _captured(self._graph, side):
                    self._logits = call(self._past, self._tokens, [0])[:, 0]
        finally:  # nothing has run yet
            for layer, known in zip(self._layers, longest, strict=True):
                layer.longest = known

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Decode one token of each sequence.

        Args:
            tokens: [batch], whole numbers on the cache's device.

        Returns:
            [batch, vocabulary]: the logits of the next token; the next call overwrites them.

        Raises:
            ShapeError: tokens of another batch, or no room is left for them.
            ConfigError: tokens are no ids, the cache has grown and so moved, or weights that hold
                its bases have changed (latent rows with a plan).
        """
        cache = self.cache
        self._model.check_tokens(tokens, (cache.batch,))
        if any(now is not then for now, then in zip(cache.layers, self._layers, strict=True)):
            raise ConfigError(
                "the cache has grown, or got other sequences, since its step was captured: capture "
                "it again"
            )
        if not all(one is None or one.is_current for one in self._folded):
            raise ConfigError(
                "weights of the model have changed since its step was captured, and it reads "
                "others that were made of them: capture it again"
            )
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
        for layer in self._layers:
            if layer.longest is not None:  # no other graph appends: steps from Python need no read
                layer.longest += 1
        self._tokens.copy_(tokens[:, None])
        self._graph.replay()
        return self._logits


def _check(model: Any, cache: KVCache) -> None:
    """Raise unless a step of the model with the cache can be captured, as far as is known."""
    if cache.device.type != "cuda":
        raise DeviceError(f"the cache is on {cache.device}: a step is captured on CUDA only")
    if cache.is_spread:
        raise DeviceError("the cache lies on several devices: a step is captured on one GPU only")
    if why := model.not_captured(cache):
        raise UnsupportedModelError(f"this model's step cannot be captured: {why}")


def _compiled(model: Any, cache: KVCache, past: Any, tokens: torch.Tensor) -> Call:
    """Compile a model's call for steps of one token; the cache keeps the same tokens."""
    call: Call = model.compiled()
    _try(cache, model.call, past, tokens)  # it checks layers and makes masks: a graph cannot
    try:
        _try(cache, call, past, tokens)
    except _CLEAR:
        raise
    except Exception as error:  # the first call would have raised the model's own
        why = " ".join(" ".join(str(error).split("\n")[:2]).split()).rstrip(" .")
        raise UnsupportedModelError(
            f"this model's step cannot be compiled: {type(error).__name__}: {why}. {_WITHOUT}. "
            "Inductor needs Triton and a C compiler; if torch has compiled steps for many other "
            "caches before, call torch.compiler.reset()"
        ) from error
    return call


def _try(cache: KVCache, call: Call, past: Any, tokens: torch.Tensor) -> None:
    """Make a step, and drop the tokens that it has appended."""
    with suppress(_TakeBack), cache.attempt(1):
        call(past, tokens, [0])
        raise _TakeBack


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream) -> Iterator[None]:
    """Capture what the block launches on the current GPU."""
    before, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    first: BaseException | None = None
    try:
        # other threads may allocate memory and wait for their own streams meanwhile
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=mode):
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        # where CUDA has ended the capture torch raises before it has set these back
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # it has
            end = next(found for name in _ENDINGS if (found := getattr(torch._C, name, None)))
            end(before.device_index, pool)  # no memory comes from the graph's pool any more
            torch._C._cuda_releasePool(before.device_index, pool)
            _failed.append(graph)
        first = first or error
        if not isinstance(first, RuntimeError) or isinstance(first, _CLEAR):
            raise first from first.__cause__  # what CUDA raised after it tells nothing
        why = str(first).partition("\n")[0]
        raise UnsupportedModelError(
            f"this model's step cannot be captured: {why}. If its forward pass waits for the GPU "
            "(weights that are brought there, experts that are chosen on the host), decode from "
            "Python by CachedModel.generate or CachedModel.step, or give model.generate a "
            "QuantizedCache(model, max_seq_len=...)"
        ) from first
