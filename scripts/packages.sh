#!/bin/sh
# packages.sh demo|test: makes sure that the distribution's packages are there (Debian 12, Ubuntu
# 24.04). Installs the missing ones where it may; otherwise says what to type.
set -eu

packages="g++ cmake ninja-build ccache pkg-config libhwy-dev libcli11-dev
libpcre2-dev nlohmann-json3-dev python3 python3-venv"
# python3-dev: torch.compile compiles against Python's headers.
[ "$1" = test ] && packages="$packages libgtest-dev python3-dev git elixir erlang-dev"

if ! command -v dpkg-query > /dev/null; then
  echo "scripts/packages.sh: not Debian or Ubuntu; expecting the equivalents of: $packages" >&2
  exit 0
fi

missing=""
for package in $packages; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
  [ "$status" = installed ] || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" != 0 ]; then
  echo "These packages are missing. Install them, then run make again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends$missing" >&2
  exit 1
fi

echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  # Another apt-get may be at work just after a machine's start.
  apt-get -o DPkg::Lock::Timeout=300 install -qq -y --no-install-recommends $missing > "$log" 2>&1
}
if ! install && ! { apt-get -o DPkg::Lock::Timeout=300 update -qq > "$log" 2>&1 && install; }; then
  cat "$log" >&2
  exit 1
fi
