// The queues of one overlapped product on a device: CUDA streams and events, and signals between
// devices.
#include "cuda/overlap_queues.h"

#include <utility>

#include "cuda/gpu_spans.h"
#include "cuda/product_kernels.h"

namespace cpd {

OverlapQueues::OverlapQueues(Call call, std::vector<GemmScratch> scratch, Lanes* lanes,
                             GpuArithmetic* arithmetic, const kernels::Meeting* meeting)
    : call_(std::move(call)),
      scratch_(std::move(scratch)),
      lanes_(lanes),
      arithmetic_(arithmetic),
      meeting_(meeting) {}

void OverlapQueues::Record(int event, cudaStream_t stream) {
  cudaEvent_t found = nullptr;
  arithmetic_->Check(lanes_->event(event, &found), "making an event");
  if (found) arithmetic_->Check(cudaEventRecord(found, stream), "recording an event");
}

void OverlapQueues::Wait(int event, cudaStream_t stream) {
  cudaEvent_t found = nullptr;
  arithmetic_->Check(lanes_->event(event, &found), "making an event");
  if (found) arithmetic_->Check(cudaStreamWaitEvent(stream, found, 0), "waiting for an event");
}

void OverlapQueues::Fork(cudaStream_t stream) {
  const int event = num_events_++;
  Record(event, stream);
  for (cudaStream_t lane : lanes_->streams()) Wait(event, lane);
}

void OverlapQueues::Join(cudaStream_t stream) {
  for (cudaStream_t lane : lanes_->streams()) {
    const int event = num_events_++;
    Record(event, lane);
    Wait(event, stream);
  }
}

void OverlapQueues::Choose(int rank, Lane lane) {
  const int local = rank - call_.first_rank;
  chosen_ = lanes_->stream(local, lane);
  arithmetic_->Choose(chosen_, &scratch_[local]);
}

int OverlapQueues::RecordEvent() {
  Record(num_events_, chosen_);
  return num_events_++;
}

void OverlapQueues::WaitForEvent(int event) { Wait(event, chosen_); }

void OverlapQueues::SignalPeer(int, int peer, int signal) {
  // After an error, nothing is signalled: no rank should read what was not computed.
  if (!arithmetic_->status().ok()) return;
  arithmetic_->Check(LaunchTell(*meeting_, peer, signal, chosen_), "launching a signal");
}

void OverlapQueues::WaitForPeer(int, int peer, int signal) {
  arithmetic_->Check(LaunchWaitFor(*meeting_, peer, signal, chosen_), "launching a wait");
}

void OverlapQueues::BeginSpan(int rank, SpanKind kind, const std::string& name) {
  if (!call_.has_spans) return;
  span_ =
      GpuSpans::Get().Begin({call_.op, call_.group, rank, kind, name, 0, 0}, call_.device, chosen_);
}

void OverlapQueues::EndSpan() {
  if (call_.has_spans) GpuSpans::Get().End(span_, chosen_);
}

}  // namespace cpd
