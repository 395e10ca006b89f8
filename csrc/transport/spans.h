// What ranks did and when, recorded while somebody wants to see it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "transport/streams.h"

namespace cpd {

// The clock of all spans, a monotonic one.
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

// All functions may be called from any thread.
class SpanRecorder {
 public:
  static SpanRecorder& Get();

  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Start();                      // forgets what was recorded before
  std::vector<RecordedSpan> Stop();  // in the order in which they ended
  void Record(RecordedSpan span);

 private:
  std::atomic<bool> enabled_{false};
  std::mutex mutex_;
  std::vector<RecordedSpan> spans_;
};

// From its construction to its end. The strings outlive it.
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
  const int64_t start_ns_;  // -1: nobody wants to see it
};

}  // namespace cpd
