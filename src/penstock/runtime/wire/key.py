"""The key of a run: a file that every worker from another machine must have.

It holds a private key and the certificate that belongs to it. Both ends of a connection show that they have the private
key and accept nobody without it (mutual TLS 1.3), so a stranger can neither read nor send anything.
"""

from __future__ import annotations

import os
import ssl
from datetime import datetime
from pathlib import Path

from penstock.errors import FileError

KEY_FILE = "key.pem"  # in the folder of a run
CERTIFICATE_NAME = "penstock run"
# Machines may disagree about the time, and the key of a run does not expire by itself.
FIRST_DAY = datetime(2020, 1, 1)
LAST_DAY = datetime(9999, 12, 31, 23, 59, 59)


def keep_key(file: Path) -> None:
    """Make a key in a file that only its owner can read, unless the file exists."""
    text = make_key()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise FileError(f"cannot write the key {file}: {error.strerror}") from None
    with os.fdopen(handle, "w", encoding="ascii") as opened:
        opened.write(text)


def make_key() -> str:
    """Return a new private key, and a certificate for it that it has signed itself, in PEM."""
    # Only the launcher makes a key, and every worker would pay for loading this.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PrivateKey,
    )
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.generate()
    kind = x509.NameOID.COMMON_NAME
    owner = x509.Name([x509.NameAttribute(kind, CERTIFICATE_NAME)])
    vouches_for_itself = x509.BasicConstraints(ca=True, path_length=None)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(owner)
        .issuer_name(owner)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FIRST_DAY)
        .not_valid_after(LAST_DAY)
        .add_extension(vouches_for_itself, critical=True)
        .sign(key, algorithm=None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (private + certificate.public_bytes(Encoding.PEM)).decode()


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
