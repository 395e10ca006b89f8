// The transport interface: ranks meet, their common work is planned once, run, and completed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace cpd {

// Three years, the longest that Python lets through: clocks count nanoseconds in 64 bits.
constexpr std::chrono::milliseconds kLongestDeadline{100'000'000'000};

// More rows than any array has: sums and products of a few such numbers stay far from 2^63.
constexpr int64_t kMostRows = int64_t{1} << 48;

enum class StatusCode { kOk, kInvalidArgument, kDeadlineExceeded, kInternal };

struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
  static Status Ok() { return {}; }
  static Status Invalid(std::string message) {
    return {StatusCode::kInvalidArgument, std::move(message)};
  }
};

// Names one exchange. `run_id` is the same on all ranks of one execution of a program, `call_site`
// tells the calls of one program apart, `group` the independent groups of one call (the other axes
// of a larger mesh). A loop meets under the same key again, once the previous round is over.
struct ExchangeKey {
  int64_t run_id;
  int64_t call_site;
  int64_t group;

  bool operator<(const ExchangeKey& other) const {
    if (run_id != other.run_id) return run_id < other.run_id;
    if (call_site != other.call_site) return call_site < other.call_site;
    return group < other.group;
  }
};

// An array of one rank that ranks of other processes read: `shared` becomes the address at which
// this process finds the rows that they do.
struct SharedArray {
  char** shared;
  int64_t num_bytes;
};

// What one rank brings to an exchange. The transport keeps it alive until the exchange is over.
class Contribution {
 public:
  virtual ~Contribution() = default;

  // For ranks of other processes: everything but the arrays themselves, and which of those they
  // may read, in an order that does not depend on the process.
  virtual std::string Write() const { return {}; }
  virtual std::vector<SharedArray> SharedArrays() { return {}; }
};

// What `Write` wrote, in another process; none: the bytes are not that.
using ContributionReader = std::function<std::unique_ptr<Contribution>(std::string_view bytes)>;

// Rows on their way to ranks of other processes: copied to where those read them.
struct StagedCopy {
  char* to;
  const char* from;
  int64_t num_bytes;
};

// Memory that pieces of work write and ranks of other processes read where it is.
struct SharedRange {
  char* begin;
  int64_t num_bytes;
};

// Ranks of other processes, for pieces of work that wait for them: counters of theirs can be added
// to, their memory only read.
struct Elsewhere {
  std::vector<bool> holds;  // by rank; none: all ranks are here
  // Tells the process of `rank`, which calls `WorkList::add`. What has been written before is seen
  // by who has waited for it.
  std::function<void(int rank, int counter)> add = {};
  std::function<std::string(int rank)> name = {};  // of its process, for messages

  bool Holds(int rank) const { return !holds.empty() && holds[rank]; }
};

// Pieces of work, each run exactly once. They must not throw.
struct WorkList {
  int64_t num_tasks = 0;
  std::function<void(int64_t task)> run;

  // Made before, and before any rank elsewhere runs its pieces.
  std::vector<StagedCopy> staging = {};
  std::vector<SharedRange> written = {};

  // Whether pieces wait for one another: all of them then run at the same time, each on a thread of
  // its own. Otherwise any thread may run any piece, and none may wait.
  bool tasks_wait = false;
  // Holds the work back until its argument is called, from any thread; none: at once.
  std::function<void(std::function<void()> begin)> gate = {};
  // What became of it, asked when the last piece is over; none: it succeeded.
  std::function<Status()> outcome = {};

  // ---- Of pieces that wait for ranks of other processes.
  Elsewhere elsewhere = {};  // in: known to the planner
  // A rank elsewhere has added to a counter of a rank here. Does not wait.
  std::function<void(int rank, int counter)> add = {};
  // Ends all waiting: what is waited for will not come.
  std::function<void(const Status&)> fail = {};
};

// Looks at the contributions of all ranks together, in rank order: either all of them are valid and
// `work` becomes the copies to make, or the error is for every rank.
using Planner =
    std::function<Status(const std::vector<std::unique_ptr<Contribution>>&, WorkList* work)>;

// Called exactly once per rank. It may run the rest of that rank's program, so it can take long.
using Completion = std::function<void(const Status&)>;

// Offers a piece of work to another thread, which may run it at any later time or never.
using Scheduler = std::function<void(std::function<void()>)>;

struct Exchange {
  std::string op;  // for messages: "dispatch over axis 'cp'"
  ExchangeKey key;
  int num_ranks;
  std::chrono::milliseconds deadline;
  Planner planner;

  // ---- Between processes. What is pointed to lives as long as the program.
  const std::vector<int>* processes = nullptr;  // of each rank; none: all ranks are here
  std::string_view signature = {};              // operation, shapes and attributes, for messages
  ContributionReader reader = {};
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Brings `contribution` as `rank` and returns at once: it never waits for a peer. `completion`
  // runs when the exchange is over for all ranks: done, or failed for every one of them. A failure
  // fails every unfinished exchange of the same execution (run_id), and those still to come.
  virtual void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
                    Completion completion, int num_helpers, const Scheduler& scheduler) = 0;

  // Fails everything unfinished or still to come of this execution, as a failed exchange does.
  virtual void Fail(int64_t run_id, const Status& status, std::chrono::milliseconds deadline) = 0;

  // A rank that cannot join: it and everything unfinished or still to come of this execution fails.
  virtual void Refuse(const Exchange& exchange, const Status& status, Completion completion) = 0;
};

}  // namespace cpd
