#!/bin/sh
# The C++ and CUDA sources of the checkout, one a line: tracked ones and new ones.
cd "$(dirname "$0")/.."
git ls-files --cached --others --exclude-standard -- '*.h' '*.hpp' '*.c' '*.cc' '*.cu' '*.cuh'
