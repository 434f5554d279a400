"""A stand-in for Triton: the same kernel source, run by NumPy. For labs 10 and 11; real kernels are in kvlab_kernels.

    from kvlab.standin import tl, triton        instead of    import triton
                                                              import triton.language as tl
    @triton.jit
    def kernel(x, out, N: tl.constexpr): ...
    kernel[grid](x, out, N=4)                   NumPy arrays in place of GPU tensors

    tensor    values and pointers as a kernel sees them: 32-bit offsets that wrap, blocks with sides of powers of two
    memory    what an argument's pointers may reach: an access outside is an error, and every access is written down
    language  the operations, tl.load to tl.dot: those that paged attention needs, no more
    launch    @triton.jit, kernel[grid](...), and record(), which counts the bytes that a launch asks for
    decode    the decode kernels of lab 10 on it
    mixed     those of lab 11: split-KV, mixed batches, INT8

It needs NumPy alone, so it runs where Triton has no wheel; it is quicker than Triton's interpreter, and says more when
something goes wrong. It knows nothing of time, of warps or of how a GPU lays out a block. The same source goes through
Triton itself with kvlab.lab.under_triton.
"""

from kvlab.standin.launch import record, tl, triton
from kvlab.standin.memory import Memory, OutOfBounds, Race, Spread

__all__ = ["Memory", "OutOfBounds", "Race", "Spread", "record", "tl", "triton"]
