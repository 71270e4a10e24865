"""Encrypted connections: only owners of the key are heard, whatever strangers send, and tensors arrive as over gloo."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import wait_until
from penstock.errors import ConfigError, FileError, PeerLostError
from penstock.ir.sum_plan import SumKind, SumPlan
from penstock.runtime.cell_format import CellFormat
from penstock.runtime.comm.wire import WireComm
from penstock.runtime.planned_sums import PlannedSum, SumThread
from penstock.runtime.process.launch import keep_store
from penstock.runtime.torch_internals import PrefixStore, TCPStore
from penstock.runtime.wire import door
from penstock.runtime.wire.certificate import public_key, sign
from penstock.runtime.wire.door import Door, dial, split_address
from penstock.runtime.wire.exchange import Exchange
from penstock.runtime.wire.frames import LENGTH, receive_frame, send_frame
from penstock.runtime.wire.key import context_of, keep_key
from penstock.runtime.wire.store import RemoteStore, serve_store
from rank_threads import on_ranks


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[Path, Path]:
    """Return the key of a run, and that of another run."""
    folder = tmp_path_factory.mktemp("keys")
    both = folder / "key.pem", folder / "other.pem"
    for file in both:
        keep_key(file)
    return both


@pytest.fixture
def hall(keys) -> Iterator[tuple[Door, list[str], list[Any]]]:
    """Return a door that echoes, the addresses that it has refused, and what it has heard."""
    refused: list[str] = []
    heard: list[Any] = []

    def serve(connection: ssl.SSLSocket) -> bool:
        heard.append(receive_frame(connection))
        send_frame(connection, heard[-1])
        return False

    opened = Door("127.0.0.1", 0, keys[0], serve, refused.append)
    yield opened, refused, heard
    opened.close()


def echo(address: tuple[str, int], key: Path) -> dict[str, Any]:
    with dial(address, context_of(key, server=False)) as connection:
        send_frame(connection, {"a": [1, "b"]})
        return receive_frame(connection)


# ---------------------------------------------------------------- keys
def test_signatures_are_those_of_the_standard():
    # The first two test vectors of RFC 8032, section 7.1.
    seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    signature = (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert public_key(bytes.fromhex(seed)).hex() == public
    assert sign(bytes.fromhex(seed), b"").hex() == signature
    seed = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
    signature = (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert sign(bytes.fromhex(seed), b"\x72").hex() == signature


def test_a_key_is_made_once_and_only_its_owner_can_read_it(keys, tmp_path):
    before = keys[0].read_bytes()
    keep_key(keys[0])
    assert keys[0].read_bytes() == before
    assert stat.S_IMODE(keys[0].stat().st_mode) == 0o600
    (tmp_path / "text.pem").write_text("no key")
    for name, reason in (("text.pem", "not a key"), ("none.pem", "No such file")):
        with pytest.raises(FileError, match=f"cannot use the key .*{reason}"):
            context_of(tmp_path / name, server=False)


# ---------------------------------------------------------------- strangers
def test_who_has_the_key_is_served_and_who_has_another_is_not(hall, keys):
    opened, refused, heard = hall
    assert echo(opened.address, keys[0]) == {"a": [1, "b"]}
    with pytest.raises(PeerLostError, match="does not let us in: it does not have"):
        echo(opened.address, keys[1])
    # A client that checks nothing still has to show the key.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with pytest.raises(PeerLostError):
        dial(opened.address, context)
    wait_until(lambda: len(refused) == 2)
    assert len(heard) == 1


def test_a_worker_does_not_believe_a_launcher_with_another_key(keys):
    heard: list[Any] = []
    fake = Door("127.0.0.1", 0, keys[1], lambda connection: heard.append(1) is None)
    with pytest.raises(PeerLostError, match="does not let us in"):
        echo(fake.address, keys[0])
    fake.close()
    assert not heard


def test_garbage_and_recorded_connections_are_closed_and_the_door_stays_open(
    hall, keys
):
    opened, refused, heard = hall
    recorded = record(opened.address, keys[0])
    assert len(heard) == 1
    garbage = [b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), LENGTH.pack(3) + b"{}"]
    hello = bytes([22, 3, 1, 255, 255, 1]) + bytes(70_000)  # a hello that is too long
    for content in (*garbage, hello, recorded):
        with socket.create_connection(opened.address) as stranger:
            stranger.settimeout(30)
            with suppress(OSError):  # It may be closed already.
                stranger.sendall(content)
                stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while stranger.recv(1 << 16):
                    pass
    wait_until(lambda: len(refused) == 5)
    assert len(heard) == 1  # A replayed connection is not heard again.
    assert echo(opened.address, keys[0])


def record(address: tuple[str, int], key: Path) -> bytes:
    """Return all bytes that a worker sends in a connection that is served."""
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def forward() -> None:
            inner, _ = listener.accept()
            outer = socket.create_connection(address)
            back = threading.Thread(target=pour, args=(outer, inner, bytearray()))
            back.start()
            pour(inner, outer, recorded)
            back.join()
            inner.close()
            outer.close()

        thread = threading.Thread(target=forward)
        thread.start()
        echo(listener.getsockname()[:2], key)
        thread.join()
    return bytes(recorded)


def pour(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            copy += content
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)


def test_a_flood_of_silent_connections_is_bounded_and_keeps_nobody_out(
    hall, keys, monkeypatch
):
    monkeypatch.setattr(door, "MAX_STRANGERS", 8)
    opened, refused, _ = hall
    with ExitStack() as flood:
        for _ in range(60):
            flood.enter_context(socket.create_connection(opened.address))
        assert echo(opened.address, keys[0])
        assert len(opened.strangers) <= 8
        threads = [one for one in threading.enumerate() if one.name == "guest"]
        assert len(threads) < 40
        wait_until(lambda: len(refused) >= 52)
    wait_until(lambda: not opened.strangers)


def test_a_stranger_that_stays_silent_is_sent_away(hall, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.05)
    opened, refused, _ = hall
    with socket.create_connection(opened.address) as stranger:
        stranger.settimeout(60)
        assert stranger.recv(1) == b""
    wait_until(lambda: refused == ["127.0.0.1"])


def test_a_frame_of_a_worker_that_is_no_json_ends_its_connection(hall, keys):
    opened, _, heard = hall
    for content in (
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(1 << 31),
        LENGTH.pack(1) + b"{",
    ):
        with dial(opened.address, context_of(keys[0], server=False)) as connection:
            connection.sendall(content)
            assert connection.recv(1) == b""
    assert not heard


def test_addresses_are_split_at_their_last_colon():
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":80", "host:x", "host:70000"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            split_address(text)


# ---------------------------------------------------------------- the store
def test_the_store_of_a_launcher_can_be_reached_only_from_its_machine_and_with_the_key(
    keys,
):
    store = keep_store()
    listening = Path("/proc/net/tcp").read_text().splitlines()
    place = f"0100007F:{store.port:04X} 00000000:0000 0A"  # listens at 127.0.0.1
    assert any(place in line for line in listening)

    def serve(connection: ssl.SSLSocket) -> bool:
        serve_store(connection, store.clone())
        return False

    opened = Door("127.0.0.1", 0, keys[0], serve)
    context = context_of(keys[0], server=False)
    remote = RemoteStore(lambda: dial(opened.address, context))
    far, near = PrefixStore("x", remote), PrefixStore("x", store)
    far.set("a", bytes(range(256)))
    assert near.get("a") == far.get("a") == bytes(range(256))
    assert far.add("n", 3) == 3
    assert near.add("n", 4) == far.clone().add("n", 0) == 7
    assert far.check(["a", "n"])
    assert not far.check(["b"])
    assert far.compare_set("c", "", "first") == b"first"
    assert far.compare_set("c", "", "second") == b"first"
    assert far.delete_key("c")
    assert not near.check(["c"])
    with pytest.raises(torch.distributed.DistError, match="cannot do"):
        remote.ask("__del__")
    opened.close()
    with pytest.raises(torch.distributed.DistError, match="cannot be reached"):
        far.get("a")
    remote.close()


# ---------------------------------------------------------------- tensors
@pytest.fixture
def connect(keys) -> Iterator[Callable[..., WireComm]]:
    """Return a function that connects a rank; each rank keeps its exchange."""
    store = keep_store()
    exchanges: dict[int, Exchange] = {}
    broken = threading.Event()

    def comm_of(
        generation: int, rank: int, ranks: int, listen: str = "127.0.0.1:0"
    ) -> WireComm:
        if rank not in exchanges:
            exchanges[rank] = Exchange(listen, keys[0])
        own = TCPStore("127.0.0.1", store.port, is_master=False)
        meeting = PrefixStore(f"g{generation}", own)
        name = f"launch/g{generation}"
        return WireComm(
            meeting, rank, ranks, 60.0, broken.is_set, exchanges[rank], name
        )

    comm_of.broken = broken
    yield comm_of
    for exchange in exchanges.values():
        exchange.close()


def test_messages_and_sums_arrive_also_from_a_rank_that_nobody_can_reach(connect):
    sizes = (1, 5, 4097, 50_001)  # whole, and in pieces of different length

    def work(rank: int) -> list[Any]:
        comm = connect(1, rank, 3, "" if rank == 1 else "127.0.0.1:0")
        comm.prepare([(0, 2)])
        sums = []
        for size in sizes:
            draw = torch.Generator().manual_seed(rank)
            sums.append(torch.randn(size, generator=draw))
            comm.add(sums[-1], (0, 1, 2)).wait()
        if rank != 1:
            pair = torch.tensor([rank + 1], dtype=torch.int64)
            comm.add(pair, (0, 2)).wait()
            sums.append(pair)
        if rank == 0:  # The second is expected first, and one is empty.
            for shape in ((3, 5), (4000, 4), (0, 2)):
                comm.send(torch.ones(shape, dtype=torch.bfloat16), 1).wait()
        if rank == 1:
            shapes = ((3, 5), (4000, 4), (0, 2))
            expected = [comm.receive(one, torch.bfloat16, 0) for one in shapes]
            arrived = [one.wait() for one in reversed(expected)]
            assert [one.sum().item() for one in arrived] == [0, 16000, 15]
        # Planned sums have messages of their own between the same ranks.
        plan = SumPlan((0,), SumKind.RING, (2, 0, 1))
        how = CellFormat(torch.float32)
        thread = SumThread(comm.apart(), [PlannedSum(plan, rank, 4097, how)])
        flat = torch.full((4097,), rank + 1.0)
        thread.put(flat).wait()
        assert (flat == 6).all()
        comm.barrier()
        comm.abandon()
        return sums

    results = on_ranks(3, work)
    draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for place, size in enumerate(sizes):
        parts = [torch.randn(size, generator=draw) for draw in draws]
        draws = [torch.Generator().manual_seed(rank) for rank in range(3)]
        expected = parts[0] + parts[1] + parts[2]
        for result in results:  # in the order of the ranks, on every rank
            assert torch.equal(result[place], expected)
    assert results[0][-1].item() == results[2][-1].item() == 4


def test_a_rank_that_goes_ends_all_waits_and_the_others_connect_again(connect):
    def work(rank: int) -> float:
        comm = connect(1, rank, 3)
        total = torch.ones(1)
        comm.add(total, (0, 1, 2)).wait()
        if rank == 1:
            comm.abandon()
            return total.item()
        pending = comm.receive((4,), torch.float32, 1)
        if rank == 2:
            pending = comm.add(torch.ones(9000), (0, 1, 2))
        with pytest.raises(PeerLostError, match="the connection is lost"):
            pending.wait()
        with pytest.raises(PeerLostError):
            comm.receive((4,), torch.float32, 1).wait()
        comm.abandon()
        comm = connect(2, {0: 0, 2: 1}[rank], 2)
        comm.add(total, (0, 1)).wait()
        comm.barrier()
        comm.abandon()
        return total.item()

    assert on_ranks(3, work) == [6.0, 3.0, 6.0]


def test_two_ranks_that_nobody_can_reach_are_told_so(connect):
    def work(rank: int) -> None:
        connect(1, rank, 2, "")

    lower = threading.Thread(target=lambda: on_ranks(1, work))
    lower.start()  # It waits for the other one, until the generation is broken.
    with pytest.raises(PeerLostError, match="neither can be reached from outside"):
        work(1)
    connect.broken.set()
    lower.join()
