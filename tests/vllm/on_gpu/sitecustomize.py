"""Python imports this first in every process that has what build.py packed. vLLM imports the
packages of grammars, for structured output, where nobody asks for any."""

from stand_ins import restore_row_stack, stand_in_for

restore_row_stack()
stand_in_for("xgrammar", "llguidance")
