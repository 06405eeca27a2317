"""A stand-in for every PTX instruction of ptx.py, with its exact meaning, for the simulator.

With NUMBA_ENABLE_CUDASIM=1, set before numba is imported, ptx.py takes its functions from
`stand_in` (stand_ins_of_kernels.py). It reads the PTX itself, so that the order of the operands is
tested, too:

    cvt.rn.f16x2.f32 $0,$1,$2;   ->   def instruction(r1, r2): r0 = step0(r1, r2); return r0

Registers hold numpy scalars, predicates bools. Lane = 4 g + t holds, of a 16-bit matrix, columns 2t
and 2t + 1 of row g; an MMA's operands are made of such 8x8 matrices (PTX ISA, m16n8k16).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from memory import SHARED_BASE, WARP, Fault
from simulator import block

KINDS = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "f32": np.float32}
NO_RESULT = (
    "st.",
    "cp.",
    "fence.",
    "bar.",
    "griddepcontrol.",
    "setmaxnreg.",
    "prefetch.",
)  # the first operand of all others is what they write
AS_PYTHON = str.maketrans("{}[]$", "()  r")  # braces hold tuples, brackets addresses

Name = re.Match[str]  # of an operation: the pattern's groups say what kind it is
Operation = Callable[..., Any]
OPERATIONS: dict[str, Callable[[Name], Operation]] = {}  # pattern -> maker
USED: set[str] = set()  # patterns that ptx.py needs


def stand_in(template: str, results: str, arguments: str) -> Operation:
    """The function that does what a PTX template does; arguments as of ptx.instruction."""
    kinds = results.split()
    scope: dict[str, Any] = {**KINDS, "cast": _cast}
    parameters, lines = [], []
    register = len(kinds)
    for word in arguments.split():
        kind, count = word[:3], int(word[4:] or 1)
        names = [f"r{register + i}" for i in range(count)]
        parameters.append(names[0] if count == 1 else f"tuple{register}")
        if count > 1:
            lines.append(f"{', '.join(names)} = tuple{register}")
        lines += [f"if type({name}) is not {kind}: {name} = cast({name}, {kind})" for name in names]
        register += count
    for step, statement in enumerate(re.sub(r"^\{|\}$", "", template).split(";")):
        name, _, text = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        written, operands = _split(name, text.translate(AS_PYTHON).replace(" ", ""))
        unpacks = name == "mov.b32" and written.startswith("(")
        scope[f"step{step}"] = _find(f"{name} unpack" if unpacks else name)
        lines.append(f"{written}{' = ' * bool(written)}step{step}({operands})")
    for i, kind in enumerate(kinds):
        lines.append(f"if type(r{i}) is not {kind}: r{i} = r{i}.view({kind})")
    lines.append(f"return {', '.join(f'r{i}' for i in range(len(kinds)))}")
    exec("\n    ".join([f"def instruction({', '.join(parameters)}):", *lines]), scope)
    made: Operation = scope["instruction"]
    return made


def shared_address(array: npt.NDArray[Any]) -> np.uint32:
    """The address of dynamic shared memory, for the instructions."""
    memory = block().shared.bytes
    offset = array.ctypes.data - memory.ctypes.data
    if not 0 <= offset <= len(memory):
        raise Fault("shared_address takes dynamic shared memory: cuda.shared.array(0, ...)")
    return np.uint32(SHARED_BASE + offset)


def operation(pattern: str) -> Callable[[Callable[[Name], Operation]], Callable[[Name], Operation]]:
    """Register the maker of the operations whose whole names match."""

    def register(make: Callable[[Name], Operation]) -> Callable[[Name], Operation]:
        OPERATIONS[pattern] = make
        return make

    return register


def _split(name: str, operands: str) -> tuple[str, str]:
    """What an operation writes, and what it reads."""
    if name.startswith(NO_RESULT):
        return "", operands
    match = re.fullmatch(r"(\(.*?\)|[\w|]+),(.*)", operands)
    assert match, f"{name} {operands} writes nothing"
    return match[1].replace("|", ", "), match[2]  # p|q: two predicates


def _find(name: str) -> Operation:
    for pattern, make in OPERATIONS.items():
        match = re.fullmatch(pattern, name)
        if match:
            USED.add(pattern)
            return make(match)
    raise NotImplementedError(
        f"{name} has no stand-in: write one in tests/simulator/instructions.py"
    )


def _cast(value: Any, dtype: Any) -> Any:
    return np.asarray(value).astype(dtype)[()]


@operation(
    r"ld\.(?:acquire\.sys\.)?(shared|global)(?:\.(nc|cg))?(?:\.v([24]))?\.(u8|u16|u32|u64|f32)"
)
def _load(name: Name) -> Operation:
    space, cache, count, kind = name.groups()
    dtype = np.dtype(KINDS[kind])
    size = dtype.itemsize * int(count or 1)

    def load(address: Any) -> Any:
        now = block()
        if space == "shared":
            values = now.shared.load(now.current.number, address, size).view(dtype)
        else:
            data = now.tensors.load(address, size, size, constant=cache == "nc")
            values = np.frombuffer(data, dtype)
        if kind == "u8":  # into a register of 32 bits
            return np.uint32(values[0])
        return tuple(values) if count else values[0]

    return load


@operation(r"st\.(?:release\.sys\.)?(shared|global)(?:\.v[24])?\.(?:u16|u32|f32)")
def _store(name: Name) -> Operation:
    def store(address: Any, values: Any) -> Any:
        now = block()
        data = b"".join(values if isinstance(values, tuple) else (values,))
        if name[1] == "shared":
            now.shared.store(now.current.number, address, data)
        else:
            now.tensors.store(address, data)

    return store


@operation(r"cp\.async\.(ca|cg)\.shared\.global")
def _copy(name: Name) -> Operation:
    constant = name[1] == "ca"  # "cg" reads from L2, which has what other blocks have written

    def copy(target: int, source: int, size: int, valid: int | None = None) -> None:
        block().start_copy(target, source, size, valid, constant=constant)

    return copy


@operation(r"prefetch\.global\.L2")
def _prefetch(name: Name) -> Operation:
    return lambda address: block().tensors.load(address, 1, 1, constant=False) and None


@operation(r"cp\.async\.commit_group")
def _commit(name: Name) -> Operation:
    return lambda: block().commit_copies()


@operation(r"cp\.async\.wait_group")
def _wait(name: Name) -> Operation:
    return lambda pending: block().wait_copies(pending)


@operation(r"ldmatrix\.sync\.aligned\.m8n8\.x([24])(\.trans)?\.shared\.b16")
def _load_matrix(name: Name) -> Operation:
    count, transposed = int(name[1]), name[2]

    def combine(addresses: Any) -> Any:
        now = block()
        rows = now.shared.load_rows(now.current.warp, addresses[: 8 * count])
        matrices = rows.view(np.uint16).reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1).copy()
        return zip(*matrices.view(np.uint32).reshape(count, WARP), strict=True)

    return lambda address: block().meet(name.string, address, combine)


@operation(r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16")
def _transpose_matrix(name: Name) -> Operation:
    def combine(words: Any) -> Any:
        matrix = np.array(words, np.uint32).view(np.uint16).reshape(8, 8)
        return matrix.T.copy().view(np.uint32).reshape(WARP)

    return lambda word: block().meet(name.string, word, combine)


@operation(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32")
def _mma(name: Name) -> Operation:
    def numbers(words: Any) -> Any:
        halves = np.array(words, np.uint32).view(np.uint16)
        if name[1] == "f16":
            return halves.view(np.float16).astype(np.float64)
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def combine(operands: Any) -> Any:
        words_a, words_b, sums = zip(*operands, strict=True)
        # lanes x registers = [g, t, half of k, half of m, column] -> [m, k]
        a = numbers(words_a).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
        b = numbers(words_b).reshape(8, 4, 2, 2).transpose(2, 1, 3, 0).reshape(16, 8)
        c = np.array(sums).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
        d = (a @ b + c).astype(np.float32)
        return map(tuple, d.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4))

    return lambda a, b, c: block().meet(name.string, (a, b, c), combine)


@operation(r"shfl\.sync\.(bfly|idx)\.b32")
def _shuffle(name: Name) -> Operation:
    def combine(given: Any) -> Any:
        if name[1] == "bfly":
            return [given[i ^ (int(lane) & 31)][0] for i, (_, lane, _) in enumerate(given)]
        return [given[i & own | int(lane) & 31][0] for i, (_, lane, own) in enumerate(given)]

    def shuffle(value: Any, lane: Any, clamp: Any, members: Any) -> Any:
        own = int(clamp) >> 8  # bits of a lane that stay: only a part of a warp takes part
        _require_all(members, clamp - (own << 8))
        return block().meet(name.string, (value, lane, own), combine)

    return shuffle


@operation(r"vote\.sync\.any\.pred")
def _any(name: Name) -> Operation:
    def vote(predicate: Any, members: Any) -> Any:
        _require_all(members)
        return block().meet(name.string, predicate, lambda given: [any(given)] * WARP)

    return vote


@operation(r"redux\.sync\.(max|add)\.u32")
def _reduce(name: Name) -> Operation:
    combine = max if name[1] == "max" else sum

    def reduce(word: Any, members: Any) -> Any:
        _require_all(members)
        return block().meet(name.string, word, lambda given: [np.uint32(combine(given))] * WARP)

    return reduce


def _require_all(members: int, clamp: int = 0x1F) -> None:
    if members != 0xFFFFFFFF or clamp != 0x1F:
        raise Fault(f"members {members:#x}, clamp {clamp:#x}: only whole warps are simulated")


@operation(r"vote\.sync\.ballot\.b32")
def _ballot(name: Name) -> Operation:
    def vote(predicate: Any, members: Any) -> Any:
        _require_all(members)
        return block().meet(name.string, predicate, combine)

    def combine(given: Any) -> Any:
        return [np.uint32(sum(1 << lane for lane in range(WARP) if given[lane]))] * WARP

    return vote


@operation(r"atom\.global\.(inc|add|min)\.u32")
def _atomic(name: Name) -> Operation:
    def increment(before: Any, last: Any) -> Any:
        return np.uint32(0 if before >= last else before + 1)

    changes: dict[str, Callable[[Any, Any], Any]] = {"add": operator.add, "min": min}
    change = changes.get(name[1], increment)

    def update(address: Any, operand: Any) -> Any:
        tensors = block().tensors
        before = np.frombuffer(tensors.load(address, 4, 4, constant=False), np.uint32)[0]
        tensors.store(address, change(before, operand).tobytes())
        return before

    return update


@operation(r"fence\.acq_rel\.(?:gpu|sys)")
def _fence(name: Name) -> Operation:
    return lambda: None


@operation(r"fence\.proxy\.async\.shared::cta")
def _fence_shared(name: Name) -> Operation:
    def fence_shared() -> None:
        now = block()
        now.shared.fence(now.current.number)

    return fence_shared


@operation(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32")
def _set_registers(name: Name) -> Operation:
    return lambda count: block().meet(name.string, None, lambda given: given)


@operation(r"bar\.(sync|arrive)")
def _barrier(name: Name) -> Operation:
    if name[1] == "arrive":
        return lambda barrier, threads: block().arrive(barrier, threads)
    return lambda barrier, threads: block().meet_warps(barrier, threads)


@operation(r"griddepcontrol\.(?:wait|launch_dependents)")
def _depend(name: Name) -> Operation:
    return lambda: None  # launches run one after another here


@operation(r"mov\.b32")
def _move(name: Name) -> Operation:
    return lambda bits: bits


@operation(r"mov\.b32 unpack")
def _unpack(name: Name) -> Operation:
    return lambda word: (np.uint16(word & 0xFFFF), np.uint16(word >> 16))


@operation(r"(shl|and)\.b32")
def _bits(name: Name) -> Operation:
    return operator.lshift if name[1] == "shl" else operator.and_


@operation(r"prmt\.b32")
def _permute(name: Name) -> Operation:
    def permute(low: Any, high: Any, choice: Any) -> Any:
        given = int(low) | int(high) << 32
        chosen = [int(choice) >> 4 * i & 0xF for i in range(4)]
        if max(chosen) > 7:
            raise Fault(f"prmt with {choice:#x}: signs are not simulated")
        return np.uint32(sum((given >> 8 * one & 0xFF) << 8 * i for i, one in enumerate(chosen)))

    return permute


@operation(r"lop3\.b32")
def _logic(name: Name) -> Operation:
    def logic(a: Any, b: Any, c: Any, table: int) -> Any:
        a, b, c, result = int(a), int(b), int(c), 0
        for row in range(8):  # of the table, by a bit of a, of b and of c
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return np.uint32(result & 0xFFFFFFFF)

    return logic


@operation(r"setp\.ne\.u32")
def _differ(name: Name) -> Operation:
    return lambda x, y: bool(x != y)


@operation(r"or\.pred")
def _or(name: Name) -> Operation:
    return operator.or_


@operation(r"selp\.u32")
def _select(name: Name) -> Operation:
    return lambda yes, no, predicate: np.uint32(yes if predicate else no)
