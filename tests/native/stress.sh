#!/bin/sh
# Random programs against the native core, and problems for the planner: plain, and under the
# compiler's sanitizers. Usage: stress.sh [programs] [seed]; prints the counts of every build. CXX
# names the compiler.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
for sanitizer in none thread address,undefined; do
  options="-fsanitize=$sanitizer -fno-sanitize-recover=all"
  [ $sanitizer = none ] && options=
  # shellcheck disable=SC2086
  "${CXX:-c++}" -std=c++17 -O1 -g1 $options -I"$root/csrc" "$root"/csrc/transport/*.cc \
    "$root"/csrc/dispatch/*.cc "$root"/csrc/numerics/*.cc "$root"/csrc/planner/*.cc \
    "$root/tests/native/main.cc" "$root/tests/native/stress.cc" \
    "$root/tests/native/test_move_queries.cc" -pthread -ldl -o "$build/stress"
  echo "sanitizer $sanitizer: $("$build/stress" stress "${1:-2000}" "${2:-0}")"
  [ $sanitizer = thread ] || "$build/stress" test_move_queries 200  # one thread
done
