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

# %%
import io
import random
import time
from hashlib import sha256

import matplotlib.pyplot as plt
from IPython.display import HTML, display

from kvlab.blocks import FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks, cdiv
from kvlab.lab import Lab
from kvlab.lab.draw import BLUE, VERMILLION, box_rows, pool_areas, pool_grid

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
print(f"the customer typed {typed} tokens; the GPU computed {first} + {second} = {first + second:,} prompt tokens")
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

# %%
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
        beginning = tuple(tokens[: start + 4])  # a block is the same only if all before it is the same
        shared = beginning in seen and len(beginning) == start + 4
        hits += shared
        boxes += [(token, "hit" if shared else "new") for token in tokens[start : start + 4]] + [None]
        if len(beginning) == start + 4:
            seen.add(beginning)
    rows.append((who, boxes))
    notes.append(f"{hits} blocks found")
box_rows(rows, "Blue: a full block that an earlier row has computed already. White: computed now.", 0.42, notes)

# %% [markdown] lang="en"
# Customer 2 shares ten tokens and finds eight. The third block holds two tokens of the instructions *and* two of the
# question, so it is another block. When customer 1 comes back, the own question and the bot's answer are found too:
# history counts as well as instructions.
#
# ## 3. Two predictions
#
# Somebody has the idea to tell the bot the time. They put **one token, the current minute, in front of** the 3,000
# tokens of instructions. Blocks have 16 tokens, so 187 full blocks were shared before. How many full blocks do two
# customers share now if they come a minute apart? Replace `None` by your guess, then run the cell.

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
# Three prompts come, each alone. How many of their tokens are found?
#
#     P      7 7 8 8   1 2 3 9   5 6
#     Q      7 7 8 8   1 2 3 4
#     R      1 2 3 4   7 7 8 8   1
#
# Two of the three are traps. Write your three numbers into the cell. You will compare them in section 7.

# %%
lab.predict("by hand", None, unit="tokens found for P, Q, R")  # three numbers, such as [0, 4, 8]

# %% [markdown] lang="en"
# ## 5. The formal model
#
# What does the K and V of a token depend on? On the token, on its position, and through attention on **every token
# before it**. So a name for block $i$ must stand for the whole beginning, tokens $0$ to $(i+1)B-1$. Long names are
# slow, so they are chained:
#
# $$k_{-1} = H(\text{salt}) \qquad k_i = H\big(k_{i-1} \,\|\, t_{iB}, \dots, t_{(i+1)B-1}\big)$$
#
# Each key (键) holds its parent's key. One changed token changes its own key and all keys behind it. That is the
# **hash chain** (哈希链). The *salt* (盐) keeps tenants apart: another salt, another root, nothing in common.
#
# A prompt of $n$ tokens whose first $m$ blocks are known starts with
#
# $$h = B \cdot \min\Big(m,\ \Big\lfloor \tfrac{n-1}{B} \Big\rfloor\Big)$$
#
# tokens that need not be computed. The $n-1$ is there because one token must always be computed. Its logits choose
# the next token, and logits are not kept in the cache.
#
# ## 6. A sanity check on H
#
# Why SHA-256, and not Python's own `hash()`, which is faster? Here are two blocks of 4 tokens. All ids are within the
# vocabulary of Qwen2.5.

# %%
one, other = (4130, 100532, 60841, 22054), (76785, 101188, 97598, 0)
print("Python's hash:", hash(one), hash(other), "  the same!" if hash(one) == hash(other) else "  different")
print("SHA-256:      ", sha256(repr(one).encode()).hexdigest()[:16], sha256(repr(other).encode()).hexdigest()[:16])

# %% [markdown] lang="en"
# They were found by a search of ten seconds on a laptop. With `hash()` as the key, whoever sends the one block is
# given the K/V of the other, silently. vLLM used `hash()` once; the hole is known as CVE-2025-25183, and SHA-256 is
# the default now. There is a second reason: `hash()` of a string differs from process to process, so two engines
# could never agree on a name.
#
# ## 7. Exercise 1: names for blocks
#
# Write the chain. A token id may be any whole number below $2^{63}$, so give each one 8 bytes. `int.to_bytes(8,
# "little")` does that. `sha256(data).digest()` makes 32 bytes.


# %% ex="block_keys"
def block_keys(tokens, block_size, salt=None):
    """The keys of the full blocks of `tokens`, in order.

    tokens: a sequence of token ids, each from 0 to 2**63 - 1. salt: a string, or None for no salt.
    Returns a list of len(tokens) // block_size keys, each the 32 bytes of a SHA-256 digest.

    Two blocks have the same key exactly if the salt, the tokens of the block and all tokens before it are the same.
    Each token is read a fixed number of times, not once for every block behind it.
    """
    ### BEGIN SOLUTION
    keys = []
    parent = sha256(repr(salt).encode()).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        data = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + block_size])
        parent = sha256(parent + data).digest()
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

# %%
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
top = keys_of(text, 4)
rows = [
    (name, [(key.hex()[:4], "hit" if i and key in top else "new") for key in keys_of(tokens, 4, salt)])
    for i, (name, (tokens, salt)) in enumerate(variants.items())
]
box_rows(rows, "Keys of 16 tokens in blocks of 4 (first 4 hex digits)", 0.75)

# %% [markdown] lang="en"
# Fourteen tokens have three keys, not three and a half: the last two tokens fill no block. With the names in hand,
# your predictions can be settled.

# %%
system_text, minutes = list(range(1, 3001)), (50_001, 50_002)


def num_shared(a, b):
    return sum(x == y for x, y in zip(keys_of(a, 16), keys_of(b, 16), strict=True))


lab.compare("time in front", num_shared([minutes[0], *system_text], [minutes[1], *system_text]))
lab.compare("time behind", num_shared([*system_text, minutes[0]], [*system_text, minutes[1]]))

# %% [markdown] lang="en"
# This is the most expensive token in the whole prompt. Put what changes at the end.
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

    block_size: tokens per block. cached_block_hash_to_block: from the key of each published block to the block.
    A block (KVCacheBlock) bears its key as block.block_hash, None if it is not published, and has a block_id.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.cached_block_hash_to_block = {}


keys_of = lab.best("block_keys")


# %% ex="prefix_index"
class PrefixIndex(PrefixIndexBase):
    """Finds published blocks by the tokens that they hold. keys_of(tokens, block_size, salt) gives the keys."""

    def match(self, tokens, salt=None):
        """The blocks that hold the longest published beginning of `tokens`, in order, [] if none. Changes nothing."""
        ### BEGIN SOLUTION
        found = []
        for key in keys_of(tokens, self.block_size, salt):
            if key not in self.cached_block_hash_to_block:
                break
            found.append(self.cached_block_hash_to_block[key])
        return found
        ### END SOLUTION

    def insert(self, tokens, blocks, salt=None, cursor=None):
        """Publish blocks[i] as the holder of block i of `tokens`, by setting its block_hash and entering it.

        A key that is taken stays with its first publisher, and a block that has a name keeps it: leave both alone.
        ValueError, and nothing changed, if `tokens` do not fill all `blocks`; tokens beyond them are ignored.
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
        """Forget `block`: no entry, no block_hash. ValueError if it is not published here."""
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
# through the block table. A wrong block gives a wrong token at once. (This helper is used again below.)

# %%
from kvlab.config import EngineConfig  # noqa: E402
from kvlab.engine import EngineCore  # noqa: E402
from kvlab.manager import KVCacheManager  # noqa: E402
from kvlab.sampling_params import SamplingParams  # noqa: E402
from kvlab.schedule import Request, Scheduler  # noqa: E402
from kvlab.sim import SlotEchoRunner  # noqa: E402

VOCABULARY = 30_000


def make_engine(num_blocks, block_size=16, caching=True, index=None, manager=None, seats=16, budget=256):
    """The real scheduler and manager over `num_blocks` usable blocks, with the slot-echo stand-in as the model."""
    manager = manager or KVCacheManager(num_blocks + 1, block_size, caching, prefix_index=index)
    config = EngineConfig(block_size=block_size, num_gpu_blocks_override=num_blocks + 1, max_num_seqs=seats,
                          max_num_batched_tokens=budget, enable_prefix_caching=caching)
    return EngineCore(Scheduler(config, manager), SlotEchoRunner(num_blocks + 1, block_size, vocab_size=VOCABULARY))


def ask(engine, name, prompt, num_outputs=3, n=1):
    """Run one request alone. Returns (its output tokens, prompt tokens found cached)."""
    request = Request(name, prompt, SamplingParams(temperature=0, seed=0, max_tokens=num_outputs, n=n))
    engine.add_request(request)
    while engine.has_unfinished_requests():
        engine.step()
    return request.output_token_ids, request.num_cached_tokens


class WithoutParents(PrefixIndexBase):
    """An index whose keys know a block's own tokens only."""

    def _keys(self, tokens):
        size = self.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def match(self, tokens, salt=None):
        found = []
        for key in self._keys(tokens):
            if key not in self.cached_block_hash_to_block:
                break
            found.append(self.cached_block_hash_to_block[key])
        return found

    def insert(self, tokens, blocks, salt=None, cursor=None):
        for key, block in zip(self._keys(tokens), blocks, strict=False):
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
                block.block_hash, self.cached_block_hash_to_block[key] = key, block

    def remove(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None


seen_before, asked = [7, 7, 8, 8, 1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 7, 8, 8, 1]
for title, index in (("parents in the key", lab.best("PrefixIndex")(4)), ("no parents", WithoutParents(4))):
    engine = make_engine(20, block_size=4, index=index)
    ask(engine, "before", seen_before)
    tokens, num_cached = ask(engine, "R", asked)
    right, _ = ask(make_engine(20, block_size=4, caching=False), "R", asked)
    print(f"{title:20} {num_cached} tokens found, output {tokens}: {'right' if tokens == right else 'WRONG'}")

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
    """The most tokens of a prompt of num_tokens (at least 1) that may come from the cache: a multiple of block_size."""
    ### BEGIN SOLUTION
    return (num_tokens - 1) // block_size * block_size
    ### END SOLUTION


def num_publishable(num_tokens, num_computed_tokens, block_size):
    """How many of a request's first blocks may be published.

    num_tokens: tokens known, prompt and outputs. num_computed_tokens: how many of them have K/V.
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
    """The n blocks that were freed longest ago, for new contents: a list, each with one owner and no name.

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
    """A hit: one owner more for each of `blocks`, some of which nobody owned so far."""
    ### BEGIN SOLUTION
    for block in blocks:
        if not block.ref_cnt:
            queue.remove(block)
        block.ref_cnt += 1
    ### END SOLUTION


def release(queue, table):
    """A request ends: one owner fewer for each block of its table (given in logical order, first block first).

    Blocks that nobody owns any more go to the tail of the queue, so that within this table a parent is evicted after
    its child. Names stay. ValueError if a block has no owner.
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

# %%
take_, touch_, release_, Index_ = (lab.best(name) for name in ("take", "touch", "release", "PrefixIndex"))


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


for title, wrong in (("Released last block first", False), ("Released first block first", True)):
    rows, notes = zip(*story(wrong), strict=True)
    box_rows(rows, title + ". The head of the queue, next to be taken, is on the left", 0.7, notes)

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

    Uses take_, touch_ and match_limit_: yours, or ours. index.match(tokens, salt) finds hits in blocks of
    index.block_size tokens.
    Returns (table, num_cached): the list of blocks that hold the prompt, hits first; and how many tokens the hits hold.
    None, and nothing changed, if there are not enough free blocks.
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

# %%
start_, publishable_ = lab.best("start_request"), lab.best("num_publishable")
queue, index = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(1, 9)]), Index_(4)
number, rows, notes = {}, [], []  # number: of each word
for who, request_words in prompts.items():
    tokens = [number.setdefault(word, len(number)) for word in request_words]
    table, num_cached = start_(queue, index, tokens)
    rows.append((f"table of {who}", [(str(b.block_id), "hit" if 4 * i < num_cached else "new")
                                     for i, b in enumerate(table)]))
    notes.append(f"{num_cached} tokens found, {len(tokens) - num_cached} computed")
    index.insert(tokens, table[: publishable_(len(tokens) + 1, len(tokens), 4)])
    release_(queue, table)
    rows.append(("queue after it", [(str(b.block_id), "cached" if b.block_hash else "empty")
                                    for b in queue.get_all_free_blocks()]))
    notes.append("")
box_rows(rows, "Block tables, and the free queue with its head on the left (hatched: cached)", 0.55, notes)

# %% [markdown] lang="en"
# Out of the middle of the queue, where customer 2 had not reached them yet.
#
# ## 12. Watch it run
#
# From here on we use the real `KVCacheManager` and `Scheduler`, with **your** `PrefixIndex` inside. First we need
# somebody who talks.
#
# Two kinds of traffic, both made here from a seed. All sizes are small, so that a run takes half a second.
#
# - **Chats**: 24 people, 3 bots with 192 tokens of instructions each, 2 to 6 turns. People think for 20 to 120 steps
#   between turns.
# - **Agents**: 8 agents, one program with 320 tokens of instructions, 8 to 12 turns. A tool answers within 1 to 4
#   steps, with 16 to 64 tokens.
#
# Each turn sends the whole conversation so far, outputs included, as real clients do.


# %%
def words(rng, num):
    return [rng.randrange(100, VOCABULARY) for _ in range(num)]


def chats(seed=1):
    """A list of (start step, opening, turns); a turn is (new tokens, number of outputs, steps until the next turn)."""
    rng = random.Random(seed)
    bots = [words(rng, 192) for _ in range(3)]
    return [
        (6 * i, rng.choice(bots), [(words(rng, rng.randint(8, 40)), rng.randint(8, 24), rng.randint(20, 120))
                                   for _ in range(rng.randint(2, 6))])
        for i in range(24)
    ]


def agents(seed=2):
    rng = random.Random(seed)
    program = words(rng, 320)
    return [
        (15 * i, program + words(rng, rng.randint(20, 60)),
         [(words(rng, rng.randint(16, 64)) if turn else [], rng.randint(6, 16), rng.randint(1, 4))
          for turn in range(rng.randint(8, 12))])
        for i in range(8)
    ]


def strangers(seed=3):
    """Sixty documents of 100 to 300 random tokens, one question each: nothing in common."""
    rng = random.Random(seed)
    return [(3 * i, words(rng, rng.randint(100, 300)), [([], rng.randint(8, 24), 0)]) for i in range(60)]


def play(sessions, engine, watch=lambda engine: None):
    """Let all sessions talk to the end. Returns (steps, outputs by name, prompt tokens by session, those found)."""
    histories = [list(opening) for _, opening, _ in sessions]
    due = [(start, i, 0) for i, (start, _, _) in enumerate(sessions)]
    who, outputs, asked, found, step = {}, {}, {}, {}, 0
    while due or engine.has_unfinished_requests():
        for entry in [entry for entry in due if entry[0] <= step]:
            due.remove(entry)
            _, i, turn = entry
            new_tokens, num_outputs, _ = sessions[i][2][turn]
            histories[i] += new_tokens
            request = Request(f"{i}.{turn}", histories[i],
                              SamplingParams(temperature=0, seed=0, max_tokens=num_outputs))
            who[request.request_id] = i, turn
            engine.add_request(request)
        if engine.has_unfinished_requests():
            for request in [output.request for output in engine.step() if output.request.is_finished()]:
                i, turn = who[request.request_id]
                histories[i] = list(request.all_token_ids)
                outputs[request.request_id] = request.output_token_ids
                asked[i] = asked.get(i, 0) + request.num_prompt_tokens
                found[i] = found.get(i, 0) + request.num_cached_tokens
                if turn + 1 < len(sessions[i][2]):
                    due.append((step + 1 + sessions[i][2][turn][2], i, turn + 1))
        watch(engine)
        step += 1
    return step, outputs, asked, found


def hit_rate(asked, found, who=None):
    """Share of prompt tokens found cached, of all sessions or of those in `who`."""
    who = asked if who is None else who
    return sum(found[i] for i in who) / sum(asked[i] for i in who)


# %% [markdown] lang="en"
# One run of the chats in a pool of 160 blocks. We note after each step which blocks somebody owns, which are cached,
# and which hold nothing.

# %%
Index = lab.best("PrefixIndex")


def state_of_pool(manager):
    """One letter a block, in order of block id: o owned, c cached, e empty (and l locked, in section 15)."""
    locked = getattr(manager, "locked", ())
    return "".join(
        ("l" if b in locked and b.ref_cnt == 1 else "o") if b.ref_cnt else "c" if b.block_hash is not None else "e"
        for b in manager.block_pool.blocks[1:]
    )


frames = []
engine = make_engine(160, index=Index(16))
steps, outputs, asked, found = play(
    chats(), engine, lambda engine: frames.append(state_of_pool(engine.scheduler.manager))
)
_, ax = plt.subplots(figsize=(9, 3.4))
pool_areas(ax, frames)
for text, place in (("empty", (45, 125)), ("cached: nobody's, and still findable", (480, 125)),
                    ("owned by a request", (200, 14))):
    ax.text(*place, text, ha="center", bbox={"facecolor": "white", "pad": 2, "lw": 0})
ax.set(ylabel="blocks of the pool", title=f"Chats in 160 blocks: {hit_rate(asked, found):.0%} of prompt tokens found")
plt.show()

# %% [markdown] lang="en"
# Look at two things. After 250 steps the pool is nearly full, and it stays so. No request ever has to wait for that:
# the hatched part is free room with something useful in it. And what the requests own is the smaller part of the
# pool, most of the time.
#
# The same run block by block. Move the slider if you are in Jupyter; the four moments below stand on their own.

# %%
def draw_step(ax, step):
    pool_grid(ax, frames[step])
    owned, cached, empty = (frames[step].count(letter) for letter in "oce")
    ax.set_title(f"step {step}: {owned} owned, {cached} cached, {empty} empty", fontsize=11, loc="left")


figure, axes = plt.subplots(2, 2, figsize=(9, 4.4), layout="constrained")
for ax, step in zip(axes.flat, (13, 67, 271, 542), strict=True):
    draw_step(ax, step)
figure.suptitle("160 blocks: blue is owned, hatched is cached, white is empty", fontsize=11)
plt.show()

# %%
try:
    from ipywidgets import Image, IntSlider, VBox
except ImportError:
    print("ipywidgets is not installed: the four pictures above have to do")
else:
    slider = IntSlider(min=0, max=len(frames) - 1, value=len(frames) // 3, description="step")
    picture = Image(width=620)

    def show_step(change=None):
        figure, ax = plt.subplots(figsize=(6.5, 2.8))
        draw_step(ax, slider.value)
        png = io.BytesIO()
        figure.savefig(png, dpi=110, bbox_inches="tight")
        plt.close(figure)
        picture.value = png.getvalue()

    slider.observe(show_step, "value")
    show_step()
    display(VBox([slider, picture]))

# %% [markdown] lang="en"
# Does the cache change what is answered? It must not: a hit is the same K and V (PAV 6). With the slot-echo stand-in,
# a single wrong slot would show.

# %%
plain = make_engine(160, caching=False)
steps_off, outputs_off, *_ = play(chats(), plain)
computed = engine.scheduler.stats.num_scheduled_tokens
computed_off = plain.scheduler.stats.num_scheduled_tokens
print(f"{len(outputs)} requests, all outputs the same: {outputs == outputs_off}")
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
# Now the whole curve, for both, from 60 to 320 blocks. Dashed: the same, but released first block first.


# %%
class FirstBlockFirst(KVCacheManager):
    """Our manager with the order of release turned round."""

    def _give_back(self, blocks):
        super()._give_back(list(blocks)[::-1])


sizes = (60, 80, 100, 120, 140, 160, 200, 240, 320)
curves = {}
for name, trace in (("chats", chats()), ("agents", agents())):
    for order in ("last block first", "first block first"):
        curves[name, order] = []
        for num_blocks in sizes if order == "last block first" else sizes[:7]:
            manager = None
            if order == "first block first":
                manager = FirstBlockFirst(num_blocks + 1, 16, prefix_index=Index(16))
            engine = make_engine(num_blocks, index=Index(16), manager=manager)
            _, _, asked, found = play(trace, engine)
            curves[name, order].append(100 * hit_rate(asked, found))

figure, ax = plt.subplots(figsize=(9, 4))
for (name, order), rates in curves.items():
    colour, marker = (BLUE, "o") if name == "chats" else (VERMILLION, "s")
    solid = order == "last block first"
    ax.plot(sizes[: len(rates)], rates, color=colour, marker=marker, ls="-" if solid else "--", lw=2 if solid else 1.2,
            ms=6 if solid else 4)
    if solid:
        ax.text(325, rates[-1], f"{name} {rates[-1]:.0f}%", va="center", color=colour, fontsize=11)
ax.set(xlim=(55, 375), ylim=(45, 100), xlabel="blocks in the pool (16 tokens each)",
       ylabel="prompt tokens found cached, %", title="Hit rate against the size of the pool")
ax.text(64, 47, "dashed: released first block first", fontsize=10)
ax.grid(alpha=0.3)
plt.show()
lab.compare("agents in 160", round(curves["agents", "last block first"][sizes.index(160)]))

# %%
print(f"{'blocks':>8} {'chats':>8} {'(turned round)':>15} {'agents':>8} {'(turned round)':>15}")
for i, num_blocks in enumerate(sizes):
    cells = [
        f"{curves[name, order][i]:.1f}" if i < len(curves[name, order]) else "-"
        for name in ("chats", "agents") for order in ("last block first", "first block first")
    ]
    print(f"{num_blocks:>8} {cells[0]:>8} {cells[1]:>15} {cells[2]:>8} {cells[3]:>15}")

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

    num_tokens: length of the prompt. num_cached: how many of them have K/V already (fewer than num_tokens).
    num_parameters: of the model; 2 bytes each. flops: FLOPs a second. bandwidth: bytes a second.
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
GPUS = {"RTX 4090": (165e12, 1.008e12), "A100": (312e12, 2.039e12), "H100": (989e12, 3.35e12)}  # bf16, datasheets
engine = make_engine(400, index=lab.best("PrefixIndex")(16))
ask(engine, "first customer", system_text + list(range(4000, 4010)))
_, num_cached = ask(engine, "next customer", system_text + list(range(5000, 5010)))
print(f"{num_cached} of 3010 tokens cached: {num_cached / 3010:.1%} of the tokens saved (7.6 billion parameters)")
speedups, times, milliseconds = {}, {}, {}
for gpu, (flops, bandwidth) in GPUS.items():
    cold, warm = seconds(3010, 0, 7.6e9, flops, bandwidth), seconds(3010, num_cached, 7.6e9, flops, bandwidth)
    speedups[gpu], milliseconds[gpu] = cold / warm, 1e3 * warm
    times[gpu] = f"{gpu} {1e3 * cold:.0f} ms cold, {1e3 * warm:.1f} ms warm"
    print(f"{gpu:9} cold {1e3 * cold:6.1f} ms, warm {1e3 * warm:5.1f} ms: {cold / warm:4.1f} times sooner")

# %% [markdown] lang="en"
# 99.4% fewer tokens, and 10 to 20 times sooner, not 170 times. Eighteen tokens are too few to keep the arithmetic
# busy, and the weights must be read all the same. (The other 99.4% of the arithmetic is not lost: it is free for
# other requests in the same step.)
#
# ## 15. When the cache is of no use
#
# The textbook warns of one case: prompts that have nothing in common. Sixty strangers, sixty random documents, a pool
# so tight that they must wait for each other. How many more steps does the engine need with the cache on than with it
# off?

# %%
lab.predict("strangers", None, unit="% more steps with the cache on")


# %%
class LockingManager(KVCacheManager):
    """A cache as one might fear it: what was published keeps its block, up to half of the pool, wanted or not."""

    locked = ()

    def free(self, request):
        table = self.req_to_blocks.get(request.request_id, [])
        keep = [block for block in table if block.block_hash is not None and block not in self.locked]
        keep = keep[: self.block_pool.num_usable_blocks // 2 - len(self.locked)]
        self.block_pool.touch(keep)  # an owner who never lets go
        self.locked = (*self.locked, *keep)
        super().free(request)


def evictable(num_blocks, caching):
    return make_engine(num_blocks, caching=caching, index=Index(16) if caching else None)


designs = {
    "cache off": lambda n: evictable(n, False),
    "cache on, evictable": lambda n: evictable(n, True),
    "cache on, locked": lambda n: make_engine(n, manager=LockingManager(n + 1, 16, prefix_index=Index(16))),
}
runs = {}
print(f"{'60 blocks':22} {'steps':>6} {'requests at once, on average':>30} {'tokens computed':>16}")
for design, make in designs.items():
    full, at_once = [], []
    engine = make(60)

    def watch(engine, full=full, at_once=at_once):
        full.append(state_of_pool(engine.scheduler.manager))
        at_once.append(len(engine.scheduler.running))

    play(strangers(), engine, watch)
    stats, average = engine.scheduler.stats, sum(at_once) / len(at_once)
    runs[design] = stats, full, average
    print(f"{design:22} {stats.num_steps:>6} {average:>30.1f} {stats.num_scheduled_tokens:>16,}")
more = 100 * (runs["cache on, evictable"][0].num_steps / runs["cache off"][0].num_steps - 1)
lab.compare("strangers", round(more))

# %% [markdown] lang="en"
# Nothing. Not one step. And yet an operator who looks at memory sees this. The three pools, step by step:

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 2.8), sharey=True, layout="constrained")
for ax, (design, (stats, full, _)) in zip(axes, runs.items(), strict=True):
    pool_areas(ax, full)
    ax.set_title(f"{design}\n{stats.num_steps} steps", fontsize=11)
axes[0].set_ylabel("blocks")
figure.suptitle("Blue: owned by requests. Hatched: cached, free. White: empty, free. Crossed: locked.", fontsize=11)
plt.show()

# %% [markdown] lang="en"
# Trace the blue of the left and of the middle picture: it is the same. Only the white has turned hatched: room that
# is free either way. A gauge that counts "blocks with something in them" shows 100% in the middle, and it alarms
# people. Your question to any such gauge: *does it count owned blocks, or full ones?* On the right stands the engine
# that the warning describes.
#
# What does the cache truly cost? Time to hash, and somebody else's hits:

# %%
prompt = words(random.Random(0), 3010)
started = time.perf_counter()
for _ in range(20):
    keys_of(prompt, 16)
hashing = (time.perf_counter() - started) / 20
cold = seconds(3010, 0, 7.6e9, *GPUS["H100"])
print(f"hashing 3,010 tokens: {1e3 * hashing:.2f} ms on this machine")
print(f"computing them on an H100: {1e3 * cold:.0f} ms or more")

chatters = chats()
mixed = chatters + strangers()
for title, sessions in (("chats alone", chatters), ("chats among strangers", mixed)):
    _, _, asked, found = play(sessions, evictable(160, True))
    print(f"{title:22} in 160 blocks: the chats find {hit_rate(asked, found, range(len(chatters))):.0%}")

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
    copies[f"4 samples of {num_tokens} tokens, by fork"] = engine.scheduler.stats.num_copy_on_writes
for what, number in copies.items():
    print(f"{number} copied blocks   {what}")

# %% [markdown] lang="en"
# Only full blocks are published, a hit is always a whole block, and at least one token is always computed into a
# block of one's own. So nobody ever writes into a cached block. A copy needs a *partly filled* block with two owners,
# and only a fork makes one.

# %%
num_requests = 10_000
cold_share = (3010 + (num_requests - 1) * (3010 - num_cached)) / (num_requests * 3010)
largest_rest = int(3000 / 0.7 - 3000)  # other tokens a request may have while 70% of its work is instructions
off, on, locked = (runs[design][0] for design in designs)
few_ms = [gpu for gpu, warm in milliseconds.items() if warm < 10]
share = 2 * system / (first + second + 2 * answer)
most = {design: {letter: max(frame.count(letter) for frame in full) for letter in "cl"}
        for design, (_, full, _) in runs.items()}  # fmt: skip
by_cache, by_fork = copies["three sharers of a cached prompt"], copies["4 samples of 1000 tokens, by fork"]
verdicts = [
    ("C23", "a shared prompt of 3,000 tokens cuts the prefill by 99% (L33 6.2)",
     f"{num_cached / 3010:.1%} of the tokens for a warm request; {1 - cold_share:.1%} over {num_requests:,} requests, "
     f"the first one cold",
     "holds for tokens" if num_cached / 3010 >= 0.99 else "contradicted"),
    ("C23", "the first token comes after a few ms in place of seconds (L33 6.2)",
     "; ".join(times.values()) + " (7.6B parameters in bf16)",
     (f"a few ms: holds on {' and '.join(few_ms)}; " if few_ms else "a few ms: contradicted; ")
     + ("99% sooner: holds" if min(speedups.values()) >= 100 else
        f"99% sooner: contradicted, {min(speedups.values()):.0f} to {max(speedups.values()):.0f} times, because the "
        f"weights are read in any case")),
    ("6.1", "over 70% of the arithmetic goes into the same instructions (L33 6.1)",
     f"{share:.0%} for the customer of section 1; 70% or more while a request's other tokens, outputs included, are at "
     f"most {largest_rest:,}",
     f"holds for up to {largest_rest:,} other tokens" if share > 0.7 else "contradicted for short chats"),
    ("C30", "with random prompts the cache takes memory and lowers concurrency (L33 8.1-4)",
     "; ".join(f"{design}: {stats.num_steps} steps, {average:.1f} at once"
               for design, (stats, _, average) in runs.items()),
     ("contradicted here" if on.num_steps == off.num_steps else "holds here")
     + ("; holds where cached blocks cannot be evicted" if locked.num_steps > off.num_steps else "")),
    ("C43", "cached blocks lock memory (L33 8.1-4), or wait for eviction (PAV 6)",
     f"evictable: up to {most['cache on, evictable']['c']} of 60 blocks cached, {on.num_steps - off.num_steps} steps "
     f"more; locked: up to {most['cache on, locked']['l']}, {locked.num_steps - off.num_steps} steps more",
     "PAV holds, and L33 6.2, which calls them reclaimable; L33 8.1-4 for locked blocks"
     if on.num_steps == off.num_steps else "L33 8.1-4 holds"),
    ("C44", "sharers of cached blocks are parted by copy-on-write (PAV 3.4)",
     "; ".join(f"{what}: {number}" for what, number in copies.items()),
     ("holds for the cache" if by_cache else "contradicted for the cache")
     + (", holds for forks of a block that is not full" if by_fork else ", contradicted for forks")),
    ("PAV 6", "the cache never changes an output",
     f"same tokens for {sum(outputs[name] == outputs_off[name] for name in outputs)} of {len(outputs)} requests",
     "holds" if outputs == outputs_off else "contradicted"),
]

head = ("claim", "the text says", "we measured", "so")
table = "".join(
    "<tr>" + "".join(f"<{tag} style='text-align:left;vertical-align:top'>{cell}</{tag}>" for cell in row) + "</tr>"
    for row, tag in [(head, "th"), *((row, "td") for row in verdicts)]
)
display(HTML(f"<table>{table}</table>"))

# %% [markdown] lang="en"
# To be fair to the text. Its 99% is about the amount of prefill, and there it is right. Its warning is right for any
# design that sets memory aside for the cache, or pins blocks in it. And an engine that took a hit on the *whole*
# prompt, and then computed the last token anew, would write into a published block: there the sentence on
# copy-on-write would be true.
#
# ## 18. Stretch: hash a growing text once
#
# A request that decodes publishes a block every 16 tokens. Each time, your `insert` hashes its whole text again. For
# an answer of 8,000 tokens that is 500 times a text of up to 8,000 tokens: two million tokens hashed for 8,000. The
# engine offers a way out. What `insert` returns, it hands back at the next call for the same text: a **cursor** (游标).
#
# Write the function that such an `insert` would call.


# %% ex="new_keys"
def new_keys(tokens, block_size, salt=None, cursor=None):
    """The keys of those full blocks of `tokens` that had none at the last call.

    cursor: what the last call for the same growing text returned, None at first. You choose what it is.
    Returns (keys, cursor). All keys together are those that one call for the whole text gives, and only tokens of new
    blocks are read.
    """
    ### BEGIN SOLUTION
    done, parent = cursor or (0, sha256(repr(salt).encode()).digest())
    keys = []
    num_full = len(tokens) // block_size
    for i in range(done, num_full):
        data = b"".join(token.to_bytes(8, "little") for token in tokens[i * block_size : (i + 1) * block_size])
        parent = sha256(parent + data).digest()
        keys.append(parent)
    return keys, (num_full, parent)
    ### END SOLUTION


# %% check="new_keys"
check("new_keys")

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
# 4. A block of 16 or of 256 tokens: what does a larger block do to the 3,010 tokens of section 1? Try `match_limit`
#    and `block_keys`.
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
# vLLM's files are in `vllm/v1/core/`, SGLang's methods in `mem_cache/radix_cache.py`. Here it is `kvlab/prefix/`,
# `kvlab/blocks/pool.py` and `kvlab/manager.py`.
#
# Lab 06 builds the other index, the radix tree (基数树), with the same three methods and the same hits.
