// The transport between processes, with several instances in one process: connected by sockets and
// segments as real ones are, under loads, ends and messages that a program cannot reproduce.
#include <sys/mman.h>
#include <sys/socket.h>

#include <cstring>

#include "dispatch/dispatch.h"
#include "job.h"
#include "loops.h"
#include "native_test.h"

namespace cpd::test_shared_memory {

using loops::AllToAll, loops::Rows;
using std::chrono::milliseconds;

Exchange MakeExchange(int64_t run_id, const std::vector<int>& processes, milliseconds deadline,
                      Direction direction = Direction::kDispatch) {
  const auto num_ranks = static_cast<int>(processes.size());
  Exchange exchange{"test", {run_id, static_cast<int64_t>(direction), 0}, num_ranks, deadline, {}};
  exchange.planner = [direction](const auto& ranks, WorkList* work) {
    return direction == Direction::kDispatch ? PlanDispatch("test", ranks, work)
                                             : PlanCombine("test", ranks, work);
  };
  exchange.processes = &processes;
  exchange.signature = direction == Direction::kDispatch ? "dispatch" : "combine";
  exchange.reader = [=](std::string_view bytes) {
    return ReadDispatchContribution(direction, num_ranks, bytes);
  };
  return exchange;
}

void Loops(Job& job, const std::vector<int>& processes, int num_rounds, int64_t row_floats) {
  loops::Run(1, static_cast<int>(processes.size()), num_rounds, row_floats,
             [&](int, int rank, Direction direction, std::unique_ptr<Contribution> mine) {
               const Exchange exchange =
                   MakeExchange(100, processes, milliseconds(60000), direction);
               return JoinIn(job, exchange, rank, std::move(mine));
             });
}

// Ends a process at any moment: while ranks arrive, while rows are staged or pulled, or at the end.
void AProcessEnds(std::chrono::microseconds after) {
  static std::vector<int> processes = {0, 1, 2};
  Job& job = NewJob(3);
  std::thread killer([&] {
    std::this_thread::sleep_for(after);
    job.Kill(2);
  });
  constexpr int64_t kRowFloats = 1 << 16;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&job, rank] {
      std::vector<float> x(6 * kRowFloats, 1), buffer(6 * kRowFloats);
      const AllToAll plan(rank, {{2, 2, 2}, {2, 2, 2}, {2, 2, 2}});
      Status status;
      while (status.ok()) {  // until it is notified
        const Exchange exchange = MakeExchange(1, processes, milliseconds(20000));
        status = JoinIn(job, exchange, rank,
                        plan.Contribute(Direction::kDispatch, Rows(x, kRowFloats),
                                        Rows(buffer, kRowFloats)))
                     .get();
        for (const float value : buffer) CHECK(!status.ok() || value == 1);
      }
      CHECK(Contains(status, "seen: it has ended"));
    });
  }
  killer.join();
  for (std::thread& thread : threads) thread.join();
}

void AMissingRankIsNamed() {
  static std::vector<int> processes = {0, 1, 0};
  Job& job = NewJob(2);
  const Exchange exchange = MakeExchange(5, processes, milliseconds(2000));
  std::vector<float> x(4), buffer(4);
  const AllToAll plan(0, {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}});
  const auto contribute = [&] {
    return plan.Contribute(Direction::kDispatch, Rows(x, 1), Rows(buffer, 1));
  };
  Exchange other = MakeExchange(5, processes, milliseconds(20000), Direction::kCombine);
  auto elsewhere =
      JoinIn(job, other, 1, plan.Contribute(Direction::kCombine, Rows(x, 1), Rows(x, 1)));
  auto first = JoinIn(job, exchange, 0, contribute()),
       second = JoinIn(job, exchange, 2, contribute());
  for (auto* rank : {&first, &second, &elsewhere}) {
    CHECK(Contains(rank->get(),
                   "2/3 ranks arrived, ranks [0, 2] wait for missing ranks [1]: [1] "
                   "of process 1 (pid "));
  }
  CHECK(Contains(JoinIn(job, exchange, 1, contribute()).get(),
                 "deadline of 2000 ms passed"));  // late
}

void BadPlansAndTwiceTheSameRank() {
  static std::vector<int> processes = {0, 1};
  Job& job = NewJob(2);
  std::vector<float> x(4), buffer(4);
  std::vector<std::future<Status>> ranks;
  std::vector<AllToAll> plans = {{0, {{1, 1}, {1, 1}}}, {1, {{1, 1}, {1, 1}}}};
  ++plans[1].num_recv_tokens[0];
  const auto join = [&](int64_t run_id, int rank) {
    ranks.push_back(
        JoinIn(job, MakeExchange(run_id, processes, milliseconds(20000)), rank,
               plans[rank].Contribute(Direction::kDispatch, Rows(x, 1), Rows(buffer, 1))));
  };
  join(1, 0), join(1, 1);
  for (auto& rank : ranks) CHECK(Contains(rank.get(), "rank 1 expects 2 tokens from rank 0"));
  ranks.clear();
  join(2, 0), join(2, 0);
  for (auto& rank : ranks) CHECK(Contains(rank.get(), "arrived twice"));
}

// Messages that this version never sends; at worst, waiting ranks get an error.
void HostileMessagesDoNoHarm() {
  static std::vector<int> processes = {0, 1};
  Job& job = NewJob(2);
  std::vector<float> x(4), buffer(4);
  const AllToAll plan(0, {{0, 0}, {0, 0}});
  auto waiting = JoinIn(job, MakeExchange(0, processes, milliseconds(500)), 0,
                        plan.Contribute(Direction::kDispatch, Rows(x, 1), Rows(buffer, 1)));
  std::mt19937 rng(0);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(rng() % 100 + 1, '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng() % 4 == 0 ? rng() : 0);
    bytes[0] = static_cast<char>(rng() % 7);
    CHECK(send(job.sockets[1][0], bytes.data(), bytes.size(), MSG_NOSIGNAL) >= 0);
  }
  CHECK(!waiting.get().ok());
}

// Only the rows that move take memory: the first and the last ones.
void OffsetsAbove4GiB() {
  static std::vector<int> processes = {0, 1};
  Job& job = NewJob(2, int64_t{32} << 30);
  constexpr int64_t kRowBytes = 1 << 20, kRows = 6 << 10, kSent = 2;
  for (const Direction direction : {Direction::kDispatch, Direction::kCombine}) {
    const bool forth = direction == Direction::kDispatch;
    std::vector<std::future<Status>> ranks;
    std::vector<std::unique_ptr<AllToAll>> plans;
    std::vector<std::vector<float>> small(2);
    for (int rank = 0; rank < 2; ++rank) {
      void* memory = mmap(nullptr, kRows * kRowBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      CHECK(memory != MAP_FAILED);
      const RowArray large{static_cast<char*>(memory), kRows, kRowBytes};
      for (int64_t row = kRows - kSent; row < kRows; ++row) {
        for (int64_t i = 0; i < kRowBytes / 4; ++i) {
          reinterpret_cast<float*>(large.data + row * kRowBytes)[i] =
              static_cast<float>(rank * 10 + row - kRows + 100);
        }
      }
      small[rank].assign(kSent * kRowBytes / 4, -1);
      const std::vector<std::vector<int64_t>> swap = {{0, kSent}, {kSent, 0}};
      plans.push_back(std::make_unique<AllToAll>(rank, swap));
      AllToAll& plan = *plans.back();
      plan.src_offset.assign(2, forth ? kRows - kSent : 0);
      if (!forth) plan.dst_offset.assign(2, kRows - kSent);
      const RowArray rows = Rows(small[rank], kRowBytes / 4);
      ranks.push_back(
          JoinIn(job, MakeExchange(1, processes, milliseconds(60000), direction), rank,
                 plan.Contribute(direction, forth ? large : rows, forth ? rows : large)));
    }
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(ranks[rank].get().ok());
      for (int64_t i = 0; i < kSent * kRowBytes / 4; ++i) {
        CHECK(small[rank][i] == (1 - rank) * 10 + 98 + i / (kRowBytes / 4));
      }
    }
  }
}

const Register kTests("test_shared_memory", [](const Numbers& numbers) {
  const int scale = numbers.Get(0, 1);
  static const std::vector<int> mixed = {0, 1, 1, 2, 0, 2}, two = {1, 0};
  Loops(NewJob(3), mixed, 25 * scale, 1 << 9);
  Loops(NewJob(2), two, 50 * scale, 4);
  for (int i = 0; i < 10 * scale; ++i) AProcessEnds(std::chrono::microseconds(i * 997 % 9973));
  AMissingRankIsNamed();
  BadPlansAndTwiceTheSameRank();
  HostileMessagesDoNoHarm();
  OffsetsAbove4GiB();
});

}  // namespace cpd::test_shared_memory
