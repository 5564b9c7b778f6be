#!/usr/bin/env bash
# A checkpoint served by `ferry serve` answers as one engine does, its cache crosses, and SIGTERM ends everything.
# The prompt is longer than what the sparse demo model attends at a time (64 keys).  usage: serve_test.sh BIN_DIR MODEL_DIR
set -euo pipefail
ferry=$1/ferry model=$2
prompt="It was a truth universally acknowledged in the village that the ferry left at six, and that whoever came a minute
later had to wait for the next one; nobody was ever heard to complain of it, for the river was broad, the evening long, and
the old man who kept the landing had always something to tell to those who sat down beside him and looked at the water."
dir=$(mktemp -d)
exec 3< <(exec "$ferry" serve --model "$model" --port 0 --log_file "$dir/log" --router_flag=--local_prefill_tokens=0)
serve=$!
trap 'kill -9 $serve 2>/dev/null || true; rm -r "$dir"' EXIT

read -r -u 3 line || { cat "$dir/log"; exit 1; }
echo "$line"
[[ $line == "serving ${model##*/} at "* ]]
"$ferry" health --address "${line##* }" | grep -qx "readiness serving"
"$ferry" health --address "${line##* }" --service ferry.v1.Inference > "/dev/null"
said=$("$ferry" health --address "${line##* }" --service nobody 2>&1) && { echo "nobody serves"; exit 1; }
grep -q "^ferry: " <<< "$said" || { echo "health of nobody says: $said"; exit 1; }
said=$("$ferry" health --address 127.0.0.1:1 2>&1) && { echo "nobody is healthy"; exit 1; }
grep -q "^ferry: 127.0.0.1:1: " <<< "$said" || { echo "health of nobody's port says: $said"; exit 1; }
flags=(--prompt "$prompt" --max_tokens 60)
for sampling in "--temperature 0" "--temperature 0.7 --seed 5"; do
  # shellcheck disable=SC2086
  served=$("$ferry" generate --address "${line##* }" "${flags[@]}" $sampling 2> "$dir/summary"; echo .)
  alone=$("$ferry" generate --model "$model" "${flags[@]}" $sampling --quiet; echo .)
  cat "$dir/summary"
  [ "$served" = "$alone" ] || { printf 'served:\n%s\nalone:\n%s\n' "$served" "$alone"; exit 1; }
  grep -q '[1-9][0-9]* bytes in [1-9][0-9]* blocks' "$dir/summary"
done

kill -TERM $serve
cat <&3 # until it has ended
wait $serve
