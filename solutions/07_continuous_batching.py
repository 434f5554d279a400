# %% [markdown]
# # Lab 07: Continuous batching (连续批处理)
#
# Labs 01 to 06 were about space: who holds which block. This one is about time: who sits in the batch, and when. You
# write the two rules that decide it, you run them on paper, in a loop of your own, on a simulated H100, and in the
# engine.
#
# It goes with L33 3.1 to 3.4, 7.2 and 8.1-3. You need the ideas of labs 00 and 02; you need not have solved them. No
# GPU, and no torch before the last step.
#
# **Time.** The core exercises (1 to 3 and 5 to 7) take about 85 minutes, reading and looking another 50. Exercises 4
# and 8, and the sections marked as extra, are for those who want more: the cells below them run on ours. A good place
# for a break is before exercise 5. Cells that only draw or count are folded away: one click opens them, and you need
# not read them.

# %%
from kvlab.lab import Lab

lab = Lab("07")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## A server that is full and does nothing
#
# A server has four places in its batch. Four requests come in together. They will get 50, 500, 100 and 150 tokens;
# these are the lengths in L33 3.1. The server computes one token for each of them in every step. It works in the old
# way, **static batching** (静态批处理): a batch starts together, and nobody enters before the whole batch has ended.
#
# Now and then you ask it two questions. How many of your places are taken? How many of them bring a token?

# %%
ANSWERS = {"A": 50, "B": 500, "C": 100, "D": 150}
for step in (0, 60, 120, 200, 499):
    writing = [name for name, length in ANSWERS.items() if length > step]
    print(f"step {step:3}: taken 4 of 4, bringing a token {len(writing)}: {' '.join(writing)}")

# %% [markdown]
# From step 150 on, the server is full, others wait at the door, and it writes for one single user. The GPU still
# computes four rows in each step. Three of them are padding, which nobody reads.
#
# L33 calls this ghost idling (幽灵空转), and such a place a slot (槽位). In lab 02 a slot was room for the K and V of one
# token, so here we say **seat** (座位). One seat in one step is a **seat-step**. It is *busy* if it brings a token, and
# *idle* if it does not.
#
# ## A picture
#
# The same batch. **How to read it.** A row is a seat, time runs to the right. A box with a letter is a request, one
# token a step; the thick line at its right is its end. Hatched is idle.

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.draw.batching import over_time, seat_chart, state_machine
from kvlab.lab.show import picture, sliders
from kvlab.schedule import on_paper

figure, ax = plt.subplots(figsize=(9.5, 2.4), layout="constrained")
seat_chart(ax, on_paper.static_schedule(list(ANSWERS.values()), 4), 4,
           title="One static batch of 50, 500, 100 and 150 tokens")
ax.set_xlabel("step")
picture(figure, "Four seats over 500 steps. A ends after 50, C after 100, D after 150, and the "
        "rest of their rows is hatched. B takes all 500.")

# %% [markdown]
# The cure was written down in 2022, in the paper on Orca: decide anew after **every step** who is in the batch. That is
# iteration-level scheduling (迭代级调度), today called continuous batching. Who has ended leaves, and the next one sits
# down in the following step.
#
# ## Your predictions
#
# Guess before you calculate. Replace each `None` by a number, in digits, and run the cell.
#
# 1. The program of L33 7.2 runs both ways on 16 requests, with four seats. The lengths are random, from 10 to 120
#    tokens. Static batching takes 338 steps. How many times as fast is continuous batching?
# 2. The same with 16 answers of equal length. How many times as fast?
# 3. An H100 serves a small model (8B) to people who chat. They ask with 300 tokens and get 200, on average; a token
#    takes about 6 milliseconds. On average one request comes in a second: for this machine that is next to nothing.
#    With static batching, the median user waits for the first token so many times as long as with continuous batching.
#    How many?

# %%
lab.predict("random lengths", None, unit="times as fast")
lab.predict("equal lengths", None, unit="times as fast")
lab.predict("one request a second", None, unit="times as long")

# %% [markdown]
# ## Exercise 1: by hand
#
# Take a pencil and fill in the batch of the picture. It lasts 500 steps.
#
# | request | tokens | idle seat-steps |
# |---|---|---|
# | A | 50 | 450 |
# | B | 500 | ? |
# | C | 100 | ? |
# | D | 150 | ? |
# | all | 800 | ? |
#
# Which share of all seat-steps is that? L33 says "over 60%". Is it? Now write it down for any batch.

# %% ex="ghost_idle"
def ghost_idle(lengths):
    """What one static batch leaves idle.

    lengths: tokens of each request, at least one request, each with at least one token. There
    is one seat for each of them. Is not changed.

    Returns (steps, idle, share): the steps of the batch; the idle seat-steps, both whole
    numbers; the share of idle ones among all its seat-steps, from 0 to 1.
    """
    ### BEGIN SOLUTION
    steps = max(lengths)
    idle = sum(steps - length for length in lengths)
    return steps, idle, idle / (steps * len(lengths))
    ### END SOLUTION

# %% check="ghost_idle"
check("ghost_idle")

# %% [markdown]
# Stuck? `hint("ghost_idle")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("ghost_idle")` is your function if it passes its check, and ours if not. So you can read on without having
# solved everything. It looks at the moment when its cell runs: if you solve an exercise later, run the cells below it
# again.

# %%
idle_of = lab.best("ghost_idle")
ghost = idle_of(list(ANSWERS.values()))
print("L33 3.1:          steps {}, idle {:,}, share {:.1%}".format(*ghost))
print("without B:        steps {}, idle {:,}, share {:.1%}".format(*idle_of([50, 100, 150])))
print("four times 150:   steps {}, idle {:,}, share {:.1%}".format(*idle_of([150] * 4)))

# %% [markdown]
# 60.0%, to the last digit: read the text's "over" as "at least". And one request alone is the reason. It is not that
# requests are long, it is that they are **different**.
#
# ## The model, in four rules
#
# 1. **One step, one token** for everybody who sits. A request of length *n* needs *n* steps.
# 2. **A seat has one request at a time.** It is free in the step *after* the last token.
# 3. **First come, first served** (先来先服务). Nobody is overtaken.
# 4. **A rule says who may enter.** Static: only into a room that was empty when the step began. Continuous: whenever a
#    seat is free.
#
# Steps count from 0. A request that runs in steps 3, 4 and 5 has `start` 3 and `end` 6, so `end - start` is its length.
#
# We leave out three things, and bring them back one by one: prompts cost nothing, every step lasts equally long, and
# memory is no limit.
#
# ## Exercise 2: static batching on paper
#
# Say for each request where it sits and when. Requests enter `num_seats` at a time. What is the next batch waiting for?

# %% ex="static_schedule"
def static_schedule(lengths, num_seats):
    """When each request runs under static batching; all of them wait from the beginning.

    lengths: tokens of each request, in order of arrival, each at least 1. May be empty. Is not
    changed. num_seats: seats, at least 1.

    Returns a list with (seat, start, end) of each request, in the same order, whole numbers.
    Seats count from 0, and a batch fills them in order. The last batch may leave some empty.
    """
    ### BEGIN SOLUTION
    turns, start = [], 0
    for first in range(0, len(lengths), num_seats):
        batch = lengths[first : first + num_seats]
        for seat, length in enumerate(batch):
            turns.append((seat, start, start + length))
        start += max(batch)
    return turns
    ### END SOLUTION

# %% check="static_schedule"
check("static_schedule")

# %% [markdown]
# Now the experiment of L33 7.2. Sixteen lengths from its seed, four seats, your schedule.

# %%
import random

rng = random.Random(42)
LENGTHS = [rng.randint(10, 120) for _ in range(16)]
total = sum(LENGTHS)


def steps_of(turns):
    """Steps until the last one has ended."""
    return max(end for seat, start, end in turns)


def told(turns, num_seats=4):
    """Steps, idle seat-steps and the share of busy ones, in a line."""
    steps, busy = steps_of(turns), sum(end - start for seat, start, end in turns)
    idle = num_seats * steps - busy
    return f"{steps} steps, {idle} idle seat-steps, {busy / (num_seats * steps):.2%} busy"


static = lab.best("static_schedule")
in_batches = static(LENGTHS, 4)
print("lengths:", *LENGTHS, " together", total)
print("static: ", told(in_batches))

# %% [markdown]
# This is what the text's program prints, to the digit. (The chapter shows the program, and not what it prints.) A
# sanity check came with it: busy and idle seat-steps together must be 4 times the steps, and there are exactly as many
# busy ones as tokens.
#
# (We count every seat in every step, also one that nobody ever took. The text counts only those that somebody has left.
# Here, 16 being a multiple of 4, it is the same.)
#
# ## Exercise 3: continuous batching on paper
#
# The same requests, the same seats, another rule: a freed seat is taken at once. You need not go step by step. Look at
# the requests one after the other, and ask: which seat is the first to be free for this one?

# %% ex="continuous_schedule"
def continuous_schedule(lengths, num_seats):
    """When each request runs under continuous batching; all of them wait from the beginning.

    lengths, num_seats: as for static_schedule.

    Returns a list with (seat, start, end) of each request, in the same order. Requests enter in
    order. Whoever is next starts in the first step in which a seat is free; of several free
    seats it takes the one with the lowest number. A seat is free from `end` on.
    """
    ### BEGIN SOLUTION
    free_from = [0] * num_seats
    turns = []
    for length in lengths:
        start = min(free_from)
        seat = free_from.index(start)
        turns.append((seat, start, start + length))
        free_from[seat] = start + length
    return turns
    ### END SOLUTION

# %% check="continuous_schedule"
check("continuous_schedule")

# %%
continuous = lab.best("continuous_schedule")
at_once = continuous(LENGTHS, 4)
print("static:    ", told(in_batches))
print("continuous:", told(at_once))
gain = steps_of(in_batches) / steps_of(at_once)
lab.compare("random lengths", round(gain, 2))

# %% [markdown]
# 1.21 times. Is that less than you thought? With 70.93% busy, *no* rule on earth could gain more than 1 / 0.7093, which
# is 1.41. The waste is the ceiling of the gain.
#
# And a second surprise. L33 3.2 promises a car that is always full, and no ghosts at all. Your continuous schedule has
# 157 idle seat-steps. Where are they?

# %% fold="yes"
def draw_both(step=None):
    figure, axes = plt.subplots(2, 1, figsize=(9.5, 4.6), layout="constrained", sharex=True)
    names = ("static", "continuous")
    for ax, name, turns in zip(axes, names, (in_batches, at_once), strict=True):
        ends = [end for seat, start, end in turns if step is None or end <= step]
        title = f"{name}: {steps_of(turns)} steps" if step is None else (
            f"{name}, after {step} steps: {len(ends)} of 16 have ended")
        seat_chart(ax, turns, 4, width=340, step=step, title=title,
                   show_waiting=step is not None)
    axes[-1].set_xlabel("step")
    return figure


picture(draw_both(), "Two charts of four seats. Static: four batches, each followed by hatched "
        "idle time, 338 steps. Continuous: no gap before step 208, then one seat after the "
        "other runs empty until step 279.")
last_start = max(start for seat, start, end in at_once)
idle_before = 4 * last_start - sum(min(end, last_start) - min(start, last_start)
                                   for seat, start, end in at_once)
print(f"the last request starts in step {last_start}; "
      f"idle seat-steps before that: {idle_before}")

# %% [markdown]
# **What to look at.** Above, four batches, each as long as its longest request. Below, not a single gap while anybody
# waits. All idle time comes at the end, when the queue is empty: O is long, and at last it sits there alone.
#
# So the promise holds **as long as somebody waits**. A queue of 16 is short. Here is how the gain grows with the queue:

# %%
def gain_of(lengths, num_seats):
    """Steps of static batching over steps of continuous batching."""
    return steps_of(static(lengths, num_seats)) / steps_of(continuous(lengths, num_seats))


for number in (16, 64, 256, 1024):
    drawn = [[rng.randint(10, 120) for _ in range(number)] for rng in map(random.Random, range(20))]
    gains = [gain_of(lengths, 4) for lengths in drawn]
    print(f"{number:5} requests, 20 draws: {sum(gains) / 20:.2f} times as fast on average, "
          f"from {min(gains):.2f} to {max(gains):.2f}")

# %% [markdown]
# So the text has drawn one of the smaller gains, even for 16. Step through it. (The slider needs a running kernel.
# Without one you see the picture after 170 steps.)

# %% fold="yes"
sliders(draw_both, step=(0, 338, 170),
        alt="After 170 steps. Static is in its third batch, and M, N, O and P wait. "
        "Continuous: four seats busy; N, O and P wait.")

# %% [markdown]
# ## What the gain is made of
#
# A static batch lasts as long as its **longest** request. It brings as many tokens as its requests have on **average**,
# times the seats. So the share of busy seat-steps is
#
# **mean length / longest length in a batch**,
#
# and a long queue gains the inverse of that, less a little for its end, where seats run empty. Two things make the
# longest of a batch long: lengths that differ much, and many seats, for among 64 there is nearly always a very long
# one. Five kinds of answers, all of 64 tokens on average:

# %% fold="yes"
from kvlab.lab.scenes.batching import SHAPES, draw_lengths

SEATS = (1, 2, 4, 8, 16, 32, 64, 128)
gains = {shape: [gain_of(draw_lengths(shape, 40 * n), n) for n in SEATS] for shape in SHAPES}
LOOKS = dict(zip(SHAPES, (("#222222", "o-"), ("#56B4E9", "v--"), ("#0072B2", "D-"),
                          ("#009E73", "s-."), ("#D55E00", "^-")), strict=True))
figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
for shape, (colour, style) in LOOKS.items():
    ax.plot(SEATS, gains[shape], style, color=colour, linewidth=2, markerfacecolor="white")
    place = (32, gains[shape][5]) if style == "^-" else (128, gains[shape][-1])
    ax.annotate(shape, place, xytext=(-130, 0) if style == "^-" else (8, -4),
                textcoords="offset points", color=colour, fontsize=11)
ax.set_xscale("log", base=2)
ax.set_xticks(SEATS, [str(n) for n in SEATS])
ax.set(xlabel="seats", ylabel="times as fast as static", xlim=(1, 300), ylim=(0.8, None))
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
picture(figure, "Gain over the number of seats, five lines. All equal stays at 1. " + " ".join(
    f"{shape}: {gains[shape][2]:.2f} with 4 seats, {gains[shape][-1]:.2f} with 128."
    for shape in SHAPES))
lab.compare("equal lengths", gain_of([64] * 16, 4))

# %% [markdown]
# **What to look at.** The black line: where all answers are equally long, continuous batching gains nothing at all. The
# orange one: one answer in ten is long, and among 32 seats there nearly always is such a one. From there on every
# static batch lasts as long as the longest answer there is, and more seats do not make it worse. The green one has no
# longest answer, and goes on growing.
#
# Turn both knobs yourself. How few seats make it twice as fast, and with which lengths? (Here a queue has only six
# requests a seat, so luck counts more than above.)

# %% fold="yes"
def show_gain(seats, lengths):
    drawn = draw_lengths(lengths, 6 * seats, seed=1)
    figure, axes = plt.subplots(2, 1, figsize=(9.5, 5), layout="constrained", sharex=True)
    width = steps_of(static(drawn, seats))
    for ax, schedule, name in zip(axes, (static, continuous), ("static", "continuous"),
                                  strict=True):
        turns = schedule(drawn, seats)
        busy = sum(drawn) / (seats * steps_of(turns))
        seat_chart(ax, turns, seats, width=width,
                   title=f"{name}: {steps_of(turns)} steps, {busy:.0%} busy" + (
                       f", {width / steps_of(turns):.2f} times as fast"
                       if name == "continuous" else ""))
    axes[-1].set_xlabel("step")
    return figure


sliders(show_gain, seats=(1, 12, 6), lengths=(list(SHAPES), "exponential"),
        alt="36 answers of exponential lengths on six seats, static above continuous.")

# %% [markdown]
# ### Exercise 4, if you like: two bounds
#
# How good is 279? Two numbers say it without any schedule.
#
# - **Fewest**: no schedule takes fewer steps, not even one that knows the future. There are two reasons: all the tokens
#   must be written, and the longest request must be.
# - **Most**: continuous batching takes no more steps, in whatever order the queue stands. Think of the longest request,
#   last in the queue. While it waits, no seat is free. So all that time is filled with tokens of the others, as many a
#   step as there are seats, and they have only so many. (Not every queue reaches this bound. None passes it.)

# %% ex="step_bounds"
def step_bounds(lengths, num_seats):
    """Two bounds for the steps in which these requests can be served.

    lengths: tokens of each, at least one request, each with at least one token. Is not changed.
    num_seats: at least 1.

    Returns (fewest, most), whole numbers. fewest: no schedule is shorter, by the two reasons
    above. most: one longest request waits while the tokens of all others, spread evenly over
    the seats, are written: so many steps, rounded down. Then it runs.
    """
    ### BEGIN SOLUTION
    longest, others = max(lengths), sum(lengths) - max(lengths)
    fewest = max(longest, (sum(lengths) + num_seats - 1) // num_seats)
    return fewest, others // num_seats + longest
    ### END SOLUTION

# %% check="step_bounds"
check("step_bounds")

# %% [markdown]
# Why is `most` right for every order, also when a shorter request ends last? Whoever ends last, with length *n*,
# started after at most (total - *n*) / seats steps. So it ended after (total - *n*) / seats + *n* steps, and that grows
# with *n*. Ron Graham proved this in 1966, for factories: whoever never leaves a machine idle needs less than twice the
# time of the best plan there is.
#
# Now 2,000 random orders of the sixteen requests. Every bar in the picture has been computed by your two schedules.

# %%
bounds = lab.best("step_bounds")
fewest, most = bounds(LENGTHS, 4)
orders, shuffled = [], random.Random(7)
for _ in range(2000):
    orders.append(shuffled.sample(LENGTHS, len(LENGTHS)))
outcomes = {schedule: [steps_of(schedule(order, 4)) for order in orders]
            for schedule in (static, continuous)}
longest_first = steps_of(continuous(sorted(LENGTHS, reverse=True), 4))
sorted_static = steps_of(static(sorted(LENGTHS), 4))
print(f"bounds: {fewest} and {most}")
print(f"continuous: {min(outcomes[continuous])} to {max(outcomes[continuous])} in 2,000 orders, "
      f"{steps_of(at_once)} in the text's, {longest_first} with the longest first")
print(f"static:     {min(outcomes[static])} to {max(outcomes[static])} in 2,000 orders, "
      f"{steps_of(in_batches)} in the text's, {sorted_static} with the lengths sorted")
lucky = sum(steps <= steps_of(in_batches) for steps in outcomes[static])
print(f"orders in which static batching takes no longer than in the text's: {lucky} of 2,000")
later = sum(mine[1] > other[1] for order in orders[:200] for mine, other in
            zip(continuous(order, 4), static(order, 4), strict=True))
print(f"requests that start later than under static batching in the same order: {later}")

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
for schedule, colour, hatch, name in ((static, "#F7DDA4", "///", "static"),
                                      (continuous, "#56B4E9", "", "continuous")):
    heights, _, _ = ax.hist(outcomes[schedule], bins=range(fewest, 416, 7), color=colour,
                            zorder=2 if schedule is static else 1,  # its few below `most`: in front
                            hatch=hatch, edgecolor="#222222", linewidth=0.6)
    middle = sum(outcomes[schedule]) / 2000
    ax.text(middle, max(heights) * 1.02, name, ha="center", va="bottom", fontsize=11)
for x, text, side in ((fewest, f"fewest {fewest} ", "right"), (most, f" most {most}", "left")):
    ax.axvline(x, color="#222222", linewidth=2, linestyle="--")
    ax.text(x, ax.get_ylim()[1], text, ha=side, va="bottom", fontsize=11)
ax.set(xlabel="steps", ylabel="orders, of 2,000", xlim=(225, 418))
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
spans = {schedule: sorted(outcomes[schedule])[100:-100] for schedule in outcomes}
picture(figure, "How many steps 2,000 orders take. Continuous batching stays between the dashed "
        f"bounds {fewest} and {most}, nine in ten take {spans[continuous][0]} to "
        f"{spans[continuous][-1]} steps. Static: nine in ten take {spans[static][0]} to "
        f"{spans[static][-1]}.")

# %% [markdown]
# Four things that are worth a second look.
#
# - The two hills hardly touch. And the text's 338 steps lie far to the left in theirs: its order is a lucky one for
#   static batching. That is why it gains only 1.21 times.
# - In one and the same order, nobody ever starts later than under static batching. There is no loser. Why? When a
#   static batch begins, all earlier requests have ended. If none of them started later under continuous batching, they
#   have ended there too, and the new batch finds its seats. So none of *it* starts later, and so on, batch after batch.
# - The order matters: 245 with the longest first, 279 as they came. Whoever knew the lengths could do better.
# - Static batching with *sorted* lengths takes 264 steps, and beats continuous batching in the text's order. The whole
#   problem is that nobody knows how long an answer will be.
#
# *This is a good place for a break.*
#
# ## Exercise 5: the two rules
#
# Now the step from paper to an engine. An engine does not know the lengths, and it does not plan. In every step it asks
# one question, for the first one who waits: **may it enter?** In kvlab that question is a function of three values:
#
# | | |
# |---|---|
# | `num_running` | seats that are taken now. A request that will have several children (lab 04) counts for all of them, so it can be *more* than there are seats |
# | `max_num_seqs` | seats that there are; vLLM's name for it |
# | `batch_is_forming` | `True` if all seats were empty when this step began. It stays `True` while this step lets in one after the other. (In the engine also over the next steps, if only the step's token budget stopped it: long prompts take several steps to come in) |
#
# Write both rules. Each is one line.

# %% ex="admission"
def admit(num_running, max_num_seqs, batch_is_forming):
    """Continuous batching: may one more request enter? True or False."""
    ### BEGIN SOLUTION
    return num_running < max_num_seqs
    ### END SOLUTION


def admit_static(num_running, max_num_seqs, batch_is_forming):
    """Static batching: may one more request enter? True or False."""
    ### BEGIN SOLUTION
    return batch_is_forming and num_running < max_num_seqs
    ### END SOLUTION

# %% check="admission"
check("admission")

# %% [markdown]
# That is the whole difference between the two: the words `batch_is_forming and`. Everything else that you see in this
# lab follows from them.
#
# ## Exercise 6: the loop
#
# Around that question, build the loop of an engine. And now requests do not all wait from the beginning: each has an
# **arrival** (到达), the first step in which it may run. One step goes like this:
#
# 1. Who has all its tokens leaves.
# 2. The batch is forming if nobody sits now.
# 3. Take the first who waits and has arrived. Ask `admit`. If yes, it enters, and the next one is asked for. If no,
#    there are no more questions in this step: nobody overtakes.
# 4. Everybody who sits gets one token. The step is over.
#
# What if nobody sits, somebody has arrived, and `admit` still says no? Then nothing will ever change. Do not loop for
# ever: raise `Stuck`. (The engine does the same.) If nobody has arrived yet, that is no reason: time passes.

# %%
from kvlab.schedule.on_paper import Stuck


# %% ex="serve"
def serve(requests, num_seats, admit):
    """The loop of an engine.

    requests: list of (arrival, length), by arrival, whole numbers; length at least 1. May be
    empty. Is not changed. num_seats: at least 1. admit(num_running, max_num_seqs,
    batch_is_forming): True if one more may enter; max_num_seqs is num_seats. It decides alone:
    if it says yes, the request enters.

    Returns a list of (start, end) of each request, in the same order. Raises Stuck if somebody
    has arrived, nobody runs, and admit says no.
    """
    ### BEGIN SOLUTION
    starts, running, step = [], {}, 0
    while running or len(starts) < len(requests):
        running = {i: left for i, left in running.items() if left > 0}
        forming = not running
        while len(starts) < len(requests) and requests[len(starts)][0] <= step:
            if not admit(len(running), num_seats, forming):
                if not running:
                    raise Stuck(f"step {step}: nobody runs, and nobody is let in")
                break
            running[len(starts)] = requests[len(starts)][1]
            starts.append(step)
        for i in running:
            running[i] -= 1
        step += 1
    return [(start, start + request[1]) for start, request in zip(starts, requests, strict=True)]
    ### END SOLUTION

# %% check="serve"
check("serve")

# %% [markdown]
# Two different programs now say when each request runs: your schedules, which plan, and your loop, which only asks. Let
# one test the other, on 300 random queues.

# %%
loop, enter, enter_static = lab.best("serve"), lab.best("admit"), lab.best("admit_static")
differ = 0
for seed in range(300):
    rng = random.Random(seed)
    lengths, seats = [rng.randint(1, 20) for _ in range(rng.randint(0, 20))], rng.randint(1, 6)
    for rule, schedule in ((enter, continuous), (enter_static, static)):
        planned = [(start, end) for seat, start, end in schedule(lengths, seats)]
        differ += [tuple(turn) for turn in loop([(0, n) for n in lengths], seats, rule)] != planned
print(f"600 schedules planned and looped: {differ} differ")

# %% [markdown]
# ## What a wrong rule does
#
# Your loop obeys whatever rule it gets. Here are six. The sixteen requests of the text come one every 8 steps. Which
# rule needs the fewest steps? Put its name in quotes.

# %%
RULES = {
    "continuous": enter,
    "static": enter_static,
    "<= in the place of <":
        lambda num_running, max_num_seqs, batch_is_forming: num_running <= max_num_seqs,
    "always yes": lambda num_running, max_num_seqs, batch_is_forming: True,
    "one at a time": lambda num_running, max_num_seqs, batch_is_forming: num_running == 0,
    "always no": lambda num_running, max_num_seqs, batch_is_forming: False,
}
lab.predict("the fastest rule", None)

# %%
ARRIVING = [(8 * i, length) for i, length in enumerate(LENGTHS)]
steps_under = {}
print(f"{'':22}{'steps':>6}{'mean wait':>11}{'longest wait':>14}{'at once':>9}")
for name, rule in RULES.items():
    try:
        ran = loop(ARRIVING, 4, rule)
    except Stuck as error:
        print(f"{name:22}Stuck: {error}")
        continue
    waits = [start - arrival for (start, _), (arrival, _) in zip(ran, ARRIVING, strict=True)]
    at_once_most = max(sum(start <= step < end for start, end in ran)
                       for step in range(max(end for _, end in ran)))
    steps_under[name] = max(end for _, end in ran)
    print(f"{name:22}{steps_under[name]:6}{sum(waits) / 16:11.1f}{max(waits):14}{at_once_most:9}")
lab.compare("the fastest rule", min(steps_under, key=steps_under.get))

# %% [markdown]
# The two fastest are wrong: they put five and more requests on four seats. On paper that costs nothing. In an engine, a
# seat is a row in every buffer that the kernels use, and the sixth row is somebody else's memory. (Ours counts the
# seats again before it asks you, so `<=` does no harm there. One that trusts the rule writes past the end.)
#
# "One at a time" and "always no" are the other kind of mistake. Nothing crashes. The machine just stands there, while
# people wait. In a running service that is the harder one to find.
#
# ## How can they share one tensor?
#
# L33 3.2 lets a new request join one that is at its 51st token, "in the same physical tensor". Think about that. The
# newcomer brings a prompt of 500 tokens, 31 others bring one token each. A tensor is a rectangle:

# %%
newcomer = [500] + [1] * 31
rectangle, flat = len(newcomer) * max(newcomer), sum(newcomer)
print(f"as a rectangle: {rectangle:,} rows, {flat / rectangle:.1%} of them of use")
print(f"laid flat:      {flat:,} rows, all of them of use")

# %% [markdown]
# With a rectangle, the step of a newcomer would cost thirty times what it must. That is why static batching let nobody
# in between: it was not stupid, it was rectangular.
#
# Orca's second idea solves this. The linear layers do not care which request a row belongs to. So lay all rows in one
# flat list (扁平批次), one after the other, and run the layers over it. Only attention must know who is who: it is
# computed for each request by itself. They called it selective batching (选择性批处理). You build the flat batch in lab
# 12. Until then, remember: "whenever a seat is free, one may enter" stands on it.
#
# ## Exercise 7: what can happen to a request
#
# In a real engine a request does not only wait, run and end. When blocks run out (lab 09), one must make way
# (preemption, 抢占). L33 3.2 speaks of a strict state machine (状态机). Here is what it is about. Before its end, a
# request is in one of four states (状态):
#
# | status | has a seat | its K and V |
# |---|---|---|
# | `waiting` | no | none yet |
# | `running` | yes | in blocks on the GPU |
# | `preempted` | no | dropped: it must be computed again |
# | `swapped` | no | copied to the CPU's memory |
#
# And it ends in one of four ways, called `stop`, `length`, `abort` and `error`. These are the `finish_reason` that
# users see. Eight events (事件) can happen. Four of the ends are called like the event that leads there:

# %%
from kvlab.schedule.lifecycle import EVENTS

for event, what in EVENTS.items():
    print(f"{event:10} {what}")

# %% [markdown]
# Four rules:
#
# - Only who has no seat can take one. Only who has one can lose it.
# - A token is sampled only for who runs.
# - Users leave, and things break, at any time before the end.
# - Nothing happens to a request that has ended. Whoever calls must look first.
#
# (A preempted or swapped request stands in the same queue as those who wait, at the place of its arrival. Its status
# says what it must do when its turn comes: compute again, or copy back.)

# %% ex="next_status"
def next_status(status, event):
    """The status of a request after an event.

    status: "waiting", "running", "preempted", "swapped", "stop", "length", "abort" or "error".
    event: "schedule", "recompute", "swap", "lose", "stop", "length", "abort" or "error".

    Returns the next status. ValueError with a message that names both, status and event, if
    this cannot happen, or if one of the words is none of these.
    """
    ### BEGIN SOLUTION
    live = ("waiting", "running", "preempted", "swapped")
    table = {("running", "recompute"): "preempted", ("running", "swap"): "swapped",
             ("swapped", "lose"): "preempted",
             ("running", "stop"): "stop", ("running", "length"): "length"}
    table |= {(before, "schedule"): "running" for before in live if before != "running"}
    table |= {(before, end): end for before in live for end in ("abort", "error")}
    if (status, event) not in table:
        raise ValueError(f"{event!r} cannot happen to a request that is {status!r}")
    return table[status, event]
    ### END SOLUTION

# %% check="next_status"
check("next_status")

# %% [markdown]
# Of 64 pairs, 16 are legal. Does the engine keep to your table? Here is its scheduler with your `admit`, on a pool that
# is much too small, and a swap space that is too small as well. 24 requests; two users leave; one request fails. The
# engine writes down all that happens. Every line of it goes through your function (if it passes its check; through
# ours, if not): one illegal move, and the cell stops with an error.

# %%
from collections import Counter

from kvlab.lab.scenes.batching import lives, record_lives

after_event = lab.best("next_status")
status_of, moves = {}, Counter()
for request, event in lives(record_lives(enter)):
    before = status_of.get(request, "waiting")
    status_of[request] = after_event(before, event)
    moves[before, event, status_of[request]] += 1
print(f"{sum(moves.values())} events, {len(moves)} different moves, all legal")
print("ended by:", dict(Counter(status_of.values())))

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9.5, 4.6), layout="constrained")
state_machine(ax, moves)
picture(figure, "The states of a request, with arrows for what happened: " + "; ".join(
    f"{before} {event} {count}" for (before, event, _), count in moves.items()) + ".")

# %% [markdown]
# **What to look at.** Arrows lead *out* of the dashed frame, and none leads back in: an end is an end. Inside the
# frame, every way back to a seat goes through `schedule`. So one place in the code decides about all of them, the
# newcomers and those who come back: your `admit`, and the question whether there is room (lab 09). `lose` did not
# happen here: no copy was lost. (kvlab's tests watch every change of status in hundreds of random runs, with failing
# copies, and find no move that is not in this table.)
#
# ## Into the simulator: what the users feel
#
# Until now every step lasted equally long, prompts were free and memory endless. From here on, the real scheduler and
# the real block manager decide, with your `admit`, and a clock for an H100 says how long each step takes (lab 00's
# roofline, with estimates for what is lost on the way). The model is Llama-3-8B.
#
# The traffic: prompts of 300 tokens and answers of 200 on average, both with a long tail. Requests come by chance, so
# many a second on average. We look at the **time to first token** (首 token 延迟, TTFT): how long a user looks at an
# empty window. Each rate is played for a minute, or for 200 requests if those take longer.

# %%
from kvlab.lab.scenes.batching import Machine
from kvlab.sim import Lognormal, Poisson, make_workload

h100 = Machine("H100", "Llama-3-8B")
PROMPT, ANSWER = Lognormal(300, 0.8, 2000), Lognormal(200, 0.8, 1500)
print(f"H100 with Llama-3-8B: {h100.num_blocks:,} blocks, {16 * h100.num_blocks:,} tokens")


def chats(number, rate=None):
    """`number` requests: `rate` a second on average, or all at once."""
    return make_workload(number, PROMPT, ANSWER, rate and Poisson(rate), seed=1)


RATES = (1, 4, 16, 32)
waiting_times = {}
print("                  first token, half of the users      the last answer after")
for rate in RATES:
    minute = chats(max(200, 60 * rate), rate)
    ran = [h100.run(minute, rule).result for rule in (enter_static, enter)]
    for name, result in zip(("static", "continuous"), ran, strict=True):
        found = result.summary()
        waiting_times[name, rate] = found["ttft_p50_s"], found["ttft_p90_s"]
    slow, fast = waiting_times["static", rate][0], waiting_times["continuous", rate][0]
    print(f"{rate:2} a second:  {1000 * slow:6,.0f} ms static, {1000 * fast:3.0f} ms continuous; "
          f"{ran[0].makespan_s:4.0f} s static, {ran[1].makespan_s:4.0f} s continuous")
    if rate == 1:
        print(f"              (a token takes {1000 * found['tpot_p50_s']:.0f} ms)")
times_longer = waiting_times["static", 1][0] / waiting_times["continuous", 1][0]
lab.compare("one request a second", round(times_longer))

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
for name, colour, marker in (("static", "#D55E00", "^"), ("continuous", "#0072B2", "o")):
    for i, (style, what) in enumerate((("-", "half of the users"), ("--", "9 in 10"))):
        ys = [waiting_times[name, rate][i] for rate in RATES]
        ax.plot(RATES, ys, style, marker=marker, color=colour, markerfacecolor="white")
        ax.annotate(f"{name}, {what}", (RATES[-1], ys[-1]), xytext=(8, -4 + 4 * i),
                    textcoords="offset points", color=colour, fontsize=10)
ax.set_xscale("log", base=2)
ax.set_xticks(RATES, [str(rate) for rate in RATES])
ax.set(yscale="log", xlabel="requests a second", ylabel="wait less than", xlim=(0.9, 110))
ax.set_yticks([0.01, 0.1, 1, 10], ["10 ms", "100 ms", "1 s", "10 s"])
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
picture(figure, "Time to first token over the rate, on a logarithmic scale. " + " ".join(
    f"{name}: half of the users wait {waiting_times[name, 1][0]:.2g} s at {RATES[0]} a second, "
    f"{waiting_times[name, 32][0]:.2g} s at {RATES[-1]}." for name in ("static", "continuous")))

# %% [markdown]
# At one request a second the machine has nearly nothing to do, and no throughput to gain. Still the median user waits
# far longer. Follow one of them: somebody came a moment before, alone; the batch has closed around that one person;
# there are 255 free seats, and the door is locked until the answer is written.
#
# This is what continuous batching was really for. The gain in throughput is a matter of lengths. The gain in waiting is
# a matter of principle: **a newcomer waits for a step, not for a batch.**
#
# At 32 a second static batching does not keep up at all. Its batches are full, all 256 seats, and each lasts as long as
# its longest answer. People still wait when the minute is long over, and the longer it goes on the longer they wait.
#
# ## Why it needs pages, and when
#
# L33 3.3 says: without PagedAttention, continuous batching is an empty dream. Let us measure both cures apart. The old
# way to keep K and V is **contiguous** (连续预留): each request reserves room for the longest one that is allowed, here
# 4,096 tokens, in one piece (lab 02). The new way is pages. So there are four servers: static or continuous, contiguous
# or paged. Everything waits at the door from the beginning, and we count tokens a second. (Contiguous and continuous is
# no straw man: Orca itself worked so. It reserves slots for the most tokens that a request may get, before it lets it
# in.)
#
# Two machines: the H100 with 80 GB, and an L4, a card of 24 GB. The model takes 16 GB on both.
#
# **Predict.** How many times as many tokens a second does the L4 write with *both* cures, compared with neither? And:
# on which machine does paging bring more, and on which continuous batching?

# %%
lab.predict("both cures", None, unit="times as many tokens a second")

# %%
l4 = Machine("L4", "Llama-3-8B")
MACHINES = {"H100": (h100, chats(600)), "L4": (l4, chats(200))}
runs = {}
for machine, (gpu, waiting) in MACHINES.items():
    print(f"{machine}: room for {16 * gpu.num_blocks:,} tokens, "
          f"{16 * gpu.num_blocks // 4096} reservations of 4,096")
    for memory, reserve in (("contiguous", 4096), ("paged", None)):
        for name, rule in (("static", enter_static), ("continuous", enter)):
            run = runs[machine, memory, name] = gpu.run(waiting, rule, reserve)
            found = run.result.summary()
            base = runs[machine, "contiguous", "static"].result.summary()
            times = found["output_tokens_per_s"] / base["output_tokens_per_s"]
            print(f"    {memory:11}{name:11}{found['output_tokens_per_s']:6,.0f} tokens/s, "
                  f"{times:5.1f} times; {found['running']:5.1f} run on average, "
                  f"{found['peak_running']:3} at most")


def times_of(machine, memory, name):
    """How many times the tokens a second of the server with neither cure."""
    rates = [runs[machine, *what].result.summary()["output_tokens_per_s"]
             for what in ((memory, name), ("contiguous", "static"))]
    return rates[0] / rates[1]


lab.compare("both cures", round(times_of("L4", "paged", "continuous"), 1))

# %% [markdown]
# Read it in two ways.
#
# **On the H100**, continuous batching alone does nearly all of it. There is room for 98 reservations. That is enough to
# keep the machine busy, and a freed region fits the next request exactly, because all regions are equally long. So the
# sentence of L33 3.3, that the hole is too small for the newcomer, does not happen here.
#
# **On the L4**, memory is the wall. Four reservations, and the server is full. Continuous batching can only exchange
# one of four; the fifth waits for memory, and not for a seat. Pages let in six times as many on average, and only then
# there is something to schedule.
#
# Watch the L4 for its first minutes:

# %% fold="yes"
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
for ax, memory in zip(axes, ("contiguous", "paged"), strict=True):
    columns = runs["L4", memory, "continuous"].result.step_columns
    over_time(ax, columns, top=200, title=f"continuous batching, {memory}")
    ax.set_xlabel("seconds")
    most_running = max(columns["num_running"])
    ax.text(0.98, 0.75, f"at most {most_running} run", transform=ax.transAxes, ha="right",
            fontsize=11)
    ax.legend(loc="upper right", frameon=False, fontsize=11, ncols=2)
axes[0].set_ylabel("requests")
picture(figure, "Two charts of the L4 over seconds. Contiguous: four requests run all the time, "
        "and the queue of 200 shrinks for ten minutes. Paged: 40 to 60 run as long as somebody "
        "waits, the queue is gone in less than a minute, and the last answer ends after two.")

# %% [markdown]
# **What to look at.** The blue area is what the machine works on, the dashed line is who waits. Left, it is a thin
# stripe at four: the seats are there (256 of them), the rule says yes, and the memory says no. Admission *starves*
# (饥饿). Mind the seconds on the two axes.
#
# ## Extra: long prompts, short answers
#
# L33 8.1-3 warns: where prompts are very long and answers very short, continuous batching gains little. Now we can say
# how little. All at once on the H100, 64 seats:

# %%
from kvlab.sim import Fixed, Uniform

CASES = [
    ("prompt 16,000, answer 1 to 9", 16_000, Uniform(1, 9)),
    ("prompt 16,000, answer 200 on average", 16_000, ANSWER),
    ("prompt  1,000, answer 200 on average", 1_000, ANSWER),
    ("prompt    100, answer 200 on average", 100, ANSWER),
    ("prompt    100, answer exactly 200", 100, Fixed(200)),
]
gain_for, used = {}, {}
print(f"{'':38}{'':6}{'time in steps':>16}{'arithmetic used:':>20}")
print(f"{'':38}{'gain':>6}{'with prompts':>16}{'static':>12}{'continuous':>12}")
for name, prompt, answer in CASES:
    number = 60 if prompt > 5000 else 300
    work = make_workload(number, Uniform(prompt * 9 // 10, prompt * 11 // 10), answer, seed=1)
    old, new = (h100.run(work, rule, max_num_seqs=64) for rule in (enter_static, enter))
    slow, fast = old.result, new.result
    with_prompts = sum(ns for ns, chunks in zip(fast.step_columns["duration_ns"],
                                                fast.step_columns["num_chunks"], strict=True)
                       if chunks)
    gain_for[name] = slow.makespan_s / fast.makespan_s
    used[name] = 100 * old.mfu, 100 * new.mfu
    print(f"{name:38}{gain_for[name]:6.2f}{with_prompts / 1e7 / fast.makespan_s:15.0f}%"
          f"{used[name][0]:11.0f}%{used[name][1]:11.0f}%")
    if prompt > 5000:
        single = h100.run(work, RULES["one at a time"], max_num_seqs=64).result
        print(f"{'':38}   (one at a time takes {single.makespan_s / fast.makespan_s:.2f} times as "
              "long as continuous)")

# %% [markdown]
# The text is right, and even careful: with 16,000 in and a handful out, there is next to nothing to gain. A prompt
# needs eight steps of 2,048 tokens. By then the request before it has ended, so the machine works on one prompt after
# the other. Even the rule that lets in one at a time takes hardly longer. (That static batching loses nothing at all
# has to do with chunks: while the tokens of a step are used up, the batch goes on forming. Here it never closes. See
# question 3.)
#
# The last line is the other case without a gain, the one that you know from paper: equal lengths. "It makes everything
# four times as fast" may come true with many seats, different lengths and short prompts, and only there.
#
# Look at the two columns on the right as well: how much of the chip's arithmetic is used. Long prompts fill it, under
# either rule. (The cost model takes 60% for the most that kernels reach; that is an estimate.)
#
# ## An hour of real traffic
#
# All of this was traffic from a seed. Now real people. Microsoft has published what came to two of its services in an
# hour of November 2023: not the texts, only when each request came and how many tokens went in and out. Both hours have
# been played through our simulator, on an H100 with a model of 14 billion parameters, in three ways: continuous and
# paged; continuous, but each request reserves room for the longest one of the hour, in one piece; static and paged. The
# traces are not part of kvlab, so the results come with it. The figure says where they are from, and by which command.
#
# The first service is a chat: prompts of 1,020 tokens and answers of 129 in the median.

# %%
from kvlab.lab.scenes.traffic import draw_admissions, tell_admissions, traffic

hours = {name: traffic(name) for name in ("azure_conv", "azure_code")}
setting, came = hours["azure_conv"]["settings"], hours["azure_conv"]["trace"]
slots = setting["blocks"] * setting["block_size"]
print(f"{came['requests'] / came['minutes'] / 60:.1f} requests a second; room for {slots:,} tokens; "
      f"the longest request of the hour has {setting['longest_request']:,}")

# %% [markdown]
# **Predict.** The engine schedules continuously, but reserves. How many run at the same time, at most? How many are
# served in a second, if each takes about three seconds? And so: how many seconds does the median user of this hour wait
# for the first token?

# %%
lab.predict("a real hour", None, unit="seconds")

# %%
picture(draw_admissions(hours["azure_conv"]), tell_admissions(hours["azure_conv"]))
first_token = {(name, way): hour["ways"][way]["summary"]["ttft_p50_s"]
               for name, hour in hours.items() for way in ("paged", "contiguous", "static")}
for (name, way), seconds in first_token.items():
    ran = hours[name]["ways"][way]["summary"]
    print(f"{name}, {way:10} first token after {seconds:7.2f} s (median); "
          f"{ran['running']:4.1f} run on average, {ran['peak_running']:3} at most")
reserved = hours["azure_conv"]["ways"]["contiguous"]
queue, last = reserved["per_minute"]["waiting"], int(came["minutes"])
print(f"azure_conv, contiguous: {reserved['summary']['requests_per_s']:.1f} requests a second are "
      f"served; {max(queue):,.0f} wait in minute {queue.index(max(queue)) + 1}, "
      f"{queue[last - 1]:,.0f} in minute {last}, when the last ones come")
lab.compare("a real hour", first_token["azure_conv", "contiguous"])

# %% [markdown]
# **What to look at.** The upper right corner: who waits. (Its scale has powers of ten.) With pages, mostly nobody. With
# static batching, some twenty. With reservations, thousands. Fewer are served in a second than come, and what is too
# many piles up. In the last twenty minutes fewer come, and the queue shrinks, slowly; fast only when nobody comes any
# more. Fourteen run, all the time, and 98% of the blocks are owned; the dotted line says that 9% of their slots hold a
# token.
#
# So here the order is turned round: continuous batching without pages is the *worst* of the three, far worse than
# static batching with them. One long conversation is enough for that, because everybody reserves room for the longest.
# This is what L33 3.3 warns of.
#
# The second service writes code: prompts of 1,469 tokens, answers of 13, in the median. It is the case of L33 8.1-3 in
# the wild.

# %% fold="yes"
picture(draw_admissions(hours["azure_code"]), tell_admissions(hours["azure_code"]))

# %% [markdown]
# Three lines, and at nine in ten requests one can hardly tell them apart. The queue grows when many prompts come at
# once, and no rule helps against that. (More GPUs do. And where prompts begin alike, labs 05 and 06.)
#
# ## Extra: how busy is the chip?
#
# L33 3.4 says that all this lifts the use of the arithmetic from 20-30% to 75-85%. Lab 00 found a roof for that: 128
# decodes do about 128 operations for each byte that is moved, the H100 can do 295, and 128 / 295 is 43%. The weights
# are shared by the batch; K and V are not, so with long contexts it is less. What do our four servers reach, prompts
# included? And static batches of 4 to 8 requests, of which the text speaks?

# %%
ideal = Machine("H100", "Llama-3-8B", compute_efficiency=1, memory_efficiency=1,
                launch_seconds=0, host_seconds=0, host_seconds_per_sequence=0)
mfu = {}
for kind, gpu in (("H100", h100), ("an H100 without any loss", ideal)):
    for memory, reserve in (("contiguous", 4096), ("paged", None)):
        for name, rule in (("static", enter_static), ("continuous", enter)):
            if kind != "H100" and name == "static":
                continue
            known = runs.get((kind, memory, name)) or gpu.run(chats(600), rule, reserve)
            mfu[kind, memory, name] = 100 * known.mfu
            print(f"{kind:26}{memory:11}{name:11}{100 * known.mfu:5.1f}% of the arithmetic")
few = {seats: 100 * h100.run(chats(60), enter_static, max_num_seqs=seats).mfu for seats in (4, 8)}
for seats, share in few.items():
    print(f"{'H100':26}{'paged':11}{f'static, {seats} seats':11}{share:5.1f}%")

# %% [markdown]
# Three times as much as with neither cure, and still far from 75%, even on a machine that loses nothing. What stands in
# the way? Exercise 8 answers that. If you leave it out, the cell below it runs on ours.
#
# ### Exercise 8, if you like: the memory is full
#
# Continuous batching and paging let in as many as memory holds. So take a machine whose memory is full of K and V, and
# ask what a decode step can do.

# %%
from kvlab.primer import step_flops, step_seconds


# %% ex="full_memory"
def full_memory(gpu, shape, kv_bytes, context, reserve):
    """A decode step with as many requests as memory holds.

    gpu: has peak_flops. shape: a ModelShape; shape.kv_bytes_per_token() is the bytes of one
    slot. kv_bytes: bytes for K and V, besides the weights, a whole number. context: tokens
    before, the same for each request. reserve: slots that each request holds, more than
    context.

    Returns (batch, seconds, share): how many whole requests fit; the least time of their step;
    the share of the arithmetic that is used in it, from 0 to 1. (0, 0.0, 0.0) if none fits.
    Use step_flops(shape, step) and step_seconds(gpu, shape, step) from lab 00; a step is a list
    with a pair (1, context) for each request.
    """
    ### BEGIN SOLUTION
    batch = kv_bytes // (reserve * shape.kv_bytes_per_token())
    if batch == 0:
        return 0, 0.0, 0.0
    step = [(1, context)] * batch
    seconds = step_seconds(gpu, shape, step)
    return batch, seconds, step_flops(shape, step) / (seconds * gpu.peak_flops)
    ### END SOLUTION

# %% check="full_memory"
check("full_memory")

# %%
full = lab.best("full_memory")
gpu, shape = h100.cost.gpu, h100.cost.shape
room = h100.num_blocks * 16 * shape.kv_bytes_per_token()
print(f"H100: weights {shape.weight_bytes() / 1e9:.0f} GB, K and V {room / 1e9:.0f} GB")
print(f"{'context':>9}{'pages: fit':>12}{'a step':>10}{'arithmetic':>12}"
      f"{'4,096 each: fit':>18}{'a step':>10}{'arithmetic':>12}")
for context in (100, 250, 500, 1000, 2000, 4000):
    row = f"{context:9}"
    for reserve, width in ((context + 1, 12), (4096, 18)):
        batch, seconds, share = full(gpu, shape, room, context, reserve)
        row += f"{batch:{width},}{1000 * seconds:7.1f} ms{share:12.1%}"
    print(row)
once = (shape.weight_bytes() + room) / gpu.bandwidth
print(f"to read weights, K and V once takes {1000 * once:.1f} ms, "
      f"so there are at most {1 / once:.0f} steps a second")

# %% [markdown]
# Read the column "a step" under pages, from the bottom upwards. As long as memory is the limit it is always the same
# time: the time to read weights, K and V once, all that memory holds. The machine makes its 50 steps a second, whatever
# its users do. What changes is how many tokens each step brings: with contexts of 4,000 it is a hundred, with 500 eight
# hundred. That is where the share of the arithmetic comes from. It is decided by the **length of the contexts**, and
# with long ones no scheduler can do anything about it.
#
# On the right, the reservations: at most 98 requests, however short they are. This is L33 3.3 and 3.4 in one line:
# paging makes the batch, continuous batching keeps it, and the batch makes the arithmetic.
#
# ## Into the engine
#
# Your `admit` is a part of the engine. The same requests run on your rule and on ours; with torch it is the model that
# we ship, and the two cells may take half a minute. There are three seats for eight requests, so your rule is asked,
# and says no.

# %%
SHORT_AND_LONG = (6, 60, 12, 8, 48, 10, 20, 14)  # the most tokens that each may have
small = {"num_requests": 8, "num_samples": 1, "max_tokens": SHORT_AND_LONG, "max_num_seqs": 3}
result = lab.run_engine(**small)

# %% [markdown]
# Now with your `admit_static` in the same place. What will differ, and what will not?

# %%
from kvlab.lab.beside import run_beside_ours
from kvlab.parts import Parts

old_way = run_beside_ours(Parts(admit=enter_static), **small)
print(f"the same tokens: {old_way.same_tokens}")
for what, slow, fast in old_way.rows():
    print(f"{what:34} static {slow:>8}   continuous {fast:>8}")

# %% [markdown]
# Every token is the same. Only the steps are more. (And some blocks are given back more often: the system prompt, which
# all share, loses its last owner whenever the room is empty.) That is the contract between a scheduler and its users:
# **a policy decides when, and never what.**
#
# ## What the textbook says, and what we measured
#
# Each line but one (who wrote Orca) is computed by this notebook, from your functions where they pass.

# %% fold="yes"
from kvlab.lab.show import ledger

rows = []


def claim(where, says, found, holds, condition=""):
    rows.append((where, says, found, holds, condition))


held = [max(end for _, begin, end in in_batches if begin == start) for _, start, _ in in_batches]
busy_64 = 100 / gains["exponential"][SEATS.index(64)]
busy_4 = 100 * total / (4 * steps_of(in_batches))
both = [steps_of(in_batches), 4 * steps_of(in_batches) - total, round(busy_4, 2),
        round(gain, 2), steps_of(in_batches) - steps_of(at_once)]
claim("L33 3.1", "50, 500, 100, 150: over 60% idle", f"{ghost[2]:.1%}", ghost[2] >= 0.6,
      '"over" read as "at least"')
claim("L33 3.1", "throughput stays below 30%",
      f"busy seats: {100 - 100 * ghost[2]:.0f}% in its own figure, {busy_4:.0f}% in its "
      f"experiment, {busy_64:.0f}% with 64 seats", busy_64 < 30,
      "many seats and a long tail; 64 seats, exponential lengths")
claim("L33 3.1", "a finished answer cannot be sent before the batch ends",
      f"answers end at step {sum(end for *_, end in in_batches) / 16:.0f} on average, their "
      f"batches at {sum(held) / 16:.0f}", sum(held) > sum(end for *_, end in in_batches),
      "nothing is streamed, as the text says itself; the seat stays locked in any case")
claim("L33 3.2", "Orca came from a team of Microsoft",
      "Yu and others, Seoul National University and FriendliAI (OSDI 2022)", False)
claim("L33 3.2", "who ends in step t makes room for somebody in t + 1",
      "600 schedules planned and looped agree", differ == 0)
claim("L33 3.2", "the car is always full, no idle waiting any more",
      f"{idle_before} idle seat-steps while somebody waits, "
      f"{4 * steps_of(at_once) - total} at the end", idle_before == 0,
      "as long as somebody waits, and memory has room")

# %% fold="yes"
alone = {m: times_of(m, "contiguous", "continuous") for m in MACHINES}
added = {m: times_of(m, "paged", "continuous") / alone[m] for m in MACHINES}
without, slow_but_paged, now = (first_token["azure_conv", way]
                                for way in ("contiguous", "static", "paged"))
claim("L33 3.3", "without paging, continuous batching is an empty dream",
      f"an hour of chats, first token after: {without:.0f} s, with paging {now:.2f} s; even "
      f"static batching with paging {slow_but_paged:.1f} s. But if all wait from the beginning: "
      + "; ".join(f"{m}: {alone[m]:.1f} times the tokens without paging, {added[m]:.1f} times "
                  f"more with it" for m in MACHINES), without > 10 * slow_but_paged,
      "where reservations let in fewer than the traffic needs")
roof = 100 * 128 / gpu.balance
best_of = max(mfu.values())
longest_75 = max((n for n in range(10, 2000, 10) if full(gpu, shape, room, n, n + 1)[2] >= 0.75),
                 default=0)
by_prompt = {prompt: used[name] for name, prompt, answer in CASES if answer is ANSWER}
old_use = [by_prompt[prompt][0] for prompt in (100, 1000, 16_000)]
claim("L33 3.4", "static, a batch of 4 to 8: 20-30% of the arithmetic",
      f"4 seats: {few[4]:.1f}%, 8 seats: {few[8]:.1f}%; decodes: at most "
      f"{100 * 8 / gpu.balance:.1f}%. 256 seats: {mfu['H100', 'contiguous', 'static']:.0f}% "
      f"contiguous, {mfu['H100', 'paged', 'static']:.0f}% paged", max(few.values()) >= 20,
      "prompts much longer than answers, if they count: 64 seats, prompts of 100, 1,000, 16,000: "
      + ", ".join(f"{use:.0f}%" for use in old_use))
claim("L33 3.4", "continuous with pages, B = 64-128: 75-85% of an H100",
      f"decodes: at most {roof:.0f}%; our traffic, prompts counted: "
      f"{mfu['H100', 'paged', 'continuous']:.0f}%, without any loss {best_of:.0f}%",
      best_of >= 75, "a full memory reaches 75% with contexts of at most "
      f"{longest_75}, and a batch of {full(gpu, shape, room, longest_75, longest_75 + 1)[0]:,}; "
      "or prompts in every step (lab 08)")
claim("L33 3.4", "it is several times as much as before",
      f"{mfu['H100', 'paged', 'continuous'] / mfu['H100', 'contiguous', 'static']:.1f} times",
      mfu["H100", "paged", "continuous"] > 2 * mfu["H100", "contiguous", "static"])
claim("L33 7.2", "its program prints 338 steps, 393 idle, 70.93%; 1.21 times, 59 saved",
      "; ".join(map(str, both)), both == [338, 393, 70.93, 1.21, 59])
code = [first_token["azure_code", way] for way in ("static", "contiguous", "paged")]
claim("L33 8.1-3", "16K in, 5 out: the gain is small",
      f"{gain_for[CASES[0][0]]:.2f} times; an hour of code: first token after "
      + ", ".join(f"{seconds:.1f}" for seconds in code) + " s (static, reserved, paged)",
      gain_for[CASES[0][0]] < 1.1)
claim("L33 8.1-3", "four times for any traffic is a mistake",
      "; ".join(f"{value:.2f}" for value in gain_for.values()) + " for five kinds",
      min(gain_for.values()) < 4)

# %%
ledger(["where", "the text says", "we find", "verdict", "condition"],
       ("holds", "holds if", "contradicted here"), rows)

# %% [markdown]
# **The empty dream** of 3.3. The text's reason is a hole that is too small for the newcomer. It does not arise where
# all regions are equally long. And if requests wait anyway, continuous batching without paging still brings two to
# three times the tokens. But people come when they come. Where reservations let in fewer than the traffic needs, the
# queue grows and grows, and then the sentence is true: people wait for minutes, beside a memory that is nine tenths
# empty.
#
# **The 75-85%** of 3.4. The direction is right, three times. The height is not to be had by decoding. You come nearer
# with longer prompts, shorter contexts, or chunks of prompts in every step (lab 08).
#
# ## What to remember
#
# - A static batch costs its longest request. The gain of continuous batching is longest over mean; equal lengths gain
#   nothing.
# - While somebody waits, no seat is idle. Then no order takes more than (total - longest) / seats + longest.
# - The greater gain is in waiting: a newcomer waits for a step, not for a batch.
# - The rule is one line. It stands on flat batches, which let anybody join, and on memory, which must have room.
# - Where memory is scarce, paging brings more than the rule; where it is ample, the rule more than paging.
#
# ## Questions to think about
#
# 1. Longest first took 245 steps, the text's order 279. What would it do to the person with the shortest question? Look
#    for the order that makes the *mean* wait smallest, and then for whom it starves.
# 2. An engine could guess the length of an answer from its prompt. In which of the experiments above would a guess
#    help, and what happens to a request whose guess was too low?
# 3. A batch of our `admit_static` goes on forming while the token budget is used up, step after step. Why does that
#    make it nearly continuous for long prompts? (Compare lines 2 and 3 of "Long prompts, short answers".)
# 4. 256 seats, and admission starves at four. Should an engine refuse a request that has waited for a minute, or go on
#    holding it? What does each of the two tell the user?
# 5. `abort` may come in any state. Which of the four needs something given back, and to whom?
#
# ## Where this lives in real engines
#
# | here | vLLM V1, `v1/core/sched/` | elsewhere |
# |---|---|---|
# | `admit` | `if len(self.running) == self.max_num_running_reqs: break` in `Scheduler.schedule` | SGLang: `get_new_batch_prefill`; TGI: `max_batch_size` |
# | `serve` | `EngineCore.step`: schedule, execute, update | |
# | `next_status` | `RequestStatus` in `v1/request.py`; no swapped state, V1 always recomputes | |
# | `waiting`, `running` | the two queues of the scheduler | Orca's request pool |
# | static batching | none | `transformers` `generate()` on a padded batch |
# | the flat batch | `gpu_model_runner.py`: `query_start_loc` | Orca: selective batching |
#
# In kvlab: `kvlab/schedule/policies.py` holds the rules, `admission.py` asks them, `lifecycle.py` is the table of
# states, `on_paper.py` is what you wrote. The papers: Yu et al., "Orca: A Distributed Serving System for
# Transformer-Based Generative Models" (OSDI 2022); Kwon et al. (SOSP 2023); Graham, "Bounds for Certain Multiprocessing
# Anomalies" (1966).
