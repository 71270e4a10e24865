"""Penstock with other people's runtimes: plans for them, and our runtime inside them.

    advice.py            the fastest plan that Megatron-LM or torchtitan can run, and what it must be told
    torchtitan/          torchtitan's trainer with our planner and executor
    torch_pipelining.py  torch's own runtime with our order of messages
    ray.py               the function that Ray Train runs on every worker

The advice imports neither torch nor the frameworks. Tests read it with the frameworks' own parsers.
"""
