#!/usr/bin/env python3
"""Writes docs/sparse.md and its pictures from docs/sparse.json: V3.2 and V4 on one GPU.

usage: sparse_report.py [ROOT]
       sparse_report.py --take GPU REVISION FOLDER    makes docs/sparse.json of what tools/gpu_sparse.sh left in FOLDER first

Floors of steps count what must be read once, at the speed of a copy: the weights of every layer and of the
experts that a batch is expected to choose, the head, and the cache's entries.  Floors of prompts count products
at the sustained bf16 rate.
"""
import datetime
import json
import math
import pathlib
import re
import sys
from xml.sax.saxutils import escape

import step_timeline

BYTES_PER_S, FLOPS = 4283e9, 690e12
MODELS = {"deepseek-v3.2-4l": "V3.2", "deepseek-v4-flash-8l": "V4-Flash"}
# Measured on the same GPU: microseconds by context of DeepGEMM's paged indexer logits, by batch of FlashMLA's sparse decodes.
LOGITS_PEER = {1: {4096: 3.56, 32768: 4.42, 131072: 8.08}, 64: {4096: 12.87, 32768: 74.64, 131072: 297.09}}
SPARSE_PEER = {"fp8": {1: 17.63, 2: 16.90, 4: 19.46, 8: 26.49, 16: 38.69, 32: 62.52, 64: 94.40, 128: 186.22},
               "V4": {1: 13.17, 2: 13.34, 8: 14.99, 32: 25.30, 64: 43.50, 128: 45.17}}
OURS, PEER, FLOOR = "#1f6fb4", "#c9a227", "#999"


def experts_hit(config: dict, batch: int) -> float:
    experts = config["n_routed_experts"]
    return experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** batch)


def layers_v32(config: dict):
    """(fp8 weights of attention, of it used in scores and values, of the MLP without routed experts, of an expert) a layer."""
    hidden, heads, rank, q_rank = (config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    index = config["index_n_heads"] * config["index_head_dim"]
    attention = hidden * (q_rank + rank + rope + config["index_head_dim"]) + q_rank * (heads * (nope + rope) + index) \
        + rank * heads * (nope + value) + heads * value * hidden + 2 * hidden * config["index_n_heads"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        if layer < config["first_k_dense_replace"]:
            yield attention + 3 * hidden * config["intermediate_size"], 0, "dense"
        else:
            yield attention + expert * config["n_shared_experts"] + 2 * config["n_routed_experts"] * hidden, expert, "moe"


def layers_v4(config: dict):
    hidden, heads, dim, rank = (config[key] for key in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"))
    o_rows = config["o_groups"] * config["o_lora_rank"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    for ratio in config["compress_ratios"][:config["num_hidden_layers"]]:
        weights = hidden * (rank + dim) + rank * heads * dim + o_rows * heads * dim // config["o_groups"] + o_rows * hidden
        if ratio == 4:
            weights += 2 * 2 * 2 * hidden * (dim + config["index_head_dim"]) + config["index_n_heads"] * (rank * config["index_head_dim"] + 2 * hidden)
        elif ratio:
            weights += 2 * 2 * hidden * dim
        weights += 2 * 4 * config["hc_mult"] * (2 + config["hc_mult"]) * config["hc_mult"] * hidden + expert + 2 * config["n_routed_experts"] * hidden
        yield weights, expert * 17 / 32, ratio


def step_floor_us(config: dict, batch: int, context: int) -> float:
    v4 = config["model_type"] == "deepseek_v4"
    total = 2.0 * config["vocab_size"] * config["hidden_size"]
    for weights, expert, kind in (layers_v4 if v4 else layers_v32)(config):
        total += weights + expert * experts_hit(config, batch)
        if not v4:
            cache = 132 * context + 656 * min(context, config["index_topk"])
        else:
            cache = 584 * min(context, config["sliding_window"])
            if kind == 4:
                cache += 132 * context / 4 + 584 * min(context / 4, config["index_topk"])
            elif kind:
                cache += 584 * context / kind
        total += batch * cache
    return total / BYTES_PER_S * 1e6


def pairs(tokens: int, most: float, ratio: int = 1) -> float:
    """Keys that all rows of a prompt attend, at most `most` each, one for `ratio` tokens."""
    full = min(tokens, most * ratio)
    return full * full / 2 / ratio + (tokens - full) * most


def prompt_floor_ms(config: dict, tokens: int) -> float:
    v4 = config["model_type"] == "deepseek_v4"
    flops = 0.0
    index = 2 * config["index_n_heads"] * config["index_head_dim"]
    heads = config["num_attention_heads"]
    for weights, expert, kind in (layers_v4 if v4 else layers_v32)(config):
        values = weights + config["num_experts_per_tok"] * (expert * 32 / 17 if v4 else expert)
        flops += 2 * values * tokens
        if not v4:
            flops += index * tokens * tokens / 2 + 2 * heads * (config["kv_lora_rank"] * 2 + 64) * pairs(tokens, config["index_topk"])
            continue
        attended = pairs(tokens, config["sliding_window"])
        if kind == 4:
            flops += index * tokens * tokens / 8
            attended += pairs(tokens, config["index_topk"], 4)
        elif kind:
            attended += tokens * tokens / 2 / kind
        flops += 4 * heads * config["head_dim"] * attended
    return flops / FLOPS * 1e3


def plot(title: str, unit: str, x_name: str, curves: list) -> str:
    """Lines over logarithmic axes; curves: (name, colour, dashed, {x: y})."""
    width, height, left, right, top, bottom = 860, 300, 60, 260, 30, 46
    xs = sorted({x for *_, points in curves for x in points})
    ys = [y for *_, points in curves for y in points.values()]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    span = math.log(xs[-1] / xs[0]) or 1
    place_x = lambda value: left + (width - left - right) * math.log(value / xs[0]) / span
    place_y = lambda value: top + (height - top - bottom) * (high - math.log10(value)) / ((high - low) or 1)
    body = [f'<text x="{left}" y="{top - 12}" font-weight="bold">{escape(title)}, {unit}</text>']
    for power in range(low, high + 1):
        y = place_y(10.0 ** power)
        body.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                    f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** power:g}</text>')
    for x in xs:
        body.append(f'<text x="{place_x(x):.1f}" y="{height - bottom + 18}" text-anchor="middle">{x if x < 1024 else f"{x // 1024}k"}</text>')
    body.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">{x_name}</text>')
    for number, (name, colour, dashed, points) in enumerate(curves):
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in sorted(points.items()))
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        body += [f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" fill="{colour}"><title>{escape(name)}: {y:.4g}</title></circle>'
                 for x, y in points.items()]
        key = top + 16 + 18 * number
        body.append(f'<line x1="{width - right + 8}" x2="{width - right + 30}" y1="{key}" y2="{key}" stroke="{colour}" stroke-width="2"{dash}/>'
                    f'<text x="{width - right + 36}" y="{key + 4}" font-size="10">{escape(name)}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">'
            f'<rect width="100%" height="100%" fill="white"/>' + "".join(body) + "</svg>\n")


def kernel_plots(rows: list) -> dict:
    logits, top_k, decode = {}, {}, {}
    for row in rows:
        if match := re.fullmatch(r"(logits|top_k) (\d+)x(\d+)", row["name"]):
            of = logits if match[1] == "logits" else top_k
            of.setdefault(int(match[2]), {})[int(match[3])] = row
        elif match := re.fullmatch(r"sparse b=(\d+) h=(128 fp8|64 V4)", row["name"]):
            decode.setdefault(match[2].split()[1], {})[int(match[1])] = row
    def curves(of: dict, label: str, peers: dict, peer: str) -> list:
        lines = []
        for number, (key, points) in enumerate(sorted(of.items())):
            lines.append((label.format(key), OURS, number > 0, {x: row["us"] for x, row in points.items()}))
            if key in peers:
                lines.append((f"{peer}, {label.format(key)}", PEER, number > 0, peers[key]))
            lines.append((f"floor, {label.format(key)}", FLOOR, number > 0, {x: row["floor_us"] for x, row in points.items()}))
        return lines
    return {
        "sparse_logits.svg": plot("Paged indexer logits, 64 heads of 128", "us", "context", curves(logits, "{} rows", LOGITS_PEER, "DeepGEMM")),
        "sparse_top_k.svg": plot("The best 2048 keys", "us", "context", curves(top_k, "{} rows", {}, "")),
        "sparse_decode.svg": plot("Sparse decode: V3.2 2048 keys, 128 heads; V4 128 + 512, 64 heads", "us", "batch",
                                  curves(decode, "{}", SPARSE_PEER, "FlashMLA")),
    }


def steps(rows: list, batch: int) -> dict:
    return {row["context"]: 1e3 * row["step_ms"] for row in rows if row.get("context") and row["batch"] == batch}


def step_plot(name: str, config: dict, rows: list) -> str:
    curves = []
    for number, batch in enumerate(sorted({row["batch"] for row in rows if row.get("context")})):
        points = steps(rows, batch)
        curves.append((f"batch {batch}", OURS, number > 0, points))
        curves.append((f"floor, batch {batch}", FLOOR, number > 0, {x: step_floor_us(config, batch, x) for x in points}))
    return plot(f"A decode step of {name}, {config['num_hidden_layers']} layers", "us", "context", curves)


def engine_section(name: str, config: dict, rows: list) -> list:
    lines = ["| prompt tokens | first token ms | floor | share of the floor | tokens/s |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        if row.get("prompt") and row["batch"] == 1:
            floor = prompt_floor_ms(config, row["prompt"])
            lines.append(f"| {row['prompt']} | {row['first_ms']:.1f} | {floor:.1f} | {floor / row['first_ms']:.0%} | {1e3 * row['prompt'] / row['first_ms']:.0f} |")
    lines += ["", "| batch | context | ms a step | on the device | floor | share of the floor | tokens/s |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        if row.get("context"):
            floor = step_floor_us(config, row["batch"], row["context"]) / 1e3
            lines.append(f"| {row['batch']} | {row['context']} | {row['step_ms']:.3f} | {row['device_step_ms']:.3f} | {floor:.3f} "
                         f"| {floor / row['step_ms']:.0%} | {1e3 * row['batch'] / row['step_ms']:.0f} |")
    one = steps(rows, 1)
    if 4096 in one and 131072 in one:
        ratio = one[131072] / one[4096]
        lines += ["", f"At batch 1 a step at 128k costs {ratio:.2f} x that at 4k{'' if name != 'V3.2' else ' (bar: below 1.25' + (')' if ratio < 1.25 else ', missed)')}."]
    return lines


def serving_section(runs: list) -> list:
    number = lambda value: f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
    ms = lambda numbers: " / ".join(number(numbers[key]) for key in ("mean", "median", "p99"))
    lines = ["| model | tokens in | out | requests at once | output tokens/s | TTFT ms | TPOT ms |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for run in runs:
        lines.append(f"| {MODELS[run['model']]} | {run['tokens_in']} | {run['tokens_out']} | {run['concurrency']} | {run['output_tokens_per_s']:.0f} "
                     f"| {ms(run['ttft_ms'])} | {ms(run['tpot_ms'])} |")
    return lines


def take(gpu: str, revision: str, folder: str) -> None:
    root = pathlib.Path(folder)
    load = lambda path: json.loads(path.read_text(encoding="utf-8"))
    pathlib.Path("docs/sparse.json").write_text(step_timeline.dumps({
        "gpu": gpu, "revision": revision, "date": datetime.date.today().isoformat(),
        "kernels": [row for path in sorted(root.glob("kernels-*.json")) for row in load(path)],
        "engine": {model: [row for path in sorted(root.glob(f"engine-{model}-*.json")) for row in load(path)] for model in MODELS},
        "serving": [run for model in MODELS for run in load(root / f"serving-{model}.json")],
        "timeline": {model: step_timeline.rounded(next(row["kernels"] for row in load(root / f"timeline-{model}.json") if row.get("context") == 4096))
                     for model in MODELS},
    }), encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--take"]:
        take(*sys.argv[2:5])
    root = pathlib.Path(sys.argv[1] if len(sys.argv) == 2 else ".")
    data = json.loads((root / "docs/sparse.json").read_text(encoding="utf-8"))
    lines = ["# V3.2 and V4 on one H200", "",
             f"Generated by `tools/sparse_report.py` from `docs/sparse.json`. {data['gpu']}, {data['date']}, revision {data['revision']}: `tools/gpu_sparse.sh`.",
             "Shapes and stored formats of DeepSeek-V3.2 with 4 layers (the first dense) and of DeepSeek-V4-Flash with 8 (2 of the window alone, 3 CSA,",
             "3 HCA), random weights, fp8 caches. Floors: what a step must read at the speed of a copy (4283 GB/s), a prompt's products at 690 TFLOP/s."]
    pictures = kernel_plots(data["kernels"])
    for model, name in MODELS.items():
        config = json.loads((root / f"bench/models/{model}/config.json").read_text(encoding="utf-8"))
        short = name.lower().split("-")[0].replace(".", "")
        rows = data["engine"][model]
        pictures[f"sparse_step_{short}.svg"] = step_plot(name, config, rows)
        lines += ["", f"## {name}: the engine by itself", ""] + engine_section(name, config, rows)
        lines += ["", f"![A step over the context](sparse_step_{short}.svg)"]
        kernels = data["timeline"][model]
        kinds = step_timeline.kinds(kernels, config["num_hidden_layers"])
        pictures[f"sparse_timeline_{short}.svg"] = step_timeline.draw([(f"A decode step of {name}", kernels, kinds)])
        lines += ["", "One step at batch 1 and a context of 4096 as it runs, and a layer of each kind (recorded by CUPTI, which costs some of the time shown;",
                  "a kernel starts early and sends for its weights, so what it adds to the step is less than its own time):", "",
                  f"![A step's kernels](sparse_timeline_{short}.svg)", ""] + step_timeline.table(kernels)
    lines += ["", "## Served", "", "A router, a prefill and a decode worker that share the GPU, and `ferry bench` over gRPC; milliseconds are mean / median / p99.", ""]
    lines += serving_section(data["serving"])
    lines += ["", "## Kernels over the context", ""] + [f"![{name}]({name})\n" for name in pictures if "step" not in name and "timeline" not in name]
    (root / "docs/sparse.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    for name, svg in pictures.items():
        (root / "docs" / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
