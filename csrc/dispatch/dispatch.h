// Copy planning: turns the contributions of the ranks of one dispatch or combine into copies.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/element.h"
#include "numerics/rows.h"
#include "transport/transport.h"

namespace cpd {

// One array on one rank: consecutive rows of equal size.
struct RowArray {
  char* data = nullptr;  // nullptr: the rank is in another process
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  char* shared = nullptr;  // where ranks of other processes read these rows

  bool is_here() const { return data != nullptr; }
  const char* source() const { return is_here() ? data : shared; }
  int64_t num_bytes() const { return num_rows * row_bytes; }
};

// Arrays that move by the same metadata, and one rank's view of that metadata. Both operations use
// the forward metadata: combine is the adjoint of dispatch.
struct OperandGroup {
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
  IntArray src_offset;       // [S]; absent: shards are consecutive
  IntArray num_recv_tokens;  // [W + 1], tokens from each rank and their sum
  IntArray fingerprint;      // [kFingerprintSize], or absent: the plan that the rank follows
  // [S, C], f32 or f64; combine only, else absent. Of ranks in this process.
  const void* weights = nullptr;
  DataType weight_type = DataType::kOther;

  // W or 1: until Select keeps the view of one rank, each field but the fingerprint is [W, ...].
  int64_t num_views = 1;
  void Select(int64_t rank);
};

// First the checksum of the whole plan, which is equal on all ranks. Then pairs of what the plan
// says and what this rank sees: its rank, and checksums of its segment ids and of its positions.
constexpr int64_t kFingerprintSize = 9;
// The plan's rank in a fallback, which no rank may follow, of tokens that are not in the order that
// the call assumes, and of a mask that is not that of the tokens. Minus 2 n, of array n of
// `check_tokens` in another order; minus 2 n + 1, with other values.
constexpr int64_t kNoRank = -1, kOutOfOrder = -2, kWrongMask = -3, kWrongTokens = -4;

enum class Direction : uint8_t { kDispatch, kCombine };

// The contribution of one rank. Pointers stay valid until the exchange is over.
struct DispatchContribution final : Contribution {
  Direction direction = Direction::kDispatch;
  int num_ranks = 0;
  std::vector<OperandGroup> groups;
  std::vector<std::vector<int64_t>> integers;  // the metadata of a rank in another process

  std::string Write() const override;
  std::vector<SharedArray> SharedArrays() override;
};

// Returns nullptr unless the bytes are those of a rank among `num_ranks`.
std::unique_ptr<Contribution> ReadDispatchContribution(Direction direction, int num_ranks,
                                                       std::string_view bytes);

// Names in error messages.
struct MessageNames {
  std::string capacity_names =
      {};  // of the operand groups: the capacity arguments, comma-separated
  const std::vector<int>* processes = nullptr;  // by rank; nullptr: all ranks are in this process
};

// Both check the contributions of all ranks together and report errors before anything moves. `op`
// begins every message.

// buffers[d][dst_offset + i] = tokens[s][src_offset + i]; rows without a source become zero.
Status PlanDispatch(const std::string& op, const std::vector<std::unique_ptr<Contribution>>& ranks,
                    WorkList* work, const MessageNames& names = {});

// tokens[s][src_offset + i] = sum over slots, then replicas, of buffers[d][dst_offset + i]. The
// order is fixed, so the result is bitwise repeatable. Rows without a source become zero. With
// weights, those that one rank holds are summed first and rounded; see SumWeightedRows.
Status PlanCombine(const std::string& op, const std::vector<std::unique_ptr<Contribution>>& ranks,
                   WorkList* work, const MessageNames& names = {});

// ---- What is wrong with a plan, in the words that CPU and GPUs have in common. Each continues a
// message that begins with the operation and, but for the first two, a rank.

constexpr char kIsFallback[] =
    ": the plan is a fallback: its batch does not fit the config, so nothing was planned. Use "
    "another algorithm, such as a ring, where `fits` of the plan is false. Its `describe` says "
    "what the batch needs.";

// `part` of the fingerprint: 0 rank, 1 segment ids, 2 positions, 3 mask.
std::string OtherBatch(int64_t part, int64_t expected, int64_t seen, const std::string& rank);

std::string OtherPlan(int64_t own, int64_t other, const std::string& rank);
std::string OtherCounts(int64_t source, int64_t announced, int64_t sent);
std::string BadLength(int64_t seq_len, int64_t src_offset);
std::string BadTarget(int64_t dst_rank, int64_t num_ranks);

// A layer of experts has the capacity name "experts:" and the rows of a rank, or "experts by rank:"
// if a slot is not a token but all tokens for a rank. Its errors are those of `route`, whichever
// exchange finds them: slots are tokens, replicas are choices, and a rank beyond the last one, by
// n, is expert n, which has no place; a negative rank is the index itself.
bool AreExperts(const std::string& capacity_name);
std::string OfRoute(const std::string& op);  // the operation in its messages
std::string TooManyRows(int64_t rank, int64_t need, const std::string& capacity_name);
std::string NoExpert(const std::string& capacity_name, int64_t rank, int64_t slot, int64_t replica,
                     int64_t expert);

}  // namespace cpd
