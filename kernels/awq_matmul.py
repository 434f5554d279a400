"""Rung 11: a product with weights in 4 bits (W4A16): activations in 16 bits, weights as AWQ stores them.

    weight[k, n] = (q[k, n] - zero[k // group, n]) * scale[k // group, n]       q and zero: 0 to 15

A decode reads every weight once and does next to nothing with it, so a quarter of the bytes can be up to four times the
speed. That holds only if a weight goes from memory to the tensor cores without a detour. So it is unpacked in
registers, written nowhere in 16 bits, and its scale waits for the product:

    x[m, k] @ (q - zero)     a whole number up to 15 is exact in fp16 and bf16, so are its products in fp32
    result += that * scale   once for a group of k, where scaling weights would be once for each

The checkpoint packs eight columns of n into an int32. Here a word holds eight k of one column, cut from a chunk of 128:

    k = 128 * chunk + 16 * plane + row       bits 4 * plane ... of word [16 * chunk + row, n]

Then one shift makes a whole plane, 16 rows of k beside each other, which is what tl.dot takes; neighbours in n are
neighbours in memory, so a thread loads four words (128 bits) at once; and nothing is moved between threads to unpack.
`repack` does it when a model is loaded. Zero points and scales stay as they are in the checkpoint.

    4 bits to a float    bits | 0x4B000000 are those of 2**23 + q in fp32. Less 2**23 + zero that is q - zero, exactly.
                         An or and a subtraction, which most GPUs do at several times the rate of a conversion.

    few rows of x        N tiles alone would leave most of the GPU idle, so k is split, the partial sums are stored in
                         fp32 and added in their order: the same bits in every run
    33 rows and more     Hopper multiplies 64 rows at a time, with weights from shared memory: there they are passed on
    many rows (> 256)    the tensor cores are the limit, no longer memory: the weight is written out in 16 bits, once
                         a call, and PyTorch multiplies
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.model import awq
from kvlab_kernels.checks import DTYPES, shown
from kvlab_kernels.configs import AWQConfig, awq_config, num_sms
from kvlab_kernels.launch import check_device, tl, triton

CHUNK, ROWS = 128, 16  # k of a chunk, and of each of its 8 planes
MOST_ROWS = 256  # of x; for more the weight is written out. An estimate
PROGRAMS, MIN_CHUNKS = 2, 4  # of an SM; of a split, below which its partial sums cost more than it saves. Estimates
MAGIC = tl.constexpr(0x4B000000)  # 2**23 in fp32: its last bits count ones
REDUCE_TILE, DEQUANTIZE_TILE = 1024, 128


class AWQWeight(NamedTuple):
    """A weight [K, N] in 4 bits, as the kernel reads it. G = K / group_size."""

    words: Tensor  # int32 [16 * ceil(K / 128), N]
    scales: Tensor  # fp16 [G, N]
    zeros: Tensor  # int32 [G, N / 8], in AWQ's order
    in_features: int

    @property
    def group_size(self) -> int:
        return self.in_features // len(self.scales)


@triton.jit
def unpack(words, plane, offset):
    """q - zero of one plane, fp32 [16, N]. words int32 [16, N]; offset fp32 [N] is 2**23 + zero."""
    return (((words >> (4 * plane)) & 15) | MAGIC).to(tl.float32, bitcast=True) - offset[None, :]


@triton.jit
def load_offset(zeros, group, n, columns, N):
    """2**23 + zero of columns n in one group, fp32 [N]."""
    # AWQ's order 0 2 4 6 1 3 5 7: an even column c of eight is nibble c // 2, an odd one 4 more.
    shift = ((n & 1) * 4 + (n & 7) // 2) * 4
    zero = (tl.load(zeros + group * (N // 8) + n // 8, mask=columns, other=0) >> shift) & 15
    return (zero | MAGIC).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(scales, group, n, columns, N):
    """The scale of columns n in one group, fp32 [N]."""
    return tl.load(scales + group * N + n, mask=columns, other=0.0).to(tl.float32)


# Not specialised: neither the rows of a step nor the splits that follow from them may bring a compilation.
@triton.jit(do_not_specialize=["M", "num_splits"])
def awq_matmul_kernel(
    x,  # [M, K], rows stride_x apart
    words,  # int32 [16 * chunks, N]
    scales,  # fp16 [G, N]
    zeros,  # int32 [G, N / 8]
    bias,  # [N], or None; not added to partial sums
    out,  # [M, N] like x; PARTIAL: sums over each split's part of K, fp32 [num_splits, M, N]
    M,
    K,
    N,
    num_splits,
    stride_x,
    GROUP: tl.constexpr,  # k that share a scale: a multiple of 16 that divides K, and 128 if it is not less
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    ROWS: tl.constexpr = 16
    CHUNK: tl.constexpr = 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    columns, row = n < N, tl.arange(0, ROWS)
    chunks = tl.cdiv(K, CHUNK)
    per_split = tl.cdiv(chunks, num_splits)
    start = split * per_split
    end = tl.minimum(start + per_split, chunks)
    x_rows = x + m.to(tl.int64)[:, None] * stride_x
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # A group's scales are asked for a turn ahead: a thread's share is too small for the pipeline that brings the rest.
    next_scale = load_scale(scales, start * CHUNK // GROUP, n, columns & (start < end), N)
    for chunk in range(start, end):
        at = (chunk * ROWS + row).to(tl.int64)[:, None] * N + n[None, :]
        tile = tl.load(words + at, mask=columns[None, :], other=0)
        if GROUP >= CHUNK:
            scale = next_scale
            next_scale = load_scale(scales, (chunk + 1) * CHUNK // GROUP, n, columns & (chunk + 1 < end), N)
            offset = load_offset(zeros, chunk * CHUNK // GROUP, n, columns, N)
        product = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for plane in tl.static_range(CHUNK // ROWS):
            first = chunk * CHUNK + plane * ROWS
            k = first + row
            part = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
            if GROUP >= CHUNK:
                weight = unpack(tile, plane, offset).to(part.dtype)
                product = tl.dot(part, weight, product, input_precision="ieee")
            else:
                offset = load_offset(zeros, first // GROUP, n, columns & (first < K), N)
                weight = unpack(tile, plane, offset).to(part.dtype)
                scale = load_scale(scales, first // GROUP, n, columns & (first < K), N)
                result += tl.dot(part, weight, input_precision="ieee") * scale[None, :]
        if GROUP >= CHUNK:
            result += product * scale[None, :]
    inside = (m < M)[:, None] & columns[None, :]
    to = out + (split.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    if PARTIAL:
        tl.store(to, result, mask=inside)
    else:
        if bias is not None:
            result += tl.load(bias + n, mask=columns, other=0.0).to(tl.float32)[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def awq_reduce_kernel(
    partial,  # fp32 [num_splits, M, N]
    bias,  # [N], or None
    out,  # [M, N]
    N,
    num_splits,
    TILE: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = n < N
    result = tl.zeros([TILE], dtype=tl.float32)
    for split in range(num_splits):  # in their order, so the sum has the same bits in every run
        result += tl.load(partial + (split * tl.num_programs(0) + m) * N + n, mask=columns, other=0.0)
    if bias is not None:
        result += tl.load(bias + n, mask=columns, other=0.0).to(tl.float32)
    tl.store(out + m * N + n, result.to(out.dtype.element_ty), mask=columns)


@triton.jit
def awq_dequantize_kernel(
    words,
    scales,
    zeros,
    out,  # [K, N]
    K,
    N,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    ROWS: tl.constexpr = 16
    CHUNK: tl.constexpr = 128
    chunk = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns, row = n < N, tl.arange(0, ROWS)
    tile = tl.load(words + (chunk * ROWS + row).to(tl.int64)[:, None] * N + n[None, :], mask=columns[None, :], other=0)
    for plane in tl.static_range(CHUNK // ROWS):
        first = chunk * CHUNK + plane * ROWS
        known = columns & (first < K)
        offset = load_offset(zeros, first // GROUP, n, known, N)
        weight = unpack(tile, plane, offset) * load_scale(scales, first // GROUP, n, known, N)[None, :]
        k = first + row
        to = out + k.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, weight.to(out.dtype.element_ty), mask=(k < K)[:, None] & columns[None, :])


def repack(numbers: Tensor, scales: Tensor, zeros: Tensor) -> AWQWeight:
    """q as numbers uint8 [K, N], 0 to 15; scales fp16 [G, N] and zeros int32 [G, N / 8] as in the checkpoint.

    K is filled up to whole chunks, with numbers that are never used. Raises ValueError for what does not fit.
    """
    if numbers.dim() != 2 or numbers.dtype != torch.uint8 or numbers.shape[1] % 8:
        raise ValueError(f"numbers is {shown(numbers)}: give uint8 [K, N], N a multiple of 8")
    (k, n), groups = numbers.shape, len(scales)
    if groups < 1 or k % groups or k // groups % ROWS:
        raise ValueError(f"{k} rows in {groups} groups: give groups of one size, a multiple of {ROWS}")
    if CHUNK % (k // groups) and k // groups % CHUNK:
        raise ValueError(f"groups of {k // groups}: give a size that divides {CHUNK} or is a multiple of it")
    filled = F.pad(numbers, (0, 0, 0, -k % CHUNK)).view(-1, CHUNK // ROWS, ROWS, n)
    words = torch.zeros(len(filled), ROWS, n, dtype=torch.int32, device=numbers.device)
    for plane in range(CHUNK // ROWS):
        words |= filled[:, plane].int() << (4 * plane)
    weight = AWQWeight(words.view(-1, n), scales.contiguous(), zeros.contiguous(), k)
    check_weight(weight)
    return weight


def check_weight(weight: AWQWeight) -> None:
    """ValueError if the parts do not fit each other."""
    words, scales, zeros, k = weight
    n = words.shape[1]
    wanted = (
        ("words", words, torch.int32, [ROWS * -(-k // CHUNK), n]),
        ("scales", scales, torch.float16, [len(scales), n]),
        ("zeros", zeros, torch.int32, [len(scales), n // 8]),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or list(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} is {shown(tensor)}: give contiguous {dtype} {shape}")


def choose_num_splits(num_rows: int, in_features: int, out_features: int, config: AWQConfig, sms: int) -> int:
    """How many programs share the K of one tile: so many that each SM gets about `PROGRAMS`, none without work."""
    tiles = triton.cdiv(num_rows, config.block_m) * triton.cdiv(out_features, config.block_n)
    chunks = triton.cdiv(in_features, CHUNK)
    splits = max(min(PROGRAMS * sms // tiles, chunks // MIN_CHUNKS), 1)
    return triton.cdiv(chunks, triton.cdiv(chunks, splits))


def awq_matmul(
    x: Tensor, weight: AWQWeight, bias: Tensor | None = None, *, num_splits: int | None = None,
    config: AWQConfig | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] times a weight in 4 bits, plus bias [N] -> [M, N]. Equal to `awq_matmul_reference` but for roundings.

    Up to 256 rows are multiplied in 4 bits, with fp32 sums; for more the weight is written out in x's dtype, K * N
    numbers, and PyTorch multiplies. num_splits, config: for tests and tuning, otherwise chosen by shape and GPU.
    Raises ValueError for what does not fit.
    """
    words, scales, zeros, in_features = weight
    if x.dim() != 2 or x.dtype not in DTYPES or x.shape[1] != in_features or (x.numel() and x.stride(1) != 1):
        raise ValueError(f"x is {shown(x)}: give float32, float16 or bfloat16 [M, {in_features}], rows contiguous")
    (m, k), n = x.shape, words.shape[1]
    if bias is not None and (list(bias.shape) != [n] or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias is {shown(bias)}: give contiguous {x.dtype} [{n}]")
    check_device(x, words, scales, zeros, *(() if bias is None else (bias,)))
    if m > MOST_ROWS:
        return F.linear(x, dequantize(weight, x.dtype).T, bias)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    config = config or awq_config(m, x.element_size())
    splits = num_splits or choose_num_splits(m, k, n, config, num_sms(x.device))
    partial = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    grid = triton.cdiv(n, config.block_n), triton.cdiv(m, config.block_m), splits
    awq_matmul_kernel[grid](
        x, words, scales, zeros, bias if splits == 1 else None, partial, m, k, n, splits, x.stride(0),
        GROUP=weight.group_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n, PARTIAL=splits > 1,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        awq_reduce_kernel[(m, triton.cdiv(n, REDUCE_TILE))](partial, bias, out, n, splits, TILE=REDUCE_TILE)
    return out


def dequantize(weight: AWQWeight, dtype: torch.dtype) -> Tensor:
    """The weight [K, N] in dtype: multiplied in fp32, rounded once. Equal to `dequantize_reference` to the bit."""
    words, scales, zeros, k = weight
    check_device(words, scales, zeros)
    n = words.shape[1]
    out = torch.empty(k, n, dtype=dtype, device=words.device)
    awq_dequantize_kernel[(triton.cdiv(k, CHUNK), triton.cdiv(n, DEQUANTIZE_TILE))](
        words, scales, zeros, out, k, n, GROUP=weight.group_size, BLOCK_N=DEQUANTIZE_TILE
    )
    return out


def dequantize_reference(weight: AWQWeight, dtype: torch.dtype) -> Tensor:
    """The same one plane after the other, in PyTorch; float64 is exact."""
    words, scales, zeros, k = weight
    chunks = words.view(-1, 1, ROWS, words.shape[1])
    planes = [(chunks >> (4 * plane)) & 15 for plane in range(CHUNK // ROWS)]
    numbers = torch.cat(planes, 1).flatten(0, 2)[:k]
    zero, scale = (x.repeat_interleave(weight.group_size, 0) for x in (awq.unpack(zeros), scales.double()))
    return ((numbers - zero.int()) * scale).to(dtype)


def awq_matmul_reference(x: Tensor, weight: AWQWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] -> [M, N]: the weight written out, then a product in fp32, or in float64 if x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = x.to(wide) @ dequantize_reference(weight, wide)
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)
