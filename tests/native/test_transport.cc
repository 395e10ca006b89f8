// The native core without XLA and Python: ranks are threads, under loads and failures that a
// program cannot be made to show. Prints what failed and exits with 1.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "dispatch/dispatch.h"
#include "transport/in_process.h"

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

namespace cpd {
namespace {

using std::chrono::milliseconds;

#define CHECK(condition)                                                 \
  if (!(condition)) {                                                    \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                        \
  }

bool Contains(const Status& status, const char* text) {
  if (status.message.find(text) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in '%s'\n", text, status.message.c_str());
  return false;
}

// Work that another thread runs later, or never, as the thread pool of a busy process does.
class Helpers {
 public:
  explicit Helpers(uint32_t seed) : rng_(seed) {}
  ~Helpers() {
    for (std::thread& thread : threads_) thread.join();
  }
  void operator()(std::function<void()> task) {
    if (rng_() % 4 == 0) return;
    threads_.emplace_back([task = std::move(task), pause = rng_() % 200] {
      std::this_thread::sleep_for(std::chrono::microseconds(pause));
      task();
    });
  }

 private:
  std::mt19937 rng_;
  std::vector<std::thread> threads_;
};

std::future<Status> Join(const Exchange& exchange, int rank,
                         std::unique_ptr<Contribution> contribution = nullptr,
                         const Scheduler& scheduler = {}) {
  auto done = std::make_shared<std::promise<Status>>();
  std::future<Status> status = done->get_future();
  InProcessTransport().Join(
      exchange, rank, std::move(contribution),
      [done](const Status& result) { done->set_value(result); }, scheduler ? 2 : 0, scheduler);
  return status;
}

Exchange MakeExchange(int64_t run_id, int num_ranks, milliseconds deadline, Planner planner) {
  return {"test", {run_id, 1, 0}, num_ranks, deadline, std::move(planner)};
}

const Planner kNothingToDo = [](const auto&, WorkList*) { return Status::Ok(); };

// Every rank sends shard d, of random length, to rank d: there with dispatch, home with combine,
// again and again under the same keys, while other groups do the same.
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
        std::vector<uint32_t> dst_offset(num_ranks), src_offset(num_ranks), num_recv(num_ranks + 1);
        for (int d = 0; d < num_ranks; ++d) {
          for (int r = 0; r < rank; ++r) dst_offset[d] += lengths[r][d];
          for (int e = 0; e < d; ++e) src_offset[d] += lengths[rank][e];
          num_recv[d] = lengths[d][rank];
          num_recv[num_ranks] += num_recv[d];
        }
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng() % 1000 + rank);

        const auto move = [&](bool forth, std::vector<float>& tokens) {
          auto mine = std::make_unique<DispatchContribution>();
          const int64_t row_bytes = kRowFloats * sizeof(float);
          mine->tokens = {{reinterpret_cast<char*>(tokens.data()), kTokens, row_bytes}};
          mine->buffers = {{reinterpret_cast<char*>(buffer.data()), capacity, row_bytes}};
          mine->types = {{DataType::kF32, DataType::kF32}};
          mine->num_slots = num_ranks;
          mine->num_replicas = 1;
          mine->dst_rank = dst_rank.data();
          mine->dst_offset = dst_offset.data();
          mine->seq_len = lengths[rank].data();
          mine->src_offset = src_offset.data();
          mine->num_recv = num_recv.data();
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
        const size_t num_received = num_recv[num_ranks] * kRowFloats;
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
  std::vector<std::promise<void>> told(kRanks);
  std::atomic<int> num_left{kRanks};
  std::promise<void> all;
  std::shared_future<void> everyone = all.get_future();
  const Exchange exchange = MakeExchange(1, kRanks, milliseconds(20000), kNothingToDo);
  for (int rank = 0; rank < kRanks; ++rank) {
    InProcessTransport().Join(exchange, rank, nullptr,
                              [&, rank](const Status&) {
                                if (--num_left == 0) all.set_value();
                                everyone.wait();
                                told[rank].set_value();
                              },
                              0, {});
  }
  for (auto& one : told) one.get_future().wait();
}

void EveryRankGetsThePlannersError(int64_t run_id, const Planner& planner, const char* message) {
  const Exchange exchange = MakeExchange(run_id, 3, milliseconds(20000), planner);
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(Join(exchange, rank));
  for (auto& status : ranks) CHECK(Contains(status.get(), message));
}

void LateRanksFindTheError() {
  const Exchange exchange = MakeExchange(2, 3, milliseconds(100), kNothingToDo);
  auto first = Join(exchange, 0), second = Join(exchange, 2);
  CHECK(Contains(first.get(), "2/3 ranks arrived, ranks [0, 2] wait for missing ranks [1]"));
  CHECK(Contains(second.get(), "missing ranks [1]"));
  auto late = Join(exchange, 1);
  CHECK(late.wait_for(milliseconds(0)) == std::future_status::ready);
  CHECK(Contains(late.get(), "missing ranks [1]"));
}

// Other groups and other calls of a failed execution neither wait nor go on; other executions do.
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

// Sums of a type that nobody implements are refused, whatever Python let through.
void UnknownTypesAreRefused() {
  float row = 0;
  int32_t dst_rank = 0;
  uint32_t zero = 0, one = 1, num_recv[] = {1, 1};
  auto mine = std::make_unique<DispatchContribution>();
  mine->tokens = mine->buffers = {{reinterpret_cast<char*>(&row), 1, sizeof row}};
  mine->types = {{DataType::kOther, DataType::kOther}};
  mine->num_slots = mine->num_replicas = 1;
  mine->dst_rank = &dst_rank;
  mine->dst_offset = mine->src_offset = &zero;
  mine->seq_len = &one;
  mine->num_recv = num_recv;
  const Exchange exchange = MakeExchange(
      5, 1, milliseconds(20000),
      [](const auto& ranks, WorkList* work) { return PlanCombine("sum", ranks, work); });
  CHECK(Contains(Join(exchange, 0, std::move(mine)).get(), "cannot be summed"));
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

}  // namespace
}  // namespace cpd

int main() {
  using cpd::Status;
  if (kCanRefuseThreads) cpd::CompletesWithoutNewThreads(20);
  cpd::CompletionsWaitForEachOther();
  if (kCanRefuseThreads) cpd::CompletesWithoutNewThreads(21);
  cpd::EveryRankGetsThePlannersError(
      3, [](const auto&, cpd::WorkList*) { return Status::Invalid("no such plan"); },
      "no such plan");
  cpd::EveryRankGetsThePlannersError(
      4, [](const auto&, cpd::WorkList*) -> Status { throw std::runtime_error("out of paper"); },
      "out of paper");
  cpd::UnknownTypesAreRefused();
  cpd::LateRanksFindTheError();
  cpd::OneFailureFailsTheExecution();
  cpd::RanksThatCannotBe(10, 0, "rank 0 arrived twice; ranks are 0..2");
  cpd::RanksThatCannotBe(11, 3, "rank 3 arrived but ranks are 0..2");
  cpd::RanksThatCannotBe(12, -1, "rank -1 arrived but ranks are 0..2");
  cpd::LoopsOfGroups(2, 1, 40);
  cpd::LoopsOfGroups(4, 2, 10);
  cpd::LoopsOfGroups(1, 3, 10);
  std::puts("ok");
}
