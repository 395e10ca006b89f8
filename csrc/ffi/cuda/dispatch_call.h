// One dispatch or combine call on a GPU: turns attributes and operands into the kernels' parameter.
// Needs no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/dispatch_call.h"
#include "gpu_schedule/exchange_pairs.h"
#include "kernels/call.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd {

// What all calls on GPUs have, in addition to those of the CPU.
struct GpuOptions {
  Counts device_table;      // of all ranks, group by group; -1: one device holds all of them
  std::string_view memory;  // "devices" of this process, a "slab" per process, or a "window"
  int64_t site;             // the number of the call in its program
  int64_t num_comm_sm;      // multiprocessors that move rows; 0: all

  void Read(AttributeReader* attributes);
  bool in_slab() const { return memory == "slab"; }
  bool in_window() const { return memory == "window"; }
};

struct CudaOptions : GpuOptions {
  DispatchOptions call;
  Counts partitions;  // of a window: the numbers of the devices in the program
};

Status ReadOptions(const xla::ffi::Dictionary& attributes, CudaOptions* options);

struct RankLocation {
  std::vector<int64_t> devices;  // of the ranks of this group
  int rank = 0;                  // the first rank on this device
  int group = 0;
  bool on_one_device = false;  // one device holds all ranks

  std::vector<int64_t> processes() const {
    std::vector<int64_t> of_ranks;
    for (const int64_t entry : devices) of_ranks.push_back(entry >> 16);
    return of_ranks;
  }
};

// Finds `here`, a device of a process, among `device_table`, which are those of all groups, one
// after another; or a single -1 if one device holds all ranks. `num_ranks` must be within the GPU
// limits.
Status LocateRanks(const std::string& op, int64_t here, int64_t num_ranks, Counts device_table,
                   RankLocation* location);

// Reads everything but the operand groups; rejects calls beyond the GPU limits.
Status ReadCudaAttributes(Direction direction, const DispatchOptions& options, DispatchCall* call);

// Reads the groups, after the attributes, and fills in the kernels' parameter, whose `num_local` is
// known. Rejects what no kernel could process.
Status ReadCudaOperands(const DispatchOptions& options, const xla::ffi::RemainingArgs& args,
                        const xla::ffi::RemainingRets& results, int num_blocks, DispatchCall* call,
                        kernels::Call* on_device);

// Reads the results of the first of two calls, behind those that `ReadCudaOperands` has read: the
// arrays that it sends, which must be in place, and `held`, memory for copies of its other
// operands, which must suffice. `addresses` are those of all results; see
// gpu_schedule/exchange_pairs.h.
Status ReadStart(const std::string& op, const kernels::Call& call,
                 const xla::ffi::RemainingRets& results, ExchangePairs::Addresses* addresses,
                 char** held);

// Reads the second of two calls, whose operands are the results of the first. Its own results must
// be the first of them, in place.
Status ReadDone(const std::string& op, const xla::ffi::RemainingArgs& args,
                const xla::ffi::RemainingRets& results, ExchangePairs::Addresses* addresses);

}  // namespace cpd
