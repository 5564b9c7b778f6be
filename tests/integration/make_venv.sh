#!/usr/bin/env bash
# make_venv.sh DIR REQUIREMENTS: a Python environment with just these packages; made anew when they change.
set -euo pipefail
dir=$1 requirements=$2
if ! cmp -s "$requirements" "$dir/installed.txt"; then
  rm -rf "$dir"
  python3 -m venv "$dir"
  "$dir/bin/pip" install --quiet --no-deps --retries 10 --requirement "$requirements"
  cp "$requirements" "$dir/installed.txt"
fi
"$dir/bin/pip" check
