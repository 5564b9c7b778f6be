#!/usr/bin/env bash
# Installs what is missing, builds, and runs a whole system on this machine: router, prefill worker and
# decode worker, a few prompts, what happened to each, and a clean end.
#   ./tools/demo.sh [flags of `ferry demo`]     e.g. --prompt "Once upon a time" --decode 2 --verbose
set -euo pipefail
cd "$(dirname "$0")/.."

./tools/install_dependencies.sh
cmake --preset release > /dev/null
cmake --build --preset release --target ferry ferry-router ferry-prefill ferry-decode

# The model that ships with the tree, or one of random weights.
model=models/demo
if [ ! -f "$model/model.safetensors" ]; then
  model=build/tiny_checkpoint
  ./tools/make_tiny_checkpoint.py --out "$model"
fi
exec build/release/bin/ferry demo --model "$model" "$@"
