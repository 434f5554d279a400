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
# 3. **the pool**: who owns what, and since when it is nobody's. Then the engine runs on what you wrote;
# 4. **inside a block**: in which order its numbers lie.
#
# The exercises take about 105 minutes. With reading, guessing and looking, plan two and a half hours. Sections 1 to 8
# are a whole and end with your allocator in the engine. Section 9 can wait for another day.
#
# Read with it: L33 2.2, 6.3, 8.1 (row 2) and A.3; PAV 2 and 3.2.

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
# ## 2. A saving that is paid back
#
# A list has another problem. You will meet **prefix caching** (前缀缓存) in lab 05. Here you need one fact about it:
# a block that nobody owns may still hold K and V that somebody can use again. So it waits among the free blocks, and
# when a prompt finds it there, it must be pulled out, *from wherever it stands*.
#
# An 80 GB GPU with Llama-3-8B has about 27,000 blocks. A prompt of 3,000 tokens finds its first 187 blocks in the
# cache. That saves some 300 ms of computing on an A100. But how long does it take to pull 187 blocks out of a Python list
# of 27,000? Commit a guess, in milliseconds. (A step that writes one token for every running user takes about 20 ms.)

# %%
lab.predict("list", None, unit="ms")

# %%
import random
import time
from collections import Counter, OrderedDict

from kvlab.blocks import BlockPoolBase, KVCacheBlock, OutOfBlocks

# 0.9 of the GPU is what vLLM uses unless told otherwise. 16 GB of it are weights.
# A block is 16 tokens of 128 KiB.
NUM_BLOCKS = int((0.9 * 80e9 - 16e9) / (16 * 128 * 1024))
long_list = [KVCacheBlock(i) for i in range(NUM_BLOCKS)]
hits = random.Random(0).sample(long_list, 187)

started = time.perf_counter()
for hit in hits:
    long_list.remove(hit)
list_ms = 1e3 * (time.perf_counter() - started)

lab.compare("list", list_ms)
print(f"{NUM_BLOCKS:,} blocks, 187 taken out of the middle. About 300 ms are saved, and")
print(f"{list_ms:.0f} ms of them are paid back before the prompt's first token.")

# %% [markdown] lang="en"
# This is the number that does not add up. A hit is there to save time, and looking for its blocks can take longer than a
# whole step for all running users. While it lasts, nobody gets a token: the scheduler has one thread. The list is
# searched from its front each time, and then everything behind the gap moves up by one. You will build a queue in
# which both cost nothing.
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
from kvlab.lab.draw.pool import draw_address, draw_pool, draw_queue, snapshot
from kvlab.lab.show import player

example = OurPool(8)
a, b, gone = (example.get_new_blocks(n) for n in (2, 1, 1))
a += example.get_new_blocks(1)
example.touch(a[:1])
example.free_blocks(gone)
fig, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
caption = "8 blocks; block 0 is never handed out (it is where padding points)"
draw_pool(ax, snapshot(example, {"A": a, "B": [a[0], *b]}, caption))

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
print("37 = 2 * 16 + 5, so the slot is table[2] * 16 + 5 = 142 * 16 + 5")

# %% [markdown] lang="en"
# In the figure the block size is 4. Follow the arrows from token 7 to its slot, then do the same for token 8 in your
# head. The two are neighbours in the text. In memory they are 9 slots apart.

# %%
TABLE = [9, 2, 5]
fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
draw_address(ax, TABLE, num_tokens=11, block_size=4, position=7)
print("slots of tokens 0 to 10:", [find_slot(TABLE, p, 4) for p in range(11)])

# %%
def draw_token(ax, position):
    draw_address(ax, TABLE, num_tokens=11, block_size=4, position=position)


player(range(11), draw_token, size=(9, 3))

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

    chunks: one (block_ids, start, count) for each request, in the order of the step. It has
    `count` tokens, the first of them at position `start`. The list is the caller's: leave it as
    it is.
    IndexError if a position has no block.
    """
    slot = lab.best("slot_of")  # your slot_of if it is solved, else ours
    ### BEGIN SOLUTION
    slots = []
    for table, first, number in chunks:
        for position in range(first, first + number):
            slots.append(slot(table, position, block_size))
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
four = [KVCacheBlock(i) for i in (7, 2, 9, 4)]
shown_queue = lab.best("FreeQueue")(four)  # ours, until yours is solved
fig, axes = plt.subplots(2, 1, figsize=(9, 2.4), layout="constrained")
before = [block.block_id for block in shown_queue.get_all_free_blocks()]
shown_queue.remove(four[1])
after = [block.block_id for block in shown_queue.get_all_free_blocks()]
draw_queue(axes[0], before, "before", marked=2)
draw_queue(axes[1], after, "after remove(block 2)")

# %% [markdown] lang="en"
# The base class sets up the sentinels and gives you what is not interesting. Read it: it is all the state there is.

# %%
class FreeQueueBase:
    """A doubly linked queue of KVCacheBlock, without its three moves.

    head, tail: the sentinels. head.next_free_block is the first block; tail if there is none.
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
            raise OutOfBlocks(f"{n} asked for, {self.num_free_blocks} free")
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
# Your check counts how often each move reads or writes a link, with 10, 1,000 and 10,000 blocks. It does not use a
# clock.

# %% ex="free_queue"
class FreeQueue(FreeQueueBase):
    """The blocks that nobody owns, in the order in which they will be handed out."""

    def popleft(self):
        """Take out the block at the head and return it. O(1).

        OutOfBlocks, and nothing changed, if there is none.
        """
        ### BEGIN SOLUTION
        first = self.head.next_free_block
        if first is self.tail:
            raise OutOfBlocks("the free queue is empty")
        self.remove(first)
        return first
        ### END SOLUTION

    def append(self, block):
        """Put `block` at the tail. O(1).

        ValueError, and nothing changed, if it is in the queue already: then it has links.
        """
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
# 2. (The cell takes some seconds: it makes more than a million blocks.)

# %% fold="yes"
from statistics import median

LinkedQueue = lab.best("FreeQueue")
SIZES = [10**2, 10**3, 10**4, 10**5, 10**6]


def remover(kind, blocks):
    """What takes a block out of a queue of this kind, made of `blocks`."""
    if kind == "list":
        return list(blocks).remove
    if kind == "linked list":
        return LinkedQueue(blocks).remove
    by_id = OrderedDict((b.block_id, b) for b in blocks)
    return lambda block: by_id.pop(block.block_id)


def microseconds(remove, block):
    started = time.perf_counter()
    remove(block)
    return 1e6 * (time.perf_counter() - started)


timings = {"list": [], "OrderedDict": [], "linked list": []}  # the median of 50 removals
for size in SIZES:
    made = [KVCacheBlock(i) for i in range(size)]
    victims = random.Random(0).sample(made, 50)
    for kind, values in timings.items():
        remove = remover(kind, made)
        values.append(median(microseconds(remove, block) for block in victims))

fig, ax = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for values, marker, colour in zip(timings.values(), "so^", ("#D55E00", "#56B4E9", "#0072B2")):
    ax.loglog(SIZES, values, marker=marker, color=colour, lw=2)
below, above = sorted(("OrderedDict", "linked list"), key=lambda kind: timings[kind][-1])
for kind, where in (("list", "center"), (above, "bottom"), (below, "top")):
    ax.text(SIZES[-1] * 1.4, timings[kind][-1], kind, va=where, fontsize=11)
ax.axvline(NUM_BLOCKS, color="#888888", lw=1, ls=":")
ax.text(NUM_BLOCKS * 1.1, 0.025, f"{NUM_BLOCKS:,} blocks: 80 GB, Llama-3-8B", fontsize=10)
ax.set(xlabel="blocks in the queue", ylabel="one removal from the middle, µs")
ax.set(xlim=(70, 2e7), ylim=(0.02, None), xticks=SIZES)
ax.spines[["top", "right"]].set_visible(False)

linked_ms = timings["linked list"][2] * 187 / 1e3
print(f"187 removals: {list_ms:.1f} ms with a list, about {linked_ms:.2f} ms with yours")

# %% [markdown] lang="en"
# Look at the slopes. The list climbs one decade in each decade. If the lower lines climb a little, that is the
# processor: a million blocks do not fit its caches, so each removal waits for memory. Your check counts accesses
# instead, and their number does not change.
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
# | **owned** (占有) | 1 or more | no | any | so many entries in block tables |
# | **cached** (缓存) | 0 | yes | set | nobody's, but a prompt may find it again |
#
# The arrows are the three moves that you will write.

# %%
from kvlab.lab.draw.pool import draw_states

fig, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
draw_states(ax)

# %% [markdown] lang="en"
# Three laws hold after every move. Every fault that you will meet breaks one of them.
#
# 1. A block's `ref_cnt` is the number of its entries in all block tables.
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
    """Hand out `num_blocks` blocks from the head of the queue: KVCacheBlock objects in a list.

    Each has ref_cnt 1 then. If a block has a name (block_hash is not None), it loses it:
    pool.evict(block).
    OutOfBlocks, and nothing changed, if fewer are free.
    """
    ### BEGIN SOLUTION
    if num_blocks > pool.free_block_queue.num_free_blocks:
        raise OutOfBlocks(f"{num_blocks} blocks asked for, fewer are free")
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
    """One owner fewer for each of `ordered_blocks`. A block may occur twice: two owners fewer.

    A block that has no owner left goes to the tail of the queue, in the order of the list.
    Names stay. The list is the caller's: leave it as it is.
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
# This time you write a method. There is no `pool` any more: inside the class the pool is `self`, and its queue is
# `self.free_block_queue`.
#
# The class takes your two functions as methods where they are solved, and ours where they are not. If you solve one
# of them later, run this cell again.

# %% ex="block_pool"
class BlockPool(BlockPoolBase):
    """All blocks of one KV cache, and the three moves."""

    get_new_blocks = lab.best("get_new_blocks")
    free_blocks = lab.best("free_blocks")

    def touch(self, blocks):
        """One owner more for each of `blocks`. A block may occur twice: two owners more.

        Those that nobody owned leave the free queue. Names stay. The pool is `self`, and the
        list is the caller's: leave it as it is.
        """
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

# %%
names = Names()
my_pool = lab.best("BlockPool")(9, prefix_index=names, free_queue=lab.best("FreeQueue"))
tables, frames = {}, [snapshot(my_pool, {}, "0  nobody is here")]


def note(caption):
    frames.append(snapshot(my_pool, tables, f"{len(frames)}  {caption}"))


tables["A"] = my_pool.get_new_blocks(3)
note("A comes with a prompt of 3 blocks")
tables["B"] = my_pool.get_new_blocks(2)
note("B comes with 2 blocks")
tables["A"] += my_pool.get_new_blocks(1)
note("A grows by one block")
tables["C"] = my_pool.get_new_blocks(1)
note("C comes with 1 block")
for block, name in zip(tables["B"], ("You are", "kind."), strict=True):
    names.publish(block, name)
my_pool.free_blocks(tables.pop("B")[::-1])
note("B ends. Its full blocks have names, and go back last one first")
my_pool.free_blocks(tables.pop("C"))
note("C ends. Its block was not full, so it has no name")
hit = names.cached_block_hash_to_block["You are"]
my_pool.touch([hit])
tables["D"] = [hit]
note("D begins like B: block 4 leaves the middle of the queue")
tables["D"] += my_pool.get_new_blocks(1)
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
my_pool.touch([hit])
tables["E"] = [hit, *my_pool.get_new_blocks(1)]
note("E begins like D; its own block is the head of the queue, and “kind.” is forgotten")
my_pool.free_blocks(tables.pop("D")[::-1])
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
def draw_frame(ax, i):
    draw_pool(ax, frames[i], before=frames[i - 1] if i else None)


player(frames, draw_frame, size=(9, 2.4))

# %% [markdown] lang="en"
# And Ann? The same story on your pool, the three lines that went wrong at the beginning:

# %%
my_pool = lab.best("BlockPool")(3, free_queue=lab.best("FreeQueue"))
ann = my_pool.get_new_blocks(1)
my_pool.free_blocks(ann)
try:
    my_pool.free_blocks(ann)
    print("freed twice, and nobody has noticed")
except ValueError as error:
    print("ValueError:", error)
bob, carl = my_pool.get_new_blocks(1), my_pool.get_new_blocks(1)
print("Bob's block:", bob[0].block_id, "  Carl's block:", carl[0].block_id)

# %% [markdown] lang="en"
# ## 8. Put it into the engine
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
# What would users notice if a move were wrong? Each pool below is yours with one fault. Read the four. Each of them
# breaks one of the three laws of section 6 first.

# %%
MyPool = lab.best("BlockPool")


class ReturnsAtOnce(MyPool):
    """A. free_blocks: a block goes to the queue, whoever else owns it"""

    def free_blocks(self, blocks):
        for block in blocks:
            if block.ref_cnt > 0:
                block.ref_cnt = 0
                self.free_block_queue.append(block)


class StaysInLine(MyPool):
    """B. touch: a block that is hit stays in the queue"""

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.next_free_block is None:
                self.free_block_queue.append(block)


class KeepsOldNames(MyPool):
    """C. get_new_blocks: the index still knows a block that is overwritten"""

    def evict(self, block):
        block.block_hash = None


class CountsOne(MyPool):
    """D. touch: one owner is counted, however many there are"""

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt = 1

# %% [markdown] lang="en"
# Two guesses. Which law does each fault break? Write four numbers, for A to D, as a text such as `"3 1 1 2"`.
#
# 1. `ref_cnt` is the number of entries in all tables.
# 2. In the queue exactly when `ref_cnt` is 0, and then once.
# 3. Nobody overwrites a block that still has a name.
#
# And how many of the four will stop the engine with an error?

# %%
lab.predict("laws that A to D break", None)
lab.predict("faults that stop the engine", None, unit="of 4")

# %% [markdown] lang="en"
# Now run them, and one pool without a fault. The model is a stand-in whose next token depends on everything that it
# reads back through the block tables, so a wrong block shows as a wrong answer. Twelve requests begin alike, one of
# them is sampled three times, and the pool is small. (Ten runs of an engine: some ten seconds.)

# %% fold="yes"
from IPython.display import Markdown

from kvlab.lab.beside import run_beside_ours
from kvlab.parts import Parts

small = {"block_size": 4, "num_gpu_blocks_override": 48, "max_model_len": 144}
rows = ["| pool | wrong answers | what stopped it |", "|---|---|---|"]
stopped = 0
for kind in (MyPool, ReturnsAtOnce, StaysInLine, KeepsOldNames, CountsOne):
    run = run_beside_ours(Parts(block_pool=kind), stand_in=True, num_requests=12,
                          max_num_batched_tokens=64, **small)
    what = "without a fault" if kind is MyPool else kind.__doc__
    wrong = sum(yours != ours for yours, ours in zip(run.yours.tokens, run.ours.tokens))
    answers = "-" if run.yours.error else f"{wrong} of {len(run.ours.tokens)}"
    error = run.yours.error.splitlines()[0] if run.yours.error else "nothing"
    stopped += bool(run.yours.error)
    rows.append(f"| {what} | {answers} | {error} |")
lab.compare("laws that A to D break", "1 2 3 1")
lab.compare("faults that stop the engine", stopped)
Markdown("\n".join(rows))

# %% [markdown] lang="en"
# A wrong allocator does not crash. It answers, and some answers come from somebody else's tokens. Only one fault was
# stopped, and look by what: by the double free that *you* notice in exercise 5.
#
# - **A** and **D** break law 1: the count is lower than the entries. So a block comes free while a table still holds it.
# - **B** breaks law 2: the block has an owner and waits for the next one.
# - **C** breaks law 3: under the old name, others find new content.
#
# Laws can be tested while the engine runs. That is why engines check their books in tests, and some in idle time too.
# Exercise 9 is such a check.
#
# Your allocator is complete, and it serves. This is a good place for a break. What follows looks inside the blocks.

# %% [markdown] lang="en"
# ## 9. Inside a block
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
# Before you compute: block size 16, heads of 128, fp16. One thread reads the *first 16 bytes* of a block. How many of
# these bytes belong to token 0, in the textbook's layout for V?

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
#
# Be strict about what lies outside the block, on both sides: token -1 of block 1 is a token of block 0.

# %% ex="byte_offset"
def byte_offset(layout, block, token, head, dim,
                block_size, num_kv_heads, head_dim, itemsize=2, x=8):
    """How many bytes after the pool's first byte number (block, token, head, dim) begins.

    layout: "NHD", "HND", "HDNX" or "HDN", see the table; ValueError for any other. The blocks
    follow each other in memory. Returns an int.
    token: the offset in the block, 0 to block_size - 1.
    itemsize: bytes of one number. x: numbers in a piece of HDNX; it divides head_dim.
    IndexError if token, head or dim is outside the block: too large, or negative.
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
# The picture asks your function for the place of every number of a small block (8 tokens, 2 heads, head_dim 16) and
# draws the first 64 bytes, two bytes a number. The digit in a cell says whose token it is, 0 to 7. A thick frame is one
# 16-byte load. Look at the first frame of each row: in `HDN` it holds one number of every token, in the others eight
# numbers of token 0.

# %%
from kvlab.lab.draw.pool import draw_layout

offset_in = lab.best("byte_offset")
LAYOUTS = {"NHD": "NHD", "HND": "HND"}
LAYOUTS |= {"HDNX": "HDNX, the textbook's K", "HDN": "HDN, the textbook's V"}
SMALL = {"block_size": 8, "num_kv_heads": 2, "head_dim": 16}

places = [(t, h, d) for t in range(8) for h in range(2) for d in range(16)]
fig, axes = plt.subplots(4, 1, figsize=(9.5, 4.4), layout="constrained")
for ax, (layout, title) in zip(axes, LAYOUTS.items()):
    in_memory = sorted(places, key=lambda place: offset_in(layout, 0, *place, **SMALL))
    draw_layout(ax, [(token, head) for token, head, _ in in_memory[:32]], title, per_load=8)

# %% [markdown] lang="en"
# Three of the four give a thread 16 bytes of *one* token. So 16-byte loads alone are not why somebody invented
# `HDNX`. Look at what the *next* thread gets. With a thread for each token, in `HDNX` neighbouring threads read
# neighbouring pieces: the loads of a warp join into one run. In `HND` they would lie `head_dim` numbers apart.
#
# `HDN` looks like a mistake and is none. For the output, V is added up *over tokens*, dim by dim. There eight tokens
# of one dim, as in its first frame, are what a thread wants.
#
# The table puts numbers on it, for a real shape: Llama-3-8B, block size 16, 8 KV heads of 128, fp16.

# %%
SHAPE = {"block_size": 16, "num_kv_heads": 8, "head_dim": 128}


def pieces(places, itemsize=2):
    """Into how many separate runs of bytes they fall. places: byte offsets, in order."""
    return 1 + sum(b != a + itemsize for a, b in zip(places[:-1], places[1:]))


bytes_of_one_token, pieces_of_one_token = {}, {}
rows = ["| layout | of the first 16 bytes, token 0 has | pieces of its K | to token 1 |"]
rows.append("|---|---|---|---|")
numbers = [(0, 0, head, dim) for head in range(8) for dim in range(128)]  # of token 0
for layout in LAYOUTS:
    places = sorted(offset_in(layout, *number, **SHAPE) for number in numbers)
    bytes_of_one_token[layout] = mine = 2 * sum(place < 16 for place in places)
    pieces_of_one_token[layout] = cut = pieces(places)
    step = offset_in(layout, 0, 1, 0, 0, **SHAPE)
    rows.append(f"| {layout} | {mine} bytes | {cut:,} | {step} bytes |")
lab.compare("bytes of token 0 in the first 16, HDN", bytes_of_one_token["HDN"])
Markdown("\n".join(rows))

# %% [markdown] lang="en"
# ## 10. What the textbook says and what we measured
#
# Each row is computed in this notebook, from your functions where they are solved. First the numbers for blocks of
# one token: what the block table costs, what handing out costs, and how well the memory is read.

# %% fold="yes"
import numpy as np

KV_PER_TOKEN = 128 * 1024  # Llama-3-8B: 32 layers, K and V, 8 heads of 128, fp16
CONTEXT = 4096


def lines_read(layout, block_size, head_dim, itemsize):
    """128-byte lines touched by reading one head's K of a block, over those that it fills."""
    shape = (block_size, 8, head_dim, itemsize, 16 // itemsize)
    numbers = [(0, token, 0, dim) for token in range(block_size) for dim in range(head_dim)]
    touched = {offset_in(layout, *number, *shape) // 128 for number in numbers}
    return len(touched) / (len(numbers) * itemsize / 128)


def time_to_hand_out(block_size):
    """Milliseconds to hand out, and take back, the blocks of one prompt of 4096 tokens."""
    n = CONTEXT // block_size
    new_pool = MyPool(n + 1, free_queue=lab.best("FreeQueue"))
    started = time.perf_counter()
    new_pool.free_blocks(new_pool.get_new_blocks(n)[::-1])
    return 1e3 * (time.perf_counter() - started)


def gather_rate(block_size, megabytes=64):
    """GB/s of copying blocks in shuffled order on this CPU: K of one layer, 2 KiB a token."""
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
of_kv = {B: CONTEXT * KV_PER_TOKEN / table_bytes[B] for B in BLOCKS}
hand_out = {B: min(time_to_hand_out(B) for _ in range(3)) for B in BLOCKS}
LARGE, MIDDLE, TINY = (128, 2), (64, 2), (64, 1)  # head_dim, bytes a number
SHAPES = {LARGE: "heads of 128, fp16", MIDDLE: "heads of 64, fp16", TINY: "heads of 64, FP8"}
lines = {
    (k, shape, B): lines_read(k, B, *shape) for k in LAYOUTS for shape in SHAPES for B in BLOCKS
}
rates = {B: gather_rate(B) for B in BLOCKS}


def row(what, cells):
    return f"| {what} | " + " | ".join(cells) + " |"


rows = [row("", [f"block size {B}" for B in BLOCKS]), "|---" * (len(BLOCKS) + 1) + "|"]
rows.append(row("block table, 4096 tokens", [f"{table_bytes[B] / 1024:g} KiB" for B in BLOCKS]))
rows.append(row("K and V are larger than it by", [f"{of_kv[B]:,.0f} times" for B in BLOCKS]))
rows.append(row("hand out, take back 4096 tokens", [f"{hand_out[B]:.2f} ms" for B in BLOCKS]))
for shape, name in SHAPES.items():
    for k in ("NHD", "HND") if shape == TINY else ("NHD",):
        what = f"lines read for lines needed, {k}, {name}"
        rows.append(row(what, [f"{lines[k, shape, B]:.2f}" for B in BLOCKS]))
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
#
# Now the textbook's sentences, one by one. "8.1, row 2" is the second row of its table of misconceptions.

# %% fold="yes"
claims = []


def claim(where, says, we_get, holds, condition=""):
    verdict = {True: "holds", False: "contradicted", None: "not known yet"}[holds]
    so_it = f"{verdict} {condition}".replace(" ;", ";").strip()
    claims.append(row(where, [says, we_get, so_it]))


index, offset = divmod(37, 16)
place = find_slot([9, 61, 142], 37, 16)
claim(
    "L33 2.2", "token 37, B = 16: logical block 2, offset 5, physical block 142",
    f"({index}, {offset}); with table[2] = 142, slot {place} in block {place // 16}",
    (index, offset, place // 16) == (2, 5, 142),
)

block_stride = {k: offset_in(k, 1, 0, 0, 0, **SHAPE) for k in LAYOUTS}
token_stride = {k: offset_in(k, 0, 1, 0, 0, **SHAPE) for k in LAYOUTS}
first = {k: offset_in(k, 142, 5, 0, 0, **SHAPE) for k in LAYOUTS}
right = sum(142 * block_stride[k] + 5 * token_stride[k] == first[k] for k in LAYOUTS)
one_piece = ", ".join(k for k in LAYOUTS if pieces_of_one_token[k] == 1)
claim(
    "L33 2.2", "its address: start + 142 block strides + 5 token strides",
    f"right for its first number in {right} of {len(LAYOUTS)} layouts; its K is one piece in "
    f"{one_piece}, and {pieces_of_one_token['HDNX']} pieces in the textbook's own layout",
    right == len(LAYOUTS), "for the first number; for the whole token in NHD only",
)

claim(
    "L33 2.2", "x for 16-byte loads is usually 8",
    f"16 bytes are {16 // 2} fp16 or {16 // 1} FP8; a load of K brings "
    f"{bytes_of_one_token['HDNX']} bytes of one token, a load of V {bytes_of_one_token['HDN']}",
    16 // 2 == 8 and bytes_of_one_token["HDNX"] == 16, "for K of 16 bits",
)
claim(
    "L33 2.2", "K is rearranged for the sake of these loads",
    f"NHD and HND bring {bytes_of_one_token['NHD']} and {bytes_of_one_token['HND']} bytes of "
    f"one token too; but the piece is {token_stride['HDNX']} bytes from the next token's, not "
    f"{token_stride['HND']}",
    token_stride["HDNX"] == 16, "for kernels that give each token to a thread or two",
)

# From 1,000 to 100,000 blocks: a million would measure the processor's caches.
growth = {kind: values[3] / values[1] for kind, values in timings.items()}
claim(
    "L33 6.3", "out of the middle: a list O(N), a linked list O(1)",
    f"with 100 times as many blocks a list takes {growth['list']:.0f} times as long, a linked "
    f"list {growth['linked list']:.1f} times (the rest is cache misses); 187 hits take "
    f"{list_ms:.0f} ms and {linked_ms:.2f} ms",
    growth["list"] > 30 and growth["linked list"] < 10,
    f"(an OrderedDict: {growth['OrderedDict']:.1f} times, cache misses too)",
)
counted = lab.results.get("free_queue")
claim(
    "PAV 3.2", "head out and tail in, both O(1)",
    "counted by your check: at most 20 accesses each, at 10 and at 10,000 blocks",
    counted.passed if counted else None, "for your queue",
)

claim(
    "L33 8.1, row 2", "B = 1: the table grows tens of times",
    f"{table_bytes[1] / table_bytes[16]:.0f} times B = 16, {CONTEXT // (CONTEXT // 32)} times "
    f"B = 32, to {1 / of_kv[1]:.3%} of the K and V; handing out takes "
    f"{hand_out[1] / hand_out[16]:.0f} times as long as at 16",
    CONTEXT >= 20 * (CONTEXT // 32),
    "against blocks of 32; it costs scheduler time, hardly any memory",
)


def worst(block_size):
    """Lines read for lines needed: the most with 64 or 128 dims in fp16, and with 64 in FP8."""
    fp16 = (lines[k, shape, block_size] for k in LAYOUTS for shape in (LARGE, MIDDLE))
    return max(fp16), lines["HND", TINY, block_size]


(large, tiny), (large_4, tiny_4) = worst(1), worst(4)
claim(
    "L33 8.1, row 2", "B = 1 ruins coalesced reading",
    f"lines read for lines needed: {large:.2f} with heads of 64 or 128 in fp16, {tiny:.2f} "
    "with 64 in FP8",
    large > 1.01,
    "for heads of 128 bytes or more" + ("; holds for smaller ones" if tiny > 1.01 else ""),
)
claim(
    "L33 8.1, row 2", "B = 1: the rate of reading collapses",
    f"{rates[1] / rates[16]:.0%} of the rate at 16, copying on this CPU",
    rates[1] < 0.7 * rates[16], "on this CPU; no GPU was measured here",
)
claim(
    "L33 A.3", "B = 4 hardly fills a line of 128 bytes",
    f"lines read for lines needed: {large_4:.2f} with heads of 64 or 128 in fp16, {tiny_4:.2f} "
    "with 64 in FP8 (HND)",
    large_4 > 1.01 or tiny_4 > 1.01,
    "for these shapes: four tokens of one head are 256 bytes at least",
)

head = row("where", ["the textbook says", "we get", "so it"])
Markdown("\n".join([head, "|---|---|---|---|", *claims]))

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
# <details><summary>Short answers (think first)</summary>
#
# 1. The block freed last would be given up first. That is the one that the next turn of a chat would hit. Blocks that
#    nobody asks for any more would stay at the other end for ever.
# 2. By 2. The three shared ones still have an owner. So a victim is worth the blocks that it owns *alone*, not the
#    length of its table.
# 3. 16 · 8 · 128 is 2¹⁴, and 2³¹ / 2¹⁴ is 131,072. Some 27,000 blocks do not get there. With 128 tokens to a block
#    the limit is 16,384, and there are about 3,400 blocks: no again. The number of *tokens* decides, 2³¹ / 1,024 of
#    them, whatever the block size.
# 4. A step that runs at a fixed size is padded, and the padding reads and writes somewhere too. An address that belongs
#    to nobody makes that harmless.
#
# </details>
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
# ### Exercise 8 (stretch): cut n blocks at once
#
# `popleft` repairs the head's link each time. For a prompt of 200 blocks that is 200 repairs, of which 199 are undone
# at once. Write `popleft_n` with one repair. About three accesses a block are enough; your check allows five.

# %% ex="popleft_n"
def popleft_n(queue, n):
    """Take the first `n` blocks out of the queue and return them in order, their links None.

    queue: use its head, tail and num_free_blocks, which are as in FreeQueueBase.
    OutOfBlocks, and nothing changed, if there are fewer.
    """
    ### BEGIN SOLUTION
    if n > queue.num_free_blocks:
        raise OutOfBlocks(f"{n} asked for, {queue.num_free_blocks} free")
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
# ### Exercise 9 (stretch): an inventory
#
# The three laws of section 6 can be tested at any moment. Write the test: it gets the counts, the queue and the
# tables as plain numbers, and says which block is wrong and how.

# %% ex="audit"
def audit(ref_cnts, queue, tables):
    """What is wrong with which block: a dict, block id -> one of five words; empty if none is.

    ref_cnts: block id -> ref_cnt, for all blocks of the pool but block 0.
    queue: ids in the free queue, in order. tables: for each request its block ids.
    The first of these that is true of a block is its word:
    "unknown"         it is in the queue or in a table, but not in ref_cnts
    "miscounted"      ref_cnt is not the number of its entries in all tables; [1, 1] has two
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
my_pool = lab.best("BlockPool")(13, prefix_index=Names(), free_queue=lab.best("FreeQueue"))
tables, refused = {}, 0
for moves in range(1, 2_001):
    move = rng.choice(("start", "grow", "share", "end", "end"))
    if move == "start" or not tables:
        try:
            tables[moves] = my_pool.get_new_blocks(rng.randint(1, 4))
        except OutOfBlocks:
            refused += 1
    else:
        who = rng.choice(list(tables))
        if move == "grow" and my_pool.get_num_free_blocks():
            tables[who] += my_pool.get_new_blocks(1)
        elif move == "share":
            tables[moves] = tables[who][: rng.randint(1, len(tables[who]))]
            my_pool.touch(tables[moves])
        elif move == "end":
            my_pool.free_blocks(tables.pop(who)[::-1])
    wrong = inventory(
        {b.block_id: b.ref_cnt for b in my_pool.blocks[1:]},
        [b.block_id for b in my_pool.free_block_queue.get_all_free_blocks()],
        [[b.block_id for b in table] for table in tables.values()],
    )
    if wrong:
        print(f"after move {moves} ({move}):", wrong)
        break
else:
    print(f"{moves:,} moves, {refused} refused for want of blocks, every inventory agreed")
