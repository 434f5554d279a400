"""What 200 idle streaming connections cost a step of the engine.

    python benchmarks/serve_idle.py [--connections 200] [--rounds 10] [--seconds 3] [--running 4] [--json FILE]

`kvlab serve` runs with `--running` seats and so many long streams in them. A connection is idle when its stream has
begun (status and headers are there, and the opening chunk) and its request waits for a seat. Rounds take turns, without
connections and with them, so both see the same machine: each counts the steps of `--seconds`, from
vllm:iteration_tokens_total at its two ends. The claim is a ratio of 1.2 at most, of the medians of the time of a step.

The clock is the server process's CPU time, all its threads, which other work on the machine stretches little; the wall's is
printed beside it, and on a quiet machine both say the same. The clients are raw sockets that sleep.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import ServerProcess


class Stream:
    """A streaming request whose answer's beginning has come."""

    def __init__(self, base: str, max_tokens: int, priority: int):
        body = json.dumps({"messages": [{"role": "user", "content": "What is a KV block?"}], "max_tokens": max_tokens,
                           "stream": True, "ignore_eos": True, "temperature": 0, "priority": priority})  # fmt: skip
        place = urlsplit(base)
        self.socket = socket.create_connection((place.hostname, place.port), timeout=120)
        head = ("POST /v1/chat/completions HTTP/1.1", f"Host: {place.netloc}", "Content-Type: application/json",
                f"Content-Length: {len(body)}", "", "")  # fmt: skip
        self.socket.sendall("\r\n".join(head).encode() + body.encode())
        seen = b""
        while b'"role"' not in seen:
            piece = self.socket.recv(4096)
            if not piece:
                raise RuntimeError(f"the server hung up: {seen!r}")
            seen += piece

    def close(self) -> None:
        self.socket.close()


def drain(streams: list[Stream]) -> None:
    """Read what has come, so that no buffer fills up."""
    for stream in streams:
        stream.socket.setblocking(False)
        try:
            while stream.socket.recv(1 << 20):
                pass
        except BlockingIOError:
            pass


def seconds_per_step(server: ServerProcess, running: list[Stream], seconds: float) -> tuple[float, float]:
    """(CPU time, time on the wall) of the steps in about `seconds`."""
    before, start = server.metrics(), time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        time.sleep(min(0.5, seconds - passed))
        drain(running)
    after, passed = server.metrics(), time.perf_counter() - start
    names = ("vllm:iteration_tokens_total_count", "process_cpu_seconds_total")
    steps, cpu = (after[name] - before[name] for name in names)
    return cpu / steps, passed / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()

    without, with_them = [], []
    with ServerProcess("--max-num-seqs", str(args.running), "--num-gpu-blocks-override", "2000") as server:
        for _ in range(args.rounds):
            running = [Stream(server.base, 1900, 0) for _ in range(args.running)]
            without.append(seconds_per_step(server, running, args.seconds))
            idle = [Stream(server.base, 8, 1) for _ in range(args.connections)]
            metrics = server.metrics()
            if metrics["vllm:num_requests_waiting"] != args.connections:
                raise RuntimeError(f"{metrics['vllm:num_requests_waiting']} wait: the streams have ended too early; "
                                   f"lower --seconds")  # fmt: skip
            with_them.append(seconds_per_step(server, running, args.seconds))
            for stream in (*idle, *running):
                stream.close()
            server.wait_until_idle()
    figures = {"connections": args.connections, "running": args.running, "rounds": args.rounds}
    for i, clock in enumerate(("cpu", "wall")):
        before, after = [each[i] for each in without], [each[i] for each in with_them]
        medians = statistics.median(before), statistics.median(after)
        figures[clock] = {
            "step_ms_without": round(1e3 * medians[0], 2), "step_ms_with": round(1e3 * medians[1], 2),
            "ratio_of_medians": round(medians[1] / medians[0], 3),
            "ratios": [round(b / a, 3) for a, b in zip(before, after, strict=True)],
        }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["cpu"]["ratio_of_medians"] <= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
