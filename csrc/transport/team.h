// Streams of ranks that are threads of one process: recorded, then run, each on its own thread.
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
       std::chrono::milliseconds deadline, Link link = CopyRows);
  ~Team();

  RankStreams streams(int rank);

  // What there is to run, when all is recorded: the streams that have something to do.
  std::vector<int> Tasks() const;

  // Runs a stream from its beginning to its end, or to the first failure of any rank.
  void Run(int task);

  // Of all ranks; final when all tasks have ended.
  Status status();

 private:
  class RankCounters;
  class RecordedStream;

  void Fail(Status status);

  const std::string op_;
  const int group_;
  const std::chrono::milliseconds deadline_;
  const Link link_;
  std::mutex mutex_;
  Status status_;
  std::vector<std::unique_ptr<RankCounters>> counters_;
  std::vector<std::unique_ptr<RecordedStream>> streams_;  // two per rank
};

}  // namespace cpd
