"""What the labs draw, on matplotlib axes. Okabe and Ito's colours, and a pattern beside each.

    costs    steps of a decode, their cost, the roofline (lab 00)
    memory   who holds which slots, and the kinds of waste (lab 02)
    pool     blocks, queue, addresses, layouts (03)
    tables   block tables over shared blocks (04)
    boxes    rows of boxes, the pool over time (05)
    tree     a radix tree (06)
    batching seats over time, a request's states, who runs and who waits (07)
    steps    steps under a token budget: timetables, bars, gaps (08)
    pressure swap against recompute, and who is thrown out when (09)
"""
