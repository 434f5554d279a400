"""K and V in 8 bits (quantisation, 量化): half the bytes of bf16, so nearly twice the tokens in one pool (PAV 3.1).

    one head of one token    [ 0.30  -1.27   0.02 ...]     D numbers
    scale = largest / 127      0.01                        one fp32 number
    stored                   [   30   -127      2 ...]     int8
    read again               stored * scale                at most scale / 2 beside the number

Each token and KV head has a scale of its own. A token can then be written alone, when it comes, and a head with large
numbers costs the others nothing; a scale for a whole block would change with the block's next token. The price is 4
bytes for each head: 3% of the 128 numbers of a head of Qwen2.5-7B.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4
# The largest number of each type that is used. -128 stays unused, so that a number and its negative are treated alike.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (numbers [..., D] of dtype, scales fp32 [...]): x is nearly numbers * scales[..., None].

    A vector of zeros has scale 0. One with infinity or NaN in it has an infinite scale and zeros, so that it is read
    again as NaN, never as a number that looks right. dtype: torch.int8, or float8_e4m3fn; KeyError for others.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    magnitudes = wide.abs()
    largest = torch.where(magnitudes < torch.inf, magnitudes, torch.inf).amax(-1, keepdim=True)
    scales = (largest / LARGEST[dtype]).float()
    known = (scales > 0) & (scales < torch.inf)
    # Where scales are subnormal they are rounded so coarsely that more than the largest can come out.
    scaled = torch.where(known, wide / scales, 0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        scaled = (scaled + 0.5).floor()  # of two equally near the upper, as the Triton kernel does
    return scaled.to(dtype), scales.squeeze(-1)


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """numbers [..., D] and scales [...] -> [..., D] of dtype; multiplied in fp32 at least, then rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (numbers.to(wide) * scales.to(wide)[..., None]).to(dtype)
