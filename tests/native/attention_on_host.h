// The kernels of attention with all threads of a block in turn on the host, against plain loops.
#pragma once

#include <cstring>
#include <memory>
#include <random>
#include <type_traits>

#include "attention_results.h"

namespace cpd::kernels {

// Runs the blocks from `first` on. Each has new scratch memory, which begins with NaN.
template <typename Scratch, typename Kernel>
void Launch(int first, int num_blocks, bool is_early, Kernel kernel) {
  for (int index = first; index < num_blocks; ++index) {
    auto scratch = std::make_unique<Scratch>();
    std::memset(static_cast<void*>(scratch.get()), 0xff, sizeof(Scratch));
    AsyncCopies copies(is_early);
    kernel(index, scratch.get(), &copies);
  }
}

template <typename Element, int H, int Hv>
void AttendOnHost(const AttendCall& call, bool is_early, int first = 0) {
  Launch<AttendScratch<H, Hv>>(first, call.batch * call.num_heads * NumTiles(call.num_rows),
                               is_early,
                               [&](auto... arguments) { Attend<Element>(call, arguments...); });
}

template <typename Element, int H, int Hv>
void DifferentiateOnHost(const GradientsCall& call, bool is_early, int first_of_rows = 0,
                         int first_of_keys = 0) {
  Launch<QueriesScratch<H, Hv>>(
      first_of_rows, call.batch * call.num_heads * NumTiles(call.num_rows), is_early,
      [&](auto... arguments) { GradientsOfQueries<Element>(call, arguments...); });
  const int num_blocks = call.batch * call.num_kv_heads * NumTiles(call.num_keys);
  const auto of_keys = [&](auto part) {
    Launch<KeysScratch<H, Hv>>(first_of_keys, num_blocks, is_early, [&](auto... arguments) {
      GradientsOfKeys<Element, part>(call, arguments...);
    });
  };
  if constexpr (H + Hv > 256) {
    of_keys(std::integral_constant<Part, Part::kK>{});
    of_keys(std::integral_constant<Part, Part::kV>{});
  } else {
    of_keys(std::integral_constant<Part, Part::kBoth>{});
  }
}

template <typename Element, int H, int Hv>
AttentionErrors EqualsLoops(std::mt19937& rng, const AttentionShape& shape, bool is_early) {
  return RunAttention<Element, H, Hv>(rng, shape, 2e-6, [&](auto run) {
    return run(
        [&](const AttendCall& call) { AttendOnHost<Element, H, Hv>(call, is_early); },
        [&](const GradientsCall& call) { DifferentiateOnHost<Element, H, Hv>(call, is_early); });
  });
}

}  // namespace cpd::kernels
