"""The pieces of a decoder layer, as plain functions on tensors, and the linear layer that holds weights.

    x -> rms_norm -> qkv_proj -> rope -> attention -> o_proj    -> + x
    x -> rms_norm -> gate_up_proj -> swiglu        -> down_proj -> + x

T is the number of tokens in the step, over all sequences: nothing here knows where one sequence ends.
"""

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.model.config import ModelConfig

# Below this many weights (1 MiB in fp32, about an L2 cache) the packed kernel's fixed cost of some 20 us is
# larger than what it saves; above it, packing is 2.5x quicker at batch 4 to 8.
PACK_MIN_WEIGHTS = 1 << 18


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019).

    x [..., D], weight [D] (or one for each head, [heads, D]) -> like x.

    The square is summed in fp32 at least (bf16 would lose the small terms), and rounded before the weight, as
    transformers does, so that tokens agree.
    """
    wide = x.float() if x.dtype.itemsize < 4 else x
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its token's position (Su et al. 2021).

    x [T, heads, D]; cos, sin [T, 1, D] -> like x.

    Elements i and i + D/2 form a pair (a, b), which becomes (a cos - b sin, b cos + a sin): the "half" layout
    of the Hugging Face checkpoints, where the paper pairs neighbours. Rolling by half a head brings each
    element's partner to its place; the minus sign is in the table, whose sin is negative in the first half.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class RotaryEmbedding:
    """The tables of cosines and signed sines, one row a position, computed in fp32 as transformers does.

    `rotary(positions)` with positions int64 [T] gives (cos, sin), each [T, 1, head_dim], for `rope`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        tables = cos_and_sin(positions, inverse_frequencies(config), dtype)
        self.cos, self.sin = (table.to(device) for table in tables)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


def cos_and_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and signed sines that `rope` takes, each [T, 1, D] of dtype.

    positions float32 [T]; frequencies float32 [D/2], in radians per position.
    """
    angles = positions[:, None, None] * frequencies  # [T, 1, D/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position for each pair of elements, float32 [head_dim/2]: theta^(-2i/D), then scaled.

    "linear" slows every pair by `factor`. "llama3" slows only those whose wavelength exceeds the context that
    the model was trained on, leaves the quick ones, and blends between (Llama 3.1).
    """
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # How often each pair turns over the trained context.
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / scaling["factor"] + keep * frequencies


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020). gate, up [..., I] -> [..., I]."""
    return F.silu(gate) * up


class Linear:
    """y = x W^T + b, for x [T, in] -> [T, out]. `weight` is [out, in] as in checkpoints, `bias` [out] or
    None.

    On a CPU in fp32 a large weight is reordered once into the layout of the matrix kernel, and only that copy
    is kept. It serves every batch size. The operators are PyTorch internals, so they are tried out first;
    where they are missing or wrong, where `pack` is False or KVLAB_PACKED_LINEAR=0 is set, and for every
    other dtype or device this is F.linear.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True):
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = (
            pack
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() >= PACK_MIN_WEIGHTS
            and os.environ.get("KVLAB_PACKED_LINEAR", "1") != "0"
            and packing_works()
        )
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


@functools.cache
def packing_works() -> bool:
    """Whether this PyTorch build packs linear weights and computes with them what F.linear computes."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((3, 64), (48, 64), (48,)))
    try:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            got = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    except (AttributeError, RuntimeError):  # no such operator, or built without oneDNN
        return False
    return torch.allclose(got, F.linear(x, weight, bias), atol=1e-4)
