# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="en"
# # Lab 05 - Prefix reuse (前缀缓存)
#
# **You build** the part of an engine that notices: *I have read this before.* At the end it runs inside the real
# scheduler.
#
# Goes with lecture 33, sections 6.1 to 6.3 and misconception 4 of 8.1, and with the paging lesson (PAV), sections 3.4
# and 6. You need the idea of a block table and of a free queue (lab 03). You do not need to have solved lab 03.
#
# Plan two hours and a half: some 100 minutes for the six exercises, 45 to read, to guess and to look. A seventh
# exercise is extra, 12 minutes. Cells that only draw or count are folded away: run them, you need not read them.

# %%
from hashlib import sha256

from kvlab.blocks import FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks, cdiv
from kvlab.lab import Lab

lab = Lab("05")
check, hint = lab.check, lab.hint

# %% [markdown] lang="en"
# ## 1. The bill for twenty words
#
# A shop puts a chat bot on its site. Every chat begins with the same instructions: rules, tools, tone. They take
# 3,000 tokens, and no customer ever sees them.
#
# A customer asks a question of 10 tokens. The bot answers with 40. The customer asks once more, 10 tokens. How much
# did the GPU have to read?

# %%
system, question, answer = 3000, 10, 40
first = system + question
second = system + question + answer + question
typed = 2 * question
print(f"the customer typed {typed} tokens")
print(f"the GPU computed {first} + {second} = {first + second:,} prompt tokens")
print(f"that is {(first + second) / typed:.0f} tokens computed for each one typed")

# %% [markdown] lang="en"
# Nearly all of it is the same text, at the same positions, with the same weights. So it is the same K and V, computed
# again. Worse: the engine *had* them. When the first question was answered, it put those blocks back into the free
# queue.
#
# Two things are missing. A **name** by which a block can be found again. And **care** in the free queue, so that a
# block which may be wanted again is not overwritten first. You build the names in part one, and the care in part two.

# %% [markdown] lang="en"
# ## 2. A picture
#
# Three requests, cut into blocks of 4 tokens: instructions (`s0` to `s9`, the same in all three), a question (`q` or
# `r`), and what has been answered so far (`a`). Look at the third block of each row.

# %% fold="yes"
from kvlab.lab.draw.boxes import box_rows

instructions = [f"s{i}" for i in range(10)]
prompts = {
    "customer 1": instructions + ["q0", "q1", "q2", "q3", "q4", "a0", "a1"],
    "customer 2": instructions + ["r0", "r1", "r2"],
    "customer 1, later": instructions + ["q0", "q1", "q2", "q3", "q4", "a0", "a1", "n0"],
}
seen, rows, notes = set(), [], []
for who, tokens in prompts.items():
    boxes, hits = [], 0
    for start in range(0, len(tokens), 4):
        beginning = tuple(tokens[: start + 4])  # a block is the same only if all before it is
        shared = beginning in seen and len(beginning) == start + 4
        hits += shared
        boxes += [(token, "hit" if shared else "new") for token in tokens[start : start + 4]]
        boxes += [None]
        if len(beginning) == start + 4:
            seen.add(beginning)
    rows.append((who, boxes))
    notes.append(f"{hits} blocks found")
title = "Blue: a full block that an earlier row has computed already. White: computed now."
alt = "Three prompts in blocks of 4 tokens: 0, 2 and 4 blocks found."
box_rows(rows, title, 0.42, notes, alt)

# %% [markdown] lang="en"
# Customer 2 shares ten tokens and finds eight. The third block holds two tokens of the instructions *and* two of the
# question, so it is another block. When customer 1 comes back, the own question is found too, and half of the bot's
# answer: history counts as well as instructions. The other half, `a1`, had filled no block yet.
#
# ## 3. Two predictions
#
# Somebody has the idea to tell the bot the time. They put **one token, the current minute, in front of** the 3,000
# tokens of instructions. A block has 16 tokens. How many full blocks do two customers share now if they come a minute
# apart? Replace `None` by your guess, then run the cell.

# %%
lab.predict("time in front", None, unit="blocks shared")

# %% [markdown] lang="en"
# And if the minute is written **behind** the instructions?

# %%
lab.predict("time behind", None, unit="blocks shared")

# %% [markdown] lang="en"
# ## 4. By hand
#
# Take a pencil. Blocks of 4 tokens. The cache has seen one prompt and holds all its full blocks:
#
#     seen   7 7 8 8   1 2 3 4   5 6
#
# Two rules. A block is found as a whole, or not at all. And one token of a prompt must always be computed, even if all
# are known: its logits (对数几率) choose the next token, and logits are not kept in the cache.
#
# Three prompts come, each alone. How many of their tokens need not be computed?
#
#     P      7 7 8 8   1 2 3 9   5 6
#     Q      7 7 8 8   1 2 3 4
#     R      1 2 3 4   7 7 8 8   1
#
# Look twice at each. Write your three numbers into the cell. You will compare them in section 7.

# %%
# Three numbers, such as [0, 4, 8]
lab.predict("by hand", None, unit="tokens found for P, Q, R")

# %% [markdown] lang="en"
# ## 5. The formal model
#
# What does the K and V of a token depend on? On the token, on its position, and through attention on **every token
# before it**. So a name for block $i$ must stand for the whole beginning, tokens $0$ to $(i+1)B-1$. Long names are
# slow, so they are chained:
#
# $$k_{-1} = H(\text{salt}) \qquad k_i = H\big(k_{i-1} \,\|\, t_{iB}, \dots, t_{(i+1)B-1}\big)$$
#
# Each key (键) is made from its parent's key. One changed token changes its own key and all keys behind it. That is the
# **hash chain** (哈希链). The *salt* (盐) keeps tenants apart: another salt, another root, nothing in common.
#
# A prompt of $n$ tokens whose first $m$ blocks are known starts with
#
# $$h = B \cdot \min\Big(m,\ \Big\lfloor \tfrac{n-1}{B} \Big\rfloor\Big)$$
#
# tokens that need not be computed. The $n-1$ is the second rule of section 4: one token is always left to compute.
#
# ## 6. A sanity check on H
#
# Why SHA-256, and not Python's own `hash()`, which is faster? Here are two blocks of 4 tokens. All ids are within the
# vocabulary of Qwen2.5.

# %%
one, other = (4130, 100532, 60841, 22054), (76785, 101188, 97598, 0)
same = "the same!" if hash(one) == hash(other) else "different"
print("Python's hash:", hash(one), hash(other), same)
digests = [sha256(repr(block).encode()).hexdigest()[:16] for block in (one, other)]
print("SHA-256:      ", *digests)

# %% [markdown] lang="en"
# They were found by a search of ten seconds on a laptop. With `hash()` as the key, whoever sends the one block is
# given the K/V of the other, silently. vLLM used `hash()` once; the hole is known as CVE-2025-25183, and SHA-256 is
# the default now. There is a second reason: `hash()` of a string differs from process to process, so two engines
# could never agree on a name.
#
# ## 7. Exercise 1: names for blocks
#
# Write the chain. `sha256(data).digest()` makes 32 bytes, and it wants bytes. A token id may be any whole number below
# $2^{63}$, so give each one 8 bytes: `token.to_bytes(8, "little")`. A text becomes bytes by `text.encode()`, all of it,
# Chinese as well. For `None`, the root of those without a salt, choose bytes that no salt can give.


# %% ex="block_keys"
def block_keys(tokens, block_size, salt=None):
    """The keys of the full blocks of `tokens`, in order.

    tokens: a sequence of token ids, each from 0 to 2**63 - 1.
    salt: any string, "" as well; or None for no salt, which is not the same as "".
    Returns a list of len(tokens) // block_size keys, each the 32 bytes of a SHA-256 digest.

    Two blocks have the same key exactly if the salt, the tokens of the block and all tokens
    before it are the same, in this process or in another one.
    Each token is read a fixed number of times, not once for every block behind it.
    """
    ### BEGIN SOLUTION
    keys = []
    parent = sha256(repr(salt).encode()).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        parent = sha256(parent + b"".join(t.to_bytes(8, "little") for t in block)).digest()
        keys.append(parent)
    return keys
    ### END SOLUTION


# %% check="block_keys"
check("block_keys")

# %% [markdown] lang="en"
# Stuck? `hint("block_keys")` gives a nudge, and a stronger one each time you call it.
#
# Now the keys themselves: the first four hex digits of each. Blue means that the key stands in the top row too.
# Change one token early, and everything behind it is lost. Change one late, and little is.

# %% fold="yes"
keys_of = lab.best("block_keys")  # yours, or ours as long as yours is not written
text = list(range(100, 116))
variants = {
    "the text": (text, None),
    "the same again": (text, None),
    "token 0 changed": ([999] + text[1:], None),
    "token 9 changed": (text[:9] + [999] + text[10:], None),
    "two tokens short": (text[:14], None),
    "another salt": (text, "tenant B"),
}
top, rows = keys_of(text, 4), []
for name, (tokens, salt) in variants.items():
    keys = keys_of(tokens, 4, salt)
    kinds = ["hit" if rows and key in top else "new" for key in keys]
    rows.append((name, [(key.hex()[:4], kind) for key, kind in zip(keys, kinds)]))
title = "Keys of 16 tokens in blocks of 4 (first 4 hex digits)"
alt = ("The keys of the text in the top row, and which of them survive a change: none after "
       "token 0, two after token 9, three of a shorter text.")
box_rows(rows, title, 0.75, alt=alt)

# %% [markdown] lang="en"
# Fourteen tokens have three keys, not three and a half: the last two tokens fill no block. With the names in hand,
# your predictions can be settled.

# %%
system_text, minutes = list(range(1, 3001)), (50_001, 50_002)


def num_shared(a, b):
    return sum(x == y for x, y in zip(keys_of(a, 16), keys_of(b, 16), strict=True))


in_front = [[minute, *system_text] for minute in minutes]
behind = [[*system_text, minute] for minute in minutes]
lab.compare("time in front", num_shared(*in_front))
lab.compare("time behind", num_shared(*behind))

# %% [markdown] lang="en"
# In front, it is the most expensive token of the whole prompt. Put what changes at the end.
#
# And your pencil: P finds 4, Q finds 4, R finds 0. P differs in the second block, and what stands behind a difference
# is lost even where the tokens agree. All 8 tokens of Q are known, but one must be computed, and a hit is made of
# whole blocks. R has the right tokens at the wrong place: other positions, another beginning, other K and V.

# %%
lab.compare("by hand", [4, 4, 0])

# %% [markdown] lang="en"
# ## 8. Exercise 2: the index
#
# The index (索引) leads from a key to the block that holds its K/V. Three methods are all that the engine asks of it:
#
# | method | when the engine calls it |
# |---|---|
# | `match(tokens, salt)` | a prompt arrives: which blocks hold its beginning? |
# | `insert(tokens, blocks, salt)` | a step is done: these blocks are full and written, **publish** (发布) them |
# | `remove(block)` | the block is about to be overwritten: forget it |
#
# The index does not decide who is evicted, and it locks nothing. It only remembers. Three rules to think about first:
#
# - A run ends at the first block that nobody has published. Behind a gap nothing can be used.
# - Two requests may compute the same block at the same time. The first publisher keeps the name; the other block
#   stays without one. If the second took the name over, the first would bear a name that leads to somebody else.
# - The name stands in two places: in the dictionary, and on the block as `block_hash`. Both, or neither.


# %%
class PrefixIndexBase:
    """What every index has.

    block_size: tokens per block.
    cached_block_hash_to_block: a dictionary, from the key of each published block to the block.
    A block (KVCacheBlock) has a block_id, and bears its key as block.block_hash: None if it is
    not published.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.cached_block_hash_to_block = {}


keys_of = lab.best("block_keys")


# %% ex="prefix_index"
class PrefixIndex(PrefixIndexBase):
    """Finds published blocks by the tokens that they hold.

    keys_of(tokens, block_size, salt) gives the keys. No method touches block.ref_cnt.
    """

    def match(self, tokens, salt=None):
        """The blocks that hold the longest published beginning of `tokens`: a list, in order.

        [] if there are none. Changes nothing.
        """
        ### BEGIN SOLUTION
        found = []
        for key in keys_of(tokens, self.block_size, salt):
            if key not in self.cached_block_hash_to_block:
                break
            found.append(self.cached_block_hash_to_block[key])
        return found
        ### END SOLUTION

    def insert(self, tokens, blocks, salt=None, cursor=None):
        """Publish blocks[i] as the holder of block i of `tokens`: set its block_hash, enter it.

        A key that is taken stays with its first publisher, and a block that has a name keeps
        it: leave both alone, and go on with the next block.
        Tokens beyond the blocks are ignored.
        ValueError, and nothing changed, if `tokens` do not fill all `blocks`.
        (cursor is for the last exercise: ignore it.)
        """
        ### BEGIN SOLUTION
        if len(blocks) * self.block_size > len(tokens):
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks")
        keys = keys_of(tokens[: len(blocks) * self.block_size], self.block_size, salt)
        for key, block in zip(keys, blocks, strict=True):
            if key in self.cached_block_hash_to_block or block.block_hash is not None:
                continue
            self.cached_block_hash_to_block[key] = block
            block.block_hash = key
        ### END SOLUTION

    def remove(self, block):
        """Forget `block`: no entry, no block_hash.

        ValueError if this very block is not published here: without a name, or with a name that
        stands for another block in this index.
        """
        ### BEGIN SOLUTION
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError(f"block {block.block_id} is not published")
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None
        ### END SOLUTION


# %% check="prefix_index"
check("prefix_index")

# %% [markdown] lang="en"
# ### What if the parent is not in the key?
#
# Then a block is found wherever its tokens appear. We try it in the engine. In place of a model runs the *slot-echo*
# stand-in: each slot stores a token and its position, and the next token is a checksum of all that is read back
# through the block table. A wrong block gives a wrong token at once. (`make_engine` and `ask` are used again below;
# they are in `kvlab/lab/play_reuse.py`, with all that plays in this lab.)

# %%
from kvlab.lab.scenes.reuse import WithoutParents, ask, make_engine

seen_before, asked = [7, 7, 8, 8, 1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 7, 8, 8, 1]
right, _ = ask(make_engine(20, block_size=4, caching=False), "R", asked)
indexes = {"parents in the key": lab.best("PrefixIndex")(4), "no parents": WithoutParents(4)}
for title, index in indexes.items():
    engine = make_engine(20, block_size=4, index=index)
    ask(engine, "before", seen_before)
    tokens, num_cached = ask(engine, "R", asked)
    verdict = "right" if tokens == right else "WRONG"
    print(f"{title:20} {num_cached} tokens found, output {tokens}: {verdict}")

# %% [markdown] lang="en"
# It found more, and it answered wrongly, without any error. A cache that finds too much is worse than none.
#
# ## 9. Exercise 3: two limits
#
# Two one-liners, and two famous off-by-ones. First: how many tokens of a prompt may be *matched*? Whole blocks, with
# at least one token left to compute.
#
# Second: how many blocks of a request may be *published* after a step? A token is **known** as soon as it is sampled,
# and **computed** once its K/V has been written, one step later. Publish a block that is known but not computed, and
# the next request reads an empty slot.


# %% ex="limits"
def match_limit(num_tokens, block_size):
    """The most tokens of a prompt of num_tokens (at least 1) that may come from the cache.

    A multiple of block_size.
    """
    ### BEGIN SOLUTION
    return (num_tokens - 1) // block_size * block_size
    ### END SOLUTION


def num_publishable(num_tokens, num_computed_tokens, block_size):
    """How many of a request's first blocks may be published.

    num_tokens: tokens known, prompt and outputs.
    num_computed_tokens: how many of them have K/V.
    """
    ### BEGIN SOLUTION
    return num_computed_tokens // block_size
    ### END SOLUTION


# %% check="limits"
check("limits")

# %% [markdown] lang="en"
# ## 10. Exercise 4: eviction without a clock
#
# A request has ended. Its blocks go back to the free queue, **with their names**. Such a block is *cached* (已缓存):
# nobody owns it, everybody may still find it, and whoever needs room may have it. It leads two lives:
#
#                         take, from the head: forget the name
#            .-----------------------------------------------------------.
#            v                                                           |
#        OWNED  --release: to the tail of the queue, the name stays-->  CACHED, in the queue
#            ^                                                           |
#            '-----------------------------------------------------------'
#                         touch: a hit, out of the middle
#
# Nobody keeps a clock. The order of the queue *is* the order of last use: released last, evicted last. That is
# **LRU** (最近最少使用). A hit may stand anywhere in the queue, and must come out of its middle in constant time.
# This is why the queue is a doubly linked list (双向链表).
#
# Inside one request there is a second order. A child without its parent cannot be reached (`match` stops at the gap),
# though it still takes up memory. So the parent must be evicted *after* the child. Who goes to the tail first?
#
# You have `queue.popleft()`, `queue.remove(block)`, `queue.append(block)`, `queue.num_free_blocks`, and
# `index.remove(block)`. A block has `ref_cnt`, the number of its owners, and `block_hash`.


# %% ex="lru"
def take(queue, index, n):
    """The n blocks that were freed longest ago, for new contents.

    A list of blocks, each with one owner and no name.
    OutOfBlocks, and nothing changed, if fewer than n are free.
    """
    ### BEGIN SOLUTION
    if queue.num_free_blocks < n:
        raise OutOfBlocks(f"{n} blocks wanted, {queue.num_free_blocks} are free")
    taken = []
    while len(taken) < n:
        block = queue.popleft()
        if block.block_hash is not None:
            index.remove(block)
        block.ref_cnt += 1
        taken.append(block)
    return taken
    ### END SOLUTION


def touch(queue, blocks):
    """A hit: one owner more for each of `blocks`. Some of them may have owners already."""
    ### BEGIN SOLUTION
    for block in blocks:
        if not block.ref_cnt:
            queue.remove(block)
        block.ref_cnt += 1
    ### END SOLUTION


def release(queue, table):
    """A request ends: one owner fewer for each block of its table, a list, first block first.

    Blocks that nobody owns any more go to the tail of the queue, so that within this table a
    parent is evicted after its child. Names stay, and so does the list `table` itself.
    ValueError if a block has no owner; what has been released by then stays released.
    """
    ### BEGIN SOLUTION
    for block in reversed(table):
        if not block.ref_cnt:
            raise ValueError(f"block {block.block_id} has no owner")
        block.ref_cnt -= 1
        if not block.ref_cnt:
            queue.append(block)
    ### END SOLUTION


# %% check="lru"
check("lru")

# %% [markdown] lang="en"
# Watch the order matter. Request A holds 4 blocks, A0 to A3, and ends. Then somebody takes two blocks for something
# else. Then A's user comes back. The first picture releases as you did, last block first; the second one the first
# block first. In the lower row of both, two blocks of A have survived.

# %% fold="yes"
take_, touch_, release_, Index_ = map(lab.best, ("take", "touch", "release", "PrefixIndex"))


def story(first_block_first):
    blocks = [KVCacheBlock(i) for i in range(1, 5)]
    queue, index, prompt = FreeKVCacheBlockQueue(blocks), Index_(4), list(range(16))
    table = take_(queue, index, 4)
    index.insert(prompt, table)
    names = {block.block_id: f"A{i}" for i, block in enumerate(table)}  # what each block holds
    release_(queue, table[::-1] if first_block_first else table)

    def row(label):
        reachable = index.match(prompt)
        boxes = [
            (names[b.block_id], "cached" if b in reachable else "dead")
            for b in queue.get_all_free_blocks()
        ]
        return (label, boxes), f"{len(reachable)} of A's 4 blocks can be found"

    before = row("queue after A")
    take_(queue, index, 2)
    return [before, row("two taken")]


for title, wrong in (("Last block first", False), ("First block first", True)):
    rows, notes = zip(*story(wrong), strict=True)
    alt = f"{title}: the free queue after A, and after two were taken. {notes[1]}."
    title += ". The head of the queue, next to be taken, is on the left"
    box_rows(rows, title, 0.7, notes, alt)

# %% [markdown] lang="en"
# Orange can still be found. Grey and crossed is dead weight: the contents are good, and no prompt leads there. (In
# the engine a child may still lose its parent, when two requests share it and are freed at different times. Then it
# stays unreachable until somebody publishes the parent again, or until it is evicted in its turn.)
#
# ## 11. Exercise 5: a prompt comes in
#
# Now put it together. A prompt arrives: find its hits, see whether it fits, take what it needs. There are two traps.
#
# - **A hit in the queue is free and needed at once.** With 5 free blocks, 2 of them hits, a request that needs 4
#   *more* blocks does not fit.
# - **Between match and take, the hits are in danger.** They stand in the queue, perhaps at its head.


# %%
match_limit_ = lab.best("match_limit")


# %% ex="start_request"
def start_request(queue, index, tokens, salt=None):
    """Blocks for a prompt of len(tokens) >= 1 tokens.

    Uses take_, touch_ and match_limit_: yours, or ours. index.match(tokens, salt) finds hits in
    blocks of index.block_size tokens.
    Returns (table, num_cached): the list of blocks that hold the prompt, hits first; and how
    many tokens the hits hold. Publishes nothing: the new blocks are not computed yet.
    None (not a pair), and nothing changed, not even the order of the queue, if there are not
    enough free blocks. They are enough if exactly as many are free as are needed.
    """
    ### BEGIN SOLUTION
    size = index.block_size
    hits = index.match(tokens[: match_limit_(len(tokens), size)], salt)
    num_new = cdiv(len(tokens), size) - len(hits)
    leaving = len([block for block in hits if block.ref_cnt == 0])
    if leaving + num_new > queue.num_free_blocks:
        return None
    touch_(queue, hits)
    return [*hits, *take_(queue, index, num_new)], len(hits) * size
    ### END SOLUTION


# %% check="start_request"
check("start_request")

# %% [markdown] lang="en"
# Now the three requests of section 2, one after the other, in a pool of 8 blocks. Blue is a hit. Look at the last
# table, and at the queue above it: from where do blocks 3 and 4 come?

# %% fold="yes"
start_, publishable_ = lab.best("start_request"), lab.best("num_publishable")
queue, index = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(1, 9)]), Index_(4)
number, rows, notes = {}, [], []  # number: of each word
for who, request_words in prompts.items():
    tokens = [number.setdefault(word, len(number)) for word in request_words]
    table, num_cached = start_(queue, index, tokens)
    kinds = ["hit" if 4 * i < num_cached else "new" for i in range(len(table))]
    rows.append((f"table of {who}", [(str(b.block_id), kind) for b, kind in zip(table, kinds)]))
    notes.append(f"{num_cached} tokens found, {len(tokens) - num_cached} computed")
    index.insert(tokens, table[: publishable_(len(tokens) + 1, len(tokens), 4)])
    release_(queue, table)
    waiting = queue.get_all_free_blocks()
    rows.append(("queue after it", [(str(b.block_id), "cached" if b.block_hash else "empty")
                                    for b in waiting]))
    notes.append("")
title = "Block tables, and the free queue with its head on the left (hatched: cached)"
alt = ("Three tables and the queue after each: blocks 1 to 4 are hits of customer 1, later; "
       "3 and 4 stood in the middle of the queue.")
box_rows(rows, title, 0.55, notes, alt)

# %% [markdown] lang="en"
# Out of the middle of the queue, where customer 2 had not reached them yet.
#
# ## 12. Watch it run
#
# From here on we use the real `KVCacheManager` and `Scheduler`, with **your** `PrefixIndex` inside. We need somebody
# who talks. Two kinds of traffic, both made from a seed, with small sizes, so that a run takes half a second:
#
# - **Chats**: 24 people, 3 bots with 192 tokens of instructions each, 2 to 6 turns. People think for 20 to 120 steps
#   between turns.
# - **Agents**: 8 agents, one program with 320 tokens of instructions, 8 to 12 turns. A tool answers within 1 to 4
#   steps, with 16 to 64 tokens.
#
# Each turn sends the whole conversation so far, outputs included, as real clients do.
#
# Here is one run of the chats in a pool of 160 blocks. After each step we note which blocks somebody owns, which are
# cached, and which hold nothing.

# %%
from kvlab.lab.scenes.reuse import agents, chats, play, pool_state, strangers

Index = lab.best("PrefixIndex")
engine, frames = make_engine(160, index=Index(16)), []


def keep_frame(engine):
    frames.append(pool_state(engine.scheduler.manager))


played = play(chats(), engine, keep_frame)
print(f"{len(played.outputs)} requests, {len(frames)} steps")
print(f"{played.hit_rate():.0%} of all prompt tokens were found")

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.draw.boxes import BLUE, VERMILLION, pool_areas, pool_grid
from kvlab.lab.show import picture

figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
pool_areas(ax, frames)
places = {"empty": (45, 125), "cached: nobody's, and still findable": (480, 125),
          "owned by a request": (200, 14)}
for text, place in places.items():
    ax.text(*place, text, ha="center", bbox={"facecolor": "white", "pad": 2, "lw": 0})
ax.set(ylabel="blocks of the pool", title="Chats in 160 blocks: what each step leaves")
picture(figure, "Blocks over steps. The cached part grows until the pool is nearly full, at "
        "step 250; the owned part goes up and down below it.")

# %% [markdown] lang="en"
# Look at two things. After 250 steps the pool is nearly full, and it stays so. No request ever has to wait for that:
# the hatched part is free room with something useful in it. And what the requests own is the smaller part of the
# pool, most of the time.
#
# The same run block by block, at four moments. Watch the hatched part grow into the white, and the blue move about in
# it. In Jupyter a slider behind them shows every step.

# %% fold="yes"
from kvlab.lab.show import player


def draw_step(ax, step):
    pool_grid(ax, frames[step])
    owned, cached, empty = (frames[step].count(letter) for letter in "oce")
    title = f"step {step}: {owned} owned, {cached} cached, {empty} empty"
    ax.set_title(title, fontsize=11, loc="left")


figure, axes = plt.subplots(2, 2, figsize=(9, 4.4), layout="constrained")
for ax, step in zip(axes.flat, (13, 67, 271, 542), strict=True):
    draw_step(ax, step)
figure.suptitle("160 blocks: blue is owned, hatched is cached, white is empty", fontsize=11)
picture(figure, "The pool at steps 13, 67, 271 and 542: cached blocks replace the empty ones.")

# %%
player(frames, draw_step, size=(6.5, 2.8))

# %% [markdown] lang="en"
# Does the cache change what is answered? It must not: a hit is the same K and V (PAV 6). With the slot-echo stand-in,
# a single wrong slot would show.

# %%
plain = make_engine(160, caching=False)
uncached = play(chats(), plain)
same_outputs = [played.outputs[name] == uncached.outputs[name] for name in uncached.outputs]
computed = engine.scheduler.stats.num_scheduled_tokens
computed_off = plain.scheduler.stats.num_scheduled_tokens
print(f"{sum(same_outputs)} of {len(same_outputs)} outputs are the same")
print(f"tokens computed without the cache: {computed_off:,}, with it: {computed:,}")
print(f"saved: {1 - computed / computed_off:.0%}")

# %% [markdown] lang="en"
# ## 13. How large must the cache be?
#
# Guess first. In the pool of 160 blocks, the chats found about three quarters of their prompt tokens. **Agents** have
# longer prompts, and fewer of them run. What share do they find in the same 160 blocks?

# %%
lab.predict("agents in 160", None, unit="% found")

# %% [markdown] lang="en"
# Now the whole curve, for both, from 60 to 320 blocks. Dashed: the same, but released first block first. (This cell
# takes some five seconds.)

# %%
from kvlab.lab.scenes.reuse import FirstBlockFirst, hit_rates

sizes, fewer = (60, 80, 100, 120, 140, 160, 200, 240, 320), (60, 80, 100, 120, 140, 160, 200)
curves, turned_round = {}, {}
for name, sessions in (("chats", chats()), ("agents", agents())):
    curves[name] = list(hit_rates(sessions, sizes, Index))
    turned_round[name] = list(hit_rates(sessions, fewer, Index, FirstBlockFirst))
lab.compare("agents in 160", round(curves["agents"][sizes.index(160)]))

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for name, colour, marker in (("chats", BLUE, "o"), ("agents", VERMILLION, "s")):
    rates = curves[name]
    ax.plot(sizes, rates, color=colour, marker=marker, lw=2)
    ax.plot(fewer, turned_round[name], color=colour, marker=marker, ls="--", lw=1.2, ms=4)
    ax.text(325, rates[-1], f"{name} {rates[-1]:.0f}%", va="center", color=colour, fontsize=11)
ax.set(xlim=(55, 375), ylim=(45, 100), xlabel="blocks in the pool (16 tokens each)",
       ylabel="prompt tokens found cached, %", title="Hit rate against the size of the pool")
ax.text(215, 55, "dashed: released first block first", fontsize=10)
ax.grid(alpha=0.3)
picture(figure, "Hit rate against blocks: the chats rise slowly, the agents jump at 140. The "
        "table below has the numbers.")

print("blocks   chats  (turned round)   agents  (turned round)")
for i, num_blocks in enumerate(sizes):
    cells = [f"{num_blocks:6}"]
    for name in ("chats", "agents"):
        other = f"{turned_round[name][i]:.1f}" if i < len(fewer) else "-"
        cells.append(f"{curves[name][i]:7.1f} {other:>15}")
    print("  ".join(cells))

# %% [markdown] lang="en"
# Read it from the left.
#
# - **A floor.** Even the smallest pool finds more than half. The instructions are hit so often that they hardly ever
#   reach the head of the queue.
# - **A cliff.** Agents jump from two thirds to 87% between 120 and 160 blocks. From there on, the histories of all
#   agents that are alive fit at once. LRU has no half measures: what comes round in a circle a little larger than the
#   cache is always evicted just before it is needed.
# - **A ceiling.** Beyond it, more memory finds nothing more. What is left is what nobody has said before, and the
#   ends of prompts that fill no block.
# - **The order of release matters less than the story of section 10 made it seem**: from nothing to eight points
#   here. It costs nothing to do right.
#
# ## 14. Exercise 6: what is 99% saved, in seconds?
#
# The customer of section 1 comes back to a bot whose instructions are cached. More than 99% of the prompt tokens are
# found. Will the first word appear 100 times sooner?
#
# A forward pass does two things at the same time: **arithmetic**, 2 FLOPs for each parameter and each computed token;
# and **reading the weights**, 2 bytes a parameter, once, for one token as for three thousand. The slower one sets the
# time. (Attention adds 4% to the arithmetic for 3,010 tokens of a 7B model. We leave it out.)


# %% ex="prefill_seconds"
def prefill_seconds(num_tokens, num_cached, num_parameters, flops, bandwidth):
    """A lower bound for the time of a prefill, in seconds.

    num_tokens: length of the prompt.
    num_cached: how many of them have K/V already, fewer than num_tokens.
    num_parameters: of the model; 2 bytes each.
    flops: FLOPs a second. bandwidth: bytes a second.
    """
    ### BEGIN SOLUTION
    arithmetic = 2 * num_parameters * (num_tokens - num_cached) / flops
    reading = 2 * num_parameters / bandwidth
    return max(arithmetic, reading)
    ### END SOLUTION


# %% check="prefill_seconds"
check("prefill_seconds")

# %%
seconds = lab.best("prefill_seconds")
# FLOPs and bytes a second in bf16, from the data sheets; a model of 7.6 billion parameters
GPUS = {"RTX 4090": (165e12, 1.008e12), "A100": (312e12, 2.039e12), "H100": (989e12, 3.35e12)}
engine = make_engine(400, index=lab.best("PrefixIndex")(16))
ask(engine, "first customer", system_text + list(range(4000, 4010)))
_, num_cached = ask(engine, "next customer", system_text + list(range(5000, 5010)))
print(f"{num_cached} of 3010 tokens cached: {num_cached / 3010:.1%} of the tokens saved")
cold = {gpu: 1e3 * seconds(3010, 0, 7.6e9, *speeds) for gpu, speeds in GPUS.items()}
warm = {gpu: 1e3 * seconds(3010, num_cached, 7.6e9, *speeds) for gpu, speeds in GPUS.items()}
for gpu in GPUS:
    print(f"{gpu:9} at least {cold[gpu]:5.0f} ms cold, {warm[gpu]:5.1f} ms warm: "
          f"the bound falls {cold[gpu] / warm[gpu]:.0f} times")

# %% [markdown] lang="en"
# 99.4% fewer tokens, and a bound that is 10 to 20 times lower, not 170 times. Eighteen tokens are too few to keep the
# arithmetic busy, and the weights must be read all the same. (The other 99.4% of the arithmetic is not lost: it is
# free for other requests in the same step.)
#
# ## 15. When the cache is of no use
#
# The textbook warns of one case: prompts that have nothing in common. Sixty strangers, sixty random documents, a pool
# so tight that they must wait for each other. How many more steps does the engine need with the cache on than with it
# off?

# %%
lab.predict("strangers", None, unit="% more steps with the cache on")

# %% [markdown] lang="en"
# Three engines: without a cache; with yours; and one whose cache is as one might fear it. There, a published block is
# never let go, until half of the pool is locked.

# %%
from kvlab.lab.scenes.reuse import LockingManager

designs = {
    "cache off": lambda: make_engine(60, caching=False),
    "cache on, evictable": lambda: make_engine(60, index=Index(16)),
    "cache on, locked": lambda: make_engine(60, index=Index(16), manager_class=LockingManager),
}
runs = {}
for design, make in designs.items():
    states, at_once = [], []

    def watch(engine, states=states, at_once=at_once):
        states.append(pool_state(engine.scheduler.manager))
        at_once.append(len(engine.scheduler.running))

    engine = make()
    play(strangers(), engine, watch)
    stats, average = engine.scheduler.stats, sum(at_once) / len(at_once)
    runs[design] = stats, states, average
    print(f"{design:20} {stats.num_steps} steps, {average:.1f} requests at once on average, "
          f"{stats.num_scheduled_tokens:,} tokens computed")
off, on, locked = (stats for stats, _, _ in runs.values())
lab.compare("strangers", round(100 * (on.num_steps / off.num_steps - 1)))

# %% [markdown] lang="en"
# Nothing. Not one step. And yet an operator who looks at memory sees this. The three pools, step by step:

# %% fold="yes"
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True, layout="constrained")
for ax, (design, (stats, states, _)) in zip(axes, runs.items(), strict=True):
    pool_areas(ax, states)
    ax.set_title(f"{design}\n{stats.num_steps} steps", fontsize=11)
axes[0].set_ylabel("blocks")
title = "Blue: owned by requests. Hatched: cached, free. White: empty, free. Crossed: locked."
figure.suptitle(title, fontsize=11)
picture(figure, "Three pools over steps. Without and with a cache the same blocks are owned; "
        "with locked blocks half of the pool is lost, and the run takes twice as long.")

# %% [markdown] lang="en"
# Trace the blue of the left and of the middle picture: it is the same. Only the white has turned hatched: room that
# is free either way. A gauge that counts "blocks with something in them" shows 100% in the middle, and it alarms
# people. Your question to any such gauge: *does it count owned blocks, or full ones?* On the right stands the engine
# that the warning describes.
#
# What does the cache truly cost? Time to hash, and somebody else's hits:

# %%
import time

prompt = list(range(1000, 4010))
started = time.perf_counter()
for _ in range(20):
    keys_of(prompt, 16)
hashing = (time.perf_counter() - started) / 20
print(f"hashing 3,010 tokens: {1e3 * hashing:.2f} ms on this machine")
print(f"computing them on an H100: {cold['H100']:.0f} ms or more")

chatters = chats()
traffic = {"chats alone": chatters, "chats among strangers": chatters + strangers()}
for title, sessions in traffic.items():
    heard = play(sessions, make_engine(160, index=Index(16)))
    rate = heard.hit_rate(range(len(chatters)))
    print(f"{title:22} in 160 blocks: the chats find {rate:.0%}")

# %% [markdown] lang="en"
# The strangers lose nothing, and the chats lose hits: random documents push useful blocks out. That is the honest
# form of the warning. It is a reason to keep such traffic apart, and no reason to switch the cache off for it alone.
#
# ## 16. Into the engine
#
# Your `PrefixIndex` goes into the engine that serves a model. The same requests run on your index and on ours. All
# tokens must be equal, and so should the counts.

# %%
comparison = lab.run_engine()

# %% [markdown] lang="en"
# The same from a terminal. Save the notebook, then ask **two** things. The line under an answer says how many tokens
# were found. The first prompt finds 0, as a prompt alone always does: nobody has been there before it. The second
# finds 64, four blocks. They hold what the chat template puts in front of both.
#
#     python -m kvlab generate "What is a block table?" "What is a free queue?" --with work/05_prefix_reuse.ipynb

# %% [markdown] lang="en"
# ## 17. What the textbook says, and what we measured
#
# One more run is needed first. PAV 3.4 says that two requests which share cached blocks are parted by
# **copy-on-write** (写时复制) when they go different ways. When is a block copied at all?

# %%
copies = {}
engine = make_engine(200)
ask(engine, "A", list(range(1000)), 8)
ask(engine, "B", list(range(1000)), 8)  # the whole prompt is known
ask(engine, "C", list(range(995)) + [1, 2, 3, 4, 5], 8)  # parts from A in the midst of a block
copies["three sharers of a cached prompt"] = engine.scheduler.stats.num_copy_on_writes
for num_tokens in (1000, 992):
    engine = make_engine(300)
    ask(engine, "fork", list(range(num_tokens)), 8, n=4)
    what = f"4 samples of {num_tokens} tokens, by fork"
    copies[what] = engine.scheduler.stats.num_copy_on_writes
for what, number in copies.items():
    print(f"{number} copied blocks   {what}")

# %% [markdown] lang="en"
# Only full blocks are published, a hit is always a whole block, and at least one token is always computed into a
# block of one's own. So nobody ever writes into a cached block. A copy needs a *partly filled* block with two owners,
# and only a fork makes one.

# %% fold="yes"
from IPython.display import HTML, display

num_requests = 10_000
saved = 1 - (3010 + (num_requests - 1) * (3010 - num_cached)) / (num_requests * 3010)
largest_rest = int(3000 / 0.7 - 3000)  # other tokens a request may have, with 70% instructions
few_ms = [gpu for gpu in GPUS if warm[gpu] < 10]
too_slow = [gpu for gpu in GPUS if warm[gpu] >= 10]
falls = [cold[gpu] / warm[gpu] for gpu in GPUS]
share = 2 * system / (first + second + 2 * answer)
more_on, more_locked = on.num_steps - off.num_steps, locked.num_steps - off.num_steps
most = {design: {letter: max(state.count(letter) for state in states) for letter in "cl"}
        for design, (_, states, _) in runs.items()}
by_cache = copies["three sharers of a cached prompt"]
by_fork = copies["4 samples of 1000 tokens, by fork"]
verdicts = [
    ("C23", "a shared prompt of 3,000 tokens cuts the prefill by 99% (L33 6.2)",
     f"measured: {num_cached / 3010:.1%} of the tokens of a warm request; "
     f"{saved:.1%} over {num_requests:,} requests, the first one cold",
     "holds for tokens" if num_cached / 3010 >= 0.99 else "contradicted"),
    ("C23", "the first token comes after a few ms, in place of seconds (L33 6.2)",
     "computed, lower bounds for 7.6B parameters in bf16: "
     + "; ".join(f"{gpu} {cold[gpu]:.0f} ms cold, {warm[gpu]:.1f} ms warm" for gpu in GPUS),
     f"a few ms (our reading: under 10): not excluded on {' and '.join(few_ms) or 'any'}, "
     f"excluded on {' and '.join(too_slow) or 'none'}. Seconds: the cold bound is only "
     f"{min(cold.values()):.0f} to {max(cold.values()):.0f} ms; a queue, a longer prompt or a "
     f"larger model makes it seconds. The bound falls {min(falls):.0f} to {max(falls):.0f} "
     f"times, the tokens {3010 / (3010 - num_cached):.0f} times"),
    ("6.1", "over 70% of the arithmetic goes into the same instructions (L33 6.1)",
     f"computed: {share:.0%} for the customer of section 1",
     f"holds while a request's other tokens, outputs included, are at most {largest_rest:,}"
     if share > 0.7 else "contradicted for short chats"),
    ("C30", "with random prompts the cache takes memory and lowers concurrency (L33 8.1-4)",
     "measured: " + "; ".join(f"{design}: {stats.num_steps} steps, {average:.1f} at once"
                              for design, (stats, _, average) in runs.items()),
     ("contradicted here" if not more_on else "holds here")
     + ("; holds where cached blocks cannot be evicted" if more_locked > 0 else "")),
    ("C43", "cached blocks lock memory (L33 8.1-4), or wait for eviction (PAV 6)",
     f"measured: evictable, up to {most['cache on, evictable']['c']} of 60 blocks cached, "
     f"{more_on} steps more; locked, up to {most['cache on, locked']['l']}, "
     f"{more_locked} steps more",
     "PAV holds, and L33 6.2, which calls them reclaimable; L33 8.1-4 for locked blocks"
     if not more_on else "L33 8.1-4 holds"),
    ("C44", "sharers of cached blocks are parted by copy-on-write (PAV 3.4)",
     "measured, blocks copied: " + "; ".join(f"{what}: {num}" for what, num in copies.items()),
     ("holds for the cache" if by_cache else "contradicted for the cache")
     + (", holds for forks of a block that is not full" if by_fork else ", and for forks")),
    ("PAV 6", "the cache never changes an output",
     f"measured: same tokens for {sum(same_outputs)} of {len(same_outputs)} requests",
     "holds" if all(same_outputs) else "contradicted"),
]

head = ("claim", "the text says", "we measured or computed", "so")
style = "text-align:left;vertical-align:top"
table = ""
for row, tag in [(head, "th"), *((row, "td") for row in verdicts)]:
    cells = "".join(f"<{tag} style='{style}'>{cell}</{tag}>" for cell in row)
    table += f"<tr>{cells}</tr>"
display(HTML(f"<table>{table}</table>"))

# %% [markdown] lang="en"
# To be fair to the text. Its 99% is about the amount of prefill, and there it is right. Its "few milliseconds" stand
# against a lower bound: where the bound is below, we cannot say more than that nothing forbids it. Its warning is right for any
# design that sets memory aside for the cache, or pins blocks in it. And an engine that took a hit on the *whole*
# prompt, and then computed the last token anew, would write into a published block: there the sentence on
# copy-on-write would be true.
#
# ## 18. Exercise 7, extra: hash a growing text once
#
# A request that decodes publishes a block every 16 tokens. Each time, your `insert` hashes its whole text again. For
# an answer of 8,000 tokens that is 500 times a text of up to 8,000 tokens: two million tokens hashed for 8,000. The
# engine offers a way out. What `insert` returns, it hands back at the next call for the same text: a **cursor** (游标).
#
# Write the function that such an `insert` would call.


# %% ex="new_keys"
def new_keys(tokens, block_size, salt=None, cursor=None):
    """The keys of those full blocks of `tokens` that had none at the last call.

    cursor: what the last call for the same growing text returned, None at first. You choose
    what it is.
    Returns (keys, cursor). All keys together are those that one call for the whole text gives,
    and only tokens of new blocks are read.
    """
    ### BEGIN SOLUTION
    done, parent = cursor or (0, sha256(repr(salt).encode()).digest())
    keys = []
    num_full = len(tokens) // block_size
    for i in range(done, num_full):
        block = tokens[i * block_size : (i + 1) * block_size]
        parent = sha256(parent + b"".join(t.to_bytes(8, "little") for t in block)).digest()
        keys.append(parent)
    return keys, (num_full, parent)
    ### END SOLUTION


# %% check="new_keys"
check("new_keys")

# %% [markdown] lang="en"
# What is it worth? An answer of 8,000 tokens, a call every 16 tokens, and a text that counts how often it is read:

# %%
from kvlab.lab.scenes.reuse import CountedTokens

new_keys_ = lab.best("new_keys")
reads, cursor, parts = {"all of it again": 0, "with a cursor": 0}, None, []
for num_tokens in range(16, 8001, 16):
    again, onward = CountedTokens(range(num_tokens)), CountedTokens(range(num_tokens))
    whole = keys_of(again, 16)
    keys, cursor = new_keys_(onward, 16, None, cursor)
    parts += keys
    reads["all of it again"] += again.reads
    reads["with a cursor"] += onward.reads
print(f"{len(whole)} keys, {len(parts)} keys")
for how, number in reads.items():
    print(f"{how:16} {number:9,} tokens read")

# %% [markdown] lang="en"
# And inside the engine: an index that asks your `new_keys`. Its `insert` returns your cursor, and the manager hands it
# back at the next call. Its `match` asks without one, since a new prompt has no past. It must find the same.

# %%
from kvlab.lab.scenes.reuse import growing_index

GrowingIndex = growing_index(new_keys_)
for title, index in (("your index", Index(16)), ("with new_keys", GrowingIndex(16))):
    heard = play(chats(), make_engine(160, index=index))
    print(f"{title:13} {heard.hit_rate():.1%} of the prompt tokens found")

# %% [markdown] lang="en"
# ## 19. To remember
#
# - A block's name stands for its tokens **and all before them**. Chaining the parent's key makes that cheap.
# - Only blocks that are full and **computed** are published. A hit is whole blocks, and one token is always left to
#   compute.
# - The free queue is the LRU list. Released is not forgotten; last block first, so that no child outlives its parent.
# - A cached block is a free block. An evictable cache costs its own requests the work of hashing, and nothing else.
# - Put what changes at the **end** of the prompt.
#
# ## 20. To think about
#
# 1. An agent's framework writes the list of its tools as JSON, in an order that varies from call to call. What
#    happens to the hit rate, and who will notice?
# 2. Two tenants share one engine without salts. One of them measures the time to the first token of prompts that it
#    makes up. What can it learn about the other?
# 3. LRU lost all of an agent's history when the circle was one agent too large for the cache. Which victim would you
#    choose, and how would you know?
# 4. A block of 16 or of 256 tokens: what does a larger block do to the 3,010 tokens of section 1? Try `match_limit`.
# 5. In section 15, the chats lost hits to strangers. Name two ways to keep them apart, and what each costs.
#
# ## 21. Where this lives
#
# | here | vLLM V1 | SGLang |
# |---|---|---|
# | `block_keys` | `kv_cache_utils.py`: `hash_block_tokens` | none: it compares tokens on its way down a tree |
# | `PrefixIndex` | `block_pool.py`: `get_cached_block`, `cache_full_blocks` | `match_prefix`, `insert` |
# | `take`, `touch`, `release` | `get_new_blocks`, `touch`, `free_blocks` | `evict`, `inc_lock_ref`, `dec_lock_ref` |
# | `start_request` | `kv_cache_manager.py`: `get_computed_blocks`, `allocate_slots` | `PrefillAdder` |
#
# vLLM's files are in `vllm/v1/core/`. SGLang's methods are in `mem_cache/radix_cache.py`, its `PrefillAdder` in
# `managers/schedule_policy.py`. Here it is `kvlab/prefix/`, `kvlab/blocks/pool.py` and `kvlab/manager.py`.
#
# Lab 06 builds the other index, the radix tree (基数树), with the same three methods and the same hits.
