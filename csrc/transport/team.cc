// Recorded spans: what each rank did and when.
#include "transport/team.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
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

// ---- Streams of ranks: recorded first, then run, each on its own thread. Of ranks in other
// processes, only their puts to local ranks run here: local ranks fetch those.

namespace {

constexpr int kStreamsPerRank = 2;

}  // namespace

void CopyRows(const std::vector<RowCopy>& copies) {
  for (const RowCopy& copy : copies) {
    if (copy.to_pitch == copy.row_bytes && copy.from_pitch == copy.row_bytes) {
      std::memcpy(copy.to, copy.from, copy.num_rows * copy.row_bytes);
      continue;
    }
    for (int64_t i = 0; i < copy.num_rows; ++i) {
      std::memcpy(copy.to + i * copy.to_pitch, copy.from + i * copy.from_pitch, copy.row_bytes);
    }
  }
}

// The signals of one rank. The sender adds after its copy, under the lock that the waiting stream
// takes.
class Team::RankCounters final : public Counters {
 public:
  RankCounters(Team* team, int rank, int num_counters)
      : team_(team), rank_(rank), counts_(num_counters, 0) {}

  void Add(int rank, const Signal& signal) override {
    if (team_->elsewhere_.Holds(rank)) {
      team_->elsewhere_.add(rank, signal.index);
    } else {
      team_->Add(rank, signal.index);
    }
  }

  void Count(int counter) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++counts_[counter];
    }
    changed_.notify_all();
  }

  bool WaitFor(const Signal& signal, int64_t count, int peer) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_over = [&] { return failed_ || counts_[signal.index] >= count; };
    if (!changed_.wait_for(lock, team_->call_.deadline, is_over)) {
      const Status late = Status::Of(
          StatusCode::kDeadlineExceeded, team_->call_.op, ": rank ", rank_, " waited ",
          team_->call_.deadline.count(), " ms for rank ", team_->NameOf(peer), ", signal '",
          signal.name, "': expected ", count, ", seen ", counts_[signal.index],
          ". The rank has arrived, but its part is not done: check whether it is stopped or the "
          "machine is overloaded, or pass a longer deadline.");
      lock.unlock();
      team_->Fail(late);
      return false;
    }
    return !failed_;
  }

  void WakeToFail() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failed_ = true;
    }
    changed_.notify_all();
  }

 private:
  Team* const team_;
  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> counts_;
  bool failed_ = false;
};

class Team::RecordedStream final : public Stream {
 public:
  RecordedStream(Team* team, int rank)
      : team_(team), rank_(rank), is_elsewhere_(team->elsewhere_.Holds(rank)) {}

  void Run(SpanKind kind, std::string name, std::function<void(Counters&)> work) override {
    if (is_elsewhere_) return;
    steps_.push_back([this, kind, name = std::move(name), work = std::move(work)] {
      const SpanScope span(team_->call_.op, team_->call_.group, rank_, kind, name);
      work(*team_->counters_[rank_]);
      return true;
    });
  }

  // Processes do not write each other's memory: the peer is notified and fetches the rows.
  void Put(std::string name, int peer, std::vector<RowCopy> copies, Signal signal) override {
    if (team_->elsewhere_.Holds(peer)) return Add(peer, team_->Fetchable(signal));
    if (is_elsewhere_) {
      steps_.push_back([this, peer, fetchable = team_->Fetchable(signal)] {
        return team_->counters_[peer]->WaitFor(fetchable, 1, rank_);
      });
      name += " from rank " + std::to_string(rank_);
    }
    const int copier = is_elsewhere_ ? peer : rank_;
    steps_.push_back([this, copier, name = std::move(name), peer, copies = std::move(copies),
                      signal = std::move(signal)] {
      {
        const SpanScope span(team_->call_.op, team_->call_.group, copier, SpanKind::kCommunication,
                             name);
        team_->link_(copies);
      }
      team_->counters_[copier]->Add(peer, signal);
      return true;
    });
  }

  void Add(int peer, Signal signal) override {
    if (is_elsewhere_) return;  // its process notifies this one
    steps_.push_back([this, peer, signal = std::move(signal)] {
      team_->counters_[rank_]->Add(peer, signal);
      return true;
    });
  }

  void Wait(Signal signal, int64_t count, int peer) override {
    if (is_elsewhere_) return;
    steps_.push_back([this, signal = std::move(signal), count, peer] {
      return team_->counters_[rank_]->WaitFor(signal, count, peer);
    });
  }

  bool empty() const { return steps_.empty(); }

  void RunAll() {
    try {
      for (const auto& step : steps_) {
        if (!step() || !team_->status().ok()) return;
      }
    } catch (const std::exception& error) {  // no memory: the others must not wait for it
      team_->Fail(Status::Internal(team_->call_.op,
                                   (is_elsewhere_ ? ": fetching from rank " : ": rank "), rank_,
                                   " threw ", error.what()));
    }
  }

 private:
  Team* const team_;
  const int rank_;
  const bool is_elsewhere_;
  std::vector<std::function<bool()>> steps_;  // false: the stream ends here
};

Team::Team(Call call, int num_ranks, int num_signals, Link link, Elsewhere elsewhere)
    : call_(std::move(call)),
      num_signals_(num_signals),
      link_(std::move(link)),
      elsewhere_(std::move(elsewhere)) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    counters_.push_back(std::make_unique<RankCounters>(this, rank, 2 * num_signals));
    for (int i = 0; i < kStreamsPerRank; ++i) {
      streams_.push_back(std::make_unique<RecordedStream>(this, rank));
    }
  }
}

Team::~Team() = default;

RankStreams Team::streams(int rank) {
  return {*streams_[kStreamsPerRank * rank], *streams_[kStreamsPerRank * rank + 1]};
}

std::vector<int> Team::Tasks() const {
  std::vector<int> tasks;
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (!streams_[i]->empty()) tasks.push_back(static_cast<int>(i));
  }
  return tasks;
}

void Team::Run(int task) { streams_[task]->RunAll(); }

Status Team::status() {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void Team::Add(int rank, int counter) {
  const bool is_one = rank >= 0 && rank < static_cast<int>(counters_.size()) && counter >= 0 &&
                      counter < 2 * num_signals_;
  if (is_one) counters_[rank]->Count(counter);
}

Signal Team::Fetchable(const Signal& signal) const {
  return {num_signals_ + signal.index, signal.name};
}

std::string Team::NameOf(int rank) const {
  const std::string number = std::to_string(rank);
  return elsewhere_.Holds(rank) ? number + " of " + elsewhere_.name(rank) : number;
}

void Team::Fail(Status status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) return;  // the first failure is reported
    status_ = std::move(status);
  }
  for (auto& counters : counters_) counters->WakeToFail();
}

}  // namespace cpd
