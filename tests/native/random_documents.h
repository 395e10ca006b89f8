// What the native tests of the planner share: random numbers from a seed, and checks that name it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace cpd {

using Random = std::mt19937;

// An integer in [0, most].
inline int64_t Draw(Random* random, int64_t most) {
  return static_cast<int64_t>((*random)() % (most + 1));
}

inline void Require(bool condition, const char* what, int seed) {
  if (condition) return;
  std::printf("seed %d: %s\n", seed, what);
  std::exit(1);
}

}  // namespace cpd
