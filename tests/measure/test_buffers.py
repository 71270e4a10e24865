"""Buffers between two ranks are measured: how long they keep a sender, and a receiver that comes late."""

from __future__ import annotations

import math

import pytest
import torch

from penstock import Network
from penstock.cost.network import BufferedMessage
from penstock.measure import links
from penstock.measure.links import BUFFERED_BYTES, measured_buffers, measured_network
from penstock.runtime import run_threads, spawn
from penstock.runtime.comm.thread import ThreadComm
from virtual_time import ShapedComm, run_in_virtual_time

LINKS = Network(1e-4, 3e9, serial=True, channels=1)
COPY_SECONDS = 1e-10  # of a byte into a buffer
BUFFER_BYTES = 5e6


class BufferedComm(ShapedComm):
    """Links on which a sender only copies its message, unless it is too large for the buffer between two ranks."""

    @property
    def channels(self) -> int:
        return 1

    def send(self, tensor, target):
        return Sending(self, tensor, target)

    def receive(self, shape, dtype, source):
        return Taking(self, shape, dtype, source)


class Sending:
    def __init__(self, comm, tensor, target):
        self.comm, self.tensor, self.target = comm, tensor, target
        now = torch.tensor([links.time.perf_counter()], dtype=torch.float64)
        comm.inner.send(now, target)
        comm.inner.send(tensor, target)

    def wait(self):
        clock = links.time
        clock.sleep(COPY_SECONDS * self.tensor.nbytes)
        if self.tensor.nbytes > BUFFER_BYTES:
            arrival = self.comm.inner.receive((1,), torch.float64, self.target).wait()
            clock.sleep(max(float(arrival) - clock.perf_counter(), 0.0))


class Taking:
    def __init__(self, comm, shape, dtype, source):
        self.comm, self.source = comm, source
        self.left = comm.inner.receive((1,), torch.float64, source)
        self.tensor = comm.inner.receive(shape, dtype, source)

    def wait(self):
        clock = links.time
        tensor = self.tensor.wait()
        hop = LINKS.latency + tensor.nbytes / LINKS.bandwidth
        copied = clock.perf_counter() + COPY_SECONDS * tensor.nbytes
        arrival = max(float(self.left.wait()) + hop, copied)
        if tensor.nbytes > BUFFER_BYTES:
            there = torch.tensor([arrival], dtype=torch.float64)
            self.comm.inner.send(there, self.source)
        clock.sleep(arrival - clock.perf_counter())
        return tensor


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_buffers_hold_is_measured(monkeypatch, ranks):
    run_in_virtual_time(monkeypatch)

    def work(comm: ThreadComm):
        return measured_buffers(BufferedComm(comm, LINKS), LINKS)

    for found in run_threads(ranks, work, patience=60):
        assert [one.bytes for one in found] == list(BUFFERED_BYTES)
        for one in found:
            copied = COPY_SECONDS * one.bytes
            assert one.receive == pytest.approx(copied, abs=1e-9)
            if one.bytes > BUFFER_BYTES:
                assert one.send == math.inf
            else:
                assert one.send == pytest.approx(copied, abs=1e-9)


def test_messages_that_take_long_are_not_tried(monkeypatch):
    run_in_virtual_time(monkeypatch)
    slow = Network(1e-3, 1e8, serial=True, channels=1)

    def work(comm: ThreadComm):
        return measured_buffers(ShapedComm(comm, slow), slow)

    found = run_threads(2, work, patience=60)[0]
    assert [one.bytes for one in found] == [1 << 12, 1 << 18, 1 << 20]


def test_only_networks_with_channels_have_buffers(monkeypatch):
    run_in_virtual_time(monkeypatch)

    def work(comm: ThreadComm):
        return measured_network(ShapedComm(comm, Network(1e-4, 3e9)))

    assert run_threads(2, work, patience=60)[0].buffers == ()


def test_messages_between_real_processes_can_be_timed():
    """Over gloo, where times mean nothing here, but every message arrives."""
    found = spawn(2, measured_buffers, LINKS, patience=60)[0]
    assert len(found) == len(BUFFERED_BYTES)
    assert all(isinstance(one, BufferedMessage) for one in found)
    assert all(0 < one.receive < math.inf for one in found)
