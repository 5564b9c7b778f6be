#!/usr/bin/env python3
"""Draws a training.json's loss curves as an SVG.

usage: loss_plot.py TRAINING_JSON > loss.svg
"""
import json
import math
import sys

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 118, 44, 48
TRAINING, HELD_OUT, GRID, TEXT = "#4a90c2", "#c0392b", "#e3e3e3", "#444444"


def loss_plot(report: dict) -> str:
    """Training loss against the held-out text's, in nats a token, over the steps."""
    curve, steps = report["curve"], report["steps"]
    held_out = report["held_out_curve"][1:]  # the first is of the untrained model
    values = [value for _, value in curve + held_out]
    low, high = math.floor(2 * min(values)) / 2, math.ceil(2 * max(values)) / 2

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def line(x1, y1, x2, y2) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{GRID}"/>'

    def text(at_x, at_y, words, anchor="start", fill=TEXT, extra="") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{fill}"{extra}>{words}</text>'

    def polyline(rows, colour, width) -> str:
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in rows)
        return (f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round" '
                f'points="{points}"/>')

    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             text(LEFT, 26, "Loss of the demo model", extra=' font-size="15" font-weight="bold"'),
             text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "training step", "middle"),
             text(16, middle, "nats a token", "middle", extra=f' transform="rotate(-90 16 {middle:.1f})"')]
    for value in range(math.ceil(low), math.floor(high) + 1):
        parts += [line(LEFT, y(value), WIDTH - RIGHT, y(value)), text(LEFT - 8, y(value) + 4, value, "end")]
    for step in range(0, steps + 1, max(1, steps // 8)):
        parts += [line(x(step), HEIGHT - BOTTOM, x(step), HEIGHT - BOTTOM + 5),
                  text(x(step), HEIGHT - BOTTOM + 18, step, "middle")]
    parts += [polyline(curve, TRAINING, 1.5), polyline(held_out, HELD_OUT, 2)]
    parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" fill="{HELD_OUT}"/>' for step, value in held_out]
    right = WIDTH - RIGHT + 8
    last, last_held_out = sum(value for _, value in curve[-10:]) / 10, held_out[-1][1]
    parts += [text(right, y(last_held_out) - 4, f"held out {last_held_out:.2f}", fill=HELD_OUT),
              text(right, y(last_held_out) + 10, f'{report["held_out_bits_per_byte"]:.3f} bits/byte', fill=HELD_OUT),
              text(right, y(last) + 4, f"training {last:.2f},", fill=TRAINING),
              text(right, y(last) + 18, f'with dropout {report["dropout"]}', fill=TRAINING)]
    body = "\n".join(parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n')


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(loss_plot(json.load(file)), end="")
