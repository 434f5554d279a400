# %% [markdown]
# # Lab 06: The radix tree (基数树)
#
# Lab 05 gave every block a name. In this lab the names become *places*: texts that begin alike walk down the same
# branch, and they part where the texts part. You build the tree that SGLang is famous for, and you put it into the
# engine in the place of lab 05's index.
#
# It goes with L33 6.1 to 6.3 (mostly 6.2) and 8.1-4, and with PAV 3.4 and 6. You need the idea of lab 05. You do not
# need to have solved it.
#
# **Time.** The six exercises take about 95 minutes, reading and looking at the figures another 40. A good place for a
# break is after exercise 4. Cells that only draw or count are folded away: one click opens them, and you need not read
# them.

# %%
from kvlab.lab import Lab

lab = Lab("06")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## Sixteen blocks, ten names
#
# Lab 05 in six lines:
#
# - A block is found by a **name**: a hash of its tokens and of its parent's name. That is the hash chain (哈希链).
# - Only full blocks have a name, and a hit is a run of whole blocks from the beginning.
# - The index has three methods: `match`, `insert`, `remove`.
# - The first publisher keeps a name. A duplicate stays without one.
# - The pool's free queue alone decides who is evicted (驱逐). The index only remembers.
# - The last token of a prompt is always computed, since the answer comes out of it. So of a prompt of 8 tokens, in
#   blocks of two, at most 6 are found.
#
# Now four short texts. A block holds two words, so each text fills four blocks. Sixteen blocks are offered to the hash
# chain of lab 05:

# %%
from kvlab.blocks import KVCacheBlock
from kvlab.prefix import HashChainIndex

TEXTS = {
    "A": "you are a tutor what is a page".split(),
    "B": "you are a tutor what is a block".split(),
    "C": "you are a tutor who made this tree".split(),
    "D": "you are a poet write me a poem".split(),
}
vocabulary = sorted({word for text in TEXTS.values() for word in text})
number_of = {word: 1000 + i for i, word in enumerate(vocabulary)}

chain, offered = HashChainIndex(block_size=2), 0
for text in TEXTS.values():
    blocks = [KVCacheBlock(offered + i + 1) for i in range(4)]
    offered += 4
    chain.insert([number_of[word] for word in text], blocks)
names = [name.hex()[:6] for name in chain.cached_block_hash_to_block]
print(f"{offered} blocks offered, {len(names)} names kept:")
print(" ".join(names))

# %% [markdown]
# Sixteen went in, ten names came out. Six blocks were duplicates: their text had been published before. Fine. Now ask
# this index three more questions.
#
# - The third name: which text does its block hold, from the beginning?
# - Which names would be out of reach without the block "a tutor"?
# - Which two waiting prompts should run right after each other, because they share the most?
#
# It cannot say. A name is a checksum, and the dictionary knows no order. It answers "is this beginning here?", and
# nothing else. A tree answers that question, and the other three as well.

# %% [markdown]
# ## A picture
#
# Here are A and B as a tree, made by our own index. You build yours below.
#
# **How to read it.** Time runs to the right: the scale below counts tokens. A thin box is one block, with its two words
# and its number. A **thick frame is one edge** (边): a run of blocks in which no text leaves. Where texts part, an edge
# ends, and several begin.

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.draw.tree import draw_tree
from kvlab.lab.show import picture, sliders
from kvlab.prefix import RadixTreeIndex

index_of_ours = RadixTreeIndex(block_size=2)
index_of_ours.insert(TEXTS["A"], [KVCacheBlock(i) for i in (1, 2, 3, 4)])
index_of_ours.insert(TEXTS["B"], [KVCacheBlock(i) for i in (5, 6, 7, 8)])

figure, ax = plt.subplots(figsize=(8.5, 2.1), layout="constrained")
draw_tree(ax, index_of_ours.roots[None], 2, width=4,
          title="A and B: 8 blocks offered, 5 in the tree, on 3 edges")
ax.set_xlabel("token position")
picture(figure, "The tree of A and B. One edge with blocks 1, 2 and 3: you are, a tutor, "
        "what is. Two edges leave its end: block 4, a page, and block 8, a block.")

# %% [markdown]
# Blocks 5, 6 and 7 are missing: they were B's copies of what A had published. Only block 8 is new.
#
# A tree with one node for every block would be called a **trie** (字典树). It would have five nodes here. Runs without a
# branch are folded into one edge, and that makes it a **radix tree**. Take a prompt of 3,000 tokens that nobody shares,
# in blocks of 16: it is one edge, not 187 nodes.

# %% [markdown]
# ## Your predictions
#
# First: C comes, and then D. How many edges has the tree then?
#
# Second: three engines serve the same model. Each has just served a prompt with 3,000 tokens of instructions (指令) and
# a question. Now the same instructions come with another question of 10 tokens. The engines report how many tokens they
# found in the cache, and **no two numbers are the same**. Their blocks hold 1, 16 and 64 tokens. What does the one with
# 64 report?
#
# Third: two rules of eviction will serve the same chats, in eight pools from much too small to ample. Ours gives up
# single blocks, in the order of the free queue. SGLang's gives up a whole edge, the leaf that was used longest ago.
# Each finds some percentage of the prompts' tokens in the cache. In the pool where the two differ most, how many
# percentage points lie between them?
#
# Replace each `None` by a number, in digits, and run the cell.

# %%
lab.predict("edges", None, unit="edges")
lab.predict("blocks of 64", None, unit="tokens found")
lab.predict("two rules", None, unit="percentage points apart at most")

# %% [markdown]
# ## Exercise 1: by hand
#
# Take a pencil and draw the tree of A, B, C and D. Then fill in:
#
# | after | blocks offered | blocks in the tree | edges |
# |---|---|---|---|
# | A | 4 | 4 | 1 |
# | A, B | 8 | 5 | 3 |
# | A, B, C | ? | ? | ? |
# | A, B, C, D | ? | ? | ? |
#
# Now a fifth text, "you are a poet". What does it change? And a text that begins with "a page"? (Careful: there is a
# block "a page" in the tree already.)
#
# Write down what you did, for any texts. The function is called `tree_size`.

# %% ex="tree_size"
def tree_size(texts, block_size):
    """The size of the radix tree of some texts.

    texts: a list of texts, each a list of tokens. block_size: tokens a block holds. Tokens at
    the end of a text that do not fill a block are left out. Changes nothing.

    Returns three whole numbers, in this order:
        full blocks of all texts together, if nothing is shared,
        blocks in the tree: two are the same if their tokens and all tokens before them are,
        edges: one ends where there are two or more ways to go on, or none; the root is none.
    """
    ### BEGIN SOLUTION
    places, private = set(), 0
    for text in texts:
        for end in range(block_size, len(text) + 1, block_size):
            places.add(tuple(text[:end]))
            private += 1
    ways_on = {place: 0 for place in places}
    for place in places:
        if len(place) > block_size:
            ways_on[place[:-block_size]] += 1
    return private, len(places), sum(1 for ways in ways_on.values() if ways != 1)
    ### END SOLUTION

# %% check="tree_size"
check("tree_size")

# %% [markdown]
# Stuck? `hint("tree_size")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("tree_size")` is your function if it passes its check, and ours if not. So you can read on without having
# solved everything. It looks at the moment when its cell runs: if you solve an exercise later, run the cells below it
# again.

# %%
size_of = lab.best("tree_size")
for upto in ("A", "AB", "ABC", "ABCD"):
    print(f"{', '.join(upto):16} {size_of([TEXTS[name] for name in upto], 2)}")
for fifth in ("you are a poet", "a page"):
    print(f"{fifth:16} {size_of([*TEXTS.values(), fifth.split()], 2)} with it as the fifth")
lab.compare("edges", size_of(list(TEXTS.values()), 2)[2])

# %% [markdown]
# Each new text added two edges: one because an edge was cut, one for what is new. That is the most a text can ever add.
# So a tree of n texts has at most 2n - 1 edges, however long the texts are. (Text number one adds a single edge.)
#
# "you are a poet" changes nothing: both of its blocks are there, and it ends in the middle of D's edge. "a page" is a
# new block on a new edge, right below the root. The block "a page" that is there already stands behind six other words.
#
# ## The model, in four rules
#
# 1. **A place is a beginning.** A place (位置) in the tree stands for a block's tokens and all tokens before it. It
#    holds one block, or none: then it is a **gap** (空缺). The first publisher keeps the place.
# 2. **Edges are runs.** An edge ends only where texts part, or at a leaf (叶).
# 3. **A match is a walk.** It starts at the root (根). It ends at the first chunk that is not there, or at the first
#    gap.
# 4. **A block's name is its place.** In lab 05 the name was a checksum. Here `block.block_hash` is an object, a
#    `Place`, and its attribute `node` is the edge on which the block lies.
#
# A **chunk** is the tuple of the tokens that fill one block. This is all you need:
#
# | | what it is |
# |---|---|
# | `RadixNode(chunks, blocks, parent)` | one edge, and what hangs below it |
# | `node.chunks` | list of the chunks of its run |
# | `node.blocks` | list as long as `chunks`: who holds each chunk, a block or `None` for a gap |
# | `node.children` | dict: first chunk of the child's edge -> the child, a `RadixNode` |
# | `node.parent` | the edge above it; `None` for the root |
# | the root | a `RadixNode` with no chunks and no blocks |
# | `Place(node)` | a name for one block that lies on `node` |
# | `block.block_hash` | the `Place` of a published block; `None` for any other |
#
# One rule about names. The index will have a dictionary from each `Place` to its block. So a name is an object that
# somebody else holds as a key. When a block moves to another edge, **change the `node` of its `Place`, and never give
# it a new `Place`**: under a new one the dictionary would not find it. And no two blocks share one.
#
# A sanity check: two counts of the same tree. One is your formula, the other counts nodes in the picture above.

# %%
from kvlab.prefix.radix_steps import Place, chunks_of  # noqa: F401
from kvlab.prefix.radix_tree import RadixNode


def nodes_below(node):
    """All edges below `node`."""
    for child in node.children.values():
        yield child
        yield from nodes_below(child)


edges = list(nodes_below(index_of_ours.roots[None]))
print("chunks of A:", chunks_of(TEXTS["A"], 2))
print("counted, (blocks, edges):", (sum(len(node.blocks) for node in edges), len(edges)))
print("tree_size says:          ", size_of([TEXTS["A"], TEXTS["B"]], 2)[1:])

# %% [markdown]
# ## Exercise 2: find
#
# Walk down. You stand on an edge, and some of its chunks lie behind you. The next chunk of the text is either the next
# one on your edge, or, at its end, the first one of a child.
#
# When a check fails, it tells the tree in one line:
#
#     ab[1 2](cd[3 -] x[4])
#
# Each letter is a chunk. Edge `ab` holds blocks 1 and 2. Below it hang two edges: `cd`, with block 3 and a gap, and
# `x`, with block 4.

# %% ex="find"
def find(root, chunks):
    """The blocks that hold the longest published beginning of a text.

    root: the root of a tree, a RadixNode. chunks: the text, a list of chunks.

    Returns a new list of blocks in order, [] if there are none: up to the first chunk that is
    not in the tree, or the first gap. Changes nothing, the list `chunks` neither. Looks at no
    child that the text does not go to.
    """
    ### BEGIN SOLUTION
    found, node, behind = [], root, 0
    for chunk in chunks:
        if behind == len(node.chunks):
            if chunk not in node.children:
                break
            node, behind = node.children[chunk], 0
        if node.chunks[behind] != chunk or node.blocks[behind] is None:
            break
        found.append(node.blocks[behind])
        behind += 1
    return found
    ### END SOLUTION

# %% check="find"
check("find")

# %% [markdown]
# Count what a match costs: one comparison for each chunk found, and one look into a dict at each fork. The hash chain
# pays one SHA-256 and one look into a dict for each chunk. Both grow with the hit, not with the size of the cache.
# (`chunks_of` cuts the whole prompt first. Ours cuts as it walks, and saves that.)

# %%
walk = lab.best("find")

for question in ("you are a tutor what is love", "you are a poet", "a page"):
    hit = walk(index_of_ours.roots[None], chunks_of(question.split(), 2))
    print(f"{question:30} -> blocks {[block.block_id for block in hit]}")

# %% [markdown]
# "a page" finds nothing, although block 4 holds these two words. Block 4 holds them at positions 6 and 7, behind six
# other words. Its K and V depend on all of that.
#
# ## Exercise 3: split
#
# C arrives. It agrees with the edge `you are|a tutor|what is` for two blocks, and then it leaves. So the edge must be
# cut (分裂) after two blocks:
#
#         before                          after split(node, 2)
#
#         [ 1  2  3 ]--- 4                [ 1  2 ]---[ 3 ]--- 4
#                    '-- 8                  upper     lower '-- 8
#
# No block moves on the GPU. What changes is who points at whom. Which links change, and which names?

# %% ex="split"
def split(node, k):
    """Cut an edge in two.

    node: an edge, not the root. k: how many blocks stay in the upper half, 0 < k <
    len(node.chunks).

    Returns the upper half. What hung below the edge hangs below the lower half now. One of the
    halves is `node` itself, whichever you like, and the other one is new. All links are right
    afterwards: chunks and blocks, children by first chunk, parents, and for each block that
    moved block.block_hash.node (gaps have none). Each block keeps the Place that it has.
    """
    ### BEGIN SOLUTION
    upper = RadixNode(node.chunks[:k], node.blocks[:k], node.parent)
    node.parent.children[upper.chunks[0]] = upper
    node.chunks, node.blocks, node.parent = node.chunks[k:], node.blocks[k:], upper
    upper.children = {node.chunks[0]: node}
    for block in upper.blocks:
        if block is not None:
            block.block_hash.node = upper
    return upper
    ### END SOLUTION

# %% check="split"
check("split")

# %% [markdown]
# ## Exercise 4: add
#
# Publish (发布) the blocks of a text. It is the walk of `find`, but it never gives up: where there is no place, make
# one. Three cases, and each has its own trap:
#
# - The text leaves an edge **in its middle**. Split it there.
# - The edge is used up, and **no child** begins with the next chunk. Hang a new edge there, for *all* the chunks that
#   are left. But if the edge is a leaf, do not hang an only child below it: **the leaf grows** (only the root cannot).
# - The place **is there**. If it has a block, leave it alone. If it is a gap, fill it.

# %%
cut = lab.best("split")

# %% ex="add"
def add(root, chunks, blocks):
    """Publish blocks along a text.

    root: the root of the tree. chunks: the text, a list of chunks. blocks: for the first
    len(blocks) of these chunks, the blocks that hold them; chunks beyond them are ignored. Some
    of the blocks may hang at their place already. Changes neither list, and puts neither into
    the tree itself.

    Afterwards each of these chunks has its place in the tree, and no place is a gap. A place
    that had a block keeps it. Each block that gets a place gets a name of its own:
    block.block_hash = Place(node). Edges end only where texts part, or at a leaf. cut(node, k)
    is your split.

    Returns the list of blocks that got a place by this call, in order.
    """
    ### BEGIN SOLUTION
    chunks = chunks[: len(blocks)]
    published, node, behind = [], root, 0
    for done, (chunk, block) in enumerate(zip(chunks, blocks, strict=True)):
        if behind == len(node.chunks) and chunk in node.children:
            node, behind = node.children[chunk], 0
        elif behind == len(node.chunks) or node.chunks[behind] != chunk:
            if behind < len(node.chunks):
                node = cut(node, behind)
            if node is root or node.children:  # only a leaf can grow
                child = RadixNode([], [], node)
                node.children[chunk] = child
                node, behind = child, 0
            node.chunks.extend(chunks[done:])
            node.blocks.extend([None] * (len(chunks) - done))
        if node.blocks[behind] is None:
            node.blocks[behind] = block
            block.block_hash = Place(node)
            published.append(block)
        behind += 1
    return published
    ### END SOLUTION

# %% check="add"
check("add")

# %% [markdown]
# ## Watch it: the tree grows and splits
#
# Four texts, added one after the other, by your functions. Orange and hatched is what this step has published.

# %%
grow = lab.best("add")


def grown(texts, block_size=2):
    """The tree of `texts`, added in order: (root, ids of blocks that the last published)."""
    root, next_id, new = RadixNode([], [], None), 1, []
    for text in texts:
        chunks = chunks_of(text, block_size)
        hits = walk(root, chunks)
        fresh = [KVCacheBlock(next_id + i) for i in range(len(chunks) - len(hits))]
        next_id += len(fresh)
        new = [block.block_id for block in grow(root, chunks, [*hits, *fresh])]
    return root, new


# %% fold="yes"
figure, axes = plt.subplots(4, 1, figsize=(8.5, 7.2), layout="constrained",
                            height_ratios=[1, 2, 3, 4])
for ax, (upto, name) in zip(axes, enumerate(TEXTS, start=1), strict=True):
    root, new = grown(list(TEXTS.values())[:upto])
    title = f"{name} is added. New blocks: {len(new)}. Edges: {len(list(nodes_below(root)))}"
    draw_tree(ax, root, 2, new=new, width=4, height=upto, title=title)
axes[-1].set_xlabel("token position")
picture(figure, "Four trees. After A: one edge of four blocks. After B it is three blocks "
        "long, and two edges of one block leave it. After C it is two blocks long, "
        "after D one block.")

# %% [markdown]
# **What to look at.** The frame at the left edge. It is four blocks long, then three, then two, then one. Nobody has
# touched the blocks in it: each text only moved the place where ways part. And look for the word "tutor": it stands
# there once, for three texts.
#
# Move the slider to add one text after the other. There are eight: the four above, then one that ends early, one that
# goes on where D ended, one with a word too many, and one that begins like the *end* of C. (The slider needs a running
# kernel. Without one you see the tree after all eight.) None of the last four splits an edge. Why not, for each of
# them?

# %% fold="yes"
MORE = [
    *TEXTS.values(),
    "you are a poet".split(),
    "you are a poet write me a poem on trees".split(),
    "you are kind to me".split(),
    "who made this tree".split(),
]


def show_growth(texts):
    root, new = grown(MORE[:texts])
    figure, ax = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    told = f"“{' '.join(MORE[texts - 1])}”" if texts else "nothing yet"
    draw_tree(ax, root, 2, new=new, width=6, height=6, title=f"{told}. New blocks: {len(new)}")
    ax.set_xlabel("token position")
    return figure


sliders(show_growth, texts=(0, 8, 8),
        alt="The tree of eight texts. At the root two edges begin: you are, with all others "
        "below it, and who made this tree, blocks 13 and 14.")

# %% [markdown]
# ## Exercise 5: take one out
#
# The pool is about to overwrite a block, so the tree must forget it. If it is the last of a leaf, that is simple. But
# what if others hang below it?
#
# You could throw away everything below. It is of no use at the moment. But the pool still counts those blocks as
# cached, and some of them may be *owned*. So we leave a **gap**. Whoever computes this block again fills the gap, and
# everything behind it is found again.
#
# Gaps with nothing behind them are dead wood (枯枝). A tree that keeps them grows for ever. Cut them off: from the end
# of the leaf upwards, as far as it goes.
#
# **Merge or not?** When a branch is gone, its parent may be left with an only child. The two edges could be joined into
# one again. You need not do it. A match finds the same blocks, with one more look into a dict. The next text may well
# split the edge again at the same place. SGLang does not merge. Ours does, because it is small, and because then the
# tree depends only on what is in it and not on what was. Both pass the check. (Keep the question in mind: it comes back
# where whole edges are evicted.)

# %% ex="take_out"
def take_out(block):
    """Forget one published block.

    block: a block that hangs in a tree; block.block_hash.node is its edge.

    Its place becomes a gap, and block.block_hash None. Then gaps that have no block behind them
    are cut off, upwards: at the end of a leaf; an edge without blocks and children leaves its
    parent, which may then be a leaf itself. The root stays. Blocks behind the gap keep their
    places, and all others the Place that they have, also if you merge. Returns nothing.
    """
    ### BEGIN SOLUTION
    node = block.block_hash.node
    node.blocks[node.blocks.index(block)] = None
    block.block_hash = None
    while node.parent is not None and not node.children:
        first_chunk = node.chunks[0]
        while node.blocks and node.blocks[-1] is None:
            node.blocks.pop()
            node.chunks.pop()
        if node.blocks:
            break
        del node.parent.children[first_chunk]
        node = node.parent
    ### END SOLUTION

# %% check="take_out"
check("take_out")

# %% [markdown]
# Block 2 goes, and B asks again. Then somebody computes "a tutor" anew:

# %%
forget = lab.best("take_out")
root, _ = grown(TEXTS.values())
by_id = {block.block_id: block for node in nodes_below(root) for block in node.blocks}
question = chunks_of(TEXTS["B"], 2)

figure, axes = plt.subplots(2, 1, figsize=(8.5, 6.2), layout="constrained")
gone, back = "Block 2 is gone", "“a tutor” is back, in block 99"
for ax, what in zip(axes, (gone, back), strict=True):
    if what == gone:
        forget(by_id[2])
    else:
        grow(root, question[:2], [by_id[1], KVCacheBlock(99)])
    hits = [block.block_id for block in walk(root, question)]
    draw_tree(ax, root, 2, width=4, height=4, hits=hits,
              title=f"{what}. B asks: {len(hits)} of its 4 blocks found (blue)")
axes[1].set_xlabel("token position")
picture(figure, "The tree of A to D, twice. Above, a gap in the place of block 2, and only "
        "block 1 is found. Below, block 99 is in that place, and blocks 1, 99, 3 and "
        "5 are found.")

# %% [markdown]
# **What to look at.** Above, the crossed box, and what hangs behind it: the five blocks in the three rows of A, B and
# C. They are in memory and out of reach. (D's row leaves before the gap, and is not concerned.) Below, one block has
# come back, and all five can be found again. The hash chain does exactly the same, for another reason: its children
# still bear the old parent's name.
#
# ## Exercise 6: the index
#
# Now wrap it up. The engine calls three methods, and it wants a dictionary of all names. A salt (盐) is a tenant: it
# gets a tree of its own.

# %%
grow, forget = lab.best("add"), lab.best("take_out")


class RadixTreeBase:
    """What the index has.

    block_size: tokens a block holds. roots: salt -> root of its tree, a RadixNode; a salt that
    nobody has used has none. cached_block_hash_to_block: the name of each published block ->
    the block.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.roots = {}
        self.cached_block_hash_to_block = {}


# %% ex="radix_tree"
class RadixTree(RadixTreeBase):
    """A prefix index over walk, grow and forget, your find, add and take_out.

    chunks_of(tokens, block_size) cuts. tokens and blocks belong to the caller, and are not
    changed.
    """

    def match(self, tokens, salt=None):
        """The blocks of the longest published beginning of `tokens`, in order, [] if none.

        Changes nothing.
        """
        ### BEGIN SOLUTION
        if salt not in self.roots:
            return []
        return walk(self.roots[salt], chunks_of(tokens, self.block_size))
        ### END SOLUTION

    def insert(self, tokens, blocks, salt=None, cursor=None):
        """Publish blocks[i] for block i of `tokens`; who gets a place enters the dictionary.

        ValueError, and nothing changed, if `tokens` do not fill all `blocks`; tokens beyond
        them are ignored. (cursor: ignore it.)
        """
        ### BEGIN SOLUTION
        num_tokens = len(blocks) * self.block_size
        if num_tokens > len(tokens):
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks")
        root = self.roots.setdefault(salt, RadixNode([], [], None))
        for block in grow(root, chunks_of(tokens[:num_tokens], self.block_size), blocks):
            self.cached_block_hash_to_block[block.block_hash] = block
        ### END SOLUTION

    def remove(self, block):
        """Forget `block`: no place, no name, no entry.

        ValueError if it is not published here: it has no name, or another index gave it.
        """
        ### BEGIN SOLUTION
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError(f"block {block.block_id} is not published here")
        del self.cached_block_hash_to_block[block.block_hash]
        forget(block)
        ### END SOLUTION

# %% check="radix_tree"
check("radix_tree")

# %% [markdown]
# ## Two indexes, one truth
#
# You have two indexes now that should agree on everything, and they have nothing in common inside: one hashes, the
# other compares. When one is wrong, the other is very likely not wrong in the same way. Such a second way to the answer
# is called an **oracle** (测试预言), and it is the best test that there is.
#
# The next cell plays random traces on both. Texts are made of two tokens only, so that they meet all the time. Blocks
# are published, evicted in any order, and published again. A tree that raises an error differs from the chain, too.

# %%
import random

Tree = lab.best("RadixTree")


def play_both(seed, num_moves=60):
    """The same moves on both: (matches compared, those that found any, first difference)."""
    rng = random.Random(seed)
    size, found = rng.choice([1, 2, 3]), 0
    sides = [
        (make(size), [KVCacheBlock(i) for i in range(40)]) for make in (HashChainIndex, Tree)
    ]
    for move in range(num_moves):
        tokens = [rng.randrange(2) for _ in range(rng.randint(0, 5 * size))]
        salt, what, which = rng.choice([None, None, "x"]), rng.random(), rng.randrange(30)
        chain, tree = (one_move(*side, size, tokens, salt, what, which) for side in sides)
        found += bool(chain[0])
        if chain != tree:
            said = f"the chain says {chain}, the tree {tree}"
            return move + 1, found, f"seed {seed}, move {move}: {said}"
    return num_moves, found, None


def one_move(index, blocks, size, tokens, salt, what, which):
    """Publish, remove or only look; then what is found, and which blocks are published."""
    try:
        if what < 0.4:
            hits = index.match(tokens, salt)
            free = [block for block in blocks if block.block_hash is None and block not in hits]
            index.insert(tokens, [*hits, *free][: len(tokens) // size], salt)
        elif what < 0.7 and blocks[which].block_hash is not None:
            index.remove(blocks[which])
        published = index.cached_block_hash_to_block.values()
        found = [block.block_id for block in index.match(tokens, salt)]
        return found, sorted(block.block_id for block in published)
    except Exception as error:
        return f"{type(error).__name__}: {error}", []

# %%
played = [play_both(seed) for seed in range(100)]
differences = [difference for _, _, difference in played if difference]
compared, hits = sum(moves for moves, _, _ in played), sum(found for _, found, _ in played)
print(f"{compared:,} matches compared, {hits:,} of them hits; {len(differences)} traces differ")
print(*differences[:3], sep="\n")

# %% [markdown]
# Would this test notice a mistake? A test that cannot fail proves nothing. Here is a tree that walks past gaps:

# %%
class PastGaps(Tree):
    """Wrong on purpose: a match goes on behind a gap."""

    def match(self, tokens, salt=None):
        found, node, rest = [], self.roots.get(salt), chunks_of(tokens, self.block_size)
        while node is not None and rest and (node := node.children.get(rest[0])):
            for chunk, block in zip(node.chunks, node.blocks, strict=True):
                if not rest or chunk != rest[0]:
                    return found
                found += [block] if block else []
                rest = rest[1:]
        return found


right, Tree = Tree, PastGaps
caught = sum(play_both(seed)[2] is not None for seed in range(100))
Tree = right
print(f"the wrong tree is caught in {caught} of 100 traces")

# %% [markdown]
# ## Watch it run: the tree of a living engine
#
# The real scheduler and the real block manager, with your tree inside. In place of a model there is the slot-echo
# model, which answers with numbers. The pool has 15 blocks of two tokens. Four people ask, one after the other, and the
# third comes back. Each answer takes five tokens more. Three moments: C has been served, D is being served, and C has
# come back.

# %%
from kvlab.lab.scenes.tree import record_turns

turns = [(name, [number_of[word] for word in TEXTS[name]]) for name in "ABCDC"]
moments = record_turns(Tree, turns, block_size=2, num_blocks=15)
last_step = {moment.turn: moment.step for moment in moments}
print(f"{len(moments)} steps; the turns end with the steps", *last_step.values())

# %% fold="yes"
word_of = {number: word for word, number in number_of.items()}


def words_of(chunk):
    return " ".join(word_of.get(token, str(token)) for token in chunk)


def draw_moment(ax, step):
    moment = moments[step]
    title = (f"step {step}, turn {moment.turn}, {moment.name}: found {moment.num_found} of 8 "
             f"tokens; {len(moment.owned)} of 15 blocks owned (blue)")
    draw_tree(ax, moment.root, 2, hits=moment.owned, title=title, width=6, height=4,
              told=words_of)


def show_engine(step):
    figure, ax = plt.subplots(figsize=(8.5, 3), layout="constrained")
    draw_moment(ax, step)
    ax.set_xlabel("token position")
    return figure


figure, axes = plt.subplots(3, 1, figsize=(8.5, 8.4), layout="constrained")
for ax, step in zip(axes, (last_step[3], last_step[4] - 2, last_step[5]), strict=True):
    draw_moment(ax, step)
axes[-1].set_xlabel("token position")
picture(figure, "Three moments of the tree. At the end of turn 3 there are branches for A, "
        "B and C, each with its answer. In the middle of turn 4 the blocks of A's "
        "answer are gone, and D has a branch. At the end C's and D's branches are "
        "whole, and of A's and B's only what they share is left: what is, block 3.")

# %% [markdown]
# **What to look at.** Nobody owns anything at the end of a turn, so all blocks are cached (已缓存): anybody may find them,
# and whoever needs room may have them. In turn 4 the pool runs out of fresh blocks. Look at A's branch, the top row
# from "a page" on: between the first picture and the second it has become shorter **from its tip**, because nobody has
# used it for longest. In the third picture A's and B's own blocks are all gone, and "what is", which both used, is
# still there. So is C's branch: 6 of its 8 tokens are found. That is the most that can be, for the last token is always
# computed, and with it the block in which it stands.
#
# Now step by step. Without a running kernel you see the end of turn 4.

# %% fold="yes"
sliders(show_engine, step=(0, len(moments) - 1, last_step[4]),
        alt="The end of turn 4: the branches of B, C and D are whole, A's is gone.")

# %% [markdown]
# Nobody told the queue what a tree is. So why does it never saw off the branch it sits on?
#
# ## Why a queue can decide for a tree
#
# Two reasons, and both are lab 05's:
#
# 1. **Whoever owns a child owns its parent.** A hit is a run from the beginning. So while a child has an owner, its
#    parent has one too, and is not in the queue at all.
# 2. **Last block first.** When a request ends, its last block goes to the tail of the queue first. So a parent stands
#    behind its child, and is evicted later.
#
# There is one exception. Two requests compute the same block at the same time. The second one's copy stays without a
# name, but what it computes *behind* it is published, below a parent that it does not own. This parent may go first.
# Then there is a gap, and gaps you can live with.
#
# **SGLang does it the other way round.** Its tree has no gaps, so only **leaves** may be evicted. Each node counts the
# running requests below it, in `lock_ref`: a request locks (锁定) the whole path up to the root when it starts, and
# unlocks it when it ends. When memory is short, the leaf that was used longest ago goes, the whole edge at once; its
# parent may be a leaf now, and so on. There is no queue; the tree itself decides.
#
# | | ours (and vLLM's) | SGLang's |
# |---|---|---|
# | who is locked | blocks with `ref_cnt` above 0 | nodes with `lock_ref` above 0 |
# | who decides | the pool's free queue, one for all | the tree: leaves, by last use |
# | the unit | one block | one edge |
# | parent before child | can happen, leaves a gap | cannot happen |
# | finding the next victim | head of the queue, O(1) | a heap (or a set) of leaves |
#
# ## Exercise 7, if you like: leaf-only eviction
#
# Write SGLang's choice of a victim. If you leave it out, the comparison below runs on ours.

# %% ex="leaf_to_evict"
def leaf_to_evict(root, last_used):
    """The edge that leaf-only eviction gives up next.

    root: the root of a tree without gaps. last_used: dict, block_id -> the moment of its latest
    use (a number). Changes neither.

    Candidates are edges without children, of whose blocks none has an owner (ref_cnt above 0).
    Of these, returns the one whose latest use is longest ago; the latest use of an edge is that
    of any of its blocks. None if there is no candidate.
    """
    ### BEGIN SOLUTION
    best, best_use, to_visit = None, None, list(root.children.values())
    while to_visit:
        node = to_visit.pop()
        to_visit.extend(node.children.values())
        if node.children or any(block.ref_cnt > 0 for block in node.blocks):
            continue
        use = max(last_used[block.block_id] for block in node.blocks)
        if best is None or use < best_use:
            best, best_use = node, use
    return best
    ### END SOLUTION

# %% check="leaf_to_evict"
check("leaf_to_evict")

# %% [markdown]
# ## Two rules on one trace
#
# Now measure. The trace is made from a seed: 40 people talk to 4 bots, each bot with some 200 tokens of instructions.
# Each person takes 2 to 6 turns. A turn sends the whole conversation so far. Four requests run at any time. Three ways
# to evict:
#
# - **queue**: the pool's, block by block, over your tree;
# - **leaf, whole edge**: SGLang's, with your `leaf_to_evict`;
# - **leaf, one block**: leaf-only, but only the last block of the leaf goes.
#
# One more contender. Not every block in the queue is worth keeping. The last block of a prompt is mostly part-full. It
# has no name, and nobody will ever find it. Yet it goes to the tail like all others, and useful blocks are evicted
# before it. So, the fourth way:
#
# - **queue, nameless first**: as the queue, but blocks without a name are used again first.
#
# The traffic and the four caches are in `kvlab/lab/scenes/tree.py`, some fifteen lines each. The leaf rules run on a tree
# that does not merge edges, as SGLang's, whatever your `take_out` does. So everybody gets the same numbers.

# %%
from kvlab.lab.scenes.tree import LeafCache, NamelessFirst, QueueCache, chats, serve

victim = lab.best("leaf_to_evict")
POOLS = (110, 120, 140, 160, 200, 250, 300, 400)
RULES = {
    "queue": lambda n: QueueCache(Tree(16), n),
    "queue, nameless first": lambda n: NamelessFirst(Tree(16), n),
    "leaf, one block": lambda n: LeafCache(n, 16, victim, whole_edge=False),
    "leaf, whole edge": lambda n: LeafCache(n, 16, victim, whole_edge=True),
}
traces = [chats(seed) for seed in range(5)]


def percent_found(make):
    """The percentage of tokens found in each of POOLS, on average over the traces."""
    return [sum(100 * serve(trace, make(n)) for trace in traces) / len(traces) for n in POOLS]


rates = {rule: percent_found(make) for rule, make in RULES.items()}
apart = [abs(a - b) for a, b in zip(rates["leaf, whole edge"], rates["queue"], strict=True)]
mean = sum(map(len, traces[0])) / len(traces[0])
print(f"one of the traces: {len(traces[0])} prompts of {mean:.0f} tokens on average, "
      f"{size_of(traces[0], 16)[1]} different blocks")
lab.compare("two rules", round(max(apart), 1))

# %% fold="yes"
LOOKS = {
    "queue": ("#222222", "o-", (8, -13)),
    "queue, nameless first": ("#0072B2", "D-", (-6, 10)),
    "leaf, one block": ("#009E73", "s:", (-6, 24)),
    "leaf, whole edge": ("#D55E00", "^--", (4, -16)),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), layout="constrained",
                                     width_ratios=[1, 1.3])
for rule, (colour, style, shift) in LOOKS.items():
    square = style == "s:"
    look = {"color": colour, "markerfacecolor": "white"}
    left.plot(POOLS, rates[rule], style, linewidth=1.5, markersize=5, **look)
    gained = [rate - queue for rate, queue in zip(rates[rule], rates["queue"], strict=True)]
    right.plot(POOLS, gained, style, linewidth=2, markersize=8 if square else 5,
               zorder=2 if square else 3, **look)
    place = 0 if rule == "leaf, whole edge" else 3
    right.annotate(rule, (POOLS[place], gained[place]), xytext=shift, color=colour,
                   textcoords="offset points", fontsize=11)
left.set(ylabel="prompt tokens found in the cache, %", ylim=(60, 90))
left.set_title("All four, one upon the other", loc="left", fontsize=11)
right.set(ylabel="percentage points above the queue", ylim=(-0.8, 2))
right.set_title("The same, enlarged: against the queue", loc="left", fontsize=11)
for ax in (left, right):
    ax.set_xlabel("blocks of 16 tokens in the pool")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
picture(figure, "Left: tokens found over the size of the pool, four lines that nearly agree, "
        "from 71 to 81 percent. Right: the difference from the queue. Leaf by one "
        "block and nameless first agree: up to 1.4 points more. Leaf by whole edge: "
        "from -0.2 at 110 blocks to 0.6 at 160, and 0 at 400.")

# %% [markdown]
# **What to look at.** Left first: four rules, nearly one line. (The scale begins at 60%.) A pool of 200 blocks instead
# of 110 brings ten points. The choice of the rule brings one and a half at most.
#
# Then the right, enlarged. The green squares and the blue diamonds lie upon each other. So leaf-only eviction, block by
# block, is better than our queue by a point, and it is *not* because of the tree: a queue that uses nameless blocks
# first gains the same. vLLM's `free_blocks` does so today: blocks without a hash go to the head of the queue. (A first
# proposal, pull request 33710 of February 2026, was closed. The change came in later.)
#
# The dashed line shows what the unit costs. A whole edge goes where one block would have been enough. On a tight pool
# that throws away a long branch for a short need, and the gain is gone. (SGLang's blocks hold one token by default. It
# could not well ask its tree once for every token.)
#
# And here merging matters after all. A match does not feel it, but merged edges are longer, and the edge is what goes:

# %%
merging = percent_found(lambda n: LeafCache(n, 16, victim, whole_edge=True, joined=True))
for num_blocks in (110, 160, 400):
    i = POOLS.index(num_blocks)
    never = rates["leaf, whole edge"][i] - rates["queue"][i]
    always = merging[i] - rates["queue"][i]
    print(f"{num_blocks} blocks, points above the queue: {never:+.1f} if edges are never "
          f"merged, {always:+.1f} if they are")

# %% [markdown]
# A fair word: this is one kind of traffic, five seeds, and every prompt is computed at once. The order of the rules can
# change on yours. Now you can measure it.
#
# ## An hour of a real service
#
# The chats above are ours. Mooncake, the system behind the assistant Kimi, has published an hour of its conversations.
# No text is in it, only lengths, times, and one id for every 512 tokens: equal ids mean equal beginnings. We played its
# prompts through the scheduler, with the queue as the rule, in caches of nine sizes.
#
# Guess before you run the cell: with room for everything, what share of the prompt tokens is found? And how much memory
# does it take to find half of that, for a model of 14 billion parameters?

# %%
from kvlab.lab.scenes.traffic import draw_hit_rates, tell_hit_rates, traffic

hour, gpu = traffic("mooncake"), traffic("azure_conv")["settings"]  # the same model, beside it
picture(draw_hit_rates(hour), tell_hit_rates(hour))

ceiling = hour["hit_rate_unbounded"]
for part in (0.5, 0.9):
    needed = next(blocks for blocks, rate in zip(hour["blocks"], hour["hit_rate"], strict=True)
                  if rate >= part * ceiling)
    print(f"{part:.0%} of what can be found: the first of these sizes that does it has {needed:,} blocks")
fits = gpu["blocks"] * gpu["block_size"] // hour["settings"]["block_size"]
print(f"beside {gpu['model']}, one {gpu['gpu']} has room for {fits} such blocks, and nobody runs yet")

# %% [markdown]
# **What to look at.** First the ceiling. Even with room for all, most tokens of this hour are new: nobody has sent them
# before. Then the left end. All that fits on one GPU lies outside the picture, to the left of the first dot. What can be
# found in this traffic needs terabytes. So it is not a better rule that helps here. Mooncake keeps K and V in the memory
# of many machines, and on their disks, and brings them to the GPU when they are needed.
#
# The figure says where the trace is from, under which licence, and which command made the numbers. kvlab does not ship
# the trace. Download it, and the command gives the same numbers again.

# %% [markdown]
# ## Three engines, three numbers
#
# Back to the second prediction. The same tree, with blocks of 1, 16 and 64 tokens. With one token a block it is a
# token-level tree, as in SGLang. Nothing of your code changes.

# %%
from kvlab.lab.scenes.tree import findable, words

rng = random.Random(3)
instructions = words(rng, 3000, 3000)
first, second = instructions + words(rng, 10, 10), instructions + words(rng, 10, 10)
warm = {}
for size in (1, 16, 64):
    tree = Tree(size)
    tree.insert(first, [KVCacheBlock(i) for i in range(len(first) // size)])
    warm[size] = size * len(tree.match(findable(second, size)))  # all but the last token
    print(f"blocks of {size:2}: {warm[size]:,} of {len(second):,} tokens found")
lab.compare("blocks of 64", warm[64])

# %% [markdown]
# All three are right. The instructions end where they end, and the block that holds this end holds a bit of the
# question too. It cannot be shared. If texts part anywhere, the part of a block that is lost is on average
#
# **(B - 1) / 2 tokens for each hit**,
#
# because the place where they part is equally likely to be at any of the B positions in a block. Is that so? Three
# traces from a seed: the **chats** from above; **plans** of agents, which branch off each other anywhere; and
# **strangers**, who have nothing in common. The cache is as large as it needs to be.

# %%
from kvlab.lab.scenes.tree import endless, plans, strangers

TRACES = {"chats": chats(6), "plans": plans(6), "strangers": strangers(6)}
found_by, share, num_places = {}, {}, {}
for name, trace in TRACES.items():
    for size in (1, 16, 64):
        tree = Tree(size)
        found_by[name, size] = endless(trace, tree)  # tokens found, prompt by prompt
        share[name, size] = 100 * sum(found_by[name, size]) / sum(map(len, trace))
        num_places[name, size] = len(tree.cached_block_hash_to_block)

for name in ("chats", "plans"):
    tokenwise = found_by[name, 1]
    hitting = [i for i, found in enumerate(tokenwise) if found]
    for size in (16, 64):
        lost = sum(tokenwise[i] - found_by[name, size][i] for i in hitting) / len(hitting)
        print(f"{name}, blocks of {size}: {lost:.1f} tokens lost a hit; "
              f"(B - 1)/2 = {(size - 1) / 2}")

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
faces = {1: ("#0072B2", ""), 16: ("#56B4E9", "//"), 64: ("white", "..")}
for i, name in enumerate(TRACES):
    for j, (size, (colour, hatch)) in enumerate(faces.items()):
        x, height = i + 0.27 * (j - 1), share[name, size]
        ax.bar(x, height, 0.25, color=colour, hatch=hatch, edgecolor="#222222")
        ax.text(x, height + 1.5, f"{height:.1f}%", ha="center", fontsize=10)
        ax.text(x, -5, f"{size}", ha="center", va="top", fontsize=10)
ax.text(-0.55, -5, "tokens a block:", ha="right", va="top", fontsize=10)
ax.set_xticks(range(3), list(TRACES), fontsize=11)
ax.tick_params(axis="x", pad=20, length=0)
ax.set(ylabel="prompt tokens found, %", ylim=(0, 100), xlim=(-0.5, 2.5))
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
told = "; ".join(f"{name}, blocks of {size}: {height:.1f}%"
                 for (name, size), height in share.items())
picture(figure, f"Prompt tokens found, in nine bars. {told}.")

# %% [markdown]
# **What to look at.** The step from the solid bar to the hatched one. A token-level tree finds 2 to 4 points more than
# blocks of 16, and blocks of 64 lose ten points and more. The loss for each hit is a constant, so it hurts where hits
# are short. With 3,000 tokens of instructions nobody will notice 8.
#
# And what does the token-level tree cost? Not edges: their number depends on where texts part. But the places:

# %%
import time


def match_in_ms(index, size):
    """Milliseconds to find the second prompt after the first was published: the best of 20."""
    index.insert(first, [KVCacheBlock(i) for i in range(len(first) // size)])
    took = []
    for _ in range(20):
        began = time.perf_counter()
        index.match(second)
        took.append(time.perf_counter() - began)
    return 1000 * min(took)


match_ms = {size: match_in_ms(Tree(size), size) for size in (1, 16, 64)}
chain_ms = match_in_ms(HashChainIndex(16), 16)
for size, ms in match_ms.items():
    print(f"blocks of {size:2}: {-(-len(second) // size):5,} entries in one block table, "
          f"{num_places['chats', size]:5,} places for the chats, a match takes {ms:.2f} ms")
print(f"(the hash chain, blocks of 16: {chain_ms:.2f} ms)")

# %% [markdown]
# ## What else a tree knows
#
# A hash chain can say whether a beginning is there. A tree can say who shares it with whom. Here is one use. 120
# prompts wait: 6 programs, 4 documents each, 5 questions on each document, in random order. They run one after the
# other. You may choose the order. Which?
#
# Walk down the tree of the waiting prompts, branch by branch, and finish a branch before you start the next one. Each
# block is then computed once, even in a small pool. And this walk has a well-known name: it is *alphabetical order*.

# %%
rng = random.Random(1)
programs = [words(rng, 200, 200) for _ in range(6)]
documents = [program + words(rng, 120, 180) for program in programs for _ in range(4)]
waiting = [document + words(rng, 10, 30) for document in documents for _ in range(5)]
rng.shuffle(waiting)
ordered = {}
for num_blocks in (60, 150, 300):
    arrival, branch = (
        100 * serve(order, QueueCache(Tree(16), num_blocks), at_once=1)
        for order in (waiting, sorted(waiting))
    )
    ordered[num_blocks] = arrival, branch
    print(f"{num_blocks} blocks: {arrival:.0f}% found as they came, "
          f"{branch:.0f}% branch by branch")

# %% [markdown]
# The pool of 60 blocks, in the right order, beats 300 blocks in the wrong one. SGLang's scheduler can pick, among those
# that wait, the one with the longest match first. It comes close to this walk without sorting everything. (What would
# you say to a customer whose prompt begins with "z"?)
#
# ## Into the engine
#
# Your `RadixTree` is a part of the engine: `prefix_index`. The same requests run on your tree and on our hash chain.
# The tokens must be equal, and so must the hits. The pool is small, so that blocks are evicted while the others are in
# use: every part of your tree has to work.

# %%
result = lab.run_engine(num_requests=16, num_gpu_blocks_override=40)

# %% [markdown]
# ## What the textbook says, and what we measured
#
# Each line is computed by this notebook. One last experiment first. L33 8.1-4 says that cached blocks lock memory. PAV
# 6 says that they are candidates for eviction. So: a pool full of cached blocks, in your tree. Then a stranger comes,
# who needs every single block. And once more, while somebody still owns one branch.

# %%
from kvlab.blocks import OutOfBlocks

outcome = {}
for still_running in (False, True):
    cache = QueueCache(Tree(16), 100)
    tables = [cache.start(words(random.Random(i), 160, 160))[0] for i in range(10)]
    for table in tables[still_running:]:
        cache.end(table)
    cached = len(cache.index.cached_block_hash_to_block)
    try:
        table, _ = cache.start(words(random.Random(99), 1600, 1600))
        outcome[still_running] = f"{cached} named blocks, a stranger gets {len(table)} of 100"
    except OutOfBlocks:
        left = cache.pool.get_num_free_blocks()
        outcome[still_running] = f"one branch of 10 owned: {left} of 100 can be had"
        kept = all(block.block_hash is not None for block in tables[0])
    print(outcome[still_running])

# %% fold="yes"
ledger = []


def claim(where, says, we_find, verdict):
    row = {"where": where, "the text says": says, "we find": we_find, "verdict": verdict}
    ledger.append(row)


def holds_if(condition, otherwise="contradicted here"):
    return "holds" if condition else otherwise


# C23: 99% less prefill. longest: the longest question for which that is true
longest = {size: int(found / 0.99) - 3000 for size, found in warm.items()}
holding = [f"blocks of {size} and questions of at most {n} tokens"
           for size, n in longest.items() if n >= 1]
shares = "; ".join(f"blocks of {size}: {100 * found / len(second):.1f}%"
                   for size, found in warm.items())
claim("L33 6.2", "a shared prompt of 3000 tokens cuts the prefill by 99%",
      f"{shares}, for a question of 10",
      f"holds for {'; '.join(holding)}" if holding else "contradicted here")


def saved_for(customers):
    return (customers - 1) * warm[16] / (customers * len(second))


enough = next((n for n in range(2, 100_000) if saved_for(n) >= 0.99), None)
claim("L33 6.2", "(the same, for all who ask, the first one cold)",
      "; ".join(f"{n} customers: {100 * saved_for(n):.1f}%" for n in (2, 10, 100, 1000))
      + " (blocks of 16)",
      f"holds from {enough} customers on" if enough else "contradicted here")

# %% fold="yes"
# 6.2: what a node is, who is locked, what stays
edges = list(nodes_below(grown(TEXTS.values())[0]))
inner = sum(bool(node.children) and any(node.blocks) for node in edges)
claim("L33 6.2", "leaves and inner nodes stand for runs of blocks",
      f"{inner} of {len(edges)} edges are inner ones and hold blocks",
      holds_if(0 < inner < len(edges)))
claim("L33 6.2", "while a session uses a branch, it is not freed",
      f"{outcome[True]}; all of its blocks are still found: {kept}",
      holds_if(kept and outcome[True].endswith("90 of 100 can be had")))
claim("L33 6.2", "a match takes a second at most (秒级)",
      "for 3,010 tokens, blocks of "
      + ", ".join(f"{size}: {ms:.2f} ms" for size, ms in match_ms.items())
      + f"; hash chain, 16: {chain_ms:.2f} ms", holds_if(max(match_ms.values()) < 1000))

# C43: locked, or candidates for eviction?
all_of_it = outcome[False].endswith("100 of 100")
claim("L33 8.1-4", "cached blocks lock memory and lower concurrency",
      outcome[False] + "; " + outcome[True],
      holds_if(not all_of_it, otherwise="holds for blocks that somebody owns; contradicted for "
               "blocks that are only cached"))
claim("PAV 6", "cached blocks wait for eviction, and are overwritten only when needed",
      outcome[False], holds_if(all_of_it))

# %% fold="yes"
import pandas as pd

# the tree and the hash chain
claim("L33 6.2 and PAV 3.4", "a radix tree finds prefixes; a hash chain finds prefixes",
      f"{compared:,} matches on both, {len(differences)} traces differ",
      "they differ: look at the oracle" if differences
      else "both hold, and at one block size they are the same")
gain = {name: share[name, 1] - share[name, 16] for name in ("chats", "plans")}
claim("L33 6.2", "tokens are matched (PAV 3.4: whole blocks)",
      f"token by token finds {gain['chats']:.1f} and {gain['plans']:.1f} points more than "
      "blocks of 16",
      "both hold: it depends on the block size")

left_and_top = {"text-align": "left", "white-space": "normal", "vertical-align": "top"}
headings = [{"selector": "th", "props": "text-align: left"}]
table = pd.DataFrame(ledger).style.hide(axis="index")
table.set_properties(**left_and_top).set_table_styles(headings)

# %% [markdown]
# **The 99%.** It is a count of tokens, and it is right for blocks of 16 and for a short question. It silently takes the
# block size for granted: with blocks of 64, the block at the end of the instructions costs more than a whole percent.
#
# **The locked memory.** L33 8.1-4 and L33 6.2 do not agree with each other: 6.2 itself says that a node without users
# can be reclaimed. What locks memory is an owner. The warning is right for a design, or a bug, in which an owner never
# lets go: a `lock_ref` that is raised once and lowered never takes a whole path out of the pool for good, up to the
# root.

# %% [markdown]
# ## What to remember
#
# - A radix tree is a set of beginnings. Runs are edges; an edge is cut where the first text leaves it.
# - At one block size, tree and hash chain give the same hits. Each is the other's oracle.
# - A queue can evict for a tree, since who owns a child owns its parent, and the last block is freed first. What may go
#   wrong is a gap, and a gap heals.
# - Token-level matching gains (B - 1)/2 tokens for each hit. It costs B times the entries.
# - What the tree adds is knowledge: who shares what with whom, and in which order to run.
#
# ## Questions to think about
#
# 1. `find` needs no hash. Does the tree need salts at all to keep tenants apart? And what could an attacker still learn
#    from the time to the first token?
# 2. SGLang splits an edge when a *match* ends in its middle, before anything is added. What is that good for? (Think of
#    `lock_ref`.) Why does our `match` not need it?
# 3. Two requests compute the same prompt at the same time. Follow their blocks through `add`. Whose copies become
#    nameless, and when do they go back to the pool?
# 4. You have gaps, and SGLang has none. Which of the two could swap a *middle* piece of a conversation out to the CPU?
# 5. Sorting the waiting prompts gained 58 points in the smallest pool. What does it do to the slowest customer? Write a
#    rule that gives up a little of the gain and starves nobody.
#
# ## Where this lives in real engines
#
# | here | SGLang, `mem_cache/radix_cache.py` | vLLM V1, `v1/core/` |
# |---|---|---|
# | `find`, `match` | `match_prefix` (splits where it ends) | `find_longest_cache_hit`, over hashes |
# | `split` | `_split_node` | none: every block has a name of its own |
# | `add`, `insert` | `insert`, when a request is cached | `cache_full_blocks`, when a block is full |
# | `take_out`, `remove` | `evict`, leaves only | `get_new_blocks`, from the head of the queue |
# | `ref_cnt` | `inc_lock_ref`, `dec_lock_ref`: all nodes up to the root | `touch`, `free_blocks` |
# | blocks of B tokens | `page_size`, 1 by default | `block_size`, 16 by default |
# | salts | `extra_key` | `cache_salt` |
#
# In kvlab: `kvlab/prefix/radix_steps.py` is what you wrote, `kvlab/prefix/radix_tree.py` is the index of the engine.
# Both are tested against `hash_chain.py`. The paper is Zheng et al., "SGLang: Efficient Execution of Structured
# Language Model Programs" (2024).
