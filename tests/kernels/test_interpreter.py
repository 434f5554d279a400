"""The interpreter put right, and the check of loads and stores."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvlab_kernels import launch

if not launch.INTERPRETED:
    pytest.skip("kernels are compiled in this process", allow_module_level=True)

from kvlab_kernels import interpreter
from kvlab_kernels.launch import tl, triton
from kvlab_kernels.sanitizer import OutOfBounds, sanitize


def test_bf16_is_right_in_this_version():
    """Else the tests of bf16 are skipped, and this one says it."""
    assert interpreter.BF16_IS_RIGHT and interpreter.try_bf16()


def test_rounding_is_pytorchs():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=generator).int()
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 1, 0]).int()
    x = torch.cat((bits, halfway)).view(torch.float32)
    ours = torch.from_numpy(interpreter.round_to_bf16(x.numpy()).astype(np.int16)).view(torch.bfloat16)
    theirs = x.bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])
    back = torch.from_numpy(interpreter.widen(ours.view(torch.int16).numpy().view(np.uint16)))
    assert torch.equal(back[~back.isnan()], theirs.float()[~theirs.isnan()])


def test_an_unknown_version_is_left_as_it_is_and_found_wrong():
    code = (
        "import kvlab_kernels.interpreter as i; i.TRIED = ('none',)\n"
        "import kvlab_kernels.launch; print(i.BF16_IS_RIGHT, hasattr(i.inner, '_kvlab_originals'))"
    )
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


@triton.jit
def doubled(x):
    return tl.sum(x, axis=0) * 2


@triton.jit
def copy_kernel(source, target, n, shift, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(target + i, tl.load(source + i + shift, mask=i < n), mask=i < n)


@triton.jit
def sum_kernel(source, target, n):
    total = 0.0
    for i in range(n):  # a loop bound that is an argument
        total += doubled(tl.load(source + i + tl.arange(0, 1)))
    tl.store(target, total)


@triton.jit
def failing_kernel(target):
    tl.store(target, tl.load(target) + tl.arange(0, 3))


def copy(source, target, n, shift=0):
    copy_kernel[(1,)](source, target, n, shift, SIZE=16)


def test_helpers_and_loops_over_arguments():
    target = torch.zeros(1)
    sum_kernel[(1,)](torch.arange(5.0), target, 5)
    assert target.item() == 20


def test_triton_is_put_back_after_a_launch_that_failed():
    member = tl.arange
    with pytest.raises(Exception, match="power of 2"):
        failing_kernel[(1,)](torch.zeros(1))
    assert tl.arange is member
    test_helpers_and_loops_over_arguments()


def test_what_is_within_passes():
    target = torch.zeros(10)
    copy(torch.arange(20.0), target, 10, shift=10)
    assert torch.equal(target, torch.arange(10.0, 20.0))


@pytest.mark.parametrize("shift", [1, 1 << 40])
def test_a_load_outside_is_found(shift):
    with pytest.raises(OutOfBounds, match=r"^copy_kernel: load: (1|10) of 10 addresses lie outside every tensor"):
        copy(torch.zeros(10), torch.zeros(30), 10, shift)


def test_the_message_says_where():
    with pytest.raises(OutOfBounds, match="the first is 4 bytes before source"):
        copy(torch.zeros(10), torch.zeros(30), 10, shift=-1)
    with pytest.raises(OutOfBounds, match="the first is 4 bytes behind the end of source"):
        copy(torch.zeros(10), torch.zeros(30), 10, shift=1)


def test_a_store_outside_is_found():
    target = torch.zeros(10)
    with pytest.raises(OutOfBounds, match="store: 2 of 12 addresses"):
        copy(torch.zeros(12), target, 12)


def test_the_memory_of_a_view_ends_with_the_view():
    whole = torch.zeros(40)
    with pytest.raises(OutOfBounds):
        copy(whole[:10], torch.zeros(30), 10, shift=20)


def test_other_errors_pass_through():
    with pytest.raises(Exception, match="power of 2") as caught:
        failing_kernel[(1,)](torch.zeros(1))
    assert not isinstance(caught.value, OutOfBounds)


def test_it_ends_with_its_block():
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    before = InterpreterBuilder.create_masked_load, GridExecutor.__call__
    with pytest.raises(OutOfBounds), sanitize():
        copy(torch.zeros(10), torch.zeros(30), 10, shift=1)
    assert (InterpreterBuilder.create_masked_load, GridExecutor.__call__) == before
