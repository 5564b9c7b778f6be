#!/usr/bin/env bash
# The demo on a random checkpoint: every request's cache crosses, the text equals that of one engine, and all
# processes end.  usage: demo_test.sh BIN_DIR MODEL_DIR
set -euo pipefail
ferry=$1/ferry model=$2
prompt="A ferry carries people and their things across the water, from the shore where they are"

shown=$("$ferry" demo --model "$model" --prompt "$prompt" --prompt "Tomorrow" --temperature 0 --max_tokens 20)
echo "$shown"
[ "$(grep -c 'cache moved: [1-9][0-9]* bytes in [1-9][0-9]* blocks over [a-z]' <<< "$shown")" = 2 ]
grep -q 'prefilled at prefill-0, decoded at decode-0' <<< "$shown"
grep -q 'all processes have ended' <<< "$shown"

alone=$("$ferry" generate --model "$model" --prompt "$prompt" --temperature 0 --max_tokens 20 --quiet; echo .)
case "$shown" in
  *"> $prompt"$'\n'"${alone%.}"*) ;;
  *) echo "the demo's text is not that of one engine:"; echo "$alone"; exit 1 ;;
esac
