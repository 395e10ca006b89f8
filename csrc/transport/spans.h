// Recorded spans: what each rank did and when.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "transport/streams.h"

namespace cpd {

// The monotonic clock of all spans.
int64_t SteadyNanoseconds();

struct RecordedSpan {
  std::string op;
  int group;
  int rank;
  SpanKind kind;
  std::string name;
  int64_t start_ns;
  int64_t duration_ns;
};

// All functions are thread-safe.
class SpanRecorder {
 public:
  static SpanRecorder& Get();

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Start();                      // clears earlier spans
  std::vector<RecordedSpan> Stop();  // in the order of their ends
  void Record(RecordedSpan span);

 private:
  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<RecordedSpan> spans_;
};

// Records from construction to destruction. The strings must outlive it.
class SpanScope {
 public:
  SpanScope(const std::string& op, int group, int rank, SpanKind kind, const std::string& name);
  ~SpanScope();
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  const std::string& op_;
  const int group_;
  const int rank_;
  const SpanKind kind_;
  const std::string& name_;
  const int64_t start_ns_;  // -1: not recording
};

}  // namespace cpd
