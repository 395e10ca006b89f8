// Recorded spans: what each rank did and when.
#include "transport/spans.h"

#include <chrono>
#include <utility>

namespace cpd {

int64_t SteadyNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

SpanRecorder& SpanRecorder::Get() {
  static auto* recorder = new SpanRecorder;  // never destroyed: streams may run during exit()
  return *recorder;
}

void SpanRecorder::Start() {
  std::lock_guard<std::mutex> lock(mutex_);
  spans_.clear();
  enabled_ = true;
}

std::vector<RecordedSpan> SpanRecorder::Stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  enabled_ = false;
  return std::exchange(spans_, {});
}

void SpanRecorder::Record(RecordedSpan span) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (enabled_) spans_.push_back(std::move(span));
}

SpanScope::SpanScope(const std::string& op, int group, int rank, SpanKind kind,
                     const std::string& name)
    : op_(op),
      group_(group),
      rank_(rank),
      kind_(kind),
      name_(name),
      start_ns_(SpanRecorder::Get().enabled() ? SteadyNanoseconds() : -1) {}

SpanScope::~SpanScope() {
  if (start_ns_ < 0) return;
  SpanRecorder::Get().Record(
      {op_, group_, rank_, kind_, name_, start_ns_, SteadyNanoseconds() - start_ns_});
}

}  // namespace cpd
