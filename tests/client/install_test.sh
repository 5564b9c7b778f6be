#!/usr/bin/env bash
# The installed SDK: only public headers, nothing that tells where it was built; a program outside of the tree finds it as a
# CMake package, also after the prefix has moved, and talks to a running system.
# usage: install_test.sh BUILD_DIR SOURCE_DIR VERSION [CXX_FLAGS]
set -euo pipefail
build=$1 source=$2 version=$3 cxx_flags=${4:-}
dir=$(mktemp -d)
serve=
trap '[ -z "$serve" ] || kill -9 $serve 2>/dev/null || true; rm -r "$dir"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

[ "$("$build/bin/ferry" --version)" = "$version" ] || fail "the package is $version, ferry is $("$build/bin/ferry" --version)"
cmake --install "$build" --prefix "$dir/first" --component sdk > "$dir/install.log"
headers=$(cd "$dir/first" && find . -name '*.h' | sort | xargs)
[ "$headers" = "./include/ferry/ferry_client.h ./include/ferry/v1/inference.pb.h" ] || fail "headers: $headers"
for path in "$build" "$source" "$dir/first"; do
  ! grep -rlF -- "$path" "$dir/first" || fail "the files above name $path"
done
mv "$dir/first" "$dir/moved"

configure() { # version wanted, build directory
  cmake -S "$source/tests/client/consumer" -B "$2" -G Ninja -DCMAKE_PREFIX_PATH="$dir/moved" -DFERRY_WANTED_VERSION="$1" \
    -DCMAKE_CXX_FLAGS="$cxx_flags" > "$2.log" 2>&1
}
configure "$version" "$dir/build" || { cat "$dir/build.log"; fail "configure"; }
grep -q "Ferry_DIR.*=$dir/moved/" "$dir/build/CMakeCache.txt" || fail "another Ferry was found"
for other in 0.0.9 99.0; do
  if configure "$other" "$dir/wrong"; then fail "version $other was found"; fi
  grep -q 'FerryConfig.cmake, version: ' "$dir/wrong.log" || { cat "$dir/wrong.log"; fail "version $other"; }
done
cmake --build "$dir/build" > "$dir/build.log" 2>&1 || { cat "$dir/build.log"; fail "build"; }

exec 3< <(exec "$build/bin/ferry" serve --model "$source/models/demo" --port 0 --log_file "$dir/log")
serve=$!
read -r -u 3 line || { cat "$dir/log"; exit 1; }
prompt="It is a truth universally acknowledged"
answer=$("$dir/build/consumer" "${line##* }" "$prompt"; echo .)
alone=$("$build/bin/ferry" generate --model "$source/models/demo" --prompt "$prompt" --max_tokens 24 --temperature 0 --quiet; echo .)
[ "${answer%.}" = "$(printf '%s' "${alone%.}")" ] || fail "consumer: $answer, ferry generate: $alone"
kill -TERM $serve
cat <&3 # until it has ended
wait $serve
echo "passed"
