"""What 200 idle streaming connections cost a step of the engine.

    python benchmarks/serve_idle.py [--connections 200] [--rounds 10] [--steps 300] [--running 4] [--json FILE]

`kvlab serve` runs with `--running` seats and so many long streams in them. A connection is idle when its stream has
begun (status and headers are there, and the opening chunk) and its request waits for a seat. Rounds take turns,
without connections and with them, so that both see the same machine, and both measure the same steps: the first
`--steps` of new streams, because a step takes longer as contexts grow. The claim is a ratio of 1.2 at most, of the
medians of a step's time.

The clock is the server process's CPU time, of all its threads, which other work on the machine stretches little; the
wall's is printed beside it. The clients are raw sockets that sleep.
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

from serving import ServerProcess, where


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


def read_events(streams: list[Stream], number: int) -> None:
    """Read until the first of `streams` has brought so many events; the others, so that no buffer fills up."""
    seen = 0
    while seen < number:
        piece = streams[0].socket.recv(1 << 16)
        if not piece:
            raise RuntimeError("the server hung up")
        seen += piece.count(b"data: ")
        for stream in streams[1:]:
            try:
                stream.socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass


def measure(server: ServerProcess, num_running: int, num_idle: int, steps: int) -> tuple[float, float]:
    """(CPU time, time on the wall) of a step, of the first `steps` of new streams beside idle ones; nothing is left."""
    sitting = [Stream(server.base, 1900, -1) for _ in range(num_running)]  # keep the seats while the others come
    idle = [Stream(server.base, 8, 1) for _ in range(num_idle)]
    running = [Stream(server.base, 1900, 0) for _ in range(num_running)]
    for stream in sitting:
        stream.close()
    read_events(running, 10)
    before, start = server.metrics(), time.perf_counter()
    read_events(running, steps)
    after, passed = server.metrics(), time.perf_counter() - start
    if after["vllm:num_requests_waiting"] != num_idle:
        raise RuntimeError(f"{after['vllm:num_requests_waiting']:.0f} wait and not {num_idle}: lower --steps")
    for stream in (*idle, *running):
        stream.close()
    server.wait_until_idle()
    names = ("vllm:iteration_tokens_total_count", "process_cpu_seconds_total")
    num_steps, cpu = (after[name] - before[name] for name in names)
    return cpu / num_steps, passed / num_steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()

    without, with_them = [], []
    with ServerProcess("--max-num-seqs", str(args.running), "--num-gpu-blocks-override", "2000") as server:
        for number in range(args.rounds):
            order = [(0, without), (args.connections, with_them)]
            for connections, times in order if number % 2 else reversed(order):
                times.append(measure(server, args.running, connections, args.steps))
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
        args.json.write_text(json.dumps(where() | figures, indent=1) + "\n")
    return 0 if figures["cpu"]["ratio_of_medians"] <= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
