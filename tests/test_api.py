"""The shape of the package: what is imported when, in which direction, how long, how documented."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import replayssm
from replayssm import ops, ring

ROOT = Path(replayssm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}

# A module imports earlier ones only. Everything a layer stands on comes before it; what people call comes last.
ORDER = [
    "recurrence", "gates", "ring", "layer", "auto", "reference", "checks", "traffic", "quantize", "backends", "library",
    "ops", "conv", "pool", "tree", "testing", "planner", "speculative", "lookup", "prefix_cache", "hf", "tiny",
    "engine", "bench", "cli", "__main__",
]  # fmt: skip
OPTIONAL = ("transformers", "numba", "triton", "rich", "fastapi", "safetensors", "hypothesis", "pytest")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules_after(statement: str) -> dict[str, float | list[str]]:
    """Modules loaded and processor time of a statement, in a fresh interpreter that has torch already."""
    code = f"import torch, sys, time, json; t = time.process_time(); n = set(sys.modules); {statement}; "
    code += "print(json.dumps(dict(time=time.process_time() - t, modules=sorted(set(sys.modules) - n))))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_import_is_light() -> None:
    loaded = modules_after("import replayssm")
    heavy = [name for name in loaded["modules"] if name.split(".")[0] in OPTIONAL]
    assert not heavy
    assert "replayssm.testing" not in loaded["modules"] and "replayssm.hf" not in loaded["modules"]
    assert loaded["time"] < 1.0 and len(loaded["modules"]) < 60


def test_the_public_names() -> None:
    assert sorted(set(replayssm.__all__)) == sorted(replayssm.__all__)
    assert all(hasattr(replayssm, name) for name in replayssm.__all__)
    assert (ROOT / "py.typed").exists()


def imported(path: str, tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it, by their first name; "" for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            if node.module == "replayssm":
                yield from (alias.name if alias.name in ORDER else "" for alias in node.names)
            elif (node.module or "").startswith("replayssm."):
                yield node.module.split(".")[1]  # type: ignore[union-attr]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("replayssm."))


@pytest.mark.parametrize("path", TREES)
def test_imports_point_one_way(path: str) -> None:
    mine = path.split("/")[0].removesuffix(".py")
    if mine == "__init__":
        return
    assert mine in ORDER, f"{mine} is new: give it a place in ORDER"
    for other in imported(path, TREES[path]):
        if other == "":
            assert ORDER.index(mine) >= ORDER.index("hf"), f"{path} imports the package that it is a part of"
        else:
            assert ORDER.index(other) <= ORDER.index(mine), f"{path} imports {other}, which comes after it"


@pytest.mark.parametrize(
    ("package", "folders"),
    [
        ("triton", {"backends/triton", "bench/read_kernel.py"}),  # the latter is no backend: it only reads
        ("numba", {"backends"}),
        ("transformers", {"hf", "cli", "bench/e2e.py", "bench/models.py"}),  # the latter time its models
        ("rich", {"cli"}),
        ("matplotlib", {"bench/plot", "cli/bench"}),
    ],
)
def test_optional_packages_stay_in_their_folders(package: str, folders: set[str]) -> None:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == package for name in names):
                assert any(path.startswith(folder) for folder in folders), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", TREES)
def test_files_are_short(path: str) -> None:
    lines = (ROOT / path).read_text().count("\n")
    assert lines <= 350, f"{path} has {lines} lines"


def public(tree: ast.Module) -> Iterator[tuple[str, ast.AST, bool]]:
    """Public classes, functions and methods, and whether these are methods; not those that implement a base class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node, False
            own = all(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
            for method in node.body if own else []:
                if isinstance(method, Function) and not method.name.startswith("_"):
                    yield f"{node.name}.{method.name}", method, True
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node, False


@pytest.mark.parametrize("path", TREES)
def test_everything_public_is_documented(path: str) -> None:
    assert ast.get_docstring(TREES[path]) or not TREES[path].body, path
    bare = [name for name, node, _ in public(TREES[path]) if not ast.get_docstring(node)]  # type: ignore[arg-type]
    assert not bare


@pytest.mark.parametrize("path", [path for path in TREES if "kernel" not in path])
def test_signatures_are_short(path: str) -> None:
    """Kernels are exempt: their parameters are strides and sizes."""
    for name, node, method in public(TREES[path]):
        if isinstance(node, Function) and not any("jit" in ast.dump(d) for d in node.decorator_list):
            a = node.args
            count = len(a.posonlyargs + a.args + a.kwonlyargs) - (method and not _is_static(node))
            assert count <= 10, f"{path}: {name} has {count} parameters"


def _is_static(node: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)


@pytest.mark.parametrize("path", [path for path in TREES if not path.startswith("cli/")])
def test_the_environment_changes_nothing(path: str) -> None:
    names = {node.attr for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)}
    assert not names & {"environ", "getenv"}


def test_no_value_is_read_from_the_device() -> None:
    """In the text of what runs every step; test_ops.test_no_synchronisation_off_the_cpu runs it."""
    for function in (ops.verify, ops.decode, ops.commit, ring.Ring, ring.without_padding, ring.put_slots):
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in {"item", "cpu", "tolist", "numpy", "nonzero", "unique", "any", "all"}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"int", "bool", "float", "list"}
