"""Whole evaluations of the demo's model, in Python and by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from refusals import assert_refused

pytest.importorskip("transformers")
from kvquant.cli.demo import MODEL
from kvquant.cli.main import main
from kvquant.errors import ConfigError
from kvquant.evaluation.decoding import Reading
from kvquant.evaluation.evaluate import HELD_OUT, Example, Sizes, Task, evaluate
from kvquant.evaluation.report import against_limit, render, verdicts
from kvquant.evaluation.retrieval import TASKS
from kvquant.hf.model import CachedModel

CACHES = ["bf16,sinks=0,recent=0", "int8/int4-g4,recent=16", "int4,sinks=0,recent=0"]
SIZES = Sizes((160,), 2, 2, facts=(0,), passages=2, scored=8, new_tokens=12, batch=2)
ALL = "kl", "generation", "retrieval"
TASK = Task(ALL, retrieval=("keys", "copy"))


@pytest.fixture(scope="module")
def found(model: CachedModel) -> dict[str, Any]:
    return evaluate(model, CACHES, task=TASK, sizes=SIZES)


def test_a_copy_in_16_bit_loses_nothing(found: dict[str, Any]) -> None:
    exact, *_ = found["kl"]["160"]
    assert exact["kl"] == exact["kl_tail"] == 0 and exact["top1"] == 1
    greedy, sampled = (found["generation"]["160"][way][0] for way in ("greedy", "sampled"))
    assert greedy["first_divergence"] == sampled["first_divergence"] == [None, None]
    (agreement,) = greedy["agreement"].values()
    assert agreement["share"] == 1 and 0.3 < agreement["error"] < 0.4  # of two texts
    for task in found["retrieval"]["160"].values():
        assert task["caches"][0]["lost"] == task["caches"][0]["won"] == 0
        assert task["least_distance"] >= 16  # beyond the window
    assert set(found["seconds"]) == {"kl", "generation", "keys", "copy"}
    assert all(len(each) == 4 and min(each) > 0 for each in found["seconds"].values())
    assert list(found)[-1] == "seconds"


def test_fewer_bits_cost_more(found: dict[str, Any]) -> None:
    _, mixed, int4 = found["kl"]["160"]
    assert 0 < mixed["kl"] < int4["kl"] and int4["kl_tail"] > int4["kl"]
    assert int4["tokens"] == 16 and int4["passages"] == 2 and len(int4["by_position"]) == 4
    assert sum(int4["by_position"]) / 4 == pytest.approx(int4["kl"])
    costs = found["caches"]
    assert [one["cache"] for one in costs][:2] == ["16 bit", "bf16"]
    assert costs[0]["bits"] == costs[1]["bits"] == 16 and costs[3]["bits"] == 4.25
    assert costs[3]["bits"] < costs[2]["bits"] < 16
    assert costs[3]["tokens_per_gib"] > 3 * costs[0]["tokens_per_gib"]


@pytest.mark.parametrize(("room", "told"), [(2, "2 passages"), (1, "1 passage, of which there is")])
def test_a_short_text_is_told(model: CachedModel, room: int, told: str) -> None:
    """The same of the packaged one, which has 3 passages of 4,096 tokens of this model."""
    text = HELD_OUT.read_text()
    size = 160 + 8 + len(model.encode("\n"))  # of a passage, and what the tokenizer adds
    few = model.decode(model.encode(text)[: room * size])
    task = Task(kinds=("kl", "generation"))
    sizes = Sizes((160,), prompts=9, passages=9, scored=8, new_tokens=4)
    found = evaluate(model, ["int8,recent=0"], task=task, sizes=sizes, text=few)
    (row,) = found["kl"]["160"]
    assert (row["passages"], row["tokens"], row["asked"]) == (room, 8 * room, 9)
    assert (row["kl_error"] is None) == (row["top1_error"] is None) == (room == 1)
    shown = " ".join(render(found).split())
    assert f"Predictions of {8 * room} tokens in {told}" in shown
    room_for = "(9 were asked for, and the text has room for no more: give a longer --text"
    assert shown.count(room_for) == 3  # greedy and sampled texts, too


def phonebook(
    model: CachedModel, caches: list[str], sizes: Sizes
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """An evaluation of this task, its results of 640 tokens, and what its progress was told."""
    task, told = Task(("retrieval",), retrieval=("phonebook",)), list[int]()
    options: dict[str, Any] = {"progress": lambda _, parts: told.append(parts)}
    found = evaluate(model, caches, task=task, sizes=sizes, **options)
    return found, found["retrieval"]["640"]["phonebook"], told


# of what 16 bit answers: more facts than the first number that fails are not tried; of none of them
# two prompts, and the third
ANSWERED = [((4, 8, 16), 16, [4, 8, 16]), ((4, 8), 8, [4, 8, 16]), ((4, 16), 4, [4, 8])]


@pytest.mark.parametrize(("answered", "facts", "tried"), [*ANSWERED, ((), 4, [4, 4])])
def test_a_task_takes_the_most_facts_that_16_bit_answers(
    model: CachedModel,
    answered: tuple[int, ...],
    facts: int,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def ask(_: Any, prompts: Any, choices: Any, __: Any) -> Any:
        (count,) = {one.facts for one in prompts}
        asked.append((count, len(choices)))
        # 4 of 5 are 80 %
        right = [[count in answered or at == 0 for at in range(5)] for _ in prompts]
        if count in answered:
            right[0][0] = right[-1][1] = len(right) == 1
        return iter([right] * (1 + len(choices)))

    monkeypatch.setattr("kvquant.evaluation.evaluate.ask_all", ask)
    sizes = Sizes((640,), 3, facts=(16, 4, 64, 8))  # 64 do not fit
    _, found, told = phonebook(model, ["int8,recent=0"], sizes)
    assert found["facts"] == facts and found["fails"] == (not answered)
    assert asked == [*((one, 0) for one in tried), *[(facts, 1)] * (2 if answered else 0)]
    assert len(told) == told[0] == 3 + 2 * 2  # three trials, two batches of two caches


@pytest.mark.parametrize(("share", "fails"), [(7, False), (6, True)])
def test_all_questions_decide_where_no_trial_was_passed(
    model: CachedModel, share: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fewest facts: two prompts may be harder than the others. No cache is asked a task
    that the 16-bit cache fails."""
    asked: list[int] = []

    def ask(_: Any, prompts: Any, choices: Any, __: Any) -> Any:
        """Two prompts of the trial, one of which is wrong; then of eight: 7 of 10 or 8 of 10."""
        right = [[True], [False]] if not asked else [[at < share for at in range(8)], []]
        asked.append(len(choices))
        if choices:
            right = [[True] * 3 + [False]] * 2
        return iter([right] * (1 + len(choices)))

    monkeypatch.setattr("kvquant.evaluation.evaluate.ask_all", ask)
    caches = ["int8,recent=0", "int8,recent=16"]
    found, row, told = phonebook(model, caches, Sizes((640,), facts=(0, 4)))
    share_of_all = (1 + share) / 10
    assert (share_of_all < 0.8) == fails
    assert (row["facts"], row["fails"]) == (4, fails)
    assert row["exact"] == (share_of_all if fails else 0.75)
    assert asked == [0, 0, *[2] * (0 if fails else 2)]
    assert len(row["caches"]) == (0 if fails else 2)
    assert {*told} == {len(told)} == {2 + 2 * 3}
    assert {len(one) for one in found["seconds"].values()} == {3}
    shown = " ".join(render(found).split())
    assert ("so no other cache was asked." in shown) == fails
    assert shown.count("not asked") == (2 if fails else 0)


def test_prompts_in_the_window_are_told(model: CachedModel) -> None:
    tokens = model.encode("The city of Manila was founded in the year of the great fire of the sea")
    found = evaluate(
        model,
        ["int8,sinks=0,recent=8"],
        task=Task(("generation",)),
        sizes=Sizes(new_tokens=2),
        examples=[Example(tokens), Example(tokens[:5])],
    )
    (note,) = found["notes"]
    assert "keeps 1 of 2 prompts whole in 16 bit, those of 8 tokens and fewer" in note
    assert note in " ".join(render(found).split())


def test_an_interrupted_run_goes_on(
    model: CachedModel, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    parts: list[str] = []

    def stop(what: str, _: int) -> None:
        parts.append(what)
        if parts.count("generation") == 4:  # of each cache; kept now
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, CACHES, task=TASK, sizes=SIZES, state=state, progress=stop)
    assert parts == 4 * ["kl"] + 4 * ["generation"] and state.exists()
    calls = counted(model, monkeypatch)
    again = evaluate(model, CACHES, task=TASK, sizes=SIZES, state=state)
    assert len(calls) == 2  # of the two retrieval tasks
    assert json.dumps(without_times(again)) == json.dumps(without_times(found))
    first = json.loads(state.read_text())["measured"]
    assert again["seconds"]["kl"] == first["kl 160 0"]["seconds"]  # of the interrupted run


@pytest.mark.parametrize("kind", ["kl", "generation", "retrieval", "prompts"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["", "kept"])
def test_progress_is_told_of_each_cache(
    kind: str, is_kept: bool, model: CachedModel, tmp_path: Path
) -> None:
    """With one length, and few prompts: 0 % would stand for the whole run."""
    examples = [Example(model.encode("The city of Manila"))] * 3 if kind == "prompts" else []
    task = Task(kinds=("generation" if examples else kind,), retrieval=("keys", "copy"))
    sizes = Sizes((160,), 3, 1, (0,), passages=3, scored=2, new_tokens=2, batch=2)
    told: list[tuple[str, int]] = []
    for _ in range(1 + is_kept):
        told.clear()
        evaluate(
            model,
            ["int8,recent=0,sinks=0", "int4,recent=0,sinks=0"],
            task=task,
            sizes=sizes,
            examples=examples,
            state=tmp_path / "state" if is_kept else None,
            progress=lambda what, parts: told.append((what, parts)),
        )
    batches = {"kl": 2, "generation": 2, "retrieval": 2 * 2, "prompts": 3}[kind]
    assert len(told) == 3 * batches and {parts for _, parts in told} == {len(told)}


def test_the_largest_seed_samples(model: CachedModel) -> None:
    sizes = Sizes((160,), prompts=2, new_tokens=2, seed=2**40 - 1)
    evaluate(model, ["int8"], task=Task(kinds=("generation",)), sizes=sizes)


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"}


def test_a_prompt_of_both_kinds_of_texts_is_read_once(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(model, monkeypatch)
    evaluate(model, CACHES, task=Task(kinds=("generation",)), sizes=SIZES)
    assert len(calls) == 1 and calls[0].shape == (2, 160)


def test_a_folder_and_a_model_of_transformers_serve_too(model: CachedModel) -> None:
    kinds, few = Task(kinds=("generation",)), Sizes(new_tokens=2)
    examples = [Example(model.encode("The city of Manila"))]
    given: list[Any] = [model, MODEL, str(MODEL), model.model]
    found = [
        evaluate(one, ["int8,sinks=0,recent=0"], task=kinds, sizes=few, examples=examples)
        for one in given
    ]
    settings = [without_times(one) | {"settings": one["settings"]["sizes"]} for one in found]
    assert settings[0] == settings[1] == settings[2] == settings[3]
    with pytest.raises(ConfigError, match=r"needs a tokenizer.*CachedModel\(model, tokenizer="):
        evaluate(model.model, ["int8"])


CHANGES: dict[str, dict[str, Any]] = {  # of kl and generation of one prompt, without a text
    "settings": {"sizes": Sizes((160,), 1, passages=1, scored=5, new_tokens=4)},
    "text": {"text": HELD_OUT.read_text(encoding="utf-8")[9:]},
    "prompts": {"examples": [Example([5, 6, 7])]},
    "tasks": {},  # as after another tokenizer or chat template
}


@pytest.mark.parametrize("changed", CHANGES)
def test_results_of_other_inputs_are_not_taken(
    changed: str, model: CachedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("kl", "generation", *["retrieval"] * (changed == "tasks"))
    options: dict[str, Any] = {
        "task": Task(kinds, retrieval=("keys",)),
        "state": tmp_path / "state",
    }
    options |= {"sizes": Sizes((160,), 1, 1, (0,), passages=1, scored=4, new_tokens=4)}
    options["examples"] = [Example([5, 6, 8])]
    evaluate(model, CACHES[:1], **options)
    calls = counted(model, monkeypatch)
    evaluate(model, CACHES[:1], **options)
    assert not calls
    monkeypatch.setitem(TASKS, "keys", TASKS["keys" if changed != "tasks" else "phonebook"])
    evaluate(model, CACHES[:1], **options | CHANGES[changed])
    assert calls


def counted(model: CachedModel, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The prompts that the model reads from now on."""
    calls: list[Any] = []
    prefill = CachedModel.prefill

    def noted(self: CachedModel, cache: Any, tokens: Any, **options: Any) -> Any:
        calls.append(tokens)
        return prefill(self, cache, tokens, **options)

    monkeypatch.setattr(CachedModel, "prefill", noted)
    return calls


def test_prompts_with_answers_are_scored(model: CachedModel) -> None:
    tokens = model.encode("The city of Manila was founded in")
    kind = Task(kinds=("generation",), pattern=r"(\w+)")
    caches = ["bf16,sinks=0,recent=0"]
    plain = evaluate(model, caches, task=kind, sizes=SIZES, examples=[Example(tokens)])
    assert set(plain["generation"]) == {"0"} and "greedy_answers" not in plain["generation"]["0"]
    sizes = Sizes((2048,), new_tokens=4)
    short = evaluate(model, ["int8,recent=3"], task=kind, sizes=sizes, examples=[Example(tokens)])
    assert short["caches"][1]["bits"] > 9  # of a cache of the prompt's length, not of 2,048
    cache = model.new_cache(1, 64)
    text = model.decode(model.generate(cache, model.prefill(cache, torch.tensor([tokens])), 12)[0])
    last = text.split()[-1].strip(".,")
    both = [Example(tokens, last), Example(tokens, "never")]
    found = evaluate(model, caches, task=kind, sizes=SIZES, examples=both)
    answers = found["generation"]["0"]["greedy_answers"]
    (pair,) = answers["caches"]
    assert answers["exact"] == pair["exact"] == 0.5 and not answers["fails"]
    assert pair["exact"] == 0.5 and pair["drop"] == 0 and pair["answers"] == 2


def test_greedy_and_sampled_texts_of_a_prompt_are_one_observation(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are lost, of one prompt of two: that is no surer than one lost answer of two."""
    right = iter([True, True, True, False] * 2)  # 16 bit, then the cache; greedy, then sampled
    monkeypatch.setattr("kvquant.evaluation.evaluate._Run._is_right", lambda *_: next(right))
    examples = [Example(model.encode(text), "yes") for text in ("The city of", "The year of")]
    sizes = Sizes(new_tokens=2)
    caches, kind = ["int8,sinks=0,recent=0"], Task(kinds=("generation",))
    found = evaluate(model, caches, task=kind, sizes=sizes, examples=examples)
    (told,) = verdicts(found)
    assert "of 4 answers 2 lost and 0 won (-50.0 ± 50.0 points): no clear loss" in told
    verdict, reasons = against_limit(found, 50.0)
    assert verdict == "unknown" and len(reasons) == 2  # of each way


def test_bad_input_is_refused_before_work_begins(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, cases = counted(model, monkeypatch), list[tuple[dict[str, Any], str]]()
    cases += [
        ({"caches": []}, "caches is \\[\\]"),
        ({"caches": "int8"}, "give a list"),
        ({"caches": [3]}, "caches has 3"),
        ({"caches": ["int5"]}, "'int5' is no format"),
        ({"sizes": Sizes((4090,))}, r"beyond the 4096 positions.*--length of 3968 or less"),
        ({"text": "short"}, r"the text has \d+ tokens, and one passage needs 288"),
        ({"sizes": Sizes((140,))}, "no room for the task"),
        ({"sizes": Sizes((40,))}, "keeps all prompts of up to 40 tokens in 16 bit"),
        ({"reading": Reading(160, from_rows=True)}, "give a --chunk below 160"),
        ({"sizes": Sizes(new_tokens=4096)}, "leave no room for one in the 4096 positions"),
        ({"examples": [Example([])]}, "prompt 1 is empty"),
        ({"examples": [Example([1], " ")]}, "prompt 1 has an empty answer"),
        ({"examples": [Example([1] * 4000)]}, "prompt 1 has 4000 tokens, and 128 behind"),
        ({"examples": [Example([1])], "task": Task(kinds=("kl",))}, "prompts are for generation"),
    ]
    for given, message in cases:
        options: dict[str, Any] = {"caches": ["int8"], "sizes": Sizes((160,)), "task": Task(ALL)}
        assert_refused(ConfigError, (partial(evaluate, model, **{**options, **given}), message))
    # as of a tokenizer of single letters, whose questions are longer
    monkeypatch.setattr("kvquant.evaluation.evaluate.MARGIN", 1)
    task = Task(kinds=("retrieval",), retrieval=("keys",))
    with pytest.raises(ConfigError, match=r"a question of \d+ \(keys\) are beyond the 4096 pos"):
        evaluate(model, ["int8"], task=task, sizes=Sizes((4095,), prompts=1))
    assert not calls


def test_settings_that_mean_nothing_are_refused() -> None:
    assert_refused(
        ConfigError,
        (lambda: Task(kinds=("speed",)), "tasks: 'speed' is none of them; there are kl"),
        (lambda: Task(retrieval=()), "retrieval: nothing is named"),
        (lambda: Task(pattern="("), "no regular expression"),
        (lambda: Sizes((0,)), "lengths has 0"),
        (lambda: Sizes(prompts=0), "prompts has 0"),
        (lambda: Sizes(facts=()), r"facts has no number: give \(0,\)"),
        (lambda: Sizes(facts=(4, -1)), "facts has -1: use whole numbers from 0 on"),
        (lambda: Sizes(seed=-1), "seed has -1: use whole numbers from 0 on and below 10995"),
        (lambda: Sizes(seed=2**40), "seed has 1099511627776: use whole numbers from 0 on and bel"),
        (lambda: Sizes(seed=2**44), "seed has 17592186044416"),
    )


SMALL = ["--samples", "1", "--scored", "4", "--facts", "0"]


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = [str(MODEL), "--cache", "int4,recent=0,sinks=0", "--cache", "int8,recent=16"]
    arguments += ["--tasks", "kl,retrieval", "--retrieval", "copy", *SMALL]
    arguments += ["--length", "100", "--json", str(path)]
    done = CliRunner().invoke(main, ["evaluate", *arguments, "--max-drop", "5"])
    assert done.exit_code == 4, done.output
    assert "fails all of them in 16 bit" in done.output
    assert "is not a test of the cache" in done.output and "int8 + 4 sinks, 16" in done.output
    kept = json.loads(path.read_text())
    assert set(kept) == {"settings", "caches", "cache_bytes", "kl", "retrieval", "seconds"}
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.slow  # two processes
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Of the command's JSON, in processes that order sets otherwise; times come last."""
    arguments = [str(MODEL), "--cache", "int4,recent=16", "--retrieval", "keys,variables", *SMALL]
    texts = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "kvquant", "evaluate", *arguments, "--json", str(path)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        sizes = ["--length", "200", "--questions", "2"]
        subprocess.run([*command, *sizes], check=True, env=environment)
        text, times = path.read_text().split('"seconds": ')
        assert json.loads(times.rstrip()[:-1]).keys() == {"kl", "keys", "variables"}
        texts.append(text)
    assert texts[0] == texts[1]


def test_options_that_need_answers_or_a_task(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "The city of"}\n')
    prompts = ["--prompts", str(path)]  # those that have no answer are no help
    for tasks, option, value, message in (
        ("kl", "--max-drop", "1", "--max-drop needs the task retrieval"),
        ("generation", "--max-drop", "1", "--max-drop needs the task retrieval"),
        ("generation", "--pattern", "x", "--pattern needs answers to compare"),
        ("kl", "--retrieval", "keys", "--retrieval needs the task retrieval"),
    ):
        arguments = ["evaluate", str(MODEL), "--cache", "int8", "--tasks", tasks, option, value]
        arguments += prompts if tasks == "generation" else []
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2 and message in done.output, (tasks, option)


def test_files_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    arguments = ["evaluate", str(MODEL), "--cache", "int8", "--prompts", str(path)]
    for text, message in (
        ("{", "line 1, is no JSON"),
        ('{"answer": "3"}', 'line 1: write {"prompt"'),
        ('{"prompt": "3", "answer": 4}', 'line 1: write {"prompt"'),
        ("\n", "has no prompts"),
        ('{"prompt": ""}', 'line 1: write {"prompt"'),
        ("[" * 100_000, "line 1, is no JSON"),
        ('{"prompt": "\\ud800"}', "line 1, is no JSON"),
        ('{"prompt": "a\u2028b\x85c"}\n{}', 'line 2: write {"prompt"'),
        ('\ufeff{"prompt": "a", "score": NaN}\n{}', 'line 2: write {"prompt"'),
    ):
        path.write_bytes(text.encode())
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2 and message in done.output, text[:30]
