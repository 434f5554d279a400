"""Lab 01: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_TOKEN = '''
def token_bytes(config, dtype_bytes=2):
    kv_heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes
'''
_COUNT = '''
def layer_parameters(config):
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", hidden // heads)
    q, k = heads * head_dim, kv_heads * head_dim
    bias = q + 2 * k if config["model_type"] == "qwen2" else 0
    return hidden * (q + 2 * k) + bias + q * hidden + 3 * hidden * inner + 2 * hidden

def num_parameters(config):
    embedding = config["vocab_size"] * config["hidden_size"]
    head = 0 if config.get("tie_word_embeddings", False) else embedding
    norm = config["hidden_size"]
    return embedding + head + norm + config["num_hidden_layers"] * layer_parameters(config)
'''
_SIZE = '''
def to_bytes(text):
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    number, unit = text.split()
    if unit not in units:
        raise ValueError(unit)
    return round(float(number) * units[unit])
'''
_BLOCKS = '''
def num_gpu_blocks(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, cudagraph_bytes, block_bytes):
    if gpu_memory_utilization <= 0 or gpu_memory_utilization > 1:
        raise ValueError("utilization")
    budget = int(total_bytes * gpu_memory_utilization)
    blocks = (budget - weight_bytes - activation_bytes - cudagraph_bytes) // block_bytes
    if blocks < 1:
        raise ValueError("no room")
    return blocks
'''
_FIT = '''
def max_concurrency(num_blocks, block_size, tokens_per_request):
    each = -(-tokens_per_request // block_size)
    return num_blocks // each
'''
_RESERVE = '''
def compare_reservation(lengths, max_len, block_size):
    used = sum(lengths)
    reserved = len(lengths) * max_len
    paged = sum(-(-n // block_size) for n in lengths) * block_size
    return 1 - used / reserved, 1 - used / paged, reserved / paged
'''
_QUANT = '''
def quantised_bytes(num_weights, bits=4, group_size=128, rest_bytes=2):
    groups = -(-num_weights // group_size)
    return -(-(num_weights + groups) * bits // 8) + groups * rest_bytes
'''
_EVEN = '''
def break_even_tokens(state_bytes, bytes_per_token, block_size):
    return state_bytes // (bytes_per_token * block_size) * block_size + 1
'''

_LEFT = "(budget - weight_bytes - activation_bytes - cudagraph_bytes)"
_DECIMAL = '"KB": 10**3, "MB": 10**6, "GB": 10**9'
_IDLE = "1 - used / reserved, 1 - used / paged"

# exercise -> {what it is: the cell}
CORRECT = {
    "token_bytes": {
        "layer by layer, with ifs": '''
def token_bytes(config, dtype_bytes=2):
    if "num_key_value_heads" in config:
        kv_heads = config["num_key_value_heads"]
    else:
        kv_heads = config["num_attention_heads"]
    head_dim = config["head_dim"] if "head_dim" in config else config["hidden_size"] // config["num_attention_heads"]
    k = v = kv_heads * head_dim * dtype_bytes
    return sum(k + v for _ in range(config["num_hidden_layers"]))
''',
    },
    "count_parameters": {
        "a list of shapes": '''
def layer_parameters(config):
    h, n = config["hidden_size"], config["num_attention_heads"]
    d = config.get("head_dim") or h // n
    q, kv = n * d, (config.get("num_key_value_heads") or n) * d
    i = config["intermediate_size"]
    weights = [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h), (1, h), (1, h)]
    if config["model_type"] == "qwen2":
        weights += [(1, q), (1, kv), (1, kv)]
    return sum(a * b for a, b in weights)

def num_parameters(config):
    h = config["hidden_size"]
    tables = 2 - bool(config.get("tie_word_embeddings"))
    return h * (tables * config["vocab_size"] + 1) + config["num_hidden_layers"] * layer_parameters(config)
''',
    },
    "to_bytes": {
        "exact, with Decimal and powers": '''
from decimal import Decimal

def to_bytes(text):
    number, unit = text.split(" ")
    base = 1024 if unit.endswith("iB") else 1000
    names = ["B", "KiB", "MiB", "GiB"] if base == 1024 else ["B", "KB", "MB", "GB"]
    return int(round(Decimal(number) * base ** names.index(unit)))
''',
        "adds a half": _changed(_SIZE, "round(float(number) * units[unit])", "int(float(number) * units[unit] + 0.5)"),
    },
    "num_gpu_blocks": {
        "floats to the end": '''
def num_gpu_blocks(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, cudagraph_bytes, block_bytes):
    if not (gpu_memory_utilization > 0 and gpu_memory_utilization <= 1):
        raise ValueError("utilization")
    left = total_bytes * gpu_memory_utilization - (weight_bytes + activation_bytes + cudagraph_bytes)
    if left < block_bytes:
        raise ValueError("too little")
    return int(left // block_bytes)
''',
        "exact, with fractions": '''
from fractions import Fraction

def num_gpu_blocks(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, cudagraph_bytes, block_bytes):
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError("utilization")
    left = total_bytes * Fraction(str(gpu_memory_utilization)) - weight_bytes - activation_bytes - cudagraph_bytes
    if left // block_bytes < 1:
        raise ValueError("too little")
    return left // block_bytes
''',
    },
    "max_concurrency": {
        "block by block": """
def max_concurrency(num_blocks, block_size, tokens_per_request):
    each = 0
    while each * block_size < tokens_per_request:
        each += 1
    return num_blocks // each
""",
        "slots of a request": '''
import math

def max_concurrency(num_blocks, block_size, tokens_per_request):
    return num_blocks // math.ceil(tokens_per_request / block_size)
''',
    },
    "compare_reservation": {
        "request by request": '''
def compare_reservation(lengths, max_len, block_size):
    empty = empty_paged = slots = slots_paged = 0
    for n in lengths:
        last = (block_size - n % block_size) % block_size
        empty += max_len - n
        empty_paged += last
        slots += max_len
        slots_paged += n + last
    return [empty / slots, empty_paged / slots_paged, slots / slots_paged]
''',
    },
    "quantised_bytes": {
        "in bits": '''
def quantised_bytes(num_weights, bits=4, group_size=128, rest_bytes=2):
    full, left = divmod(num_weights, group_size)
    groups = full + (left > 0)
    packed = num_weights * bits + groups * bits
    return packed // 8 + (packed % 8 > 0) + groups * rest_bytes
''',
    },
    "break_even_tokens": {
        "searches": '''
def break_even_tokens(state_bytes, bytes_per_token, block_size):
    blocks = 1
    while blocks * block_size * bytes_per_token <= state_bytes:
        blocks += 1
    return (blocks - 1) * block_size + 1
''',
    },
}

WRONG = {
    "token_bytes": {
        "query heads": _changed(_TOKEN, 'config.get("num_key_value_heads", config["num_attention_heads"])',
                                'config["num_attention_heads"]'),
        "always divides for head_dim": _changed(
            _TOKEN, 'config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])',
            'config["hidden_size"] // config["num_attention_heads"]'),
        "hidden_size as if there were no GQA": '''
def token_bytes(config, dtype_bytes=2):
    return 2 * config["num_hidden_layers"] * config["hidden_size"] * dtype_bytes
''',
        "K only": _changed(_TOKEN, "return 2 * config", "return config"),
        "one layer": _changed(_TOKEN, 'config["num_hidden_layers"] * ', ""),
        "always two bytes": _changed(_TOKEN, "* dtype_bytes", "* 2"),
        "counts numbers, not bytes": _changed(_TOKEN, " * dtype_bytes", ""),
        "a float": _changed(_TOKEN, '["hidden_size"] //', '["hidden_size"] /'),
        "one K/V head if the file does not say": _changed(
            _TOKEN, ', config["num_attention_heads"])\n    head', ", 1)\n    head"),
        "fp32 by default": _changed(_TOKEN, "dtype_bytes=2", "dtype_bytes=4"),
        "writes into the config": _changed(
            _TOKEN, 'config.get("num_key_value_heads"', 'config.setdefault("num_key_value_heads"'),
        "divides by the K/V heads": _changed(_TOKEN, '// config["num_attention_heads"]', "// kv_heads"),
    },
    "count_parameters": {
        "k and v as wide as q": _changed(_COUNT, "hidden * (q + 2 * k) + bias", "hidden * 3 * q + bias"),
        "no o": _changed(_COUNT, "+ q * hidden ", ""),
        "o from hidden to hidden": _changed(_COUNT, "+ q * hidden ", "+ hidden * hidden "),
        "two matrices in the MLP": _changed(_COUNT, "3 * hidden * inner", "2 * hidden * inner"),
        "no norms": _changed(_COUNT, " + 2 * hidden\n", "\n"),
        "one norm": _changed(_COUNT, " + 2 * hidden\n", " + hidden\n"),
        "no biases": _changed(_COUNT, "q + 2 * k if", "0 if"),
        "biases everywhere": _changed(_COUNT, 'q + 2 * k if config["model_type"] == "qwen2" else 0', "q + 2 * k"),
        "a bias on o too": _changed(_COUNT, "q + 2 * k if", "q + 2 * k + hidden if"),
        "head_dim always by division": _changed(_COUNT, 'config.get("head_dim", hidden // heads)', "hidden // heads"),
        "a tied head counted again": _changed(_COUNT, '0 if config.get("tie_word_embeddings", False) else embedding',
                                              "embedding"),
        "never a head": _changed(_COUNT, '0 if config.get("tie_word_embeddings", False) else embedding', "0"),
        "tied if the file does not say": _changed(_COUNT, '_embeddings", False', '_embeddings", True'),
        "writes into the config": _changed(_COUNT, 'config.get("head_dim"', 'config.setdefault("head_dim"'),
        "takes fields out of the config": _changed(_COUNT, 'config.get("tie_word_embeddings"',
                                                   'config.pop("tie_word_embeddings"'),
        "no last norm": _changed(_COUNT, 'norm = config["hidden_size"]', "norm = 0"),
        "one layer": _changed(_COUNT, 'config["num_hidden_layers"] * ', ""),
    },
    "to_bytes": {
        "everything in 1024s": _changed(_SIZE, _DECIMAL, '"KB": 2**10, "MB": 2**20, "GB": 2**30'),
        "everything in 1000s": _changed(_SIZE, '"KiB": 2**10, "MiB": 2**20, "GiB": 2**30',
                                        '"KiB": 10**3, "MiB": 10**6, "GiB": 10**9'),
        "turned round": '''
def to_bytes(text):
    units = {"B": 1, "KiB": 10**3, "MiB": 10**6, "GiB": 10**9, "KB": 2**10, "MB": 2**20, "GB": 2**30}
    number, unit = text.split()
    if unit not in units:
        raise ValueError(unit)
    return round(float(number) * units[unit])
''',
        "cut off": _changed(_SIZE, "round(", "int("),
        "whole numbers only": _changed(_SIZE, "round(float(number) * units[unit])",
                                       "int(number.split('.')[0]) * units[unit]"),
        "a float": _changed(_SIZE, "round(float(number) * units[unit])", "float(number) * units[unit]"),
        "what it does not know is bytes": _changed(_SIZE, "        raise ValueError(unit)\n",
                                                   "        return round(float(number))\n"),
        "KeyError for what it does not know": _changed(_SIZE, "        raise ValueError(unit)\n", "        pass\n"),
        "upper and lower case alike": _changed(_SIZE, "    if unit", """    if len(unit) > 1:
        unit = unit[0].upper() + unit[1:-1] + 'B'
    if unit"""),
        "two decimals": _changed(_SIZE, "float(number)", "round(float(number), 2)"),
        "rounded up": _changed(_SIZE, "return round(", "from math import ceil\n    return ceil("),
        "K twice": _changed(_SIZE, '"MiB": 2**20', '"MiB": 2**10 * 1000'),
    },
    "num_gpu_blocks": {
        "all of the GPU": _changed(_BLOCKS, "int(total_bytes * gpu_memory_utilization)", "total_bytes"),
        "the share of what is left": '''
def num_gpu_blocks(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, cudagraph_bytes, block_bytes):
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError("utilization")
    left = total_bytes - weight_bytes - activation_bytes - cudagraph_bytes
    blocks = int(left * gpu_memory_utilization) // block_bytes
    if blocks < 1:
        raise ValueError("no room")
    return blocks
''',
        "weights only": _changed(_BLOCKS, " - activation_bytes - cudagraph_bytes", ""),
        "no graphs": _changed(_BLOCKS, " - cudagraph_bytes", ""),
        "nothing taken off": _changed(_BLOCKS, _LEFT, "budget"),
        "rounded up": _changed(_BLOCKS, f"{_LEFT} // block_bytes", f"-(-{_LEFT} // block_bytes)"),
        "rounded": _changed(_BLOCKS, f"{_LEFT} // block_bytes", f"round({_LEFT} / block_bytes)"),
        "the budget rounded": _changed(_BLOCKS, "int(total_bytes", "round(total_bytes"),
        "the budget rounded up": _changed(_BLOCKS, "int(total_bytes * gpu_memory_utilization)",
                                          "-int(-total_bytes * gpu_memory_utilization // 1)"),
        "zero is a pool": _changed(_BLOCKS, "blocks < 1", "blocks < 0"),
        "never less than one": _changed(_BLOCKS, '        raise ValueError("no room")', "        return 1"),
        "never less than zero": _changed(_BLOCKS, '        raise ValueError("no room")', "        return 0"),
        "one block is too few": _changed(_BLOCKS, "blocks < 1", "blocks < 2"),
        "takes the null block out": _changed(_BLOCKS, "return blocks", "return blocks - 1"),
        "per cent": _changed(_BLOCKS, "    if gpu", '''    if gpu_memory_utilization > 1:
        gpu_memory_utilization /= 100
    if gpu'''),
        "no look at the share": _changed(_BLOCKS, "gpu_memory_utilization <= 0 or gpu_memory_utilization > 1", "False"),
        "1 is too much": _changed(_BLOCKS, "gpu_memory_utilization > 1:", "gpu_memory_utilization >= 1:"),
        "0 is a share": _changed(_BLOCKS, '''gpu_memory_utilization <= 0 or gpu_memory_utilization > 1:''',
                                 '''gpu_memory_utilization < 0 or gpu_memory_utilization > 1:
        raise ValueError("utilization")
    if gpu_memory_utilization == 0:
        return total_bytes // block_bytes
    if False:'''),
        "a float": _changed(_BLOCKS, "int(total_bytes * gpu_memory_utilization)",
                            "total_bytes * gpu_memory_utilization"),
        "absolute": _changed(_BLOCKS, "blocks = (", "blocks = abs("),
    },
    "max_concurrency": {
        "shares out slots": _changed(_FIT, "return num_blocks // each",
                                     "return num_blocks * block_size // tokens_per_request"),
        "rounds down": _changed(_FIT, "-(-tokens_per_request // block_size)",
                                "max(1, tokens_per_request // block_size)"),
        "one block more": _changed(_FIT, "-(-tokens_per_request // block_size)",
                                   "tokens_per_request // block_size + 1"),
        "at least one": _changed(_FIT, "num_blocks // each", "max(1, num_blocks // each)"),
        "a float": _changed(_FIT, "num_blocks // each", "num_blocks / each"),
        "rounds up": _changed(_FIT, "num_blocks // each", "-(-num_blocks // each)"),
        "divides blocks by tokens": _changed(_FIT, "num_blocks // each", "num_blocks // tokens_per_request"),
        "keeps one block back": _changed(_FIT, "num_blocks // each", "(num_blocks - 1) // each"),
    },
    "compare_reservation": {
        "used, not idle": _changed(_RESERVE, _IDLE, "used / reserved, used / paged"),
        "the mean of shares": _changed(
            _RESERVE, "1 - used / paged",
            "sum(1 - n / (-(-n // block_size) * block_size) for n in lengths) / len(lengths)"),
        "one block more when full": _changed(_RESERVE, "-(-n // block_size)", "n // block_size + 1"),
        "blocks waste nothing": _changed(
            _RESERVE, "paged = sum(-(-n // block_size) for n in lengths) * block_size", "paged = used"),
        "blocks of all together": _changed(_RESERVE, "sum(-(-n // block_size) for n in lengths)",
                                           "-(-used // block_size)"),
        "the ratio turned round": _changed(_RESERVE, "reserved / paged", "paged / reserved"),
        "the ratio of tokens": _changed(_RESERVE, "reserved / paged", "reserved / used"),
        "the ratio of the wastes": _changed(_RESERVE, ", reserved / paged",
                                            ", (reserved - used) / max(1, paged - used)"),
        "one reservation": _changed(_RESERVE, "len(lengths) * max_len", "max_len"),
        "the longest, not max_len": _changed(_RESERVE, "len(lengths) * max_len", "len(lengths) * max(lengths)"),
        "max_len in whole blocks": _changed(_RESERVE, "* max_len", "* -(-max_len // block_size) * block_size"),
        "max_len cut to whole blocks": _changed(_RESERVE, "* max_len", "* (max_len // block_size * block_size)"),
        "sorts in place": _changed(_RESERVE, "    used", "    lengths.sort()\n    used"),
        "empties the list": """
def compare_reservation(lengths, max_len, block_size):
    used = paged = reserved = 0
    while lengths:
        n = lengths.pop()
        used += n
        paged += -(-n // block_size) * block_size
        reserved += max_len
    return 1 - used / reserved, 1 - used / paged, reserved / paged
""",
        "per cent": _changed(_RESERVE, "return 1 - used / reserved", "return 100 * (1 - used / reserved)"),
        "whole numbers": _changed(_RESERVE, "reserved / paged", "reserved // paged"),
        "blocks as a part of the reservation": _changed(_RESERVE, "1 - used / paged", "(paged - used) / reserved"),
    },
    "quantised_bytes": {
        "weights only": _changed(_QUANT, "return -(-(num_weights + groups) * bits // 8) + groups * rest_bytes",
                                 "return -(-num_weights * bits // 8)"),
        "no zero points": _changed(_QUANT, "(num_weights + groups)", "num_weights"),
        "no scales": _changed(_QUANT, " + groups * rest_bytes", ""),
        "whole groups only": _changed(_QUANT, "-(-num_weights // group_size)", "num_weights // group_size"),
        "always 4 bits": _changed(_QUANT, "* bits //", "* 4 //"),
        "rounds down": _changed(_QUANT, "-(-(num_weights + groups) * bits // 8)", "(num_weights + groups) * bits // 8"),
        "zero points in full": _changed(_QUANT, "-(-(num_weights + groups) * bits // 8) + groups * rest_bytes",
                                        "-(-num_weights * bits // 8) + 2 * groups * rest_bytes"),
        "the last group filled up": _changed(_QUANT, "(num_weights + groups)", "(groups * group_size + groups)"),
        "rounded apart": _changed(_QUANT, "-(-(num_weights + groups) * bits // 8)",
                                  "-(-num_weights * bits // 8) + -(-groups * bits // 8)"),
        "each group rounded": """
def quantised_bytes(num_weights, bits=4, group_size=128, rest_bytes=2):
    full, left = divmod(num_weights, group_size)
    return full * (-(-(group_size + 1) * bits // 8) + rest_bytes) + (
        -(-(left + 1) * bits // 8) + rest_bytes if left else 0)
""",
        "a zero point of 4 bits": _changed(_QUANT, "(num_weights + groups) * bits",
                                           "(num_weights * bits + groups * 4)"),
        "groups of 64 by default": _changed(_QUANT, "group_size=128", "group_size=64"),
    },
    "break_even_tokens": {
        "without blocks": _changed(_EVEN, "state_bytes // (bytes_per_token * block_size) * block_size + 1",
                                   "state_bytes // bytes_per_token + 1"),
        "where they are equal": _changed(_EVEN, "return state_bytes //", "return (state_bytes - 1) //"),
        "the last that is not more": _changed(_EVEN, " + 1", ""),
        "a whole block": _changed(_EVEN, "* block_size + 1", "* block_size + block_size"),
        "rounded": _changed(_EVEN, "state_bytes // (bytes_per_token * block_size)",
                            "round(state_bytes / (bytes_per_token * block_size))"),
    },
}
