"""`python -m kvquant` is the command kvquant."""

from .cli import main

main()
