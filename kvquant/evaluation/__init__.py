"""Whether a model still predicts, writes and finds the same with a quantized cache.

kvquant.evaluate compares caches. This package has its settings:

    Task      what to evaluate: kinds of tasks, retrieval tasks, chat template
    Sizes     how much: lengths of contexts, prompts, questions, tokens, the seed
    Reading   how prompts come into caches: at once, in chunks, from packed rows
    Example   a prompt of your own, with its answer if it has one

kvquant.evaluation.report shows the result as text and as a page.
"""

from .decoding import Reading
from .evaluate import Example, Sizes, Task

__all__ = ["Example", "Reading", "Sizes", "Task"]
