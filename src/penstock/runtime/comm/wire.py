"""Connects the workers of one generation over encrypted links, on one machine or on several.

It does what `GlooComm` does, and the ranks meet in the same way. But gloo sends plain bytes and believes everyone who
reaches its port, and the gloo in torch's packages is built without TLS. So tensors travel over connections of our own.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerLostError
from penstock.runtime.comm.gloo import LOOK_SECONDS, Broken, GlooComm
from penstock.runtime.torch_internals import Store
from penstock.runtime.wire.exchange import Exchange, Flow
from penstock.runtime.wire.group import WireGroup
from penstock.runtime.wire.links import MOST_EARLY_BYTES, SECOND_MESSAGES, Links


class WireComm(GlooComm):
    """This process's connection to the ranks of one generation, encrypted.

    `meeting` is the name of the generation, which no other run or generation has. `most_early` is
    how many bytes another rank may send before this one waits for them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        patience: float,
        broken: Broken,
        exchange: Exchange,
        meeting: str,
        most_early: int = MOST_EARLY_BYTES,
    ) -> None:
        self.exchange = exchange
        self.most_early = most_early
        self.meeting_name = meeting
        self.links: Links | None = None
        super().__init__(store, rank, ranks, patience, broken)

    def make_group(
        self, store: Store, group: tuple[int, ...], rank: int
    ) -> dist.ProcessGroup:
        """Connect to all ranks; smaller groups use the same connections."""
        if self.links is None:
            self.links = self.make_links(store, len(group), rank)
        made: Any = WireGroup(self.links, group)
        return cast(dist.ProcessGroup, made)  # It has the methods that are used.

    def make_links(self, store: Store, ranks: int, rank: int) -> Links:
        """Connect to every other rank, in both directions."""
        exchange = self.exchange
        exchange.begin(self.meeting_name)
        store.set(f"address/{rank}", exchange.address)
        outgoing = {}
        incoming = {}
        flows = {}
        for peer in range(ranks):
            if peer == rank:
                continue
            address = self.address_of(store, peer)
            there = Flow(self.meeting_name, rank, peer)
            back = Flow(self.meeting_name, peer, rank)
            if _dials(rank, exchange.address, peer, address):
                outgoing[peer] = exchange.reach(address, there)
                incoming[peer] = exchange.reach(address, back)
            else:
                flows[peer] = (there, back)
        for peer, (there, back) in flows.items():
            outgoing[peer] = exchange.accept(there, self.gives_up)
            incoming[peer] = exchange.accept(back, self.gives_up)
        return Links(rank, outgoing, incoming, self.most_early)

    def address_of(self, store: Store, peer: int) -> str:
        """The address of another rank, as soon as it is known."""
        key = f"address/{peer}"
        while not store.check([key]):
            if self.gives_up():
                raise PeerLostError(f"rank {peer} does not say where it is")
            time.sleep(LOOK_SECONDS)
        return store.get(key).decode()

    def gives_up(self) -> bool:
        """Whether to stop waiting for other ranks."""
        return self.broken() or time.monotonic() > self.connect_end

    def create_second_group(self) -> dist.ProcessGroup:
        """Use the same connections; messages of this group are matched among themselves."""
        assert self.links is not None
        made: Any = WireGroup(self.links, self.everyone, SECOND_MESSAGES)
        return cast(dist.ProcessGroup, made)

    def start_sum(self, tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing a tensor over a group."""
        wire: Any = group
        return cast(dist.Work, wire.add(tensor))

    def start_barrier(self) -> dist.Work:
        """Start a barrier over all ranks."""
        wire: Any = self.world
        return cast(dist.Work, wire.barrier())

    def cut_connections(self) -> None:
        """Break this rank's connections, so that every wait on them ends on all ranks."""
        if self.links is not None:
            self.links.cut("this worker has cut its connections")


def _dials(rank: int, address: str, peer: int, peer_address: str) -> bool:
    """Whether this rank connects to another one, and not the other way round."""
    if bool(address) != bool(peer_address):
        return bool(peer_address)
    return rank > peer
