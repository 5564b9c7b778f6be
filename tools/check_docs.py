#!/usr/bin/env python3
"""Fails where docs/life_of_a_request.md names a file that is not there, or a name that its file does not hold.

usage: check_docs.py ROOT

A code place is `folder/file.h`, optionally followed by (`Name`, `Other`): each Name, without its class, must occur in the
file or in its header.  Other `Names` in back quotes must occur somewhere in the tree's sources.
"""
import pathlib
import re
import sys

PLACE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:h|cc|py|proto))`(?:\s*\(((?:`[^`]+`(?:,\s*)?)+)\))?")
NAME = re.compile(r"`([A-Za-z_][A-Za-z_0-9:]*)`")


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    text = (root / "docs/life_of_a_request.md").read_text(encoding="utf-8")
    problems, places, names = [], 0, 0
    for path, listed in PLACE.findall(text):
        places += 1
        file = root / path
        if not file.exists():
            problems.append(f"no file {path}")
            continue
        source = file.read_text(encoding="utf-8")
        header = file.with_suffix(".h")
        if header.exists():
            source += header.read_text(encoding="utf-8")
        for name in NAME.findall(listed):
            names += 1
            if name.split("::")[-1] not in source:
                problems.append(f"{path} has no {name}")
    everything = "".join(
        p.read_text(encoding="utf-8") for folder in root.iterdir() if folder.is_dir() and folder.name not in {"build", ".git"}
        for p in folder.rglob("*") if p.suffix in {".h", ".cc", ".proto", ".py"})
    for name in NAME.findall(text):
        names += 1
        if name.split("::")[-1] not in everything:
            problems.append(f"nothing in the tree is called {name}")
    for problem in problems:
        print(problem)
    print(f"{places} places and {names} names read, {len(problems)} wrong")
    return 1 if problems or places == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
