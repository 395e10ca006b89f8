// Coverage-guided fuzzing of how the handlers check a plan: any bytes as the metadata of all ranks
// are rejected, or give copies and sums that stay within the arrays. See fuzz.sh.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstring>
#include <memory>
#include <vector>

#include "dispatch/dispatch.h"

namespace cpd {
namespace {

constexpr DataType kTypes[] = {DataType::kF32, DataType::kBF16, DataType::kI8, DataType::kF64,
                               DataType::kOther};
constexpr int64_t kTypeBytes[] = {4, 2, 1, 8, 1};

// Memory of exactly the stated size: the sanitizer sees every access outside.
class Memory {
 public:
  char* Take(int64_t num_bytes) {
    blocks_.push_back(std::make_unique<char[]>(num_bytes));
    return blocks_.back().get();
  }

  IntArray Integers(FuzzedDataProvider& data, int64_t count) {
    const auto type = static_cast<IntType>(data.ConsumeIntegralInRange(0, 3));
    const bool is_wide = type == IntType::kI64 || type == IntType::kU64;
    char* bytes = Take(count * (is_wide ? 8 : 4));
    // Mostly small numbers: others are rejected at once.
    for (int64_t i = 0; i < count; ++i) {
      const int64_t value = data.ConsumeBool() ? data.ConsumeIntegralInRange<int64_t>(-1, 6)
                                               : data.ConsumeIntegral<int64_t>();
      std::memcpy(bytes + i * (is_wide ? 8 : 4), &value, is_wide ? 8 : 4);
    }
    return {bytes, type};
  }

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
};

RowArray Rows(FuzzedDataProvider& data, Memory& memory, int64_t row_bytes) {
  const int64_t num_rows = data.ConsumeIntegralInRange(0, 12);
  return {memory.Take(num_rows * row_bytes), num_rows, row_bytes};
}

// Mostly the values of another rank, as in a program on all devices.
int64_t Alike(FuzzedDataProvider& data, int64_t common, int64_t most) {
  return data.ConsumeIntegralInRange(0, 15) ? common
                                            : data.ConsumeIntegralInRange<int64_t>(0, most);
}

void Fuzz(FuzzedDataProvider& data) {
  Memory memory;
  const bool is_dispatch = data.ConsumeBool();
  const int64_t num_ranks = data.ConsumeIntegralInRange(1, 4);
  const int64_t num_groups = data.ConsumeIntegralInRange(1, 2);
  const int64_t num_slots = data.ConsumeIntegralInRange(0, 4);
  const int64_t num_replicas = data.ConsumeIntegralInRange(1, 3);
  const int64_t num_arrays = data.ConsumeIntegralInRange(1, 2);
  const int type = data.ConsumeIntegralInRange(0, 4);
  const int64_t row_elements = data.ConsumeIntegralInRange(0, 3);
  const bool has_src_offset = data.ConsumeBool();
  std::vector<std::unique_ptr<Contribution>> ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    auto mine = std::make_unique<DispatchContribution>();
    for (int64_t p = Alike(data, num_groups, 2); p > 0; --p) {
      OperandGroup group;
      group.num_slots = Alike(data, num_slots, 4);
      group.num_replicas = Alike(data, num_replicas, 3);
      group.dst_rank = memory.Integers(data, group.num_slots * group.num_replicas);
      group.dst_offset = memory.Integers(data, group.num_slots * group.num_replicas);
      group.seq_len = memory.Integers(data, group.num_slots);
      if (has_src_offset) group.src_offset = memory.Integers(data, group.num_slots);
      group.num_recv_tokens = memory.Integers(data, num_ranks + 1);
      if (data.ConsumeIntegralInRange(0, 7) == 0)
        group.fingerprint = memory.Integers(data, kFingerprintSize);
      const RowArray tokens = Rows(data, memory, row_elements * kTypeBytes[type]);
      const RowArray buffers = Rows(data, memory, row_elements * kTypeBytes[type]);
      for (int64_t a = Alike(data, num_arrays, 2); a > 0; --a) {
        group.tokens.push_back(tokens);
        group.tokens.back().data = memory.Take(tokens.num_rows * tokens.row_bytes);
        group.buffers.push_back(buffers);
        group.buffers.back().data = memory.Take(buffers.num_rows * buffers.row_bytes);
        group.types.push_back({kTypes[type], kTypes[type]});
      }
      mine->groups.push_back(std::move(group));
    }
    ranks.push_back(std::move(mine));
  }
  WorkList work;
  const Status status =
      is_dispatch ? PlanDispatch("fuzz", ranks, &work) : PlanCombine("fuzz", ranks, &work);
  if (!status.ok()) {
    if (status.message.rfind("fuzz", 0) != 0) __builtin_trap();
    return;
  }
  for (int64_t task = 0; task < work.num_tasks; ++task) work.run(task);
}

}  // namespace
}  // namespace cpd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t num_bytes) {
  FuzzedDataProvider data(bytes, num_bytes);
  cpd::Fuzz(data);
  return 0;
}
