# %% [markdown]
# # Lab 11: Split-KV, mixed batches, INT8 (切分, 混合批, 量化)
#
# Lab 10's best kernel reads every byte once. That is not enough: one sequence alone leaves most of the GPU idle. Here
# you cut a sequence among many programs and merge what they find; you put prefill chunks and decodes into one launch;
# and you store K and V in 8 bits.
#
# It goes with L33 2.3, 4.2 to 4.4, 8.1-1 and A.1, and with PAV 3.1. You need lab 10 (its packed kernel, and its ten minutes of
# Triton), and from lab 08 what a chunk is. You need no GPU, and no Triton either.
#
# **Time.** The whole lab is a stretch lab. Its six core exercises take about 95 minutes, reading another 40. Two more
# exercises are extra. A good place for a break is after exercise 3. Cells that only draw are folded away.

# %%
from kvlab.lab import Lab

lab = Lab("11")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## The launch that does more work, sooner
#
# One user, one document of 32,768 tokens, Qwen2.5-7B on an H200. Every new token reads all of K and V. The packed kernel asks
# for each byte once: nobody can ask for less. Below is a second way. It asks for the same bytes, writes intermediate results
# besides, reads them again, and needs a second launch. We put both into a small model (`split_time`).

# %%
import math

import numpy as np

from kvlab.lab.scenes.mixed import SMS, split_time, workspace_bytes
from kvlab.primer import GPUS

length, sms = 32_768, SMS["H200"]
kv = 2 * 2 * length * 4 * 128  # K and V, 2 bytes, 4 KV heads of 128 numbers: one layer
for title, splits in (("packed", 1), ("the other", 64)):
    print(f"{title:10} {1e6 * split_time(1, length, splits).whole:6.1f} microseconds (model)")
print(f"{'data sheet':10} {1e6 * kv / GPUS['H200'].bandwidth:6.1f} microseconds for {kv:,} bytes, at full bandwidth")

# %% [markdown]
# More bytes, one launch more, and many times as fast. Where does the time go? Not to the memory, and not to arithmetic.
#
# (These are times of a *model*. Two of its numbers are guesses: how much one multiprocessor can draw, which we shall turn, and 3
# microseconds for the second launch. No GPU has measured this lab.)
#
# ## A picture
#
# A GPU is many processors: an H200 has 132 **streaming multiprocessors** (SM, 流式多处理器). A program runs on one of them.
#
# **How to read it.** A square is a multiprocessor. The number in it says how many programs it gets. Dotted is idle.

# %% fold="yes"
from kvlab.lab.draw import mixed as draw
from kvlab.lab.show import ledger, picture, sliders, table

picture(draw.occupancy({"packed": 1 * 4, "64 splits": 1 * 4 * 64}, sms),
        f"Two fields of {sms} squares. Packed: 4 of them have work. With 64 splits all have, one or two programs each.")

# %% [markdown]
# The packed kernel has one program for each sequence and KV head. One sequence, four KV heads: four programs. Each pulls at
# the memory as hard as a multiprocessor can, and 128 others look on.
#
# ## Your predictions
#
# First: not one such user decodes, but 32 together, 32,768 tokens each. How many times as fast is the launch with 64 splits as
# the packed one? (A number below 1 says that it is slower.)
#
# Second: one user again. Each of the 64 splits leaves a result of 128 numbers and one number more for each of the 28 query heads,
# in fp32, and all this is read again. How many percent of K's and V's bytes does that add, for the 32,768 tokens above?
#
# Third: the cache of Qwen2.5-7B goes from bf16 to INT8, with a scale for each token and head, in fp32. How many times as many
# tokens fit into the same pool?
#
# Replace each `None` by a number and run the cell.

# %%
lab.predict("gain", None, unit="times as fast, with 32 sequences")
lab.predict("workspace", None, unit="% more bytes")
lab.predict("tokens", None, unit="times as many tokens")

# %%
extra = 2 * workspace_bytes(1, 28, 128, 64)  # written, and read again
lab.compare("gain", split_time(32, length, 1).whole / split_time(32, length, 64).whole)
lab.compare("workspace", 100 * extra / kv)

# %% [markdown]
# One user gains much, 32 users lose a little: they fill the multiprocessors without splits, and pay for them all the same.
# So *how many* splits is a question about the launch.

# %% [markdown]
# ## Exercise 1: by hand
#
# Take a pencil. One sequence of 8,192 tokens, 4 KV heads, 132 multiprocessors.
#
# 1. How many programs are there with 1 split? With 2, 4, 8, ...?
# 2. We want **two programs for each multiprocessor**, so that one computes while the other waits for memory. What is the
#    smallest power of two that gives them?
# 3. A split of fewer than 256 tokens is not worth its start. How many splits are allowed at most?
#
# Write the rule down. A power of two from 1 to 64: the smallest that gives at least `2 * sms` programs. But no more than
# leave the longest sequence 256 tokens for each split. (One split is always allowed.)

# %% ex="choose_num_splits"
def choose_num_splits(num_seqs, num_kv_heads, max_seq_len, sms):
    """How many splits a decode is launched with: 1, 2, 4, ... or 64.

    max_seq_len: of the longest sequence. sms: multiprocessors of the GPU.
    """
    ### BEGIN SOLUTION
    splits = 1
    while splits < 64:
        enough = num_seqs * num_kv_heads * splits >= 2 * sms
        too_short = max_seq_len < 256 * (2 * splits)
        if enough or too_short:
            break
        splits = 2 * splits
    return splits
    ### END SOLUTION

# %% check="choose_num_splits"
check("choose_num_splits")

# %% [markdown]
# `hint("choose_num_splits")` gives a nudge. Now turn the knobs. **How to read the figure.** A bar is the time of one layer's
# decode with that many splits; hatched is what the second launch and the merge cost. The framed bar is the rule's choice.
# `share` is a guess: how many times its even part of the bandwidth one multiprocessor can draw while others idle. Start with one
# sequence. Then add sequences: **from how many on do splits gain nothing?**

# %% fold="yes"
rule = lab.best("choose_num_splits")


def at(sequences, thousands, share):
    tokens = 1024 * thousands
    found = {s: split_time(sequences, tokens, s, share=share) for s in (1, 2, 4, 8, 16, 32, 64)}
    return draw.split_times(found, rule(sequences, 4, tokens, sms), f"{sequences} sequence{'s' * (sequences > 1)} of {tokens:,} tokens, H200, 4 KV heads")


sliders(at, "Bars of the modelled time of one layer's decode for 1 to 64 splits; the rule's choice is framed.",
        sequences=(1, 64, 1), thousands=(1, 64, 32), share=(1, 8, 2))

# %% [markdown]
# **What to look at.** The same as a table: the model's best number of splits, and the rule's.

# %%
rows, powers = [], (1, 2, 4, 8, 16, 32, 64)
for n in powers:
    times = {s: split_time(n, length, s).whole for s in powers}
    best, chosen = min(times, key=times.get), rule(n, 4, length, sms)
    rows.append((n, best, f"{times[1] / times[best]:.1f} times", chosen, f"{times[chosen] / times[best] - 1:.1%}"))
table(("sequences of 32,768", "best in the model", "as fast as 1 split", "the rule's", "slower than the best by"), rows)

# %% [markdown]
# With one long sequence the bars fall until enough multiprocessors pull to use the whole bandwidth. Then they rise a
# little: each split writes a partial result. With 32 long sequences the launch is full anyway, and splits only cost. The shorter the
# sequence, the less they gain, for the second launch costs what it costs. The rule does not know `share`; that is why it is a rule.
#
# The rule asks for the *longest length* and the *number of sequences*, not for each length. A CUDA graph (lab 13) is captured for
# one number of splits, and then lengths change. So a short sequence may find **more splits than it has tokens for**. Keep that in mind.
#
# ## Merging
#
# Say one sequence's scores are `2 5 7 1` (with base 2), and two programs have two each. With lab 10's words:
#
# | | largest | total | result (mean of V) |
# |---|---|---|---|
# | program 0: `2 5` | 5 | 1.125 | A |
# | program 1: `7 1` | 7 | 1.015625 | B |
#
# The whole is a mean of A and B. With which weights? A stands for a sum of weights of 1.125 · 2^5, B for 1.015625 · 2^7. So each
# program keeps, beside its result, one number: `lse = largest + log2(total)`, the **log-sum-exp** (here with base 2). 2^lse is the sum
# of weights behind the result.

# %%
lse_0, lse_1 = 5 + math.log2(1.125), 7 + math.log2(1.015625)
print("lse:", round(lse_0, 4), round(lse_1, 4))
print("program 0 has", f"{2**lse_0 / (2**lse_0 + 2**lse_1):.4f}", "of the weight; by all four scores:",
      f"{(2**2 + 2**5) / (2**2 + 2**5 + 2**7 + 2**1):.4f}")

# %% [markdown]
# Equal. Nothing is approximated: it is the same sum, in another order.
#
# ## The model, in five rules
#
# 1. **A split** is a run of tokens: split i has tokens `i * split_tokens` up to `(i + 1) * split_tokens`, as far as there are any.
# 2. **It leaves** `result` (divided by its own total) and `lse`, in fp32.
# 3. **An empty split** has `lse` = -inf. Its result is *garbage*: nobody clears the workspace, which holds an earlier step's numbers.
# 4. **Merged** is the mean of the results, weighted with 2^lse. The merged lse is the log2 of the sum of all 2^lse.
# 5. **Nothing but empty splits**: zeros, and an lse of -inf.
#
# ## Exercise 2: merge
#
# In NumPy, for one query head. Mind rule 3: only lse tells that a split is empty, and 0 × NaN is NaN. And 2^lse may be infinite, although the weights are harmless.

# %% ex="merge"
def merge(partial, lse):
    """The results of one query head's splits, as one.

    partial [num_splits, D], lse [num_splits], arrays. Where lse is -inf, partial is garbage.
    Returns (result [D], lse): a new array, and one number. Changes nothing.
    """
    ### BEGIN SOLUTION
    used = np.isfinite(lse)
    if not used.any():
        return np.zeros(partial.shape[1], dtype=partial.dtype), -np.inf
    parts, logs = partial[used], lse[used]
    top = logs.max()
    share = 2.0 ** (logs - top)
    whole = share.sum()
    return (share[:, None] * parts).sum(axis=0) / whole, top + np.log2(whole)
    ### END SOLUTION

# %% check="merge"
check("merge")

# %% [markdown]
# A sanity check: a sequence cut at any place, attention on both sides, merged. `attend` is plain attention over some tokens.

# %%
merged = lab.best("merge")
numbers = np.random.default_rng(0)
q1, k1, v1 = (numbers.normal(size=shape) for shape in ((32,), (20, 32), (20, 32)))


def attend(tokens):
    """(result, lse in base 2) of one query over some tokens."""
    scores = k1[tokens] @ q1 * math.log2(math.e) / math.sqrt(32)
    if not len(scores):
        return np.full(32, np.nan), -np.inf  # garbage
    weights = 2.0 ** (scores - scores.max())
    return weights @ v1[tokens] / weights.sum(), scores.max() + math.log2(weights.sum())


whole = attend(np.arange(20))[0]
for cuts in ([10], [1], [4, 19], [7, 7], [20]):
    parts = [attend(tokens) for tokens in np.split(np.arange(20), cuts)]
    result, _ = merged(np.array([p for p, _ in parts]), np.array([lse for _, lse in parts]))
    print(f"cut at {cuts!s:8} off by {np.abs(result - whole).max():.1e}")

# %% [markdown]
# ## The walk, cut out
#
# The three kernels of this lab differ in *where a walk starts and ends* and in *what each row may see*. The walk itself is that of your
# packed kernel. So here it is, as a function that kernels call. Read it; two things are new. `start` and `end` bound the tokens.
# And `limit` is a number for each row: row r sees the tokens before `limit[r]`.

# %%
from kvlab.standin import mixed as ours
from kvlab.standin import record, tl, triton


@triton.jit
def sweep(
    query,  # [ROWS, HEAD_DIM]
    limit,  # int32 [ROWS]; every row must see a token of the first tile
    start, end,  # tokens start to end - 1
    table,  # pointer to this sequence's row of the block table
    keys, values,  # pointers to number 0 of this KV head in block 0, slot 0
    scale_log2e, stride_block, stride_slot,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):
    """Online softmax -> largest [ROWS], total [ROWS], result [ROWS, HEAD_DIM], not yet divided."""
    d = tl.arange(0, HEAD_DIM)
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        known = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = block * stride_block + token % BLOCK_SIZE * stride_slot
        k = tl.load(keys + slot[None, :] + d[:, None], mask=known[None, :], other=0.0)
        v = tl.load(values + slot[:, None] + d[None, :], mask=known[:, None], other=0.0)
        visible = known[None, :] & (token[None, :] < limit[:, None])
        scores = tl.where(visible, tl.dot(query, k, input_precision="ieee") * scale_log2e, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        alpha = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        result = result * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    return largest, total, result

# %% [markdown]
# ## Exercise 3: the split kernel
#
# One program for each KV head (axis 0), sequence (axis 1) and **split** (axis 2). As in lab 10, GROUP heads are packed and padded
# to ROWS. It stores for each of its heads the result, divided, into `partial`, and the lse into `lse`.
#
# On paper first: `lse` is `[num_seqs, num_heads, num_splits]` without gaps. Where does the lse of sequence s, head h, split i lie?
# (`num_heads` is no argument. But the grid knows how many KV heads there are, and each has GROUP heads.)
#
# `sweep` wants a limit for each row; here every row sees all tokens of the split. (A block with one number everywhere:
# `tl.zeros([ROWS], dtype=tl.int32) + end`.)
#
# A split may be empty. Then -inf must be stored, whatever becomes of `partial`. (What do `largest` and `total` hold after a walk over
# nothing?)

# %% ex="split_kernel"
@triton.jit
def split_kernel(
    partial,  # out: fp32 [num_seqs, num_heads, num_splits, HEAD_DIM], no gaps
    lse,  # out: fp32 [num_seqs, num_heads, num_splits], base 2
    q,  # [num_seqs, num_heads, HEAD_DIM], no gaps
    keys, values,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    block_tables, seq_lens, scale_log2e,
    split_tokens,  # split i has tokens from i * split_tokens on, so many at most
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):
    """A part of one sequence, for one KV head. Grid (num_kv_heads, num_seqs, num_splits)."""
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens + seq)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    ### BEGIN SOLUTION
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, seq_len)
    head = (seq * tl.num_programs(0) + kv_head) * GROUP + row
    is_head = row < GROUP
    query = tl.load(q + head[:, None] * HEAD_DIM + d[None, :], mask=is_head[:, None], other=0.0)
    largest, total, result = sweep(
        query, tl.zeros([ROWS], dtype=tl.int32) + end, begin, end,
        block_tables + seq * stride_table,
        keys + kv_head * stride_head, values + kv_head * stride_head,
        scale_log2e, stride_block, stride_slot, ROWS, HEAD_DIM, BLOCK_SIZE, TILE,
    )
    place = head * num_splits + split
    tl.store(lse + place, largest + tl.log2(total), mask=is_head)  # -inf + log2(0) is -inf
    mean = result / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], mean, mask=is_head[:, None])
    ### END SOLUTION

# %% check="split_kernel"
check("split_kernel")

# %% [markdown]
# Run it: two sequences of very different length, cut into four. `launch_split` makes a workspace full of NaN, and launches.

# %%
from kvlab.lab.scenes.attention import make_case
from kvlab.standin.decode import attend_gathered

split = lab.best("split_kernel")
two = make_case([120, 21], block_size=8, kv_heads=2, group=3, head_dim=32)


def reference(case):
    """Plain attention of every sequence, in float64."""
    return np.array([attend_gathered(case.q[s], case.keys, case.values, case.block_tables[s], int(n))
                     for s, n in enumerate(case.seq_lens)])


with record() as traffic:
    partial, lse = ours.launch_split(split, 4, 32, *two)
out = np.array([[merged(partial[s, h], lse[s, h])[0] for h in range(6)] for s in range(2)])
print("programs:", traffic.programs, "  lse of sequence 1, head 0:", lse[1, 0].round(2))
print(f"off by at most {np.abs(out - reference(two)).max():.1e}")

# %% [markdown]
# Three of the four splits of sequence 1 are empty. What moves, and what does not? The stand-in has counted every byte.

# %%
rows = []
for splits, tokens in ((1, 128), (2, 64), (4, 32), (8, 16)):
    with record() as traffic:
        ours.launch_split(split, splits, tokens, *two)
    asked = traffic.num_bytes("load", "keys", "values")
    left = traffic.num_bytes("store", "partial", "lse")
    rows.append((splits, traffic.programs, f"{asked:,}", f"{left:,}", f"{left / asked:.1%}"))
table(("splits", "programs", "bytes of K and V asked for", "bytes left for the merge", "of K's and V's"), rows)

# %% [markdown]
# K and V are read once, however many splits there are. What grows is the workspace: here it is large because a split has so few
# tokens. That is what the 256 in the rule is for:

# %%
for tokens in (16, 64, 256, 512):
    share = 2 * workspace_bytes(1, 28, 128, 1) / (2 * 2 * tokens * 4 * 128)  # written and read, a split
    print(f"splits of {tokens:4} tokens add {share:6.1%} to the bytes (Qwen2.5-7B, bf16)")

# %% [markdown]
# (A kernel in an engine merges on the GPU, in a second launch: `kernels/split_kv.py` has it, and there each sequence is cut into
# equal parts of its own length. Other engines: vLLM's Triton kernel cuts into 16 segments; FlashAttention-3 and SGLang choose by the number of
# multiprocessors, as you do.)
#
# This is a good place for a break.

# %% [markdown]
# ## One launch for everybody
#
# L33 4.3: to what executes a step on the GPU, a decode is 1 token, a chunk is 512, and both are the same thing. What must a kernel
# be for that? The rows of `q` lie one behind the other, `[T, num_heads, head_dim]`. `query_start_loc` says where each sequence's rows begin: `[0, 1, 6, 7]`
# means one row, five rows, one row.
#
# A program takes a **query block** (查询块): `BLOCK_Q` rows of *one* sequence. All of them share one walk over K and V, so K and V are
# read once for BLOCK_Q rows. How many query blocks are there? The CPU that launches does not want to know (in a CUDA graph it
# cannot). It launches `T // BLOCK_Q + num_seqs` programs, which is always enough, and says: **sequence i's blocks begin at number
# `query_start_loc[i] // BLOCK_Q + i`.** Some numbers are left over, and have nothing to do. By hand, with BLOCK_Q = 2:
#
#     query_start_loc  0 1 6 7             T = 7, so 7 // 2 + 3 = 6 programs: 0 to 5
#     sequence 0       0 // 2 + 0 = 0      block 0
#     sequence 1       1 // 2 + 1 = 1      blocks 1, 2, 3: five rows are three blocks
#     sequence 2       6 // 2 + 2 = ?      block ?; and which number is left over?
#
# **How to read the figure.** Each field is a sequence: down are its rows of q, across its tokens. A row sees what is filled. Left of the
# dashed red line is the context (上下文), computed in earlier steps. A thick frame is one program's walk: it ends at the block's last position.

# %% fold="yes"
from kvlab.lab.scenes.mixed import make_batch, query_blocks

step_pairs = [(1, 9), (5, 12), (1, 17)]
picture(draw.staircase(step_pairs, query_blocks([r for r, _ in step_pairs], 2), unnamed=2),
        "Three sequences: a decode with block 0, a chunk of five after seven tokens with blocks 1 to 3, each row seeing one token more "
        "than the row above, and a decode whose block is for you to name.")

# %% [markdown]
# ## Exercise 4: whose block is it?
#
# Each program knows its number and must find its sequence: the **last one whose blocks begin at or before it**. With 256 sequences it
# should not look at all 256: binary search (二分查找). This is a function that kernels call; `while` and `if` on single
# numbers work in Triton as in Python.

# %% ex="find_sequence"
@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The last sequence i, of num_seqs, with query_start_loc[i] // BLOCK_Q + i <= block.

    query_start_loc: pointer to int32 [num_seqs + 1]. Returns one number.
    """
    ### BEGIN SOLUTION
    known, behind = 0, num_seqs  # known begins at or before block, behind does not
    while behind - known > 1:
        middle = (known + behind) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            known = middle
        else:
            behind = middle
    return known
    ### END SOLUTION

# %% check="find_sequence"
check("find_sequence")

# %% [markdown]
# ## Exercise 5: chunks and decodes in one launch
#
# A program has BLOCK_Q positions, and GROUP heads for each: `ROWS` rows, padded. Row r is position `first + r // GROUP` of the
# chunk, head `r % GROUP` of the group. It sees the context, and the chunk up to its own position, itself
# included. Its number among all rows of `q` is `query_start_loc[seq]` + its position; what lies where in a row is as in exercise 3.
#
# `first` is the block's first position in its chunk. If that is not in the chunk, the program has nothing to do: `return`.

# %%
whose = lab.best("find_sequence")

# %% ex="varlen_kernel"
@triton.jit
def varlen_kernel(
    out, q,  # [T, num_heads, HEAD_DIM], no gaps
    keys, values, block_tables,
    seq_lens,  # int32 [num_seqs]: with this step's tokens, whose K and V are written already
    query_start_loc,  # int32 [num_seqs + 1]
    num_seqs, scale_log2e, stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,  # >= BLOCK_Q * GROUP
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):
    """BLOCK_Q rows of one sequence, for one KV head.

    The grid is (T // BLOCK_Q + num_seqs, num_kv_heads).
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    seq = whose(query_start_loc, num_seqs, block, BLOCK_Q)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    ### BEGIN SOLUTION
    start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - start
    first = (block - (start // BLOCK_Q + seq)) * BLOCK_Q
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    position = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < BLOCK_Q * GROUP) & (position < query_len)
    at = ((start + position) * tl.num_programs(1) * GROUP + head) * HEAD_DIM
    query = tl.load(q + at[:, None] + d[None, :], mask=real[:, None], other=0.0)
    sees = seq_len - query_len + position + 1
    end = tl.minimum(seq_len, seq_len - query_len + first + BLOCK_Q)
    largest, total, result = sweep(
        query, sees, 0, end, block_tables + seq * stride_table,
        keys + kv_head * stride_head, values + kv_head * stride_head,
        scale_log2e, stride_block, stride_slot, ROWS, HEAD_DIM, BLOCK_SIZE, TILE,
    )
    tl.store(out + at[:, None] + d[None, :], result / total[:, None], mask=real[:, None])
    ### END SOLUTION

# %% check="varlen_kernel"
check("varlen_kernel")

# %% [markdown]
# One launch, three sequences; and each row against plain attention over exactly the tokens that it may see:

# %%
varlen = lab.best("varlen_kernel")
batch = make_batch([(1, 50), (20, 44), (1, 13)], block_size=8, kv_heads=2, group=3, head_dim=32)


def run_batch(batch, block_q=4):
    found = np.full_like(batch.q, np.nan)
    with record() as traffic:
        ours.launch_varlen(varlen, found, *batch, block_q=block_q)
    return found, traffic


found, _ = run_batch(batch)
for s, n in enumerate(batch.seq_lens):
    begin, end = batch.query_start_loc[s : s + 2]
    want = np.array([attend_gathered(batch.q[i], batch.keys, batch.values, batch.block_tables[s], int(n - (end - 1 - i)))
                     for i in range(begin, end)])
    print(f"sequence {s}: {end - begin:2} rows, off by at most {np.abs(found[begin:end] - want).max():.1e}")

# %% [markdown]
# How large should BLOCK_Q be? Count K's bytes, and the rows of `tl.dot` that work for nobody:

# %%
rows = []
for block_q in (1, 2, 4, 8, 16):
    _, traffic = run_batch(batch, block_q)
    padded = max(triton.next_power_of_2(3 * block_q), 16)
    blocks = [b for b in query_blocks([1, 20, 1], block_q) if b]
    used = sum(3 * (end - first) for _, first, end in blocks)
    rows.append((block_q, len(blocks), f"{traffic.num_bytes('load', 'keys'):,}", f"{used / (padded * len(blocks)):.0%}"))
table(("BLOCK_Q", "query blocks", "bytes of K asked for", "rows of tl.dot in use"), rows)

# %% [markdown]
# **A trade.** A long chunk wants a large BLOCK_Q: with 16, K is read twice where 20 single rows read it twenty times. A decode has one row, and
# every row of padding beyond it is wasted. One number must serve both, or the engine chooses it by the longest chunk of the step. Ours
# does (`kernels/configs.py`). And a decode in a mixed step has no splits: that is why many engines launch decode-only steps differently.
#
# ## Eight bits
#
# All these kernels wait for bytes. So make the bytes fewer. PAV 3.1 says that a cache of 8 bits has half the bytes in a block, so the pool holds
# twice the tokens.
#
# **INT8** has whole numbers from -127 to 127. A row of K (one token, one KV head) has small and large numbers. Divide it by a **scale** (缩放因子) so that
# its largest magnitude becomes 127, round, and keep the scale beside it.
#
#     a row      0.30  -1.27   0.02     largest magnitude 1.27, scale 1.27 / 127 = 0.01
#     stored       30   -127      2     one byte each
#     read       0.30  -1.27   0.02     stored * scale: off by half a scale at most
#
# Why a scale for *each token and head*? A token can then be written when it comes, without touching its neighbours in the block.
#
# ## Exercise 6: quantise

# %% ex="quantize"
def quantize(x):
    """x [..., D], fp32 or fp16 -> (numbers int8 [..., D], scales float32 [...]).

    x is nearly numbers * scales[..., None]. A row of zeros has scale 0. Changes nothing.
    """
    ### BEGIN SOLUTION
    exact = np.asarray(x, dtype=np.float32)
    scales = np.max(np.abs(exact), axis=-1) / 127
    step = np.where(scales == 0, np.float32(1), scales)
    return np.round(exact / step[..., None]).astype(np.int8), scales
    ### END SOLUTION

# %% check="quantize"
check("quantize")

# %% [markdown]
# How far off? A stored number is off by half a step at most: largest / 254. For a row of similar numbers that is little. For a row
# with one outlier (离群值) it is much, for all the others. **How to read the figure.** For four kinds of rows: the error of q · k, as a
# share of |q| |k|, on average. Hatched: with one scale for all rows together, 64 of which have been made ten times as large.

# %% fold="yes"
from kvlab.lab.scenes.mixed import KINDS, rows_of

eight = lab.best("quantize")
errors = {}
for kind in KINDS:
    x = rows_of(kind)
    x[:64] *= 10
    asks = np.random.default_rng(9).normal(size=(64, 128)).astype(np.float32)
    sizes = np.linalg.norm(asks, axis=1)[:, None] * np.linalg.norm(x, axis=1)[None, :]
    each, scales = eight(x)
    one, scale = eight(x.reshape(-1))
    errors[kind] = {
        what: float((np.abs(asks @ (x - numbers.astype(np.float32) * by).T) / sizes).mean())
        for what, numbers, by in (("a scale for each row", each, scales[:, None]), ("one scale for all", one.reshape(x.shape), scale))
    }
picture(draw.errors(errors, "error of q · k, as a share of |q| |k| (log scale)"),
        "; ".join(f"{kind}: {e['a scale for each row']:.2%} with a scale for each row, {e['one scale for all']:.2%} with one"
                  for kind, e in errors.items()))

# %% [markdown]
# **What to look at.** A scale for each row costs a row of loud numbers nothing to its quiet neighbours: compare the first two pairs. But inside
# a row, one outlier is everybody's outlier. "All but one tiny" looks harmless. Count what became of the tiny ones:

# %%
for kind in KINDS:
    stored, _ = eight(rows_of(kind))
    print(f"{kind:17} {(stored == 0).mean():5.1%} of the numbers are stored as 0")

# %% [markdown]
# What that does to an answer, only answers can tell: an engine's INT8 is judged by the model's scores on a test set. What it does to *memory*
# is arithmetic:

# %%
from kvlab.sizing import GIB, kv_bytes_per_token, model_shape, num_gpu_blocks

shape = model_shape("Qwen2.5-7B")
dims = shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim
rows, blocks = [], {}
for name, dtype_bytes, scale_bytes in (("bf16", 2, 0), ("INT8, no scales", 1, 0), ("INT8, a scale for each token and head", 1, 4)):
    token = kv_bytes_per_token(*dims, dtype_bytes, scale_bytes)
    # on 24 GiB; 2 GiB for activations and 0.5 for CUDA graphs are assumed
    blocks[name] = num_gpu_blocks(24 * GIB, 0.9, shape.weight_bytes(), 2 * GIB, GIB // 2, 16 * token)
    rows.append((name, f"{token:,}", f"{blocks[name]:,}", f"{blocks[name] / blocks['bf16']:.3f}"))
table(("K and V in", "bytes of a token", "num_gpu_blocks of 16, on 24 GiB", "times as many"), rows)
lab.compare("tokens", blocks["INT8, a scale for each token and head"] / blocks["bf16"])

# %% [markdown]
# Not quite twice: a scale of 4 bytes stands beside 128 numbers of one byte. With FP8 and one scale for a whole layer, which is PAV's case, it
# *is* twice. And with a small head_dim?

# %%
for head_dim in (128, 64, 32):
    print(f"head_dim {head_dim:3}: {2 * head_dim / (head_dim + 4):.2f} times as many tokens")

# %% [markdown]
# ## Exercise 7 (extra): the walk over INT8
#
# A kernel could multiply every number by its scale after loading it: D products for each row. It need not. One row has *one* scale, so
#
#     q · (scale * k) = scale * (q · k)              the scale may wait until after the product
#     weight * (scale * v) = (weight * scale) * v    or go onto the weight
#
# Copy the loop of `sweep`, and change it accordingly. Scales lie in `[num_blocks, BLOCK_SIZE, num_kv_heads]`: slot n's at `key_scales + n * stride_scale`, with n counted in
# tokens. Two traps: a dead slot's scale is NaN here; and there is one sum that V's scale must not get into.

# %% ex="sweep_int8"
@triton.jit
def sweep_int8(
    query, limit, start, end, table,
    keys, values,  # int8
    key_scales, value_scales,  # fp32, pointers to this KV head's scale in slot 0
    scale_log2e, stride_block, stride_slot, stride_scale,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):
    """As sweep, over int8 keys and values with their scales."""
    d = tl.arange(0, HEAD_DIM)
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    ### BEGIN SOLUTION
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        known = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        at = block * stride_block + token % BLOCK_SIZE * stride_slot
        slot = block * BLOCK_SIZE + token % BLOCK_SIZE
        k_scale = tl.load(key_scales + slot * stride_scale, mask=known, other=0.0)
        v_scale = tl.load(value_scales + slot * stride_scale, mask=known, other=0.0)
        k = tl.load(keys + at[None, :] + d[:, None], mask=known[None, :], other=0)
        v = tl.load(values + at[:, None] + d[None, :], mask=known[:, None], other=0)
        scores = tl.dot(query, k.to(query.dtype), input_precision="ieee")
        scores = scores * scale_log2e * k_scale[None, :]
        visible = known[None, :] & (token[None, :] < limit[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        top = tl.maximum(largest, tl.max(scores, axis=1))
        alpha = tl.exp2(largest - top)
        weights = tl.exp2(scores - top[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        scaled = (weights * v_scale[None, :]).to(query.dtype)
        result = result * alpha[:, None] + tl.dot(scaled, v.to(query.dtype), input_precision="ieee")
        largest = top
    ### END SOLUTION
    return largest, total, result

# %% check="sweep_int8"
check("sweep_int8")

# %%
walk8 = lab.best("sweep_int8")
k8, k8_scales = eight(np.nan_to_num(two.keys))
v8, v8_scales = eight(np.nan_to_num(two.values))
out8 = np.full_like(two.q, np.nan)
with record() as traffic:
    ours.launch_int8(ours.with_sweep(walk8), out8, two.q, k8, v8, k8_scales, v8_scales, two.block_tables, two.seq_lens)
stored = two._replace(keys=k8 * k8_scales[..., None], values=v8 * v8_scales[..., None])
print(f"against attention over what is stored: off by {np.abs(out8 - reference(stored)).max():.1e}")
print(f"against attention over fp32:           off by {np.abs(out8 - reference(two)).max():.1e}")
print({name: traffic.num_bytes("load", name) for name in ("keys", "key_scales")}, "bytes; in fp32, K had",
      f"{4 * traffic.num_bytes('load', 'keys'):,}")

# %% [markdown]
# Keep the two errors apart. The first is the kernel's: it must be tiny, and a fault in the kernel shows there. The second is the price of
# 8 bits, and no kernel can mend it.
#
# ## Bit for bit?
#
# L33 8.1-1 says that paging loses not one bit. Lab 10 found: the same kernel, adding in the same order, gives the same bits wherever the
# pages lie. Now there are splits. One sequence, alone and beside a longer one, with the number of splits that the launch chooses:

# %%
def equal_parts(case, splits):
    """Split the longest sequence into equal parts; the others are cut at the same places."""
    tokens = -(-int(case.seq_lens.max()) // splits)
    partial, lse = ours.launch_split(split, splits, tokens, *case)
    return np.array([[merged(partial[s, h], lse[s, h])[0] for h in range(case.q.shape[1])] for s in range(len(case.q))])


def only(case, s):
    """One of its sequences alone."""
    return case._replace(q=case.q[s : s + 1], block_tables=case.block_tables[s : s + 1], seq_lens=case.seq_lens[s : s + 1])


pair = make_case([100, 230], block_size=16, kv_heads=1, group=4, head_dim=32)
alone, beside = equal_parts(only(pair, 0), 4)[0], equal_parts(pair, 4)[0]
print("the same bits" if np.array_equal(alone, beside) else f"differs, by at most {np.abs(alone - beside).max():.1e}")

# %% [markdown]
# The sequence is the same, its pages are the same, and its bits are not: **somebody else came into the batch, and the cuts moved.** Mostly nobody
# notices. Now and then two logits are nearly equal, and the text goes another way; then a test fails that nobody can repeat. Engines have
# a switch for it (vLLM: batch invariance, 批不变性; SGLang: deterministic inference with a fixed split). What does it cost? Splits that are too
# short for one batch, too long for another.
#
# ## Exercise 8 (extra): the same bits in any batch
#
# Cut every sequence every `SPLIT_TOKENS` tokens, whoever else is there. How many splits there are may depend on the batch: those behind a
# sequence's end are empty. This function is what the engine will call. Use `split`, `merged`, and `launch_split(kernel, num_splits, split_tokens,
# q, keys, values, block_tables, seq_lens)`, which returns `partial` and `lse`.
#
# (The order in which the *merge* adds counts too. If it takes the empty ones along, does it add in the same order?)

# %%
from kvlab.standin.mixed import launch_split

SPLIT_TOKENS = 32

# %% ex="decode_attention"
def decode_attention(q, keys, values, block_tables, seq_lens):
    """Attention of one query a sequence; the bits of a sequence depend on nobody else.

    q [num_seqs, num_heads, head_dim]; keys, values [num_blocks, block_size, num_kv_heads,
    head_dim]; block_tables int32 [num_seqs, width]; seq_lens int32 [num_seqs], maybe none, maybe 0.
    Returns a new array like q.
    """
    ### BEGIN SOLUTION
    out = np.empty_like(q)
    counts = [-(-int(n) // SPLIT_TOKENS) for n in seq_lens]
    launched = max([1, *counts])
    partial, lse = launch_split(split, launched, SPLIT_TOKENS, q, keys, values, block_tables, seq_lens)
    for s, live in enumerate(counts):
        for h in range(q.shape[1]):
            out[s, h], _ = merged(partial[s, h, :live], lse[s, h, :live])
    return out
    ### END SOLUTION

# %% check="decode_attention"
check("decode_attention")

# %%
decode = lab.best("decode_attention")
alone, beside = decode(*only(pair, 0))[0], decode(*pair)[0]
print("alone and beside:", "the same bits" if np.array_equal(alone, beside) else "other bits")
print(f"off by at most {np.abs(decode(*pair) - reference(pair)).max():.1e}")

# %% [markdown]
# ## Into the engine
#
# Your function computes the decodes of the engine: every layer, every step, out of pages that other requests share. Prompts are computed as
# before.

# %%
result = lab.run_engine(max_tokens=8)

# %% [markdown]
# In a terminal: `kvlab generate "What is a page?" --with work/11_split_and_mixed.ipynb`.
#
# ## The same source under Triton
#
# If Triton is installed here, your kernels go through its interpreter as they are:

# %%
from kvlab.lab.under_triton import has_triton, under_triton

if has_triton():
    mine = ours.launch_split(split, 4, 32, *two)
    with np.errstate(divide="ignore"):  # log2(0) of an empty split
        theirs = ours.launch_split(under_triton(split), 4, 32, *two)
    print("split_kernel: ", "the same bits" if all(map(np.array_equal, mine[1:], theirs[1:])) else "other bits",
          f"in lse; results off by {np.nanmax(np.abs(mine[0] - theirs[0])):.1e}")
    other = np.full_like(batch.q, np.nan)
    ours.launch_varlen(under_triton(varlen), other, *batch)
    print("varlen_kernel:", "the same bits" if np.array_equal(found, other) else f"off by {np.abs(found - other).max():.1e}")
else:
    print("Triton is not installed here (it has wheels for Linux only): the stand-in's results stand.")

# %% [markdown]
# ## What the textbook says and what we measured

# %%
def with_pages(block_size, in_order):
    shuffled = make_case([100, 230], block_size=block_size, kv_heads=1, group=4, head_dim=32, in_order=in_order)
    return decode(*shuffled)


same = all(np.array_equal(with_pages(16, True), with_pages(*how)) for how in ((16, False), (1, False), (64, True)))
ledger(("where", "the textbook says", "we found", "verdict", "on the condition that"),
       ("holds", "holds if", "contradicted"), [
    ("L33 2.3", "a thread block takes one or more query heads",
     f"then one sequence keeps {4 / sms:.0%} of an H200's multiprocessors busy; with 64 splits, all", True,
     "there are sequences enough; else a sequence is cut as well"),
    ("L33 4.3", "to the GPU a decode is 1 token and a chunk is 512: the same thing",
     "one launch computes both, right to rounding", True, "the kernel was written for it; the best BLOCK_Q is not the same for both"),
    ("L33 8.1-1", "not one bit of accuracy is lost",
     f"{'the same bits' if same else 'other bits'} wherever pages lie; other bits when the number of splits follows the batch", True,
     "the cuts, and the order of the merge, depend on the sequence alone"),
    ("PAV 3.1", "8 bits: twice the tokens", f"{blocks['INT8, a scale for each token and head'] / blocks['bf16']:.2f} times", True,
     "the scales are few, such as one a layer; with a scale for each token and head it is less"),
])

# %% [markdown]
# **What is missing** is time. All microseconds above are a model's, with two guesses in it. `kvlab bench kernels` measures split and varlen
# kernels where there is a GPU; no figures of it exist yet (`kernels/README.md`). L33 A.1's 3 to 5% and the textbook's words on pages of 1 token (8.1-2)
# wait for the same card; lab 10 has what can be said about them by counting bytes.
#
# **You have built** a launch that fills the GPU for one sequence, an exact merge, one kernel for chunks and decodes, and a cache of 8 bits; and you
# know what to distrust: a workspace that nobody clears, a scale in the wrong sum, and bits that depend on one's neighbours.
#
# **Next:** lab 12 puts a whole model onto these pages.
