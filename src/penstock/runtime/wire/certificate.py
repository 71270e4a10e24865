"""Makes a private key and a certificate that it signs itself, as text that `ssl` can read.

    seed ──► private key (Ed25519, RFC 8032) ──► public key ──► certificate (X.509, RFC 5280)
                   └─────────────── signs ──────────────────────────┘

Python can use certificates but cannot make them, and not every machine has a tool that can. One
signature is all that is needed here, so plain integers are fast enough. Nothing else in Penstock
uses this arithmetic: connections are made by OpenSSL, which also checks the result.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import NamedTuple

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point
CURVE_D = -121665 * pow(121666, -1, PRIME) % PRIME
SEED_BYTES = 32
HALF_DIGEST_BYTES = 32
KEY_BITS = 255  # of a coordinate; the bit above them holds the sign

# Tags of DER, the encoding of certificates.
INTEGER = 0x02
BITS = 0x03
OCTETS = 0x04
IDENTIFIER = 0x06
TEXT = 0x0C
UTC_TIME = 0x17
LONG_TIME = 0x18
SEQUENCE = 0x30
SET = 0x31
VERSION_FIELD = 0xA0
EXTENSIONS_FIELD = 0xA3
ED25519 = bytes([0x2B, 0x65, 0x70])  # 1.3.101.112
COMMON_NAME = bytes([0x55, 0x04, 0x03])  # 2.5.4.3
BASIC_CONSTRAINTS = bytes([0x55, 0x1D, 0x13])  # 2.5.29.19
TRUE = bytes([0x01, 0x01, 0xFF])
# Machines may disagree about the time, and the key of a run does not expire by itself.
FIRST_DAY = b"200101000000Z"
LAST_DAY = b"99991231235959Z"
LINE_LENGTH = 64
MAX_SHORT_LENGTH = 127  # of a value in DER whose length is one byte
VERSION_3 = bytes([2])  # X.509 counts its versions from 0
KEY_VERSION = bytes([0])
NO_UNUSED_BITS = b"\0"  # begins every string of bits
SERIAL_BYTES = 15


def make_certificate(name: str, seed: bytes | None = None) -> str:
    """Return a private key and its certificate in PEM; the key is drawn unless a seed is given."""
    seed = secrets.token_bytes(SEED_BYTES) if seed is None else seed
    algorithm = _der(SEQUENCE, _der(IDENTIFIER, ED25519))
    content = _certificate_content(name, algorithm, seed)
    signature = _der(BITS, NO_UNUSED_BITS, sign(seed, content))
    certificate = _der(SEQUENCE, content, algorithm, signature)
    version = _der(INTEGER, KEY_VERSION)
    wrapped_seed = _der(OCTETS, _der(OCTETS, seed))
    private_key = _der(SEQUENCE, version, algorithm, wrapped_seed)
    return _pem("PRIVATE KEY", private_key) + _pem("CERTIFICATE", certificate)


def _certificate_content(name: str, algorithm: bytes, seed: bytes) -> bytes:
    """The part of a certificate that is signed."""
    # The first byte keeps the number positive.
    serial = b"\x01" + secrets.token_bytes(SERIAL_BYTES)
    owner = _owner(name)
    first_day = _der(UTC_TIME, FIRST_DAY)
    last_day = _der(LONG_TIME, LAST_DAY)
    key = _der(BITS, NO_UNUSED_BITS, public_key(seed))
    return _der(
        SEQUENCE,
        _der(VERSION_FIELD, _der(INTEGER, VERSION_3)),
        _der(INTEGER, serial),
        algorithm,
        owner,  # as the issuer
        _der(SEQUENCE, first_day, last_day),
        owner,
        _der(SEQUENCE, algorithm, key),
        _der(EXTENSIONS_FIELD, _der(SEQUENCE, _authority())),
    )


def _owner(name: str) -> bytes:
    """The name of the owner, who is also the issuer."""
    kind = _der(IDENTIFIER, COMMON_NAME)
    common_name = _der(SEQUENCE, kind, _der(TEXT, name.encode()))
    return _der(SEQUENCE, _der(SET, common_name))


def _authority() -> bytes:
    """The extension that lets this certificate vouch for itself."""
    kind = _der(IDENTIFIER, BASIC_CONSTRAINTS)
    is_critical = TRUE
    is_authority = _der(SEQUENCE, TRUE)
    return _der(SEQUENCE, kind, is_critical, _der(OCTETS, is_authority))


def _der(tag: int, *contents: bytes) -> bytes:
    """A value in DER: its tag, its length and its content."""
    content = b"".join(contents)
    length = len(content)
    if length <= MAX_SHORT_LENGTH:
        return bytes([tag, length]) + content
    length_bytes = (length.bit_length() + 7) // 8
    header = bytes([tag, 0x80 + length_bytes])
    return header + length.to_bytes(length_bytes, "big") + content


def _pem(kind: str, content: bytes) -> str:
    """A key or a certificate as text, in lines of equal length."""
    text = base64.b64encode(content).decode()
    lines = [text[n : n + LINE_LENGTH] for n in range(0, len(text), LINE_LENGTH)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


# ---------------------------------------------------------------- Ed25519
class CurvePoint(NamedTuple):
    """A point (X/Z, Y/Z) of the curve; T/Z is the product of its coordinates."""

    x: int
    y: int
    z: int
    t: int


NEUTRAL = CurvePoint(0, 1, 1, 0)


def public_key(seed: bytes) -> bytes:
    """The public key of a private one."""
    point = _multiple(_secret_factor(seed))
    return _packed(point)


def sign(seed: bytes, message: bytes) -> bytes:
    """Sign a message with a private key."""
    factor = _secret_factor(seed)
    prefix = hashlib.sha512(seed).digest()[HALF_DIGEST_BYTES:]
    nonce = _number(prefix, message)
    commitment = _packed(_multiple(nonce))
    challenge = _number(commitment, public_key(seed), message)
    response = (nonce + challenge * factor) % ORDER
    return commitment + response.to_bytes(32, "little")


def _secret_factor(seed: bytes) -> int:
    """The first half of a hash of the seed, with some bits fixed by the standard."""
    half = hashlib.sha512(seed).digest()[:HALF_DIGEST_BYTES]
    number = int.from_bytes(half, "little")
    highest_bit = 1 << 254
    free_bits = highest_bit - 8  # all lower bits except the last three
    return number & free_bits | highest_bit


def _number(*pieces: bytes) -> int:
    """A hash of these pieces as a number below the order."""
    digest = hashlib.sha512(b"".join(pieces)).digest()
    return int.from_bytes(digest, "little") % ORDER


def _sum(left: CurvePoint, right: CurvePoint) -> CurvePoint:
    """The sum of two points on the curve, with the names of RFC 8032."""
    a = (left.y - left.x) * (right.y - right.x)
    b = (left.y + left.x) * (right.y + right.x)
    c = 2 * left.t * right.t * CURVE_D
    d = 2 * left.z * right.z
    e = b - a
    f = d - c
    g = d + c
    h = b + a
    return CurvePoint(e * f % PRIME, g * h % PRIME, f * g % PRIME, e * h % PRIME)


def _multiple(factor: int) -> CurvePoint:
    """The base point, added to itself this often."""
    total = NEUTRAL
    power = _base_point()
    while factor:
        if factor & 1:
            total = _sum(total, power)
        power = _sum(power, power)
        factor >>= 1
    return total


def _base_point() -> CurvePoint:
    """The point with y = 4/5 and an even x."""
    y = 4 * _inverse(5) % PRIME
    x_squared = (y * y - 1) * _inverse(CURVE_D * y * y + 1) % PRIME
    x = pow(x_squared, (PRIME + 3) // 8, PRIME)
    if x * x % PRIME != x_squared:
        root_of_minus_one = pow(2, (PRIME - 1) // 4, PRIME)
        x = x * root_of_minus_one % PRIME
    if x & 1:
        x = PRIME - x
    return CurvePoint(x, y, 1, x * y % PRIME)


def _packed(point: CurvePoint) -> bytes:
    """A point as 32 bytes: y, and the lowest bit of x."""
    scale = _inverse(point.z)
    x = point.x * scale % PRIME
    y = point.y * scale % PRIME
    sign_bit = (x & 1) << KEY_BITS
    return (y | sign_bit).to_bytes(SEED_BYTES, "little")


def _inverse(number: int) -> int:
    """The number whose product with this one is 1, modulo the prime."""
    return pow(number, -1, PRIME)
