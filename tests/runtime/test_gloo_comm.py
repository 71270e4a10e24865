"""Connections that are made again after a loss; ranks are threads that talk through real sockets."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.crew.links import GlooComm
from penstock.errors import PeerLostError
from penstock.torch_internals import PrefixStore, TCPStore
from rank_threads import on_ranks

pytestmark = pytest.mark.usefixtures("_loopback")


@pytest.fixture
def _loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def comm_of(store, name: str, rank: int, ranks: int, broken=lambda: False) -> GlooComm:
    connection = TCPStore("127.0.0.1", store.port, is_master=False)
    return GlooComm(PrefixStore(name, connection), rank, ranks, 30.0, broken)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_messages_and_sums_work_and_again_after_a_rank_has_left(store):
    def work(rank: int) -> list[float]:
        comm = comm_of(store, "g1", rank, 3)
        comm.prepare([(0, 2)])
        total = torch.tensor([float(rank + 1)])
        comm.add(total, (0, 1, 2)).wait()
        if rank != 1:
            pair = torch.tensor([float(rank)])
            comm.add(pair, (0, 2)).wait()
            assert pair.item() == 2.0
        comm.barrier()
        comm.abandon()
        if rank == 1:
            return [total.item()]
        number = {0: 0, 2: 1}[rank]
        comm = comm_of(store, "g2", number, 2)
        if number == 0:
            comm.send(torch.tensor([5.0]), 1).wait()
        else:
            total += comm.receive((1,), torch.float32, 0).wait()
        again = torch.ones(1)
        comm.add(again, (0, 1)).wait()
        comm.abandon()
        return [total.item(), again.item()]

    assert on_ranks(3, work) == [[6.0, 2.0], [6.0], [11.0, 2.0]]


def test_who_waits_for_a_rank_that_has_gone_is_told_so(store):
    def work(rank: int) -> None:
        comm = comm_of(store, "g1", rank, 2)
        if rank == 0:
            comm.abandon()
        else:
            comm.receive((4,), torch.float32, 0).wait()

    gone, waits = on_ranks(2, work)
    assert gone is None
    assert isinstance(waits, PeerLostError)


def test_a_rank_that_leaves_after_rank_0_tells_the_others_too(store):
    # All are connected before rank 0 leaves, and rank 2 waits for rank 1 before that leaves.
    connected = threading.Barrier(3, timeout=60)
    waiting = threading.Barrier(2, timeout=60)

    def work(rank: int) -> None:
        comm = comm_of(store, "g1", rank, 3)
        connected.wait()
        if rank == 0:
            comm.abandon()
            return
        with pytest.raises(PeerLostError):
            comm.receive((4,), torch.float32, 0).wait()
        if rank == 1:
            kept.append(comm.world)  # A work in flight may keep the sockets open.
            waiting.wait()
            comm.abandon()
        else:
            waits = comm.receive((4,), torch.float32, 1)
            waiting.wait()
            waits.wait()

    kept: list[object] = []
    *_, waits = on_ranks(3, work)
    assert isinstance(waits, PeerLostError)  # Lost patience would be a StuckError.


def test_connecting_ends_as_soon_as_the_generation_is_broken(store):
    with pytest.raises(PeerLostError, match="one of them is lost"):
        comm_of(store, "g1", 0, 2, lambda: True)  # Nobody else comes.
