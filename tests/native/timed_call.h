// A call of dispatch or combine in which every rank of one GPU sends an equal share of its rows to
// every rank, and its memory.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "kernels/prepare.h"
#include "kernels/small.h"

#define CUDA(call)                                                                           \
  do {                                                                                       \
    const cudaError_t error = call;                                                          \
    if (error != cudaSuccess) {                                                              \
      std::fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                          \
    }                                                                                        \
  } while (0)

namespace cpd::kernels {

constexpr int kTimedRanks = 8;
constexpr int64_t kTimedBytes = int64_t{512} << 20;  // rows of all ranks

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) {
    CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
    CUDA(cudaMemset(data_, 0, bytes));
    CUDA(cudaDeviceSynchronize());  // streams that do not block would not wait for it
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
};

struct Timed {
  bool is_dispatch;
  int num_passes;
  int64_t row_bytes;
  int64_t num_bytes = kTimedBytes;  // of the rows of all ranks
  bool is_small = false;            // one kernel
};

// Every rank sends an equal share of its rows to every rank.
class TimedCall {
 public:
  TimedCall(const Timed& timed, int num_blocks)
      : tokens_(timed.num_bytes / kTimedRanks / timed.row_bytes),
        fields_(4 * kTimedRanks * (4 * kTimedRanks + 1)),
        in_(timed.num_bytes),
        out_(timed.num_bytes) {
    constexpr int kRanks = kTimedRanks;
    const int64_t row_bytes = timed.row_bytes;
    const auto share = static_cast<int32_t>(tokens_ / kRanks);
    std::vector<int32_t> received, lengths, ranks, offsets;
    for (int r = 0; r < kRanks; ++r) {
      for (int s = 0; s < kRanks; ++s) {
        received.push_back(share);
        lengths.push_back(share);
        ranks.push_back(s);
        offsets.push_back(r * share);
      }
      received.push_back(kRanks * share);
    }
    Call call{};
    call.is_dispatch = timed.is_dispatch;
    call.num_ranks = kRanks;
    call.num_local = timed.num_passes == 1 ? kRanks : 1;
    call.num_groups = call.num_arrays = 1;
    call.deadline_ns = 2'000'000'000;
    for (int r = 0; r < kRanks; ++r) call.pe[r] = -1;
    OperandGroup& group = call.groups[0];
    char* at = fields_.data();
    for (const auto& [field, values] :
         {std::pair{&group.num_recv_tokens, &received}, std::pair{&group.seq_len, &lengths},
          std::pair{&group.dst_rank, &ranks}, std::pair{&group.dst_offset, &offsets}}) {
      CUDA(cudaMemcpy(at, values->data(), 4 * values->size(), cudaMemcpyHostToDevice));
      *field = {at, IntType::kI32};
      at += 4 * values->size();
    }
    group.has_all_views = true;
    group.num_slots = kRanks;
    group.num_replicas = 1;
    group.num_tokens = group.capacity = tokens_;
    group.num_arrays = 1;
    const DataType type = timed.is_dispatch ? DataType::kU8 : DataType::kF32;
    call.arrays[0].in = in_.data();
    call.arrays[0].out = out_.data();
    call.arrays[0].in_row_bytes = call.arrays[0].out_row_bytes = row_bytes;
    call.arrays[0].in_type = call.arrays[0].out_type = type;
    group.rows_per_strip = group.rows_per_push = RowsPerStrip(call, group, num_blocks);
    if (timed.is_small) {
      ChooseSmall(&call, num_blocks);
      if (!call.is_small) {
        std::fprintf(stderr, "%lld bytes are not a small call\n",
                     static_cast<long long>(timed.num_bytes));
        std::exit(1);
      }
    }
    const int64_t channel_bytes = AlignUp(LayOutChannel(&call));
    channel_ = std::make_unique<DeviceMemory>(kRanks * channel_bytes);
    for (int r = 0; r < kRanks; ++r) call.symmetric[r] = channel_->data() + r * channel_bytes;
    LayOutLocal(&call);
    local_ = std::make_unique<DeviceMemory>(kRanks * call.local_bytes);
    CUDA(cudaHostAlloc(reinterpret_cast<void**>(&errors_), kRanks * sizeof(ErrorRecord),
                       cudaHostAllocMapped));
    std::memset(static_cast<void*>(errors_), 0, kRanks * sizeof(ErrorRecord));
    CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&call.errors), errors_, 0));
    for (int r = 0; r < kRanks; r += call.num_local) {
      calls.push_back(call);
      Call& one = calls.back();
      one.first_rank = r;
      one.arrays[0].in += r * tokens_ * row_bytes;
      one.arrays[0].out += r * tokens_ * row_bytes;
      one.local = local_->data() + r * call.local_bytes;
      one.errors += r;
    }
  }
  ~TimedCall() { cudaFreeHost(errors_); }
  TimedCall(const TimedCall&) = delete;
  TimedCall& operator=(const TimedCall&) = delete;

  bool IsFine() const {
    return std::all_of(errors_, errors_ + kTimedRanks,
                       [](const ErrorRecord& record) { return record.raised == 0; });
  }

  std::vector<Call> calls;  // one of all ranks, or one of each

 private:
  const int64_t tokens_;
  const DeviceMemory fields_, in_, out_;
  std::unique_ptr<DeviceMemory> channel_, local_;
  ErrorRecord* errors_ = nullptr;
};

}  // namespace cpd::kernels
