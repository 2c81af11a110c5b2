"""Where figures come from: machine, versions, commit, command."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import replayssm


def about(device: torch.device, command: str, read_gbps: float) -> dict[str, Any]:
    """The facts that belong beside every figure."""
    facts: dict[str, Any] = {
        "device": device_name(device), "replayssm": replayssm.__version__, "commit": commit(), "command": command,
        "date": str(date.today()), "python": platform.python_version(), "torch": torch.__version__,
        "triton": installed("triton"), "read_gbps": read_gbps,
    }  # fmt: skip
    if device.type == "cpu":
        facts |= {"threads": torch.get_num_threads(), "numba": installed("numba")}
    return facts


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else "Apple GPU" if device.type == "mps" else str(device)


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside of a checkout."""
    if not _git(
        "ls-files", "--error-unmatch", "__init__.py"
    ):  # installed, perhaps inside of another project's checkout
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=12")


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=Path(replayssm.__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
