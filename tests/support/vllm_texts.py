"""Texts that engines of vLLM generate, and how two of them are compared. Without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Text(NamedTuple):
    """A generated text.

    Attributes:
        ids: its tokens.
        known: at each step the log-probabilities of the likeliest tokens and of the chosen one.
    """

    ids: list[Any]
    known: list[dict[Any, float]]

    @classmethod
    def of(cls, output: Any) -> Text:
        """Read an output of vllm.LLM that was asked for logprobs."""
        known = [{token: one.logprob for token, one in step.items()} for step in output.logprobs]
        return cls(list(output.token_ids), known)

    @classmethod
    def parse(cls, given: Any) -> Text:
        """Read what json.dumps made of one, whose keys are strings."""
        ids, known = given
        return cls(ids, [{int(token): value for token, value in step.items()} for step in known])

    def sure_steps(self, margin: float) -> int:
        """Tokens before the first step whose likeliest token leads by less than the margin."""
        for at, known in enumerate(self.known):
            first, second = sorted(known.values(), reverse=True)[:2]
            if first - second < margin:
                return at
        return len(self.ids)


def check_alike(
    found: Sequence[Text],
    wanted: Sequence[Text],
    limit: float,
    *,
    most: float | None = None,
    least_sure: float = 1 / 3,
    sampled: bool = False,
) -> None:
    """Compare log-probabilities, of each text as long as the tokens before are the same.

    Where the two likeliest tokens are nearer than both may move, either may come, and the text goes
    on otherwise. So no text is compared word for word: the margin is checked where two part.

    Args:
        found, wanted: texts of the same prompts.
        limit: how far the log-probabilities of the two likeliest tokens may move.
        most: how far they may move in a few steps, where the mean of all is below half the limit;
            the limit when None.
        least_sure: share of all tokens that stand before the first step of their text whose margin
            is too small: they are compared on any processor.
        sampled: tokens were drawn, so that a text may part anywhere, and rarely does; least_sure is
            then the share of tokens that were compared.
    """
    sure = total = 0
    most = limit if most is None else most
    moved: list[float] = []
    for ours, theirs in zip(found, wanted, strict=True):
        total += len(theirs.ids)
        sure += 0 if sampled else theirs.sure_steps(2 * limit)
        steps = zip(ours.ids, theirs.ids, ours.known, theirs.known, strict=True)
        for at, (token, other, here, there) in enumerate(steps):
            # the likeliest, and what was drawn: what is less likely moves more, and never comes
            likely = {*sorted(there, key=there.__getitem__)[-2:], other}
            errors = [abs(here[one] - there[one]) for one in likely & here.keys()]
            assert errors and max(errors) < most, (at, here, there)
            moved.append(max(errors))
            if token != other:
                gap = there[other] - there.get(token, -float("inf"))
                assert sampled or gap < 2 * most, (at, here, there)
                break
            sure += sampled
    assert sure >= least_sure * total, f"only {sure} of {total} tokens are sure to be compared"
    assert most == limit or sum(moved) < limit / 2 * len(moved)


def check_same_rows(found: Sequence[Text], wanted: Sequence[Text], **options: Any) -> None:
    """check_alike where both texts were read from the same int4 rows.

    One code in some 10,000 rounds to its neighbour, by a 15th of a group's range, where sums are in
    another order. Then codes of later layers and tokens do. Most steps do not move at all; with two
    versions of the CPU kernels one of 512 moved by .075.
    """
    check_alike(found, wanted, 0.025, most=0.15, **options)


def abort_second(
    llm: Any, prompts: Sequence[Any], tokens: int, **options: Any
) -> tuple[Text, list[Text]]:
    """Abort the second of several requests in the middle.

    Args:
        llm: of vLLM.
        prompts: of the requests.
        tokens: of each text.
        options: of SamplingParams.

    Returns:
        What the second one got, and the texts of the others.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **options)
    names = [f"request {i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        llm.llm_engine.add_request(name, prompt, params)
    found: dict[str, Text] = {}
    for step in range(1000):
        for request in llm.llm_engine.step():
            found[request.request_id] = Text.of(request.outputs[0])
        if step == 5:
            llm.llm_engine.abort_request([names[1]])
        if not llm.llm_engine.has_unfinished_requests():
            break
    aborted = found.pop(names[1], Text([], []))
    return aborted, [found[name] for name in (names[0], *names[2:])]
