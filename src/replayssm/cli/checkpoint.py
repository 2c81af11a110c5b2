"""Opens a checkpoint directory: safetensors only, nothing fetched, no code of the checkpoint run, one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm.cli.args import UsageError, need_transformers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
BYTES = 256
SMALL = 10_000_000  # parameters below which torch's threads only wait for each other: docs/log.md


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model and its way from text to token ids and back."""

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.model.config.get_text_config(decoder=True)


def load(path: Path, *, dtype: str = "float32", device: str = "cpu", replay: bool = True) -> Checkpoint:
    """The checkpoint in ``path``. ``replay``: refuse, before weights are read, types that ``attach`` does not support.

    Text becomes tokens through the directory's tokenizer files. Without any, a model of exactly 256 tokens is taken to
    be byte-level, as our tiny models are: token id == byte, after the configuration's ``bos_token_id``.
    """
    _check_config(path)
    _check_weights(path)
    need_transformers()
    import safetensors
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, **local)
        if replay:
            _check_type(path, config)
        known = type(config) in AutoModelForCausalLM._model_mapping
        auto: Any = AutoModelForCausalLM if known else AutoModelForImageTextToText
        model, report = auto.from_pretrained(
            path, dtype=dtype if dtype == "auto" else getattr(torch, dtype), use_safetensors=True,
            output_loading_info=True, **local,
        )  # fmt: skip
        model = model.to(device).eval()
        if device == "cpu" and model.num_parameters() < SMALL:
            torch.set_num_threads(1)
    except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot load {path}: {_first_line(error)}") from None
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise UsageError(f"cannot load {path}: {len(names)} weights are missing from the checkpoint, first {names[0]}")
    return Checkpoint(model, *_text(path, model.config.get_text_config(decoder=True)))


def check_device(device: str) -> str:
    """``auto`` resolved, anything else tried."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {device!r} cannot be used: {_first_line(error)}") from None
    return device


def _check_config(path: Path) -> None:
    if not path.is_dir():
        raise UsageError(
            f"{path} is not a directory" if path.exists() else f"checkpoint directory {path} does not exist"
        )
    try:
        description = json.loads((path / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is not a checkpoint: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(description, dict) or not isinstance(description.get("model_type"), str):
        raise UsageError(f"{path / 'config.json'} names no model_type")


def _check_weights(path: Path) -> None:
    """Every file of weights is there and as long as its header says."""
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            raise UsageError(f"{index} cannot be read as an index of weights") from None
    elif not (path / names[0]).is_file() and any([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        raise UsageError(f"{path} has pickled weights only; convert them to model.safetensors, pickles are not loaded")
    for name in names:
        file = path / name
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(min(length, 100_000_000)))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except FileNotFoundError:
            raise UsageError(f"{path} has no {name}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{file} is truncated or no safetensors file: its header cannot be read") from None
        if (size := file.stat().st_size) != 8 + length + end:
            raise UsageError(
                f"{file} is truncated or damaged: {size} bytes, but its header describes {8 + length + end}"
            )


def _check_type(path: Path, config: Any) -> None:
    from replayssm.hf import SUPPORTED

    kind = config.get_text_config(decoder=True).model_type
    if kind not in SUPPORTED:
        raise UsageError(
            f"{path} is of model type {kind!r}, which has no recurrence that replayssm knows; supported: "
            f"{', '.join(sorted(SUPPORTED))}"
        )


def _text(path: Path, config: Any) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    if any((path / name).is_file() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a damaged tokenizer raises
            raise UsageError(f"cannot load the tokenizer in {path}: {_first_line(error)}") from None
        return lambda text: tokenizer(text).input_ids, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    if config.vocab_size != BYTES:
        raise UsageError(
            f"{path} has no tokenizer files; only a byte-level model (vocab_size {BYTES}) does without, and this one "
            f"has vocab_size {config.vocab_size}"
        )
    start = [] if config.bos_token_id is None else [config.bos_token_id]
    special = {config.bos_token_id, config.pad_token_id}

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i not in special).decode("utf-8", "replace")

    return lambda text: start + list(text.encode()), decode


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
