"""The kernels beside attention: blocks moved, RMSNorm, RoPE with the cache write, SwiGLU. Right, and their bandwidth.

All of them only pass memory through, so the ceiling is a copy's. PyTorch's way stands beside each: several launches,
each of which reads again what the one before it wrote.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvlab.model import layers
from kvlab_kernels.bench.cases import QWEN, TOY
from kvlab_kernels.bench.machine import Machine, Row, timed
from kvlab_kernels.block_copy import copy_blocks, pieces_of
from kvlab_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from kvlab_kernels.rope_cache import rope_and_cache
from kvlab_kernels.swiglu import swiglu

WIDTHS = {True: (96, 160, 2), False: (3584, 18944, 28)}  # hidden, intermediate, layers: Qwen2.5-7B's if not toy


class Operation(NamedTuple):
    """`kernel` and `torch` do the same to the same tensors."""

    name: str
    kernel: Callable[[], Tensor | None]
    torch: Callable[[], Tensor | None]
    changed: tuple[Tensor, ...]  # what they write besides their result
    bytes_moved: int  # at the least, read and written
    graph: bool = True  # whether it can be captured


def operations(machine: Machine, tokens: int, dtype: torch.dtype) -> Iterator[Operation]:
    """One of each, over so many tokens; blocks one for each 16."""
    (hidden, intermediate, num_layers), shape = WIDTHS[machine.toy], TOY if machine.toy else QWEN
    generator = torch.Generator(machine.device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=machine.device, dtype=dtype)
    size = dtype.itemsize

    x, residual, weight = random(tokens, hidden), random(tokens, hidden), random(hidden)
    norm, normed = (partial(function, x, weight, 1e-6) for function in (rms_norm, layers.rms_norm))
    yield Operation("RMSNorm", norm, normed, (), 2 * x.numel() * size)
    add, added = (partial(function, x, residual, weight, 1e-6) for function in (add_rms_norm, add_rms_norm_reference))
    yield Operation("add, RMSNorm", add, added, (residual,), 4 * x.numel() * size)

    gate, up = random(tokens, 2 * intermediate).chunk(2, dim=-1)
    yield Operation("SwiGLU", partial(swiglu, gate, up), partial(layers.swiglu, gate, up), (), 3 * gate.numel() * size)

    heads, kv_heads, dim = shape
    q, k, v = random(tokens, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
    angles = random(4096, 1, dim).float()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.arange(tokens, device=machine.device)
    kv = random(2, tokens // 16 + 1, 16, kv_heads, dim)
    slots = torch.randperm(kv.shape[1] * 16, device=machine.device)[:tokens]

    def in_steps() -> Tensor:
        turn = cos[positions], sin[positions]
        keys, values = kv.flatten(1, 2)
        keys.index_copy_(0, slots, layers.rope(k, *turn))
        values.index_copy_(0, slots, v)
        return layers.rope(q, *turn)

    rope = partial(rope_and_cache, q, k, v, cos, sin, positions, kv, slots)
    yield Operation("RoPE, cache write", rope, in_steps, (kv,), 2 * tokens * (heads + 2 * kv_heads) * dim * size)

    pairs = max(tokens // 16, 1)
    cache = [random(2, 2 * pairs, 16, kv_heads, dim) for _ in range(num_layers)]
    order = torch.randperm(2 * pairs).tolist()
    moves = list(zip(order[:pairs], order[pairs:], strict=True))
    source, target = (torch.tensor(blocks, device=machine.device) for blocks in zip(*moves, strict=True))

    def by_index() -> None:
        for layer in cache:
            layer.index_copy_(1, target, layer.index_select(1, source))

    moved = 2 * pairs * num_layers * cache[0][:, 0].numel() * size
    yield Operation("copy blocks", partial(copy_blocks, pieces_of(cache), moves), by_index, tuple(cache), moved, False)


def both_ways(operation: Operation) -> tuple[Tensor, Tensor]:
    """All that the kernel makes or changes, and all that PyTorch does, from the same beginning."""
    before = [tensor.clone() for tensor in operation.changed]
    made = []
    for run in (operation.kernel, operation.torch):
        for tensor, numbers in zip(operation.changed, before, strict=True):
            tensor.copy_(numbers)
        result = run()
        made.append(torch.cat([x.flatten() for x in (*operation.changed, *(() if result is None else (result,)))]))
    return made[0], made[1]


def small_kernels(machine: Machine, copy: float | None) -> list[Row]:
    """A row for each operation, by our kernel and by PyTorch."""
    rows = []
    for tokens in (20,) if machine.toy else (16, 256, 2048):
        for operation in operations(machine, tokens, torch.bfloat16):
            if machine.out_of_time():
                return rows
            for way, call in (("kernel", operation.kernel), ("torch", operation.torch)):
                row = {"operation": operation.name, "by": way, "tokens": tokens}
                rows.append(timed(machine, call, operation.bytes_moved, copy, graph=operation.graph, **row))
    return rows
