"""Live views of the engine: one player, a file for each view. How to write one: docs/watch.md.

    from kvlab.watch import views
    views.pool("fragmented", seed=3, step=12)      a run of the real allocator, frame by frame; parts= is yours

    style, svg    what marks mean; the writer that draws them
    view          what a view is: events -> states -> pictures and sentences; scenarios and questions
    stage, books  scenarios over the real manager; the state of views that show blocks
    lanes, bills  the state of views that show requests by step; that of crossover: prices and where they cross
    player        frames, question, still picture, page; player.js and player.css show them
    seats         the state and the words of schedule
    pace          the state and the words of budget; budget_picture draws it
    prefix        a view; prefix_picture draws it, twins has its stage and its state
    kernel        a view; kernel_picture draws it, kernel_run records it, walk has its state
    pool, fork, strip, address, crossover, preemption, schedule, budget    the other views
"""

from kvlab.watch.stage import probe

__all__ = ["probe"]
