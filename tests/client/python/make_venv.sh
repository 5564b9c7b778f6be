#!/usr/bin/env bash
# A virtual environment with the Python package, installed as users install it, and what its tests need.
# The packages stay from one run to the next; ours is installed anew.   usage: make_venv.sh VENV_DIR SOURCE_DIR
set -euo pipefail
venv=$1 source=$2
wanted=$source/tests/client/python/requirements.txt
if ! cmp -s "$wanted" "$venv/made_of.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q -r "$wanted"
  cp "$wanted" "$venv/made_of.txt"
fi
"$venv/bin/pip" install -q --force-reinstall --no-deps "$source/client/python"
