"""Tables of cases as text: a case in a line, with its cells on both sides of an arrow."""

from __future__ import annotations


def cases(text: str) -> list[tuple[str, ...]]:
    r"""The cells of every case.

    In a cell, \n is the end of a line. A long case goes on in a line that begins with an arrow.

    >>> cases(r'''
    ... [run]\nsteps = 0  =>  must be at least 1
    ... [model]\nlayers = 3
    ...     =>  did you mean
    ... ''')
    [('[run]\nsteps = 0', 'must be at least 1'), ('[model]\nlayers = 3', 'did you mean')]
    """
    found: list[list[str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip().replace("\\n", "\n") for cell in line.split("=>")]
        if cells[0] or not found:
            found.append(cells)
        else:
            found[-1] += cells[1:]
    return [tuple(cells) for cells in found]
