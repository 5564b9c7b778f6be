#!/usr/bin/env bash
# Takes the numbers of tools/sparse_report.py on a machine with a bundle of tools/gpu_bundle.sh, V3.2 and V4 on one GPU:
#   ./gpu_sparse.sh FOLDER [MODEL...]       both models, unless they are named
# Then, in the tree: tools/sparse_report.py --take GPU REVISION FOLDER
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 FOLDER [MODEL...]" >&2; exit 2; }
out=$(realpath -m "$1")
shift
[ $# -gt 0 ] || set -- deepseek-v3.2-4l deepseek-v4-flash-8l
mkdir -p "$out"
cd "$(dirname "$0")"

for rows in "sparse b=" "logits " "top_k "; do
  bin/cuda_kernels "$rows" --json "$out/kernels-${rows%% *}.json"
done
for model in "$@"; do
  speed=(bin/engine_speed --config "models/$model" --device cuda --kv_cache_dtype fp8)
  "${speed[@]}" --batch 1 --prompt 1000 --prompt 8000 --prompt 64000 \
    --context 1024 --context 4096 --context 32768 --context 131072 --output 50 --json "$out/engine-$model-1.json" \
    --timeline "$out/timeline-$model.json"
  "${speed[@]}" --batch 32 --context 1024 --context 32768 --output 50 --json "$out/engine-$model-32.json"
  ./gpu_serving.py --bin bin --model "models/$model" --layout shared --kv_cache_dtype fp8 --max_model_len 70000 --max_seqs 32 \
    --point 1000:32:4:1 --point 8000:32:4:1 --point 64000:32:2:1 --point 32000:100:1:1 --point 1000:100:32:32 --out "$out/serving-$model.json"
done
