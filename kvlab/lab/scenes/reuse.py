"""Who talks to a cache, and what becomes of the pool (lab 05). Which index runs inside is the caller's choice.

    chats(), agents(), strangers()   sessions, made from a seed: (start step, opening, turns)
    play(sessions, engine)           each turn sends the whole conversation so far -> Played: outputs, tokens found
    make_engine(num_blocks, ...)     the real scheduler and manager, with the slot-echo stand-in as the model
    pool_state(manager)              a letter for each block, as draw.pool_grid and draw.pool_areas take it

To compare with: an index that hashes a growing text once, one that forgets parents, a manager that releases in the
wrong order, and one that locks what it caches.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvlab.blocks import KVCacheBlock
from kvlab.config import EngineConfig
from kvlab.engine import EngineCore
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.sim import SlotEchoRunner

VOCABULARY = 30_000
Turn = tuple[list[int], int, int]  # new tokens, number of outputs, steps until the next turn
Session = tuple[int, list[int], list[Turn]]  # step at which it starts, opening, turns


def words(rng: random.Random, num: int) -> list[int]:
    """`num` random token ids."""
    return [rng.randrange(100, VOCABULARY) for _ in range(num)]


def chats(seed: int = 1) -> list[Session]:
    """24 people, 3 bots with 192 tokens of instructions each, 2 to 6 turns, 20 to 120 steps between them."""
    rng = random.Random(seed)
    bots = [words(rng, 192) for _ in range(3)]
    return [
        (6 * i, rng.choice(bots), [(words(rng, rng.randint(8, 40)), rng.randint(8, 24), rng.randint(20, 120))
                                   for _ in range(rng.randint(2, 6))])
        for i in range(24)
    ]  # fmt: skip


def agents(seed: int = 2) -> list[Session]:
    """8 agents, one program of 320 tokens, 8 to 12 turns; a tool answers within 1 to 4 steps, with 16 to 64 tokens."""
    rng = random.Random(seed)
    program = words(rng, 320)
    return [
        (15 * i, program + words(rng, rng.randint(20, 60)),
         [(words(rng, rng.randint(16, 64)) if turn else [], rng.randint(6, 16), rng.randint(1, 4))
          for turn in range(rng.randint(8, 12))])
        for i in range(8)
    ]  # fmt: skip


def strangers(seed: int = 3) -> list[Session]:
    """Sixty documents of 100 to 300 random tokens, one question each: nothing in common."""
    rng = random.Random(seed)
    return [(3 * i, words(rng, rng.randint(100, 300)), [([], rng.randint(8, 24), 0)]) for i in range(60)]


# ---- running


def make_engine(num_blocks: int, block_size: int = 16, caching: bool = True, index: Any = None,
                manager_class: Callable[..., KVCacheManager] = KVCacheManager) -> EngineCore:  # fmt: skip
    """The real scheduler and manager over `num_blocks` usable blocks; a wrong slot gives a wrong token."""
    manager = manager_class(num_blocks + 1, block_size, caching, prefix_index=index)
    config = EngineConfig(block_size=block_size, num_gpu_blocks_override=num_blocks + 1, max_num_seqs=16,
                          max_num_batched_tokens=256, enable_prefix_caching=caching)  # fmt: skip
    return EngineCore(Scheduler(config, manager), SlotEchoRunner(num_blocks + 1, block_size, vocab_size=VOCABULARY))


def ask(engine: EngineCore, name: str, prompt: list[int], num_outputs: int = 3, n: int = 1) -> tuple[list[int], int]:
    """Run one request alone. Returns (its output tokens, prompt tokens found cached)."""
    request = Request(name, prompt, SamplingParams(temperature=0, seed=0, max_tokens=num_outputs, n=n))
    engine.add_request(request)
    while engine.has_unfinished_requests():
        engine.step()
    return request.output_token_ids, request.num_cached_tokens


@dataclass
class Played:
    """What sessions got. outputs: by request, named "session.turn". asked, found: prompt tokens by session."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)

    def hit_rate(self, sessions: Iterable[int] | None = None) -> float:
        """The share of prompt tokens found cached, of all sessions or of those whose places are given."""
        chosen = list(self.asked if sessions is None else sessions)
        return sum(self.found[i] for i in chosen) / sum(self.asked[i] for i in chosen)


def play(sessions: Sequence[Session], engine: EngineCore, watch: Callable[[EngineCore], None] | None = None) -> Played:
    """Let all sessions talk to the end; watch(engine) is called after each step."""
    played, histories = Played(), [list(opening) for _, opening, _ in sessions]
    due = [(start, i, 0) for i, (start, _, _) in enumerate(sessions)]
    who: dict[str, tuple[int, int]] = {}
    step = 0
    while due or engine.has_unfinished_requests():
        for entry in [entry for entry in due if entry[0] <= step]:
            due.remove(entry)
            _, i, turn = entry
            new_tokens, num_outputs, _ = sessions[i][2][turn]
            histories[i] += new_tokens
            params = SamplingParams(temperature=0, seed=0, max_tokens=num_outputs)
            request = Request(f"{i}.{turn}", list(histories[i]), params)
            who[request.request_id] = i, turn
            engine.add_request(request)
        if engine.has_unfinished_requests():
            for request in [output.request for output in engine.step() if output.request.is_finished()]:
                i, turn = who[request.request_id]
                histories[i] = list(request.all_token_ids)
                played.outputs[request.request_id] = request.output_token_ids
                played.asked[i] = played.asked.get(i, 0) + request.num_prompt_tokens
                played.found[i] = played.found.get(i, 0) + request.num_cached_tokens
                if turn + 1 < len(sessions[i][2]):
                    due.append((step + 1 + sessions[i][2][turn][2], i, turn + 1))
        if watch:
            watch(engine)
        step += 1
    return played


def pool_state(manager: KVCacheManager) -> str:
    """One letter a block, in order of block id: o owned, c cached, e empty, l owned by a LockingManager alone."""
    locked = getattr(manager, "locked", ())
    return "".join(
        ("l" if block in locked and block.ref_cnt == 1 else "o") if block.ref_cnt
        else "c" if block.block_hash is not None else "e"
        for block in manager.block_pool.blocks[1:]
    )  # fmt: skip


def hit_rates(sessions: Sequence[Session], sizes: Iterable[int], index_class: Callable[[int], Any],
              manager_class: Callable[..., KVCacheManager] = KVCacheManager) -> Iterator[float]:  # fmt: skip
    """The hit rate of `sessions`, in percent, in pools of `sizes` blocks of 16 tokens."""
    for num_blocks in sizes:
        engine = make_engine(num_blocks, index=index_class(16), manager_class=manager_class)
        yield 100 * play(sessions, engine).hit_rate()


# ---- to count, and to compare with


class CountedTokens(Sequence[int]):
    """Token ids that count how many of them are read, one by one or in a slice."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.reads = tokens, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        got = self.tokens[index]
        self.reads += len(got) if isinstance(index, slice) else 1
        return got


def growing_index(new_keys: Callable[..., tuple[list[Any], Any]]) -> type[HashChainIndex]:
    """An index that hashes a growing text once, by lab 05's new_keys(tokens, block_size, salt, cursor)."""

    class GrowingIndex(HashChainIndex):
        def match(self, tokens, salt=None):
            keys, _ = new_keys(tokens, self.block_size, salt)
            known = self.cached_block_hash_to_block
            return [known[key] for key in takewhile(known.__contains__, keys)]

        def insert(self, tokens, blocks, salt=None, cursor=None):
            if len(tokens) < (num_tokens := len(blocks) * self.block_size):
                raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {self.block_size}")
            keys, cursor = new_keys(tokens[:num_tokens], self.block_size, salt, cursor)
            for key, block in zip(keys, blocks[len(blocks) - len(keys) :], strict=True):
                if block.block_hash is None and key not in self.cached_block_hash_to_block:
                    block.block_hash, self.cached_block_hash_to_block[key] = key, block
            return cursor

    return GrowingIndex


class FirstBlockFirst(KVCacheManager):
    """Our manager with the order of release turned round: a parent is evicted before its children."""

    def _give_back(self, blocks):
        super()._give_back(list(blocks)[::-1])


class LockingManager(KVCacheManager):
    """A cache as one might fear it: what was published keeps its block, up to half of the pool, wanted or not."""

    locked: tuple[KVCacheBlock, ...] = ()

    def free(self, request):
        table = self.req_to_blocks.get(request.request_id, [])
        keep = [block for block in table if block.block_hash is not None and block not in self.locked]
        keep = keep[: self.block_pool.num_usable_blocks // 2 - len(self.locked)]
        self.block_pool.touch(keep)  # an owner who never lets go
        self.locked = (*self.locked, *keep)
        super().free(request)


class WithoutParents:
    """An index whose keys know a block's own tokens only. It finds more, and what it finds is wrong."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.cached_block_hash_to_block: dict[tuple[int, ...], KVCacheBlock] = {}

    def _keys(self, tokens):
        size = self.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def match(self, tokens, salt=None):
        found = []
        for key in self._keys(tokens):
            if key not in self.cached_block_hash_to_block:
                break
            found.append(self.cached_block_hash_to_block[key])
        return found

    def insert(self, tokens, blocks, salt=None, cursor=None):
        for key, block in zip(self._keys(tokens), blocks, strict=False):
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
                block.block_hash, self.cached_block_hash_to_block[key] = key, block

    def remove(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None
