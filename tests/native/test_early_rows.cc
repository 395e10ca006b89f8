// `dispatch` between devices takes rows while ranks still send: how many in an exchange of equal
// parts, and none of a rank that has not signalled.
#include <memory>
#include <vector>

#include "device.h"
#include "device_world.h"
#include "native_test.h"

namespace cpd::kernels::test_early_rows {

// Every rank sends `num_rows` rows to every rank; those of rank r are the r-th of a result.
World EqualParts(int num_ranks, int64_t num_rows) {
  World world{};
  world.num_ranks = num_ranks;
  world.is_dispatch = true;
  World::Made group{num_ranks, 1, num_ranks * num_rows, num_ranks * num_rows, {16, 5}, {}, {}, {}};
  for (int r = 0; r < num_ranks; ++r) {
    Plan plan;
    plan.num_recv_tokens.assign(num_ranks, num_rows);
    plan.num_recv_tokens.push_back(num_ranks * num_rows);
    for (int to = 0; to < num_ranks; ++to) {
      plan.seq_len.push_back(num_rows);
      plan.dst_rank.push_back(to);
      plan.src_offset.push_back(to * num_rows);
      plan.dst_offset.push_back(r * num_rows);
    }
    group.plans.push_back(plan);
  }
  world.groups.push_back(group);
  Rng rng(32);
  FillArrays(&world, rng);
  return world;
}

// The ranks whose rows are in the result of `at`.
int NumTaken(const World& world, int at) {
  const World::Made& group = world.groups[0];
  int num = 0;
  for (int from = 0; from < world.num_ranks; ++from) {
    bool is_taken = from != at;
    for (size_t a = 0; a < group.row_bytes.size(); ++a) {
      const int64_t bytes = group.num_tokens / world.num_ranks * group.row_bytes[a];
      const char *got = group.out[a][at].data() + from * bytes,
                 *sent = group.x[a][from].data() + at * bytes;
      is_taken = is_taken && std::memcmp(got, sent, bytes) == 0;
    }
    num += is_taken;
  }
  return num;
}

// One thread a block; the caller runs the blocks of all ranks in lock step.
struct OneRank {
  Call call;
  Rank rank{call, 0};
  std::vector<Block> blocks;
  std::vector<std::unique_ptr<PushTakeScratch>> scratch;
  std::vector<PushTake> parts;

  OneRank(World& world, int r, int num_blocks) : call(world.MakeCall(r)) {
    Launch<PlanScratch>(1, 1, [&](const Block& b, PlanScratch* s) { Prepare(b, rank, s); });
    for (int b = 0; b < num_blocks; ++b) blocks.push_back({0, 1, b, num_blocks, nullptr});
    for (const Block& block : blocks) {
      scratch.push_back(std::make_unique<PushTakeScratch>());
      parts.emplace_back(block, rank, scratch.back().get());
      parts.back().Begin();
    }
  }
  OneRank(const OneRank&) = delete;

  int NumHeard() const {
    int num = 0;
    for (int from = 0; from < call.num_ranks; ++from) {
      num += *Arrived(call, rank.rank(), from) == rank.state()->epoch;
    }
    return num;
  }
  void Finish() {
    for (PushTake& part : parts) part.End();
    Launch<MeetScratch>(1, 1, [&](const Block& b, MeetScratch* s) { Wait(b, rank, s); });
    Launch<UnpackScratch>(2, 2, [&](const Block& b, UnpackScratch* s) { Unpack(b, rank, s); });
  }
};

// With one signal for all ranks, every rank would take nothing before the last signal.
void AllButOnePartIsTakenBeforeTheLastSignal() {
  constexpr int kRanks = 8, kSteps = 2;  // of a block, for each rank
  for (const int num_blocks : {1, 3}) {
    World world = EqualParts(kRanks, num_blocks * kSteps * 3);
    for (int call = 0; call < 3; ++call) {
      std::vector<std::unique_ptr<OneRank>> ranks;
      for (int r = 0; r < kRanks; ++r) {
        ranks.push_back(std::make_unique<OneRank>(world, r, num_blocks));
      }
      world.Clear();
      for (const auto& one : ranks) CHECK(one->NumHeard() == 0);
      std::vector<int> taken_before_last(kRanks, -1);
      for (int step = 0; step < kRanks * kSteps; ++step) {
        for (int b = 0; b < num_blocks; ++b) {
          for (int r = 0; r < kRanks; ++r) {
            ranks[r]->parts[b].Step(step * num_blocks + b);
            for (int at = 0; at < kRanks; ++at) {  // its own part is last, and needs no signal
              if (taken_before_last[at] >= 0 || ranks[at]->NumHeard() < kRanks - 1) continue;
              taken_before_last[at] = NumTaken(world, at);
            }
          }
        }
      }
      for (const int num_taken : taken_before_last) CHECK(num_taken == kRanks - 2);
      // A block takes after it has signalled, so two turns are enough for what is left.
      for (const auto& one : ranks) {
        for (PushTake& part : one->parts) part.End();
      }
      for (int r = 0; r < kRanks; ++r) {
        for (PushTake& part : ranks[r]->parts) part.End();
        CHECK(NumTaken(world, r) == kRanks - 1);
      }
      for (const auto& one : ranks) one->Finish();
      CheckMoved(world);
    }
  }
}

// A rank that is late keeps back its own rows only.
void RowsOfOtherRanksAreTakenMeanwhile() {
  World world = EqualParts(4, 6);
  RunRanks(world);
  OneRank own(world, 0, 2), first(world, 1, 1), third(world, 3, 1), late(world, 2, 1);
  world.Clear();
  for (OneRank* one : {&first, &third, &own}) {
    const auto num_blocks = static_cast<int>(one->blocks.size());
    for (int i = 0; i < 8; ++i) one->parts[i % num_blocks].Step(i);
    for (PushTake& part : one->parts) part.End();
  }
  CHECK(NumTaken(world, 0) == 2 && own.NumHeard() == 3);
  for (int i = 0; i < 8; ++i) late.parts[0].Step(i);
  late.parts[0].End();
  CHECK(NumTaken(world, 0) == 2 && NumTaken(world, 2) == 3);
  for (OneRank* one : {&own, &first, &late, &third}) one->Finish();
  CheckMoved(world);
}

void TagsNameTheirSender() {
  for (const uint64_t epoch : {uint64_t{1}, (uint64_t{3} << 40) + 5, (uint64_t{1} << 57) - 1}) {
    for (int sender = 0; sender < kMaxRanks; ++sender) {
      const uint64_t tag = TagOf(epoch, sender), in_place = TagInPlace(epoch);
      CHECK(SenderOf(tag) == sender);
      CHECK((Tagged{&tag, epoch}.IsReady(0)) && !(Tagged{&tag, epoch + 2}.IsWritten(0)));
      CHECK((Tagged{&in_place, epoch}.IsWritten(0)) && !(Tagged{&in_place, epoch}.IsReady(0)));
    }
  }
}

const Register kTests("test_early_rows", [](const Numbers&) {
  TagsNameTheirSender();
  AllButOnePartIsTakenBeforeTheLastSignal();
  RowsOfOtherRanksAreTakenMeanwhile();
});

}  // namespace cpd::kernels::test_early_rows
