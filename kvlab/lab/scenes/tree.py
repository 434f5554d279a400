"""Traffic, and caches that run short (lab 06): how much of each prompt is found, under which rule of eviction.

    chats, plans, strangers --prompts--> serve --start(tokens)--> cache --> (table, tokens found)
                                               --end(table)-----> cache

    QueueCache     any prefix index in the engine's block pool: the free queue decides, block by block
    NamelessFirst  the same, but a block without a name is handed out before any other
    LeafCache      a tree that decides itself: the leaf that was used longest ago goes, or its last block
    endless        room for all
    record_turns   the real scheduler over an index: the tree after each step, to be drawn later

All is made from a seed: the same numbers at every run.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvlab.blocks import BlockPool, KVCacheBlock, OutOfBlocks, cdiv
from kvlab.config import EngineConfig
from kvlab.parts import Parts
from kvlab.prefix.radix_steps import add, chunks_of, find, take_out
from kvlab.prefix.radix_tree import RadixNode
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request

Table = list[KVCacheBlock]
Victim = Callable[[RadixNode, Mapping[int, int]], RadixNode | None]


def findable(tokens: Sequence[int], block_size: int) -> Sequence[int]:
    """What a match may look for: whole blocks, and not the last token, which is always computed."""
    return tokens[: (len(tokens) - 1) // block_size * block_size]


# ---- caches


class QueueCache:
    """`index` (a prefix index with a block_size) in a block pool of num_blocks."""

    def __init__(self, index: Any, num_blocks: int):
        self.index, self.size = index, index.block_size
        self.pool = BlockPool(num_blocks + 1, prefix_index=index)

    def start(self, tokens: Sequence[int]) -> tuple[Table, int]:
        """Blocks for a prompt, computed and published at once; how many tokens were found. May raise OutOfBlocks."""
        hits = self.index.match(findable(tokens, self.size))
        self.pool.touch(hits)
        table = hits + self.pool.get_new_blocks(cdiv(len(tokens), self.size) - len(hits))
        self.index.insert(tokens, table[: len(tokens) // self.size])
        return table, len(hits) * self.size

    def end(self, table: Table) -> None:
        """The prompt's request has ended: last block first."""
        self.pool.free_blocks(reversed(table))


class NamelessFirst(QueueCache):
    """The queue, but a block that nobody can find is handed out before any other."""

    def end(self, table: Table) -> None:
        super().end(table)
        queue = self.pool.free_block_queue
        free = queue.get_all_free_blocks()
        for block in sorted(free, key=lambda block: block.block_hash is not None):  # stable: else in the queue's order
            queue.remove(block)
            queue.append(block)


class LeafCache:
    """A tree that gives up leaves only. victim(root, last_used) names the leaf (leaf_to_evict in lab 06).

    whole_edge: all its blocks go at once, else only the last one. joined: an only child that is left becomes one edge
    with its parent; SGLang does not do that.
    """

    def __init__(self, num_blocks: int, block_size: int, victim: Victim, whole_edge: bool = True, joined: bool = False):
        self.root, self.size = RadixNode([], [], None), block_size
        self.victim, self.whole_edge, self.joined = victim, whole_edge, joined
        self.free = [KVCacheBlock(i) for i in range(num_blocks)]
        self.last_used: dict[int, int] = {}
        self.clock = 0

    def start(self, tokens: Sequence[int]) -> tuple[Table, int]:
        """As QueueCache.start."""
        hits = find(self.root, chunks_of(findable(tokens, self.size), self.size))
        for block in hits:
            block.ref_cnt += 1
        num_new = cdiv(len(tokens), self.size) - len(hits)
        while len(self.free) < num_new:
            self._evict()
        new = [self.free.pop() for _ in range(num_new)]
        for block in new:
            block.ref_cnt = 1
        add(self.root, chunks_of(tokens, self.size), (hits + new)[: len(tokens) // self.size])
        self._use(hits + new)
        return hits + new, len(hits) * self.size

    def end(self, table: Table) -> None:
        self._use(table)
        for block in table:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.block_hash is None:
                self.free.append(block)

    def _use(self, table: Table) -> None:
        self.clock += 1
        self.last_used.update((block.block_id, self.clock) for block in table)

    def _evict(self) -> None:
        leaf = self.victim(self.root, self.last_used)
        if leaf is None:
            raise OutOfBlocks("every leaf of the tree has an owner")
        above, going = leaf.parent, leaf.blocks[::-1] if self.whole_edge else leaf.blocks[-1:]
        for block in going:
            take_out(block)
        self.free += going
        if self.joined and not leaf.blocks:
            join(above)


def join(node: RadixNode) -> None:
    """Make one edge of `node` and its only child; nothing, if it has none, or several, or is the root."""
    if node.parent is None or len(node.children) != 1:
        return
    (child,) = node.children.values()
    node.chunks, node.blocks, node.children = node.chunks + child.chunks, node.blocks + child.blocks, child.children
    for grandchild in node.children.values():
        grandchild.parent = node
    for block in filter(None, child.blocks):
        block.block_hash.node = node


# ---- traffic: lists of prompts, each a list of tokens


def words(rng: random.Random, shortest: int, longest: int) -> list[int]:
    """Some random tokens, from shortest to longest of them."""
    return [rng.randrange(30_000) for _ in range(rng.randint(shortest, longest))]


def chats(seed: int, num_people: int = 40, num_bots: int = 4) -> list[list[int]]:
    """People talk to bots: each turn sends the whole conversation so far. At most ten talk at a time."""
    rng = random.Random(seed)
    bots = [words(rng, 150, 250) for _ in range(num_bots)]  # each with its instructions
    people = [[list(rng.choice(bots)), rng.randint(2, 6)] for _ in range(num_people)]  # conversation, turns left
    prompts: list[list[int]] = []
    talking: list[list[Any]] = []
    while people or talking:
        if people and len(talking) < 10:
            talking.append(people.pop())
        person = rng.choice(talking)
        person[0] += words(rng, 5, 40)  # a question
        prompts.append(list(person[0]))
        person[0] += words(rng, 10, 60)  # the answer
        person[1] -= 1
        if not person[1]:
            talking.remove(person)
    return prompts


def plans(seed: int) -> list[list[int]]:
    """Agents' plans: each leaves an earlier one somewhere in its second half."""
    rng = random.Random(seed)
    known = [words(rng, 150, 250)]
    for _ in range(150):
        base = rng.choice(known)
        known.append(base[: rng.randint(len(base) // 2, len(base))] + words(rng, 10, 60))
    return known[1:]


def strangers(seed: int) -> list[list[int]]:
    """Prompts that have nothing in common."""
    rng = random.Random(seed)
    return [words(rng, 100, 300) for _ in range(60)]


def serve(prompts: Iterable[Sequence[int]], cache: Any, at_once: int = 4) -> float:
    """Start one prompt after the other; each ends when `at_once` more have started. Returns the share found, 0 to 1."""
    running: list[Table] = []
    found = total = 0
    for tokens in prompts:
        if len(running) == at_once:
            cache.end(running.pop(0))
        table, num_found = cache.start(tokens)
        running.append(table)
        found, total = found + num_found, total + len(tokens)
    return found / total


def endless(prompts: Iterable[Sequence[int]], index: Any) -> list[int]:
    """Tokens found for each prompt if nothing is ever forgotten."""
    size, found = index.block_size, []
    for tokens in prompts:
        found.append(size * len(index.match(findable(tokens, size))))
        index.insert(tokens, [KVCacheBlock(0) for _ in range(len(tokens) // size)])
    return found


# ---- the engine


@dataclass(frozen=True)
class TreeMoment:
    """The tree after a step: a copy of its root (None: nothing published), the ids of owned blocks, who ran."""

    step: int
    name: str
    turn: int
    num_found: int
    root: Any
    owned: frozenset[int]


def record_turns(index: Callable[[int], Any], turns: Iterable[tuple[str, list[int]]], *, block_size: int = 2,
                 num_blocks: int = 15, max_tokens: int = 5) -> list[TreeMoment]:  # fmt: skip
    """(name, prompt) one after the other through the engine's scheduler, over index(block_size), without a model.

    The index keeps its trees in `roots`, by salt.
    """
    core = Parts(prefix_index=index).make_engine(
        EngineConfig(block_size=block_size, num_gpu_blocks_override=num_blocks + 1)
    )
    pool, moments = core.scheduler.manager.block_pool, []
    for turn, (name, prompt) in enumerate(turns, start=1):
        core.add_request(Request(str(turn), prompt, SamplingParams(temperature=0, seed=0, max_tokens=max_tokens)))
        num_found = 0
        while core.has_unfinished_requests():
            for output in core.step():
                num_found = output.request.num_cached_tokens
            root = pool.prefix_index.roots.get(None)
            owned = frozenset(block.block_id for block in pool.blocks if block.ref_cnt > 0)
            moments.append(TreeMoment(len(moments), name, turn, num_found, root and copy_of(root), owned))
    return moments


def copy_of(node: Any, parent: Any = None) -> Any:
    """What a tree looks like now: later changes do not show in it."""
    twin = SimpleNamespace(chunks=list(node.chunks), blocks=list(node.blocks), parent=parent)
    twin.children = {chunk: copy_of(child, twin) for chunk, child in node.children.items()}
    return twin
