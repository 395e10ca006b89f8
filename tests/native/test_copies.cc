// What copies of rows do with their threads, run on the host against plain loops: copies of
// every size and alignment, and sums of every type.
#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "device.h"
#include "device_world.h"
#include "native_test.h"

namespace cpd::kernels::test_copies {

// Blocks of 1 to 5 threads take whole steps, and every remainder of one.
void CopiesMoveEveryByteOnce() {
  Rng rng(1);
  for (int num_threads = 1; num_threads <= 5; num_threads += 2) {
    for (int64_t bytes = 0; bytes < 16 * 4 * num_threads * 2 + 40; bytes += Draw(rng, 1, 13)) {
      const int64_t from_at = Draw(rng, 0, 20);
      const int num_to = static_cast<int>(Draw(rng, 1, 3));
      std::vector<char> from(from_at + bytes);
      for (char& byte : from) byte = static_cast<char>(Draw(rng, 0, 255));
      std::vector<std::vector<char>> to(num_to, std::vector<char>(bytes + 64, 0x7f));
      std::vector<char*> at;
      const int64_t to_at = Draw(rng, 0, 1) ? from_at : Draw(rng, 0, 20);
      for (auto& one : to) at.push_back(one.data() + to_at);
      Launch<int>(1, num_threads, [&](const Block& block, int*) {
        Copy(block, from.data() + from_at, at.data(), num_to, bytes);
      });
      for (auto& one : to) {
        std::vector<char> wanted(bytes + 64, 0x7f);
        if (bytes > 0) std::memcpy(&wanted[to_at], &from[from_at], bytes);
        CHECK(one == wanted);
      }
    }
  }
}

template <typename T>
T Small(Rng& rng) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(rng());
  } else {
    return cpd::Round<T>(static_cast<float>(Draw(rng, -64, 64)) / 4);
  }
}

// Two ranks hold rows of a third; the owner adds them up, in rows of `width` elements.
template <typename In, typename Acc, typename Out>
void SumsAre(DataType in_type, DataType out_type, int64_t width) {
  Rng rng(static_cast<unsigned>(width));
  World world{};
  world.num_ranks = 3;
  world.in_type = in_type;
  world.out_type = out_type;
  world.num_threads = 4;
  world.groups.push_back(MakeGroup(rng, 3, {5, 3, 12, {width * int64_t{sizeof(In)}}, true}));
  World::Made& group = world.groups[0];
  FillArrays(&world, rng);
  for (auto& rows : group.x[0]) {
    auto* values = reinterpret_cast<In*>(rows.data());
    for (size_t i = 0; i < rows.size() / sizeof(In); ++i) values[i] = Small<In>(rng);
  }
  RunRanks(world, 1);
  CHECK(world.IsFine());
  int most = 0;
  for (int r = 0; r < 3; ++r) {
    const Plan& plan = group.plans[r];
    for (int64_t row = 0; row < group.num_tokens; ++row) {
      std::vector<const In*> sources;
      for (int64_t t = 0; t < group.num_slots * group.num_replicas; ++t) {
        const int64_t s = t / group.num_replicas, i = row - plan.src_offset[s];
        if (plan.dst_rank[t] < 0 || i < 0 || i >= plan.seq_len[s]) continue;
        const auto& y = group.x[0][plan.dst_rank[t]];
        sources.push_back(reinterpret_cast<const In*>(y.data()) + (plan.dst_offset[t] + i) * width);
      }
      most = std::max(most, static_cast<int>(sources.size()));
      for (int64_t e = 0; e < width; ++e) {
        Acc sum{};
        for (const In* source : sources) sum = static_cast<Acc>(sum + static_cast<Acc>(source[e]));
        const Out wanted = cpd::Round<Out>(sum);
        const auto* out = reinterpret_cast<const Out*>(group.out[0][r].data()) + row * width + e;
        CHECK(std::memcmp(out, &wanted, sizeof(Out)) == 0);
      }
    }
  }
  CHECK(most > 2);
}

// Widths: not aligned; fewer vectors than threads; whole steps of several threads, and not.
void SumsOfEveryType() {
  for (const int64_t width : {3, 16, 48, 256, 272, 336}) {
    SumsAre<BF16, float, BF16>(DataType::kBF16, DataType::kBF16, width);
    SumsAre<BF16, float, float>(DataType::kBF16, DataType::kF32, width);
    SumsAre<F16, float, F16>(DataType::kF16, DataType::kF16, width);
    SumsAre<F16, float, float>(DataType::kF16, DataType::kF32, width);
    SumsAre<float, float, float>(DataType::kF32, DataType::kF32, width);
    SumsAre<double, double, double>(DataType::kF64, DataType::kF64, width);
    SumsAre<uint8_t, uint8_t, uint8_t>(DataType::kI8, DataType::kI8, width);
    SumsAre<uint16_t, uint16_t, uint16_t>(DataType::kU16, DataType::kU16, width);
    SumsAre<uint32_t, uint32_t, uint32_t>(DataType::kI32, DataType::kI32, width);
    SumsAre<uint64_t, uint64_t, uint64_t>(DataType::kU64, DataType::kU64, width);
  }
}

const Register kTests("test_copies", [](const Numbers&) {
  CopiesMoveEveryByteOnce();
  SumsOfEveryType();
});

}  // namespace cpd::kernels::test_copies
