"""Weights in 4 bits: the kernel right, and how fast beside a product in 16 bits, for every matrix of a layer.

`rate` counts each way's own bytes of weights, so that it says how near to memory's speed that way runs; `faster` is the
time in 16 bits over the row's. awq_matmul.MOST_ROWS should be where "written out" becomes the quicker way.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab_kernels import awq_matmul as kernel
from kvlab_kernels.awq_matmul import AWQWeight, awq_matmul, dequantize, repack
from kvlab_kernels.bench.machine import Machine, Row, timed

LAYERS = {"qkv": (3584, 4608), "o": (3584, 3584), "gate, up": (3584, 37888), "down": (18944, 3584)}  # Qwen2.5-7B
TOY_LAYERS = {"qkv": (384, 96), "down": (640, 64)}
ROWS, TOY_ROWS = (1, 16, 32, 64, 128, 256), (1, 17)
GROUP = 128


def random_weight(in_features: int, out_features: int, device: torch.device) -> AWQWeight:
    """Every number and zero from 0 to 15, scales about those of a trained model."""
    generator = torch.Generator(device).manual_seed(0)
    groups = in_features // GROUP
    size = in_features, out_features
    numbers = torch.randint(0, 16, size, generator=generator, device=device, dtype=torch.uint8)
    scales = torch.rand(groups, out_features, generator=generator, device=device) * 0.01 + 0.002
    zeros = torch.randint(-(2**31), 2**31, (groups, out_features // 8), generator=generator, device=device)
    return repack(numbers, scales.half(), zeros.int())


def layers(machine: Machine) -> Iterator[tuple[str, AWQWeight]]:
    for name, (in_features, out_features) in (TOY_LAYERS if machine.toy else LAYERS).items():
        yield name, random_weight(in_features, out_features, machine.device)


def in_both_ways(weight: AWQWeight, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A product and what it must equal, both over the largest number, by which the error of a long sum goes."""
    generator = torch.Generator(weight.words.device).manual_seed(1)
    x = torch.randn(rows, weight.in_features, generator=generator, device=weight.words.device).to(dtype)
    want = kernel.awq_matmul_reference(x.double(), weight)
    largest = want.abs().amax()
    return (awq_matmul(x, weight).double() / largest).to(dtype), (want / largest).to(dtype)


def written_out(weight: AWQWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return dequantize(weight, dtype), kernel.dequantize_reference(weight, dtype)


def products(machine: Machine, copy: float | None) -> list[Row]:
    """Each matrix by the number of rows: in 4 bits, written out and then multiplied, and in bf16 from the start."""
    found = []
    for name, weight in layers(machine):
        plain = dequantize(weight, torch.bfloat16).T.contiguous()  # [N, K], as F.linear wants it
        in_4_bits = sum(part.numel() * part.element_size() for part in weight[:3])
        for rows in TOY_ROWS if machine.toy else ROWS:
            x = torch.randn(rows, weight.in_features, device=machine.device).bfloat16()
            ways = {
                "bfloat16": (partial(F.linear, x, plain), plain.numel() * 2),
                "4 bits": (partial(awq_matmul, x, weight), in_4_bits),
                "written out": (lambda x=x, w=weight: x @ dequantize(w, x.dtype), in_4_bits),
            }
            base = None
            for way, (call, num_bytes) in ways.items():
                if machine.out_of_time():
                    return found
                row = timed(machine, call, num_bytes, copy, layer=name, rows=rows, by=way)
                base = base or row["p50"]
                found.append(row | {"faster": f"{base / row['p50']:.2f}x" if base else None})
    return found
