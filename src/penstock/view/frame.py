"""The frame of every page: one HTML file that loads nothing else, in light and dark."""

from __future__ import annotations

from html import escape

FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""


def framed(title: str, css: str, body: str) -> str:
    """A whole page around a body in HTML."""
    return FRAME.format(title=escape(title), css=css, body=body)
