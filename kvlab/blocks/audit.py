"""An inventory of the pool: does every block stand where its owners say (PAV 2; lab 03)? For tests and idle time.

    counted in the tables      ref_cnt      in the queue
    n > 0                      n            never            owned
    0                          0            once             free, or cached if it has a name
"""

from collections import Counter
from collections.abc import Mapping, Sequence


def audit(ref_cnts: Mapping[int, int], queue: Sequence[int], tables: Sequence[Sequence[int]]) -> dict[int, str]:
    """What is wrong with which block; empty if the books agree. O(blocks).

    ref_cnts: block id -> its reference count, for all usable blocks. queue: the ids in the free queue, in order.
    tables: the block ids of each request. A block has the first of these that is true of it:
    "unknown" (in queue or table, but no block of the pool), "miscounted" (ref_cnt is not the number of table entries),
    "owned and free" (in a table and in the queue), "queued twice", "lost" (in no table and not in the queue).
    """
    references = Counter(block_id for table in tables for block_id in table)
    queued = Counter(queue)
    found = {}
    for block_id in sorted({*ref_cnts, *references, *queued}):
        if block_id not in ref_cnts:
            found[block_id] = "unknown"
        elif ref_cnts[block_id] != references[block_id]:
            found[block_id] = "miscounted"
        elif references[block_id] and queued[block_id]:
            found[block_id] = "owned and free"
        elif queued[block_id] > 1:
            found[block_id] = "queued twice"
        elif not references[block_id] and not queued[block_id]:
            found[block_id] = "lost"
    return found
