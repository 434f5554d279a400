"""What the labs play: small worlds around what the student writes, from seeds, so that every number comes again.

    decode     a token by the engine, computed anew and decoded (lab 00)
    sharing    samples and beams word by word (lab 04)      reuse    chats and agents before a prefix cache (05)
    tree       traffic through caches with several rules of eviction (06)
    batching   lengths, machines on the virtual clock, lives of requests (07)
    traffic    an hour of real traffic, from committed results (06, 07)
    chunks     long prompts among readers, step by step (08)
    pressure   too little memory: who runs, waits and is thrown out, step by step (09)
"""
