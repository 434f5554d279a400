# %% [markdown]
# # Lab 08: Chunked prefill (分块预填充)
#
# Thirty-two people are reading their answers as these are written. Then somebody sends a document. In this lab you find
# out who has to wait for it and for how long, you write the few lines that decide about it, and you put them into the
# engine.
#
# It goes with L33 4.1 to 4.4, and with the budgets of L33 8.2. You need the idea of lab 07, that requests enter and
# leave between two steps. You do not need to have solved it.
#
# **Time.** The six core exercises take about 85 minutes, reading and looking at the figures another 40. A good place
# for a break is after exercise 3, and another one after exercise 6. Cells that only draw or count are folded away: one
# click opens them, and you need not read them.

# %%
from kvlab.lab import Lab

lab = Lab("08")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## Two servers, one median
#
# Two servers, X and Y. Each has one A100 with the same 8B model. For a test, both get the same 160 requests at the same
# moments, chats and documents mixed. (The lab has no A100. The scheduler is the real one; a cost model says how long
# each step takes. Its efficiencies are estimates.)
#
# Here is what the operator's screen shows of the test. An **inter-token latency** (词间延迟, ITL) is the time between two
# tokens of one reader.

# %%
from kvlab.costs import GPUCost, work_of_step
from kvlab.lab.scenes.chunks import config_of, mixed, whole
from kvlab.parts import Parts
from kvlab.sim import Simulator

MODEL = "Llama-3-8B"  # Llama-3.1-8B has the same shape, and reads prompts of 128,000 tokens
TRAFFIC = {"A100": mixed(rate=2.5), "H100": mixed(rate=6)}  # requests a second


def serve(config, gpu="A100", plan=None):
    """Simulate a test on one GPU; plan: a function in the place of our plan_tokens."""
    parts = Parts() if plan is None else Parts(plan_tokens=plan)
    return Simulator(config, GPUCost.of(gpu, MODEL), parts).run(TRAFFIC[gpu])


servers = {"X": serve(config_of(32_000)), "Y": serve(config_of(512))}
for name, result in servers.items():
    found = result.summary()
    print(f"{name}: {found['output_tokens_per_s']:.0f} tokens a second, "
          f"median ITL {1000 * found['itl_p50_s']:.1f} ms")

# %% [markdown]
# The two lines are alike. But the people at server X complain that the text stands still. Nobody complains about Y.
# Look at the tails:

# %%
for name, result in servers.items():
    num_gaps = sum(result.gaps.values())
    long_gaps = sum(count for gap, count in result.gaps.items() if gap > 200e6)
    stalled = sum(record.longest_gap > 200e6 for record in result.records)
    print(f"{name}: worst ITL {max(result.gaps) / 1e6:,.0f} ms. Longer than 200 ms: {long_gaps} of "
          f"{num_gaps:,} gaps, and {stalled} of {len(result.records)} people have met one")

# %% [markdown]
# Of a hundred gaps one or two are long, which no median shows. But an answer has more than a hundred tokens, so most
# people meet one. X and Y differ in a single setting, and in no hardware at all.
#
# ## A picture: the bulldozer (推土机)
#
# What happens on X. To see it large: an H100, a 13B model, 32 readers, and one prompt of 8,000 tokens. (The model has
# the shape of Llama-2-13B. That model itself stops at 4,096 tokens.)
#
# **How to read it.** Each box is one step. It is as wide as the step lasts, and as high as it has tokens. Orange and
# hatched are tokens of the prompt, blue are decodes. The steps before and after have 32 tokens: at this scale you see
# no more than a line on the ground. Below, a dot is a token that somebody gets. Red is a reader's longest gap until the
# newcomer has its first token. The dashed bar is the newcomer's **time to first token** (首字延迟, TTFT).

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.draw import steps as draw
from kvlab.lab.scenes.chunks import NEWCOMER, beside
from kvlab.lab.show import picture, sliders

cost13 = GPUCost.of("H100", "Llama-2-13B")
bulldozer = beside(8000, cost13, chunked=False, around=300)


def draw_scene(axes, scene, budget, title, **options):
    """Steps above, tokens below, for one reader and the newcomer."""
    draw.bars(axes[0], scene.steps, NEWCOMER, scene.arrival, budget, title=title, **options)
    draw.lanes(axes[1], scene.steps, ["reader 1", NEWCOMER], scene.arrival, NEWCOMER)


figure, axes = plt.subplots(2, 1, figsize=(9, 4), layout="constrained", height_ratios=[3, 1.4],
                            sharex=True)
draw_scene(axes, bulldozer, None, "One step for the whole prompt")
axes[1].set(xlim=(-110, 680), xlabel="ms since the newcomer's arrival")
picture(figure, "Boxes over time: one of 8,032 tokens that lasts "
        f"{bulldozer.worst_gap:.0f} ms, in which no reader gets a token; before and after it steps of "
        "32 tokens, too low to be seen.")
first = bulldozer.steps[0]
print(f"a step of {len(first.tokens)} decodes: {first.end - first.start:.1f} ms; "
      f"the one with the prompt: {bulldozer.worst_gap:.0f} ms")

# %% [markdown]
# A step is one forward pass for all. It ends for all at the same time. So the 32 readers wait for the last of 8,000
# tokens that are none of theirs. This is prefill-decode interference (互相干扰).
#
# ## Your predictions
#
# The cure is known: cut the prompt into chunks, and compute one chunk a step, beside the decodes.
#
# First: a step may have 512 tokens. 32 readers decode all the time, one token each in every step. A prompt of 4,000
# tokens arrives. After how many steps does it have its first token? (L33 4.2 divides 4000 by 512.)
#
# Second: a colleague builds this for server X. Prompts are now cut into chunks, and no step has more than 512 tokens.
# The colleague lets the chunks go first, so that newcomers need not wait, and decodes get what is left. The worst ITL
# of X was about 3,500 ms. What is it now, on the same traffic?
#
# Third: L33 8.2 recommends steps of 2,048 tokens on an H100. In a step with few tokens the GPU waits for its memory,
# and more tokens cost no time. From how many tokens on do they cost time?
#
# Replace each `None` by a number, in digits, and run the cell.

# %%
lab.predict("first token", None, unit="steps")
lab.predict("chunks first", None, unit="ms")
lab.predict("knee", None, unit="tokens")

# %% [markdown]
# ## Exercise 1: by hand
#
# Take a pencil. A step has at most 5 tokens, which is its **budget** (预算). Three readers decode: they take 3 of them in
# every step. A prompt of 7 tokens arrives. Fill in:
#
# | | step 1 | step 2 | step 3 | step 4 | first token after |
# |---|---|---|---|---|---|
# | whole: readers + prompt | 3 + 7 | | | | 1 step of 10 tokens |
# | in chunks: readers + chunk | 3 + 2 | 3 + ? | 3 + ? | 3 + ? | ? steps |
#
# Let a token cost a millisecond. How long is a reader's gap when the prompt comes whole, and how long in chunks? And
# what happens with five readers?
#
# Now write down what you did, for any numbers.

# %% ex="chunks"
def chunks(num_tokens, budget, num_decodes):
    """Cut a prompt into the chunks in which it is computed.

    num_tokens: of the prompt, 1 or more. budget: tokens that a step may have, 1 or more.
    num_decodes: readers who take one token of every step, before anybody else; 0 or more.

    Returns a list of whole numbers, the sizes of the chunks in order. Each takes all that is
    left of its step. None if the prompt would never be computed.
    """
    ### BEGIN SOLUTION
    left_for_prompt = budget - num_decodes
    if left_for_prompt <= 0:
        return None
    sizes = []
    while sum(sizes) < num_tokens:
        sizes.append(min(left_for_prompt, num_tokens - sum(sizes)))
    return sizes
    ### END SOLUTION

# %% check="chunks"
check("chunks")

# %% [markdown]
# Stuck? `hint("chunks")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("chunks")` is your function if it passes its check, and ours if not. So you can read on without having
# solved everything. It looks at the moment when its cell runs: if you solve an exercise later, run the cells below it
# again.

# %%
cut = lab.best("chunks")

print("the pencil's:", cut(7, 5, 3), "  with five readers:", cut(7, 5, 5))
for num_decodes in (0, 32, 500):
    sizes = cut(4000, 512, num_decodes)
    print(f"4,000 tokens in steps of 512, {num_decodes:3} readers: {len(sizes)} chunks of "
          f"{sizes[0]}, the last of {sizes[-1]}")
steps_to_first_token = len(cut(4000, 512, 32))
lab.compare("first token", steps_to_first_token)

# %% [markdown]
# (The pencil's gaps: 10 ms in one piece, 5 ms in chunks. Five readers use the budget up, so the prompt never gets in.)
#
# The textbook's eight is right where 512 is the size of the *chunk* and the readers' tokens come on top, and also when
# nobody is reading. In vLLM 512 is the budget, and the readers' tokens come out of it: with 32 of them it takes a step
# more, and with 500 it takes 334. That is why engines ask for a budget well above the number of **seats** (席位): the
# requests that may run at once, `max_num_seqs`.
#
# ## The model, in five rules
#
# 1. **A request is a number.** Its **pending** tokens (待计算) are those that it has, and whose K and V are not computed
#    yet. A prompt that has just come has all of its tokens pending. Who decodes has 1: the token that came last. There
#    is no other difference between prefill and decode.
# 2. **A step has a budget.** The tokens of all requests together are at most `max_num_batched_tokens`.
# 3. **A chunk builds on the chunks before it.** Their K and V are in the cache. Nothing is computed twice.
# 4. **A token comes out** at the end of a step that computes the *last* pending token of a request, and at no other
#    time. So all chunks but the last one bring nothing.
# 5. **Who reads goes first.** Decodes take their tokens before chunks do.
#
# A sanity check of rule 3. Here is the small decoder of lab 00. It gets a prompt at once, and then another cache gets
# it in the chunks that you cut. Is the last one's output the same?

# %%
from kvlab.primer import Cache, ToyDecoder

toy, prompt = ToyDecoder(), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
at_once = toy.forward(prompt, Cache())

for sizes in ([4, 4, 2], cut(len(prompt), 5, 2), [1] * len(prompt)):
    cache, start = Cache(), 0
    for size in sizes:
        logits = toy.forward(prompt[start : start + size], cache)
        start += size
    apart = max(abs(a - b) for a, b in zip(at_once, logits, strict=True))
    print(f"in chunks of {sizes}: largest difference {apart}")

# %% [markdown]
# Equal to the last bit, here. (On a GPU, products of another shape are summed in another order, so they are equal up to
# rounding.)
#
# ## Exercise 2: the plan
#
# This is the heart of the lab, and of L33 4.4: who gets how many tokens of the next step? The scheduler hands you the
# pending tokens of all who run, and does what you answer. (It refuses only what cannot be done, such as more tokens
# than the budget has.)
#
# There is a `limit` besides the budget: the most tokens that one request may get in one step. Usually it is as large as
# the budget. What it is good for comes later.
#
# Work these out before you write: `plan_tokens([1, 7, 1], 5, 5)`. Then `[7, 1, 1]`. Then four decodes and a budget of
# 2.

# %% ex="plan_tokens"
def plan_tokens(pending, budget, limit):
    """Divide the budget of one step among those who run.

    pending: a list, for each request its number of pending tokens, 0 or more. budget: tokens
    that may be given in all, 0 or more. limit: the most that one request may get, 1 or more.

    Returns a new list of whole numbers (int), one for each request, in the same order. First all
    with exactly one token pending are served, in order; then all others, in order. Each gets
    as many tokens as it has pending, as far as limit and budget go. Changes nothing.
    """
    ### BEGIN SOLUTION
    plan = [0] * len(pending)
    decodes = [i for i, tokens in enumerate(pending) if tokens == 1]
    others = [i for i, tokens in enumerate(pending) if tokens != 1]
    for i in decodes + others:
        plan[i] = min(pending[i], limit, budget)
        budget -= plan[i]
    return plan
    ### END SOLUTION

# %% check="plan_tokens"
check("plan_tokens")

# %%
plan = lab.best("plan_tokens")

for pending, budget, limit in (([1, 7, 1], 5, 5), ([7, 1, 1], 5, 5), ([1, 1, 1, 1], 2, 2),
                               ([900, 1, 900, 1], 512, 512), ([900, 1, 900, 1], 512, 256)):
    print(f"pending {pending}, budget {budget}, limit {limit}: {plan(pending, budget, limit)}")

# %% [markdown]
# The third line is unfair: the last two of four readers get nothing, and it will be the same two in the next step. vLLM
# refuses a budget that is smaller than the number of seats, and rightly.
#
# ## Exercise 3: a scheduler on paper
#
# Now many requests, step after step. Memory is ample, and there are seats for all. Then this is all that a scheduler
# does in a step:
#
# 1. It asks the plan about those who run, in the order in which they have entered.
# 2. With what is left of the budget it lets waiting ones in, in the order of arrival. Each gets the smallest of what it
#    has pending, the limit, and what is left. Who would get nothing stays outside, and so do all behind it.
# 3. After the step: who has nothing pending any more gets a token (rule 4). This token is pending itself from now on,
#    unless it was the last one: then the request is gone.
#
# Do it by hand for two requests, with a budget of 3. The first arrives in step 0, has 1 token, and wants 3. The second
# arrives in step 1, has 4, and wants 2. (The check has this example.)

# %% ex="timetable"
def timetable(requests, plan, budget, limit):
    """What a scheduler does, step by step, until the last request has its last token.

    requests: a list of (arrival, prompt, output), in order of arrival. arrival: the first step,
    counted from 0, in which the request may get tokens. prompt: its tokens. output: how many
    tokens it gets before it is gone. Both are 1 or more.
    plan: a function like your plan_tokens, called plan(pending, budget, limit). pending is a
    list with the pending tokens of all who have entered in an earlier step and have not gone,
    in the order in which they entered. (If there are none, you may ask it or not.)
    budget, limit: 1 or more.

    Returns two lists. Rows: for each step a list of how many tokens each request computes in
    it, 0 for those who compute none; also for a step in which nobody is there yet. Came: for
    each request the list of the steps at whose end it gets a token. Changes nothing.
    """
    ### BEGIN SOLUTION
    pending = [prompt for _, prompt, _ in requests]
    came = [[] for _ in requests]
    running, waiting, rows = [], list(range(len(requests))), []
    while running or waiting:
        step, row = len(rows), [0] * len(requests)
        planned = plan([pending[i] for i in running], budget, limit)
        for i, tokens in zip(running, planned, strict=True):
            row[i] = tokens
        left = budget - sum(row)
        while waiting and left > 0 and requests[waiting[0]][0] <= step:
            newcomer = waiting.pop(0)
            row[newcomer] = min(pending[newcomer], limit, left)
            left -= row[newcomer]
            running.append(newcomer)
        for i in running:
            pending[i] -= row[i]
            if pending[i] == 0:
                came[i].append(step)
                pending[i] = 1
        running = [i for i in running if len(came[i]) < requests[i][2]]
        rows.append(row)
    return rows, came
    ### END SOLUTION

# %% check="timetable"
check("timetable")

# %% [markdown]
# ## Watch it: three ways to serve the same four
#
# Readers A, B and C, and a newcomer D with a prompt of 12 tokens, who arrives in step 1. The third way is the
# colleague's from the second prediction: chunks first.
#
# **How to read it.** A row is a request, a column a step. The number is how many tokens it computes. Orange and
# hatched is a prompt or a piece of one, blue is a decode. A dotted box with a 0 is a step in which somebody inside
# gets nothing; an empty one is a newcomer who waits outside. A dot means that a token came. Below each step is the
# number of its tokens, in bold where the budget is used up.

# %%
table = lab.best("timetable")


def chunks_first(pending, budget, limit):
    """The colleague's plan."""
    given = [0] * len(pending)
    for i in sorted(range(len(pending)), key=lambda i: pending[i] == 1):
        given[i] = min(pending[i], limit, budget)
        budget -= given[i]
    return given


def told(requests, came):
    """D's wait for its first token, and the longest gap of anybody, in steps."""
    wait = came[-1][0] - requests[-1][0] + 1
    gap = max(b - a for steps in came for a, b in zip(steps, steps[1:], strict=False))
    return f"Steps to D's first token: {wait}. Longest gap, in steps: {gap}"


FOUR = [(0, 1, 8)] * 3 + [(1, 12, 3)]

# %% fold="yes"
WAYS = {"whole prompts": (plan, 20), "decodes first": (plan, 5), "chunks first": (chunks_first, 5)}
figure, axes = plt.subplots(3, 1, figsize=(9, 7.8), layout="constrained")
figure.get_layout_engine().set(hspace=0.1)
for ax, (name, (one, budget)) in zip(axes, WAYS.items(), strict=True):
    rows, came = table(FOUR, one, budget, budget)
    draw.grid(ax, rows, came, FOUR, budget, title=f"{name}. {told(FOUR, came)}")
axes[-1].set_xlabel("step")
picture(figure, "Three timetables. Whole prompts: D computes 12 tokens in step 1. Decodes first: "
        "D computes 2 tokens in each of steps 1 to 6, and A, B and C one in every step. "
        "Chunks first: 2, 5 and 5 tokens, and A, B and C get nothing in steps 2 and 3.")

# %% [markdown]
# **What to look at.** In the first picture nobody misses a step. But step 1 has 15 tokens, and a step with five times
# the tokens lasts longer: this table does not show the bulldozer, because it has no clock. In the second picture no
# step is large, and nobody misses one: D pays. In the third one no step is large either, and still A, B and C get
# nothing in two of them. Cutting the prompt did not help them.
#
# Move the slider. From which budget on does D need only one step? What happens at 3? (The slider needs a running
# kernel.)

# %% fold="yes"
def show_table(budget):
    rows, came = table(FOUR, plan, budget, budget)
    figure, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
    draw.grid(ax, rows, came, FOUR, budget, title=f"decodes first. {told(FOUR, came)}")
    ax.set_xlabel("step")
    return figure


sliders(show_table, budget=(3, 16, 4),
        alt="Decodes first with a budget of 4: D computes one token a step, in steps 1 to 7; "
        "when A, B and C have gone, four in step 8 and its last one in step 9.")

# %% [markdown]
# (From 15 on, 3 for the readers and 12 for the prompt. At 3 the readers use all of it, and D waits outside until they
# have gone. And at 4, look at step 9. The drawing calls D's last token a piece of a prompt. Your plan takes it for a
# decode. By rule 1 it is right: nobody can tell them apart, and nobody has to.)
#
# ## Your table is what the engine does
#
# Is it, though? Here is the real scheduler, with its blocks, tables, queues and statistics, in the simulator. Every
# step takes one second, so that the clock counts steps. 300 random workloads: do its steps equal your table, number by
# number?

# %%
import random

from kvlab.lab.scenes.chunks import on_paper

rng, num_steps, differences = random.Random(8), 0, []
for _ in range(300):
    requests = sorted((rng.randint(0, 8), rng.randint(1, 40), rng.randint(1, 9)) for _ in range(6))
    budget = rng.randint(1, 24)
    limit = rng.choice([budget, rng.randint(1, budget)])
    mine = table(requests, plan, budget, limit)
    theirs = on_paper(requests, budget, limit)
    num_steps += len(mine[0])
    if [[list(row) for row in part] for part in mine] != list(theirs):
        differences.append((requests, budget, limit))
print(f"{num_steps:,} steps compared in 300 workloads; {len(differences)} workloads differ")
print(*differences[:1], sep="\n")

# %% [markdown]
# All that a real scheduler has besides is for the case that memory or seats run out: lab 09.
#
# ## With a clock
#
# Back to the bulldozer: 32 readers, a 13B model, 8,000 tokens. The steps come from the simulator, which runs your plan
# if you have solved it. Their times come from the cost model. Above: in one piece. Below: a budget of 512 tokens.

# %% fold="yes"
mild = beside(512, cost13, parts=lab.parts(), around=130)
figure, axes = plt.subplots(4, 1, figsize=(9, 7.6), layout="constrained",
                            height_ratios=[2.4, 1.2, 2.4, 1.2], sharex=True)
draw_scene(axes[:2], bulldozer, None, "whole: 8,032 tokens in one step")
draw_scene(axes[2:], mild, 512, f"a budget of 512: {len(mild.during)} steps")
axes[3].set(xlim=(-110, 680), xlabel="ms since the newcomer's arrival")
picture(figure, f"Above, one box of 8,032 tokens; the reader waits {bulldozer.worst_gap:.0f} ms. "
        f"Below, {len(mild.during)} boxes of at most 512 tokens; the reader's longest gap is "
        f"{mild.worst_gap:.0f} ms, and the newcomer waits {mild.ttft:.0f} ms.")

# %%
took = [step.end - step.start for step in mild.during]
for name, scene in {"whole": bulldozer, "512": mild}.items():
    print(f"{name:5}: longest gap of a reader {scene.worst_gap:4.0f} ms; "
          f"the newcomer's first token after {scene.ttft:.0f} ms")
print(f"the steps with full chunks take {took[0]:.1f} to {max(took):.1f} ms")
print(f"tokens that each reader has {mild.ttft:.0f} ms after the arrival: "
      f"{bulldozer.read(mild.ttft)} (whole), {mild.read(mild.ttft)} (512)")

# %% [markdown]
# **What to look at.** The longest gap is eleven times shorter, and the newcomer waits for nearly half as long again.
# That is the trade, and you will see it all over this lab.
#
# The last line is the surprise. Chunking looks like a waste: the weights are read in every one of 17 steps instead of
# once. And yet, at the moment when the newcomer has its first token, each of the 32 readers has *more* than without
# chunks. (The newcomer has fewer, of course.) The reason: a step of decodes waits for memory while the arithmetic units
# idle. A chunk uses just these. Each needs what the other leaves, so together they take less time than one after the
# other. The decodes travel **piggyback** (搭便车) on the chunks.
#
# Choose the budget. Before you do: what happens to the gap, and what to the newcomer, from 512 to 128?

# %% fold="yes"
def show_budget(budget):
    scene = beside(int(budget), cost13, parts=lab.parts(), around=60)
    figure, axes = plt.subplots(2, 1, figsize=(9, 4), layout="constrained", sharex=True,
                                height_ratios=[3, 1.4])
    title = (f"{len(scene.during)} steps. Longest gap {scene.worst_gap:.0f} ms, first token "
             f"after {scene.ttft:,.0f} ms")
    draw_scene(axes, scene, int(budget), title)
    axes[1].set_xlabel("ms since the newcomer's arrival")
    return figure


BUDGETS = ("64", "96", "128", "192", "256", "384", "512", "1024", "2048", "4096")
sliders(show_budget, budget=(BUDGETS, "128"),
        alt="A budget of 128: 84 steps, none much longer than one of decodes alone.")

# %% [markdown]
# Below about 256 the gaps do not shrink any more. Then a step takes what it takes to read the weights and the K and V,
# with a chunk or without one. All that a smaller budget still does is to make the newcomer wait. (The gaps even grow a
# little: the longer the newcomer waits, the more K and V the readers have by then.)
#
# ## The order is the cure
#
# Now the colleague's server. Whole prompts, chunks with your plan, chunks with the colleague's, all on the traffic
# from the beginning:

# %%
PLANS = {"whole prompts": (whole(32_000), None), "512, decodes first": (config_of(512), plan),
         "512, chunks first": (config_of(512), chunks_first)}
results = {name: serve(config, plan=one) for name, (config, one) in PLANS.items()}
worst = {name: max(result.gaps) / 1e6 for name, result in results.items()}
for name, result in results.items():
    found = result.summary()
    print(f"{name:19}: worst ITL {worst[name]:6,.0f} ms, ITL p99 {1000 * found['itl_p99_s']:3.0f} "
          f"ms; TTFT median {1000 * found['ttft_p50_s']:.0f} ms, p99 {found['ttft_p99_s']:.2f} s")
longest = max(arrival.prompt_tokens for arrival in TRAFFIC["A100"].arrivals)
print(f"the longest prompt: {longest:,} tokens, {len(cut(longest, 512, 0))} steps of 512")
lab.compare("chunks first", round(worst["512, chunks first"]))

# %% [markdown]
# The steps are small now, and the worst gap is what it was. The longest prompt takes the whole budget of all its
# steps, and the readers sit through them. **Chunks bound the length of a step. Only the order bounds the gap of a
# reader.** And the newcomers gained little: the median TTFT is nearly the same in all three rows. Only those who wait
# longest, the p99, have gained about a quarter, and with either order.
#
# So far this is the textbook's decision tree, L33 4.4. But open vLLM's V1 scheduler, and you will find no "decodes
# first" in it. It serves those who run **in the order in which they have entered**, whatever they do. Is that the
# colleague's mistake?

# %%
def in_order(pending, budget, limit):
    """Who has entered first is served first."""
    given = []
    for tokens in pending:
        given.append(min(tokens, limit, budget))
        budget -= given[-1]
    return given


same, compared = 0, 0
for budget, limit in ((96, None), (512, None), (512, 128)):
    config = config_of(budget, limit)
    a, b = serve(config, "H100", plan), serve(config, "H100", in_order)
    same += a.records == b.records and a.step_columns == b.step_columns
    compared += 1
print(f"decodes first and in order: {same} of {compared} tests are equal to the last nanosecond")

# %% [markdown]
# It comes to the same. Try it with a budget of 5. A decodes. Behind it B has 7 tokens of a prompt left, and outside
# stands C.
#
# - This step: A gets 1, B gets 4. Nothing is left, so C stays outside, however short its prompt is.
# - The next step: A gets 1, B its last 3. One token is left, and C enters with it.
# - From now on A and B decode. They need 2, where they had 4. So C cannot be crowded out any more.
#
# Whoever is inside has entered while there was budget left behind all those before it. And those before it never need
# more than they did then: a prompt gets shorter, and a decode stays one token. So a decode finds its token in every
# later step.
#
# The rule is a consequence, as long as nobody's demand grows. When does it grow? When a request forks into several
# sequences that all want to read on (lab 04). You will meet that at the end, in the engine.
#
# ## Exercise 4: what a chunk costs
#
# Nothing is computed twice, by rule 3. But a chunk of 512 tokens behind 30,000 is not the same work as the first one.
# Two things count in attention:
#
# - **pairs**: each token looks at all tokens before it, and at itself. A pair costs arithmetic.
# - **tokens read**: their K and V must be fetched from memory, once for the chunk.
#
# By hand: a prompt of 4 tokens in one piece, and in two chunks of 2. How many pairs, how many tokens read?

# %% ex="chunk_work"
def chunk_work(sizes):
    """The work of attention, chunk by chunk.

    sizes: a list of whole numbers, the sizes of a prompt's chunks in order. Changes nothing.

    Returns a list with two whole numbers for each chunk: its pairs (a token with each token
    before it, and with itself), and the tokens whose K and V it reads, its own included.
    """
    ### BEGIN SOLUTION
    work, computed = [], 0
    for size in sizes:
        behind, among = size * computed, size * (size + 1) // 2
        computed += size
        work.append((behind + among, computed))
    return work
    ### END SOLUTION

# %% check="chunk_work"
check("chunk_work")

# %%
work_of_chunks = lab.best("chunk_work")

for size in (4000, 1024, 512, 128, 16, 1):
    work = work_of_chunks(cut(4000, size, 0))
    pairs, read = (sum(column) for column in zip(*work, strict=True))
    print(f"4,000 tokens in chunks of {size:5,}: {pairs:,} pairs, {read:10,} tokens read")

# %% [markdown]
# The pairs are the same, to the last one. The tokens read double each time the chunks are halved. Here is the same as
# a picture. Each row of the triangle is a token, and the row is as long as what it sees. A chunk is a slice of the
# triangle. The area is the pairs. The lower edge of a slice is what it reads.

# %% fold="yes"
figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.7), layout="constrained")
for ax, size in zip(axes, (4000, 1024, 512), strict=True):
    sizes = cut(4000, size, 0)
    read = sum(tokens for _, tokens in work_of_chunks(sizes))
    draw.triangle(ax, sizes, title=f"chunks: {len(sizes)}\ntokens read: {read:,}")
picture(figure, "The same triangle three times: in one piece, in four slices, in eight slices.")

# %% [markdown]
# **What to look at.** Cutting does not change the area. It adds lower edges.
#
# And the lower edges grow. So is the step time flat, as L33 4.2 says? Below is a step with 32 readers and a full chunk
# of 480 tokens, priced for a chunk ever further into a long prompt, for two models on an H100. (Of the shapes of
# Llama-2-13B and Llama-3.1-8B. The 13B's row ends early, because the K and V of more tokens do not fit beside those of
# the readers.)

# %%
READERS = [(1, 1000)] * 32  # one new token behind 1,000
DEPTHS = (0, 3_584, 8_000, 16_000, 32_000, 64_000, 128_000)
costs = {"Llama-2-13B": cost13, MODEL: GPUCost.of("H100", MODEL)}


def fits(cost, computed):
    """Whether weights and K and V of a prompt and of 32 readers take at most 90% of the memory."""
    kv_bytes = (computed + 480 + 32 * 1001) * cost.shape.kv_bytes_per_token(2)
    return cost.shape.weight_bytes(2) + kv_bytes <= 0.9 * cost.gpu.memory


def step_ms(cost, chunk, computed):
    """A step of the readers and one chunk behind `computed` tokens, in ms."""
    step = READERS + [(chunk, computed)] if chunk else READERS
    return 1000 * cost.step_seconds(work_of_step(step))


for name, cost in costs.items():
    print(f"{name:11}:", ", ".join(f"{depth:,}: {step_ms(cost, 480, depth):.1f} ms"
                                   for depth in DEPTHS if fits(cost, depth)))

# %% [markdown]
# Flat within the textbook's example: up to 3,584 tokens it grows by a few percent. Behind 128,000 tokens the 8B takes
# nearly five times as long for the same chunk. The budget counts *tokens*. It does not count pairs. So what L33 4.4
# calls the rigid bound of a step's work holds for the matrices, where a token is a token, and not for attention. (An
# engine for very long prompts makes its chunks smaller as it goes, or counts pairs too.)
#
# ## Exercise 5: the knee (拐点)
#
# How small may a budget be? The slider showed that below some size a step gets no shorter. There the step is bound by
# memory: it waits for the weights, which are read once a step for all tokens. More tokens cost nothing. Above, the
# step is bound by arithmetic (lab 00's roofline), and every token costs its own time. In between is the knee.
#
# Count the weights of the matrices only. One token takes 2 FLOP for each weight. A step reads every weight once. At
# how many tokens does the arithmetic take longer than the reading? Do it on paper first. Which of the four numbers
# drops out?

# %% ex="knee"
def knee(flops_rate, memory_rate, num_weights, bytes_per_weight):
    """The fewest tokens in a step whose arithmetic takes longer than reading the weights.

    flops_rate: FLOP a second. memory_rate: bytes a second. num_weights: of the model.
    bytes_per_weight: 2 for bf16, 1 for FP8, 0.5 for 4 bits. Arithmetic: 2 FLOP for each token
    and weight.

    Returns a whole number, 1 or more.
    """
    ### BEGIN SOLUTION
    reading = num_weights * bytes_per_weight / memory_rate
    one_token = 2 * num_weights / flops_rate
    return int(reading / one_token) + 1
    ### END SOLUTION

# %% check="knee"
check("knee")

# %%
knee_of = lab.best("knee")
TEXT_BUDGET = {"A100": 512, "H100": 2048}  # L33 8.2

knees = {}
for gpu in ("A100", "H100"):
    for name in (MODEL, "Llama-2-13B"):
        one = GPUCost.of(gpu, name)
        knees[gpu] = knee_of(one.flops_rate, one.memory_rate, one.shape.num_layer_weights, 2)
        print(f"{gpu}, {name:11}: {knees[gpu]} tokens; the textbook's budget: {TEXT_BUDGET[gpu]}")
one = GPUCost.of("H100", MODEL)
for size, kind in ((1, "FP8"), (0.5, "4 bits")):
    tokens = knee_of(one.flops_rate, one.memory_rate, one.shape.num_layer_weights, size)
    print(f"H100, weights in {kind}, the same FLOP/s: {tokens} tokens")
tokens = knee_of(one.gpu.peak_flops, one.gpu.bandwidth, one.shape.num_layer_weights, 2)
print(f"H100, bf16, at the full rates of the data sheet: {tokens} tokens")
lab.compare("knee", knees["H100"])

# %% [markdown]
# The model drops out: a larger one is read for longer and computed for longer. What is left is the GPU's FLOP/s over
# its bytes/s, as far as they are reached. The rates are 60% and 80% of the data sheet. That is our estimate, so take
# the knee as "about 200" on an H100. L33 3.4 gives 295 FLOP a byte for the H100, which is this same knee at the full
# rates (the last line; the fewest tokens *above* 295). So if you guessed 295, you have the idea and the data sheet.
#
# Quantised weights are read faster, so their knee comes *earlier*, if the FLOP/s stay as they are. (An H100 that also
# *computes* in FP8 has twice the FLOP/s, and its knee is back where it was.) And the model drops out only if it is
# **dense**: a mixture of experts (混合专家) reads the weights of all the experts that a step needs, and each token
# computes with a few of them. Its knee comes later.
#
# Now look at it. Left: the time of a step that computes nothing but n tokens of one prompt. Right: tokens per second.

# %% fold="yes"
LOOKS = {"A100": ("#D55E00", "s--"), "H100": ("#0072B2", "o-")}
SIZES = [2**i for i in range(4, 13)]
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.9), layout="constrained")
speed = {}
for gpu, (colour, style) in LOOKS.items():
    cost = GPUCost.of(gpu, MODEL)
    seconds = [cost.step_seconds(work_of_step([(n, 0)])) for n in SIZES]
    speed[gpu] = dict(zip(SIZES, (n / s for n, s in zip(SIZES, seconds, strict=True)), strict=True))
    look = {"color": colour, "markerfacecolor": "white"}
    left.plot(SIZES, [1000 * s for s in seconds], style, **look)
    right.plot(SIZES, [rate / 1000 for rate in speed[gpu].values()], style, **look)
    left.annotate(gpu, (SIZES[-1], 1000 * seconds[-1]), xytext=(-8, 4), ha="right",
                  textcoords="offset points", color=colour, fontsize=11)
    right.annotate(gpu, (SIZES[-1], speed[gpu][SIZES[-1]] / 1000), xytext=(0, -16), ha="right",
                   textcoords="offset points", color=colour, fontsize=11)
    for ax in (left, right):
        ax.axvline(knees[gpu], color=colour, linestyle=":", linewidth=1.5)
    left.text(knees[gpu] * 0.95, 250, f"knee {knees[gpu]}", color=colour, rotation=90,
              ha="right", va="top", fontsize=10)
left.set(xscale="log", yscale="log", xlabel="tokens in the step", ylabel="ms a step")
right.set(xscale="log", xlabel="tokens in the step", ylabel="thousand tokens a second",
          ylim=(0, None))
draw.plain_ticks(left, SIZES[::2], (5, 10, 20, 50, 100, 200))
draw.plain_ticks(right, SIZES[::2])
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
picture(figure, "Step time is flat up to the knee, 115 tokens on an A100 and 222 on an H100, and "
        "then doubles when the tokens double. Tokens a second rise up to the knee and stay there.")
for gpu in LOOKS:
    rates = speed[gpu]
    print(f"{gpu}: at 256 tokens a step {100 * rates[256] / max(rates.values()):.0f}% of its best "
          f"speed; at the textbook's {TEXT_BUDGET[gpu]}: "
          f"{100 * rates[TEXT_BUDGET[gpu]] / max(rates.values()):.0f}%")

# %% [markdown]
# So the GPU is busy from about 256 tokens on, on either. Neither 512 nor 2,048 is needed for that. Where do the
# textbook's numbers come from, then?
#
# ## Exercise 6: the largest chunk
#
# From the other end: from the readers. A service promises, say, 50 ms between two tokens. Then the budget is the
# number of readers plus the largest chunk with which a step still keeps the promise.
#
# You get a function `seconds(chunk)`, which may be a cost model, a table of measurements, or the engine itself. Each
# call is expensive, so ask seldom. One thing you may rely on: with more tokens a step never gets shorter.

# %% ex="largest_chunk"
def largest_chunk(seconds, limit, most):
    """The largest chunk whose step is not longer than `limit`.

    seconds: a function of a whole number of tokens, from 0 to `most`: how long a step with such
    a chunk takes. It never falls. limit: in the same unit. most: tokens, 1 or more.

    Returns a whole number from 1 to `most`, or 0 if even a chunk of 1 takes too long. Calls
    `seconds` about log2(most) times: 10 times for a thousand, 20 times for a million.
    """
    ### BEGIN SOLUTION
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if seconds(middle) > limit:
            too_long = middle
        else:
            fits = middle
    return fits
    ### END SOLUTION

# %% check="largest_chunk"
check("largest_chunk")

# %% [markdown]
# Now the budgets. The step has 32 readers, each behind 1,000 tokens, and one chunk behind 4,000 tokens of its prompt.

# %%
largest = lab.best("largest_chunk")

budgets = {}
for name in (MODEL, "Llama-2-13B"):
    for gpu in ("A100", "H100"):
        cost = GPUCost.of(gpu, name)
        for promise in (20, 50, 100):
            chunk = largest(lambda n, cost=cost: step_ms(cost, n, 4000), promise, 16_384)
            budgets[gpu, name, promise] = chunk + len(READERS) if chunk else None
        found = ", ".join(f"{promise} ms: {budgets[gpu, name, promise] or 'none':>5}"
                          for promise in (20, 50, 100))
        print(f"{name:11} on {gpu}, 32 readers: budget for {found}")

# %% [markdown]
# There they are. For an 8B model, 32 readers and a promise of 50 ms, the largest budget is near 512 on an A100 and
# near 2,048 on an H100. The textbook's numbers are no property of the GPU alone. They fit this kind of model and this
# promise. For a 13B, or for 20 ms, they are two to three times too large, and a 13B cannot keep 20 ms on either GPU:
# its decodes alone take nearly that long on the H100, and longer on the A100.
#
# ## The trade (取舍), measured
#
# Two bounds: the knee from below, the readers' patience from above. Between them, every budget is a choice. Here is the
# traffic of the beginning on both GPUs, with several budgets. One line is your plan, the other one the colleague's.
#
# **How to read it.** To the right: readers wait longer (the worst ITL). Upwards: newcomers wait longer (the median
# TTFT). Down and left is better. The small numbers are budgets; those of chunks first stand behind its name.

# %%
CURVE = {"decodes first": (plan, (64, 128, 256, 512, 1024, 2048, 8192)),
         "chunks first": (chunks_first, (128, 512, 2048))}
curves = {}
for gpu in ("A100", "H100"):
    for name, (one, some) in CURVE.items():
        points = {}
        for budget in some:
            result = serve(config_of(budget), gpu, one)
            points[budget] = max(result.gaps) / 1e6, 1000 * result.summary()["ttft_p50_s"]
        curves.setdefault(gpu, {})[name] = points

# %% fold="yes"
figure, axes = plt.subplots(1, 2, figsize=(10, 4.3), layout="constrained", sharey=True)
for ax, (gpu, lines) in zip(axes, curves.items(), strict=True):
    draw.trade(ax, lines, title=f"{gpu}: the knee is at {knees[gpu]} tokens")
    ax.set_xlabel("worst ITL, ms")
    draw.plain_ticks(ax, (10, 30, 100, 300, 1000, 3000), (50, 100, 200, 500, 1000, 2000, 5000, 10_000))
    ax.legend(frameon=False, fontsize=10, loc="upper right")
axes[0].set_ylabel("TTFT, median, ms")
told_of = [f"{gpu}: from a budget of 64 to 256 and 8,192, TTFT is {points[64][1]:,.0f}, "
           f"{points[256][1]:.0f} and {points[8192][1]:.0f} ms, the worst ITL {points[64][0]:.0f}, "
           f"{points[256][0]:.0f} and {points[8192][0]:,.0f} ms."
           for gpu, points in ((gpu, lines["decodes first"]) for gpu, lines in curves.items())]
picture(figure, "Curves like the letter L, and far to the right of them the points of chunks "
        "first. " + " ".join(told_of))
print(*told_of, sep="\n")

# %% [markdown]
# **What to look at.** The curve is an L, and its corner lies where the knee is. Left of it the newcomers' wait shoots
# up, because the GPU cannot compute the prompts as fast as they come. To the right of it newcomers gain next to
# nothing any more, while the readers' worst gap doubles with the budget. The colleague's points all lie at the far
# right: no budget buys smooth reading there.
#
# A rule of thumb that you can now defend: **take the largest budget that keeps your promise to the readers, and stay
# above the knee.** If the promise asks for less than the knee, no budget will do. You need a faster GPU, fewer readers
# on each, or other machines for the prompts.
#
# ## What the limit is for
#
# The p99 of the TTFT was three or four seconds in each of the three tests. Who waits three seconds? Look at the short
# prompts, those of fewer than 1,000 tokens. They would be computed in a moment. But they stand behind a long one,
# which takes the whole budget of every step until it is done. Chunks protect those who read. They do not protect those
# who wait.
#
# So give one prompt at most a part of the budget. In vLLM the setting is `long_prefill_token_threshold`; here it
# arrives in your plan as `limit`:

# %%
def ttfts(result, least, most):
    """TTFT in ms of prompts of least up to most tokens, sorted."""
    return sorted(r.ttft_ns / 1e6 for r in result.records if least <= r.prompt_tokens < most)


limits = {}
for limit in (512, 256, 128, 64):
    result = serve(config_of(512, limit), plan=plan)
    short, long = ttfts(result, 0, 1000), ttfts(result, 8000, 100_000)
    limits[limit] = short[9 * len(short) // 10], long[len(long) // 2]
    print(f"at most {limit:3} of 512 tokens for one prompt: short ones wait {limits[limit][0]:4.0f} "
          f"ms (p90 of {len(short)}), long ones {limits[limit][1]:5.0f} ms (median of {len(long)})")

# %% [markdown]
# A quarter of the budget for each, and the short prompts' wait falls to a fraction. The long ones pay with more time,
# but not with the same factor. Too small a limit helps nobody: when a single long prompt is there, the rest of the
# budget stays unused.
#
# ## Exercise 7, if you like: drafts are tokens too
#
# L33 4.3 counts one more kind of work in tokens: **speculative decoding** (投机解码). A small, fast model guesses the next
# few tokens of an answer. These are drafts (草稿). The large model then computes all of them in one step, as if they
# were a small chunk, and sees which ones it would have said itself. A draft is accepted only if all drafts before it
# are. Behind the last accepted one the large model adds a token of its own. So k drafts and the last token are k + 1
# tokens of the budget, and they bring between 1 and k + 1 tokens of the answer.
#
# How many on average? Suppose that each draft is right with the same probability, whatever the others are.

# %% ex="expected_tokens"
def expected_tokens(acceptance, num_drafts):
    """How many tokens a step brings on average that verifies drafts of one request.

    acceptance: the probability, from 0 to 1, that a draft is right, if all before it are.
    num_drafts: 0 or more.

    Returns a number (float or int) from 1 to num_drafts + 1.
    """
    ### BEGIN SOLUTION
    return 1 + sum(acceptance**needed for needed in range(1, num_drafts + 1))
    ### END SOLUTION

# %% check="expected_tokens"
check("expected_tokens")

# %% [markdown]
# A sanity check by dice, and the price: tokens of the budget for each token gained.

# %%
gained = lab.best("expected_tokens")
rng = random.Random(45)


def throw(acceptance, num_drafts):
    """The tokens of one step."""
    tokens = 1
    while tokens <= num_drafts and rng.random() < acceptance:
        tokens += 1
    return tokens


DRAFTS = 4
for acceptance in (0.5, 0.7, 0.9):
    thrown = sum(throw(acceptance, DRAFTS) for _ in range(20_000)) / 20_000
    mean = gained(acceptance, DRAFTS)
    print(f"acceptance {acceptance}: {mean:.2f} tokens a step (dice: {thrown:.2f}) for "
          f"{DRAFTS + 1} of the budget: {(DRAFTS + 1) / mean:.1f} for each")

# %% [markdown]
# Below the knee, extra tokens in a step are free. Above, each costs its time. So drafts should help a lone reader, and
# hurt on a full machine. Here is the gain over the number of readers: tokens a second with 4 drafts over tokens a
# second without. (The drafts themselves are taken as free. So real gains are smaller.)

# %% fold="yes"
CROWD = (1, 2, 4, 8, 16, 32, 64, 128, 256)
figure, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
cost, gains = GPUCost.of("H100", MODEL), {}
ends_at = {0.9: ("#009E73", "^-"), 0.7: ("#0072B2", "o-"), 0.5: ("#D55E00", "s--")}
for acceptance, (colour, style) in ends_at.items():
    line = []
    for n in CROWD:
        plain = work_of_step([(1, 500)] * n)
        drafted = work_of_step([(DRAFTS + 1, 500)] * n)._replace(num_logits=n * (DRAFTS + 1))
        longer = cost.step_seconds(drafted) / cost.step_seconds(plain)
        line.append(gained(acceptance, DRAFTS) / longer)
    gains[acceptance] = dict(zip(CROWD, line, strict=True))
    ax.plot(CROWD, line, style, color=colour, markerfacecolor="white")
    ax.annotate(f"acceptance {acceptance}", (CROWD[0], line[0]), xytext=(0, 7),
                textcoords="offset points", color=colour, fontsize=10)
ax.axhline(1, color="#222222", linewidth=1)
ax.axvline(knees["H100"] / (DRAFTS + 1), color="#222222", linestyle=":")
ax.text(knees["H100"] / (DRAFTS + 1) * 1.05, 3.9, f"{knees['H100']} tokens in a step: the knee",
        fontsize=10, va="top")
ax.set(xscale="log", xlabel="readers, each behind 500 tokens, on an H100",
       ylabel="gain: 1 is without drafts", ylim=(0, 4.4))
draw.plain_ticks(ax, CROWD)
ax.spines[["top", "right"]].set_visible(False)
picture(figure, "Three lines over the number of readers, level at first, falling from 45 readers "
        "on, where a step reaches the knee; with 256 readers all but one are below 1.")
for acceptance, line in gains.items():
    print(f"acceptance {acceptance}: {line[1]:.2f} times as fast with 1 reader, "
          f"{line[256]:.2f} with 256")

# %% [markdown]
# **What to look at.** The lines fall where 5 tokens for each reader reach the knee. Beyond it, a rejected draft is time
# taken from somebody else.
#
# And one thing for your plan. A request with 4 drafts has 5 tokens pending. Your `plan_tokens` takes it for a chunk,
# and serves it after the decodes, although somebody is reading. If it comes behind a long prompt, that prompt takes
# the whole budget, and the reader gets nothing for as many steps as the prompt needs. That is the colleague's mistake
# again. Does it happen? The simulator can draft. Here is the traffic of the beginning again, on the A100 with a budget
# of 512. (Look at the time per output token, TPOT: the tokens of one verification come together, so their gaps are 0.)

# %%
from kvlab.sim import Speculation

speculation = Speculation(num_drafts=DRAFTS, acceptance=0.7)
drafting = {}
for name, one, guesses in (("no drafts, decodes first", plan, None),
                           ("drafts, decodes first", plan, speculation),
                           ("drafts, in order", in_order, speculation),
                           ("drafts, chunks first", chunks_first, speculation)):
    simulator = Simulator(config_of(512), GPUCost.of("A100", MODEL), Parts(plan_tokens=one),
                          speculation=guesses)
    drafting[name] = simulator.run(TRAFFIC["A100"])
    found = drafting[name].summary()
    print(f"{name:24}: TPOT median {1000 * found['tpot_p50_s']:4.1f} ms, p99 "
          f"{1000 * found['tpot_p99_s']:4.1f} ms; worst gap {max(drafting[name].gaps) / 1e6:5,.0f} ms")
rate = drafting["drafts, decodes first"].summary()["tokens_per_verification"]
print(f"tokens a verification: {rate:.2f}; your formula: {gained(0.7, DRAFTS):.2f} (near the end of an "
      "answer there are fewer drafts)")
alike = drafting["drafts, decodes first"].records == drafting["drafts, in order"].records
print("decodes first and in order are equal:", alike)

# %% [markdown]
# It does not happen. Among chunks your plan keeps the order of entry, and (without a limit for each prompt) whoever
# reads has entered before those who are still at their prompt. But look at what the number has lost: 5 pending tokens
# may be a reader, or the end of a prompt. "Everything is a number of tokens" is true of the *cost*, up to attention.
# It is not true of the *urgency*.
#
# ## Into the engine
#
# Your `plan_tokens` is a part of the engine. The same requests run on your plan and on ours, with the model that we
# ship and a budget of 16 tokens, so that every prompt is cut. The first one has three samples, so it forks. A plan
# changes *when* things happen. It must never change a token. Is that so?

# %%
SMALL = {"num_requests": 8, "max_num_batched_tokens": 16, "max_num_seqs": 8,
         "enable_prefix_caching": False}
result = lab.run_engine(**SMALL)

# %% [markdown]
# The same must hold for the colleague's plan, and for order of entry. Here they are in the engine, on the slot-echo
# model, a stand-in that turns every fault of bookkeeping into a wrong token:

# %%
from kvlab.lab.beside import run_beside_ours

for name, one, samples in (("chunks first", chunks_first, 3), ("in order", in_order, 3),
                           ("in order, no fork", in_order, 1)):
    other = run_beside_ours(Parts(plan_tokens=one), num_samples=samples, stand_in=True, **SMALL)
    parted = other.first_difference
    where = f"parts from ours in step {parted[0].step}" if parted else "does the same in every step"
    print(f"{name:17}: {where}; {other.yours.count('step_begin')} steps (ours: "
          f"{other.ours.count('step_begin')}); the same tokens: {other.same_tokens}")

# %% [markdown]
# Other steps, and the same tokens. Order of entry parts from ours only where a request forks: there the demand grows.
#
# ## What the textbook says, and what we measured
#
# Each number is computed by this notebook. The authors are on the title page of the paper, whose name is at the end.

# %% fold="yes"
ledger = []


def claim(where, says, we_find, verdict):
    row = {"where": where, "the text says": says, "we find": we_find, "verdict": verdict}
    ledger.append(row)


def ms_of(gpu, name, step, **options):
    return 1000 * GPUCost.of(gpu, name, **options).step_seconds(work_of_step(step))


# C17: the bulldozer
cases = {(gpu, name): (ms_of(gpu, name, READERS), ms_of(gpu, name, [*READERS, (8000, 0)]))
         for gpu in ("A100", "H100") for name in (MODEL, "Llama-2-13B")}
fitting = [f"{name} on an {gpu}" for (gpu, name), (a, b) in cases.items()
           if 15 < a < 25 and 250 < b < 1000]
share = next(share / 100 for share in range(60, 20, -1)
             if ms_of("H100", "Llama-2-13B", [*READERS, (8000, 0)],
                      compute_efficiency=share / 100) >= 500)
claim("L33 4.1", "8,000 tokens beside 32 decodes: 20 ms become over 500 ms",
      "; ".join(f"{name}, {gpu}: {a:.0f} to {b:.0f}" for (gpu, name), (a, b) in cases.items()),
      f"holds in kind; in size for {', '.join(fitting)}, fully if {share:.0%} of the FLOP/s are reached")
claim("L33 4.1", "interference is the first enemy of tail latency",
      f"worst ITL {worst['whole prompts']:,.0f} ms against {worst['512, decodes first']:.0f}, at "
      "the same median", "holds, for traffic with long prompts")

# C18: chunks of 512
steps18 = [ms_of("H100", "Llama-2-13B", [*READERS, (512, 512 * i)]) for i in range(8)]
claim("L33 4.2", "the idea is of Microsoft and Tsinghua",
      "the paper's authors are of Georgia Tech and of Microsoft Research India",
      "half; nobody of Tsinghua is on this paper")
claim("L33 4.2", "4,000 tokens in chunks of 512: 8 steps to the first token",
      f"{len(cut(4000, 512, 0))}, the last of {cut(4000, 512, 0)[-1]} tokens; "
      f"{steps_to_first_token} if 32 decodes share a budget of 512",
      "holds if 512 is the chunk (a budget of 544), or if nobody decodes")
claim("L33 4.2", "each of these steps takes 35 ms (32 in the figure)",
      f"13B, H100: {steps18[0]:.1f} to {steps18[6]:.1f} ms; the 8B: "
      f"{step_ms(costs[MODEL], 480, 0):.0f}, and {step_ms(costs[MODEL], 480, 128_000):.0f} behind 128,000",
      "holds for a 13B and short prompts; not flat for long ones")

# %% fold="yes"
usual = bulldozer.steps[0].end - bulldozer.steps[0].start
claim("L33 4.2", "readers feel no pause at all",
      f"a step of {usual:.1f} ms becomes one of {took[0]:.1f}",
      f"holds for people; a program reads {took[0] / usual:.1f} times slower")
claim("L33 4.4", "decodes first keeps the readers' flow",
      f"worst ITL {worst['512, decodes first']:.0f} ms; chunks first: "
      f"{worst['512, chunks first']:,.0f}", "holds, and is half of the cure")
claim("L33 4.4", "V1's scheduler serves decodes in a phase of its own, before chunks",
      f"in order of entry: {same} of {compared} tests equal to the nanosecond",
      "the effect holds; V1's code has one loop, in order")
behind = [step_ms(GPUCost.of("H100", MODEL), 2016, depth) for depth in (0, 128_000)]
claim("L33 4.4", "the work of a step is rigidly bounded",
      f"2,048 tokens, 8B, H100: {behind[0]:.0f} ms for the first of a prompt, "
      f"{behind[1]:.0f} ms behind 128,000", "holds for tokens; attention's pairs are not counted")

# C32: budgets
fit50 = {gpu: budgets[gpu, MODEL, 50] for gpu in ("A100", "H100")}
claim("L33 8.2", "budgets: 512 on an A100, 2,048 on an H100",
      f"largest for 50 ms, 8B, 32 readers: {fit50['A100']} and {fit50['H100']}; knees "
      f"{knees['A100']} and {knees['H100']}",
      "holds for about 50 ms with an 8B; more than is needed to fill the GPU")
claim("L33 8.2", "chunked prefill must always be on",
      f"worst ITL {worst['whole prompts']:,.0f} to {worst['512, decodes first']:.0f} ms, median "
      f"TTFT {1000 * results['whole prompts'].summary()['ttft_p50_s']:.0f} to "
      f"{1000 * results['512, decodes first'].summary()['ttft_p50_s']:.0f} ms",
      "holds where people read; an offline job gains nothing in ITL")

# %% fold="yes"
import pandas as pd

# C45: verification as tokens
claim("L33 4.3", "verifying drafts is a request for 5 tokens",
      f"at acceptance 0.7 they bring {gained(0.7, DRAFTS):.1f}: {gains[0.7][1]:.1f} times as fast "
      f"with 1 reader, {gains[0.7][256]:.1f} with 256",
      "holds for the cost, not for the urgency (and 5 drafts are 6 tokens)")

left_and_top = {"text-align": "left", "white-space": "normal", "vertical-align": "top"}
headings = [{"selector": "th", "props": "text-align: left"}]
shown = pd.DataFrame(ledger).style.hide(axis="index")
shown.set_properties(**left_and_top).set_table_styles(headings)

# %% [markdown]
# **The 500 ms.** The textbook does not name its model. A 13B on an H100 fits it well, in the bulldozer and in the 35 ms
# of the chunks alike. So the two figures are consistent with each other. They only belong to this model.
#
# **The budgets.** They read like a property of the GPU. The knee is one, and it is much lower. The rest is a promise to
# the readers, and you can compute it for yours.
#
# A word on our own side: all times are from a cost model with two assumed efficiencies. What depends on them is the
# size of the numbers. What does not: that the knee is the same for all dense models, that pairs add up, that order
# matters, and every count of steps.
#
# ## What to remember
#
# - A request is its pending tokens. Prefill and decode differ in nothing else.
# - A step ends for all at the same time, so a long prompt in one piece stops every reader.
# - Chunks bound the step. The order bounds the gap. You need both.
# - Pairs do not change when a prompt is cut. What is read again does, and the last chunks of a long prompt cost more.
# - Below the knee tokens are free, and a smaller budget only hurts newcomers. Above, each token is somebody's time. The
#   knee is FLOP/s over bytes/s, whatever the dense model.
# - Chunks do not help those who wait behind a long prompt. A limit for each prompt does.
#
# ## Questions to think about
#
# 1. Two long prompts, each limited to half of the budget, or one after the other with all of it: who gains, who loses?
#    Use `timetable`.
# 2. A prompt finds its first 3,000 tokens in the prefix cache (lab 05). What is pending? Which of your functions must
#    change?
# 3. Prove what "in order" showed: who decodes always finds budget left behind those before it. Where does the proof
#    break if requests fork?
# 4. The scheduler admits a newcomer with its first chunk. Should it make sure that there are blocks for the *whole*
#    prompt? What can happen to ten newcomers who each got in with one chunk? (Lab 09.)
# 5. Prompts on one machine, decodes on another, with K and V sent over: what happens to the trade curve, and what must
#    the network carry for 8,000 tokens?
#
# ## Where this lives in real engines
#
# | here | vLLM V1, `v1/core/sched/scheduler.py` | elsewhere |
# |---|---|---|
# | `pending` | `num_tokens_with_spec` less `num_computed_tokens` | |
# | `budget` | `max_num_batched_tokens` | SGLang: `chunked_prefill_size`, for prompts only |
# | `limit` | `long_prefill_token_threshold` | |
# | `plan_tokens` | the first loop of `schedule`, in order of entry | Sarathi-Serve: decodes first, by rule |
# | newcomers in `timetable` | its second loop, over `waiting` | |
# | chunks first | V0's default was near it: prompts first, in steps of their own | |
#
# In kvlab: `kvlab/schedule/policies.py` has the plan, `scheduler.py` asks it, `timetable.py` and
# `kvlab/costs/budget.py` are the other exercises. The paper is Agrawal et al., "Taming Throughput-Latency Tradeoff in
# LLM Inference with Sarathi-Serve" (OSDI 2024). On drafts: Leviathan et al., "Fast Inference from Transformers via
# Speculative Decoding" (2023).
