"""Prefix reuse (L33 6, PAV 3.4): which blocks already hold the beginning of a prompt. Plain Python; labs 05 and 06.

    HashChainIndex    a block's name is a hash of its tokens and its parent's name: one look-up a block
    RadixTreeIndex    prompts that share a beginning share a path
    reuse             what an engine does with an index, as plain functions, in miniature
    outline           where each edge of a tree stands when it is drawn

Both indexes are PrefixIndex, and give the same hits.
"""

from kvlab.prefix.hash_chain import HashChainIndex, block_keys, new_keys
from kvlab.prefix.radix_tree import RadixTreeIndex

__all__ = ["HashChainIndex", "RadixTreeIndex", "block_keys", "new_keys"]
