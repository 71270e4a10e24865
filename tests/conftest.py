"""Makes Ctrl-C work in all tests, even if a shell started them in the background, where it is turned off."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
