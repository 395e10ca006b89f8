// The transport within one process, without XLA and Python: ranks are threads, under loads and
// failures that a JAX program cannot reproduce.
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "dispatch/dispatch.h"
#include "native_test.h"
#include "ranks.h"
#include "transport/completion_pool.h"

// Thread creation that fails on demand; sanitizers need the symbol for themselves.
static std::atomic<bool> refuse_threads{false};
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kCanRefuseThreads = false;
#else
constexpr bool kCanRefuseThreads = true;
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  static const auto create =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return refuse_threads ? EAGAIN : create(thread, attributes, start, argument);
}
#endif

namespace cpd::test_transport {

using std::chrono::milliseconds;

Exchange MakeExchange(int64_t run_id, int num_ranks, milliseconds deadline, Planner planner) {
  return {"test", {run_id, 1, 0}, num_ranks, deadline, std::move(planner)};
}

const Planner kNothingToDo = [](const auto&, WorkList*) { return Status::Ok(); };

// Every rank sends shard d, of random length, to rank d with dispatch and returns it with combine,
// repeatedly under the same keys, while other groups do the same.
void LoopsOfGroups(int num_ranks, int num_groups, int num_rounds) {
  constexpr int kTokens = 64;
  const int64_t capacity = int64_t{kTokens} * num_ranks;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_ranks * num_groups; ++thread) {
    threads.emplace_back([=] {
      const int rank = thread % num_ranks, group = thread / num_ranks;
      std::mt19937 pause(thread);
      Helpers helpers(thread);
      constexpr int kRowFloats = 1 << 9;  // a round has several pieces of work
      std::vector<float> x(kTokens * kRowFloats), home(x), buffer(capacity * kRowFloats);
      for (int round = 0; round < num_rounds; ++round) {
        std::mt19937 rng(round * 100 + group);  // the same plan on all ranks
        std::vector<std::vector<uint32_t>> lengths(num_ranks, std::vector<uint32_t>(num_ranks));
        for (auto& row : lengths) {
          for (uint32_t& length : row) length = rng() % (kTokens / num_ranks + 1);
        }
        std::vector<int32_t> dst_rank(num_ranks);
        std::iota(dst_rank.begin(), dst_rank.end(), 0);
        std::vector<uint32_t> dst_offset(num_ranks), src_offset(num_ranks),
            num_recv_tokens(num_ranks + 1);
        for (int d = 0; d < num_ranks; ++d) {
          for (int r = 0; r < rank; ++r) dst_offset[d] += lengths[r][d];
          for (int e = 0; e < d; ++e) src_offset[d] += lengths[rank][e];
          num_recv_tokens[d] = lengths[d][rank];
          num_recv_tokens[num_ranks] += num_recv_tokens[d];
        }
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng() % 1000 + rank);

        const auto move = [&](bool forth, std::vector<float>& tokens) {
          OperandGroup operands;
          const int64_t row_bytes = kRowFloats * sizeof(float);
          operands.tokens = {{reinterpret_cast<char*>(tokens.data()), kTokens, row_bytes}};
          operands.buffers = {{reinterpret_cast<char*>(buffer.data()), capacity, row_bytes}};
          operands.types = {{DataType::kF32, DataType::kF32}};
          operands.num_slots = num_ranks;
          operands.num_replicas = 1;
          operands.dst_rank = {dst_rank.data(), IntType::kI32};
          operands.dst_offset = {dst_offset.data(), IntType::kU32};
          operands.seq_len = {lengths[rank].data(), IntType::kU32};
          operands.src_offset = {src_offset.data(), IntType::kU32};
          operands.num_recv_tokens = {num_recv_tokens.data(), IntType::kU32};
          auto mine = std::make_unique<DispatchContribution>();
          mine->groups = {operands};
          Exchange exchange{"loop", {100, forth, group}, num_ranks, milliseconds(60000), {}};
          exchange.planner = [forth](const auto& ranks, WorkList* work) {
            return forth ? PlanDispatch("loop", ranks, work) : PlanCombine("loop", ranks, work);
          };
          std::this_thread::sleep_for(std::chrono::microseconds(pause() % 300));
          const Status status = Join(exchange, rank, std::move(mine), std::ref(helpers)).get();
          CHECK(status.ok());
        };
        std::fill(buffer.begin(), buffer.end(), -1);
        std::fill(home.begin(), home.end(), -1);
        move(true, x);
        const size_t num_received = num_recv_tokens[num_ranks] * kRowFloats;
        for (size_t i = num_received; i < buffer.size(); ++i) CHECK(buffer[i] == 0);
        move(false, home);
        const auto& sent = lengths[rank];
        const size_t num_sent = std::accumulate(sent.begin(), sent.end(), 0u) * kRowFloats;
        for (size_t i = 0; i < x.size(); ++i) CHECK(home[i] == (i < num_sent ? x[i] : 0));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The rest of a rank's program may wait for the rest of another's.
void CompletionsWaitForEachOther() {
  constexpr int kRanks = 8;
  std::vector<std::promise<void>> ended(kRanks);
  std::atomic<int> num_left{kRanks};
  std::promise<void> all;
  std::shared_future<void> everyone = all.get_future();
  const Exchange exchange = MakeExchange(1, kRanks, milliseconds(20000), kNothingToDo);
  for (int rank = 0; rank < kRanks; ++rank) {
    InProcessTransport().Join(exchange, rank, nullptr,
                              [&, rank](const Status&) {
                                if (--num_left == 0) all.set_value();
                                everyone.wait();
                                ended[rank].set_value();
                              },
                              0, {});
  }
  for (auto& one : ended) one.get_future().wait();
}

void EveryRankGetsThePlannersError(int64_t run_id, const Planner& planner, const char* message) {
  const Exchange exchange = MakeExchange(run_id, 3, milliseconds(20000), planner);
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(Join(exchange, rank));
  for (auto& status : ranks) CHECK(Contains(status.get(), message));
}

void LateRanksFindTheError() {
  const Exchange exchange = MakeExchange(2, 3, milliseconds(2000), kNothingToDo);
  auto first = Join(exchange, 0), second = Join(exchange, 2);
  CHECK(Contains(first.get(), "2/3 ranks arrived, ranks [0, 2] wait for missing ranks [1]"));
  CHECK(Contains(second.get(), "missing ranks [1]"));
  // Had it waited for a meeting of its own, the others would be missing.
  CHECK(Contains(Join(exchange, 1).get(), "2/3 ranks arrived, ranks [0, 2] wait for missing"));
}

// Other groups and other calls of a failed execution fail too; other executions continue.
void OneFailureFailsTheExecution() {
  Exchange exchange = MakeExchange(6, 2, milliseconds(20000), kNothingToDo);
  Exchange group = exchange, call = exchange, other = exchange;
  group.key.group = 1;
  call.key.call_site = 2;
  other.key.run_id = 7;
  exchange.planner = [](const auto&, WorkList*) { return Status::Invalid("no such plan"); };
  auto in_group = Join(group, 0), in_call = Join(call, 1), in_other = Join(other, 0);
  auto first = Join(exchange, 0), second = Join(exchange, 1), late = Join(group, 1);
  for (auto* status : {&in_group, &in_call, &first, &second, &late}) {
    CHECK(Contains(status->get(), "no such plan"));
  }
  CHECK(Join(other, 1).get().ok());
  CHECK(in_other.get().ok());
}

void RanksThatCannotBe(int64_t run_id, int rank, const char* message) {
  const Exchange exchange = MakeExchange(run_id, 3, milliseconds(20000), kNothingToDo);
  auto waiting = Join(exchange, 0), wrong = Join(exchange, rank), late = Join(exchange, 1);
  for (auto* status : {&waiting, &wrong, &late}) CHECK(Contains(status->get(), message));
}

// A rank that arrived with another operation is named, together with this operation.
void RanksInAnotherCallAreNamed() {
  Exchange dispatch = MakeExchange(8, 3, milliseconds(100), kNothingToDo);
  Exchange combine = dispatch, in_other_group = dispatch, in_other_run = dispatch;
  dispatch.op = "dispatch over axis 'cp'";
  combine.op = "combine over axis 'cp'";
  combine.deadline = in_other_group.deadline = in_other_run.deadline = milliseconds(20000);
  combine.key.call_site = in_other_group.key.call_site = in_other_run.key.call_site = 2;
  in_other_group.key.group = 1;
  in_other_run.key.run_id = 9;
  std::vector<std::future<Status>> ranks;
  ranks.push_back(Join(combine, 1));
  ranks.push_back(Join(in_other_group, 2));
  auto unconcerned = Join(in_other_run, 2);
  ranks.push_back(Join(dispatch, 0));
  for (auto& status : ranks) {
    const Status result = status.get();
    CHECK(Contains(result, "missing ranks [1, 2]. Rank 1 waits in another call: combine over"));
    CHECK(result.message.find("Rank 2") == std::string::npos);
  }
  Join(in_other_run, 0), Join(in_other_run, 1);
  CHECK(unconcerned.get().ok());
}

// A rank that may not join fails the ranks that wait for it and those that come later.
void ARefusedRankFailsTheExecution() {
  const Exchange exchange = MakeExchange(13, 3, milliseconds(20000), kNothingToDo);
  Exchange call = exchange;
  call.key.call_site = 2;
  auto waiting = Join(exchange, 0), in_call = Join(call, 2);
  auto refused = Refuse(exchange, Status::Invalid("no such buffer"));
  auto late = Join(exchange, 2), again = Refuse(call, Status::Invalid("no such buffer"));
  for (auto* status : {&waiting, &in_call, &refused, &late, &again}) {
    CHECK(Contains(status->get(), "no such buffer"));
  }
}

// Tasks never wait for busy threads; idle threads are reused, and end when there is nothing to do.
void ThePoolGrowsAndShrinks() {
  constexpr int kTasks = 6;
  static auto* pool = new CompletionPool(std::chrono::hours(1));  // its threads outlive this
  std::map<std::thread::id, int> num_rounds;                      // by thread
  std::mutex mutex;
  const auto has_worked_again = [&] {
    std::lock_guard<std::mutex> lock(mutex);
    return std::any_of(num_rounds.begin(), num_rounds.end(),
                       [](const auto& thread) { return thread.second > 1; });
  };
  while (!has_worked_again()) {
    std::atomic<int> num_left{kTasks};
    std::promise<void> all;
    std::shared_future<void> everyone = all.get_future();
    std::vector<std::promise<void>> done(kTasks);
    for (auto& one : done) {
      pool->Run([&] {
        {
          std::lock_guard<std::mutex> lock(mutex);
          ++num_rounds[std::this_thread::get_id()];
        }
        if (--num_left == 0) all.set_value();
        everyone.wait();
        one.set_value();
      });
    }
    for (auto& one : done) one.get_future().wait();
  }
  CHECK(pool->num_threads() >= kTasks);
  static auto* small = new CompletionPool(milliseconds(10));
  std::promise<void> done;
  small->Run([&] { done.set_value(); });
  done.get_future().wait();
  while (small->num_threads() > 0) std::this_thread::sleep_for(milliseconds(1));
}

// First in a process, when the pool has no thread yet, and again when it has some.
void CompletesWithoutNewThreads(int64_t run_id) {
  InProcessTransport();
  const Exchange exchange = MakeExchange(run_id, 4, milliseconds(20000), kNothingToDo);
  refuse_threads = true;
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < 4; ++rank) ranks.push_back(Join(exchange, rank));
  for (auto& status : ranks) CHECK(status.get().ok());
  refuse_threads = false;
}

const Register kTests("test_transport", [](const Numbers&) {
  if (kCanRefuseThreads) CompletesWithoutNewThreads(20);
  CompletionsWaitForEachOther();
  if (kCanRefuseThreads) CompletesWithoutNewThreads(21);
  EveryRankGetsThePlannersError(
      3, [](const auto&, WorkList*) { return Status::Invalid("no such plan"); }, "no such plan");
  EveryRankGetsThePlannersError(
      4, [](const auto&, WorkList*) -> Status { throw std::runtime_error("out of paper"); },
      "out of paper");
  LateRanksFindTheError();
  OneFailureFailsTheExecution();
  RanksInAnotherCallAreNamed();
  ARefusedRankFailsTheExecution();
  ThePoolGrowsAndShrinks();
  RanksThatCannotBe(10, 0, "rank 0 arrived twice; ranks are 0..2");
  RanksThatCannotBe(11, 3, "rank 3 arrived but ranks are 0..2");
  RanksThatCannotBe(12, -1, "rank -1 arrived but ranks are 0..2");
  LoopsOfGroups(2, 1, 40);
  LoopsOfGroups(4, 2, 10);
  LoopsOfGroups(1, 3, 10);
});

}  // namespace cpd::test_transport
