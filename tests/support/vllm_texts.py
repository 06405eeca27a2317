"""Texts that engines generate, and how two of them are compared. Without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Text(NamedTuple):
    """A generated text.

    Attributes:
        ids: its tokens.
        known: at each step the log-probabilities of the likeliest tokens and of the chosen one.
        found: tokens of the prompt that were in the engine's cache.
    """

    ids: list[Any]
    known: list[dict[Any, float]]
    found: int = 0

    @classmethod
    def all_of(cls, request: Any) -> list[Text]:
        """Read the outputs of a request of vllm.LLM that asks for logprobs."""
        return [
            cls(
                list(output.token_ids),
                [{token: one.logprob for token, one in step.items()} for step in output.logprobs],
                request.num_cached_tokens or 0,
            )
            for output in request.outputs
        ]

    @classmethod
    def parse(cls, given: Any) -> Text:
        """Read what json.dumps made of one, whose keys are strings."""
        ids, known, found = given
        steps = [{int(token): value for token, value in step.items()} for step in known]
        return cls(ids, steps, found)

    def sure_steps(self, margin: float) -> int:
        """Tokens before the first step whose likeliest token leads by less than the margin."""
        for at, known in enumerate(self.known):
            first, second = sorted(known.values(), reverse=True)[:2]
            if first - second < margin:
                return at
        return len(self.ids)


def check_alike(
    found: Sequence[Text], wanted: Sequence[Text], limit: float, *, least_sure: float
) -> None:
    """Compare log-probabilities, of each text as long as the tokens before are the same.

    Where the two likeliest tokens are nearer than both may move, either may come, and the text goes
    on otherwise. So no text is compared word for word: the margin is checked where two part.

    Args:
        found, wanted: texts of the same prompts.
        limit: how far the log-probabilities of the two likeliest tokens may move.
        least_sure: share of all tokens that stand before the first step of their text whose margin
            is too small: they are compared on any processor.
    """
    sure = sum(text.sure_steps(2 * limit) for text in wanted)
    total = sum(len(text.ids) for text in wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        steps = zip(ours.ids, theirs.ids, ours.known, theirs.known, strict=True)
        for at, (token, other, here, there) in enumerate(steps):
            likely = {*sorted(there, key=there.__getitem__)[-2:]}  # others move more
            errors = [abs(here[one] - there[one]) for one in likely & here.keys()]
            assert errors and max(errors) < limit, (at, here, there)
            if token != other:
                gap = there[other] - there.get(token, -float("inf"))
                assert gap < 2 * limit, (at, here, there)
                break
    assert sure >= least_sure * total, f"only {sure} of {total} tokens are sure to be compared"


def as_tokens(prompts: Sequence[list[int]]) -> list[Any]:
    """Prompts as vllm.LLM takes them."""
    return [{"prompt_token_ids": ids} for ids in prompts]


def abort_second(
    llm: Any, prompts: Sequence[list[int]], tokens: int, **options: Any
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
    for name, prompt in zip(names, as_tokens(prompts), strict=True):
        llm.llm_engine.add_request(name, prompt, params)
    found: dict[str, Text] = {}
    for step in range(1000):
        for request in llm.llm_engine.step():
            (found[request.request_id],) = Text.all_of(request)
        if step == 5:
            llm.llm_engine.abort_request([names[1]])
        if not llm.llm_engine.has_unfinished_requests():
            break
    aborted = found.pop(names[1], Text([], []))
    return aborted, [found[name] for name in (names[0], *names[2:])]
