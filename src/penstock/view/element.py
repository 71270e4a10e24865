"""The elements of SVG figures as text, and the frame of every page.

    element("rect", x=4.0, y=0.5, fill="#ffffff")         <rect x="4" y="0.5" fill="#ffffff"/>
    element("text", "rank 0", x=56.0, text_anchor="end")  <text x="56" text-anchor="end">rank 0</text>

Words and colours are written as they are: whoever shows the text of a user escapes it. A page is one HTML file that
loads nothing else, in light and dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from penstock.view.numbers import short
from penstock.view.palette import IDLE, INK

FONT = "Helvetica, Arial, sans-serif"
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


def element(name: str, /, *content: str, **attributes: str | float) -> str:
    """An element in one line, with other elements or words as its content."""
    tag = _open_tag(name, attributes)
    if not content:
        return f"<{tag}/>"
    return f"<{tag}>{''.join(content)}</{name}>"


def group(content: Iterable[str], **attributes: str | float) -> Iterator[str]:
    """A group of elements, one in a line, that share the attributes."""
    yield f"<{_open_tag('g', attributes)}>"
    yield from content
    yield "</g>"


def figure(title: str, width: float, height: float, content: Iterable[str]) -> str:
    """The text of an SVG file: elements on a white sheet, which the title names to a screen reader."""
    attributes: dict[str, str | float] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {write_number(width)} {write_number(height)}",
        "width": width,
        "height": height,
        "font_family": FONT,
        "font_size": 12,
        "fill": INK,
        "role": "img",
    }
    lines = [
        f"<{_open_tag('svg', attributes)}>",
        element("title", title),
        element("rect", width="100%", height="100%", fill=IDLE),
        *content,
        "</svg>\n",
    ]
    return "\n".join(lines)


def write_number(number: float) -> str:
    """A number of pixels with at most two decimals.

    >>> write_number(64.0), write_number(1 / 3)
    ('64', '0.33')
    """
    return short(round(number, 2), 7)


def _open_tag(name: str, attributes: dict[str, str | float]) -> str:
    """The name of an element and its attributes.

    Python's `class_` and `text_anchor` are `class` and `text-anchor` in SVG.
    """
    words = [name]
    for key, value in attributes.items():
        text = value if isinstance(value, str) else write_number(value)
        svg_key = key.rstrip("_").replace("_", "-")
        words.append(f'{svg_key}="{text}"')
    return " ".join(words)


# ---------------------------------------------------------------- pages
def framed(title: str, css: str, body: str) -> str:
    """A whole page around a body in HTML."""
    return FRAME.format(title=escape(title), css=css, body=body)
