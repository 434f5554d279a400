"""The stand-in for Triton gives what Triton's interpreter gives, counts what is asked for, refuses what is wrong."""

import numpy as np
import pytest

from kvlab.lab.scenes.attention import make_case
from kvlab.lab.under_triton import has_triton, under_triton
from kvlab.standin import OutOfBounds, Race, Spread, record, tl, triton
from kvlab.standin.decode import (
    attend_gathered,
    bytes_moved,
    gqa_packed_kernel,
    launch_by_head,
    launch_packed,
    naive_kernel,
    online_softmax_kernel,
    paged_attention,
)
from kvlab.standin.faults import FAULTS, faulty

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton has wheels for Linux only")
RUNGS = [
    pytest.param(naive_kernel, launch_by_head, "naive", id="naive"),
    pytest.param(online_softmax_kernel, launch_by_head, "online", id="online"),
    pytest.param(gqa_packed_kernel, launch_packed, "packed", id="packed"),
]
SCALE = 3


@triton.jit
def half(x):
    return x * 0.5


@triton.jit
def numbers_kernel(x, y, i, out, whole, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    b = tl.load(y + at, mask=at < N - 3, other=2.0)
    k = tl.load(i + at)
    row = 0
    for value in (a + b, a - 1, 2 * a, a / b, half(a), -a, tl.maximum(a, b), tl.minimum(a, 0.25), tl.exp(a), tl.exp2(a),
                  tl.log2(tl.abs(a) + 1.0), tl.sqrt(tl.abs(a)), tl.floor(a), tl.where(a > b, a, -1.0), a.to(tl.float16),
                  k * a, k / 3, a * SCALE):  # fmt: skip
        tl.store(out + row * N + at, value)
        row += 1
    row = 0
    for value in (k + 1, k * k, k // 3, k % 3, 7 - k, tl.cdiv(k, 4), k * 1_000_003, (k > 2) & (k < 5) | (k == -6),
                  ~(k > 2), k.to(tl.int64) * 1_000_003 % 1000, a.to(tl.int32)):  # fmt: skip
        tl.store(whole + row * N + at, value)
        row += 1


@triton.jit
def blocks_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a = tl.load(x + at, mask=(i < N - 1)[:, None] & (i < N - 2)[None, :], other=0.0)
    product = tl.dot(a, tl.trans(a), input_precision="ieee")
    tl.store(out + at, product)
    tl.store(out + N * N + i, tl.sum(a, axis=1))
    tl.store(out + N * N + N + i, tl.max(product, axis=0))
    tl.store(out + N * N + 2 * N, tl.sum(tl.sum(a, axis=0), axis=0) + tl.min(tl.min(a, axis=1), axis=0))
    total = tl.zeros([N], dtype=tl.float32)
    for step in range(0, tl.program_id(0) + 2):
        total += tl.full([N], 0.5, dtype=tl.float32) * step
    tl.store(out + N * N + 3 * N + i, total + tl.num_programs(0))


def both(kernel, grid, make, **sizes):
    """What the stand-in and Triton's interpreter leave in the same arrays."""
    ours, theirs = make(), make()
    kernel[grid](*ours, **sizes)
    under_triton(kernel)[grid](*theirs, **sizes)
    return zip(ours, theirs, strict=True)


@needs_triton
def test_arithmetic_is_the_interpreters_bit_for_bit():
    def make():
        numbers = np.random.default_rng(0)
        x, y = numbers.normal(size=(2, 16)).astype(np.float32) * 3
        i = np.array([-9, -7, -6, -5, -3, -1, 0, 1, 2, 3, 4, 5, 100_000, 2**31 - 1, -(2**31), 11], np.int32)
        return x, y, i, np.zeros((18, 16), np.float32), np.zeros((11, 16), np.int64)

    for one, other in both(numbers_kernel, (1,), make, N=16):
        assert np.array_equal(one, other)


@needs_triton
def test_blocks_are_the_interpreters():
    def make():
        return np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32), np.zeros(16 * 20, np.float32)

    for one, other in both(blocks_kernel, (1,), make, N=16):
        assert np.allclose(one, other, rtol=1e-6, atol=1e-6)


@needs_triton
@pytest.mark.parametrize(("kernel", "launch", "rung"), RUNGS)
def test_the_rungs_are_the_interpreters_bit_for_bit(kernel, launch, rung):
    case = make_case([1, 17, 0, 12], block_size=4, kv_heads=2, group=3, head_dim=16)
    ours, theirs = np.full_like(case.q, np.nan), np.full_like(case.q, np.nan)
    launch(kernel, ours, *case)
    launch(under_triton(kernel), theirs, *case)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("kernel", "launch", "rung"), RUNGS)
def test_the_rungs_attend(kernel, launch, rung, dtype):
    case = make_case([1, 17, 0, 12, 33], block_size=8, kv_heads=2, group=3, head_dim=32)
    case = case._replace(q=case.q.astype(dtype), keys=case.keys.astype(dtype), values=case.values.astype(dtype))
    out = np.full_like(case.q, np.nan)
    with record() as traffic:
        launch(kernel, out, *case)
    for seq, length in enumerate(case.seq_lens):
        want = attend_gathered(case.q[seq], case.keys, case.values, case.block_tables[seq], int(length))
        assert np.abs(out[seq] - want).max() < (2e-6 if dtype == np.float32 else 3e-3)
    asked = traffic.num_bytes("load", "keys", "values")
    assert asked == bytes_moved(rung, case.seq_lens.tolist(), 6, 2, 32, case.keys.itemsize)


def test_the_launch_serves_any_group_and_no_sequence():
    case = make_case([5, 9], block_size=4, kv_heads=1, group=20, head_dim=16)
    want = [attend_gathered(case.q[s], case.keys, case.values, case.block_tables[s], n) for s, n in ((0, 5), (1, 9))]
    assert np.allclose(paged_attention(*case), want, atol=1e-5)
    nobody = [x[:0] if len(x) == 2 else x for x in case]
    assert paged_attention(*nobody).shape == (0, 20, 16)


def test_the_reference_is_the_kernels_own():
    torch = pytest.importorskip("torch")
    kernels = pytest.importorskip("kvlab_kernels.gather", reason="needs Triton")
    case = make_case([7, 12], block_size=4, kv_heads=2, group=2, head_dim=16)
    kv = torch.from_numpy(np.stack([case.keys, case.values]))
    theirs = kernels.decode_reference(*(torch.from_numpy(x) if x is not None else kv
                                        for x in (case.q, None, case.block_tables, case.seq_lens)))  # fmt: skip
    for seq, length in enumerate(case.seq_lens):
        ours = attend_gathered(case.q[seq], case.keys, case.values, case.block_tables[seq], int(length))
        assert np.abs(theirs[seq].numpy() - ours).max() < 1e-6


# ---- what it refuses


@triton.jit
def touch(x, out, at, N: tl.constexpr):
    tl.store(out, tl.load(x + at))


@triton.jit
def careless(x, out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N), mask=tl.arange(0, N) < 2))


def arrays(n=4):
    return np.arange(n, dtype=np.float32), np.zeros(n, np.float32)


@pytest.mark.parametrize("at", [-1, 4, 1 << 40])
def test_an_address_outside_is_told(at):
    with pytest.raises(OutOfBounds, match=rf"load of x\[{at}\]: it has the elements 0 to 3"):
        touch[(1,)](*arrays(), at, N=4)


def test_two_programs_must_not_write_one_number():
    x, out = arrays()
    with pytest.raises(Race, match=r"store to out\[0\]"):
        touch[(2,)](x, out, 1, N=4)
    touch[(1,)](x, out, 1, N=4)  # another launch may
    touch[(1,)](x, out, 2, N=4)
    assert out[0] == 2


def test_a_masked_load_without_other_leaves_nan():
    x, out = arrays()
    careless[(1,)](x, out, N=4)
    assert out[:2].tolist() == [0, 1] and np.isnan(out[2:]).all()


def test_offsets_wrap_at_32_bits():
    @triton.jit
    def far(x, out, block, stride):
        tl.store(out, tl.load(x + block * stride))

    @triton.jit
    def wide(x, out, block, stride):
        tl.store(out, tl.load(x + block.to(tl.int64) * stride))

    x, out = np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros(1, np.float32)
    wide[(1,)](Spread(x, 1 << 30), out, 2, 1 << 30)
    assert out[0] == 8
    with pytest.raises(OutOfBounds, match="passed 2\\^31"):
        far[(1,)](Spread(x, 1 << 30), out, 2, 1 << 30)


def bad(body):
    """A kernel with `body`, which has x, out, i [16] and block [16, 16] at hand."""
    space = {"tl": tl, "np": np}
    lines = "\n    ".join(["i = tl.arange(0, 16)", "block = tl.zeros([16, 16], dtype=tl.float32)", *body.split("; ")])
    exec(f"def kernel(x, out):\n    {lines}\n", space)
    return triton.jit(space["kernel"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("tl.arange(0, 12)", "powers of two"),
        ("tl.zeros([3], dtype=tl.float32)", "powers of two"),
        ("tl.dot(block, tl.zeros([16, 8], dtype=tl.float32))", "at least 16"),
        ("tl.dot(block, block.to(tl.float16))", "float32 and float16"),
        ("i + tl.arange(0, 8)", r"\[16\] and \[8\] do not fit"),
        ("i[0]", "no elements to pick"),
        ("np.exp(block)", "ufunc"),
        ("if i < 4: pass", "use &"),
        ("(i > 3) and (i < 5)", "use &"),
        ("tl.load(x + 0.5)", "whole number of elements"),
        ("tl.load(i)", "give a pointer"),
        ("tl.load(x + i, mask=i)", "give a comparison"),
        ("tl.load(x, mask=i < 4)", r"a mask \[16\] for addresses \[\]"),
        ("tl.exp2(i)", "convert it"),
        ("x + x", "a pointer plus a pointer"),
        ("x * 2", "unsupported operand"),
        ("tl.softmax(block)", "no tl.softmax; it has"),
        ("block.to(tl.bfloat16)", "no bfloat16"),
        ("tl.sum(3.0, axis=0)", "give a block"),
        ("range(0, i)", "loop counts with a scalar"),
    ],
)
def test_what_triton_would_refuse_is_refused(body, words):
    with pytest.raises((TypeError, ValueError, AttributeError), match=words):
        bad(body)[(1,)](np.zeros(16, np.float32), np.zeros(16, np.float32))


def test_a_kernel_is_launched_with_a_grid():
    x, out = arrays()
    with pytest.raises(RuntimeError, match=r"touch\[grid\]"):
        touch(x, out, 0, 4)
    with pytest.raises(ValueError, match="the grid"):
        touch[(1, 1, 1, 1)](x, out, 0, N=4)
    with pytest.raises(TypeError, match="float64"):
        touch[(1,)](x.astype(np.float64), out, 0, N=4)


def test_strided_arrays_are_read_in_place():
    wide = np.arange(32, dtype=np.float32).reshape(4, 8)
    out = np.zeros(1, np.float32)
    touch[(1,)](wide[1:, 2:6], out, 2 * 8 + 3, N=4)
    assert out[0] == wide[3, 5]


# ---- the compiler, and the faults


@needs_triton
@pytest.mark.slow
def test_the_compiler_s_report_and_a_lost_hint():
    from kvlab.lab.scenes.attention import KEPT, compiled
    from kvlab_kernels.aot import Report

    (hinted, unhinted), whose = compiled(gqa_packed_kernel)
    assert {*hinted} == {*Report._fields, "loads"} and "your machine" in whose
    assert hinted["mma"] > 0 and hinted["spill"] == 0 and hinted["wide"] > 10 * unhinted["wide"]
    assert unhinted["regs"] > hinted["regs"] and hinted["loads"]["const"] == 0
    assert KEPT.exists()


def test_every_fault_is_another_line_of_the_kernel():
    for name in ("none", *FAULTS):
        assert faulty(name).fn is not online_softmax_kernel.fn
