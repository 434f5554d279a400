"""Beam groups move as a whole (整组): how the scheduler admits, plans, preempts, branches and ends them (L33 2.4).

    admit      all members or none, with room for all that they hold should they share nothing
    plan       a member computes its last known token only in a step in which all members do; who has come
               back without K/V computes its other tokens until all stand there again
    preempt    a member, and all go
    branch     between steps: who does not live on becomes a fork of one who does
    end        once, for all; the leader stands for the group

Members at different positions could not be ranked against each other, and half a group would hold its blocks for
nothing.
"""

from collections.abc import Iterable, Sequence

from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.manager import KVCacheManager
from kvlab.schedule.beam import BeamGroup
from kvlab.schedule.request import Request

Scheduled = dict[str, tuple[Request, int]]  # by request id: (request, number of tokens)


def check_group(request: Request, config: EngineConfig, manager: KVCacheManager) -> None:
    """ValueError if the group of `request` could fail to move as a whole. request.max_num_tokens is known."""
    name, width = f"request {request.request_id!r}", request.group.width
    if not manager.can_share:
        raise ValueError(f"{name}: beam search shares blocks, which contiguous reservation cannot; use 'paged'")
    if not config.enable_chunked_prefill:
        raise ValueError(f"{name}: preempted beams compute their tokens again in parts; enable chunked prefill")
    if width > config.max_num_seqs:
        raise ValueError(
            f"{name}: beam_width is {width} and there are {config.max_num_seqs} seats, one for each beam; lower "
            f"beam_width or raise max_num_seqs"
        )
    if width > config.max_num_batched_tokens:
        raise ValueError(
            f"{name}: beam_width is {width} and a step computes {config.max_num_batched_tokens} tokens, one for each "
            f"beam at least; lower beam_width or raise max_num_batched_tokens"
        )
    blocks = cdiv(request.max_num_tokens - 1, config.block_size)
    if width * blocks > manager.block_pool.num_usable_blocks:
        raise ValueError(
            f"{name}: {width} beams of {blocks} blocks, should they share nothing, need more than the "
            f"{manager.block_pool.num_usable_blocks} KV blocks that there are; lower beam_width or max_tokens, or "
            f"give the engine more blocks"
        )


def companions(request: Request) -> list[Request]:
    """Those who come, go and end together with `request`."""
    return request.group.members if request.group is not None else [request]


def side_by_side(running: Sequence[Request]) -> list[Request]:
    """Who may compute something, in order, but members next to each other: two groups never halve a budget for ever."""
    order: dict[str, int] = {}
    able = [request for request, tokens in zip(running, pending_tokens(running), strict=True) if tokens]
    return sorted(able, key=lambda request: order.setdefault(request.parent_id, len(order)))


def pending_tokens(requests: Sequence[Request]) -> list[int]:
    """How many tokens each may compute: a member's last known one only when its group is ready."""
    held_back = {request.group for request in requests if request.group is not None and not request.group.is_ready}
    return [r.num_tokens - r.num_computed_tokens - (r.group in held_back) for r in requests]


def keep_whole(todo: Sequence[Request], plan: list[int], scheduled: Scheduled) -> list[int]:
    """Change `plan` (and `scheduled`) so that a ready group samples as a whole, or waits.

    If that leaves an empty step, the first of those who would wait goes on: its width fits every budget.
    """
    plan = list(plan)
    waiting: list[list[int]] = []
    for group in dict.fromkeys(request.group for request in todo):
        mine = [i for i, request in enumerate(todo) if request.group is group]
        if group is None or not group.is_ready or all(plan[i] for i in mine):
            continue
        for i in mine:
            plan[i] = 0
        for member in group.members:
            scheduled.pop(member.request_id, None)
        if len(mine) == len(group.members):
            waiting.append(mine)
    if waiting and not scheduled and not any(plan):
        for i in waiting[0]:
            plan[i] = 1
    return plan


def blocks_to_start(group: BeamGroup, block_size: int) -> int:
    """Free blocks that surely suffice for all tokens of all members. What they may find or share is not counted:

    the first to come in may evict what the second would have found.
    """
    return sum(cdiv(member.num_tokens, block_size) for member in group.members)


def in_doubt(groups: Iterable[BeamGroup], blocks: set[int], manager: KVCacheManager) -> list[Request]:
    """Members whose tables hold one of `blocks`: a member may be given slots in a step that leaves it out."""
    tables = manager.req_to_blocks
    members = [member for group in groups for member in group.members if member.request_id in tables]
    return [member for member in members if not blocks.isdisjoint(tables[member.request_id].block_ids)]


def branch(group: BeamGroup, living: Sequence[tuple[int, int]], manager: KVCacheManager) -> None:
    """Let `living`, (position of the parent, token) by rank, be the members from here on; `width` of them exist."""
    for parent, child in group.place(living):
        manager.free(child)
        manager.fork(parent, child)
        child.all_token_ids = list(parent.all_token_ids)
    for member, (_, token) in zip(group.members, living, strict=True):
        member.all_token_ids.append(token)
