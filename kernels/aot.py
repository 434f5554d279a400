"""What the compiler makes of the kernels, for GPUs that are not here: registers, spills, tensor cores.

    python -m kvlab_kernels.aot [--arch 80 89 90] [--check | --write]

Each launcher is called in the engine's configuration for Qwen2.5-7B (28 query heads, 4 KV heads, head dim 128, block
size 16, bf16) with a driver that has no GPU: Triton specialises and compiles to machine code as it would there, and
nothing runs. NVIDIA's cuobjdump, which comes with Triton, then says what is in the code:

    regs         registers of a thread; 255 at most. The more, the fewer programs run at once
    stack, spill bytes on the stack, and instructions that save registers there (STL) and load them back (LDL): none
    shared       bytes of shared memory of a program
    mma          matrix instructions on tensor cores: HMMA; HGMMA on Hopper, UTCHMMA on Blackwell
    wide         global loads of 128 bits, the widest there are

--check compares with aot_budget.json: not more registers and shared memory than there, no spills, tensor cores where
tl.dot is, and wide loads. Under another Triton than the budget's, only spills, tensor cores and the GPU's shared
memory are looked at. --write writes it anew.

A process either interprets kernels or compiles them, so this is a process of its own.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BUDGET = Path(__file__).with_name("aot_budget.json")
ARCHS = (80, 89, 90)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 4, 128, 16
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that one program may use
HIDDEN, INTERMEDIATE = 3584, 18944
DOT = ("gqa_packed_kernel", "split_kernel", "varlen_kernel", "awq_matmul_kernel")  # the kernels with tl.dot


class Report(NamedTuple):
    """What is in one compiled kernel."""

    regs: int
    stack: int
    spill: int
    shared: int
    mma: int
    wide: int


@contextlib.contextmanager
def compiling_for(arch: int) -> Iterator[list]:
    """Launches inside compile for `arch` and run nothing. Yields the list of (label, compiled kernel) that they fill.

    The tensors lie on the CPU. The driver without a GPU stays when this ends: the process can launch nothing any more.
    RuntimeError if it interprets kernels.
    """
    import torch

    from kvlab_kernels import launch

    if launch.INTERPRETED:
        raise RuntimeError("this process interprets kernels: start Python with TRITON_INTERPRET=0 to compile them")
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoGPU(DriverBase):
        """As much of a driver as the compiler asks."""

        def __init__(self):
            pass

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_benchmarker(self):
            raise RuntimeError("there is no GPU to time anything on")

        def get_current_device(self):
            return arch  # Triton keeps what it has compiled by device

        def get_current_stream(self, device=None):
            return 0

    compiled = []
    run = JITFunction.run

    def compile_instead(self, *args, grid, warmup, **kwargs):
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run, launch.compile_only = compile_instead, True
    driver.set_active(NoGPU())
    try:
        yield compiled
    finally:
        JITFunction.run, launch.compile_only = run, False


def launch_all(arch: int) -> Iterator[str]:
    """Every launcher once, as the engine calls it on that architecture. Yields what the last launches were for."""
    import torch

    from kvlab_kernels import (
        awq_matmul,
        block_copy,
        cache_write,
        configs,
        gather,
        gqa_packed,
        naive,
        online_softmax,
        quantized,
        rms_norm,
        rope_cache,
        split_kv,
        swiglu,
        varlen,
    )

    def bf16(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    num_seqs, width, rows = 3, 64, 200
    kv = bf16(2, 64, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    qkv = bf16(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)  # a fused projection, of which q, k and v are slices
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    tables = torch.zeros(num_seqs, width, dtype=torch.int32)
    lens = torch.full((num_seqs,), 100, dtype=torch.int32)
    decode = (q[:num_seqs], kv, tables, lens)
    cache_write.reshape_and_cache(k, v, kv, torch.arange(rows))
    gather.gather_pages(kv, tables, lens, 100)
    naive.naive_attention(*decode)
    online_softmax.online_softmax_attention(*decode)
    config = configs.decode_config(arch, HEAD_DIM)
    gqa_packed.gqa_packed_attention(*decode, config=config)
    split_kv.split_kv_attention(*decode, num_splits=8, config=config)
    starts = torch.tensor([0, 1, 2, 30], dtype=torch.int32)
    shape = (arch, HEAD_DIM, HEADS // KV_HEADS)
    short, long = (configs.varlen_config(*shape, longest) for longest in (1, 1024))
    varlen.varlen_attention(q, kv, tables, lens, starts, config=short)
    block_copy.copy_blocks(block_copy.pieces_of([kv, kv]), [(1, 2)])
    x, weight, table = bf16(rows, HIDDEN), bf16(HIDDEN), bf16(4096, 1, HEAD_DIM)
    rope = (q, k, v, table, table, torch.arange(rows))
    rope_cache.rope_and_cache(*rope, kv, torch.arange(rows))
    rms_norm.rms_norm(x, weight, 1e-6)
    swiglu.swiglu(*bf16(rows, 2 * INTERMEDIATE).chunk(2, dim=1))

    def four_bits(n):
        groups = HIDDEN // 128
        zeros = torch.empty(groups, n // 8, dtype=torch.int32)
        words = torch.empty(HIDDEN // 8, n, dtype=torch.int32)
        return awq_matmul.AWQWeight(words, torch.empty(groups, n, dtype=torch.float16), zeros, HIDDEN)

    gate_up, qkv_out = four_bits(2 * INTERMEDIATE), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    awq_matmul.awq_matmul(x[:1], gate_up)
    awq_matmul.dequantize(gate_up, x.dtype)
    yield ""
    awq_matmul.awq_matmul(x[:1], four_bits(qkv_out), bf16(qkv_out))
    yield "splits"
    for num_rows in (32, 64):
        awq_matmul.awq_matmul(x[:num_rows], gate_up)
        yield f"{num_rows} rows"
    rms_norm.add_rms_norm(x, bf16(rows, HIDDEN), weight, 1e-6)
    yield "add"
    rms_norm.rms_norm(qkv[:, :-KV_HEADS], bf16(HEADS + KV_HEADS, HEAD_DIM), 1e-6)  # of q and k, as Qwen3 has it
    yield "heads"
    varlen.varlen_attention(q, kv, tables, lens, starts, config=long)
    yield "prefill"
    scales = torch.empty(kv.shape[:4])
    config = configs.decode_config(arch, HEAD_DIM, quantized=True)
    short, long = (configs.varlen_config(*shape, longest, quantized=True) for longest in (1, 1024))
    for dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "fp8")):
        if name == "fp8" and arch < 89:
            continue
        small = kv.to(dtype)
        quantized.quantize_and_cache(k, v, small, scales, torch.arange(rows))
        rope_cache.rope_and_cache(*rope, small, torch.arange(rows), scales=scales)
        decode = (q[:num_seqs], small, tables, lens)
        split_kv.split_kv_attention(*decode, scales=scales, num_splits=8, config=config)
        varlen.varlen_attention(q, small, tables, lens, starts, scales=scales, config=short)
        yield name
        varlen.varlen_attention(q, small, tables, lens, starts, scales=scales, config=long)
        yield f"{name}, prefill"


def reports(arch: int) -> dict[str, Report]:
    """Compile all for one architecture -> kernel's name, and in brackets what for if that matters: what is in it."""
    found: dict[str, Report] = {}
    seen = set()
    with compiling_for(arch) as compiled:
        for purpose in launch_all(arch):
            for name, kernel in compiled:
                if kernel.hash not in seen:
                    found[f"{name} ({purpose})" if purpose else name] = inspect(kernel)
                seen.add(kernel.hash)
            compiled.clear()
    return found


def inspect(kernel) -> Report:
    """Look into a compiled kernel with cuobjdump."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage, sass = (
            subprocess.run([cuobjdump, option, cubin], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    fields = dict(field.split(":") for field in usage.split("Function")[-1].split() if field.count(":") == 1)
    code = [line.split("*/")[1].split() for line in sass.splitlines() if line.count("*/") > 1]
    opcodes = [next((word for word in words if not word.startswith("@")), "") for words in code]
    return Report(
        regs=int(fields["REG"]),
        stack=int(fields["STACK"]),
        spill=sum(op.startswith(("STL", "LDL")) for op in opcodes),
        shared=kernel.metadata.shared,
        mma=sum("HMMA" in op or "HGMMA" in op for op in opcodes),
        wide=sum(op.startswith(("LDG", "LDGSTS")) and ".128" in op for op in opcodes),
    )


def faults(arch: int, found: dict[str, Report], budget: dict, version: str) -> list[str]:
    """What is not as the budget has it, one sentence each."""
    wrong = []
    same = version == budget["triton"]
    for name, report in found.items():
        where = f"sm_{arch} {name}"
        if report.spill or report.stack:
            wrong.append(f"{where}: {report.spill} spills, {report.stack} bytes of stack: make its tile smaller")
        if report.shared > SHARED_MEMORY[arch] * 1024:
            wrong.append(f"{where}: {report.shared} bytes of shared memory, the GPU has {SHARED_MEMORY[arch]} KiB")
        if name.split()[0] in DOT and not report.mma:
            wrong.append(f"{where}: tl.dot does not run on tensor cores")
        if not same:
            continue
        allowed = budget["kernels"].get(str(arch), {}).get(name)
        if allowed is None:
            wrong.append(f"{where}: has no budget: run with --write")
            continue
        for what in ("regs", "shared"):
            if getattr(report, what) > allowed[what]:
                wrong.append(f"{where}: {what} {getattr(report, what)}, the budget is {allowed[what]}")
        if report.wide < allowed["wide"]:
            wrong.append(f"{where}: {report.wide} loads of 128 bits, the budget has {allowed['wide']}: a hint was lost")
    return wrong


def table(arch: int, found: dict[str, Report]) -> str:
    """One architecture's reports in columns."""
    head = f"sm_{arch:<26}" + "".join(f"{name:>8}" for name in Report._fields)
    rows = [f"  {name:<27}" + "".join(f"{value:>8}" for value in report) for name, report in found.items()]
    return "\n".join([head, *rows])


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status: 1 if --check found a fault."""
    parser = argparse.ArgumentParser(prog="python -m kvlab_kernels.aot", description="Compile kernels without a GPU.")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, choices=SHARED_MEMORY, help="80: A100, 90: H200")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with aot_budget.json")
    action.add_argument("--write", action="store_true", help="write aot_budget.json anew")
    args = parser.parse_args(argv)
    os.environ["TRITON_INTERPRET"] = "0"
    import triton

    found = {arch: reports(arch) for arch in args.arch}
    for arch in args.arch:
        print(table(arch, found[arch]))
    if args.write:
        kernels = {arch: {name: report._asdict() for name, report in found[arch].items()} for arch in found}
        text = json.dumps({"triton": triton.__version__, "kernels": kernels}, indent=1)
        BUDGET.write_text(text + "\n", encoding="utf-8")
    if not args.check:
        return 0
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    wrong = [line for arch in found for line in faults(arch, found[arch], budget, triton.__version__)]
    print("\n".join(wrong) if wrong else f"Triton {triton.__version__}: within the budget of {budget['triton']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
