// One custom call on a GPU: what its attributes and operands tell the kernels. Needs no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/dispatch_call.h"
#include "kernels/call.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// Those of the CPU, and what GPUs are told besides.
struct CudaOptions {
  DispatchOptions call;
  Counts places;            // of all ranks, group by group; -1: one device holds all of them
  std::string_view memory;  // "devices" of this process, or a "slab" per process
};

Status ReadOptions(const xla::ffi::Dictionary& attributes, CudaOptions* options);

struct Placement {
  std::vector<int64_t> places;  // of the ranks of this group
  int rank = 0;                 // the first on this device
  int group = 0;
  bool on_one_device = false;  // which holds all ranks
};

// Where `here`, a device of a process, stands among `places`, those of all groups, one after
// another; one of -1 where a device holds all ranks. `num_ranks` is one that GPUs take.
Status LocateRanks(const std::string& op, int64_t here, int64_t num_ranks, Counts places,
                   Placement* placement);

// Everything but the parts; refuses more than GPUs take.
Status ReadCudaAttributes(const DispatchOptions& options, DispatchCall* call);

// The parts, after the attributes, and all of it for the kernels of `num_local` ranks; refuses what
// no kernel could take.
Status ReadCudaOperands(const DispatchOptions& options, const xla::ffi::RemainingArgs& args,
                        const xla::ffi::RemainingRets& results, int64_t num_local, int num_blocks,
                        DispatchCall* call, kernels::Call* on_device);

}  // namespace cpd
