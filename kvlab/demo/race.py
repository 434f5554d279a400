"""Three engines with the same model, pool and requests, stepped side by side; what one can see after each step.

    make_jobs --> Lane: an LLM's engine.step(), timed  --observe--> Frame: cells, counts and one sentence
                        recorder events of the step    --Narrator--^

A Lane is plain bookkeeping around `EngineCore`: nothing here decides anything about the engine's work.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from kvlab.demo.narrate import Narrator
from kvlab.demo.workload import Job, letters_of, make_jobs
from kvlab.events import Recorder
from kvlab.schedule import Policies, Request

BLOCK_SIZE = 16
POOL = 96  # usable blocks
MAX_MODEL_LEN = 384  # 24 blocks: the contiguous engine has room for 4 reservations
SEATS = 24
BUDGET = 128


def fits(request, room) -> bool:
    """Admission for reservations: they never grow, so asking for spare blocks would only hold them back."""
    return room.needed <= room.free


class Setup(NamedTuple):
    """An engine of the race. has, rest: what it can (+) and lacks (-). options: the EngineConfig fields that differ."""

    name: str
    zh: str
    has: str
    rest: str
    options: dict
    policies: Policies | None = None


SETUPS = (
    Setup("contiguous", "连续分配", "+ continuous batching", "- reserves 24 blocks per request",
          {"reservation": "contiguous", "max_num_batched_tokens": BUDGET}, Policies(may_resume=fits)),
    Setup("static batch", "静态批处理", "+ paged blocks", "- no entry until the batch ends",
          {"batching": "static", "enable_prefix_caching": False, "max_num_batched_tokens": POOL * BLOCK_SIZE}),
    Setup("paged", "分页", "+ pages, continuous batching", "+ prefix cache, chunked prefill",
          {"max_num_batched_tokens": BUDGET}),
)  # fmt: skip


class Cell(NamedTuple):
    """One block. kind: "held", "reserved" (owned, empty), "shared", "cached" or "free"; text: one character."""

    kind: str
    text: str


@dataclass(frozen=True)
class Frame:
    """What one sees of an engine after a step. Tokens and slots are counts; a cell for each usable block."""

    step: int
    cells: list[Cell]
    running: int
    waiting: int
    finished: int
    prefill_tokens: int
    decode_tokens: int
    slots_owned: int
    slots_filled: int
    note: str
    is_news: bool  # the note tells of an event of a kind not seen before

    @property
    def filled(self) -> float:
        """Share of the owned slots that hold a token's K/V, 0 to 1; 0 where nothing is owned."""
        return self.slots_filled / self.slots_owned if self.slots_owned else 0.0


@dataclass
class Lane:
    """One engine of the race. llm: an idle kvlab LLM that was made with `recorder`."""

    setup: Setup
    llm: object
    recorder: Recorder
    jobs: Sequence[Job]
    frames: list[Frame] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)  # token ids by letter
    answered_at: dict[str, int] = field(default_factory=dict)  # step by letter
    seconds: float = 0.0  # in engine.step() alone

    def __post_init__(self):
        self.letters = letters_of(self.jobs)
        self._narrator = Narrator(self.letters, self.llm.engine.scheduler)
        self._events = []
        self.recorder.listen(self._events.append)
        eos = self.llm.model_config.eos_token_ids
        for job in self.jobs:
            self.llm.engine.add_request(Request(job.letter, job.prompt_token_ids, job.params, eos_token_ids=eos))

    @property
    def done(self) -> bool:
        return not self.llm.engine.has_unfinished_requests()

    @property
    def stats(self):
        return self.llm.engine.scheduler.stats

    @property
    def num_preemptions(self) -> int:
        return self.stats.num_preemptions_recompute + self.stats.num_preemptions_swap

    @property
    def mean_answered_at(self) -> float:
        """The mean step at which an answer was complete: how long a user waits."""
        return sum(self.answered_at.values()) / len(self.answered_at)

    @property
    def mean_running(self) -> float:
        """Sequences running after a step, the mean over steps."""
        return sum(frame.running for frame in self.frames) / len(self.frames)

    @property
    def utilisation(self) -> float:
        """Share of the owned slots that held a token, over all steps, 0 to 1 (L33 1.4)."""
        return sum(frame.slots_filled for frame in self.frames) / sum(frame.slots_owned for frame in self.frames)

    def step(self) -> Frame:
        """One step of the engine, and the frame that shows it."""
        self._events.clear()
        computed = self.stats.num_scheduled_tokens
        start = perf_counter()
        results = self.llm.engine.step()
        self.seconds += perf_counter() - start
        for result in results:
            request = result.request
            if request.is_finished():
                if request.error:
                    raise RuntimeError(f"request {request.request_id} failed in the demo: {request.error}")
                self.outputs[self.letters[request.request_id]] = request.output_token_ids
                self.answered_at[self.letters[request.request_id]] = self.stats.num_steps
        decoded = sum(result.request.num_output_tokens > 1 for result in results)
        frame = self._observe(self.stats.num_scheduled_tokens - computed - decoded, decoded)
        self.frames.append(frame)
        return frame

    def _observe(self, prefill_tokens: int, decode_tokens: int) -> Frame:
        scheduler = self.llm.engine.scheduler
        pool, tables = scheduler.manager.block_pool, scheduler.manager.req_to_blocks
        owner: dict[int, str] = {}
        filled: dict[int, int] = {}
        for request in scheduler.running:
            for index, block in enumerate(tables[request.request_id]):
                tokens = min(max(request.num_computed_tokens - index * BLOCK_SIZE, 0), BLOCK_SIZE)
                owner[block.block_id] = self.letters[request.request_id]
                filled[block.block_id] = max(tokens, filled.get(block.block_id, 0))
        cells = [cell_of(block, owner.get(block.block_id), filled.get(block.block_id, 0)) for block in pool.blocks[1:]]
        counts = {
            "step": self.stats.num_steps,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "finished": len(self.outputs),
            "prefill_tokens": prefill_tokens,
            "decode_tokens": decode_tokens,
            "slots_owned": BLOCK_SIZE * len(owner),
            "slots_filled": sum(filled.values()),
        }
        note = self._narrator.sentence(counts, self._events)
        return Frame(cells=cells, note=note, is_news=self._narrator.is_news, **counts)


def cell_of(block, owner: str | None, filled: int) -> Cell:
    """How to draw a block: by its owners, and by whether it holds any token."""
    if block.ref_cnt > 1:
        return Cell("shared", str(block.ref_cnt) if block.ref_cnt < 10 else "+")
    if owner is not None:
        return Cell("held", owner) if filled else Cell("reserved", owner.lower())
    return Cell("cached", ":") if block.block_hash is not None else Cell("free", ".")


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one CPU thread: in a model this small, threads mostly wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_lanes(model: str) -> list[Lane]:
    """The three engines, loaded, with all requests added."""
    from kvlab.engine import LLM

    lanes, jobs = [], None
    for setup in SETUPS:
        recorder = Recorder()
        llm = LLM(model, recorder=recorder, policies=setup.policies, block_size=BLOCK_SIZE, max_num_seqs=SEATS,
                  num_gpu_blocks_override=POOL + 1, max_model_len=MAX_MODEL_LEN, **setup.options)  # fmt: skip
        jobs = jobs or make_jobs(llm.tokenizer)
        lanes.append(Lane(setup, llm, recorder, jobs))
    return lanes
