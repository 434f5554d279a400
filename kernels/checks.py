"""What every launcher checks before it launches: a kernel itself would read the wrong bytes without a word.

Shapes, dtypes, strides and devices are checked always. Values (lengths, slots) are checked where the tensors are on the
CPU; to look at them on a GPU, the host would have to wait for it.
"""

import torch
from torch import Tensor

from kvlab_kernels.launch import check_device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)  # with scales
MAX_BLOCK_SIZE = 256
MAX_HEAD_DIM = 256


def check_cache(kv: Tensor, scales: Tensor | None = None) -> None:
    """One layer's cache: [2, num_blocks, block_size, num_kv_heads, head_dim], K first. ValueError if it is not.

    scales: fp32 [2, num_blocks, block_size, num_kv_heads], with a quantised cache and with no other.
    """
    if kv.dim() != 5 or kv.shape[0] != 2:
        raise ValueError(f"kv has shape {list(kv.shape)}: give [2, num_blocks, block_size, num_kv_heads, head_dim]")
    if scales is not None:
        check_scales(kv, scales)
    elif kv.dtype in QUANTIZED:
        raise ValueError(f"kv is {kv.dtype} without scales: give them to gqa_packed, split_kv or varlen attention")
    elif kv.dtype not in DTYPES:
        raise ValueError(f"kv is {kv.dtype}: the kernels read float32, float16 and bfloat16")
    if kv.stride(-1) != 1:
        raise ValueError(f"the last dimension of kv has stride {kv.stride(-1)}: make it 1")
    if not 1 <= kv.shape[2] <= MAX_BLOCK_SIZE:
        raise ValueError(f"the block size is {kv.shape[2]}: the kernels take 1 to {MAX_BLOCK_SIZE} tokens")
    if not 1 <= kv.shape[4] <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim is {kv.shape[4]}: the kernels take 1 to {MAX_HEAD_DIM}")


def check_scales(kv: Tensor, scales: Tensor) -> None:
    """ValueError unless kv is quantised and scales are its scales."""
    if kv.dtype not in QUANTIZED:
        raise ValueError(f"kv is {kv.dtype}: only int8 and float8_e4m3fn have scales, so leave them out")
    if kv.dtype == torch.float8_e4m3fn and kv.is_cuda and torch.cuda.get_device_capability(kv.device) < (8, 9):
        raise ValueError("float8_e4m3fn needs a GPU of compute capability 8.9 or newer: quantise to int8 instead")
    if scales.shape != kv.shape[:4] or scales.dtype != torch.float32 or not scales[0].is_contiguous():
        raise ValueError(f"scales is {shown(scales)}: give float32 {list(kv.shape[:4])}, each half contiguous")


def check_tables(kv: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    """block_tables int32 [S, W], seq_lens int32 [S], and every length within its table. ValueError if not."""
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError(f"block_tables is {shown(block_tables)}: give int32 [num_seqs, width], rows contiguous")
    if seq_lens.shape != block_tables.shape[:1] or seq_lens.dtype != torch.int32 or not seq_lens.is_contiguous():
        raise ValueError(f"seq_lens is {shown(seq_lens)}: give contiguous int32 [{block_tables.shape[0]}]")
    longest = kv.shape[2] * block_tables.shape[1]
    if not seq_lens.is_cuda and seq_lens.numel() and not 0 <= int(seq_lens.min()) <= int(seq_lens.max()) <= longest:
        raise ValueError(
            f"seq_lens goes from {int(seq_lens.min())} to {int(seq_lens.max())}, but {block_tables.shape[1]} blocks of "
            f"{kv.shape[2]} tokens hold 0 to {longest}: widen block_tables"
        )


def check_attention(
    q: Tensor, kv: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """All that attention needs; returns `out`, a new one if None. ValueError, or RuntimeError for the device.

    q [rows, H, D] of kv's head dim and, without scales, its dtype; H a multiple of kv's heads; out like q.
    """
    check_cache(kv, scales)
    check_tables(kv, block_tables, seq_lens)
    num_kv_heads, head_dim = kv.shape[3:]
    if q.dim() != 3 or q.shape[2] != head_dim or q.stride(2) != 1:
        raise ValueError(f"q is {shown(q)}: give [rows, heads, {head_dim}], the last dimension contiguous")
    if q.shape[1] < 1 or q.shape[1] % num_kv_heads:
        raise ValueError(f"q has {q.shape[1]} heads: they must be a multiple of the {num_kv_heads} KV heads")
    if scales is not None and q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}: the kernels compute in float32, float16 and bfloat16")
    if scales is None and q.dtype != kv.dtype:
        raise ValueError(f"q is {q.dtype} and kv is {kv.dtype}: convert q to the cache's dtype")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    elif out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1:
        raise ValueError(f"out is {shown(out)}: give {list(q.shape)} of {q.dtype}, the last dimension contiguous")
    check_device(q, kv, block_tables, seq_lens, out, *(() if scales is None else (scales,)))
    return out


def check_decode(
    q: Tensor, kv: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """`check_attention` for one query a sequence: as many rows of q as of block_tables."""
    if q.shape[:1] != block_tables.shape[:1]:
        raise ValueError(f"q has {q.shape[0]} rows for {block_tables.shape[0]} block tables: a decode has one each")
    return check_attention(q, kv, block_tables, seq_lens, out, scales)


def shown(tensor: Tensor) -> str:
    """A tensor's dtype, shape and strides, for a message."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
