// Overlapped GEMMs between processes if one ends, throws or does not do its part.
#include <atomic>
#include <stdexcept>

#include "native_test.h"
#include "overlap_problems.h"
#include "shared_overlap_call.h"

namespace cpd::shared_overlap {
namespace {

// A failure reaches the ranks after a delay: all problems wait at once.
void ForEachAtOnce(const std::vector<OverlapProblem>& problems,
                   const std::function<void(const OverlapProblem&)>& check) {
  std::vector<std::future<void>> checks;
  for (const OverlapProblem& problem : problems) {
    checks.push_back(std::async(std::launch::async, check, problem));
  }
  for (std::future<void>& one : checks) one.get();
}

// Ends a process at any moment: the others are notified at once, and none of their ranks waits for
// the deadline.
void AProcessEnds(Job& job, const OverlapProblem& problem, std::chrono::microseconds after) {
  static const Processes processes = {0, 1, 2};
  std::thread killer([&] {
    std::this_thread::sleep_for(after);
    job.Kill(2);
  });
  std::vector<std::thread> threads;
  const Call call(problem);
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Status status;
      while (status.ok()) {  // until it is notified
        const Exchange exchange = MakeExchange(1, processes, call.problem(), kLong, PlainGemm);
        status = JoinIn(job, exchange, rank,
                        std::make_unique<OverlapContribution>(call.problem(),
                                                              call.problem().ranks[rank]))
                     .get();
      }
      CHECK(Contains(status, "seen: it has ended"));
    });
  }
  killer.join();
  for (std::thread& thread : threads) thread.join();
}

// A GEMM is not done by the deadline: all ranks learn whose part is missing, even those with a
// longer deadline; its later work does no harm.
void APartThatIsNotDone(Job& job, const OverlapProblem& problem) {
  static const Processes processes = {0, 1, 0, 2};
  // No rank waits in the middle of a direct all-gather.
  const char* missing =
      problem.config.copies ? ", signal 'chunk " : "the parts of ranks [1] are not done";
  const Call call(problem);
  std::atomic<bool> is_over{false};
  const GemmFunction gemm = [&](const GemmTask& task) {
    if (call.RankOf(task.c) == 1 || call.RankOf(task.b.data) == 1) {
      while (!is_over) std::this_thread::sleep_for(milliseconds(1));
    }
    PlainGemm(task);
  };
  std::vector<std::future<Status>> ranks;
  for (const int rank : {0, 1, 2, 3}) {
    const Exchange exchange = MakeExchange(
        1, processes, call.problem(), rank == 0 || rank == 2 ? milliseconds(1500) : kLong, gemm);
    ranks.push_back(
        JoinIn(job, exchange, rank,
               std::make_unique<OverlapContribution>(call.problem(), call.problem().ranks[rank])));
  }
  for (const int rank : {0, 2, 3}) {
    const Status status = ranks[rank].get();
    CHECK(status.code == StatusCode::kDeadlineExceeded);
    CHECK(Contains(status, "of process 1 (pid ") && Contains(status, missing));
  }
  is_over = true;
  CHECK(Contains(ranks[1].get(), missing));
}

// A failure of one rank: all are notified at once.
void AGemmThatThrows() {
  static const Processes processes = {0, 1, 2, 1};
  Job& job = NewJob(3, kFewBytes);
  std::atomic<int64_t> run_id{0};
  ForEachAtOnce(AllProblems({1, 2, 1, 1}), [&](const OverlapProblem& problem) {
    const Call call(problem);
    const GemmFunction gemm = [&](const GemmTask& task) {
      if (call.RankOf(task.c) == 1 || call.RankOf(task.b.data) == 1)
        throw std::runtime_error("out of paper");
      PlainGemm(task);
    };
    for (auto& rank :
         JoinAll(job, MakeExchange(++run_id, processes, call.problem(), kLong, gemm), call)) {
      CHECK(Contains(rank.get(), "test: rank 1 threw out of paper"));
    }
  });
}

void Failures() {
  std::vector<OverlapProblem> problems = GatheringProblems({2, 3, 1});
  for (OverlapProblem& problem : ReducingProblems({2, 3, 1})) problems.push_back(problem);
  std::mutex mutex;
  const auto new_job = [&]() -> Job& {
    std::lock_guard<std::mutex> lock(mutex);
    return NewJob(3, kFewBytes);
  };
  std::atomic<int64_t> i{0};
  ForEachAtOnce(problems, [&](const OverlapProblem& problem) {
    AProcessEnds(new_job(), problem, std::chrono::microseconds(++i * 997 % 4973));
  });
  std::vector<OverlapProblem> waiting;
  for (const CommMethod method :
       {CommMethod::kNone, CommMethod::kPipeline, CommMethod::kRingExchange}) {
    waiting.push_back(Problem(CommType::kReduceScatter, method, {1, 1, 1, 1}));
  }
  waiting.push_back(Problem(CommType::kAllGather, CommMethod::kRingExchange, {1, 1, 1, 1}));
  waiting.back().config.copies = false;
  ForEachAtOnce(waiting,
                [&](const OverlapProblem& problem) { APartThatIsNotDone(new_job(), problem); });
}

const Register kFailureTests("test_shared_overlap_failures", [](const Numbers&) {
  AGemmThatThrows();
  Failures();
});

}  // namespace
}  // namespace cpd::shared_overlap
