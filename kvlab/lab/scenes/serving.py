"""A server under load (lab 14): clients that come at random times and may leave, and somebody who watches the pool.

    asks(rate, seconds, seed) --Load(server, asks)--> visits: when each came, read its first and last token, left
    Watch(server, every)                          --> moments: running, waiting, blocks held, cached, free
    rounds(server, num_clients, seconds)          --> visits of clients who ask again as soon as they are answered

Server and clients share the process, so times are for comparison within one run.
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab.serve.reading import EventReader
from kvlab.tiny import load_glossary


@dataclass(frozen=True)
class Ask:
    """What a client does. at: seconds after the start. leave_after: pieces after which it hangs up; None: it stays."""

    at: float
    question: str
    max_tokens: int
    leave_after: int | None = None


@dataclass
class Visit:
    """What became of an ask. Times are seconds after the start; first: of the first piece; num_pieces: read."""

    ask: Ask
    arrival: float
    first: float | None = None
    last: float = 0.0
    num_pieces: int = 0
    left: bool = False
    refused: int = 0  # the HTTP status, if it was not 200

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def latency(self) -> float:
        return self.last - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds from piece to piece; None with fewer than two."""
        return (self.last - self.first) / (self.num_pieces - 1) if self.num_pieces > 1 else None


@dataclass(frozen=True)
class Moment:
    """The engine between two steps. time: seconds after the start; blocks without the null block."""

    time: float
    running: int
    waiting: int
    held: int
    cached: int
    free: int
    owners: tuple[str, ...] = ()  # of each block: a request's id, "shared", "cached" or ""


def asks(rate: float, seconds: float, seed: int = 0, leaving: float = 1 / 3,
         tokens: tuple[int, int] = (16, 96)) -> list[Ask]:  # fmt: skip
    """Clients as a Poisson process of `rate` a second; a share of `leaving` hangs up after 1 to 15 pieces."""
    rng, found, now = random.Random(seed), [], 0.0
    questions = [entry["question"] for entry in load_glossary()]
    while (now := now + rng.expovariate(rate)) < seconds:
        leave_after = rng.randint(1, tokens[0] - 1) if rng.random() < leaving else None
        found.append(Ask(now, rng.choice(questions), rng.randint(*tokens), leave_after))
    return found


class Load:
    """Clients on a thread of their own; started when made. make_reader: what splits a stream into events."""

    def __init__(self, server: Any, asks: Sequence[Ask], make_reader: Callable[[], Any] = EventReader):
        self.visits: list[Visit] = []
        self.began = time.monotonic()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(server, asks, make_reader), daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> list[Visit]:
        """Wait for all; their visits, in the order in which they came."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.visits

    def _run(self, *args: Any) -> None:
        try:
            asyncio.run(self._all(*args))
        except BaseException as error:
            self._error = error

    async def _all(self, server: Any, asks: Sequence[Ask], make_reader: Callable[[], Any]) -> None:
        async with _client(server) as client:

            async def one(ask: Ask) -> None:
                await asyncio.sleep(max(0.0, ask.at - (time.monotonic() - self.began)))
                self.visits.append(await _visit(client, server.model, ask, self.began, make_reader))

            await asyncio.gather(*(one(ask) for ask in asks))
        self.visits.sort(key=lambda visit: visit.arrival)


def rounds(server: Any, num_clients: int, seconds: float, max_tokens: int = 40, seed: int = 0) -> list[Visit]:
    """`num_clients` who each ask again as soon as they are answered, for `seconds`. Waits for the last of them."""
    questions = [entry["question"] for entry in load_glossary()]
    visits: list[Visit] = []

    async def all_of_them() -> None:
        began = time.monotonic()
        async with _client(server) as client:

            async def one(number: int) -> None:
                rng = random.Random(f"{seed} {number}")
                while (now := time.monotonic() - began) < seconds:
                    ask = Ask(now, rng.choice(questions), max_tokens)
                    visits.append(await _visit(client, server.model, ask, began, EventReader))

            await asyncio.gather(*(one(number) for number in range(num_clients)))

    thread = threading.Thread(target=lambda: asyncio.run(all_of_them()), daemon=True)
    thread.start()
    thread.join()
    return visits


def _client(server: Any) -> Any:
    import httpx

    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False)


async def _visit(client: Any, model: str, ask: Ask, began: float, make_reader: Callable[[], Any]) -> Visit:
    """Ask for exactly max_tokens tokens, and read them as they come, or leave."""
    visit = Visit(ask, time.monotonic() - began)
    body = {"model": model, "messages": [{"role": "user", "content": ask.question}], "max_tokens": ask.max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True}  # fmt: skip
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            visit.refused, visit.last = response.status_code, time.monotonic() - began
            return visit
        reader = make_reader()
        async for piece in response.aiter_bytes():
            for event in reader.feed(piece):
                if event == "[DONE]" or not json.loads(event)["choices"][0]["delta"].get("content"):
                    continue
                visit.num_pieces += 1
                visit.last = time.monotonic() - began
                visit.first = visit.first if visit.first is not None else visit.last
            if ask.leave_after is not None and visit.num_pieces >= ask.leave_after:
                visit.left = True
                break
    visit.last = visit.last or time.monotonic() - began
    return visit


@dataclass
class Watch:
    """Looks at the engine every so many seconds, on a thread of its own, inside `with Watch(server) as watch:`."""

    server: Any
    every: float = 0.02
    moments: list[Moment] = field(default_factory=list)

    def __enter__(self) -> "Watch":
        self.began, self._over = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def _run(self) -> None:
        while not self._over.wait(self.every):
            self.look()

    def look(self) -> Moment:
        """One more moment, now."""
        self.moments.append(self.server.ask(lambda: moment(self.server.llm, time.monotonic() - self.began)))
        return self.moments[-1]

    def mean(self, value: Callable[[Moment], float], start: float = 0.0, end: float = float("inf")) -> float:
        """The mean over time of `value` between `start` and `end`: each moment lasts until the next."""
        inside = [m for m in self.moments if start <= m.time <= end]
        spans = [b.time - a.time for a, b in zip(inside, inside[1:], strict=False)]
        return sum(value(m) * span for m, span in zip(inside, spans, strict=False)) / sum(spans)


def moment(llm: Any, now: float = 0.0) -> Moment:
    """The pool as it is. To be called where the engine may be touched: on its thread, or where it has none."""
    scheduler = llm.engine.scheduler
    blocks = scheduler.manager.block_pool.blocks[1:]
    owners = ["cached" if block.ref_cnt == 0 and block.block_hash is not None else "" for block in blocks]
    for request_id, table in scheduler.manager.req_to_blocks.items():
        for block in table:
            if block.block_id:
                owners[block.block_id - 1] = "shared" if block.ref_cnt > 1 else request_id
    held = sum(block.ref_cnt > 0 for block in blocks)
    cached = sum(owner == "cached" for owner in owners)
    return Moment(now, len(scheduler.running), len(scheduler.waiting), held, cached, len(blocks) - held - cached,
                  tuple(owners))  # fmt: skip
