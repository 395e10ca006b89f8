// One call of dispatch or combine, on CPU or a GPU: reads and checks its attributes and operands.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch/dispatch.h"
#include "ffi/attributes.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// The attributes of a call; those with an entry per part are spans.
struct DispatchOptions {
  Direction direction;
  std::string_view op;    // the function that was called, for messages
  std::string_view axis;  // likewise
  int64_t num_ranks;
  int64_t deadline_ms;
  std::string_view capacity_names;  // of all parts, for messages; see dispatch/dispatch.h
  Counts has_src_offset;            // per part: whether the metadata ends with src_offset
  Counts has_stamp;                 // per part: whether there is a stamp
  Counts num_arrays;                // per part: arrays that move
  Counts num_tokens;                // per part: rows in the owner's layout, of one rank
  Counts capacity;                  // per part: rows of the receive buffer, of one rank
  Counts buffer;                    // per part: id of the registered buffer with its limits, or 0
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
  std::vector<DispatchPart> parts;

  bool is_dispatch() const { return direction == Direction::kDispatch; }
};

// Reads everything but the parts. Rejects attributes that are out of range or inconsistent.
Status ReadAttributes(const DispatchOptions& options, DispatchCall* call);

// Reads the parts, after the attributes. The arrays hold the rows of `num_held` ranks. Rejects
// operands and results whose number, shapes or types do not match the attributes.
//
// Operands: first the metadata of all parts, each field as one rank's view [...] or [1, ...], or as
// the views of all ranks [W, ...]: num_recv [W + 1], seq_len [S], dst_rank [S(, C)], dst_offset
// [S(, C)], and src_offset [S] if present. Then the stamp [5], of this rank only, of each part that
// has one. Then the arrays of all parts: x [T, feature...] for dispatch, y [capacity, feature...]
// for combine. For dispatch, storage to reuse may follow. Results: [capacity, feature...] for
// dispatch, [T, feature...] for combine.
Status ReadOperands(const DispatchOptions& options, const xla::ffi::RemainingArgs& args,
                    const xla::ffi::RemainingRets& results, int64_t num_held, DispatchCall* call);

}  // namespace cpd
