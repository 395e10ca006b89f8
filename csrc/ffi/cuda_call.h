// One custom call on a GPU: what its attributes and operands tell the kernels.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "device/call.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

using Counts = xla::ffi::Span<const int64_t>;

// Attributes that are known when the program is made; those with an entry per part are spans.
struct CudaOptions {
  bool is_dispatch;
  std::string_view axis;  // for messages
  int64_t num_ranks;
  int64_t deadline_ms;
  Counts has_src_offset;
  Counts num_arrays;
  Counts num_tokens;
  Counts capacity;
  Counts buffer;
  Counts places;            // of all ranks, group by group; -1: one device holds all of them
  std::string_view memory;  // "devices" of this process, or a "slab" per process

  std::string op() const {
    return std::string(is_dispatch ? "dispatch" : "combine") + " over axis '" + std::string(axis) +
           "'";
  }
};

// Fills in `call` for `num_local` ranks; refuses what no kernel could take.
Status ReadCall(const CudaOptions& options, xla::ffi::RemainingArgs args,
                xla::ffi::RemainingRets results, int64_t num_local, int num_blocks,
                device::Call* call);

}  // namespace cpd
