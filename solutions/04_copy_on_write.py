# %% [markdown]
# # Lab 04: Copy-on-write (写时复制)
#
# One question, four answers. The four sequences begin with the same thousand tokens, and then they part. In this lab
# you build what lets them share every block that is the same, and what notices, just in time, when a block is about to
# become different: a fork and a write barrier. Then you build on the two: parallel sampling, beam search, an agent that
# changes its mind.
#
# It goes with L33 2.4 and PAV 3.4. Plan two hours and a quarter: some 85 minutes for the six exercises, the rest to
# read, to guess and to look. Two more exercises at the end are extra, 25 minutes together.

# %%
from kvlab.lab import Lab

lab = Lab("04")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## A number that does not add up
#
# Somebody asks for four answers to one prompt. The prompt has 1000 tokens, each answer 24, and a block holds 16 tokens.
#
# - One sequence of 1024 tokens needs 64 blocks.
# - Four of them need 256 blocks.
#
# The engine below has **80** blocks. It uses the real scheduler and the real block manager; in place of a model there
# is the slot-echo model, which makes each next token out of everything that it reads back through the block table.

# %%
from kvlab.config import EngineConfig
from kvlab.parts import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request


def serve(prompts, n, num_outputs, num_blocks, block_size=16, parts=None, **options):
    """Sample n answers to each prompt. Returns the tokens by sequence, and the counts."""
    config = EngineConfig(block_size=block_size, num_gpu_blocks_override=num_blocks + 1,
                          **options)
    core = (parts or Parts()).make_engine(config)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(n=n, temperature=1.0, seed=i, max_tokens=num_outputs)
        core.add_request(Request(str(i), prompt, params))
    tokens = {}
    while core.has_unfinished_requests():
        for output in core.step():
            tokens.setdefault(output.request.request_id, []).extend(output.new_token_ids)
    return tokens, core.scheduler.stats


tokens, stats = serve([range(1000)], n=4, num_outputs=24, num_blocks=80)
print(f"{len(tokens)} answers of {', '.join(str(len(t)) for t in tokens.values())} tokens")
print(f"blocks in use at the peak: {stats.peak_usage * 80:.0f} of 80")
print(f"preemptions: {stats.num_preemptions_recompute}")

# %% [markdown]
# It ran, nobody was thrown out, and 10 blocks were never touched. So the four sequences hold 70 blocks where 256 were
# expected.
#
# An operating system does the same when a process calls `fork()`. The child gets the parent's page table, not the
# parent's pages. Pages are copied one at a time, when somebody writes. That is copy-on-write, and your blocks are
# pages.

# %% [markdown]
# ## A picture
#
# Small numbers from here on: a block holds 4 words, and the prompt has 10 words. That is two full blocks and half of a
# third. The figure shows the moment right after the fork (分叉): four sequences, A to D.
#
# **How to read it.** One row is one sequence. One box is one physical block. A box that is four rows high is *one*
# block that four tables name. So the number of boxes is the number of blocks held.

# %%
import matplotlib.pyplot as plt

from kvlab.lab.draw.tables import draw_tables
from kvlab.lab.show import picture

PROMPT = "my cat sat on the mat and it was so".split()

figure, ax = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
draw_tables(ax, {name: [1, 2, 3] for name in "ABCD"}, {name: PROMPT for name in "ABCD"},
            block_size=4, title="After the fork: 4 tables, 3 blocks")
ax.set_xlabel("token position")
picture(figure, "Tables A to D. Blocks 1, 2 and 3 are each drawn once, four rows high.")

# %% [markdown]
# ## Your prediction
#
# Now A writes "warm" at position 10, then B writes "soft", C writes "calm" and D writes "glad". All four words want the
# same slot: block 3, third place.
#
# How many blocks will have been **copied** when all four have written? And in the engine above, with a prompt of 1000
# tokens? And with a prompt of 992 tokens, which is only eight tokens less?
#
# Replace each `None` by a number and run the cell. Guess now; a wrong guess teaches more than none.

# %%
lab.predict("10 words", None, unit="copies")
lab.predict("1000 tokens", None, unit="copies")
lab.predict("992 tokens", None, unit="copies")

# %% [markdown]
# ## By hand
#
# Take a pencil. Fill in what A, B, C and D do, one after the other, with the prompt of 10 words.
#
# | who writes | owners of block 3 before | what must happen | owners of block 3 after |
# |---|---|---|---|
# | A | 4 | ? | ? |
# | B | ? | ? | ? |
# | C | ? | ? | ? |
# | D | ? | ? | ? |
#
# ## Exercise 1: the cost, on paper
#
# Then count boxes, twice. *Copying*: each sequence has all its blocks for itself. *Sharing*: as in the figure, after
# the four words. Do it again for a prompt of 12 words. Now write down what you did, for any numbers.

# %% ex="sharing_cost"
def sharing_cost(num_prompt, num_output, n, block_size):
    """What n samples of one prompt hold, once each has written num_output tokens of its own.

    num_prompt: tokens that all samples begin with, 1 or more.
    num_output: tokens that each has written after them, 0 or more; no two samples write the
    same. n: samples. block_size: tokens a block holds.

    Returns three whole numbers (int), in a tuple:
        blocks held if every sample has a private copy of the prompt,
        blocks held with copy-on-write,
        blocks that were copied on the way.
    """
    ### BEGIN SOLUTION
    blocks_each = -(-(num_prompt + num_output) // block_size)
    if num_output == 0:
        return n * blocks_each, blocks_each, 0
    full = num_prompt // block_size
    copies = n - 1 if num_prompt % block_size else 0
    return n * blocks_each, full + n * (blocks_each - full), copies
    ### END SOLUTION

# %% check="sharing_cost"
check("sharing_cost")

# %% [markdown]
# Stuck? `hint("sharing_cost")` gives a nudge, and more if you call it again. It works for every exercise.

# %% [markdown]
# ## The model, in three rules
#
# Everything in this lab follows from three rules. They speak of a block's reference count (引用计数), `ref_cnt`.
#
# 1. **Counts are true.** `ref_cnt` of a block is the number of tables that name it. A block is in the free queue
#    exactly when its `ref_cnt` is 0.
# 2. **Who may be written.** A block may be written exactly when its `ref_cnt` is 1 and it has no published name
#    (`block_hash is None`).
# 3. **The barrier (写屏障).** Before a token is written at position p of a table, the block `table[p // block_size]` is
#    made one that may be written.
#
# The second half of rule 2 is easy to forget. A published block (lab 05 makes them) can be found by its name. A prompt
# that arrives next minute may point its table at it. So even a single owner must leave it as it is.
#
# A sanity check of rule 1 on the picture above. Four tables, three blocks, and nobody has lost count:

# %%
from collections import Counter

owners = Counter(block for table in [[1, 2, 3]] * 4 for block in table)
print("owners by block:", dict(owners))
print("table entries:", sum(owners.values()), " blocks held:", len(owners))

cost = lab.best("sharing_cost")  # yours if it is solved, else ours
on_paper, counted = tuple(cost(10, 0, 4, 4)), (sum(owners.values()), len(owners), 0)
assert on_paper == counted, f"sharing_cost(10, 0, 4, 4) gives {on_paper}, the picture {counted}"

# %% [markdown]
# ## Exercise 2: fork
#
# `pool` is the block pool of lab 03. Three of its methods are all you need today:
#
# | call | what it does |
# |---|---|
# | `pool.get_new_blocks(n)` | n blocks, `ref_cnt` 1 each; or `OutOfBlocks`, with nothing changed, if fewer are free |
# | `pool.touch(blocks)` | one owner more for each block |
# | `pool.free_blocks(blocks)` | one owner fewer for each block; without owners it goes to the tail of the free queue |
#
# And `pool.get_num_free_blocks()` says how many there are. A table is a plain list of blocks, each with `block_id`,
# `ref_cnt` and `block_hash`.
#
# When a check fails, it shows the books after each step, like this:
#
#     A = [1, 2]; B = [1, 3]; owners 1:2 2:1 3:1; named 2; free 4 5
#
# Table A names blocks 1 and 2. Block 1 has two owners. Block 2 is published. Blocks 4 and 5 are in the free queue, and
# 4 is handed out next.

# %% ex="fork"
def fork(pool, blocks):
    """The table of a child that shares all of `blocks` with its parent.

    pool: the block pool. blocks: the parent's table, a list of blocks in logical order.

    Returns the child's table: a new list with the same blocks, published or not. Each of them
    has one owner more. Nothing is copied, and no block is taken from the pool.
    """
    ### BEGIN SOLUTION
    pool.touch(blocks)
    return list(blocks)
    ### END SOLUTION

# %% check="fork"
check("fork")

# %% [markdown]
# ## What a fork costs
#
# Counts go up, and a list of numbers is copied: that is all that happens at a fork. How large is that list? The prompt
# of 1000 tokens has 63 entries of 4 bytes. Remember the number; we come back to it.
#
# ## What goes wrong without a barrier
#
# Now let A and B write, with nobody watching. A `Sheet` stands for the K/V memory: each block has four places, one for a
# word. `sheet.write(table, position, word)` finds the block in the table and writes, `sheet.read(table, n)` reads the
# first n words back, `sheet.copy(old, new)` copies a block.

# %%
from kvlab.blocks import BlockPool
from kvlab.lab.scenes.sharing import Sheet

share = lab.best("fork")  # yours if it is solved, else ours

pool, sheet = BlockPool(9), Sheet()
A = pool.get_new_blocks(3)
for position, word in enumerate(PROMPT):
    sheet.write(A, position, word)
B = share(pool, A)

sheet.write(A, 10, "warm")
print("A reads:", " ".join(sheet.read(A, 11)))
sheet.write(B, 10, "soft")
print("A reads:", " ".join(sheet.read(A, 11)), "   <- A never wrote that")

# %% [markdown]
# A's own word is gone. No error, no warning: A goes on from a text that it has not written. In a real model the damage
# is a vector in a tensor, and the answer is merely odd. Such a bug can live for months.
#
# ## Exercise 3: the write barrier
#
# So every write asks first. Think about the order of your steps: what if the pool has no free block? And what if the
# old block would be the only free one?
#
# (`KVCacheBlock` has a property that knows rule 2. It is switched off in this check. Say the rule yourself.)

# %% ex="ensure_writable"
def ensure_writable(pool, table, index):
    """Make logical block `index` of `table` one that its owner may write.

    pool: the block pool. table: a list of blocks. index: 0 <= index < len(table).

    If it may be written as it is: returns None, and changes nothing.
    If not: a new block takes its place at table[index], and this table no longer owns the old
    one. Returns the tuple (old, new) of the two blocks; the caller copies the contents. If the
    pool has no free block, OutOfBlocks comes out of the pool, and nothing has changed.
    """
    ### BEGIN SOLUTION
    old = table[index]
    if old.ref_cnt == 1 and old.block_hash is None:
        return None
    (new,) = pool.get_new_blocks(1)  # first: it may raise, and must not hand out the old block
    table[index] = new
    pool.free_blocks([old])
    return old, new
    ### END SOLUTION

# %% check="ensure_writable"
check("ensure_writable")

# %% [markdown]
# The same two writes again, now through the barrier:

# %%
share, barrier = lab.best("fork"), lab.best("ensure_writable")
pool, sheet = BlockPool(9), Sheet()
A = pool.get_new_blocks(3)
for position, word in enumerate(PROMPT):
    sheet.write(A, position, word)
B = share(pool, A)

for name, table, word in (("A", A, "warm"), ("B", B, "soft")):
    pair = barrier(pool, table, 10 // 4)
    if pair is None:
        print(name, "writes in place")
    else:
        sheet.copy(*pair)
        print(name, f"copies block {pair[0].block_id} to block {pair[1].block_id}")
    sheet.write(table, 10, word)
print("A reads:", " ".join(sheet.read(A, 11)))
print("B reads:", " ".join(sheet.read(B, 11)))

# %% [markdown]
# Look at the second line of the output. Two owners, two writes, **one** copy. When A took its copy it left block 3, and
# B was the only owner left. The last writer writes in place.
#
# ## Exercise 4: room for the next tokens, all or nothing
#
# A step of the engine asks for more than one block at a time. A sequence may need copies of blocks that it shares *and*
# new blocks behind them. If too few are free, the answer is no, and the scheduler will throw somebody else out and ask
# again.
#
# First a guess. A and B share one block of 4 places, with 2 tokens in it. The pool has **one** free block. B wants room
# for 3 tokens. That takes two blocks: a copy of the shared one, and a new one behind it. So the answer is no. What must
# have changed after the no? How many blocks are free then, and how many owners has the shared block?

# %%
lab.predict("free blocks after the no", None)
lab.predict("owners after the no", None)

# %% [markdown]
# So count everything first. The copies are part of the count. From here on `block.is_writable` is yours to use: it is
# rule 2. And `barrier` is your `ensure_writable` if it is solved, else ours.

# %% ex="make_room"
def make_room(pool, table, start, num_tokens, block_size):
    """Let `table` take tokens at positions start, ..., start + num_tokens - 1, ready to write.

    pool: the block pool. table: a list of blocks that covers all positions before `start`; it
    may reach further. start: tokens that are there already. num_tokens: tokens that come, 1 or
    more. block_size: tokens a block holds.

    Every block that these positions fall into must be in the table and writable afterwards.
    First, each of these blocks that is in the table and may not be written is replaced through
    barrier(pool, table, index), lowest index first; there may be several. Then the missing
    blocks are appended, and none that is not needed.

    Returns the list of pairs (old, new) that the barrier gave, [] if there were none.
    Returns None, and changes nothing, if the pool has too few free blocks for copies and new
    blocks together.
    """
    barrier = lab.best("ensure_writable")  # yours if it is solved, else ours
    ### BEGIN SOLUTION
    first, last = start // block_size, (start + num_tokens - 1) // block_size
    standing = range(first, min(last + 1, len(table)))
    to_copy = [index for index in standing if not table[index].is_writable]
    num_new = max(0, last + 1 - len(table))
    if len(to_copy) + num_new > pool.get_num_free_blocks():
        return None
    copies = [barrier(pool, table, index) for index in to_copy]
    table.extend(pool.get_new_blocks(num_new))
    return copies
    ### END SOLUTION

# %% check="make_room"
check("make_room")

# %% [markdown]
# Now ask for too much, as in your guess:

# %%
pool = BlockPool(3)  # block 0 is never handed out, so two are
A = pool.get_new_blocks(1)
B = lab.best("fork")(pool, A)
answer = lab.best("make_room")(pool, B, 2, 3, 4)
print("room for 3 tokens behind 2:", answer, "  B =", [block.block_id for block in B])
lab.compare("free blocks after the no", pool.get_num_free_blocks())
lab.compare("owners after the no", A[0].ref_cnt)

# %% [markdown]
# Nothing has changed: that is what a no means. Had the copy been made before the count, the only free block would be
# gone, and B would have got nothing for it.
#
# ## Watch it: parallel sampling (并行采样)
#
# Your functions are enough for parallel sampling. The next cell plays it word by word. A `Play` has a pool and a sheet,
# and sends each word through your `make_room`. `put` gives a sequence a table, `say` lets it write, `keep` keeps a
# picture of the moment.

# %%
from kvlab.lab.scenes.sharing import Play, draw_moments

ANSWERS = {"A": "warm", "B": "soft", "C": "calm", "D": "glad"}


def sample(num_prompt, n):
    """Fork a prompt n - 1 times and let each sample write one word. Keeps every moment."""
    share, play = lab.best("fork"), Play(lab.best("make_room"))
    play.say("A", [*PROMPT, "and", "full"][:num_prompt])
    play.keep("The prompt is computed once")
    for name in "ABCD"[1:n]:
        play.put(name, share(play.pool, play.tables["A"]), num_prompt)
    play.keep("The fork")
    for name in "ABCD"[:n]:
        copied_before = play.num_copies
        new = play.say(name, ANSWERS[name])
        copied = play.num_copies > copied_before
        how = "takes a copy" if copied else "a new block" if new else "in place"
        play.keep(f"{name} writes “{ANSWERS[name]}”, {how}", new)
    return play


play = sample(num_prompt=10, n=4)
picture(draw_moments(play.moments),
        "Six moments. Block 3 has four rows after the fork, three after A has written, two "
        "after B; C takes the last copy, D writes in place. 6 blocks, 3 copied.")
lab.compare("10 words", play.num_copies)

# %% [markdown]
# **What to look at.** Follow block 3, the last box of the prompt. It is four rows high after the fork, then three, then
# two. The third copy is C's. In the last picture D writes into block 3 itself, because nobody else is left.
#
# Four writers, three copies, and six blocks where copying would hold twelve. Your `sharing_cost` said so before:

# %%
tables = play.moments[-1].tables.values()
seen = sum(map(len, tables)), len(set().union(*tables)), play.num_copies
print("sharing_cost(10, 1, 4, 4) =", tuple(lab.best("sharing_cost")(10, 1, 4, 4)))
print("seen in the tables        =", seen)

# %% [markdown]
# Move the sliders. (They need a running kernel; without one you see a prompt of 12 words when A has written.) Compare a
# prompt of 12 words with one of 11: what does the first write do to block 3?

# %%
from kvlab.lab.show import sliders


def show(prompt, samples, moment):
    moments = sample(prompt, samples).moments
    return draw_moments([moments[min(moment, len(moments) - 1)]], width=16)


sliders(show, alt="A prompt of 12 words, four samples: A has written, and nothing was copied.",
        prompt=(8, 12, 12), samples=(2, 4, 4), moment=(0, 5, 2))

# %% [markdown]
# Now the engine, with the two prompts that you guessed about:

# %%
for num_prompt in (1000, 992):
    _, stats = serve([range(num_prompt)], n=4, num_outputs=24, num_blocks=80)
    lab.compare(f"{num_prompt} tokens", stats.num_copy_on_writes)

# %% [markdown]
# 1000 tokens are 62 full blocks and a half. 992 tokens are 62 full blocks. Here nobody writes into a full block, so there
# is nothing to copy: each sample takes a new block for its first word.
#
# ## What sharing saves
#
# Copies are rare and small. What matters is the memory that is *not* held. The next figure shows the share of blocks
# saved against copying, for answers of 200 tokens and prompts from 10 to 10,000 tokens. The lines are your formula. The
# dots are counted in a pool, with your `fork` and your `make_room`.

# %%
def counted_saving(num_prompt, num_output, n, block_size=16):
    """Play it in a pool: blocks saved against copying, as a share."""
    share, room, pool = lab.best("fork"), lab.best("make_room"), BlockPool(8000)
    tables = [[]]
    room(pool, tables[0], 0, num_prompt, block_size)
    tables += [share(pool, tables[0]) for _ in range(n - 1)]
    for table in tables:
        room(pool, table, num_prompt, num_output, block_size)
    held = pool.num_usable_blocks - pool.get_num_free_blocks()
    return 1 - held / sum(map(len, tables))


DOTS = [16, 100, 500, 2000, 8000]
lengths = sorted({*(round(10 * 1.07**i) for i in range(103)), *DOTS})
cost, saving = lab.best("sharing_cost"), {}
for n in (2, 4, 8):
    by_formula = [cost(num_prompt, 200, n, 16) for num_prompt in lengths]
    saving[n] = [100 * (1 - shared / private) for private, shared, _ in by_formula]
    for num_prompt in DOTS:
        drawn = saving[n][lengths.index(num_prompt)]
        counted = 100 * counted_saving(num_prompt, 200, n)
        assert abs(drawn - counted) < 1e-9, f"{n} samples, prompt {num_prompt}: off the line"
print("The pool counts what the formula says, at 15 points.")

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
for n, colour, style in ((2, "#0072B2", "-"), (4, "#D55E00", "--"), (8, "#009E73", "-.")):
    ax.plot(lengths, saving[n], color=colour, linestyle=style, linewidth=2)
    counted = [100 * counted_saving(num_prompt, 200, n) for num_prompt in DOTS]
    ax.plot(DOTS, counted, "o", color=colour, markersize=5)
    most = f"(at most {100 * (1 - 1 / n):.0f}%)"
    ax.text(11500, saving[n][-1], f"{n} samples\n{most}", va="center", color=colour)
ax.axhline(55, color="#222222", linewidth=1, linestyle=":")
ax.text(10.5, 57, "55%: the textbook's figure", fontsize=10)
ax.set(xscale="log", xlim=(10, 11000), ylim=(0, 100), ylabel="blocks saved against copying, %",
       xlabel="tokens in the prompt (answers: 200 tokens each)")
ax.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
picture(figure, "Blocks saved over the length of the prompt: three rising lines. 2 samples "
        "stay below 50%, 4 pass 55% near 600 tokens, 8 earlier.")

# %% [markdown]
# **What to look at.** Where each line crosses 55%. Two samples never do: even if they shared everything, one of two
# copies is all that can be saved. Four samples need a prompt of some 600 tokens. Sharing saves most where prompts are
# long and answers short. With a prompt of 10 tokens it saves exactly nothing: not one block is full. The teeth of the
# lines are the blocks: a prompt that ends at the edge of one shares all of it.
#
# ## Exercise 5: a step of beam search (束搜索)
#
# Beam search keeps the best few continuations, the beams (束). After each step some beams have several successors and
# some have none:
#
#         before          parents = [0, 0, 2]        after
#         beam 0  ------------------------------->   beam 0   (goes on from 0)
#                 \------------------------------>   beam 1   (goes on from 0)
#         beam 1  x                                           (nobody goes on from 1)
#         beam 2  ------------------------------->   beam 2   (goes on from 2)
#
# In tables: some are forked, some are given back. The order matters. A block whose count drops to zero, only for a
# moment, is in the free queue, and anybody may take it and write over it. Our check takes that literally: the contents
# of a block without owner are gone at once.
#
# `share` is your `fork` if it is solved, else ours.

# %% ex="beam_step"
def beam_step(pool, tables, parents):
    """The tables of the next beams.

    pool: the block pool. tables: one table for each living beam. parents: one entry for each
    next beam: beam i goes on from tables[parents[i]]. A parent may appear several times, or not
    at all. The old beams end here; their tables are not used again.

    Returns the list of the next beams' tables, each a list of its own. Afterwards the next
    beams are the only owners that are left, and no block that one of them names was without
    owner at any time.
    """
    share = lab.best("fork")  # yours if it is solved, else ours
    ### BEGIN SOLUTION
    next_tables = [share(pool, tables[parent]) for parent in parents]
    for table in tables:
        pool.free_blocks(table[::-1])
    return next_tables
    ### END SOLUTION

# %% check="beam_step"
check("beam_step")

# %% [markdown]
# ## Watch it: a real search, played again in your tables
#
# Now a real search. The engine searches with the model that we ship (without torch: with the slot-echo model), and tells
# us who went on from whom. Then your `beam_step` and your `make_room` play the same history in an empty pool. Your
# count must be the engine's count: blocks held over all steps, and copies.

# %%
from kvlab.lab.scenes.sharing import beam_searches


def play_again(history, num_prompt, block_size=16):
    """The same history in your tables: blocks held, and blocks that copying would hold, after
    each step; and copies."""
    step, room, pool = lab.best("beam_step"), lab.best("make_room"), BlockPool(400)
    tables, num_tokens, num_copies = [[]], num_prompt, 0
    room(pool, tables[0], 0, num_prompt, block_size)
    held, copying = [len(tables[0])], [len(tables[0])]
    for parents in history:
        tables = step(pool, tables, parents)
        for table in tables:
            num_copies += len(room(pool, table, num_tokens, 1, block_size))
        num_tokens += 1
        held.append(pool.num_usable_blocks - pool.get_num_free_blocks())
        copying.append(sum(map(len, tables)))
    return held, copying, num_copies


shapes = [(*lengths, width) for lengths in ((19, 58), (256, 64)) for width in (2, 4, 6)]
found = {}
for (num_prompt, _, width), search in beam_searches(shapes).items():
    held, copying, num_copies = play_again(search.parents, num_prompt)
    memory = search.memory
    yours = sum(held), sum(copying), num_copies
    engines = memory.sum_blocks, memory.sum_blocks_copying, memory.num_copies
    assert yours == engines, f"you count {yours}, the engine {engines}: do all checks pass?"
    found[num_prompt, width] = held, copying, num_copies, memory.saved_on_average
print("Six searches: your tables and the engine agree on every count.")

# %% fold="yes"
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=False)
for ax, num_prompt in zip(axes, (19, 256), strict=True):
    held, copying, num_copies, saved = found[num_prompt, 4]
    steps = range(len(held))
    ax.step(steps, copying, where="mid", color="#D55E00", linewidth=2, linestyle="--")
    ax.step(steps, held, where="mid", color="#0072B2", linewidth=2)
    ax.fill_between(steps, held, copying, step="mid", color="#0072B2", alpha=0.12)
    ax.text(steps[-1], copying[-1] * 1.02, "copying", color="#D55E00", ha="right", va="bottom",
            fontsize=10)
    ax.text(steps[-1], held[-1] - copying[-1] * 0.03, "sharing", color="#0072B2", ha="right",
            va="top", fontsize=10)
    ax.set_title(f"4 beams, a prompt of {num_prompt} tokens:\n{100 * saved:.0f}% saved on "
                 f"average, {num_copies} blocks copied", loc="left", fontsize=11)
    ax.set(xlabel="step", ylabel="blocks of 16 tokens held", ylim=(0, max(copying) * 1.15),
           xlim=(0, steps[-1]))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
picture(figure, "Blocks held by 4 beams, step by step: with a short prompt and with a long "
        "one, sharing stays far below copying from the first fork on.")

# %% [markdown]
# **What to look at.** The distance between the lines. It opens at the first fork. On the right it is wide at once,
# because the prompt is long. On the left the prompt fills hardly more than a block, so the gap is small at first; and
# yet it grows: beams share what their common ancestors wrote. Follow the lower line. It jumps when the beams enter a
# new block, each one of its own. It falls back when the search settles on one of them: the others die, and their
# blocks come back.
#
# ## Exercise 6: branch off, go back
#
# An agent tries a path, gives it up, goes back three sentences and tries another. Two operations do it:
#
# - `fork_at`: a new branch (分支) that shares the first so many tokens, at *any* position;
# - `truncate`: the branch itself goes back (回溯) to its first so many tokens.
#
# Neither copies anything. A cut in the middle of a block leaves a block that is shared in part, or one that is full and
# published and is now used in part. Whoever writes there next goes through the barrier, and that is soon enough.

# %% ex="branch_and_return"
from kvlab.blocks import cdiv  # cdiv(a, b): a / b rounded up


def fork_at(pool, table, num_tokens, block_size):
    """The table of a new branch that shares the first num_tokens tokens of `table`.

    pool: the block pool. table: a list of blocks. num_tokens: from 0 to the tokens in the
    table. block_size: tokens a block holds.

    Returns a new list: every block that holds at least one of these tokens, published or not,
    with one owner more, and no other block.
    """
    share = lab.best("fork")  # yours if it is solved, else ours
    ### BEGIN SOLUTION
    return share(pool, table[: cdiv(num_tokens, block_size)])
    ### END SOLUTION


def truncate(pool, table, num_tokens, block_size):
    """Cut `table` itself back to its first num_tokens tokens.

    The arguments are those of fork_at. Blocks that hold none of these tokens leave the table,
    and this table no longer owns them: give them back, the last one first, so that the
    beginning is reused last. Returns nothing.
    """
    ### BEGIN SOLUTION
    keep = cdiv(num_tokens, block_size)
    cut_off = table[keep:]
    del table[keep:]
    pool.free_blocks(reversed(cut_off))
    ### END SOLUTION

# %% check="branch_and_return"
check("branch_and_return")

# %% [markdown]
# ## Watch it: an agent's tree
#
# An agent plans a trip. A writes a plan. B leaves it after six words, C leaves B after seven. Then A gives its plan up,
# goes back to its second word and starts again.

# %%
branch_off, go_back = lab.best("fork_at"), lab.best("truncate")
play = Play(lab.best("make_room"))
play.say("A", "go by train to Xian then take the bus home")
play.keep("A has a plan of 10 words")
play.put("B", branch_off(play.pool, play.tables["A"], 6, 4), 6)
play.say("B", "fly")
play.keep("B branches off at word 6")
play.put("C", branch_off(play.pool, play.tables["B"], 7, 4), 7)
play.say("C", "back on Monday")
play.keep("C branches off B and goes on")
go_back(play.pool, play.tables["A"], 2, 4)
play.put("A", play.tables["A"], 2)
play.say("A", "boat")
play.keep("A goes back to word 2, writes “boat”")

picture(draw_moments(play.moments, height=3),
        "Four moments of the tree. B writes into block 4, a copy of block 2; C into "
        "block 5, a copy of block 4; A goes back and writes into block 7, a copy of block 1.")

# %% [markdown]
# **What to look at.** B branches off in the middle of block 2, which is *full*. B's first word costs a copy: block 4.
# In the last picture A goes back into block 1, which is full too, and which B and C still read. A takes a copy, block
# 7, and goes on alone; its old blocks 2 and 3 have gone back to the pool. So a full block can be copied after all, if
# somebody goes back into it.
#
# ## Into the engine
#
# Your `fork` and your `ensure_writable` are parts of the engine. `lab.run_engine()` runs it twice on the same requests,
# once with your parts and once with ours. One of the requests asks for three samples.

# %%
result = lab.run_engine()

# %% [markdown]
# And now the bug from above, in the engine. `no_barrier` says that it has copied a block, and has not. It runs on the
# slot-echo model, whose next token depends on every token that it reads back. So one wrong slot cannot hide.

# %%
def no_barrier(pool, table, index):
    """Says that it has copied the block, and has not."""
    return table[index], table[index]


# %% fold="yes"
from kvlab.sim import echo_generate


def compare_samples(parts, n=4, num_prompt=10, num_outputs=8):
    """Print each sample's tokens, a cross behind those that are wrong."""
    prompt = list(range(num_prompt))
    tokens, _ = serve([prompt], n, num_outputs, num_blocks=20, block_size=4, parts=parts)
    for i in range(n):
        params = SamplingParams(temperature=1.0, max_tokens=num_outputs)
        right = echo_generate(prompt, params, seed=i)
        got = tokens["0" if i == 0 else f"0#{i}"]
        pairs = list(zip(got, right, strict=True))
        shown = " ".join(f"{g:3}" if g == r else f"{g:2}✗" for g, r in pairs)
        wrong = [j for j, (g, r) in enumerate(pairs) if g != r]
        verdict = f"wrong from output {wrong[0]} on" if wrong else "right"
        print(f"  sample {'ABCD'[i]}: {shown}   {verdict}")


# %%
print("with no barrier (✗: not the right token; outputs are counted from 0):")
compare_samples(Parts(ensure_writable=no_barrier))
print("with yours, as far as solved:")
compare_samples(lab.parts())

# %% [markdown]
# The first token of each sample is right: it was drawn before anybody wrote. All samples then wrote into one slot, and
# only the last of them reads its own word there.
#
# ## What the textbook says, and what we measured
#
# Each line of the table is computed by this notebook, in four cells. First the fork and the copies.

# %%
share, barrier = lab.best("fork"), lab.best("ensure_writable")
cost, room, branch_off = lab.best("sharing_cost"), lab.best("make_room"), lab.best("fork_at")
ledger = []


def claim(where, says, we_find, verdict):
    ledger.append((where, says, we_find, verdict))


pool = BlockPool(80)
prompt = pool.get_new_blocks(63)
children = [share(pool, prompt) for _ in range(3)]
taken = pool.num_usable_blocks - pool.get_num_free_blocks() - 63
counts = {block.ref_cnt for block in prompt}
claim("L33 2.4", "at the fork no K/V is copied, and ref_cnt is 4",
      f"{taken} blocks taken, ref_cnt {counts}",
      "holds" if taken == 0 and counts == {4} else "contradicted")

table_bytes = 4 * len(prompt)  # 4 bytes a block
claim("L33 2.4", "a branch costs some tens of bytes of table",
      f"{table_bytes} bytes for 1000 tokens", "holds" if table_bytes < 100 else
      f"holds up to {100 // 4 * 16} tokens, where it is 100 bytes")

copies = {p: serve([range(p)], 4, 24, 80)[1].num_copy_on_writes for p in (1000, 992)}
claim("L33 2.4", "the writer copies the one block it changes",
      f"4 writers: {copies[1000]} copies for 1000 tokens, {copies[992]} for 992",
      "holds if the last block is part full, for all writers but the last"
      if (copies[1000], copies[992]) == (3, 0) else "contradicted")

named = pool.get_new_blocks(1)
named[0].block_hash = "a name"
by_name = barrier(pool, named, 0) is not None
claim("L33 2.4", "a write copies when ref_cnt > 1",
      f"a published block with ref_cnt 1: {int(by_name)} copy", "holds" if not by_name else
      "holds without a prefix cache; with one, a published block is copied too")

# %% [markdown]
# Then the memory. "Saved" is blocks not held, as a share of the blocks that copying would hold.

# %%
private, shared, _ = cost(1000, 0, 4, 16)
claim("L33 2.4", "copying the prompt 4 times wastes 4 times the memory",
      f"{private} blocks for {shared}: {private // shared} times held, "
      f"{private // shared - 1} of them wasted",
      "holds if “wastes” means “takes”" if private == 4 * shared else "contradicted")

for width in (2, 4, 6):
    short, long = found[19, width][3], found[256, width][3]
    bound = 1 - 1 / width
    verdict = "contradicted: it cannot pass 1 - 1/width" if bound <= 0.55 else (
        "holds" if min(short, long) > 0.55 else
        "holds if the prompt is long" if long > 0.55 else "contradicted here")
    claim("L33 2.4", f"beam search, {width} beams: over 55% saved",
          f"{100 * short:.0f}% (prompt 19, output 58), {100 * long:.0f}% (256, 64); "
          f"at most {100 * bound:.0f}%", verdict)

saved = {}
for num_prompt in range(1, 2001):
    private, shared, _ = cost(num_prompt, 200, 4, 16)
    saved[num_prompt] = 1 - shared / private
enough = max(num_prompt for num_prompt in saved if saved[num_prompt] <= 0.55) + 1
claim("L33 2.4", "parallel sampling, 4 samples: over 55% saved",
      f"{100 * saved[100]:.0f}% (prompt 100, answers 200), "
      f"{100 * saved[1000]:.0f}% (prompt 1000)",
      "holds" if enough == 1 else "contradicted here" if enough > 2000 else
      f"holds from a prompt of {enough} tokens on, for answers of 200")

# %% [markdown]
# Now throughput. We count steps of the scheduler in a pool that is too small for everybody, with sharing and without,
# and take a step to cost the same however many sequences it serves.

# %%
speed_up = {}
for case in ((64, 64, 4, 60), (256, 64, 4, 160), (512, 32, 8, 320)):
    num_prompt, num_output, n, num_blocks = case
    prompts = [range(10_000 * i, 10_000 * i + num_prompt) for i in range(12)]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    _, forked = serve(prompts, n, num_output, num_blocks, **options)
    single = [prompt for prompt in prompts for _ in range(n)]
    _, apart = serve(single, 1, num_output, num_blocks, **options)
    speed_up[case] = apart.num_steps / forked.num_steps
slow, middle, fast = speed_up.values()
claim("L33 2.4", "throughput doubles",
      f"{slow:.1f}x (4 samples, prompt 64, answers 64), {middle:.1f}x (4, 256, 64), "
      f"{fast:.1f}x (8, 512, 32)", "holds" if slow >= 2 else
      "holds if memory is what limits, and most of it is shared" if fast >= 2 else
      "contradicted here")

# %% [markdown]
# Last, requests that share cached blocks: do they ever copy? And what if they fork, or go back?

# %%
system = list(range(40))
prompts = [system + [1000 + 100 * i + j for j in range(1 + 5 * i)] for i in range(12)]
_, cached = serve(prompts, 1, 40, 200, max_num_seqs=4)
_, forked = serve(prompts, 4, 40, 200, max_num_seqs=16)
full = pool.get_new_blocks(1)  # one full block of 16 tokens
child = branch_off(pool, full, 8, 16)
into_full = room(pool, child, 8, 1, 16)
by_cache, by_fork = cached.num_copy_on_writes, forked.num_copy_on_writes
by_return = len(into_full)
claim("PAV 3.4", "sharers of cached blocks part by copy-on-write",
      f"12 prompts on one beginning, {cached.num_prefix_hit_tokens} tokens hit: {by_cache} "
      f"copies; with 4 samples each: {by_fork}; a branch from the middle of a full block: "
      f"{by_return}", "holds" if by_cache else "contradicted for cached blocks alone; holds "
      "after a fork with a part-full block, and after going back into a full one"
      if by_fork and by_return else "contradicted")

# %%
from kvlab.lab.show import table as show_table

show_table(["where", "the text says", "we find", "verdict"], ledger)

# %% [markdown]
# **The 55%.** The paper on paged attention (SOSP'23, its section 6.3) counts savings as we do. For beam search with 2 to
# 6 beams it reports 37.6% to 55.2% on the short prompts of Alpaca, and 44.3% to 66.3% on ShareGPT. For parallel sampling
# with 2 to 6 samples it reports much less: 6.1% to 9.8% on Alpaca, 16.2% to 30.5% on ShareGPT. So 55% is the upper end
# of one of four ranges, not a floor. How much you save is not a property of the mechanism. It follows from the width,
# the length of prompt and answer, and how late the branches part.
#
# **Twice the throughput.** Where memory is what limits, more sequences in the pool are more tokens in a step. Where
# prompts are short beside answers there is little to share, and little is gained. And where memory is not what limits,
# sharing memory gains nothing.
#
# **The cached blocks.** Only full blocks get a name, and only whole blocks are hit. Two requests that hit the same
# blocks write their next tokens *behind* them, each into a block of its own. So they part without any copy. That is why
# an engine with a prefix cache alone can do without copy-on-write. It pays in another coin: with a prompt of 30 tokens
# and blocks of 16, every sample computes the last 14 tokens again.

# %% [markdown]
# ## More, if you like
#
# ### Exercise 7: what would giving up a branch bring?
#
# The pool is full and a branch must go. How many blocks come back? Not those that others hold. And two branches that
# share a block bring it back only if both go. The engine's scheduler asks this before it preempts (抢占) anybody.

# %% ex="blocks_freed_by"
def blocks_freed_by(tables):
    """How many blocks would come back if all of `tables` were given up together.

    tables: a list of tables, each a list of blocks with `ref_cnt`. Other tables, not in this
    list, may share blocks with them. Returns a whole number. Nothing is changed: count, and
    give nothing back.
    """
    ### BEGIN SOLUTION
    entries = Counter(block for table in tables for block in table)
    return sum(1 for block, number in entries.items() if number == block.ref_cnt)
    ### END SOLUTION

# %% check="blocks_freed_by"
check("blocks_freed_by")

# %% [markdown]
# ### Exercise 8: which copies may be made at once?
#
# The barrier only keeps the books. The copies themselves go to the GPU as an ordered list, and a GPU likes to do many
# at once: it reads all sources, then it writes all targets, in no particular order. Usually that is the same as one
# after the other. Not always. If a copy goes from 1 to 2 and the next one from 2 to 3, then block 3 must get what was
# in block 1. And if two copies go to block 2, nobody can say which of them will be there at the end.
#
# Cut the list into batches (批), in its order, as few as possible.

# %% ex="copy_batches"
def copy_batches(copies):
    """Cut an ordered list of copies into the fewest batches that may each be made at once.

    copies: a list of pairs (source, target) of block ids, to be made in this order.

    Returns a list of batches, each a list of pairs. Put behind each other they are `copies`. In
    each batch, reading all sources and then writing all targets, in any order, must give what
    one copy after the other gives; so no block is written twice in a batch, even with the same
    contents. No copies: no batches.
    """
    ### BEGIN SOLUTION
    batches, written = [], None
    for source, target in copies:
        if written is None or written & {source, target}:
            batches.append([])
            written = set()
        batches[-1].append((source, target))
        written.add(target)
    return batches
    ### END SOLUTION

# %% check="copy_batches"
check("copy_batches")

# %% [markdown]
# ## What to remember
#
# - A fork copies no K/V. It copies a list of block numbers and adds one to each count.
# - A block may be written with one owner and no name. Everything else goes through the barrier: take a new block, put
#   it in the table, give the old one back, in this order.
# - n samples of one prompt make n - 1 copies, or none if the prompt ends at the edge of a block. The last writer writes
#   in place.
# - Count the copy before you change anything. Fork before you free.
# - What sharing saves is at most 1 - 1/n. It comes close when the prompt is long and the answers are short.
#
# ## Questions to think about
#
# 1. `block_size = 1`: how many copies does parallel sampling make then? What does the answer cost elsewhere?
# 2. Beam search with 4 beams copied about one block every two steps. Would you copy eagerly, at the fork, to have all
#    copies in one launch? What does it cost in blocks?
# 3. Four samples share 62 blocks, and each holds 3 of its own. What does `blocks_freed_by` say about each sample alone,
#    and about all four? What should a scheduler that looks for a victim make of that?
# 4. Swap space (lab 09) moves blocks to the CPU. Two siblings that share 62 blocks are both swapped out. How many
#    blocks must move?
#
# ## Where this lives in real engines
#
# - **vLLM, first version**: sequences had a `fork`, the block manager copied on write, and a kernel copied many blocks
#   in one launch (pull request 32 of April 2023), because beam search made so many of them.
# - **vLLM today**: beam search was the most complex user of the block manager and rarely used, so it was rewritten
#   outside the engine, on top of prefix caching (issues 6226 and 8306, pull request 8726). V1 came without
#   copy-on-write: n samples are n requests that hit the same cached blocks. `ref_cnt` and `touch` are still there, in
#   `vllm/v1/core/block_pool.py`.
# - **SGLang**: the radix tree of lab 06 shares whole prefixes. With its usual pages of one token there is no part-full
#   block, so nothing is ever copied.
# - **kvlab**: `kvlab/blocks/sharing.py` is your two parts, `kvlab/manager.py` calls them, `kvlab/schedule/beam.py` and
#   `group.py` are the search, `KVCache.apply` in `kvlab/model/kv_cache.py` makes the copies.
