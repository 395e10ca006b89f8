// The streams of one call of an overlapped product on a device, for its schedule: CUDA's streams
// and events, and signals among devices.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "cuda/gpu_arithmetic.h"
#include "cuda/lanes.h"
#include "gpu_schedule/overlap_team.h"
#include "kernels/meeting.h"

namespace cpd {

class OverlapQueues final : public GpuQueues {
 public:
  // `lanes` is locked by the caller. `meeting` is that of the one rank of this device, null where
  // all ranks are here.
  OverlapQueues(std::string op, int device, int group, int first_rank,
                std::vector<GemmScratch> scratch, Lanes* lanes, GpuArithmetic* arithmetic,
                const kernels::Meeting* meeting, bool has_spans);

  // All lanes begin where the program's stream is, and it goes on when they are over.
  void Fork(cudaStream_t stream);
  void Join(cudaStream_t stream);

  void Choose(int rank, Lane lane) override;
  void Copy(const std::vector<RowCopy>& pieces) override { arithmetic_->Copy(pieces); }
  int RecordEvent() override;
  void WaitForEvent(int event) override;
  void SignalPeer(int rank, int peer, int signal) override;
  void WaitForPeer(int rank, int peer, int signal) override;
  void BeginSpan(int rank, SpanKind kind, const std::string& name) override;
  void EndSpan() override;

 private:
  void Record(int event, cudaStream_t stream);
  void Wait(int event, cudaStream_t stream);

  const std::string op_;
  const int device_, group_, first_rank_;
  const std::vector<GemmScratch> scratch_;
  Lanes* const lanes_;
  GpuArithmetic* const arithmetic_;
  const kernels::Meeting* const meeting_;
  const bool has_spans_;
  cudaStream_t chosen_ = nullptr;
  int num_events_ = 0;
  int span_ = -1;
};

}  // namespace cpd
