// Overlapped GEMMs between processes, with several instances in one process: the values of every
// schedule, in shared memory that may run out.
#include "gemm/plan_overlap.h"
#include "native_test.h"
#include "overlap_problems.h"
#include "shared_overlap_call.h"

namespace cpd::shared_overlap {
namespace {

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
});

}  // namespace
}  // namespace cpd::shared_overlap
