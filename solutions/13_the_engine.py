# %% [markdown]
# # Lab 13: The engine
#
# Pool, cache, scheduler and kernel are there. This lab closes the loop. You write the **step** (步) that joins them, and
# the **sampler** (采样器) that turns logits into a token, so that a request with a seed says the same on every day and in
# every company. You find out how the engine knows its own size (`num_gpu_blocks`). Then you climb the whole ladder, from
# reserved memory to the prefix cache, on one trace, and measure what each rung gives.
#
# It goes with L33 0.2, 1, 3, 4, 8.1 and 8.2, and with PAV 3.1 and 6. (L33 is the course's lecture 33, on the memory of the
# KV cache; PAV is its lesson on PagedAttention as virtual memory.) You need three ideas: K and V live in blocks (lab 01),
# requests come and go in every step (lab 07), and a step has a token budget (lab 08). You do not need to have solved them.
#
# **Time.** The six core exercises take about 70 minutes, reading and looking another 35. A good place for a break is after
# exercise 4. A seventh exercise is extra. Cells that only draw or count are folded away.

# %%
from kvlab.lab import Lab

lab = Lab("13")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## The answer that changed on Monday
#
# A tester sends a question with `seed=7` and files the answer. On Monday the same question with the same seed gives
# another answer. Nobody has changed the model. What is different on Monday: somebody else is using the engine too.
#
# Here is that engine: the real one, with a sampler as one would write it first. It has one random generator (随机数发生器)
# for the whole engine, started from the seed.

# %%
import random

from kvlab import Parts
from kvlab.engine.engine_steps import sample as our_sample
from kvlab.lab.scenes.engine import reply


def one_generator():
    """A sampler that ignores the number it is given, and takes the next one of its own."""
    rng = random.Random(7)

    def wrong_sample(logits, temperature, top_k, top_p, uniform):
        return our_sample(logits, temperature, top_k, top_p, rng.random())

    return Parts(sampler=wrong_sample)


print("Friday, alone:      ", repr(reply(one_generator()).text))
print("Monday, in company: ", repr(reply(one_generator(), neighbours=1).text))

# %% [markdown]
# The model is small. At this temperature it talks nonsense, in two languages. That is not the point. The point is that a
# neighbour, whom this user will never meet, has changed every word. No test of this engine can be repeated, and no bug of
# it either.
#
# ## Your predictions
#
# First: the same question and seed, in the engine with one generator, in four situations. (a) A neighbour joins, as you
# have just seen: that is one. (b) The pool is full, and our request is preempted (抢占) and computed again. (c) We ask for
# n = 4 samples and look at the first. (d) The prompt is computed in many small chunks. In how many of the four does the
# text change?
#
# Second: a 13B on one A100 gets 300 chats at once. The lowest rung reserves 2,048 tokens for each and runs static batches
# (静态批处理). The top rung has pages, continuous batching (连续批处理), chunked prefill and a prefix cache (前缀缓存). How
# many times the tokens per second?
#
# Third: the same 300 chats, a 7B with grouped KV heads on an H100. One change only, the first rung: pages in the place of
# reservations. How many times the tokens per second?

# %%
lab.predict("one generator", None, unit="of 4 situations")
lab.predict("the whole ladder", None, unit="times the tokens per second")
lab.predict("pages for the 7B", None, unit="times the tokens per second")

# %% [markdown]
# ## Exercise 1: one number draws one token
#
# By hand first. Four tokens, A to D, have the weights 1, 4, 2, 1. Put them end to end on a line of length 8. A number
# `uniform` in [0, 1) is given, say 0.7. Its place on the line is 0.7 × 8 = 5.6. A ends at 1, B at 5, C at 7. So 5.6 lies in
# C, and C is drawn.
#
# Now think of all numbers in [0, 1). One half of them falls into B. That is what "B has probability 4/8" means, and
# nothing else is random here: **one number in, one token out**.

# %% ex="pick"
def pick(weights, uniform):
    """The first index at which the running sum of `weights` exceeds uniform * their sum.

    weights: a list of numbers, 0 or more each, not all 0; they need not add up to 1. Their sum is
    the last running sum: sum() of Python 3.12 may round otherwise. uniform: in [0, 1). So an
    index of weight 0 is never drawn. Do not change the list.
    """
    ### BEGIN SOLUTION
    total, sums = 0, []
    for weight in weights:
        total += weight
        sums.append(total)
    target = uniform * total
    return next(i for i, reached in enumerate(sums) if reached > target)
    ### END SOLUTION

# %% check="pick"
check("pick")

# %% [markdown]
# Stuck? `hint("pick")` gives a nudge, and more if you call it again. `lab.best("pick")` is your function if it passes its
# check, and ours if not, so you can read on in any case.
#
# A sanity check that needs no statistics: try a whole grid of numbers, and count.

# %%
draw_one = lab.best("pick")

counts = [0] * 4
for i in range(800):
    counts[draw_one([1, 4, 2, 1], i / 800)] += 1
print("of 800 numbers on a grid:", dict(zip("ABCD", counts)))

# %% [markdown]
# ## Exercise 2: who may be drawn
#
# Two settings cut the candidates before the draw.
#
# - **top-k** keeps the k tokens of highest rank.
# - **top-p** keeps, of these, the shortest run of first ranks whose share reaches p. It is a top-k whose k the distribution
#   chooses.
#
# The edges decide whether two engines agree: equals rank by token id, lowest first. Top-k goes first, and p is a share of
# what it *left*. The token with which the sum reaches p is kept.
#
# By hand, with the weights 1, 4, 2, 1 again. The ranks are B, C, A, D: A and D are equals, and A has the lower id. Their
# sum is 8. For p = 0.5 the run must reach 4, and B alone does. For p = 0.6 it must reach 4.8: B falls short, B and C
# together have 6. Now top-k 2 before p = 0.6. It leaves B and C, whose sum is 6. The run must reach 3.6, and B alone does.

# %% ex="keep"
def keep(weights, top_k, top_p):
    """The indices that top-k and then top-p leave, ascending.

    weights: a list of numbers, 0 or more each, not all 0. top_k: so many first ranks; 0 keeps all.
    top_p: of these the shortest run of first ranks whose sum reaches top_p times the sum of what
    top-k left; 1 keeps all, also weight 0. Of equals, the lower index ranks first.
    """
    ### BEGIN SOLUTION
    ranks = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k:
        ranks = ranks[:top_k]
    if top_p < 1:
        wanted, run = top_p * sum(weights[i] for i in ranks), 0
        for n, i in enumerate(ranks, 1):
            run += weights[i]
            if run >= wanted:
                ranks = ranks[:n]
                break
    return sorted(ranks)
    ### END SOLUTION

# %% check="keep"
check("keep")

# %% [markdown]
# ## Exercise 3: from logits to a token
#
# A model gives logits, not weights. A weight is exp(logit / temperature). **Temperature** (温度) 0 cannot divide: it means
# greedy (贪心), the highest logit, of equals the lowest id. And exp(1000) is too large for a float. Subtract the highest
# logit first: all weights change by one factor, and no share changes. The row is float64. Stay in it.
#
# `logits` is a NumPy array that belongs to the engine. With n = 4, four draws look at the same row. Leave it as it is. What
# you return is a token id, a whole number of Python's.

# %%
import math

draw_one, keep_ranks = lab.best("pick"), lab.best("keep")
print("exp(700) =", math.exp(700), "  exp(-800) =", math.exp(-800))

# %% ex="sample"
def sample(logits, temperature, top_k, top_p, uniform):
    """The token id drawn from one row of logits.

    logits: NumPy array of float64; -inf for banned tokens, but not for all. temperature: 0 is
    greedy. top_k: 0 is off. top_p: 1 is off. uniform: the number that decides.
    You may use draw_one (exercise 1) and keep_ranks (exercise 2).
    """
    ### BEGIN SOLUTION
    values = [float(x) for x in logits]
    highest = max(values)
    if temperature == 0:
        return values.index(highest)
    weights = [math.exp((x - highest) / temperature) for x in values]
    kept = keep_ranks(weights, top_k, top_p)
    return kept[draw_one([weights[i] for i in kept], uniform)]
    ### END SOLUTION

# %% check="sample"
check("sample")

# %% [markdown]
# Here is your sampler at work, on five tokens. Move the sliders (they need a running kernel). Which of them can change *who*
# may be drawn, and which only how wide the pieces are?

# %% fold="yes"
import numpy as np

from kvlab.lab.draw import engine as draw
from kvlab.lab.show import ledger, picture, sliders, table

NAMES, LOGITS = "ABCDE", np.array([0.0, 2.0, 1.0, -0.5, 1.5])


def show_draw(heat_tenths, top_k, p_percent, uniform_percent):
    my_sample, heat = lab.best("sample"), heat_tenths / 10
    drawn = my_sample(LOGITS.copy(), heat, top_k, p_percent / 100, uniform_percent / 100)
    weights = [math.exp((x - LOGITS.max()) / heat) for x in LOGITS]
    kept = lab.best("keep")(weights, top_k, p_percent / 100)
    return draw.interval(weights, kept, NAMES, uniform_percent / 100, drawn)


sliders(show_draw, heat_tenths=(1, 40, 10), top_k=(0, 5, 0), p_percent=(5, 100, 80), uniform_percent=(0, 99, 40),
        alt="Five tokens as pieces of a line, by weight. Below, the three that top-p keeps, B, C and E, fill the whole "
        "line, and a mark at 0.40 falls into B.")

# %% [markdown]
# **What to look at.** The lower line. What is left fills the whole interval again, in the order of the token ids, not of the
# ranks. As long as the same tokens are kept, nothing jumps when two ranks swap places: a small change of the logits moves
# borders a little. Only a swap across the edge of top-k or top-p lets one in and another out. And the mark does not move
# when you change anything but `uniform`.
#
# ## Exercise 4: whose number?
#
# So a token is a function of its logits and of one number. Where does the number come from? From a pure function:
#
# **uniform(seed, position)**: `seed` belongs to the request, `position` counts the outputs that it already has.
#
# No state is kept anywhere, so there is none to be lost or advanced by somebody else. What is left to decide in each step
# is *who* draws, *from which row*, and *with which position*. A batch is flat: the entries' tokens lie one after the other,
# one row each. A request draws in the step that computes its **last known token**, be it a decode, the last chunk of a
# prompt, or the last chunk of a recomputation. A request with n = 3 brings two children when its prompt ends: all draw from
# the same row, child c with seed + c.

# %%
from kvlab.engine.engine_steps import Entry
from kvlab.sampling_params import uniform

print("an Entry has", ", ".join(Entry._fields))
print([f"{uniform(7, position):.4f}" for position in range(4)], "the first four numbers of seed 7")
print([f"{uniform(8, position):.4f}" for position in range(4)], "and of seed 8")

# %% ex="draws"
def draws(scheduled):
    """(row, seed, position) for each token that a step draws, in order.

    scheduled: list of Entry, with the numbers seed, num_prompt_tokens, num_tokens (of the prompt
    and all outputs so far: the known ones), num_computed (of these, how many have K and V before
    the step), num_scheduled (how many the step computes) and num_to_fork (children to be born when
    the prompt ends; 0 ever after).
    """
    ### BEGIN SOLUTION
    found, end = [], 0
    for entry in scheduled:
        end += entry.num_scheduled
        if entry.num_computed + entry.num_scheduled == entry.num_tokens:
            position = entry.num_tokens - entry.num_prompt_tokens
            for child in range(1 + entry.num_to_fork):
                found.append((end - 1, entry.seed + child, position))
    return found
    ### END SOLUTION

# %% check="draws"
check("draws")

# %% [markdown]
# A step with a decode, a chunk that ends nowhere, and a request that was preempted with five outputs and is computed again:

# %%
who_draws = lab.best("draws")

for row, seed, position in who_draws([Entry(7, 40, 52, 51, 1), Entry(8, 400, 400, 64, 128), Entry(9, 30, 35, 0, 35)]):
    print(f"row {row:3} draws output {position} of the request with seed {seed}: uniform {uniform(seed, position):.4f}")

# %% [markdown]
# Now the four situations, in both engines. On the right runs **your** `sample`, fed with counted numbers.

# %%
SITUATIONS = {
    "(a) a neighbour": dict(neighbours=1),
    "(b) preempted": dict(neighbours=6, blocks=34),
    "(c) first of n = 4": dict(n=4),
    "(d) chunks of 4": dict(budget=4),
}
mine = Parts(sampler=lab.best("sample"))
before, rows, changed = reply(one_generator()), [], [0, 0]
for name, options in SITUATIONS.items():
    told = []
    for i, parts in enumerate((one_generator(), mine)):
        there = reply(parts, **options)
        same = there.tokens == (before if i == 0 else reply(mine)).tokens
        changed[i] += not same
        told.append(("same text" if same else "another text")
                    + (f", preempted {there.preempted}x" if there.preempted else ""))
    rows.append((name, *told))
table(["situation", "one generator", "counted numbers"], rows)
lab.compare("one generator", changed[0])

# %% [markdown]
# Chunks alone change nothing: the prompt's end still makes the first draw. But whatever adds a draw, or moves one before
# ours, shifts everything behind it. Note (c): our own siblings are neighbours too. Counted numbers do not know what a
# neighbour is. (A generator for each request, as vLLM has for requests with a seed, also keeps neighbours out; it is a state
# that must live as long as the request.)
#
# One warning. The *logits* may still differ in the last bits when a batch has another shape. That seldom matters, and
# where it does, no sampler can help.
#
# ## Exercise 5: the step
#
# Everything that this course builds hangs in three calls:
#
#     scheduler.schedule()                          -> output: who computes how many tokens; which blocks are copied
#     runner.execute(output)                        -> sampled: token ids by request id (prepare, forward, sample)
#     scheduler.update_from_output(output, sampled) -> what the step brought, for the users
#
# `sampled` is a dict. It is empty if nobody draws in this step, as when it computes a chunk in the middle of a prompt.
# Nothing but the last call advances a request or publishes a block. So if the second one fails, nothing has happened yet,
# and the engine around your step can try again. That is not the step's own business.

# %% ex="step"
def step(scheduler, runner):
    """One step of the engine. Returns what update_from_output returns.

    Each is called once, in each step, even if nobody computes or nobody draws. Errors are not caught
    here: they come out as they are, and nothing is called after one.
    """
    ### BEGIN SOLUTION
    output = scheduler.schedule()
    sampled = runner.execute(output)
    return scheduler.update_from_output(output, sampled)
    ### END SOLUTION

# %% check="step"
check("step")

# %% [markdown]
# Three lines, and your `step` is a part of the engine. Where does its time go? This is measured now, on your machine, with
# the small model, on one thread. A row is a kind of step; the bar is cut by stage. The forward pass fills most of it,
# so the right half leaves it out and shows the rest in microseconds.

# %% fold="yes"
from kvlab.lab.scenes.engine import STAGES, anatomy

anatomy(1)  # once to warm up
KINDS = {f"{n} decode{'s' * (n > 1)}": anatomy(n) for n in (1, 4, 16, 64)}
KINDS["16 decodes + a chunk of 128"] = anatomy(16, chunk=128)
picture(draw.steps(KINDS, (*STAGES, "other"), "forward"),
        "Shares of a step, in bars: " + "; ".join(
            f"{name}: forward {100 * s['forward'] / sum(s.values()):.0f}%, all else "
            f"{1e6 * (sum(s.values()) - s['forward']):,.0f} microseconds" for name, s in KINDS.items()))

# %%
one, many = KINDS["1 decode"], KINDS["64 decodes"]
for stage in sorted(one, key=lambda s: one[s] / many[s]):
    print(f"{stage:9} {1e6 * one[stage]:8.0f} us with 1 request, {1e6 * many[stage]:8.0f} us with 64: "
          f"{many[stage] / one[stage]:5.1f} times")
whole = sum(many.values()) / sum(one.values())
print(f"the step   {whole:.1f} times as long, for 64 times the tokens")

# %% [markdown]
# **What to look at.** The last line first. It is why one batches at all: 64 tokens cost far less than 64 steps. Then
# the factors, the largest on top. None comes near 64, but the stages that do work *for each request*, on the host, grow
# with the batch: turning tokens into text above all, then taking in the result (update), laying out the batch (prepare)
# and the draws (sample), in an order that differs between machines. In this small model they are small beside the
# forward pass. On a fast GPU the forward pass shrinks and they do not, so real engines write them in fast code, or do
# them while the GPU computes.
#
# ## How large is the pool?
#
# The engine asks this once, before the first request (PAV 3.1):
#
# **num_gpu_blocks = floor((memory × utilisation − weights − activations − graphs) / bytes of a block)**
#
# Lab 01 has the formula. One term of it is not on any data sheet: **activations** (激活), the memory that a *step* takes
# and gives back. Engines find it by running one step and looking. But which step? The blocks are handed out for good, so it
# must be the worst that the limits allow.
#
# ## Exercise 6: the worst step
#
# As many tokens as possible. With these, as many requests as possible, since each may have a row of logits. And with these,
# the longest as long as possible, for the sake of its attention.

# %% ex="worst_batch"
def worst_batch(max_num_batched_tokens, max_num_seqs, max_model_len):
    """Tokens of each request in the worst step, longest first: a list of whole numbers.

    The step has at most max_num_batched_tokens tokens and max_num_seqs requests. Each request
    computes at least 1 token, and at most max_model_len.
    """
    ### BEGIN SOLUTION
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    counts, left = [1] * num_seqs, max_num_batched_tokens - num_seqs
    for i in range(num_seqs):
        more = min(left, max_model_len - 1)
        counts[i] += more
        left -= more
    return counts
    ### END SOLUTION

# %% check="worst_batch"
check("worst_batch")

# %% [markdown]
# Now measure. While the small model runs one step, we count the bytes of all tensors that are alive, and keep the highest
# count. (What a kernel takes inside itself is not seen.) Your batch stands among some rivals, the largest peak on top. It
# may lose: it has the most of what can be counted beforehand, not of everything.

# %%
from kvlab.lab.scenes.engine import peak_bytes

worst = lab.best("worst_batch")(512, 32, 2048)
CANDIDATES = {
    "32 decodes": [1] * 32,
    "32 requests, 16 tokens each": [16] * 32,
    "2 prompts of 256": [256, 256],
    "yours": worst,
    "one prompt of 512": [512],
}
peaks = {name: peak_bytes(counts) for name, counts in CANDIDATES.items()}
for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
    print(f"{name:28} {sum(CANDIDATES[name]):4} tokens, {peak / 1e6:6.2f} MB")

# %% [markdown]
# The same 512 tokens take very different memory. This backend writes the attention scores down: a prompt of 512 needs 512 ×
# 512 of them for each head, two prompts of 256 need half of that. A flash kernel never writes them. So the honest rule is:
# **profile with the kernels that will serve, and take the largest of a few bad candidates.** Neither "yours" nor any other
# single batch is the worst for every kernel.
#
# What if one profiles with an *average* step? A 7B with 24 GB, in bf16, by the engine's own estimate of activations (three
# wide rows of the MLP for each token, three rows of fp32 logits for each request):

# %%
from kvlab.sizing import GB, model_shape, num_gpu_blocks

seven = model_shape("Qwen2.5-7B")
BLOCK = 16 * seven.kv_bytes_per_token()


def activations(counts):
    return sum(counts) * seven.intermediate_size * 3 * 2 + len(counts) * seven.vocab_size * 3 * 4


bad, usual = activations(lab.best("worst_batch")(8192, 256, 4096)), activations([1] * 32)
print(f"worst step: {bad / GB:.2f} GB of activations; a step of 32 decodes: {usual / GB:.2f} GB")
plans, over = {}, {}
for share in (0.92, 0.98):
    for name, seen in (("worst step", bad), ("average step", usual)):
        blocks = num_gpu_blocks(24 * GB, share, seven.weight_bytes(), seen, 0, BLOCK)
        key = f"{name}, {share}"
        plans[key] = {"weights": seven.weight_bytes() / GB, "K and V": blocks * BLOCK / GB, "activations": bad / GB}
        over[key] = sum(plans[key].values()) - 24
        print(f"profiled with the {name:12} at {share}: {blocks:5,} blocks, "
              f"{f'{over[key]:.2f} GB too many' if over[key] > 0 else 'fits'} when the worst step comes")

# %% fold="yes"
picture(draw.memory(plans, 24, [24 * share for share in (0.92, 0.92, 0.98, 0.98)]),
        "Memory in the worst step for four plans. " + "; ".join(
            f"{name}: {sum(parts.values()):.2f} GB of 24" for name, parts in plans.items()))

# %% [markdown]
# **What to look at.** The second bar: it is past its dotted line, and nothing happens. The 8% that were never promised pay
# for the mistake, as long as nobody else needs them. The last bar is past the thick line. It runs well until 8,192 tokens of
# prompts meet in one step. That is the out-of-memory error that nobody can repeat.
#
# ## The ladder
#
# Now all rungs, on one trace, in one engine, with one pool of 96 blocks. Each rung adds one idea to those below it:
#
# | rung | what is new | lab |
# |---|---|---|
# | contiguous | a run of blocks for the longest sequence, reserved at admission; static batches | 02, 07 |
# | + pages | blocks on demand | 03 |
# | + continuous | who is done leaves, who waits comes in | 07 |
# | + chunks | a prompt is computed in pieces beside the decodes | 08 |
# | + prefix cache | what somebody has computed is found | 05, 06 |
#
# The requests are 24 chats with long answers and short ones. The engine runs your `step` and your `sample` on every
# rung, and the answers must be the same on all of them.

# %%
from kvlab.lab.scenes.engine import RUNGS, climb

measured, answers = {}, {}
for rung in RUNGS:
    measured[rung], answers[rung] = climb(rung, lab.parts())
same = all(found == answers["contiguous"] for found in answers.values())
print("every rung gave the same answers:", same)
table(["rung", "steps", "tokens computed", "running", "filled"],
      [(rung, r.steps, f"{r.computed:,}", f"{r.running:.1f}", f"{100 * r.filled:.0f}%") for rung, r in measured.items()])

# %% [markdown]
# All of this is counted, so run the cell again and it stays. ("Filled" is above 100% where blocks are shared.) Seconds are
# not shown here, on purpose. On a CPU a step's time grows with its tokens, so fewer steps are not a proportional gain; and
# a run this short moves more from one time to the next than from one rung to the next. A GPU that reads all weights in
# every step is another matter. For that we have the simulator: the same scheduler, with the clock of a cost model, exact to the
# last digit. A 13B with full multi-head attention on an A100 with 80 GB, up to 300 chats, at several loads:

# %%
from kvlab.lab.scenes.engine import gpu_blocks, simulate, traffic

LOADS = {"one in 10 s": (0.1, 60), "2 a second": (2, 300), "10 a second": (10, 300), "all at once": (None, 300)}
found = {load: {rung: simulate(rung, traffic(*what)) for rung in RUNGS} for load, what in LOADS.items()}
rush = found["all at once"]
print(f"{gpu_blocks():,} blocks of 16: {gpu_blocks() // 128} reservations of 2,048 tokens")
gain = rush["+ prefix cache"].tokens_per_s / rush["contiguous"].tokens_per_s
lab.compare("the whole ladder", f"{gain:.2f}")

# %% fold="yes"
COLUMNS = {"tokens_per_s": "tokens/s", "ttft_p50": "first token, p50, s", "ttft_p95": "first token, p95, s",
           "longest_gap": "longest gap, s"}


def show_load(load):
    return draw.ladder(found[load], COLUMNS, f"13B on an A100 (simulated), load: {load}")


sliders(show_load, load=(list(LOADS), "all at once"),
        alt="Bars of five rungs, all at once. Tokens a second: " + ", ".join(
            f"{rung} {row.tokens_per_s:,.0f}" for rung, row in rush.items()) + ". The longest gap falls with chunks.")

# %% [markdown]
# **What to look at.** Choose the loads one after the other, from the bottom. At "one in 10 s" all five bars of tokens/s
# are equal: nobody can serve more than comes in. What moves there is the wait for the first token. Each rung has *its own
# column*. Pages and continuous batching raise tokens/s, once there is a queue. Chunks hardly do: they shorten the longest
# gap. Before you read on: which rung would you take away first, if you had to? Say first which column *your* users would
# feel.
#
# And the 7B on the H100, everything at once?

# %%
seven_rush = {rung: simulate(rung, traffic(None), gpu="H100", model="Qwen2.5-7B") for rung in RUNGS}
pages_gain = seven_rush["+ pages"].tokens_per_s / seven_rush["contiguous"].tokens_per_s
lab.compare("pages for the 7B", f"{pages_gain:.2f}")
for name, label in (("Llama-2-13B", "13B"), ("Qwen2.5-7B", "7B")):
    room, shape = gpu_blocks(model=name), model_shape(name)
    print(f"{label:3} weights {shape.weight_bytes() / GB:4.1f} GB, K and V of a token {shape.kv_bytes_per_token() / 1e3:5.1f} kB: "
          f"{room:6,} blocks in 80 GB, {room // 128:3} reservations of 2,048 tokens, for 256 seats")
for rung, row in seven_rush.items():
    print(f"{rung:15} {row.tokens_per_s:7,.0f} tokens/s, filled {100 * row.filled:4.0f}%, longest gap {row.longest_gap:.3f} s")

# %% [markdown]
# The reservations waste as much as before: look at "filled". But there is room for more of them than there are seats, so
# nobody ever waits for memory, and pages bring nothing at all. **Waste costs only where memory is what runs out.** And look
# at the rung "+ chunks": it shortens the longest gap, and *costs* throughput here.
#
# So which rung would you take away? There is no one answer: it depends on whose column nobody feels. A job at night, with no one waiting for the
# next word, does without chunks: their column is the gap. This 7B would not miss pages in tokens/s. But do not saw there:
# the prefix cache stands on pages, for blocks are what is shared.
#
# ## Into the engine
#
# Both parts, in the engine with the model, in a pool so small that requests are preempted. It takes about half a minute.

# %%
result = lab.run_engine(num_requests=10, num_gpu_blocks_override=32, max_tokens=40)

# %% [markdown]
# ## Extra: exercise 7, who spoils the batch?
#
# One request of 64 makes the forward pass raise. All 64 were in one batch. Who was it? Try the step again, one request at a
# time. A forward only writes slots that its own requests will write again, so trying again is harmless. Two things are not:
# copies of blocks must be made once; and if *they* failed, nothing may be tried at all.
#
# `alone(output, i)` is the step of entry i alone, with `block_ops_done` set. `output.scheduled` is a list of (request,
# number of tokens); `request.request_id` names it. Here is a step of two, and its second entry alone:

# %%
from types import SimpleNamespace

from kvlab.engine.engine_steps import alone
from kvlab.schedule import SchedulerOutput

ann, bob = SimpleNamespace(request_id="ann"), SimpleNamespace(request_id="bob")
both = SchedulerOutput(step=1, scheduled=[(ann, 3), (bob, 1)], block_tables=[[4], [5, 6]], block_ops=[("copy", 5, 7)])
for output in (both, alone(both, 1)):
    who = ", ".join(f"{request.request_id} computes {n}" for request, n in output.scheduled)
    print(f"{who}; block_ops {output.block_ops}, block_ops_done {output.block_ops_done}")


# %% ex="careful_execute"
def careful_execute(runner, output):
    """Two dicts: the sampled token ids by request id, and str(error) by id for who fails alone.

    First all together; if that raises, each entry alone, in order. If output.block_ops is not
    empty and output.block_ops_done is not set, the copies failed: raise what was raised. Ctrl-C
    (KeyboardInterrupt) is not an error of a request.
    """
    ### BEGIN SOLUTION
    def attempt(one):
        try:
            return runner.execute(one), None
        except Exception as error:
            return {}, error

    sampled, error = attempt(output)
    if error is None:
        return sampled, {}
    if output.block_ops and not output.block_ops_done:
        raise error
    failed = {}
    for i, (request, _) in enumerate(output.scheduled):
        tokens, error = attempt(alone(output, i))
        sampled.update(tokens)
        if error is not None:
            failed[request.request_id] = str(error)
    return sampled, failed
    ### END SOLUTION

# %% check="careful_execute"
check("careful_execute")

# %% [markdown]
# The engine does this around your `step`, which never hears of it. What would be a faster search, if one of 64 fails? And
# when is it slower?
#
# ## What the textbook says, and what we measured
#
# Each line is computed by this notebook. The first question is always under which conditions the text is right.

# %% fold="yes"
from kvlab.sim import Uniform, make_workload


def step_up(rows, upper, lower):
    return rows[upper].tokens_per_s / rows[lower].tokens_per_s


light, ten = found["one in 10 s"], found["10 a second"]
running = rush["+ continuous"].running / rush["contiguous"].running
long_in = make_workload(40, Uniform(15_000, 16_000), Uniform(3, 7), seed=1)
few = [simulate(rung, long_in, longest=16_384).tokens_per_s for rung in ("+ pages", "+ continuous")]
decodes = sum(a.output_tokens - 1 for a in traffic(None).arrivals)
prefill = [rush[rung].computed - decodes for rung in ("+ chunks", "+ prefix cache")]
short = simulate("contiguous", make_workload(200, Uniform(50, 250), Uniform(50, 250), seed=1))
rows = [
    ("L33 0.2", "pages and continuous batching together: 6.6 times the largest stable concurrency; waste was 68%",
     f"13B, all at once: {running:.1f} times the requests that run in a step, on average; "
     f"{100 - 100 * rush['contiguous'].filled:.0f}% of the reserved memory was waste",
     running > 5, "reservations fill the memory, and there is a queue; it depends on the lengths, and on the 4,096 (there) "
     "or 2,048 (here) tokens that are reserved"),
    ("L33 1.4", "reserved memory is used to 10-20%",
     f"{100 * short.filled:.0f}% for 100 to 500 tokens; "
     + ", ".join(f"{100 * r['contiguous'].filled:.0f}%" for r in found.values()) + " at our four loads",
     0.1 < short.filled < 0.2, "for sequences of about 300 tokens on average in 2,048; ours have "
     f"{sum(a.prompt_tokens + a.output_tokens for a in traffic(None).arrivals) / 300:.0f}"),
    ("L33 0.2", "after pages, waste is 3.2%",
     ", ".join(f"{100 * (1 - r['+ pages'].filled):.1f}%" for r in found.values()),
     all(r["+ pages"].filled > 0.968 for r in found.values()), "the mean length is many blocks"),
    ("L33 8.1-3", "continuous batching does not give 4 times everywhere",
     "; ".join(f"{load}: {step_up(r, '+ continuous', '+ pages'):.2f}x" for load, r in found.items())
     + f"; 15,000 to 16,000 tokens in and 3 to 7 out: {few[1] / few[0]:.2f}x",
     max(step_up(r, "+ continuous", "+ pages") for r in found.values()) < 4, ""),
    ("L33 4", "chunks keep a long prompt from holding up the others",
     f"longest gap {1000 * ten['+ continuous'].longest_gap:.0f} ms before, {1000 * ten['+ chunks'].longest_gap:.0f} ms after; "
     f"tokens/s {step_up(ten, '+ chunks', '+ continuous'):.2f}x",
     ten["+ chunks"].longest_gap < ten["+ continuous"].longest_gap / 2, "it is a matter of gaps, not of throughput"),
    ("L33 6.2", "a shared beginning spares most of the prefill",
     f"tokens of prompts computed, all at once: {prefill[0]:,} before, {prefill[1]:,} after; "
     f"tokens/s {step_up(rush, '+ prefix cache', '+ chunks'):.2f}x all at once, {step_up(light, '+ prefix cache', '+ chunks'):.2f}x in a quiet hour",
     prefill[1] < prefill[0] / 2, "prompts share, here 320 tokens"),
    ("PAV 3.1", "blocks = (utilisation × memory − weights − activations − graphs) / block",
     f"profiled with an average step it fits at 0.92: {over['average step, 0.92'] < 0}, at 0.98: {over['average step, 0.98'] < 0}",
     True, "the activations are those of the worst step"),
    ("L33 8.1-5, 8.2", "0.98 asks for trouble; take 0.90, and leave 6 GB for all that is not K and V",
     f"7B, 24 GB, profiled with an average step: {over['average step, 0.98']:.2f} GB too many at 0.98; with the worst step it "
     f"fits, and {-over['worst step, 0.98']:.2f} GB are left. Its activations take {bad / GB:.2f} GB",
     over["average step, 0.98"] > 0, "something was not profiled: a worse step, graphs, other processes. 10% are 6 GB on a GPU "
     f"of {6 / 0.1:.0f} GB only"),
    ("PAV 3", "more concurrency turns into throughput",
     f"13B: {step_up(rush, '+ pages', 'contiguous'):.2f}x by pages; 7B on an H100: {pages_gain:.2f}x; "
     f"13B, one in 10 s: {step_up(light, '+ pages', 'contiguous'):.2f}x",
     step_up(rush, "+ pages", "contiguous") > 1.5, "memory is what runs out, and somebody waits"),
]
ledger(["where", "the text says", "we find", "verdict", "condition"],
       ["holds", "holds if", "contradicted here"], rows)

# %% [markdown]
# **The factors.** None of them is a property of an engine. Each is a property of an engine, a model, a GPU *and a load*. The
# same change gives a factor above two, or nothing. Whoever quotes a factor should say who was waiting for what.
#
# ## What to remember
#
# - A token is a function of logits and one number; the number is a function of seed and position. Then company, preemption
#   and chunks cannot change an answer.
# - A request draws in the step that computes its last known token. There is no other test for "is this a decode".
# - A step is three calls: decide, compute, take in. Only the last one changes what requests are.
# - The pool is what the *worst* step leaves. An average step leaves more, for a while.
# - Every rung of the ladder has its own column. Look for what runs out (memory, seats, the user's patience) before you climb.
#
# ## Questions to think about
#
# 1. A request with n = 4 is preempted before its children are born. Which seeds do they draw with afterwards? Why is
#    "seed + the number of draws so far" wrong?
# 2. `min_p` drops tokens whose weight is below a share of the highest. Where in your `sample` would it go, before top-p or
#    after it? Find weights for which the order matters.
# 3. An engine could schedule step t + 1 while the GPU computes step t. Which of the three calls needs something that it does
#    not have yet, and what could it put in its place?
# 4. Two engines give 0.7 × 8 as 5.6 and as 5.6000001. How often do their texts part, for a vocabulary of 150,000?
# 5. At which load, between "2 a second" and "10 a second", do pages begin to help the 13B? Find it with `traffic(rate)`.
#
# ## Where this lives in real engines
#
# | here | vLLM V1 |
# |---|---|
# | `step` | `EngineCore.step`: `schedule`, `execute_model`, `update_from_output` |
# | `sample` | `v1/sample/sampler.py`: temperature, min-p, top-k and top-p, all rows at once on the GPU |
# | `uniform(seed, position)` | a `torch.Generator` for each request that has a seed |
# | `draws` | `logits_indices` of the model runner; partial prefills are sampled and dropped |
# | `worst_batch` | `profile_run`: a dummy step of `max_num_batched_tokens` tokens, and a dummy sampler run |
# | `careful_execute` | none: an exception of the forward ends the engine |
#
# In kvlab: `kvlab/engine/core.py` is the loop, `kvlab/engine/sampler.py` draws for many rows at once,
# `kvlab/engine/runner.py` lays out the batch, `kvlab/engine/engine_steps.py` is what you wrote.
