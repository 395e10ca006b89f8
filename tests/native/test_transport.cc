// The native core without XLA and Python: ranks are threads, under loads and failures that a
// program cannot be made to show. Prints what failed and exits with 1.
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "dispatch/dispatch.h"
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

namespace cpd {
namespace {

using std::chrono::milliseconds;

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
          DispatchPart part;
          const int64_t row_bytes = kRowFloats * sizeof(float);
          part.tokens = {{reinterpret_cast<char*>(tokens.data()), kTokens, row_bytes}};
          part.buffers = {{reinterpret_cast<char*>(buffer.data()), capacity, row_bytes}};
          part.types = {{DataType::kF32, DataType::kF32}};
          part.num_slots = num_ranks;
          part.num_replicas = 1;
          part.dst_rank = {dst_rank.data(), IntType::kI32};
          part.dst_offset = {dst_offset.data(), IntType::kU32};
          part.seq_len = {lengths[rank].data(), IntType::kU32};
          part.src_offset = {src_offset.data(), IntType::kU32};
          part.num_recv = {num_recv.data(), IntType::kU32};
          auto mine = std::make_unique<DispatchContribution>();
          mine->parts = {part};
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
  const milliseconds deadline(2000);
  const Exchange exchange = MakeExchange(2, 3, deadline, kNothingToDo);
  auto first = Join(exchange, 0), second = Join(exchange, 2);
  CHECK(Contains(first.get(), "2/3 ranks arrived, ranks [0, 2] wait for missing ranks [1]"));
  CHECK(Contains(second.get(), "missing ranks [1]"));
  auto late = Join(exchange, 1);
  CHECK(late.wait_for(deadline / 2) == std::future_status::ready);  // it does not wait for one
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

// A rank that came with another operation is named, and where it waits.
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

// A rank that may not join fails those that wait for it and those that come later.
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

// Busy threads are never waited for; idle ones work again, and end when there is nothing to do.
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

// Sums of a type that nobody implements are refused, whatever Python let through.
void UnknownTypesAreRefused() {
  float row = 0;
  int32_t dst_rank = 0;
  uint32_t zero = 0, one = 1, num_recv[] = {1, 1};
  DispatchPart part;
  part.tokens = part.buffers = {{reinterpret_cast<char*>(&row), 1, sizeof row}};
  part.types = {{DataType::kOther, DataType::kOther}};
  part.num_slots = part.num_replicas = 1;
  part.dst_rank = {&dst_rank, IntType::kI32};
  part.dst_offset = part.src_offset = {&zero, IntType::kU32};
  part.seq_len = {&one, IntType::kU32};
  part.num_recv = {num_recv, IntType::kU32};
  auto mine = std::make_unique<DispatchContribution>();
  mine->parts = {part};
  const Exchange exchange = MakeExchange(
      5, 1, milliseconds(20000),
      [](const auto& ranks, WorkList* work) { return PlanCombine("sum", ranks, work); });
  CHECK(Contains(Join(exchange, 0, std::move(mine)).get(), "cannot be summed"));
}

// No number that metadata can hold overflows on the way to its refusal.
void HostileNumbersAreRefused(int64_t seq_len, int64_t src_offset, int64_t dst_offset,
                              const char* message) {
  constexpr int64_t kSlots = 1 << 16;
  float row = 0;
  // All but the last slot stay at home: they only take up rows.
  std::vector<int64_t> lengths(kSlots, seq_len), offsets(kSlots, dst_offset);
  std::vector<int64_t> ranks(kSlots, -1), first_rows(kSlots, src_offset);
  ranks.back() = 0;
  int64_t num_recv[] = {1, 1};
  DispatchPart part;
  part.tokens = part.buffers = {{reinterpret_cast<char*>(&row), 1, sizeof row}};
  part.types = {{DataType::kF32, DataType::kF32}};
  part.num_slots = kSlots;
  part.num_replicas = 1;
  part.dst_rank = {ranks.data(), IntType::kI64};
  part.dst_offset = {offsets.data(), IntType::kU64};
  part.seq_len = {lengths.data(), IntType::kI64};
  if (src_offset != 0) part.src_offset = {first_rows.data(), IntType::kI64};
  part.num_recv = {num_recv, IntType::kI64};
  std::vector<std::unique_ptr<Contribution>> contributions;
  auto mine = std::make_unique<DispatchContribution>();
  mine->parts = {part};
  contributions.push_back(std::move(mine));
  WorkList work;
  CHECK(Contains(PlanDispatch("send", contributions, &work), message));
  CHECK(Contains(PlanCombine("bring", contributions, &work), message));
}

// One part per row of `need`: what each rank announces that it would receive, into buffers of four.
std::vector<std::unique_ptr<Contribution>> Announcing(
    std::vector<std::vector<std::array<int64_t, 4>>>* need) {
  static char rows[4];
  static const int64_t none = 0;
  static const int64_t nowhere = -1;
  std::vector<std::unique_ptr<Contribution>> contributions;
  for (size_t rank = 0; rank < 3; ++rank) {
    auto mine = std::make_unique<DispatchContribution>();
    mine->num_ranks = 3;
    for (auto& part_need : *need) {
      DispatchPart part;
      part.tokens = part.buffers = {{rows, 4, 1}};
      part.num_slots = part.num_replicas = 1;
      part.dst_rank = {&nowhere, IntType::kI64};
      part.dst_offset = part.seq_len = {&none, IntType::kI64};
      part.num_recv = {part_need[rank].data(), IntType::kI64};
      mine->parts.push_back(part);
    }
    contributions.push_back(std::move(mine));
  }
  return contributions;
}

// The message names the largest need, of every part, and the arguments that set the capacities.
void OverflowsNameTheLargestNeedOfEveryPart() {
  std::vector<std::vector<std::array<int64_t, 4>>> need = {
      {{0, 0, 0, 5}, {0, 0, 0, 9}, {0, 0, 0, 7}}, {{0, 0, 0, 6}, {0, 0, 0, 2}, {0, 0, 0, 8}}};
  WorkList work;
  const Status status = PlanDispatch("send", Announcing(&need), &work, {"first,second"});
  CHECK(Contains(status, "send: rank 1 would receive 9 tokens but first is 4. Pass first>=9,"));
  CHECK(Contains(status, "rank 2 would receive 8 tokens but second is 4. Pass second>=8,"));
}

// A rank whose batch is not that of the plan, and a plan of another batch, are refused.
void StampsAreCompared() {
  std::vector<std::vector<std::array<int64_t, 4>>> need(1, {{}, {}, {}});
  using Stamp = std::array<int32_t, kStampSize>;
  const auto plan = [&](std::array<Stamp, 3> stamps) {
    auto contributions = Announcing(&need);
    for (int rank = 0; rank < 3; ++rank) {
      auto* mine = static_cast<DispatchContribution*>(contributions[rank].get());
      mine->parts[0].stamp = {stamps[rank].data(), IntType::kI32};
      // As the other processes read it.
      contributions[rank] = ReadDispatchContribution(Direction::kDispatch, 3, mine->Write());
      CHECK(contributions[rank] != nullptr);
    }
    WorkList work;
    const std::vector<int> processes = {4, 4, 6};
    return PlanDispatch("send", contributions, &work, {"", &processes});
  };
  const Stamp right = {7, -1, -1, 0, 0};
  CHECK(plan({right, right, right}).ok());
  CHECK(
      Contains(plan({right, right, {7, -1, 5, 0, 0}}),
               "send: the plan was made for another batch: the segment ids of rank 2 of process 6 "
               "have checksum 5 but the plan expects -1"));
  CHECK(Contains(plan({right, {7, 4, 4, 0, 2}, right}),
                 "the positions of rank 1 of process 4 have checksum 2"));
  CHECK(Contains(plan({right, {8, -1, -1, 0, 0}, right}),
                 "rank 1 of process 4 follows the plan of a batch with checksum 8, rank 0 of "
                 "process 4 that of another batch, with checksum 7"));
}

// No array bounds what the slots name, and nothing moves: the numbers are not summed either.
void HostileNumbersWithoutArrays() {
  const int64_t zeros[] = {0, 0}, lengths[] = {std::numeric_limits<int64_t>::max(), 1};
  DispatchPart part;
  part.num_slots = 2;
  part.num_replicas = 1;
  part.dst_rank = part.dst_offset = part.src_offset = part.num_recv = {zeros, IntType::kI64};
  part.seq_len = {lengths, IntType::kI64};
  for (const auto plan : {PlanDispatch, PlanCombine}) {
    std::vector<std::unique_ptr<Contribution>> contributions;
    auto mine = std::make_unique<DispatchContribution>();
    mine->parts.push_back(part);
    contributions.push_back(std::move(mine));
    WorkList work;
    CHECK(plan("send", contributions, &work, {}).ok());
    CHECK(work.num_tasks == 0);
  }
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
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  cpd::HostileNumbersAreRefused(kMost, 0, 0, "but the rank has 1 tokens");
  cpd::HostileNumbersAreRefused(5, kMost, 0, "but the rank has 1 tokens");
  cpd::HostileNumbersAreRefused(-kMost, 0, 0, "both must be at least 0");
  cpd::HostileNumbersAreRefused(1, -kMost, 0, "both must be at least 0");
  cpd::HostileNumbersAreRefused(0, -1, 0, "both must be at least 0");
  cpd::HostileNumbersWithoutArrays();
  cpd::OverflowsNameTheLargestNeedOfEveryPart();
  cpd::StampsAreCompared();
  cpd::LateRanksFindTheError();
  cpd::OneFailureFailsTheExecution();
  cpd::RanksInAnotherCallAreNamed();
  cpd::ARefusedRankFailsTheExecution();
  cpd::ThePoolGrowsAndShrinks();
  cpd::RanksThatCannotBe(10, 0, "rank 0 arrived twice; ranks are 0..2");
  cpd::RanksThatCannotBe(11, 3, "rank 3 arrived but ranks are 0..2");
  cpd::RanksThatCannotBe(12, -1, "rank -1 arrived but ranks are 0..2");
  cpd::LoopsOfGroups(2, 1, 40);
  cpd::LoopsOfGroups(4, 2, 10);
  cpd::LoopsOfGroups(1, 3, 10);
  std::puts("ok");
}
