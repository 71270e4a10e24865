"""What happened to the workers of a run, one line an event: RUN/events.jsonl.

{"step": 41, "event": "lost", "seconds": 0.9, "text": "worker 3 was killed by SIGKILL",
 "members": [0, 1, 2], "speed": 0.52, "limit": 0.55, "back": 0}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import FileError

EVENTS = "events.jsonl"  # in the folder of a run


@dataclass(frozen=True, slots=True)
class Event:
    """A change of the crew."""

    step: int  # the last step before it
    event: str  # "lost", "joined", "pace" if one is slow or fast again, "retry" or "restart"
    seconds: float  # from the end of the last step to the beginning of the next one
    text: str
    members: tuple[int, ...]  # the workers that go on
    # Steps per second of their plan, compared with the plan for all workers, and what no plan for
    # them can exceed.
    speed: float = 1.0
    limit: float = 1.0
    back: int = 0  # steps that were done already and are done again


class EventLog:
    """The file of events. A run that does not resume begins with an empty one."""

    def __init__(self, folder: Path, resume: bool) -> None:
        self.file = folder / EVENTS
        if not resume:
            self.file.unlink(missing_ok=True)

    def put(self, event: Event) -> None:
        """Write down an event."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")


def read_events(folder: Path) -> list[Event]:
    """Read the events of a run; a run without any has no file."""
    try:
        lines = (folder / EVENTS).read_text(encoding="utf-8").splitlines()
        return [_event(json.loads(line)) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{folder / EVENTS} is not a list of events: {error}") from None


def _event(fields: dict[str, Any]) -> Event:
    fields.pop("workers", None)  # Earlier versions wrote down how many members go on.
    event = Event(**fields)
    return replace(event, members=tuple(event.members))
