"""A public model served by vLLM on a GPU: HumanEval with each engine's cache; a JSON for a model.

    python tests/benchmarks/vllm_models.py qwen2.5-coder-1.5b --folder DIR \
        --run-programs HumanEval.jsonl.gz --engine "16 bit" --engine "plan, window" --sample 0

Prompts, programs and rows are those of public_models.py: alone, and behind 6,000 tokens of other
code. Each engine runs in a process of its own, one after another, with vLLM's defaults. Sampled
generations of a problem have the same seed in all engines. Each row of results/vllm-NAME.json is
written at once, and another call goes on; calls at the same time need a --json each, and a last
one takes their rows with --add.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click
from bench_vllm import GRAPHS, INT4, machine, ours, usual
from decoding import Figures
from programs import interpreter, passed, problems_of
from public_models import (
    PLACES,
    PUBLIC,
    RESULTS,
    TEMPERATURE,
    Row,
    Rows,
    Subject,
    made_folder,
    prompts_of,
    show_losses,
)
from vllm_process import EngineProcess

from kvquant.cli.console import COUNT, FILE, NEW_FILE
from kvquant.errors import ConfigError
from kvquant.evaluation.evaluate import hash_of

ROWS: dict[str, Figures] = {
    "default": {},
    "plan": {"plan": "auto"},
    "int4-g4": {**INT4, "accept_loss": True},
}
ENGINES: dict[str, Figures] = {
    "16 bit": {"attention_backend": "FLASH_ATTN"},
    "16 bit, TRITON_ATTN": {"attention_backend": "TRITON_ATTN"},  # the same in another order
    "FLASH_ATTN fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
    **{
        f"{name}, {'window' if last else 'rows alone'}": ours(**rows, recent_len=last)
        for name, rows in ROWS.items()
        for last in (0, 128)
    },
}


@click.command()
@click.argument("name", type=click.Choice([*PUBLIC]))
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Of the model.")
@click.option("--run-programs", "data", type=FILE, required=True, help="HumanEval.jsonl.gz.")
@click.option("--network-is-off", is_flag=True, help="The machine has none: make no namespaces.")
@click.option("--engine", "names", type=click.Choice([*ENGINES]), multiple=True, default=[*ENGINES])
@click.option("--place", "places", type=click.Choice(PLACES), multiple=True, default=PLACES)
@click.option("--sample", "samples", type=click.IntRange(0), multiple=True, default=(0,))
@click.option("--problems", type=COUNT, default=164, show_default=True)
@click.option("--new-tokens", type=COUNT, default=512, show_default=True)
@click.option("--gib", default=32, show_default=True, help="Memory of pages.")
@click.option("--seconds", default=3600.0, show_default=True, help="No engine begins later.")
@click.option("--add", type=FILE, multiple=True, help="JSON of other runs, whose rows are taken.")
@click.option("--json", "json_file", type=NEW_FILE, help="In place of results/vllm-NAME.json.")
def main(
    name: str,
    folder: Path,
    data: Path,
    network_is_off: bool,
    names: tuple[str, ...],
    places: tuple[str, ...],
    samples: tuple[int, ...],
    problems: int,
    new_tokens: int,
    gib: int,
    seconds: float,
    add: tuple[Path, ...],
    json_file: Path | None,
) -> None:
    """Measure how many programs of a public model are right with each engine's cache."""
    ends = time.monotonic() + seconds
    folder = made_folder(name, folder)
    rows = Rows(json_file or RESULTS / f"vllm-{name}.json", {"model": name, **machine()})
    rows.add(add)
    interpreter(not network_is_off)  # before anything is written
    subject = Subject(name, folder, "cuda", folder / "plans")
    asked = problems_of(data, problems)
    prompts = {place: prompts_of(subject, asked, place) for place in places}
    ids = {
        place: subject.tokenizer(texts, add_special_tokens=False)["input_ids"]
        for place, texts in prompts.items()
    }
    key: Row = {"measure": "humaneval", "problems": len(asked), "new_tokens": new_tokens}
    wanted: list[Row] = [
        {**key, "place": place, "prompts": hash_of("".join(prompts[place])), "sample": sample}
        for place in places
        for sample in samples
    ]

    def found(process: EngineProcess, place: str, sample: int) -> Row:
        given = {"tokens": new_tokens, "temperature": TEMPERATURE if sample else 0.0}
        answers = process.ask("texts", prompts=ids[place], first_seed=sample << 20, **given)
        texts = subject.tokenizer.batch_decode(answers, skip_special_tokens=True)
        right = passed(texts, asked, alone=not network_is_off)
        return {"passed": right, "temperature": given["temperature"]}

    for engine in names:
        missing = [one for one in wanted if rows.find({**one, "cache": engine}) is None]
        if not missing or time.monotonic() > ends:
            continue
        process = EngineProcess(
            {
                **usual(GRAPHS),
                "model": str(folder),
                "dtype": "bfloat16",
                "max_model_len": 8192,
                "kv_cache_memory_bytes": gib << 30,
                **ENGINES[engine],
            },
            rows.path.with_suffix(f".{engine.replace(' ', '-')}.log"),
        )
        try:
            facts = process.answer()
            click.echo(f"{engine}: up after {facts['start_s']:.0f} s, {facts['tokens']:,} tokens")
            for one in missing:
                of = {**one, "cache": engine}
                row = rows.measure(of, partial(found, process, one["place"], one["sample"]))
                right = row["passed"].count("1")
                click.echo(f"{engine}, {one['place']}, {one['sample']}: {right} of {len(asked)}")
        except RuntimeError as error:
            raise ConfigError(f"{engine} failed: {error}") from None
        finally:
            process.close()
    show_losses(rows.rows)


if __name__ == "__main__":
    main()
