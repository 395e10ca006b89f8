// Ranks of one device in one launch, as an XLA call of one GPU runs them: rows take one pass, from
// the sender's array into the receiver's. Worlds of 2, 4 and 8 ranks against plain loops.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "device.h"
#include "kernels/prepare.h"
#include "native_test.h"
#include "one_launch.h"

namespace cpd::kernels::test_one_launch {

// `times` calls in a row, of all ranks together.
void Run(World& world, OneLaunch& launch, int times) {
  launch.Clear();
  for (int i = 0; i < times; ++i) RunCall(launch.call, world.num_blocks, world.num_threads);
  launch.Store(&world);
}

void RandomPlans(int num_worlds) {
  Rng rng(21);
  for (const int num_ranks : {2, 4, 8}) {
    for (int i = 0; i < num_worlds; ++i) {
      for (const bool is_dispatch : {true, false}) {
        World world = RandomWorld(rng, is_dispatch, num_ranks);
        OneLaunch launch(world);
        for (int round = 0; round < 2; ++round) {
          Run(world, launch, 1 + round);
          CheckMoved(world);
        }
      }
    }
  }
}

// A strip has a row for each warp where a rank has enough of them for its share of the blocks.
void StripsAreThoseOfOneRank() {
  Call call{};
  OperandGroup& group = call.groups[0];
  group.num_tokens = group.capacity = 4096;
  group.num_arrays = 1;
  call.arrays[0].in_row_bytes = 16384;
  for (const auto& [num_local, rows] : {std::pair{8, 8}, std::pair{1, 3}}) {
    call.num_local = num_local;
    CHECK(RowsPerStrip(call, group, 264) == rows);
  }
}

// A number of multiprocessors is one of blocks, unless it names all of them: two on each. By
// default, an exchange between devices leaves some to other work.
void MultiprocessorsAreBlocks() {
  for (const bool on_one_device : {true, false}) {
    const int by_default = on_one_device ? 264 : 64;
    for (const auto& [num_comm_sm, blocks] : {std::pair{0, by_default},
                                              {1, 1},
                                              {48, 48},
                                              {131, 131},
                                              {132, 264},
                                              {1000, 264},
                                              {-1, by_default}}) {
      CHECK(NumMoveBlocks(num_comm_sm, 264, on_one_device) == blocks);
    }
  }
  CHECK(NumMoveBlocks(0, 40, false) == 40);  // a small GPU
}

// Rows that were not written, in every array: holes, and a tail of several turns of each block.
void UnwrittenRowsAreCleared() {
  Rng rng(25);
  World world{};
  world.num_ranks = 2;
  world.is_dispatch = true;
  world.num_blocks = 3;
  world.num_threads = 8;
  for (const int64_t tail : {0, 5, 400}) {
    world.groups.push_back(MakeGroup(rng, 2, {6, 2, 60, {1, 70, 2064}, true}));
    world.groups.back().capacity += tail;
  }
  FillArrays(&world, rng);
  OneLaunch launch(world);
  for (int i = 0; i < 3; ++i) {
    Run(world, launch, 1);
    CheckMoved(world);
  }
}

// Each block has more sources than it gathers once; its strips have some of one source.
void SourcesAreGatheredByStrip() {
  Rng rng(26);
  World world{};
  world.num_ranks = 4;
  world.in_type = world.out_type = DataType::kF32;
  world.num_blocks = 2;
  world.num_threads = 3;
  world.rows_per_strip = 4;
  for (const int64_t num_replicas : {1, 2}) {
    world.groups.push_back(MakeGroup(rng, 4, {60, num_replicas, 240, {16, 12}, true}));
  }
  FillArrays(&world, rng, true);
  OneLaunch launch(world);
  Run(world, launch, 2);
  CheckMoved(world);
}

// The channel of such a call has tags and messages, but no rows.
void NoRowPassesThroughTheChannel() {
  Rng rng(22);
  for (const bool is_dispatch : {true, false}) {
    World world = RandomWorld(rng, is_dispatch, 4);
    const OneLaunch launch(world);
    int64_t half = AlignUp(4 * MessageBytes(launch.call));
    for (const World::Made& group : world.groups) {
      if (is_dispatch) half += AlignUp(8 * group.capacity);
    }
    CHECK(launch.call.half_bytes == half);
  }
}

// By then, the other ranks have written rows into the result.
void APlanThatOneRankRejectsHasNoResult() {
  Rng rng(23);
  for (const bool is_dispatch : {true, false}) {
    World world = RandomWorld(rng, is_dispatch, 4);
    const int32_t good = world.groups[0].plans[2].seq_len[0];
    OneLaunch launch(world);
    int32_t& length = launch.fields[0].seq_len[2 * world.groups[0].num_slots];
    length = -1;
    Run(world, launch, 1);
    CheckRefused(world, 2, Failure::kLength);
    length = good;
    Run(world, launch, 3);
    CheckMoved(world);
  }
}

void ARowThatIsWrittenTwiceIsFound() {
  World world{};
  world.num_ranks = 2;
  world.is_dispatch = true;
  world.num_blocks = world.num_threads = 1;
  World::Made group{2, 1, 8, 8, {16}, {}, {}, {}};
  // Rank 1 writes rows 0 to 3 twice: one block in sequence, or a sanitizer would rightly object.
  group.plans = {{{0, 8, 8}, {0, 0}, {-1, -1}, {0, 0}, {0, 0}},
                 {{0, 0, 0}, {4, 4}, {0, 0}, {0, 4}, {0, 0}}};
  world.groups.push_back(group);
  Rng rng(24);
  FillArrays(&world, rng);
  OneLaunch launch(world);
  Run(world, launch, 1);
  const ErrorRecord found = world.Take(0);
  CHECK(found.failure == Failure::kOverlap && found.expected == 8 && found.seen == 4);
  CHECK(IsSpoiled(world, 0) && !IsSpoiled(world, 1));
}

const Register kTests("test_one_launch", [](const Numbers& numbers) {
  RandomPlans(numbers.Get(0, 4));
  StripsAreThoseOfOneRank();
  MultiprocessorsAreBlocks();
  UnwrittenRowsAreCleared();
  SourcesAreGatheredByStrip();
  NoRowPassesThroughTheChannel();
  APlanThatOneRankRejectsHasNoResult();
  ARowThatIsWrittenTwiceIsFound();
});

}  // namespace cpd::kernels::test_one_launch
