#!/usr/bin/env python3
"""Unpacks the compressed golden data of the tests: unpack_golden.py SOURCE DESTINATION.

Every *.xz below SOURCE is decompressed, every other file copied; files that are up to date stay.
"""
import lzma
import pathlib
import shutil
import sys


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: unpack_golden.py SOURCE DESTINATION")
    source, destination = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        relative = path.relative_to(source)
        target = destination / (relative.with_suffix("") if path.suffix == ".xz" else relative)
        if target.exists() and target.stat().st_mtime >= path.stat().st_mtime:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        if path.suffix == ".xz":
            with lzma.open(path) as packed, open(partial, "wb") as out:
                shutil.copyfileobj(packed, out)
        else:
            shutil.copyfile(path, partial)
        partial.replace(target)


if __name__ == "__main__":
    main()
