// The queues of one overlapped product on a device: CUDA streams and events, and signals between
// devices.
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
  struct Call {
    std::string op;
    int device, group, first_rank;
    bool has_spans;
  };

  // `lanes` must be locked by the caller. `meeting` is that of this device's one rank, or nullptr
  // if all ranks are here.
  OverlapQueues(Call call, std::vector<GemmScratch> scratch, Lanes* lanes,
                GpuArithmetic* arithmetic, const kernels::Meeting* meeting);

  // All lanes start from the program's stream, which continues when they are done.
  void Fork(cudaStream_t stream);
  void Join(cudaStream_t stream);

  void Choose(int rank, Lane lane) override;
  void Copy(const std::vector<RowCopy>& copies) override { arithmetic_->Copy(copies); }
  int RecordEvent() override;
  void WaitForEvent(int event) override;
  void SignalPeer(int rank, int peer, int signal) override;
  void WaitForPeer(int rank, int peer, int signal) override;
  void BeginSpan(int rank, SpanKind kind, const std::string& name) override;
  void EndSpan() override;

 private:
  void Record(int event, cudaStream_t stream);
  void Wait(int event, cudaStream_t stream);

  const Call call_;
  const std::vector<GemmScratch> scratch_;
  Lanes* const lanes_;
  GpuArithmetic* const arithmetic_;
  const kernels::Meeting* const meeting_;
  cudaStream_t chosen_ = nullptr;
  int num_events_ = 0;
  int span_ = -1;
};

}  // namespace cpd
