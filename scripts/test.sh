#!/usr/bin/env bash
# Everything a change must pass, in the order in which failures are cheapest to find.
# test.sh [STEP...]: only those steps. `make test` has set up the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
export PATH=$bin:$PATH

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Runs a command and shows the end of what it says; all of it where it fails.
quietly() {
  local lines=$1
  shift
  if ! "$@" > "$log" 2>&1; then
    cat "$log"
    return 1
  fi
  tail -n "$lines" "$log"
}

style() {
  scripts/sources.sh | xargs clang-format --dry-run -Werror
  ruff check -q .
  ruff format -q --check .
}

# As many compilers as cores: Ninja's one more makes two cores 4% slower.
compile() { quietly 1 ninja -j "$(nproc)" -C "$@"; }

build() {
  quietly 0 cmake -S . -B build -G Ninja -DFK_WERROR=ON
  compile build
}

cpp() { quietly 3 ctest --test-dir build --output-on-failure -j 2; }

# Hopper's kernels, as a build for Turing alone compiles them: to nothing.
without_hopper() {
  local nvcc
  nvcc=$(sed -n 's/^FK_NVCC:[^=]*=//p' build/CMakeCache.txt)
  find src/ops -name '*.cu' \( -path '*/sm90/*' -o -name 'cuda_sm90_*' \) |
    xargs -P "$(nproc)" -n 1 "$nvcc" --cuda -odir "$1" -std=c++17 -DFK_HAVE_CUDA=1 -Iinclude -Isrc \
      -gencode=arch=compute_75,code=compute_75
}

# An op must have a reference, a test and a doc line; a kernel must not spill.
house() {
  FK_LIBRARY=$PWD/build/libflashkernel.so python tools/check_house.py
  if [ -d build/cuda ]; then
    python tools/check_spills.py build/cuda
    without_hopper build/cuda
  fi
}

# What this machine could not run is not compiled to be watched: AVX-512 would be a third of it. Nor
# is what threads do alike on every instruction set.
sanitized() {
  local flags=
  if [ "$(uname -m)" = x86_64 ]; then
    if [ "$2" = thread ]; then
      flags="-DHWY_DISABLED_TARGETS='(HWY_AVX3|HWY_AVX2)'"
    elif ! grep -qw avx512bw /proc/cpuinfo; then
      flags=-DHWY_DISABLED_TARGETS=HWY_AVX3
    fi
  fi
  quietly 0 cmake -S . -B "$1" -G Ninja -DFK_SANITIZE="$2" -DFK_WERROR=ON -DFK_CUDA=OFF \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DCMAKE_CXX_FLAGS="$flags"
  compile "$1" "${@:3}"
}

# The C++ tests again, with every memory access and every operation watched; and a minute of hostile
# calls.
asan() {
  sanitized build-asan address,undefined fk_tests fk_pool_tests fk_memory_tests fk_thread_tests \
    fk_fuzz fk_fuzz_abi fk
  quietly 3 ctest --test-dir build-asan --output-on-failure -j 2
  quietly 2 build-asan/fk_fuzz_abi 60s
}

# The pool, ops and engines, with every pair of accesses from two threads watched.
tsan() {
  sanitized build-tsan thread fk_pool_tests fk_thread_tests
  quietly 1 build-tsan/fk_pool_tests --gtest_brief=1
  quietly 1 build-tsan/fk_thread_tests --gtest_brief=1
}

# The same code as in `build`, so ccache has all of it.
wheel() { scripts/wheel.sh "$bin/python" AUTO FK_WERROR=ON; }

# Whether there can be a GPU in software (docs/softgpu.md).
can_build_softgpu() {
  [ -d build/softgpu_cuda ] && return
  echo "   no nvcc: the kernels are not run"
  return 1
}

# check_on_softgpu: fk check on all chips, as many at a time as there are cores, with every pair of
# accesses watched.
check_on_softgpu() {
  printf '%s\n' 90 80 75 | xargs -P "$(nproc)" -L 1 sh -c \
    'FK_SOFTGPU_RACES=1 FK_SOFTGPU_ARCH=$0 build/fk_softgpu check --device cuda'
}

# on_softgpu CHIP: every op's tests on the CUDA side, and the software GPU's own.
on_softgpu() {
  export FK_SOFTGPU_ARCH=$1
  quietly 1 build/softgpu_tests --gtest_brief=1
  OMP_NUM_THREADS=1 FK_LIBRARY=$PWD/build/libflashkernel_softgpu.so PYTHONPATH=bindings/python \
    quietly 1 python -m pytest -q -n 2 --dist loadgroup tests/softgpu tests/ops \
      -k "torch_cuda or gpu_agrees or bad_values or softgpu"
  unset FK_SOFTGPU_ARCH
}

# The software GPU's own tests; on each of the chips every kernel on drawn inputs beside its reference,
# with every pair of accesses watched, and every op's tests.
softgpu() {
  can_build_softgpu || return 0
  compile build softgpu
  quietly 1 check_on_softgpu
  local chip
  for chip in 90 80 75; do
    on_softgpu $chip
  done
}

# The same in other orders and on other inputs, all of it with every pair of accesses watched; and
# whether the checks notice a kernel that lacks a barrier, a wait or a fence. An hour.
softgpu_more() {
  can_build_softgpu || return 0
  compile build softgpu
  local chip seed
  for seed in 1 2; do
    FK_SOFTGPU_SEED=$seed quietly 1 check_on_softgpu
    for chip in 90 80 75; do
      FK_SOFTGPU_RACES=1 FK_SOFTGPU_SEED=$seed FK_TEST_SEED=$seed on_softgpu $chip
    done
  done
  for chip in 90 80; do
    FK_SOFTGPU_ARCH=$chip FK_LIBRARY=$PWD/build/libflashkernel_softgpu.so OMP_NUM_THREADS=1 \
      PYTHONPATH=bindings/python quietly 1 python tests/softgpu/mutants.py
  done
}

# Last, so that the run ends with its summary. A worker for each of two cores: more threads in each
# would wait for one another.
python_tests() { OMP_NUM_THREADS=1 python -m pytest -q -n 2; }

steps=("$@")
[ $# -gt 0 ] || steps=(style build cpp house softgpu asan tsan wheel python_tests)
for step in "${steps[@]}"; do
  echo "== $step"
  begin=$SECONDS
  "$step"
  [ "$step" = python_tests ] || echo "   $step took $((SECONDS - begin)) s"
done
