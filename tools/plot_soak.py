#!/usr/bin/env python3
"""Draws docs/soak.svg: memory, descriptors and threads of the processes of a soak over time.

usage: plot_soak.py CSV [ROOT]

CSV is the file that FERRY_SOAK_CSV named (tests/chaos/soak_test.cc).
"""
import csv
import pathlib
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 760, 130, 70, 150, 30, 46
COLOURS = {"router": "#1f6fb4", "prefill": "#c9a227", "decode": "#8a5b9a"}
PANELS = [("resident memory, MiB", "resident_bytes", 1 / 2**20), ("descriptors", "descriptors", 1), ("threads", "threads", 1)]


def main() -> None:
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    with open(sys.argv[1], encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    end = max(float(row["seconds"]) for row in rows) or 1
    body, y = [], TOP
    for title, column, scale in PANELS:
        top = max(float(row[column]) * scale for row in rows) * 1.15
        body.append(f'<text x="{LEFT}" y="{y - 8}" font-weight="bold">{title}</text>')
        body.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT}" fill="none" stroke="#bbb"/>')
        for part in (0, 0.5, 1):
            at = y + HEIGHT * (1 - part)
            body.append(f'<text x="{LEFT - 8}" y="{at + 4:.0f}" text-anchor="end">{top * part:.0f}</text>')
        labels = []
        for name, colour in COLOURS.items():
            points = [(float(row["seconds"]), float(row[column]) * scale) for row in rows if row["process"] == name]
            path = " ".join(f"{LEFT + (WIDTH - LEFT - RIGHT) * t / end:.1f},{y + HEIGHT * (1 - v / top):.1f}" for t, v in points)
            body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            # A slope that the scale hides is told in figures.
            words = f"{name} {points[0][1]:.4g} to {points[-1][1]:.4g}"
            labels.append([y + HEIGHT * (1 - points[-1][1] / top) + 4, words, colour])
        # Names that would lie on each other are moved apart.
        labels.sort()
        for one, two in zip(labels, labels[1:]):
            two[0] = max(two[0], one[0] + 14)
        for at, name, colour in labels:
            body.append(f'<text x="{WIDTH - RIGHT + 8}" y="{at:.0f}" fill="{colour}">{name}</text>')
        y += HEIGHT + GAP
    body.append(f'<text x="{(WIDTH + LEFT - RIGHT) / 2:.0f}" y="{y - GAP + 22}" text-anchor="middle">minutes: 0 to {end / 60:.1f}</text>')
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">'
           f'<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n")
    (root / "docs/soak.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
