"""The table of sizes: a row for every GPU and head dim that the kernels serve, and tiles that tl.dot takes."""

import pytest

from kvlab_kernels.configs import DECODE, VARLEN, decode_config, varlen_config

ARCHS = [80, 86, 87, 89, 90, 100, 120]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", [1, 64, 65, 80, 128, 192, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_shape_has_sizes_that_tl_dot_takes(arch, head_dim, element_size):
    decode = decode_config(arch, head_dim, element_size)
    chunks = [varlen_config(arch, head_dim, group, n, element_size) for group in (1, 7, 28) for n in (1, 2048)]
    for size in [decode.tile, *(n for config in chunks for n in (config.tile, config.block_m))]:
        assert size >= 16 and size & (size - 1) == 0
    assert all(config.block_m >= 28 for config in chunks[-2:])


def test_a_newer_gpu_takes_the_newest_row_before_it():
    assert decode_config(86, 128) == DECODE[80, 128]
    assert varlen_config(86, 128, 7, 2048) == VARLEN[80, 128][1]
    assert varlen_config(90, 128, 7, 2048) == VARLEN[89, 128][1]
    assert varlen_config(90, 128, 7, 63) == VARLEN[89, 128][0]


@pytest.mark.parametrize(("arch", "head_dim"), [(75, 128), (90, 257)])
def test_what_has_no_row_is_refused(arch, head_dim):
    with pytest.raises(ValueError, match="no sizes for compute capability"):
        decode_config(arch, head_dim)
