#!/usr/bin/env python3
"""Fails on an #include that points against the design's arrows (docs/architecture in the README).

usage: check_includes.py ROOT
"""
import pathlib
import re
import sys

ALLOWED = {
    "status": {"ferry"},
    "input_file": {"status"},
    "steady_time": set(),
    "curl_handle": set(),
    "block_hash": set(),
    "proto": set(),
    "pairing": {"status", "ferry"},
    "tokenizer": {"status", "input_file"},
    "chat": {"tokenizer", "status", "input_file"},
    "kernels": {"status"},
    "model": {"kernels", "status", "input_file"},
    "engine": {"model", "kernels", "block_hash", "status"},
    "kv_transfer": {"steady_time", "kernels", "status"},
    "tracing": {"curl_handle"},
    "service": {"steady_time", "status", "ferry", "input_file", "tracing"},
    "worker": {"steady_time", "engine", "model", "kernels", "kv_transfer", "block_hash", "tokenizer", "service", "status", "ferry"},
    "router": {"steady_time", "chat", "tokenizer", "block_hash", "pairing", "service", "status", "ferry", "input_file", "tracing"},
    "prefill_worker": {"steady_time", "tracing", "worker", "engine", "kv_transfer", "block_hash", "service", "status", "ferry", "model", "kernels"},
    "decode_worker": {"steady_time", "tracing", "worker", "pairing", "engine", "kv_transfer", "block_hash", "service", "status", "ferry", "model", "kernels"},
    "client": {"steady_time", "status", "ferry", "input_file"},
}
ANY = {"cli", "bench", "tests"}
# Below the services nobody may know gRPC; the router must not know CUDA.
FORBIDDEN = {
    folder: re.compile(r"^(grpc|grpcpp|google/protobuf|ferry/v1)/") for folder in ("kernels", "model", "engine", "kv_transfer", "tokenizer", "chat", "block_hash", "tracing")
}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]')


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    folders = set(ALLOWED) | ANY
    problems, files = [], 0
    for folder in sorted(folders):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cc", ".cu", ".cuh"}:
                continue
            files += 1
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                target = match.group(1)
                where = f"{path.relative_to(root)}:{number}"
                top = target.split("/")[0]
                if folder in FORBIDDEN and FORBIDDEN[folder].match(target):
                    problems.append(f"{where}: {folder} must not include {target}")
                if "cuda" in target and "kernels/cuda" not in str(path) and top not in folders and folder not in ANY:
                    problems.append(f"{where}: only kernels/cuda includes CUDA headers, not {target}")
                if folder in ANY or "/" not in target or top not in folders | {"ferry"}:
                    continue
                if top != folder and top not in ALLOWED[folder]:
                    problems.append(f"{where}: {folder} must not include {target}")
    for problem in problems:
        print(problem)
    print(f"{files} files read, {len(problems)} includes against the arrows")
    return 1 if problems or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
