"""The KV cache manager: per-request block tables over one pool, one prefix index and one swap space.

    admit, resume   get_computed_blocks -> allocate_slots        hits are shared, the rest is new or copied back
    each step       allocate_slots                               grows the table; copies a block before a write (CoW)
    after a step    cache_blocks                                 full blocks become findable, never earlier
    branch          fork, hand_over                              the child shares blocks; another name for their owner
    pressure        swap_out, or free                            then allocate_slots resumes
    end             free                                         the one way out: finish, abort, recompute

Every allocation is one atomic count: hits that lie in the free queue, blocks to copy back, the copy that a
write to a shared block needs, and new blocks. If they do not all fit, nothing changes and None is returned.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from kvlab.blocks import BlockPool, BlockPoolBase, BlockTable, KVCacheBlock, PrefixIndex, cdiv, sharing
from kvlab.events import Recorder
from kvlab.prefix import HashChainIndex
from kvlab.swap import BlockOp, SwapSpace

NO_BLOCKS: list[KVCacheBlock] = []


class KVCacheManager:
    """Block tables of all requests.

    num_gpu_blocks: blocks of `block_size` tokens on the GPU, the null block included.
    num_cpu_blocks: blocks of swap space.
    prefix_index, block_pool, fork, ensure_writable: replacements for ours (labs 03 to 06).
    A request needs: request_id, all_token_ids, num_tokens, num_computed_tokens, cache_salt.
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, enable_caching: bool = True, num_cpu_blocks: int = 0,
                 prefix_index: PrefixIndex | None = None, block_pool: BlockPoolBase | None = None,
                 recorder: Recorder | None = None, fork: Callable | None = None,
                 ensure_writable: Callable | None = None):  # fmt: skip
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least 1 token (16 is usual)")
        self.block_size = block_size
        self.recorder = recorder
        if block_pool is None:
            index = (prefix_index or HashChainIndex(block_size)) if enable_caching else None
            block_pool = BlockPool(num_gpu_blocks, prefix_index=index, recorder=recorder)
        self.block_pool = block_pool
        self._fork = fork or sharing.fork
        self._ensure_writable = ensure_writable or sharing.ensure_writable
        self.enable_caching = block_pool.enable_caching
        if self.enable_caching and block_pool.prefix_index.block_size != block_size:
            raise ValueError(
                f"block_size of the prefix index is {block_pool.prefix_index.block_size} and the manager's is "
                f"{block_size}: make both the same"
            )
        self.swap_space = SwapSpace(num_cpu_blocks)
        self.req_to_blocks: dict[str, BlockTable] = {}
        self._published: dict[str, tuple[int, object]] = {}  # request id -> (full blocks offered, index cursor)
        self._block_ops: list[BlockOp] = []

    # ---- reading

    can_share = True  # `fork` works
    tables_grow = True  # a running request may need another block at any step

    @property
    def usage(self) -> float:
        return self.block_pool.get_usage()

    @property
    def max_tokens_per_request(self) -> int:
        """The longest sequence whose K/V fits an otherwise empty pool."""
        return self.block_pool.num_usable_blocks * self.block_size

    def get_block_ids(self, request_id: str) -> list[int]:
        return self.req_to_blocks[request_id].block_ids

    def num_blocks_freed_by(self, requests) -> int:
        """How many blocks come back if all of `requests` are preempted: those that only they hold."""
        held = Counter(block for r in requests for block in self.req_to_blocks.get(r.request_id, ()))
        return sum(block.ref_cnt == count for block, count in held.items())

    def next_block(self, request) -> KVCacheBlock | None:
        """The block that the next token of `request` falls into; None if it has none yet."""
        table, index = self.req_to_blocks.get(request.request_id, NO_BLOCKS), request.num_computed_tokens
        return table[index // self.block_size] if index < len(table) * self.block_size else None

    def get_computed_blocks(self, request) -> tuple[list[KVCacheBlock], int]:
        """The published blocks that hold the request's beginning, and how many tokens that is.

        At least one token is left to compute, for its logits are what the next token is sampled from.
        """
        if not self.enable_caching:
            return [], 0
        limit = (request.num_tokens - 1) // self.block_size * self.block_size
        blocks = self.block_pool.prefix_index.match(request.all_token_ids[:limit], request.cache_salt)
        return blocks, len(blocks) * self.block_size

    def num_blocks_to_start(self, request, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        """Free blocks that a request needs to hold `num_tokens` tokens, given its hits or its table."""
        table = self.req_to_blocks.get(request.request_id)
        if table is not None:  # it goes on with what a branch has held for it
            tail = self.next_block(request)
            return max(0, cdiv(num_tokens, self.block_size) - len(table)) + (tail is not None and not tail.is_writable)
        shared, _ = self._reusable(request, hits)
        return cdiv(num_tokens, self.block_size) - sum(block is not None and block.ref_cnt > 0 for block in shared)

    # ---- allocating

    def allocate_slots(self, request, num_new_tokens: int,
                       new_computed_blocks: Sequence[KVCacheBlock] = ()) -> list[KVCacheBlock] | None:  # fmt: skip
        """Make slots for the next `num_new_tokens` tokens of `request`, writable ones.

        new_computed_blocks: for a request without a table, its hits (from get_computed_blocks).
        Returns the blocks that are new in the table, or None if they do not fit (nothing has changed then).
        The request's first new token is at max(num_computed_tokens, tokens in the hits).
        """
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens is {num_new_tokens}: allocate for at least 1 token")
        table = self.req_to_blocks.get(request.request_id)
        if table is None:
            return self._start(request, num_new_tokens, new_computed_blocks)
        start, size, num_held = request.num_computed_tokens, self.block_size, len(table)
        first = start // size  # the block that the first new token falls into
        tail = table[first] if first < num_held else None
        if tail is not None and tail.ref_cnt == 1 and tail.block_hash is None:  # tail.is_writable
            if start + num_new_tokens <= num_held * size:  # nearly every decode
                if self.swap_space.tables:
                    self.swap_space.unlink(tail)
                return NO_BLOCKS
        must_copy = tail is not None and not tail.is_writable
        num_new = max(0, cdiv(start + num_new_tokens, size) - num_held)
        if num_new + must_copy > self.block_pool.get_num_free_blocks():
            return None
        copied = NO_BLOCKS
        if must_copy:
            copied = self._copy_on_write(request, table, first)
        elif tail is not None:
            self.swap_space.unlink(tail)
        new = self.block_pool.get_new_blocks(num_new)
        table.extend(new)
        return copied + new

    def _copy_on_write(self, request, table: BlockTable, index: int) -> list[KVCacheBlock]:
        """Put a private copy in the place of a block that others read (写时复制, L33 2.4); the copy, in a list."""
        shared, copy = self._ensure_writable(self.block_pool, table, index)
        self._block_ops.append(("copy", shared.block_id, copy.block_id))
        if self.recorder is not None:
            self.recorder.emit("copy", request.request_id, (shared.block_id, copy.block_id))
        if shared.ref_cnt == 0:
            self.swap_space.unlink(shared)
        return [copy]

    def _reusable(self, request, hits: Sequence[KVCacheBlock]) -> tuple[list[KVCacheBlock | None], list[int]]:
        """For a request without a table: what fills its computed blocks, in logical order.

        Returns (shared, cpu): shared[i] is a GPU block that holds logical block i already, or None if it must
        be copied from CPU block cpu[i]. A request that was not swapped out has its hits only.
        """
        cpu = self.swap_space.tables.get(request.request_id, [])
        shared: list[KVCacheBlock | None] = list(hits)
        for i in range(len(hits), len(cpu)):
            # A block that the next token goes into is copied back even if a sibling holds it: it would
            # have to be copied before the write anyway.
            full = (i + 1) * self.block_size <= request.num_computed_tokens
            shared.append(self.swap_space.resident(cpu[i]) if full else None)
        return shared, cpu

    def _start(self, request, num_new_tokens: int, hits: Sequence[KVCacheBlock]) -> list[KVCacheBlock] | None:
        computed = max(request.num_computed_tokens, len(hits) * self.block_size)
        total = cdiv(computed + num_new_tokens, self.block_size)
        shared, cpu = self._reusable(request, hits)
        held = [block for block in shared if block is not None]
        num_new = total - len(held)
        if num_new + sum(block.ref_cnt == 0 for block in held) > self.block_pool.get_num_free_blocks():
            return None
        self.block_pool.touch(held)  # before taking new ones, which would evict them
        new = self.block_pool.get_new_blocks(num_new)
        spare = iter(new)
        table = BlockTable()
        for i, block in enumerate(shared):
            if block is None:
                block = next(spare)
                self._block_ops.append(("swap_in", cpu[i], block.block_id))
                if (i + 1) * self.block_size <= computed:
                    self.swap_space.link(block, cpu[i])
            table.append(block)
        table.extend(spare)
        self.swap_space.release(request.request_id)
        if self.recorder is not None and len(held) < len(shared):
            self.recorder.emit("swap_in", request.request_id, [b.block_id for b in table[len(hits) : len(shared)]])
        self.req_to_blocks[request.request_id] = table
        return new

    # ---- sharing, publishing, giving back

    def cache_blocks(self, request, num_computed_tokens: int) -> None:
        """Publish the blocks of `request` that are full once `num_computed_tokens` have K/V. Call it after the step."""
        num_full = num_computed_tokens // self.block_size
        done, cursor = self._published.get(request.request_id, (0, None))
        if self.enable_caching and num_full > done:
            blocks = self.req_to_blocks[request.request_id]
            cursor = self.block_pool.cache_full_blocks(request, blocks, num_full, cursor)
            self._published[request.request_id] = (num_full, cursor)

    def fork(self, parent, child, num_tokens: int | None = None) -> bool:
        """Let `child` share every computed block of `parent`, also a last one that is not full; no K/V moves.

        num_tokens: share the first so many tokens at most; the cut may lie amid a block. Both may go on: whoever
        writes first into a shared block copies it (L33 2.4). Sets child.num_computed_tokens. True if it was done
        (a manager that cannot share says False, and the child computes its own). ValueError if the parent has no
        table or the child has one. Only between steps: what a step has been promised to copy or write is not known
        to a child that comes in its midst.
        """
        if parent.request_id not in self.req_to_blocks:
            raise ValueError(f"request {parent.request_id!r} holds no blocks, so nothing can be forked from it")
        if child.request_id in self.req_to_blocks or child.request_id in self.swap_space.tables:
            raise ValueError(f"request {child.request_id!r} already holds blocks; fork into a new request")
        computed = parent.num_computed_tokens
        computed = computed if num_tokens is None else min(computed, num_tokens)
        blocks = self.req_to_blocks[parent.request_id][: cdiv(computed, self.block_size)]
        self.req_to_blocks[child.request_id] = BlockTable(self._fork(self.block_pool, blocks))
        child.num_computed_tokens = computed
        if parent.request_id in self._published:
            self._keep_published(child, self._published[parent.request_id], computed)
        if self.recorder is not None:
            self.recorder.emit("fork", child.request_id, [b.block_id for b in blocks])
        return True

    def _keep_published(self, request, published: tuple[int, object], num_computed_tokens: int) -> None:
        """`request` goes on where another has published to, unless it has been cut off before: then it starts anew."""
        if published[0] * self.block_size <= num_computed_tokens:
            self._published[request.request_id] = published

    def hand_over(self, giver, taker, num_tokens: int) -> bool:
        """The K/V of the first `num_tokens` computed tokens of `giver` becomes that of `taker`; nothing is copied.

        What `giver` holds besides is given back. Sets taker.num_computed_tokens. False, and nothing changed, from a
        manager that ties its blocks to one request. The taker must hold nothing (or be the giver, who is cut off).
        Never between a step's planning and its copies, as for `fork`.
        """
        table = self.req_to_blocks.pop(giver.request_id)
        self.req_to_blocks[taker.request_id] = table
        self._give_back(reversed(table.cut(cdiv(num_tokens, self.block_size))))
        if giver.request_id in self._published:
            self._keep_published(taker, self._published.pop(giver.request_id), num_tokens)
        taker.num_computed_tokens = num_tokens
        return True

    def swap_out(self, request) -> bool:
        """Move the computed K/V of `request` to swap space and give its GPU blocks back.

        False, and nothing changed, if it holds none or swap space has too few blocks.
        """
        blocks = self.req_to_blocks.get(request.request_id, NO_BLOCKS)
        blocks = blocks[: cdiv(request.num_computed_tokens, self.block_size)]
        if not blocks:
            return False
        ops = self.swap_space.swap_out(request.request_id, blocks)
        if ops is None:
            return False
        self._block_ops += ops
        if self.recorder is not None:
            self.recorder.emit("swap_out", request.request_id, [b.block_id for b in blocks])
        self._give_back(reversed(self.req_to_blocks.pop(request.request_id)))
        self._published.pop(request.request_id, None)
        return True

    def free(self, request) -> None:
        """Give back all that `request` holds, on the GPU and in swap space; harmless if it holds nothing.

        Its last block goes first, so that its prefix is evicted last. Published blocks stay findable.
        """
        self._give_back(reversed(self.req_to_blocks.pop(request.request_id, NO_BLOCKS)))
        self._published.pop(request.request_id, None)
        self.swap_space.release(request.request_id)

    def _give_back(self, blocks) -> None:
        blocks = list(blocks)
        self.block_pool.free_blocks(blocks)
        if self.swap_space.tables:
            for block in blocks:
                if block.ref_cnt == 0:
                    self.swap_space.unlink(block)

    def take_block_ops(self) -> list[BlockOp]:
        """The copies to make before the next forward, in order; each is handed over once."""
        ops, self._block_ops = self._block_ops, []
        return ops

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def check(self) -> None:
        """AssertionError unless references, queue, tables and swap space agree. O(everything): tests, idle time."""
        pool = self.block_pool
        references = [0] * pool.num_gpu_blocks
        for table in self.req_to_blocks.values():
            for block in table:
                references[block.block_id] += 1
        queued = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        assert len(queued) == pool.get_num_free_blocks(), "the free queue miscounts itself"
        for block in pool.blocks[1:]:
            assert block.ref_cnt == references[block.block_id], f"{block} is in {references[block.block_id]} tables"
            assert (block.ref_cnt == 0) == (block.block_id in queued), f"{block} is both owned and free, or neither"
        assert references[0] == 0 and 0 not in queued, "the null block was handed out"
        for name, block in pool.cached_block_hash_to_block.items():
            assert block.block_hash == name, f"{block} is known by a name that it does not bear"
        assert not set(self.req_to_blocks) & set(self.swap_space.tables), "a request is on the GPU and swapped out"
        self.swap_space.check()
