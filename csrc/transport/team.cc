// Recorded spans: what each rank did and when.
#include "transport/team.h"

#include <algorithm>
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

// ---- Streams of ranks: recorded first, then run, each on its own thread. Of ranks in other
// processes, only their puts to local ranks run here: local ranks fetch those.

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

Team::Team(Call call, int num_ranks, int num_signals, Link link, Elsewhere elsewhere)
    : call_(std::move(call)),
      num_signals_(num_signals),
      link_(std::move(link)),
      elsewhere_(std::move(elsewhere)),
      schedule_(num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    counters_.push_back(std::make_unique<RankCounters>(this, rank, 2 * num_signals));
  }
}

Team::~Team() = default;

bool Team::RunsHere(int rank, const Step& step) const {
  return !elsewhere_.Holds(rank) || (step.kind == Step::Kind::kPut && !elsewhere_.Holds(step.peer));
}

std::vector<int> Team::Tasks() const {
  std::vector<int> tasks;
  for (int i = 0; i < schedule_.num_streams(); ++i) {
    const std::vector<Step>& steps = schedule_.steps(i);
    const auto runs = [&](const Step& step) { return RunsHere(i / 2, step); };
    if (std::any_of(steps.begin(), steps.end(), runs)) tasks.push_back(i);
  }
  return tasks;
}

void Team::Run(int task) {
  const int rank = task / 2;
  try {
    for (const Step& step : schedule_.steps(task)) {
      if (RunsHere(rank, step) && (!RunStep(rank, step) || !status().ok())) return;
    }
  } catch (const std::exception& error) {  // no memory: the others must not wait for it
    Fail(Status::Internal(call_.op, elsewhere_.Holds(rank) ? ": fetching from rank " : ": rank ",
                          rank, " threw ", error.what()));
  }
}

template <typename Work>
void Team::Span(int rank, SpanKind kind, const std::string& name, const Work& work) const {
  SpanRecorder& spans = SpanRecorder::Get();
  const int64_t start = spans.enabled() ? SteadyNanoseconds() : -1;
  work();
  if (start < 0) return;
  spans.Record({call_.op, call_.group, rank, kind, name, start, SteadyNanoseconds() - start});
}

bool Team::RunStep(int rank, const Step& step) {
  RankCounters& own = *counters_[rank];
  switch (step.kind) {
    case Step::Kind::kRun:
      Span(rank, step.span, step.name, [&] { step.work(own); });
      return true;
    case Step::Kind::kPut: {
      // Processes do not write each other's memory: the peer is notified and fetches the rows.
      if (elsewhere_.Holds(step.peer)) {
        own.Add(step.peer, Fetchable(step.signal));
        return true;
      }
      RankCounters& copier = elsewhere_.Holds(rank) ? *counters_[step.peer] : own;
      std::string name = step.name;
      if (&copier != &own) {
        if (!copier.WaitFor(Fetchable(step.signal), 1, rank)) return false;
        name += " from rank " + std::to_string(rank);
      }
      Span(&copier == &own ? rank : step.peer, step.span, name, [&] { link_(step.copies); });
      copier.Add(step.peer, step.signal);
      return true;
    }
    case Step::Kind::kAdd:
      own.Add(step.peer, step.signal);
      return true;
    case Step::Kind::kWait:
      return own.WaitFor(step.signal, step.count, step.peer);
  }
  return false;
}

Status Team::status() {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void Team::Add(int rank, int counter) {
  const bool is_one = rank >= 0 && rank < static_cast<int>(counters_.size()) && counter >= 0 &&
                      counter < 2 * num_signals_;
  if (is_one) counters_[rank]->Count(counter);
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
