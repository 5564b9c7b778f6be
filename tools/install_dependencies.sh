#!/usr/bin/env bash
# Installs the Debian 12 packages Ferry is built from.  Without root it prints the line to run.
set -euo pipefail

packages=(
  build-essential cmake ninja-build pkg-config ccache mold clang libclang-rt-14-dev python3 python3-venv xz-utils openssl
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev libssl-dev
  libucx-dev ucx-utils prometheus-cpp-dev nlohmann-json3-dev libpcre2-dev libspdlog-dev libcli11-dev
  libxxhash-dev libboost1.81-dev libgtest-dev libgmock-dev libbenchmark-dev libcurl4-openssl-dev python3-jinja2 iproute2 dnsmasq-base
  prometheus curl nftables faketime
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "These packages are missing.  Run this, then start again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends "${missing[@]}"
