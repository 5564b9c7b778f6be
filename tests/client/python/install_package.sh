#!/usr/bin/env bash
# A virtual environment with the Python package, installed as users install it, and what its tests need.
# The packages stay from one run to the next; ours is installed anew.   usage: install_package.sh VENV_DIR SOURCE_DIR
set -euo pipefail
venv=$1 source=$2
"$source/tests/make_venv.sh" "$venv" "$source/tests/client/python/requirements.txt"
# From a copy of what it is built from: pip builds beside the sources, which other tests read meanwhile.
rm -rf "$venv/tree"
mkdir -p "$venv/tree/client"
cp -r "$source/client/python" "$venv/tree/client/"
cp -r "$source/proto" "$venv/tree/"
rm -rf "$venv/tree/client/python/build"
"$venv/bin/pip" install -q --force-reinstall --no-deps "$venv/tree/client/python"
