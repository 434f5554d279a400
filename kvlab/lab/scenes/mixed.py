"""Scenes of lab 11: how long a split launch takes in a model of few rules, a mixed batch, numbers to quantise.

    split_time    seconds of one layer's decode: reading and merging, by the number of splits. A model, no measurement
    make_batch    prefill chunks and decodes in one flat batch
    query_blocks  which program gets which rows of which sequence
    rows_of       rows of 128 numbers of some kind, for INT8
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvlab.lab.scenes.attention import Case, make_case
from kvlab.primer import GPUS

SMS = {"H200": 132, "A100": 108, "RTX 4090": 128}  # streaming multiprocessors, from NVIDIA's data sheets


class SplitTime(NamedTuple):
    """Seconds. read: K and V, and writing partial results. merge: reading them again, in a launch of its own."""

    read: float
    merge: float

    @property
    def whole(self) -> float:
        return self.read + self.merge


def workspace_bytes(num_seqs: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Bytes that the splits write: a result and an lse each, in fp32. The merge reads them again."""
    return 4 * num_seqs * num_heads * splits * (head_dim + 1)


def split_time(num_seqs: int, seq_len: int, splits: int, *, num_heads: int = 28, kv_heads: int = 4, head_dim: int = 128,
               gpu: str = "H200", share: float = 2.0, start: float = 3e-6) -> SplitTime:  # fmt: skip
    """A decode of equal sequences, bf16, one layer.

    Two numbers are estimates, not measurements. share: how many times its even part of the memory bandwidth one
    multiprocessor can draw, when the others are idle. start: seconds that a second launch costs.
    """
    sms, bandwidth = SMS[gpu], GPUS[gpu].bandwidth
    busy = min(num_seqs * kv_heads * splits, sms)
    drawn = min(bandwidth, busy * share * bandwidth / sms)
    kv = 2 * 2 * num_seqs * seq_len * kv_heads * head_dim
    left = workspace_bytes(num_seqs, num_heads, head_dim, splits) if splits > 1 else 0
    return SplitTime((kv + left) / drawn, left / bandwidth + start if splits > 1 else 0.0)


class Batch(NamedTuple):
    """One step's flat batch: q [T, H, D] with sequence i's rows at query_start_loc[i] to [i + 1]."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray


def make_batch(pairs: Sequence[tuple[int, int]], seed: int = 0, **options: int) -> Batch:
    """pairs: (rows in this step, length with them) of each sequence. options: as make_case."""
    case: Case = make_case([length for _, length in pairs], seed=seed, **options)
    starts = np.cumsum([0, *(rows for rows, _ in pairs)]).astype(np.int32)
    q = np.random.default_rng(seed + 2).normal(size=(int(starts[-1]), *case.q.shape[1:])).astype(np.float32)
    return Batch(q, *case[1:], starts)


def query_blocks(rows: Sequence[int], block_q: int) -> list[tuple[int, int, int] | None]:
    """For each program along axis 0: (sequence, first row, one behind its last) in the chunk; None: nothing to do."""
    found: list[tuple[int, int, int] | None] = [None] * (sum(rows) // block_q + len(rows))
    start = 0
    for seq, count in enumerate(rows):
        for i, first in enumerate(range(0, count, block_q)):
            found[start // block_q + seq + i] = (seq, first, min(first + block_q, count))
        start += count
    return found


KINDS = ("uniform", "normal", "one outlier", "all but one tiny")


def rows_of(kind: str, count: int = 256, dim: int = 128, seed: int = 0) -> np.ndarray:
    """Rows of fp32 numbers, [count, dim]."""
    numbers = np.random.default_rng(seed)
    x = numbers.uniform(-1, 1, (count, dim)) if kind == "uniform" else numbers.normal(size=(count, dim))
    if kind == "one outlier":
        x[:, 0] = 30.0
    elif kind == "all but one tiny":
        x[:, 1:] *= 0.003
        x[:, 0] = 1.0
    return x.astype(np.float32)
