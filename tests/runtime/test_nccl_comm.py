"""Connections over NCCL that are made anew after a loss, with gloo in the place of NCCL.

What NCCL does itself is tested on GPUs (test_nccl.py): here an aborted sum ends, too, with numbers that mean nothing.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from penstock.errors import PeerLostError
from penstock.runtime.comm.gloo import GlooComm
from penstock.runtime.comm.nccl import NcclComm
from penstock.runtime.torch_internals import PrefixStore, TCPStore
from rank_threads import on_ranks


class WorkOnGpu:
    """A sum on a GPU: the host does not wait for it, and an abort ends it without an error."""

    def __init__(self, work, tensor, aborted):
        self.work = work
        self.tensor = tensor
        self.aborted = aborted

    def wait(self, limit=None):
        while not self.work.is_completed() and not self.aborted.is_set():
            time.sleep(0.01)
        if self.aborted.is_set():
            self.tensor.fill_(-1.0)  # garbage
        return True


class PretendedNccl(NcclComm):
    """Talks over gloo, and waits as a GPU would."""

    def __init__(self, *words):
        self.aborted = threading.Event()
        super().__init__(*words)

    def wire_device(self):
        return torch.device("cpu")

    def make_group(self, store, group, rank):
        return GlooComm.make_group(self, store, group, rank)

    def start_sum(self, tensor, group):
        work = super().start_sum(tensor, group)
        return WorkOnGpu(work, tensor, self.aborted)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_cut_sum_raises_an_error_and_the_others_connect_anew(store, monkeypatch):
    def abort(group):
        aborted[group].set()
        # A receive that times out breaks gloo's connections.
        peer = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], peer, 1).wait(timedelta(milliseconds=1))

    monkeypatch.setattr("penstock.runtime.comm.nccl.abort_group", abort)
    aborted = {}
    lost = threading.Event()

    def comm_of(name, rank, ranks, broken):
        connection = TCPStore("127.0.0.1", store.port, is_master=False)
        words = (PrefixStore(name, connection), rank, ranks, 30.0, broken)
        comm = PretendedNccl(*words)
        aborted.update(dict.fromkeys(comm.all_groups(), comm.aborted))
        return comm

    def work(rank):
        comm = comm_of("g1", rank, 3, lost.is_set)
        assert comm.upward is not comm.world  # Messages do not wait for sums.
        total = torch.ones(1)
        comm.add(total, (0, 1, 2)).wait()
        assert total.item() == 3.0
        comm.barrier()
        if rank == 1:
            lost.set()  # It does not come to the next sum.
            return 0.0
        with pytest.raises(PeerLostError, match="waits for the sum over ranks 0 1 2"):
            comm.add(total, (0, 1, 2)).wait()
        for use in (
            lambda: comm.send(total, 1),
            lambda: comm.receive((1,), torch.float32, 1),
            comm.barrier,
        ):
            with pytest.raises(PeerLostError, match="because a rank is lost"):
                use()
        comm.abandon()
        comm = comm_of("g2", rank // 2, 2, lambda: False)
        again = torch.ones(1)
        comm.add(again, (0, 1)).wait()
        comm.abandon()
        return again.item()

    assert on_ranks(3, work) == [2.0, 0.0, 2.0]
