"""The command lm_eval, which knows the model kvquant: python -m kvquant.lm_eval --model kvquant ...

The harness has no entry point for other packages' models: importing a class registers it. All
options are those of lm_eval.
"""

from __future__ import annotations

import sys

from ..errors import KVQuantError


def main() -> None:
    """Run lm_eval; foreseen errors of kvquant are one line and exit code 2, as in its commands."""
    try:
        from . import model  # noqa: F401 (it registers itself)

        from lm_eval.__main__ import cli_evaluate  # isort: skip

        cli_evaluate()
    except KVQuantError as error:
        print("Error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
