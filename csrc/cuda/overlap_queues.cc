// The queues of one overlapped product on a device: CUDA streams and events, and signals between
// devices.
#include "cuda/overlap_queues.h"

#include <utility>

#include "cuda/gpu_spans.h"
#include "cuda/product_kernels.h"

namespace cpd {

OverlapQueues::OverlapQueues(std::string op, int device, int group, int first_rank,
                             std::vector<GemmScratch> scratch, Lanes* lanes,
                             GpuArithmetic* arithmetic, const kernels::Meeting* meeting,
                             bool has_spans)
    : op_(std::move(op)),
      device_(device),
      group_(group),
      first_rank_(first_rank),
      scratch_(std::move(scratch)),
      lanes_(lanes),
      arithmetic_(arithmetic),
      meeting_(meeting),
      has_spans_(has_spans) {}

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
  const int local = rank - first_rank_;
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
  if (has_spans_) span_ = GpuSpans::Get().Begin(op_, group_, rank, kind, name, device_, chosen_);
}

void OverlapQueues::EndSpan() {
  if (has_spans_) GpuSpans::Get().End(span_, chosen_);
}

}  // namespace cpd
