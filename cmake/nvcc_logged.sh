#!/bin/sh
# nvcc_logged.sh LOG COMMAND...: what the compiler says goes to LOG; shown where it fails or warns.
log=$1
shift
if ! "$@" > "$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
grep -i warning "$log" >&2
exit 0
