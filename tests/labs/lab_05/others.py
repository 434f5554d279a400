"""Lab 05: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""

_KEYS = '''
def block_keys(tokens, block_size, salt=None):
    keys, parent = [], sha256(b"root" if salt is None else b"salt" + salt.encode()).digest()
    for i in range(len(tokens) // block_size):
        block = tokens[i * block_size : (i + 1) * block_size]
        parent = sha256(parent + b"".join(t.to_bytes(8, "big") for t in block)).digest()
        keys.append(parent)
    return keys
'''
_INDEX = '''
class PrefixIndex(PrefixIndexBase):
    def match(self, tokens, salt=None):
        found = []
        for key in keys_of(tokens, self.block_size, salt):
            block = self.cached_block_hash_to_block.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, tokens, blocks, salt=None, cursor=None):
        if len(tokens) < len(blocks) * self.block_size:
            raise ValueError("too few tokens")
        for block, key in zip(blocks, keys_of(tokens, self.block_size, salt)):
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
                block.block_hash = key
                self.cached_block_hash_to_block[key] = block

    def remove(self, block):
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError("not published")
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None
'''
_LIMITS = '''
def match_limit(num_tokens, block_size):
    return (num_tokens - 1) - (num_tokens - 1) % block_size

def num_publishable(num_tokens, num_computed_tokens, block_size):
    return num_computed_tokens // block_size
'''
_LRU = '''
def take(queue, index, n):
    if n > queue.num_free_blocks:
        raise OutOfBlocks("too few")
    blocks = []
    for _ in range(n):
        block = queue.popleft()
        if block.block_hash is not None:
            index.remove(block)
        block.ref_cnt = 1
        blocks.append(block)
    return blocks

def touch(queue, blocks):
    for block in blocks:
        if block.ref_cnt == 0:
            queue.remove(block)
        block.ref_cnt += 1

def release(queue, table):
    for block in table[::-1]:
        if block.ref_cnt == 0:
            raise ValueError("freed twice")
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            queue.append(block)
'''
_START = '''
def start_request(queue, index, tokens, salt=None):
    hits = index.match(tokens[: match_limit_(len(tokens), index.block_size)], salt)
    num_new = cdiv(len(tokens), index.block_size) - len(hits)
    if num_new + sum(1 for block in hits if block.ref_cnt == 0) > queue.num_free_blocks:
        return None
    touch_(queue, hits)
    return hits + take_(queue, index, num_new), len(hits) * index.block_size
'''
_SECONDS = '''
def prefill_seconds(num_tokens, num_cached, num_parameters, flops, bandwidth):
    return max(2 * num_parameters * (num_tokens - num_cached) / flops, 2 * num_parameters / bandwidth)
'''
_NEW = '''
def new_keys(tokens, block_size, salt=None, cursor=None):
    start, parent = cursor or (0, sha256(repr(salt).encode()).digest())
    keys = []
    while start + block_size <= len(tokens):
        data = b"".join(t.to_bytes(8, "big") for t in tokens[start : start + block_size])
        parent = sha256(parent + data).digest()
        keys.append(parent)
        start += block_size
    return keys, (start, parent)
'''


def _changed(source: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


# exercise -> {what it is: the cell}
CORRECT = {
    "block_keys": {
        "tokens as text with commas": '''
def block_keys(tokens, block_size, salt=None):
    keys, parent = [], repr(salt)
    for i in range(len(tokens) // block_size):
        block = ",".join(str(t) for t in tokens[i * block_size : (i + 1) * block_size])
        keys.append(sha256(f"{parent}|{block}".encode()).digest())
        parent = keys[-1].hex()
    return keys
''',
        "one hash that goes on, copied at each block": '''
from array import array

def block_keys(tokens, block_size, salt=None):
    running = sha256(repr((salt,)).encode())
    keys = []
    for start in range(0, len(tokens) - len(tokens) % block_size, block_size):
        running.update(array("Q", tokens[start : start + block_size]).tobytes())
        keys.append(running.copy().digest())
    return keys
''',
        "the salt in every block": _changed(
            _KEYS, ("sha256(parent + ", "sha256(repr(salt).encode() + b'|' + parent + ")),
    },
    "prefix_index": {
        "keys that are the tokens themselves": '''
class PrefixIndex(PrefixIndexBase):
    def _keys(self, tokens, salt, num):
        return [(salt, tuple(tokens[: (i + 1) * self.block_size])) for i in range(num)]

    def match(self, tokens, salt=None):
        known, found = self.cached_block_hash_to_block, []
        for key in self._keys(tokens, salt, len(tokens) // self.block_size):
            if key not in known:
                return found
            found.append(known[key])
        return found

    def insert(self, tokens, blocks, salt=None, cursor=None):
        if len(blocks) > len(tokens) // self.block_size:
            raise ValueError(len(blocks))
        for key, block in zip(self._keys(tokens, salt, len(blocks)), blocks):
            if block.block_hash is None:
                if self.cached_block_hash_to_block.setdefault(key, block) is block:
                    block.block_hash = key

    def remove(self, block):
        mine = [key for key, held in self.cached_block_hash_to_block.items() if held is block]
        if not mine:
            raise ValueError(block.block_id)
        self.cached_block_hash_to_block.pop(mine[0])
        block.block_hash = None
''',
    },
    "limits": {
        "in steps": '''
def match_limit(num_tokens, block_size):
    full, rest = divmod(num_tokens, block_size)
    return (full if rest else full - 1) * block_size

def num_publishable(num_tokens, num_computed_tokens, block_size):
    return min(num_computed_tokens, num_tokens) // block_size
''',
    },
    "lru": {
        "popleft_n, and counted at the end": _changed(_LRU, ('''    if n > queue.num_free_blocks:
        raise OutOfBlocks("too few")
    blocks = []
    for _ in range(n):
        block = queue.popleft()
''', '''    blocks = queue.popleft_n(n)
    for block in blocks:
'''), ("        blocks.append(block)\n    return", "    return")),
    },
    "start_request": {
        "counted block by block": '''
def start_request(queue, index, tokens, salt=None):
    size = index.block_size
    found = index.match(tokens[:-1], salt)
    room, wanted = queue.num_free_blocks, -(-len(tokens) // size)
    for i in range(wanted):
        if i >= len(found) or found[i].ref_cnt == 0:
            room -= 1
    if room < 0:
        return None
    touch_(queue, found)
    table = list(found)
    while len(table) < wanted:
        table += take_(queue, index, 1)
    return table, size * len(found)
''',
    },
    "prefill_seconds": {
        "by comparing": '''
def prefill_seconds(num_tokens, num_cached, num_parameters, flops, bandwidth):
    new = num_tokens - num_cached
    if new / flops > 1 / bandwidth:
        return new * num_parameters * 2 / flops
    return num_parameters * 2 / bandwidth
''',
    },
    "new_keys": {
        "a hash object in the cursor": '''
def new_keys(tokens, block_size, salt=None, cursor=None):
    running, done = cursor if cursor else (sha256(repr(salt).encode()), 0)
    running, keys = running.copy(), []
    for i in range(done, len(tokens) // block_size):
        running.update(repr(list(tokens[i * block_size : (i + 1) * block_size])).encode())
        keys.append(running.digest())
    return keys, (running, len(tokens) // block_size)
''',
        "one token at a time": _changed(_NEW, ('''b"".join(t.to_bytes(8, "big") for t in tokens[start : start + block_size])''',
                                               '''repr([tokens[start + i] for i in range(block_size)]).encode()''')),
    },
}
WRONG = {
    "block_keys": {
        "no parent": _changed(_KEYS, ("sha256(parent + ", "sha256(")),
        "no parent, but the block's number": _changed(_KEYS, ("sha256(parent + ", "sha256(bytes([i]) + ")),
        "no parent, but root and number": _changed(
            _KEYS, ("sha256(parent + ", "sha256(repr((salt, i)).encode() + ")),
        "Python's hash": '''
def block_keys(tokens, block_size, salt=None):
    keys, parent = [], salt
    for i in range(len(tokens) // block_size):
        parent = hash((parent, tuple(tokens[i * block_size : (i + 1) * block_size])))
        keys.append(parent)
    return keys
''',
        "Python's hash, dressed up": _changed(
            _KEYS, ('b"".join(t.to_bytes(8, "big") for t in block)', "str(hash(tuple(block))).encode()")),
        "Python's hash of each token, dressed up": _changed(
            _KEYS, ('b"".join(t.to_bytes(8, "big") for t in block)', "repr([hash(t) for t in block]).encode()")),
        "no salt": _changed(_KEYS, ('b"root" if salt is None else b"salt" + salt.encode()', 'b"root"')),
        "the salt in the first key only": '''
def block_keys(tokens, block_size, salt=None):
    keys, parent = [], b""
    for i in range(len(tokens) // block_size):
        data = b"".join(t.to_bytes(8, "big") for t in tokens[i * block_size : (i + 1) * block_size])
        parent = sha256(parent + data).digest()
        keys.append(parent)
    if keys:
        keys[0] = sha256(keys[0] + repr(salt).encode()).digest()
    return keys
''',
        "no salt is a salt called None": _changed(
            _KEYS, ('b"root" if salt is None else b"salt" + salt.encode()', "str(salt).encode()")),
        "the unfinished block, too": _changed(
            _KEYS, ("range(len(tokens) // block_size)", "range(-(-len(tokens) // block_size))")),
        "tokens glued together": _changed(
            _KEYS, ('b"".join(t.to_bytes(8, "big") for t in block)', '"".join(map(str, block)).encode()')),
        "one byte a token": _changed(_KEYS, ('t.to_bytes(8, "big")', "bytes([t % 256])")),
        "two bytes a token": _changed(_KEYS, ('t.to_bytes(8, "big")', '(t % 65536).to_bytes(2, "big")')),
        "order does not count": _changed(_KEYS, ("for t in block", "for t in sorted(block)")),
        "all tokens again for each block": _changed(
            _KEYS, ("block = tokens[i * block_size : (i + 1) * block_size]", "block = tokens[: (i + 1) * block_size]")),
        "hex digits": _changed(_KEYS, ("keys.append(parent)", "keys.append(parent.hex())")),
        "the empty salt is none": _changed(_KEYS, ('b"root" if salt is None else b"salt" + salt.encode()',
                                                   '(salt or "").encode()')),
        "a salt in ASCII": _changed(_KEYS, ("salt.encode()", 'salt.encode("ascii", "ignore")')),
        "Python's hash of the salt": _changed(_KEYS, ('b"root" if salt is None else b"salt" + salt.encode()',
                                                      'hash(salt).to_bytes(8, "big", signed=True)')),
        "four bytes a token": _changed(_KEYS, ('to_bytes(8, "big")', 'to_bytes(4, "big")')),
        "a name made up each time": "import random\n" + _changed(_KEYS, ('b"root"', "repr(random.random()).encode()")),
    },
    "prefix_index": {
        "goes on behind a gap": _changed(_INDEX, ("break", "continue")),
        "the last publisher takes the name": _changed(_INDEX, (" and key not in self.cached_block_hash_to_block", "")),
        "a duplicate gets the name as well": _changed(
            _INDEX, ('''            if block.block_hash is None and key not in self.cached_block_hash_to_block:
                block.block_hash = key
                self.cached_block_hash_to_block[key] = block
''', '''            if block.block_hash is None:
                block.block_hash = key
                self.cached_block_hash_to_block.setdefault(key, block)
''')),
        "the block does not learn its name": _changed(_INDEX, ("                block.block_hash = key\n", "")),
        "stops at a key that is taken": _changed(
            _INDEX, ("            if block.block_hash is None and key not in self.cached_block_hash_to_block:\n", '''
            if key in self.cached_block_hash_to_block:
                break
            if block.block_hash is None:
''')),
        "removed from the dictionary, and still named": _changed(
            _INDEX, ("[block.block_hash]\n        block.block_hash = None", "[block.block_hash]")),
        "unnamed, and still found": _changed(_INDEX, ("del self.cached_block_hash_to_block[block.block_hash]", "pass")),
        "removes what was never published": _changed(_INDEX, ('''
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError("not published")
        del self.cached_block_hash_to_block[block.block_hash]
''', '''
        self.cached_block_hash_to_block.pop(block.block_hash, None)
''')),
        "a KeyError for what was never published": _changed(_INDEX, ('''
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError("not published")
''', "\n")),
        "publishes a block that is not full": _changed(_INDEX, ('            raise ValueError("too few tokens")\n', '''
            tokens = list(tokens) + [0] * self.block_size
''')),
        "publishes the full ones and then complains": _changed(_INDEX, ('''
        if len(tokens) < len(blocks) * self.block_size:
            raise ValueError("too few tokens")
''', "\n"), ("salt)):\n            if block", "salt), strict=True):\n            if block")),
        "no salt": _changed(_INDEX, ("keys_of(tokens, self.block_size, salt)", "keys_of(tokens, self.block_size)")),
        "no salt in match": _changed(_INDEX, ("in keys_of(tokens, self.block_size, salt):", "in keys_of(tokens, self.block_size):")),
        "a block that has a name gets another": _changed(_INDEX, ("block.block_hash is None and ", "")),
        "a block that has a name is moved to the new one": _changed(_INDEX, ('''
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
''', '''
            if key not in self.cached_block_hash_to_block:
                self.cached_block_hash_to_block.pop(block.block_hash, None)
''')),
        "a block that has a name is an error": _changed(_INDEX, ('''
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
''', '''
            if block.block_hash not in (None, key):
                raise ValueError("it has a name")
            if block.block_hash is None and key not in self.cached_block_hash_to_block:
''')),
        "any name will do to remove": _changed(_INDEX, (
            "self.cached_block_hash_to_block.get(block.block_hash) is not block", "block.block_hash is None")),
        "a known name will do to remove": _changed(_INDEX, (
            "self.cached_block_hash_to_block.get(block.block_hash) is not block",
            "block.block_hash not in self.cached_block_hash_to_block")),
        "a match counts as an owner": _changed(_INDEX, ("            found.append(block)\n", '''
            block.ref_cnt += 1
            found.append(block)
''')),
        "the index counts as an owner": _changed(_INDEX, ("                block.block_hash = key\n", '''
                block.block_hash = key
                block.ref_cnt += 1
''')),
        "ids in place of blocks": _changed(_INDEX, ("found.append(block)", "found.append(block.block_id)")),
        "None if there are none": _changed(_INDEX, ("        return found\n", "        return found or None\n")),
        "leaves a token in match": _changed(
            _INDEX, ("in keys_of(tokens, self.block_size, salt):", "in keys_of(tokens[:-1], self.block_size, salt):")),
        "all or nothing": _changed(_INDEX, ("                break\n", "                return []\n")),
    },
    "limits": {
        "the whole prompt": _changed(_LIMITS, ("(num_tokens - 1) - (num_tokens - 1) % block_size",
                                               "num_tokens // block_size * block_size")),
        "a block fewer, always": _changed(_LIMITS, ("(num_tokens - 1) - (num_tokens - 1) % block_size",
                                                    "max(0, num_tokens // block_size - 1) * block_size")),
        "all but one token": _changed(_LIMITS, ("(num_tokens - 1) - (num_tokens - 1) % block_size", "num_tokens - 1")),
        "blocks in place of tokens": _changed(_LIMITS, ("(num_tokens - 1) - (num_tokens - 1) % block_size",
                                                        "(num_tokens - 1) // block_size")),
        "what is known": _changed(_LIMITS, ("return num_computed_tokens //", "return num_tokens //")),
        "what is known, less one": _changed(_LIMITS, ("return num_computed_tokens //", "return (num_tokens - 1) //")),
        "the block that was begun": _changed(_LIMITS, ("num_computed_tokens // block_size",
                                                       "-(-num_computed_tokens // block_size)")),
    },
    "lru": {
        "evicted blocks stay in the index": _changed(_LRU, ("            index.remove(block)\n", "            pass\n")),
        "takes the name away at release": _changed(
            _LRU, ("            queue.append(block)", "            block.block_hash = queue.append(block)")),
        "first block first": _changed(_LRU, ("table[::-1]", "table")),
        "a hit stays in the queue": _changed(_LRU, ("            queue.remove(block)\n", "            pass\n")),
        "a hit has no more owners than before": _changed(_LRU, ("block.ref_cnt += 1", "block.ref_cnt = 1")),
        "removes owned blocks from the queue, too": _changed(
            _LRU, ("        if block.ref_cnt == 0:\n            queue.remove(block)\n", "        queue.remove(block)\n")),
        "looks at the first block only": _changed(_LRU, ('''
    for block in blocks:
        if block.ref_cnt == 0:
            queue.remove(block)
''', '''
    free = bool(blocks) and blocks[0].ref_cnt == 0
    for block in blocks:
        if free:
            queue.remove(block)
''')),
        "all of them or none": _changed(_LRU, ('''
    for block in blocks:
        if block.ref_cnt == 0:
            queue.remove(block)
''', '''
    free = all(block.ref_cnt == 0 for block in blocks)
    for block in blocks:
        if free:
            queue.remove(block)
''')),
        "any of them": _changed(_LRU, ('''
    for block in blocks:
        if block.ref_cnt == 0:
            queue.remove(block)
''', '''
    free = any(block.ref_cnt == 0 for block in blocks)
    for block in blocks:
        if free:
            queue.remove(block)
''')),
        "turns the caller's table round": _changed(_LRU, ("    for block in table[::-1]:", '''
    table.reverse()
    for block in table:''')),
        "empties the caller's table": _changed(_LRU, ("    for block in table[::-1]:", '''
    while table:
        block = table.pop()''')),
        "back to the queue whoever else owns it": _changed(_LRU, ('''
        if block.ref_cnt == 0:
            queue.append(block)
''', '''
        queue.append(block)
''')),
        "does not count owners": _changed(_LRU, ("        block.ref_cnt -= 1\n", "        block.ref_cnt = 0\n")),
        "takes what is there": _changed(_LRU, ('        raise OutOfBlocks("too few")', "        n = queue.num_free_blocks")),
        "takes some and then finds too few": _changed(_LRU, ('''    if n > queue.num_free_blocks:
        raise OutOfBlocks("too few")
''', "")),
        "an owner too few": _changed(_LRU, ("        block.ref_cnt = 1\n", "")),
        "freed twice unnoticed": _changed(_LRU, ('            raise ValueError("freed twice")', "            continue")),
        "walks through the queue": _changed(_LRU, ("            queue.remove(block)\n", '''
            for other in queue.get_all_free_blocks():
                if other is block:
                    queue.remove(other)
''')),
        "takes unnamed blocks first": _changed(_LRU, ("        block = queue.popleft()\n", '''
        waiting = queue.get_all_free_blocks()
        block = next((b for b in waiting if b.block_hash is None), waiting[0])
        queue.remove(block)
''')),
    },
    "start_request": {
        "takes before it touches": _changed(_START, ('''    touch_(queue, hits)
    return hits + take_(queue, index, num_new), len(hits) * index.block_size
''', '''    new = take_(queue, index, num_new)
    touch_(queue, hits)
    return hits + new, len(hits) * index.block_size
''')),
        "hits in the queue cost nothing": _changed(
            _START, ("num_new + sum(1 for block in hits if block.ref_cnt == 0)", "num_new")),
        "hits in the queue cost nothing, and the error is caught": _changed(_START, ('''
    if num_new + sum(1 for block in hits if block.ref_cnt == 0) > queue.num_free_blocks:
        return None
    touch_(queue, hits)
    return hits + take_(queue, index, num_new), len(hits) * index.block_size
''', '''
    touch_(queue, hits)
    try:
        return hits + take_(queue, index, num_new), len(hits) * index.block_size
    except OutOfBlocks:
        return None
''')),
        "tries, and puts back": _changed(_START, ('''
    if num_new + sum(1 for block in hits if block.ref_cnt == 0) > queue.num_free_blocks:
        return None
    touch_(queue, hits)
    return hits + take_(queue, index, num_new), len(hits) * index.block_size
''', '''
    touch_(queue, hits)
    try:
        return hits + take_(queue, index, num_new), len(hits) * index.block_size
    except OutOfBlocks:
        release_(queue, hits)
        return None
''')),
        "room for hits that are not used": _changed(_START, (
            "    if num_new + sum(1 for block in hits if", "    found = index.match(tokens, salt)\n    if num_new + sum(1 for block in found if")),
        "publishes what nobody has computed": _changed(_START, ('''
    return hits + take_(queue, index, num_new), len(hits) * index.block_size
''', '''
    table = hits + take_(queue, index, num_new)
    index.insert(tokens, table[: len(tokens) // index.block_size], salt)
    return table, len(hits) * index.block_size
''')),
        "a pair with None in it": _changed(_START, ("        return None\n", "        return None, 0\n")),
        "an error in place of None": _changed(_START, ("        return None\n", '        raise OutOfBlocks("it does not fit")\n')),
        "every hit costs a block": _changed(_START, ("sum(1 for block in hits if block.ref_cnt == 0)", "len(hits)")),
        "matches the whole prompt": _changed(
            _START, ("tokens[: match_limit_(len(tokens), index.block_size)]", "tokens")),
        "does not touch": _changed(_START, ("    touch_(queue, hits)\n", "")),
        "the block that is not full is left out": _changed(
            _START, ("cdiv(len(tokens), index.block_size)", "len(tokens) // index.block_size")),
        "no salt": _changed(_START, (", salt)\n", ")\n")),
        "new blocks first": _changed(
            _START, ("hits + take_(queue, index, num_new)", "take_(queue, index, num_new) + hits")),
        "blocks in place of tokens": _changed(_START, ("len(hits) * index.block_size\n", "len(hits)\n")),
        "a block in reserve": _changed(_START, ("> queue.num_free_blocks", ">= queue.num_free_blocks")),
    },
    "prefill_seconds": {
        "one after the other": _changed(_SECONDS, ("max(", "("), (" / flops,", " / flops +")),
        "as if all were computed": _changed(_SECONDS, ("(num_tokens - num_cached)", "num_tokens")),
        "no floor": _changed(_SECONDS, ("2 * num_parameters / bandwidth)", "0)")),
        "weights read for each token": _changed(
            _SECONDS, ("num_parameters / bandwidth", "num_parameters * (num_tokens - num_cached) / bandwidth")),
        "one FLOP": _changed(_SECONDS, ("max(2 *", "max(1 *")),
        "the faster one": _changed(_SECONDS, ("max(", "min(")),
    },
    "new_keys": {
        "all keys, every time": '''
def new_keys(tokens, block_size, salt=None, cursor=None):
    keys, parent = [], sha256(repr(salt).encode()).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = sha256(parent + repr(list(tokens[start : start + block_size])).encode()).digest()
        keys.append(parent)
    return keys, None
''',
        "hashes all, shows the new": '''
def new_keys(tokens, block_size, salt=None, cursor=None):
    keys, parent = [], sha256(repr(salt).encode()).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = sha256(parent + repr(list(tokens[start : start + block_size])).encode()).digest()
        keys.append(parent)
    return keys[cursor or 0 :], len(keys)
''',
        "the chain breaks": _changed(
            _NEW, ("cursor or (0, sha256(repr(salt).encode()).digest())", "cursor or 0, sha256(repr(salt).encode()).digest()"),
            ("return keys, (start, parent)", "return keys, start")),
        "counts tokens that fill no block": _changed(
            _NEW, ("return keys, (start, parent)", "return keys, (len(tokens), parent)")),
        "one cursor for everybody": _changed(
            _NEW, ("cursor or", "memory.get(salt) or"), ("\ndef", "\nmemory = {}\n\ndef"),
            ("return keys, (start, parent)", "memory[salt] = (start, parent)\n    return keys, None")),
        "no salt": _changed(_NEW, ("repr(salt)", "repr(0)")),
    },
}  # fmt: skip
