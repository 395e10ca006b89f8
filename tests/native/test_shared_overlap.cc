// Overlapped GEMMs between processes, with several instances in one process: the values of every
// schedule, and the outcome if a process ends or does not do its part.
#include <atomic>

#include "gemm/overlap_buffers.h"
#include "gemm/overlap_contribution.h"
#include "gemm/plan_overlap.h"
#include "job.h"
#include "native_test.h"
#include "overlap_call.h"
#include "overlap_problems.h"

namespace cpd::test_shared_overlap {

using Processes = std::vector<int>;  // of each rank; never freed

constexpr int64_t kFewBytes = 16 << 20;  // of a segment: sanitizers have few addresses

// Far longer than an immediate notification takes: the test fails if a rank waits this long.
constexpr milliseconds kLong = std::chrono::hours(24);

Exchange MakeExchange(int64_t run_id, const Processes& processes, const OverlapProblem& call,
                      milliseconds deadline, GemmFunction gemm, int64_t buffer = 0) {
  OverlapProblem problem = call;
  problem.ranks.clear();
  const auto num_ranks = static_cast<int>(processes.size());
  Exchange exchange{"test", {run_id, 0, 0}, num_ranks, deadline, {}};
  exchange.processes = &processes;
  exchange.signature = "a product";
  exchange.planner = [=](const auto& ranks, WorkList* work) {
    return PlanOverlap(exchange, problem, buffer, gemm, ranks, work);
  };
  exchange.reader = [problem](std::string_view) {
    RankMemory memory;
    memory.is_elsewhere = true;
    return std::make_unique<OverlapContribution>(problem, memory);
  };
  return exchange;
}

std::vector<std::future<Status>> JoinAll(Job& job, const Exchange& exchange, const Call& call) {
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < exchange.num_ranks; ++rank) {
    ranks.push_back(
        JoinIn(job, exchange, rank,
               std::make_unique<OverlapContribution>(call.problem(), call.problem().ranks[rank])));
  }
  return ranks;
}

void ResultsAreThoseOfAPlainComputation(Job& job, const Processes& processes, int64_t num_batches) {
  std::vector<int64_t> counts;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    counts.push_back((3 * static_cast<int64_t>(rank) + 2) % 5);  // rank 1: 0
  }
  static int64_t run_id = 1000;
  bool is_odd = false;
  for (OverlapProblem& problem : AllProblems(counts)) {
    problem.rows.num_batches = num_batches;
    ++problem.rows.capacity;
    is_odd = !is_odd;
    problem.rhs_transposed = is_odd;
    if (is_odd) {
      problem.lhs_type = problem.output_type = problem.aux_type = problem.partial_type =
          DataType::kBF16;
    }
    const Call call(problem, /*has_bias=*/is_odd);
    const Exchange exchange = MakeExchange(++run_id, processes, call.problem(), kLong, PlainGemm);
    for (std::future<Status>& rank : JoinAll(job, exchange, call)) CHECK(rank.get().ok());
    CHECK(call.IsRight());
  }
}

// Two concurrent calls with one registered buffer, in a different order in each process: each has
// its own memory, so neither waits for the other. The buffer is in use until its call is over.
void OneBufferForCallsInAnyOrder() {
  static const Processes processes = {0, 1};
  Job& job = NewJob(2);
  OverlapProblem problem = Problem(CommType::kReduceScatter, CommMethod::kRingExchange, {2, 2});
  problem.config.atomic = true;  // as the buffer says
  OverlapBufferSpec spec;
  spec.config = problem.config;
  spec.num_ranks = 2;
  spec.type = DataType::kF32;
  spec.rank_bytes = BufferBytes(problem);
  CHECK(OverlapBuffers::Get().Create("create", 1, spec).ok());
  problem.config.atomic = false;
  for (int round = 0; round < 10; ++round) {
    OverlapProblem configured = problem;
    configured.rows.counts = {1, 1};
    const Call first(problem), second(problem);
    CHECK(ConfigureByBuffer("call", 1, &configured).ok() && configured.config.atomic);
    std::vector<std::future<Status>> ranks;
    for (const int rank : {0, 1}) {
      for (const bool is_first : {rank == 0, rank == 1}) {
        const Call& call = is_first ? first : second;
        Exchange exchange =
            MakeExchange(round, processes, call.problem(), kLong, PlainGemm, /*buffer=*/1);
        exchange.key.call_site = is_first;
        ranks.push_back(JoinIn(
            job, exchange, rank,
            std::make_unique<OverlapContribution>(call.problem(), call.problem().ranks[rank])));
      }
    }
    for (std::future<Status>& rank : ranks) CHECK(rank.get().ok());
    CHECK(first.IsRight() && second.IsRight());
    CHECK(OverlapBuffers::Get().List()[0].second.num_in_use == 0);
  }
  CHECK(OverlapBuffers::Get().List()[0].second.num_groups == 0);
  CHECK(OverlapBuffers::Get().Destroy("destroy", 1).ok());
  const Call call(problem);
  const Exchange exchange =
      MakeExchange(99, processes, call.problem(), kLong, PlainGemm, /*buffer=*/1);
  for (std::future<Status>& rank : JoinAll(job, exchange, call)) {
    CHECK(Contains(rank.get(), "test: buffer 1 has been destroyed"));
  }
}

// Reserved address space for a segment, and its memory.
void NoRoomIsAnError() {
  static const Processes processes = {0, 1};
  OverlapProblem problem = Problem(CommType::kReduceScatter, CommMethod::kNone, {2, 2});
  problem.n = 1 << 17;
  const Call call(problem);  // 2 MiB of partial sums on each rank
  const Exchange exchange = MakeExchange(1, processes, call.problem(), kLong, PlainGemm);
  for (std::future<Status>& rank : JoinAll(NewJob(2, 1 << 16), exchange, call)) {
    CHECK(Contains(rank.get(), "do not fit the free part of this process's segment of 65536"));
  }
  Job& job = NewJob(2);
  OverlapProblem few = problem;
  few.n = 1;
  const Call small(few);  // its first memory also holds the announcements of the next call
  Exchange first = MakeExchange(2, processes, small.problem(), kLong, PlainGemm);
  for (std::future<Status>& rank : JoinAll(job, first, small)) CHECK(rank.get().ok());
  close(job.segments[1]);  // the system has no more
  for (std::future<Status>& rank : JoinAll(job, exchange, call)) {
    CHECK(Contains(rank.get(), "test: no shared memory for 2097152 bytes that other processes"));
  }
  first.key.run_id = 3;
  for (std::future<Status>& rank : JoinAll(job, first, small)) CHECK(rank.get().ok());
  CHECK(small.IsRight());
}

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

const Register kTests("test_shared_overlap", [](const Numbers&) {
  static const Processes layouts[] = {{0, 1}, {1, 0, 1}, {0, 1, 2}, {2, 0, 1, 0, 2, 1}};
  Job& job = NewJob(3);
  for (const Processes& processes : layouts) {
    for (const int num_batches : {1, 2}) {
      ResultsAreThoseOfAPlainComputation(job, processes, num_batches);
    }
  }
  OneBufferForCallsInAnyOrder();
  NoRoomIsAnError();
  AGemmThatThrows();
  Failures();
});

}  // namespace cpd::test_shared_overlap
