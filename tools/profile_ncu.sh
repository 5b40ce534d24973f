#!/usr/bin/env bash
# Profiles FlashKernel's kernels in a command with Nsight Compute and writes one CSV line per kernel
# and metric. Clocks are left alone, so that the figures agree with the benchmarks.
#
#   tools/profile_ncu.sh results/h200/ncu/norm.csv -- python -m flashkernel.bench bandwidth --op rms_norm ...
set -euo pipefail
if [ $# -lt 3 ] || [ "$2" != "--" ]; then
  sed -n '2,6p' "$0" >&2
  exit 2
fi
output=$1
shift 2
mkdir -p "$(dirname "$output")"
metrics=gpu__time_duration.sum
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,dram__bytes.sum
metrics+=,sm__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,launch__registers_per_thread
metrics+=,launch__occupancy_limit_registers
metrics+=,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio
metrics+=,smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio
metrics+=,smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio
metrics+=,smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio
exec ncu --clock-control none --csv --kernel-name-base demangled \
  --kernel-name "${FK_NCU_KERNELS:-regex:fk::}" \
  --launch-count "${FK_NCU_COUNT:-20}" --metrics "$metrics" --log-file "$output" "$@"
