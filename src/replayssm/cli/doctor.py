"""``replayssm doctor``: versions, devices, backends and why not, and the memory bandwidth that decoding is bound by."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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

    if device == "cpu":
        name = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    else:
        name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "Apple GPU"
    return {
        "device": device,
        "name": name,
        "read_gb_per_s": round(read_bandwidth(device) / 1e9, 1),
        "backends": _backends(device),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _backends(device: str) -> dict[str, str | None]:
    """For each backend, None where it serves a pool on this device, else why not."""
    from replayssm import KDA, LayerSpec, StatePool
    from replayssm.backends import load, names

    def reason(name: str) -> str | None:
        pool = StatePool(1, fold_every=1 if name == "sequential" else 16, device=device)
        return load(name).refuses(pool.add_layer(LayerSpec(KDA, H=1, HV=1, K=32, V=32)))

    return {name: reason(name) for name in names()}


def read_bandwidth(device: str, mib: int = 256, repeats: int = 5) -> float:
    """Bytes a second of a plain float32 sum over ``mib`` MiB, more than any cache holds; the best of ``repeats``."""
    import torch

    x = torch.ones(mib * 2**18, device=device)
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(x.device.type, lambda: None)
    best = float("inf")
    for _ in range(repeats + 1):
        wait()
        begin = time.perf_counter()
        x.sum()
        wait()
        best = min(best, time.perf_counter() - begin)
    return x.numel() * 4 / best


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
