"""The same source under Triton itself: interpreted (or compiled, on a GPU), and through the compiler for GPUs not here.

    under_triton(kernel)[grid](arrays...)             kernel: made by the stand-in's @triton.jit
    compile_report(kernel, grid, args, variants)      registers, spills, load widths: what the compiler makes of it

A kernel's function is made anew with Triton's `tl` and `triton` in the place of ours, and so are the kernels that it
calls. ImportError where Triton is not installed.
"""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from kvlab.standin.launch import Kernel, tl, triton


def has_triton() -> bool:
    """Whether Triton and torch are installed here, and our kernels' package with them."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "triton", "kvlab_kernels"))


class UnderTriton:
    """A kernel of the stand-in's, launched under Triton. Arrays of NumPy go in, and results come back in them."""

    def __init__(self, kernel: Kernel):
        from kvlab_kernels.launch import INTERPRETED

        self.kernel, self.interpreted = _translated(kernel, {}), INTERPRETED

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            import torch

            moved: dict[int, tuple[np.ndarray, Any]] = {}

            def tensor(x: Any) -> Any:
                if not isinstance(x, np.ndarray):
                    return x
                if id(x) not in moved:
                    made = torch.from_numpy(x)
                    moved[id(x)] = x, made if self.interpreted else made.cuda()
                return moved[id(x)][1]

            self.kernel[grid](*map(tensor, args), **{name: tensor(x) for name, x in kwargs.items()})
            if not self.interpreted:
                for array, copy in moved.values():
                    array[...] = copy.cpu().numpy()

        return run


def under_triton(kernel: Kernel) -> UnderTriton:
    """The kernel, to be launched by Triton. ImportError, with the remedy, where it is not installed."""
    return UnderTriton(kernel)


def _translated(kernel: Kernel, done: dict[int, Any]) -> Any:
    from kvlab_kernels.launch import tl as real_tl
    from kvlab_kernels.launch import triton as real_triton

    if id(kernel) not in done:
        space: dict[str, Any] = dict(kernel.fn.__globals__)
        fn = FunctionType(kernel.fn.__code__, space, kernel.fn.__name__, kernel.fn.__defaults__, kernel.fn.__closure__)
        fn.__kwdefaults__, fn.__module__ = kernel.fn.__kwdefaults__, kernel.fn.__module__
        annotations = kernel.fn.__annotations__.items()
        fn.__annotations__ = {name: real_tl.constexpr for name, a in annotations if a is tl.constexpr}
        done[id(kernel)] = real_triton.jit(fn)
        for name in kernel.fn.__code__.co_names:
            value = space.get(name)
            if value is tl or value is triton:
                space[name] = real_tl if value is tl else real_triton
            elif isinstance(value, Kernel):
                space[name] = _translated(value, done)
    return done[id(kernel)]


# ---- the compiler

SCRIPT = """
import json, sys
from kvlab_kernels import aot
import torch
import kernel_source as source

request = json.loads(sys.argv[1])
args = request["args"]
args = [torch.empty(a["shape"], dtype=getattr(torch, a["dtype"])) if isinstance(a, dict) else a for a in args]
found = []
with aot.compiling_for(request["arch"]) as compiled:
    for unhinted in request["variants"]:
        kernel = source.triton.jit(do_not_specialize=unhinted)(getattr(source, request["name"]).fn)
        kernel[tuple(request["grid"])](*args, **request["keywords"])
        made = compiled[-1][1]
        spaces = {space: made.asm["ptx"].count("ld." + space) for space in ("global", "const", "shared")}
        found.append(aot.inspect(made)._asdict() | {"loads": spaces})
print(json.dumps(found))
"""


def compile_report(kernel: Kernel, grid: tuple, args: tuple, variants: list[tuple[str, ...]], *, arch: int = 90,
                   **keywords: Any) -> list[dict[str, Any]]:  # fmt: skip
    """What the compiler makes of a kernel for a GPU of that architecture (90: H100, H200), in a process of its own.

    args: numbers, and for arrays anything with a shape and a dtype (torch's name of it). variants: for each, names of
    arguments of which the compiler is not to know that 16 divides them; () is as usual. -> for each variant
    kvlab_kernels.aot.Report as a dict, and `loads`: how many load instructions of each memory space the PTX has.
    ImportError without Triton; RuntimeError, with the compiler's words, if it refuses the kernel.
    """
    if not has_triton():
        raise ImportError("the compiler comes with Triton, which is not installed here", name="triton")
    plain = [{"shape": list(arg.shape), "dtype": str(arg.dtype)} if hasattr(arg, "dtype") else arg for arg in args]
    request = {"name": kernel.fn.__name__, "grid": grid, "args": plain, "keywords": keywords, "arch": arch,
               "variants": variants}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        text = "\n\n".join(_sources(kernel, {}).values())
        Path(folder, "kernel_source.py").write_text(f"import triton\nimport triton.language as tl\n\n{text}")
        Path(folder, "run.py").write_text(SCRIPT)
        path = os.pathsep.join([folder, *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, str(Path(folder, "run.py")), json.dumps(request)], capture_output=True, text=True,
            env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}, timeout=170,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError("the compiler refuses this kernel:\n" + "\n".join(done.stderr.strip().splitlines()[-12:]))
    return json.loads(done.stdout.strip().splitlines()[-1])


def _sources(kernel: Kernel, found: dict[str, str]) -> dict[str, str]:
    """Name -> source, of the kernels and numbers that `kernel` uses and, last, of itself."""
    for name in kernel.fn.__code__.co_names:
        value = kernel.fn.__globals__.get(name)
        if isinstance(value, Kernel) and value.fn.__name__ not in found:
            _sources(value, found)
        elif isinstance(value, int | float):
            found[name] = f"{name} = tl.constexpr({value!r})"
    lines = textwrap.dedent(inspect.getsource(kernel.fn)).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("def "))
    found[kernel.fn.__name__] = "\n".join(["@triton.jit", *lines[begin:]])
    return found
