"""Swap space: the bounded pool of CPU blocks that preempted requests' K/V waits in (换出, L33 5.2).

    swap_out   GPU blocks of one request -> CPU blocks, all or nothing
    swap_in    back, except what is on the GPU still

One CPU block per distinct GPU block: siblings that share a block share its copy. For that a CPU block is
*linked* to the GPU block it equals, for as long as it equals it: until that block is freed or written.
The link also saves the way back: a sibling that is still running holds the content already.

This module only counts and remembers. The copies are (kind, src, dst) operations for the data plane.
"""

from collections.abc import Sequence

from kvlab.blocks import KVCacheBlock

BlockOp = tuple[str, int, int]


class SwapSpace:
    """`num_blocks` CPU blocks, and which swapped request owns which."""

    def __init__(self, num_blocks: int):
        if num_blocks < 0:
            raise ValueError(f"num_cpu_blocks is {num_blocks}: use 0 for no swap space, or a positive number")
        self.num_blocks = num_blocks
        self.tables: dict[str, list[int]] = {}  # request id -> its CPU blocks in logical order
        self._free = list(range(num_blocks))
        self._ref_cnt = [0] * num_blocks
        self._cpu_of: dict[int, int] = {}  # GPU block id -> the CPU block that equals it
        self._gpu_of: dict[int, KVCacheBlock] = {}  # and back

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def swap_out(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> list[BlockOp] | None:
        """Reserve CPU blocks for `blocks`; the copies to make, or None (and nothing changed) if too few are free."""
        new = [block for block in blocks if block.block_id not in self._cpu_of]
        if len(new) > len(self._free):
            return None
        ops = []
        for block in new:
            cpu = self._free.pop()
            self._cpu_of[block.block_id] = cpu
            self._gpu_of[cpu] = block
            ops.append(("swap_out", block.block_id, cpu))
        table = [self._cpu_of[block.block_id] for block in blocks]
        for cpu in table:
            self._ref_cnt[cpu] += 1
        self.tables[request_id] = table
        return ops

    def resident(self, cpu: int) -> KVCacheBlock | None:
        """The GPU block that holds the content of CPU block `cpu` right now, if any."""
        return self._gpu_of.get(cpu)

    def link(self, block: KVCacheBlock, cpu: int) -> None:
        """`block` is about to be filled from `cpu` and will equal it."""
        self._cpu_of[block.block_id] = cpu
        self._gpu_of[cpu] = block

    def unlink(self, block: KVCacheBlock) -> None:
        """`block` is about to be written, or nobody owns it any more: it vouches for no CPU block now."""
        cpu = self._cpu_of.pop(block.block_id, None)
        if cpu is not None:
            del self._gpu_of[cpu]

    def release(self, request_id: str) -> None:
        """Give up the request's CPU blocks; harmless if it has none."""
        for cpu in self.tables.pop(request_id, ()):
            self._ref_cnt[cpu] -= 1
            if self._ref_cnt[cpu] == 0:
                self._free.append(cpu)
                if cpu in self._gpu_of:
                    self.unlink(self._gpu_of[cpu])

    def check(self) -> None:
        """AssertionError unless every count is what the tables say and no CPU block is lost."""
        owned = [cpu for table in self.tables.values() for cpu in table]
        for cpu in range(self.num_blocks):
            assert self._ref_cnt[cpu] == owned.count(cpu), f"CPU block {cpu}: count {self._ref_cnt[cpu]}"
            assert (cpu in self._free) == (self._ref_cnt[cpu] == 0), f"CPU block {cpu} is lost or free twice"
        assert len(set(self._free)) == len(self._free)
        for cpu, block in self._gpu_of.items():
            assert block.ref_cnt > 0 and self._ref_cnt[cpu] > 0, f"link {block} = CPU block {cpu} has outlived an end"
            assert self._cpu_of[block.block_id] == cpu
        assert len(self._cpu_of) == len(self._gpu_of)
