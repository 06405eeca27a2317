"""Pages offloaded to memory of the host where there is no GPU: vLLM's own worker asks for one."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies whole pages at once, one page an offloaded block."""

    def __init__(self, caches: Any, num_blocks: int) -> None:
        self.pages = [one.tensor for one in caches.tensors]
        self.host = [torch.zeros_like(one[:1]).repeat(num_blocks, 1) for one in self.pages]
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, host in zip(self.pages, self.host, strict=True):
            host[dst_spec.block_ids] = pages[src_spec.block_ids]
        return self._done(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, host in zip(self.pages, self.host, strict=True):
            pages[dst_spec.block_ids] = host[src_spec.block_ids]
        return self._done(job_id)

    def _done(self, job_id: int) -> bool:
        self.done.append(TransferResult(job_id, True, 1, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass


class HostSpec(CPUOffloadingSpec):
    """What "spec_name" of OffloadingConnector asks for."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        self._worker: OffloadingWorker = self._worker or HostWorker(kv_caches, self.num_chunks)
        return self._worker
