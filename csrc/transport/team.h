// Recorded spans: what each rank did and when.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/streams.h"
#include "transport/transport.h"

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

// ---- Streams of ranks: recorded first, then run, each on its own thread. Of ranks in other
// processes, only their puts to local ranks run here: local ranks fetch those.

// How the bytes of a put reach the peer; tests replace it with a slow link.
using Link = std::function<void(const std::vector<RowCopy>&)>;

void CopyRows(const std::vector<RowCopy>& copies);

// The ranks of one call that have met. Its tasks wait for one another, so all of them must run at
// the same time.
class Team {
 public:
  // The call, for messages and spans, and how long its tasks wait.
  struct Call {
    std::string op;
    int group;
    std::chrono::milliseconds deadline;
  };

  Team(Call call, int num_ranks, int num_signals, Link link = CopyRows, Elsewhere elsewhere = {});
  ~Team();

  RankStreams streams(int rank) { return schedule_.streams(rank); }

  // The tasks after recording: the streams that are not empty.
  std::vector<int> Tasks() const;

  // Runs a stream to its end, or to the first failure of any rank.
  void Run(int task);

  // Of all ranks; final when all tasks have ended.
  Status status();

  // A rank elsewhere has added to a counter of a local rank. Ignores unknown ranks and counters.
  void Add(int rank, int counter);

  // Ends all waiting. The first failure is reported.
  void Fail(Status status);

 private:
  class RankCounters;

  // Whether a step of `rank` runs in this process: of ranks elsewhere, their puts to local ranks.
  bool RunsHere(int rank, const Step& step) const;
  bool RunStep(int rank, const Step& step);  // false: the stream ends here
  template <typename Work>
  void Span(int rank, SpanKind kind, const std::string& name, const Work& work) const;
  // Each signal has a second counter: of its puts that their rank has staged, so that they can be
  // fetched.
  Signal Fetchable(const Signal& signal) const {
    return {num_signals_ + signal.index, signal.name};
  }
  std::string NameOf(int rank) const;

  const Call call_;
  const int num_signals_;
  const Link link_;
  const Elsewhere elsewhere_;
  RecordedSchedule schedule_;
  std::mutex mutex_;
  Status status_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
};

}  // namespace cpd
