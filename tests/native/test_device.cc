// The GPU's kernels, run block by block on the host, against plain loops: values, refusals, errors.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "device.h"

namespace {

using namespace cpd;          // NOLINT
using namespace cpd::device;  // NOLINT

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (0)

using Rng = std::mt19937;

int64_t Draw(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

// One part of one rank, and what the ranks hold of it.
struct Plan {
  std::vector<int32_t> num_recv, seq_len, dst_rank, src_offset;
  std::vector<int64_t> dst_offset;
};

// A world of ranks with one channel; the same plans go there and back.
struct World {
  struct Made {
    int64_t num_slots, num_replicas, num_tokens, capacity;
    std::vector<int64_t> row_bytes;
    std::vector<Plan> plans;                             // [rank]
    std::vector<std::vector<std::vector<char>>> x, out;  // [array][rank]
  };
  int num_ranks;
  bool is_dispatch;
  std::vector<Made> parts;
  std::vector<std::vector<uint64_t>> symmetric, local;
  std::vector<ErrorRecord> errors;
  DataType in_type = DataType::kU8, out_type = DataType::kU8;
  uint64_t deadline_ns = 20'000'000'000;
  int num_blocks = 2, num_threads = 3;
  int64_t rows_per_piece = 3;
  bool use_src_offset = true;

  Call MakeCall(int rank) {
    Call call{};
    call.num_ranks = num_ranks;
    call.first_rank = rank;
    call.num_local = 1;
    call.is_dispatch = is_dispatch;
    call.deadline_ns = deadline_ns;
    for (Made& made : parts) {
      Part& part = call.parts[call.num_parts++];
      Plan& plan = made.plans[rank];
      part.num_recv = {plan.num_recv.data(), IntType::kI32};
      part.seq_len = {plan.seq_len.data(), IntType::kI32};
      part.dst_rank = {plan.dst_rank.data(), IntType::kI32};
      part.dst_offset = {plan.dst_offset.data(), IntType::kI64};
      if (use_src_offset) part.src_offset = {plan.src_offset.data(), IntType::kU32};
      part.num_slots = made.num_slots;
      part.num_replicas = made.num_replicas;
      part.num_tokens = made.num_tokens;
      part.capacity = made.capacity;
      part.rows_per_piece = rows_per_piece;
      part.first_array = call.num_arrays;
      part.num_arrays = static_cast<int>(made.row_bytes.size());
      for (size_t a = 0; a < made.row_bytes.size(); ++a) {
        Array& array = call.arrays[call.num_arrays++];
        array.in = made.x[a][rank].data();
        array.out = made.out[a][rank].data();
        array.in_row_bytes = made.row_bytes[a];
        array.out_row_bytes = made.row_bytes[a] / ElementBytes(in_type) * ElementBytes(out_type);
        array.in_type = in_type;
        array.out_type = out_type;
      }
    }
    const int64_t bytes = LayOutChannel(&call);
    const int64_t local_bytes = LayOutLocal(&call);
    if (symmetric.empty()) {
      symmetric.assign(num_ranks, std::vector<uint64_t>(bytes / 8 + 1));
      local.assign(num_ranks, std::vector<uint64_t>(local_bytes / 8 + 1));
      errors.assign(num_ranks, ErrorRecord{});
    }
    for (int r = 0; r < num_ranks; ++r) {
      call.symmetric[r] = reinterpret_cast<char*>(symmetric[r].data());
    }
    call.local = reinterpret_cast<char*>(local[rank].data());
    call.errors = &errors[rank];
    return call;
  }

  // All ranks but `absent`, at once; `times` calls without meeting in between.
  void Run(int times = 1, int absent = -1) {
    std::vector<Call> calls;
    for (int r = 0; r < num_ranks; ++r) calls.push_back(MakeCall(r));
    for (Made& part : parts) {
      for (auto& ranks : part.out) {
        for (auto& rows : ranks) std::memset(rows.data(), 0x7f, rows.size());
      }
    }
    std::vector<std::thread> threads;
    for (int r = 0; r < num_ranks; ++r) {
      if (r == absent) continue;
      threads.emplace_back([&, r] {
        for (int i = 0; i < times; ++i) RunCall(calls[r], 0, num_blocks, num_threads);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // The error of a rank since the last look.
  ErrorRecord Take(int rank) {
    ErrorRecord record = errors[rank];
    if (record.raised == record.reported) return {};
    errors[rank].reported = record.raised;
    return record;
  }

  bool IsFine() {
    for (int r = 0; r < num_ranks; ++r) {
      if (Take(r).failure != Failure::kNone) return false;
    }
    return true;
  }
};

// A plan as Metadata allows: holes, replicas, rows named twice, destinations in any order.
World::Made MakePart(Rng& rng, int num_ranks, int64_t num_slots, int64_t num_replicas,
                     int64_t num_tokens, std::vector<int64_t> row_bytes, bool has_src_offset) {
  World::Made part{num_slots, num_replicas, num_tokens, 0, row_bytes, {}, {}, {}};
  part.plans.resize(num_ranks);
  std::vector<int64_t> filled(num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    Plan& plan = part.plans[r];
    plan.num_recv.assign(num_ranks + 1, 0);
    int64_t row = 0;
    for (int64_t s = 0; s < num_slots; ++s) {
      const int64_t room = num_tokens - (has_src_offset ? 0 : row);
      const int64_t n = Draw(rng, 0, std::min<int64_t>(room, 2 * num_tokens / num_slots + 1));
      plan.seq_len.push_back(n);
      plan.src_offset.push_back(has_src_offset ? Draw(rng, 0, num_tokens - n) : row);
      row += n;
    }
  }
  for (int r = 0; r < num_ranks; ++r) {
    Plan& plan = part.plans[r];
    for (int64_t s = 0; s < num_slots; ++s) {
      for (int64_t c = 0; c < num_replicas; ++c) {
        const int64_t dst = Draw(rng, -1, num_ranks - 1);
        const int64_t gap = Draw(rng, 0, 2);
        plan.dst_rank.push_back(dst);
        plan.dst_offset.push_back(dst < 0 ? -7 : filled[dst] + gap);
        if (dst < 0) continue;
        filled[dst] += gap + plan.seq_len[s];
        part.plans[dst].num_recv[r] += plan.seq_len[s];
        part.plans[dst].num_recv[num_ranks] += plan.seq_len[s];
      }
    }
  }
  part.capacity = *std::max_element(filled.begin(), filled.end()) + Draw(rng, 1, 5);
  return part;
}

void FillArrays(World* world, Rng& rng, bool small_floats = false) {
  for (World::Made& part : world->parts) {
    const int64_t in_rows = world->is_dispatch ? part.num_tokens : part.capacity;
    const int64_t out_rows = world->is_dispatch ? part.capacity : part.num_tokens;
    part.x.assign(part.row_bytes.size(), {});
    part.out.assign(part.row_bytes.size(), {});
    for (size_t a = 0; a < part.row_bytes.size(); ++a) {
      for (int r = 0; r < world->num_ranks; ++r) {
        std::vector<char> rows(in_rows * part.row_bytes[a]);
        if (small_floats) {
          auto* values = reinterpret_cast<float*>(rows.data());
          std::normal_distribution<float> normal;
          for (size_t i = 0; i < rows.size() / 4; ++i) values[i] = normal(rng);
        } else {
          for (char& byte : rows) byte = static_cast<char>(Draw(rng, 0, 255));
        }
        part.x[a].push_back(std::move(rows));
        const int64_t out_row =
            part.row_bytes[a] / ElementBytes(world->in_type) * ElementBytes(world->out_type);
        part.out[a].push_back(std::vector<char>(out_rows * out_row));
      }
    }
  }
}

// out[d][dst_offset + i] = x[s][src_offset + i], by its definition.
void CheckDispatched(const World& world) {
  for (const World::Made& part : world.parts) {
    for (size_t a = 0; a < part.row_bytes.size(); ++a) {
      const int64_t bytes = part.row_bytes[a];
      std::vector<std::vector<char>> wanted(world.num_ranks,
                                            std::vector<char>(part.capacity * bytes));
      for (int r = 0; r < world.num_ranks; ++r) {
        const Plan& plan = part.plans[r];
        for (int64_t t = 0; t < part.num_slots * part.num_replicas; ++t) {
          const int64_t s = t / part.num_replicas;
          if (plan.dst_rank[t] < 0 || plan.seq_len[s] == 0) continue;
          std::memcpy(&wanted[plan.dst_rank[t]][plan.dst_offset[t] * bytes],
                      &part.x[a][r][plan.src_offset[s] * bytes], plan.seq_len[s] * bytes);
        }
      }
      for (int r = 0; r < world.num_ranks; ++r) CHECK(part.out[a][r] == wanted[r]);
    }
  }
}

// x[s][src_offset + i] = the float32 sum over slots, then replicas, from the left.
void CheckCombined(const World& world) {
  for (const World::Made& part : world.parts) {
    for (size_t a = 0; a < part.row_bytes.size(); ++a) {
      const int64_t width = part.row_bytes[a] / 4;
      for (int r = 0; r < world.num_ranks; ++r) {
        const Plan& plan = part.plans[r];
        std::vector<float> wanted(part.num_tokens * width);
        std::vector<bool> has(part.num_tokens);
        for (int64_t t = 0; t < part.num_slots * part.num_replicas; ++t) {
          const int64_t s = t / part.num_replicas;
          if (plan.dst_rank[t] < 0) continue;
          const auto* y = reinterpret_cast<const float*>(part.x[a][plan.dst_rank[t]].data());
          for (int64_t i = 0; i < plan.seq_len[s]; ++i) {
            const int64_t row = plan.src_offset[s] + i;
            for (int64_t e = 0; e < width; ++e) {
              const float value = y[(plan.dst_offset[t] + i) * width + e];
              wanted[row * width + e] = has[row] ? wanted[row * width + e] + value : value;
            }
            has[row] = true;
          }
        }
        CHECK(std::memcmp(part.out[a][r].data(), wanted.data(), part.out[a][r].size()) == 0);
      }
    }
  }
}

World RandomWorld(Rng& rng, bool is_dispatch) {
  World world{};
  world.num_ranks = static_cast<int>(Draw(rng, 1, 4));
  world.is_dispatch = is_dispatch;
  world.use_src_offset = Draw(rng, 0, 1);
  world.rows_per_piece = Draw(rng, 1, 9);
  world.num_blocks = static_cast<int>(Draw(rng, 1, 3));
  world.num_threads = static_cast<int>(Draw(rng, 1, 4));
  if (!is_dispatch) world.in_type = world.out_type = DataType::kF32;
  const int64_t num_parts = Draw(rng, 1, 2);
  for (int64_t p = 0; p < num_parts; ++p) {
    std::vector<int64_t> row_bytes;
    const int64_t num_arrays = Draw(rng, 1, 3);
    for (int64_t a = 0; a < num_arrays; ++a) {
      row_bytes.push_back(is_dispatch ? Draw(rng, 1, 70) : 4 * Draw(rng, 1, 20));
    }
    world.parts.push_back(MakePart(rng, world.num_ranks, Draw(rng, 1, 7), Draw(rng, 1, 3),
                                   Draw(rng, 1, 30), row_bytes, world.use_src_offset));
  }
  FillArrays(&world, rng, !is_dispatch);
  return world;
}

void RandomPlans(int num_worlds) {
  Rng rng(1);
  for (int i = 0; i < num_worlds; ++i) {
    World there = RandomWorld(rng, true);
    for (int round = 0; round < 2; ++round) {
      there.Run(2);  // the third and the fourth call write over the first two
      CHECK(there.IsFine());
      CheckDispatched(there);
    }
    World back = RandomWorld(rng, false);
    for (int round = 0; round < 2; ++round) {
      back.Run(2);
      CHECK(back.IsFine());
      CheckCombined(back);
    }
  }
}

void ManyReplicasAndSources() {
  Rng rng(2);
  World there{};
  there.num_ranks = 3;
  there.is_dispatch = true;
  there.parts.push_back(MakePart(rng, 3, 4, 21, 12, {48, 17}, true));
  FillArrays(&there, rng);
  there.Run();
  CHECK(there.IsFine());
  CheckDispatched(there);

  World back{};  // every row of a piece has far more sources than the block can gather
  back.num_ranks = 2;
  back.is_dispatch = false;
  back.in_type = back.out_type = DataType::kF32;
  back.parts.push_back(MakePart(rng, 2, 150, 4, 9, {16, 12}, true));
  back.rows_per_piece = 64;
  FillArrays(&back, rng, true);
  back.Run();
  CHECK(back.IsFine());
  CheckCombined(back);
}

void OneDeviceHoldsAllRanks() {
  Rng rng(3);
  World world = RandomWorld(rng, true);
  world.num_ranks = 0;
  do {
    world = RandomWorld(rng, true);
  } while (world.num_ranks != 4 || world.parts.size() != 1);
  World::Made& part = world.parts[0];
  Call call = world.MakeCall(0);
  // The same as arrays and views of all ranks, one after another.
  std::vector<int32_t> num_recv, seq_len, dst_rank, src_offset;
  std::vector<int64_t> dst_offset;
  std::vector<std::vector<char>> x(part.row_bytes.size()), out(part.row_bytes.size());
  const auto append = [](auto* all, const auto& one) {
    all->insert(all->end(), one.begin(), one.end());
  };
  for (int r = 0; r < 4; ++r) {
    append(&num_recv, part.plans[r].num_recv);
    append(&seq_len, part.plans[r].seq_len);
    append(&dst_rank, part.plans[r].dst_rank);
    append(&dst_offset, part.plans[r].dst_offset);
    append(&src_offset, part.plans[r].src_offset);
    for (size_t a = 0; a < x.size(); ++a) append(&x[a], part.x[a][r]);
  }
  Part& all = call.parts[0];
  all.num_recv.data = num_recv.data();
  all.seq_len.data = seq_len.data();
  all.dst_rank.data = dst_rank.data();
  all.dst_offset.data = dst_offset.data();
  if (all.src_offset) all.src_offset.data = src_offset.data();
  all.has_all_views = true;
  for (size_t a = 0; a < x.size(); ++a) {
    out[a].assign(4 * part.capacity * part.row_bytes[a], 0x7f);
    call.arrays[a].in = x[a].data();
    call.arrays[a].out = out[a].data();
  }
  call.num_local = 4;
  std::vector<uint64_t> local(LayOutLocal(&call) / 8);
  std::vector<ErrorRecord> errors(4);
  call.local = reinterpret_cast<char*>(local.data());
  call.errors = errors.data();
  std::vector<std::thread> ranks;
  for (int r = 0; r < 4; ++r) ranks.emplace_back([&, r] { RunCall(call, r, 2, 2); });
  for (std::thread& rank : ranks) rank.join();
  for (size_t a = 0; a < x.size(); ++a) {
    for (int r = 0; r < 4; ++r) {
      const int64_t bytes = part.capacity * part.row_bytes[a];
      part.out[a][r].assign(out[a].begin() + r * bytes, out[a].begin() + (r + 1) * bytes);
    }
  }
  for (const ErrorRecord& error : errors) CHECK(error.raised == 0);
  CheckDispatched(world);
}

bool IsSpoiled(const World& world, int rank) {
  for (const World::Made& part : world.parts) {
    for (const auto& ranks : part.out) {
      for (const char byte : ranks[rank]) {
        if (static_cast<uint8_t>(byte) != 0xff) return false;
      }
    }
  }
  return true;
}

World SmallWorld(int num_ranks, bool is_dispatch) {
  Rng rng(4);
  World world{};
  world.num_ranks = num_ranks;
  world.is_dispatch = is_dispatch;
  if (!is_dispatch) world.in_type = world.out_type = DataType::kF32;
  world.parts.push_back(MakePart(rng, num_ranks, 4, 2, 16, {32, 8}, true));
  FillArrays(&world, rng, !is_dispatch);
  return world;
}

// A plan that one rank refuses has no result anywhere, and the next call goes well.
void BadPlansAreRefusedEverywhere() {
  struct Case {
    Failure failure;
    void (*spoil)(World::Made*, Plan*);
  };
  const Case cases[] = {
      {Failure::kDstRank, [](World::Made*, Plan* plan) { plan->dst_rank[1] = 3; }},
      {Failure::kDstRank, [](World::Made*, Plan* plan) { plan->dst_rank[0] = -2; }},
      {Failure::kLength, [](World::Made*, Plan* plan) { plan->seq_len[2] = -1; }},
      {Failure::kTokens,
       [](World::Made* part, Plan* plan) { plan->src_offset[1] = part->num_tokens; }},
      {Failure::kDstOffset, [](World::Made*, Plan* plan) { plan->dst_offset[1] = -1; }},
      {Failure::kDstOffset, [](World::Made*, Plan* plan) { plan->dst_offset[1] = 1LL << 50; }},
      {Failure::kCapacity,
       [](World::Made* part, Plan* plan) { plan->dst_offset[1] = part->capacity; }},
      {Failure::kCapacity,
       [](World::Made* part, Plan* plan) { plan->num_recv[3] = part->capacity + 1; }},
  };
  for (const bool is_dispatch : {true, false}) {
    for (const Case& one : cases) {
      World world = SmallWorld(3, is_dispatch);
      Plan& plan = world.parts[0].plans[1];
      for (auto& n : plan.seq_len) n = std::max(n, 1);  // counts no longer fit; checked later
      for (auto& row : plan.src_offset) row = 0;
      for (auto& dst : plan.dst_rank) dst = std::max(dst, 0);
      for (auto& row : plan.dst_offset) row = std::max<int64_t>(row, 0);
      for (auto& row : plan.dst_offset) row = std::min(row, world.parts[0].capacity - 16);
      one.spoil(&world.parts[0], &plan);
      world.Run();
      CHECK(world.Take(1).failure == one.failure);
      for (const int r : {0, 2}) {
        const ErrorRecord error = world.Take(r);
        CHECK(error.failure == Failure::kPeer && error.peer == 1);
      }
      for (int r = 0; r < 3; ++r) CHECK(IsSpoiled(world, r));
      const World good = SmallWorld(3, is_dispatch);
      world.parts[0].plans = good.parts[0].plans;
      world.Run(3);
      CHECK(world.IsFine());
      is_dispatch ? CheckDispatched(world) : CheckCombined(world);
    }
  }
}

void ReceiversCheckCountsAndOverlaps() {
  World counts = SmallWorld(3, true);
  counts.parts[0].plans[2].num_recv[1] += 1;
  counts.Run();
  const ErrorRecord error = counts.Take(2);
  CHECK(error.failure == Failure::kCounts && error.peer == 1 && error.expected == error.seen + 1);
  CHECK(IsSpoiled(counts, 2));
  CHECK(counts.IsFine());

  World overlap{};
  overlap.num_ranks = 2;
  overlap.is_dispatch = true;
  World::Made part{1, 1, 4, 8, {16}, {}, {}, {}};
  part.plans = {{{0, 0, 0}, {4}, {1}, {0}, {0}}, {{4, 4, 8}, {4}, {1}, {0}, {3}}};
  overlap.parts.push_back(part);
  Rng rng(5);
  FillArrays(&overlap, rng);
  overlap.num_blocks = 1;
  // Both write row 3: run one rank's push after the other's, or a sanitizer would rightly object.
  overlap.Run(0);
  const Call first = overlap.MakeCall(0), second = overlap.MakeCall(1);
  for (const Call* call : {&first, &second}) {
    const Rank rank{*call, 0};
    Launch<PlanScratch>(1, 1, [&](const Block& b, PlanScratch* s) { Prepare(b, rank, s); });
    Launch<PushScratch>(1, 1, [&](const Block& b, PushScratch* s) { Push(b, rank, s); });
    Launch<MeetScratch>(1, 1, [&](const Block& b, MeetScratch*) { Signal(b, rank); });
  }
  const Rank receiver{second, 0};
  Launch<MeetScratch>(1, 1, [&](const Block& b, MeetScratch* s) { Wait(b, receiver, s); });
  Launch<UnpackScratch>(1, 1, [&](const Block& b, UnpackScratch* s) { Unpack(b, receiver, s); });
  const ErrorRecord found = overlap.Take(1);
  CHECK(found.failure == Failure::kOverlap && found.expected == 8 && found.seen == 7);
}

// A rank that makes another call than the others is found out, not read as if it were theirs.
void AnotherProgramIsNamed() {
  World world = SmallWorld(2, true);
  Call calls[] = {world.MakeCall(0), world.MakeCall(1)};
  calls[1].program = 1;
  std::vector<std::thread> threads;
  for (const Call& call : calls) threads.emplace_back([&] { RunCall(call, 0, 2, 2); });
  for (std::thread& thread : threads) thread.join();
  CHECK(world.Take(0).failure == Failure::kProgram);
  CHECK(world.Take(1).failure == Failure::kProgram);
}

// Everybody names the rank that did not come; afterwards the channel is at its end for all.
void AnAbsentRankIsNamed() {
  World world = SmallWorld(3, true);
  world.Run();
  CHECK(world.IsFine());
  world.deadline_ns = 50'000'000;
  world.Run(1, /*absent=*/1);
  for (const int r : {0, 2}) {
    const ErrorRecord error = world.Take(r);
    CHECK(error.failure == Failure::kDeadline && error.peer == 1);
    CHECK(error.expected == 2 && error.seen == 1 && error.epoch == 2);
    CHECK(IsSpoiled(world, r));
  }
  world.Run();
  for (const int r : {0, 2}) CHECK(world.Take(r).failure == Failure::kBroken);
  const ErrorRecord error = world.Take(1);
  CHECK(error.failure == Failure::kGone && error.peer == 0 && error.epoch == 2);
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

}  // namespace

int main(int argc, char** argv) {
  CopiesAreCutAtTheWidestVector();
  RandomPlans(argc > 1 ? std::atoi(argv[1]) : 10);
  ManyReplicasAndSources();
  OneDeviceHoldsAllRanks();
  BadPlansAreRefusedEverywhere();
  ReceiversCheckCountsAndOverlaps();
  AnotherProgramIsNamed();
  AnAbsentRankIsNamed();
  std::printf("ok\n");
}
