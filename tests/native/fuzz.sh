#!/bin/sh
# Coverage-guided fuzzing of what handlers check, under the sanitizers. Needs clang with libFuzzer.
# Usage: fuzz.sh plans|gemm [seconds] [corpus folder]; CLANG names the compiler, and PYTHON one that
# has jaxlib, whose headers `gemm` needs.
set -eu
target=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
corpus=${3:-$build/corpus}
mkdir -p "$corpus"
csrc=$root/csrc
sources="$csrc/dispatch/*.cc $csrc/numerics/*.cc"
headers=$csrc
if [ "$target" = gemm ]; then
  sources="$sources $csrc/gemm/*.cc $csrc/transport/*.cc $csrc/ffi/gemm_call.cc $csrc/ffi/common.cc"
  jaxlib=$("${PYTHON:-python3}" -c 'import jaxlib; print(*jaxlib.__path__)')
  headers=$jaxlib/include
fi
# shellcheck disable=SC2086
"${CLANG:-clang++}" -std=c++17 -O1 -g1 -fsanitize=fuzzer,address,undefined \
  -fno-sanitize-recover=all -I"$csrc" -isystem "$headers" $sources \
  "$root/tests/native/fuzz_$target.cc" -ldl -o "$build/fuzz"
"$build/fuzz" -max_total_time="${2:-3600}" -max_len=2048 -timeout=60 -print_final_stats=1 \
  -artifact_prefix="$corpus/../crash-" "$corpus"
