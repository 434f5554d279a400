"""The compiler without a GPU: within the budget, and no compilation that a change of lengths or batch would bring."""

import json
import os
import subprocess
import sys

import pytest

from kvlab_kernels import aot


def run(*args: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in aot.ARCHS if arch != 90)]
)
def test_the_kernels_compile_within_the_budget(arch):
    done = run("-m", "kvlab_kernels.aot", "--check", "--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the budget" in done.stdout and done.stdout.count("_kernel") == (26 if arch < 89 else 31)


BUDGET = {"triton": "1", "kernels": {"90": {"split_kernel": {"regs": 100, "shared": 1000, "wide": 8}}}}
GOOD = aot.Report(regs=100, stack=0, spill=0, shared=1000, mma=4, wide=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill": 2}, "2 spills"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"mma": 0}, "tensor cores"),
        ({"shared": 300_000}, "the GPU has 227 KiB"),
        ({"regs": 101}, "regs 101, the budget is 100"),
        ({"wide": 7}, "a hint was lost"),
    ],
)
def test_what_is_not_within_the_budget_is_named(change, message):
    assert aot.faults(90, {"split_kernel": GOOD}, BUDGET, "1") == []
    found = aot.faults(90, {"split_kernel": GOOD._replace(**change)}, BUDGET, "1")
    assert any("sm_90 split_kernel" in line and message in line for line in found)


def test_under_another_triton_registers_may_differ():
    assert aot.faults(90, {"split_kernel": GOOD._replace(regs=120)}, BUDGET, "2") == []
    assert aot.faults(90, {"split_kernel": GOOD._replace(spill=1)}, BUDGET, "2") != []


def test_a_kernel_without_a_budget_is_named():
    assert aot.faults(80, {"split_kernel": GOOD}, BUDGET, "1") == [
        "sm_80 split_kernel: has no budget: run with --write"
    ]


def test_the_budget_has_every_architecture_and_no_spills():
    budget = json.loads(aot.BUDGET.read_text(encoding="utf-8"))
    assert sorted(map(int, budget["kernels"])) == sorted(aot.ARCHS)
    for kernels in budget["kernels"].values():
        assert all(report["spill"] == report["stack"] == 0 for report in kernels.values())


UNPACKED = """
import os
os.environ["TRITON_INTERPRET"] = "0"
import torch
from kvlab_kernels import aot, awq_matmul
x = torch.zeros(32, 3584, dtype=torch.bfloat16)
words, scales = torch.zeros(448, 4608, dtype=torch.int32), torch.zeros(28, 4608, dtype=torch.float16)
weight = awq_matmul.AWQWeight(words, scales, torch.zeros(28, 576, dtype=torch.int32), 3584)
for arch in (80, 90):
    with aot.compiling_for(arch) as compiled:
        for rows in (1, 32):
            awq_matmul.awq_matmul(x[:rows], weight)
    for name, kernel in compiled:
        if name == "awq_matmul_kernel":
            print(arch, kernel.asm["ttgir"].count("ttg.local_alloc :"), kernel.asm["ttgir"].count("ttg.local_alloc %"))
"""


def test_weights_of_4_bits_go_from_registers_to_the_tensor_cores():
    """Unpacked, they pass through no shared memory: an allocation there with a value is a detour, the rest pipeline."""
    done = run("-c", UNPACKED)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["80", "80", "90", "90"], done.stdout + done.stderr
    assert all(int(pipeline) > 0 and int(detours) == 0 for _, pipeline, detours in lines), lines


VARIANTS = """
import itertools, torch
from kvlab_kernels import (aot, block_copy, cache_write, gqa_packed, quantized, rms_norm, rope_cache, split_kv, swiglu,
                           varlen)
from kvlab_kernels.configs import DecodeConfig, VarlenConfig
kv = torch.zeros(2, 64, 16, 4, 128, dtype=torch.bfloat16)
kv8, scales, table = kv.to(torch.int8), torch.zeros(kv.shape[:4]), torch.zeros(512, 1, 128, dtype=torch.bfloat16)
with aot.compiling_for(90) as compiled:
    cache = block_copy.pieces_of([scales, kv8])
    for n, width, splits in itertools.product((1, 2, 16, 17, 33), (1, 3, 16, 17), (2, 16, 17)):
        q = torch.zeros(n, 28, 128, dtype=torch.bfloat16)
        tables, lens = torch.zeros(n, width, dtype=torch.int32), torch.ones(n, dtype=torch.int32)
        starts = torch.arange(n + 1, dtype=torch.int32)
        config = DecodeConfig(64, 4, 2)
        cache_write.reshape_and_cache(q[:, :4], q[:, 4:8], kv, torch.arange(n))
        gqa_packed.gqa_packed_attention(q, kv, tables, lens, config=config)
        split_kv.split_kv_attention(q, kv, tables, lens, num_splits=splits, config=config)
        varlen.varlen_attention(q, kv, tables, lens, starts, config=VarlenConfig(32, 32, 4, 2))
        qkv, slots = torch.zeros(n, 36, 128, dtype=torch.bfloat16), torch.arange(n)
        q, k, v = qkv.split((28, 4, 4), dim=1)
        x = torch.zeros(n, 2 * 3584, dtype=torch.bfloat16)
        rope_cache.rope_and_cache(q, k, v, table, table, slots, kv, slots)
        quantized.quantize_and_cache(k, v, kv8, scales, slots)
        rms_norm.add_rms_norm(x, x.clone(), x[0].clone(), 1e-6)
        rms_norm.rms_norm(qkv[:, :32], qkv[0, :32].clone(), 1e-6)
        swiglu.swiglu(*x.chunk(2, dim=1))
        block_copy.copy_blocks(cache, [(i, 40 + i) for i in range(min(n, 20))])
for name in sorted({name for name, _ in compiled}):
    print(name, len({kernel.hash for other, kernel in compiled if other == name}))
"""


def test_lengths_and_batch_sizes_compile_nothing_new():
    """A server that met a new batch size would else compile in the middle of a request."""
    done = run("-c", "import os; os.environ['TRITON_INTERPRET'] = '0'\n" + VARIANTS)
    counts = dict(line.split() for line in done.stdout.splitlines())
    once = (
        "cache_write_kernel", "gqa_packed_kernel", "merge_kernel", "move_blocks_kernel", "quantized_write_kernel",
        "rope_cache_kernel", "split_kernel", "swiglu_kernel", "varlen_kernel",
    )  # fmt: skip
    assert counts == dict.fromkeys(once, "1") | {"rms_norm_kernel": "2"}, done.stdout + done.stderr
