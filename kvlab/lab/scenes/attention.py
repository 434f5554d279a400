"""Scenes of lab 10: paged sequences, the walk of one query over them, and what memory and compiler say.

    make_case    K and V in shuffled pages, garbage in every slot that nobody owns
    walk         one query over tiles: the running maximum, sum and result, frame by frame
    requested    bytes of K, V and table that a launch asks for; lines: 128-byte lines that it touches
    compiled     what the compiler makes of a kernel, with its hints and without; kept figures where Triton is missing
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from kvlab.lab.under_triton import compile_report, has_triton
from kvlab.standin.decode import launch_packed
from kvlab.standin.launch import Kernel
from kvlab.standin.memory import Traffic

KEPT = Path(__file__).parents[1] / "data" / "lab10_compiler.json"
LINE, SECTOR = 128, 32  # bytes of a cache line, and the piece of it that a GPU reads from memory


class Case(NamedTuple):
    """The arguments of a decode: q [S, H, D]; keys, values [blocks, block_size, KV heads, D]; tables; lengths."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray


def make_case(seq_lens: Sequence[int], block_size: int = 4, kv_heads: int = 2, group: int = 3, head_dim: int = 16,
              in_order: bool = False, seed: int = 0) -> Case:  # fmt: skip
    """Random numbers, the same for each token whatever the block size and the order of the pages.

    Slots that nobody owns hold NaN, the tables' tails -1.
    """
    numbers = np.random.default_rng(seed)
    pages = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(pages) + 2
    order = np.arange(num_blocks) if in_order else np.random.default_rng(seed + 1).permutation(num_blocks)
    keys = np.full((num_blocks, block_size, kv_heads, head_dim), np.nan, np.float32)
    values = keys.copy()
    tables = np.full((len(seq_lens), max([*pages, 1])), -1, np.int32)
    given = iter(order)
    for seq, length in enumerate(seq_lens):
        tables[seq, : pages[seq]] = [next(given) for _ in range(pages[seq])]
        positions = np.arange(length)
        at = tables[seq, positions // block_size], positions % block_size
        keys[at] = numbers.normal(size=(length, kv_heads, head_dim))
        values[at] = numbers.normal(size=(length, kv_heads, head_dim))
    q = numbers.normal(size=(len(seq_lens), kv_heads * group, head_dim)).astype(np.float32)
    return Case(q, keys, values, tables, np.array(seq_lens, np.int32))


class Frame(NamedTuple):
    """After some tiles of a walk. start:end are the tile's tokens; weights are relative to `largest` so far."""

    start: int
    end: int
    scores: tuple[float, ...]  # of all tokens so far
    largest: float
    alpha: float
    total: float
    result: tuple[float, ...]


def walk(case: Case, seq: int, head: int, tile: int) -> list[Frame]:
    """One query's walk in tiles of `tile` tokens; frame 0 is before the first. Scores as exp2 wants them."""
    block_size, kv_heads, head_dim = case.keys.shape[1:]
    kv_head = head // (case.q.shape[1] // kv_heads)
    positions = np.arange(int(case.seq_lens[seq]))
    at = case.block_tables[seq, positions // block_size], positions % block_size, kv_head
    scores = case.keys[at] @ case.q[seq, head] * math.log2(math.e) / math.sqrt(head_dim)
    values = case.values[at]
    largest, total, result = -math.inf, 0.0, np.zeros(head_dim)
    frames = [Frame(0, 0, (), largest, 0.0, total, tuple(result))]
    for start in range(0, len(positions), tile):
        now = scores[start : start + tile]
        new_largest = max(largest, float(now.max()))
        alpha, weights = 2.0 ** (largest - new_largest), 2.0 ** (now - new_largest)
        total = total * alpha + float(weights.sum())
        result = result * alpha + weights @ values[start : start + tile]
        largest = new_largest
        end = start + len(now)
        frames.append(Frame(start, end, tuple(scores[:end]), largest, alpha, total, tuple(result)))
    return frames


def requested(traffic: Traffic) -> dict[str, int]:
    """Bytes that were loaded: of K, of V, of the block table; and bytes that were stored."""
    of = {"K": "keys", "V": "values", "table": "block_tables"}
    return {name: traffic.num_bytes("load", argument) for name, argument in of.items()}


def lines(traffic: Traffic, name: str, size: int = LINE) -> tuple[int, int]:
    """(bytes that the loads of `name` use, bytes of the memory lines of `size` bytes that they touch), load by load."""
    used = touched = 0
    for access in traffic:
        if (access.kind, access.name) == ("load", name):
            addresses = np.unique(access.at) * access.itemsize
            used += addresses.size * access.itemsize
            touched += np.unique(addresses // size).size * size
    return used, touched


def in_bf16(case: Case) -> tuple:
    """The packed kernel's grid, arguments and sizes for `case`, for the compiler: arrays as shapes alone, in bf16."""
    found: list[Any] = []

    class Catcher:
        def __getitem__(self, grid: Any) -> Callable:
            return lambda *args, **sizes: found.extend((grid, args, sizes))

    launch_packed(Catcher(), case.q, *case, tile=64)
    grid, args, sizes = found

    def bare(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return SimpleNamespace(shape=x.shape, dtype="bfloat16" if x.dtype == np.float32 else str(x.dtype))

    return grid, tuple(map(bare, args)), sizes


STRIDES = ("stride_block", "stride_slot", "stride_head")


def compiled(kernel: Kernel, *, write: bool = False) -> tuple[list[dict[str, Any]], str]:
    """The packed kernel compiled for an H200 as Qwen2.5-7B needs it: with all hints, and without those of its strides.

    Also says whose figures these are. Without Triton, the kept ones of our own kernel.
    """
    if not has_triton():
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
        return kept["reports"], f"kept figures of our kernel, compiled by Triton {kept['triton']}: none is here"
    case = make_case([100, 40, 7], block_size=16, kv_heads=4, group=7, head_dim=128)
    grid, args, sizes = in_bf16(case)
    reports = compile_report(kernel, grid, args, [(), STRIDES], num_warps=4, num_stages=2, **sizes)
    from importlib.metadata import version

    if write:
        kept = {"command": "python -m kvlab.lab.scenes.attention", "triton": version("triton"), "reports": reports}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return reports, f"your machine, just now, by Triton {version('triton')}"


if __name__ == "__main__":
    from kvlab.standin.decode import gqa_packed_kernel

    print(*compiled(gqa_packed_kernel, write=True), sep="\n")
