#!/usr/bin/env bash
# Installs what is missing, builds and runs the tests.
#   ./tools/test.sh           fast and integration tests, release build; fuzzers for 5 s each
#   ./tools/test.sh --all     also the long labels (chaos, soak) and the sanitizer builds (label sanitizer); fuzzers for 60 s
set -euo pipefail
cd "$(dirname "$0")/.."

all=false
case "${1:-}" in
  --all) all=true ;;
  "") ;;
  *) echo "usage: $0 [--all]" >&2; exit 2 ;;
esac

./tools/install_dependencies.sh

run_preset() {  # preset, ctest arguments...
  local preset=$1
  shift
  cmake --preset "$preset" > "/dev/null"
  cmake --build --preset "$preset"
  ctest --test-dir "build/$preset" --output-on-failure -j "$(nproc)" "$@"
}

if $all; then
  run_preset release -LE gpu
  run_preset debug -LE 'gpu|soak'
  run_preset tsan -LE 'gpu|soak'
  FERRY_FUZZ_SECONDS=60 run_preset fuzz -L fuzz
else
  run_preset release -LE 'gpu|chaos|soak'
  run_preset fuzz -L fuzz
fi
