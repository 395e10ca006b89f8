// The GPUs of one process meet on the host before they first execute a call of a program.
//
// The thread of each GPU initializes a program, then executes it. Initialization loads kernels and
// allocates memory, and may need a lock of the driver. Another thread may hold that lock until a
// GPU is idle, for example while it copies a result, and that GPU may wait, in an exchange, for one
// whose thread is still initializing: none of them ever continues. A GPU therefore enqueues its
// first exchange of a program when the threads of all GPUs that exchange with it have ended their
// initialization. XLA does the same for programs with collectives of its own.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/completion_pool.h"
#include "transport/transport.h"

namespace cpd {

// One per custom call of a program, for all its executions and groups of ranks.
class FirstMeeting {
 public:
  struct Arrival {
    const std::string& op;
    int64_t run_id;  // the same on all GPUs of one execution
    // Of all ranks of the group, in order: process << 16 | GPU.
    const std::vector<int64_t>& devices;
    int rank;  // of the GPU that arrives
    std::chrono::milliseconds deadline;

    // Whether a rank is in the process of the one that arrives.
    bool IsLocal(size_t other) const { return devices[other] >> 16 == devices[rank] >> 16; }
    size_t NumLocal() const {
      size_t num = 0;
      for (size_t other = 0; other < devices.size(); ++other) num += IsLocal(other);
      return num;
    }
  };

  // Returns when all local ranks of the group have arrived, in this execution or an earlier one;
  // fails if they do not come by the deadline, or one of them has refused the execution. After a
  // missed deadline all later arrivals fail, also those of the late rank.
  Status Arrive(const Arrival& arrival) {
    const size_t num_local = arrival.NumLocal();
    if (num_local < 2) return Status::Ok();
    const auto deadline = std::min<std::chrono::milliseconds>(arrival.deadline, kLongest);
    Executions& all = Executions::Get();
    std::unique_lock<std::mutex> lock(all.mutex);
    Group& group = groups_[arrival.devices];
    if (group.is_open || !group.failure.ok()) return group.failure;
    group.arrived.insert(arrival.rank);
    if (group.arrived.size() == num_local) {
      group.is_open = true;
      all.changed.notify_all();
    }
    const Status* refusal = nullptr;
    const auto is_over = [&] {
      refusal = all.RefusalOf(arrival.run_id);
      return group.is_open || !group.failure.ok() || refusal != nullptr;
    };
    if (!all.changed.wait_for(lock, deadline, is_over)) {
      group.failure = WhyLate(arrival, deadline, group.arrived);
      all.changed.notify_all();
    }
    if (group.is_open || !group.failure.ok()) return group.failure;
    group.arrived.erase(arrival.rank);  // a later execution may succeed
    return *refusal;
  }

  // A GPU cannot execute a call in this execution, so it comes to no later call either: those that
  // wait for it at any call of the execution fail too.
  static void Refuse(int64_t run_id, const Status& why) {
    Executions& all = Executions::Get();
    std::lock_guard<std::mutex> lock(all.mutex);
    if (all.refusals.size() == kMostRefusals) all.refusals.erase(all.refusals.begin());
    all.refusals.emplace_back(run_id, why);
    all.changed.notify_all();
  }

 private:
  static constexpr size_t kMostRefusals = 64;  // of executions whose GPUs may still arrive
  // Ranks in other processes may compile or save for hours, but the GPUs of one process begin an
  // execution together. One that has not come by then has failed outside this package, for example
  // for want of memory, and XLA tells no other GPU.
  static constexpr std::chrono::minutes kLongest{10};

  // What all meetings of the process share.
  struct Executions {
    std::mutex mutex;  // protects the groups of all meetings too
    std::condition_variable changed;
    std::vector<std::pair<int64_t, Status>> refusals;  // by execution, the latest last

    static Executions& Get() {
      static auto* all = new Executions;  // never destroyed: threads of XLA may still wait
      return *all;
    }
    const Status* RefusalOf(int64_t run_id) const {
      for (const auto& [run, why] : refusals) {
        if (run == run_id) return &why;
      }
      return nullptr;
    }
  };

  struct Group {
    std::set<int> arrived;
    bool is_open = false;  // forever
    Status failure;        // a missed deadline
  };

  static Status WhyLate(const Arrival& arrival, std::chrono::milliseconds deadline,
                        const std::set<int>& arrived) {
    std::vector<bool> has_come(arrival.devices.size());
    for (size_t rank = 0; rank < has_come.size(); ++rank) {
      has_come[rank] = !arrival.IsLocal(rank) || arrived.count(static_cast<int>(rank)) > 0;
    }
    return Status::Of(
        StatusCode::kDeadlineExceeded, arrival.op, ": rank ", arrival.rank, " waited ",
        deadline.count(),
        " ms for the other GPUs of this process to begin the program: "
        "expected ",
        arrival.NumLocal(), " ranks, seen ", arrived.size(), ", missing ranks ",
        RankList(has_come, false),
        ". Such a GPU has failed, still loads the program, or its thread runs another one. All "
        "GPUs of a group must run the same programs in the same order; restart the program.");
  }

  std::map<std::vector<int64_t>, Group> groups_;
};

}  // namespace cpd
