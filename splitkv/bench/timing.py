"""Timing on the GPU: replays of CUDA graphs over rotating buffers, the limit of the memory, and host time per call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels.read import read_all

METHOD = (
    "CUDA graph of many calls, each on the next of several caches that together exceed the L2 cache; "
    "median of the replays, per call"
)
# Words per block, programs per multiprocessor (0: one per block), pipeline stages, warps; the best depends on the size.
READ_CONFIGS = ((4096, 4, 1, 8), (4096, 4, 3, 8), (8192, 2, 4, 8), (2048, 8, 1, 4), (4096, 0, 1, 8))
MAX_CALLS = 200


def graph_time_us(
    call: Callable[[int], object],
    copies: int,
    device: torch.device,
    *,
    budget_ms: float = 30.0,
    repeats: int = 7,
) -> float:
    """Median microseconds per call over replays of a CUDA graph that calls call(0), call(1), … in rotation.

    Args:
        call: Enqueues one call on buffer i of `copies` on the current stream, without waiting for the device.
        copies: Buffers; together larger than the L2 cache, or repeated reads are served by it.
        device: A CUDA device.
        budget_ms: About how long one replay may take; at least one call per buffer is made.
        repeats: Replays, of which the median counts.
    """
    with torch.cuda.device(device):
        # Whatever a first call compiles or allocates is done before the capture, on another stream as captures are.
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for i in range(min(copies, 3)):
                call(i)
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call(0)
        end.record()
        torch.cuda.synchronize(device)
        affordable = int(budget_ms / max(begin.elapsed_time(end), 0.004))
        rounds = max(1, min(MAX_CALLS, affordable) // copies)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for i in range(copies):
                    call(i)
        graph.replay()
        torch.cuda.synchronize(device)
        times: list[float] = []
        for _ in range(repeats):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end) * 1e3 / (rounds * copies))
        del graph
    return statistics.median(times)


def speed_of_light_us(buffers: Sequence[Tensor], *, budget_ms: float = 30.0, repeats: int = 7) -> float:
    """Microseconds of the fastest pure read of one buffer, timed as a decode is timed.

    Args:
        buffers: [n] int32 CUDA tensors of one size, read in rotation.
        budget_ms, repeats: As for `graph_time_us`.
    """
    device = buffers[0].device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    times = []
    for block, per_sm, num_stages, num_warps in READ_CONFIGS:
        programs = sms * per_sm if per_sm else -(-buffers[0].numel() // block)
        sink = torch.empty(programs, dtype=torch.int32, device=device)

        def call(
            i: int,
            block: int = block,
            programs: int = programs,
            num_stages: int = num_stages,
            num_warps: int = num_warps,
            sink: Tensor = sink,
        ) -> None:
            read_all(buffers[i], sink, block=block, programs=programs, num_stages=num_stages, num_warps=num_warps)

        times.append(graph_time_us(call, len(buffers), device, budget_ms=budget_ms, repeats=repeats))
    return min(times)


def product_flops_per_us(dtype: torch.dtype, device: torch.device, size: int = 8192) -> float:
    """Operations per microsecond of a square matrix product in PyTorch, timed as a decode is timed."""
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return 2 * size**3 / graph_time_us(lambda i: torch.mm(a, b, out=out), 1, device)


def wake(buffers: Sequence[Tensor], seconds: float = 0.3) -> None:
    """Keep the GPU busy for a while, so that its clocks are up before the first measurement."""
    device = buffers[0].device
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    sink = torch.empty(4 * sms, dtype=torch.int32, device=device)
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for buffer in buffers:
            read_all(buffer, sink, block=4096, programs=4 * sms, num_stages=1, num_warps=8)
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class HostTime:
    """Microseconds that the host spends in one call.

    Attributes:
        median: Half of the calls take no longer.
        p90: Nine of ten calls take no longer.
    """

    median: float
    p90: float


def host_time_us(
    call: Callable[[int], object],
    prepare: Callable[[], None],
    wait: Callable[[], None],
    *,
    calls: int = 512,
    group: int = 32,
    queue: int = 4,
) -> HostTime:
    """Host time of one call, the queue kept short so that the host never waits for the device inside of it.

    Args:
        call: Enqueues call i of a group, i in 0…group - 1.
        prepare: Called before each group, outside of the timing, to make its inputs.
        wait: Waits for the device; called outside of the timing, after every `queue` calls.
        calls: Calls that are timed, after one group that is not.
        group, queue: As above.
    """
    times: list[int] = []
    for round_ in range(1 + -(-calls // group)):
        prepare()
        wait()
        for i in range(group):
            begin = time.perf_counter_ns()
            call(i)
            end = time.perf_counter_ns()
            if round_ > 0:
                times.append(end - begin)
            if i % queue == queue - 1:
                wait()
    times.sort()
    return HostTime(median=statistics.median(times) / 1e3, p90=times[len(times) * 9 // 10] / 1e3)
