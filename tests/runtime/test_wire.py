"""Encrypted connections: only owners of the key are heard, whatever strangers send, and tensors arrive as over gloo."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import wait_until
from penstock.crew import tls
from penstock.crew.links import (
    HEADER,
    MESSAGES,
    Address,
    Exchange,
    Flow,
    Links,
    TensorTransfer,
    WireComm,
)
from penstock.crew.store import RemoteStore, serve_store
from penstock.crew.tls import (
    FIRST_BYTES,
    LENGTH,
    MAX_FRAME_BYTES,
    MAX_PLAN_BYTES,
    Listener,
    context_of,
    dial,
    keep_key,
    make_key,
    receive_frame,
    send_frame,
)
from penstock.errors import ConfigError, FileError, PeerLostError
from penstock.ir.sums import SumKind, SumPlan
from penstock.runtime.planned_sums import CellFormat, PlannedSum, SumThread
from penstock.runtime.process.launch import keep_store
from penstock.torch_internals import PrefixStore, TCPStore
from penstock.train.elastic import split_address
from rank_threads import on_ranks

x509 = pytest.importorskip("cryptography.x509")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> tuple[Path, Path]:
    """Return the key of a run, and that of another run."""
    folder = tmp_path_factory.mktemp("keys")
    both = folder / "key.pem", folder / "other.pem"
    for file in both:
        keep_key(file)
    return both


@pytest.fixture
def hall(keys) -> Iterator[tuple[Listener, list[str], list[Any]]]:
    """Return a door that echoes, the addresses that it has refused, and what it has heard."""
    refused: list[str] = []
    heard: list[Any] = []

    def serve(connection: ssl.SSLSocket) -> bool:
        heard.append(receive_frame(connection))
        send_frame(connection, heard[-1])
        return False

    opened = Listener("127.0.0.1", 0, keys[0], serve, refused.append)
    yield opened, refused, heard
    opened.close()


def echo(address: tuple[str, int], key: Path) -> dict[str, Any]:
    with dial(address, context_of(key, server=False)) as connection:
        send_frame(connection, {"a": [1, "b"]})
        return receive_frame(connection)


# ---------------------------------------------------------------- keys
# A key of the versions of Penstock that did the arithmetic of Ed25519 themselves.
OLD_KEY = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBADCBs6ADAgECAhABIWt8JgFqcGtSTRsCW7p5MAUGAytlcDAXMRUwEwYDVQQD
DAxwZW5zdG9jayBydW4wIBcNMjAwMTAxMDAwMDAwWhgPOTk5OTEyMzEyMzU5NTla
MBcxFTATBgNVBAMMDHBlbnN0b2NrIHJ1bjAqMAUGAytlcAMhAAOhB7/zzhC+HXDd
GOdLwJln5NYwm6UNXx3chmQSVTG4oxMwETAPBgNVHRMBAf8EBTADAQH/MAUGAytl
cANBAFGvOy6niw0NUZwIjcnfigywO7PlWdRb5eBO16rvMtQB6IeQKgih+UrAviM4
7vycx8OS5kgxpX6I3kFM9ET7Wgs=
-----END CERTIFICATE-----
"""


def test_a_new_key_has_the_form_of_one_that_penstock_has_made_before():
    made, old = (
        x509.load_pem_x509_certificate(t.encode()) for t in (make_key(), OLD_KEY)
    )
    for one in (made, old):
        one.verify_directly_issued_by(one)  # It has signed itself.
    assert made.subject == made.issuer == old.subject
    assert list(made.extensions) == list(old.extensions)
    days = [(one.not_valid_before_utc, one.not_valid_after_utc) for one in (made, old)]
    assert days[0] == days[1]
    assert made.signature_algorithm_oid == old.signature_algorithm_oid
    private = serialization.load_pem_private_key(OLD_KEY.encode(), None)
    assert private.public_key() == old.public_key()


def test_a_key_of_an_earlier_version_still_opens_doors(keys, tmp_path):
    old = tmp_path / "key.pem"
    old.write_text(OLD_KEY)
    keep_key(old)  # It stays as it is.
    assert old.read_text() == OLD_KEY
    heard: list[Any] = []

    def serve(connection: ssl.SSLSocket) -> bool:
        heard.append(receive_frame(connection))
        send_frame(connection, heard[-1])
        return False

    opened = Listener("127.0.0.1", 0, old, serve)
    assert echo(opened.address, old) == {"a": [1, "b"]}
    with pytest.raises(PeerLostError, match="does not let us in"):
        echo(opened.address, keys[0])
    opened.close()


def test_a_key_is_made_once_and_only_its_owner_can_read_it(keys, tmp_path):
    before = keys[0].read_bytes()
    keep_key(keys[0])
    assert keys[0].read_bytes() == before
    assert stat.S_IMODE(keys[0].stat().st_mode) == 0o600
    (tmp_path / "text.pem").write_text("no key")
    for name, reason in (("text.pem", "not a key"), ("none.pem", "No such file")):
        with pytest.raises(FileError, match=f"cannot use the key .*{reason}"):
            context_of(tmp_path / name, server=False)


def test_connections_are_tls_1_3_or_none(hall, keys):
    """The same key over TLS 1.2 opens no door, and nobody walks through a door of TLS 1.2."""
    opened, refused, heard = hall
    old = context_of(keys[0], server=False)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(PeerLostError, match="does not let us in"):
        dial(opened.address, old)
    wait_until(lambda: refused == ["127.0.0.1"])
    opened.context.minimum_version = ssl.TLSVersion.TLSv1_2
    opened.context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(PeerLostError, match="does not let us in"):
        echo(opened.address, keys[0])
    assert not heard
    # That door understands TLS 1.2, so the refusal is that of the worker.
    with dial(opened.address, old) as connection:
        assert connection.version() == "TLSv1.2"


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
    fake = Listener("127.0.0.1", 0, keys[1], lambda connection: heard.append(1) is None)
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
            stranger.settimeout(600)
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
    monkeypatch.setattr(tls, "MAX_STRANGERS", 8)
    opened, refused, _ = hall
    with ExitStack() as flood:
        for _ in range(60):
            flood.enter_context(socket.create_connection(opened.address))
        assert echo(opened.address, keys[0])
        assert len(opened.strangers) <= 8
        wait_until(lambda: len(refused) >= 52)
        wait_until(lambda: len(stranger_threads()) <= 8)
    wait_until(lambda: not opened.strangers)


def stranger_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "stranger"]


def test_a_stranger_that_stays_silent_is_sent_away(hall, monkeypatch):
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.05)
    opened, refused, _ = hall
    with socket.create_connection(opened.address) as stranger:
        stranger.settimeout(600)
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


def test_one_more_connection_with_the_key_than_a_door_serves_is_told_so(keys):
    context = context_of(keys[0], server=False)

    def serve(connection: ssl.SSLSocket) -> bool:
        receive_frame(connection)
        return False

    opened = Listener("127.0.0.1", 0, keys[0], serve, most=3)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(dial(opened.address, context))
        with pytest.raises(PeerLostError, match="as many connections with this key"):
            dial(opened.address, context)
        assert len(opened.served) == 3
    wait_until(lambda: not opened.served)
    with dial(opened.address, context):
        pass
    opened.close()


@pytest.mark.parametrize("most", [MAX_FRAME_BYTES, MAX_PLAN_BYTES])
def test_a_message_takes_no_memory_for_bytes_that_have_not_come(most):
    """The length of a message is only announced."""
    near, far = socket.socketpair()
    with near:
        with far:
            far.sendall(LENGTH.pack(most) + b"{" + bytes(999))
        assert peak_of(lambda: refuse(near, most, "was closed")) < 4 * FIRST_BYTES
    near, far = socket.socketpair()
    with near, far:
        far.sendall(LENGTH.pack(most + 1))
        refuse(near, most, f"at most {most:,} are expected")


def refuse(connection: socket.socket, most: int, reason: str) -> None:
    with pytest.raises(PeerLostError, match=reason):
        receive_frame(connection, most)


def peak_of(work: Callable[[], Any]) -> int:
    """Return the most memory that Python takes while something runs."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_message_comes_whole_in_pieces():
    near, far = socket.socketpair()
    sent = {"plan": "x" * (5 * FIRST_BYTES + 7)}
    with near, far:
        thread = threading.Thread(target=send_frame, args=(far, sent))
        thread.start()
        assert receive_frame(near) == sent
        thread.join()


def test_a_worker_keeps_only_the_connections_that_its_run_can_need(keys):
    exchange = Exchange("127.0.0.1:0", keys[0], ranks=2)
    context = context_of(keys[0], server=False)
    address = split_address(exchange.address)
    with ExitStack() as held:
        for number in range(8):
            held.enter_context(dial(address, context))
            held.enter_context(
                exchange.reach(exchange.address, Flow("a/g1", number, 0))
            )
        # Silent ones, and those that say to which meeting they belong.
        wait_until(lambda: len(exchange.waiting) == 8)
        late = held.enter_context(exchange.reach(exchange.address, Flow("a/g1", 8, 0)))
        assert late.recv(1) == b""
        assert len(exchange.waiting) == 8
    exchange.close()


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

    opened = Listener("127.0.0.1", 0, keys[0], serve)
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
PLACE = Address(MESSAGES, 1)
NEXT = Address(MESSAGES, 2)


@pytest.fixture
def ends() -> Iterator[tuple[Links, socket.socket, socket.socket]]:
    """Return the links of rank 0 with rank 1, and the ends of rank 1: what rank 0 sends, and what it receives."""
    sent, theirs = socket.socketpair()
    mine, received = socket.socketpair()
    links = Links(0, {1: sent}, {1: mine}, most_early=1 << 28)
    yield links, theirs, received
    links.cut("the test is over")
    theirs.close()
    received.close()


def packed(address: Address, content: bytes, announced: int | None = None) -> bytes:
    size = len(content) if announced is None else announced
    return HEADER.pack(address.channel, address.tag, size) + content


def wait_for_end(transfer: TensorTransfer, reason: str) -> None:
    """Wait for a transfer that must fail; no time limit here may be what ends it."""
    with pytest.raises(RuntimeError, match=reason):
        transfer.wait(timedelta(seconds=600))


def test_an_early_tensor_of_another_size_than_expected_is_an_error(ends):
    links, _, peer = ends
    peer.sendall(packed(PLACE, bytes(12)) + packed(NEXT, bytes(4)))
    # When the second one is here, the first one has come early.
    links.receive(torch.ones(1), 1, NEXT).wait(timedelta(seconds=600))
    four = torch.ones(4)
    wrong = links.receive(four, 1, PLACE)
    wait_for_end(wrong, "a tensor of 12 bytes, but 16 were expected")
    assert four.sum() == 4
    peer.sendall(packed(PLACE, bytes(16)))
    links.receive(four, 1, PLACE).wait(timedelta(seconds=600))
    assert four.sum() == 0


def test_an_early_tensor_takes_no_memory_before_it_comes(ends):
    links, _, peer = ends
    awaited = links.receive(torch.ones(1), 1, NEXT)

    def announce_and_go() -> None:
        peer.sendall(packed(PLACE, bytes(999), announced=1 << 27))
        peer.shutdown(socket.SHUT_WR)
        wait_for_end(awaited, "the connection from rank 1 is lost: .* was closed")

    assert peak_of(announce_and_go) < 4 * FIRST_BYTES


@pytest.mark.parametrize("sizes", [[1 << 60], [0] * 300], ids=["long", "many"])
def test_a_peer_that_sends_more_early_tensors_than_can_be_is_cut_off(sizes, ends):
    links, _, peer = ends
    links.inboxes[1].most_early = 1 << 16
    awaited = links.receive(torch.ones(1), 1, NEXT)
    with suppress(ConnectionError):
        peer.sendall(b"".join(packed(PLACE, b"", announced=one) for one in sizes))
    wait_for_end(awaited, "nobody waits for")


def test_early_tensors_that_are_used_make_room_for_others(ends):
    links, _, peer = ends
    inbox = links.inboxes[1]
    for _ in range(3):
        peer.sendall(packed(PLACE, bytes(1 << 12)) + packed(NEXT, bytes(4)))
        links.receive(torch.ones(1), 1, NEXT).wait(timedelta(seconds=600))
        assert inbox.early_bytes > 1 << 12
        links.receive(torch.ones(1 << 10), 1, PLACE).wait(timedelta(seconds=600))
        assert inbox.early_bytes == 0


def test_no_send_waits_for_ever_when_a_connection_is_cut(ends):
    """The first send is too long for a peer that reads nothing, and the others queue behind it."""
    links, peer, _ = ends
    sends = [links.send(torch.ones(1 << 22), 1, Address(MESSAGES, n)) for n in range(5)]
    assert peer.recv(1)  # It has begun.
    links.cut("this worker has cut its connections")
    for send in sends:
        wait_for_end(send, "has cut its connections|is lost")
    wait_for_end(links.send(torch.ones(1), 1, PLACE), "has cut its connections")


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
            exchanges[rank] = Exchange(listen, keys[0], ranks)
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
        thread = SumThread(
            comm.second_connection(), [PlannedSum(plan, rank, 4097, how)]
        )
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
