"""Two virtual machines for a test: network namespaces joined by a virtual cable. Needs root and Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[list[tuple[str, str, str]]]:
    """Yield the namespace, the network card and the address of both machines.

    Skips the test where network namespaces are not allowed.
    """
    if shutil.which("ip") is None:
        pytest.skip(
            "the program `ip`, which makes network namespaces, is not installed"
        )
    mark = os.getpid() % 100_000
    both = [
        (f"ps{mark}{side}", f"p{mark}{side}", f"10.77.{mark % 250}.{1 + n}")
        for n, side in enumerate("ab")
    ]
    try:
        for name, _, _ in both:
            ip("netns", "add", name)
        ip("link", "add", both[0][1], "type", "veth", "peer", "name", both[1][1])
        for name, card, address in both:
            ip("link", "set", card, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove(both)
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        yield both
    finally:
        remove(both)


def limit(machines: list[tuple[str, str, str]], megabits: int) -> None:
    """Limit the bandwidth of the cable in both directions, with the kernel's token bucket.

    The bucket is small: while a busy machine sends nothing it fills up, and what it holds passes at
    once. With 16 kB before every message, a fit finds at most 8.4% more than the limit of 80 Mbit/s;
    with 32 kB it would be 28%.

    Skips the test where the kernel has none.
    """
    for name, card, _ in machines:
        words = [
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            card,
            "root",
            "tbf",
            "rate",
            f"{megabits}mbit",
        ]
        line = [*words, "burst", "16kb", "latency", "500ms"]
        made = subprocess.run(line, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"this kernel has no token bucket (tbf): {made.stderr.strip()}")


def remove(both: list[tuple[str, str, str]]) -> None:
    for name, _, _ in both:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
