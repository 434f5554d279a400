"""The Triton ladder (labs 10 and 11) and the kernels that the engine uses; installed and imported as
`kvlab_kernels`.

Each rung is one file, with the picture, the kernel, a function that checks and launches it, and beside it the plain
function that it must equal:

    cache_write  ->  gather  ->  naive  ->  online_softmax  ->  gqa_packed  ->  split_kv, varlen
    quantized (8 bits)    block_copy (copy-on-write, swap)    rms_norm, rope_cache, swiglu (fused)
    awq_matmul (products with weights in 4 bits)

`launch` chooses between GPU and interpreter, `interpreter` and `sanitizer` serve the latter, `configs` holds the sizes,
`aot` asks the compiler without a GPU. README.md says what has run where.

Importing this package never imports triton: each kernel's file does, when it is asked for.
"""

import sys

if __name__ == "kernels":
    # Python was started in the repository, so this folder answers to the name `kernels`, which belongs to a
    # package on PyPI that transformers looks for. If that package is installed, hand its module over; if not,
    # say version 0, which transformers takes for "too old" and passes by (without any version some releases
    # fail).
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    _here = Path(__file__).resolve().parent.parent
    _spec = PathFinder.find_spec("kernels", [p for p in sys.path if Path(p or ".").resolve() != _here])
    if _spec is not None and _spec.loader is not None:
        sys.modules["kernels"] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["kernels"])
    else:
        __version__ = "0"
