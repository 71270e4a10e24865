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

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the base point
CURVE_D = -121665 * pow(121666, -1, PRIME) % PRIME
SEED_BYTES = 32
# X, Y, Z and T of a point, with x = X/Z, y = Y/Z and x * y = T/Z.
Point = tuple[int, int, int, int]
NEUTRAL: Point = (0, 1, 1, 0)

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


def make_certificate(name: str, seed: bytes | None = None) -> str:
    """Return a private key and its certificate in PEM; the key is drawn unless a seed is given."""
    seed = secrets.token_bytes(SEED_BYTES) if seed is None else seed
    algorithm = _der(SEQUENCE, _der(IDENTIFIER, ED25519))
    names = _names(name)
    ours = _der(
        SEQUENCE,
        _der(VERSION_FIELD, _der(INTEGER, bytes([2]))),
        _der(INTEGER, b"\x01" + secrets.token_bytes(15)),
        algorithm,
        names,
        _der(SEQUENCE, _der(UTC_TIME, FIRST_DAY), _der(LONG_TIME, LAST_DAY)),
        names,
        _der(SEQUENCE, algorithm, _der(BITS, b"\0" + public_key(seed))),
        _der(EXTENSIONS_FIELD, _der(SEQUENCE, _authority())),
    )
    signature = _der(BITS, b"\0" + sign(seed, ours))
    certificate = _der(SEQUENCE, ours, algorithm, signature)
    wrapped = _der(OCTETS, _der(OCTETS, seed))
    private = _der(SEQUENCE, _der(INTEGER, b"\0"), algorithm, wrapped)
    return _pem("PRIVATE KEY", private) + _pem("CERTIFICATE", certificate)


def _names(name: str) -> bytes:
    """The name of the owner, who is also the issuer."""
    common = _der(SEQUENCE, _der(IDENTIFIER, COMMON_NAME), _der(TEXT, name.encode()))
    return _der(SEQUENCE, _der(SET, common))


def _authority() -> bytes:
    """The extension that lets this certificate vouch for itself."""
    content = _der(OCTETS, _der(SEQUENCE, TRUE))
    return _der(SEQUENCE, _der(IDENTIFIER, BASIC_CONSTRAINTS), TRUE, content)


def _der(tag: int, *contents: bytes) -> bytes:
    """A value in DER: its tag, its length and its content."""
    content = b"".join(contents)
    length = len(content)
    if length < 128:
        return bytes([tag, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 + len(size)]) + size + content


def _pem(kind: str, content: bytes) -> str:
    text = base64.b64encode(content).decode()
    lines = [text[n : n + LINE_LENGTH] for n in range(0, len(text), LINE_LENGTH)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


# ---------------------------------------------------------------- Ed25519
def public_key(seed: bytes) -> bytes:
    """The public key of a private one."""
    return _packed(_multiple(_scalar(seed)))


def sign(seed: bytes, message: bytes) -> bytes:
    """Sign a message with a private key."""
    scalar = _scalar(seed)
    nonce = _number(hashlib.sha512(seed).digest()[32:], message)
    commitment = _packed(_multiple(nonce))
    challenge = _number(commitment, public_key(seed), message)
    response = (nonce + challenge * scalar) % ORDER
    return commitment + response.to_bytes(32, "little")


def _scalar(seed: bytes) -> int:
    """The secret factor: the first half of a hash, with some bits fixed by the standard."""
    number = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little")
    return number & ((1 << 254) - 8) | (1 << 254)


def _number(*pieces: bytes) -> int:
    digest = hashlib.sha512(b"".join(pieces)).digest()
    return int.from_bytes(digest, "little") % ORDER


def _sum(left: Point, right: Point) -> Point:
    """The sum of two points on the curve."""
    low = (left[1] - left[0]) * (right[1] - right[0])
    high = (left[1] + left[0]) * (right[1] + right[0])
    cross = 2 * left[3] * right[3] * CURVE_D
    scale = 2 * left[2] * right[2]
    e, f, g, h = high - low, scale - cross, scale + cross, high + low
    return e * f % PRIME, g * h % PRIME, f * g % PRIME, e * h % PRIME


def _multiple(factor: int) -> Point:
    """The base point, added to itself this often."""
    total, power = NEUTRAL, _base_point()
    while factor:
        if factor & 1:
            total = _sum(total, power)
        power = _sum(power, power)
        factor >>= 1
    return total


def _base_point() -> Point:
    """The point with y = 4/5 and an even x."""
    y = 4 * pow(5, -1, PRIME) % PRIME
    square = (y * y - 1) * pow(CURVE_D * y * y + 1, -1, PRIME) % PRIME
    x = pow(square, (PRIME + 3) // 8, PRIME)
    if x * x % PRIME != square:
        x = x * pow(2, (PRIME - 1) // 4, PRIME) % PRIME
    x = PRIME - x if x & 1 else x
    return x, y, 1, x * y % PRIME


def _packed(point: Point) -> bytes:
    """A point as 32 bytes: y, and the lowest bit of x."""
    inverse = pow(point[2], -1, PRIME)
    x, y = point[0] * inverse % PRIME, point[1] * inverse % PRIME
    return (y | (x & 1) << 255).to_bytes(32, "little")
