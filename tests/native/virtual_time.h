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

  VirtualStreams(int num_ranks, int num_signals, Times times) : times_(std::move(times)) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      counters_.push_back(std::make_unique<RankCounters>(this, num_signals));
      for (int i = 0; i < 2; ++i) lines_.push_back(std::make_unique<Line>(this, rank));
    }
  }

  RankStreams streams(int rank) { return {*lines_[2 * rank], *lines_[2 * rank + 1]}; }
  int num_reads(int rank) const {
    return lines_[2 * rank]->num_reads() + lines_[2 * rank + 1]->num_reads();
  }

  // From the start of all streams to the end of the last one.
  double Run() {
    std::vector<double> ends(lines_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < lines_.size(); ++i) {
      threads.emplace_back([this, i, &ends] {
        now_ = 0;
        lines_[i]->RunAll();
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

  class Line final : public Stream {
   public:
    Line(VirtualStreams* all, int rank) : all_(all), rank_(rank) {}

    void Run(SpanKind kind, std::string, std::function<void(Counters&)> work) override {
      const bool is_read = kind == SpanKind::kCommunication;
      num_reads_ += is_read;
      steps_.push_back([this, is_read, work = std::move(work)] {
        if (is_read) Pass(all_->times_.read);
        work(own());
      });
    }
    void Put(std::string, int peer, std::vector<RowCopy> copies, Signal signal) override {
      steps_.push_back([this, peer, copies = std::move(copies), signal = std::move(signal)] {
        Pass(all_->times_.put(copies));
        own().Add(peer, signal);
      });
    }
    void Add(int peer, Signal signal) override {
      steps_.push_back([this, peer, signal = std::move(signal)] { own().Add(peer, signal); });
    }
    void Wait(Signal signal, int64_t count, int peer) override {
      steps_.push_back(
          [this, signal = std::move(signal), count, peer] { own().WaitFor(signal, count, peer); });
    }

    int num_reads() const { return num_reads_; }
    void RunAll() {
      for (const auto& step : steps_) step();
    }

   private:
    Counters& own() { return *all_->counters_[rank_]; }

    VirtualStreams* const all_;
    const int rank_;
    int num_reads_ = 0;
    std::vector<std::function<void()>> steps_;
  };

  static inline thread_local double now_ = 0;  // of the stream that runs on this thread

  const Times times_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
  std::vector<std::unique_ptr<Line>> lines_;  // two per rank
};

}  // namespace cpd
