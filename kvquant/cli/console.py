"""What the commands share on a terminal: kinds of options, errors, early checks."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..errors import ConfigError, KVQuantError, refuse
from ..io.model_source import check_source
from ..rows.format import HEAD_DIMS, NAMES, nearest

if TYPE_CHECKING:
    from ..kernels.cuda.runtime.spec import Spec

F = TypeVar("F")
MAX = 2**31 - 1  # lengths are int32
MAX_TEXT = 1 << 28  # bytes; /dev/zero has no end
COUNT = click.IntRange(min=1, max=MAX)
WHOLE = click.IntRange(min=0, max=MAX)
HEAD_DIM = click.Choice(HEAD_DIMS)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
AUTO = "auto"  # io.plan.AUTO; io waits for torch


class Source(click.Path):
    """A model: a folder, a GGUF file, or a name on the hub, as a path."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            return check_source(str(super().convert(value, param, ctx)))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PlanFile(click.Path):
    """The file of a plan, or "auto"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == AUTO else super().convert(value, param, ctx)


FORMATS = f"FORMAT is one of {', '.join(NAMES)}."  # epilog of commands that take one


class Format(click.Choice[str]):
    """A row format, or two with a separator: "/" of K and V, "+" of a latent row's parts."""

    def __init__(self, separators: str = "") -> None:
        super().__init__(NAMES)
        self.separators = separators

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "FORMAT"

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Name the nearest format."""
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + nearest(str(value))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        separator = self._separator_of(str(value))
        names = str(value).split(separator or None)
        if len(names) > 2:
            allowed = " or ".join(["FORMAT", *(f"FORMAT{one}FORMAT" for one in self.separators)])
            self.fail(f"{value!r:.80} is not {allowed}", param, ctx)
        checked = [super(Format, self).convert(name, param, ctx) for name in names or [value]]
        return separator.join(checked)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        separator = self._separator_of(incomplete)
        first, _, last = incomplete.rpartition(separator) if separator else ("", "", incomplete)
        items = super().shell_complete(ctx, param, last)
        before = first + separator
        return [CompletionItem(f"{before}{item.value}") for item in items]

    def _separator_of(self, text: str) -> str:
        return next((one for one in self.separators if one in text), "")


class Positive(click.FloatRange):
    """A finite number above 0."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


SOURCE, POSITIVE = Source(path_type=Path), Positive(min=0, min_open=True)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
PLAN = PlanFile(exists=True, dir_okay=False, path_type=Path)
FORMAT, LATENT, EITHER = Format(), Format("+"), Format("/+")
HTML = ".html", ".htm"

# arguments and options of several commands
MODEL = click.argument("model", type=SOURCE)
MODEL_OR_NONE = click.argument("model", type=SOURCE, required=False)
OUTPUT = click.option("-o", "--output", type=NEW_FILE, required=True, help="File to write.")
JSON = click.option(
    "--json", "json_file", type=NEW_FILE, help="Write the figures to this file too."
)


def _together(*options: Any) -> Any:
    """Options that commands have together, in this order."""
    return lambda command: reduce(lambda found, option: option(found), options[::-1], command)


ON_DEVICE: Callable[[F], F] = _together(
    click.option("--device", default="cpu", help="Or cuda, or cuda:N."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default="float32",
        help="Of weights and arithmetic; 16 bit for large models.",
    ),
)
WINDOW: Callable[[F], F] = _together(
    click.option("--sink-len", type=WHOLE, default=4, help="First 16-bit tokens."),
    click.option("--recent-len", type=WHOLE, default=128, help="Last 16-bit tokens."),
)


class Commands(click.Group):
    """Commands whose foreseen errors are one line, shown by click; others keep their traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print help, if the user wants it."""
        with _shown_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _shown_errors():
            return super().invoke(ctx)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Turn foreseen errors into those that click shows."""
    try:
        yield
    except KVQuantError as error:
        raise _failure(str(error)) from error
    except KeyboardInterrupt:
        click.echo("Aborted.", err=True)
        raise click.exceptions.Exit(130) from None  # the exit code that shells give it
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has seen enough; click knows what to do
            raise
        what = error.strerror or str(error)
        raise _failure(f"{what}: {error.filename}" if error.filename else what) from error


def _failure(message: str) -> click.UsageError:
    """One line, and exit code 2; without a context no usage."""
    return click.UsageError(" ".join(message.split()))


def given_options(*names: str) -> list[str]:
    """The running command's options that the user gave, as --options."""
    context = click.get_current_context()
    unset = (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    found = {one.name: one.opts[-1] for one in context.command.params}
    return [found[name] for name in names if context.get_parameter_source(name) not in unset]


def refuse_options(names: Sequence[str], why: str) -> None:
    """Raise UsageError if the user gave one of these options."""
    for option in given_options(*names):
        raise click.UsageError(f"{option} {why}")


@contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Turn out-of-memory errors into one that names the options to lower."""
    words = ("can't allocate", "out of memory", "not enough memory", "calculation overflow")
    try:
        yield
    except KVQuantError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in words):
            raise
        raise ConfigError(
            f"these sizes take more memory than there is: use a smaller {options}"
        ) from None


def compile_kernels(kernels: Sequence[Spec], arch: str) -> int:
    """Compile CUDA kernels that are not on the disk, and return their number."""
    from ..kernels.cuda.runtime.compile import missing
    from ..kernels.cuda.runtime.compile_pool import compile_all
    from ..text import progress

    todo = missing(kernels, arch)
    if not todo:
        return 0
    with progress(len(todo), "Compiling") as update:
        compile_all(todo, arch, lambda kernel: update(1, kernel.kernel.partition(".")[0]))
    if missing(todo, arch):
        raise ConfigError(
            "kernels cannot be kept: let KVQUANT_CACHE_DIR name a folder that can be written"
        )
    return len(todo)


def check_output(
    path: Path | None, *inputs: Path | None, endings: tuple[str, ...] = (".safetensors",)
) -> None:
    """Raise ConfigError, before a long run, if a file cannot be written or must not be replaced.

    Args:
        path: the file; None is fine.
        inputs: files and folders that the run reads.
        endings: allowed ones of the name.
    """
    if path is not None:
        name = path if path.name else "a file without a name"
        refuse(ConfigError, (f"{name} {why}" for why in _unwritable(path, inputs, endings)))


def _unwritable(
    path: Path, inputs: Sequence[Path | None], endings: tuple[str, ...]
) -> Iterator[str]:
    """Why a file is not written; see check_output."""
    if path.suffix not in endings:
        yield f"cannot be written: name it NAME{' or NAME'.join(endings)}"
    if not path.absolute().parent.is_dir():
        yield f"cannot be written: {path.parent} is not a folder"
    from ..io.atomic import check_writable, target_of

    try:
        target = target_of(path)
        for given in filter(None, inputs):
            read = Path(os.path.realpath(given))
            if read in target.parents:
                yield f"is in {given}, which is read: write to another folder"
            files = [read, *read.iterdir()] if read.is_dir() else [read]
            if any(_is_same(file, target) for file in files):
                yield "is read: give another name to write to"
        if _holds_model(target.parent):
            yield (
                f"cannot be written: {path.parent} holds a model, which is left as it is; name a "
                "file in another folder"
            )
        check_writable(target)
    except OSError as error:
        yield f"cannot be written: {error.strerror}"


def _is_same(given: Path, path: Path) -> bool:
    if os.path.realpath(given) == str(path):
        return True
    return given.exists() and path.exists() and os.path.samefile(given, path)


def _holds_model(folder: Path) -> bool:
    """Whether a folder is one that transformers loads a model from."""
    try:
        config = json.loads((folder / "config.json").read_bytes()[:MAX_TEXT])
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "model_type" in config


def json_text(data: object) -> str:
    """Plain data as JSON, with null for NaN and infinite numbers."""

    def plain(value: object) -> object:
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(data), indent=2)


def write_json(path: Path | None, data: object) -> None:
    """Write plain data as JSON; an old file is replaced when the new one is whole."""
    if path is None:
        return
    from ..io.atomic import save_text

    save_text(path, json_text(data) + "\n")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ConfigError if it is not UTF-8, or longer than MAX_TEXT."""
    with open(path, "rb") as file:
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise ConfigError(f"{path} has more than {MAX_TEXT >> 20} MiB: give a part of it")
    try:
        return data.decode("utf-8-sig")  # Windows begins texts with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None


def warn_of_length(max_positions: int | None, what: str, length: int) -> None:
    """Warn on stderr of a text that is longer than the model was made for."""
    if max_positions is not None and length > max_positions:
        click.echo(
            f"Warning: {what} has {length} tokens, the model was made for {max_positions}", err=True
        )
