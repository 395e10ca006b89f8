// What a call will launch, recorded once and thrown away, before ranks wait for one another.
//
// A kernel of cuBLASLt is loaded when it is first launched, and loading may wait for the device: on
// which a rank may be waiting for the one that loads; nor should a program that XLA records load
// in the middle of it. Recording loads, and runs nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/gpu_arithmetic.h"
#include "gpu_schedule/overlap_team.h"

namespace cpd {

// Puts all steps of a schedule on one stream, and leaves out what is between streams.
class Rehearsal final : public GpuQueues {
 public:
  Rehearsal(GpuArithmetic* arithmetic, const GemmScratch* scratch)
      : arithmetic_(arithmetic), scratch_(scratch) {}

  // Loads what every call needs, then runs `launch` on a stream that is recorded; each once for
  // these kernels (see KernelsOf) on the device, which is current.
  Status Run(const std::string& op, int device, const std::vector<int64_t>& kernels,
             const std::function<Status(cudaStream_t)>& launch);

  void Choose(int, Lane) override { arithmetic_->Choose(stream_, scratch_); }
  void Copy(const std::vector<RowCopy>&) override {}
  int RecordEvent() override { return 0; }
  void WaitForEvent(int) override {}
  void SignalPeer(int, int, int) override {}
  void WaitForPeer(int, int, int) override {}
  void BeginSpan(int, SpanKind, const std::string&) override {}
  void EndSpan() override {}

 private:
  GpuArithmetic* const arithmetic_;
  const GemmScratch* const scratch_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace cpd
