"""What the benchmark runs on, and how it takes a launch's time.

    one sample     flush L2  |  event  |  replay of a CUDA graph  |  event         30 of them, then p10, p50, p90

A launch from Python takes the host tens of microseconds, more than a small decode takes the GPU; so it is captured in a
CUDA graph once, and what is timed is the replay. Flushing writes a buffer larger than any L2 cache, so that K and V
come from memory as they do in an engine, whose other layers have passed through the cache meanwhile.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from kvlab_kernels.launch import INTERPRETED, triton

FLUSH_BYTES = 256 << 20  # L2: 50 MB on an H100 or H200, 72 MB on a 4090, 126 MB on a B200
WARM_UPS, SAMPLES = 3, 30
Call = Callable[[], Any]
Row = dict[str, Any]


@dataclass
class Times:
    """Seconds of one launch."""

    p10: float
    p50: float
    p90: float
    how: str  # "graph", or "eager" where a graph could not be captured: then the host's time may be in it


class Machine:
    """The device, toy or real, and a deadline. `toy`: small sizes and no times, whatever the device."""

    def __init__(self, toy: bool, minutes: float = 8.0):
        if not INTERPRETED and not torch.cuda.is_available():
            raise RuntimeError("kernels are compiled in this process and there is no GPU: unset TRITON_INTERPRET")
        self.toy = toy or INTERPRETED
        self.device = torch.device("cpu" if INTERPRETED else "cuda")
        self.end = time.monotonic() + 60 * minutes
        self._flush = None if self.toy else torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    @property
    def knows_bf16(self) -> bool:
        """False under a version of Triton's interpreter that multiplies bf16 wrongly."""
        if not INTERPRETED:
            return True
        from kvlab_kernels import interpreter

        return interpreter.BF16_IS_RIGHT

    def out_of_time(self) -> bool:
        return time.monotonic() > self.end

    def facts(self) -> dict[str, Any]:
        """Versions, and what the GPU is."""
        facts = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
        if self.device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self.device)
            facts |= {"gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "sms": gpu.multi_processor_count,
                      "memory_bytes": gpu.total_memory, "cuda": torch.version.cuda}  # fmt: skip
        else:
            facts |= {"gpu": None, "interpreted": True, "numpy": metadata.version("numpy")}
        return facts | {"toy": self.toy}

    def capture(self, call: Call) -> Call:
        """`call` as a CUDA graph: the result replays it on what its tensors hold then. Without a GPU, `call` itself."""
        if self.device.type != "cuda":
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):  # compiles, and allocates what is allocated once
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def time(self, call: Call, graph: bool = True) -> Times | None:
        """How long a launch takes with a cold L2 cache. Toy: it is made once, and None.

        graph: False for calls that cannot be captured, since the host makes something for each launch.
        """
        if self.toy:
            call()
            return None
        how, run = "eager", call
        if graph:
            try:
                how, run = "graph", self.capture(call)
            except RuntimeError:  # something in it must wait for the host
                torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(SAMPLES)]
        for _ in range(WARM_UPS):
            run()
        for start, stop in events:
            self._flush.zero_()
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        seconds = torch.tensor([start.elapsed_time(stop) / 1000 for start, stop in events], dtype=torch.float64)
        p10, p50, p90 = seconds.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return Times(p10, p50, p90, how)


def timed(
    machine: Machine, call: Call, work: float, ceiling: float | None, *, graph: bool = True, **row: Any
) -> Row:
    """The row with the call's times, work a second, and its fraction of the ceiling; None where nothing is timed."""
    times = machine.time(call, graph)
    if times is None:
        return row | {"p10": None, "p50": None, "p90": None, "how": "not timed", "rate": None, "fraction": None}
    rate = work / times.p50
    return row | asdict(times) | {"rate": rate, "fraction": None if ceiling is None else rate / ceiling}


def quantised_dtypes(machine: Machine) -> list[torch.dtype]:
    """What K and V can be quantised to and read from here: FP8 needs compute capability 8.9, or the interpreter."""
    fp8 = machine.device.type != "cuda" or torch.cuda.get_device_capability(machine.device) >= (8, 9)
    return [torch.int8, torch.float8_e4m3fn] if fp8 else [torch.int8]


def copy_bandwidth(machine: Machine) -> float | None:
    """Bytes a second, read and written, of a plain copy over 2 GiB: what no kernel can be expected to pass."""
    count = (1 << 30) if not machine.toy else 1 << 10
    source, target = torch.ones(2, count, dtype=torch.int8, device=machine.device)
    times = machine.time(lambda: target.copy_(source))
    return None if times is None else 2 * count / times.p50


def gemm_flops(machine: Machine, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Operations a second of a large matrix product: the ceiling for prefill."""
    side = 8192 if not machine.toy else 16
    a, b = torch.randn(2, side, side, device=machine.device).to(dtype)
    times = machine.time(lambda: a @ b)
    return None if times is None else 2 * side**3 / times.p50
