"""The warm-up compiles all that serving needs and nothing else: without a GPU, in a process that only compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab_kernels.warmup import warm_up_steps


def compile_days(split_tokens: int = 0, warm: str = "warm", kv_cache_dtype: str = "auto") -> dict:
    script = Path(__file__).with_name("warm_day.py")
    done = subprocess.run(
        [sys.executable, script, str(split_tokens), warm, kv_cache_dtype],
        env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_after_the_warm_up_no_day_of_requests_compiles_anything():
    found = compile_days()
    assert sorted(found["warm-up"]["compiled"]) == [
        "gqa_packed_kernel", "merge_kernel", "move_blocks_kernel", "rms_norm_kernel", "rms_norm_kernel",
        "rope_cache_kernel", "split_kernel", "swiglu_kernel", "varlen_kernel", "varlen_kernel",
    ]  # fmt: skip
    assert found["day 1"]["compiled"] == found["day 2"]["compiled"] == []
    # The days need each of them: nothing was compiled in vain, and the days are rich enough to say so.
    assert found["warm-up"]["launched"] == found["day 1"]["launched"] == found["day 2"]["launched"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"split_tokens": 256}, {"kv_cache_dtype": "int8"}], ids=str)
def test_with_fixed_splits_and_with_int8_too(options):
    found = compile_days(**options)
    assert found["day 1"]["compiled"] == found["day 2"]["compiled"] == []
    assert set(found["day 1"]["launched"]) == set(found["warm-up"]["launched"])


@pytest.mark.slow
def test_without_a_warm_up_the_first_day_compiles_and_the_second_does_not():
    found = compile_days(warm="cold")
    assert len(found["day 1"]["compiled"]) == 9
    assert found["day 2"]["compiled"] == []


ROWS = """
import json, os
os.environ["TRITON_INTERPRET"] = "0"
import torch
from kvlab.model.awq_linear import AWQLinear
from kvlab_kernels.aot import compiling_for
from kvlab_kernels.warmup import count_compilations
linears = []
for k, n, bias in ((1024, 1152, True), (2048, 1024, False), (1024, 18944, False)):
    qweight, qzeros = torch.zeros(k, n // 8, dtype=torch.int32), torch.zeros(k // 128, n // 8, dtype=torch.int32)
    parts = qweight, qzeros, torch.zeros(k // 128, n, dtype=torch.float16)
    bias = torch.zeros(n, dtype=torch.bfloat16) if bias else None
    linears.append(AWQLinear(*parts, bias, dtype=torch.bfloat16, kernel=True))
with compiling_for(90) as launched:
    found = []
    with count_compilations() as compiled:
        for linear in linears:
            linear.warm_up(257)
    found.append((sorted(compiled), sorted({kernel.hash for _, kernel in launched})))
    launched.clear()
    with count_compilations() as compiled:
        for linear in linears:
            for rows in range(1, 258):
                linear(torch.zeros(rows, linear.in_features, dtype=torch.bfloat16))
    found.append((sorted(compiled), sorted({kernel.hash for _, kernel in launched})))
print(json.dumps(found))
"""


def test_after_the_warm_up_no_number_of_rows_compiles_a_product_in_4_bits():
    done = subprocess.run([sys.executable, "-c", ROWS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (warm, by_warm_up), (later, by_rows) = json.loads(done.stdout)
    assert later == [] and by_warm_up == by_rows
    assert {"awq_matmul_kernel", "awq_reduce_kernel", "awq_dequantize_kernel"} == set(warm)


def test_the_steps_respect_the_limits_of_the_engine():
    for max_num_batched_tokens, max_model_len in ((1, 2), (2, 2), (63, 4096), (64, 4096), (2048, 40)):
        for step in warm_up_steps(max_num_batched_tokens, max_model_len):
            assert sum(step.query_lens) <= max_num_batched_tokens
            assert max(step.seq_lens) <= max_model_len
            assert all(1 <= query <= length for query, length in zip(*step, strict=True))
