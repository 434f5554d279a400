"""Lab 13: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_PICK = '''
def pick(weights, uniform):
    target, total = uniform * sum(weights), 0
    for i, weight in enumerate(weights):
        total += weight
        if total > target:
            return i
    return max(i for i, weight in enumerate(weights) if weight)
'''
_PICK_DIVIDES = '''
def pick(weights, uniform):
    whole, total = sum(weights), 0
    for i, weight in enumerate(weights):
        total += weight / whole
        if total > uniform:
            return i
    return len(weights) - 1
'''
_PICK_SEARCH = '''
from bisect import bisect_right
from itertools import accumulate

def pick(weights, uniform):
    sums = list(accumulate(weights))
    return bisect_right(sums, uniform * sums[-1])
'''
_KEEP = '''
def keep(weights, top_k, top_p):
    left = dict(enumerate(weights))
    first = []
    while left and (top_k == 0 or len(first) < top_k):
        best = max(left, key=left.get)
        first.append(best)
        del left[best]
    if top_p < 1:
        total, run = sum(weights[i] for i in first), 0
        for end, i in enumerate(first):
            run += weights[i]
            if run >= top_p * total:
                first = first[: end + 1]
                break
    return sorted(first)
'''
_KEEP_NUMPY = '''
def keep(weights, top_k, top_p):
    import numpy as np

    weights = np.array(weights, float)
    ranks = np.argsort(-weights, kind="stable")[: top_k or None]
    if top_p < 1:
        sums = np.cumsum(weights[ranks])
        ranks = ranks[: int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1]
    return np.sort(ranks).tolist()
'''
_SAMPLE = '''
import math

def sample(logits, temperature, top_k, top_p, uniform):
    values = list(map(float, logits))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if temperature == 0:
        return order[0]
    top = values[order[0]]
    weights = {i: math.exp((values[i] - top) / temperature) for i in order}
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total, run, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            run += weights[i]
            if run >= top_p * total:
                break
        order = kept
    order.sort()
    target, run = uniform * sum(weights[i] for i in order), 0.0
    for i in order:
        run += weights[i]
        if run > target:
            return i
    return order[-1]
'''
_SAMPLE_NUMPY = '''
def sample(logits, temperature, top_k, top_p, uniform):
    import numpy as np

    if temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits - logits.max()) / temperature)
    ranks = np.argsort(-logits, kind="stable")
    if top_k > 0:
        ranks = ranks[:top_k]
    if top_p < 1:
        sums = np.cumsum(weights[ranks])
        ranks = ranks[: np.searchsorted(sums, top_p * sums[-1]) + 1]
    ids = np.sort(ranks)
    sums = np.cumsum(weights[ids])
    return int(ids[np.searchsorted(sums, uniform * sums[-1], side="right")])
'''
_DRAWS = '''
def draws(scheduled):
    rows, found = 0, []
    for e in scheduled:
        rows += e.num_scheduled
        if e.num_tokens - e.num_computed == e.num_scheduled:
            for child in range(e.num_to_fork + 1):
                found.append((rows - 1, e.seed + child, e.num_tokens - e.num_prompt_tokens))
    return found
'''
_DRAWS_FLAT = '''
def draws(scheduled):
    flat = [(e, position) for e in scheduled for position in range(e.num_computed, e.num_computed + e.num_scheduled)]
    return [(row, e.seed + c, e.num_tokens - e.num_prompt_tokens) for row, (e, position) in enumerate(flat)
            if position + 1 == e.num_tokens for c in range(1 + e.num_to_fork)]
'''
_STEP = '''
def step(scheduler, runner):
    plan = scheduler.schedule()
    return scheduler.update_from_output(plan, runner.execute(plan))
'''
_WORST = '''
def worst_batch(max_num_batched_tokens, max_num_seqs, max_model_len):
    num = min(max_num_batched_tokens, max_num_seqs)
    counts = [1] * num
    left = max_num_batched_tokens - num
    for i in range(num):
        more = min(left, max_model_len - 1)
        counts[i] += more
        left -= more
    return counts
'''
_WORST_DIVMOD = '''
def worst_batch(budget, seats, longest):
    seats = min(seats, budget)
    full, rest = divmod(budget - seats, longest - 1) if longest > 1 else (0, 0)
    counts = [longest] * full + [1 + rest] + [1] * seats
    return counts[:seats]
'''
_CAREFUL = '''
from kvlab.engine.engine_steps import alone

def careful_execute(runner, output):
    try:
        return runner.execute(output), {}
    except Exception:
        if output.block_ops and not output.block_ops_done:
            raise
    sampled, failed = {}, {}
    for i in range(len(output.scheduled)):
        try:
            tokens = runner.execute(alone(output, i))
        except Exception as error:
            failed[output.scheduled[i][0].request_id] = str(error)
        else:
            sampled |= tokens
    return sampled, failed
'''
_CAREFUL_PLAIN = _CAREFUL[: _CAREFUL.index("    for i")] + '''
    for i, (request, _) in enumerate(output.scheduled):
        try:
            sampled.update(runner.execute(alone(output, i)))
        except Exception as error:
            failed[request.request_id] = str(error)
    return sampled, failed
'''
_CAREFUL_FUNCTION = '''
from kvlab.engine.engine_steps import alone

def careful_execute(runner, output):
    def attempt(step):
        try:
            return runner.execute(step), None
        except Exception as error:
            return {}, error

    sampled, error = attempt(output)
    if error is None:
        return sampled, {}
    if output.block_ops and not output.block_ops_done:
        raise error
    tried = [(request.request_id, *attempt(alone(output, i))) for i, (request, _) in enumerate(output.scheduled)]
    sampled = {}
    for _, tokens, _ in tried:
        sampled.update(tokens)
    return sampled, {name: str(error) for name, _, error in tried if error is not None}
'''

CORRECT = {
    "pick": {
        "walk": _PICK,
        "bisect": _PICK_SEARCH,
        "sum() of Python 3.12": _changed(_PICK, "uniform * sum(weights)", "uniform * __import__('math').fsum(weights)"),
        "two walks": '''
def pick(weights, uniform):
    total = 0
    for weight in weights:
        total += weight
    target, total = uniform * total, 0
    for i, weight in enumerate(weights):
        total += weight
        if total > target:
            return i
''',
    },
    "keep": {"heaviest first": _KEEP, "NumPy": _KEEP_NUMPY},
    "sample": {"in one function": _SAMPLE, "NumPy": _SAMPLE_NUMPY},
    "draws": {"rows left": _DRAWS, "token by token": _DRAWS_FLAT},
    "step": {"two lines": _STEP, "with names": '''
def step(scheduler, runner):
    output = scheduler.schedule()
    sampled = runner.execute(output=output)
    return scheduler.update_from_output(output=output, sampled=sampled)
''', "looks and checks": '''
def step(scheduler, runner):
    output = scheduler.schedule()
    sampled = runner.execute(output)
    print(len(output.scheduled), output.total_num_scheduled_tokens, len(sampled), dict(sampled))
    for request_id, tokens in sampled.items():
        assert tokens and any(request.request_id == request_id for request, _ in output.scheduled)
    return scheduler.update_from_output(output, sampled)
'''},
    "worst_batch": {"deal out": _WORST, "divmod": _WORST_DIVMOD},
    "careful_execute": {"else": _CAREFUL, "attempts": _CAREFUL_FUNCTION, "as anybody writes it": _CAREFUL_PLAIN},
}  # fmt: skip

_CUT = "    if top_k:\n        order = order[:top_k]\n"

WRONG = {
    "pick": {
        "reaches": _changed(_PICK, "total > target", "total >= target"),
        "weights are shares": _changed(_PICK, "uniform * sum(weights)", "uniform"),
        "bisect left": _changed(_PICK_SEARCH, "bisect_right", "bisect_left"),
        "heaviest first": _changed(_PICK, "enumerate(weights):", "sorted(enumerate(weights), key=lambda x: -x[1]):"),
        "from the end": _changed(_PICK, "uniform * sum", "(1 - uniform) * sum"),
        "random": "import random\ndef pick(weights, uniform):\n    return random.choices(range(len(weights)), weights)[0]\n",
        "the heaviest": "def pick(weights, uniform):\n    return weights.index(max(weights))\n",
        "by place": "def pick(weights, uniform):\n    return int(uniform * len(weights))\n",
        "shares rounded": _changed(_PICK, "total += weight\n", "total += round(weight)\n"),
        "changes the list": '''
def pick(weights, uniform):
    target = uniform * sum(weights)
    for i in range(1, len(weights)):
        weights[i] += weights[i - 1]
    return next(i for i, total in enumerate(weights) if total > target)
''',
        "divides in place": '''
def pick(weights, uniform):
    total, run = sum(weights), 0
    for i in range(len(weights)):
        run += weights[i] / total
        if run > uniform:
            return i
''',
        "divides first": _PICK_DIVIDES,
        "no index at the end": _changed(_PICK, "uniform * sum(weights)", "uniform * __import__('math').fsum(weights)").replace(
            "    return max(i for i, weight in enumerate(weights) if weight)\n", ""),
        "subtracts from the end": '''
def pick(weights, uniform):
    total = sum(weights)
    target = uniform * total
    for i in reversed(range(len(weights))):
        total -= weights[i]
        if total <= target:
            return i
''',
        "skips the first": _changed(_PICK, "total = uniform * sum(weights), 0", "total = uniform * sum(weights), -weights[0]"),
        "returns the weight": _changed(_PICK, "return i\n", "return weight\n"),
    },
    "keep": {
        "more than p": _changed(_KEEP, "run >= top_p", "run > top_p"),
        "drops the one that reaches": _changed(_KEEP, "first[: end + 1]", "first[:end] or first[:1]"),
        "p of all weights": _changed(_KEEP, "sum(weights[i] for i in first), 0", "sum(weights), 0"),
        "p of 1": _changed(_KEEP, "top_p * total", "top_p"),
        "by rank": _changed(_KEEP, "sorted(first)", "first"),
        "ties to the highest": _changed(_KEEP, "max(left, key=left.get)", "max(left, key=lambda i: (left[i], i))"),
        "ties all stay": '''
def keep(weights, top_k, top_p):
    ranks = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k and top_k < len(ranks):
        ranks = [i for i in ranks if weights[i] >= weights[ranks[top_k - 1]]]
    if top_p < 1:
        total, run = sum(weights[i] for i in ranks), 0
        for end, i in enumerate(ranks):
            run += weights[i]
            if run >= top_p * total:
                break
        ranks = ranks[: end + 1]
    return sorted(ranks)
''',
        "top_k 0 keeps one": _changed(_KEEP, "top_k == 0 or len(first) < top_k", "len(first) < max(1, top_k)"),
        "top-p first": '''
def keep(weights, top_k, top_p):
    ranks = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_p < 1:
        total, run = sum(weights), 0
        for end, i in enumerate(ranks):
            run += weights[i]
            if run >= top_p * total:
                break
        ranks = ranks[: end + 1]
    return sorted(ranks[:top_k] if top_k else ranks)
''',
        "no top-p": _changed(_KEEP, "top_p < 1", "False"),
        "no weight 0": _changed(_KEEP, "return sorted(first)", "return sorted(i for i in first if weights[i])"),
        "weights": _changed(_KEEP, "return sorted(first)", "return sorted(weights[i] for i in first)"),
        "a threshold": _changed(_KEEP, "if run >= top_p * total:", "if weights[i] <= (1 - top_p) * total:"),
        "one rank too many": _changed(_KEEP, "end + 1]", "end + 2]"),
        "sorts the caller's list": _changed(_KEEP, "    left =", "    weights.sort(reverse=True)\n    left ="),
        "almost 1 is 1": _changed(_KEEP, "top_p < 1", "top_p < 0.99"),
        "nearly 1 is 1": _changed(_KEEP, "top_p < 1", "top_p < 0.999"),
        "divides first": _changed(_changed(_KEEP, "run += weights[i]", "run += weights[i] / total"), "top_p * total", "top_p"),
        "nearly reaches": _changed(_KEEP, "run >= top_p * total", "run >= top_p * total - 1e-9"),
        "as text": _changed(_KEEP, "return sorted(first)", "return sorted(first, key=str)"),
    },
    "sample": {
        "divides by 0": _changed(_SAMPLE, "    if temperature == 0:\n        return order[0]\n", ""),
        "greedy, last of equals": _changed(_SAMPLE, "return order[0]", "return max(range(len(values)), key=lambda i: (values[i], i))"),
        "no shift": _changed(_SAMPLE, "values[i] - top", "values[i]"),
        "by rank": _changed(_SAMPLE, "    order.sort()\n", ""),
        "place for token": _changed(_SAMPLE, "            return i\n", "            return order.index(i)\n"),
        "reaches": _changed(_SAMPLE, "if run > target", "if run >= target"),
        "temperature times": _changed(_SAMPLE, "- top) / temperature", "- top) * temperature"),
        "temperature forgotten": _changed(_SAMPLE, " / temperature", ""),
        "temperature after top-p": _changed(
            _changed(_SAMPLE, " / temperature", ""), "    order.sort()\n",
            "    weights = {i: weights[i] ** (1 / temperature) for i in order}\n    order.sort()\n"),
        "temperature on the highest too late": _changed(_SAMPLE, "(values[i] - top) / temperature", "values[i] / temperature - top"),
        "no top-k": _changed(_SAMPLE, _CUT, ""),
        "top-p before top-k": _changed(_changed(_SAMPLE, _CUT, ""), "    order.sort()\n", _CUT + "    order.sort()\n"),
        "no top-p": _changed(_SAMPLE, "top_p < 1", "False"),
        "ties to the highest id": _changed(_SAMPLE, "key=lambda i: (-values[i], i)", "key=lambda i: (-values[i], -i)"),
        "draws without kept": _changed(_SAMPLE, "    order.sort()\n", "    order = list(range(len(values)))\n"),
        "changes the logits": "def sample(logits, temperature, top_k, top_p, uniform):\n"
                              "    result = _sample(list(logits), temperature, top_k, top_p, uniform)\n"
                              "    logits -= logits.max()\n    return result\n"
                              + _changed(_SAMPLE, "def sample", "def _sample"),
        "a NumPy number": _changed(_SAMPLE_NUMPY, "return int(ids[", "return (ids[").replace("right\")])", "right\")])"),
        "random": _changed(_SAMPLE, "uniform * sum", "__import__('random').random() * sum"),
        "half precision": _changed(_SAMPLE, "math.exp((values[i] - top) / temperature)", "round(math.exp((values[i] - top) / temperature), 1)"),
        "uniform turned": _changed(_SAMPLE, "uniform * sum", "(1 - uniform) * sum"),
        "greedy below 0.2": _changed(_SAMPLE, "temperature == 0", "temperature < 0.2"),
        "greedy below 0.01": _changed(_SAMPLE, "temperature == 0", "temperature < 0.01"),
        "single precision": _changed(_SAMPLE, "list(map(float, logits))", "[float(x) for x in logits.astype('float32')]"),
        "greedy always": "def sample(logits, temperature, top_k, top_p, uniform):\n    return int(logits.argmax())\n",
    },
    "draws": {
        "every chunk": _changed(_DRAWS, "if e.num_tokens - e.num_computed == e.num_scheduled:", "if True:"),
        "decodes only": _changed(_DRAWS, "if e.num_tokens - e.num_computed == e.num_scheduled:", "if e.num_scheduled == 1:"),
        "at the prompt's end": _changed(_DRAWS, "if e.num_tokens - e.num_computed == e.num_scheduled:",
                                        "if e.num_computed + e.num_scheduled >= e.num_prompt_tokens:"),
        "row of the entry": _changed(_DRAWS, "rows - 1, ", "len(found), "),
        "row after": _changed(_DRAWS, "rows - 1, ", "rows, "),
        "first row": _changed(_DRAWS, "rows - 1, ", "rows - e.num_scheduled, "),
        "sampled rows only": '''
def draws(scheduled):
    rows, found = 0, []
    for e in scheduled:
        if e.num_tokens - e.num_computed == e.num_scheduled:
            rows += e.num_scheduled
            for child in range(e.num_to_fork + 1):
                found.append((rows - 1, e.seed + child, e.num_tokens - e.num_prompt_tokens))
    return found
''',
        "position in the text": _changed(_DRAWS, "e.num_tokens - e.num_prompt_tokens))", "e.num_tokens))"),
        "position 0 after recomputing": _changed(_DRAWS, "e.num_tokens - e.num_prompt_tokens))",
                                                 "0 if e.num_scheduled > 1 else e.num_tokens - e.num_prompt_tokens))"),
        "position of what is computed": _changed(_DRAWS, "e.num_tokens - e.num_prompt_tokens))", "max(0, e.num_computed - e.num_prompt_tokens)))"),
        "position counts from 1": _changed(_DRAWS, "e.num_tokens - e.num_prompt_tokens))", "e.num_tokens - e.num_prompt_tokens + 1))"),
        "one seed for all": _changed(_DRAWS, "e.seed + child", "e.seed"),
        "no children": _changed(_DRAWS, "range(e.num_to_fork + 1)", "range(1)"),
        "one child too few": _changed(_DRAWS, "range(e.num_to_fork + 1)", "range(max(1, e.num_to_fork))"),
        "a row for each child": _changed(_DRAWS, "rows - 1, ", "rows - 1 + child, "),
        "children in a chunk": '''
def draws(scheduled):
    rows, found = 0, []
    for e in scheduled:
        rows += e.num_scheduled
        if e.num_tokens - e.num_computed == e.num_scheduled or e.num_to_fork:
            for child in range(e.num_to_fork + 1):
                found.append((rows - 1, e.seed + child, e.num_tokens - e.num_prompt_tokens))
    return found
''',
        "seed by place": _changed(_DRAWS, "e.seed + child", "e.seed + len(found)"),
        "a generator": _changed(_DRAWS, "return found", "return iter(found)"),
        "marks the children as born": _changed(_DRAWS, "            for child", "            e.num_to_fork = e.num_to_fork\n            for child"),
        "empties the list": _changed(_DRAWS, "    return found", "    scheduled.clear()\n    return found"),
    },
    "step": {
        "forgotten return": _changed(_STEP, "return scheduler", "scheduler"),
        "skips an empty step": _changed(_STEP, "    return", "    if not plan.scheduled:\n        return []\n    return"),
        "schedules twice": _changed(_STEP, "runner.execute(plan)", "runner.execute(scheduler.schedule())"),
        "computes twice": _changed(_STEP, "    return", "    runner.execute(plan)\n    return"),
        "returns what was sampled": "def step(scheduler, runner):\n    plan = scheduler.schedule()\n    sampled = runner.execute(plan)\n"
                                    "    scheduler.update_from_output(plan, sampled)\n    return sampled\n",
        "no update": "def step(scheduler, runner):\n    return runner.execute(scheduler.schedule())\n",
        "the wrong way round": _changed(_STEP, "plan, runner.execute(plan)", "runner.execute(plan), plan"),
        "update first": '''
def step(scheduler, runner):
    plan = scheduler.schedule()
    results = scheduler.update_from_output(plan, {})
    runner.execute(plan)
    return results
''',
        "hides errors": '''
def step(scheduler, runner):
    try:
        plan = scheduler.schedule()
        return scheduler.update_from_output(plan, runner.execute(plan))
    except Exception:
        return []
''',
        "hides the runner's": '''
def step(scheduler, runner):
    plan = scheduler.schedule()
    try:
        sampled = runner.execute(plan)
    except Exception:
        sampled = {}
    return scheduler.update_from_output(plan, sampled)
''',
        "nobody drew, nothing to say": '''
def step(scheduler, runner):
    plan = scheduler.schedule()
    sampled = runner.execute(plan)
    if not sampled:
        return []
    return scheduler.update_from_output(plan, sampled)
''',
        "updates after an error": '''
def step(scheduler, runner):
    plan, sampled = scheduler.schedule(), {}
    try:
        sampled = runner.execute(plan)
    finally:
        results = scheduler.update_from_output(plan, sampled)
    return results
''',
        "tries again": '''
def step(scheduler, runner):
    plan = scheduler.schedule()
    try:
        sampled = runner.execute(plan)
    except Exception:
        sampled = runner.execute(plan)
    return scheduler.update_from_output(plan, sampled)
''',
        "a new plan after an error": '''
def step(scheduler, runner):
    plan = scheduler.schedule()
    try:
        sampled = runner.execute(plan)
    except Exception:
        scheduler.schedule()
        raise
    return scheduler.update_from_output(plan, sampled)
''',
        "another error": '''
def step(scheduler, runner):
    try:
        plan = scheduler.schedule()
        return scheduler.update_from_output(plan, runner.execute(plan))
    except Exception as error:
        raise RuntimeError("the step failed") from error
''',
        "the results copied": _changed(_STEP, "runner.execute(plan))", "dict(runner.execute(plan)))"),
        "another plan": _changed(_STEP, "return scheduler.update_from_output(plan, ", "return scheduler.update_from_output(list(plan.scheduled), "),
        "a copy of the list": _changed(_STEP, "return scheduler.update_from_output(plan, runner.execute(plan))",
                                       "return [scheduler.update_from_output(plan, runner.execute(plan))]"),
        "as long as there is work": '''
def step(scheduler, runner):
    results = []
    for _ in range(2):
        plan = scheduler.schedule()
        results += scheduler.update_from_output(plan, runner.execute(plan))
    return results
''',
        "the next plan ahead": '''
ahead = []

def step(scheduler, runner):
    plan = ahead.pop() if ahead else scheduler.schedule()
    results = scheduler.update_from_output(plan, runner.execute(plan))
    ahead.append(scheduler.schedule())
    return results
''',
    },
    "worst_batch": {
        "evenly": '''
def worst_batch(budget, seats, longest):
    seats = min(seats, budget)
    budget = min(budget, seats * longest)
    return [budget // seats + (i < budget % seats) for i in range(seats)]
''',
        "one long": "def worst_batch(budget, seats, longest):\n    return [min(budget, longest)]\n",
        "fills up": '''
def worst_batch(budget, seats, longest):
    counts = []
    while budget and len(counts) < seats:
        counts.append(min(budget, longest))
        budget -= counts[-1]
    return counts
''',
        "decodes": "def worst_batch(budget, seats, longest):\n    return [1] * min(seats, budget)\n",
        "over the budget": _changed(_WORST, "max_num_batched_tokens - num", "max_num_batched_tokens"),
        "longer than the model": _changed(_WORST, "max_model_len - 1", "max_model_len"),
        "all seats": _changed(_WORST, "num = min(max_num_batched_tokens, max_num_seqs)", "num = max_num_seqs"),
        "every seat full": "def worst_batch(budget, seats, longest):\n    return [longest] * seats\n",
        "rest is lost": "def worst_batch(budget, seats, longest):\n    seats = min(seats, budget)\n    return [min(longest, budget // seats)] * seats\n",
        "all on the first": "def worst_batch(budget, seats, longest):\n    seats = min(seats, budget)\n"
                            "    return [min(longest, budget - seats + 1)] + [1] * (seats - 1)\n",
        "one token, one request": _changed(_WORST, "    num =", "    if max_model_len == 1:\n        return [1]\n    num ="),
        "divides by 0": _changed(_WORST_DIVMOD, " if longest > 1 else (0, 0)", ""),
        "shortest first": _changed(_WORST, "return counts", "return counts[::-1]"),
        "average": "def worst_batch(budget, seats, longest):\n    seats = max(1, min(seats, budget) // 2)\n    return [max(1, min(longest, budget // seats // 2))] * seats\n",
    },
    "careful_execute": {
        "one by one at once": '''
from kvlab.engine.engine_steps import alone

def careful_execute(runner, output):
    sampled, failed = {}, {}
    for i, (request, _) in enumerate(output.scheduled):
        try:
            sampled.update(runner.execute(alone(output, i)))
        except Exception as error:
            failed[request.request_id] = str(error)
    return sampled, failed
''',
        "all fail together": '''
def careful_execute(runner, output):
    try:
        return runner.execute(output), {}
    except Exception as error:
        if output.block_ops and not output.block_ops_done:
            raise
        return {}, {request.request_id: str(error) for request, _ in output.scheduled}
''',
        "copies again": '''
from dataclasses import replace

def careful_execute(runner, output):
    try:
        return runner.execute(output), {}
    except Exception:
        if output.block_ops and not output.block_ops_done:
            raise
    sampled, failed = {}, {}
    for i, (request, _) in enumerate(output.scheduled):
        try:
            one = replace(output, scheduled=[output.scheduled[i]], block_tables=[output.block_tables[i]], block_ops_done=False)
            sampled.update(runner.execute(one))
        except Exception as error:
            failed[request.request_id] = str(error)
    return sampled, failed
''',
        "goes on after failed copies": _changed(_CAREFUL, "        if output.block_ops and not output.block_ops_done:\n            raise\n", "        pass\n"),
        "gives up after any copies": _changed(_CAREFUL, "output.block_ops and not output.block_ops_done", "output.block_ops"),
        "gives up without copies": _changed(_CAREFUL, "output.block_ops and not output.block_ops_done", "not output.block_ops_done"),
        "eats Ctrl-C": _changed(_CAREFUL, "except Exception:", "except BaseException:").replace("except Exception as", "except BaseException as"),
        "eats Ctrl-C of one alone": _changed(_CAREFUL, "except Exception as", "except BaseException as"),
        "the request as key": _changed(_CAREFUL, "output.scheduled[i][0].request_id", "output.scheduled[i][0]"),
        "eats it alone": "def careful_execute(runner, output):\n    try:\n        return runner.execute(output), {}\n    except:\n        return {}, {}\n",
        "stops at the first": _changed(_CAREFUL, "= str(error)\n", "= str(error)\n            break\n"),
        "the error itself": _changed(_CAREFUL, "= str(error)", "= error"),
        "its repr": _changed(_CAREFUL, "= str(error)", "= repr(error)"),
        "the number of the entry": _changed(_CAREFUL, "output.scheduled[i][0].request_id", "i"),
        "the last one's tokens": _changed(_CAREFUL, "sampled |= tokens", "sampled = tokens"),
        "no words, no failure": _changed(_CAREFUL, "failed[output.scheduled[i][0].request_id] = str(error)",
                                         "if str(error):\n                failed[output.scheduled[i][0].request_id] = str(error)"),
        "whole step again": _changed(_CAREFUL, "runner.execute(alone(output, i))", "runner.execute(output)"),
        "tries the good ones together": '''
from dataclasses import replace
from kvlab.engine.engine_steps import alone

def careful_execute(runner, output):
    try:
        return runner.execute(output), {}
    except Exception:
        if output.block_ops and not output.block_ops_done:
            raise
    failed = {}
    for i, (request, _) in enumerate(output.scheduled):
        try:
            runner.execute(alone(output, i))
        except Exception as error:
            failed[request.request_id] = str(error)
    good = [i for i, (request, _) in enumerate(output.scheduled) if request.request_id not in failed]
    rest = replace(output, scheduled=[output.scheduled[i] for i in good], block_tables=[output.block_tables[i] for i in good])
    return runner.execute(rest), failed
''',
    },
}  # fmt: skip
