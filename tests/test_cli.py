"""The command line: every command in-process, every bad input, and what a person gets to see."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import continue_text, copy_checkpoint, save_byte_model

import replayssm
from replayssm.cli import compare, main
from replayssm.cli.compare import Result, first_difference
from replayssm.cli.screen import PlainScreen
from replayssm.cli.stream import TextStream
from replayssm.testing import VerifyRow
from replayssm.tiny import TINY, tiny_model

KEYS = {
    "recurrence", "identical", "tokens_per_s", "stock_tokens_per_s", "state_bytes_per_token",
    "stock_state_bytes_per_token", "bytes_per_sequence", "drafts_accepted", "tokens_per_forward",
    "drafts_tokens_per_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


# ------------------------------------------------------------------------------------------------ demo


@pytest.mark.parametrize("name", TINY)
def test_demo_json_is_identical_for_each_trained_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", name, "--tokens", "40", "--json"]) == 0
    shown = capsys.readouterr()
    (model,) = json.loads(shown.out)["models"]
    assert set(model) == KEYS
    assert model["recurrence"] == name and model["identical"] is True
    assert 0 < model["state_bytes_per_token"] < model["stock_state_bytes_per_token"]
    assert model["tokens_per_s"] > 0 and model["stock_tokens_per_s"] > 0 and model["bytes_per_sequence"] > 0
    assert 0 < model["drafts_accepted"] <= 1 < model["tokens_per_forward"]
    assert model["drafts_tokens_per_s"] > 0
    assert "identical: 40 tokens" in shown.err


def test_demo_state_bytes_follow_the_fold_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    moved = {}
    for fold_every in ("1", "4", "16"):
        command = ["demo", "--model", "gdn", "--tokens", "2", "--json", "--fold-every", fold_every]
        assert main(command) == 0
        moved[fold_every] = json.loads(capsys.readouterr().out)["models"][0]
    # 4 layers of 4 heads: state 64 x 32; rows k [2, 32], d [4, 64], w and g [4], all float32.
    state, row = 4 * 4 * 64 * 32 * 4, 4 * (2 * 32 + 4 * 64 + 4 + 4) * 4
    assert {model["stock_state_bytes_per_token"] for model in moved.values()} == {2 * state}
    assert moved["1"]["state_bytes_per_token"] == 2 * state + 2 * row
    assert moved["4"]["state_bytes_per_token"] == state * 5 / 4 + 3.5 * row
    assert moved["16"]["state_bytes_per_token"] == state * 17 / 16 + 9.5 * row


def test_demo_plain_text_shows_both_texts_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "kda", "--tokens", "12", "--prompt", "import ", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    _, stock, ours = out.split("import ", 2)
    text = stock.split("\n\n-- ReplaySSM")[0]
    assert len(text) == 12 and ours.startswith(text)
    words = " ".join(out.split())
    for line in (
        " text identical tokens/s",
        " state moved a token ReplaySSM ",
        " memory a sequence ReplaySSM ",
        " with drafts ",
    ):
        assert line in words


def test_demo_on_an_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "nvidia", "--tokens", "4"]) == 2
    assert "device 'nvidia' cannot be used" in capsys.readouterr().err


def test_demo_exits_1_and_says_where_the_texts_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attach_and_break(model: Any, **options: Any) -> None:
        replayssm.attach(model, **options)
        torch.manual_seed(1)
        model.lm_head.weight.data += torch.randn(model.lm_head.weight.shape)

    monkeypatch.setattr(compare, "attach", attach_and_break)
    assert main(["demo", "--model", "mamba2", "--tokens", "24", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["models"][0]["identical"] is False
    assert "DIFFERENT from token" in shown.err and "apart" in shown.err


def test_the_comparison_of_a_gpu_has_caches_of_fixed_size() -> None:
    """Run here without a graph: the same texts as with caches that grow, and the same bytes but for convolutions, whose
    windows have to divide the ring's rows."""
    from replayssm.cli.checkpoint import load

    found, said = {}, []
    for static in (False, True):
        comparison = compare.Comparison(
            "gdn", load(tiny_model("gdn")), "def ", 12, 0, attaching={"fold_every": 4}, sampling={"temperature": 0.5},
            write=lambda side, text: said.append((side, text)), status=said.append, static=static,
        )  # fmt: skip
        found[static] = comparison.run()
        assert getattr(comparison.models["replay"], "_replayssm", None) is None, "left attached"
    assert found[False].identical and found[True].identical
    assert 1 <= found[True].bytes_per_sequence / found[False].bytes_per_sequence < 1.05
    for name in ("stock_bytes_per_sequence", "state_bytes_per_token", "drafts_accepted"):
        assert getattr(found[False], name) == getattr(found[True], name), name
    assert "ReplaySSM writes, compiling first" in said


def test_demo_fits_a_terminal() -> None:
    rich_console = pytest.importorskip("rich.console")
    from replayssm.cli.checkpoint import load
    from replayssm.cli.panels import PanelScreen

    out = io.StringIO()
    console = rich_console.Console(file=out, force_terminal=True, width=80, highlight=False)
    with PanelScreen("def ", console) as screen:
        screen.begin("gdn", load(tiny_model("gdn")))
        screen.status("working")
        screen.write("stock", "f(x):\n    return [x]")
        screen.write("replay", "f(x):\n    return [y]")
        screen.end(dataclasses.replace(RESULT, divergence=18, gap=0.25))
        screen.table([RESULT])
    shown = out.getvalue()
    assert "stock transformers" in shown and "return [x]" in shown and "DIFFERENT from token 18" in shown
    assert "\x1b[31my]" in shown  # ours is red from the first difference on
    assert "identical" in shown and "64.0 KiB" in shown


RESULT = Result("gdn", 24, None, 0.0, 1e-6, 100.0, 90.0, 50_000.0, 65_536.0, 70_000, 60_000)


def test_the_table_says_where_a_text_differs(capsys: pytest.CaptureFixture[str]) -> None:
    PlainScreen("", sys.stdout, quiet=False).table([RESULT, dataclasses.replace(RESULT, divergence=7)])
    assert capsys.readouterr().out.splitlines()[1].split() == ["text", "identical", "differs", "at", "7"]
    PlainScreen("", sys.stdout, quiet=False).table([dataclasses.replace(RESULT, drafts_identical=False)])
    assert "differs with drafts" in capsys.readouterr().out


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


# -------------------------------------------------------------------------------------------- generate


def test_generate_writes_the_same_text_as_stock(checkpoint: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    texts = []
    for options in (
        (),
        ("--no-replay",),
        ("--fold-every", "1"),
        ("--backend", "torch", "--dtype", "float32"),
        ("--compile", "on"),
    ):
        assert continue_text(checkpoint, "--prompt", "def ", *options) == 0
        shown = capfdbinary.readouterr()
        assert b"20 tokens" in shown.err and b"tokens/s" in shown.err
        texts.append(shown.out)
    assert len(set(texts)) == 1 and len(texts[0]) > 10


def test_generate_samples_by_the_seed(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def text(*options: str) -> str:
        assert continue_text(checkpoint, "--prompt", "def ", *options) == 0
        return capfd.readouterr().out

    greedy, sampled = text(), text("--temperature", "2", "--seed", "1")
    assert (
        sampled == text("--temperature", "2", "--seed", "1") == text("--temperature", "2", "--seed", "1", "--no-replay")
    )
    assert sampled != text("--temperature", "2", "--seed", "2") and sampled != greedy
    assert text("--temperature", "2", "--top-k", "1") == greedy
    assert text("--temperature", "2", "--top-p", "0.000001") == greedy


def test_generate_reads_stdin_and_explains(
    checkpoint: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert continue_text(checkpoint, "--prompt", "héllo") == 0
    expected = capfd.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("héllo".encode())))
    assert continue_text(checkpoint, "--prompt", "-", "--explain", "--backend", "torch") == 0
    shown = capfd.readouterr()
    assert shown.out == expected
    assert "backend: torch" in shown.err


def test_generate_with_a_tokenizer(checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(256)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = copy_checkpoint(checkpoint, tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    assert continue_text(path, "--prompt", "w1 w2") == 0
    tokens = capfd.readouterr().out.split()
    assert len(tokens) == 20 and all(token.startswith("w") for token in tokens)
    assert continue_text(path, "--prompt", "w1 w2", "--draft", str(checkpoint)) == 2
    shown = capfd.readouterr()
    assert "its tokenizer is not that of" in shown.err and not shown.out


def test_stream_hands_on_whole_characters_and_spaces() -> None:
    pieces: list[str] = []
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"), pieces.append)
    stream.put(torch.tensor([[1, 2]]))  # the prompt
    for byte in "a\n\n é\n".encode() + b"\xff":
        stream.put(torch.tensor([byte]))
    assert pieces == ["a", "\n", "\n", " ", "é", "\n"]
    stream.end()
    assert "".join(pieces) == "a\n\n é\n\ufffd" and len(stream.tokens) == len(stream.times) == 8


def test_stream_counts_its_rate_after_the_warm_up() -> None:
    for warm, rate in ((1, 3 / 11), (2, 2 / 2), (3, 1 / 1), (4, 0.0)):
        stream = TextStream(lambda ids: "", lambda text: None, warm=warm)
        stream.tokens, stream.times = [7] * 4, [0.0, 9.0, 10.0, 11.0]
        assert stream.rate == pytest.approx(rate)


# ------------------------------------------------------------------------------------- doctor, verify, main


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    cpu = facts["devices"][0]
    assert cpu["device"] == "cpu" and cpu["read_gb_per_s"] > 0
    assert set(cpu["backends"]) == set(replayssm.backends.names()) and cpu["backends"]["torch"] is None
    assert facts["packages"]["torch"] == torch.__version__
    assert Path(facts["models"]["kda"]).is_dir()
    assert main(["doctor"]) == 0
    assert "torch       available" in capsys.readouterr().out


ROWS = [
    VerifyRow("torch", "gdn", "float32", 1, 1e-7, 2e-7, True),
    VerifyRow("cpu", "all", "all", 0, 0.0, 0.0, True, "numba is not installed"),
]


@pytest.mark.parametrize(
    ("rows", "code", "last"),
    [
        (ROWS, 0, "1 of 1 checks passed, 1 skipped"),
        ([*ROWS, VerifyRow("torch", "kda", "float32", 5, float("inf"), 1e-7, False, None, "slot 3 was written")], 1,
         "1 of 2 checks passed, 1 skipped"),
    ],
)  # fmt: skip
def test_verify_reports(
    rows: list[VerifyRow], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("replayssm.testing.verify_backends", lambda backends, device: rows)
    assert main(["verify", "--backend", "torch"]) == code
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == last and "skipped: numba is not installed" in shown
    assert ("FAILED: slot 3 was written" in shown) == bool(code)
    assert main(["verify", "--backend", "torch", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] == (not code)


def test_verify_runs_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--backend", "torch"]) == 0
    assert capsys.readouterr().out.count(" ok\n") == 18


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"replayssm {replayssm.__version__}\n"


# -------------------------------------------------------------------------------- as a process of its own


@contextlib.contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, which does not outlive the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def generating(checkpoint: Path) -> list[str]:
    return ["-m", "replayssm", "generate", "--model", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "100000"]


@pytest.mark.parametrize("compiling", [False, True])
def test_interrupt_keeps_what_was_written(checkpoint: Path, tmp_path: Path, monkeypatch: Any, compiling: bool) -> None:
    if compiling:  # the CPU kernels, which follow the first token
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    with started(*generating(checkpoint)) as process:
        assert process.stdout is not None
        first = process.stdout.read(1 if compiling else 20)
        time.sleep(3 if compiling else 0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert len(first + out) > 1 and out.endswith(b"\n"), (first + out, err)
    assert b"Traceback" not in err and b" token" in err and err.endswith(b"\nreplayssm: interrupted\n"), err.decode()


INTERRUPTED_IN_A_DESTRUCTOR = """
import os, signal, time
from replayssm import __main__ as program

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Slow:
    def __del__(self):
        time.sleep(0.2)  # so that the interrupt, when it comes again, falls into a destructor again

class HalfMade:
    def __del__(self):
        raise AttributeError("what __init__ would have set")

def main():
    try:
        Interrupted(), Slow()
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt:
        HalfMade()
        return 130

program.main = main
program.entry()
"""


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    """Python drops what is raised there; numba's objects have destructors, and many die while it compiles."""
    with started("-c", INTERRUPTED_IN_A_DESTRUCTOR) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and not err


def test_a_closed_pipe_is_no_error(checkpoint: Path) -> None:
    with started(*generating(checkpoint)) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=120) == 141
    assert b"Traceback" not in err and b"Exception" not in err


# ------------------------------------------------------------------------------------------------ drafts


@pytest.mark.parametrize(
    "more",
    [
        ["prompt-lookup"],
        ["prompt-tree"],
        ["{other}", "--draft-tokens", "3"],
        ["prompt-lookup", "--draft-tokens", "1000000"],
    ],
)
def test_generate_with_drafts_writes_the_same(
    checkpoint: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_checkpoint(checkpoint, tmp_path)
    assert continue_text(checkpoint, "--prompt", "ababab") == 0
    plain = capsys.readouterr().out
    more = [x.format(other=other) for x in more]
    assert continue_text(checkpoint, "--prompt", "ababab", "--draft", *more) == 0
    shown = capsys.readouterr()
    assert shown.out == plain
    assert "20 tokens" in shown.err and "drafts accepted" in shown.err
    tree = more == ["prompt-tree"]  # static caches verify chains
    assert continue_text(checkpoint, "--prompt", "ababab", "--compile", "on", "--draft", *more) == 2 * tree
    compiled = capsys.readouterr()
    assert "verifies chains" in compiled.err if tree else compiled.out == plain
    if not more[0].startswith("prompt-"):  # the model itself: drafts of three, so five forwards
        assert "15 of 15 drafts accepted" in shown.err or "14 of 14 drafts accepted" in shown.err
    assert continue_text(checkpoint, "--prompt", "ab", "--temperature", "0.8", "--draft", "prompt-lookup") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "beam"], "--draft must be prompt-lookup, prompt-tree, mtp or a checkpoint directory; got 'beam'"),
        (["--draft", "mtp"], "no weights mtp.*"),
        (["--draft-tokens", "3"], "it needs --draft"),
        (["--draft", "prompt-lookup", "--draft-tokens", "0"], "of at least 1; got '0'"),
        (["--draft", "prompt-lookup", "--no-replay"], "leave out --no-replay"),
        (["--draft", str(tiny_model("gdn").parent)], "is not a checkpoint"),
    ],
)
def test_generate_refuses_drafts(
    checkpoint: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert continue_text(checkpoint, "--prompt", "ab", *options) == 2
    assert message in capsys.readouterr().err


def test_a_draft_model_has_the_same_tokens(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_byte_model(tmp_path, vocab_size=300)
    assert continue_text(checkpoint, "--prompt", "ab", "--draft", str(tmp_path)) == 2
    shown = capsys.readouterr()
    assert "300" in shown.err and shown.out == ""
