#!/bin/sh
# Coverage-guided fuzzing of the checks of plans, under the sanitizers. Needs clang with libFuzzer.
# Usage: fuzz.sh [seconds] [corpus folder]; CLANG names the compiler.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
corpus=${2:-$build/corpus}
mkdir -p "$corpus"
"${CLANG:-clang++}" -std=c++17 -O1 -g1 -fsanitize=fuzzer,address,undefined \
  -fno-sanitize-recover=all -I"$root/csrc" "$root"/csrc/dispatch/*.cc "$root"/csrc/numerics/*.cc \
  "$root/tests/native/fuzz_plans.cc" -o "$build/fuzz"
"$build/fuzz" -max_total_time="${1:-3600}" -max_len=2048 -timeout=10 -print_final_stats=1 \
  -artifact_prefix="$corpus/../crash-" "$corpus"
