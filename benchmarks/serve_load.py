"""The server under load: many streaming clients, some of whom leave at a random moment.

    python benchmarks/serve_load.py [--clients 200] [--requests 2000] [--leave 0.333] [--json FILE]

`kvlab serve` with the shipped model runs in a process of its own; the clients are the official openai client, in this
one. They ask the questions of the glossary, two of three greedily, one with a seed and some heat, each with its own
max_tokens and one of three priorities, so that some preempt others. Those who leave do so before the first token, while
they wait or after some pieces. Then it is checked, and the exit code is 1 unless all of it holds:

- every answer that came to its end equals what LLM.chat gives for the same request without a server;
- nobody who stayed was refused or cut off;
- the gauges return to zero, and with them the share of blocks in use: no block is lost;
- the server's memory grows by at most --growth in the second half of the requests;
- SIGTERM ends it with exit code 0.

Times are of this machine, with client and server on the same cores: for comparison within one run only.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from openai import APIError, AsyncOpenAI
from serving import ROOT, ServerProcess, where

# Fewer seats than clients: requests of higher priority preempt others, whose K/V is swapped or computed again.
FLAGS = ("--max-num-seqs", "32", "--num-gpu-blocks-override", "140", "--swap-space", "0.005")


@dataclass(frozen=True)
class Ask:
    """What a client asks."""

    question: str
    max_tokens: int
    temperature: float
    seed: int

    def params(self) -> dict:
        return {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass
class Tally:
    """What became of the requests."""

    ends: Counter = field(default_factory=Counter)
    answers: list[tuple[Ask, str]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # seconds to the first piece, of those who stayed
    errors: list[str] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)  # of the server, bytes, after each tenth


def make_asks(number: int, seed: int = 0) -> list[Ask]:
    """`number` different requests."""
    rng = random.Random(seed)
    lines = (ROOT / "kvlab" / "tiny" / "glossary.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    return [
        Ask(questions[i % len(questions)], rng.randint(2, 24) if i % 4 else 70, 0.0 if i % 3 else 0.8, i)
        for i in range(number)
    ]


def answer_offline(asks: list[Ask]) -> dict[Ask, str]:
    import torch

    from kvlab import LLM, SamplingParams

    torch.set_num_threads(1)
    llm = LLM("tiny", max_num_seqs=64, num_gpu_blocks_override=600)
    conversations = [[{"role": "user", "content": ask.question}] for ask in asks]
    outputs = llm.chat(conversations, [SamplingParams(**ask.params()) for ask in asks])
    return {ask: output.outputs[0].text for ask, output in zip(asks, outputs, strict=True)}


async def ask_one(client: AsyncOpenAI, ask: Ask, leave_after: int | None, tally: Tally) -> None:
    """Read an answer to its end, or `leave_after` pieces of it."""
    start, text, reason, num_pieces = time.perf_counter(), "", None, 0
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": ask.question}], stream=True,
        extra_body={"priority": ask.seed % 3}, **ask.params()
    )  # fmt: skip
    async with stream:
        if leave_after == 0:
            tally.ends["left"] += 1
            return
        async for chunk in stream:
            num_pieces += 1
            if num_pieces == 2:  # the first has the role alone
                seconds = time.perf_counter() - start
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
            if leave_after is not None and num_pieces >= leave_after and reason is None:
                tally.ends["left"] += 1
                return
    tally.ends[reason] += 1
    tally.answers.append((ask, text))
    tally.first.append(seconds)


async def run(server: ServerProcess, asks: list[Ask], args: argparse.Namespace) -> Tally:
    """`--clients` workers that take one request after the other until all have been made."""
    rng, tally = random.Random(1), Tally()
    todo = [
        (rng.choice(asks), rng.random() < args.leave, rng.random(), rng.randint(0, 8)) for _ in range(args.requests)
    ]
    marks = {args.requests * i // 10 for i in range(1, 11)}
    num_ended = 0
    client = AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=600)

    async def work() -> None:
        nonlocal num_ended
        while todo:
            ask, leaves, moment, pieces = todo.pop()
            try:
                if leaves and moment < 0.5:  # hang up after a time, wherever the request is by then
                    async with asyncio.timeout(moment * 0.4):
                        await ask_one(client, ask, None, tally)
                else:
                    await ask_one(client, ask, pieces if leaves else None, tally)
            except TimeoutError:
                tally.ends["left"] += 1
            except APIError as error:
                tally.errors.append(f"{type(error).__name__}: {error}")
            num_ended += 1
            if num_ended in marks:
                metrics = await asyncio.to_thread(server.metrics)
                tally.rss.append(metrics.get("process_resident_memory_bytes", 0.0))

    async with client:
        await asyncio.gather(*(work() for _ in range(args.clients)))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--different", type=int, default=240, help="how many of the requests are different")
    parser.add_argument("--leave", type=float, default=1 / 3, help="the share of those who leave")
    parser.add_argument("--growth", type=float, default=16.0, help="MiB of memory in the second half")
    parser.add_argument("--json", type=Path, help="write the figures")
    args = parser.parse_args()

    asks = make_asks(args.different)
    expected = answer_offline(asks)
    with ServerProcess(*FLAGS) as server:
        start = time.perf_counter()
        tally = asyncio.run(run(server, asks, args))
        seconds = time.perf_counter() - start
        metrics = server.wait_until_idle()
    wrong = [(ask, text) for ask, text in tally.answers if text != expected[ask]]
    half = tally.rss[len(tally.rss) // 2 :]
    growth = (half[-1] - half[0]) / 2**20 if half else 0.0
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    figures = {
        "clients": args.clients, "requests": args.requests, "seconds": round(seconds, 1),
        "completed": len(tally.answers), "left": tally.ends["left"], "refused_or_failed": len(tally.errors),
        "equal_to_offline": len(tally.answers) - len(wrong),
        "requests_per_second": round(args.requests / seconds, 1),
        "tokens_per_second": round(metrics["vllm:generation_tokens_total"] / seconds, 1),
        "first_piece_median_s": round(statistics.median(tally.first), 3),
        "aborted_in_the_engine": metrics["vllm:request_success_total"] - len(tally.answers),
        "preemptions": metrics["vllm:num_preemptions_total"],
        "gauges": [metrics[name] for name in gauges],
        "rss_mib": [round(each / 2**20, 1) for each in tally.rss], "growth_second_half_mib": round(growth, 1),
        "exit_code": server.exit_code,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    for ask, text in wrong[:3]:
        print(f"{ask}: {text!r} and not {expected[ask]!r}", file=sys.stderr)
    for error in tally.errors[:3]:
        print(error, file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(where() | figures, indent=1) + "\n")
    ended = len(tally.answers) + tally.ends["left"] == args.requests
    holds = ended and not wrong and not tally.errors and not any(figures["gauges"])
    return 0 if holds and growth <= args.growth and server.exit_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
