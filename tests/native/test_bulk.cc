// Rows that move in bulk, by an adverse copy engine of the host: copies of every size and
// alignment, and calls of 2, 4 and 8 ranks, against plain loops.
#include <cstdio>
#include <cstdlib>

#include "adverse_engine.h"
#include "device.h"
#include "device_world.h"
#include "native_test.h"
#include "one_launch.h"

namespace cpd::kernels::test_bulk {

using CopyPath = InBulk<AdverseEngine>;

// Several copies in a row, as one block makes them: stages and parities go on.
void CopiesMoveEveryByteOnce() {
  Rng rng(41);
  for (int num_threads = 1; num_threads <= 3; ++num_threads) {
    for (int round = 0; round < 60; ++round) {
      struct One {
        int64_t bytes, from_at, to_at;
        std::vector<char> from;
        std::vector<std::vector<char>> to;
        std::vector<char*> at;
      };
      std::vector<One> copies(Draw(rng, 1, 5));
      for (One& one : copies) {
        one.bytes = Draw(rng, 0, 12 * AdverseEngine::kChunkBytes);
        one.from_at = Draw(rng, 0, 20);
        one.to_at = Draw(rng, 0, 2) ? one.from_at : Draw(rng, 0, 20);
        one.from.resize(one.from_at + one.bytes);
        for (char& byte : one.from) byte = static_cast<char>(Draw(rng, 0, 255));
        one.to.assign(Draw(rng, 1, 3), std::vector<char>(one.bytes + 64, 0x7f));
        for (auto& to : one.to) one.at.push_back(to.data() + one.to_at);
      }
      Launch<CopyPath::Scratch>(1, num_threads,
                                [&](const Block& block, CopyPath::Scratch* scratch) {
                                  MoveWith<CopyPath>(block, scratch, [&](const CopyPath& path) {
                                    for (One& one : copies) {
                                      path.Copy(block, one.from.data() + one.from_at, one.at.data(),
                                                static_cast<int>(one.at.size()), one.bytes);
                                      block.Sync();
                                    }
                                  });
                                });
      for (const One& one : copies) {
        std::vector<char> wanted(one.bytes + 64, 0x7f);
        std::copy(one.from.begin() + one.from_at, one.from.end(), wanted.begin() + one.to_at);
        for (const auto& to : one.to) CHECK(to == wanted);
      }
    }
  }
  CHECK(AdverseEngine::num_stores() > 1000);
}

// Copies that are not aligned alike, or too short, do not use the engine.
void WhatDoesNotFitGoesThroughRegisters() {
  const int64_t before = AdverseEngine::num_stores();
  alignas(16) char from[256] = {}, to[256];
  for (const auto& [to_at, bytes] : {std::pair{1, 200}, {8, 200}, {0, 31}, {0, 0}}) {
    char* at = to + to_at;
    Launch<CopyPath::Scratch>(
        1, 2, [&, bytes = bytes](const Block& block, CopyPath::Scratch* scratch) {
          MoveWith<CopyPath>(block, scratch,
                             [&](const CopyPath& path) { path.Copy(block, from, &at, 1, bytes); });
        });
  }
  CHECK(AdverseEngine::num_stores() == before);
}

World WorldOf(Rng& rng, int num_ranks, bool is_dispatch) {
  World world{};
  world.num_ranks = num_ranks;
  world.is_dispatch = is_dispatch;
  world.in_bulk = true;
  world.use_src_offset = Draw(rng, 0, 1);
  world.rows_per_strip = Draw(rng, 1, 12);
  world.num_blocks = static_cast<int>(Draw(rng, 1, 2));
  world.num_threads = static_cast<int>(Draw(rng, 1, 2));
  world.num_early = static_cast<int>(Draw(rng, 0, 2));
  if (!is_dispatch) world.in_type = world.out_type = DataType::kF32;
  for (int64_t p = Draw(rng, 1, 2); p > 0; --p) {
    std::vector<int64_t> row_bytes = {16 * Draw(rng, 1, 9), 4 * Draw(rng, 1, 20)};
    world.groups.push_back(MakeGroup(
        rng, num_ranks,
        {Draw(rng, 1, 7), Draw(rng, 1, 3), Draw(rng, 1, 30), row_bytes, world.use_src_offset}));
  }
  FillArrays(&world, rng, !is_dispatch);
  return world;
}

// Ranks on their own devices: rows pass through channels.
void RandomPlans(int num_worlds) {
  Rng rng(42);
  for (const int num_ranks : {2, 4, 8}) {
    for (int i = 0; i < num_worlds; ++i) {
      for (const bool is_dispatch : {true, false}) {
        World world = WorldOf(rng, num_ranks, is_dispatch);
        RunRanks(world, 3);
        CHECK(world.IsFine());
        is_dispatch ? CheckDispatched(world) : CheckCombined(world);
      }
    }
  }
}

// All ranks on one device: rows go into the results at once.
void RandomPlansInOneLaunch(int num_worlds) {
  Rng rng(43);
  for (const int num_ranks : {2, 4, 8}) {
    for (int i = 0; i < num_worlds; ++i) {
      World world = WorldOf(rng, num_ranks, true);
      OneLaunch launch(world);
      launch.Clear();
      for (int call = 0; call < 3; ++call) {
        RunCall(launch.call, world.num_blocks, world.num_threads);
      }
      launch.Store(&world);
      CHECK(world.IsFine());
      CheckDispatched(world);
    }
  }
}

const Register kTests("test_bulk", [](const Numbers& numbers) {
  const int num_worlds = numbers.Get(0, 4);
  CopiesMoveEveryByteOnce();
  WhatDoesNotFitGoesThroughRegisters();
  RandomPlans(num_worlds);
  RandomPlansInOneLaunch(num_worlds);
});

}  // namespace cpd::kernels::test_bulk
