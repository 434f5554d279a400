"""The command: python -m kvlab_kernels.bench [--json FILE] [--only SECTION ...] [--toy] [--tune] [--minutes N]"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

SECTIONS = ("correctness", "graphs", "decodes", "ladder", "writes", "order", "quantised", "small", "weights",
            "prefill", "torch")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 1 if a kernel is wrong; speed is for the reader to judge."""
    parser = argparse.ArgumentParser("python -m kvlab_kernels.bench", description="Are the kernels right, and fast?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--toy", action="store_true", help="toy sizes and no times; always so without a GPU")
    parser.add_argument("--tune", action="store_true", help="instead: try sizes for configs.py; the best go to --json")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing new after so many (8)")
    args = parser.parse_args(argv)

    from kvlab_kernels.bench import correct, four_bits, small, speed, tune
    from kvlab_kernels.bench.machine import Machine, copy_bandwidth, gemm_flops
    from kvlab_kernels.bench.table import goals, table

    machine = Machine(args.toy, args.minutes)
    result = {"machine": machine.facts()}
    print("  ".join(f"{key} {value}" for key, value in result["machine"].items()))
    if machine.toy:
        print("Toy sizes: this shows that everything runs and is right. No time is taken; that needs a GPU.")
    copy, gemm = copy_bandwidth(machine), gemm_flops(machine)
    result["ceilings"] = {"copy_bytes_per_second": copy, "gemm_flops": gemm}
    if copy and gemm:
        print(f"ceilings: copy {copy / 1e12:.2f} TB/s read and written, bf16 matrix product {gemm / 1e12:.0f} TFLOP/s")
    if args.tune:
        sections = {"decode sizes": partial(tune.decode_sizes, machine, copy),
                    "varlen sizes": partial(tune.varlen_sizes, machine, gemm),
                    "awq sizes": partial(tune.awq_sizes, machine, copy)}  # fmt: skip
    else:
        sections = {
            "correctness": partial(correct.correctness, machine),
            "graphs": partial(correct.replays, machine),
            "decodes": partial(speed.decodes, machine, copy),
            "ladder": partial(speed.ladder, machine, copy),
            "writes": partial(speed.writes, machine, copy),
            "order": partial(speed.order_of_pages, machine, copy),
            "quantised": partial(speed.quantised, machine, copy),
            "small": partial(small.small_kernels, machine, copy),
            "weights": partial(four_bits.products, machine, copy),
            "prefill": partial(speed.prefill, machine, gemm),
            "torch": partial(speed.torch_attention, machine, copy),  # last: FlexAttention may compile for a minute
        }
    found: dict[str, list[dict]] = {}
    result["sections"] = found
    for name, run in sections.items():
        if args.only and name not in args.only:
            continue
        began = time.monotonic()
        try:
            found[name] = [] if machine.out_of_time() else run()
        except Exception as error:  # of the GPU, most likely: what was found before is kept
            found[name] = [{"section": name, "right": False, "note": correct.describe(error)}]
        print(f"\n{name} ({time.monotonic() - began:.0f} s)\n{table(name, found[name])}", flush=True)
        write(args.json, result)
    if args.tune:
        result["best"] = tune.best(machine, found)
        print(f"\nbest: {json.dumps(result['best'])}")
    else:
        result["goals"] = goals(found)
        print(f"\ngoals\n{table('goals', result['goals'])}")
    write(args.json, result)
    return int(not all(row.get("right", True) for rows in found.values() for row in rows))


def write(path: Path | None, result: dict) -> None:
    """After each section, so that a run that is cut short leaves what it found."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
