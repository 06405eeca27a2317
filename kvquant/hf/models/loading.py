"""Load a model from a folder, a GGUF file, or the Hugging Face hub, and run nothing from it.

kvquant checks before transformers reads: the model's own code, pickled weights (pytorch_model.bin),
quantization_config, which needs other packages, and adapters, which name other folders, all raise.
The attention implementation is ours, whatever config.json names.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.distributed.configuration_utils import DistributedConfig

from ...errors import ConfigError, missing_extra, refuse
from ...io.model_source import check_source, is_gguf

TensorPlan = Literal["auto"] | dict[str, str]
WEIGHTS = "model.safetensors"
LAYERS = {"n_layer", "n_layers", "num_hidden_layers", "num_layers"}
FLOATS = {"BF16", "F16", "F32", "F64"}  # dtypes of weights, as safetensors names them
# of the hub: no code, no pickles, no second copy of the weights in another program's layout
CONFIGS = ("config.json", "generation_config.json")
FILES = ("model*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja")
# transformers downloads nothing with these, and runs nothing
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load(
    source: str | Path,
    dtype: torch.dtype,
    tp_plan: TensorPlan | None = None,
    *,
    has_tokenizer: bool = True,
) -> tuple[Any, Any, torch.dtype | None]:
    """Load a model and its tokenizer; the third result is the dtype of the saved model.

    Weights that the model does not use (images, prediction of several tokens) cause a warning.

    Args:
        source: as of located; weights of a GGUF file are dequantized.
        dtype: of weights and arithmetic.
        tp_plan: as of CachedModel.from_pretrained.
        has_tokenizer: else the tokenizer is None.

    Raises:
        ConfigError: as located; no model that transformers loads by its own code from safetensors
            or GGUF; weights that are missing or do not fit; or a tp_plan and one process.
        UnsupportedError: a GGUF file, without the packages that read one.
    """
    if tp_plan is not None and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigError(
            "tp_plan spreads a model over processes, and there is one: start them by "
            "torchrun --nproc-per-node=2, or leave tp_plan out"
        )
    folder = located(source)
    of_gguf = is_gguf(folder)
    shapes = [] if of_gguf else _check_folder(folder)
    what, advice = str(folder), "give a causal language model that this transformers can load"
    with _quiet(), _placed(folder) as (where, options):
        try:
            config = transformers.AutoConfig.from_pretrained(where, **options)
            saved = config.dtype
            # transformers' own choice, whatever the file names: a kernel would be downloaded
            config._attn_implementation = config._experts_implementation = None
            if not of_gguf:
                _check_size(folder, config, dtype, shapes)
            elif hasattr(transformers, "GgufConfig"):  # else packed weights, for kernels of others
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            found: Any = transformers.AutoModelForCausalLM.from_pretrained(
                where,
                config=config,
                dtype=dtype,
                use_safetensors=None if of_gguf else True,
                ignore_mismatched_sizes=True,  # listed below, by name
                output_loading_info=True,
                **_spreading(tp_plan),
                **options,
            )
            model, told = found
            options.pop("quantization_config", None)
            if of_gguf:  # an ordinary model from here on, with an ordinary config
                model.hf_quantizer, model.is_quantized = None, False
                vars(model.config).pop("quantization_config", None)
                model.name_or_path = model.config.name_or_path = str(folder)
            what = f"the tokenizer of {folder}"
            advice = "put its files there (tokenizer.json, tokenizer_config.json)"
            tokenizer = _tokenizer(folder, where, options) if has_tokenizer else None
        except (ConfigError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of many kinds; a panic of tokenizers is no Exception
            line = _first_line(error).rstrip(" .,:")
            raise ConfigError(f"{what} could not be loaded: {line}: {advice}") from error
    problems = [
        f"{name} of shape {list(stored)}, where its config.json asks for {list(wanted)}"
        for name, stored, wanted in sorted(told["mismatched_keys"])
    ]
    if missing := sorted(told["missing_keys"]):
        problems.append(
            f"no weights for {len(missing)} tensors of the model that its config.json asks for, "
            f"{missing[0]} first"
        )
    refuse(ConfigError, (f"{folder} has {one}: fix it, or take another copy" for one in problems))
    unused = sorted(told["unexpected_keys"])
    if unused:
        warnings.warn(
            f"{folder} has {len(unused)} tensors that its model does not use, {unused[0]} first",
            stacklevel=2,
        )
    return model, tokenizer, saved


def tokenizer_of(model: Any) -> Any:
    """The tokenizer beside a loaded model's weights; ConfigError if there is none."""
    name = getattr(model, "name_or_path", "")
    try:
        if not name:
            raise OSError("the model has no name_or_path")
        with _quiet(), _placed(Path(name)) as (where, options):
            return _tokenizer(name, where, options)
    except Exception as error:  # of many kinds, as in load
        raise ConfigError(
            f"the tokenizer of {name or type(model).__name__} could not be loaded: "
            f"{_first_line(error)}: give tokenizer="
        ) from error


def _tokenizer(name: str | Path, where: str, options: dict[str, Any]) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    if "gguf_file" in options:
        _check_words(tokenizer)
    tokenizer.model_max_length = sys.maxsize  # or it warns of texts that are cut later
    tokenizer.name_or_path = str(name)
    return tokenizer


def _check_words(tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer made of a GGUF file splits the words of its vocabulary.

    transformers 5.17 and older make one of Gemma's files that reads text letter by letter.
    """
    size = len(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(range(0, size, max(size // 4096, 1)))
    words = [tokenizer.convert_tokens_to_string([piece]) for piece in pieces]
    words = [word for word in words if len(word) > 3 and word.strip().isalpha()]
    split = sum(len(tokenizer.encode(word, add_special_tokens=False)) > 1 for word in words)
    if 2 * split > len(words):
        raise ConfigError(
            f"transformers {transformers.__version__} makes a wrong tokenizer of this GGUF file, "
            f"which splits {split} of {len(words)} words of its own vocabulary: install "
            "transformers>=5.18, or give the model's folder"
        )


def _spreading(tp_plan: TensorPlan | None) -> dict[str, Any]:
    """The options of transformers' from_pretrained that spread a model over ranks."""
    if tp_plan is None:
        return {}
    if not hasattr(transformers.PreTrainedModel, "prepare_distribute_model"):  # an older version
        return {"tp_plan": tp_plan}
    return {"distributed_config": DistributedConfig(tp_plan=tp_plan)}


def located(source: str | Path, files: Sequence[str] = FILES) -> Path:
    """The folder or the GGUF file of a model, from the hub if its cache folder lacks it.

    Args:
        source: a folder with safetensors files, a GGUF file, or OWNER/NAME on the Hugging Face hub.
        files: patterns of those to download.

    Raises:
        ConfigError: there is no such model, or the hub does not answer or refuses it.
    """
    path = check_source(source)
    if path.exists():
        return path
    name = str(path)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
        is_bare = files is FILES and not list(folder.glob("*.safetensors"))
        if is_bare:  # raises if the hub is not reached: the folder is what was here before
            huggingface_hub.model_info(name)
    except Exception as error:  # of huggingface_hub, or of the HTTP library that its version has
        why = (
            f"is no folder or GGUF file here, its weights are not in the hub's cache folder, and "
            f"the hub gives none: {_first_line(error).rstrip(' .:')}. Check the path; or run "
            f"`hf download {name} --local-dir FOLDER` where there is a network, and give FOLDER"
        )
        if isinstance(error, RepositoryNotFoundError):
            why = (
                "is no folder, no GGUF file, and no model on the Hugging Face hub: give the path "
                "of one, or OWNER/NAME; for a private model log in (hf auth login)"
            )
        if isinstance(error, GatedRepoError):
            why = (
                "is gated on the Hugging Face hub: accept its terms on its page there, and log in "
                "(hf auth login)"
            )
        raise ConfigError(f"{name} {why}") from error
    if is_bare:
        raise ConfigError(
            f"{name} has no safetensors files on the Hugging Face hub, and pickles are not "
            "loaded, as they can run code: take another one; of a GGUF file give the path"
        )
    return folder


def folder_here(
    source: str, revision: str | None, cache_dir: str | None, downloads: bool = False
) -> str | None:
    """A model's folder, or that of a name in the hub's cache folder; None if it is not there.

    revision and cache_dir are those of the hub, None for its own. With downloads it is filled.
    """
    if os.path.isdir(source):
        return source
    with suppress(Exception):  # of huggingface_hub, or of the HTTP library that its version has
        return huggingface_hub.snapshot_download(
            source,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=list(FILES),
            local_files_only=not downloads,
        )
    return None


@contextmanager
def _placed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the options by which transformers finds a folder or a GGUF file."""
    # A GGUF file gets a temporary folder of its own: transformers would load the files beside it,
    # such as another model's tokenizer.json.
    if not is_gguf(path):
        yield str(path), dict(LOCAL)
        return
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise missing_extra("transformers reads GGUF files with more", "gguf", error) from error
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as alone:
        link = Path(alone, path.name)
        for make in (os.symlink, os.link):
            with suppress(OSError):
                make(path.resolve(), link)
                break
        else:
            raise ConfigError(
                f"{path} could not be linked from {alone}: set TMPDIR to a folder on its disk"
            )
        yield alone, {**LOCAL, "gguf_file": path.name}


def load_config(source: str | Path) -> Any:
    """Read the config of a model, without its weights.

    Raises:
        ConfigError: as located, or no config that transformers knows.
        UnsupportedError: as load.
    """
    folder = located(source, CONFIGS)
    if not is_gguf(folder):
        _read_json(folder / "config.json")
    with _quiet(), _placed(folder) as (where, options):
        try:
            config = transformers.AutoConfig.from_pretrained(where, **options)
            config.name_or_path = str(folder)
            return config
        except Exception as error:
            raise ConfigError(f"{folder} could not be loaded: {_first_line(error)}") from error


def empty_model(folder: Path) -> Any:
    """The model of a config, with weights on the meta device; see load_config."""
    config = load_config(folder)
    with _quiet():
        return _empty(config, torch.bfloat16)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's safetensors files by name, mapped, not read; errors as of load."""
    _check_folder(folder)
    found: dict[str, torch.Tensor] = {}
    for path in _weights(folder):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def _empty(config: Any, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # of any model's code; many models are no causal language models
        raise ConfigError(
            f"no causal language model could be made of a config of {config.model_type}: "
            f"{_first_line(error).rstrip(' .:')}: give one that this transformers can load"
        ) from error


def _check_folder(folder: Path) -> list[list[int]]:
    """Raise ConfigError for a folder that would lead elsewhere, or run something."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model's folder: it has no config.json")
    config = _read_json(folder / "config.json")
    shapes = [shape for path in _weights(folder) for shape in _shapes(path)]
    refuse(ConfigError, (f"{folder}{why}" for why in _oddities(folder, config, len(shapes))))
    return shapes


def _oddities(folder: Path, config: dict[str, Any], tensors: int) -> Iterator[str]:
    """What a folder has that is not loaded; it has so many tensors of weights."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in LAYERS & part.keys():
            if isinstance(part[name], int) and part[name] > tensors:
                yield (
                    f": config.json has {name} {part[name]}, and there are {tensors} tensors of "
                    "weights: fix it, or take another copy"
                )
        quantization = part.get("quantization_config") or part.get("compression_config")
        if quantization:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            yield (
                f" has quantized weights ({method}), which need other packages: give one with 16- "
                "or 32-bit weights, or load it yourself and pass it to CachedModel"
            )
    if config.get("transformers_weights"):
        yield f" names its weights itself: call them {WEIGHTS}"
    if (folder / "adapter_config.json").exists():
        yield (
            " holds an adapter (adapter_config.json), which leads to another model: merge it into "
            "that one, or load it by peft and pass it to CachedModel"
        )


def _weights(folder: Path) -> list[Path]:
    """The files of weights, all of them safetensors beside config.json."""
    names = sorted(path.name for path in folder.iterdir())
    index = folder / f"{WEIGHTS}.index.json"
    if any(name.startswith("shard-") for name in names):
        raise ConfigError(f"{folder} is a distributed checkpoint: save it by save_pretrained")
    if WEIGHTS in names:
        return [folder / WEIGHTS]
    if index.name not in names:
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        what = f"pickles ({pickles[0]}), which can run code" if pickles else "missing"
        raise ConfigError(
            f"{folder} could not be loaded: its weights are {what}: {WEIGHTS} is needed, as "
            "save_pretrained writes it"
        )
    found = _read_json(index).get("weight_map")
    shards: list[Any] = list(found.values()) if isinstance(found, dict) else [found]
    for shard in shards:
        if shard not in names or not str(shard).endswith(".safetensors"):
            raise ConfigError(
                f"{index} names {shard!r:.80}: there must be a safetensors file of this name "
                "beside it"
            )
    return [folder / shard for shard in sorted(set(shards))]


def _shapes(path: Path) -> list[list[int]]:
    """The shapes of a safetensors file of 16- to 64-bit weights, from its header."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise ConfigError(f"{path} could not be loaded: it is not a file")
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} could not be loaded: {_first_line(error)}") from error
    for name, found in slices.items():
        if name.endswith("weight") and found.get_dtype() not in FLOATS:
            raise ConfigError(
                f"{path} has quantized weights ({name} is {found.get_dtype()}), and config.json "
                "does not tell how: give a model with 16- or 32-bit weights"
            )
    return [found.get_shape() for found in slices.values()]


def _check_size(folder: Path, config: Any, dtype: torch.dtype, shapes: list[list[int]]) -> None:
    """Raise ConfigError for a config of a much larger model, before that is made."""
    wanted, stored = _empty(config, dtype).num_parameters(), sum(map(math.prod, shapes))
    if wanted > 2 * stored:
        raise ConfigError(
            f"{folder}: config.json asks for a model of {wanted:,} numbers, and its weights have "
            f"{stored:,}: fix it, or take another copy"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} could not be read: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} could not be read: it holds no JSON object")
    return found


def _first_line(error: BaseException) -> str:
    """An error's first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    if isinstance(error, (OSError, ValueError, ImportError, RuntimeError)) and said:
        return said
    return f"{type(error).__name__}: {said}"  # 'model_type' alone tells nothing


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without progress bars and reports of what it loads."""
    logging = transformers.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
