"""Bad input on the command line: each one clear line on stderr, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import continue_text, copy_checkpoint, save_byte_model
from safetensors.torch import load_file, save_file

from replayssm.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_safetensors_file(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"not a safetensors file")


def header_only(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x08")


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def a_weight_missing(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def a_weight_of_another_shape(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def a_shard_missing(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "model-2.safetensors"}}')


def bad_json(path: Path) -> None:
    (path / "config.json").write_text("{")


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def no_model_type(path: Path) -> None:
    (path / "config.json").write_text("{}")


def bad_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


def llama(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "llama", "vocab_size": 256}')


def unknown_type(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "no_such_model"}')


def larger_vocabulary(path: Path) -> None:
    save_byte_model(path, vocab_size=300)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, "is truncated or damaged"),
        (no_safetensors_file, "its header cannot be read"),
        (header_only, "its header cannot be read"),
        (pickled, "pickled weights only"),
        (a_weight_missing, "1 weights are missing from the checkpoint, first model.norm.weight"),
        (a_weight_of_another_shape, "cannot load"),
        (a_shard_missing, "has no model-2.safetensors"),
        (bad_json, "config.json cannot be read"),
        (no_config, "has no config.json"),
        (no_model_type, "names no model_type"),
        (bad_tokenizer, "cannot load the tokenizer"),
        (llama, "is of model type 'llama', which has no recurrence that replayssm knows; supported: bailing_hybrid"),
        (unknown_type, "no_such_model"),
        (larger_vocabulary, "has no tokenizer files"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_checkpoint_is_one_line(
    spoil: Callable[[Path], None], message: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = copy_checkpoint(checkpoint, tmp_path)
    spoil(path)
    before = sorted((file.name, file.stat().st_size) for file in path.iterdir())
    assert continue_text(path, "--prompt", "x") == 2
    assert_one_line(capfd.readouterr(), message)
    assert sorted((file.name, file.stat().st_size) for file in path.iterdir()) == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["serve"], "invalid choice: 'serve'"),
        (["demo", "--model", "rwkv"], "invalid choice: 'rwkv'"),
        (["demo", "--tokens", "1"], "must be a whole number of at least 2; got '1'"),
        (["demo", "--tokens", "many"], "must be a whole number of at least 2; got 'many'"),
        (["demo", "--fold-every", "0"], "must be a whole number of at least 1"),
        (["demo", "--prompt", ""], "the prompt is empty"),
        (["demo", "--prompt", "\udcff"], "the prompt is not UTF-8"),
        (["demo", "--backend", "no_such", "--model", "gdn"], "unknown backend 'no_such'; valid: auto, "),
        (["demo", "--what"], "unrecognized arguments: --what"),
        (["verify", "--backend", "no_such"], "unknown backend 'no_such'; valid: "),
        (["verify", "--device", "no_such"], "device 'no_such' cannot be used"),
        (["generate", "--prompt", "x"], "required: --model"),
        (["generate", "--model", "{missing}", "--prompt", "x"], "does not exist"),
        (["generate", "--model", "{file}", "--prompt", "x"], "is not a directory"),
        (["generate", "--model", "{model}", "--prompt", ""], "the prompt is empty"),
        (["generate", "--model", "{model}", "--prompt", "\udcff"], "the prompt is not UTF-8"),
        (["generate", "--model", "{model}", "--prompt", "x", "--max-new-tokens", "0"], "of at least 1; got '0'"),
        (["generate", "--model", "{model}", "--prompt", "x", "--temperature", "-1"], "at least 0; got '-1'"),
        (["generate", "--model", "{model}", "--prompt", "x", "--temperature", "nan"], "at least 0; got 'nan'"),
        (["generate", "--model", "{model}", "--prompt", "x", "--top-p", "1.5"], "a number from 0 to 1; got '1.5'"),
        (["generate", "--model", "{model}", "--prompt", "x", "--temperature", "1e-45"], "must be 0, or at least 1e-06"),
        (["generate", "--model", "{model}", "--prompt", "x", "--temperature", "1", "--top-p", "0"], "must be above 0"),
        (["generate", "--model", "{model}", "--prompt", "x", "--draft", ""], "a checkpoint directory; got ''"),
        (["generate", "--model", "{model}", "--prompt", "x", "--top-k", "5"], "need --temperature above 0"),
        (["generate", "--model", "{model}", "--prompt", "x", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["generate", "--model", "{model}", "--prompt", "x", "--device", "cuda:77"], "device 'cuda:77' cannot be used"),
        (["generate", "--model", "{model}", "--prompt", "x", "--backend", "no_such"], "unknown backend 'no_such'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value)[:60].encode("ascii", "replace").decode(),
)  # fmt: skip
def test_bad_arguments_are_one_line(
    argv: list[str], message: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    places = {"{model}": checkpoint, "{missing}": tmp_path / "missing", "{file}": checkpoint / "config.json"}
    assert main([str(places.get(word, word)) for word in argv]) == 2
    assert_one_line(capfd.readouterr(), message)


def test_stdin_that_is_empty_or_not_text(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for content, message in ((b"", "the prompt is empty"), (b"\xff\xfe", "standard input is not UTF-8")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert continue_text(checkpoint, "--prompt", "-") == 2
        assert_one_line(capfd.readouterr(), message)


@pytest.mark.parametrize("command", [["demo"], ["generate", "--model", "{model}", "--prompt", "x"]])
def test_without_transformers(
    command: list[str], checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main([word.replace("{model}", str(checkpoint)) for word in command]) == 2
    assert_one_line(capfd.readouterr(), "transformers is not installed; pip install 'replayssm[hf]'")


def assert_one_line(shown: Any, message: str) -> None:
    assert shown.out == ""
    assert shown.err.startswith("replayssm: error: ") and shown.err.count("\n") == 1, shown.err
    assert message in shown.err


@pytest.mark.parametrize("command", [["generate", "--model", "models/gdn", "--prompt", "x"], ["demo"]])
def test_a_backend_that_does_not_run_here(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--backend", "triton", "--device", "cpu"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("replayssm: error: backend 'triton' does not run on cpu: ") and "\n" not in error


def test_to_verify_nothing_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--backend", "triton", "--json"]) == 1
    assert '"ok": false' in capsys.readouterr().out
