"""Which steps an engine runs before it serves, so that no request waits for the compiler (warm-up, 预热).

Triton compiles a kernel when it is first launched with arguments of a new kind: dtypes, constants, and whether an
integer is 1 or a multiple of 16, unless the kernel asks not to look. For our kernels this leaves few kinds:

    always the same in one engine      dtypes, heads, head dim, block size, strides
    not looked at                      number of sequences, width of the block table, splits
    differs from step to step          decodes alone, in one split:      gqa_packed
                                       decodes alone, in several:        split_kv and its merge
                                       chunks with or without decodes:   varlen in its small sizes
                                       and with a long chunk:            varlen in its sizes for prefill

so four steps reach all of them, and what stands between the matrix products besides, which every step launches. A test
runs a day of random requests after them and finds nothing left to compile, and nothing compiled in vain.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kvlab_kernels.awq_matmul import MOST_ROWS, choose_num_splits
from kvlab_kernels.configs import LONG_QUERY, awq_config, num_sms
from kvlab_kernels.launch import INTERPRETED, triton


class WarmUpStep(NamedTuple):
    """A step that makes the launchers compile: rows and length of each sequence, this step's rows included."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def warm_up_steps(max_num_batched_tokens: int, max_model_len: int) -> list[WarmUpStep]:
    """The steps that between them compile all that an engine with these limits can need.

    One sequence decodes with as many splits as any batch of it would have: alone, at the greatest length.
    """
    steps = [WarmUpStep((1,), (1,)), WarmUpStep((1,), (max_model_len,))]
    for query_len in (2, LONG_QUERY):
        if query_len <= min(max_num_batched_tokens, max_model_len):
            steps.append(WarmUpStep((query_len,), (query_len,)))
    return steps


def awq_warm_up_rows(
    in_features: int, out_features: int, max_rows: int, element_size: int, device: torch.device
) -> list[int]:
    """Numbers of rows that between them compile all that awq_matmul can need for one weight: the least of each kind.

    The steps above do not cover them. A kind is a tile of rows, with K split or not; or, for more than MOST_ROWS rows,
    the weight written out.
    """
    kinds: dict[tuple, int] = {}
    for rows in range(1, min(max_rows, MOST_ROWS) + 1):
        config = awq_config(rows, element_size)
        splits = choose_num_splits(rows, in_features, out_features, config, num_sms(device))
        kinds.setdefault((config, splits > 1), rows)
    return [*kinds.values(), *([MOST_ROWS + 1] if max_rows > MOST_ROWS else [])]


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The names of the kernels that are compiled inside, one entry for each time. Interpreted kernels never are."""
    compiled: list[str] = []
    if INTERPRETED:
        yield compiled
        return
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def hook(*args, **kwargs):
        compiled.append(kwargs["fn"].name)
        return None if before is None else before(*args, **kwargs)

    runtime.jit_post_compile_hook = hook
    try:
        yield compiled
    finally:
        runtime.jit_post_compile_hook = before
