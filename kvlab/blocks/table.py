"""A request's block table (块表): the page table that makes scattered blocks look like one sequence.

    token position p  ->  logical block p // B, offset p % B  ->  physical block table[p // B]
                      ->  slot = block_id * B + offset: the row in the flattened K/V tensors (L33 2.2)
"""

from collections.abc import Iterable

from kvlab.blocks.block import KVCacheBlock


def cdiv(a: int, b: int) -> int:
    """How many blocks of b hold a tokens: a / b rounded up."""
    return -(-a // b)


class BlockTable(list):
    """A list of KVCacheBlock in logical order.

    `version` changes whenever an entry that was already there changes, so that a reader who copies the
    table step by step knows whether appending the new entries is enough or all must be read again.
    """

    __slots__ = ("version",)
    _versions = 0

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()):
        super().__init__(blocks)
        self._renew()

    def _renew(self) -> None:
        BlockTable._versions += 1  # never repeats, so a new table is never taken for an old one
        self.version = BlockTable._versions

    def __setitem__(self, index: int, block: KVCacheBlock) -> None:
        super().__setitem__(index, block)
        self._renew()

    def replace(self, index: int, block: KVCacheBlock) -> KVCacheBlock:
        """Put `block` at logical block `index` (a copy-on-write did that); return the one that stood there."""
        old = self[index]
        self[index] = block
        return old

    def cut(self, length: int) -> list[KVCacheBlock]:
        """Keep the first `length` blocks; return the others."""
        rest = self[length:]
        if rest:
            del self[length:]
            self._renew()
        return rest

    @property
    def block_ids(self) -> list[int]:
        return [block.block_id for block in self]

    def slot(self, position: int, block_size: int) -> int:
        """The slot of token `position`. IndexError if no block has been allocated for it."""
        if not 0 <= position < len(self) * block_size:
            raise IndexError(f"position {position} has no slot: the table holds {len(self)} blocks of {block_size}")
        return self[position // block_size].block_id * block_size + position % block_size
