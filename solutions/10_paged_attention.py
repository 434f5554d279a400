# %% [markdown]
# # Lab 10: Paged attention (分页注意力)
#
# The K and V of a sequence lie scattered over the pool, block by block. In this lab you write the kernels (内核) that
# read them where they lie: a naive one, one with online softmax, and one that reads each byte once. You write them in
# Triton, count every byte that they ask for, and put the last one into the engine.
#
# It goes with L33 2.2, 2.3, 8.1-1, 8.1-2, 9.3-2 and A.1, and with PAV 3.2. You need two ideas from earlier labs: what K
# and V are for (lab 00), and what a block table (块表) is (lab 03). You need no GPU, and no Triton either. NumPy you
# should have seen.
#
# **Time.** The seven core exercises take about 100 minutes, reading and looking at the figures another 40. A good place
# for a break is after exercise 3. An eighth exercise is extra. Cells that only draw or count are folded away: one click
# opens them, and you need not read them.

# %%
from kvlab.lab import Lab

lab = Lab("10")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## The kernel that saves the copy
#
# Attention wants K and V in a row. The pages are not in a row. So there are two ways:
#
# - **Gather** (聚集): copy the pages together, then call any attention. Each byte is read, written, and read again.
# - **Read in place**: a kernel that looks up each page and loads it from where it lies. No copy.
#
# L33 2.3 asks whether the copy would not ruin everything, says that none is needed, and sketches the kernel: one program
# takes a query head, walks the block table, and loads K and V page by page, once. We have such a kernel, and it is right
# (you will build it; below it is called "online"). Both ways now decode one token for a sequence of 96, with 14 query heads
# that share 2 KV heads: the ratio of Qwen2.5-7B. We count what they ask the memory for.

# %%
import math

import numpy as np

from kvlab.lab.scenes.attention import make_case, requested
from kvlab.standin import decode as ours
from kvlab.standin import record, tl, triton

case = make_case([96], block_size=16, kv_heads=2, group=7, head_dim=64)
row_bytes = 2 * 64 * 4  # of a token: 2 KV heads of 64 numbers of 4 bytes
gather_bytes = 3 * 2 * 96 * row_bytes
print(f"gather:    K and V, each read, written and read {gather_bytes:9,} bytes")
out = np.empty_like(case.q)
with record() as traffic:
    ours.launch_by_head(ours.online_softmax_kernel, out, *case)
asked = requested(traffic)
in_place = asked["K"] + asked["V"]
print(f"in place:  no copy at all, asked for            {in_place:9,} bytes, {in_place / gather_bytes:.2f} times as much")

# %% [markdown]
# Read that again. The kernel that saves the copy asks for more than twice as much as the one that makes it.
#
# The textbook is right that no copy is needed. But its sketch is for a model in which every query head has K and V of its
# own. In today's models several query heads share them, seven in Qwen2.5-7B. So there is a ladder (阶梯) of kernels:
# gather, naive, online, packed. The textbook's is the third, and the gain comes with the fourth. You climb all of it.

# %% [markdown]
# ## A picture
#
# **How to read it.** On top are the tokens of one sequence, in order, in pages of four. In the middle is its block
# table: one number a page. Below is the pool. The thick frames follow token 9: it is on the third page of the sequence;
# the table says where that page lies. White and dashed is nobody's. The slots behind token 9 have been reserved and
# never written.

# %% fold="yes"
from kvlab.lab.draw import attention as draw
from kvlab.lab.show import ledger, picture, sliders, table

picture(draw.where([5, 2, 7], 4, 10, 9, 9), "Ten tokens in three pages of four. The block table says 5, 2, 7. Token 9 is "
        "the second of the third page, so it lies in physical block 7, at offset 1.")

# %% [markdown]
# ## Your predictions
#
# First: the best rung of the ladder reads each byte of K and V once. Qwen2.5-7B has 28 query heads on 4 KV heads. How
# many times as much as that does the naive kernel ask for?
#
# (The naive kernel has one program for each query head too, and it reads K *twice* and V once.)
#
# Second: somebody sets the block size to 1, so that every token is a page of its own, at any place in the pool. The GPU
# reads memory in lines of 128 bytes. Of the bytes that come with the lines, how many percent does the packed kernel use?
# (With pages of 16 it uses 100%.)
#
# Third: a kernel computes `block * stride_block` in 32 bits. One layer of that 7B has blocks of 16 tokens, K apart from V.
# The first block id at which this goes wrong: what is it?
#
# Replace each `None` by a number and run the cell.

# %%
lab.predict("naive", None, unit="times as much")
lab.predict("pages of 1", None, unit="% of the lines used")
lab.predict("32 bits", None, unit="(block id)")

# %% [markdown]
# ## Exercise 1: by hand
#
# The textbook's example, L33 2.2: token 37, block size 16, and a block table that says 142 for the third page. Take a
# pencil.
#
# 1. Which page of the sequence is it on? Which place (offset, 偏移) on that page?
# 2. K is an array `[num_blocks, block_size, num_kv_heads, head_dim]`, and the last index runs fastest. How many numbers
#    lie before those of token 37, KV head 0, if there are 4 KV heads with a head_dim of 128?
#
# Then write it down for any token. The function is called `locate`.

# %% ex="locate"
def locate(position, kv_head, block_table, block_size, num_kv_heads, head_dim):
    """Where the K of one token lies, for one KV head.

    position: of the token in its sequence, from 0. block_table: physical block of each page.
    K is an array [num_blocks, block_size, num_kv_heads, head_dim].

    Returns three whole numbers: the physical block, the offset in it (in tokens), and how many
    numbers of the array lie before the first one of this token and KV head.
    """
    ### BEGIN SOLUTION
    page, offset = divmod(position, block_size)
    block = block_table[page]
    token = block * block_size + offset
    return block, offset, token * num_kv_heads * head_dim + kv_head * head_dim
    ### END SOLUTION

# %% check="locate"
check("locate")

# %% [markdown]
# Stuck? `hint("locate")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("locate")` is your function if it passes its check, and ours if not. So you can read on without having solved
# everything. It looks at the moment when its cell runs: if you solve an exercise later, run the cells below it again.

# %%
place = lab.best("locate")
print("token 37:", place(37, 0, [7, 3, 142], 16, 4, 128))

block_elements = place(0, 0, [1], 16, 4, 128)[2]  # where block 1 begins
print(f"a block has {block_elements:,} numbers, 2^31 / {block_elements:,} = {2**31 // block_elements:,}")
lab.compare("32 bits", -(-(2**31) // block_elements))
all_layers = block_elements * 2 * 28  # K and V of 28 layers side by side
first = -(-(2**31) // all_layers)
print(f"with all 28 layers in one block: block {first:,}, after {first * 16:,} tokens")

# %% [markdown]
# 262,144 blocks of 16 are four million tokens: you would not meet that. But a layout that keeps all layers of a block
# together passes 2^31 after 75 thousand tokens, which is one small GPU. Then a 32-bit product wraps to a negative number,
# and the kernel reads what lies there. vLLM and SGLang have each mended this fault more than once. So: **the block id is
# made 64 bits wide before it is multiplied.**
#
# ## The model, in five rules
#
# 1. **One query a sequence.** This is decode (解码): `q` is `[num_seqs, num_heads, head_dim]`, and so is `out`.
# 2. **What is attended to.** Positions 0 to `seq_len - 1` of its own sequence. The token's own K and V have been written
#    already. A sequence of length 0 gives zeros.
# 3. **Heads.** Consecutive query heads share a KV head: head h reads KV head `h // GROUP`.
# 4. **The sum.** `softmax(q K^T / sqrt(head_dim)) V`. The largest score is subtracted before `exp`, always.
# 5. **Nobody's slots.** Behind a sequence's last token, in its last page, lies anything: in our tests NaN, or what the last
#    owner left. Behind its last page the table's row holds anything: in our tests -1, or an old block id. Only `seq_len`
#    says where the sequence ends.
#
# ## Exercise 2: gather, then attend
#
# Every kernel needs a plain function that it must equal. Yours is for one sequence, in NumPy, in float64, and slow is
# fine. It is the bottom rung of the ladder as well.

# %% ex="attend_gathered"
def attend_gathered(q, keys, values, block_table, seq_len):
    """Attention of one sequence's query.

    q [num_heads, head_dim]. keys, values [num_blocks, block_size, num_kv_heads, head_dim].
    block_table: row of the table, an array; what lies behind the last page is not to be used.

    Returns a new float64 array like q; zeros if seq_len is 0. Changes nothing.
    """
    ### BEGIN SOLUTION
    out = np.zeros(q.shape)
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    group = len(q) // num_kv_heads
    if seq_len:
        spots = [(block_table[p // block_size], p % block_size) for p in range(seq_len)]
        k = np.array([keys[spot] for spot in spots], dtype=np.float64)
        v = np.array([values[spot] for spot in spots], dtype=np.float64)
        for head in range(len(q)):
            scores = k[:, head // group] @ q[head].astype(np.float64) / math.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ v[:, head // group] / weights.sum()
    return out
    ### END SOLUTION

# %% check="attend_gathered"
check("attend_gathered")

# %% [markdown]
# A sanity check, before it becomes the yardstick for everything: with all keys alike, every position must get the same
# weight, so attention is the mean of V.

# %%
plain = lab.best("attend_gathered")
small = make_case([10], block_size=4, kv_heads=1, group=2, head_dim=16)
same_keys = np.where(np.isnan(small.keys), small.keys, 1.0)
rows = np.array([small.values[small.block_tables[0, p // 4], p % 4, 0] for p in range(10)])
print("like the mean of V:", np.allclose(plain(small.q[0], same_keys, small.values,
                                               small.block_tables[0], 10)[0], rows.mean(axis=0)))


def reference(case):
    """The plain function for every sequence."""
    return np.array([plain(case.q[s], case.keys, case.values, case.block_tables[s], int(n))
                     for s, n in enumerate(case.seq_lens)])


def error_of(out, case):
    return f"off by at most {np.abs(out - reference(case)).max():.1e}"

# %% [markdown]
# ## Ten minutes of Triton
#
# A GPU runs many **programs** (程序) at once. A Triton kernel is what *one* of them does. All run the same code, and each
# asks where it is: `tl.program_id(axis)`. A program does not loop over single numbers. It handles **blocks** (here: small
# arrays, not the blocks of the pool!) of them at once.
#
# An argument that is an array arrives as a **pointer** (指针) to its first number. Pointer plus offset, in numbers, is an
# address; pointer plus a block of offsets is a block of addresses, and `tl.load` fetches them all. A **mask** (掩码) says
# which of them: the others are not touched, and give `other`.

# %%
@triton.jit
def copy_page(source, target, block_table, seq_len, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr):
    page = tl.program_id(0)  # the launch has as many programs as there are pages
    block = tl.load(block_table + page)  # one number
    offset = tl.arange(0, BLOCK_SIZE)  # [BLOCK_SIZE]: 0, 1, 2, ...
    d = tl.arange(0, DIM)  # [DIM]
    token = page * BLOCK_SIZE + offset
    known = token < seq_len
    at = (block * BLOCK_SIZE + offset)[:, None] * DIM + d[None, :]  # [BLOCK_SIZE, DIM]
    rows = tl.load(source + at, mask=known[:, None], other=0.0)
    tl.store(target + token[:, None] * DIM + d[None, :], rows, mask=known[:, None])


pool = np.arange(5 * 4 * 2, dtype=np.float32).reshape(5, 4, 2)  # 5 blocks of 4 tokens of 2 numbers
gathered = np.zeros((6, 2), np.float32)
with record() as traffic:
    copy_page[2](pool, gathered, np.array([3, 1], np.int32), 6, BLOCK_SIZE=4, DIM=2)  # [2]: two programs
print(gathered.T)
print({f"{kind} {name}": size for (kind, name), size in traffic.table().items()}, "bytes")

# %% [markdown]
# `kernel[grid](...)` launches it; the grid (网格) says how many programs. Arguments marked `tl.constexpr` are known to the
# compiler: sides of blocks must be, and they are powers of two. `[:, None]` makes a column, as in NumPy. This is all
# that you need:
#
# | | |
# |---|---|
# | `tl.program_id(axis)`, `tl.num_programs(axis)` | where am I, of how many |
# | `tl.arange(0, N)`, `tl.zeros([N], dtype=tl.float32)`, `tl.full([N], value, dtype=...)` | make a block |
# | `tl.load(pointers, mask=..., other=...)`, `tl.store(pointers, values, mask=...)` | memory |
# | `x.to(tl.float32)`, `x.to(tl.int64)` | another type |
# | `tl.sum(x, axis=1)`, `tl.max(x, axis=1)` | along one axis, which goes away |
# | `tl.maximum(a, b)`, `tl.where(condition, a, b)`, `tl.exp2(x)`, `tl.cdiv(a, b)` | element by element |
# | `tl.dot(a, b, input_precision="ieee")` | matrix product, on tensor cores: all sides at least 16, both of one type |
#
# What runs your kernels here is a **stand-in** (替身): `tl` and `triton` come from `kvlab.standin`, a few hundred lines of
# NumPy. It runs one program after the other, on any machine, and it is stricter than a GPU: an address outside an
# array is an error, and so are two programs that write the same number. The source is Triton's: further down the same
# cells go through Triton itself. So three of its rules hold here as well, and the checks ask for them:
#
# - **Only `tl` computes.** NumPy, `math` and Python's `float` do not work on what `tl.load` gives.
# - **A loop changes values, not types.** The compiler translates a loop once. So what the loop adds to has its final type
#   and shape before it: `0.0` and not `0`; `tl.zeros([DIM], dtype=tl.float32)` and not `0.0`, if it becomes a block.
# - **A loop runs to its end.** No `break`, no `continue`, no `return` inside it.
#
# (`input_precision` is for GPUs: without it their tensor cores round fp32 operands to TF32, which keeps 10 bits behind the
# point. The stand-in never does.)

# %% [markdown]
# ## Exercise 3: the naive kernel
#
# L33 2.3's walk, in two passes. One program for each query head (axis 0) and sequence (axis 1). It walks the pages of its
# sequence **twice**: pass 1 finds the largest score; pass 2 adds up the weights `exp(score - largest)` and the weighted
# V. At the end it divides.
#
# Three details. GPUs have `exp2`, not `exp`: `scale_log2e` holds `1 / sqrt(head_dim)` and `log2(e)`, so if the query is
# multiplied by it, `2^score` is what `e^score` would have been. And strides (步长) come as arguments, in numbers: block b
# begins at `b * stride_block`, a token in it is `stride_slot` further, a KV head `stride_head`. Take them as they come, and
# the kernel reads other layouts too: the check gives it one in which a block keeps the tokens of a KV head together. And
# where K and V are fp16, add up in fp32: `.to(tl.float32)` after the load.
#
# On paper first: which numbers does the program of head 5, sequence 1 load for its first page, if GROUP is 3?

# %% ex="naive_kernel"
@triton.jit
def naive_kernel(
    out, q,  # [num_seqs, num_heads, HEAD_DIM], no gaps
    keys, values,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    block_tables,  # int32 [num_seqs, width]: a row is stride_table numbers
    seq_lens,  # int32 [num_seqs]
    scale_log2e, stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr,  # query heads that share a KV head
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """One query head of one sequence. The grid is (num_heads, num_seqs)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    d = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, BLOCK_SIZE)
    mine = (seq * tl.num_programs(0) + head) * HEAD_DIM + d  # of q and of out
    ### BEGIN SOLUTION
    query = tl.load(q + mine).to(tl.float32) * scale_log2e
    in_block = offset[:, None] * stride_slot + (head // GROUP) * stride_head + d[None, :]
    m = -float("inf")
    for page in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)
        known = page * BLOCK_SIZE + offset < seq_len
        at = block * stride_block + in_block
        k = tl.load(keys + at, mask=known[:, None], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(query[None, :] * k, axis=1), -float("inf"))
        m = tl.maximum(m, tl.max(scores, axis=0))
    norm = 0.0
    acc = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)
        known = page * BLOCK_SIZE + offset < seq_len
        at = block * stride_block + in_block
        k = tl.load(keys + at, mask=known[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=known[:, None], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(query[None, :] * k, axis=1), -float("inf"))
        p = tl.exp2(scores - m)
        norm += tl.sum(p, axis=0)
        acc += tl.sum(p[:, None] * v, axis=0)
    acc = acc / tl.where(seq_len > 0, norm, 1.0)
    tl.store(out + mine, acc)
    ### END SOLUTION

# %% check="naive_kernel"
check("naive_kernel")

# %% [markdown]
# (The question on paper: head 5 reads KV head `5 // 3`, which is 1. The block id is number `1 * stride_table` of
# `block_tables`. For token i of the page and each d it loads number `block * stride_block + i * stride_slot + 1 *
# stride_head + d` of K, as far as i is below `seq_len`.)
#
# Run it, on two sequences whose pages are shuffled, and with NaN in every slot that nobody owns:

# %%
two = make_case([21, 50], block_size=8, kv_heads=2, group=3, head_dim=32)


def run(kernel, case, launch=ours.launch_by_head, **options):
    """Launch a kernel: what it gives, and what it asked the memory for."""
    out = np.full_like(case.q, np.nan)
    with record() as traffic:
        launch(kernel, out, *case, **options)
    return out, traffic


naive_out, naive_traffic = run(lab.best("naive_kernel"), two)
print(error_of(naive_out, two))
print("programs:", naive_traffic.programs, "  bytes loaded:", requested(naive_traffic))

# %% [markdown]
# You may have wondered about the mask on V. The score of a slot that nobody owns is set to -inf, so its weight is 0.
# Why mask V as well?

# %%
print("0 * NaN =", 0.0 * math.nan, "   0 * inf =", 0.0 * math.inf)

# %% [markdown]
# Nobody's slots hold what the last owner has left, or what was never set. Most of the time it is harmless, and the
# output is right. One day it is a NaN. (In FlashInfer's pull request 4971 a faster way to load pages brings such rows in
# unmasked. It sets them to zero before they are multiplied, for V; for K it need not. Why not? Exercise 8 asks.)
#
# Break the rule and see: take the mask off your kernel's load of V and check it again. (Then put it back.)
#
# ## One pass: online softmax
#
# K is read twice only because the largest score must be known before weights are added up. Must it? Say the scores
# come two at a time, `2 5`, then `7 1`. With base 2:
#
# | | largest | total |
# |---|---|---|
# | after `2 5` | 5 | 2^(2-5) + 2^(5-5) = 1.125 |
# | after `7 1` | 7 | 1.125 × **2^(5-7)** + 2^(7-7) + 2^(1-7) = ? |
#
# Weights so far were taken relative to 5. Times 2^(5-7) they are relative to 7. That factor is called **alpha**. What
# is the total? And what would two passes have given?

# %%
print("one pass: ", 1.125 * 2.0 ** (5 - 7) + 2.0 ** (7 - 7) + 2.0 ** (1 - 7))
print("two passes:", sum(2.0 ** (score - 7) for score in (2, 5, 7, 1)))

# %% [markdown]
# Equal. The same factor goes onto the weighted sum of V. This is **online softmax** (在线 softmax): three things are kept,
# the largest score, the total, and the result, and after every page all three are right for what has been seen.
#
# **How to read the figure.** Left: a bar is the score of a position, and the step reveals more of them. Hatched bars are
# this step's tile; the dashed line is the running maximum. Below stands the physical block that each score was read from. Right:
# the first four numbers of the result so far, and, as diamonds, where they will end. Move the step: **how far do the bars
# jump when alpha is far from 1?** Then change the tile: it may be a page of four, or half of one, or two and a half.

# %% fold="yes"
from kvlab.lab.scenes.attention import walk

walked = make_case([27], block_size=4, kv_heads=1, group=1, head_dim=16, seed=85)
walks = {str(t): walk(walked, 0, 0, t) for t in (2, 4, 10)}


def at_step(step, tile):
    frames = walks[tile]
    return draw.walk_frame(frames, min(step, len(frames) - 1), walked.block_tables[0].tolist(), 4, int(tile))


last = len(walks["4"]) - 1
sliders(at_step, "One query's scores over 27 positions as bars, tile by tile, with the running maximum, and the first "
        "numbers of the result so far beside their final values.", step=(0, last, 3), tile=(list(walks), "4"))

# %% [markdown]
# The first page is a special case that needs no code: `largest` is -inf, so alpha is `2^(-inf)`, which is 0, and there is
# nothing yet to rescale. (But `-inf - -inf` is NaN. Could that happen here? Only in a page without any token, and the
# walk has none. In lab 11 it can.)
#
# ## Exercise 4: online softmax
#
# The same arguments, the same grid. One walk, K and V each read once: this is the kernel of L33 2.3.

# %% ex="online_softmax_kernel"
@triton.jit
def online_softmax_kernel(
    out, q, keys, values, block_tables, seq_lens,
    scale_log2e, stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):
    """As naive_kernel, in one pass over the pages."""
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    d = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, BLOCK_SIZE)
    mine = (seq * tl.num_programs(0) + head) * HEAD_DIM + d
    ### BEGIN SOLUTION
    query = tl.load(q + mine).to(tl.float32) * scale_log2e
    in_block = offset[:, None] * stride_slot + (head // GROUP) * stride_head + d[None, :]
    m = -float("inf")
    norm = 0.0
    acc = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)
        known = page * BLOCK_SIZE + offset < seq_len
        at = block * stride_block + in_block
        k = tl.load(keys + at, mask=known[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=known[:, None], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(query[None, :] * k, axis=1), -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=0))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new)
        norm = norm * alpha + tl.sum(p, axis=0)
        acc = acc * alpha + tl.sum(p[:, None] * v, axis=0)
        m = m_new
    acc = acc / tl.where(seq_len > 0, norm, 1.0)
    tl.store(out + mine, acc)
    ### END SOLUTION

# %% check="online_softmax_kernel"
check("online_softmax_kernel")

# %%
online_out, online_traffic = run(lab.best("online_softmax_kernel"), two)
print(error_of(online_out, two))
for name, traffic in (("naive", naive_traffic), ("online", online_traffic)):
    print(f"{name:7} bytes loaded:", requested(traffic))

# %% [markdown]
# K has halved. What is left is the larger part: three query heads share a KV head here, and each of their programs reads
# that head's K and V for itself. On a 7B it is seven.
#
# ## One program for the group
#
# So let **one program do all heads that share a KV head** (分组查询注意力, GQA). Three things change together:
#
# - The query is a matrix `[ROWS, HEAD_DIM]`, a row a head. Then `q K^T` is a matrix product, `tl.dot`, and runs on tensor
#   cores (张量核心). Those want at least 16 rows, so a group of 7 is padded: `ROWS` is 16, and rows 7 to 15 are nobody's. They
#   must not be stored: behind your group lies the next one.
# - `largest` and `total` become one number a row.
# - **The tile (瓦片) is no longer the page.** A page of 16 tokens is a small bite; the hardware likes 64. So the loop takes
#   `TILE` tokens at a time, and *each token looks up its own block*: `token // BLOCK_SIZE` is now a block of numbers, and
#   one `tl.load` fetches all the ids. The block size can suit the memory manager, and the tile the hardware.
#
# ## Exercise 5: the packed kernel
#
# One program for each KV head (axis 0) and sequence (axis 1). K is needed as `[HEAD_DIM, TILE]` for `tl.dot(query, k)`: load
# it in that shape, with the token along the columns. The scale may be put onto the scores, after the product.

# %% ex="gqa_packed_kernel"
@triton.jit
def gqa_packed_kernel(
    out, q, keys, values, block_tables, seq_lens,
    scale_log2e, stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr,  # ROWS >= GROUP: a power of two, at least 16
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # tokens of a step, whatever the block size
):
    """All query heads of one KV head of one sequence. The grid is (num_kv_heads, num_seqs)."""
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    d = tl.arange(0, HEAD_DIM)
    row = tl.arange(0, ROWS)
    ### BEGIN SOLUTION
    head = (seq * tl.num_programs(0) + kv_head) * GROUP + row
    mine = head[:, None] * HEAD_DIM + d[None, :]
    is_head = row[:, None] < GROUP
    query = tl.load(q + mine, mask=is_head, other=0.0)
    m = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    norm = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for first in range(0, seq_len, TILE):
        token = first + tl.arange(0, TILE)
        known = token < seq_len
        page = block_tables + seq * stride_table + token // BLOCK_SIZE
        block = tl.load(page, mask=known, other=0).to(tl.int64)
        at = block * stride_block + token % BLOCK_SIZE * stride_slot + kv_head * stride_head
        k = tl.load(keys + at[None, :] + d[:, None], mask=known[None, :], other=0.0)
        v = tl.load(values + at[:, None] + d[None, :], mask=known[:, None], other=0.0)
        scores = tl.dot(query, k, input_precision="ieee") * scale_log2e
        scores = tl.where(known[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(scores - m_new[:, None])
        norm = norm * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    acc = acc / tl.where(seq_len > 0, norm, 1.0)[:, None]
    tl.store(out + mine, acc, mask=is_head)
    ### END SOLUTION

# %% check="gqa_packed_kernel"
check("gqa_packed_kernel")

# %%
packed = lab.best("gqa_packed_kernel")
packed_out, packed_traffic = run(packed, two, ours.launch_packed)
print(error_of(packed_out, two))
for name, traffic in (("naive", naive_traffic), ("online", online_traffic), ("packed", packed_traffic)):
    print(f"{name:7} {traffic.programs:3} programs, bytes loaded:", requested(traffic))

# %% [markdown]
# ## Exercise 6: the launch
#
# A kernel knows nothing of arrays: somebody has to hand it the grid, the strides and the sizes. This function is what the
# engine will call, once a layer and step. Use `packed` from the cell above (it is your kernel, or ours), and a `TILE` of
# 64. So far `ours.launch_packed` has done this for you; here it is barred.

# %% ex="paged_attention"
def paged_attention(q, keys, values, block_tables, seq_lens):
    """Launch the packed kernel: attention of one query a sequence.

    q [num_seqs, num_heads, head_dim]; keys, values [num_blocks, block_size, num_kv_heads,
    head_dim] of q's dtype; block_tables int32 [num_seqs, width]; seq_lens int32 [num_seqs].
    All without gaps. Returns a new array like q.
    """
    ### BEGIN SOLUTION
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    out = np.zeros_like(q)
    per_token = num_kv_heads * head_dim
    packed[num_kv_heads, num_seqs](
        out, q, keys, values, block_tables, seq_lens,
        math.log2(math.e) / math.sqrt(head_dim),
        block_tables.shape[1], block_size * per_token, per_token, head_dim,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=64,
    )
    return out
    ### END SOLUTION

# %% check="paged_attention"
check("paged_attention")

# %% [markdown]
# ## Exercise 7: bytes
#
# Now back to the riddle of the beginning. How many bytes of K and V does each rung ask the memory for, in one layer?
#
# | rung | its programs | what each reads |
# |---|---|---|
# | `"gather"` | | every byte: read from the page, written to the copy, read by attention (once for each KV head) |
# | `"naive"` | num_heads × num_seqs | ? |
# | `"online"` | num_heads × num_seqs | ? |
# | `"packed"` | num_kv_heads × num_seqs | ? |

# %% ex="bytes_moved"
def bytes_moved(rung, seq_lens, num_heads, num_kv_heads, head_dim, dtype_bytes=2):
    """Bytes of K and V that a decode of one layer asks for (for "gather": and writes).

    rung: "gather", "naive", "online" or "packed". seq_lens: a list. Returns a whole number.
    """
    ### BEGIN SOLUTION
    k_of_a_head = sum(seq_lens) * head_dim * dtype_bytes
    if rung == "gather":
        return 3 * 2 * k_of_a_head * num_kv_heads
    if rung == "packed":
        return 2 * k_of_a_head * num_kv_heads
    times = 3 if rung == "naive" else 2
    return times * k_of_a_head * num_heads
    ### END SOLUTION

# %% check="bytes_moved"
check("bytes_moved")

# %% [markdown]
# First the sanity check: the formula against what the kernels were counted to ask for.

# %%
formula = lab.best("bytes_moved")
for name, traffic in (("naive", naive_traffic), ("online", online_traffic), ("packed", packed_traffic)):
    counted = requested(traffic)
    said = formula(name, two.seq_lens.tolist(), 6, 2, 32, dtype_bytes=4)
    print(f"{name:7} formula {said:8,}   counted {counted['K'] + counted['V']:8,}")

# %% [markdown]
# Then the real thing: Qwen2.5-7B, 32 sequences of 2,000 tokens, bf16. All 28 layers of one decode step.

# %% fold="yes"
from kvlab.sizing import GB, model_shape

model, lens = model_shape("Qwen2.5-7B"), [2000] * 32
heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
moved = {rung: formula(rung, lens, heads, kv_heads, dim) for rung in ("gather", "naive", "online", "packed")}
unit = model.num_hidden_layers / GB
once = moved["packed"] * unit
parts = {
    "gather": {"K": once / 2, "V": once / 2, "copies": moved["gather"] * unit - once},
    "naive": {"K": moved["naive"] * unit * 2 / 3, "V": moved["naive"] * unit / 3},
    "online": {"K": moved["online"] * unit / 2, "V": moved["online"] * unit / 2},
    "packed": {"K": once / 2, "V": once / 2},
}
picture(draw.bytes_bars(parts, "GB", "GB that one decode step asks for"),
        "Bars of gigabytes: " + ", ".join(f"{r} {size * unit:.1f}" for r, size in moved.items()))
lab.compare("naive", moved["naive"] / moved["packed"])

# %% [markdown]
# **What to look at.** Order them by length. The naive kernel is the worst of all, though it makes no copy. Reading in place
# pays only together with reading *once*.
#
# **How far to trust it.** These are bytes *asked for*. Between a program and the memory lie caches (L1, L2). The seven
# programs of a group run side by side and read the same pages, and when the second one asks, the L2 cache may have them
# still. So on a GPU the naive kernel moves something between 1 and 10.5 times as much as the packed one from memory, and
# nobody can say from a count where. The packed kernel does not depend on that luck. That is why all serving engines have
# it.
#
# ## Under the roof
#
# Is a decode limited by memory at all? Count the arithmetic: for each query head and position, `head_dim` multiplications
# and additions for the score, and as many for V.

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.primer import GPUS

flops = 4 * heads * dim * sum(lens)
h200 = GPUS["H200"]
figure, ax = plt.subplots(figsize=(9, 2.9), layout="constrained")
draw.times(moved, flops, h200.bandwidth, h200.peak_flops, ax)
picture(figure, f"Microseconds of one layer on an H200, by its data sheet, if all bytes come from memory: packed "
        f"{1e6 * moved['packed'] / h200.bandwidth:.1f}, the arithmetic {1e6 * flops / h200.peak_flops:.1f}.")
print(f"packed: {flops / moved['packed']:.0f} FLOP for each byte; the H200's balance is {h200.balance:.0f}")

# %% [markdown]
# Seven FLOP a byte, where the GPU could do two hundred: even the best rung is far on the memory's side of the roofline
# (屋顶线), and the padding from 7 rows to 16 costs nothing that anybody waits for. (These times are computed, from the data
# sheet: bytes asked for, divided by the memory's bandwidth. No kernel can beat the packed one's bar, because each byte must
# come from memory once. The others would, as far as a cache catches their repeats.)
#
# There is one more thing in the launch. How many programs work?

# %%
for count in (1, 8, 32):
    print(f"{count:3} sequences: {kv_heads * count:4} programs; an H200 has 132 multiprocessors")

# %% [markdown]
# **One sequence alone keeps 4 of 132 multiprocessors busy.** Each can draw a small part of the bandwidth, so the other
# 128 wait. The cure is to cut one sequence's tokens among several programs and to merge what they find, with the same
# alpha. That is the first exercise of lab 11.

# %% [markdown]
# ## What the page size does, and what it does not
#
# L33 9.3-2 asks why scattered reads do not eat the gain, and 8.1-2 says that pages of 1 token ruin coalescing (合并访存), the
# art of asking for neighbours together. The stand-in knows every address, so count. A GPU fetches memory in lines of 128
# bytes. For each load: how many bytes were asked for, and how many lie in the lines that it touches?
#
# The model's own shape: 4 KV heads, head_dim 128. Here numbers have 4 bytes; then a row is 512 bytes. In bf16 it is 256.
# In order: page after page. Shuffled: anywhere in the pool.

# %%
from kvlab.lab.scenes.attention import LINE, SECTOR, lines

found, table_bytes = [], {}
for block_size, in_order in ((16, True), (16, False), (64, False), (1, False)):
    spread = make_case([128], block_size=block_size, kv_heads=4, group=7, head_dim=128, in_order=in_order)
    _, traffic = run(packed, spread, ours.launch_packed, tile=64)
    used, touched = lines(traffic, "keys", LINE)
    order = "in order" if in_order else "shuffled"
    distinct = spread.block_tables.size * spread.block_tables.itemsize
    table_bytes[block_size] = distinct
    found.append((f"{block_size}, {order}", f"{100 * used / touched:.0f}%", f"{distinct} bytes",
                  f"{requested(traffic)['table'] / requested(traffic)['K']:.2%}"))
table(("pages of", "of the lines used", "the block table", "table entries asked for, of K's bytes"), found)
lab.compare("pages of 1", 100 * used / touched)

# %% [markdown]
# **The order of the pages does not matter, and neither does their size.** What has to be contiguous is the *row*: one token's
# K for one KV head, 256 bytes in bf16, which is two whole lines. Lines are filled to the last byte, wherever the rows lie.
# That is the answer to 9.3-2: a decode reads rows, each row fills its lines, and nobody reads half a line. It holds for
# this layout. When would it not? Make the rows small, and the lines are shared with a neighbour who was not asked for:

# %%
from kvlab.standin.memory import Access, Traffic

for numbers, size in ((128, 2), (64, 2), (64, 1), (16, 1)):
    row = np.arange(numbers) + 4 * numbers * np.arange(0, 4000, 7)[:, None]  # one of 4 KV heads, scattered tokens
    one = Traffic([Access("load", "keys", (0, 0, 0), row.ravel(), size)])
    by_line, by_sector = (lines(one, "keys", unit) for unit in (LINE, SECTOR))
    print(f"head_dim {numbers:3}, {size} byte(s) a number: rows of {numbers * size:3} bytes use "
          f"{by_line[0] / by_line[1]:4.0%} of the lines, {by_sector[0] / by_sector[1]:4.0%} of 32-byte sectors")

# %% [markdown]
# (When half a line is not wanted, a GPU fetches only its sectors (扇区) of 32 bytes.) So what *does* a page of 1 cost? The
# table: sixteen times as long as with pages of 16 (L33 8.1-2: tens of times). But each token of a tile looks up its entry
# anyway, so no more bytes are asked for: 4 for every row, whatever the page (in bf16 that is 0.8% of K and V together). The
# bookkeeping on the CPU: a block for every token. The arithmetic of addresses: a lookup for each token of a tile, where a
# large page needs one. And hardware that copies whole tiles by itself (TMA on Hopper and newer) wants large pages; our
# loads do not use it.
#
# So the textbook's advice stands, with another reason. Measurements that others have published: two prefill kernels on an
# AMD GPU take 12 to 18% longer with pages of 1 than of 16 (FlyDSL's pull request 1066). FlashAttention's first paged
# kernel for Blackwell decodes at 0.87 TB/s with pages of 1, 1.35 with 32, and 4.0 with 128, where TMA loads them (its pull
# request 1999). All pages there have rows that fill their lines.
#
# What about the layout of L33 2.2, `[num_blocks, num_kv_heads, head_dim / x, block_size, x]`? It is older, made for a kernel
# in which each *thread* reads whole keys: neighbours in memory are the same 16 bytes of neighbouring tokens. Its V is
# `[..., head_dim, block_size]`. Today's kernels, ours too, let the threads share out a row, and keep the row together.
#
# Count for this layout as well. One instruction loads 16 bytes for each of 32 threads, so in bf16 x is 8. In the layout of
# L33 2.2 they are the first 16 bytes of 32 tokens; where a row stays together, they are two rows of 256 bytes.

# %%
threads, pieces, scattered = np.arange(32), 128 // 8, 7 * np.arange(32)  # pieces of a row; pages that are no neighbours
for size in (16, 1):
    block, slot = scattered[threads // size], threads % size
    cut = (block * 4 * pieces * size + slot) * 8  # the first piece, of KV head 0; counted in numbers of 2 bytes
    token = threads // pieces
    whole = (scattered[token // size] * size + token % size) * 4 * 128 + threads % pieces * 8
    for layout, first in (("L33 2.2", cut), ("a row together", whole)):
        one = Traffic([Access("load", "keys", (0, 0, 0), (first[:, None] + np.arange(8)).ravel(), 2)])
        wanted, fetched = lines(one, "keys", LINE)
        print(f"pages of {size:2}, {layout:14} {wanted} bytes lie in {fetched // LINE:2} lines: {wanted / fetched:4.0%} used")

# %% [markdown]
# In L33 2.2's layout pages of 16 fill the lines, and pages of 1 do break them. (A cache may keep such a line until the next
# instruction asks for its next piece. But until then it takes up room.)
#
# ## The same source under Triton
#
# Your cells ran on a stand-in. Now they go through Triton, if this machine has it: first its interpreter (解释器), then its
# compiler for an H200. The kernel is the one that you wrote.

# %%
from kvlab.lab.under_triton import has_triton, under_triton

if has_triton():
    for kernel, launch in ((lab.best("naive_kernel"), ours.launch_by_head),
                           (lab.best("online_softmax_kernel"), ours.launch_by_head), (packed, ours.launch_packed)):
        standin_out, _ = run(kernel, two, launch)
        triton_out = np.full_like(two.q, np.nan)
        launch(under_triton(kernel), triton_out, *two)
        alike = "the same bits" if np.array_equal(standin_out, triton_out) else error_of(triton_out, two)
        print(f"{kernel.__name__:22} under Triton: {alike}")
else:
    print("Triton is not installed here (it has wheels for Linux only): the stand-in's results stand.")

# %% [markdown]
# **Next: a hint that is lost.** The compiler is told that the strides can be divided by 16. That one fact lets it load
# 16 bytes with one instruction (向量化加载): it knows that a row begins at a multiple of 16 bytes. vLLM lost this hint
# once, by accident, when Triton changed a rule: by its pull request 18161 the kernel was 40% slower, and not one number
# was wrong. Below, your kernel is compiled twice for an H200, in the shape of the 7B, in bf16: once as it is, and once
# without that hint.

# %%
from kvlab.lab.scenes.attention import compiled

(hinted, unhinted), whose = compiled(packed)
print("Figures of:", whose)
table(("", "with the hint", "without"),
      [(label, str(hinted[key]), str(unhinted[key])) for label, key in (
          ("registers of a thread (255 is the most)", "regs"),
          ("instructions that save registers to memory and back", "spill"),
          ("loads of 128 bits", "wide"), ("tensor-core instructions", "mma"),
          ("bytes of shared memory", "shared"))])
print("load instructions by memory space, with the hint:", hinted["loads"])

# %% [markdown]
# **What to look at.** "Without" every number is loaded by itself, each needs an address, the addresses fill the registers,
# and what does not fit goes to memory and back (溢出). Nothing in the output would tell you. That is why this project
# compiles its kernels without a GPU in its tests, and compares these figures with a budget.
#
# The last line answers a question about L33 2.3: it says that the block table is copied into *constant* or *shared* memory
# when the kernel starts. In this kernel no load is from constant memory: table entries come by ordinary global loads,
# like everything else, and the caches do the rest. Could it be otherwise?

# %%
CONSTANT_MEMORY = 64 * 1024  # bytes that a CUDA program may declare
entries = 256 * (32_768 // 16)
print(f"tables of 256 sequences of 32,768 tokens: {4 * entries:,} bytes, {4 * entries / CONSTANT_MEMORY:.0f} times the constant memory")
print(f"one program's own row: {4 * 32_768 // 16:,} bytes, read once from front to back")

# %% [markdown]
# It would not fit. Shared memory would hold one row, but a row is read once from front to back, so keeping it gains little.
# vLLM's and SGLang's Triton kernels read it as yours does.
#
# ## Bit for bit?
#
# L33 8.1-1: paging loses *not one bit* of accuracy. Test it. The same numbers, with pages in order and shuffled, with other
# page sizes, with another tile, and by another rung:

# %%
def bits(case, kernel=packed, launch=ours.launch_packed, **options):
    return run(kernel, case, launch, **options)[0]


shape_of_it = dict(kv_heads=2, group=3, head_dim=32)
in_order = make_case([90, 33], block_size=16, in_order=True, **shape_of_it)
one_page = make_case([90, 33], block_size=128, in_order=True, **shape_of_it)  # each sequence in one piece: contiguous
by_contiguous = bits(one_page)
for what, result in (
    ("pages of 16, in order", bits(in_order)),
    ("pages of 16, shuffled", bits(make_case([90, 33], block_size=16, **shape_of_it))),
    ("pages of 1, shuffled", bits(make_case([90, 33], block_size=1, **shape_of_it))),
    ("tiles of 32, not 16", bits(one_page, tile=32)),
    ("the online kernel", bits(in_order, lab.best("online_softmax_kernel"), ours.launch_by_head)),
):
    apart = np.abs(result - by_contiguous).max()
    print(f"{what:22} {'the same bits' if apart == 0 else f'differs, by at most {apart:.1e}'}")

# %% [markdown]
# So the textbook is right about **paging**: where a token lies changes no bit. And it needs its condition: **the same
# kernel, adding in the same order.** Another tile, another kernel, another number of splits adds the same numbers in another
# order, and floating point notices. An engine that switches kernels by batch size (they all do) gives a sequence other
# last bits in another batch. That has nothing to do with pages. Lab 11 shows how to stop it.
#
# ## Into the engine
#
# Your `paged_attention` now computes the decodes of the engine: every layer, every step, out of the pages that the block
# manager gave out, which other requests share, and which copy-on-write copies. (Prompts are computed as before; so are
# the copies and all the rest.) If one address is wrong, the text is.

# %%
result = lab.run_engine(max_tokens=10)

# %% [markdown]
# In a terminal: `kvlab generate "What is a page?" --with work/10_paged_attention.ipynb`. It is slow: each of your programs is
# walked through by NumPy. The project's own kernels are the same rungs, in `kernels/`, with a split-KV rung and one for
# mixed batches on top; open `kernels/gqa_packed.py`, and you will recognise it.
#
# ## Exercise 8 (extra): catch the fault
#
# Somebody has changed one line of the online kernel. Which **case** would show it? Eight faults:

# %%
from kvlab.standin.faults import FAULTS

for name, (what, right, wrong) in FAULTS.items():
    print(f'{name:7} {what}\n        was:  {right}\n        now:  {wrong}\n')

# %% [markdown]
# A case is a dict: `seq_lens` (a list, 40 tokens in all at most), and if you like
#
# | | default | |
# |---|---|---|
# | `block_size` | 4 | |
# | `kv_heads`, `group`, `head_dim` | 1, 1, 16 | |
# | `scores` | `"random"` | or `"equal"`, `"large"`, `"hot"` (all near +1000), `"cold"` (all near -1000) |
# | `values` | `"positions"` | V of position p is 1 at place p; or `"random"` |
# | `nan` | `True` | nobody's slots hold NaN; `False`: zeros |
# | `spread` | `False` | `True`: blocks lie 2^30 numbers apart |
#
# The check runs the right kernel and the faulty one on your case. They must differ. **One of the eight cannot be caught by
# any case**: for that one return `None`, and know why.

# %% ex="case_for"
def case_for(fault):
    """A case on which the kernel with this fault gives something else than the right one.

    fault: a name out of FAULTS. Returns a dict, or None if there is no such case.
    """
    ### BEGIN SOLUTION
    if fault == "key":
        return None  # its scores are overwritten by -inf
    case = {"seq_lens": [15]}  # the last page is not full
    if fault == "zero":
        case["scores"] = "cold"
    elif fault == "group":
        case |= {"kv_heads": 2, "group": 2}
    elif fault == "narrow":
        case["spread"] = True
    return case
    ### END SOLUTION

# %% check="case_for"
check("case_for")

# %% [markdown]
# A good test set is one that every fault you can think of fails. Our kernels' tests were made so: `tests/kernels/mutants.py`
# has the list.
#
# ## What the textbook says and what we measured

# %%
ledger(("where", "the textbook says", "we found", "verdict", "on the condition that"),
       ("holds", "holds if", "contradicted"), [
    ("L33 2.2, A.1", "token 37, block size 16: block 142, offset 5", f"{place(37, 0, [7, 3, 142], 16, 4, 128)[:2]}",
     True, ""),
    ("L33 2.3", "no copy is needed, so performance is not ruined",
     f"a program a query head asks for {moved['online'] / moved['gather']:.1f} times the bytes of gather; packed, "
     f"for {moved['packed'] / moved['gather']:.2f} times", True,
     "each query head has its own K and V, or the heads of a group are packed, or the caches catch the repeats"),
    ("L33 2.3", "the block table is copied to constant or shared memory",
     f"{hinted['loads']['const']} loads from constant memory: it is read from global memory, through the caches", False, ""),
    ("L33 8.1-1", "not one bit of accuracy is lost", "the same bits, wherever the pages lie", True,
     "the same kernel, adding in the same order: another tile or kernel has other last bits"),
    ("L33 8.1-2", "block size 1: a table tens of times longer",
     f"{table_bytes[1] // table_bytes[16]} times as long as at 16", True, ""),
    ("L33 8.1-2, A.1", "block size 1, or pages that are not neighbours, break coalescing",
     f"{100 * used / touched:.0f}% of the lines used", False, ""),
    ("L33 9.3-2", "scattered reads do not eat the gain", f"{100 * used / touched:.0f}% of the lines used, in any order",
     True, "a row (one token, one KV head) fills whole lines, as in this layout"),
    ("L33 A.1", "each read asks the table first", found[-1][3] + " more bytes asked for", True, ""),
])

# %% [markdown]
# "Contradicted" is about *this* layout, in which a row stays together. In the layout of L33 2.2 a row is cut into pieces of
# 16 bytes, and neighbours on a line are other tokens of the same page: there, small pages do break the lines.
#
# **What is missing** is time. L33 A.1 says that paging costs 3 to 5% of a kernel's time; the paper of PagedAttention says 20
# to 26% for its own kernel. We have measured neither: it takes a GPU. On one, `kvlab bench kernels` reads ordered pages and
# shuffled ones, and compares; no card has run it for this project yet. What we counted are the bytes asked for; what
# the caches made of them is not among it.
#
# **You have built** the walk of a block table, attention that reads pages in place, online softmax, and a kernel that
# reads each byte once; and you know what to distrust: 32-bit offsets, masks on V, the table's tail, and a lost hint.
#
# **Next:** lab 11 gives one sequence to many programs, puts prefill and decode into one launch, and halves the bytes with
# INT8.
