// Small calls, each in one kernel: beside calls of several kernels on one channel, with few blocks
// at a time, rejected plans, ranks that do not come, and which calls are small.
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "device.h"
#include "device_world.h"
#include "native_test.h"
#include "one_launch.h"

namespace cpd::kernels::test_small_calls {

// Each rank draws for each of its calls whether it is small: calls may alternate, and the ranks of
// one call may differ.
void BothKindsServeOneChannel(int num_worlds) {
  Rng rng(61);
  for (const int num_ranks : {2, 4}) {
    for (int i = 0; i < num_worlds; ++i) {
      for (const bool is_dispatch : {true, false}) {
        World world = RandomWorld(rng, is_dispatch, num_ranks);
        Concurrently(world, -1, [&](Call call) {
          Rng of_rank(100 * i + call.first_rank);
          for (int n = 0; n < 6; ++n) {
            call.is_small = Draw(of_rank, 0, 1);
            RunCall(call, world.num_blocks, world.num_threads);
          }
        });
        CheckMoved(world);
      }
    }
  }
}

void BothKindsServeOneLaunch(int num_worlds) {
  Rng rng(62);
  for (const int num_ranks : {1, 2, 8}) {
    for (int i = 0; i < num_worlds; ++i) {
      for (const bool is_dispatch : {true, false}) {
        World world = RandomWorld(rng, is_dispatch, num_ranks);
        OneLaunch launch(world);
        launch.Clear();
        for (int n = 0; n < 5; ++n) {
          launch.call.is_small = Draw(rng, 0, 1);
          RunCall(launch.call, world.num_blocks, world.num_threads);
        }
        launch.Store(&world);
        CheckMoved(world);
      }
    }
  }
}

// One device with all ranks runs any number of blocks at once: those that wait never keep out those
// that send.
void AnyNumberOfBlocksRunsAtOnce() {
  Rng rng(63);
  for (const bool is_dispatch : {true, false}) {
    World world = RandomWorld(rng, is_dispatch, 4);
    OneLaunch launch(world);
    for (const int num_resident : {1, 2, 3, 5, 1}) {
      launch.Clear();
      RunSmallCall(launch.call, world.num_threads, num_resident);
      launch.Store(&world);
      CheckMoved(world);
    }
  }
}

// No rank has a result, and the next call succeeds.
void APlanThatOneRankRejects() {
  Rng rng(64);
  for (const bool is_dispatch : {true, false}) {
    World world = RandomWorld(rng, is_dispatch, 3);
    world.is_small = true;
    int32_t& length = world.groups[0].plans[1].seq_len[0];
    const int32_t good = std::exchange(length, -1);
    RunRanks(world);
    CheckRefused(world, 1, Failure::kLength);
    length = good;
    RunRanks(world, 3);
    CheckMoved(world);
  }
}

// Counts that do not fit: found before rows are taken.
void MessagesAreChecked() {
  Rng rng(65);
  World counts = RandomWorld(rng, true, 2);
  counts.is_small = true;
  counts.groups[0].plans[1].num_recv_tokens[0] += 1;
  RunRanks(counts);
  CHECK(counts.Take(1).failure == Failure::kCounts && IsSpoiled(counts, 1) && counts.IsFine());
}

// The deadline has passed when the waits begin: all ranks miss the first one at least. Afterwards
// the channel cannot be used again, by calls of either kind.
void AnAbsentRankIsNamed() {
  Rng rng(66);
  World world = RandomWorld(rng, true, 3);
  world.is_small = true;
  RunRanks(world);
  CHECK(world.IsFine());
  Concurrently(world, /*absent=*/0, [&](Call call) {
    call.deadline_ns = 0;
    RunCall(call, 1, 2);
  });
  for (const int r : {1, 2}) {
    const ErrorRecord error = world.Take(r);
    CHECK(error.failure == Failure::kDeadline && error.peer == 0);
    CHECK(error.expected == 2 && error.seen == 1 && error.epoch == 2);
    CHECK(IsSpoiled(world, r));
  }
  for (const bool is_small : {false, true}) {
    world.is_small = is_small;
    Concurrently(world, 0, [&](const Call& call) { RunCall(call, 1, 2); });
    for (const int r : {1, 2}) CHECK(world.Take(r).failure == Failure::kBroken);
  }
  RunRanks(world);
  const ErrorRecord error = world.Take(0);
  CHECK(error.failure == Failure::kGone && error.peer == 1);
}

// On a GPU that is broken, a part that takes may wait for one that never ends.
void APartThatDoesNotEnd() {
  Rng rng(67);
  World world = RandomWorld(rng, true, 2);
  OneLaunch launch(world);
  launch.Clear();
  launch.call.deadline_ns = 1'000'000;
  Rank{launch.call, 0}.state()->parts_drawn = 3;  // what is left is to take for rank 1
  SmallScratch scratch;
  RunSmall<true>(Block{0, 1, 0, 1, nullptr}, launch.call, &scratch);
  launch.Store(&world);
  const ErrorRecord error = world.Take(1);
  CHECK(error.failure == Failure::kDeadline && error.peer == 1);
  CHECK(error.expected == 1 && error.seen == 0);
  CHECK(IsSpoiled(world, 1) && (Rank{launch.call, 1}.state()->broken == 1));
}

Call CallOf(int num_ranks, int num_local, int64_t rows, int64_t row_bytes) {
  Call call{};
  call.num_ranks = num_ranks;
  call.num_local = num_local;
  call.num_groups = call.num_arrays = call.groups[0].num_arrays = 1;
  OperandGroup& group = call.groups[0];
  group.num_slots = num_ranks;
  group.num_replicas = 1;
  group.num_tokens = group.capacity = rows;
  call.arrays[0].in_row_bytes = call.arrays[0].out_row_bytes = row_bytes;
  return call;
}

void WhichCallsAreSmall() {
  const auto is_small = [](const Call& call, int num_resident = 264) {
    return IsSmall(call, num_resident);
  };
  CHECK(is_small(CallOf(8, 1, 64, 1024)) && !is_small(CallOf(8, 1, 65, 1024)));
  CHECK(is_small(CallOf(64, 1, 1, 1)) && !is_small(CallOf(64, 1, 1, 1), 64));  // blocks that wait
  CHECK(is_small(CallOf(64, 64, 1, 1), 2));  // all ranks on one device: no two wait for each other
  CHECK(!is_small(CallOf(8, 1, int64_t{1} << 40, 1)) &&
        !is_small(CallOf(8, 1, 1, int64_t{1} << 40)));

  Call tags = CallOf(8, 1, 64, 1016);
  tags.is_dispatch = true;
  CHECK(is_small(tags));
  tags.arrays[0].in_row_bytes = 1017;
  CHECK(!is_small(tags));

  Call sent = CallOf(8, 1, 32, 1024);
  sent.groups[0].num_replicas = 2;
  CHECK(is_small(sent));
  sent.groups[0].num_replicas = 3;
  CHECK(!is_small(sent));

  Call targets = CallOf(8, 1, 1, 1);
  targets.groups[0].num_slots = 256;
  CHECK(is_small(targets));
  targets.groups[0].num_replicas = 2;
  CHECK(!is_small(targets));

  Call sums = CallOf(8, 1, 64, 512);
  sums.arrays[0].out_row_bytes = 1024;
  CHECK(is_small(sums));
  sums.arrays[0].out_row_bytes = 1040;
  CHECK(!is_small(sums));

  Call network = CallOf(8, 1, 1, 1);
  network.has_network = true;
  CHECK(!is_small(network));
}

// Warps push the rows of a small call; everything else moves them at once.
void WarpsPush() {
  for (const auto& [rows, row_bytes, strip] :
       {std::tuple{64, 1024, 8}, {4096, 16, 512}, {8, 16, 128}, {1, 60000, 1}, {0, 16, 128}}) {
    Call call = CallOf(8, 1, rows, row_bytes);
    OperandGroup& group = call.groups[0];
    group.rows_per_strip = group.rows_per_push = 99;
    ChooseSmall(&call, 264);
    CHECK(call.is_small && group.rows_per_push == strip);
    CHECK(group.rows_per_strip == (rows ? rows : 1));
  }
  Call large = CallOf(8, 1, 65, 1024);
  large.groups[0].rows_per_strip = large.groups[0].rows_per_push = 99;
  ChooseSmall(&large, 264);
  CHECK(!large.is_small);
  CHECK(large.groups[0].rows_per_strip == 99 && large.groups[0].rows_per_push == 99);
}

const Register kTests("test_small_calls", [](const Numbers& numbers) {
  const int num_worlds = numbers.Get(0, 3);
  BothKindsServeOneChannel(num_worlds);
  BothKindsServeOneLaunch(num_worlds);
  AnyNumberOfBlocksRunsAtOnce();
  APlanThatOneRankRejects();
  MessagesAreChecked();
  AnAbsentRankIsNamed();
  APartThatDoesNotEnd();
  WhichCallsAreSmall();
  WarpsPush();
});

}  // namespace cpd::kernels::test_small_calls
