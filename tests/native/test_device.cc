// The GPU kernels, run block by block on the host, against plain loops: values, rejected plans,
// errors.
#include <cstdio>
#include <cstdlib>

#include "cuda/errors.h"
#include "device.h"
#include "device_world.h"
#include "kernels/prepare.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::kernels::test_device {

void RandomPlans(int num_worlds) {
  Rng rng(1);
  for (int i = 0; i < num_worlds; ++i) {
    World there = RandomWorld(rng, true);
    for (int round = 0; round < 2; ++round) {
      RunRanks(there, 2);  // the third and the fourth call write over the first two
      CheckMoved(there);
    }
    World back = RandomWorld(rng, false);
    for (int round = 0; round < 2; ++round) {
      RunRanks(back, 2);
      CheckMoved(back);
    }
  }
}

void ManyReplicasAndSources() {
  Rng rng(2);
  World there{};
  there.num_ranks = 3;
  there.is_dispatch = true;
  there.groups.push_back(MakeGroup(rng, 3, {4, 21, 12, {48, 17}, true}));
  FillArrays(&there, rng);
  RunRanks(there);
  CheckMoved(there);

  World back{};  // every row of a strip has far more sources than the block can gather
  back.num_ranks = 2;
  back.is_dispatch = false;
  back.in_type = back.out_type = DataType::kF32;
  back.groups.push_back(MakeGroup(rng, 2, {150, 4, 9, {16, 12}, true}));
  back.rows_per_strip = 64;
  FillArrays(&back, rng, true);
  RunRanks(back);
  CheckMoved(back);
}

// A call that runs beside its program reads copies of the metadata.
void CopiesOfFieldsTakeTheirPlace(bool is_dispatch) {
  Rng rng(5);
  World world = RandomWorld(rng, is_dispatch);
  std::vector<Seen<uint64_t>> memory;
  std::vector<Call> calls;
  for (int r = 0; r < world.num_ranks; ++r) {
    Call call = world.MakeCall(r);
    HeldFields held;
    Call sized = call;
    const int64_t bytes = HoldFields(&sized, nullptr, &held);
    memory.emplace_back(bytes / 8);
    CHECK(HoldFields(&call, reinterpret_cast<char*>(memory.back().data()), &held) == bytes);
    Launch<int>(held.num, world.num_threads, [&](const Block& b, int*) { Hold(b, held); });
    calls.push_back(call);
  }
  world.Clear();
  const auto plans = world.groups;
  for (auto& group : world.groups) {
    for (Plan& plan : group.plans) {
      for (auto* field : {&plan.num_recv_tokens, &plan.seq_len, &plan.dst_rank, &plan.src_offset}) {
        std::fill(field->begin(), field->end(), -9);
      }
      std::fill(plan.dst_offset.begin(), plan.dst_offset.end(), -9);
    }
  }
  std::vector<std::thread> threads;
  for (const Call& call : calls) threads.emplace_back([&] { RunCall(call, 2, 3); });
  for (std::thread& thread : threads) thread.join();
  for (size_t p = 0; p < plans.size(); ++p) world.groups[p].plans = plans[p].plans;
  CheckMoved(world);
}

// A plan that one rank rejects has no result on any rank, and the next call succeeds.
void BadPlansAreRefusedEverywhere() {
  struct Case {
    Failure failure;
    void (*spoil)(World::Made*, Plan*);
  };
  const Case cases[] = {
      {Failure::kDstRank, [](World::Made*, Plan* plan) { plan->dst_rank[1] = 3; }},
      {Failure::kDstRank, [](World::Made*, Plan* plan) { plan->dst_rank[0] = -2; }},
      {Failure::kBatch,
       [](World::Made*, Plan* plan) { plan->fingerprint = {7, 2, 1, -3, -3, 5, 5, 0, 0}; }},
      {Failure::kBatch,
       [](World::Made*, Plan* plan) { plan->fingerprint = {7, 1, 1, -3, -2, 5, 5, 0, 0}; }},
      {Failure::kBatch,
       [](World::Made*, Plan* plan) { plan->fingerprint = {7, 1, 1, -3, -3, 5, 6, 0, 0}; }},
      {Failure::kBatch,
       [](World::Made*, Plan* plan) { plan->fingerprint = {7, 1, 1, -3, -3, 5, 5, 0, 4}; }},
      {Failure::kLength, [](World::Made*, Plan* plan) { plan->seq_len[2] = -1; }},
      {Failure::kTokens,
       [](World::Made* group, Plan* plan) { plan->src_offset[1] = group->num_tokens; }},
      {Failure::kDstOffset, [](World::Made*, Plan* plan) { plan->dst_offset[1] = -1; }},
      {Failure::kDstOffset, [](World::Made*, Plan* plan) { plan->dst_offset[1] = 1LL << 50; }},
      {Failure::kCapacity,
       [](World::Made* group, Plan* plan) { plan->dst_offset[1] = group->capacity; }},
      {Failure::kCapacity,
       [](World::Made* group, Plan* plan) { plan->num_recv_tokens[3] = group->capacity + 1; }},
  };
  for (const bool is_dispatch : {true, false}) {
    for (const Case& one : cases) {
      World world = SmallWorld(3, is_dispatch);
      Plan& plan = world.groups[0].plans[1];
      for (auto& n : plan.seq_len) n = std::max(n, 1);  // counts no longer fit; checked later
      for (auto& row : plan.src_offset) row = 0;
      for (auto& dst : plan.dst_rank) dst = std::max(dst, 0);
      for (auto& row : plan.dst_offset) row = std::max<int64_t>(row, 0);
      for (auto& row : plan.dst_offset) row = std::min(row, world.groups[0].capacity - 16);
      one.spoil(&world.groups[0], &plan);
      RunRanks(world);
      CheckRefused(world, 1, one.failure);
      const World good = SmallWorld(3, is_dispatch);
      world.groups[0].plans = good.groups[0].plans;
      RunRanks(world, 3);
      CheckMoved(world);
    }
  }
}

// A rank follows another plan than the others, with the same counts: all ranks see it.
void PlansAreCompared() {
  World world = SmallWorld(3, true);
  for (int r = 0; r < 3; ++r)
    world.groups[0].plans[r].fingerprint = {r == 1 ? 8 : -7, r, r, 1, 1, 2, 2, 3, 3};
  RunRanks(world);
  for (int r = 0; r < 3; ++r) {
    const ErrorRecord error = world.Take(r);
    CHECK(error.failure == Failure::kPlan && error.peer == (r == 1 ? 0 : 1));
    CHECK(error.expected == (r == 1 ? 8 : -7) && error.seen == (r == 1 ? -7 : 8));
    CHECK(IsSpoiled(world, r));
  }
  world.groups[0].plans[1].fingerprint[0] = -7;
  RunRanks(world, 3);
  CheckMoved(world);
}

void ReceiversCheckCountsAndOverlaps() {
  World counts = SmallWorld(3, true);
  counts.groups[0].plans[2].num_recv_tokens[1] += 1;
  RunRanks(counts);
  const ErrorRecord error = counts.Take(2);
  CHECK(error.failure == Failure::kCounts && error.peer == 1 && error.expected == error.seen + 1);
  CHECK(IsSpoiled(counts, 2));
  CHECK(counts.IsFine());

  World overlap{};
  overlap.num_ranks = 2;
  overlap.is_dispatch = true;
  World::Made group{1, 1, 4, 8, {16}, {}, {}, {}};
  group.plans = {{{0, 0, 0}, {4}, {1}, {0}, {0}}, {{4, 4, 8}, {4}, {1}, {0}, {3}}};
  overlap.groups.push_back(group);
  Rng rng(5);
  FillArrays(&overlap, rng);
  overlap.num_blocks = 1;
  // Both write row 3: run one rank's push after the other's, or a sanitizer would rightly object.
  RunRanks(overlap, 0);
  const Call first = overlap.MakeCall(0), second = overlap.MakeCall(1);
  for (const Call* call : {&first, &second}) {
    const Rank rank{*call, 0};
    Launch<PlanScratch>(1, 1, [&](const Block& b, PlanScratch* s) { Prepare(b, rank, s); });
    Launch<PushScratch>(1, 1, [&](const Block& b, PushScratch* s) { Push(b, rank, s); });
    Launch<MeetScratch>(1, 1, [&](const Block& b, MeetScratch*) { Signal(b, rank); });
  }
  const Rank receiver{second, 0};
  Launch<MeetScratch>(1, 1, [&](const Block& b, MeetScratch* s) { Wait(b, receiver, s); });
  Launch<UnpackScratch>(3, 2, [&](const Block& b, UnpackScratch* s) { Unpack(b, receiver, s); });
  const ErrorRecord found = overlap.Take(1);
  CHECK(found.failure == Failure::kOverlap && found.expected == 8 && found.seen == 7);
  CHECK(IsSpoiled(overlap, 1));
}

// Ranks may use different numbers of blocks, and cut their rows into different strips.
void RanksDifferInBlocks() {
  Rng rng(6);
  for (const bool is_dispatch : {true, false}) {
    World world = RandomWorld(rng, is_dispatch, 3);
    Concurrently(world, -1, [&](Call call) {
      for (int p = 0; p < call.num_groups; ++p) {
        call.groups[p].rows_per_strip = 1 + 3 * call.first_rank;
        call.groups[p].rows_per_push = 8 - 2 * call.first_rank;
      }
      for (int i = 0; i < 3; ++i) RunCall(call, 1 + call.first_rank, 2);
    });
    CheckMoved(world);
  }
}

// Two calls of one shape, of which rank 1 runs the second first: keys would arrive as values. Both
// calls are errors on all ranks, and the next call succeeds.
void SwappedCallsAreNamed(bool is_small) {
  constexpr uint64_t kHash = ~uint64_t{0} - 4;
  World world = SmallWorld(3, true);
  world.is_small = is_small;
  for (const int64_t first : {5, 6}) {
    Concurrently(world, -1, [&](Call call) {
      call.program = ProgramWord(kHash, call.first_rank == 1 ? 11 - first : first);
      RunCall(call, 2, 2);
    });
    for (int r = 0; r < 3; ++r) {
      const ErrorRecord error = world.Take(r);
      CHECK(error.failure == Failure::kProgram && error.peer == (r == 1 ? 0 : 1));
      CHECK(SiteOf(error.expected) == (r == 1 ? 11 - first : first));
      CHECK(SiteOf(error.seen) == 11 - SiteOf(error.expected));
      CHECK(IsSpoiled(world, r));
      const Status said = Status::Invalid(Describe("dispatch", error, 3, 1));
      if (r == 0 && first == 5)
        CHECK(Contains(said,
                       "rank 0 runs another call than rank 1: "
                       "expected call 5 of its program, seen call 6, "
                       "of the same shapes"));
    }
  }
  RunRanks(world);
  CheckMoved(world);
}

// Every rank names the one that did not come; afterwards the channel cannot be used again.
void AnAbsentRankIsNamed() {
  World world = SmallWorld(3, true);
  RunRanks(world);
  CHECK(world.IsFine());
  RunWithout(world, /*absent=*/1);
  for (const int r : {0, 2}) {
    const ErrorRecord error = world.Take(r);
    CHECK(error.failure == Failure::kDeadline && error.peer == 1);
    CHECK(error.expected == 2 && error.seen == 1 && error.epoch == 2);
    CHECK(IsSpoiled(world, r));
  }
  RunWithout(world, /*absent=*/1);
  for (const int r : {0, 2}) CHECK(world.Take(r).failure == Failure::kBroken);
  RunRanks(world);
  const ErrorRecord error = world.Take(1);
  CHECK(error.failure == Failure::kGone && error.peer == 0 && error.epoch == 2);
}

// While a rank is late, its name can be read where the others wait. Then all have their results.
void ALateRankIsMissingUntilItComes(bool is_small) {
  World world = SmallWorld(3, true);
  world.is_small = is_small;
  std::vector<Call> calls;
  for (int r = 0; r < 3; ++r) calls.push_back(world.MakeCall(r));
  world.Clear();
  const auto missing_at = [&](int at, uint64_t call) {
    uint64_t arrived[3];
    for (int from = 0; from < 3; ++from) arrived[from] = LoadAcquire(Arrived(calls[at], at, from));
    return MissingRanks(arrived, 3, call);
  };
  std::vector<std::thread> threads;
  for (const int r : {0, 2}) threads.emplace_back([&, r] { RunCall(calls[r], 2, 2); });
  for (const int r : {0, 2}) {
    while (missing_at(r, 1) != std::vector<int>{1}) std::this_thread::yield();
  }
  threads.emplace_back([&] { RunCall(calls[1], 2, 2); });
  for (std::thread& thread : threads) thread.join();
  CheckMoved(world);
  for (int r = 0; r < 3; ++r) CHECK(missing_at(r, 1).empty());
}

void CopiesAreCutAtTheWidestVector() {
  for (uint64_t from = 0; from < 16; ++from) {
    for (uint64_t to = 0; to < 16; ++to) {
      for (int64_t bytes = 0; bytes < 70; ++bytes) {
        const Cut cut = CutCopy(from, to - from, bytes);
        CHECK(cut.head + cut.count * cut.width + cut.tail == bytes);
        if (cut.count > 0) {
          CHECK((from + cut.head) % cut.width == 0 && (to + cut.head) % cut.width == 0);
        }
        CHECK(cut.head < cut.width && cut.tail < cut.width);
        if ((to - from) % 16 == 0) CHECK(cut.width == 16);
      }
    }
  }
}

const Register kTests("test_device", [](const Numbers& numbers) {
  CopiesAreCutAtTheWidestVector();
  RandomPlans(numbers.Get(0, 6));
  ManyReplicasAndSources();
  CopiesOfFieldsTakeTheirPlace(true);
  CopiesOfFieldsTakeTheirPlace(false);
  BadPlansAreRefusedEverywhere();
  PlansAreCompared();
  ReceiversCheckCountsAndOverlaps();
  RanksDifferInBlocks();
  SwappedCallsAreNamed(/*is_small=*/false);
  SwappedCallsAreNamed(/*is_small=*/true);
  AnAbsentRankIsNamed();
  ALateRankIsMissingUntilItComes(/*is_small=*/false);
  ALateRankIsMissingUntilItComes(/*is_small=*/true);
});

}  // namespace cpd::kernels::test_device
