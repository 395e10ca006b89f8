// The GPUs of one process meet before they first execute a call; here each GPU is a thread.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "gpu_schedule/first_meeting.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_first_meeting {

using std::chrono::milliseconds;

constexpr milliseconds kNever{1'000'000};  // longer than any test

// A call of one program by groups of ranks, as its GPUs run it. The last ranks of each group are in
// other processes.
struct Program {
  int num_ranks, num_local;
  milliseconds deadline = kNever;
  FirstMeeting meeting = {};

  Status Execute(int rank, int64_t run_id = 1, int group = 0) {
    std::vector<int64_t> devices;
    for (int r = 0; r < num_ranks; ++r) {
      devices.push_back((r < num_local ? 0 : r) << 16 | (group * num_ranks + r));
    }
    return meeting.Arrive({"dispatch", run_id, devices, rank, deadline});
  }
};

// One GPU takes long to initialize. None executes before it has ended. Later runs do not wait.
void NoneExecutesBeforeAllAreInitialized() {
  constexpr int kRanks = 8;
  Program program{kRanks, kRanks};
  std::atomic<int> num_initialized{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      if (rank == 5) std::this_thread::sleep_for(milliseconds(50));
      ++num_initialized;
      CHECK(program.Execute(rank).ok());
      CHECK(num_initialized == kRanks);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(program.Execute(3, /*run_id=*/2).ok());
}

// Ranks wait neither for other groups nor for other processes.
void OnlyLocalRanksOfTheGroupAreAwaited() {
  Program program{4, 2};
  std::thread waits([&] { CHECK(program.Execute(0, 1, /*group=*/1).ok()); });
  std::thread other([&] { CHECK(program.Execute(1, 1, /*group=*/0).ok()); });
  CHECK(program.Execute(0, 1, /*group=*/0).ok());
  other.join();
  CHECK(program.Execute(1, /*run_id=*/2, /*group=*/1).ok());  // two executions in flight
  waits.join();
  CHECK((Program{4, 1}.Execute(0).ok()));
}

void AMissingRankIsNamed() {
  Program program{4, 3, milliseconds(20)};
  std::vector<Status> found(2);
  std::thread other([&] { found[1] = program.Execute(2); });
  found[0] = program.Execute(0);
  other.join();
  for (const int rank : {1, 1, 0}) found.push_back(program.Execute(rank));  // too late
  CHECK(found[0].code == StatusCode::kDeadlineExceeded);
  CHECK(Contains(found[0],
                 "waited 20 ms for the other GPUs of this process to begin the program: "
                 "expected 3 ranks, seen "));
  CHECK(Contains(found[2], "missing ranks [1"));
  for (const Status& status : found) CHECK(status.message == found[0].message);
}

// A GPU that fails in any call fails this execution on all of them, not the next one.
void ARefusalEndsTheExecution() {
  Program program{2, 2};
  std::thread waits([&] { CHECK(Contains(program.Execute(0, /*run_id=*/7), "no memory")); });
  FirstMeeting::Refuse(7, Status::Internal("no memory"));
  waits.join();
  CHECK(Contains(Program{2, 2}.Execute(0, 7), "no memory"));  // another call of the program
  CHECK(Contains(program.Execute(0, 7), "no memory"));
  std::thread next([&] { CHECK(program.Execute(0, 8).ok()); });
  CHECK(program.Execute(1, 8).ok());
  next.join();
}

const Register kTests("test_first_meeting", [](const Numbers&) {
  NoneExecutesBeforeAllAreInitialized();
  OnlyLocalRanksOfTheGroupAreAwaited();
  AMissingRankIsNamed();
  ARefusalEndsTheExecution();
});

}  // namespace cpd::test_first_meeting
