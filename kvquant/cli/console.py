"""What the commands share on a terminal: kinds of options, errors, early checks."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..errors import ConfigError, DeviceError, KVQuantError
from ..io.model_source import check_source
from ..rows.format import HEAD_DIMS, NAMES, nearest

if TYPE_CHECKING:
    from ..kernels.cuda.runtime.spec import Spec

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

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Refuse what is none of these; see click.Path."""
        try:
            return check_source(str(super().convert(value, param, ctx)))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PlanFile(click.Path):
    """The file of a plan, or "auto"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Let "auto" pass; see click.Path."""
        return value if value == AUTO else super().convert(value, param, ctx)


class Name(click.Path):
    """The name of a file that need not be there."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Refuse an empty name too, which would be that of the folder; see click.Path."""
        if not str(value):
            self.fail("the name is empty", param, ctx)
        path = super().convert(value, param, ctx)
        assert isinstance(path, Path)
        return path


FORMATS = f"FORMAT is one of {', '.join(NAMES)}."  # epilog of commands that take one


class Format(click.Choice[str]):
    """A row format, which the epilog lists."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """See click.Choice."""
        return "FORMAT"

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Name ours where the name is another project's; see click.Choice."""
        message = super().get_invalid_choice_message(value, ctx)
        return message.removesuffix(".") + nearest(str(value))


class Pair(Format):
    """A format, or two: of K and V apart (int8-g4/int4-g4), or of a latent row's two parts.

    Args:
        separators: one, or each of the two that may stand between formats.
    """

    def __init__(self, separators: str) -> None:
        super().__init__(NAMES)
        self.separators = separators

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check each of them; see click.Choice."""
        separator = self._separator_of(str(value))
        names = str(value).split(separator)
        if len(names) > 2:
            allowed = " or ".join(["FORMAT", *(f"FORMAT{one}FORMAT" for one in self.separators)])
            self.fail(f"{value!r:.80} is not {allowed}", param, ctx)
        return separator.join(super(Pair, self).convert(name, param, ctx) for name in names)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the last of them; see click.Choice."""
        first, separator, last = incomplete.rpartition(self._separator_of(incomplete))
        items = super().shell_complete(ctx, param, last)
        return [CompletionItem(f"{first}{separator}{item.value}") for item in items]

    def _separator_of(self, text: str) -> str:
        return next((one for one in self.separators if one in text), self.separators[0])


class Positive(click.FloatRange):
    """A finite number above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Refuse nan and inf too; see click.FloatRange."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Device(click.Choice[str]):
    """cpu, cuda or cuda:N."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Take numbered GPUs too; see click.Choice."""
        if re.fullmatch("cuda:[0-9]{1,3}", str(value)):
            return str(value)
        return super().convert(value, param, ctx)


NEW_FILE, SOURCE = Name(), Source()
PLAN = PlanFile(exists=True, dir_okay=False, path_type=Path)
DEVICE = Device(["cpu", "cuda"])
FORMAT, POSITIVE = Format(NAMES), Positive()
PAIR, LATENT, EITHER = Pair("/"), Pair("+"), Pair("/+")  # of latent rows: see LatentFormat

# options that several commands have
OUTPUT = click.option("-o", "--output", type=NEW_FILE, required=True, help="File to write.")
JSON = click.option(
    "--json", "json_file", type=NEW_FILE, help="Write the figures to this file too."
)
# what a command decodes with: its model, where it runs, and in which dtype
MODEL = click.argument("model", type=SOURCE)
ON_DEVICE = click.option(
    "--device", type=DEVICE, default="cpu", show_default=True, help="Or cuda:N."
)
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of weights and arithmetic; 16 bit for large models.",
)


class Failure(click.ClickException):
    """An error that is no wrong use of the command line: one line, exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Interrupted(click.ClickException):
    """An interrupt, with the exit code that shells give it."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("Aborted.")

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it."""
        click.echo(self.message, err=True)


class Commands(click.Group):
    """Commands whose foreseen errors are one line, shown by click; others keep their traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print help, if that is asked for; see click.Group.parse_args."""
        with _shown_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; see click.Group.invoke."""
        with _shown_errors():
            return super().invoke(ctx)


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Turn foreseen errors into those that click shows."""
    try:
        yield
    except KVQuantError as error:
        raise Failure(str(error)) from error
    except KeyboardInterrupt:
        raise Interrupted from None
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has seen enough; click knows what to do
            raise
        what = error.strerror or str(error)
        raise Failure(f"{what}: {error.filename}" if error.filename else what) from error


def is_given(option: str) -> bool:
    """Whether an option of the command that runs was given, be it with its default."""
    source = click.get_current_context().get_parameter_source(option)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


@contextmanager
def enough_memory(options: str) -> Iterator[None]:
    """Turn errors about memory that cannot be had into one that says which options to change."""
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
    """Compile CUDA kernels that are not on the disk, and show how far that is.

    Returns:
        How many there were.

    Raises:
        ConfigError: they cannot be kept.
    """
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
    """Raise before a long run whose result could not be written, or would destroy what is there.

    Args:
        path: to be written; nothing is checked when None.
        inputs: files and folders that the run reads; of a folder everything in it.
        endings: that the name may have.

    Raises:
        ConfigError: the name has another ending, or there is no place for such a file, or it is a
            device, an input or part of one, or in the folder of a model.
    """
    if path is None:
        return
    if path.suffix not in endings:
        raise ConfigError(f"{path} cannot be written: name it NAME{' or NAME'.join(endings)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder")
    from ..io.atomic import check_writable, target_of

    try:
        target = target_of(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    for given in filter(None, inputs):
        inside = list(given.iterdir()) if given.is_dir() else []
        if Path(os.path.realpath(given)) in target.parents:
            raise ConfigError(f"{path} is in {given}, which is read: write to another folder")
        if any(_is_same(file, target) for file in (given, *inside)):
            raise ConfigError(f"{path} is read: give another name to write to")
    if _holds_model(target.parent):
        raise ConfigError(
            f"{path} cannot be written: {path.parent} holds a model, which is left as it is; name "
            "a file in another folder"
        )
    try:
        check_writable(target)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _is_same(given: Path, path: Path) -> bool:
    if os.path.realpath(given) == str(path):  # be it there or not
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
    """Plain data as JSON, which has no NaN and no infinite numbers: null stands for them."""

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
    """The text of a UTF-8 file.

    Raises:
        ConfigError: it is not UTF-8, or longer than MAX_TEXT.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise ConfigError(f"{path} has more than {MAX_TEXT >> 20} MiB: give a part of it")
    try:
        return data.decode("utf-8-sig")  # Windows begins texts with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None


def check_device(name: str) -> None:
    """Raise unless there is a device.

    Args:
        name: that DEVICE took.

    Raises:
        DeviceError: torch finds no such GPU.
    """
    if name == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(f"--device {name}: torch finds no GPU here; use --device cpu")
    count = torch.cuda.device_count()
    if name != "cuda" and int(name.removeprefix("cuda:")) >= count:
        raise DeviceError(f"--device {name}: torch finds GPUs up to cuda:{count - 1} here")


def warn_of_length(max_positions: int | None, what: str, length: int) -> None:
    """Say on stderr if a text is longer than a model was made for."""
    if max_positions is not None and length > max_positions:
        click.echo(
            f"Warning: {what} has {length} tokens, the model was made for {max_positions}", err=True
        )
