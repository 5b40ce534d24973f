#!/bin/sh
# wheel.sh PYTHON FK_CUDA [CMAKE_DEFINE...]: builds the wheel into dist/ and installs it for PYTHON,
# whose environment has what the build needs. The build folder is kept, so a repeat takes seconds.
set -eu
cd "$(dirname "$0")/.."
python=$1
cuda=$2
shift 2
defines=""
for define in "FK_CUDA=$cuda" "$@"; do defines="$defines -C cmake.define.$define"; done
build=build-wheel-$(echo "$cuda" | tr '[:upper:]' '[:lower:]')
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Python would name the compiler otherwise than CMake does, and ccache find nothing.
export CC="${CC:-cc}" CXX="${CXX:-c++}"
echo "building the wheel (FK_CUDA=$cuda, in $build)"
rm -rf dist
if ! "$python" -m pip wheel . --no-deps --no-build-isolation -w dist \
    -C "build-dir=$build" $defines > "$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
"$python" -m pip install -qq --force-reinstall --no-deps dist/*.whl
