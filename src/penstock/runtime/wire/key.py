"""The key of a run: a file that every worker from another machine must have.

It holds a private key and the certificate that belongs to it. Both ends of a connection show that they have the private
key and accept nobody without it (mutual TLS 1.3), so a stranger can neither read nor send anything.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from penstock.errors import FileError
from penstock.runtime.wire.certificate import make_certificate

KEY_FILE = "key.pem"  # in the folder of a run
CERTIFICATE_NAME = "penstock run"


def keep_key(file: Path) -> None:
    """Make a key in a file that only its owner can read, unless the file exists."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise FileError(f"cannot write the key {file}: {error.strerror}") from None
    with os.fdopen(handle, "w", encoding="ascii") as opened:
        opened.write(make_certificate(CERTIFICATE_NAME))


def context_of(file: Path, server: bool) -> ssl.SSLContext:
    """Return the settings of connections between owners of a key."""
    side = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate is that of the run, on whatever machine it is shown.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # No connection is resumed.
    try:
        context.load_cert_chain(file)
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        reason = "it is not a key"
        if not isinstance(error, ssl.SSLError):
            reason = error.strerror or str(error)
        raise FileError(
            f"cannot use the key {file}: {reason}\n"
            f"  copy {KEY_FILE} out of the folder of the run, on the machine of `penstock train`"
        ) from None
    return context
