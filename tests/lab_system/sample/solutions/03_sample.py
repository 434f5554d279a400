# %% [markdown] lang="en"
# # Lab 03: a sample
#
# A *block* is a seat for tokens.

# %% [markdown] lang="zh"
# # 实验 03：样例
#
# *块*是词元的座位。

# %%
seats = 16


def check(name):
    print(f"{name}: passed")

# %% [markdown] lang="en"
# Nobody has translated this.

# %% ex="num_blocks"
def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens need."""
    ### BEGIN SOLUTION
    full_blocks, tokens_left_over = divmod(num_tokens, block_size)
    return full_blocks + bool(tokens_left_over)
    ### END SOLUTION

# %% check="num_blocks"
check("num_blocks")

# %% [markdown]
# In both languages: $\lceil n / B \rceil$

# %% ex="free_list"
class FreeList:
    """Block ids that nobody holds, first come, first served."""

    def __init__(self, num_blocks):
        ### BEGIN SOLUTION
        self.blocks_in_order_of_release = list(range(num_blocks))
        ### END SOLUTION

    def popleft(self):
        def first():
            ### BEGIN SOLUTION
            return self.blocks_in_order_of_release.pop(0)
            ### END SOLUTION

        return first()


### BEGIN SOLUTION
EMPTY_LIST_OF_FREE_BLOCKS = FreeList(num_blocks=0)
### END SOLUTION

# %% check="free_list"
check("free_list")

# %%
FreeList(num_blocks(100, seats)).popleft()
