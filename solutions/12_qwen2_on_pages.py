# %% [markdown]
# # Lab 12: Qwen2 on pages (分页上的 Qwen2)
#
# Blocks, tables, budgets, kernels: so far the model itself was a box. In this lab you open it. You write what stands between
# the matrix products of Qwen2: RoPE, RMSNorm, attention over pages, and the flat batch that carries many requests through one
# forward pass. The result must equal `transformers`, and then it serves requests in the engine.
#
# It goes with L33 2.2, 2.3, 3.4, 4.3, 8.1-1 and 8.2, and with PAV 3.1. You need two ideas from earlier labs: what a block table (块表) is (lab
# 03), and what a chunk is (lab 08). You need no GPU. Tensors of PyTorch you should have seen.
#
# **Time.** The seven core exercises take about 105 minutes, reading and looking at the figures another 40. A good place for a
# break is after exercise 5. An eighth exercise is extra. Cells that only draw or count are folded away.

# %%
from kvlab.lab import Lab

lab = Lab("12")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## The mask that nobody missed
#
# A causal mask (因果掩码) keeps a token from looking at those that come after it. Every text on transformers says that without it nothing
# works. We have removed it: in the prompt, every token now sees the whole prompt, its own future included. Then we ask both models a
# question. (The model is the small one that we ship: a real Qwen2, trained on a glossary of this course.)

# %%
import math

import torch
import torch.nn.functional as F

from kvlab.lab.scenes.decoder import FAULTS, TinyRun, first_difference, spread, text_of, tokens_of, with_fault
from kvlab.model.batch import FlatBatch

QUESTION = "What is external fragmentation?"
right = with_fault("").answer(QUESTION)
unmasked = with_fault("mask").answer(QUESTION)
print("with the mask:   ", text_of(right))
print("without the mask:", text_of(unmasked))
print("first token that differs:", first_difference(unmasked, right))

# %% [markdown]
# Not one word has changed. So is the mask superfluous? No. The model was broken, and **the text did not tell**.
#
# That is the theme of this lab. Here are twelve changes that people have made to a model by mistake, one at a time.

# %%
for name, (what, _) in FAULTS.items():
    print(f"{name:8} {what}")

# %% [markdown]
# ## A picture
#
# **How to read it.** The two halves of one layer; Qwen2 has 24 to 80 of them, ours has 4. `x` is a matrix: a row for each token of
# the step, of all requests together. White boxes work on each row for itself. They do not know which request a row belongs to, or where it
# stands. **Thick, hatched boxes do.** The line above is the residual (残差): what goes past the boxes and is added at the end.

# %% fold="yes"
from kvlab.lab.draw import decoder as draw
from kvlab.lab.show import ledger, picture, sliders, table

picture(draw.layer_flow(), "First half: x, RMSNorm, the matrices of q, k and v, RoPE, the write of K and V, attention over "
        "pages, the matrix o, and x is added. Second half: RMSNorm, gate and up, SiLU of gate times up, down, and x is added. "
        "RoPE, the write and attention are hatched.")

# %% [markdown]
# So the whole difference between a model for one request and a model that serves hundreds is in three boxes, and in the lists that
# tell them who is who: the positions, the slots, where each request's rows begin, how long each request is, and the block tables. The matrices do not notice.
#
# ## Your predictions
#
# First: each of the twelve faults answers the question above, greedily (贪心), in 40 tokens at most. In how many of the twelve does **at least one word** change?
#
# Second: "shift" makes every position 1,000 too large: RoPE turns the first token as if it were the 1,001st. The right logits after this question
# lie between -8 and 21. By how much does the largest change?
#
# Third: a prompt of 8,192 tokens goes through Qwen2.5-7B in one step. Somebody computes logits (fp32) for all its rows, not for the last one.
# How many GB are they? The vocabulary has about 150,000 tokens. (For comparison: the K and V of the whole prompt are 0.47 GB.)
#
# Replace each `None` by a number and run the cell.

# %%
lab.predict("faults", None, unit="of 12 change a word")
lab.predict("shift", None, unit="(largest change of a logit)")
lab.predict("logits", None, unit="GB of logits")

# %% [markdown]
# ## Exercise 1: by hand
#
# Attention compares q and k by a dot product, and a dot product knows no order. So the position must be put into q and k. **RoPE**
# (旋转位置编码) does it by turning. The D numbers of a head are D/2 pairs. Pair i of a token at position p is turned by
#
# $$\text{angle} = p \cdot \theta^{-2i/D} \quad \text{radians}$$
#
# like the hand of a clock: pair 0 is the fastest. Take a pencil. D is 8, theta is 10,000:
#
# 1. By how much does pair 0 turn with each position? Pair 1? Pair 3?
# 2. The pair (1, 0) is pair 1 of a token at position 3. What does it become?
# 3. A query (1, 0) at position 5, a key (1, 0) at position 2, pair 0. What is their dot product after turning?
#
# A minute for each; the cell behind the check prints the answers. Then write it down for any pair. (Turning (a, b) by an angle gives a cos - b sin and a sin + b cos.)

# %% ex="turn_pair"
def turn_pair(a, b, position, pair, head_dim, theta):
    """Turn one pair of numbers, as RoPE does.

    a, b: the pair. position: of the token in its sequence. pair: which one, from 0 to
    head_dim / 2 - 1.

    Returns what a and b become.
    """
    ### BEGIN SOLUTION
    angle = position * theta ** (-2 * pair / head_dim)
    cos, sin = math.cos(angle), math.sin(angle)
    return a * cos - b * sin, a * sin + b * cos
    ### END SOLUTION

# %% check="turn_pair"
check("turn_pair")

# %% [markdown]
# Stuck? `hint("turn_pair")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("turn_pair")` is your function if it passes its check, and ours if not. So you can read on without having solved
# everything. It looks at the moment when its cell runs: if you solve an exercise later, run the cells below it again.

# %%
turn_one = lab.best("turn_pair")
print("1. pairs 0, 1, 3 turn a position by", [round(math.atan2(*turn_one(1, 0, 1, i, 8, 10_000)[::-1]), 6) for i in (0, 1, 3)])
print("2. pair 1 at position 3:", turn_one(1.0, 0.0, 3, 1, 8, 10_000))


def dot_of(query_at, key_at, pair=0):
    q, k = turn_one(1.0, 0.0, query_at, pair, 8, 10_000), turn_one(1.0, 0.0, key_at, pair, 8, 10_000)
    return q[0] * k[0] + q[1] * k[1]


for query_at, key_at in ((5, 2), (6, 3), (105, 102), (100_005, 100_002)):
    print(f"3. query at {query_at:6}, key at {key_at:6}: dot product {dot_of(query_at, key_at):.6f}, cos(3) is {math.cos(3):.6f}")

# %% [markdown]
# **The dot product depends only on the distance.** Both hands turn; the angle between them is what counts. Move the sliders: first
# `position`, and watch the hands and the dot products. Then `distance`. Which pair can tell a distance of 1 from 2? Which one can tell 10 from 500?

# %% fold="yes"
def hands(position, distance):
    return draw.circles(position + distance, position, 32, 10_000, (0, 3, 8, 15))


sliders(hands, "Four circles, for pairs 0, 3, 8 and 15 of a head of 32: the hands of a query and a key, and their dot product. Fast pairs tell "
        "small distances apart, slow pairs large ones.", position=(0, 60, 4), distance=(0, 512, 5))

# %% [markdown]
# Pair 0 tells 1 from 2, but it goes round every 2π positions and cannot count its rounds. Pair 8 hardly notices 1 or 2, and tells 10 from 500. Pair 15 needs thousands. A head has
# all of them.
#
# This is what makes pages, prefix caching and preemption possible: a key is turned **once**, by its own position, and then it lies in its slot for
# whoever comes. No later token changes it. It also says when a cached block (lab 05) can be shared: the same tokens at the *same positions*.
#
# ## The model, in six rules
#
# T is the number of rows in the step, H the query heads, Hkv the KV heads, D the numbers of a head.
#
# 1. **RMSNorm**: `x / sqrt(mean(x²) + eps) * weight`, each row for itself.
# 2. **RoPE**: element i and element i + D/2 of a head are a pair. (Not neighbours: the checkpoints are stored for halves.) q and k are turned, v is not.
# 3. **Slots** (槽位): K and V of a token at position p of a sequence go to slot `block_table[p // block_size] * block_size + p % block_size`.
# 4. **Attention**: a row at position p sees positions 0 to p of its own sequence, itself included. `softmax(q K^T / sqrt(D)) V`.
# 5. **Groups** (GQA): query head h reads KV head `h // (H / Hkv)`.
# 6. **MLP**: `down(silu(gate(h)) * up(h))`.
#
# A sanity check of rule 4, on paper, before anything is built: a sequence of length 1 has one weight. It must be 1, so attention gives V itself, whatever q is.
# You will see it again as the first example of exercise 6.
#
# ## Exercise 2: RoPE
#
# Now all rows and heads at once. `positions` comes from the batch: rows of different requests stand side by side, so **the row number says nothing**.
#
# Mind the precision. bf16 has 8 bits: of the numbers around 1,900 it knows every eighth. Positions and angles are fp32, whatever x is.

# %% ex="rope"
def rope(x, positions, theta):
    """Turn every pair of every head of every row.

    x [T, heads, D]. positions: int64 [T], of each row in its own sequence. theta: a float.
    The angles are computed in fp32.

    Returns a new tensor of x's shape and dtype. Changes nothing.
    """
    ### BEGIN SOLUTION
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None, None] * frequencies  # [T, 1, D/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    ### END SOLUTION

# %% check="rope"
check("rope")

# %% [markdown]
# Use it at once, on a real head: random q and k, 32 numbers. The score of a query and a key 5 before it, at many places:

# %%
turn = lab.best("rope")
generator = torch.Generator().manual_seed(0)
q, k = torch.randn(2, 1, 1, 32, generator=generator)
for place in (0, 10, 1_000, 100_000):
    turned = turn(q, torch.tensor([place + 5]), 10_000.0), turn(k, torch.tensor([place]), 10_000.0)
    score = float((turned[0] * turned[1]).sum())
    print(f"query at {place + 5:7,}, key at {place:7,}: {score:.6f}")

# %% [markdown]
# In real numbers all four would be equal. In fp32 the digits go with the position: at 1,000 some five are left behind the point, at 100,000 about two. An fp32 number has 24 bits, and a large angle
# spends them in front of the point.
#
# Now the second prediction. All positions 1,000 too large:

# %%
prompt = tokens_of(QUESTION)
good_logits = with_fault("").step({"a": prompt})["a"]
change = (with_fault("shift").step({"a": prompt})["a"] - good_logits).abs().max()
print(f"logits lie between {good_logits.min():.1f} and {good_logits.max():.1f}")
lab.compare("shift", float(change))

# %% [markdown]
# So small a change is rounding. "shift" is no fault at all: RoPE knows distances, not places. (As long as *all* of a sequence is shifted. If a chunk begins again at 0, distances are
# wrong, and so is the text.)
#
# ## Exercise 3: RMSNorm
#
# It looks harmless: five operations. But x may be fp16 or bf16. A square of 400 is more than fp16 can hold, and every operation in bf16 rounds to 8 bits. So make it
# wide first. And round **before** weight, not after: the normalised x goes back to x's dtype, and then it is multiplied by weight. That is the order of `transformers` and of the engine. The other order is
# no less exact, but its last digits are others, and tokens are to be equal.

# %% ex="rms_norm"
def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    x [..., D]; weight [D], or [heads, D] for x [T, heads, D]. fp32 inside (float64 if x is),
    and back in x's dtype before weight.

    Returns a new tensor of x's shape and dtype. Changes nothing.
    """
    ### BEGIN SOLUTION
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
    ### END SOLUTION

# %% check="rms_norm"
check("rms_norm")

# %%
norm = lab.best("rms_norm")
loud = torch.tensor([[400.0, -300.0, 200.0, 100.0]], dtype=torch.float16)
ones = torch.ones(4, dtype=torch.float16)
print("fp16 throughout:", (loud * torch.rsqrt(loud.square().mean(-1, keepdim=True) + 1e-6)).tolist())
print("yours:          ", norm(loud, ones, 1e-6).tolist())

# %% [markdown]
# No error, no warning, no NaN: zeros. A model whose first layers give small numbers and whose last layers give large ones would die in the last layers only.
#
# ## Exercise 4: the flat batch
#
# L33 4.3 says that to the executor all requests are alike: each brings some tokens. Here is what that means in memory. Three decodes and two chunks, in one step, in blocks
# of four.
#
# **How to read it.** Each column on top is a row of x. A letter with its colour and pattern is a request. Thick lines are where a request begins: `query_start_loc`.
# Below is the pool: where the K and V of these rows go. (What is there already, from earlier steps, is not drawn.)

# %% fold="yes"
names = "ABCDE"
STEP = [([901], 9, [7, 2, 5], True), ([902], 4, [1, 6], True), ([903], 7, [8, 3], True),
        ([31, 32, 33], 5, [9, 4], False), ([41, 42, 43, 44], 0, [10], True)]
positions_of = [range(start, start + len(tokens)) for tokens, start, _, _ in STEP]
slots_of = [blocks[p // 4] * 4 + p % 4 for (_, _, blocks, _), at in zip(STEP, positions_of, strict=True) for p in at]
starts_of = [sum(len(at) for at in positions_of[:i]) for i in range(len(STEP) + 1)]
picture(draw.flat(names, positions_of, slots_of, starts_of, 4, 11), "Ten rows: A at position 9, B at 4, C at 7, D at 5 to 7, E at 0 to 3. Their "
        "slots lie scattered over eleven blocks: A in block 5, B in 6, C in 3, D in 4, E in 10.")

# %% [markdown]
# There is no padding (填充), and nothing says "prefill" or "decode". Follow C7 with your finger: position 7, block size 4, so page 1; C's table is `[8, 3]`, so block 3; offset 3;
# slot 3 · 4 + 3 = 15.
#
# Write the function. Each sequence comes as `(token_ids, start, block_ids, wants_logits)`: the tokens to compute now, the position of the first, the physical block of each page (maybe
# one more than needed yet), and whether its last row needs logits. Those with one token come first: the caller has seen to it. `FlatBatch` is the engine's record (`kvlab.model.batch`): the last lines of the cell fill it
# from your lists, and from `tables`, `num_decodes`, `max_query_len` and `max_seq_len`, which you make too.

# %% ex="flat_batch"
def flat_batch(seqs, block_size):
    """Lay the sequences of a step end to end, in the order given.

    seqs: (token_ids, start, block_ids, wants_logits) each, those of one token first.

    Returns a FlatBatch: token_ids, positions, slot_mapping int64 [T]; query_start_loc int32
    [S + 1]; seq_lens int32 [S], this step's tokens included; block_tables int32 [S, width],
    filled up with any number; logits_indices int64 [R], the last row of each that wants logits;
    num_decodes: sequences of one token, from the front; max_query_len: most tokens of one
    sequence; max_seq_len: largest of seq_lens.
    """
    token_ids, positions, slots, starts, seq_lens, logits_rows = [], [], [], [0], [], []
    ### BEGIN SOLUTION
    for tokens, start, block_ids, wants_logits in seqs:
        end = start + len(tokens)
        token_ids += tokens
        positions += range(start, end)
        for p in range(start, end):
            slots.append(block_ids[p // block_size] * block_size + p % block_size)
        starts.append(len(token_ids))
        seq_lens.append(end)
        if wants_logits:
            logits_rows.append(len(token_ids) - 1)
    counts = [len(tokens) for tokens, _, _, _ in seqs]
    num_decodes = 0
    while num_decodes < len(counts) and counts[num_decodes] == 1:
        num_decodes += 1
    max_query_len, max_seq_len = max(counts), max(seq_lens)
    width = max(len(block_ids) for _, _, block_ids, _ in seqs)
    tables = [list(block_ids) + [0] * (width - len(block_ids)) for _, _, block_ids, _ in seqs]
    ### END SOLUTION
    long, short = torch.int64, torch.int32
    return FlatBatch(
        torch.tensor(token_ids, dtype=long), torch.tensor(positions, dtype=long),
        torch.tensor(slots, dtype=long), torch.tensor(starts, dtype=short),
        torch.tensor(seq_lens, dtype=short), torch.tensor(tables, dtype=short),
        torch.tensor(logits_rows, dtype=long), num_decodes, max_query_len, max_seq_len,
    )

# %% check="flat_batch"
check("flat_batch")

# %%
lay_out = lab.best("flat_batch")
batch = lay_out(STEP, 4)
print("positions      ", batch.positions.tolist())
print("slot_mapping   ", batch.slot_mapping.tolist(), "as in the figure:", batch.slot_mapping.tolist() == slots_of)
print("query_start_loc", batch.query_start_loc.tolist())
print("seq_lens       ", batch.seq_lens.tolist())
print("logits_indices ", batch.logits_indices.tolist(), "of", len(batch.token_ids), "rows: D is not done with its prompt")

# %% [markdown]
# **The last line is worth 5 GB.** Third prediction: 8,192 rows of logits, 152,064 numbers each, in fp32:

# %%
from kvlab.sizing import model_shape

seven = model_shape("Qwen2.5-7B")
all_rows = 8192 * seven.vocab_size * 4
lab.compare("logits", all_rows / 1e9)
print(f"K and V of the prompt: {8192 * seven.kv_bytes_per_token() / 1e9:.2f} GB; logits of one row: {seven.vocab_size * 4 / 1e6:.2f} MB")

# %% [markdown]
# So an engine picks the rows *before* the head, and the head is a small product. (For log-probabilities of a prompt one needs all rows, and then this memory is needed.)
#
# ## Exercise 5: the ledger of a step
#
# What does a step move? Not how long it takes, only bytes. Before you write it, predict on paper, for each item: what makes it grow? A token? A token of context? A sequence? Nothing?
#
# | item | bytes of | grows with |
# |---|---|---|
# | `weights` | all layers' matrices and the head, read once | ? |
# | `kv_written` | K and V of the new tokens, all layers | ? |
# | `kv_read` | K and V of each sequence's whole context, this step's tokens included, all layers | ? |
# | `widest` | gate and up of **one** layer, for all new tokens: the largest intermediate result (激活). The layers use the same memory in turn | ? |
# | `logits` | fp32, a row for each sequence that is sampled | ? |
#
# `shape` is a `kvlab.sizing.ModelShape`: it has `num_layer_weights` (numbers in the matrices of all layers together, without the head), `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_key_value_heads`, `head_dim`, and the method `kv_bytes_per_token(dtype_bytes)`.

# %% ex="step_ledger"
def step_ledger(step, shape, dtype_bytes=2):
    """The bytes of one step, item by item.

    step: (new tokens, tokens computed before, is it sampled?) of each sequence.

    Returns a dict of whole numbers: weights, kv_written, kv_read, widest, logits.
    """
    ### BEGIN SOLUTION
    tokens = sum(new for new, computed, sampled in step)
    context = sum(new + computed for new, computed, sampled in step)
    kv = shape.kv_bytes_per_token(dtype_bytes)
    matrices = shape.num_layer_weights + shape.vocab_size * shape.hidden_size
    return {
        "weights": matrices * dtype_bytes,
        "kv_written": tokens * kv,
        "kv_read": context * kv,
        "widest": tokens * 2 * shape.intermediate_size * dtype_bytes,
        "logits": sum(sampled for new, computed, sampled in step) * shape.vocab_size * 4,
    }
    ### END SOLUTION

# %% check="step_ledger"
check("step_ledger")

# %%
account = lab.best("step_ledger")
STEPS = {
    "1 decode after 4,000": [(1, 4000, True)],
    "64 decodes after 4,000": [(1, 4000, True)] * 64,
    "64 decodes after 32,000": [(1, 32_000, True)] * 64,
    "a prompt of 2,048": [(2048, 0, True)],
    "a chunk of 2,048 after 30,000": [(2048, 30_000, False)],
    "64 decodes after 4,000, and a chunk of 1,984": [(1, 4000, True)] * 64 + [(1984, 0, False)],
}
items = ("weights", "kv_read", "kv_written", "widest", "logits")
bills = {what: account(step, seven) for what, step in STEPS.items()}
table(("Qwen2.5-7B, bf16, in MB", *items), [(what, *(f"{bill[item] / 1e6:,.2f}".rjust(10, "\u2007") for item in items)) for what, bill in bills.items()])

# %% [markdown]
# Move the sliders: decodes, the context of each, and the size of one chunk beside them. **From which context on do 64 decodes read more K and V than weights?** Then take one decode and a chunk of 2,048: which bars did the chunk move, and which not? The next cell has the answers.

# %% fold="yes"
def bill_of(decodes, context, chunk):
    step = [(1, context, True)] * decodes + ([(chunk, 0, False)] if chunk else [])
    title = f"{decodes} decodes after {context:,} tokens" + (f", a chunk of {chunk:,}" if chunk else "")
    return draw.ledger_bars(account(step, seven), title)


sliders(bill_of, "Bars of the five items on a log axis. Weights never move; K and V read follows decodes times context; the chunk moves all but the weights and the logits.",
        decodes=(1, 256, 64), context=(0, 32_000, 4000), chunk=(0, 2048, 0))

# %%
from dataclasses import replace

alone, beside_chunk = account([(1, 4000, True)], seven), account([(1, 4000, True), (2048, 0, False)], seven)
for item in items:
    print(f"one decode after 4,000, and with a chunk of 2,048 beside it: {item:10} {alone[item] / 1e6:10,.1f} -> {beside_chunk[item] / 1e6:10,.1f} MB")


def balance_of(shape):
    """From which context on 64 decodes read more K and V than weights."""
    bill = account([(1, 0, True)] * 64, shape)
    return bill["weights"] / bill["kv_read"]


group, balance = seven.num_attention_heads // seven.num_key_value_heads, balance_of(seven)
print(f"64 decodes read more K and V than weights from a context of about {balance:,.0f} tokens on")
print(f"with a KV head for each query head (no GQA, {group} times the K and V): from about {balance_of(replace(seven, num_key_value_heads=seven.num_attention_heads)):,.0f} on")

# %% [markdown]
# The weights are the fare of the bus, whoever rides. In bytes, a chunk adds little to it, and the arithmetic that it adds is not in this ledger: decodes leave the arithmetic units idle (L33 3.4), and that is why a chunk can ride
# along. Only one item can pass the weights: K and V read. GQA divides it, and K and V written, by the size of its groups.
#
# A good place for a break.
#
# ## Exercise 6: attention over pages
#
# Labs 10 and 11 do this as a kernel. Here it is a plain function, for **one sequence's rows**: a decode (n = 1), a whole prompt, or a chunk from the middle. All three are one
# case: the n newest tokens of a sequence of `seq_len`. So row i stands at position `seq_len - n + i`, and sees everything up to there.
#
# **How to read it.** Rows are rows of q, columns positions. Filled is seen. Red and dashed: where this step's tokens begin.

# %% fold="yes"
from kvlab.lab.draw.mixed import staircase

stairs = staircase([(1, 10), (3, 8), (4, 4)], [(0, 0, 1), (1, 0, 3), (2, 0, 4)], numbered=False)
stairs.supxlabel("position"), stairs.supylabel("row of q")
picture(stairs, "Three staircases: a decode sees ten positions; a chunk of three after five tokens "
        "sees six, seven and eight; a prompt of four sees one to four.")

# %% [markdown]
# The K and V of this step have been written already. Slots behind `seq_len` hold anything, in our tests NaN.

# %% ex="attend"
def attend(q, kv, block_table, seq_len):
    """Causal attention of a sequence's n newest tokens over its pages.

    q [n, H, D]. kv [2, num_blocks, block_size, Hkv, D]: K, then V. block_table: a list, the
    physical block of each page; it may be longer, and what stands behind the sequence's pages
    is anything. seq_len: all tokens of the sequence, the n newest included.

    Returns a new tensor of q's shape and dtype. Changes nothing.
    """
    ### BEGIN SOLUTION
    n, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.shape[2], kv.shape[3]
    positions = torch.arange(seq_len)
    blocks = torch.tensor(block_table)[positions // block_size]
    k, v = kv[:, blocks, positions % block_size]  # [seq_len, Hkv, D] each
    group = num_heads // num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) / math.sqrt(head_dim)
    own = seq_len - n + torch.arange(n)
    hidden = positions[None, :] > own[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)
    ### END SOLUTION

# %% check="attend"
check("attend")

# %% [markdown]
# A test that needs no reference: **cutting must not matter**. Attend for ten rows at once, then in three chunks, then one by one. (Here K and V are all there from the beginning, and each
# chunk is told its own `seq_len`.)

# %%
over_pages = lab.best("attend")
kv = torch.randn(2, 9, 4, 2, 32, generator=generator)
ten = torch.randn(10, 6, 32, generator=generator)
whole = over_pages(ten, kv, [7, 2, 5], 10)
for sizes in ((4, 5, 1), (1,) * 10):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [over_pages(ten[end - size : end], kv, [7, 2, 5], end) for size, end in zip(sizes, ends, strict=True)]
    print(f"in {len(sizes):2} pieces: off by at most {(torch.cat(parts) - whole).abs().max():.1e}")

# %% [markdown]
# ## Exercise 7: the layer
#
# Now put it together, by the picture. The matrix products are `F.linear(x, weight, bias)` (`F` is `torch.nn.functional`). The weights of one layer are in a dict `w`, under the names that Qwen2 gives them:
#
# | | |
# |---|---|
# | `input_layernorm.weight`, `post_attention_layernorm.weight` | of the two norms |
# | `q_proj.weight`, `q_proj.bias`, and the same for `k_proj` and `v_proj` | hidden to heads × D. Qwen2 has these biases, Llama has not |
# | `o_proj.weight` | heads × D back to hidden |
# | `gate_proj.weight`, `up_proj.weight`, `down_proj.weight` | the MLP |
#
# From `config` you need `rms_norm_eps`, `rope_theta` and `head_dim`. `x.unflatten(-1, (-1, D))` cuts a row into heads, `x.flatten(1)` puts it together. `kv[0].flatten(0, 1)` is a *view*
# `[num_blocks * block_size, Hkv, D]` of all slots' K: what is written into it is in `kv`. `over_pages` wants a list: a row of `batch.block_tables`, `.tolist()`. `norm`, `turn` and `over_pages` are yours from
# above.

# %% ex="decoder_layer"
def decoder_layer(x, w, batch, kv, config):
    """One layer of Qwen2 over pages.

    x [T, hidden]. w: the layer's weights by name. batch: a FlatBatch. kv [2, num_blocks,
    block_size, Hkv, D]: this layer's pages; K and V of all T rows are written to their slots.

    Returns a new tensor like x. Changes nothing but kv.
    """
    ### BEGIN SOLUTION
    eps, head_dim = config.rms_norm_eps, config.head_dim
    h = norm(x, w["input_layernorm.weight"], eps)
    q, k, v = (F.linear(h, w[f"{name}_proj.weight"], w[f"{name}_proj.bias"]) for name in "qkv")
    q, k, v = (heads.unflatten(-1, (-1, head_dim)) for heads in (q, k, v))
    q = turn(q, batch.positions, config.rope_theta)
    k = turn(k, batch.positions, config.rope_theta)
    kv[0].flatten(0, 1)[batch.slot_mapping] = k
    kv[1].flatten(0, 1)[batch.slot_mapping] = v
    starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    out = []
    for i, seq_len in enumerate(seq_lens):
        pages = batch.block_tables[i].tolist()
        out.append(over_pages(q[starts[i] : starts[i + 1]], kv, pages, seq_len))
    x = x + F.linear(torch.cat(out).flatten(1), w["o_proj.weight"])

    h = norm(x, w["post_attention_layernorm.weight"], eps)
    gate, up = F.linear(h, w["gate_proj.weight"]), F.linear(h, w["up_proj.weight"])
    return x + F.linear(F.silu(gate) * up, w["down_proj.weight"])
    ### END SOLUTION

# %% check="decoder_layer"
check("decoder_layer")

# %% [markdown]
# Four of your layers, with an embedding before and the head behind, are the model. Now the reference: the same weights in `transformers`, which knows no pages.

# %%
from kvlab.lab.scenes.decoder import reference_model

layer, TOLERANCE = lab.best("decoder_layer"), 1e-3
theirs = reference_model()


def mine(**options):
    return TinyRun(layer=layer, norm=norm, flat_batch=lay_out, **options)


with torch.inference_mode():
    expected = theirs(torch.tensor([prompt])).logits[0]
logits = mine().step({"a": prompt})["a"]
off = float((logits - expected[-1]).abs().max())
print(f"{len(prompt)} tokens, logits off by at most {off:.1e}; tolerance {TOLERANCE:g}:", "equal" if off < TOLERANCE else "NOT EQUAL")
first, second = expected[-1].topk(2).values.tolist()
print(f"the likeliest token has {first:.1f}, the next one {second:.1f}: a gap of {first - second:.1f}")

# %% [markdown]
# Why is it not 0? Both add the same numbers in another order. And 1e-3 as a tolerance: it is far above rounding, and far below the gap between the likeliest token and the next. You will see what it is good for.
#
# Now as an engine would do it: three requests in one flat batch. One is a decode, two come in chunks. Every logit is compared with `transformers`, which gets each sequence alone and whole.

# %%
QUESTIONS = (QUESTION, "What is the KV cache?", "What is a block table?")
texts = [tokens_of(question) for question in QUESTIONS]
together = mine()
together.step({0: texts[0][:-1]})
steps = ({0: texts[0][-1:], 1: texts[1][:40], 2: texts[2][:25]}, {1: texts[1][40:], 2: texts[2][25:]})
rows = []
for chunks in steps:
    for name, got in together.step(chunks).items():
        done = together.lengths[name]
        with torch.inference_mode():
            alone = theirs(torch.tensor([texts[name][:done]])).logits[0, -1]
        rows.append((f"request {name}, {len(chunks[name])} new, {done} in all", f"{(got - alone).abs().max():.1e}"))
table(("row of logits", "off by at most"), rows)

with torch.inference_mode():
    ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt):].tolist()
answer = mine().answer(QUESTION)
print(text_of(answer))
print("token by token as transformers:", answer == ids[: len(answer)])

# %% [markdown]
# ## Twelve faults
#
# Now the first prediction. Each fault answers the question; the table shows the first token that differs, the words before it, and what follows | (in brackets: what should follow). `logits` is the largest difference after
# the prompt, computed whole.

# %%
rows, noticed = [], 0
for name, (what, _) in FAULTS.items():
    answer = with_fault(name).answer(QUESTION)
    at = first_difference(answer, right)
    noticed += at is not None
    gap = float((with_fault(name).step({"a": prompt})["a"] - good_logits).abs().max())
    shown = "the same"
    if at is not None:
        before, after, instead = (text_of(part).strip() for part in (answer[:at], answer[at : at + 5], right[at : at + 5]))
        shown = f"{before[-24:]} | {after[:30]} ({instead[:30]})".replace("\n", " ")
    rows.append((name, what, "-" if at is None else str(at), f"{gap:.1e}", shown))
table(("fault", "what", "first wrong token", "logits", "the answer there"), rows)
lab.compare("faults", noticed)

# %% [markdown]
# **What to look at.** "pairs" is gibberish at once. "heads" writes a fluent sentence up to token 26: whoever reads only the beginning sees nothing. Seven of twelve change *no word at all*, and six of these are real faults. The model
# is less sure of everything, but still sure enough. (Two more questions below, for those who think that it is this one's fault.)
#
# In fairness: our model has learned its answers by heart, so the gap between its first and second choice is large (you printed it above). A real model is often undecided, and its text would part sooner. But where it parts, it writes another *good* sentence,
# and that is no easier to notice.
#
# Compare logits, and all of them stand out, except two. "shift" is rounding, as it must be. And "offset"? After the prompt the logits are right! Its error is in *chunks*, and the prompt was no chunk:

# %%
rows = []
for name in ("", "mask", "offset"):
    run = with_fault(name)
    run.step({"a": prompt[:50]})
    cut = run.step({"a": prompt[50:]})["a"]
    in_one = with_fault(name).step({"a": prompt})["a"]
    rows.append((name or "no fault", f"{(in_one - good_logits).abs().max():.1e}", f"{(cut - in_one).abs().max():.1e}"))
table(("", "whole prompt: off from the right logits by", "in two chunks: off from its own whole by"), rows)

# %%
for question in ("What is the KV cache?", "What is a block table?"):
    other = with_fault("").answer(question)
    print(question, "is answered otherwise by:", *(name for name in FAULTS if with_fault(name).answer(question) != other))

# %% [markdown]
# Two lessons. **A test must have the shape of what is served**: chunks, decodes, several sequences. And the table's last column needs no reference: a model must agree with *itself*, however its prompt is cut. That test finds "mask" and "offset" without `transformers`.
#
# **Where does it begin?** The next figure compares every result on the way: each norm, each turned q and k, each attention, each MLP.

# %% fold="yes"
def watched(fault, cut=None):
    run = with_fault(fault, watch=True)
    for chunk in (prompt[:cut], prompt[cut:]) if cut else (prompt,):
        run.step({"a": chunk})
    return run.trace


good_trace = watched("")
picture(draw.drift({name: spread(watched(name), good_trace) for name in ("scale", "mask", "gelu", "eps", "shift")}, TOLERANCE),
        "Largest difference of each result on the way through four layers. scale and mask leave the axis at the first attention, gelu at the first MLP, eps at the first norm. "
        "shift jumps at every turned q and k, and is back at rounding after attention.")

# %% [markdown]
# **What to look at.** The first point above the dashed line names the culprit: "scale" and "mask" (one above the other) at the first attention, "gelu" at the first swiglu, "eps" at the first norm. From there on everything differs, and says nothing. And look at "shift": q and k are far off
# in every layer, and the attention after them is right. *Different inside, same outside*: a difference is not yet a fault.
#
# ## Into the engine
#
# Your `rope`, `rms_norm`, `attend` and `flat_batch` now serve: prefix caching is on, prompts are cut into chunks of at most 64, one request is sampled three times, and blocks are shared and copied. Our parts run the same requests beside it.

# %%
result = lab.run_engine(max_tokens=12, max_num_batched_tokens=64)

# %% [markdown]
# And one question, token by token beside our engine:

# %%
from kvlab import LLM, SamplingParams

options = dict(max_num_batched_tokens=48, num_gpu_blocks_override=64)
chat, params = [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=40)
yours, plain = (LLM("tiny", parts=parts, **options).chat(chat, params)[0].outputs[0] for parts in (lab.parts(), None))
print(yours.text)
print("token by token as our engine:", list(yours.token_ids) == list(plain.token_ids))

# %% [markdown]
# In a terminal: `kvlab generate "What is a page?" --with work/12_qwen2_on_pages.ipynb`. The engine's own model is `kvlab/model/decoder.py`: one forward of some 30 lines, and after this lab you can read every one. On a GPU the same boxes are kernels: RMSNorm with the
# residual, RoPE with the write, and lab 11's attention.
#
# ## Exercise 8 (extra): the detective
#
# Let a program find where two runs part ways. A trace (轨迹) is a list of `(name, tensor)` in the order of computation; x is `[rows, columns]`, q and k are `[rows, heads, D]`. Return the name of the first result in which any element differs by more than `atol`, and the first such row. Careful: a NaN is
# always wrong, and every comparison with NaN is `False`.

# %% ex="first_wrong"
def first_wrong(trace, reference, atol):
    """Where two runs part ways.

    trace, reference: lists of (name, tensor), the same names and shapes. A tensor is
    [rows, columns] or [rows, heads, D].

    Returns (name, row) of the first result, and its first row, with an element that differs by
    more than atol, or is NaN on either side; None if there is none. Changes nothing.
    """
    ### BEGIN SOLUTION
    for (name, x), (_, y) in zip(trace, reference):
        close = (x - y).abs() <= atol
        for row in range(len(close)):
            if not close[row].all():
                return name, row
    return None
    ### END SOLUTION

# %% check="first_wrong"
check("first_wrong")

# %%
find = lab.best("first_wrong")
rows = []
cut_trace = watched("", cut=50)
for name in FAULTS:
    whole, cut = find(watched(name), good_trace, TOLERANCE), find(watched(name, cut=50), cut_trace, TOLERANCE)
    rows.append((name, *(f"{found[0]}, row {found[1]}" if found else "nothing" for found in (whole, cut))))
table(("fault", "in the whole prompt", "in the second chunk"), rows)

# %% [markdown]
# Read the rows too. In the whole prompt "pairs" and "theta" begin at row 1: at position 0 nothing turns, so row 0 is right. "scale" begins at row 1 as well. Why? (Row 0 sees only itself. Its one weight is 1, whatever the score.)
#
# And "shift" is caught although it is no fault. What would you do about it? (Compare what attention *gives*, not q and k.)
#
# ## What the textbook says and what we measured

# %%
served = bills["64 decodes after 4,000, and a chunk of 1,984"]
beside = served["widest"] + served["logits"]
heavy = bills["64 decodes after 4,000"]
ledger(("where", "the textbook says", "we found", "verdict", "on the condition that"),
       ("holds", "holds if", "contradicted"), [
    ("L33 2.2", "page, offset, block table: the address of a token's K and V", f"the logits of transformers, to {off:.0e}", True, ""),
    ("L33 4.3", "to the executor a decode is 1 token and a chunk is 512: one measure",
     "one flat batch, one forward; right to rounding for decodes and chunks together", True,
     "the measure is rows: a row of a decode reads a whole context of K and V, 512 rows of a chunk read theirs once"),
    ("L33 3.4", "a step moves all weights, so decodes share their cost: intensity about B",
     f"64 decodes after 4,000 tokens read {heavy['weights'] / 1e9:.1f} GB of weights and {heavy['kv_read'] / 1e9:.1f} GB of K and V", True,
     f"contexts are short: at 64 decodes, K and V pass the weights at about {balance:,} tokens"),
    ("L33 8.1-1", "paging loses not one bit of accuracy", f"tokens equal, logits within {off:.0e} of a model without pages", True,
     "bits are compared with the same kernel on contiguous memory (lab 10); another order of adding has other last bits"),
    ("L33 8.2-2", "gpu_memory_utilization 0.90 keeps at least 6 GB for what is not K and V",
     f"0.90 leaves {80 - 0.9 * 80:.1f} GB of 80, and {24 - 0.9 * 24:.1f} GB of 24", True,
     f"the card has 60 GB or more. A step's activations (at least {beside / 1e9:.2f} GB for 2,048 tokens of a 7B) are paid from the 0.90, not from these 6 GB"),
    ("PAV 3.1", "activations are subtracted before the pool is sized", f"they grow with max_num_batched_tokens: {seven.intermediate_size * 4:,} bytes a token for gate and up", True,
     "logits are computed for sampled rows only: for all rows of 8,192 tokens they alone are " + f"{all_rows / 1e9:.1f} GB"),
])

# %% [markdown]
# **What is missing.** Our model is small, and it is sure of itself: how soon a text shows a fault depends on the model. The faults' *logits* do not. And the ledger counts bytes, not time: which of them a GPU's caches save is not in it.
#
# **You have built** everything of Qwen2 that is not a matrix product, and the batch that lets strangers share one forward pass. You know what to distrust: positions by row number, angles in bf16, squares in fp16, a mask without offset, and above all, *a text that reads
# well*.
#
# **Next:** lab 13 puts the step loop around it: schedule, execute, sample, update.
