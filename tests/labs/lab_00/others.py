"""Lab 00: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_COUNT = '''
def num_projected(prompt, num_tokens, with_cache):
    if with_cache:
        return prompt + num_tokens - 1 if num_tokens else 0
    return num_tokens * prompt + num_tokens * (num_tokens - 1) // 2
'''
_ATTEND = '''
import math

def attend(q, keys, values):
    scores = []
    for k in keys:
        scores.append(sum(a * b for a, b in zip(q, k)) / math.sqrt(len(q)))
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    weights = [w / total for w in weights]
    return [sum(w * v[i] for w, v in zip(weights, values)) for i in range(len(values[0]))]
'''
_NEXT = '''
def attend_next(layer, x, keys, values):
    q = matvec(layer["q"], x)
    k = matvec(layer["k"], x)
    v = matvec(layer["v"], x)
    keys.append(k)
    values.append(v)
    return attention(q, keys, values)
'''
_DECODE = '''
def decode_without_cache(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model.forward(tokens, Cache())
        tokens.append(logits.index(max(logits)))
    return tokens[len(prompt):]

def decode_with_cache(model, prompt, num_tokens):
    cache, new, output = Cache(), list(prompt), []
    for _ in range(num_tokens):
        logits = model.forward(new, cache)
        token = logits.index(max(logits))
        output.append(token)
        new = [token]
    return output
'''
_FLOPS = '''
def step_flops(shape, step):
    flops = 0
    for new, computed in step:
        pairs = new * computed + new * (new + 1) // 2
        flops += 2 * shape.num_layer_weights * new
        flops += 2 * shape.vocab_size * shape.hidden_size
        flops += 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * pairs
    return flops
'''
_BYTES = '''
def step_bytes(shape, step, dtype_bytes=2):
    total = (shape.num_layer_weights + shape.vocab_size * shape.hidden_size) * dtype_bytes
    for new, computed in step:
        total += new * shape.hidden_size * dtype_bytes
        total += (computed + new) * shape.kv_bytes_per_token(dtype_bytes)
    return total
'''
_ROOF = '''
def attainable_flops(gpu, flop_per_byte):
    return min(gpu.peak_flops, flop_per_byte * gpu.bandwidth)

def step_seconds(gpu, shape, step, dtype_bytes=2):
    flops, moved = flops_of(shape, step), bytes_of(shape, step, dtype_bytes)
    return max(flops / gpu.peak_flops, moved / gpu.bandwidth)
'''
_BATCH = '''
import math

def batch_for_balance(gpu, shape, computed, dtype_bytes=2):
    one = [(1, computed)]
    f = flops_of(shape, one)
    b = bytes_of(shape, one * 2, dtype_bytes) - bytes_of(shape, one, dtype_bytes)
    w = bytes_of(shape, one, dtype_bytes) - b
    if f <= gpu.balance * b:
        return None
    return math.ceil(gpu.balance * w / (f - gpu.balance * b))
'''

CORRECT = {
    "num_projected": {
        "closed formula": _COUNT,
        "step by step": '''
def num_projected(prompt, num_tokens, with_cache):
    total = 0
    for i in range(num_tokens):
        total += 1 if with_cache and i else prompt + (0 if with_cache else i)
    return total
''',
    },
    "attend": {
        "three passes": _ATTEND,
        "one pass, rescaled when a larger score comes": '''
from math import exp

def attend(q, keys, values):
    largest, norm, mixed = float("-inf"), 0.0, [0.0] * len(values[0])
    for k, v in zip(keys, values):
        score = sum(a * b for a, b in zip(q, k)) / len(q) ** 0.5
        new = max(largest, score)
        shrink, weight = exp(largest - new), exp(score - new)
        norm = norm * shrink + weight
        mixed = [m * shrink + weight * x for m, x in zip(mixed, v)]
        largest = new
    return [m / norm for m in mixed]
''',
    },
    "attend_next": {
        "one after the other": _NEXT,
        "in place, without append": '''
def attend_next(layer, x, keys, values):
    keys += [matvec(layer["k"], x)]
    values += [matvec(layer["v"], x)]
    return attention(matvec(layer["q"], x), list(keys), list(values))
''',
    },
    "decode": {
        "new, then one": _DECODE,
        "behind what the cache holds": _DECODE.split("def decode_with_cache")[0] + '''
def decode_with_cache(model, prompt, num_tokens):
    cache, text = Cache(), list(prompt)
    for _ in range(num_tokens):
        logits = model.forward(text[len(cache):], cache)
        text.append(max(range(len(logits)), key=logits.__getitem__))
    return text[len(prompt):]
''',
    },
    "step_flops": {
        "sequence by sequence": _FLOPS,
        "token by token": '''
def step_flops(shape, step):
    heads = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    positions = [computed + i for new, computed in step for i in range(new)]
    matrices = len(positions) * shape.num_layer_weights
    return 2 * (matrices + len(step) * shape.vocab_size * shape.hidden_size) + 4 * heads * sum(p + 1 for p in positions)
''',
    },
    "step_bytes": {
        "sequence by sequence": _BYTES,
        "K and V by their size": '''
def step_bytes(shape, step, dtype_bytes=2):
    per_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    entries = shape.num_layer_weights + shape.vocab_size * shape.hidden_size
    entries += sum(shape.hidden_size * new + per_token * (new + computed) for new, computed in step)
    return entries * dtype_bytes
''',
    },
    "roofline": {
        "min and max": _ROOF,
        "by the balance": '''
def attainable_flops(gpu, flop_per_byte):
    if flop_per_byte >= gpu.peak_flops / gpu.bandwidth:
        return gpu.peak_flops
    return flop_per_byte * gpu.bandwidth

def step_seconds(gpu, shape, step, dtype_bytes=2):
    flops = flops_of(shape, step)
    return flops / attainable_flops(gpu, flops / bytes_of(shape, step, dtype_bytes))
''',
    },
    "batch_for_balance": {
        "solved for B": _BATCH,
        "by halving": '''
def batch_for_balance(gpu, shape, computed, dtype_bytes=2):
    one = [(1, computed)]
    f, first = flops_of(shape, one), bytes_of(shape, one, dtype_bytes)
    b = bytes_of(shape, one + one, dtype_bytes) - first
    enough = lambda n: n * f >= gpu.balance * (first - b + n * b)
    if not enough(1 << 40):
        return None
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
''',
    },
}

WRONG = {
    "num_projected": {
        "the last token goes in, too": _changed(_COUNT, "prompt + num_tokens - 1 if num_tokens else 0",
                                                "prompt + num_tokens"),
        "no step still computes": _changed(_COUNT, " if num_tokens else 0", ""),
        "the first step has a token already": _changed(_COUNT, "(num_tokens - 1) // 2", "(num_tokens + 1) // 2"),
        "the prompt every time, and no more": _changed(_COUNT, " + num_tokens * (num_tokens - 1) // 2", ""),
        "half a token": _changed(_COUNT, "// 2", "/ 2"),
        "the prompt is free with a cache": _changed(_COUNT, "prompt + num_tokens - 1 if", "num_tokens if"),
        "the wrong way round": _changed(_COUNT, "if with_cache:", "if not with_cache:"),
    },
    "attend": {
        "no scale": _changed(_ATTEND, " / math.sqrt(len(q))", ""),
        "scaled by d": _changed(_ATTEND, "math.sqrt(len(q))", "len(q)"),
        "scaled by the number of keys": _changed(_ATTEND, "math.sqrt(len(q))", "math.sqrt(len(keys))"),
        "scaled the other way": _changed(_ATTEND, "/ math.sqrt(len(q))", "* math.sqrt(len(q))"),
        "overflows": _changed(_ATTEND, "score - top", "score"),
        "divides zero by zero": _changed(_ATTEND, "score - top", "min(score, 700)"),
        "weights do not add up to 1": _changed(_ATTEND, "w / total", "w"),
        "the mean of the values": _changed(_ATTEND, "math.exp(score - top)", "1.0"),
        "only the best": _changed(_ATTEND, "math.exp(score - top)", "float(score == top)"),
        "mixes the keys": _changed(_ATTEND, "zip(weights, values)) for", "zip(weights, keys)) for"),
        "as long as the query": _changed(_ATTEND, "range(len(values[0]))", "range(len(q))"),
        "the weights, not the mixture": _changed(
            _ATTEND, "    return [sum(w * v[i] for w, v in zip(weights, values)) for i in range(len(values[0]))]",
            "    return weights"),
        "subtracts the first score": _changed(_ATTEND, "top = max(scores)", "top = scores[0]"),
        "mixes into the first value": _changed(
            _ATTEND, "    return [sum(w * v[i] for w, v in zip(weights, values)) for i in range(len(values[0]))]",
            """    out = values[0]
    mixed = [sum(w * v[i] for w, v in zip(weights, values)) for i in range(len(out))]
    out[:] = mixed
    return out"""),
        "scaled by the length of a value": _changed(_ATTEND, "math.sqrt(len(q))", "math.sqrt(len(values[0]))"),
        "no exponential": _changed(_ATTEND, "math.exp(score - top)", "score - top + 1"),
        "powers of two": _changed(_ATTEND, "math.exp(score - top)", "2 ** (score - top)"),
    },
    "attend_next": {
        "attends before it appends": _changed(_NEXT, '''    keys.append(k)
    values.append(v)
    return attention(q, keys, values)''', '''    found = attention(q, keys, values) if keys else v
    keys.append(k)
    values.append(v)
    return found'''),
        "keeps q for k": _changed(_NEXT, "keys.append(k)", "keys.append(q)"),
        "keeps the input": _changed(_NEXT, "keys.append(k)", "keys.append(x)"),
        "k and v swapped": _changed(_NEXT, "keys.append(k)\n    values.append(v)", "keys.append(v)\n    values.append(k)"),
        "asks with the key": _changed(_NEXT, "attention(q,", "attention(k,"),
        "asks with the input": _changed(_NEXT, "attention(q,", "attention(x,"),
        "makes new lists": _changed(_NEXT, "keys.append(k)\n    values.append(v)",
                                    "keys = keys + [k]\n    values = values + [v]"),
        "keeps nothing": _changed(_NEXT, "attention(q, keys, values)", "attention(q, [keys.pop()], [values.pop()])"),
        "looks at itself alone": _changed(_NEXT, "attention(q, keys, values)", "attention(q, keys[-1:], values[-1:])"),
        "the newest first": _changed(_NEXT, "keys.append(k)\n    values.append(v)",
                                     "keys.insert(0, k)\n    values.insert(0, v)"),
        "a cache for everybody": _NEXT.replace("def attend_next", "ALL_K, ALL_V = [], []\n\ndef attend_next").replace(
            "    return attention(q, keys, values)",
            "    ALL_K.append(k)\n    ALL_V.append(v)\n    return attention(q, ALL_K, ALL_V)"),
    },
    "decode": {
        "all tokens behind the cache": _changed(_DECODE, "        new = [token]", "        new = list(prompt) + output"),
        "throws the cache away": _changed(_DECODE, "model.forward(new, cache)", "model.forward(new, Cache())"),
        "recomputes and calls it a cache": _changed(_DECODE, "model.forward(new, cache)",
                                                    "model.forward(list(prompt) + output, Cache())"),
        "one cache for all calls": _changed(_DECODE, "def decode_with_cache",
                                            "SHARED = Cache()\n\ndef decode_with_cache").replace(
            "cache, new, output = Cache(),", "cache, new, output = SHARED,"),
        "a cache where there should be none": _changed(_DECODE, '''    for _ in range(num_tokens):
        logits = model.forward(tokens, Cache())''', '''    cache = Cache()
    for _ in range(num_tokens):
        logits = model.forward(tokens[len(cache):], cache)'''),
        "computes the last token, too": _changed(_DECODE, "        new = [token]\n    return output",
                                                 "        new = [token]\n    model.forward(new, cache)\n    return output"),
        "prefill even for nothing": _DECODE.split("def decode_with_cache")[0] + '''
def decode_with_cache(model, prompt, num_tokens):
    cache = Cache()
    logits, output = model.forward(prompt, cache), []
    for i in range(num_tokens):
        output.append(logits.index(max(logits)))
        if i + 1 < num_tokens:
            logits = model.forward(output[-1:], cache)
    return output
''',
        "the prompt token by token": _DECODE.split("def decode_with_cache")[0] + '''
def decode_with_cache(model, prompt, num_tokens):
    if not num_tokens:
        return []
    cache = Cache()
    for token in prompt:
        logits = model.forward([token], cache)
    output = [logits.index(max(logits))]
    while len(output) < num_tokens:
        logits = model.forward(output[-1:], cache)
        output.append(logits.index(max(logits)))
    return output
''',
        "takes token 0 for the end": _changed(_DECODE, "        new = [token]", """        new = [token]
        if not token:
            break"""),
        "returns the prompt, too": _changed(_DECODE, "return tokens[len(prompt):]", "return tokens"),
        "writes into the prompt": _changed(_DECODE, "tokens = list(prompt)", "tokens, n = prompt, len(prompt)").replace(
            "return tokens[len(prompt):]", "return tokens[n:]"),
        "the smallest logit": _changed(_DECODE, "index(max(logits))", "index(min(logits))"),
        "the last prompt token alone": _changed(_DECODE, "cache, new, output = Cache(), list(prompt), []",
                                                "cache, new, output = Cache(), prompt[-1:], []"),
    },
    "step_flops": {
        "a multiply and an add are one": _changed(_FLOPS, "return flops", "return flops // 2"),
        "logits for each token": _changed(_FLOPS, "shape.vocab_size * shape.hidden_size",
                                          "shape.vocab_size * shape.hidden_size * new"),
        "half a pair": _changed(_FLOPS, "// 2", "/ 2"),
        "one head for the batch": _changed(_FLOPS, "        flops += 2 * shape.vocab_size * shape.hidden_size\n",
                                           "").replace("flops = 0", "flops = 2 * shape.vocab_size * shape.hidden_size"),
        "no logits": _changed(_FLOPS, "        flops += 2 * shape.vocab_size * shape.hidden_size\n", ""),
        "looks into the future": _changed(_FLOPS, "new * (new + 1) // 2", "new * new"),
        "does not look at itself": _changed(_FLOPS, "new * (new + 1) // 2", "new * (new - 1) // 2"),
        "only what was computed before": _changed(_FLOPS, " + new * (new + 1) // 2", ""),
        "only the last token looks": _changed(_FLOPS, "new * computed + new * (new + 1) // 2", "computed + new"),
        "heads of K and V": _changed(_FLOPS, "num_attention_heads", "num_key_value_heads"),
        "q . k alone": _changed(_FLOPS, "4 * shape", "2 * shape"),
        "hidden size for heads": _changed(_FLOPS, "shape.num_attention_heads * shape.head_dim", "shape.hidden_size"),
        "one layer": _changed(_FLOPS, "4 * shape.num_hidden_layers *", "4 *"),
        "all parameters": _changed(_FLOPS, "num_layer_weights", "num_parameters"),
        "matrices once": _changed(_FLOPS, "num_layer_weights * new", "num_layer_weights"),
        "computes the old tokens again": _changed(_FLOPS, "num_layer_weights * new", "num_layer_weights * (new + computed)"),
        "no attention": _changed(_FLOPS, "head_dim * pairs", "head_dim * 0"),
    },
    "step_bytes": {
        "weights for each sequence": '''
def step_bytes(shape, step, dtype_bytes=2):
    total = 0
    for new, computed in step:
        total += (shape.num_layer_weights + shape.hidden_size * (shape.vocab_size + new)) * dtype_bytes
        total += (computed + new) * shape.kv_bytes_per_token(dtype_bytes)
    return total
''',
        "K and V of the new tokens alone": _changed(_BYTES, "(computed + new) * shape", "new * shape"),
        "does not write the new K and V": _changed(_BYTES, "(computed + new) * shape", "computed * shape"),
        "reads K and V for each new token": _changed(_BYTES, "(computed + new) * shape", "new * (computed + new) * shape"),
        "two bytes, whatever was said": _changed(_BYTES, "    total =", "    dtype_bytes = 2\n    total ="),
        "bytes twice": _changed(_BYTES, "shape.kv_bytes_per_token(dtype_bytes)",
                                "shape.kv_bytes_per_token(dtype_bytes) * dtype_bytes"),
        "the whole embedding": _changed(_BYTES, "        total += new * shape.hidden_size * dtype_bytes\n", "").replace(
            "shape.vocab_size * shape.hidden_size", "2 * shape.vocab_size * shape.hidden_size"),
        "no embedding": _changed(_BYTES, "        total += new * shape.hidden_size * dtype_bytes\n", ""),
        "no head": _changed(_BYTES, " + shape.vocab_size * shape.hidden_size", ""),
        "no default": _changed(_BYTES, "dtype_bytes=2", "dtype_bytes"),
        "K alone": _changed(_BYTES, "shape.kv_bytes_per_token(dtype_bytes)", "shape.kv_bytes_per_token(dtype_bytes) // 2"),
        "K and V of all heads": _changed(_BYTES, "shape.kv_bytes_per_token(dtype_bytes)",
                                         "2 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim"
                                         " * dtype_bytes"),
        "K and V are shared": _changed(_BYTES, "    for new, computed in step:", "    for new, computed in step[:1]:"),
    },
    "roofline": {
        "the higher limit": _changed(_ROOF, "min(", "max("),
        "no roof": _changed(_ROOF, "min(gpu.peak_flops, flop_per_byte * gpu.bandwidth)", "flop_per_byte * gpu.bandwidth"),
        "always the peak": _changed(_ROOF, "min(gpu.peak_flops, flop_per_byte * gpu.bandwidth)", "gpu.peak_flops"),
        "divides by the intensity": _changed(_ROOF, "flop_per_byte * gpu.bandwidth", "gpu.bandwidth / flop_per_byte"),
        "one after the other": _changed(_ROOF, "max(flops / gpu.peak_flops, moved / gpu.bandwidth)",
                                        "flops / gpu.peak_flops + moved / gpu.bandwidth"),
        "the faster one": _changed(_ROOF, "return max(", "return min("),
        "limits swapped": _changed(_ROOF, "flops / gpu.peak_flops, moved / gpu.bandwidth",
                                   "moved / gpu.peak_flops, flops / gpu.bandwidth"),
        "forgets the format": _changed(_ROOF, "bytes_of(shape, step, dtype_bytes)", "bytes_of(shape, step)"),
        "arithmetic alone": _changed(_ROOF, "max(flops / gpu.peak_flops, moved / gpu.bandwidth)",
                                     "flops / gpu.peak_flops"),
    },
    "batch_for_balance": {
        "the balance itself": '''
import math

def batch_for_balance(gpu, shape, computed, dtype_bytes=2):
    return math.ceil(gpu.balance)
''',
        "K and V cost nothing": _changed(_BATCH, "(f - gpu.balance * b)", "f"),
        "rounds down": _changed(_BATCH, "math.ceil", "int"),
        "a negative batch": _changed(_BATCH, "    if f <= gpu.balance * b:\n        return None\n", ""),
        "one sequence's K and V are weights": _changed(_BATCH, "w = bytes_of(shape, one, dtype_bytes) - b",
                                                       "w = bytes_of(shape, one, dtype_bytes)"),
        "forgets the format": _BATCH.replace(", dtype_bytes) ", ") ").replace(", dtype_bytes)\n", ")\n"),
        "looks no further than 299": '''
def batch_for_balance(gpu, shape, computed, dtype_bytes=2):
    for b in range(1, 300):
        step = [(1, computed)] * b
        if flops_of(shape, step) >= gpu.balance * bytes_of(shape, step, dtype_bytes):
            return b
    return None
''',
    },
}  # fmt: skip
