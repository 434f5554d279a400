"""RoPE and attention over pages for those who have a few tokens at hand and no engine: what lab 12 writes.

    rope(x, positions, theta)                the engine looks the cosines up in a table: layers.RotaryEmbedding
    attend(q, kv, block_table, seq_len)      the engine attends for many sequences at once: attention.TorchAttention

Each fits into the engine as a part of its name (kvlab.parts).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.model import layers


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate each head of x [T, heads, D] by its token's position, int64 [T] -> like x (Su et al. 2021).

    Elements i and i + D/2 are a pair, turned by position * theta^(-2i/D) radians, in float32.
    """
    exponents = torch.arange(0, x.shape[-1], 2, device=x.device).float() / x.shape[-1]
    return layers.rope(x, *layers.cos_and_sin(positions.float(), 1.0 / theta**exponents, x.dtype))


def attend(q: Tensor, kv: Tensor, block_table: Sequence[int], seq_len: int) -> Tensor:
    """Causal attention of a sequence's last n tokens, q [n, H, D], over its pages -> like q (L33 2.3).

    kv [2, num_blocks, block_size, Hkv, D] of q's dtype; the n tokens' own K and V are in it. Position p lies in block
    block_table[p // block_size] at p % block_size. seq_len: tokens of the context, these n included.
    """
    positions = torch.arange(seq_len, device=q.device)
    blocks = torch.tensor(block_table, device=q.device)[positions // kv.shape[2]]
    keys, values = kv[:, blocks, positions % kv.shape[2]].transpose(1, 2)  # each [Hkv, seq_len, D]
    visible = positions <= positions[-len(q) :, None]  # a token sees what stands before it, and itself
    out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=visible, enable_gqa=True)
    return out.transpose(0, 1)
