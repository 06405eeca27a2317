"""The kernel that exchanges the states of ranks: in numba's simulator, and on one GPU."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from in_simulator import SIMULATED, in_simulator

from kvquant.kernels.cuda.ranks.launch import Exchange
from kvquant.ops.merge import merge_states

if SIMULATED:
    from simulated_launches import simulated

pytestmark = pytest.mark.extra("cuda")
MOST_ROWS = 16
States = tuple[torch.Tensor, torch.Tensor]


def ranks_of(world: int, dim: int, device: str = "cpu") -> list[Exchange]:
    """Exchanges of ranks that share a device."""
    size = Exchange.memory_bytes(world, dim, MOST_ROWS)
    memory = torch.zeros(world, size, dtype=torch.uint8, device=device)
    addresses = [one.data_ptr() for one in memory]
    return [Exchange(one, addresses, i, dim, MOST_ROWS) for i, one in enumerate(memory)]


def states_of(world: int, rows: int, dim: int, dtype: torch.dtype, device: str) -> list[States]:
    """Of each rank, with rows that one rank has no tokens of, or all."""
    outs = torch.randn(world, rows, dim, device=device).to(dtype)
    lses = 5 * torch.randn(world, rows, device=device)
    lses[0, 1] = lses[:, 2] = -torch.inf
    outs[0, 1], outs[:, 2] = torch.nan, 0.0
    return list(zip(outs, lses, strict=True))


def check(found: list[States], states: list[States], dtype: torch.dtype) -> None:
    expected, lse = merge_states(*states)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for one in found:
        torch.testing.assert_close(one[0], expected, rtol=2.02 * rounding, atol=1e-6)
        torch.testing.assert_close(one[1], lse, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(x, y) for x, y in zip(one, found[0], strict=True))


def copies(states: list[States]) -> list[States]:
    return [(out.clone(), lse.clone()) for out, lse in states]


@in_simulator
def test_ranks_merge_what_all_have() -> None:
    merge_in_turn(64, torch.bfloat16)
    merge_in_turn(136, torch.float16)


def merge_in_turn(dim: int, dtype: torch.dtype) -> None:
    """The simulator runs a rank to its end, so that flags have to be there before it begins. A
    first round brings the states, a second one merges them."""
    torch.manual_seed(0)
    world, calls = 3, 3
    ranks = ranks_of(world, dim)
    for one in ranks:  # as of ranks that are a call ahead
        one.memory[: 4 * world * 4].view(torch.int32).fill_(calls + 1)
    for call in range(1, calls + 1):
        states = states_of(world, 7 + call, dim, dtype, "cpu")
        for _ in range(2):
            found = copies(states)
            for one, state in zip(ranks, found, strict=True):
                one._calls.fill_(call - 1)
                memories = [other.memory for other in ranks]
                with simulated(*state, one._peers, one._calls, memories, backwards=call == 2):
                    one.merge(*state)
                blocks = -(-len(state[1]) // 4)
                assert one._calls.tolist() == [call] * blocks + [call - 1] * (4 - blocks)
        check(found, states, dtype)
        for one in ranks:
            flags = one.memory[: 4 * world * 4].view(torch.int32).view(world, 4)
            assert (flags[:, :blocks] == call).all()
            flags.fill_(calls + 1)


def test_what_it_takes() -> None:
    (one,) = ranks_of(1, 64)
    assert one.takes(torch.empty(3, 4, 64, dtype=torch.bfloat16))
    for other in (
        torch.empty(3, 4, 64),
        torch.empty(17, 64, dtype=torch.bfloat16),
        torch.empty(0, 64, dtype=torch.bfloat16),
        torch.empty(64, 4, dtype=torch.bfloat16).T,
        torch.empty(3, 128, dtype=torch.bfloat16),
    ):
        assert not one.takes(other)


def test_a_copy_has_no_memory_that_ranks_write_to() -> None:
    assert copy.deepcopy(ranks_of(2, 64)) == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (80, torch.float16)])
def test_ranks_on_streams_of_one_gpu(dim: int, dtype: torch.dtype, captured: bool) -> None:
    """Kernels of two ranks wait for one another, many times; a rank is held up now and then."""
    torch.manual_seed(0)
    ranks, streams = ranks_of(2, dim, "cuda"), [torch.cuda.Stream() for _ in range(2)]
    rounds = [states_of(2, 12 - i % 5, dtype=dtype, dim=dim, device="cuda") for i in range(40)]
    found = [copies(states) for states in rounds]
    torch.cuda.synchronize()
    for one, state in zip(ranks, copies(rounds[0]), strict=True):
        one._prepare(state[0])  # a kernel that waits would let no other one be loaded
    graphs = [torch.cuda.CUDAGraph() for _ in ranks]
    for i, (one, stream, graph) in enumerate(zip(ranks, streams, graphs, strict=True)):
        with torch.cuda.graph(graph, stream=stream) if captured else nullcontext():
            with torch.cuda.stream(stream):
                for j, states in enumerate(found):
                    if j % 7 == 3 * i:
                        torch.cuda._sleep(200_000)
                    one.merge(*states[i])
    if captured:
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for merged, states in zip(found, rounds, strict=True):
        check(merged, states, dtype)
