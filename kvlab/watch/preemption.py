"""View 8b, preemption (抢占, L33 5.1 and 9.3-1): a run of the real scheduler in a small pool, step by step.

A lane for each request, as they came; below them the blocks held, and the line that they cannot cross. Eight requests
of 12 + 24 tokens need 9 blocks each in the end, and the pool has 36: room for four. A step is a step, however long.

Scenarios: "six": six seats, and who finds a block comes in: is it quicker than four? "victim": the same run: who gives
way? "four": does anybody? "watermark": come in only with room to grow. "mixed": six seats, answers of 4 to 44 tokens.
"""

from collections.abc import Callable, Sequence
from random import Random

from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.events import Event, Recorder
from kvlab.parts import PartError, Parts
from kvlab.sim import Arrival, ConstantCost, Simulator, Workload
from kvlab.watch import lanes as by_step
from kvlab.watch.books import listed
from kvlab.watch.lanes import COLUMN, COLUMNS, LANES, ROW, WHY, X0, Lanes, shown
from kvlab.watch.stage import probe
from kvlab.watch.style import INK, PAPER
from kvlab.watch.svg import Svg
from kvlab.watch.view import Question, Scenario, View

BLOCK, POOL, PROMPT, OUTPUT, BUDGET = 4, 36, 12, 24, 16
MIXED = (4, 44, 8, 40, 12, 36, 20, 28)  # answers, 24 on average
MOST_STEPS = 200


def whoever(request, room) -> bool:
    """No watermark (水位线): who finds blocks for its next chunk comes in."""
    return True


def _simulate(seats: int, arrivals: Sequence[Arrival], parts: Parts, recorder: Recorder | None = None):
    config = EngineConfig(block_size=BLOCK, num_gpu_blocks_override=POOL + 1, max_num_seqs=seats,
                          max_num_batched_tokens=BUDGET, enable_prefix_caching=False)  # fmt: skip

    def look(scheduler, now_ns: int) -> None:
        if recorder is not None:
            probe(scheduler.manager, recorder)
        if scheduler.stats.num_steps == MOST_STEPS:
            raise RuntimeError(f"{MOST_STEPS} steps, and no end of it")

    simulator = Simulator(config, ConstantCost(1.0), parts, recorder)
    return simulator.run(Workload("preemption", arrivals), look).stats


Rule = Callable | None  # None: the engine's may_resume


def _run(seats: int, rule: Rule, than: tuple[str, int, Rule], mixed: bool = False):
    """than: (name, seats, rule) of the run to compare with. The seed says who comes when, and with which answer."""

    def play(seed: int, parts: Parts) -> list[Event]:
        random, recorder = Random(seed), Recorder()
        names = random.sample("ABCDEF", 6) + random.sample("GH", 2)
        outputs = random.sample(MIXED, 8) if mixed else [OUTPUT] * 8
        arrivals = [Arrival(0, PROMPT, output, name) for name, output in zip(names, outputs, strict=True)]
        name, other_seats, other_rule = than
        stats = _simulate(other_seats, arrivals, Parts(may_resume=other_rule))
        said = f"{seats} seats, {'watermark' if rule is None else 'no watermark'}"
        recorder.emit("setting", None, [said, cdiv(PROMPT + max(outputs) - 1, BLOCK), POOL])
        recorder.emit("reference", None, [name, stats.num_steps, stats.num_scheduled_tokens,
                                          stats.num_recomputed_tokens, stats.num_preemptions_recompute])  # fmt: skip
        try:
            _simulate(seats, arrivals, Parts(may_resume=rule) | parts, recorder)
        except (PartError, RuntimeError, ValueError) as error:  # of a student's part: the last frame says it
            recorder.emit("error", None, [str(error)])
        return recorder.events()

    return play


# ---- the picture


def draw(lanes: Lanes, pen: Svg) -> None:
    first = max(0, lanes.num_steps - COLUMNS)  # the oldest step that still has a column
    rows = {name: 4 + ROW * i for i, name in enumerate(shown(lanes))}
    acting = {name for victim in lanes.victims for name in victim[:2]}
    for name, y in rows.items():
        by_step.draw_lane(lanes, pen, name, y, first, name in acting)
    x = X0 + COLUMN * (lanes.num_steps - first)
    for victim in lanes.victims:
        if victim.name != victim.needy and victim.name in rows and victim.needy in rows:
            pen.arrow(x + 12, rows[victim.needy] + 10, x + 12, rows[victim.name] + 10, 4)
    by_step.draw_pool(lanes, pen, first)
    _figures(lanes, pen)


def _figures(lanes: Lanes, pen: Svg) -> None:
    """What the run has cost so far, beside another run's whole."""
    x, columns = 808, (1028, 1184)
    drawn = f", {LANES} drawn" if len(lanes.order) > LANES else ""
    pen.text(x, 24, lanes.setting[0] if lanes.setting else f"{len(lanes.order)} requests{drawn}", 22, bold=True)
    pen.text(columns[0], 58, "so far", anchor="end")
    other = lanes.reference[1:]
    if other:
        pen.text(columns[1], 58, lanes.reference[0], anchor="end")
    mine = (lanes.num_steps, lanes.tokens, lanes.again, lanes.num_preemptions)
    for row, name in enumerate(("steps", "tokens", "of them again", "gave way")):
        y = 66 + 34 * row
        pen.box(x, y, 384, 34, PAPER, 1)
        pen.text(x + 8, y + 25, name)
        pen.text(columns[0], y + 26, mine[row], 26, "end", bold=True)
        if other:
            pen.text(columns[1], y + 25, other[row], anchor="end")
    scale = 384 / max(500, lanes.tokens)
    pen.box(x, 212, scale * lanes.useful, 28, PAPER, 2)
    pen.box(x + scale * lanes.useful, 212, scale * lanes.again, 28, INK, 2)
    pen.text(x, 264, "black: again; ▽ gives way")
    pen.text(x, 288, "line: waits; thick: K and V gone")
    if lanes.victims:
        names, needy = listed([victim.name for victim in lanes.victims]), lanes.victims[0].needy
        pen.box(x, 299, 384, 36, PAPER, 5)
        pen.text(x + 10, 325, f"{names} ▽" + (f" for {needy}" if names != needy else ""), 24, bold=True)


# ---- scenarios

FULL = 14  # the step after which the pool of "six" is full, and nobody has given way yet
SPEED = ("a third fewer: half as many again run", "somewhat fewer", "no fewer")


def _ask_steps(lanes: Lanes) -> tuple[str, Sequence[str]]:
    name, steps, *_ = lanes.reference
    answers = "Answers are of 4 to 44 tokens. " if lanes.setting[1] > cdiv(PROMPT + OUTPUT, BLOCK) else ""
    return f"{answers}{name} take {steps} steps for all. How many will six take?", SPEED


def _answer_steps(states: Sequence[Lanes]) -> int:
    gain = states[-1].num_steps / states[-1].reference[1]
    return 0 if gain < 0.75 else 1 if gain < 0.97 else 2


def _why_steps(states: Sequence[Lanes]) -> str:
    end, (name, steps, _, again, _) = states[-1], states[-1].reference
    limit = ("memory is the limit, not seats", "some end early and leave room")[_answer_steps(states) < 2]
    cost = f"{end.num_preemptions} times somebody gave way, {end.again} tokens were computed again, not {again}"
    return f"{end.num_steps} steps, with {name} {steps}: {limit}. {cost}."


def _ask_victim(lanes: Lanes) -> tuple[str, Sequence[str]]:
    running = [name for name in lanes.order if lanes.status[name] == "running"]
    held = f"{lanes.held[-1]} of {lanes.num_blocks} blocks are held"
    return f"{held}, and in the next step somebody needs one more. Who gives way?", (
        f"{running[0]}, the oldest: it holds most", f"{running[-1]}, the youngest", "the one that needs the block",
        "nobody: it waits for a block")  # fmt: skip


def _answer_victim(states: Sequence[Lanes]) -> int:
    running = [name for name in states[FULL].order if states[FULL].status[name] == "running"]
    for name, needy, *_ in states[FULL + 1].victims:
        return 2 if name == needy else {running[0]: 0, running[-1]: 1}.get(name, -1)
    return 3


def _why_victim(states: Sequence[Lanes]) -> str:
    now = states[FULL + 1]
    if not now.victims:
        return "In this step nobody has to give way."
    name, _, reason, lost = now.victims[0]
    oldest = next(one for one in now.order if states[FULL].status[one] == "running")
    other = f"{oldest}, the oldest, would have had {states[FULL].computed[oldest]}"
    return f"{name}, {WHY.get(reason, 'whom the policy chose')}: {lost or 0} tokens to compute again. {other}."


def _ask_four(lanes: Lanes) -> tuple[str, Sequence[str]]:
    return f"{lanes.held[-1]} of {lanes.num_blocks} blocks are held, and all who run need more. Who will give way?", (
        "the youngest", "the oldest", "nobody")  # fmt: skip


def _answer_four(states: Sequence[Lanes]) -> int:
    for state in states[NEARLY:]:
        for victim in state.victims:
            return 0 if victim.reason in WHY else -1
    return 2


def _why_four(states: Sequence[Lanes]) -> str:
    end = states[-1]
    held = f"at most {max(end.held)} of {end.num_blocks} blocks were held"
    if end.num_preemptions:
        return f"{end.num_preemptions} times somebody gave way; {held}."
    return f"Nobody; {held}. Four requests of at most {end.setting[1]} blocks cannot need more than there are."


def _ask_more(lanes: Lanes) -> tuple[str, Sequence[str]]:
    others = lanes.reference[4]
    rule = "Whoever comes in now needs room for all its tokens, and a spare block for each that runs"
    return f"{rule}. Without, {others} gave way; so far {lanes.num_preemptions}. How many more?", (
        "none", "one or two", f"{others - lanes.num_preemptions}, as without")  # fmt: skip


def _answer_more(states: Sequence[Lanes]) -> int:
    more = states[-1].num_preemptions - states[FULL + 1].num_preemptions
    return 0 if more == 0 else 1 if more < 3 else 2


def _why_more(states: Sequence[Lanes]) -> str:
    end, (_, steps, _, again, _) = states[-1], states[-1].reference
    return (f"{end.num_preemptions} in all, and nobody at once again: {end.again} tokens computed again, not {again}. "
            f"It takes {end.num_steps} steps ({steps} without).")  # fmt: skip


NEARLY = 23  # the step of "four" after which the pool is nearly full
FOUR, NO_MARK = ("4 seats", 4, whoever), ("no watermark", 6, whoever)
STEPS = (_ask_steps, _answer_steps, _why_steps)

VIEW = View(
    name="preemption",
    title="Preemption (抢占)",
    begin=Lanes(),
    after=by_step.after,
    draw=draw,
    say=by_step.say,
    alt=by_step.alt,
    kinds=by_step.KINDS,
    legend="a lane: texture: its prompt; plain: one token a step; black: computed again. Grey: blocks held in a step",
    scenarios={
        "six": Scenario(_run(6, whoever, FOUR), Question(FULL, -1, *STEPS)),
        "victim": Scenario(
            _run(6, whoever, FOUR), Question(FULL, FULL + 1, _ask_victim, _answer_victim, _why_victim)
        ),
        "four": Scenario(
            _run(4, whoever, ("2 seats", 2, whoever)), Question(NEARLY, -1, _ask_four, _answer_four, _why_four)
        ),
        "watermark": Scenario(_run(6, None, NO_MARK), Question(FULL + 1, -1, _ask_more, _answer_more, _why_more)),
        "mixed": Scenario(_run(6, whoever, FOUR, mixed=True), Question(FULL, -1, *STEPS)),
    },
)
