#!/usr/bin/env python3
"""models/demo says what is true: its README's samples are what `ferry generate` writes, its figures those of
training.json, and its plot is drawn from it.  models/demo-sparse is as good as it within 2 %.

usage: demo_model_test.py FERRY ROOT
"""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

SAMPLE = re.compile(r"```sh\n(ferry generate .*?)\n```\n+```text\n(.*?)\n```", re.S)


def main() -> int:
    ferry, root = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    sys.path.insert(0, str(root / "tools"))
    sys.dont_write_bytecode = True
    from demo_model.loss_plot import loss_plot

    demo = root / "models/demo"
    readme = (demo / "README.md").read_text(encoding="utf-8")
    report = json.loads((demo / "training.json").read_text(encoding="utf-8"))
    problems = []

    samples = SAMPLE.findall(readme)
    if len(samples) != 3:
        problems.append(f"the README has {len(samples)} samples instead of 3")
    for command, expected in samples:
        result = subprocess.run([ferry] + shlex.split(command)[1:] + ["--quiet"], cwd=root, text=True,
                                encoding="utf-8", stdout=subprocess.PIPE, check=True)
        if result.stdout.strip() != expected.strip():
            problems.append(f"{command}\nwrote\n{result.stdout.strip()}\ninstead of\n{expected.strip()}")

    for name in ("held_out_bits_per_byte", "xz9_bits_per_byte"):
        if f"{report[name]:.3f}" not in readme:
            problems.append(f"the README does not state {name}, {report[name]:.3f}")
    if report["held_out_bits_per_byte"] >= report["xz9_bits_per_byte"]:
        problems.append("the model packs its held-out text worse than xz")
    if loss_plot(report) != (demo / "loss.svg").read_text(encoding="utf-8"):
        problems.append("loss.svg is not what tools/demo_model/loss_plot.py draws from training.json")

    sparse = json.loads((root / "models/demo-sparse/training.json").read_text(encoding="utf-8"))
    sparse_readme = (root / "models/demo-sparse/README.md").read_text(encoding="utf-8")
    for name in ("held_out_bits_per_byte", "before_finetuning", "untrained_indexer"):
        if f"{sparse[name]:.3f}" not in sparse_readme:
            problems.append(f"the sparse README does not state {name}, {sparse[name]:.3f}")
    if sparse["held_out_bits_per_byte"] > 1.02 * report["held_out_bits_per_byte"]:
        problems.append("the sparse model loses more than 2 % to the dense one")

    print("\n\n".join(problems) or f"{len(samples)} samples, the figures and the plot agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
