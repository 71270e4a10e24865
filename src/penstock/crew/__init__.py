"""Training that survives the loss of workers: the launcher keeps a crew together, and replans when it changes.

    launcher (`coordinator`) store ── who lives ── plans for those who live ── events
                               │ decision 2: workers 0 2 3, plan, step 41
    worker (`member`)        connects ─ trains ─ ✗ lost a peer ─ reports its step ─ connects ─ trains ─ ...

A worker never restarts and reads nothing from disk: it keeps its parts in memory from one generation
of the crew to the next.
"""

from __future__ import annotations
