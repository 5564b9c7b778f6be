#!/usr/bin/env bash
# A Python environment of a test; made anew when its requirements change.
#   make_venv.sh DIR REQUIREMENTS [PIP_FLAG...]
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 DIR REQUIREMENTS [PIP_FLAG...]" >&2; exit 2; }
dir=$1 requirements=$2
shift 2
if cmp -s "$requirements" "$dir/requirements.txt"; then exit 0; fi
rm -rf "$dir"
/usr/bin/python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check --retries 10 "$@" --requirement "$requirements"
cp "$requirements" "$dir/requirements.txt"
