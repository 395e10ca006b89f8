// Dispatch and combine in which some ranks reach each other only over a network, run block by block
// on the host: the same bits as with mapped memory, the same rejections, and a deadline for each
// wait.
#include <cstdio>
#include <cstdlib>

#include "adverse_network.h"
#include "device.h"
#include "device_world.h"
#include "native_test.h"

namespace cpd::kernels::test_network {

// Runs `ranks` over an adverse network. Returns the number of puts and gets.
int64_t OverNetwork(World& world, const std::function<void()>& ranks) {
  static unsigned seed = 0;
  world.MakeCall(0);  // makes the memory
  std::vector<char*> memory;
  for (auto& channel : world.symmetric) memory.push_back(reinterpret_cast<char*>(channel.data()));
  AdverseNetwork::Start(memory, 8 * static_cast<int64_t>(world.symmetric[0].size()), ++seed);
  ranks();
  const int64_t num_moved = AdverseNetwork::num_puts() + AdverseNetwork::num_gets();
  AdverseNetwork::Stop();
  return num_moved;
}

// `times` calls of all ranks without synchronization in between.
int64_t Run(World& world, int times = 1) {
  return OverNetwork(world, [&] {
    Concurrently(world, -1, [&](const Call& call) {
      const auto run = call.has_network ? RunCall<AdverseNetwork> : RunCall<Mapped>;
      for (int i = 0; i < times; ++i) run(call, world.num_blocks, world.num_threads, [] {});
    });
  });
}

void Divide(World* world, Rng& rng) {
  world->memory_groups.clear();
  for (int r = 0; r < world->num_ranks; ++r) world->memory_groups.push_back(Draw(rng, 0, 2));
}

void RandomPlans(int num_worlds) {
  Rng rng(11);
  int64_t num_moved = 0;
  int num_mixed = 0;
  for (int i = 0; i < num_worlds; ++i) {
    for (const bool is_dispatch : {true, false}) {
      World world = RandomWorld(rng, is_dispatch);
      Divide(&world, rng);
      for (int r = 1; r < world.num_ranks; ++r) {
        num_mixed += world.IsRemote(0, r) && world.num_ranks > 2;
      }
      for (int round = 0; round < 2; ++round) {
        num_moved += Run(world, 2);  // the third and the fourth call write over the first two
        CheckMoved(world);
      }
    }
  }
  CHECK(num_moved > 0 && num_mixed > 0);
}

World SmallWorld(bool is_dispatch, std::vector<int> memory_groups) {
  World world = kernels::SmallWorld(static_cast<int>(memory_groups.size()), is_dispatch);
  world.memory_groups = std::move(memory_groups);
  return world;
}

// A strip with more tags than one put sends, in rows of odd sizes.
void LongStrips() {
  Rng rng(13);
  World world{};
  world.num_ranks = 2;
  world.memory_groups = {0, 1};
  world.is_dispatch = true;
  world.rows_per_strip = 5000;
  world.groups.push_back(MakeGroup(rng, 2, {2, 1, 3 * kTagRun, {1, 3}, true}));
  for (Plan& plan : world.groups[0].plans) plan.src_offset = {0, 1};
  FillArrays(&world, rng);
  CHECK(Run(world) > 0);
  CheckMoved(world);
}

// More sources for a strip than a block gathers: they are looked up row by row.
void ManySources() {
  Rng rng(14);
  World world{};
  world.num_ranks = 3;
  world.memory_groups = {0, 1, 0};
  world.in_type = world.out_type = DataType::kF32;
  world.use_src_offset = false;
  world.num_threads = 4;
  world.rows_per_strip = 400;
  world.groups.push_back(MakeGroup(rng, 3, {200, 3, 400, {16}, false}));
  FillArrays(&world, rng, true);
  CHECK(Run(world) > 0);
  CheckMoved(world);
}

void NothingMoves() {
  for (const bool is_dispatch : {true, false}) {
    World world = SmallWorld(is_dispatch, {0, 1, 1});
    for (Plan& plan : world.groups[0].plans) {
      for (auto& n : plan.seq_len) n = 0;
      for (auto& n : plan.num_recv_tokens) n = 0;
    }
    CHECK(Run(world, 3) == 0);
    CheckMoved(world);
  }
}

// A plan that one rank rejects has no result on any rank, and the next call succeeds.
void BadPlansAreRefusedEverywhere() {
  for (const bool is_dispatch : {true, false}) {
    World world = SmallWorld(is_dispatch, {0, 1, 0});
    const auto good = world.groups[0].plans;
    world.groups[0].plans[1].seq_len[2] = -1;
    CHECK(Run(world) >= 0);
    CheckRefused(world, 1, Failure::kLength);
    world.groups[0].plans = good;
    Run(world, 3);
    CheckMoved(world);
  }
}

// Ranges that overlap on the rank that holds them are both summed if there is space to fetch them.
void OverlappingRanges() {
  for (const int num_slots : {4, 5}) {
    World world{};
    world.num_ranks = 2;
    world.memory_groups = {0, 1};
    world.in_type = world.out_type = DataType::kF32;
    World::Made group{num_slots, 1, 8, 16, {16}, {}, {}, {}};
    group.plans.resize(2);
    for (int s = 0; s < num_slots; ++s) {  // all rows of rank 0, from one half of rank 1's
      group.plans[0].seq_len.push_back(8);
      group.plans[0].dst_rank.push_back(1);
      group.plans[0].dst_offset.push_back(4);
      group.plans[0].src_offset.push_back(0);
      group.plans[1].seq_len.push_back(0);
      group.plans[1].dst_rank.push_back(-1);
      group.plans[1].dst_offset.push_back(0);
      group.plans[1].src_offset.push_back(0);
    }
    group.plans[0].num_recv_tokens = {0, 0, 0};
    group.plans[1].num_recv_tokens = {8 * num_slots, 0, 16};
    world.groups.push_back(group);
    Rng rng(15);
    FillArrays(&world, rng, true);
    Run(world);
    if (num_slots == 4) {
      CheckMoved(world);
      continue;
    }
    const ErrorRecord error = world.Take(0);
    CHECK(error.failure == Failure::kFetched && error.expected == 32 && error.seen == 40);
    CHECK(world.Take(1).failure == Failure::kPeer);
    CHECK(IsSpoiled(world, 0) && IsSpoiled(world, 1));
  }
}

// Every rank names the one that did not come; afterwards the channel cannot be used again.
void AnAbsentRankIsNamed() {
  for (const int absent : {1, 2}) {
    World world = SmallWorld(absent == 1, {0, 1, 0});
    Run(world);
    CHECK(world.IsFine());
    const auto others = [&] {
      RunWithout<AdverseNetwork>(world, absent, AdverseNetwork::DeliverSignals);
    };
    OverNetwork(world, others);
    for (int r = 0; r < 3; ++r) {
      if (r == absent) continue;
      const ErrorRecord error = world.Take(r);
      CHECK(error.failure == Failure::kDeadline && error.peer == absent);
      CHECK(error.expected == 2 && error.seen == 1 && error.epoch == 2);
      CHECK(IsSpoiled(world, r));
    }
    OverNetwork(world, others);
    for (int r = 0; r < 3; ++r) {
      if (r != absent) CHECK(world.Take(r).failure == Failure::kBroken);
    }
    Run(world);
    const ErrorRecord error = world.Take(absent);
    CHECK(error.failure == Failure::kGone && error.peer == 0 && error.epoch == 2);
  }
}

// With mapped memory only, the same plans give the same bits.
void TheSameBits() {
  for (const bool is_dispatch : {true, false}) {
    World far = SmallWorld(is_dispatch, {0, 0, 1, 2}), near = far;
    near.memory_groups.clear();
    Run(far);
    Run(near);
    CHECK(near.IsFine() && far.IsFine());
    for (size_t a = 0; a < near.groups[0].out.size(); ++a) {
      for (int r = 0; r < near.num_ranks; ++r) {
        CHECK(near.groups[0].out[a][r] == far.groups[0].out[a][r]);
      }
    }
  }
}

const Register kTests("test_network", [](const Numbers& numbers) {
  RandomPlans(numbers.Get(0, 6));
  LongStrips();
  ManySources();
  NothingMoves();
  BadPlansAreRefusedEverywhere();
  OverlappingRanges();
  AnAbsentRankIsNamed();
  TheSameBits();
});

}  // namespace cpd::kernels::test_network
