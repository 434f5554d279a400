# %% [markdown]
# # Lab 04: Copy-on-write (写时复制)
#
# One question, four answers. The four sequences begin with the same thousand tokens, and then they part. In this lab
# you build the two small functions that let them share every block that is the same, and that notice, just in time,
# when a block is about to become different.
#
# It goes with L33 2.4 and PAV 3.4. It takes about 80 minutes.

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
    """Sample n answers to each prompt. Returns the tokens by sequence, and what the scheduler counted."""
    config = EngineConfig(block_size=block_size, num_gpu_blocks_override=num_blocks + 1, **options)
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
print(f"blocks in use at the peak: {stats.peak_usage * 80:.0f} of 80; preemptions: {stats.num_preemptions_recompute}")

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

from kvlab.lab.draw_tables import draw_tables

PROMPT = "my cat sat on the mat and it was so".split()

figure, ax = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
draw_tables(ax, {name: [1, 2, 3] for name in "ABCD"}, {name: PROMPT for name in "ABCD"}, block_size=4,
            title="After the fork: 4 tables, 3 blocks")
ax.set_xlabel("token position")
plt.show()

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
# Then count boxes, twice. *Copying*: each sequence has all its blocks for itself. *Sharing*: as in the figure, after
# the four words. Do it again for a prompt of 12 words. Now write down what you did, for any numbers.

# %% ex="sharing_cost"
def sharing_cost(num_prompt, num_output, n, block_size):
    """What n samples of one prompt hold, once each has written num_output tokens of its own.

    num_prompt: tokens that all samples begin with, 1 or more. num_output: tokens that each has written after them, 0 or
    more; no two samples write the same. n: samples. block_size: tokens a block holds.

    Returns three whole numbers, in a tuple:
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
assert cost(10, 0, 4, 4) == (sum(owners.values()), len(owners), 0)

# %% [markdown]
# ## Build 1: fork
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

    Returns the child's table: a new list with the same blocks. Each of them has one owner more. Nothing is copied, and
    no block is taken from the pool.
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
# Now let A and B write, with nobody watching. A sheet of words stands for the K/V memory: each block has four places.

# %%
from kvlab.blocks import BlockPool

share = lab.best("fork")  # yours if it is solved, else ours


class Sheet:
    """What the blocks hold: one word a slot, where a GPU has K and V."""

    def __init__(self, block_size=4):
        self.block_size, self.rows = block_size, {}

    def write(self, table, position, word):
        row = self.rows.setdefault(table[position // self.block_size].block_id, [""] * self.block_size)
        row[position % self.block_size] = word

    def copy(self, source, target):
        self.rows[target.block_id] = list(self.rows[source.block_id])

    def read(self, table, num_tokens):
        return [self.rows[table[p // self.block_size].block_id][p % self.block_size] for p in range(num_tokens)]


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
# ## Build 2: the write barrier
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
    If not: a new block takes its place at table[index], and this table no longer owns the old one. Returns the tuple
    (old, new); the caller copies the contents. If the pool has no free block, OutOfBlocks comes out of the pool, and
    nothing has changed.
    """
    ### BEGIN SOLUTION
    old = table[index]
    if old.ref_cnt == 1 and old.block_hash is None:
        return None
    (new,) = pool.get_new_blocks(1)  # first: it may raise, and it must not hand out the old block
    table[index] = new
    pool.free_blocks([old])
    return old, new
    ### END SOLUTION

# %% check="ensure_writable"
check("ensure_writable")

# %% [markdown]
# The same two writes again, now through the barrier:

# %%
barrier = lab.best("ensure_writable")  # yours if it is solved, else ours

pool, sheet = BlockPool(9), Sheet()
A = pool.get_new_blocks(3)
for position, word in enumerate(PROMPT):
    sheet.write(A, position, word)
B = share(pool, A)

for name, table, word in (("A", A, "warm"), ("B", B, "soft")):
    pair = barrier(pool, table, 10 // 4)
    if pair is not None:
        sheet.copy(*pair)
    sheet.write(table, 10, word)
    done = "writes in place" if pair is None else f"copies block {pair[0].block_id} to block {pair[1].block_id}"
    print(f"{name} {done}")
print("A reads:", " ".join(sheet.read(A, 11)))
print("B reads:", " ".join(sheet.read(B, 11)))

# %% [markdown]
# Look at the second line of the output. Two owners, two writes, **one** copy. When A took its copy it left block 3, and
# B was the only owner left. The last writer writes in place.
#
# ## Build 3: room for the next tokens, all or nothing
#
# A step of the engine asks for more than one block at a time. A sequence may need a copy of its last block *and* a new
# block behind it. If only one block is free, the answer is no, and a no must change nothing: the scheduler will throw
# somebody else out and ask again.
#
# So count everything first. The copy is part of the count. From here on `block.is_writable` is yours to use: it is rule
# 2.

# %% ex="make_room"
def make_room(pool, table, start, num_tokens, block_size):
    """Let `table` take tokens at positions start, ..., start + num_tokens - 1, each in a block that may be written.

    pool: the block pool. table: a list of blocks that covers all positions before `start`; it may reach further.
    start: tokens that are there already. num_tokens: tokens that come, 1 or more. block_size: tokens a block holds.

    Every block that these positions fall into must be in the table and writable afterwards.
    First, blocks that are in the table and may not be written are replaced through barrier(pool, table, index), lowest
    index first. Then the missing blocks are appended, and none that is not needed.

    Returns the list of pairs (old, new) that the barrier gave, [] if there were none.
    Returns None, and changes nothing, if the pool has too few free blocks for copies and new blocks together.
    """
    ### BEGIN SOLUTION
    first, last = start // block_size, (start + num_tokens - 1) // block_size
    to_copy = [index for index in range(first, min(last + 1, len(table))) if not table[index].is_writable]
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
# ## Watch it: parallel sampling (并行采样)
#
# Your three functions are enough for parallel sampling. The next cell plays it word by word, and keeps a picture after
# each write.

# %%
room = lab.best("make_room")  # yours if it is solved, else ours
ANSWERS = {"A": "warm", "B": "soft", "C": "calm", "D": "glad"}


def sample(num_prompt, n, block_size=4):
    """Fork a prompt n - 1 times and let each sample write one word. One snapshot after each event."""
    pool, sheet, words = BlockPool(40), Sheet(block_size), (PROMPT + ["and", "full"])[:num_prompt]
    tables = {"A": []}
    room(pool, tables["A"], 0, num_prompt, block_size)
    for position, word in enumerate(words):
        sheet.write(tables["A"], position, word)
    length, num_copies, snapshots = {"A": num_prompt}, 0, []

    def snapshot(title, new=()):
        snapshots.append({
            "title": f"{title}: {pool.num_usable_blocks - pool.get_num_free_blocks()} blocks, {num_copies} copied",
            "tables": {name: [block.block_id for block in table] for name, table in tables.items()},
            "words": {name: sheet.read(table, length[name]) for name, table in tables.items()}, "new": set(new),
        })

    snapshot("The prompt is computed once")
    for name in "ABCD"[1:n]:
        tables[name], length[name] = share(pool, tables["A"]), num_prompt
    snapshot("The fork")
    for name in "ABCD"[:n]:
        before = {block.block_id for block in tables[name]}
        copies = room(pool, tables[name], num_prompt, 1, block_size)
        for source, target in copies:
            sheet.copy(source, target)
        sheet.write(tables[name], num_prompt, ANSWERS[name])
        num_copies, length[name] = num_copies + len(copies), num_prompt + 1
        new = {block.block_id for block in tables[name]} - before
        how = "takes a copy" if copies else "a new block" if new else "in place"
        snapshot(f"{name} writes “{ANSWERS[name]}”, {how}", new)
    return snapshots, num_copies


snapshots, num_copies = sample(num_prompt=10, n=4)
figure, axes = plt.subplots(3, 2, figsize=(11, 7.6), layout="constrained")
for ax, moment in zip(axes.flat, snapshots, strict=True):
    draw_tables(ax, moment["tables"], moment["words"], 4, new=moment["new"], title=moment["title"], width=12, height=4)
plt.show()
lab.compare("10 words", num_copies)

# %% [markdown]
# **What to look at.** Follow block 3, the last box of the prompt. It is four rows high after the fork, then three, then
# two. The third copy is C's. In the last picture D writes into block 3 itself, because nobody else is left.
#
# Four writers, three copies, and six blocks where copying would hold twelve. Your `sharing_cost` said so before:

# %%
tables = snapshots[-1]["tables"].values()
print("sharing_cost(10, 1, 4, 4) =", cost(10, 1, 4, 4))
print("seen in the tables        =", (sum(map(len, tables)), len(set().union(*tables)), num_copies))

# %% [markdown]
# Move the sliders. (They need a running kernel; without one you see a prompt of 12 words when A has written.) Compare a
# prompt of 12 words with one of 11: what does the first write do to block 3?

# %%
from kvlab.lab.draw_tables import sliders


def show(prompt, samples, moment):
    snapshots, _ = sample(prompt, samples)
    now = snapshots[min(moment, len(snapshots) - 1)]
    figure, ax = plt.subplots(figsize=(8.5, 2.6), layout="constrained")
    draw_tables(ax, now["tables"], now["words"], 4, new=now["new"], title=now["title"], width=16, height=4)
    return figure


sliders(show, prompt=(8, 12, 12), samples=(2, 4, 4), moment=(0, 5, 2))

# %% [markdown]
# Now the engine, with the two prompts that you guessed about:

# %%
for num_prompt in (1000, 992):
    _, stats = serve([range(num_prompt)], n=4, num_outputs=24, num_blocks=80)
    lab.compare(f"{num_prompt} tokens", stats.num_copy_on_writes)

# %% [markdown]
# 1000 tokens are 62 full blocks and a half. 992 tokens are 62 full blocks. Nobody ever writes into a full block, so
# there is nothing to copy: each sample takes a new block for its first word.
#
# ## What sharing saves
#
# Copies are rare and small. What matters is the memory that is *not* held. The next figure shows the share of blocks
# saved against copying, for answers of 200 tokens and prompts from 10 to 10,000 tokens. The lines are your formula. The
# dots are counted in a pool, with your `fork` and your `make_room`.

# %%
def counted_saving(num_prompt, num_output, n, block_size=16):
    """Play it in a pool: blocks saved against copying, as a share."""
    pool = BlockPool(4000)
    tables = [[]]
    room(pool, tables[0], 0, num_prompt, block_size)
    tables += [share(pool, tables[0]) for _ in range(n - 1)]
    for table in tables:
        room(pool, table, num_prompt, num_output, block_size)
    held = pool.num_usable_blocks - pool.get_num_free_blocks()
    return 1 - held / sum(map(len, tables))


lengths = [round(10 * 1.07**i) for i in range(103)]
figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
for n, colour, style in ((2, "#0072B2", "-"), (4, "#D55E00", "--"), (8, "#009E73", "-.")):
    saved = [100 * (1 - shared / private) for private, shared, _ in (cost(p, 200, n, 16) for p in lengths)]
    ax.plot(lengths, saved, color=colour, linestyle=style, linewidth=2)
    at = [16, 100, 500, 2000, 8000]
    ax.plot(at, [100 * counted_saving(p, 200, n) for p in at], "o", color=colour, markersize=5)
    ax.text(11500, saved[-1], f"{n} samples\n(at most {100 * (1 - 1 / n):.0f}%)", va="center", color=colour)
ax.axhline(55, color="#222222", linewidth=1, linestyle=":")
ax.text(10.5, 57, "55%: the textbook's figure", fontsize=10)
ax.set(xscale="log", xlim=(10, 11000), ylim=(0, 100), xlabel="tokens in the prompt (answers: 200 tokens each)",
       ylabel="blocks saved against copying, %")
ax.set_xticks([10, 100, 1000, 10000], ["10", "100", "1,000", "10,000"])
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
plt.show()

# %% [markdown]
# **What to look at.** Where each line crosses 55%. Two samples never do: even if they shared everything, one of two
# copies is all that can be saved. Four samples need a prompt of some 600 tokens. Sharing saves most where prompts are
# long and answers short. With a prompt of 10 tokens it saves next to nothing.
#
# ## Build 4: a step of beam search (束搜索)
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

# %% ex="beam_step"
def beam_step(pool, tables, parents):
    """The tables of the next beams.

    pool: the block pool. tables: one table for each living beam. parents: one entry for each next beam: beam i goes on
    from tables[parents[i]]. A parent may appear several times, or not at all. The old beams end here; their tables are
    not used again.

    Returns the list of the next beams' tables, each a list of its own. Afterwards the next beams are the only owners
    that are left, and no block that one of them names was without owner at any time. share(pool, table) is your fork.
    """
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
# Now a real search. The engine searches with the model that we ship (without torch: with the slot-echo model), and we
# write down who went on from whom. Then your `beam_step` and your `make_room` play the same history in an empty pool.
# Your count must be the engine's count: blocks held over all steps, and copies.

# %%
from importlib.util import find_spec

from kvlab.sampling_params import BeamSearchParams
from kvlab.schedule.beam import BeamGroup, beam_request

step_of_beams = lab.best("beam_step")  # yours if it is solved, else ours
has_model = find_spec("torch") is not None and find_spec("transformers") is not None
if has_model:
    from kvlab import LLM
    from kvlab.tiny import load_glossary

    llm = LLM("tiny", dtype="float32", block_size=16, num_gpu_blocks_override=400)
    TEXT = [token for entry in load_glossary() for token in llm.tokenizer.encode(entry["question"] + entry["answer"])]


def search(num_prompt, num_output, width):
    """A beam search: who went on from whom, step by step, and the engine's own account of its memory."""
    history, advance = [], BeamGroup.advance

    def advance_and_tell(group):
        living = advance(group)
        history.append([parent for parent, _ in living])
        return living

    params = BeamSearchParams(beam_width=width, max_tokens=num_output, ignore_eos=True)
    BeamGroup.advance = advance_and_tell  # only while this search runs
    try:
        if has_model:
            return history, llm.beam_search([TEXT[:num_prompt]], params)[0].memory
        core = Parts().make_engine(EngineConfig(block_size=16, num_gpu_blocks_override=400))
        request = beam_request("beams", list(range(num_prompt)), params)
        core.add_request(request)
        while core.has_unfinished_requests():
            core.step()
        return history, request.group.memory
    finally:
        BeamGroup.advance = advance


def play(history, num_prompt, block_size=16):
    """The same history in your tables: blocks held and blocks that copying would hold, after each step; copies."""
    pool, num_tokens, num_copies = BlockPool(400), num_prompt, 0
    tables = [[]]
    room(pool, tables[0], 0, num_prompt, block_size)
    held, copying = [len(tables[0])], [len(tables[0])]
    for parents in history[:-1]:  # after the last step nobody lives on
        tables = step_of_beams(pool, tables, parents)
        for table in tables:
            num_copies += len(room(pool, table, num_tokens, 1, block_size))
        num_tokens += 1
        held.append(pool.num_usable_blocks - pool.get_num_free_blocks())
        copying.append(sum(map(len, tables)))
    return held, copying, num_copies


found = {}
for num_prompt, num_output in ((19, 58), (256, 64)):
    for width in (2, 4, 6):
        history, memory = search(num_prompt, num_output, width)
        held, copying, num_copies = play(history, num_prompt)
        engine_counts = memory.sum_blocks, memory.sum_blocks_copying, memory.num_copies
        assert (sum(held), sum(copying), num_copies) == engine_counts, "your counts differ: do all checks so far pass?"
        found[num_prompt, width] = held, copying, num_copies, memory.saved_on_average
print("Six searches: your tables and the engine agree on every count.")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=False)
for ax, num_prompt in zip(axes, (19, 256), strict=True):
    held, copying, num_copies, saved = found[num_prompt, 4]
    steps = range(len(held))
    ax.step(steps, copying, where="mid", color="#D55E00", linewidth=2, linestyle="--")
    ax.step(steps, held, where="mid", color="#0072B2", linewidth=2)
    ax.fill_between(steps, held, copying, step="mid", color="#0072B2", alpha=0.12)
    ax.text(steps[-1], copying[-1] * 1.02, "copying", color="#D55E00", ha="right", va="bottom", fontsize=10)
    ax.text(steps[-1], held[-1] - copying[-1] * 0.03, "sharing", color="#0072B2", ha="right", va="top", fontsize=10)
    ax.set_title(f"4 beams, a prompt of {num_prompt} tokens:\n{100 * saved:.0f}% saved on average, "
                 f"{num_copies} blocks copied", loc="left", fontsize=11)
    ax.set(xlabel="step", ylabel="blocks of 16 tokens held", ylim=(0, max(copying) * 1.15), xlim=(0, steps[-1]))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
plt.show()

# %% [markdown]
# **What to look at.** The distance between the lines. On the right it is there from the first fork on, because the
# prompt is long. On the left the prompt fills hardly more than a block, and yet there is a distance: beams share what
# their common ancestors wrote. Follow the lower line. It jumps when the beams enter a new block, each one of its own.
# It falls back when the search settles on one of them: the others die, and their blocks come back.
#
# ## Build 5: branch off, go back
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

    pool: the block pool. table: a list of blocks. num_tokens: from 0 to the tokens in the table. block_size: tokens a
    block holds.

    Returns a new list: every block that holds at least one of these tokens, with one owner more, and no other block.
    """
    ### BEGIN SOLUTION
    return share(pool, table[: cdiv(num_tokens, block_size)])
    ### END SOLUTION


def truncate(pool, table, num_tokens, block_size):
    """Cut `table` itself back to its first num_tokens tokens.

    The arguments are those of fork_at. Blocks that hold none of these tokens leave the table, and this table no longer
    owns them: give them back, the last one first, so that the beginning is reused last. Returns nothing.
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
pool, sheet = BlockPool(40), Sheet()
tables, length, moments, num_copies = {}, {}, [], 0


def say(name, text):
    """`name` writes words, each through the barrier."""
    global num_copies
    for word in text.split():
        for source, target in room(pool, tables[name], length[name], 1, 4):
            sheet.copy(source, target)
            num_copies += 1
        sheet.write(tables[name], length[name], word)
        length[name] += 1


def keep_moment(title):
    held = pool.num_usable_blocks - pool.get_num_free_blocks()
    moments.append((f"{title}: {held} blocks held, {num_copies} copied so far",
                    {name: [block.block_id for block in table] for name, table in tables.items()},
                    {name: sheet.read(table, length[name]) for name, table in tables.items()}))


tables["A"], length["A"] = [], 0
say("A", "go by train to Xian then take the bus home")
keep_moment("A has a plan of 10 words")
tables["B"], length["B"] = branch_off(pool, tables["A"], 6, 4), 6
say("B", "fly")
keep_moment("B branches off at word 6 and writes “fly”")
tables["C"], length["C"] = branch_off(pool, tables["B"], 7, 4), 7
say("C", "back on Monday")
keep_moment("C branches off B and goes on")
go_back(pool, tables["A"], 2, 4)
length["A"] = 2
say("A", "boat")
keep_moment("A goes back to word 2 and writes “boat”")

figure, axes = plt.subplots(2, 2, figsize=(11, 4.6), layout="constrained")
for ax, (title, shown, words) in zip(axes.flat, moments, strict=True):
    draw_tables(ax, shown, words, 4, title=title, width=12, height=3)
plt.show()

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
from kvlab.sim import echo_generate


def no_barrier(pool, table, index):
    """Says that it has copied the block, and has not."""
    return table[index], table[index]


def compare_samples(parts, n=4, num_prompt=10, num_outputs=8):
    tokens, _ = serve([list(range(num_prompt))], n, num_outputs, num_blocks=20, block_size=4, parts=parts)
    for i in range(n):
        params = SamplingParams(temperature=1.0, max_tokens=num_outputs)
        right = echo_generate(list(range(num_prompt)), params, seed=i)
        got = tokens["0" if i == 0 else f"0#{i}"]
        shown = " ".join(f"{g:3}" if g == r else f"{g:2}✗" for g, r in zip(got, right, strict=True))
        wrong = [j for j in range(num_outputs) if got[j] != right[j]]
        print(f"  sample {'ABCD'[i]}: {shown}   " + (f"wrong from output {wrong[0]} on" if wrong else "right"))


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
# Each line below is computed by this notebook. "Holds if" names the condition.

# %%
import pandas as pd

ledger = []


def claim(where, says, we_find, verdict):
    ledger.append({"where": where, "the text says": says, "we find": we_find, "verdict": verdict})


# C13: four samples of a prompt of 1000 tokens
copies = {p: serve([range(p)], 4, 24, 80)[1].num_copy_on_writes for p in (1000, 992)}
pool = BlockPool(80)
prompt = pool.get_new_blocks(63)
children = [share(pool, prompt) for _ in range(3)]
taken = pool.num_usable_blocks - pool.get_num_free_blocks() - 63
counts = {block.ref_cnt for block in prompt}
claim("L33 2.4", "at the fork no K/V is copied, and ref_cnt is 4", f"{taken} blocks taken, ref_cnt {counts}",
      "holds" if taken == 0 and counts == {4} else "contradicted")
table_bytes = 4 * len(prompt)
claim("L33 2.4", "a branch costs some tens of bytes of table", f"{table_bytes} bytes for 1000 tokens (4 a block)",
      "holds" if table_bytes < 100 else f"holds up to {100 // 4 * 16} tokens, where it is 100 bytes")
claim("L33 2.4", "the writer copies the one block it changes", f"4 writers: {copies[1000]} copies for 1000 tokens, "
      f"{copies[992]} for 992", "holds if the last block is part full, for all writers but the last"
      if (copies[1000], copies[992]) == (3, 0) else "contradicted")
named = pool.get_new_blocks(1)
named[0].block_hash = "a name"
by_name = barrier(pool, named, 0) is not None
claim("L33 2.4", "a write copies when ref_cnt > 1", f"a published block with ref_cnt 1: {int(by_name)} copy",
      "holds without a prefix cache; with one, a published block is copied too" if by_name else "holds")
private, shared, _ = cost(1000, 0, 4, 16)
claim("L33 2.4", "copying the prompt 4 times wastes 4 times the memory", f"{private} blocks for {shared}: "
      f"{private // shared} times held, {private // shared - 1} of them wasted",
      "holds if “wastes” means “takes”" if private == 4 * shared else "contradicted")

# C14: memory saved
for width in (2, 4, 6):
    short, long = found[19, width][3], found[256, width][3]
    bound = 1 - 1 / width
    verdict = "contradicted: it cannot pass 1 - 1/width" if bound <= 0.55 else (
        "holds" if min(short, long) > 0.55 else
        "holds if the prompt is long" if long > 0.55 else "contradicted here")
    claim("L33 2.4", f"beam search, {width} beams: over 55% saved", f"{100 * short:.0f}% (prompt 19, output 58), "
          f"{100 * long:.0f}% (256, 64); at most {100 * bound:.0f}%", verdict)
sampling = {p: 1 - cost(p, 200, 4, 16)[1] / cost(p, 200, 4, 16)[0] for p in range(1, 2001)}
enough = max(p for p in sampling if sampling[p] <= 0.55) + 1
claim("L33 2.4", "parallel sampling, 4 samples: over 55% saved",
      f"{100 * sampling[100]:.0f}% (prompt 100, answers 200), "
      f"{100 * sampling[1000]:.0f}% (prompt 1000)", "holds" if enough == 1 else
      f"holds from a prompt of {enough} tokens on, for answers of 200" if enough <= 2000 else "contradicted here")

# C14: throughput, where the pool is what limits; a step is taken to cost the same however many sequences it has
speed_up = {}
for num_prompt, num_output, n, num_blocks in ((64, 64, 4, 60), (256, 64, 4, 160), (512, 32, 8, 320)):
    prompts = [range(10_000 * i, 10_000 * i + num_prompt) for i in range(12)]
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    _, forked = serve(prompts, n, num_output, num_blocks, **options)
    _, apart = serve([p for p in prompts for _ in range(n)], 1, num_output, num_blocks, **options)
    speed_up[num_prompt, num_output, n] = apart.num_steps / forked.num_steps
slow, middle, fast = speed_up.values()
claim("L33 2.4", "throughput doubles", f"{slow:.1f}x (4 samples, prompt 64, answers 64), {middle:.1f}x (4, 256, 64), "
      f"{fast:.1f}x (8, 512, 32)", "holds if memory is what limits, and most of it is shared"
      if max(speed_up.values()) >= 2 > min(speed_up.values()) else "holds" if slow >= 2 else "contradicted here")

# C44: do sharers of cached blocks ever copy?
system = list(range(40))
prompts = [system + [1000 + 100 * i + j for j in range(1 + 5 * i)] for i in range(12)]
_, cached = serve(prompts, 1, 40, 200, max_num_seqs=4)
_, partly = serve(prompts, 4, 40, 200, max_num_seqs=16)
cut = pool.get_new_blocks(1)  # one full block of 16 tokens
child = branch_off(pool, cut, 8, 16)
into_full = room(pool, child, 8, 1, 16)
claim("PAV 3.4", "sharers of cached blocks part by copy-on-write",
      f"12 prompts on one beginning: {cached.num_prefix_hit_tokens} tokens hit, "
      f"{cached.num_copy_on_writes} copies; with 4 samples each: {partly.num_copy_on_writes}; a branch from the middle "
      f"of a full block: {len(into_full)}",
      "holds if somebody writes into a shared block: a fork with a part-full block, or going back into a full one"
      if cached.num_copy_on_writes == 0 < partly.num_copy_on_writes else "holds")

pd.DataFrame(ledger).style.hide(axis="index").set_properties(
    **{"text-align": "left", "white-space": "normal", "vertical-align": "top"}
).set_table_styles([{"selector": "th", "props": "text-align: left"}])

# %% [markdown]
# **The 55%.** The paper on paged attention (SOSP'23) measured 37.6% to 55.2% for beam search on one set of prompts, so
# 55% is the upper end of a range, not a floor. How much you save is not a property of the mechanism. It follows from
# three numbers: the width, the length of the prompt, and how late the branches part.
#
# **Twice the throughput.** We count steps of the scheduler in a pool that is too small for everybody, with sharing and
# without, and take a step to cost the same however many sequences it serves. Then more sequences in the pool are more
# tokens in a step. Where prompts are short beside answers there is little to share, and little is gained. And where
# memory is not what limits, sharing memory gains nothing.
#
# **The cached blocks.** Only full blocks get a name, and only whole blocks are hit. Two requests that hit the same
# blocks write their next tokens *behind* them, each into a block of its own. So they part without any copy. That is why
# an engine with a prefix cache alone can do without copy-on-write. It pays in another coin: with a prompt of 30 tokens
# and blocks of 16, every sample computes the last 14 tokens again.

# %% [markdown]
# ## More, if you like
#
# ### What would giving up a branch bring?
#
# The pool is full and a branch must go. How many blocks come back? Not those that others hold. And two branches that
# share a block bring it back only if both go. The engine's scheduler asks this before it preempts (抢占) anybody.

# %% ex="blocks_freed_by"
def blocks_freed_by(tables):
    """How many blocks would come back if all of `tables` were given up together.

    tables: a list of tables, each a list of blocks with `ref_cnt`. Other tables, not in this list, may share blocks
    with them. Returns a whole number. Nothing is changed.
    """
    ### BEGIN SOLUTION
    entries = Counter(block for table in tables for block in table)
    return sum(1 for block, number in entries.items() if number == block.ref_cnt)
    ### END SOLUTION

# %% check="blocks_freed_by"
check("blocks_freed_by")

# %% [markdown]
# ### Which copies may be made at once?
#
# The barrier only keeps the books. The copies themselves go to the GPU as an ordered list, and a GPU likes to do many
# at once: read all sources, then write all targets. Usually that is the same as one after the other. Not always. If a
# copy goes from 1 to 2 and the next one from 2 to 3, then block 3 must get what was in block 1.
#
# Cut the list into batches (批), in its order, as few as possible.

# %% ex="copy_batches"
def copy_batches(copies):
    """Cut an ordered list of copies into the fewest batches that may each be made at once.

    copies: a list of pairs (source, target) of block ids, to be made in this order.

    Returns a list of batches, each a list of pairs. Put behind each other they are `copies`. In each batch, reading all
    sources and then writing all targets must give what one copy after the other gives. No copies: no batches.
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
