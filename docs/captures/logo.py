"""Draw the logo, for light and for dark pages: a tree on the left, its leaves on the way, the same tree on the right.

python docs/captures/logo.py
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "_static"
ROOT, LEAF = "#2f6fde", "#f08c00"
INKS = {"light": "#1b1f24", "dark": "#e8eaed"}
ENDS, LEAVES = ((14, 40), (106, 40)), ((60, 12), (60, 40), (60, 68))


def mark() -> str:
    """Return the lines and the nodes."""
    lines = "".join(
        f'<line x1="{x}" y1="{y}" x2="{u}" y2="{v}" stroke="{ROOT}" stroke-width="5"/>'
        for x, y in ENDS
        for u, v in LEAVES
    )
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="12" fill="{ROOT}"/>' for x, y in ENDS)
    return lines + dots + "".join(f'<circle cx="{x}" cy="{y}" r="9" fill="{LEAF}"/>' for x, y in LEAVES)


def logo(ink: str) -> str:
    """Return the mark with the name beside it."""
    font = 'font-family="Inter, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif" font-size="52" font-weight="600"'
    name = f'<text x="138" y="57" {font} fill="{ink}" textLength="214" lengthAdjust="spacingAndGlyphs">easydist</text>'
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 80" role="img" aria-label="easydist">'
    return f"{head}{mark()}{name}</svg>\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for kind, ink in INKS.items():
        (FOLDER / f"logo-{kind}.svg").write_text(logo(ink))
    square = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -20 120 120">'
    (FOLDER / "favicon.svg").write_text(f"{square}{mark()}</svg>\n")
