"""CUDA graphs: the launches of a decode step, recorded once and replayed with one call.

A decode step of a 7B model is some 400 kernels, many of which run for a few microseconds: less than Python needs to
launch them, so that the GPU waits for the host. A CUDA graph (CUDA 图) is the list of launches, arguments and addresses
included, and replaying it is one call. So all that a launch is given must be the same every time:

    the batch size             a bucket (桶): the step is padded to the next size in a short list
    the longest context        a class: it settles the width of the block table and the number of splits
    the addresses of inputs    the first pieces of the staging buffer, whose places follow from bucket and class
    the address of the result  one buffer of logits for all graphs

A row of padding has slot -1 (its K and V are written nowhere), length 1 and a table that names the null block. What the
model makes of it may be anything, NaN too: rows do not mix, and nobody reads its logits. Steps with a chunk of a
prompt, or with more sequences than the largest bucket, run as they always did: their kernels run for longer than
Python needs to launch them.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from kvlab.config import EngineConfig
from kvlab.model.config import ModelConfig
from kvlab.model.decoder import CausalLM
from kvlab.sizing import format_bytes

logger = logging.getLogger("kvlab")

Key = tuple[int, int]  # (batch size, longest context) that a graph is captured for


class GraphBackend(Protocol):
    """Who records: CudaGraphs, or a stand-in for tests on a CPU."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` enqueues -> a function that enqueues it again. `run` may be called more than once."""
        ...


class CudaGraphs:
    """torch.cuda.graph, with one pool of memory for all graphs: they never run at the same time."""

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # Once for real, beside the main stream: kernels are loaded, libraries make their handles and workspaces grow,
        # which must not happen while the graph is recorded.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            run()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what another thread of a server does with CUDA meanwhile does not spoil the recording.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


class GraphPool:
    """Graphs by bucket, captured when they are first needed, or before: `keys` names all, the largest first.

    sizes: of the batch; lengths: of the longest context, in tokens. A step takes the smallest of each that fits.
    The largest graph should be captured first: the others then find room in the memory that it has taken.
    """

    def __init__(self, backend: GraphBackend, sizes: Sequence[int], lengths: Sequence[int], logits: Tensor):
        self.backend = backend
        self.sizes, self.lengths = sorted(sizes), sorted(lengths)
        self.logits = logits  # [max(sizes), vocab]: where every graph leaves its result
        self._replays: dict[Key, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def keys(self) -> list[Key]:
        return [(size, length) for size in reversed(self.sizes) for length in reversed(self.lengths)]

    def key(self, num_seqs: int, max_seq_len: int) -> Key | None:
        """The bucket for a step of so many decodes; None if there is none."""
        size = next((size for size in self.sizes if size >= num_seqs), None)
        length = next((length for length in self.lengths if length >= max_seq_len), None)
        return None if size is None or length is None else (size, length)

    def capture_all(self, run: Callable[[Key], object]) -> None:
        """`run(key)` for every key, the largest first; says in the log what it took."""
        device, begin = self.logits.device, perf_counter()
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        for key in self.keys():
            run(key)
        taken = torch.cuda.memory_reserved(device) - before if device.type == "cuda" else 0
        logger.info(
            "Captured %d graphs in %.1f s; they take %s", len(self), perf_counter() - begin, format_bytes(taken)
        )

    def run(self, key: Key, forward: Callable[[], Tensor]) -> Tensor:
        """Logits [size, vocab] by the graph of `key`; if there is none yet, it is captured from `forward`, which
        makes them.

        forward: reads its inputs where each step with this key puts them, and nothing else that changes.
        """
        logits = self.logits[: key[0]]
        if key not in self._replays:

            def run() -> None:
                logits.copy_(forward())

            with collector_paused():
                self._replays[key] = self.backend.capture(run)
        self._replays[key]()
        return logits


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's garbage collector (垃圾回收器).

    Garbage may hold a graph or a compiled kernel, of an engine that was there before. CUDA forbids to destroy it while
    this thread records, and the recording would be lost; torch.cuda.graph has not collected beforehand since PyTorch
    2.9 (pytorch/pytorch#161037).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graph_sizes(config: EngineConfig, model: CausalLM) -> list[int]:
    """The batch sizes that an engine captures; none without a GPU, with `enforce_eager`, or if attention waits.

    That of backend "torch" does: it reads the lengths on the host, to group similar ones.
    """
    backend = model.backend
    compiled = getattr(backend, "graph_safe", False) and not backend.interpreted
    if model.device.type != "cuda" or config.enforce_eager or not compiled:
        return []
    sizes = config.cudagraph_capture_sizes
    return capture_sizes(config.max_num_seqs) if sizes is None else sorted(sizes)


def make_graph_pool(config: EngineConfig, model: CausalLM) -> GraphPool | None:
    """The graphs of an engine, none captured yet; None if it captures none. config.max_model_len must be set."""
    sizes = graph_sizes(config, model)
    return make_pool(CudaGraphs(), sizes, config.max_model_len, model) if sizes else None


def make_pool(backend: GraphBackend, sizes: Sequence[int], max_model_len: int, model: CausalLM) -> GraphPool:
    """A pool for batches of `sizes` and contexts of up to max_model_len, with room for its logits."""
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    logits = torch.zeros((max(sizes), model.config.vocab_size), dtype=dtype, device=model.device)
    return GraphPool(backend, sizes, capture_lengths(max_model_len), logits)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture for: 1, 2, 4, then by 8 to 256 and by 16 beyond, and max_num_seqs itself (vLLM's rule).

    At most 7 rows of padding to 256, 15 beyond. They cost the GPU next to nothing: a decode waits for the weights.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def capture_lengths(max_model_len: int) -> list[int]:
    """Longest contexts to capture for: 1024, 8192, 65536, ... below max_model_len, and max_model_len itself.

    What is captured for a length serves shorter ones as well: a context is cut into at most as many splits as it has
    whole tiles, and the splits behind them end at once. A class up to eight times as long costs a context those empty
    programs and a merge over up to 64 splits, a few microseconds a layer; a graph for each power of two would cost
    memory and seconds at every start.
    """
    lengths = [1024 * 8**i for i in range(8)]
    return [length for length in lengths if length < max_model_len] + [max_model_len]


def graph_bytes(config: EngineConfig, model: CausalLM) -> int:
    """**Estimate** of the device memory that an engine's graphs will take, for who sizes the pool of blocks (PAV 3.1).

    The largest graph's activations (all share its memory), fp32 logits for it once more, and 2 MiB for each graph's
    list of launches. 0 if none are captured.
    """
    sizes = graph_sizes(config, model)
    return estimate_bytes(model.config, model.dtype, sizes, len(capture_lengths(config.max_model_len))) if sizes else 0


def estimate_bytes(config: ModelConfig, dtype: torch.dtype, sizes: Sequence[int], num_lengths: int) -> int:
    """The sum behind `graph_bytes`."""
    wide = max(2 * config.hidden_size + 3 * config.intermediate_size, config.vocab_size)  # alive at once, for one row
    per_row = wide * dtype.itemsize + 2 * config.vocab_size * 4
    return max(sizes) * per_row + len(sizes) * num_lengths * (2 << 20)
