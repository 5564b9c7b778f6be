#!/usr/bin/env bash
# run_fuzzer.sh corpus|fuzz FUZZER CORPUS: replays a corpus, or looks for new inputs for FERRY_FUZZ_SECONDS.
set -euo pipefail
kind=$1 fuzzer=$2 corpus=$3
# One input may take 10 s and 1 GiB, sanitizers included.
limits=(-timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=1024 -print_final_stats=1)
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT
if [ "$kind" = corpus ]; then
  "$fuzzer" "${limits[@]}" -runs=0 -artifact_prefix="$found/" "$corpus"
else
  "$fuzzer" "${limits[@]}" -max_total_time="${FERRY_FUZZ_SECONDS:-5}" -artifact_prefix="$found/" "$found" "$corpus" || {
    status=$?
    # The input that failed, so that it can be added to the corpus.
    for input in "$found"/{crash,timeout,oom,leak}-*; do
      [ -e "$input" ] && { echo "$(basename "$input"), base64:"; base64 "$input"; }
    done
    exit "$status"
  }
fi
