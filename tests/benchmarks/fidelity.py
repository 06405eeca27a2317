"""How well caches keep a model's predictions: kvquant's formats, plans, and other projects' caches.

Passages of a text are read once with exact attention. Then their last tokens are decoded one by one
from each cache, everything before them being read from it, and the predictions are compared with
those of the 16-bit cache: KL divergence, equal likeliest tokens, perplexity. Tokens are given, not
generated, so that all caches answer the same questions.

    context   tokens of a passage; the last ones are scored, so each sees nearly as many
    KL        mean over all scored tokens, nats; +-: its standard error, by the spread of passages
    bits      of an element of K and V, scales and 16-bit rows included, a mean over the steps

Run by hand, for minutes on a CPU and longer with many tokens; --json keeps what was measured, and
another run with it measures only what is missing:

    python tests/benchmarks/fidelity.py --tokens 512
    python tests/benchmarks/fidelity.py --model FOLDER --text FILE --context 2048 --context 4096 \\
        --plan plan.safetensors --json fidelity.json
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import torch
from fidelity_ours import PLAIN, Candidate, Ours, plan_candidates
from fidelity_peers import PEERS
from fidelity_record import Figures, Record

from kvquant.calibration.calibrate import spread
from kvquant.calibration.fidelity import compare, predict, read_prompt
from kvquant.cli.console import COUNT, FILE, NEW_FILE, SOURCE, check_output
from kvquant.errors import ConfigError, KVQuantError
from kvquant.hf.model import CachedModel
from kvquant.io.model_id import model_identity
from kvquant.io.plan import CachePlan
from kvquant.text import progress

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXACT = "16 bit"
VERSIONS = ("torch", "transformers", "hqq", "optimum-quanto")


def measure_batch(
    model: CachedModel, windows: torch.Tensor, scored: int, candidates: Sequence[Candidate]
) -> Iterator[tuple[str, list[Figures] | str]]:
    """Measure caches on one batch of passages.

    Args:
        model: decodes.
        windows: [batch, context + 1], int64: passages, each with its successor.
        scored: last tokens of a passage that are decoded.
        candidates: what to measure.

    Yields:
        The 16-bit cache's name and each candidate's, with the figures of each passage, or with the
        reason why it cannot run.
    """
    prompt, fed = windows[:, : -scored - 1], windows[:, -scored - 1 : -1]
    targets = windows[:, -scored:].t()[..., None].to(model.model.device)  # [scored, batch, 1]
    exact = read_prompt(model, prompt, scored)
    expected = predict(model, exact, fed)
    exact.crop(prompt.shape[1])
    yield EXACT, _compared(expected, expected, targets, 16.0)
    for candidate in candidates:
        try:
            given, bits = candidate.predict(model, exact, fed)
        except KVQuantError:
            raise
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            yield candidate.name, f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        yield candidate.name, _compared(expected, given, targets, bits)


def _compared(
    expected: torch.Tensor, given: torch.Tensor, targets: torch.Tensor, bits: float
) -> list[Figures]:
    """The figures of each passage."""
    passages = zip(*(x.split(1, dim=1) for x in (expected, given, targets)), strict=True)
    names = ("kl", "top1", "nll")
    return [{"bits": bits} | dict(zip(names, compare(*x), strict=True)) for x in passages]


def run_all(
    model: CachedModel,
    windows: torch.Tensor,
    scored: int,
    candidates: Sequence[Candidate],
    record: Record,
    run: str,
    *,
    batch: int = 8,
    progress: Callable[[str], None] = lambda name: None,
) -> None:
    """Measure all caches on all passages; what the record has is not measured again.

    Args:
        model: decodes.
        windows: [passages, context + 1], int64.
        scored: as in measure_batch.
        candidates: what to measure; one that cannot run is not tried again.
        record: takes the figures.
        run: name of the model and the context.
        batch: passages at a time.
        progress: called with the name of each cache when it is done with a batch.
    """
    waiting = list(candidates)
    for start in range(0, len(windows), batch):
        group = windows[start : start + batch]
        due = [one for one in waiting if len(record.parts(run, one.name)) <= start]
        if not due:
            continue
        for name, figures in measure_batch(model, group, scored, due):
            if isinstance(figures, str):
                waiting = [one for one in waiting if one.name != name]
            elif len(record.parts(run, name)) > start:
                continue  # the 16-bit cache, again
            record.add(run, name, figures)
            progress(name)


def _step(update: Callable[..., None]) -> Callable[[str], None]:
    return lambda name: update(1, name)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@click.command()
@click.option("--model", "models", type=SOURCE, multiple=True, help="The bundled one by default.")
@click.option("--text", type=FILE, help="The bundled one by default.")
@click.option("--context", "contexts", type=COUNT, multiple=True, help="Tokens; 2048.")
@click.option("--tokens", type=COUNT, default=8192, show_default=True, help="Tokens to score.")
@click.option("--scored", type=COUNT, default=256, show_default=True, help="Of each passage.")
@click.option("--batch", type=COUNT, default=8, show_default=True, help="Passages at a time.")
@click.option("--plan", "plans", type=FILE, multiple=True, help="From kvquant calibrate.")
@click.option("--only", multiple=True, help="Caches whose name holds this word.")
@click.option("--device", default="cpu", show_default=True, help="Where the model runs.")
@click.option("--json", "json_file", type=NEW_FILE, help="Keep the figures; go on from them.")
def main(
    models: tuple[Path, ...],
    text: Path | None,
    contexts: tuple[int, ...],
    tokens: int,
    scored: int,
    batch: int,
    plans: tuple[Path, ...],
    only: tuple[str, ...],
    device: str,
    json_file: Path | None,
) -> None:
    """Compare the predictions from quantized caches with those from the 16-bit cache.

    \b
    Example:
      python tests/benchmarks/fidelity.py --tokens 512 --context 1024 --only int4 --only KIVI
    """
    models, contexts = models or (EXAMPLES / "llama-demo-5m",), contexts or (2048,)
    text = text or EXAMPLES / "unseen.txt"
    check_output(json_file, text, *plans, endings=(".json",))
    words = text.read_text(encoding="utf-8")
    settings = {
        "text": hashlib.sha256(words.encode()).hexdigest(),
        "tokens": tokens,
        "scored": scored,
        "batch": batch,
        "versions": {name: _version(name) for name in VERSIONS},
    }
    if min(contexts) <= scored:
        raise ConfigError(f"--context {min(contexts)} must be more than --scored {scored}")
    record = Record(json_file, settings)
    unused = set(plans)
    for folder in models:
        model = CachedModel.from_pretrained(folder, device=device)
        text_tokens = model.encode(words)
        identity = model_identity(model.config_dict)
        planned: list[Ours] = []
        for path in plans:
            if CachePlan.load(path).facts["model"]["sha256"] == identity["sha256"]:
                planned += plan_candidates(path)
                unused.discard(path)
        candidates: list[Candidate] = [*PLAIN, *planned, *PEERS]
        candidates = [one for one in candidates if not only or any(w in one.name for w in only)]
        for context in contexts:
            run = f"{folder.name}, context {context}"
            if model.max_positions is not None and context > model.max_positions:
                click.echo(f"{run}: left out, the model is made for {model.max_positions} tokens")
                continue
            for one in planned:
                record.check_plan(run, one.name, one.digest)
            windows = spread(text_tokens, -(-tokens // scored), context + 1)
            with progress(-(-len(windows) // batch) * (len(candidates) + 1), run) as update:
                run_all(
                    model,
                    windows,
                    scored,
                    candidates,
                    record,
                    run,
                    batch=batch,
                    progress=_step(update),
                )
            click.echo(f"{run}, {len(windows) * scored} tokens scored\n\n{record.table(run)}\n")
    if unused:
        raise ConfigError(f"{', '.join(map(str, unused))}: made for none of these models")


if __name__ == "__main__":
    try:
        main()
    except KVQuantError as error:
        sys.exit(f"Error: {error}")
