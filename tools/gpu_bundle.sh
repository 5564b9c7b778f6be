#!/usr/bin/env bash
# Packs what a GPU machine needs to check a build of this tree, with every library it uses:
#   ./tools/gpu_bundle.sh BUILD_DIR OUT.tar.gz [UCX_DIR]      (a build of the cuda preset)
# UCX_DIR is an unpacked libucx-cu13 of PyPI (pip download --no-deps libucx-cu13; unzip): its UCX, which knows CUDA memory, goes
# in place of Debian's.
# There: tar xzf OUT.tar.gz && ./ferry-gpu/gpu_check.sh, and gpu_serving.py --bin bin --model models/deepseek-v2-lite
set -euo pipefail
[ $# -eq 2 ] || [ $# -eq 3 ] || { echo "usage: $0 BUILD_DIR OUT.tar.gz [UCX_DIR]" >&2; exit 2; }
for tool in patchelf strip; do
  command -v "$tool" > /dev/null || { echo "gpu_bundle: $tool is not installed: apt-get install patchelf binutils" >&2; exit 1; }
done
build=$(realpath "$1")
out=$(realpath -m "$2")
tree=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bundle=$work/ferry-gpu
mkdir -p "$bundle/bin" "$bundle/lib"

programs=(ferry ferry-router ferry-prefill ferry-decode cuda_kernels_test cuda_kernels engine_speed
  transport_contract_test peer_process_test kv_transfer_peer transfer_bandwidth)
for program in "${programs[@]}"; do
  [ -x "$build/bin/$program" ] || [ -n "$(find "$build" -name "$program" -type f -perm -u+x -print -quit)" ] || {
    echo "gpu_bundle: $program is not built in $build" >&2; exit 1; }
  cp "$(find "$build" -name "$program" -type f -perm -u+x -print -quit)" "$bundle/bin/"
done

# Everything but glibc, which the GPU machine's own loader insists on.
glibc='ld-linux|libc\.so|libm\.so|libpthread|libdl\.so|librt\.so|libresolv|linux-vdso'
ldd "$bundle"/bin/* | awk '/=> \//{print $3}' | sort -u | grep -vE "/($glibc)" | xargs -I{} cp -L {} "$bundle/lib/"
# UCX opens its modules from lib/ucx beside its own library.
ucx=$(dirname "$(ldd "$bundle/bin/ferry" | awk '/libucs/{print $3}')")/ucx
[ -d "$ucx" ] && mkdir "$bundle/lib/ucx" && cp -L "$ucx"/libuct_cma.so* "$bundle/lib/ucx/"
if [ $# -eq 3 ]; then
  wheel=$(realpath "$3")/libucx
  [ -e "$wheel/lib/ucx/libuct_cuda.so.0" ] || { echo "gpu_bundle: $3 has no libucx/lib/ucx/libuct_cuda.so.0" >&2; exit 1; }
  rm -f "$bundle"/lib/libuc[pstm].so* "$bundle"/lib/ucx/*
  cp -L "$wheel"/lib/libuc[pstm].so.0 "$wheel"/../libucx_cu13.libs/libcudart-*.so* "$bundle/lib/"
  for module in uct_cma uct_cuda ucm_cuda; do
    cp -L "$wheel/lib/ucx/lib$module.so.0" "$bundle/lib/ucx/"
    ln -s "lib$module.so.0" "$bundle/lib/ucx/lib$module.so"
  done
  strip "$bundle"/lib/libuc[pstm].so.0 "$bundle"/lib/ucx/*.so.0
fi

strip "$bundle"/bin/*
# DT_RPATH, so that it serves libraries of libraries and wins over LD_LIBRARY_PATH.
patchelf --force-rpath --set-rpath '$ORIGIN/../lib' "$bundle"/bin/*
find "$bundle/lib" -maxdepth 1 -type f -exec patchelf --force-rpath --set-rpath '$ORIGIN' {} +
find "$bundle/lib/ucx" -type f -exec patchelf --force-rpath --set-rpath '$ORIGIN/..' {} +

"$tree/tools/unpack_golden.py" "$tree/tests/golden" "$bundle/golden"
cp "$tree/tools/gpu_check.sh" "$tree/tools/gpu_serving.py" "$tree/tools/gpu_sparse.sh" "$tree/tools/transformers_generation.py" "$bundle/"
cp -r "$tree/bench/models" "$bundle/models"
tar czf "$out" -C "$work" ferry-gpu
echo "$out: $(du -h "$out" | cut -f1)"
