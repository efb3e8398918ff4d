"""Draw how data flows through the layers: docs/pictures/layers.svg.

The file has its colours as CSS, so that it is readable on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).with_name("layers.svg")

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1b1f24; }
  .small { font-size: 11.5px; fill: #57606a; }
  .title { font-weight: 600; }
  .box { fill: #eef4ff; stroke: #3b6fd4; }
  .loss { fill: #fff4e5; stroke: #c77700; }
  .outer { fill: none; stroke: #8b949e; stroke-dasharray: 5 4; }
  .arrow { fill: none; stroke: #57606a; stroke-width: 1.6; marker-end: url(#head); }
  .head { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .box { fill: #16233d; stroke: #6f9bff; }
    .loss { fill: #33240d; stroke: #e0a040; }
    .arrow { stroke: #9da7b3; }
    .head { fill: #9da7b3; }
  }
"""

# Name, second line, left, top, width, class.
BOXES = [
    ("environment", "envs/", 30, 60, 120, "box"),
    ("collector", "trainers/ or TorchRL", 190, 60, 140, "box"),
    ("replay buffer", "TorchRL, sequences", 370, 60, 140, "box"),
    ("loss", "objectives/", 550, 60, 120, "loss"),
    ("stepper", "trainers/", 710, 60, 120, "box"),
    ("policy, critic", "modules/ or yours", 370, 190, 140, "box"),
    ("functions of tensors", "objectives/functional", 523, 190, 174, "loss"),
    ("optimisers", "torch", 710, 190, 120, "box"),
]
HEIGHT = 54
ARROWS = [
    ((150, 87), (190, 87)),
    ((330, 87), (370, 87)),
    ((510, 87), (550, 87)),
    ((670, 87), (710, 87)),
    ((610, 114), (610, 190)),
    ((770, 114), (770, 190)),
]
PATHS = [
    "M 770 244 V 272 H 440 V 244",  # optimisers -> networks
    "M 440 190 V 140 H 260 V 114",  # networks -> collector
]
NOTES = [
    ("TensorDict", 340, 50),
    ("batch", 522, 50),
    ("losses", 676, 50),
    ("weights back to the collector", 270, 158),
    ("steps", 560, 288),
]


def box(name: str, below: str, left: int, top: int, width: int, kind: str) -> str:
    """A rectangle with two lines in it."""
    middle, centred = left + width / 2, 'text-anchor="middle"'
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{width}" height="{HEIGHT}" rx="7"/>'
        f'<text class="title" x="{middle}" y="{top + 24}" {centred}>{escape(name)}</text>'
        f'<text class="small" x="{middle}" y="{top + 42}" {centred}>{escape(below)}</text>'
    )


def drawing() -> str:
    """The whole picture."""
    parts = [box(*each) for each in BOXES]
    parts += [
        f'<path class="arrow" d="M {x0} {y0} L {x1 - 3 * (x1 > x0)} {y1 - 3 * (y1 > y0)}"/>'
        for (x0, y0), (x1, y1) in ARROWS
    ]
    parts += [f'<path class="arrow" d="{path}"/>' for path in PATHS]
    parts += [f'<text class="small" x="{x}" y="{y}">{escape(text)}</text>' for text, x, y in NOTES]
    run = (
        '<rect class="outer" x="12" y="18" width="836" height="330" rx="10"/>'
        '<text class="small" x="26" y="36">a run (runs/) of an algorithm (algorithms/)</text>'
        '<text class="small" x="26" y="330">evaluation · metrics.csv · checkpoints · callbacks, '
        "then report/: curves and tables of finished runs</text>"
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 360" role="img">'
        "<title>How data flows through the layers</title>"
        f"<style>{STYLE}</style>{marker}{run}{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    OUT.write_text(drawing())
