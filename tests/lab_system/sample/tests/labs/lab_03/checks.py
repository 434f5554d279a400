"""The sample lab's exercises: enough for its notebooks, too little to grade."""

from kvlab.grade import Exercise, LabInfo, say

LAB = LabInfo(title=say("A sample"), sections="L33 2.2", before=())


class NumBlocks(Exercise):
    """Blocks for so many tokens."""

    name, points, defines = "num_blocks", 2, ("num_blocks",)


class FreeList(Exercise):
    """A free list."""

    name, points, defines = "free_list", 3, ("FreeList",)
