// Streams on a virtual clock that only their work advances: the duration of a schedule for given
// times of products and copies. The result does not depend on the actual threads.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ranks.h"
#include "transport/team.h"

namespace cpd {

class VirtualStreams {
 public:
  struct Times {
    std::function<double(const std::vector<RowCopy>&)> put;  // of a put
    double read;  // of other communication, in which a rank reads from its peers
  };

  // Work on a stream states its duration.
  static void Pass(double seconds) { now_ += seconds; }

  VirtualStreams(Schedule schedule, int num_signals, Times times)
      : schedule_(std::move(schedule)), times_(std::move(times)) {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      counters_.push_back(std::make_unique<RankCounters>(this, num_signals));
    }
  }

  // Steps in which a rank reads from its peers.
  int num_reads(int rank) const {
    int num = 0;
    for (const int i : {2 * rank, 2 * rank + 1}) {
      for (const Step& step : schedule_.streams[i].steps) num += IsRead(step);
    }
    return num;
  }

  // From the start of all streams to the end of the last one.
  double Run() {
    std::vector<double> ends(schedule_.streams.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ends.size(); ++i) {
      threads.emplace_back([this, i, &ends] {
        now_ = 0;
        for (const Step& step : schedule_.streams[i].steps) RunStep(*counters_[i / 2], step);
        ends[i] = now_;
      });
    }
    for (std::thread& thread : threads) thread.join();
    return *std::max_element(ends.begin(), ends.end());
  }

 private:
  // Each signal is added to once; streams that wait for it continue at that time.
  class RankCounters final : public Counters {
   public:
    RankCounters(VirtualStreams* all, int num_signals) : all_(all), added_at_(num_signals, -1) {}

    void Add(int rank, const Signal& signal) override {
      all_->counters_[rank]->AddHere(signal.index);
    }
    bool WaitFor(const Signal& signal, int64_t count, int) override {
      CHECK(count == 1);
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return added_at_[signal.index] >= 0; });
      now_ = std::max(now_, added_at_[signal.index]);
      return true;
    }

   private:
    void AddHere(int signal) {
      std::lock_guard<std::mutex> lock(mutex_);
      CHECK(added_at_[signal] < 0);
      added_at_[signal] = now_;
      changed_.notify_all();
    }

    VirtualStreams* const all_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<double> added_at_;
  };

  static bool IsRead(const Step& step) {
    return step.kind == Step::Kind::kRun && step.span == SpanKind::kCommunication;
  }

  void RunStep(Counters& own, const Step& step) const {
    if (IsRead(step)) Pass(times_.read);
    switch (step.kind) {
      case Step::Kind::kRun: return step.work(own);
      case Step::Kind::kPut: Pass(times_.put(step.copies)); return own.Add(step.peer, step.signal);
      case Step::Kind::kAdd: return own.Add(step.peer, step.signal);
      case Step::Kind::kWait: own.WaitFor(step.signal, step.count, step.peer);
    }
  }

  static inline thread_local double now_ = 0;  // of the stream that runs on this thread

  const Schedule schedule_;
  const Times times_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
};

}  // namespace cpd
