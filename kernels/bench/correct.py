"""Every kernel against its reference, in every dtype; and CUDA graphs replayed on other lengths.

References compute in float64 from the same rounded numbers, so that what is measured is the kernel's own error. Copies
must be equal to the last bit.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlab_kernels.bench import four_bits
from kvlab_kernels.bench.cases import QWEN, TOY, Paged, in_8_bits, paged
from kvlab_kernels.bench.machine import Machine, quantised_dtypes
from kvlab_kernels.bench.small import both_ways, operations
from kvlab_kernels.cache_write import reshape_and_cache, reshape_and_cache_reference
from kvlab_kernels.gather import decode_reference, gather_attention, gather_pages, gather_pages_reference
from kvlab_kernels.gqa_packed import gqa_packed_attention
from kvlab_kernels.naive import naive_attention
from kvlab_kernels.online_softmax import online_softmax_attention
from kvlab_kernels.quantized import dequantized, quantize_and_cache, quantize_and_cache_reference
from kvlab_kernels.split_kv import make_workspace, split_kv_attention
from kvlab_kernels.varlen import varlen_attention, varlen_reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# And of the number itself: rounding alone puts a bf16 number above 2 off by 8e-3.
RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# (lengths, rows of each) by toy or not: a page's edge and its neighbours, one token, a length for several splits
LENGTHS = {True: [1, 15, 16, 17, 70], False: [1, 15, 16, 17, 255, 1024, 3000]}
CHUNKS = {True: ([17, 20, 9, 40], [1, 20, 3, 16]), False: ([257, 700, 9, 40, 2000], [1, 700, 3, 16, 129])}


class Check(NamedTuple):
    """One comparison. `run` gives (what the kernel made, what it must equal)."""

    kernel: str
    dtype: torch.dtype
    tolerance: float
    run: Callable[[], tuple[Tensor, Tensor]]


DECODE_KERNELS: dict[str, Callable[[Paged], Tensor]] = {
    "gather + SDPA": lambda c: gather_attention(*c.decode, max_seq_len=c.block_tables.shape[1] * c.kv.shape[2]),
    "naive": lambda c: naive_attention(*c.decode),
    "online softmax": lambda c: online_softmax_attention(*c.decode),
    "gqa packed": lambda c: gqa_packed_attention(*c.decode, scales=c.scales),
    "split-KV, 4 splits": lambda c: split_kv_attention(*c.decode, scales=c.scales, num_splits=4),
    "split-KV, 64 splits": lambda c: split_kv_attention(*c.decode, scales=c.scales, num_splits=64),
    "split-KV, fixed": lambda c: split_kv_attention(*c.decode, scales=c.scales, split_tokens=48),
    "varlen, decodes": lambda c: varlen_attention(*c.decode, c.query_start_loc, scales=c.scales, max_query_len=1),
}
READ_8_BITS = [name for name in DECODE_KERNELS if name.startswith(("gqa", "split", "varlen"))]


def checks(machine: Machine) -> Iterator[Check]:
    """All comparisons, one dtype after the other."""
    shape = TOY if machine.toy else QWEN
    lengths, (context, rows) = LENGTHS[machine.toy], CHUNKS[machine.toy]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype == torch.bfloat16 and not machine.knows_bf16:
            continue
        decodes = paged(shape, lengths, 16, dtype, machine.device)
        chunks = paged(shape, context, 16, dtype, machine.device, query_lens=rows)
        yield Check("cache write", dtype, 0.0, lambda c=chunks: write(c))
        yield Check("gather", dtype, 0.0, lambda c=decodes: gather(c))
        for name, kernel in DECODE_KERNELS.items():
            yield Check(name, dtype, TOLERANCE[dtype], lambda c=decodes, k=kernel: (k(c), decode_reference(*c.decode)))
        for operation in operations(machine, 20 if machine.toy else 300, dtype):
            tolerance = 0.0 if operation.name == "copy blocks" else TOLERANCE[dtype]
            yield Check(operation.name, dtype, tolerance, partial(both_ways, operation))
        for name, longest in (("varlen, mixed", 1), ("varlen, sizes for prefill", 1024)):
            yield Check(name, dtype, TOLERANCE[dtype], lambda c=chunks, n=longest: varlen(c, n))


def checks_of_8_bits(machine: Machine) -> Iterator[Check]:
    """INT8 and FP8, against attention over what is stored, dequantised: the error of quantising is not the kernel's."""
    shape = TOY if machine.toy else QWEN
    lengths, (context, rows) = LENGTHS[machine.toy], CHUNKS[machine.toy]
    dtype = torch.bfloat16 if machine.knows_bf16 else torch.float16
    for stored in quantised_dtypes(machine):
        decodes = in_8_bits(paged(shape, lengths, 16, dtype, machine.device), stored)
        chunks = in_8_bits(paged(shape, context, 16, dtype, machine.device, query_lens=rows), stored)
        if stored == torch.int8 or machine.device.type == "cuda":  # the interpreter rounds to FP8 wrongly
            yield Check("quantise and write", stored, 0.0, partial(quantise, chunks))
        for name in READ_8_BITS:
            yield Check(name, stored, TOLERANCE[dtype], partial(read_8_bits, decodes, DECODE_KERNELS[name]))
        yield Check("varlen, mixed", stored, TOLERANCE[dtype], partial(varlen, chunks, 1))


def checks_of_4_bits(machine: Machine) -> Iterator[Check]:
    """Weights in 4 bits: each tile of rows, matrices that are split and one that is not, and the weight written out."""
    dtype = torch.bfloat16 if machine.knows_bf16 else torch.float16
    for layer, weight in four_bits.layers(machine):
        for rows in four_bits.TOY_ROWS if machine.toy else four_bits.ROWS:
            run = partial(four_bits.in_both_ways, weight, rows, dtype)
            yield Check(f"4 bits, {layer}, {rows} rows", dtype, TOLERANCE[dtype], run)
        yield Check(f"4 bits, {layer}, written out", dtype, 0.0, partial(four_bits.written_out, weight, dtype))


def quantise(case: Paged) -> tuple[Tensor, Tensor]:
    """Numbers and scales that the kernel stores, as bytes, against those of the reference."""
    made = []
    k, v = torch.randn(2, case.q.shape[0], *case.kv.shape[3:], device=case.kv.device, dtype=case.q.dtype)
    slots = torch.randperm(case.kv.shape[1] * case.kv.shape[2], device=case.kv.device)[: len(k)]
    for function in (quantize_and_cache, quantize_and_cache_reference):
        kv, scales = case.kv.clone(), case.scales.clone()
        function(k, v, kv, scales, slots)
        made.append(torch.cat([x.view(torch.uint8).flatten() for x in (kv, scales)]))
    return made[0], made[1]


def read_8_bits(case: Paged, kernel: Callable[[Paged], Tensor]) -> tuple[Tensor, Tensor]:
    plain = dequantized(case.kv, case.scales)
    return kernel(case), decode_reference(case.q, plain, case.block_tables, case.seq_lens)


def write(case: Paged) -> tuple[Tensor, Tensor]:
    """Rows to slots in random order, one of them to none; the whole cache is compared."""
    kv, expected = case.kv.clone(), case.kv.clone()
    k, v = case.q.new_empty(2, case.q.shape[0], *kv.shape[3:]).normal_()
    slots = torch.randperm(kv.shape[1] * kv.shape[2], device=kv.device)[: len(k)]
    slots[len(k) // 2] = -1
    reshape_and_cache(k, v, kv, slots)
    reshape_and_cache_reference(k, v, expected, slots)
    return kv, expected


def gather(case: Paged) -> tuple[Tensor, Tensor]:
    longest = int(case.seq_lens.max())
    got, expected = (
        torch.stack(function(case.kv, case.block_tables, case.seq_lens, longest))
        for function in (gather_pages, gather_pages_reference)
    )
    return got, expected


def varlen(case: Paged, max_query_len: int) -> tuple[Tensor, Tensor]:
    plain = case.kv if case.scales is None else dequantized(case.kv, case.scales)
    rest = case.block_tables, case.seq_lens, case.query_start_loc
    got = varlen_attention(case.q, case.kv, *rest, scales=case.scales, max_query_len=max_query_len)
    return got, varlen_reference(case.q, plain, *rest)


def correctness(machine: Machine) -> list[dict[str, Any]]:
    """A row for each check: the largest error beside the tolerance."""
    rows = []
    for check in chain(checks(machine), checks_of_8_bits(machine), checks_of_4_bits(machine)):
        row = {"kernel": check.kernel, "dtype": str(check.dtype).removeprefix("torch."), "tolerance": check.tolerance}
        try:
            got, expected = check.run()
            error, right = compare(got, expected, check.tolerance)
            rows.append(row | {"error": error, "right": right})
        except Exception as failure:  # the compiler's or the launch's: the other kernels are looked at all the same
            rows.append(row | {"right": False, "note": describe(failure)})
    return rows


def compare(got: Tensor, expected: Tensor, tolerance: float) -> tuple[float, bool]:
    """The largest error, and whether each is within tolerance; NaN is not."""
    errors, sizes = (got.double() - expected.double()).abs(), expected.double().abs()
    relative = RELATIVE[got.dtype] if tolerance else 0.0
    return errors.max().item(), bool((errors <= tolerance + relative * sizes).all())


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def replays(machine: Machine) -> list[dict[str, Any]]:
    """Decodes are captured once, at full length; then lengths, tables, queries and K/V change under the graph.

    A replay must equal a launch of its own with the same number of splits, to the last bit. Without a GPU there are no
    graphs, and the launch is simply made again.
    """
    shape, (longest, num_seqs) = (TOY, (70, 3)) if machine.toy else (QWEN, (4096, 8))
    dtype = torch.float32 if machine.toy else torch.bfloat16
    how = "graph" if machine.device.type == "cuda" else "no GPU: launched again"
    rows = []
    for num_splits in (1, 4, 16):
        case = paged(shape, [longest] * num_seqs, 16, dtype, machine.device)
        workspace = make_workspace(num_seqs, shape.num_heads, num_splits, shape.head_dim, machine.device)
        out = torch.empty_like(case.q)
        launch = partial(split_kv_attention, *case.decode, num_splits=num_splits, workspace=workspace, out=out)
        replay = machine.capture(launch)
        equal = True
        others = [1] * num_seqs, [longest // 3] * num_seqs, [longest, *[5] * (num_seqs - 1)]
        for seed, lengths in enumerate(others, 1):
            other = paged(shape, lengths, 16, dtype, machine.device, seed=seed)
            case.q.copy_(other.q)
            case.kv[:, : other.kv.shape[1]].copy_(other.kv)
            case.block_tables.zero_()
            case.block_tables[:, : other.block_tables.shape[1]].copy_(other.block_tables)
            case.seq_lens.copy_(other.seq_lens)
            out.fill_(torch.nan)
            replay()
            equal &= torch.equal(out, split_kv_attention(*case.decode, num_splits=num_splits))
            equal &= compare(out, decode_reference(*case.decode), TOLERANCE[dtype])[1]
        rows.append({"kernel": f"split-KV, {num_splits} splits", "replayed": how, "right": bool(equal)})
    return rows
