#!/usr/bin/env bash
# Checks a bundle of tools/gpu_bundle.sh on a machine with a Hopper GPU; prints "N passed, N failed".
#   ./gpu_check.sh [--quick]      --quick leaves the sanitizers out
cd "$(dirname "$0")" || exit 2
quick=false
[ "${1:-}" = "--quick" ] && quick=true
log=$(mktemp -d)
passed=0
failed=0

# check NAME COMMAND...: one check; its output is shown if it fails.
check() {
  local name=$1 start=$SECONDS
  shift
  if "$@" > "$log/$name" 2>&1; then
    passed=$((passed + 1))
    echo "ok      $name ($((SECONDS - start)) s)"
  else
    failed=$((failed + 1))
    echo "FAILED  $name"
    tail -n 30 "$log/$name"
  fi
}

# Every kernel against the CPU's operation; a run in which everything was skipped is a failure.
kernels() { bin/cuda_kernels_test "$@" && ! grep -q SKIPPED "$log/$current"; }
kernel_check() { current=$1; check "$1" kernels "${@:2}"; }

# Logits and texts against golden ones on every path, twice, the same to the last digit shown.
parity() {
  local runs=()
  for run in 1 2; do
    bin/ferry parity --model "$1" --device cuda --dtype float32 > "$log/run$run" || { cat "$log/run$run"; return 1; }
    runs+=("$(sed -E 's/[0-9.]+ ms//; s/(shm|tcp)[^ ]*//' "$log/run$run")")
  done
  cat "$log/run1"
  [ "${runs[0]}" = "${runs[1]}" ] || { diff "$log/run1" "$log/run2"; return 1; }
}

# What every transport must do, over the GPU's memory: staged, and as it is where the UCX at hand takes it.
transport() { FERRY_TEST_MEMORY=cuda "bin/$1" "${@:2}"; }

# Without a GPU to see, one sentence says so.
refusal() {
  local text
  text=$(CUDA_VISIBLE_DEVICES= bin/ferry parity --model "$1" --device cuda 2>&1) && return 1
  echo "$text"
  [ "$(wc -l <<< "$text")" -eq 1 ] && grep -q "no usable NVIDIA GPU" <<< "$text"
}

# A test has an allocation fail on purpose, which is no error of the program.
sanitizer() {
  local options=()
  [ "$1" = memcheck ] && options=(--report-api-errors no)
  compute-sanitizer --tool "$1" "${options[@]}" --error-exitcode 9 bin/cuda_kernels_test "${@:2}"
}

kernel_check kernels
models=()
for name in v2_lite v2_group v3 v3_odd v3_fp8 v32 v32_odd v32_native v4_odd v4_native; do
  models+=("golden/models/$name")
done
for model in "${models[@]}"; do check "parity-$(basename "$model")" parity "$model"; done
check transport transport transport_contract_test --gtest_filter='-Rdma*:UcxTransportTest*'
check transport-peers transport peer_process_test --gtest_filter='*_staged:*_shared:*_device'
check refusal refusal "${models[0]}"
if ! $quick; then
  if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do check "$tool" sanitizer "$tool" --gtest_filter="${FERRY_SANITIZER_FILTER:-*}"; done
  else
    echo "FAILED  sanitizers: no compute-sanitizer on the PATH"
    failed=$((failed + 2))
  fi
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
