"""Python imports this file first in every process that finds a pack (gpu_pack.py). vLLM and SGLang
import packages of grammars (structured output) although nobody asks for a grammar."""

from stand_ins import restore_row_stack, stand_in_for

restore_row_stack()
stand_in_for("xgrammar", "llguidance")
