"""Products with weights in 4 bits: the kernel against the weight written out, however K and the rows are cut."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE

from kvlab.model import awq
from kvlab_kernels import awq_matmul as kernel
from kvlab_kernels import interpreter, launch
from kvlab_kernels.awq_matmul import awq_matmul, awq_matmul_reference, choose_num_splits, dequantize, repack
from kvlab_kernels.configs import AWQ, AWQConfig, awq_config
from kvlab_kernels.warmup import awq_warm_up_rows

needs_bf16 = pytest.mark.skipif(
    launch.INTERPRETED and not interpreter.BF16_IS_RIGHT, reason="Triton's interpreter is wrong on bf16 here"
)
SMALL = AWQConfig(16, 32, 4, 2)
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_bf16)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# in, out, group: one chunk; several, and a last tile that is not full; less than a chunk; last chunks that are not
# full; groups longer than a chunk
SHAPES = [(128, 64, 128), (384, 40, 128), (48, 8, 16), (192, 72, 64), (224, 24, 32), (512, 24, 256)]


def weight_of(in_features, out_features, group, seed=0):
    """(AWQWeight, the checkpoint's parts) of random bits: every number and zero from 0 to 15."""
    generator = torch.Generator().manual_seed(seed)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, generator=generator).int()

    parts = words(in_features, out_features // 8), words(in_features // group, out_features // 8)
    scales = (torch.rand(in_features // group, out_features, generator=generator) * 0.02 + 0.001).half()
    parts = [part.to(DEVICE) for part in (*parts, scales)]
    return repack(awq.unpack(parts[0]), parts[2], parts[1]), parts


def rows_of(num_rows, in_features, dtype, seed=1):
    """x as a slice of wider rows full of NaN, and behind the last row NaN."""
    wide = torch.full((num_rows + 1, in_features + 5), torch.nan)
    x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(seed))
    wide[:num_rows, :in_features] = x
    return wide.to(dtype).to(DEVICE)[:num_rows, :in_features]


def close(got, want):
    """Sums of the same exact products in another order, rounded once; fp32 by the sizes that were summed."""
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]
    assert got.dtype == want.dtype and got.shape == want.shape
    assert ((got.double() - want.double()).abs() <= tolerance * want.double().abs().amax()).all()


# ---- the layout


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repacked_and_written_out_it_is_the_checkpoint(shape):
    weight, parts = weight_of(*shape)
    assert weight.group_size == shape[2] and weight.words.numel() * 8 == -(-shape[0] // 128) * 128 * shape[1]
    for dtype in (torch.float32, torch.float16):
        want = awq.dequantise_weight(*parts, dtype).T
        assert torch.equal(dequantize(weight, dtype), want)
        assert torch.equal(kernel.dequantize_reference(weight, dtype), want)


def test_where_a_number_lies():
    """k = 128 * chunk + 16 * plane + row is in bits 4 * plane of word [16 * chunk + row, n]."""
    numbers = torch.zeros(256, 8, dtype=torch.uint8, device=DEVICE)
    numbers[128 + 16 * 3 + 5, 2] = 9
    scales = torch.ones(2, 8, dtype=torch.float16, device=DEVICE)
    words = repack(numbers, scales, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)).words
    assert words.nonzero().tolist() == [[16 + 5, 2]] and words[21, 2] == 9 << 12


# ---- the product


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product(shape, dtype):
    weight, _ = weight_of(*shape)
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    for num_rows, splits in ((1, 1), (17, 2)):
        x = rows_of(num_rows, shape[0], dtype)
        close(awq_matmul(x, weight, bias, num_splits=splits, config=SMALL), awq_matmul_reference(x, weight, bias))
        close(awq_matmul(x, weight, num_splits=splits, config=SMALL), awq_matmul_reference(x, weight))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 70])
def test_the_sizes_that_the_engine_takes(num_rows):
    weight, _ = weight_of(1024, 136, 128)
    x = rows_of(num_rows, 1024, torch.float16)
    close(awq_matmul(x, weight), awq_matmul_reference(x, weight))


@every_dtype
def test_many_rows_write_the_weight_out(dtype, monkeypatch):
    monkeypatch.setattr(kernel, "MOST_ROWS", 3)
    weight, _ = weight_of(192, 72, 64)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    x = rows_of(4, 192, dtype)
    want = torch.nn.functional.linear(x, dequantize(weight, dtype).T, bias)
    assert torch.equal(awq_matmul(x, weight, bias), want)
    assert not torch.equal(awq_matmul(x[:3], weight, bias), want[:3]) or dtype == torch.float32


def test_a_weight_is_not_rounded_before_the_product():
    """Scaled after the product, in fp32: a row of ones and one chunk give an exact sum, which fp16 weights do not."""
    weight, parts = weight_of(128, 64, 128)
    x = torch.ones(1, 128, dtype=torch.float16, device=DEVICE)
    exact = awq.dequantise_weight(*parts, torch.float64).sum(1)
    got = awq_matmul(x, weight, num_splits=1)[0]
    assert torch.equal(got, exact.half())
    rounded = awq.dequantise_weight(*parts, torch.float16).double().sum(1).half()
    assert not torch.equal(rounded, exact.half())


def test_more_splits_than_chunks_and_a_split_without_work():
    weight, _ = weight_of(640, 24, 128)
    x = rows_of(3, 640, torch.float32)
    want = awq_matmul_reference(x, weight)
    for splits in (4, 5, 9):  # of 5 chunks: two each, so the fourth has none
        close(awq_matmul(x, weight, num_splits=splits, config=SMALL), want)


def test_equal_bits_in_every_run_and_in_every_place_of_the_batch():
    weight, _ = weight_of(1024, 72, 128)
    x = rows_of(5, 1024, torch.float16)
    got = awq_matmul(x, weight, num_splits=4)
    assert torch.equal(got, awq_matmul(x, weight, num_splits=4))
    assert torch.equal(awq_matmul(x[2:4], weight, num_splits=4), got[2:4])


def test_a_nan_stays_in_its_row():
    weight, _ = weight_of(192, 24, 64)
    x = rows_of(3, 192, torch.float32).clone()
    x[1, 7] = torch.nan
    got = awq_matmul(x, weight, num_splits=2)
    assert got[1].isnan().all() and not got[[0, 2]].isnan().any()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 20), st.sampled_from([16, 32, 64, 128, 256]), st.integers(1, 5), st.integers(1, 9),
       st.integers(1, 4))  # fmt: skip
def test_any_shape(num_rows, group, groups, eights, splits):
    weight, _ = weight_of(group * groups, 8 * eights, group, seed=num_rows)
    x = rows_of(num_rows, group * groups, torch.float32)
    close(awq_matmul(x, weight, num_splits=splits, config=SMALL), awq_matmul_reference(x, weight))


def test_no_rows():
    weight, _ = weight_of(128, 64, 128)
    assert awq_matmul(torch.empty(0, 128, device=DEVICE), weight).shape == (0, 64)


# ---- the choice of sizes


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((3584, 4608), 7), ((3584, 3584), 7), ((3584, 37888), 1), ((18944, 3584), 9), ((512, 512), 1)],
)
def test_splits_of_a_decode_on_132_sms(shape, splits):
    """Qwen2.5-7B's qkv, o, gate and up, down: two programs to an SM, where each has four chunks of K at least."""
    assert choose_num_splits(1, *shape, AWQ[0], 132) == splits


def test_no_split_is_without_work():
    for chunks in range(1, 150):
        splits = choose_num_splits(1, 128 * chunks, 256, AWQ[0], 132)
        per_split = -(-chunks // splits)
        assert (splits - 1) * per_split < chunks


def test_tiles_by_rows():
    assert [awq_config(rows).block_m for rows in (1, 16, 17, 32, 33, 64, 65, 256)] == [16, 16, 32, 32, 64, 64, 64, 64]


def test_warm_up_names_a_number_of_rows_of_each_kind():
    device = torch.device(DEVICE)
    rows = awq_warm_up_rows(3584, 4608, 8192, 2, device)
    assert {awq_config(n).block_m for n in rows if n <= 256} == {16, 32, 64} and 257 in rows
    assert max(awq_warm_up_rows(3584, 4608, 40, 2, device)) <= 40
    assert awq_warm_up_rows(128, 128, 1, 2, device) == [1]


# ---- what is refused


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(2, 64), None, r"give float32, float16 or bfloat16 \[M, 128\]"),
        (torch.zeros(128), None, "x is float32"),
        (torch.zeros(2, 128).double(), None, "x is float64"),
        (torch.zeros(128, 2).T, None, "rows contiguous"),
        (torch.zeros(2, 128), torch.zeros(8), r"bias is float32 \[8\].*\[64\]"),
        (torch.zeros(2, 128), torch.zeros(64).half(), "bias is float16"),
    ],
)
def test_a_bad_product_is_refused(x, bias, message):
    weight, _ = weight_of(128, 64, 128)
    with pytest.raises(ValueError, match=message):
        awq_matmul(x.to(DEVICE), weight, None if bias is None else bias.to(DEVICE))


@pytest.mark.parametrize(
    ("numbers", "groups", "message"),
    [
        (torch.zeros(128, 12, dtype=torch.uint8), 1, "N a multiple of 8"),
        (torch.zeros(128, 16), 1, "numbers is float32"),
        (torch.zeros(130, 16, dtype=torch.uint8), 3, "130 rows in 3 groups"),
        (torch.zeros(24, 16, dtype=torch.uint8), 3, "a multiple of 16"),
        (torch.zeros(96, 16, dtype=torch.uint8), 2, "groups of 48"),
    ],
)
def test_a_bad_weight_is_refused(numbers, groups, message):
    scales, zeros = torch.ones(groups, 16).half(), torch.zeros(groups, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        repack(numbers, scales, zeros)


def test_scales_and_zeros_that_do_not_fit():
    numbers, scales = torch.zeros(128, 16, dtype=torch.uint8), torch.ones(1, 16).half()
    with pytest.raises(ValueError, match="scales is float32"):
        repack(numbers, scales.float(), torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="zeros is int32 .1, 3."):
        repack(numbers, scales, torch.zeros(1, 3, dtype=torch.int32))
