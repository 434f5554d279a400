"""One physical KV block (物理块) as the control plane sees it: a number, a count, a name, two links.

Its state follows from its fields (PAV 2):

    owned    ref_cnt > 0                       in one or more block tables, not in the free queue
    cached   ref_cnt == 0, block_hash set      in the free queue, still holds a prefix, first evicted from the head
    free     ref_cnt == 0, block_hash None     in the free queue, holds nothing that anybody may read
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class OutOfBlocks(ValueError):
    """More blocks were asked for than are free. Nothing has changed."""


class KVCacheBlock:
    """A block's bookkeeping. K and V themselves live in the data plane, at row `block_id`.

    block_id: row in the K/V tensors. ref_cnt: how many block tables hold it.
    block_hash: the key under which a prefix index has published it, or None.
    prev_free_block, next_free_block: its neighbours while it is in the free queue, else None.
    """

    __slots__ = ("block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block", "is_null")

    def __init__(self, block_id: int, is_null: bool = False):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: Any = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None
        self.is_null = is_null

    @property
    def is_writable(self) -> bool:
        """Only a block with one owner and no published name may be written (L33 2.4)."""
        return self.ref_cnt == 1 and self.block_hash is None

    def __repr__(self) -> str:
        name = "" if self.block_hash is None else ", published"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{name})"


class PrefixIndex(Protocol):
    """Finds the blocks that already hold a prompt's beginning (前缀缓存, L33 6; labs 05 and 06).

    The index only remembers: who may be evicted is decided by the pool's free queue alone, and the
    lock that keeps a block from eviction is its reference count. `salt` keeps tenants apart.
    """

    block_size: int
    cached_block_hash_to_block: Mapping[Any, KVCacheBlock]

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[KVCacheBlock]:
        """The longest run of published blocks that holds tokens[0 : k * block_size]. Changes nothing."""

    def insert(self, tokens: Sequence[int], blocks: Sequence[KVCacheBlock], salt: str | None = None,
               cursor: Any = None) -> Any:  # fmt: skip
        """Publish blocks[i] as the holder of tokens[: (i + 1) * block_size] by setting its `block_hash`.

        The first publisher keeps a name: a block that would be its duplicate stays unpublished.
        `cursor` is what the last insert for the same growing sequence returned, so that an index need
        not walk the whole sequence again; an index that has no use for it ignores it.
        """

    def remove(self, block: KVCacheBlock) -> None:
        """Forget a published block (it is about to be reused) and set its `block_hash` to None."""
