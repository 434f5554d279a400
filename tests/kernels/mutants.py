"""Faults put into the kernels on purpose, and for each the shortest cases that must notice it.

python tests/kernels/mutants.py      runs them all and says what killed each
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from kernel_cases import DEVICE, bits, close, decode, far_apart, in_8_bits, paged, varlen

import kvlab_kernels
from kvlab.model import awq, layers
from kvlab_kernels.awq_matmul import awq_matmul_reference, dequantize_reference
from kvlab_kernels.block_copy import copy_blocks_reference
from kvlab_kernels.cache_write import reshape_and_cache_reference
from kvlab_kernels.configs import AWQConfig, DecodeConfig, VarlenConfig
from kvlab_kernels.gather import decode_reference, gather_pages_reference
from kvlab_kernels.quantized import dequantized, quantize_and_cache_reference
from kvlab_kernels.rms_norm import add_rms_norm_reference
from kvlab_kernels.rope_cache import rope_and_cache_reference
from kvlab_kernels.sanitizer import reaching
from kvlab_kernels.split_kv import make_workspace
from kvlab_kernels.varlen import varlen_reference

SOURCES = Path(kvlab_kernels.__file__).parent
DECODE, VARLEN = DecodeConfig(16, 4, 2), VarlenConfig(16, 16, 4, 2)

# ---- cases: each takes the modules, one of them with a fault, and raises where the fault shows


def write(modules, slots, kv=None):
    kv = torch.full((2, 3, 4, 2, 40), torch.nan, device=DEVICE) if kv is None else kv
    qkv = torch.randn(len(slots), 8, kv.shape[4], generator=torch.Generator().manual_seed(0))
    _, k, v = qkv.to(kv.dtype).to(DEVICE).split((4, 2, 2), dim=1)
    slots, before = torch.tensor(slots, device=DEVICE), kv[:, :2].clone()
    modules("cache_write").reshape_and_cache(k, v, kv, slots)
    got = kv[:, :2].clone()
    kv[:, :2] = before
    reshape_and_cache_reference(k, v, kv, slots)
    assert torch.equal(bits(got), bits(kv[:, :2].contiguous()))


def gather(modules, case=None, max_seq_len=12):
    case = case or paged([9, 3, 14], head_dim=20)
    args = (case.kv, case.block_tables, case.seq_lens, max_seq_len)
    for got, want in zip(modules("gather").gather_pages(*args), gather_pages_reference(*args), strict=True):
        assert torch.equal(got, want)


def decode_of(name, case, **options):
    def run(modules):
        more = options if name in ("naive", "online_softmax") else {"config": DECODE} | options
        decode(getattr(modules(name), f"{name}_attention"), case(), **more)

    return run


def chunks(modules, case=None):
    case = case or paged([40, 30, 8, 5], [9, 24, 8, 1], padding=2)
    varlen(partial(modules("varlen").varlen_attention, config=VARLEN), case)


def far_write(modules):
    kv = far_apart([4, 3, 2], head_dim=8).kv
    x = torch.ones(1, 2, 8, device=DEVICE)
    modules("cache_write").reshape_and_cache(x, x, kv, torch.tensor([9], device=DEVICE))
    assert (kv[:, 2, 1] == 1).all()


def stale_split(modules):
    workspace = make_workspace(2, 4, 5, 32, DEVICE)
    for left_over in workspace:
        left_over.fill_(torch.nan)
    decode_of("split_kv", partial(paged, [1, 20]), num_splits=5, workspace=workspace)(modules)


def decode_int8(name, **options):
    def run(modules):
        case, scales = in_8_bits(paged([9, 40], num_kv_heads=3, spare=9, seed=1))  # nobody owns block 0
        attention = getattr(modules(name), f"{name}_attention")
        got = attention(*case[:4], scales=scales, config=DECODE, **options)
        close(got, decode_reference(case.q, dequantized(case.kv, scales), *case[2:4]))

    return run


def chunks_int8(modules):
    case, scales = in_8_bits(paged([20, 9], [7, 1]))
    got = modules("varlen").varlen_attention(*case, scales=scales, config=VARLEN)
    close(got, varlen_reference(case.q, dequantized(case.kv, scales), *case[2:]))


def write_int8(modules, slots=(6, -1, 3), head_dim=20):
    k, v = torch.randn(2, len(slots), 3, head_dim, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    k[0, 0] = 0
    k[0, 1, :2] = torch.tensor([127.0, 0.5])
    v[-1, 2, 0] = torch.nan
    got = torch.full((2, 2, 4, 3, head_dim), 99, dtype=torch.int8, device=DEVICE), torch.full((2, 2, 4, 3), -1.0)
    got = got[0], got[1].to(DEVICE)
    want = tuple(x.clone() for x in got)
    slots = torch.tensor(slots, device=DEVICE)
    modules("quantized").quantize_and_cache(k, v, *got, slots)
    quantize_and_cache_reference(k, v, *want, slots)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def rope(modules, slots=(6, -1, 3), dtype=torch.float16, int8=False):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(len(slots), 9, 20, generator=generator).to(dtype).to(DEVICE).split((3, 3, 3), dim=1)
    cos, sin = torch.randn(2, 50, 1, 20, generator=generator).to(dtype).to(DEVICE)
    kv = torch.full((2, 2, 4, 3, 20), 99, dtype=torch.int8 if int8 else dtype, device=DEVICE)
    scales = torch.full((2, 2, 4, 3), -1.0, device=DEVICE) if int8 else None
    want = kv.clone(), None if scales is None else scales.clone()
    positions, slots = torch.tensor([7, 1, 49], device=DEVICE), torch.tensor(slots, device=DEVICE)
    args = (q, k, v, cos, sin, positions)
    got = modules("rope_cache").rope_and_cache(*args, kv, slots, scales=scales)
    rotated = rope_and_cache_reference(*args, want[0], slots, scales=want[1])
    assert torch.equal(got[slots >= 0], rotated[slots >= 0])
    assert torch.equal(kv, want[0]) and (scales is None or torch.equal(scales, want[1]))


def far_rope(modules):
    kv = far_apart([4, 3, 2], head_dim=8).kv
    x, zero = torch.ones(1, 2, 8, dtype=torch.float16, device=DEVICE), torch.tensor([0], device=DEVICE)
    turn = torch.ones(1, 1, 8, dtype=torch.float16, device=DEVICE)
    modules("rope_cache").rope_and_cache(x, x, x, turn, turn * 0, zero, kv, zero + 9)
    assert (kv[:, 2, 1] == 1).all()


def norm(modules, add=False, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 6, 4, 50, generator=generator).to(dtype).to(DEVICE)[..., 5:45]
    weight = (torch.randn(4, 40, generator=generator) * 3).to(dtype).to(DEVICE)
    if add:
        want_residual = residual.clone()
        want = add_rms_norm_reference(x, want_residual, weight, 0.1)
        got = modules("rms_norm").add_rms_norm(x, residual, weight, 0.1)
        assert torch.equal(residual, want_residual)
    else:
        want, got = layers.rms_norm(x, weight, 0.1), modules("rms_norm").rms_norm(x, weight, 0.1)
    assert (got != want).sum() < 20  # where the order of the sum decided a rounding


def gated(modules):
    gate, up = (torch.randn(3, 2400, generator=torch.Generator().manual_seed(0)).half() * 9).to(DEVICE).chunk(2, dim=1)
    assert (modules("swiglu").swiglu(gate, up) != layers.swiglu(gate, up)).sum() < 20
    low = torch.full((1, 1), -200.0, device=DEVICE)
    assert modules("swiglu").swiglu(low, low) == 0


def blocks(modules, pairs=((1, 4), (2, 3), (4, 5), (0, 1)), head_dim=3):
    generator = torch.Generator().manual_seed(0)
    guards = [torch.randn(2, 7, 2, 1, n, generator=generator).to(DEVICE) for n in (head_dim, 1)]
    want = [guard.clone() for guard in guards]
    copy_blocks_reference(want, pairs)
    tensors = [guard[:, :6] for guard in guards]
    with reaching(*tensors):
        modules("block_copy").copy_blocks(modules("block_copy").pieces_of(tensors), pairs)
    assert all(torch.equal(a, b) for a, b in zip(guards, want, strict=True))


def rows_and_back(modules):
    module = modules("block_copy")
    tensor = torch.arange(2 * 4 * 3, dtype=torch.float32, device=DEVICE).view(2, 4, 3)
    before, cache = tensor.clone(), module.pieces_of([tensor])
    buffer = torch.zeros(2, 24, dtype=torch.uint8, device=DEVICE)
    with reaching(tensor, buffer):
        module.gather_blocks(cache, [3, 1], module.pieces_of_rows(buffer, cache))
        assert torch.equal(buffer.view(torch.float32).view(2, 2, 3), before[:, [3, 1]].transpose(0, 1))
        module.scatter_blocks(module.pieces_of_rows(buffer, cache), cache, [0, 2])
    assert torch.equal(tensor[:, [0, 2]], before[:, [3, 1]]) and torch.equal(tensor[:, [1, 3]], before[:, [1, 3]])


def four_bits(modules, shape=(384, 40, 128), num_rows=3, splits=2):
    """A product, and the weight written out; bits and zeros at random, no two scales of a group alike."""
    (k, n, group), generator = shape, torch.Generator().manual_seed(0)
    words, zeros = (torch.randint(-(2**31), 2**31, (r, n // 8), generator=generator).int() for r in (k, k // group))
    scales = (torch.rand(k // group, n, generator=generator) + 0.1).half()
    module = modules("awq_matmul")
    weight = module.repack(awq.unpack(words).to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE))
    want = awq.dequantise_weight(words, zeros, scales, torch.float32).T.to(DEVICE)
    assert torch.equal(module.dequantize(weight, torch.float32), want)
    assert torch.equal(dequantize_reference(weight, torch.float32), want)
    x = torch.full((num_rows + 1, k + 3), torch.nan, device=DEVICE)[:num_rows, :k]
    x.copy_(torch.randn(num_rows, k, generator=generator))
    bias = torch.randn(n, generator=generator).to(DEVICE) * 50
    got = module.awq_matmul(x, weight, bias, num_splits=splits, config=AWQConfig(16, 32, 4, 2))
    want = awq_matmul_reference(x, weight, bias)
    assert ((got - want).abs() <= 1e-6 * want.abs().amax()).all()


RAGGED = partial(paged, [14, 3, 9])
TILES = partial(paged, [55])  # four tiles of 16 in one program: the second and third must rescale
FAR = partial(far_apart, [4, 3, 2], block_size=4, num_kv_heads=1, head_dim=16)
CASES = {
    "write": partial(write, slots=[6, 1, 3]),
    "write, a slot of -1": partial(write, slots=[6, -1]),
    "write, far": far_write,
    "gather": gather,
    "gather, far": lambda modules: gather(modules, FAR(), 4),
    "varlen": chunks,
    "varlen, few rows": lambda modules: chunks(modules, paged([9, 7], [1, 1])),
    "varlen, far": lambda modules: chunks(modules, far_apart([8, 3], [5, 1], num_kv_heads=1, head_dim=16)),
    "split, empty": stale_split,
    "split, length 0": decode_of("split_kv", partial(paged, [0, 20]), num_splits=3),
    "split, many": decode_of("split_kv", partial(paged, [110]), split_tokens=3),  # more than the merge takes at once
    "split, planned too short": decode_of("split_kv", TILES, split_tokens=16, max_seq_len=20),
    "split": decode_of("split_kv", TILES, num_splits=2),
    "packed, int8": decode_int8("gqa_packed"),
    "split, int8": decode_int8("split_kv", num_splits=3),
    "varlen, int8": chunks_int8,
    "write, int8": write_int8,
    "write, int8, one head": lambda modules: write_int8(modules, slots=(1,)),
    "rope": rope,
    "rope, int8": partial(rope, int8=True),
    "rope, far": far_rope,
    "norm": norm,
    "norm, add": partial(norm, add=True),
    "swiglu": gated,
    "blocks": blocks,
    "blocks, large": partial(blocks, head_dim=1500),
    "blocks, rows": rows_and_back,
    "4 bits": four_bits,
    "4 bits, one split": partial(four_bits, splits=1),
    "4 bits, small groups": partial(four_bits, shape=(192, 8, 32)),
    "4 bits, large groups": partial(four_bits, shape=(512, 8, 256), splits=1),
    "4 bits, rows of two tiles": partial(four_bits, shape=(128, 8, 128), num_rows=18, splits=1),
}
for decoder in ("naive", "online_softmax", "gqa_packed"):
    CASES |= {
        decoder: decode_of(decoder, RAGGED),
        f"{decoder}, tiles": decode_of(decoder, TILES),
        f"{decoder}, full": decode_of(decoder, partial(paged, [16])),
        f"{decoder}, large": decode_of(decoder, partial(paged, [13], scale=80.0)),
        f"{decoder}, far": decode_of(decoder, FAR),
        f"{decoder}, length 0": decode_of(decoder, partial(paged, [0, 2])),
        f"{decoder}, odd sizes": decode_of(decoder, partial(paged, [8, 5], block_size=3, head_dim=20)),
    }


# ---- faults


class Fault(NamedTuple):
    module: str
    says: str
    instead: str
    cases: tuple[str, ...]


def fault(module, says, instead, *cases) -> Fault:
    return Fault(module, says, instead, cases or (module,))


FAULTS = {
    "write: -1 is a slot": fault("cache_write", "if slot < 0:", "if slot < -1:", "write, a slot of -1"),
    "write: slot in 32 bits": fault(
        "cache_write",
        "tl.load(slot_mapping + token).to(tl.int64)",
        "tl.load(slot_mapping + token).to(tl.int32)",
        "write, far",
    ),
    "write: block and offset swapped": fault(
        "cache_write",
        "slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE",
        "slot % BLOCK_SIZE * stride_block + slot // BLOCK_SIZE",
        "write",
    ),
    "write: V is K": fault("cache_write", "tl.load(v + token * stride_v", "tl.load(k + token * stride_k", "write"),
    "write: rows thought contiguous": fault(
        "cache_write", "tl.load(k + token * stride_k", "tl.load(k + token * ROW", "write"
    ),
    "write: the padding of a row is written": fault(
        "cache_write", "inside = column < ROW", "inside = column < TILE", "write"
    ),
    "gather: the table is read behind the end": fault(
        "gather", "written = positions < tl.load(seq_lens + seq)", "written = positions < max_seq_len"
    ),
    "gather: what lies behind the end is not zeroed": fault(
        "gather", "wanted = (positions < max_seq_len)[:, None] & dims", "wanted = known"
    ),
    "gather: writes behind the copy's end": fault(
        "gather", "wanted = (positions < max_seq_len)[:, None] & dims", "wanted = (positions >= 0)[:, None] & dims"
    ),
    "gather: block in 32 bits": fault("gather", "other=0).to(tl.int64)", "other=0)", "gather, far"),
    "gather: the table's row in tokens": fault("gather", "positions // BLOCK_SIZE, mask", "positions, mask"),
    "naive: the wrong KV head": fault("naive", "head // GROUP", "head % GROUP"),
    "naive: V is not masked": fault(
        "naive",
        "v = tl.load(value_cache + at, mask=known[:, None] & dims[None, :]",
        "v = tl.load(value_cache + at, mask=dims[None, :]",
    ),
    "naive: unknown positions count": fault("naive", "scores = tl.where(known, ", "scores = tl.where(offset >= 0, "),
    "naive: the largest score is not subtracted": fault(
        "naive", "tl.exp2(scores - largest)", "tl.exp2(scores)", "naive, large"
    ),
    "naive: the last block is forgotten": fault("naive", "tl.cdiv(seq_len, BLOCK_SIZE)", "seq_len // BLOCK_SIZE"),
    "naive: one block too many": fault(
        "naive", "tl.cdiv(seq_len, BLOCK_SIZE)", "seq_len // BLOCK_SIZE + 1", "naive, full"
    ),
    "naive: block in 32 bits": fault("naive", "block_index).to(tl.int64)", "block_index)", "naive, far"),
    "naive: 0 / 0": fault("naive", "tl.where(seq_len > 0, total, 1.0)", "total", "naive, length 0"),
    "naive: a page's padding counts": fault(
        "naive", "known = (offset < BLOCK_SIZE) & ", "known = ", "naive, odd sizes"
    ),
    "naive: e, not 2": fault("naive", "math.log2(math.e) * (", "(", "naive"),
    "online: the sum is not rescaled": fault(
        "online_softmax", "total = total * alpha", "total = total", "online_softmax, tiles"
    ),
    "online: the result is not rescaled": fault(
        "online_softmax", "result = result * alpha", "result = result", "online_softmax, tiles"
    ),
    "online: the largest is the last block's": fault(
        "online_softmax",
        "tl.maximum(largest, tl.max(scores, axis=0))",
        "tl.max(scores, axis=0)",
        "online_softmax, large",
    ),
    "online: V is not masked": fault(
        "online_softmax",
        "v = tl.load(value_cache + at, mask=known[:, None] & dims[None, :]",
        "v = tl.load(value_cache + at, mask=dims[None, :]",
    ),
    "online: block in 32 bits": fault(
        "online_softmax", "block_index).to(tl.int64)", "block_index)", "online_softmax, far"
    ),
    "online: alpha is upside down": fault(
        "online_softmax", "tl.exp2(largest - new_largest)", "tl.exp2(new_largest - largest)", "online_softmax, tiles"
    ),
    "sweep: the sum is not rescaled": fault(
        "gqa_packed", "total = total * alpha", "total = total", "gqa_packed, tiles"
    ),
    "sweep: the result is not rescaled": fault("gqa_packed", "result * alpha[:, None]", "result", "gqa_packed, tiles"),
    "sweep: the largest is not kept": fault(
        "gqa_packed", "largest = new_largest\n    return", "pass\n    return", "gqa_packed, tiles"
    ),
    "sweep: the table is read behind the end": fault(
        "gqa_packed", "token // BLOCK_SIZE, mask=known, other=0)", "token // BLOCK_SIZE)", "gqa_packed, tiles"
    ),
    "sweep: block in 32 bits": fault(
        "gqa_packed", "other=0).to(tl.int64)", "other=0)", "gqa_packed, far", "varlen, far"
    ),
    "sweep: V is not masked": fault(
        "gqa_packed",
        "v = tl.load(value_cache + slot[:, None] + d[None, :], mask=known[:, None] & dims[None, :]",
        "v = tl.load(value_cache + slot[:, None] + d[None, :], mask=dims[None, :]",
    ),
    "sweep: K's padded dimensions are read": fault(
        "gqa_packed", "mask=known[None, :] & dims[:, None]", "mask=known[None, :]", "gqa_packed, odd sizes"
    ),
    "sweep: a row sees itself and the next": fault("gqa_packed", "< limit[:, None]", "<= limit[:, None]", "varlen"),
    "sweep: every row sees all": fault(
        "gqa_packed", "known[None, :] & (token[None, :] < limit[:, None])", "known[None, :]", "varlen"
    ),
    "sweep: a block id for the whole tile": fault(
        "gqa_packed", "tl.load(table + token // BLOCK_SIZE", "tl.load(table + first // BLOCK_SIZE + 0 * token"
    ),
    "sweep: unknown positions count": fault("gqa_packed", "tl.where(known[None, :] & (", "tl.where((", "split, many"),
    "packed: heads dealt round": fault("gqa_packed", "kv_head * GROUP + row", "kv_head + row * tl.num_programs(0)"),
    "packed: padded rows are written": fault(
        "gqa_packed", "real = (row < GROUP)[:, None]", "real = (row < ROWS)[:, None]"
    ),
    "packed: 0 / 0": fault("gqa_packed", "tl.where(seq_len > 0, total, 1.0)", "total", "gqa_packed, length 0"),
    "split: an empty one says nothing": fault(
        "split_kv",
        'tl.store(lse + at * stride_lse + split, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=row < GROUP)',
        "pass",
        "split, empty",
    ),
    "split: an empty one weighs 1": fault(
        "split_kv", 'tl.full([ROWS], -float("inf")', "tl.full([ROWS], 0.0", "split, empty"
    ),
    "split: the sum is not in lse": fault("split_kv", "largest + tl.log2(total)", "largest", "split"),
    "split: lse to the base e": fault("split_kv", "tl.log2(total)", "tl.log(total)", "split"),
    "split: the result is not divided": fault("split_kv", "result / total[:, None]", "result", "split"),
    "split: the rest is left out": fault(
        "split_kv",
        "tl.where(split == num_splits - 1, seq_len, tl.minimum(start + tokens, seq_len))",
        "tl.minimum(start + tokens, seq_len)",
        "split, planned too short",
    ),
    "split: a split reads on to the end": fault(
        "split_kv",
        "query, tl.full([ROWS], seq_len, dtype=tl.int32), start, end,",
        "query, tl.full([ROWS], seq_len, dtype=tl.int32), start, seq_len,",
        "split",
    ),
    "split: padded rows are written": fault(
        "split_kv", "real = (row < GROUP)[:, None]", "real = (row < ROWS)[:, None]", "split"
    ),
    "merge: empty splits are read": fault(
        "split_kv",
        'live = (lses > -float("inf"))[:, None] & dims',
        "live = (split < num_splits)[:, None] & dims",
        "split, empty",
    ),
    "merge: the result is not rescaled": fault("split_kv", "result = result * alpha", "result = result", "split, many"),
    "merge: the sum is not rescaled": fault("split_kv", "total = total * alpha", "total = total", "split, many"),
    "merge: -inf - -inf": fault(
        "split_kv", 'tl.where(new_largest == -float("inf"), 0.0, new_largest)', "new_largest", "split, length 0"
    ),
    "merge: the first tile of splits only": fault(
        "split_kv", "range(0, num_splits, MERGE_TILE)", "range(0, MERGE_TILE, MERGE_TILE)", "split, many"
    ),
    "varlen: the context is forgotten": fault("varlen", "query, context + position + 1", "query, position + 1"),
    "varlen: a row does not see itself": fault("varlen", "context + position + 1", "context + position", "varlen"),
    "varlen: the search is one too early": fault("varlen", "+ middle <= block", "+ middle < block"),
    "varlen: blocks counted without the sequences before": fault(
        "varlen", "(first_row // BLOCK_Q + seq)) * BLOCK_Q", "(first_row // BLOCK_Q)) * BLOCK_Q"
    ),
    "varlen: rows laid out the other way": fault(
        "varlen", "position = first + row // GROUP", "position = first + row % BLOCK_Q"
    ),
    "varlen: rows of the next sequence are written": fault(
        "varlen", "(row < BLOCK_Q * GROUP) & (position < query_len)", "(row < BLOCK_Q * GROUP)"
    ),
    "varlen: reads behind the sequence": fault(
        "varlen", "tl.minimum(context + first + BLOCK_Q, seq_len)", "context + first + BLOCK_Q"
    ),
    "varlen: too few programs": fault(
        "varlen", "num_rows // block_q + num_seqs,", "num_rows // block_q + 1,", "varlen, few rows"
    ),
    "varlen: the wrong sequence's length": fault("varlen", "tl.load(seq_lens + seq)", "tl.load(seq_lens)"),
    "varlen: another sequence's table": fault("varlen", "seq.to(tl.int64) * stride_table", "0 * stride_table"),
    "int8: K's scales are forgotten": fault(
        "gqa_packed", "factor *= tl.load(", "factor += 0.0 * tl.load(", "packed, int8"
    ),
    "int8: V's scales are forgotten": fault(
        "gqa_packed", "weights *= tl.load(", "weights += 0.0 * tl.load(", "packed, int8"
    ),
    "int8: V's scales count in the sum": fault(
        "gqa_packed",
        "weights *= tl.load(value_scales + at_scale, mask=known, other=0.0)[None, :]",
        "weights *= tl.load(value_scales + at_scale, mask=known, other=0.0)[None, :]\n"
        "            total = total * 0.0 + tl.sum(weights, axis=1)",
        "packed, int8",
    ),
    "int8: V is scaled as K": fault(
        "gqa_packed", "tl.load(value_scales + at_scale", "tl.load(key_scales + at_scale", "packed, int8"
    ),
    "int8: the first head's scales": fault("gqa_packed", "* stride_scale + kv_head", "* stride_scale", "packed, int8"),
    "int8: scales at the token, not its slot": fault(
        "gqa_packed", "(block * BLOCK_SIZE + token % BLOCK_SIZE) * stride_scale", "token * stride_scale", "split, int8"
    ),
    "int8: scales of unowned slots": fault(
        "gqa_packed",
        "tl.load(value_scales + at_scale, mask=known, other=0.0)",
        "tl.load(value_scales + at_scale)",
        "packed, int8",
    ),
    "split: K's and V's scales exchanged": fault(
        "split_kv", "*halves(scales), partial", "*halves(scales)[::-1], partial", "split, int8"
    ),
    "varlen: K's and V's scales exchanged": fault(
        "varlen", "*halves(scales), out", "*halves(scales)[::-1], out", "varlen, int8"
    ),
    "write int8: the largest, not its magnitude": fault("quantized", "tl.abs(x)", "x", "write, int8"),
    "write int8: NaN is overlooked": fault(
        "quantized", 'tl.where(magnitude < float("inf"), magnitude, float("inf"))', "magnitude * 1.0", "write, int8"
    ),
    "write int8: rounded towards zero": fault("quantized", "tl.floor(scaled + 0.5)", "scaled", "write, int8"),
    "write int8: one scale too far": fault(
        "quantized", "slot * HEADS + head", "slot * HEADS + head + 1", "write, int8"
    ),
    "write int8: padded heads have scales": fault(
        "quantized", "tl.store(scales, scale, mask=row_real)", "tl.store(scales, scale)", "write, int8, one head"
    ),
    "write int8: padding is written": fault("quantized", "if slot < 0:", "if slot < -1:", "write, int8"),
    "write int8: V is K": fault(
        "quantized", "tl.load(v + token * stride_v", "tl.load(k + token * stride_k", "write, int8"
    ),
    "rope: the partner is itself": fault("rope_cache", "partner = (1 - half)", "partner = half", "rope"),
    "rope: neighbours are paired": fault("rope_cache", "d = half * HALF + i", "d = half + 2 * i", "rope"),
    "rope: the sine of the other half": fault(
        "rope_cache", "tl.load(sin + row + d", "tl.load(sin + row + partner", "rope"
    ),
    "rope: the first product is not rounded": fault(
        "rope_cache", "(own.to(tl.float32) * cos[None, :]).to(own.dtype)", "own.to(tl.float32) * cos[None, :]", "rope"
    ),
    "rope: the row, not the position": fault("rope_cache", "tl.load(positions + token)", "token", "rope"),
    "rope: k is stored as it came": fault(
        "rope_cache",
        "write_rows(key,",
        "write_rows(tl.load(k + token * stride_k + head + d[None, :], mask=real),",
        "rope",
    ),
    "rope: v is rotated too": fault(
        "rope_cache",
        "value = tl.load(v + token * stride_v + head + d[None, :], mask=real, other=0.0)",
        "value = rotate(v + token * stride_v, head + d[None, :], head + partner[None, :], cosine, sine, real)",
        "rope",
    ),
    "rope: padding is written": fault("rope_cache", "if slot < 0:", "if slot < -1:", "rope"),
    "rope: padded heads are written": fault(
        "rope_cache", "real = heads[:, None] & dims[None, :]", "real = (kv_head >= 0)[:, None] & dims[None, :]", "rope"
    ),
    "rope: slot in 32 bits": fault(
        "rope_cache",
        "tl.load(slot_mapping + token).to(tl.int64)",
        "tl.load(slot_mapping + token).to(tl.int32)",
        "rope, far",
    ),
    "rope int8: scales by slot alone": fault("rope_cache", "slot * KV_HEADS + kv_head", "slot + kv_head", "rope, int8"),
    "norm: the mean over the padded row": fault("rms_norm", "axis=0) / DIM", "axis=0) / DIM_PADDED", "norm"),
    "norm: eps outside the root": fault(
        "rms_norm",
        "tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)",
        "1 / (tl.sqrt(tl.sum(wide * wide, axis=0) / DIM) + eps)",
        "norm",
    ),
    "norm: rounded once": fault("rms_norm", "/ DIM + eps)).to(value.dtype)", "/ DIM + eps))", "norm"),
    "norm: every head's weight is the first's": fault("rms_norm", "weight + head * stride_weight", "weight", "norm"),
    "norm: tokens next to each other": fault("rms_norm", "token * stride_x + head", "token * DIM + head", "norm"),
    "norm: the residual is not stored": fault("rms_norm", "tl.store(at, value, mask=dims)", "pass", "norm, add"),
    "norm: x alone is normalised": fault(
        "rms_norm",
        "wide = value.to(tl.float32)",
        "wide = tl.load(x + token * stride_x + head * stride_x_head + d, mask=dims, other=0.0).to(tl.float32)",
        "norm, add",
    ),
    "norm: the sum is not rounded": fault(
        "rms_norm", "+ value.to(tl.float32)).to(value.dtype)", "+ value.to(tl.float32))", "norm, add"
    ),
    "norm: writes behind the row": fault("rms_norm", "dims = d < DIM", "dims = d < DIM_PADDED", "norm"),
    "swiglu: sigmoid alone": fault("swiglu", "wide / (1.0", "1.0 / (1.0", "swiglu"),
    "swiglu: the sign": fault("swiglu", "tl.exp(-wide)", "tl.exp(wide)", "swiglu"),
    "swiglu: rounded once": fault("swiglu", "tl.exp(-wide))).to(g.dtype)", "tl.exp(-wide)))", "swiglu"),
    "swiglu: up lies where gate does": fault(
        "swiglu", "tl.load(up + token * stride_up", "tl.load(gate + token * stride_up", "swiglu"
    ),
    "swiglu: writes behind the row": fault("swiglu", "dims = d < DIM", "dims = d < DIM + TILE", "swiglu"),
    "blocks: V's blocks from K's": fault(
        "block_copy", "for half in tensor", "for half in (tensor[0], tensor[0])", "blocks"
    ),
    "blocks: source and target exchanged": fault(
        "block_copy",
        "src = tl.load(pairs + tl.program_id(0))",
        "src = tl.load(pairs + tl.num_programs(0) + tl.program_id(0))",
        "blocks",
    ),
    "blocks: the first part alone": fault("block_copy", "tl.program_id(2) * TILE +", "0 * TILE +", "blocks, large"),
    "blocks: the neighbour's bytes too": fault(
        "block_copy", "mask=inside), mask=inside)", "mask=inside, other=0))", "blocks"
    ),
    "rows: all pieces at the row's start": fault("block_copy", "address += size", "address += 0", "blocks, rows"),
    "4 bits: the sign comes along": fault(
        "awq_matmul", "(4 * plane)) & 15) | MAGIC", "(4 * plane))) | MAGIC", "4 bits"
    ),
    "4 bits: zeros in plain order": fault("awq_matmul", "((n & 1) * 4 + (n & 7) // 2) * 4", "(n & 7) * 4", "4 bits"),
    "4 bits: planes and rows exchanged": fault(
        "awq_matmul", "words |= filled[:, plane]", "words |= filled.flatten(1, 2)[:, plane::8]", "4 bits"
    ),
    "4 bits: every group's zero is the first's": fault(
        "awq_matmul", "zeros + group * (N // 8)", "zeros + 0 * (N // 8)", "4 bits"
    ),
    "4 bits: a chunk behind with its scales": fault(
        "awq_matmul", "(chunk + 1) * CHUNK // GROUP, n", "chunk * CHUNK // GROUP, n", "4 bits, one split"
    ),
    "4 bits: the next group is the next chunk": fault(
        "awq_matmul", "(chunk + 1) * CHUNK // GROUP, n", "chunk + 1, n", "4 bits, large groups"
    ),
    "4 bits: scales are read behind the end": fault(
        "awq_matmul", "n, columns & (chunk + 1 < end), N)", "n, columns, N)", "4 bits, one split"
    ),
    "4 bits: a small group's scale is the chunk's": fault(
        "awq_matmul",
        "scale = load_scale(scales, first // GROUP",
        "scale = load_scale(scales, chunk * CHUNK // GROUP",
        "4 bits, small groups",
    ),
    "4 bits: x is read behind its end": fault(
        "awq_matmul", "(m < M)[:, None] & (k < K)[None, :]", "(m < M)[:, None]", "4 bits, small groups"
    ),
    "4 bits: columns behind the last": fault(
        "awq_matmul", "words + at, mask=columns[None, :], other=0)", "words + at)", "4 bits"
    ),
    "4 bits: rows behind the last are written": fault(
        "awq_matmul", "inside = (m < M)[:, None] & columns", "inside = (m >= 0)[:, None] & columns", "4 bits, one split"
    ),
    "4 bits: tiles of rows lie on each other": fault(
        "awq_matmul", "m = tl.program_id(1) * BLOCK_M", "m = 0 * BLOCK_M", "4 bits, rows of two tiles"
    ),
    "4 bits: the last chunk is left out": fault(
        "awq_matmul", "per_split = tl.cdiv(chunks, num_splits)", "per_split = chunks // num_splits", "4 bits"
    ),  # fmt: skip
    "4 bits: every split starts at 0": fault("awq_matmul", "start = split * per_split", "start = 0", "4 bits"),
    "4 bits: partial sums on each other": fault(
        "awq_matmul", "(split.to(tl.int64) * M + m)[:, None] * N", "(0 * M + m.to(tl.int64))[:, None] * N", "4 bits"
    ),
    "4 bits: the first split alone": fault(
        "awq_matmul", "for split in range(num_splits)", "for split in range(1)", "4 bits"
    ),
    "4 bits: the bias is left out of a sum of splits": fault(
        "awq_matmul", "](partial, bias, out, n", "](partial, None, out, n", "4 bits"
    ),
    "4 bits: the bias is left out": fault("awq_matmul", "bias if splits == 1 else None", "None", "4 bits, one split"),
    "4 bits: rows of x thought contiguous": fault(
        "awq_matmul", "m.to(tl.int64)[:, None] * stride_x", "m.to(tl.int64)[:, None] * K", "4 bits"
    ),
    "4 bits, written out: rows behind the last": fault(
        "awq_matmul", "mask=(k < K)[:, None] & columns[None, :]", "mask=columns[None, :]", "4 bits, small groups"
    ),
    "rows: the stride of the cache": fault("block_copy", "staging.stride(0), size)", "size, size)", "blocks, rows"),
}

# Faults that no result can show, each with the reason.
EQUIVALENT = {
    "sweep: K's unknown positions are read": (
        fault("gqa_packed", "mask=known[None, :] & dims[:, None]", "mask=dims[:, None]"),
        "their scores are replaced by -inf, and their block id is 0, so the address is one of the cache's",
    ),
    "split: not whole tiles": (
        fault("split_kv", "num_splits), TILE) * TILE  # whole tiles", "num_splits), TILE)", "split"),
        "the last split takes the rest: right, and slow",
    ),
    "varlen: no early end": (
        fault("varlen", "if first >= query_len:", "if first < 0:"),
        "a program without rows masks all that it would write: right, and slow",
    ),
    "varlen: all tiles for each block of rows": (
        fault("varlen", "tl.minimum(context + first + BLOCK_Q, seq_len)", "seq_len"),
        "each row's limit hides what comes behind it: right, and slow",
    ),
    "write int8: 0 / 0": (
        fault("quantized", "known = (scale > 0) & (scale", "known = (scale >= 0) & (scale", "write, int8"),
        "NaN becomes 0 as a whole number, by the habit of processors: no language promises it",
    ),
    "blocks: one launch for all": (
        fault("block_copy", "at_once=True", "at_once=False", "blocks"),
        "the interpreter runs the programs in the order of the pairs: this one needs a GPU",
    ),
    "sweep: fp32 rounded to tf32": (
        fault("gqa_packed", 'input_precision="ieee"', 'input_precision="tf32"'),
        "the interpreter does not round to tf32: this one needs a GPU",
    ),
}


def load(name: str, says: str, instead: str, folder: Path, swap: dict[str, str] | None = None) -> ModuleType:
    """kvlab_kernels.<name> with other words, as a module of another name."""
    source = (SOURCES / f"{name}.py").read_text(encoding="utf-8")
    assert says in source, f"{name}.py does not say {says!r} any more"
    source = source.replace(says, instead)
    for old, new in (swap or {}).items():
        source = source.replace(f"from {old} import", f"from {new} import")
    alias = f"mutant_{name}"
    path = folder / f"{alias}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(alias, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module


def killed_by(fault: Fault, folder: Path) -> str | None:
    """The first of the fault's cases that notices it, and how; None if none does."""
    broken = load(fault.module, fault.says, fault.instead, folder)

    def modules(name: str) -> ModuleType:
        """The module with the fault; one that stands on it is loaded anew, on the broken one."""
        if name == fault.module:
            return broken
        if fault.module == "gqa_packed":
            return load(name, "", "", folder, {"kvlab_kernels.gqa_packed": broken.__name__})
        return importlib.import_module(f"kvlab_kernels.{name}")

    for case in fault.cases:
        try:
            CASES[case](modules)
        except Exception as error:
            return f"{case}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


if __name__ == "__main__":
    import tempfile
    import time

    from kvlab_kernels.sanitizer import sanitize

    every = FAULTS | {title: fault for title, (fault, _) in EQUIVALENT.items()}
    with sanitize(), np.errstate(all="ignore"):
        for title, one in every.items():
            with tempfile.TemporaryDirectory() as folder:  # its own: Python would take two quick ones for the same
                start = time.perf_counter()
                how = killed_by(one, Path(folder)) or "survives"
                print(f"{title:52} {time.perf_counter() - start:5.2f} s  {how}"[:170])
