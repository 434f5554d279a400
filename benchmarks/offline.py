"""Offline throughput beside peers: the same requests, the same weights, engines taking turns in one run.

    python benchmarks/offline.py --model tiny [--threads 1] [--rounds 5] [--engines kvlab,hf-continuous,hf-static8]

kvlab             this project, as `LLM(...)` comes, prefix caching off
hf-continuous     transformers' continuous batching, attention "paged|sdpa"
hf-static8        transformers' generate in batches of 8
vllm              vLLM's CPU build, where it can be imported

fp32, greedy, forced output lengths, all requests at once. Each engine lives in a process of its own and waits
while the others run. The rule for busy machines, set before looking at results: a run counts only if its process
had at least 0.95 x threads cores (its CPU seconds over its wall seconds); rounds go on until every engine has
`--rounds` runs that count, or three times as many tries. Prints medians and ratios, and writes JSON with machine and
versions.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARE = 0.95  # of `threads` cores that a run must have had


def kvlab_engine(folder: str, seats: int):
    from kvlab import LLM, SamplingParams

    llm = LLM(folder, enable_prefix_caching=False, max_num_seqs=seats, max_num_batched_tokens=512, max_model_len=512)

    def run(requests):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests]
        return [o.outputs[0].token_ids for o in llm.generate([p for p, _ in requests], params)]

    return run


def load_transformers(folder: str, attention: str | None = None):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    options = {"attn_implementation": attention} if attention else {}
    return torch, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def hf_static8(folder: str, seats: int):
    torch, model = load_transformers(folder)

    def run(requests):
        outputs = []
        for i in range(0, len(requests), 8):
            batch = requests[i : i + 8]
            width, longest = max(len(p) for p, _ in batch), max(n for _, n in batch)
            ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
            with torch.inference_mode():
                rows = model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest,
                                      do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip
            outputs += [row[width : width + n].tolist() for row, (_, n) in zip(rows, batch, strict=True)]
        return outputs

    return run


def hf_continuous(folder: str, seats: int):
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    _, model = load_transformers(folder, "paged|sdpa")

    def run(requests):
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=128),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=32, num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=seats,
                allow_block_sharing=False, use_cuda_graph=False, auto_switch_to_flash=False),
        )  # fmt: skip
        manager.start()
        try:
            run.start = clock()  # its start-up does not count against it
            ids = [manager.add_request(p, max_new_tokens=n, eos_token_id=-1) for p, n in requests]
            done = {}
            while len(done) < len(ids):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("transformers' generation thread has died")
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
            run.end = clock()
        finally:
            manager.stop(block=True, timeout=10)
        return [done[i] for i in ids]

    return run


def vllm_engine(folder: str, seats: int):
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, dtype="float32", max_model_len=512, max_num_seqs=seats, max_num_batched_tokens=512,
              enable_prefix_caching=False, skip_tokenizer_init=True)  # fmt: skip

    def run(requests):
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
        outputs = llm.generate([{"prompt_token_ids": p} for p, _ in requests], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return run


ENGINES = {"kvlab": kvlab_engine, "hf-continuous": hf_continuous, "hf-static8": hf_static8, "vllm": vllm_engine}


def clock() -> tuple[float, float]:
    """(wall, CPU) seconds of this process."""
    return time.perf_counter(), sum(os.times()[:4])


def work(engine: str, model: str, folder: str, threads: int) -> None:
    """The child: load, warm up, then one timed run for each line on stdin; one JSON line each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines chatter on stdout
    import torch
    from workload import make_requests

    torch.set_num_threads(threads)
    requests = make_requests(model)
    run = ENGINES[engine](folder, len(requests))
    run([(p, min(n, 4)) for p, n in requests[:4]])
    print(json.dumps("ready"), file=out, flush=True)
    for _ in sys.stdin:
        start = clock()
        outputs = run(requests)
        end = clock()
        start, end = getattr(run, "start", start), getattr(run, "end", end)
        wall, cpu = end[0] - start[0], end[1] - start[1]
        print(json.dumps({"wall_s": wall, "cores": cpu / wall, "outputs": outputs}), file=out, flush=True)


class Child:
    def __init__(self, engine: str, args, folder: Path):
        env = dict(os.environ, OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads),
                   HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH=str(HERE.parent))  # fmt: skip
        command = [sys.executable, __file__, "--work", engine, "--model", args.model, "--folder", str(folder),
                   "--threads", str(args.threads)]  # fmt: skip
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.DEVNULL if not args.verbose else None)  # fmt: skip

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args[3]} died; run with --verbose to see why")
        return json.loads(line)

    def run(self) -> dict:
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return self.answer()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def processor() -> str:
    """The CPU's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "small"), default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default="kvlab,hf-continuous,hf-static8,vllm")
    parser.add_argument("--folder", type=Path, help="where the random model is kept (default: ./work/bench-MODEL)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder or Path("work") / f"bench-{args.model}"
    if args.work:
        return work(args.work, args.model, str(folder), args.threads)

    from workload import make_model, make_requests

    make_model(args.model, folder)
    children = {}
    for engine in args.engines.split(","):
        child = Child(engine, args, folder)
        try:
            child.answer()
            children[engine] = child
        except RuntimeError as error:
            print(f"{engine}: left out ({error})")
    tokens = sum(n for _, n in make_requests(args.model))
    counted = {engine: [] for engine in children}
    dropped, outputs = dict.fromkeys(children, 0), {}
    for _ in range(3 * args.rounds):
        for engine, child in children.items():
            if len(counted[engine]) < args.rounds:
                result = child.run()
                outputs[engine] = result.pop("outputs")
                ok = result["cores"] >= SHARE * args.threads
                counted[engine] += [result["wall_s"]] if ok else []
                dropped[engine] += not ok
                note = "" if ok else "  dropped"
                print(f"  {engine:14} {result['wall_s']:7.3f} s, {result['cores']:.2f} cores{note}", flush=True)
    for child in children.values():
        child.process.kill()

    reference = outputs["hf-static8"] if "hf-static8" in outputs else next(iter(outputs.values()))
    rows = {}
    for engine, walls in counted.items():
        agree = sum(a == b for a, b in zip(outputs[engine], reference, strict=True))
        rows[engine] = {
            "runs": len(walls), "dropped": dropped[engine], "wall_s": walls, "agree": f"{agree}/{len(reference)}",
            "tokens_per_s": round(tokens / statistics.median(walls), 1) if walls else None,
        }  # fmt: skip
    base = rows.get("hf-continuous", {}).get("tokens_per_s")
    print(f"\n{args.model}, {args.threads} thread(s): {tokens} output tokens")
    for engine, row in rows.items():
        ratio = f"{row['tokens_per_s'] / base:5.2f} x hf-continuous" if base and row["tokens_per_s"] else ""
        note = f"median of {row['runs']}, {row['dropped']} dropped, {row['agree']} outputs equal"
        print(f"{engine:14} {row['tokens_per_s']} tokens/s  {ratio}  ({note})")
    if args.json:
        report = {"command": " ".join(sys.argv), "model": args.model, "threads": args.threads, "rule_min_cores": SHARE,
                  "engines": rows, "cpu": processor(), "cores": os.cpu_count(), "versions": versions()}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
