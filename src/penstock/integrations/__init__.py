"""Penstock with other people's runtimes: plans for them, and our runtime inside them.

    terms.py    a plan in the terms that all frameworks share
    advice.py   the fastest plan that a framework can run, and what the framework must be told
    megatron.py  torchtitan/advice.py    what each framework takes and what it cannot run
    torchtitan/          torchtitan's trainer with our planner and executor
    torch_pipelining.py  torch's own runtime with our order of messages
    ray.py               the function that Ray Train runs on every worker

Terms and advice import neither torch nor the frameworks. Tests read the advice with the frameworks' own parsers.
"""
