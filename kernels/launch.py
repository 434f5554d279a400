"""The one door to Triton: every kernel's file takes `triton` and `tl` from here.

Triton runs a kernel in one of two ways, and a process has only one of them:

    compiled      for an NVIDIA GPU: the kernel becomes machine code
    interpreted   on any machine: NumPy walks through the kernel, one program after the other. Slow, and right

Triton makes the choice while it is imported, by the variable TRITON_INTERPRET. So this file sets it first: where
there is no GPU, kernels are interpreted, and one sentence says so. TRITON_INTERPRET=1 asks for it on a GPU machine too;
TRITON_INTERPRET=0 keeps the compiler without a GPU, which `kvlab_kernels.aot` needs.
"""

import importlib.util
import os
import sys

import torch
from torch import Tensor

VARIABLE = "TRITON_INTERPRET"
TRUE = ("1", "true", "yes", "on", "y")


def choose() -> bool:
    """Whether kernels are to be interpreted. Sets TRITON_INTERPRET if nobody has, and the choice is still open.

    ImportError where Triton is not installed; RuntimeError where it was imported in the other mode already.
    """
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        raise ImportError(
            "the kernels need Triton, which is not installed: on Linux, `python -m pip install triton`; elsewhere "
            'there is no wheel of it, so use a Linux container, or attention backend "torch"',
            name="triton",
        )
    asked = os.environ.get(VARIABLE)
    interpreted = asked.lower() in TRUE if asked is not None else not torch.cuda.is_available()
    if "triton" in sys.modules and is_interpreted() != interpreted:
        now = "interpreted" if interpreted else "compiled"
        raise RuntimeError(
            f"kernels are to be {now} here, but Triton was imported for the other mode before (transformers imports it "
            f"too): set {VARIABLE}={int(interpreted)} before Python starts, or import kvlab_kernels.launch first"
        )
    if asked is None and interpreted:
        os.environ[VARIABLE] = "1"
        print("kvlab_kernels: no NVIDIA GPU found, so Triton's interpreter runs the kernels, slowly.", file=sys.stderr)
    return interpreted


def is_interpreted() -> bool:
    """The mode that Triton was imported in. Its own helpers, like tl.sum, were decorated then."""
    from triton.language import sum as helper
    from triton.runtime.jit import JITFunction

    return not isinstance(helper, JITFunction)


INTERPRETED = choose()
compile_only = False  # kvlab_kernels.aot launches nothing, so it may hand over tensors that are not on a GPU

import triton  # noqa: E402 (the choice comes first)
import triton.language as tl  # noqa: E402

if INTERPRETED:
    from kvlab_kernels import interpreter

    interpreter.install()


def check_device(*tensors: Tensor) -> None:
    """All on one device, and one that this process can launch on. ValueError, or RuntimeError for the device."""
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"the tensors are on {device} and on {tensor.device}: move them to one device")
    if device.type != "cuda" and not INTERPRETED and not compile_only:
        raise RuntimeError(
            f"the tensors are on {device}, but kernels are compiled for a GPU in this process: move the tensors to "
            f"cuda, or start Python with {VARIABLE}=1 to have the kernels interpreted"
        )


__all__ = ["INTERPRETED", "check_device", "tl", "triton"]
