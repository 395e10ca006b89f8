// As test_attention_kernels.cc: the other sizes of heads, float16, and random shapes. Its templates
// take long to compile, so it is built with the sanitizers only.
// `test_attention_sizes SEED ROUNDS` adds problems of random shapes, and prints errors.
#include <cstdio>
#include <random>

#include "attention_on_host.h"
#include "native_test.h"

namespace cpd::kernels::test_attention_sizes {

AttentionErrors OfRandomShape(std::mt19937& rng) {
  const AttentionShape shape = RandomAttentionShape(rng);
  const bool is_early = rng() % 2 == 0;
  switch (rng() % 6) {
    case 0: return EqualsLoops<F16, 64, 64>(rng, shape, is_early);
    case 1: return EqualsLoops<BF16, 96, 96>(rng, shape, is_early);
    case 2: return EqualsLoops<BF16, 192, 128>(rng, shape, is_early);
    case 3: return EqualsLoops<F16, 256, 256>(rng, shape, is_early);
    case 4: return EqualsLoops<BF16, 64, 64>(rng, shape, is_early);
    default: return EqualsLoops<BF16, 128, 128>(rng, shape, is_early);
  }
}

const Register kTests("test_attention_sizes", [](const Numbers& numbers) {
  const int seed = numbers.Get(0, static_cast<int>(std::random_device{}()));
  std::fprintf(stderr, "seed %d\n", seed);
  std::mt19937 rng(seed);
  EqualsLoops<F16, 64, 64>(rng, {150, 200, 1, 1, 1, false, true, true}, false);
  EqualsLoops<BF16, 96, 96>(rng, {70, 70}, false);
  EqualsLoops<BF16, 256, 256>(rng, {70, 70, 1, 1, 1}, true);
  EqualsLoops<BF16, 128, 128>(rng, {37, 100, 4, 2, 1}, true);
  AttentionErrors worst{};
  for (int i = 0; i < numbers.Get(1, 1); ++i) {
    Enlarge(&worst, OfRandomShape(rng));
  }
  Print(stderr, worst);
});

}  // namespace cpd::kernels::test_attention_sizes
