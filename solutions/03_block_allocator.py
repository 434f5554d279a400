# %% [markdown] lang="en"
# # Lab 03: The block allocator (块分配器)
#
# In lab 02 a request's K and V had to lie in one piece, and the pieces did not fit together. Paging cuts the memory
# into blocks of equal size. A request takes the blocks that are free, wherever they are, and a small table says in
# which order to read them.
#
# Somebody has to know at every moment which block belongs to whom. That is the block allocator. It is about a hundred
# lines of Python, and every answer of the server rests on it. In this lab you write it:
#
# 1. **addresses**: from a token's position to its slot, and back;
# 2. **the free queue**: which block is handed out next;
# 3. **the pool**: who owns what, and since when it is nobody's;
# 4. **inside a block**: in which order its numbers lie.
#
# At the end the engine runs on what you wrote.
#
# Read with it: L33 2.2 and 6.3, PAV 2 and 3.2.

# %%
from kvlab.lab import Lab

lab = Lab("03")
check, hint = lab.check, lab.hint

# %% [markdown] lang="en"
# ## 1. Whose card number is this?
#
# Here is an allocator in ten lines. `free` lists the blocks that nobody owns. `memory` is what the GPU holds.
#
# Ann's answer is complete, so her block is given back. In the same moment she closes her browser. The server aborts
# her request, and gives her block back. Both paths are right, each by itself.
#
# Before you run the cell: what will Bob read?

# %%
free = [1]
memory = {}


def start(user, text):
    block = free.pop(0)
    memory[block] = f"{user}: {text}"
    return block


def end(block):
    free.append(block)


ann = start("Ann", "what is a block table?")
end(ann)  # her answer is complete
end(ann)  # her browser is closed: abort

bob = start("Bob", "my card number is 4000 1234, is that valid?")
carl = start("Carl", "write a haiku on rain")

print("free list now:", free)
print("Bob's block: ", bob, "  he reads back:", memory[bob])
print("Carl's block:", carl, "  he reads back:", memory[carl])

# %% [markdown] lang="en"
# Bob's answer will be about rain. With other timing, Carl's would be about Bob's card.
#
# Look at what did *not* happen: no exception, no CUDA error, no memory out of bounds. The block went into the list
# twice, so it came out twice. This is a **double free** (重复释放). It cannot be seen from outside, so the allocator
# itself has to notice.
#
# ## 2. A number that does not add up
#
# A list has another problem. You will meet **prefix caching** (前缀缓存) in lab 05. Here you need one fact about it:
# a block that nobody owns may still hold K and V that somebody can use again. So it waits among the free blocks, and
# when a prompt finds it there, it must be pulled out, *from wherever it stands*.
#
# An 80 GB GPU with Llama-3-8B has about 27,000 blocks. A prompt of 3,000 tokens finds its first 187 blocks in the
# cache. That saves some 300 ms of computing on an A100. How long does it take to pull 187 blocks out of a Python list
# of 27,000? Commit a guess, in milliseconds. (A step that writes one token for every running user takes about 20 ms.)

# %%
lab.predict("list", None, unit="ms")

# %%
import random
import time
from collections import Counter, OrderedDict

from kvlab.blocks import BlockPoolBase, KVCacheBlock, OutOfBlocks

NUM_BLOCKS = int((0.9 * 80e9 - 16e9) / (16 * 128 * 1024))  # 16 GB of weights; 16 tokens a block, 128 KiB a token
queue = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
hits = random.Random(0).sample(queue, 187)

started = time.perf_counter()
for block in hits:
    queue.remove(block)
list_ms = 1e3 * (time.perf_counter() - started)

print(f"{NUM_BLOCKS:,} blocks, 187 taken out of the middle")
lab.compare("list", list_ms)

# %% [markdown] lang="en"
# While this runs, nobody gets a token: the scheduler has one thread. The list is searched from its front each time,
# and then everything behind the gap moves up by one. You will build a queue in which both cost nothing.
#
# ## 3. The picture
#
# Three things, and you will write all three:
#
# - the **pool** (块池): all blocks, and for each its number of owners, `ref_cnt` (引用计数);
# - the **free queue** (空闲队列): blocks without an owner, in the order in which they will be handed out;
# - one **block table** (块表) for each request: its blocks, in the order of its text.
#
# In the figure look at three things. A's blocks are not neighbours: 1, 2 and 5. Block 1 stands in two tables, so it
# has two owners. And the queue does not care about numbers: 6 will be handed out before 4.

# %%
import matplotlib.pyplot as plt

from kvlab.blocks import BlockPool as OurPool
from kvlab.lab.draw_pool import draw_address, draw_pool, draw_queue, draw_states, player, snapshot

pool = OurPool(8)
a, b, gone = pool.get_new_blocks(2), pool.get_new_blocks(1), pool.get_new_blocks(1)
a += pool.get_new_blocks(1)
pool.touch(a[:1])
pool.free_blocks(gone)
fig, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
caption = "8 blocks; block 0 is never handed out (it is where padding points)"
draw_pool(ax, snapshot(pool, {"A": a, "B": [a[0], *b]}, caption))

# %% [markdown] lang="en"
# ## 4. Addresses
#
# ### By hand
#
# A **slot** (槽位) is room for the K and V of one token. Block `b` has the slots from `b * B` on, `B` of them, where
# `B` is the block size. A token at **position** `p` (its place in the text, from 0) finds its slot in three steps:
#
#     i    = p // B              the logical block (逻辑块), and
#     o    = p % B               how far into it
#     slot = table[i] * B + o    table[i] is the physical block (物理块)
#
# Take a pencil. Block size 16, table [9, 61, 142]. In which slot is token 37? Write it into the cell.

# %%
lab.predict("slot of token 37", None)

# %% [markdown] lang="en"
# ### Exercise 1: there and back
#
# Two functions of a few lines. Be strict about positions that have no block. Python reads `table[-1]` without
# complaint, and a C kernel would read whatever lies there: somebody else's token.

# %% ex="slots"
def slot_of(block_ids, position, block_size):
    """The slot of the token at `position`, counted from 0.

    block_ids: the request's block table: physical block ids in logical order, a list of int.
    block_size: tokens that a block holds.
    IndexError if the table has no block for this position; a negative position has none either.
    """
    ### BEGIN SOLUTION
    if not 0 <= position < len(block_ids) * block_size:
        raise IndexError(f"position {position} has no block in {block_ids}")
    index, offset = divmod(position, block_size)
    return block_ids[index] * block_size + offset
    ### END SOLUTION


def position_of(block_ids, slot, block_size):
    """The position of the token in `slot`: the inverse of slot_of.

    ValueError if the slot is in none of the table's blocks.
    """
    ### BEGIN SOLUTION
    block_id, offset = divmod(slot, block_size)
    return block_ids.index(block_id) * block_size + offset
    ### END SOLUTION

# %% check="slots"
check("slots")

# %%
find_slot = lab.best("slot_of")
lab.compare("slot of token 37", find_slot([9, 61, 142], 37, 16))

# %% [markdown] lang="en"
# In the figure the block size is 4. Follow the arrows from token 7 to its slot, then do the same for token 8 in your
# head. The two are neighbours in the text. In memory they are 9 slots apart.

# %%
TABLE = [9, 2, 5]
fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
draw_address(ax, TABLE, num_tokens=11, block_size=4, position=7)
print("slots of tokens 0 to 10:", [find_slot(TABLE, p, 4) for p in range(11)])

# %%
player(range(11), lambda ax, p: draw_address(ax, TABLE, num_tokens=11, block_size=4, position=p), size=(9, 3))

# %% [markdown] lang="en"
# ### Exercise 2: all slots of one step
#
# In one step the engine computes tokens of many requests. One request may bring a chunk of its prompt, another a
# single new token. The GPU gets one flat list that says where each new K and V is written: the **slot mapping**
# (槽位映射).
#
# A request that has computed `start` tokens and is given `count` more computes positions `start` to `start + count -
# 1`. There is no special case for a decode: it is a chunk of one.

# %% ex="slot_mapping"
def slot_mapping(chunks, block_size):
    """The slots of all tokens of one step: a list of int.

    chunks: one (block_ids, start, count) for each request, in the order of the step. The request computes `count`
    tokens, the first of them at position `start`.
    IndexError if a position has no block.
    """
    slot = lab.best("slot_of")  # your slot_of if it is solved, else ours
    ### BEGIN SOLUTION
    slots = []
    for table, first, number in chunks:
        slots += [slot(table, position, block_size) for position in range(first, first + number)]
    return slots
    ### END SOLUTION

# %% check="slot_mapping"
check("slot_mapping")

# %% [markdown] lang="en"
# A step of three requests, block size 4. A computes the rest of its prompt, B and C decode. Cover the output and say
# how many numbers there will be.

# %%
step = [([9, 2, 5], 3, 6), ([7], 2, 1), ([1, 8, 3], 8, 1)]
print(lab.best("slot_mapping")(step, 4))

# %% [markdown] lang="en"
# ## 5. The free queue
#
# Three things happen to the queue of free blocks:
#
# | method | when | where in the queue |
# |---|---|---|
# | `popleft` | a request needs a block | the head: the block that has been free for longest |
# | `append` | the last owner of a block has gone | the tail |
# | `remove` | a prompt finds a cached block | anywhere |
#
# All three must cost the same, however long the queue is: O(1). The answer is a **doubly linked list** (双向链表).
# Each block knows its neighbours, `prev_free_block` and `next_free_block`. No new object is made when a block comes
# or goes: the links are fields of the block itself.
#
# At the two ends stand **sentinels** (哨兵): two blocks that hold nothing and never leave. Thanks to them every block
# in the queue has two neighbours, and no method needs a special case for the ends.
#
# In the figure, block 2 leaves. Count the links that must change: two of its neighbours, and its own two.

# %%
blocks = [KVCacheBlock(i) for i in (7, 2, 9, 4)]
queue = lab.best("FreeQueue")(blocks)  # ours, until yours is solved
fig, axes = plt.subplots(2, 1, figsize=(9, 2.4), layout="constrained")
draw_queue(axes[0], [b.block_id for b in queue.get_all_free_blocks()], "before", marked=2)
queue.remove(blocks[1])
draw_queue(axes[1], [b.block_id for b in queue.get_all_free_blocks()], "after remove(block 2)")

# %% [markdown] lang="en"
# The base class sets up the sentinels and gives you what is not interesting. Read it: it is all the state there is.

# %%
class FreeQueueBase:
    """A doubly linked queue of KVCacheBlock, without its three moves.

    head, tail: the sentinels. head.next_free_block is the first block, or tail if the queue is empty.
    num_free_blocks: how many blocks are in the queue, a number that the moves keep right.
    A block outside the queue has None in both of its links.
    """

    def __init__(self, blocks):
        self.head, self.tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self.head.next_free_block = self.tail
        self.tail.prev_free_block = self.head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def append_n(self, blocks):
        for block in blocks:
            self.append(block)

    def popleft_n(self, n):
        if n > self.num_free_blocks:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free_blocks} are free")
        return [self.popleft() for _ in range(n)]

    def get_all_free_blocks(self):
        found, block = [], self.head.next_free_block
        while block is not self.tail:
            found.append(block)
            block = block.next_free_block
        return found

# %% [markdown] lang="en"
# ### Exercise 3: the three moves
#
# Your check counts how often links are read or written, with 10 blocks and with 10,000. It does not use a clock.

# %% ex="free_queue"
class FreeQueue(FreeQueueBase):
    """The blocks that nobody owns, in the order in which they will be handed out."""

    def popleft(self):
        """Take out the block at the head and return it. OutOfBlocks, and nothing changed, if there is none."""
        ### BEGIN SOLUTION
        first = self.head.next_free_block
        if first is self.tail:
            raise OutOfBlocks("the free queue is empty")
        self.remove(first)
        return first
        ### END SOLUTION

    def append(self, block):
        """Put `block` at the tail. ValueError, and nothing changed, if it is in the queue already (it has links)."""
        ### BEGIN SOLUTION
        if block.prev_free_block is not None:
            raise ValueError(f"block {block.block_id} is in the free queue already")
        left, right = self.tail.prev_free_block, self.tail
        block.prev_free_block, block.next_free_block = left, right
        left.next_free_block = right.prev_free_block = block
        self.num_free_blocks += 1
        ### END SOLUTION

    def remove(self, block):
        """Take `block` out from wherever it stands; then both of its links are None.

        ValueError, and nothing changed, if it is not in the queue. O(1): do not walk.
        """
        ### BEGIN SOLUTION
        left, right = block.prev_free_block, block.next_free_block
        if left is None:
            raise ValueError(f"block {block.block_id} is not in the free queue")
        left.next_free_block, right.prev_free_block = right, left
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        ### END SOLUTION

# %% check="free_queue"
check("free_queue")

# %% [markdown] lang="en"
# ### How much does it matter?
#
# Now with a clock, for a look and for no points. Three queues, 10² to 10⁶ blocks. From each, blocks are pulled out of
# the middle: a Python list, an `OrderedDict` from ids to blocks, and your linked list. Both axes are logarithmic, so
# a line that climbs one decade in each decade is O(N), and a flat one is O(1). The dotted line is the GPU of section
# 2.

# %%
LinkedQueue = lab.best("FreeQueue")


def microseconds_per_remove(size, kind, seed=0):
    blocks = [KVCacheBlock(i) for i in range(size)]
    victims = random.Random(seed).sample(blocks, min(size // 2, 4 if kind == "list" and size > 10_000 else 50))
    queue = {"list": list, "linked list": LinkedQueue,
             "OrderedDict": lambda blocks: OrderedDict((b.block_id, b) for b in blocks)}[kind](blocks)
    remove = queue.__delitem__ if kind == "OrderedDict" else queue.remove
    keys = [b.block_id for b in victims] if kind == "OrderedDict" else victims
    started = time.perf_counter()
    for key in keys:
        remove(key)
    return 1e6 * (time.perf_counter() - started) / len(keys)


SIZES = [10**2, 10**3, 10**4, 10**5, 10**6]
timings = {kind: [microseconds_per_remove(n, kind) for n in SIZES] for kind in ("list", "OrderedDict", "linked list")}

fig, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for values, marker, colour in zip(timings.values(), "so^", ("#D55E00", "#56B4E9", "#0072B2"), strict=True):
    ax.loglog(SIZES, values, marker=marker, color=colour, lw=2)
ax.text(SIZES[3] * 0.8, timings["list"][3] * 1.5, "list", ha="right", fontsize=11)
ax.text(SIZES[0], 0.04, "OrderedDict (circles), linked list (triangles)", fontsize=11)
ax.axvline(NUM_BLOCKS, color="#888888", lw=1, ls=":")
ax.set(xlabel="blocks in the queue", ylabel="one removal from the middle, µs", ylim=(0.02, None))
ax.text(NUM_BLOCKS * 1.1, 0.025, f"{NUM_BLOCKS:,} blocks: 80 GB, Llama-3-8B", fontsize=9, color="#444444")
ax.spines[["top", "right"]].set_visible(False)

linked_ms = timings["linked list"][2] * 187 / 1e3
print(f"187 removals: {list_ms:.1f} ms with a list, about {linked_ms:.2f} ms with yours")

# %% [markdown] lang="en"
# If the lower lines climb a little, that is the processor: a million blocks do not fit its caches, so each removal
# waits for memory. Your check counts accesses instead, and their number does not change.
#
# The `OrderedDict` is a surprise to many: it is O(1) as well. (Inside, it is a doubly linked list.) So the reason for
# your own links is not the removal alone. It is that links inside the blocks need no second object for each block, no
# hashing, and nothing to be allocated or collected while the engine runs.
#
# ## 6. The pool
#
# ### The formal model
#
# Of each block three facts are known: how many owners it has, whether it stands in the free queue, and whether it has
# a **name**. A name is what a prefix index finds it by; `block_hash` holds it, and it says: "my K and V are those of
# this text". Not all combinations are allowed. There are three **states** (状态):
#
# | state | `ref_cnt` | in the queue | `block_hash` | meaning |
# |---|---|---|---|---|
# | **free** (空闲) | 0 | yes | `None` | holds nothing that anybody may read |
# | **owned** (占有) | 1 or more | no | any | stands in so many block tables |
# | **cached** (缓存) | 0 | yes | set | nobody's, but a prompt may find it again |
#
# The arrows are the three moves that you will write.

# %%
fig, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
draw_states(ax)

# %% [markdown] lang="en"
# Three laws hold after every move. Every fault that you will meet breaks one of them.
#
# 1. A block's `ref_cnt` is the number of tables that it stands in.
# 2. It is in the queue exactly when `ref_cnt` is 0, and then once.
# 3. Nobody overwrites a block that still has a name.
#
# ### Sanity check, with a pencil
#
# A pool has 10 blocks; block 0 is the null block. A owns 4 blocks, B owns 3, and 2 of these are the same blocks. Two
# blocks are cached. How many blocks can be handed out now?

# %%
lab.predict("can be handed out", None, unit="blocks")

# %%
owned = 4 + 3 - 2
lab.compare("can be handed out", 10 - 1 - owned)

# %% [markdown] lang="en"
# The cached ones count: they are given up when somebody needs them. A server whose memory is "full" of cached blocks
# is not full.
#
# ### Three moves
#
# You write each move as a function whose first argument is the pool; afterwards they become methods. What the pool
# holds is set up by `kvlab.blocks.BlockPoolBase`:
#
# | attribute | what it is |
# |---|---|
# | `pool.blocks` | all blocks; `pool.blocks[7].block_id == 7` |
# | `pool.free_block_queue` | a free queue as in exercise 3: `popleft`, `append`, `remove`, `num_free_blocks` |
# | `pool.evict(block)` | takes away the name of a block that has one, on the block and in the index |
#
# ### Exercise 4: hand out, all or none
#
# A request that needs five blocks cannot use three. If it kept them and waited, and another did the same, both would
# wait for ever. So the call gives all or none: it is **atomic** (原子的).

# %% ex="get_new_blocks"
def get_new_blocks(pool, num_blocks):
    """Hand out `num_blocks` blocks from the head of the queue: a list of KVCacheBlock, in that order.

    Each has ref_cnt 1 then. A block that has a name (block_hash is not None) loses it: pool.evict(block).
    OutOfBlocks, and nothing changed, if fewer are free.
    """
    ### BEGIN SOLUTION
    if num_blocks > pool.free_block_queue.num_free_blocks:
        raise OutOfBlocks(f"{num_blocks} blocks asked for, {pool.free_block_queue.num_free_blocks} are free")
    new = []
    for _ in range(num_blocks):
        block = pool.free_block_queue.popleft()
        if block.block_hash is not None:
            pool.evict(block)
        block.ref_cnt = 1
        new.append(block)
    return new
    ### END SOLUTION

# %% check="get_new_blocks"
check("get_new_blocks")

# %% [markdown] lang="en"
# ### Exercise 5: take back, and notice Ann
#
# One owner fewer for each block of the list. Only a block without any goes to the queue. It keeps its name: its K and
# V are as good as before.
#
# And here the double free must be noticed, the whole call or nothing. Think of these two before you write:
#
# - `[8, 3]`, where 8 has an owner and 3 has none: after the error, 8 must still have its owner;
# - `[5, 5]`, where 5 has one owner.

# %% ex="free_blocks"
def free_blocks(pool, ordered_blocks):
    """One owner fewer for each of `ordered_blocks`; a block may occur more than once, for owners of its own.

    A block that has no owner left goes to the tail of the queue, in the order of the list. Names stay.
    ValueError, and nothing changed, if a block occurs more often than it has owners.
    """
    ### BEGIN SOLUTION
    blocks = list(ordered_blocks)
    for block, times in Counter(blocks).items():
        if times > block.ref_cnt:
            raise ValueError(f"block {block.block_id} was freed twice")
    for block in blocks:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            pool.free_block_queue.append(block)
    ### END SOLUTION

# %% check="free_blocks"
check("free_blocks")

# %% [markdown] lang="en"
# ### Exercise 6: a hit, and the pool is complete
#
# `touch` adds an owner. If the block was nobody's, it stands somewhere in the queue and has to leave it.
#
# The class takes your two functions as methods where they are solved, and ours where they are not. If you solve one
# of them later, run this cell again.

# %% ex="block_pool"
class BlockPool(BlockPoolBase):
    """All blocks of one KV cache, and the three moves."""

    get_new_blocks = lab.best("get_new_blocks")
    free_blocks = lab.best("free_blocks")

    def touch(self, blocks):
        """One owner more for each of `blocks`. Those that nobody owned leave the free queue. Names stay."""
        ### BEGIN SOLUTION
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
        ### END SOLUTION

# %% check="block_pool"
check("block_pool")

# %% [markdown] lang="en"
# ## 7. Watch it run
#
# Nine blocks, your queue, your pool. The script below tells a story of five requests. B and D begin with the same
# words, and so does E. `Names` stands in for a prefix index: it only knows which block has which name. Lab 05 builds
# the real one.
#
# Every frame is read off the pool after a move. Nothing is drawn by hand.

# %%
class Names:
    """The simplest index: names and blocks."""

    block_size = 4

    def __init__(self):
        self.cached_block_hash_to_block = {}

    def publish(self, block, name):
        block.block_hash = name
        self.cached_block_hash_to_block[name] = block

    def remove(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None


names = Names()
pool = lab.best("BlockPool")(9, prefix_index=names, free_queue=lab.best("FreeQueue"))
tables, frames = {}, [snapshot(pool, {}, "0  nobody is here")]


def note(caption):
    frames.append(snapshot(pool, tables, f"{len(frames)}  {caption}"))


tables["A"] = pool.get_new_blocks(3)
note("A comes with a prompt of 3 blocks")
tables["B"] = pool.get_new_blocks(2)
note("B comes with 2 blocks")
tables["A"] += pool.get_new_blocks(1)
note("A grows by one block")
tables["C"] = pool.get_new_blocks(1)
note("C comes with 1 block")
for block, name in zip(tables["B"], ("You are", "kind."), strict=True):
    names.publish(block, name)
pool.free_blocks(tables.pop("B")[::-1])
note("B ends. Its full blocks have names, and go back last one first")
pool.free_blocks(tables.pop("C"))
note("C ends. Its block was not full, so it has no name")
hit = names.cached_block_hash_to_block["You are"]
pool.touch([hit])
tables["D"] = [hit]
note("D begins like B: block 4 leaves the middle of the queue")
tables["D"] += pool.get_new_blocks(1)
note("D needs a block of its own")

# %% [markdown] lang="en"
# The last picture so far. E comes next. It begins like D, and then it needs one block of its own. Which block will
# that be?

# %%
fig, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
draw_pool(ax, frames[-1])

# %%
lab.predict("E's own block", None)

# %%
pool.touch([hit])
tables["E"] = [hit, *pool.get_new_blocks(1)]
note("E begins like D; for its own text it gets the head of the queue, and “kind.” is forgotten")
pool.free_blocks(tables.pop("D")[::-1])
note("D ends: its own block is free, the shared one still has an owner")
lab.compare("E's own block", tables["E"][1].block_id)

# %% [markdown] lang="en"
# Six moments. A thick outline marks what has changed. Look at:
#
# - **step 5**: B's blocks are striped: nobody's, but not empty. The queue holds 5 before 4: the *end* of B's text
#   will be given up first, the beginning, which others share, last;
# - **step 7**: block 4 is pulled out of the *middle* of the queue. This is the move that a list is bad at;
# - **step 9**: block 4 has two owners (×2), and block 5 has lost its name together with its content;
# - **step 10**: D has gone, and block 4 did not go with it.

# %%
shown = (2, 5, 6, 7, 9, 10)
fig, axes = plt.subplots(len(shown), 1, figsize=(9, 2.25 * len(shown)), layout="constrained")
for ax, i in zip(axes, shown, strict=True):
    draw_pool(ax, frames[i], before=frames[i - 1])

# %%
player(frames, lambda ax, i: draw_pool(ax, frames[i], frames[i - 1] if i else None), size=(9, 2.4))

# %% [markdown] lang="en"
# And Ann? The same story on your pool, the three lines that went wrong at the beginning:

# %%
pool = lab.best("BlockPool")(3, free_queue=lab.best("FreeQueue"))
ann = pool.get_new_blocks(1)
pool.free_blocks(ann)
try:
    pool.free_blocks(ann)
    print("freed twice, and nobody has noticed")
except ValueError as error:
    print("ValueError:", error)
bob, carl = pool.get_new_blocks(1), pool.get_new_blocks(1)
print("Bob's block:", bob[0].block_id, "  Carl's block:", carl[0].block_id)

# %% [markdown] lang="en"
# ## 8. Inside a block
#
# So far a slot was a number. In memory it is room for `num_kv_heads × head_dim` numbers of K, and as many of V, in
# each layer. In which order do they lie? A layout is named by its letters, from slow to fast:
#
# | layout | a block is | used for |
# |---|---|---|
# | `NHD` | [token, head, dim] | kvlab, FlashAttention |
# | `HND` | [head, token, dim] | the other common choice |
# | `HDNX` | [head, dim // x, token, dim % x] | the textbook's K (L33 2.2) |
# | `HDN` | [head, dim, token] | the textbook's V |
#
# A GPU thread reads 16 bytes at once. In fp16 that is 8 numbers, and the textbook's `x` is 8.
#
# Before you compute: one thread reads the *first 16 bytes* of a block. How many of these bytes belong to token 0, in
# the textbook's layout for V?

# %%
lab.predict("bytes of token 0 in the first 16, HDN", None, unit="bytes")

# %% [markdown] lang="en"
# ### By hand
#
# Block size 4, 2 heads, head_dim 8, 2 bytes a number, layout `NHD`. One dim further is 1 number. One head further is
# 8 numbers. One token further is 2 · 8 = 16 numbers, so 32 bytes. One block further is 4 · 16 numbers, so 128 bytes.
#
# These steps are called **strides** (步长). Each is the product of the sizes of everything that stands to its right.
#
# ### Exercise 7: the byte offset
#
# The only hard layout is `HDNX`. It cuts `dim` in two, so there is no single stride for `dim`: `dim // x` and `dim %
# x` have one each.

# %% ex="byte_offset"
def byte_offset(layout, block, token, head, dim, block_size, num_kv_heads, head_dim, itemsize=2, x=8):
    """How many bytes after the pool's first byte the number at (block, token, head, dim) begins: an int.

    layout: "NHD", "HND", "HDNX" or "HDN", see the table; blocks follow each other. ValueError for any other.
    token: the offset in the block, 0 to block_size - 1.
    itemsize: bytes of one number. x: numbers in a piece of HDNX; it divides head_dim.
    IndexError if token, head or dim is outside the block.
    """
    ### BEGIN SOLUTION
    digits = {"N": (token, block_size), "H": (head, num_kv_heads), "D": (dim, head_dim)}
    for place, size in digits.values():
        if not 0 <= place < size:
            raise IndexError(f"{place} is outside: there are {size}")
    if layout == "HDNX":
        digits["D"] = (dim // x, head_dim // x)
        digits["X"] = (dim % x, x)
    elif layout not in ("NHD", "HND", "HDN"):
        raise ValueError(f"unknown layout {layout!r}")
    offset, stride = 0, 1
    for letter in reversed(layout):
        place, size = digits[letter]
        offset += place * stride
        stride *= size
    return (block * stride + offset) * itemsize
    ### END SOLUTION

# %% check="byte_offset"
check("byte_offset")

# %% [markdown] lang="en"
# The picture asks your function for the place of every number of a small block (4 tokens, 2 heads, head_dim 16) and
# draws the first 64 bytes. Each cell is one number and says whose token it is. A thick frame is one 16-byte load.

# %%
offset_in = lab.best("byte_offset")
LAYOUTS = {"NHD": "NHD", "HND": "HND", "HDNX": "HDNX, the textbook's K", "HDN": "HDN, the textbook's V"}
SMALL = {"block_size": 4, "num_kv_heads": 2, "head_dim": 16}


def tokens_by_place(layout, block_size, num_kv_heads, head_dim, itemsize=2, x=8):
    """For each number of block 0, in the order of memory: (token, head, dim)."""
    return sorted(
        ((t, h, d) for t in range(block_size) for h in range(num_kv_heads) for d in range(head_dim)),
        key=lambda thd: offset_in(layout, 0, *thd, block_size, num_kv_heads, head_dim, itemsize, x),
    )


fig, axes = plt.subplots(4, 1, figsize=(9.5, 4.4), layout="constrained")
for ax, (layout, title) in zip(axes, LAYOUTS.items(), strict=True):
    for i, (token, head, _) in enumerate(tokens_by_place(layout, **SMALL)[:32]):
        colour = ("#E69F00", "#56B4E9", "#FFFFFF", "#CC79A7")[token]
        ax.add_patch(plt.Rectangle((i, 0), 1, 1, facecolor=colour, edgecolor="#888888", lw=0.6))
        ax.text(i + 0.5, 0.5, token, ha="center", va="center", fontsize=10)
        if i % 8 == 0:
            ax.add_patch(plt.Rectangle((i, 0), 8, 1, fill=False, edgecolor="black", lw=2.6, zorder=3))
            ax.text(i + 4, -0.32, f"head {head}", ha="center", va="center", fontsize=8, color="#444444")
    ax.set(xlim=(-0.2, 32.2), ylim=(-0.6, 1.1))
    ax.set_title(title, loc="left", fontsize=10)
    ax.axis("off")

# %% [markdown] lang="en"
# Three of the four give a thread 16 bytes of *one* token. So 16-byte loads alone are not why somebody invented
# `HDNX`. Look at what the *next* thread gets. With a thread for each token, in `HDNX` neighbouring threads read
# neighbouring pieces: the loads of a warp join into one run. In `HND` they would lie `head_dim` numbers apart.
#
# `HDN` looks like a mistake and is none. For the output, V is added up *over tokens*, dim by dim. There eight tokens
# of one dim are what a thread wants.
#
# The table puts numbers on it, for a real shape: Llama-3-8B, block size 16, 8 KV heads of 128, fp16.

# %%
from IPython.display import Markdown

SHAPE = {"block_size": 16, "num_kv_heads": 8, "head_dim": 128}


def places_of(layout, token, head=None):
    """Byte offsets of all numbers of one token in block 0; of one head, or of all."""
    heads = range(8) if head is None else [head]
    return sorted(offset_in(layout, 0, token, h, d, **SHAPE) for h in heads for d in range(128))


def pieces(places, itemsize=2):
    """Into how many separate runs of bytes they fall."""
    return 1 + sum(b != a + itemsize for a, b in zip(places[:-1], places[1:], strict=True))


bytes_of_one_token, pieces_of_one_token = {}, {}
rows = ["| layout | bytes of token 0 in the first 16 | pieces of a token's K | from a token to the next |"]
rows.append("|---|---|---|---|")
for layout in LAYOUTS:
    bytes_of_one_token[layout] = 2 * sum(place < 16 for place in places_of(layout, 0))
    pieces_of_one_token[layout] = pieces(places_of(layout, 0))
    step = offset_in(layout, 0, 1, 0, 0, **SHAPE) - offset_in(layout, 0, 0, 0, 0, **SHAPE)
    rows.append(f"| {layout} | {bytes_of_one_token[layout]} | {pieces_of_one_token[layout]:,} | {step} bytes |")
lab.compare("bytes of token 0 in the first 16, HDN", bytes_of_one_token["HDN"])
Markdown("\n".join(rows))

# %% [markdown] lang="en"
# ## 9. Put it into the engine
#
# The engine of kvlab asks a pool for the three moves, and its pool asks a queue for its own. It cannot tell yours
# from ours. The cell runs the same requests twice, on your parts and on ours, with prefix caching off. Every token
# must be the same: an allocator decides *where* things lie, never *what* is written. (Without torch, a stand-in for
# the model takes its place.)

# %%
result = lab.run_engine(enable_prefix_caching=False)

# %% [markdown] lang="en"
# Your pool keeps names and evicts. So it also runs with the prefix cache on, over the index that you will write in
# lab 05:

# %%
result_cached = lab.run_engine(enable_prefix_caching=True)

# %% [markdown] lang="en"
# ### Now break it
#
# What would users notice if a move were wrong? Each pool below is yours with one fault. The model is a stand-in whose
# next token depends on everything that it reads back through the block tables, so a wrong block shows as a wrong
# answer. Twelve requests begin alike, one of them is sampled three times, and the pool is small.
#
# Guess first: how many of the four faults will stop the engine with an error?

# %%
lab.predict("faults that stop the engine", None, unit="of 4")

# %%
from kvlab.lab.beside import run_beside_ours
from kvlab.parts import Parts

MyPool = lab.best("BlockPool")


class ReturnsAtOnce(MyPool):
    """free_blocks: a block goes to the queue, whoever else owns it"""

    def free_blocks(self, blocks):
        for block in blocks:
            if block.ref_cnt > 0:
                block.ref_cnt = 0
                self.free_block_queue.append(block)


class StaysInLine(MyPool):
    """touch: a block that is hit stays in the queue"""

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.next_free_block is None:
                self.free_block_queue.append(block)


class KeepsOldNames(MyPool):
    """get_new_blocks: the index still knows a block that is overwritten"""

    def evict(self, block):
        block.block_hash = None


class CountsOne(MyPool):
    """touch: one owner is counted, however many there are"""

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt = 1


small = {"block_size": 4, "num_gpu_blocks_override": 48, "max_model_len": 144, "max_num_batched_tokens": 64}
rows = ["| pool | wrong answers | what stopped it |", "|---|---|---|"]
stopped = 0
for pool_class in (MyPool, ReturnsAtOnce, StaysInLine, KeepsOldNames, CountsOne):
    run = run_beside_ours(Parts(block_pool=pool_class), stand_in=True, num_requests=12, **small)
    wrong = sum(yours != ours for yours, ours in zip(run.yours.tokens, run.ours.tokens, strict=False))
    what = "without a fault" if pool_class is MyPool else pool_class.__doc__
    stopped += bool(run.yours.error)
    answers = "-" if run.yours.error else f"{wrong} of {len(run.ours.tokens)}"
    rows.append(f"| {what} | {answers} | {run.yours.error.splitlines()[0] if run.yours.error else 'nothing'} |")
lab.compare("faults that stop the engine", stopped)
Markdown("\n".join(rows))

# %% [markdown] lang="en"
# A wrong allocator does not crash. It answers, and some answers come from somebody else's tokens. Only one fault was
# stopped, and look by what: by the double free that *you* notice in exercise 5. That is why engines check their books
# in tests, and some in idle time too. The second stretch exercise is such a check.
#
# ## 10. What the textbook says and what we measured
#
# Each row is computed in this notebook, from your functions where they are solved. First the numbers for blocks of
# one token: what the block table costs, what handing out costs, and how well the memory is read.

# %%
import numpy as np

KV_PER_TOKEN = 128 * 1024  # Llama-3-8B: 32 layers, K and V, 8 heads of 128, fp16
CONTEXT = 4096


def lines_read(layout, block_size, head_dim, itemsize):
    """128-byte lines touched by reading one head's K of a block, over the lines that its bytes would fill."""
    shape = (block_size, 8, head_dim, itemsize, 16 // itemsize)
    touched = {offset_in(layout, 0, t, 0, d, *shape) // 128 for t in range(block_size) for d in range(head_dim)}
    return len(touched) / (block_size * head_dim * itemsize / 128)


def time_to_hand_out(block_size):
    """Milliseconds to hand out, and take back, the blocks of one prompt of 4096 tokens."""
    n = CONTEXT // block_size
    pool = MyPool(n + 1, free_queue=lab.best("FreeQueue"))
    started = time.perf_counter()
    pool.free_blocks(pool.get_new_blocks(n)[::-1])
    return 1e3 * (time.perf_counter() - started)


def gather_rate(block_size, megabytes=64):
    """GB/s of copying blocks in shuffled order on this machine's CPU: K of one layer, 2 KiB a token."""
    kv = np.ones((megabytes * 2**20 // (2048 * block_size), 1024 * block_size), np.float16)
    order, out = np.random.default_rng(0).permutation(len(kv)), np.ones_like(kv)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        np.take(kv, order, axis=0, out=out, mode="clip")
        seconds.append(time.perf_counter() - started)
    return kv.nbytes / min(seconds) / 1e9


BLOCKS = (1, 4, 16, 128)
table_bytes = {B: 4 * CONTEXT / B for B in BLOCKS}  # an int32 for each block
of_kv = {B: table_bytes[B] / (CONTEXT * KV_PER_TOKEN) for B in BLOCKS}
hand_out = {B: min(time_to_hand_out(B) for _ in range(3)) for B in BLOCKS}
LARGE, MIDDLE, TINY = (128, 2), (64, 2), (64, 1)  # head_dim, bytes a number
SHAPES = {LARGE: "heads of 128, fp16", MIDDLE: "heads of 64, fp16", TINY: "heads of 64, FP8"}
lines = {(k, shape, B): lines_read(k, B, *shape) for k in LAYOUTS for shape in SHAPES for B in BLOCKS}
rates = {B: gather_rate(B) for B in BLOCKS}


def row(what, cells):
    return f"| {what} | " + " | ".join(cells) + " |"


rows = [row("", [f"block size {B}" for B in BLOCKS]), "|---" * (len(BLOCKS) + 1) + "|"]
rows.append(row("block table of 4096 tokens", [f"{table_bytes[B] / 1024:g} KiB" for B in BLOCKS]))
rows.append(row("the same, as a share of their K and V", [f"{100 * of_kv[B]:.1g} %" for B in BLOCKS]))
rows.append(row("hand out and take back 4096 tokens", [f"{hand_out[B]:.2f} ms" for B in BLOCKS]))
for shape, name in SHAPES.items():
    for k in ("NHD", "HND") if shape == TINY else ("NHD",):
        rows.append(row(f"lines read for lines needed, {k}, {name}", [f"{lines[k, shape, B]:.2f}" for B in BLOCKS]))
rows.append(row("copying shuffled blocks, this CPU", [f"{rates[B]:.1f} GB/s" for B in BLOCKS]))
Markdown("\n".join(rows))

# %% [markdown] lang="en"
# Read the table from top to bottom:
#
# - the block table is 16 times as long with blocks of one token as with 16, and still next to nothing beside the K
#   and V;
# - handing out costs the scheduler about as many times more, and it has one thread;
# - a GPU reads whole lines of 128 bytes. One head of one token of Llama-3-8B is 256 bytes, two whole lines, wherever
#   it lies: nothing is lost. With small heads in 8 bits half a line is lost with one token to a block; `NHD` loses it
#   at every block size;
# - the last row is a CPU, which likes long runs. It is no measurement of a GPU.

# %%
claims = []


def claim(where, says, we_get, holds, condition=""):
    verdict = {True: "holds", False: "contradicted", None: "not known yet"}[holds]
    claims.append(row(where, [says, we_get, f"{verdict} {condition}".replace(" ;", ";").strip()]))


index, offset = divmod(37, 16)
place = find_slot([9, 61, 142], 37, 16)
claim(
    "L33 2.2", "token 37, B = 16: logical block 2, offset 5, physical block 142",
    f"({index}, {offset}); with table[2] = 142, slot {place} in block {place // 16}",
    (index, offset, place // 16) == (2, 5, 142),
)

block_stride = {k: offset_in(k, 1, 0, 0, 0, **SHAPE) for k in LAYOUTS}
token_stride = {k: offset_in(k, 0, 1, 0, 0, **SHAPE) for k in LAYOUTS}
sums = [142 * block_stride[k] + 5 * token_stride[k] == offset_in(k, 142, 5, 0, 0, **SHAPE) for k in LAYOUTS]
one_piece = ", ".join(k for k in LAYOUTS if pieces_of_one_token[k] == 1)
claim(
    "L33 2.2", "its address: start + 142 block strides + 5 token strides",
    f"right for its first number in {sum(sums)} of {len(sums)} layouts; its K is one piece in {one_piece}, and "
    f"{pieces_of_one_token['HDNX']} pieces in the textbook's own layout",
    all(sums), "for the first number; for the whole token in NHD only",
)

claim(
    "L33 2.2", "x for 16-byte loads is usually 8",
    f"16 bytes are {16 // 2} fp16 or {16 // 1} FP8; a load of K brings {bytes_of_one_token['HDNX']} bytes of "
    f"one token, a load of V {bytes_of_one_token['HDN']}",
    16 // 2 == 8 and bytes_of_one_token["HDNX"] == 16, "for K of 16 bits",
)
claim(
    "L33 2.2", "K is rearranged for the sake of these loads",
    f"NHD and HND bring {bytes_of_one_token['NHD']} and {bytes_of_one_token['HND']} bytes of one token too; but the "
    f"piece is {token_stride['HDNX']} bytes from the next token's, not {token_stride['HND']}",
    token_stride["HDNX"] == 16, "for kernels that give each token to a thread or two",
)


def growth(kind):
    """The exponent e of time ~ N^e, from 1,000 blocks on."""
    return np.polyfit(np.log10(SIZES[1:]), np.log10(timings[kind][1:]), 1)[0]


slow, fast = growth("list"), growth("linked list")
claim(
    "L33 6.3", "out of the middle: a list O(N), a linked list O(1)",
    f"time grows as N^{slow:.2f} and N^{fast:.2f}; 187 hits take {list_ms:.0f} ms and {linked_ms:.2f} ms",
    bool(slow > 0.7 and fast < 0.5), f"(and an OrderedDict grows as N^{growth('OrderedDict'):.2f})",
)
counted = lab.results.get("free_queue")
claim(
    "PAV 3.2", "head out and tail in, both O(1)",
    "counted by your check: at most 20 accesses, at 10 and at 10,000 blocks",
    counted.passed if counted else None, "for your queue",
)

claim(
    "L33 8.1-2", "B = 1: the table grows tens of times",
    f"{table_bytes[1] / table_bytes[16]:.0f} times B = 16, {CONTEXT // (CONTEXT // 32)} times B = 32, to {of_kv[1]:.3%} of "
    f"the K and V; handing out takes {hand_out[1] / hand_out[16]:.0f} times as long as at 16",
    CONTEXT >= 20 * (CONTEXT // 32), "against blocks of 32; it costs scheduler time, hardly any memory",
)
large, tiny = max(lines[k, shape, 1] for k in LAYOUTS for shape in (LARGE, MIDDLE)), lines["HND", TINY, 1]
claim(
    "L33 8.1-2", "B = 1 ruins coalesced reading",
    f"lines read for lines needed: {large:.2f} with heads of 64 or 128 in fp16, {tiny:.2f} with 64 in FP8",
    large > 1.01, "for heads of 128 bytes or more" + ("; holds for smaller ones" if tiny > 1.01 else ""),
)
claim(
    "L33 8.1-2", "B = 1: the rate of reading collapses",
    f"{rates[1] / rates[16]:.0%} of the rate at 16, copying on this CPU",
    rates[1] < 0.7 * rates[16], "on this CPU; no GPU was measured here",
)
large, tiny = max(lines[k, shape, 4] for k in LAYOUTS for shape in (LARGE, MIDDLE)), lines["HND", TINY, 4]
claim(
    "L33 A.3", "B = 4 hardly fills a line of 128 bytes",
    f"lines read for lines needed: {large:.2f} with heads of 64 or 128 in fp16, {tiny:.2f} with 64 in FP8 (HND)",
    large > 1.01 or tiny > 1.01, "for these shapes: four tokens of one head are 256 bytes at least",
)

Markdown("\n".join([row("where", ["the textbook says", "we get", "so it"]), "|---|---|---|---|", *claims]))

# %% [markdown] lang="en"
# Be fair to the rows that say "contradicted". They fit the kernel that the textbook has in mind. The first
# PagedAttention kernel gave each token to a thread or two and filled a warp with tokens of one block; blocks of one
# token would leave most of the warp idle. Kernels of today give neighbouring threads neighbouring *dims*, and then a
# token is enough. Engines do run on pages of one token: SGLang lists its Triton backend for pages of one token only. What small blocks do
# cost is bookkeeping, and that row holds.
#
# ## 11. What to remember
#
# - A slot is `table[p // B] * B + p % B`. The table makes scattered blocks look like one text.
# - A block is free, owned or cached. It is in the queue exactly when nobody owns it.
# - "Freed" means one owner fewer. The content stays until somebody else gets the block, and then its name must go
#   first.
# - Allocation is all or none, and a double free is an error at once. Both protect people, not memory.
# - The linked list is there for one move: out of the middle, in O(1).
#
# **To think about**
#
# 1. The queue hands out the block that has been free for longest. What would change for prefix hits if `append` put
#    blocks at the head, like a stack?
# 2. Two requests share 3 blocks and own 2 each besides. One of them ends. By how many does the number of free blocks
#    grow? What does that say about choosing a victim when memory runs out?
# 3. One layer's K of Llama-3-8B has 16 · 8 · 128 numbers in a block. From which block id on does a kernel that
#    computes `block * stride` in 32-bit signed integers read the wrong place? Does an 80 GB GPU get there? Does it
#    with blocks of 128 tokens? What decides it?
# 4. Why does the null block exist at all? (Look for a place where an address must be valid although nobody will use
#    what is there.)
#
# **Where this lives**
#
# | here | vLLM (under `vllm/`) | SGLang |
# |---|---|---|
# | `FreeQueue` | `FreeKVCacheBlockQueue` in `v1/core/kv_cache_utils.py` | a tensor of free page ids |
# | `BlockPool` | `BlockPool` in `v1/core/block_pool.py` | `TokenToKVPoolAllocator`; the radix tree holds locks |
# | block tables | `req_to_blocks` in `v1/core/single_type_kv_cache_manager.py` | `ReqToTokenPool` |
# | `slot_mapping` | `BlockTable` in `v1/worker/block_table.py` | `out_cache_loc` of a batch |
#
# In kvlab: `kvlab/blocks/`, and its user `kvlab/manager.py`.
#
# ## 12. If you have time
#
# ### Stretch: cut n blocks at once
#
# `popleft` repairs the head's link each time. For a prompt of 200 blocks that is 200 repairs, of which 199 are undone
# at once. Write `popleft_n` with one repair. About three accesses a block are enough; your check allows five.

# %% ex="popleft_n"
def popleft_n(queue, n):
    """Take the first `n` blocks out of the queue (a FreeQueueBase) and return them in order, their links None.

    OutOfBlocks, and nothing changed, if there are fewer.
    """
    ### BEGIN SOLUTION
    if n > queue.num_free_blocks:
        raise OutOfBlocks(f"{n} blocks asked for, {queue.num_free_blocks} are free")
    cut, stays = [], queue.head.next_free_block
    while len(cut) < n:
        cut.append(stays)
        after = stays.next_free_block
        stays.next_free_block = stays.prev_free_block = None
        stays = after
    queue.head.next_free_block, stays.prev_free_block = stays, queue.head
    queue.num_free_blocks -= n
    return cut
    ### END SOLUTION

# %% check="popleft_n"
check("popleft_n")

# %% [markdown] lang="en"
# ### Stretch: an inventory
#
# The three laws of section 6 can be tested at any moment. Write the test: it gets the counts, the queue and the
# tables as plain numbers, and says which block is wrong and how.

# %% ex="audit"
def audit(ref_cnts, queue, tables):
    """What is wrong with which block: a dict from block id to one of five words; empty if the books agree.

    ref_cnts: block id -> ref_cnt, for all blocks of the pool but block 0. queue: ids in the free queue, in order.
    tables: for each request its block ids. The first of these that is true of a block is its word:
    "unknown"         it is in the queue or in a table, but not in ref_cnts
    "miscounted"      ref_cnt is not the number of its entries in all tables
    "owned and free"  it is in a table and in the queue
    "queued twice"    it is in the queue more than once
    "lost"            it is in no table and not in the queue
    """
    ### BEGIN SOLUTION
    entries = [block_id for table in tables for block_id in table]
    found = {}
    for block_id in {*ref_cnts, *queue, *entries}:
        held, queued = entries.count(block_id), queue.count(block_id)
        if block_id not in ref_cnts:
            found[block_id] = "unknown"
        elif ref_cnts[block_id] != held:
            found[block_id] = "miscounted"
        elif held and queued:
            found[block_id] = "owned and free"
        elif queued > 1:
            found[block_id] = "queued twice"
        elif not held and not queued:
            found[block_id] = "lost"
    return found
    ### END SOLUTION

# %% check="audit"
check("audit")

# %% [markdown] lang="en"
# With it, a random walk over your pool: 2,000 moves, and an inventory after each. Whoever reads your allocator does
# not have to believe you.

# %%
inventory = lab.best("audit")
rng = random.Random(7)
pool = lab.best("BlockPool")(13, prefix_index=Names(), free_queue=lab.best("FreeQueue"))
tables, moves, refused = {}, 0, 0
for moves in range(1, 2_001):
    move = rng.choice(("start", "grow", "share", "end", "end"))
    if move == "start" or not tables:
        try:
            tables[moves] = pool.get_new_blocks(rng.randint(1, 4))
        except OutOfBlocks:
            refused += 1
    else:
        who = rng.choice(list(tables))
        if move == "grow" and pool.get_num_free_blocks():
            tables[who] += pool.get_new_blocks(1)
        elif move == "share":
            tables[moves] = tables[who][: rng.randint(1, len(tables[who]))]
            pool.touch(tables[moves])
        elif move == "end":
            pool.free_blocks(tables.pop(who)[::-1])
    wrong = inventory({b.block_id: b.ref_cnt for b in pool.blocks[1:]},
                      [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
                      [[b.block_id for b in table] for table in tables.values()])
    if wrong:
        print(f"after move {moves} ({move}):", wrong)
        break
else:
    print(f"{moves:,} moves, {refused} refused for want of blocks, every inventory agreed")
