"""Slots: a token's place in the flattened K/V tensors, from its request's block ids and back (L33 2.2; lab 03).

    position 37, block size 16      37 // 16 = 2, 37 % 16 = 5      block_ids[2] = 142      slot 142 * 16 + 5 = 2277

The slot mapping of a step lists the slots of all tokens that it computes, request after request: the rows that the
new K and V are written to.
"""

from collections.abc import Iterable, Sequence


def slot_of(block_ids: Sequence[int], position: int, block_size: int) -> int:
    """The slot of token `position` (from 0). IndexError if the table has no block for it."""
    if not 0 <= position < len(block_ids) * block_size:
        raise IndexError(f"position {position} has no slot: the table holds {len(block_ids)} blocks of {block_size}")
    return block_ids[position // block_size] * block_size + position % block_size


def position_of(block_ids: Sequence[int], slot: int, block_size: int) -> int:
    """The position whose slot it is: the inverse of slot_of. ValueError if the slot is in none of the blocks."""
    block_id, offset = divmod(slot, block_size)
    for index, candidate in enumerate(block_ids):
        if candidate == block_id:
            return index * block_size + offset
    raise ValueError(f"slot {slot} is in block {block_id}, which the table {list(block_ids)} does not hold")


def slot_mapping(chunks: Iterable[tuple[Sequence[int], int, int]], block_size: int) -> list[int]:
    """The slots of all tokens of one step, in order.

    chunks: for each request (block_ids, num_computed_tokens, num_scheduled_tokens); it computes the tokens at positions
    num_computed_tokens, ..., num_computed_tokens + num_scheduled_tokens - 1. IndexError if one of them has no block.
    """
    return [
        slot_of(block_ids, position, block_size)
        for block_ids, start, count in chunks
        for position in range(start, start + count)
    ]
