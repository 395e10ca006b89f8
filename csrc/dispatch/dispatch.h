// Copy planning: from what the ranks of one dispatch or combine bring to the copies that make it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/int_array.h"
#include "numerics/sum_rows.h"
#include "transport/transport.h"

namespace cpd {

// One array on one rank: rows of equal size, one after another.
struct RowArray {
  char* data = nullptr;  // none: the rank is in another process
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  char* shared = nullptr;  // where ranks of other processes find the rows that they read

  bool is_here() const { return data != nullptr; }
  const char* source() const { return is_here() ? data : shared; }
  int64_t num_bytes() const { return num_rows * row_bytes; }
};

// Arrays that move as one metadata says, and one rank's view of that metadata (the forward one for
// both operations: combine is the adjoint of dispatch).
struct DispatchPart {
  // Rows in the owner's layout: read by dispatch, written by combine.
  std::vector<RowArray> tokens;
  // Rows of the receive buffer: written by dispatch, read by combine.
  std::vector<RowArray> buffers;
  std::vector<SumTypes> types;  // per array; combine only

  int64_t num_slots = 0;     // S
  int64_t num_replicas = 0;  // C
  IntArray dst_rank;         // [S, C], -1 = not sent
  IntArray dst_offset;       // [S, C]
  IntArray seq_len;          // [S]
  IntArray src_offset;       // [S]; none: shards stand one after another
  IntArray num_recv;         // [W + 1], tokens from each rank and their sum
  IntArray stamp;            // [kStampSize], or none: for which batch the plan was made

  // W: each of the fields but the stamp is [W, ...], the views of all ranks, until Select keeps
  // that of one.
  int64_t num_views = 1;
  void Select(int64_t rank);
};

// Checksums: of the whole batch as the plan knows it, equal on all ranks; then in pairs what the
// plan expects of this rank's columns and what the rank sees, of segment ids and of positions.
constexpr int64_t kStampSize = 5;

enum class Direction : uint8_t { kDispatch, kCombine };

// What one rank brings. Pointers stay valid until the exchange is over.
struct DispatchContribution final : Contribution {
  Direction direction = Direction::kDispatch;
  int num_ranks = 0;
  std::vector<DispatchPart> parts;
  std::vector<std::vector<int64_t>> integers;  // of a rank elsewhere: what its metadata points to

  std::string Write() const override;
  std::vector<SharedArray> SharedArrays() override;
};

// nullptr: the bytes are not those of a rank among `num_ranks`.
std::unique_ptr<Contribution> ReadDispatchContribution(Direction direction, int num_ranks,
                                                       std::string_view bytes);

// For messages.
struct PlanWords {
  std::string capacity_names = {};  // of the parts: the arguments that set them, by commas
  const std::vector<int>* processes = nullptr;  // of each rank; none: all ranks are here
};

// Both check the contributions of all ranks together and refuse before anything moves.
// `op` begins every message.

// buffers[d][dst_offset + i] = tokens[s][src_offset + i]; rows that nobody writes become zero.
Status PlanDispatch(const std::string& op, const std::vector<std::unique_ptr<Contribution>>& ranks,
                    WorkList* work, const PlanWords& words = {});

// tokens[s][src_offset + i] = sum over slots, then replicas, of buffers[d][dst_offset + i]; in that
// order, so the result is bitwise repeatable. Rows that nobody names become zero.
Status PlanCombine(const std::string& op, const std::vector<std::unique_ptr<Contribution>>& ranks,
                   WorkList* work, const PlanWords& words = {});

}  // namespace cpd
