"""Draws decode steps as `engine_speed --timeline` recorded them; used by the reports of kernels and of sparse models.

A step's kernels are [name, start, end] in microseconds since the step's start, in order of their start.  A kernel
begins while the one before it still runs, to send for its weights early, so that each has a lane of its own.
"""
import json
import re
from xml.sax.saxutils import escape

COLOURS = ["#1f6fb4", "#c9a227", "#8a9a5b", "#7a4f8f", "#b4562a", "#3f8f8a", "#9db8cf", "#d08fa8", "#5f6b7a", "#a0a030"]
WIDTH, LEFT, LABEL, LANE = 900, 20, 170, 17


def rounded(kernels: list) -> list:
    return [[name, round(begin, 2), round(end, 2)] for name, begin, end in kernels]


def dumps(data: dict) -> str:
    """JSON with a kernel a line."""
    text = json.dumps(data, indent=1) + "\n"
    return re.sub(r'\[\s+("[^"]*"),\s+([\d.]+),\s+([\d.]+)\s+\]', r"[\1, \2, \3]", text)


def layers(kernels: list, num_layers: int) -> list:
    """The step cut where the first kernel that runs once a layer starts: (names, kernels) a layer, the last one aside."""
    counts = {}
    for name, _, _ in kernels:
        counts[name] = counts.get(name, 0) + 1
    mark = next((name for name, _, _ in kernels if counts[name] == num_layers), None)
    starts = [i for i, (name, _, _) in enumerate(kernels) if name == mark]
    return [kernels[a:b] for a, b in zip(starts, starts[1:])]


def exposed(kernels: list) -> list:
    """How much later the work is done with each kernel than with all before it: (name, us), which add up to the whole."""
    done, out = kernels[0][1], []
    for name, _, end in kernels:
        out.append((name, max(0.0, end - done)))
        done = max(done, end)
    return out


def colours(kernels: list) -> dict:
    sums = {}
    for name, us in exposed(kernels):
        sums[name] = sums.get(name, 0.0) + us
    ranked = sorted(sums, key=lambda name: -sums[name])
    return {name: COLOURS[i] if i < len(COLOURS) else "#bbb" for i, name in enumerate(ranked)}


def _layer(title: str, kernels: list, colour: dict, top: float) -> tuple:
    start = kernels[0][1]
    scale = (WIDTH - LEFT - LABEL - 60) / (max(end for _, _, end in kernels) - start)
    body = [f'<text x="{LEFT}" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    y = top + 20
    for name, begin, end in kernels:
        x = LEFT + LABEL + (begin - start) * scale
        body.append(f'<text x="{LEFT + LABEL - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
                    f'<rect x="{x:.1f}" y="{y}" width="{(end - begin) * scale:.1f}" height="{LANE - 4}" fill="{colour[name]}"/>'
                    f'<text x="{x + (end - begin) * scale + 4:.1f}" y="{y + 11}" fill="#555">{end - begin:.1f}</text>')
        y += LANE
    return body, y + 14


def draw(steps: list) -> str:
    """One picture of several steps: (title, kernels, [(title of a layer, its kernels)])."""
    body, y = [], 10.0
    for title, kernels, chosen in steps:
        colour = colours(kernels)
        scale = (WIDTH - 2 * LEFT) / max(end for _, _, end in kernels)
        body.append(f'<text x="{LEFT}" y="{y + 12}" font-weight="bold">{escape(title)}</text>')
        done = 0.0
        for name, begin, end in kernels:
            if end > done:
                body.append(f'<g><title>{escape(name)}: {begin:.1f} to {end:.1f} us</title><rect x="{LEFT + max(begin, done) * scale:.2f}" y="{y + 20}" '
                            f'width="{(end - max(begin, done)) * scale:.2f}" height="26" fill="{colour[name]}"/></g>')
                done = end
        y += 60
        for layer_title, layer in chosen:
            lines, y = _layer(layer_title, layer, colour, y)
            body += lines
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n")


def table(kernels: list) -> list:
    """Markdown: by name, launches, time from start to end, and what each adds to the step."""
    runs, adds = {}, {}
    for (name, begin, end), (_, us) in zip(kernels, exposed(kernels)):
        count, total = runs.get(name, (0, 0.0))
        runs[name] = (count + 1, total + end - begin)
        adds[name] = adds.get(name, 0.0) + us
    whole = sum(adds.values())
    lines = ["| kernel | launches | start to end, us | adds to the step, us | share |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {runs[name][0]} | {runs[name][1]:.1f} | {adds[name]:.1f} | {adds[name] / whole:.0%} |"
              for name in sorted(adds, key=lambda name: -adds[name])]
    return lines


def kinds(kernels: list, num_layers: int) -> list:
    """A layer of each kind (by the kernels it runs), the middle one of its kind: (title, kernels)."""
    by_kind = {}
    for number, layer in enumerate(layers(kernels, num_layers)):
        by_kind.setdefault(tuple(name for name, _, _ in layer), []).append((number, layer))
    chosen = []
    for of_kind in by_kind.values():
        number, layer = of_kind[len(of_kind) // 2]
        us = max(end for _, _, end in layer) - layer[0][1]
        chosen.append((f"from layer {number} on: {us:.1f} us ({len(of_kind)} of this kind)", layer))
    return chosen
