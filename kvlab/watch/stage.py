"""A stage for scenarios: requests by letter over the real KVCacheManager, each move recorded as one frame.

    stage = Stage(num_blocks=16, block_size=4, parts=parts)
    stage.write("A", ["my", "dog"])    stage.fork("A", "BC")    stage.finish("B")    ->    stage.recorder.events()

probe(manager, recorder) adds to the stream what the books say at that moment, read from the structures themselves, a
student's too: `table` of each request, `refs` (the count of each block), `queue` (free blocks in their order).
"""

from collections.abc import Callable, Iterable, Sequence

from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.parts import PartError, Parts
from kvlab.schedule.request import Request


def probe(manager, recorder: Recorder) -> None:
    """Emit the tables, counts and queue of a KVCacheManager. O(blocks): only while somebody watches."""
    for request_id, table in manager.req_to_blocks.items():
        recorder.emit("table", request_id, [block.block_id for block in table])
    pool = manager.block_pool
    recorder.emit("refs", None, [block.ref_cnt for block in pool.blocks])
    recorder.emit("queue", None, [block.block_id for block in pool.free_block_queue.get_all_free_blocks()])


class Stage:
    """num_blocks: the null block included. Prefix caching is off, so that a view of the pool shows the pool alone."""

    def __init__(self, num_blocks: int, block_size: int = 4, parts: Parts | None = None):
        self.recorder = Recorder()
        config = EngineConfig(num_gpu_blocks_override=num_blocks, block_size=block_size, enable_prefix_caching=False)
        self.manager = (parts or Parts()).make_manager(config, self.recorder)
        self.block_size = block_size
        self.requests: dict[str, Request] = {}
        self.failed = False
        self._move("stage", None, [num_blocks, block_size], lambda: None)

    def _move(self, kind: str, name: str | None, values: Iterable, move: Callable[[], None]) -> None:
        """One frame: what is tried, what the layers report of it, and the books after it."""
        if self.failed:
            return
        self.recorder.emit(kind, name, values)
        try:
            move()
            probe(self.manager, self.recorder)
        except PartError as error:  # a student's part: its last frame says what went wrong, and the play is over
            self.failed = True
            self.recorder.emit("error", name, [str(error)])
        self.recorder.step += 1

    def write(self, name: str, words: Sequence[str]) -> None:
        """`name` computes K/V for `words` behind what it has; it is made if it is new."""
        self._move("write", name, words, lambda: self._write(name, words))

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
        self._move("fork_all", parent, list(children), lambda: self._fork(parent, children))

    def _fork(self, parent: str, children: str) -> None:
        for child in children:
            self.requests[child] = Request(child, [0])
            self.manager.fork(self.requests[parent], self.requests[child])

    def finish(self, name: str) -> None:
        self._move("finish", name, [], lambda: self.manager.free(self.requests.pop(name)))
