#!/bin/sh
# The C++ and CUDA sources of the checkout, one a line: tracked ones and new ones. Without Git, all
# but those that were built.
cd "$(dirname "$0")/.." || exit
git ls-files --cached --others --exclude-standard -- \
  '*.h' '*.hpp' '*.c' '*.cc' '*.cu' '*.cuh' 2> /dev/null ||
  find * -path 'build*' -prune -o -type f \( -name '*.h' -o -name '*.hpp' -o -name '*.c' \
    -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print
