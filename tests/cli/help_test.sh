#!/usr/bin/env bash
# What a program says of itself and of its flags.   help_test.sh DIRECTORY_OF_BINARIES MODEL
set -euo pipefail
bin=$1
model=$2
fail() { echo "FAILED: $*"; exit 1; }

for program in ferry ferry-router ferry-prefill ferry-decode; do
  help=$("$bin/$program" --help) || fail "$program --help"
  grep -q "^Usage: $program \[OPTIONS\]" <<< "$help" || fail "$program: usage line in: $help"
  version=$("$bin/$program" --version) || fail "$program --version"
  [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "$program --version says $version"
done
for program in "ferry generate" ferry-router ferry-prefill ferry-decode; do
  said=$("$bin"/$program --nonsense=1 2>&1) && fail "$program --nonsense=1 succeeded"
  [ "$(wc -l <<< "$said")" -eq 1 ] || fail "$program --nonsense=1 says: $said"
  grep -q "^${program%% *}: .*--nonsense=1" <<< "$said" || fail "$program --nonsense=1 says: $said"
done
commands=$("$bin/ferry" --help | sed -n '/^Subcommands:/,$p' | awk '/^  [a-z]/ { print $1 }')
for command in $commands; do
  help=$("$bin/ferry" "$command" --help) || fail "$command --help"
  grep -q "^Usage: ferry $command " <<< "$help" || fail "$command: usage line in: $help"
done
[ "$(wc -w <<< "$commands")" -ge 7 ] || fail "sub-commands: $commands"

# Without a command: the help, on stderr, and no success.
if said=$("$bin/ferry" 2>&1 > /dev/null); then fail "ferry alone succeeded"; fi
grep -q "^Subcommands:" <<< "$said" || fail "ferry alone says: $said"

# A wrong command is named.
said=$("$bin/ferry" nonsense 2>&1) && fail "ferry nonsense succeeded"
grep -q "^ferry: .*nonsense" <<< "$said" || fail "ferry nonsense says: $said"
# So is an address that is none, before anything is called.
for command in "generate --prompt x" bench health; do
  for address in "" : 127.0.0.1 127.0.0.1:99999 127.0.0.1:-1; do
    said=$("$bin/ferry" $command --address "$address" 2>&1) && fail "$command at '$address' succeeded"
    grep -q "^ferry: --address: \"$address\" is not host:port" <<< "$said" ||
      fail "$command at '$address' says: $said"
  done
done

# An error is one line: none of gRPC's own.  Here a key stands where a certificate belongs.
not_a_certificate=$(mktemp)
trap 'rm -f "$not_a_certificate"' EXIT
printf -- '-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n' > "$not_a_certificate"
for command in "generate --prompt x" "bench --ready_timeout_s 1"; do
  said=$("$bin/ferry" $command --address 127.0.0.1:1 --tls_ca "$not_a_certificate" 2>&1) &&
    fail "$command succeeded"
  [ "$(wc -l <<< "$said")" -eq 1 ] || fail "$command says: $said"
  grep -q "^ferry: .*--tls_ca" <<< "$said" || fail "$command says: $said"
done

# What cannot be written is no success.
for command in "tokenize x" "generate --prompt x --max_tokens 1 --num_threads 1 --quiet"; do
  said=$("$bin/ferry" $command --model "$model" 2>&1 > /dev/full) && fail "$command into a full disk"
  grep -q "^ferry: standard output cannot be written" <<< "$said" || fail "$command says: $said"
done
# Numbers that the flag cannot hold.
for flag in --seed=-1 --seed=18446744073709551616 --num_threads=100000 --num_threads=-1 \
  --max_model_len=-5; do
  said=$("$bin/ferry" generate --model "$model" --prompt x --max_tokens 1 $flag 2>&1) &&
    fail "generate $flag succeeded"
  name=${flag%%=*}
  grep -q "^ferry: .*${name#--}.*${flag#*=}" <<< "$said" || fail "generate $flag says: $said"
done
said=$("$bin/ferry" generate --address 127.0.0.1:1 2>&1) && fail "generate without a prompt succeeded"
grep -q "^ferry: no prompt: give --prompt" <<< "$said" || fail "generate without a prompt says: $said"
said=$("$bin/ferry" bench --address 127.0.0.1:1 --ready_timeout_s nan 2>&1) && fail "nan succeeded"
grep -q "^ferry: --ready_timeout_s" <<< "$said" || fail "bench --ready_timeout_s nan says: $said"
for flag in ready_timeout_s request_timeout_s stall_timeout_s; do
  for seconds in 0 -1; do
    said=$("$bin/ferry" bench --address 127.0.0.1:1 --$flag=$seconds 2>&1) && fail "$flag=$seconds succeeded"
    grep -q "^ferry: --$flag: .*$seconds" <<< "$said" || fail "bench --$flag=$seconds says: $said"
  done
done
# Of a load, before the server is asked for.
for flag in --request_rate=nan --request_rate=-1 --request_rate=inf --slo_ttft_ms=nan --slo_e2e_ms=x \
  --input_tokens=5:3 --output_tokens=0; do
  said=$("$bin/ferry" bench --address 127.0.0.1:1 $flag 2>&1) && fail "bench $flag succeeded"
  grep -q "^ferry: .*${flag#*=} is no" <<< "$said" || fail "bench $flag says: $said"
done
for delta in nan -1; do
  said=$("$bin/ferry" parity --model "$model" --max_mean_delta=$delta 2>&1) && fail "delta $delta"
  grep -q "^ferry: --max_mean_delta: $delta is not a number" <<< "$said" || fail "parity says: $said"
done
echo "passed"
