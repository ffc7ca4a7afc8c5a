"""Tables and texts as HTML, with which notebooks show easydist's values in the colours of the page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

_TEXT = "white-space: pre-wrap; font-family: var(--jp-code-font-family, monospace); line-height: 1.4; margin: 0 0 .5em"
_MARK = ' style="font-weight: bold; color: var(--jp-error-color1, #d32f2f)"'
_CELL = "padding: .2em .7em; white-space: nowrap; font-variant-numeric: tabular-nums"


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[str] = (), marked: Collection[int] = ()
) -> str:
    """Return a table as HTML.

    Args:
        titles: The titles of the columns.
        rows: The cells of each row, which are escaped.
        texts: The titles of the columns with text, which are aligned left; numbers are aligned right.
        marked: The indices of the rows to highlight.

    Example:
        >>> table(["rank"], [["<1>"]]).count("&lt;1&gt;</td>")
        1
    """
    styles = [f"text-align: {'left' if title in texts else 'right'}; {_CELL}" for title in titles]
    head = "".join(_cells("th", styles, titles))
    body = "".join(
        f"<tr{_MARK if number in marked else ''}>{''.join(_cells('td', styles, row))}</tr>"
        for number, row in enumerate(rows)
    )
    return f'<table style="margin: 0 0 .5em"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cells(tag: str, styles: Sequence[str], row: Sequence[str]) -> Iterable[str]:
    return (f'<{tag} style="{style}">{escape(text)}</{tag}>' for style, text in zip(styles, row, strict=True))


def text(said: str, title: str = "") -> str:
    """Return a text as HTML that keeps its lines and columns.

    Args:
        said: The text, which is escaped.
        title: A title before the text, in bold.

    Example:
        >>> "<b>Title</b> a &lt; b" in text("a < b", "Title")
        True
    """
    bold = f"<b>{escape(title)}</b> " if title else ""
    return f'<pre style="{_TEXT}">{bold}{escape(said)}</pre>'
