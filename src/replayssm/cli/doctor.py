"""``replayssm doctor``: versions, devices, backends and why not, and the memory bandwidth that decoding is bound by."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from replayssm.cli.args import unserved

PACKAGES = ("replayssm", "torch", "transformers", "safetensors", "numba", "triton", "rich")


def add(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("doctor", help="versions, devices, backends and why not, measured bandwidth")
    parser.add_argument("--json", action="store_true", help="print it as JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "models": _models(),
        "devices": [_device(name) for name in _devices()],
    }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _models() -> dict[str, str | None]:
    from replayssm.tiny import TINY, tiny_model

    places: dict[str, str | None] = dict.fromkeys(TINY)
    for name in TINY:
        try:
            places[name] = str(tiny_model(name))
        except FileNotFoundError:
            continue
    return places


def _devices() -> list[str]:
    import torch

    cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _device(device: str) -> dict[str, Any]:
    import torch

    from replayssm.bench.about import device_name
    from replayssm.bench.timing import Clock

    name = device_name(torch.device(device))
    if device == "cpu":
        name += f", {torch.get_num_threads()} threads"
    return {
        "device": device,
        "name": name,
        "read_gb_per_s": round(Clock(device, repeats=5).read_bandwidth() / 1e9, 1),
        "backends": _backends(device),
    }


def _backends(device: str) -> dict[str, str | None]:
    """For each backend, None where it serves a pool on this device, else why not."""
    from replayssm.backends import names

    return {name: unserved(name, device) for name in names()}


def _print(facts: dict[str, Any]) -> None:
    print(f"python        {facts['python']} on {facts['platform']}")
    for name, installed in facts["packages"].items():
        print(f"{name:12}  {installed or 'not installed'}")
    for name, place in facts["models"].items():
        print(f"model {name:6}  {place or 'not found'}")
    for device in facts["devices"]:
        print(f"\n{device['device']}: {device['name']}; reads {device['read_gb_per_s']} GB/s")
        for name, why in device["backends"].items():
            print(f"  {name:10}  {'available' if why is None else 'not here: ' + why}")
    if "linux" in sys.platform and facts["packages"]["triton"] is None:
        print("\nGPU kernels need triton: pip install 'replayssm[gpu]'")
