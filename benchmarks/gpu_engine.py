"""The engine on a GPU, in under ten minutes: is it right, and how near to the hardware's limit?

    python benchmarks/gpu_engine.py --json benchmarks/results/gpu_engine.json       on a GPU: Qwen2.5-7B, random weights
    python benchmarks/gpu_engine.py --toy                                           anywhere: tiny sizes, all sections

    right          logits and greedy tokens beside transformers, on the same weights
    decode         tokens/s at batch 1 to 256 against the roofline; CUDA graphs on and off
    prefill        TFLOP/s of long prompts, beside a large matrix product
    workload       256 requests, 100 to 1,024 tokens in and out (nano-vllm's benchmark)
    transformers   its continuous batching on the same requests, several configurations
    variants       K/V in INT8, weights in 4 bits, fixed splits, attention by PyTorch

The roofline (屋顶线) is of memory: the bytes that a step must move (weights once, each sequence's K and V once) over
the bandwidth of a large copy, measured in the same run. Each section is a process of its own, so that none finds memory
taken, and the results are written after each: a run that is cut off keeps what it has.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
# In order of importance. Seconds after which a section is ended; what it has shown by then is kept.
SECTIONS = {"right": 120, "decode": 120, "workload": 90, "transformers": 120, "prefill": 45, "variants": 100}
GOALS = [
    ("decode", "batch 1: at least 75% of the roofline, aim for 85", lambda r: r["batch"] == 1 and r["graphs"], 0.75),
    ("decode", "batch 64: at least 65%", lambda r: r["batch"] == 64 and r["graphs"], 0.65),
]


def facts() -> dict:
    """Versions, the card and the commit."""
    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    import torch

    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {"gpu": card.name, "capability": f"{card.major}.{card.minor}", "memory_bytes": card.total_memory,
                  "cuda": torch.version.cuda}  # fmt: skip
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        except OSError:
            pass
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True)
        found["commit"] = commit.stdout.strip()
    except OSError:
        pass
    return found


def run_section(name: str, args: argparse.Namespace) -> dict:
    """Rows of one section, from a process of its own; "error" if it fails or runs out of time."""
    command = [sys.executable, __file__, "--work", name, "--folder", str(args.folder), "--awq-folder",
               str(args.awq_folder)] + ["--toy"] * args.toy  # fmt: skip
    rows, start = [], time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=SECTIONS[name])
        error = None if child.returncode == 0 else " | ".join(err.strip().splitlines()[-3:])
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
        error = f"ended after {SECTIONS[name]} s"
    for line in out.splitlines():
        if line.startswith("{"):
            rows.append(json.loads(line))
    return {"rows": rows, "error": error, "seconds": round(time.monotonic() - start, 1)}


def table(rows: list[dict]) -> str:
    """Rows in columns; a column for every key that any of them has."""
    names = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value) -> str:
        if isinstance(value, bool) or value is None:
            return {True: "yes", False: "no", None: "-"}[value]
        return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else (
            f"{value:,.0f}" if isinstance(value, int | float) else str(value))  # fmt: skip

    lines = [names] + [[cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  " + "  ".join(t.rjust(w) for t, w in zip(line, widths, strict=True)) for line in lines)


def goals(sections: dict) -> list[str]:
    """Each goal beside what was measured; nothing is said of what was not."""
    lines = []
    for section, text, wanted, least in GOALS:
        for row in sections.get(section, {}).get("rows", []):
            if wanted(row) and row.get("of_roofline") is not None:
                word = "reached" if row["of_roofline"] >= least else "MISSED"
                lines.append(f"{text}: {row['of_roofline']:.0%}, {word}")
    ours = [r["tokens_per_s"] for r in sections.get("workload", {}).get("rows", []) if r.get("tokens_per_s")]
    theirs = [r["tokens_per_s"] for r in sections.get("transformers", {}).get("rows", []) if r.get("tokens_per_s")]
    if ours and theirs:
        ratio = max(ours) / max(theirs)
        word = "reached" if ratio >= 2 else "MISSED"
        lines.append(f"the fastest of transformers' continuous batching, at least 2x: {ratio:.2f}x, {word}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on whatever there is; nothing is compared")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of: %(default)s")
    parser.add_argument("--model", default="Qwen2.5-7B", help="whose shape (kvlab random-model --help)")
    parser.add_argument("--folder", type=Path, help="its random weights; made if missing (default: ./work/gpu-MODEL)")
    parser.add_argument("--awq-folder", type=Path, help="the same in 4 bits (default: ./work/gpu-MODEL-awq)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    name = "toy" if args.toy else args.model
    args.folder = args.folder or Path("work") / f"gpu-{name}"
    args.awq_folder = args.awq_folder or Path("work") / f"gpu-{name}-awq"
    from gpu import sections

    if args.work:
        return sections.work(args.work, args.folder, args.awq_folder, args.toy)
    chosen = args.sections.split(",")
    if unknown := [section for section in chosen if section not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    import torch

    if not args.toy and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU here: use --toy")
    sections.make_folders(args.model, args.folder, args.awq_folder, args.toy, with_awq="variants" in chosen)
    report = {"command": " ".join(sys.argv), "toy": args.toy, "model": args.model, "machine": facts(), "sections": {}}
    for section in SECTIONS:
        if section in chosen:
            result = report["sections"][section] = run_section(section, args)
            print(f"\n{section} ({result['seconds']} s)" + (f"  ERROR: {result['error']}" if result["error"] else ""))
            print(table(result["rows"]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    report["goals"] = [] if args.toy else goals(report["sections"])
    print("", *report["goals"], sep="\n")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
