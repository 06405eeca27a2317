"""Files that somebody forged, with checksums that fit: each is refused by name, nobody comes to
another's rows, and what is accepted hangs together. Plans are in test_plan.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import latent_pages
import paged_cases
import pytest
import torch
from forged import GONE, forge, put, write
from invariants import check_invariants
from paged_cases import values
from slow_cases import mark_slow

from kvquant import KVCache, LatentKVCache, LatentPagedBatch, load_cache, load_sequences, save_cache
from kvquant.errors import CheckpointError, OutOfPagesError
from kvquant.io.sequences import save_sequences
from kvquant.ops.quantize import quantize_rows
from kvquant.paged.batch import PagedBatch
from kvquant.paged.cache import PagedKVCache
from kvquant.paged.pool import Arrival
from kvquant.rows.format import RowFormat

HUGE, ZEROS = 2**31 - 1, "0" * 64
Refused = tuple[str, Any, str]  # the place in the manifest, the value there, the message

OF_ALL: list[Refused] = [
    ("format", "x", "has no format of kvquant, but 'x'"),
    ("format", 3, "has no format of kvquant, but 3"),
    ("format", "kvquant.plan", "this is a plan, not a cache: CachePlan.load"),
    ("version", 2, "the file has version 2, this kvquant reads 1"),
    ("version", True, "the file has version True"),
    ("version", GONE, "the file has version None"),
    ("more", 1, "another key or lacks one: object contains unknown field more"),
    ("model", GONE, "lacks one: object missing required field model"),
    ("model", 3, "model is 3"),
    ("transforms", [{"rotate": 1}], "transforms[0] has another key"),
    ("transforms", [1], "transforms[0] is 1"),
    ("transforms", [dict.fromkeys("kv", ZEROS)], "1 transforms for 2 layers"),
    ("num_kv_heads", 0, "num_kv_heads is 0"),
    ("num_kv_heads", HUGE, "it must be torch.uint8"),
    ("recent_len", True, "recent_len is True"),
    ("exact_format", "x", "exact_format is 'x'"),
    ("layers", 3, "layers is 3: it must be array, got int"),
    ("layers", [], "layers is []: it must be array of length >= 1"),
    ("layers", [{}] * 4097, "length <= 4096"),
    ("layers.0.k.format", "int6", "layers[0].k"),
    ("layers.1.v.head_dim", 128, "it must be torch.uint8"),
    ("creation", {"a": [[]] * (1 << 20)}, "more than 1048576 lists"),
    ("sha256.layers/1/k_x", ZEROS, "'layers.1.k_x' is missing"),
    ("sha256.layers/1/k_x", "x", "must be 64 hexadecimal digits"),
    ("sha256", {}, "should not be there"),
    ("sha256", None, "sha256 is None"),
]
OF_CACHES: list[Refused] = [
    ("max_seq_len", HUGE, "GiB, more than there is"),
    ("max_seq_len", 2**40, "must be int <= 2147483647"),
    ("max_seq_len", 20, "23 tokens, max_seq_len is 20"),
    ("seq_lens", [24, 9], "do not fit"),
    ("seq_lens", [], "seq_lens is []: it must be array of length >= 1"),
    ("seq_lens", [0] * (1 + (1 << 20)), "length <= 1048576"),
    ("seq_lens.0", -1, "seq_lens[0] is -1: it must be int >= 0"),
    ("layers.0.packed_lens.0", 2, "packed_lens has 2"),
    ("layers.0.window", 0, "layers[0].window is 0"),
    ("layers.0.window", True, "layers[0].window is True"),
    ("layers.0.window", "12", "layers[0].window is '12'"),
    ("layers.0.window", 1.5, "layers[0].window is 1.5"),
    ("sha256.layers/0/k_packed", ZEROS, "tensor 'layers.0.k_packed' is damaged"),
]
OF_SEQUENCES: list[Refused] = [
    ("page_size", 17, "page_size is 17"),
    ("page_size", 0, "page_size is 0"),
    ("windows", [8], "1 windows for 2 layers"),
    ("sequences", [], "sequences is []: it must be array of length >= 1"),
    ("sequences.0.namespace", "x", "cannot share page 0"),
    ("sequences.0.namespace", 3, "sequences[0].namespace is 3: it must be str | null, got int"),
    ("sequences.0.id", "b", "two sequences have one id"),
    ("sequences.0.id", 1.5, "sequences[0].id is 1.5"),
    ("sequences.0.length", -1, "sequences[0].length is -1"),
    ("sequences.0.length", 9, "length 9, packed_len 52"),
    ("sequences.0.packed_len", 40, "packed_len 40"),
    ("sequences.0.pages", [0, 1, 2], "3 pages and 60 tokens do not fit"),
    ("sequences.0.pages", [0, 1, 2, 9], "not counted from 0 without gaps"),
    ("sequences.0.pages", [0, 1, 2, 0], "sequences[0] cannot share page 0"),
    ("sequences.0.pages", [0, 5, 2, 3], "sequences[1] cannot share page 2"),
    ("sequences.0.pages.0", -1, "sequences[0].pages[0] is -1"),
    ("sequences.0.tokens", list(range(61)), "4 pages and 61 tokens do not fit"),
    ("sequences.0.tokens", [0.5], "sequences[0].tokens[0] is 0.5: it must be int, got float"),
    ("sequences.0.tokens", [2**63], "sequences[0].tokens[0]"),
    ("sequences.0.tokens", [1, *range(1, 60)], "sequences[1] cannot share page 0"),
    ("sequences.0.tokens", [*range(30), 0], "sequences[1] cannot share page 1"),
    ("sha256.layers/0/k_pages", ZEROS, "tensor 'layers.0.k_pages' is damaged"),
]
OF_LATENTS: list[Refused] = [
    ("num_kv_heads", 2, "latent rows are of one size, and of one KV head"),
    ("layers.1.k.head_dim", 64, "formats that no cache has: latent has 64 elements"),
    ("latent", GONE, "formats that no cache has: head_dim 32 is that of"),
]
OF_LATENT_CACHES: list[Refused] = [
    ("head_dim", 64, "head_dim is 64: that of latent rows is"),
    ("layers.0.window", 96, "latent rows have no windows"),
]
OF_LATENT_SEQUENCES: list[Refused] = [("windows", [8, 8], "latent rows have no windows")]


def sequences(batch: PagedBatch | LatentPagedBatch, path: Path) -> Path:
    """Save "a" of 60 tokens and a fork that went on."""
    paged_cases.begin(batch, "a", 60, range(60))
    batch.cache.fork("a", "b")
    paged_cases.extend(batch, ["b"], 9, range(9))
    return save_sequences(batch.cache, ["a", "b"], path)


def refuse(path: Path, case: Refused, load: Any) -> None:
    place, value, message = case
    forge(path, lambda top, _: put(place, value, top), digests=False)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert message in str(caught.value) and str(caught.value).startswith(str(path))


@pytest.mark.parametrize("case", OF_ALL + OF_CACHES)
def test_forged_caches_are_refused(case: Refused, tmp_path: Path) -> None:
    options: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4", "sink_len": 2}
    cache = KVCache(2, 2, 2, 64, 40, recent_len=6, **options)
    for layer in range(2):
        k, v = torch.randn(2, 2, 2, 23, 64)
        cache.append(layer, k, v, [23, 9])
    refuse(save_cache(cache, tmp_path / "x.safetensors"), case, load_cache)


@pytest.mark.parametrize("case", OF_ALL + OF_SEQUENCES)
def test_forged_sequences_are_refused(case: Refused, tmp_path: Path) -> None:
    path = sequences(PagedBatch(paged_cases.make(), 4, 100), tmp_path / "x.safetensors")
    cache = paged_cases.make()
    refuse(path, case, lambda path: load_sequences(cache, path))
    assert (cache.ids, cache.num_free_pages) == ([], 12)


@pytest.mark.parametrize("case", OF_LATENTS + OF_LATENT_CACHES)
def test_forged_caches_of_latent_rows_are_refused(case: Refused, tmp_path: Path) -> None:
    cache = LatentKVCache(2, 1, 100, fmt="int8", latent_dim=512, rope_dim=32)
    for layer in range(2):
        cache.append(layer, torch.randn(1, 1, 60, 512), torch.randn(1, 1, 60, 32))
    refuse(save_cache(cache, tmp_path / "x.safetensors"), case, load_cache)


@pytest.mark.parametrize("case", OF_LATENTS + OF_LATENT_SEQUENCES)
def test_forged_sequences_of_latent_rows_are_refused(case: Refused, tmp_path: Path) -> None:
    path = sequences(LatentPagedBatch(latent_pages.make(), 4, 100), tmp_path / "x.safetensors")
    cache = latent_pages.make()
    refuse(path, case, lambda path: load_sequences(cache, path))
    assert cache.ids == []


PAGE, DIM = 16, 64
INT8, BF16 = (RowFormat.parse(name, DIM) for name in ("int8", "bf16"))


def make(sinks: int = 0, recent: int = 0, **options: Any) -> PagedKVCache:
    sizes = {"num_pages": 8, "max_num_seqs": 6, "max_seq_len": 64, **options}
    lens: dict[str, Any] = {"sink_len": sinks, "recent_len": recent, "page_size": PAGE}
    return PagedKVCache(1, 1, DIM, k_format="int8", v_format="int8", **sizes, **lens)


def sequence(
    name: int | str, length: int, pages: Sequence[int], tokens: Sequence[int] = (), packed: int = -1
) -> dict[str, Any]:
    lens = {"length": length, "packed_len": length if packed < 0 else packed}
    return {"id": name, **lens, "pages": list(pages), "tokens": list(tokens)}


def shared(path: Path, sequences: list[dict[str, Any]], sinks: int = 0, recent: int = 0) -> Path:
    """Write a file whose page n holds the value n in all rows, and its 16-bit rows 100."""
    pages = len({page for one in sequences for page in one["pages"]})
    exact = sum(max(one["length"] - one["packed_len"], 0) for one in sequences)
    of_pages = torch.arange(pages).float()[:, None, None, None].expand(pages, 1, PAGE, DIM)
    tensors = {}
    for side in "kv":
        tensors[f"layers.0.{side}_pages"] = quantize_rows(of_pages, INT8)
        tensors[f"layers.0.{side}_exact"] = quantize_rows(torch.full((exact, 1, DIM), 100.0), BF16)
    top: dict[str, Any] = {"format": "kvquant.sequences", "version": 1, "writer": "x"}
    top |= {"num_kv_heads": 1, "model": None, "creation": {}, "transforms": []}
    top |= {"page_size": PAGE, "sink_len": sinks, "recent_len": recent, "exact_format": "bf16"}
    top |= {"layers": [{side: {"format": "int8", "head_dim": DIM} for side in "kv"}]}
    top["sequences"] = sequences
    write(path, top, {name: rows for name, rows in tensors.items() if rows.numel()})
    return path


ONES, TWOS, SEVENS = [1] * PAGE, [2] * PAGE, [7] * 8
REFUSED: dict[str, list[dict[str, Any]]] = {
    "the first knows no tokens": [
        sequence(0, 16, [0]),
        sequence(1, 16, [0], ONES),
        sequence(2, 16, [0], TWOS),
    ],
    "the first is shorter": [
        sequence(0, 8, [0], SEVENS),
        sequence(1, 16, [0], [*SEVENS, *ONES[:8]]),
        sequence(2, 16, [0], [*SEVENS, *TWOS[:8]]),
    ],
    "the first knows less": [
        sequence(0, 16, [0], SEVENS[:3]),
        sequence(1, 16, [0], [*SEVENS, *ONES[:8]]),
        sequence(2, 16, [0], [*SEVENS, *TWOS[:8]]),
    ],
    "the longest comes first": [
        sequence(0, 32, [0, 1], [*ONES, *ONES]),
        sequence(1, 20, [0, 1], ONES),
        sequence(2, 24, [0, 1], [*ONES, *TWOS[:8]]),
    ],
    "in other places": [sequence(0, 32, [0, 1]), sequence(1, 32, [1, 0])],
    "after other pages": [sequence(0, 32, [0, 1]), sequence(1, 32, [2, 1])],
    "as the first page": [sequence(0, 32, [0, 1], ONES * 2), sequence(1, 16, [1], ONES)],
    "one page twice, later": [sequence(0, 48, [0, 1, 0])],
    "a page of an empty sequence": [sequence(0, 0, [0])],
    "more packed tokens than tokens": [sequence(0, 16, [0], packed=17)],
    "less packed tokens than there must be": [sequence(0, 16, [], packed=0)],
    "longer than the cache takes": [sequence(0, 80, range(5))],
}


@pytest.mark.parametrize("name", REFUSED)
def test_pages_are_shared_only_by_sequences_that_agree(name: str, tmp_path: Path) -> None:
    cache = make()
    with pytest.raises(CheckpointError):
        load_sequences(cache, shared(tmp_path / "x.safetensors", REFUSED[name]))
    assert (cache.ids, cache.num_free_pages, cache.num_free_seq_slots) == ([], 8, 6)
    check_invariants(cache)


def test_an_id_that_no_cache_takes_is_told_of_the_file(tmp_path: Path) -> None:
    for number in (-(2**1024), 2**1024):
        path = shared(tmp_path / "x.safetensors", [sequence(number, 4, [0])])
        with pytest.raises(CheckpointError, match=r"x.safetensors: .*\[0\].id has 1025 bits: 1024"):
            load_sequences(make(), path)
    shared(path, [sequence(2**1024 - 1, 4, [0])])
    assert load_sequences(make(), path) == [2**1024 - 1]


def test_first_tokens_that_differ_are_not_shared(tmp_path: Path) -> None:
    """Sinks stand in no page, but the rows behind them were computed with them."""
    both = [sequence(i, 18, [0], [i + 1, 9, *ONES], packed=16) for i in (0, 1)]
    cache = make(sinks=2)
    with pytest.raises(CheckpointError, match=r"sequences\[1\] cannot share page 0"):
        load_sequences(cache, shared(tmp_path / "x.safetensors", both, sinks=2))


@pytest.mark.parametrize("name", [None, "two", ""], ids=repr)
def test_two_namespaces_share_no_page(name: str | None, tmp_path: Path) -> None:
    cache = make()
    cache.allocate("a", namespace="one")
    batch = PagedBatch(cache, 1, 20)
    with batch.extend(["a"], 16, ONES):
        batch.append(0, *torch.zeros(2, 16, 1, DIM).bfloat16())
    cache.fork("a", "b")
    path = save_sequences(cache, ["a", "b"], tmp_path / "x.safetensors")
    forge(path, lambda top, _: top["sequences"][1].update(namespace=name))
    with pytest.raises(CheckpointError, match=r"sequences\[1\] cannot share page 0"):
        load_sequences(make(), path)


def test_a_page_keeps_its_name_when_another_is_wanted_for_it() -> None:
    """Were a file to come through, the pool would not be led astray."""
    cache = make()
    cache.state.place(
        {"a": Arrival(16, 16, [0], ONES, None, []), "b": Arrival(16, 16, [0], TWOS, None, [])}
    )
    cache.insert_prefixes(["a", "b"])
    check_invariants(cache)
    assert cache.match_prefix([*ONES, 0]) == PAGE and cache.match_prefix([*TWOS, 0]) == 0
    cache.free("a")
    check_invariants(cache)
    cache.free("b")
    check_invariants(cache)


def tenant(cache: PagedKVCache, batch: PagedBatch, name: str, count: int) -> None:
    """A sequence of rows with the value 42 and tokens that nobody else has."""
    tokens = [ord(name[0])] * count
    assert cache.allocate(name, tokens) == 0
    with batch.extend([name], count, tokens):
        batch.append(0, *torch.full((2, count, 1, DIM), 42.0).bfloat16())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_loaded_nobody_comes_to_rows_of_others(seed: int, tmp_path: Path) -> None:
    """Random files; those that are taken are used, and end, and others come to their pages."""
    draw, taken = random.Random(seed), 0
    for number in range(60):
        sinks, recent = draw.choice([(0, 0), (2, 0), (0, 5), (2, 5)])
        sequences: list[dict[str, Any]] = []
        for name in range(draw.randrange(1, 5)):
            length = draw.choice([0, 1, 8, 16, 17, 18, 24, 32, 40])
            most = max(length - sinks, 0)
            packed = draw.randint(max(most - recent, 0), most)
            count = -(-packed // PAGE)
            like = draw.choice(sequences)["pages"] if sequences and draw.random() < 0.8 else []
            new = 1 + max((page for one in sequences for page in one["pages"]), default=-1)
            pages = (like[: draw.randrange(4)] + list(range(new, new + count)))[:count]
            if draw.random() < 0.1:
                draw.shuffle(pages)
            tokens = [draw.choice([1, 1, 1, 2])] * draw.randrange(20)
            tokens = (tokens + [3] * draw.randrange(30))[: draw.randint(0, length)]
            sequences.append(sequence(name, length, pages, tokens, packed))
        path = shared(tmp_path / f"{number}.safetensors", sequences, sinks, recent)
        cache = make(sinks, recent)
        batch = PagedBatch(cache, 6, 200)
        try:
            load_sequences(cache, path)
        except (CheckpointError, OutOfPagesError):
            assert cache.ids == []
            continue
        taken += 1
        check_invariants(cache)
        found = [cache.match_prefix([*one["tokens"], 9]) for one in sequences]
        for one, present in zip(sequences, found, strict=True):
            full = sinks + one["packed_len"] // PAGE * PAGE
            known = sinks + (len(one["tokens"]) - sinks) // PAGE * PAGE
            assert present in (0, min(full, known)), "its own pages are found, or nothing"
            if cache.can_append([one["id"]]):
                with batch.extend([one["id"]], 1):
                    batch.append(0, *torch.full((2, 1, 1, DIM), 5.0).bfloat16())
            check_invariants(cache)
        draw.shuffle(sequences)
        for one in sequences:
            cache.free(one["id"])
            check_invariants(cache)
        tenant(cache, batch, "tenant", 60)
        for one in sequences:
            present = cache.allocate("stranger", [*one["tokens"], 9])
            for x in values(cache, "stranger"):
                assert not (x[:, :present].round() == 42).any()
            check_invariants(cache)
            cache.free("stranger")
        cache.free("tenant")
        for other in "xy":
            tenant(cache, batch, other, 30)
            check_invariants(cache)
            cache.free(other)
        assert cache.num_free_pages == 8
    assert taken > 5


Mutation = Callable[[Path, random.Random], None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are only slowed down by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_cache() -> KVCache:
    cache = KVCache(
        *(2, 2, 2, 64, 12), k_format=["int4-g2", "fp8"], v_format="int8", sink_len=1, recent_len=2
    )
    generator = torch.Generator().manual_seed(0)
    cache.start_positions.copy_(torch.tensor([3, 50]))
    for layer in range(2):
        k, v = torch.randn(2, 2, 2, 6, 64, generator=generator)
        cache.append(layer, k, v, [6, 4])
    return cache


def edit_manifest(path: Path, rng: random.Random) -> None:
    """Values of the manifest change, and its checksum with them."""

    def edit(top: dict[str, Any], _: object) -> None:
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            mutate_json(top, rng)

    forge(path, edit, digests=False)


def edit_tensor(path: Path, rng: random.Random) -> None:
    """A row of a tensor changes, and both checksums with it: headers become NaN or negative."""

    def edit(_: object, tensors: dict[str, torch.Tensor]) -> None:
        rows = tensors[rng.choice([*tensors])].flatten(0, 1)
        row = rows[rng.randrange(len(rows))]
        row.copy_(torch.tensor([*rng.randbytes(len(row))], dtype=torch.uint8))

    forge(path, edit)


def mutate_json(value: Any, rng: random.Random) -> None:
    """Put something hostile at a random place of a JSON value, in place."""
    places: list[tuple[Any, Any]] = []

    def walk(at: Any) -> None:
        for key in at if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], (dict, list)):
                walk(at[key])

    walk(value)
    at, key = rng.choice(places)
    action = rng.randrange(6)
    if action == 0:
        del at[key]
    elif action == 1 and isinstance(at, list):
        at.append(at[key])
    elif action == 1:
        at[f"{key}x"] = at[key]
    elif action == 2 and type(at[key]) is int:
        at[key] += rng.choice((-1, 1))
    elif action == 3:
        other, other_key = rng.choice(places)
        at[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else key))
    else:
        hostile: list[Any] = [-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**400, 1e308]
        hostile += [0.5, float("nan")]
        hostile += [None, True, "", "int4-g3", "int8", "x" * 5000, "\ud800", [], [[]], {}, {"": 0}]
        hostile += ["int4-g" + "9" * 5000, [0] * 1000, "9" * 64, "layers.0.k_packed"]
        at[key] = rng.choice(hostile)


@pytest.mark.parametrize("share", mark_slow([8, 1], [8]))  # one of so many mutations
@pytest.mark.parametrize("mutate", [edit_manifest, edit_tensor])
def test_sealed_mutations_are_refused_or_hang_together(
    tmp_path: Path, mutate: Mutation, share: int
) -> None:
    path = tmp_path / "c.safetensors"
    save_cache(make_cache(), path, model={"model_type": "x"}, creation={"a": [1, {"b": 2}]})
    original = path.read_bytes()
    rng = random.Random(mutate.__name__)
    accepted = 0
    for _ in range(600 // share):
        path.write_bytes(original)
        mutate(path, rng)
        try:
            cache = load_cache(path)
        except CheckpointError:
            continue
        accepted += 1
        for layer in range(cache.num_layers):
            k, v = cache.dequantized(layer)
            assert k.isfinite().all() and v.isfinite().all()
            assert k.shape[2] == int(cache.seq_lens.max()) <= cache.max_seq_len
            one = torch.zeros(cache.batch, cache.num_kv_heads, 1, k.shape[3])
            if k.shape[2] < cache.max_seq_len:
                cache.append(layer, one, one[..., : v.shape[3]])
    assert accepted  # the row stays readable if only codes change
