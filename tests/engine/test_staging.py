"""The staging buffer: pieces that do not touch, at addresses that follow from the shapes."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.engine.staging import StagingBuffer

PIECES = st.lists(
    st.tuples(st.sampled_from([np.int64, np.int32, np.float64]), st.lists(st.integers(0, 9), min_size=1, max_size=2)),
    min_size=1, max_size=9,
)  # fmt: skip


@given(PIECES, st.integers(0, 2000))
def test_what_is_written_comes_out_aligned_and_untouched_by_the_others(pieces, capacity):
    buffer = StagingBuffer(capacity, "cpu")
    shapes = {str(i): (dtype, tuple(shape)) for i, (dtype, shape) in enumerate(pieces)}
    arrays, tensors = buffer.lay_out(shapes)
    for i, array in enumerate(arrays.values()):
        array[...] = i + 1
    buffer.send()
    for i, (name, (dtype, shape)) in enumerate(shapes.items()):
        tensor = tensors[name]
        assert tensor.dtype == torch.from_numpy(np.empty(0, dtype)).dtype and tensor.shape == shape
        assert (tensor == i + 1).all() and tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 16 == 0  # Triton compiles other kernels for other pointers
    buffer.lay_out({"other": (np.int64, (1,))})
    again = buffer.lay_out(shapes)[1]
    assert [x.data_ptr() for x in again.values()] == [x.data_ptr() for x in tensors.values()]


def test_what_comes_behind_does_not_move_what_stands_before():
    buffer = StagingBuffer(1000, "cpu")
    first = buffer.lay_out({"a": (np.int64, (3,)), "b": (np.int32, (5,))})[1]
    second = buffer.lay_out({"a": (np.int64, (3,)), "b": (np.int32, (5,)), "c": (np.float64, (4, 2))})[1]
    assert [first[name].data_ptr() for name in "ab"] == [second[name].data_ptr() for name in "ab"]


def test_what_does_not_fit_goes_elsewhere_and_the_rest_stays():
    buffer = StagingBuffer(64, "cpu")
    before = buffer.lay_out({"a": (np.int64, (6,))})[1]["a"].data_ptr()
    for count in (3, 100, 10_000):
        arrays, tensors = buffer.lay_out({"a": (np.int64, (6,)), "b": (np.float64, (count,)), "c": (np.int32, (4,))})
        for i, array in enumerate(arrays.values()):
            array[:] = i
        assert [x.unique().tolist() for x in tensors.values()] == [[0], [1], [2]]
        assert tensors["a"].data_ptr() == before
        assert buffer.fixed.used == 64 and buffer.overflow.used >= 8 * count  # "c" found room in the first


def test_the_host_is_the_cpu_whatever_the_default_device():
    """As set by torch.set_default_device("cuda"), whose memory NumPy cannot write."""
    with torch.device("meta"):
        arrays, tensors = StagingBuffer(100, "cpu").lay_out({"a": (np.int64, (3,))})
    arrays["a"][:] = 7
    assert tensors["a"].tolist() == [7, 7, 7]
