"""Clocks. On a GPU: CUDA graphs between two events. On a CPU: wall time, each run followed by a read of memory, since
on a shared machine bandwidth drifts by the second."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

MIB = 1 << 20
PATIENCE = 4.0  # seconds after which a CPU's repeats end, if there are three
Run = Callable[[], object]


class Timed(NamedTuple):
    """Median seconds of a run, and the bytes a second that the machine reads, measured in the same run."""

    seconds: float
    read: float


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device | str, repeats: int = 11) -> None:
        self.device, self.repeats = torch.device(device), repeats

    def time(self, run: Run) -> Timed:
        """Median of the repeats, after one run that is not counted. Slow runs on a CPU are repeated less often."""
        if self.device.type == "cuda":
            return Timed(graph_seconds(run, self.device, self.repeats), self._gpu_read)
        self._wall(run)
        pairs, start = [], time.perf_counter()
        while len(pairs) < self.repeats and (len(pairs) < 3 or time.perf_counter() - start < PATIENCE):
            pairs.append((self._wall(run), self._wall(self._read_buffer.sum)))
        took, reads = (median(times) for times in zip(*pairs, strict=True))
        return Timed(took, self._read_buffer.nbytes / reads)

    def read_bandwidth(self) -> float:
        """Bytes a second that the device reads."""
        return self._gpu_read if self.device.type == "cuda" else self.time(self._read_buffer.sum).read

    @cached_property
    def _gpu_read(self) -> float:
        return gpu_read_bandwidth(self.device)

    @cached_property
    def _read_buffer(self) -> torch.Tensor:
        return torch.ones(max(128 * MIB, 4 * cache_bytes(self.device)) // 4, device=self.device)

    def _wall(self, run: Run) -> float:
        wait = torch.accelerator.synchronize if self.device.type != "cpu" else lambda: None
        wait()
        start = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - start


def graph_seconds(run: Run, device: torch.device, repeats: int = 11) -> float:
    """Median device seconds of ``run``, captured once and replayed as a CUDA graph."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()  # compiles, and takes the scratch memory that a captured graph may point to
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            times = []
            for _ in range(repeats):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()  # keeps the GPU at work while what is timed is launched, so that no launch is timed
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
        torch.cuda.synchronize()
    return median(times)


def gpu_read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a kernel that only reads: the best of a few block sizes over 1 GiB."""
    x, out = torch.randn(1 << 28, device=device), torch.zeros(1, device=device)
    runs: list[Run] = [lambda: [x.sum() for _ in range(4)]]
    try:
        from replayssm.bench import read_kernel

        for block, warps in read_kernel.VARIANTS:
            runs.append(lambda b=block, w=warps: [read_kernel.read(x, out, b, w) for _ in range(4)])
    except ImportError:  # no Triton: torch's sum alone, within a few percent of it
        pass
    return max(4 * x.nbytes / graph_seconds(run, device) for run in runs)


def cache_bytes(device: torch.device | str) -> int:
    """The last cache before memory: a pool must be larger by far, or its state is timed from there."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": MIB}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes) or 32 * MIB
