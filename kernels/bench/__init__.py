"""The benchmark of the kernels: `python -m kvlab_kernels.bench`, or `kvlab bench kernels`.

    machine.py   what it runs on, and how a launch is timed
    cases.py     paged sequences of any shape
    correct.py   every kernel against its reference, in every dtype; CUDA graphs replayed under other lengths
    speed.py     bandwidth of decodes, the ladder, PyTorch's attention beside it, order of the pages, prefill
    small.py     the kernels beside attention, right and fast
    tune.py      the sweep from which the table in configs.py is made
    table.py     what is printed, and the goals

Without a GPU all of it runs, interpreted and at toy sizes, which shows that it works; then no time is taken.
"""
