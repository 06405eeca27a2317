"""Whether a model still answers, reasons and finds things with a quantized cache.

kvquant.evaluate compares caches. Its settings are here:

    Task      what is evaluated: kinds of tasks, retrieval tasks, chat template, drafts
    Sizes     how much: lengths of contexts, prompts, questions, tokens, the seed
    Reading   how prompts come into caches: at once, in chunks, from packed rows
    Example   a prompt of your own, with an answer if there is one

kvquant.evaluation.report makes tables of what it returns, kvquant.evaluation.html_report a page.
"""

from .decoding import Reading
from .evaluate import Example, Sizes, Task

__all__ = ["Example", "Reading", "Sizes", "Task"]
