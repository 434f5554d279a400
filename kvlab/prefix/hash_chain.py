"""The hash chain: a block's name says everything that its K and V depend on (PAV 3.4).

    root(salt) --tokens 0..B-1--> key 0 --tokens B..2B-1--> key 1 --> ...        key = SHA-256(parent, tokens)

A key names the block's tokens and, through its parent, all tokens before them, hence their positions too.
SHA-256 because two prompts with one key would read each other's K/V: Python's own hash() of integers is
built for speed, not against an adversary, and differs between processes for strings.

Only full blocks have a key. The chain needs no links between blocks: a child whose parent has been evicted
cannot be reached, is reached again when somebody publishes the parent anew, and is evicted in its turn.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from kvlab.blocks import KVCacheBlock


def root_key(salt: str | None) -> bytes:
    """The parent of every first block; another salt, another root, nothing shared."""
    return sha256(b"kvlab" if salt is None else b"kvlab salt " + salt.encode()).digest()


def _chain(tokens: Sequence[int], block_size: int, parent: bytes, start: int, stop: int) -> Iterator[bytes]:
    """The keys of full blocks start..stop-1, given the key of block start-1."""
    size = block_size * 8
    data = array("q", tokens[start * block_size : stop * block_size]).tobytes()
    for offset in range(0, (stop - start) * size, size):
        # Both parts have a fixed length, so no two different inputs are the same bytes.
        parent = sha256(parent + data[offset : offset + size]).digest()
        yield parent


def block_keys(tokens: Sequence[int], block_size: int, salt: str | None = None) -> list[bytes]:
    """The keys of the full blocks of `tokens`, in order, 32 bytes each; what does not fill a block has none."""
    return list(_chain(tokens, block_size, root_key(salt), 0, len(tokens) // block_size))


def new_keys(tokens: Sequence[int], block_size: int, salt: str | None = None,
             cursor: tuple[int, bytes] | None = None) -> tuple[list[bytes], tuple[int, bytes]]:  # fmt: skip
    """The keys of those full blocks of a growing text that had none at the last call, and a cursor for the next one.

    cursor: what the last call for the same text and salt returned, (blocks done, last key); None at first.
    """
    done, parent = cursor or (0, root_key(salt))
    num_full = len(tokens) // block_size
    keys = list(_chain(tokens, block_size, parent, done, num_full))
    return keys, (max(done, num_full), keys[-1] if keys else parent)


class HashChainIndex:
    """Maps the key of each published block to the block."""

    def __init__(self, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least 1 token")
        self.block_size = block_size
        self.cached_block_hash_to_block: dict[bytes, KVCacheBlock] = {}

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[KVCacheBlock]:
        """The published blocks that hold the longest prefix of `tokens`, in order. O(hit) hashes."""
        found = []
        for key in _chain(tokens, self.block_size, root_key(salt), 0, len(tokens) // self.block_size):
            block = self.cached_block_hash_to_block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, tokens: Sequence[int], blocks: Sequence[KVCacheBlock], salt: str | None = None,
               cursor: Any = None) -> tuple[int, bytes]:  # fmt: skip
        """Publish `blocks` as holders of the first len(blocks) blocks of `tokens`.

        Returns the cursor (blocks done, last key); given it back, only the new blocks are hashed.
        ValueError if `tokens` do not fill the blocks.
        """
        if len(tokens) < len(blocks) * self.block_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {self.block_size}")
        done, key = cursor or (0, root_key(salt))
        keys = _chain(tokens, self.block_size, key, done, len(blocks))
        for block, key in zip(blocks[done:], keys, strict=True):
            # The first publisher keeps the name; a block that already has one holds a hit.
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
                block.block_hash = key
                self.cached_block_hash_to_block[key] = block
        return max(done, len(blocks)), key

    def remove(self, block: KVCacheBlock) -> None:
        """Forget `block`. ValueError if it is not published here."""
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError(f"block {block.block_id} is not published, so it cannot be removed")
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None
