#!/usr/bin/env bash
# ferry tokenize --chat.   tokenize_test.sh FERRY DEMO_MODEL
set -euo pipefail
ferry=$1 model=$2
fail() { echo "FAILED: $*"; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo '{"messages": [{"role": "user", "content": "Hi"}]}' > "$folder/request.json"
echo '{' > "$folder/broken.json"

# A format by name, one from the checkpoint, and the same prompt as a text.
named=$("$ferry" tokenize --model "$model" --ids --chat "$folder/request.json" --chat_format v3.1)
text=$("$ferry" tokenize --model "$model" --ids "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>")
[ "$named" = "$text" ] || fail "v3.1 gives $named, its text $text"
cp "$model"/{tokenizer.json,tokenizer_config.json,config.json} "$folder"
echo "{{'<｜User｜>'}}{{'<｜Assistant｜>'}}{{'</think>'}}{{'<｜end▁of▁sentence｜>'}}" > "$folder/chat_template.jinja"
own=$("$ferry" tokenize --model "$folder" --ids --chat "$folder/request.json")
[ "$own" = "$named" ] || fail "the checkpoint's own format gives $own"

refused() {  # words of the error, arguments...
  local words=$1 said
  shift
  said=$("$ferry" tokenize --model "$model" "$@" 2>&1) && fail "$* succeeded"
  [ "$(wc -l <<< "$said")" -eq 1 ] || fail "$* says: $said"
  grep -qF -- "$words" <<< "$said" || fail "$* says: $said"
}
refused "has no chat_template; --chat_format names a format" --chat "$folder/request.json"
refused "chat format \"v9\" is none of v2" --chat "$folder/request.json" --chat_format v9
refused "broken.json is not JSON" --chat "$folder/broken.json" --chat_format v3
refused "no such file" --chat "$folder/absent.json" --chat_format v3
refused "chat format v4 needs the token ｜DSML｜" --chat "$folder/request.json" --chat_format v4
refused "tokenize needs a text, or --chat"
refused "--chat" text --chat "$folder/request.json"
refused "--chat" text --chat_format v3
echo "passed"
