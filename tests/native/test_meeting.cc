// Ranks that meet on a GPU, on threads of the host: they signal, come late or run another program.
#include <cmath>
#include <thread>

#include "cuda/errors.h"
#include "device.h"
#include "kernels/meeting.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::kernels::test_meeting {

struct Ranks {
  explicit Ranks(int num_ranks, uint64_t deadline_ms = 60000)
      : memory(num_ranks), states(num_ranks), errors(num_ranks), meetings(num_ranks) {
    for (int r = 0; r < num_ranks; ++r) {
      memory[r].resize(MeetingBytes(num_ranks, 2) / 8);
      Meeting& m = meetings[r];
      m = {};
      m.state = &states[r];
      m.error = &errors[r];
      m.deadline_ns = deadline_ms * 1'000'000;
      m.program = 7;
      m.num_ranks = num_ranks;
      m.rank = r;
    }
    for (Meeting& m : meetings) {
      for (int r = 0; r < num_ranks; ++r) m.symmetric[r] = reinterpret_cast<char*>(&memory[r][0]);
    }
  }

  void Begin(int r) {
    Launch<BeginScratch>(
        1, 4, [&](const Block& b, BeginScratch* s) { kernels::Begin(b, meetings[r], s); });
  }
  void End(int r, char* result = nullptr, int64_t num_bytes = 0) {
    const MeetingResults results{&states[r], {result}, {num_bytes}};
    Launch<int>(2, 2, [&](const Block& b, int*) { kernels::End(b, results); });
  }
  std::string Error(int r) const {
    return errors[r].raised == 0 ? "" : Describe("op", errors[r], meetings[r].num_ranks, 1);
  }

  std::vector<std::vector<uint64_t>> memory;
  std::vector<State> states;
  std::vector<ErrorRecord> errors;
  std::vector<Meeting> meetings;
};

template <typename Work>
void OnThreads(int num_ranks, Work work) {
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) threads.emplace_back(work, r);
  for (std::thread& thread : threads) thread.join();
}

// In every call, data that a rank puts before its signal is visible to the rank that has waited.
void RanksMeet() {
  constexpr int kRanks = 3;
  Ranks ranks(kRanks);
  std::vector<int> buffer(kRanks, 0);  // written by the rank before
  OnThreads(kRanks, [&](int r) {
    const int next = (r + 1) % kRanks, previous = (r + kRanks - 1) % kRanks;
    for (int call = 1; call <= 50; ++call) {
      ranks.Begin(r);
      buffer[next] = call;
      Tell(ranks.meetings[r], next, 1);
      WaitFor(ranks.meetings[r], previous, 1);
      CHECK(buffer[r] == call);
      ranks.End(r);
    }
  });
  for (int r = 0; r < kRanks; ++r) CHECK(ranks.Error(r).empty() && ranks.states[r].epoch == 50);
}

void ALateRankIsNamed() {
  Ranks ranks(2, /*deadline_ms=*/30);
  ranks.Begin(0);
  CHECK(Contains(Status::Invalid(ranks.Error(0)),
                 "op: rank 0 waited for rank 1 until the deadline: signal expected 1, seen 0"));
  // It arrives late: the other has given up, and results are NaN on both.
  ranks.Begin(1);
  WaitFor(ranks.meetings[1], 0, 0);
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 1 waited for rank 0"));
  for (int r = 0; r < 2; ++r) {
    float result[3] = {1, 2, 3};
    ranks.End(r, reinterpret_cast<char*>(result), sizeof result);
    for (const float value : result) CHECK(std::isnan(value));
  }
  ranks.errors[0] = {};
  ranks.Begin(0);  // every later call fails at once
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "cannot use this buffer any more"));
  ranks.errors[1] = {};
  ranks.states[1].broken = ranks.states[1].failed = 0;
  ranks.Begin(1);  // ranks that did not fail are notified
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 0 gave up on this buffer"));
}

void AMissingSignalIsNamed() {
  Ranks ranks(2);
  OnThreads(2, [&](int r) { ranks.Begin(r); });
  for (Meeting& m : ranks.meetings) m.deadline_ns = 30'000'000;
  WaitFor(ranks.meetings[0], 1, 0);
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "rank 0 waited for rank 1 until the deadline"));
  CHECK(ranks.states[0].failed == kGivenUp && ranks.states[1].failed == kFine);
  Tell(ranks.meetings[0], 1, 0);  // signals that it has given up
  WaitFor(ranks.meetings[1], 0, 0);
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 0 gave up on this buffer"));
}

// Streams that nothing orders may begin two calls in any order.
void ACallWaitsForTheOneBefore() {
  Ranks ranks(1);
  ranks.Begin(0);
  bool has_ended = false;
  std::thread next([&] {
    ranks.Begin(0);
    CHECK(has_ended && ranks.states[0].epoch == 2);
    ranks.End(0);
  });
  while (LoadAcquire(&ranks.states[0].begun) < 2) std::this_thread::yield();
  CHECK(ranks.states[0].epoch == 1);
  has_ended = true;
  ranks.End(0);
  next.join();
  CHECK(ranks.Error(0).empty() && ranks.states[0].finished == 2);
  ranks.Begin(0);  // it never ends
  ranks.meetings[0].deadline_ns = 30'000'000;
  ranks.Begin(0);
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "rank 0 waited for rank 0 until the deadline"));
}

void AnotherProgramIsNamed() {
  Ranks ranks(2);
  ranks.meetings[1].program = 8;
  OnThreads(2, [&](int r) { ranks.Begin(r); });
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "rank 0 runs another call than rank 1"));
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 1 runs another call than rank 0"));
}

const Register kTests("test_meeting", [](const Numbers&) {
  RanksMeet();
  ALateRankIsNamed();
  AMissingSignalIsNamed();
  ACallWaitsForTheOneBefore();
  AnotherProgramIsNamed();
});

}  // namespace cpd::kernels::test_meeting
