// The transport interface: ranks meet; their common work is planned once, runs, and completes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace cpd {

// Three years, the maximum that Python accepts: clocks count nanoseconds in 64 bits.
constexpr std::chrono::milliseconds kLongestDeadline{100'000'000'000};

// FNV-1a, the same in all processes.
inline uint64_t HashOf(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

// More rows than any array has: sums and products of a few such numbers stay far below 2^63.
constexpr int64_t kMostRows = int64_t{1} << 48;

enum class StatusCode { kOk, kInvalidArgument, kDeadlineExceeded, kInternal };

struct Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }
  static Status Ok() { return {}; }
  // The message is the text of these values, one after another.
  template <typename... Parts>
  static Status Invalid(const Parts&... parts) {
    return Of(StatusCode::kInvalidArgument, parts...);
  }
  template <typename... Parts>
  static Status Internal(const Parts&... parts) {
    return Of(StatusCode::kInternal, parts...);
  }
  template <typename... Parts>
  static Status Of(StatusCode code, const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    return {code, message.str()};
  }
};

// Identifies one exchange. `run_id` is the same on all ranks of one execution of a program.
// `call_site` distinguishes the calls of one program, and `group` the independent groups of one
// call (the other axes of a larger mesh). A loop uses the same key again once the previous round is
// over.
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

// An array of one rank that ranks of other processes read. `shared` is set to the address at which
// this process sees the staged rows.
struct SharedArray {
  char** shared;
  int64_t num_bytes;
};

// What one rank contributes to an exchange. The transport keeps it alive until the exchange is
// over.
class Contribution {
 public:
  virtual ~Contribution() = default;

  // For ranks of other processes: `Write` gives everything but the arrays; `SharedArrays` gives the
  // arrays that they may read, in an order that does not depend on the process.
  virtual std::string Write() const { return {}; }
  virtual std::vector<SharedArray> SharedArrays() { return {}; }
};

// Reads the bytes of `Write` in another process. Returns nullptr if they are invalid.
using ContributionReader = std::function<std::unique_ptr<Contribution>(std::string_view bytes)>;

// Rows for ranks of other processes, copied to where those read them.
struct StagedCopy {
  char* to;
  const char* from;
  int64_t num_bytes;
};

// Memory that tasks write and ranks of other processes read in place.
struct SharedRange {
  char* begin;
  int64_t num_bytes;
};

// Ranks of other processes, for tasks that wait for them: local tasks can add to their counters and
// read their memory.
struct Elsewhere {
  std::vector<bool> holds;  // by rank; empty: all ranks are in this process
  // Notifies the process of `rank`, which calls `WorkList::add`. Earlier writes are visible to
  // a stream that has waited for it.
  std::function<void(int rank, int counter)> add = {};
  std::function<std::string(int rank)> name = {};  // the process of a rank, for messages

  bool Holds(int rank) const { return !holds.empty() && holds[rank]; }
};

// Tasks, each run exactly once. They must not throw.
struct WorkList {
  int64_t num_tasks = 0;
  std::function<void(int64_t task)> run;

  // Copies made first, before any rank elsewhere runs its tasks.
  std::vector<StagedCopy> staging = {};
  std::vector<SharedRange> written = {};

  // Whether tasks wait for one another: then all of them run at the same time, each on its own
  // thread. Otherwise any thread may run any task, and none may wait.
  bool tasks_wait = false;
  // Delays the work until its argument is called, from any thread. Empty: no delay.
  std::function<void(std::function<void()> begin)> gate = {};
  // The result, asked for when the last task is over. Empty: success.
  std::function<Status()> outcome = {};

  // ---- For tasks that wait for ranks of other processes.
  Elsewhere elsewhere = {};  // input: known to the planner
  // A rank elsewhere has added to a counter of a local rank. Does not block.
  std::function<void(int rank, int counter)> add = {};
  // Ends all waiting: the awaited signals will not come.
  std::function<void(const Status&)> fail = {};
};

// Checks the contributions of all ranks together, in rank order. If all of them are valid, `work`
// becomes the copies to make; otherwise every rank gets the error.
using Planner =
    std::function<Status(const std::vector<std::unique_ptr<Contribution>>&, WorkList* work)>;

// Called exactly once per rank. It may run the rest of that rank's program, so it can take long.
using Completion = std::function<void(const Status&)>;

// Offers a task to another thread, which may run it at any later time or never.
using Scheduler = std::function<void(std::function<void()>)>;

struct Exchange {
  std::string op;  // for messages: "dispatch over axis 'cp'"
  ExchangeKey key;
  int num_ranks;
  std::chrono::milliseconds deadline;
  Planner planner;

  // ---- Between processes. The pointers are valid as long as the program.
  const std::vector<int>* processes = nullptr;  // by rank; nullptr: all ranks are in this process
  std::string_view signature = {};              // operation, shapes and attributes, for messages
  ContributionReader reader = {};
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Adds `contribution` for `rank` and returns at once: it never waits for a peer. `completion`
  // runs when the exchange is over for all ranks: it succeeded, or failed for every one of them. A
  // failure also fails every unfinished and every later exchange of the same execution (run_id).
  virtual void Join(const Exchange& exchange, int rank, std::unique_ptr<Contribution> contribution,
                    Completion completion, int num_helpers, const Scheduler& scheduler) = 0;

  // For a rank that cannot join: fails it, and all unfinished and later exchanges of this
  // execution.
  virtual void Refuse(const Exchange& exchange, const Status& status, Completion completion) = 0;
};

}  // namespace cpd
