#!/bin/sh
# Random programs against the native core: plain, and under the compiler's sanitizers.
# Usage: stress.sh [programs] [seed]; prints the counts of every build. CXX names the compiler.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
for sanitizer in none thread address,undefined; do
  options="-fsanitize=$sanitizer -fno-sanitize-recover=all"
  [ $sanitizer = none ] && options=
  # shellcheck disable=SC2086
  "${CXX:-c++}" -std=c++17 -O1 -g1 $options -I"$root/csrc" "$root"/csrc/transport/*.cc \
    "$root"/csrc/dispatch/*.cc "$root"/csrc/numerics/*.cc "$root/tests/native/main.cc" \
    "$root/tests/native/stress.cc" -pthread -ldl -o "$build/stress"
  echo "sanitizer $sanitizer: $("$build/stress" stress "${1:-2000}" "${2:-0}")"
done
