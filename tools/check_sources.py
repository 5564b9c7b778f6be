#!/usr/bin/env python3
"""Fails on a source file that no CMakeLists.txt above it names: it would never be built, or tested.

usage: check_sources.py ROOT
"""
import pathlib
import re
import sys

SUFFIXES = {".cc", ".cu"}


def main() -> int:
    root = pathlib.Path(sys.argv[1]).resolve()
    named = {}  # by folder: the words of its CMakeLists.txt and of those above it

    def words(folder):
        if folder not in named:
            own = folder / "CMakeLists.txt"
            above = words(folder.parent) if folder != root else set()
            named[folder] = above | set(re.findall(r"\w+", own.read_text() if own.exists() else ""))
        return named[folder]

    def is_built(path):
        # Lists of like ones leave the suffix to a loop.
        return {path.stem, re.sub("_(test|fuzzer)$", "", path.stem)} & words(path.parent)

    forgotten = [path.relative_to(root) for folder in sorted(root.iterdir()) if folder.is_dir() and (folder / "CMakeLists.txt").exists()
                 for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and not is_built(path)]
    for path in forgotten:
        print(f"{path}: named by no CMakeLists.txt")
    return 1 if forgotten else 0


if __name__ == "__main__":
    sys.exit(main())
