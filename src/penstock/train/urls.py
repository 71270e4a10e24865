"""URLs of storages, as they may be shown to others."""

from __future__ import annotations

import re


def hide_secrets(text: str) -> str:
    """Return a text in which no URL shows a password, or a query, which may have a key in it.

    >>> hide_secrets("cannot read sftp://me:secret@host/run: no such file")
    'cannot read sftp://me:***@host/run: no such file'
    """
    text = re.sub(r"""(://[^/\s:@"']*):[^/\s"']*@""", r"\1:***@", text)
    return re.sub(r"""(://[^\s?"']*\?)[^\s"']+""", r"\1***", text)
