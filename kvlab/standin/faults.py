"""The online-softmax kernel with one fault each: what a test must notice (lab 10, last exercise).

    FAULTS   name -> (what is wrong, the line as it should be, the line as it is)
    faulty   name -> the kernel
"""

import inspect

from kvlab.standin.decode import online_softmax_kernel
from kvlab.standin.launch import Kernel, tl

FAULTS = {
    "short": (
        "counts only full pages",
        "range(0, tl.cdiv(seq_len, BLOCK_SIZE))",
        "range(0, seq_len // BLOCK_SIZE)",
    ),
    "late": (
        "lets one token too many in",
        "known = page * BLOCK_SIZE + offset < seq_len",
        "known = page * BLOCK_SIZE + offset <= seq_len",
    ),
    "lost": (
        "forgets to rescale the sum of weights",
        "total = total * alpha + tl.sum(weights, axis=0)",
        "total = total + tl.sum(weights, axis=0)",
    ),
    "zero": (
        "starts the running maximum at 0",
        'largest, total = -float("inf"), 0.0',
        "largest, total = 0.0, 0.0",
    ),
    "group": (
        "takes the wrong KV head",
        "head // GROUP * stride_head",
        "head % (tl.num_programs(0) // GROUP) * stride_head",
    ),
    "narrow": (
        "computes offsets in 32 bits",
        "block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)",
        "block = tl.load(block_tables + seq * stride_table + page)",
    ),
    "value": (
        "loads V without a mask",
        "v = tl.load(values + block * stride_block + inside, mask=known[:, None], other=0.0)",
        "v = tl.load(values + block * stride_block + inside)",
    ),
    "key": (
        "loads K without a mask",
        "k = tl.load(keys + block * stride_block + inside, mask=known[:, None], other=0.0)",
        "k = tl.load(keys + block * stride_block + inside)",
    ),
}
_SOURCE = inspect.getsource(online_softmax_kernel.fn)


def faulty(name: str) -> Kernel:
    """The kernel with the fault `name`; the right one for "none"."""
    source = _SOURCE
    if name != "none":
        _, right, wrong = FAULTS[name]
        assert source.count(right) == 1, f"{name}: the kernel has changed, so change FAULTS"
        source = source.replace(right, wrong)
    space = {"tl": tl, "__name__": __name__}
    exec(source[source.index("def ") :], space)
    return Kernel(space["online_softmax_kernel"])


def case_for(fault: str) -> dict | None:
    """The smallest case that shows a fault; None if there is none."""
    cases = {
        "short": {"seq_lens": [1]},
        "late": {"seq_lens": [1]},
        "lost": {"seq_lens": [6], "block_size": 1},
        "zero": {"seq_lens": [1], "scores": "cold"},
        "group": {"seq_lens": [2], "kv_heads": 2, "group": 2},
        "narrow": {"seq_lens": [9], "spread": True},
        "value": {"seq_lens": [1]},
        "key": None,
    }
    return cases[fault]
