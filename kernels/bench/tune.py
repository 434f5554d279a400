"""The sweep from which the tables in configs.py are made: `--tune`, on the GPU that a row is for.

Sizes that do not compile, or want more shared memory than there is, are rows with a note. No program reads what is
written: the best rows go into configs.py by hand, with the GPU and the date, so that the code says what it serves with.
"""

from itertools import product
from typing import Any

import torch

from kvlab_kernels.awq_matmul import awq_matmul
from kvlab_kernels.bench import four_bits
from kvlab_kernels.bench.cases import paged, useful_bytes
from kvlab_kernels.bench.correct import describe
from kvlab_kernels.bench.machine import Machine, Row, timed
from kvlab_kernels.bench.speed import shape_of
from kvlab_kernels.configs import AWQConfig, DecodeConfig, VarlenConfig, architecture, num_sms
from kvlab_kernels.split_kv import choose_num_splits, make_workspace, split_kv_attention
from kvlab_kernels.varlen import varlen_attention

DECODE_SHAPES = [(1, 32768), (8, 8192), (64, 4096)]  # batch, length
VARLEN_SHAPES = [(8, 1, 4096), (8, 16, 4096), (1, 2048, 0), (1, 2048, 8192)]  # sequences, new tokens, context
DECODE_GRID = list(product((32, 64, 128), (4, 8), (2, 3, 5)))
AWQ_ROWS = (1, 16, 32, 64, 256)
# A warp for each 32 columns, as configs.py says.
AWQ_GRID = [(m, n, n // 32, stages) for m, n, stages in product((16, 32, 64), (64, 128, 256), (3, 4, 5))]
NAMES = {
    "decode sizes": DecodeConfig._fields,
    "varlen sizes": VarlenConfig._fields,
    "awq sizes": ("block_m", "block_n", "num_warps", "num_stages", "splits"),
}
VARLEN_GRID = list(product((32, 64, 128), (32, 64), (4, 8), (2, 3)))


def decode_sizes(machine: Machine, copy: float | None) -> list[Row]:
    """Tile, warps and stages of a decode."""
    rows, shape = [], shape_of(machine)
    for batch, length in [(2, 70)] if machine.toy else DECODE_SHAPES:
        case = paged(shape, [length] * batch, 16, torch.bfloat16, machine.device)
        splits = choose_num_splits(batch, shape.num_kv_heads, length, num_sms(machine.device))
        workspace = make_workspace(batch, shape.num_heads, splits, shape.head_dim, machine.device)
        for config in [DecodeConfig(*sizes) for sizes in DECODE_GRID][: 2 if machine.toy else None]:
            if machine.out_of_time():
                return rows
            row = {"batch": batch, "length": length, "splits": splits, **config._asdict()}
            call = lambda c=case, n=splits, w=workspace, s=config: split_kv_attention(  # noqa: E731
                *c.decode, num_splits=n, workspace=w, config=s
            )
            rows.append(attempt(machine, call, useful_bytes(case), copy, row))
    return rows


def varlen_sizes(machine: Machine, gemm: float | None) -> list[Row]:
    """Rows, tile, warps and stages of varlen."""
    rows, shape = [], shape_of(machine)
    for batch, new, context in [(2, 9, 20)] if machine.toy else VARLEN_SHAPES:
        case = paged(shape, [context + new] * batch, 16, torch.bfloat16, machine.device, query_lens=[new] * batch)
        work = 4 * shape.num_heads * shape.head_dim * batch * (new * context + new * (new + 1) // 2)
        for config in [VarlenConfig(*sizes) for sizes in VARLEN_GRID][: 2 if machine.toy else None]:
            if machine.out_of_time():
                return rows
            row = {"batch": batch, "new": new, "context": context, **config._asdict()}
            call = lambda c=case, s=config: varlen_attention(*c.decode, c.query_start_loc, config=s)  # noqa: E731
            rows.append(attempt(machine, call, work, gemm, row))
    return rows


def awq_sizes(machine: Machine, copy: float | None) -> list[Row]:
    """Tile, warps, stages and splits of a product with weights in 4 bits."""
    rows = []
    for layer, weight in four_bits.layers(machine):
        num_bytes = sum(part.numel() * part.element_size() for part in weight[:3])
        for num_rows in four_bits.TOY_ROWS if machine.toy else AWQ_ROWS:
            x = torch.randn(num_rows, weight.in_features, device=machine.device).bfloat16()
            for sizes, splits in list(product(AWQ_GRID, (1, 4, 8)))[: 2 if machine.toy else None]:
                config = AWQConfig(*sizes)
                if machine.out_of_time():
                    return rows
                row = {"layer": layer, "rows": num_rows, **config._asdict(), "splits": splits}
                call = lambda x=x, w=weight, n=splits, s=config: awq_matmul(x, w, num_splits=n, config=s)  # noqa: E731
                rows.append(attempt(machine, call, num_bytes, copy, row))
    return rows


def attempt(machine: Machine, call, work: float, ceiling: float | None, row: Row) -> Row:
    """A timed row, or one that says why these sizes do not run."""
    try:
        return timed(machine, call, work, ceiling, **row)
    except Exception as error:  # the compiler's, or too much shared memory
        return row | {"note": describe(error)}


def best(machine: Machine, found: dict[str, list[Row]]) -> dict[str, Any]:
    """For each shape that was timed the quickest sizes, and the architecture and head dim that they are for."""
    result: dict[str, Any] = {"architecture": architecture(machine.device), "head_dim": shape_of(machine).head_dim}
    for section, names in NAMES.items():
        quickest: dict[str, Row] = {}
        for row in found.get(section, []):
            keys = ("batch", "length", "new", "context", "layer", "rows")
            shape = " ".join(f"{key}={row[key]}" for key in keys if key in row)
            if row.get("p50") and row["p50"] < quickest.get(shape, {"p50": float("inf")})["p50"]:
                quickest[shape] = row
        result[section] = {shape: [row[name] for name in names] for shape, row in quickest.items()}
    return result
