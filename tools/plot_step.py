#!/usr/bin/env python3
"""Draws docs/step_timeline.svg: where the time of a layer goes, kernel after kernel, from the rows of bench/cuda_kernels.

usage: cuda_kernels --json rows.json && plot_step.py rows.json [ROOT]

A bar a step: a decode step of 1 and of 100 sequences, a prefill step of 1000 tokens.  Each is a mixture layer of
DeepSeek-V2-Lite, the kernels one after the other as they follow each other in the layer; below it what each must take
at the speed of memory or of the tensor cores.  Prints the same as a table for docs/performance.md.
"""
import json
import pathlib
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, BAR, FLOOR = 900, 20, 34, 12
COLOURS = ["#1f6fb4", "#9db8cf", "#c9a227", "#8a9a5b", "#7a4f8f", "#b4562a"]
# What a layer runs, by the names of the rows: (label, row).
STEPS = {
    "decode, 1 sequence": [("q_kv_a", "q_kv_a T=1"), ("rope, store, absorb", "rope, store, absorb T=1"),
                           ("attention", "decode b=1 h=16 keys=1024 W_UV"), ("o", "o T=1"), ("experts", "moe T=1")],
    "decode, 100 sequences": [("q_kv_a", "q_kv_a T=100"), ("rope, store, absorb", "rope, store, absorb T=100"),
                              ("attention", "decode b=100 h=16 keys=1050 W_UV"), ("o", "o T=100"),
                              ("experts", "moe T=100")],
    "prefill, 1000 tokens": [("q_kv_a", "q_kv_a T=1000"), ("kv_b", "kv_b T=1000"), ("attention", "prefill 1x1000 h=16"),
                             ("o", "o T=1000"), ("experts", "moe T=1000")],
}


def main() -> None:
    rows = {row["name"]: row for row in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))}
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    y, body = 10, []
    print("| step | kernel | us | floor | share |\n| --- | --- | --- | --- | --- |")
    for title, kernels in STEPS.items():
        missing = [row for _, row in kernels if row not in rows]
        if missing:
            sys.exit(f"{sys.argv[1]} has no row {missing[0]!r}, which {title!r} needs")
        layer = [(label, rows[row]["us"], rows[row]["floor_us"]) for label, row in kernels]
        total = sum(us for _, us, _ in layer)
        scale = (WIDTH - 2 * LEFT) / total
        body.append(f'<text x="{LEFT}" y="{y + 14}" font-weight="bold">{escape(title)}: {total:.1f} us a layer, '
                    f'{sum(floor for _, _, floor in layer):.1f} at the floor</text>')
        y += 22
        x = LEFT
        for i, (label, us, floor) in enumerate(layer):
            colour = COLOURS[i % len(COLOURS)]
            width = us * scale
            body.append(f'<g><title>{escape(label)}: {us:.1f} us, floor {floor:.1f}</title>'
                        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
                        f'<rect x="{x:.1f}" y="{y + BAR}" width="{floor * scale:.1f}" height="{FLOOR}" fill="{colour}" opacity="0.5"/></g>')
            if width > 7 * len(f"{us:.1f}") + 4:
                body.append(f'<text x="{x + 4:.1f}" y="{y + 22}" fill="white">{us:.1f}</text>')
            print(f"| {title if i == 0 else ''} | {label} | {us:.1f} | {floor:.1f} | {100 * us / total:.0f} % |")
            x += width
        y += BAR + FLOOR + 4
        x = LEFT
        for i, (label, _, _) in enumerate(layer):
            body.append(f'<rect x="{x}" y="{y + 3}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
                        f'<text x="{x + 14}" y="{y + 12}">{escape(label)}</text>')
            x += 34 + 7 * len(label)
        y += 30
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">'
           f'<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n")
    (root / "docs/step_timeline.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
