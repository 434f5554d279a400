"""Times: decodes over the whole plane of batch and length, the ladder, PyTorch's attention, order of pages, prefill.

A decode is bound by memory. So its speed is told as useful bytes a second, K and V of every token once, and as a
fraction of what a plain copy reaches on the same machine. What a kernel reads twice counts once, and costs it.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kvlab_kernels.bench.cases import QWEN, TOY, Paged, bytes_per_token, in_8_bits, paged, useful_bytes
from kvlab_kernels.bench.correct import DECODE_KERNELS, describe
from kvlab_kernels.bench.machine import Machine, Row, quantised_dtypes, timed
from kvlab_kernels.cache_write import reshape_and_cache
from kvlab_kernels.configs import num_sms
from kvlab_kernels.quantized import quantize_and_cache
from kvlab_kernels.split_kv import choose_num_splits, make_workspace, split_kv_attention
from kvlab_kernels.varlen import varlen_attention

PLANE = [(1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (32, 2048), (64, 4096), (256, 1024), (128, 8192)]
LADDER = [(1, 8192), (8, 8192), (64, 4096)]
PREFILL = [(1, 512, 0), (1, 2048, 0), (1, 512, 8192), (1, 2048, 8192), (8, 512, 0)]  # sequences, new tokens, context
TOY_PLANE, TOY_PREFILL = [(1, 20), (3, 70)], [(1, 70, 0), (2, 9, 20)]
PAGES, SPLITS = (16, 64, 256), (1, 4, 16, 64)


def shape_of(machine: Machine):
    return TOY if machine.toy else QWEN


def decode_call(machine: Machine, case: Paged, num_splits: int) -> Callable:
    """A launch as the engine makes it: workspace and output kept."""
    num_seqs, num_heads, head_dim = case.q.shape
    workspace = make_workspace(num_seqs, num_heads, num_splits, head_dim, machine.device)
    out = torch.empty_like(case.q)
    return partial(
        split_kv_attention, *case.decode, scales=case.scales, num_splits=num_splits, workspace=workspace, out=out
    )


def decodes(machine: Machine, copy: float | None) -> list[Row]:
    """Split-KV over batch and length, by page size and splits; `chosen` marks the splits that the engine would take."""
    rows, shape = [], shape_of(machine)
    for batch, length in TOY_PLANE if machine.toy else PLANE:
        for page in PAGES[:1] if machine.toy else PAGES:
            if machine.out_of_time():
                return rows
            case = paged(shape, [length] * batch, page, torch.bfloat16, machine.device)
            chosen = choose_num_splits(batch, shape.num_kv_heads, length, num_sms(machine.device))
            for splits in sorted({*(SPLITS[:2] if machine.toy else SPLITS), chosen}):
                row = {"batch": batch, "length": length, "page": page, "splits": splits, "chosen": splits == chosen}
                rows.append(timed(machine, decode_call(machine, case, splits), useful_bytes(case), copy, **row))
    return rows


def writes(machine: Machine, copy: float | None) -> list[Row]:
    """Rung 1, K and V of a step to their slots, in random order: bytes read and written."""
    rows, shape = [], shape_of(machine)
    for tokens in (3, 40) if machine.toy else (1, 256, 2048, 16384):
        case = paged(shape, [2 * tokens], 16, torch.bfloat16, machine.device)
        k, v = torch.randn(2, tokens, *case.kv.shape[3:], device=machine.device, dtype=torch.bfloat16)
        slots = torch.randperm(case.kv.shape[1] * 16, device=machine.device)[:tokens]
        small = in_8_bits(case, torch.int8)
        calls = {
            "bfloat16": (case, partial(reshape_and_cache, k, v, case.kv, slots)),
            "int8": (small, partial(quantize_and_cache, k, v, small.kv, small.scales, slots)),
        }
        for stored, (target, call) in calls.items():
            moved = tokens * (bytes_per_token(case) + bytes_per_token(target))
            rows.append(timed(machine, call, moved, copy, stored=stored, tokens=tokens))
    return rows


def ladder(machine: Machine, copy: float | None) -> list[Row]:
    """Each rung that decodes, on the same sequences."""
    rows, shape = [], shape_of(machine)
    for batch, length in TOY_PLANE[1:] if machine.toy else LADDER:
        case = paged(shape, [length] * batch, 16, torch.bfloat16, machine.device)
        chosen = choose_num_splits(batch, shape.num_kv_heads, length, num_sms(machine.device))
        calls = {name: partial(kernel, case) for name, kernel in DECODE_KERNELS.items() if "split" not in name}
        calls[f"split-KV, {chosen} splits"] = decode_call(machine, case, chosen)
        for name, call in calls.items():
            if machine.out_of_time():
                return rows
            rows.append(timed(machine, call, useful_bytes(case), copy, kernel=name, batch=batch, length=length))
    return rows


def order_of_pages(machine: Machine, copy: float | None) -> list[Row]:
    """The same lengths over blocks one after the other and over blocks in random order: what paging itself costs."""
    batch, length = (2, 40) if machine.toy else (64, 4096)
    rows, shape = [], shape_of(machine)
    chosen = choose_num_splits(batch, shape.num_kv_heads, length, num_sms(machine.device))
    for page in PAGES[:1] if machine.toy else PAGES:
        for shuffled in (False, True):
            if machine.out_of_time():
                return rows
            case = paged(shape, [length] * batch, page, torch.bfloat16, machine.device, shuffled=shuffled)
            rows.append(timed(machine, decode_call(machine, case, chosen), useful_bytes(case), copy, batch=batch,
                              length=length, page=page, order="shuffled" if shuffled else "in order"))  # fmt: skip
    return rows


def quantised(machine: Machine, copy: float | None) -> list[Row]:
    """The same decodes with K and V in 16 and in 8 bits; `faster` is the time in bf16 over the row's."""
    rows, shape = [], shape_of(machine)
    for batch, length in TOY_PLANE[1:] if machine.toy else LADDER:
        chosen = choose_num_splits(batch, shape.num_kv_heads, length, num_sms(machine.device))
        plain = None
        for stored in (torch.bfloat16, *quantised_dtypes(machine)):
            if machine.out_of_time():
                return rows
            case = paged(shape, [length] * batch, 16, torch.bfloat16, machine.device)
            case = case if stored == torch.bfloat16 else in_8_bits(case, stored)
            name = str(stored).removeprefix("torch.")
            row = timed(machine, decode_call(machine, case, chosen), useful_bytes(case), copy, stored=name, batch=batch,
                        length=length)  # fmt: skip
            plain = plain or row["p50"]
            rows.append(row | {"faster": f"{plain / row['p50']:.2f}x" if plain else None})
    return rows


def torch_attention(machine: Machine, copy: float | None) -> list[Row]:
    """PyTorch's own: contiguous K and V, which no engine with pages has; FlexAttention; pages gathered by indexing."""
    rows, shape = [], shape_of(machine)
    for batch, length in TOY_PLANE[1:] if machine.toy else LADDER:
        if machine.out_of_time():
            return rows
        case = paged(shape, [length] * batch, 16, torch.bfloat16, machine.device)
        size = (2, batch, shape.num_kv_heads, length, shape.head_dim)
        k, v = torch.randn(size, device=machine.device, dtype=torch.bfloat16)
        q = case.q[:, :, None]  # [B, H, 1, D]
        packed = case.q.view(batch, shape.num_kv_heads, -1, shape.head_dim)  # the group as if it were positions

        def gathered(case=case, q=q, length=length):
            pages = case.kv[:, case.block_tables].flatten(2, 3)[:, :, :length].transpose(2, 3)
            return F.scaled_dot_product_attention(q, pages[0], pages[1], enable_gqa=True)

        calls: dict[str, Callable | str] = {
            "SDPA, contiguous": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "SDPA, contiguous, group packed": lambda q=packed, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
            "indexing + SDPA": gathered,
            "FlexAttention, contiguous, compiled": flex(machine, q, k, v),
        }
        for name, call in calls.items():
            if machine.out_of_time():
                return rows
            row = {"kernel": name, "batch": batch, "length": length}
            if isinstance(call, str):
                rows.append(row | {"note": call})
                continue
            try:
                rows.append(timed(machine, call, useful_bytes(case), copy, **row))
            except Exception as error:  # of PyTorch: what it cannot do here is a result
                rows.append(row | {"note": describe(error)})
    return rows


def flex(machine: Machine, q, k, v) -> Callable | str:
    """FlexAttention, compiled, or why it is not there."""
    if machine.toy:
        return "not run: it is compiled for a GPU"
    try:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        compiled(q, k, v, enable_gqa=True)
        return lambda: compiled(q, k, v, enable_gqa=True)
    except Exception as error:
        return describe(error)


def prefill(machine: Machine, gemm: float | None) -> list[Row]:
    """Chunks through varlen, in operations a second beside a large matrix product; PyTorch's where there is no context.

    4 * H * D operations for each pair of a query and a token that it sees.
    """
    rows, shape = [], shape_of(machine)
    for batch, new, context in TOY_PREFILL if machine.toy else PREFILL:
        if machine.out_of_time():
            return rows
        case = paged(shape, [context + new] * batch, 16, torch.bfloat16, machine.device, query_lens=[new] * batch)
        pairs = batch * (new * context + new * (new + 1) // 2)
        work = 4 * shape.num_heads * shape.head_dim * pairs
        row = {"batch": batch, "new": new, "context": context}
        out = torch.empty_like(case.q)
        arguments = (*case.decode, case.query_start_loc)
        call = lambda a=arguments, n=new, o=out: varlen_attention(*a, max_query_len=n, out=o)  # noqa: E731
        rows.append(timed(machine, call, work, gemm, kernel="varlen", **row))
        if context == 0:
            q = case.q.view(batch, new, *case.q.shape[1:]).transpose(1, 2)
            size = (2, batch, shape.num_kv_heads, new, shape.head_dim)
            k, v = torch.randn(size, device=machine.device, dtype=torch.bfloat16)
            call = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            rows.append(timed(machine, call, work, gemm, kernel="SDPA, contiguous", **row))
    return rows
