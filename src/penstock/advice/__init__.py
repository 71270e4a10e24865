"""Advice for those who stay with their runtime: what another framework must be told to run a plan.

    pipeline.py     a plan in the terms that all frameworks share
    orders.py       which well-known order and placement a schedule has
    torchtitan.py  automodel.py  megatron.py  deepspeed.py    what each framework takes and what it cannot run
    advise.py       chooses the fastest plan that a framework can run

Nothing here imports torch or the frameworks. Tests read the advice with the frameworks' own parsers.
"""
