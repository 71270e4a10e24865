"""torchrun itself, except that its workers are forks, which need not load torch again.

`commands.torchrun` runs this script in a fork, too.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
)
from torch.distributed.run import main

from forked import Command


def fork_worker(
    handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
) -> Command:
    """Start what torchrun would start with `python -u`: a script, or the module penstock."""
    unbuffered, target, *words = args[1:]
    assert unbuffered == "-u"
    script = None
    if target == "-m":
        assert words.pop(0) == "penstock"
    else:
        script = Path(target)
    return Command(Path.cwd(), words, env, session=True, script=script, shown=True)


if __name__ == "__main__":
    SubprocessHandler._popen = fork_worker
    main()
