// One call of dispatch or combine, on CPU or a GPU: reads and checks its attributes and operands.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "dispatch/dispatch.h"
#include "ffi/common.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// The attributes of a call; vectors have an entry per operand group.
struct DispatchOptions : RankOptions {
  static constexpr char kTypeName[] = "jax_cp_dispatch.Dispatch";
  std::string capacity_names;            // of all groups, for messages; see dispatch/dispatch.h
  std::vector<int64_t> has_src_offset;   // whether the metadata ends with src_offset
  std::vector<int64_t> has_weights;      // whether weights follow it
  std::vector<int64_t> has_fingerprint;  // whether there is a fingerprint
  std::vector<int64_t> num_arrays;       // arrays that move
  std::vector<int64_t> num_tokens;       // rows in the owner's layout, of one rank
  std::vector<int64_t> capacity;         // rows of the receive buffer, of one rank
  std::vector<int64_t> buffer;           // id of the registered buffer with its limits, or 0
};

// Reads the attributes that CPU and GPU calls have in common.
void ReadOptions(AttributeReader* attributes, DispatchOptions* options);

// The arrays hold the rows of one rank, or those of all ranks in rank order. Each RowArray
// describes the first rank's rows: as many as the plan may name.
struct DispatchCall {
  std::string op;  // begins every message
  Direction direction;
  int num_ranks;
  std::chrono::milliseconds deadline;
  std::vector<OperandGroup> groups;
  bool is_start = false;  // the first call of two; see ReadOperands

  bool is_dispatch() const { return direction == Direction::kDispatch; }
};

// Reads everything but the operand groups. Rejects attributes that are out of range or
// inconsistent.
Status ReadAttributes(Direction direction, const DispatchOptions& options, DispatchCall* call);

// Reads the groups, after the attributes. The arrays hold the rows of `num_held` ranks. Rejects
// operands and results whose number, shapes or types do not match the attributes.
//
// Operands: first the metadata of all groups, each field as one rank's view [...] or [1, ...], or
// as the views of all ranks [W, ...]: num_recv_tokens [W + 1], seq_len [S], dst_rank [S(, C)],
// dst_offset [S(, C)], and src_offset [S] and weights [S(, C)] (f32 or f64, of this rank only) if
// present. Then the fingerprint [9], of this rank only,
// of each group that has one. Then the arrays of all groups: x [T, feature...] for dispatch, y
// [capacity, feature...] for combine. For dispatch, storage to reuse may follow. Results:
// [capacity, feature...] for dispatch, [T, feature...] for combine. The first call of two takes no
// storage, and has more results: the arrays, and memory for the other operands.
Status ReadOperands(const DispatchOptions& options, const xla::ffi::RemainingArgs& args,
                    const xla::ffi::RemainingRets& results, int64_t num_held, DispatchCall* call);

}  // namespace cpd
