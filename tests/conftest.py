"""Ctrl-C works in all tests, also if they were started in the background of a shell, which turns it off."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
