"""README, docs and configuration say what is so: their code runs, their links lead somewhere, their facts agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


WITH_CODE = [page for page in PAGES if blocks(page, "python")]


def test_the_extractor_finds_code() -> None:
    assert ROOT / "README.md" in WITH_CODE and len(WITH_CODE) >= 3


def run(code: str) -> str:
    """What the code prints, in a fresh interpreter with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_python_blocks_run(page: Path) -> None:
    """All blocks of a page, one after the other."""
    out = run("\n".join(blocks(page, "python")))
    if page.name == "README.md":
        assert f"```\n{out.rstrip()}\n```" in page.read_text("utf-8")


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path) -> None:
    assert run(example.read_text("utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}"


def test_the_readme_names_every_supported_model_type() -> None:
    from replayssm.hf import SUPPORTED

    section = (ROOT / "README.md").read_text("utf-8").split("## Supported models")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ") and "`model_type`" not in row]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {
        kind.package for kind in SUPPORTED.values()
    }


def test_the_readme_names_every_command() -> None:
    from replayssm.cli import COMMANDS

    named = set(re.findall(r"^\| `replayssm (\w+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE))
    assert named == {command.__name__.rpartition(".")[2] for command in COMMANDS}


def test_the_readme_s_cpu_table_is_made_from_the_file() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu-xeon-2.8ghz-2core.json").read_text("utf-8"))["rows"]
    names = {
        "stock transformers": "stock transformers",
        "torch, fold every 16, staggered": "ReplaySSM, `torch`",
        "cpu, fold every 16, staggered": "ReplaySSM, `cpu` (compiled)",
        "cpu, plain (fold every step)": "plain recurrence, by the kernels of `cpu`",
    }
    section = (ROOT / "README.md").read_text("utf-8").split("## Performance")[1].split("\n## ")[0]
    for variant, name in names.items():
        mine = {row["recurrence"]: row for row in rows if row["variant"] == variant}
        cells = [f"{mine[recurrence]['ms']:.1f}" for recurrence in ("mamba2", "gdn", "kda")]
        assert f"| {name} | {' | '.join(cells)} |" in section
        if variant == "cpu, fold every 16, staggered":
            shares = [f"{mine[recurrence]['share']:.0%}" for recurrence in ("mamba2", "gdn", "kda")]
            assert f"| share of the bandwidth of a sum, `cpu` | {' | '.join(shares)} |" in section


def test_gpu_figures_of_the_readme_are_those_of_the_file() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200-kernels.json").read_text("utf-8"))["rows"]
    section = (ROOT / "README.md").read_text("utf-8").split("## Performance")[1].split("\n## ")[0]
    names = {"mamba2": "Mamba-2", "gdn": "Gated DeltaNet", "kda": "KDA"}
    for shape in {row["shape"] for row in rows}:
        recurrence, heads = shape.split()
        for dtype in ("float32", "bfloat16"):
            decode, verify = (
                next(r for r in rows if (r["shape"], r["dtype"], r["batch"], r["mode"]) == (shape, dtype, 256, mode))
                for mode in ("standard", "verify")
            )
            cells = [
                f"{decode['us']:.0f}", f"{decode['x']:.2f}", f"{decode['plain_us']:.0f}", f"{decode['speedup']:.2f}",
                f"{verify['us']:.0f}", f"{verify['x']:.2f}",
            ]  # fmt: skip
            assert f"| {names[recurrence]} {heads}, {dtype} | {' | '.join(cells)} |" in section


def test_whole_models_of_the_readme_are_those_of_the_file() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200-e2e.json").read_text("utf-8"))["rows"]
    section = (ROOT / "README.md").read_text("utf-8").split("## Performance")[1].split("\n## ")[0]
    at = {(row["model"], row["variant"], row["batch"]): row for row in rows if row["T"] == 1}
    for model, batch in {
        (row["model"], row["batch"]) for row in rows if row["T"] == 1 and "verify" not in row["variant"]
    }:
        stock, plain, replay = (at.get((model, name, batch)) for name in ("stock-compiled", "replay-off", "replay-on"))
        taken = (plain if batch == 1 else replay) or replay
        numbers = [taken["floor_ms"], *(row and row["ms"] for row in (stock, plain, replay))]
        numbers += [taken["ms"] / taken["floor_ms"], stock and stock["ms"] / taken["ms"]]
        assert f"| {batch} | {' | '.join('-' if n is None else f'{n:.2f}' for n in numbers)} |" in section
    one, four = (next(r["ms"] for r in rows if (r["variant"], r["T"]) == ("replay-verify", T)) for T in (1, 4))
    assert f"{four:.2f} ms against {one:.2f} with one ({four / one:.2f})" in section


def test_the_picture_of_gpu_figures_is_made_from_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plot_results

    assert f"made from {plot_results.made_from()}" in plot_results.PICTURE.read_text("utf-8")


def test_ci_runs_the_readme_test_command() -> None:
    (command,) = (block for block in blocks(ROOT / "README.md", "bash") if "pytest" in block)
    assert command.count("\n") == 1 and command in (ROOT / ".ci" / "run").read_text("utf-8")


def test_pre_commit_uses_the_tested_versions() -> None:
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    pinned = re.findall(r"([\w-]+)==([\w.]+)", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert ("ruff", tested["ruff"]) in pinned
    assert all(version == tested.get(name, version) for name, version in pinned)


def test_pictures_are_well_formed() -> None:
    for picture in (ROOT / "docs").glob("*.svg"):
        assert ET.parse(picture).getroot().tag.endswith("svg")
