"""The least work and the quickest links that a micro-batch meets, whatever its path."""

from __future__ import annotations

from penstock.ir.table import Floats
from penstock.plan.paths.problem import Problem


class LeastWork:
    """Seconds of work and of links, as a bound may count them: the least slice of each part.

    forward, backward: a slice over each part; in waves each half of a part counts alone.
    trip_part: forward and backward of a slice over each part; in waves over both its halves.
    own: a data node's work on its first part, for one micro-batch.
    data: the same, with the head.
    first_forward, first_backward: a data node's first forward and last backward of a micro-batch.
    whole_part: all slices of a micro-batch over each part.
    whole_data: all slices of a micro-batch over the first part and the head.
    one_way, pair: seconds of a link, and of a link and back.
    inner: how often a micro-batch uses a link of its path, there and back.
    close: how often it uses the link from its last node to its data node.
    tasks_per_hop: tasks of a micro-batch on a node of its path.
    """

    def __init__(self, problem: Problem) -> None:
        traffic = problem.traffic
        body = problem.body
        forward = traffic.forward.min(axis=1)
        backward = traffic.backward.min(axis=1)
        whole_forward = traffic.forward.sum(axis=1)
        whole_backward = traffic.backward.sum(axis=1)
        # the other slices, which one node does one after the other
        other_slices = whole_forward - forward + whole_backward - backward
        both = forward + backward
        whole = whole_forward + whole_backward
        self.forward: Floats = forward
        self.backward: Floats = backward
        self.trip_part = both[:body].copy()
        self.whole_part = whole[:body].copy()
        if problem.waves:
            self.trip_part += both[body:][::-1]
            self.whole_part += whole[body:][::-1]
            self.own = float(self.trip_part[0] + other_slices[0])
            self.data = self.own
            self.whole_data = float(self.whole_part[0])
            self.inner = 2.0
            self.close = 0.0
            self.tasks_per_hop = 4 * problem.slices
        else:
            self.own = float(both[0] + other_slices[0])
            self.data = float(self.own + both[-1])
            self.whole_data = float(self.whole_part[0] + whole[-1])
            self.inner = 1.0
            self.close = 1.0
            self.tasks_per_hop = 2 * problem.slices
        self.first_forward = float(whole_forward[0])
        self.first_backward = float(whole_backward[0])
        self.one_way: Floats = traffic.latency + traffic.byte * traffic.message.min()
        self.pair: Floats = self.one_way + self.one_way.T
