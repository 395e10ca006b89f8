// Streams of ranks, recorded, then run, each on its own thread. Of ranks in other processes only
// what they put to ranks here runs here: these fetch it.
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

// How bytes of a put get to the peer; for tests, a link that takes its time.
using Link = std::function<void(const std::vector<RowCopy>&)>;

void CopyRows(const std::vector<RowCopy>& pieces);

// The ranks of one call that have met. Its tasks wait for one another: all of them have to run at
// the same time.
class Team {
 public:
  Team(std::string op, int group, int num_ranks, int num_signals,
       std::chrono::milliseconds deadline, Link link = CopyRows, Elsewhere elsewhere = {});
  ~Team();

  RankStreams streams(int rank);

  // What there is to run, when all is recorded: the streams that have something to do.
  std::vector<int> Tasks() const;

  // Runs a stream from its beginning to its end, or to the first failure of any rank.
  void Run(int task);

  // Of all ranks; final when all tasks have ended.
  Status status();

  // A rank elsewhere has added to a counter of a rank here. What is none is ignored.
  void Add(int rank, int counter);

  // Ends all waiting. The first one says why.
  void Fail(Status status);

 private:
  class RankCounters;
  class RecordedStream;

  // Behind the signals there is a counter for each of them: what is put with it lies where its rank
  // has it, and can be fetched.
  Signal Fetchable(const Signal& signal) const;
  std::string NameOf(int rank) const;

  const std::string op_;
  const int group_;
  const int num_signals_;
  const std::chrono::milliseconds deadline_;
  const Link link_;
  const Elsewhere elsewhere_;
  std::mutex mutex_;
  Status status_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
  std::vector<std::unique_ptr<RecordedStream>> streams_;  // two per rank
};

}  // namespace cpd
