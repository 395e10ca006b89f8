// Records the launches of a call once and discards them, before ranks wait for one another.
//
// A cuBLASLt kernel is loaded at its first launch. Loading may wait for the device, where a rank
// may be waiting for the one that loads; and nothing should be loaded while XLA records a program.
// A recording loads the kernels and runs nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/gpu_arithmetic.h"
#include "gpu_schedule/overlap_team.h"

namespace cpd {

// Puts all steps of a schedule on one stream, without the dependencies between streams.
class Rehearsal final : public GpuQueues {
 public:
  Rehearsal(GpuArithmetic* arithmetic, const GemmScratch* scratch)
      : arithmetic_(arithmetic), scratch_(scratch) {}

  // Loads what every call needs, then runs `launch` on a recorded stream. Does each once for these
  // kernels (see KernelsOf) on the current device.
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
