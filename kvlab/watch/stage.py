"""A stage for scenarios: requests by letter over the real KVCacheManager, each move recorded as one frame.

    stage = Stage(num_blocks=16, block_size=4, parts=parts)
    stage.write("A", ["my", "dog"])    stage.fork("A", "BC")    stage.finish("B")    ->    stage.recorder.events()

probe(manager, recorder) adds to the stream what the books say at that moment, read from the structures themselves, a
student's too: `block_size`, the `table` of each request, `refs` (the count of each block), `queue` (free blocks in
their order); with prefix caching `index` (its block size), `names` (block id, name, ... of what it finds), and each
`edge` of a tree.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.parts import PartError, Parts
from kvlab.prefix.outline import outline
from kvlab.schedule.request import Request


def probe(manager, recorder: Recorder) -> None:
    """Emit the tables, counts and queue of a KVCacheManager. O(blocks): only while somebody watches."""
    for request_id, table in manager.req_to_blocks.items():
        recorder.emit("table", request_id, [block.block_id for block in table])
    pool = manager.block_pool
    recorder.emit("block_size", None, [manager.block_size])
    recorder.emit("refs", None, [block.ref_cnt for block in pool.blocks])
    recorder.emit("queue", None, [block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
    if manager.enable_caching:
        recorder.emit("index", None, [pool.prefix_index.block_size])
        known = pool.cached_block_hash_to_block.items()
        recorder.emit("names", None, [each for name, block in known for each in (block.block_id, _short(name))])
        probe_tree(manager, recorder)


def _short(name: Any) -> str:
    """Enough of a block's name to tell it from the others: 8 hex digits of a key; a number as it is."""
    if isinstance(name, int):
        return str(name)
    return (name if isinstance(name, bytes) else sha256(repr(name).encode()).digest()).hex()[:8]


def probe_tree(manager, recorder: Recorder, told: Callable[[tuple[int, ...]], str] | None = None) -> None:
    """Emit the edges of a tree index, which keeps `roots` by salt; nothing for any other index.

    edge: depth in blocks, row, row of its parent (-1: none), then for each block its text, its id (None: a gap), its
    reference count and its holders. told: the text of a block's tokens.
    """
    told = told or (lambda chunk: " ".join(map(str, chunk)))
    tables = sorted(manager.req_to_blocks.items())
    first = 0
    for root in getattr(manager.block_pool.prefix_index, "roots", {}).values():
        edges = outline(root)
        rows = {id(node): first + row for node, _, row in edges}
        for node, depth, _ in edges:
            values: list[Any] = [depth, rows[id(node)], rows.get(id(node.parent), -1)]
            for chunk, block in zip(node.chunks, node.blocks, strict=False):  # a student's tree may be uneven
                holders = "".join(name for name, table in tables if block is not None and block in table)
                id_, count = (None, 0) if block is None else (block.block_id, block.ref_cnt)
                values += [told(chunk), id_, count, holders]
            recorder.emit("edge", None, values)
        first += 1 + max((row for *_, row in edges), default=-1)


class Stage:
    """num_blocks: the null block included. caching: with a prefix index; without, a view of the pool shows it alone."""

    def __init__(self, num_blocks: int, block_size: int = 4, parts: Parts | None = None, caching: bool = False):
        self.recorder = Recorder()
        config = EngineConfig(num_gpu_blocks_override=num_blocks, block_size=block_size, enable_prefix_caching=caching)
        self.manager = (parts or Parts()).make_manager(config, self.recorder)
        self.block_size = block_size
        self.requests: dict[str, Request] = {}
        self.failed = False
        self.move("stage", None, [num_blocks, block_size], lambda: None)

    def move(self, kind: str, name: str | None, values: Iterable, act: Callable[[], None]) -> None:
        """One frame: what is tried, what the layers report of it, and the books after it."""
        if self.failed:
            return
        self.recorder.emit(kind, name, values)
        try:
            act()
            self._probe()
        except PartError as error:  # a student's part: its last frame says what went wrong, and the play is over
            self.failed = True
            self.recorder.emit("error", name, [str(error)])
        self.recorder.step += 1

    def _probe(self) -> None:
        probe(self.manager, self.recorder)

    def write(self, name: str, words: Sequence[str]) -> None:
        """`name` computes K/V for `words` behind what it has; it is made if it is new."""
        self.move("write", name, words, lambda: self._write(name, words))

    def _write(self, name: str, words: Sequence[str]) -> None:
        request = self.requests.setdefault(name, Request(name, [0]))
        start = request.num_computed_tokens
        if self.manager.allocate_slots(request, len(words)) is None:
            self.recorder.emit("refused", name, [len(words)])
            return
        ids = [block.block_id for block in self.manager.req_to_blocks[name]]
        for position, word in enumerate(words, start):
            self.recorder.emit("slot", name, [ids[position // self.block_size], position % self.block_size, word])
        request.num_computed_tokens += len(words)

    def fork(self, parent: str, children: str) -> None:
        """A request for each letter of `children` shares all that `parent` has."""
        self.move("fork_all", parent, list(children), lambda: self._fork(parent, children))

    def _fork(self, parent: str, children: str) -> None:
        for child in children:
            self.requests[child] = Request(child, [0])
            self.manager.fork(self.requests[parent], self.requests[child])

    def finish(self, name: str) -> None:
        self.move("finish", name, [], lambda: self.manager.free(self.requests.pop(name)))
