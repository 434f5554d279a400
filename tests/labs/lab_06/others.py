"""Lab 06: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_SIZE = '''
def tree_size(texts, block_size):
    cut = [[tuple(text[i : i + block_size]) for i in range(0, len(text) - block_size + 1, block_size)] for text in texts]
    trie = {}
    for chunks in cut:
        level = trie
        for chunk in chunks:
            level = level.setdefault(chunk, {})

    def count(level, is_root):
        blocks, edges = len(level), int(not is_root and len(level) != 1)
        for below in level.values():
            more_blocks, more_edges = count(below, False)
            blocks, edges = blocks + more_blocks, edges + more_edges
        return blocks, edges

    return sum(len(chunks) for chunks in cut), *count(trie, True)
'''
_FIND = '''
def find(root, chunks):
    node, i, found = root, 0, []
    for chunk in chunks:
        if i == len(node.chunks):
            node, i = node.children.get(chunk), 0
        if node is None or node.chunks[i] != chunk or node.blocks[i] is None:
            break
        found.append(node.blocks[i])
        i += 1
    return found
'''
_SPLIT = '''
def split(node, k):
    upper = RadixNode(node.chunks[:k], node.blocks[:k], node.parent)
    node.parent.children[node.chunks[0]] = upper
    node.chunks = node.chunks[k:]
    node.blocks = node.blocks[k:]
    node.parent = upper
    upper.children[node.chunks[0]] = node
    for block in upper.blocks:
        if block is not None:
            block.block_hash.node = upper
    return upper
'''
_ADD = '''
def add(root, chunks, blocks):
    node, i, published = root, 0, []
    for n in range(len(blocks)):
        chunk = chunks[n]
        if i == len(node.chunks) and chunk in node.children:
            node, i = node.children[chunk], 0
        elif i == len(node.chunks) or node.chunks[i] != chunk:
            if i < len(node.chunks):
                node = cut(node, i)
            if node.children or node is root:
                new = RadixNode([], [], node)
                node.children[chunk] = new
                node, i = new, 0
            for later in chunks[n : len(blocks)]:
                node.chunks.append(later)
                node.blocks.append(None)
        if node.blocks[i] is None:
            node.blocks[i] = blocks[n]
            blocks[n].block_hash = Place(node)
            published.append(blocks[n])
        i += 1
    return published
'''
_OUT = '''
def take_out(block):
    node = block.block_hash.node
    block.block_hash = None
    node.blocks[node.blocks.index(block)] = None
    while node.parent is not None and not node.children:
        first = node.chunks[0]
        while node.blocks and node.blocks[-1] is None:
            del node.blocks[-1], node.chunks[-1]
        if node.blocks:
            return
        del node.parent.children[first]
        node = node.parent
'''
_TREE = '''
class RadixTree(RadixTreeBase):
    def match(self, tokens, salt=None):
        root = self.roots.get(salt)
        return walk(root, chunks_of(tokens, self.block_size)) if root else []

    def insert(self, tokens, blocks, salt=None, cursor=None):
        if len(tokens) < len(blocks) * self.block_size:
            raise ValueError("too few tokens")
        if salt not in self.roots:
            self.roots[salt] = RadixNode([], [], None)
        for block in grow(self.roots[salt], chunks_of(tokens, self.block_size), blocks):
            self.cached_block_hash_to_block[block.block_hash] = block

    def remove(self, block):
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError("not here")
        del self.cached_block_hash_to_block[block.block_hash]
        forget(block)
'''
_LEAF = '''
def leaf_to_evict(root, last_used):
    def leaves(node):
        if not node.children and node.parent is not None:
            yield node
        for child in node.children.values():
            yield from leaves(child)

    free = [leaf for leaf in leaves(root) if all(block.ref_cnt == 0 for block in leaf.blocks)]
    free.sort(key=lambda leaf: max(last_used[block.block_id] for block in leaf.blocks))
    return free[0] if free else None
'''

# exercise -> {what it is: the cell}
CORRECT = {
    "tree_size": {"a trie of dicts": _SIZE},
    "find": {
        "one line a step": _FIND,
        "recursive": '''
def find(root, chunks):
    if not chunks or chunks[0] not in root.children:
        return []
    child, found = root.children[chunks[0]], []
    for have, block, want in zip(child.chunks, child.blocks, chunks):
        if have != want or block is None:
            return found
        found.append(block)
    if len(found) < len(child.chunks):
        return found
    return found + find(child, chunks[len(found):])
''',
    },
    "split": {
        "the new node is the upper one": _SPLIT,
        "the new node is the lower one": '''
def split(node, k):
    lower = RadixNode(node.chunks[k:], node.blocks[k:], node)
    lower.children = node.children
    for child in lower.children.values():
        child.parent = lower
    for block in lower.blocks:
        if block is not None:
            block.block_hash.node = lower
    node.children = {lower.chunks[0]: lower}
    del node.chunks[k:], node.blocks[k:]
    return node
''',
    },
    "add": {
        "place by place": _ADD,
        "makes the places first, then fills them": '''
def add(root, chunks, blocks):
    chunks = list(chunks[: len(blocks)])
    node, i, places = root, 0, []
    while len(places) < len(chunks):
        done = len(places)
        if i < len(node.chunks) and node.chunks[i] == chunks[done]:
            places.append((node, i))
            i += 1
            continue
        if i < len(node.chunks):
            before = node
            node = cut(node, i)
            places = [(node, j) if where is before and j < i else (where, j) for where, j in places]
        if chunks[done] in node.children:
            node, i = node.children[chunks[done]], 0
        elif node is root or node.children:
            child = RadixNode(chunks[done:], [None] * (len(chunks) - done), node)
            node.children[chunks[done]] = child
            node, i = child, 0
        else:
            node.chunks += chunks[done:]
            node.blocks += [None] * (len(chunks) - done)
    published = []
    for (node, i), block in zip(places, blocks):
        if node.blocks[i] is None:
            node.blocks[i], block.block_hash = block, Place(node)
            published.append(block)
    return published
''',
    },
    "take_out": {
        "no merging": _OUT,
        "joins an only child to its parent": _OUT.rstrip().replace("            return\n", "            break\n") + '''
    if node.parent is not None and len(node.children) == 1:
        (child,) = node.children.values()
        node.chunks += child.chunks
        node.blocks += child.blocks
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for other in child.blocks:
            if other is not None:
                other.block_hash.node = node
''',
        "recursive": '''
def take_out(block):
    node = block.block_hash.node
    node.blocks[node.blocks.index(block)], block.block_hash = None, None
    prune(node)

def prune(node):
    if node.parent is None or node.children:
        return
    keep = max((i + 1 for i, b in enumerate(node.blocks) if b is not None), default=0)
    if keep == 0:
        del node.parent.children[node.chunks[0]]
        return prune(node.parent)
    node.blocks, node.chunks = node.blocks[:keep], node.chunks[:keep]
''',
    },
    "radix_tree": {
        "with get": _TREE,
        "also drops a tree without blocks": _changed(_TREE, "        forget(block)", '''        forget(block)
        self.roots = {salt: root for salt, root in self.roots.items() if root.children}'''),
    },
    "leaf_to_evict": {"recursive, sorted": _LEAF},
}

WRONG = {
    "tree_size": {
        "blocks by their own tokens": '''
def tree_size(texts, block_size):
    cut = [[tuple(t[i : i + block_size]) for i in range(0, len(t) - block_size + 1, block_size)] for t in texts]
    places = {chunk for chunks in cut for chunk in chunks}
    return sum(map(len, cut)), len(places), len(places)
''',
        "counts the root": _changed(_SIZE, "int(not is_root and len(level) != 1)", "int(len(level) != 1)"),
        "a trie: an edge for each block": _changed(_SIZE, "int(not is_root and len(level) != 1)", "int(not is_root)"),
        "only leaves": _changed(_SIZE, "len(level) != 1)", "len(level) == 0)"),
        "only forks": _changed(_SIZE, "len(level) != 1)", "len(level) > 1)"),
        "part-full blocks too": _changed(_SIZE, "range(0, len(text) - block_size + 1, block_size)",
                                         "range(0, len(text), block_size)"),
        "tokens as one string": _changed(_SIZE, "tuple(text[i : i + block_size])",
                                         "''.join(map(str, text[i : i + block_size]))"),
        "eats the texts": _changed(_SIZE, "    trie = {}\n", "    trie = {}\n    texts.clear()\n"),
        "2n - 1, always": _changed(_SIZE, "*count(trie, True)", "count(trie, True)[0], 2 * len(set(map(tuple, cut))) - 1"),
        "an edge ends where a text ends": '''
def tree_size(texts, block_size):
    cut = [tuple(tuple(t[i : i + block_size]) for i in range(0, len(t) - block_size + 1, block_size)) for t in texts]
    places = {chunks[:end] for chunks in cut for end in range(1, len(chunks) + 1)}
    ways = {place: sum(other[:-1] == place for other in places) for place in places}
    return sum(map(len, cut)), len(places), sum(ways[p] != 1 or p in cut for p in places)
''',
    },
    "find": {
        "past gaps": _changed(_FIND, " or node.blocks[i] is None", "").replace(
            "found.append(node.blocks[i])", "found += [node.blocks[i]] if node.blocks[i] else []"),
        "gives gaps back": _changed(_FIND, " or node.blocks[i] is None", ""),
        "does not compare along the edge": _changed(_FIND, " or node.chunks[i] != chunk", ""),
        "only whole edges": '''
def find(root, chunks):
    node, found, at = root, [], 0
    while at < len(chunks) and chunks[at] in node.children:
        node = node.children[chunks[at]]
        if chunks[at : at + len(node.chunks)] != node.chunks or None in node.blocks:
            break
        found += node.blocks
        at += len(node.chunks)
    return found
''',
        "the first edge only": _changed(_FIND, "node, i = node.children.get(chunk), 0",
                                        "node, i = (node.children.get(chunk) if node is root else None), 0"),
        "looks at every child": _changed(_FIND, "node.children.get(chunk)",
                                         "next((c for c in node.children.values() if c.chunks[0] == chunk), None)"),
        "looks in the edge for the chunk anywhere": _changed(_FIND, "node.chunks[i] != chunk", "chunk not in node.chunks"),
        "falls off the end": _changed(_FIND, "node is None or ", ""),
        "ids, not blocks": _changed(_FIND, "found.append(node.blocks[i])", "found.append(node.blocks[i].block_id)"),
        "eats its input": '''
def find(root, chunks):
    node, i, found = root, 0, []
    while chunks:
        chunk = chunks.pop(0)
        if i == len(node.chunks):
            node, i = node.children.get(chunk), 0
        if node is None or node.chunks[i] != chunk or node.blocks[i] is None:
            break
        found.append(node.blocks[i])
        i += 1
    return found
''',
        "hands out the edge's own list": _changed(_FIND, "    return found", '''    if root.children and chunks:
        first = root.children.get(chunks[0])
        if first is not None and first.blocks == found:
            return first.blocks
    return found'''),
        "plants None": _changed(_FIND, "node.children.get(chunk), 0", "node.children.setdefault(chunk), 0"),
        "plants what it does not find": _changed(_FIND, "node.children.get(chunk), 0",
                                                 "node.children.setdefault(chunk, RadixNode([chunk], [None], node)), 0"),
    },
    "split": {
        "new names instead of changed ones": _changed(_SPLIT, "block.block_hash.node = upper",
                                                      "block.block_hash = Place(upper)"),
        "new names for those below": '''
def split(node, k):
    lower = RadixNode(node.chunks[k:], node.blocks[k:], node)
    lower.children = node.children
    for child in lower.children.values():
        child.parent = lower
    for block in filter(None, lower.blocks):
        block.block_hash = Place(lower)
    node.children = {lower.chunks[0]: lower}
    del node.chunks[k:], node.blocks[k:]
    return node
''',
        "two new nodes": '''
def split(node, k):
    upper = RadixNode(node.chunks[:k], node.blocks[:k], node.parent)
    lower = RadixNode(node.chunks[k:], node.blocks[k:], upper)
    node.parent.children[upper.chunks[0]] = upper
    upper.children[lower.chunks[0]] = lower
    lower.children = node.children
    for child in lower.children.values():
        child.parent = lower
    for half in (upper, lower):
        for block in filter(None, half.blocks):
            block.block_hash.node = half
    return upper
''',
        "places are not told": _changed(_SPLIT, "            block.block_hash.node = upper", "            pass"),
        "all blocks are told, below too": _changed(_SPLIT, "in upper.blocks:", "in upper.blocks + node.blocks:"),
        "gaps have a place": _changed(_SPLIT, "        if block is not None:\n            block", "        block"),
        "the parent keeps the old child": _changed(_SPLIT, "    node.parent.children[node.chunks[0]] = upper\n", ""),
        "the lower half keeps its old parent": _changed(_SPLIT, "    node.parent = upper\n", ""),
        "the lower half is filed under the old chunk": _changed(_SPLIT, "upper.children[node.chunks[0]] = node",
                                                                "upper.children[upper.chunks[0]] = node"),
        "nothing hangs below": _changed(_SPLIT, "    upper.children[node.chunks[0]] = node\n", ""),
        "one block too many above": _SPLIT.replace("[:k]", "[:k + 1]").replace("[k:]", "[k + 1:]"),
        "returns the lower half": _changed(_SPLIT, "return upper", "return node"),
        "grandchildren stay with the upper half": '''
def split(node, k):
    lower = RadixNode(node.chunks[k:], node.blocks[k:], node)
    for block in lower.blocks:
        if block is not None:
            block.block_hash.node = lower
    node.children[lower.chunks[0]] = lower
    del node.chunks[k:], node.blocks[k:]
    return node
''',
        "grandchildren keep their old parent": '''
def split(node, k):
    lower = RadixNode(node.chunks[k:], node.blocks[k:], node)
    lower.children = node.children
    for block in lower.blocks:
        if block is not None:
            block.block_hash.node = lower
    node.children = {lower.chunks[0]: lower}
    del node.chunks[k:], node.blocks[k:]
    return node
''',
        "cuts only the chunks": _changed(_SPLIT, "    node.blocks = node.blocks[k:]\n", ""),
    },
    "add": {
        "eats its chunks": _changed(_ADD, "    return published", "    del chunks[:len(blocks)]\n    return published"),
        "eats its blocks": _changed(_ADD, "    return published", "    blocks.clear()\n    return published"),
        "keeps the list it got": _changed(_ADD, "    node, i, published = root, 0, []\n", '''    node, i, published = root, 0, []
    if blocks and len(blocks) == len(chunks) and chunks[0] not in root.children:
        new = root.children[chunks[0]] = RadixNode(chunks, list(blocks), root)
        for block in blocks:
            block.block_hash = Place(new)
        return list(blocks)
'''),
        "one Place for a run": _changed(_ADD, "Place(node)", "next((b.block_hash for b in node.blocks if b is not None "
                                        "and b.block_hash), None) or Place(node)"),
        "the second publisher takes the place": _changed(_ADD, "if node.blocks[i] is None:", "if True:"),
        "an edge for each block": _changed(_ADD, "if node.children or node is root:", "if True:").replace(
            "chunks[n : len(blocks)]", "chunks[n : n + 1]"),
        "a leaf does not grow": _changed(_ADD, "if node.children or node is root:", "if True:"),
        "an edge with children grows": _changed(_ADD, "if node.children or node is root:", "if node is root:"),
        "the root grows": _changed(_ADD, "if node.children or node is root:", "if node.children:"),
        "splits where a text ends": _ADD.replace("    return published", '''    if i < len(node.chunks):
        cut(node, i)
    return published'''),
        "stays on the lower half": _changed(_ADD, "node = cut(node, i)", "cut(node, i)"),
        "publishes chunks without blocks": _changed(_ADD, "chunks[n : len(blocks)]", "chunks[n:]"),
        "leaves gaps": _changed(_ADD, "if node.blocks[i] is None:", "if node.blocks[i] is None and blocks[n].block_hash is "
                                "None and i == len(node.blocks) - 1:"),
        "does not name": _changed(_ADD, "            blocks[n].block_hash = Place(node)\n", ""),
        "one name for all of an edge": _changed(_ADD, "Place(node)", "next((b.block_hash for b in node.blocks if b is not "
                                                "None and b.block_hash), None) or Place(root)"),
        "tells duplicates too": _changed(_ADD, "            published.append(blocks[n])", "            pass").replace(
            "        i += 1", "        published.append(blocks[n])\n        i += 1"),
        "overwrites the edge": _changed(_ADD, "                node = cut(node, i)",
                                        "                del node.chunks[i:], node.blocks[i:]"),
    },
    "take_out": {
        "all below is lost": '''
def take_out(block):
    node = block.block_hash.node
    i = node.blocks.index(block)
    gone = [other for other in node.blocks[i:] if other]
    for other in gone:
        other.block_hash = None
    del node.blocks[i:], node.chunks[i:]
    node.children = {}
''',
        "closes the gap": '''
def take_out(block):
    node = block.block_hash.node
    i = node.blocks.index(block)
    first = node.chunks[0]
    del node.blocks[i], node.chunks[i]
    block.block_hash = None
    if not node.blocks and not node.children:
        del node.parent.children[first]
''',
        "dead wood stays": _OUT[: _OUT.index("    while node.parent")],
        "one level only": _changed(_OUT, "        node = node.parent\n", "        return\n"),
        "one gap only": _changed(_OUT, "while node.blocks and node", "if node.blocks and node"),
        "the empty edge stays": _changed(_OUT, "        del node.parent.children[first]\n        node = node.parent\n",
                                         "        node.chunks, node.blocks = [first], [None]\n        return\n"),
        "the block keeps its name": _changed(_OUT, "    block.block_hash = None\n", ""),
        "cuts an edge that has children": _changed(_OUT, "while node.parent is not None and not node.children:",
                                                   "while node.parent is not None:"),
        "the parent loses all its children": _changed(_OUT, "del node.parent.children[first]",
                                                      "node.parent.children.clear()"),
        "joins, with new names": _OUT.rstrip().replace("            return\n", "            break\n") + '''
    if node.parent is not None and len(node.children) == 1:
        (child,) = node.children.values()
        node.chunks += child.chunks
        node.blocks += child.blocks
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        for other in child.blocks:
            if other is not None:
                other.block_hash = Place(node)
''',
        "joins, and tells nobody": _OUT.rstrip().replace("            return\n", "            break\n") + '''
    if node.parent is not None and len(node.children) == 1:
        (child,) = node.children.values()
        node.chunks += child.chunks
        node.blocks += child.blocks
        node.children = child.children
''',
    },
    "radix_tree": {
        "one tree for all salts": _TREE.replace("self.roots.get(salt)", "self.roots.get(None)").replace(
            "salt not in", "None not in").replace("self.roots[salt]", "self.roots[None]"),
        "match plants a tree": _changed(_TREE, "self.roots.get(salt)", "self.roots.setdefault(salt, RadixNode([], [], None))"),
        "names before it checks": _changed(_TREE, '''        if len(tokens) < len(blocks) * self.block_size:
            raise ValueError("too few tokens")
''', "        blocks = blocks[: len(tokens) // self.block_size]\n"),
        "all blocks enter, duplicates too": _changed(_TREE, '''        for block in grow(self.roots[salt], chunks_of(tokens, self.block_size), blocks):
''', '''        grow(self.roots[salt], chunks_of(tokens, self.block_size), blocks)
        for block in blocks:
'''),
        "removes what is not there": _changed(_TREE, '''            raise ValueError("not here")
''', "            return\n"),
        "any block with a name will do": _changed(_TREE, "        if self.cached_block_hash_to_block.get(block.block_hash) is "
                                                  "not block:", "        if block.block_hash is None:").replace(
            "        del self.cached_block_hash_to_block[block.block_hash]",
            "        self.cached_block_hash_to_block.pop(block.block_hash, None)"),
        "plants a tree before it checks": _changed(_TREE, '''    def insert(self, tokens, blocks, salt=None, cursor=None):
''', '''    def insert(self, tokens, blocks, salt=None, cursor=None):
        self.roots.setdefault(salt, RadixNode([], [], None))
'''),
        "eats the blocks": _changed(_TREE, "            self.cached_block_hash_to_block[block.block_hash] = block\n",
                                    "            self.cached_block_hash_to_block[block.block_hash] = block\n"
                                    "        blocks.clear()\n"),
        "the entry stays": _changed(_TREE, "        del self.cached_block_hash_to_block[block.block_hash]\n", ""),
        "forgets first": _changed(_TREE, '''        del self.cached_block_hash_to_block[block.block_hash]
        forget(block)''', '''        forget(block)
        self.cached_block_hash_to_block.pop(block.block_hash, None)'''),
        "a tree for each text": _changed(_TREE, "if salt not in self.roots:", "if True:"),
        "block size 1": _TREE.replace("chunks_of(tokens, self.block_size)", "chunks_of(tokens, 1)"),
        "publishes the part-full block": _changed(_TREE, "len(tokens) < len(blocks) * self.block_size",
                                                  "len(tokens) <= (len(blocks) - 1) * self.block_size"),
    },
    "leaf_to_evict": {
        "any edge": _changed(_LEAF, "not node.children and node.parent", "node.parent"),
        "the root too": _changed(_LEAF, "not node.children and node.parent is not None", "not node.children"),
        "owned leaves too": _changed(_LEAF, "if all(block.ref_cnt == 0 for block in leaf.blocks)", ""),
        "only the last block's owner counts": _changed(_LEAF, "all(block.ref_cnt == 0 for block in leaf.blocks)",
                                                       "leaf.blocks[-1].ref_cnt == 0"),
        "the earliest use of an edge": _changed(_LEAF, "max(last_used", "min(last_used"),
        "the use of its first block": _changed(_LEAF, "max(last_used[block.block_id] for block in leaf.blocks)",
                                               "last_used[leaf.blocks[0].block_id]"),
        "the one used last": _changed(_LEAF, "free[0]", "free[-1]"),
        "counts down in last_used": _changed(_LEAF, "    return free", "    last_used.clear()\n    return free"),
        "raises when there is none": _changed(_LEAF, "free[0] if free else None", "free[0]"),
        "a block, not an edge": _changed(_LEAF, "free[0] if free else None", "free[0].blocks[-1] if free else None"),
    },
}  # fmt: skip
