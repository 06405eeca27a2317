"""Golden values: rows, files, outputs, logits and host times, recorded and compared later (CPU).

    python tests/benchmarks/golden.py record FILE [--model NAME FOLDER]...
    python tests/benchmarks/golden.py compare FILE [--allow 'files/bare/*']...
    python tests/benchmarks/golden.py compare FILE --times     # or record: the host times alone

FILE also keeps the models' folders and plans, and `compare` takes the same. It prints a line for
each name whose value differs and then exits with 1. Values are compared bit for bit. A host time
differs where there are more calls of kvquant's functions, or the median is longer by `--slack`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

import kvquant as kv

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO, TEXT = EXAMPLES / "llama-demo-5m", EXAMPLES / "unseen.txt"
FORMATS = ["int2", "int3", "bf16", "fp16", "int4", "int8", "fp8"]
FORMATS += [f"{codec}-g{groups}" for codec in FORMATS[4:] for groups in (2, 4, 8)]
LATENT_FORMATS = [*FORMATS, *(f"{name}+int8-g4" for name in FORMATS)]
DTYPES = torch.float32, torch.bfloat16, torch.float16
BLANK = {"version", "format", "writer", "sha256", "shapes"}  # magic, and what the tensors tell
INT4: dict[str, Any] = {"k_format": "int4-g4", "v_format": "int4-g4"}
PAIRS = {"default": {**INT4, "k_format": "int8-g4"}, "int4-g4": INT4}
Golden = Iterator[tuple[str, Any]]


def sha(x: torch.Tensor) -> str:
    """The SHA-256 of a tensor's bytes; every NaN counts as the same."""
    x = torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x
    return hashlib.sha256(x.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Seeded numbers, with one large channel."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., 5] += 8
    return x


def hostile(dim: int) -> torch.Tensor:
    """Rows of many magnitudes; constant, subnormal, infinite and NaN ones."""
    rows = normal(dim, 48, dim) * 10 ** torch.linspace(-9, 9, 48)[:, None]
    some = [0.0, -0.0, 1 / 3, 65504, 65505, 3.38e38, 1e-41, 6e-8, torch.inf, -torch.inf, torch.nan]
    one, odd, ramp = torch.tensor(some), normal(dim + 1, len(some), dim), torch.arange(dim).float()
    odd[range(len(some)), range(0, 5 * len(some), 5)] = one
    ramps = torch.stack([ramp * 1e-42, ramp * 3e-8, -ramp, ramp - ramp.mean()])
    return torch.cat([rows, odd, one[:, None].expand(-1, dim), ramps])


def rows() -> Golden:
    """Packed bytes of every format, and what they decode to."""
    for dim in (64, 80, 128, 256, 576):
        is_latent = dim == 576
        for name in LATENT_FORMATS if is_latent else FORMATS:
            at, fmt = f"rows/{name}/{dim}", None
            with suppress(kv.ConfigError):
                fmt = kv.LatentFormat.parse(name) if is_latent else kv.RowFormat.parse(name, dim)
            if fmt is None:
                yield at, "refused"
                continue
            for dtype, backend in product(DTYPES, ("cpu", "reference")):
                packed = kv.quantize_rows(hostile(dim).to(dtype), fmt, check=False, backend=backend)
                yield f"{at}/{dtype}/{backend}", sha(packed)
                values = kv.dequantize_rows(packed, fmt, backend=backend)
                yield f"{at}/{dtype}/{backend}/values", sha(values)


def caches(plan: kv.CachePlan) -> dict[str, Any]:
    """Empty caches of every kind."""
    room: dict[str, Any] = {"max_num_seqs": 4, "max_seq_len": 400, "page_size": 16}
    short: dict[str, Any] = {"sink_len": 3, "recent_len": 20}
    kinds: dict[str, dict[str, Any]] = {"default": {}, "int4-g4": INT4, "short": short | INT4}
    kinds["bare"] = {"k_format": "int8", "sink_len": 0, "recent_len": 0}
    kinds["fp8"] = {"k_format": "fp8", "v_format": "fp8", "exact_format": "fp16"}
    kinds["few bits"] = {"k_format": "int3", "v_format": "int2", "rollback_len": 8}
    kinds["window"] = {"windows": [None, 40], "recent_len": 16}
    found: dict[str, Any] = {}
    for name, options in kinds.items():
        found[name] = kv.KVCache(2, 2, 2, 128, 400, **options)
        found[f"pages {name}"] = kv.PagedKVCache(2, 2, 128, 60, **room, **options)
    for name in ("int8-g4", "int4-g8+int8-g4", "fp8"):
        found[f"latent {name}"] = kv.LatentKVCache(2, 2, 400, fmt=name)
        found[f"pages latent {name}"] = kv.LatentPagedKVCache(2, 60, fmt=name, **room, **short)
    found["planned"] = kv.KVCache.from_plan(plan, 2, 400)
    return found | {"pages planned": kv.PagedKVCache.from_plan(plan, 60, **room, **short)}


def fill(name: str, cache: Any) -> Golden:
    """What attention gives while a cache is appended to, cropped, forked."""
    is_latent, heads = "latent" in name, 1 if "latent" in name or "planned" in name else 2
    dims, scale = ((512, 64), {"sm_scale": 0.1}) if is_latent else ((128, 128), {})

    def new(seed: int, *axes: int, count: int = 2) -> list[torch.Tensor]:
        return [normal(seed + i, *axes, dim).bfloat16() for i, dim in enumerate(dims[:count])]

    ask, layers = partial(new, 9, count=1 + is_latent), range(cache.num_layers)
    if "pages" not in name:
        for i in layers:
            cache.append(i, *new(i, 2, heads, 300), [300, 217])
            yield f"{i}/attend", cache.attend(i, *ask(2, 4), **scale)
        for at, i in product(range(4), layers):
            count = (1, 1, 4, 1)[at]
            q, rows = ask(2, *[count] * (count > 1), 4), new(at, 2, heads, count)
            yield f"{i}/step {at}", cache.step(i, *q, *rows, **scale)
            if at == 2 and i == layers[-1]:
                cache.crop([302, 200])
        return
    batch: Any = (kv.LatentPagedBatch if is_latent else kv.PagedBatch)(cache, 4, 300)
    for ids, count in (("a", 150), ("c", 60), ("abc", 1), ("ab", 3)):
        first = cache.allocate(ids, range(count)) if len(ids) == 1 else 0
        if ids == "abc":
            cache.fork("a", "b")
        total = (count - first) * len(ids)
        with batch.extend(list(ids), count - first, range(first, first + total)):
            for i in layers:
                batch.append(i, *new(i, total, heads))
                yield f"{i}/attend {ids} {first}", batch.attend(i, *ask(len(ids), 4), **scale)


def content(path: Path) -> Golden:
    """The tensors of a file and its manifest, key by key."""
    with safe_open(path, "pt") as file:
        yield from [(key, sha(file.get_tensor(key))) for key in file.keys()]
        texts = (file.metadata() or {}).values()
    for text in texts:
        with suppress(ValueError):  # checksums are no JSON
            for key in (facts := json.loads(text)).keys() - BLANK:
                yield f"manifest {key}", json.dumps(facts[key], sort_keys=True)


def command(out: Path, *words: Any) -> Golden:
    """What a command of kvquant writes, or its exit status."""
    from kvquant.cli.main import main

    code = CliRunner().invoke(main, [*map(str, words), "-o", str(out)]).exit_code
    yield from [("exit", code)] if code else content(out)


def named(name: str, values: Golden) -> Golden:
    """Values with a name before their own."""
    yield from ((f"{name}/{key}", value) for key, value in values)


def outputs_and_files(plan: kv.CachePlan, folder: Path) -> Golden:
    """Outputs of every kind of cache; then its file, its exports, and what is loaded from it."""
    plan_file, raw_file, out = (folder / f"{name}.safetensors" for name in ("plan", "raw", "out"))
    plan.save(plan_file)
    yield from named("files/plan", content(plan_file))
    for name, cache in caches(kv.CachePlan.load(plan_file)).items():
        yield from named(f"outputs/{name}", fill(name, cache))
        path, at = folder / f"{name}.safetensors", f"files/{name}"
        if "pages" in name:
            kv.save_sequences(cache, list("abc"), path, model={"model_type": "x"})
            other = caches(plan)[name]
            kv.load_sequences(other, path)
            values = [other.dequantized(one, 0) for one in "abc"]
        else:
            kv.save_cache(cache, path, model={"model_type": "x"}, creation={"by": "golden.py"})
            planned = name == "planned"
            values = [kv.load_cache(path, plan=plan if planned else None).dequantized(1)]
            for to in ("bf16", "fp16", "fbgemm", "xformers", "flashmla"):
                words = ["export", path, "--to", to, *["--plan", plan_file] * planned]
                yield from named(f"{at}/{to}", command(out, *words))
        yield from named(at, content(path))
        yield from ((f"{at}/loaded {i}", sha(x)) for i, x in enumerate(chain(*values)))
    save_file({f"layers.0.{side}": normal(7, 2, 2, 300, 128) for side in "kv"}, raw_file)
    yield from named("files/quantize raw", command(out, "quantize", "--from", raw_file))
    words = ["quantize", DEMO, "--prompt", TEXT, "--tokens", "300"]
    yield from named("files/quantize text", command(out, *words))
    yield from named("files/quantize planned", command(out, *words, "--plan", plan_file))


def made_plan(model: Any) -> Any:
    """Facts and tensors of a plan of few tokens."""
    from kvquant.calibration.windows import Sizes

    sizes = Sizes(observed=1024, length=256, windows=2, context=64, scored=8)
    plan: Any = kv.calibrate(model, sizes=sizes)
    return json.loads(json.dumps(dict(plan.facts))), dict(plan.tensors)


def lasting(facts: Any, tensors: dict[str, torch.Tensor]) -> kv.CachePlan:
    """A plan with what stays of it: feedback of K."""
    for layer in facts["layers"]:
        layer["v"]["rounding"] = "nearest"
    return kv.CachePlan(facts, {name: x for name, x in tensors.items() if name != "v.feedback"})


def logits(model: Any, plan: kv.CachePlan, prompt: int, steps: int) -> Golden:
    """Of a prompt, and of steps whose tokens are the text's."""
    ids = torch.tensor(model.encode(TEXT.read_text("utf-8")[:4000])[: prompt + steps])
    for name, options in (PAIRS | {"plan": {"plan": plan}}).items():
        for recent in (16, 128):
            more: dict[str, Any] = {"recent_len": recent, "accept_loss": True}
            cache = model.new_cache(1, prompt + steps, **options, **more)
            found = [model.prefill(cache, ids[None, :prompt])]
            found += [model.step(cache, one[None]) for one in ids[prompt:]]
            yield f"{name}, {recent} recent", torch.cat(found).float()


def measure(
    call: Callable[[], Any], back: Callable[[], Any], share: int = 1
) -> tuple[float, float]:
    """Calls of kvquant's functions, and microseconds of this thread: the least of five medians."""
    calls, medians, ours = 0, [], str(Path(kv.__file__).parent)

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(ours)

    for _ in range(5):
        taken = []
        for at in range(240):
            start = time.thread_time()
            call()
            taken.append(time.thread_time() - start)
            if at % 20 == 19:
                back()
        medians.append(median(taken) * 1e6)
    sys.setprofile(note)
    call()
    sys.setprofile(None)
    back()
    return calls / share, min(medians) / share


def times(model: Any) -> Golden:
    """Of one layer on the CPU: 32 query heads on 8, head_dim 128, one sequence of 300 tokens."""
    k, v = normal(1, 2, 1, 8, 300, 128).bfloat16()
    q, one = normal(2, 1, 32, 128).bfloat16(), (k[:, :, :1], v[:, :, :1])
    for name, formats in PAIRS.items():
        rows = [kv.quantize_rows(x, fmt) for x, fmt in zip((k, v), formats.values(), strict=True)]
        bare = partial(kv.decode_attention, q, *rows, torch.tensor([300]).int(), **formats)
        cache, text = kv.KVCache(1, 1, 8, 128, 400, **formats), model.new_cache(1, 400, **formats)
        cache.append(0, k, v)
        model.prefill(text, torch.arange(300)[None])
        back, share = partial(cache.crop, 300), text.num_layers
        yield f"{name}/decode_attention", measure(bare, back)
        yield f"{name}/append", measure(partial(cache.append, 0, *one), back)
        yield f"{name}/attend", measure(partial(cache.attend, 0, q), back)
        yield f"{name}/step", measure(partial(cache.step, 0, q, *one), back)
        token = partial(model.step, text, torch.tensor([7]))
        yield f"{name}/token of a model, a layer", measure(token, partial(text.crop, 300), share)


def collect(models: dict[str, str], plans: dict[str, Any]) -> Golden:
    """Everything; plans that are not there yet are made."""
    yield from rows()
    for name, folder in models.items():
        model = kv.CachedModel.from_pretrained(folder)
        if name == "demo" or name not in plans:
            made = made_plan(model)
            plans.setdefault(name, made)
        if name == "demo":  # plans of other models are not made again
            yield from ((f"calibrate/demo/{key}", sha(x)) for key, x in made[1].items())
        plan, sizes = lasting(*plans[name]), (200, 40) if name == "demo" else (64, 8)
        yield from named(f"logits/{name}", logits(model, plan, *sizes))
        if name == "demo":
            with TemporaryDirectory() as folder:
                yield from outputs_and_files(plan, Path(folder))
            yield from named("times", times(model))


def differences(old: dict[str, Any], new: dict[str, Any], slack: float) -> Golden:
    """The names whose value is another one now, and how."""
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            yield name, "gone" if now is None else "new"
        elif isinstance(was, tuple):
            print(f"{name}: {was[0]:g} -> {now[0]:g} calls, {was[1]:.0f} -> {now[1]:.0f} us")
            if now[0] > was[0] or now[1] > was[1] * (1 + slack):
                yield name, "slower"
        elif isinstance(was, torch.Tensor) and was.shape == now.shape:
            error = (now - was).double().norm() / was.double().norm()
            if sha(was) != sha(now):
                yield name, f"relative error {error:.1e}"
        elif isinstance(was, torch.Tensor) or was != now:
            yield name, "differs"


@click.command()
@click.argument("task", type=click.Choice(["record", "compare"]))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", "models", type=(str, str), multiple=True, help="NAME FOLDER")
@click.option(
    "--times", "only_times", is_flag=True, help="Host times alone, of a FILE that is there."
)
@click.option("--slack", default=0.25, show_default=True, help="Share by which a time may grow.")
@click.option("--allow", multiple=True, help="Pattern of names that may differ.")
def main(task: str, file: Path, models: Any, only_times: bool, slack: float, allow: Any) -> None:
    """Record golden values in FILE, or compare with those in it."""
    torch.set_num_threads(1)
    old: dict[str, Any] = {"models": {"demo": ""}, "plans": {}, "values": {}}
    if task == "compare" or only_times:
        old = torch.load(file)
    models = old["models"] | {"demo": str(DEMO)} | dict(models)
    values = old["values"]
    if only_times:
        new = dict(named("times", times(kv.CachedModel.from_pretrained(DEMO))))
        kept = {name: x for name, x in values.items() if name not in new}
    else:
        new, kept = dict(collect(models, old["plans"])), {}
    if task == "record":
        torch.save({"models": models, "plans": old["plans"], "values": kept | new}, file)
        return
    found = dict(differences(values, kept | new, slack))
    found = {name: how for name, how in found.items() if not any(fnmatch(name, p) for p in allow)}
    print(*(f"{name}: {how}" for name, how in found.items()), sep="\n")
    print(f"{len(found):,} of {len(values):,} values differ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
