"""The command kvquant, and `python -m kvquant`: where the process begins and ends."""

from __future__ import annotations

import io
import signal
import sys
import warnings
from types import FrameType

INTERRUPTED = 130  # exit code, as shells have it


def main() -> None:
    """Run the command; an interrupt ends it in one line, even while libraries are loaded."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background
        signal.signal(signal.SIGINT, interrupt)
    warnings.showwarning = _tell
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # it may be closed
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        from .cli.main import main as command

        command()
    except SystemExit as end:
        if interrupted:
            end.code = INTERRUPTED
        raise
    except BaseException:
        if not interrupted:  # a library may have made another error of it
            raise
        print("Aborted.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        exec("")  # Python forgets an interrupt of a library's exec, or it would end by the signal
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left that a traceback tells


def _tell(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning of a library as the commands print theirs: one line, no source."""
    if sys.stderr:
        print("Warning:", " ".join(str(message).split()), file=sys.stderr)


if __name__ == "__main__":
    main()
