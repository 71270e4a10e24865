"""What results were before the house was rebuilt, room by room, so that a move which changes one is seen.

    python tests/frozen/freeze.py            write the files of all rooms
    python tests/frozen/freeze.py plan       write that of one room

Each `cases_<room>.py` has a function `cases` from names to calls; a call returns what JSON can hold. `<room>.json`
keeps the answers. Floats may differ by what another CPU rounds; how much, the room says in `TOLERANCE`. A room may
have a function `no_worse(name, frozen, now)` for results that may change as long as they are no worse: it returns the
fault as a sentence, or an empty string.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from penstock.errors import PenstockError

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

Case = Callable[[], object]


def rooms() -> list[str]:
    return sorted(
        file.stem.removeprefix("cases_") for file in FOLDER.glob("cases_*.py")
    )


def module_of(room: str) -> ModuleType:
    return importlib.import_module(f"cases_{room}")


def cases_of(room: str) -> dict[str, Case]:
    found: dict[str, Case] = module_of(room).cases()
    return found


def frozen(room: str) -> dict[str, object]:
    page: dict[str, object] = json.loads((FOLDER / f"{room}.json").read_text("utf-8"))
    return page


def freeze(room: str) -> None:
    answers = {name: plain(case()) for name, case in cases_of(room).items()}
    lines = [
        f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()
    ]
    (FOLDER / f"{room}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def plain(answer: object) -> object:
    """The answer as JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(answer))


# ---------------------------------------------------------------- what cases share
def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def said(call: Callable[[], object], accepted: str = "accepted") -> str:
    """The class and the text of an error."""
    try:
        call()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return accepted


# ---------------------------------------------------------------- comparing
def differences(
    frozen: object, now: object, tolerance: float, where: str = ""
) -> list[str]:
    """Where two answers differ, as sentences."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        keys = {*frozen, *now}
        return [
            fault
            for key in sorted(keys)
            for fault in differences(
                frozen.get(key), now.get(key), tolerance, f"{where}.{key}"
            )
        ]
    if isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        return [
            fault
            for index, (one, other) in enumerate(zip(frozen, now, strict=True))
            for fault in differences(one, other, tolerance, f"{where}[{index}]")
        ]
    if isinstance(frozen, float | int) and isinstance(now, float | int):
        same = math.isclose(frozen, now, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        same = same or frozen == now
    else:
        same = frozen == now
    return [] if same else [f"{where}: {now!r} instead of {frozen!r}"]


if __name__ == "__main__":
    for one in sys.argv[1:] or rooms():
        freeze(one)
