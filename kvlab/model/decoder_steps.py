"""The decoder in steps (lab 12): one function for each thing that stands between the matrix products.

    turn_pair      RoPE by hand: one pair of numbers, one position
    rope           every pair of every head of every token
    attend         one sequence's rows over its pages: causal, grouped, through the block table
    decoder_layer  all of it, in order: the whole layer of Qwen2
    step_ledger    the bytes of a step, item by item
    first_wrong    where two runs part ways

Slow and plain. kvlab.model.layers, .attention, .batch and .decoder do the same in the engine.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.model.layers import rms_norm
from kvlab.sizing import ModelShape


def turn_pair(a: float, b: float, position: int, pair: int, head_dim: int, theta: float) -> tuple[float, float]:
    """(a, b) rotated by position * theta^(-2 pair / head_dim) radians (Su et al. 2021)."""
    angle = position * theta ** (-2 * pair / head_dim)
    return a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate each head by its token's position: x [T, heads, D], positions int64 [T] -> like x.

    Elements i and i + D/2 are a pair; angles, cosines and sines are computed in fp32, as transformers does.
    """
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(half, device=x.device).float() / half)
    angles = (positions[:, None].float() * frequencies)[:, None]  # [T, 1, D/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(q: Tensor, kv: Tensor, block_table: Sequence[int], seq_len: int) -> Tensor:
    """Causal attention of one sequence's n newest tokens over its pages (L33 2.2, 2.3).

    q [n, H, D]; kv [2, num_blocks, block_size, Hkv, D], this step's K and V in it already; seq_len: tokens of the
    sequence, the n included -> [n, H, D], like q. Row i sees positions 0 to seq_len - n + i.
    """
    n, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.shape[2:4]
    positions = torch.arange(seq_len)
    blocks = torch.as_tensor(block_table)[positions // block_size]
    keys, values = kv[:, blocks, positions % block_size].to(q.dtype)  # [seq_len, Hkv, D]
    grouped = q.view(n, num_kv_heads, -1, head_dim)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, keys) / math.sqrt(head_dim)
    hidden = positions > seq_len - n + torch.arange(n)[:, None]  # [n, seq_len]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("kgnl,lkd->nkgd", weights, values).reshape(q.shape)


def _no_watch(name: str, x: Tensor) -> None:
    pass


def decoder_layer(x: Tensor, w: Mapping[str, Tensor], batch, kv: Tensor, config, *, norm: Callable = rms_norm,
                  turn: Callable = rope, attention: Callable = attend, activation: Callable = F.silu,
                  watch: Callable[[str, Tensor], None] = _no_watch) -> Tensor:  # fmt: skip
    """One layer of Qwen2: x [T, hidden] -> [T, hidden]. Writes the K and V of all T tokens to kv.

    w: the layer's weights by their Hugging Face names, without "model.layers.N." and without "self_attn.", "mlp.".
    batch: a FlatBatch. kv [2, num_blocks, block_size, Hkv, D] of this layer. watch(name, x) is told each result.
    """
    eps, theta, dim = config.rms_norm_eps, config.rope_theta, config.head_dim
    h = norm(x, w["input_layernorm.weight"], eps)
    watch("norm", h)
    q, k, v = (F.linear(h, w[f"{n}.weight"], w[f"{n}.bias"]).unflatten(-1, (-1, dim))
               for n in ("q_proj", "k_proj", "v_proj"))  # fmt: skip
    q, k = turn(q, batch.positions, theta), turn(k, batch.positions, theta)
    watch("rope q", q)
    watch("rope k", k)
    kv[0].flatten(0, 1)[batch.slot_mapping] = k
    kv[1].flatten(0, 1)[batch.slot_mapping] = v
    out = torch.empty_like(q)
    starts = batch.query_start_loc.tolist()
    for i, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        out[first:end] = attention(q[first:end], kv, batch.block_tables[i].tolist(), int(batch.seq_lens[i]))
    watch("attention", out)
    x = x + F.linear(out.flatten(1), w["o_proj.weight"])
    watch("+ attention", x)
    h = norm(x, w["post_attention_layernorm.weight"], eps)
    watch("second norm", h)
    h = activation(F.linear(h, w["gate_proj.weight"])) * F.linear(h, w["up_proj.weight"])
    watch("swiglu", h)
    x = x + F.linear(h, w["down_proj.weight"])
    watch("+ mlp", x)
    return x


def step_ledger(step: Sequence[tuple[int, int, bool]], shape: ModelShape, dtype_bytes: int = 2) -> dict[str, int]:
    """The bytes of one step, item by item.

    step: (new tokens, tokens computed before, is it sampled?) of each sequence.

    weights: layers' matrices and head, read once, whoever is there. kv_written: K and V of the new tokens. kv_read: K
    and V of every sequence's context, this step's included. logits: fp32, a row for each sampled sequence. widest:
    gate and up of one layer for all new tokens, the largest intermediate result; the layers use its memory in turn.
    """
    tokens = sum(new for new, _, _ in step)
    kv = shape.kv_bytes_per_token(dtype_bytes)
    return {
        "weights": (shape.num_layer_weights + shape.vocab_size * shape.hidden_size) * dtype_bytes,
        "kv_written": tokens * kv,
        "kv_read": sum(new + computed for new, computed, _ in step) * kv,
        "logits": sum(sampled for _, _, sampled in step) * shape.vocab_size * 4,
        "widest": tokens * 2 * shape.intermediate_size * dtype_bytes,
    }


def first_wrong(trace: Sequence[tuple[str, Tensor]], reference: Sequence[tuple[str, Tensor]],
                atol: float) -> tuple[str, int] | None:  # fmt: skip
    """Where two runs part ways: (name of the first result that differs by more than atol, its first such row).

    trace, reference: (name, tensor [rows, ...]) in the order of computation. NaN differs from everything, itself
    included. None if nothing differs.
    """
    for (name, x), (_, y) in zip(trace, reference, strict=True):
        close = ((x - y).abs() <= atol).flatten(1).all(-1)  # NaN <= atol is False
        if not close.all():
            return name, int((~close).nonzero()[0])
    return None
