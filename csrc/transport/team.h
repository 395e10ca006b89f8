// Streams of ranks: recorded first, then run, each on its own thread. Of ranks in other processes,
// only their puts to local ranks run here: local ranks fetch those.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/streams.h"
#include "transport/transport.h"

namespace cpd {

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

  RankStreams streams(int rank);

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
  class RecordedStream;

  // Each signal has a second counter: of its puts that their rank has staged, so that they can be
  // fetched.
  Signal Fetchable(const Signal& signal) const;
  std::string NameOf(int rank) const;

  const Call call_;
  const int num_signals_;
  const Link link_;
  const Elsewhere elsewhere_;
  std::mutex mutex_;
  Status status_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
  std::vector<std::unique_ptr<RecordedStream>> streams_;  // two per rank
};

}  // namespace cpd
