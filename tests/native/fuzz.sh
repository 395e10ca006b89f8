#!/bin/sh
# Coverage-guided fuzzing of what handlers check, under the sanitizers. Needs clang with libFuzzer.
# Usage: fuzz.sh plans|calls|gemm|cuda_gemm|grouped_gemm [seconds] [corpus folder]; CLANG names the
# compiler, and PYTHON one that has jaxlib, whose headers are needed. An input that fails is kept in
# the current folder, as crash-TARGET-*.
set -eu
target=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
corpus=${3:-$build/corpus}
mkdir -p "$corpus"
csrc=$root/csrc
jaxlib=$("${PYTHON:-python3}" -c 'import jaxlib; print(*jaxlib.__path__)')
compile="${CLANG:-clang++} -std=c++17 -O1 -g1 -fsanitize=fuzzer-no-link,address,undefined \
  -fno-sanitize-recover=all -I$csrc -isystem $jaxlib/include"
# All that checks a call, on CPU or for a GPU, and what runs it on the host.
for source in "$csrc"/dispatch/*.cc "$csrc"/numerics/*.cc "$csrc"/gemm/*.cc "$csrc"/gpu_schedule/*.cc \
  "$csrc"/transport/*.cc "$csrc"/ffi/*.cc "$csrc"/ffi/*/*_call.cc \
  "$root/tests/native/fuzz_$target.cc"; do
  echo "$source"
done | xargs -P "$(nproc)" -I '{}' sh -c \
  "$compile -c '{}' -o $build/\$(echo '{}' | tr / _).o"
"${CLANG:-clang++}" -fsanitize=fuzzer,address,undefined "$build"/*.o -ldl -lpthread -o "$build/fuzz"
"$build/fuzz" -max_total_time="${2:-3600}" -max_len=2048 -timeout=60 -print_final_stats=1 \
  -artifact_prefix="$PWD/crash-$target-" "$corpus"
