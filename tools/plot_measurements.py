#!/usr/bin/env python3
"""Draws docs/measurements.svg from docs/measurements.csv: one group of horizontal bars per comparison.

usage: plot_measurements.py [ROOT]

The file's columns: group, name, value, unit.  Bars of a group share a scale that starts at 0.
"""
import csv
import itertools
import pathlib
import sys
from xml.sax.saxutils import escape

WIDTH, LABEL, BAR, GAP = 760, 300, 16, 6
COLOURS = ["#1f6fb4", "#9db8cf", "#c9a227", "#8a9a5b"]


def main() -> None:
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with open(root / "docs/measurements.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    y, body = 10, []
    for group, members in itertools.groupby(rows, key=lambda row: row["group"]):
        members = list(members)
        top = max(float(row["value"]) for row in members)
        y += 18
        body.append(f'<text x="10" y="{y}" font-weight="bold">{escape(group)}</text>')
        y += 8
        for i, row in enumerate(members):
            length = (WIDTH - LABEL - 110) * float(row["value"]) / top
            colour = COLOURS[min(i, len(COLOURS) - 1)]
            body.append(f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(row["name"])}</text>')
            body.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            body.append(f'<text x="{LABEL + length + 6:.1f}" y="{y + 12}">{escape(row["value"])} {escape(row["unit"])}</text>')
            y += BAR + GAP
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" font-family="sans-serif" font-size="12">'
           f'<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n")
    (root / "docs/measurements.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
