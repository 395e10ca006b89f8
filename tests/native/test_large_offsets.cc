// Rows beyond 4 GiB move correctly: large address ranges over little memory.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "dispatch/dispatch.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_large_offsets {

constexpr int64_t kRowBytes = 1 << 20;
constexpr int64_t kNumRows = ((int64_t{1} << 32) + (int64_t{1} << 26)) / kRowBytes;
constexpr int64_t kAliasedRows = 32;
constexpr int64_t kSrcRow = kNumRows - 3, kDstRow = kNumRows - 5;  // both beyond 4 GiB
static_assert(kDstRow * kRowBytes > int64_t{1} << 32);

// All rows share a little memory, except the last ones, which have their own.
char* Reserve() {
  const int file = memfd_create("rows", 0);
  CHECK(file >= 0 && ftruncate(file, 2 * kAliasedRows * kRowBytes) == 0);
  auto* base = static_cast<char*>(mmap(nullptr, kNumRows * kRowBytes, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  CHECK(base != MAP_FAILED);
  for (int64_t row = 0; row < kNumRows; row += kAliasedRows) {
    const bool is_last = row + kAliasedRows >= kNumRows;
    // Populated at once: a million page faults take longer.
    void* mapped =
        mmap(base + row * kRowBytes, kAliasedRows * kRowBytes, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED | MAP_POPULATE, file, is_last ? kAliasedRows * kRowBytes : 0);
    CHECK(mapped != MAP_FAILED);
  }
  close(file);
  return base;
}

float* Row(const RowArray& rows, int64_t row) {
  return reinterpret_cast<float*>(rows.data + row * rows.row_bytes);
}

void Run(decltype(PlanDispatch) plan, const OperandGroup& group) {
  std::vector<std::unique_ptr<Contribution>> ranks;
  auto mine = std::make_unique<DispatchContribution>();
  mine->groups.push_back(group);
  ranks.push_back(std::move(mine));
  WorkList work;
  CHECK(plan("large", ranks, &work, MessageNames{}).ok());
  for (int64_t task = 0; task < work.num_tasks; ++task) work.run(task);
}

const Register kTests("test_large_offsets", [](const Numbers&) {
  const int64_t dst_rank = 0, length = 1, counts[] = {1, 1};
  OperandGroup group;
  group.tokens.push_back({Reserve(), kNumRows, kRowBytes});
  group.buffers.push_back({Reserve(), kNumRows, kRowBytes});
  group.types.push_back({DataType::kF32, DataType::kF32});
  group.num_slots = group.num_replicas = 1;
  group.dst_rank = {&dst_rank, IntType::kI64};
  group.dst_offset = {&kDstRow, IntType::kI64};
  group.seq_len = {&length, IntType::kI64};
  group.src_offset = {&kSrcRow, IntType::kI64};
  group.num_recv_tokens = {counts, IntType::kI64};
  const RowArray &tokens = group.tokens[0], &buffer = group.buffers[0];

  constexpr int64_t kNum = kRowBytes / 4;
  for (int64_t i = 0; i < kNum; ++i) Row(tokens, kSrcRow)[i] = static_cast<float>(i);
  std::memset(Row(buffer, kDstRow - 1), 0x7f, 3 * kRowBytes);
  Run(PlanDispatch, group);
  for (int64_t i = 0; i < kNum; ++i) {
    CHECK(Row(buffer, kDstRow)[i] == static_cast<float>(i));
    CHECK(Row(buffer, kDstRow - 1)[i] == 0 && Row(buffer, kDstRow + 1)[i] == 0);
  }

  std::memset(Row(tokens, kSrcRow - 1), 0x7f, 3 * kRowBytes);
  Run(PlanCombine, group);
  for (int64_t i = 0; i < kNum; ++i) {
    CHECK(Row(tokens, kSrcRow)[i] == static_cast<float>(i));
    CHECK(Row(tokens, kSrcRow - 1)[i] == 0 && Row(tokens, kSrcRow + 1)[i] == 0);
  }
});

}  // namespace cpd::test_large_offsets
