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
constexpr int64_t kAliasedRows = 8;
constexpr int64_t kFromRow = kNumRows - 3, kToRow = kNumRows - 5;  // both beyond 4 GiB
static_assert(kToRow * kRowBytes > int64_t{1} << 32);

// The last rows have memory of their own. All others share a little if a call writes them, and have
// none if it reads one row only.
char* Reserve(bool is_written) {
  const int file = memfd_create("rows", 0);
  CHECK(file >= 0 && ftruncate(file, 2 * kAliasedRows * kRowBytes) == 0);
  auto* base = static_cast<char*>(mmap(nullptr, kNumRows * kRowBytes, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  CHECK(base != MAP_FAILED);
  for (int64_t row = 0; row < kNumRows; row += kAliasedRows) {
    const bool is_last = row + kAliasedRows >= kNumRows;
    if (!is_last && !is_written) continue;
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

// From the rows of a dispatch to those of its buffer, and back by a combine.
const Register kTests("test_large_offsets", [](const Numbers&) {
  const int64_t dst_rank = 0, length = 1, counts[] = {1, 1};
  const RowArray from{Reserve(false), kNumRows, kRowBytes}, to{Reserve(true), kNumRows, kRowBytes};
  OperandGroup group;
  group.types.push_back({DataType::kF32, DataType::kF32});
  group.num_slots = group.num_replicas = 1;
  group.dst_rank = {&dst_rank, IntType::kI64};
  group.seq_len = {&length, IntType::kI64};
  group.num_recv_tokens = {counts, IntType::kI64};

  constexpr int64_t kNum = kRowBytes / 4;
  for (int64_t i = 0; i < kNum; ++i) Row(from, kFromRow)[i] = static_cast<float>(i);
  for (const bool is_dispatch : {true, false}) {
    group.tokens = {is_dispatch ? from : to};
    group.buffers = {is_dispatch ? to : from};
    group.src_offset = {is_dispatch ? &kFromRow : &kToRow, IntType::kI64};
    group.dst_offset = {is_dispatch ? &kToRow : &kFromRow, IntType::kI64};
    std::memset(Row(to, kToRow - 1), 0x7f, 3 * kRowBytes);
    Run(is_dispatch ? PlanDispatch : PlanCombine, group);
    for (int64_t i = 0; i < kNum; ++i) {
      CHECK(Row(to, kToRow)[i] == static_cast<float>(i));
      CHECK(Row(to, kToRow - 1)[i] == 0 && Row(to, kToRow + 1)[i] == 0);
    }
  }
});

}  // namespace cpd::test_large_offsets
