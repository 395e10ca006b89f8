// Rows that the receiver takes before all ranks have signalled: worlds of 2, 4 and 8 ranks against
// plain loops, ranks that come late or never, and messages that must be rejected.
#include <cstdio>
#include <cstdlib>

#include "device.h"
#include "device_world.h"
#include "native_test.h"

namespace cpd::kernels::test_early_rows {

World WorldOf(Rng& rng, int num_ranks, int num_early) {
  World world{};
  world.num_ranks = num_ranks;
  world.is_dispatch = true;
  world.num_early = num_early;
  world.use_src_offset = Draw(rng, 0, 1);
  world.rows_per_strip = Draw(rng, 1, 9);
  world.num_blocks = static_cast<int>(Draw(rng, 1, 2));
  world.num_threads = static_cast<int>(Draw(rng, 1, 2));
  for (int64_t p = Draw(rng, 1, 2); p > 0; --p) {
    world.groups.push_back(MakeGroup(rng, num_ranks,
                                     {Draw(rng, 1, 7),
                                      Draw(rng, 1, 2),
                                      Draw(rng, 1, 30),
                                      {Draw(rng, 1, 70)},
                                      world.use_src_offset}));
  }
  FillArrays(&world, rng);
  return world;
}

void RandomPlans(int num_worlds) {
  Rng rng(31);
  for (const int num_ranks : {2, 4, 8}) {
    for (int i = 0; i < num_worlds; ++i) {
      World world = WorldOf(rng, num_ranks, static_cast<int>(Draw(rng, 1, 3)));
      for (int round = 0; round < 2; ++round) {
        RunRanks(world, 2);  // the third and the fourth call write over the first two
        CHECK(world.IsFine());
        CheckDispatched(world);
      }
    }
  }
}

// Every rank sends one row to every rank: row r of a result comes from rank r.
World OneRowEach(int num_ranks, int64_t row_bytes = 16) {
  World world{};
  world.num_ranks = num_ranks;
  world.is_dispatch = true;
  world.num_early = 1;
  world.rows_per_strip = 2;
  World::Made group{num_ranks, 1, num_ranks, num_ranks + 1, {row_bytes}, {}, {}, {}};
  for (int r = 0; r < num_ranks; ++r) {
    Plan plan;
    plan.num_recv_tokens.assign(num_ranks + 1, 1);
    plan.num_recv_tokens[num_ranks] = num_ranks;
    for (int to = 0; to < num_ranks; ++to) {
      plan.seq_len.push_back(1);
      plan.dst_rank.push_back(to);
      plan.src_offset.push_back(to);
      plan.dst_offset.push_back(r);
    }
    group.plans.push_back(plan);
  }
  world.groups.push_back(group);
  Rng rng(32);
  FillArrays(&world, rng);
  return world;
}

// The steps of a call, one at a time.
struct Steps {
  Call call;
  Rank rank{call, 0};

  explicit Steps(World& world, int r) : call(world.MakeCall(r)) {}
  Steps(const Steps&) = delete;

  void Send() {
    Launch<PlanScratch>(1, 2, [&](const Block& b, PlanScratch* s) { Prepare(b, rank, s); });
    Launch<PushScratch>(1, 2, [&](const Block& b, PushScratch* s) { Push(b, rank, s); });
    Launch<int>(1, 2, [&](const Block& b, int*) { Signal(b, rank); });
  }
  void TakeSome() {
    Launch<MeetScratch>(1, 2, [&](const Block& b, MeetScratch* s) { WaitSome(b, rank, s); });
    Launch<UnpackScratch>(1, 2, [&](const Block& b, UnpackScratch* s) { UnpackReady(b, rank, s); });
  }
  void TakeRest() {
    Launch<MeetScratch>(1, 2, [&](const Block& b, MeetScratch* s) { Wait(b, rank, s); });
    Launch<UnpackScratch>(1, 2, [&](const Block& b, UnpackScratch* s) { Unpack(b, rank, s); });
  }
};

// Whether a row of the result is that of its sender; if not, it is still poison.
bool HasRow(const World& world, int at, int from) {
  const World::Made& group = world.groups[0];
  const int64_t bytes = group.row_bytes[0];
  const char* row = group.out[0][at].data() + from * bytes;
  if (std::memcmp(row, group.x[0][from].data() + at * bytes, bytes) == 0) return true;
  for (int64_t i = 0; i < bytes; ++i) CHECK(row[i] == 0x7f);
  return false;
}

// Each round takes the rows of all ranks that have signalled, and no others; no row is taken twice.
void RowsAreTakenAsTheirSendersSignal() {
  World world = OneRowEach(4);
  world.deadline_ns = 3'600'000'000'000;  // no round ends by it
  Steps own(world, 0), first(world, 1), second(world, 2), third(world, 3);
  for (int call = 0; call < 3; ++call) {
    world.Clear();
    own.Send();
    CHECK(HasRow(world, 0, 0));  // in place
    first.Send();
    third.Send();
    own.TakeSome();  // waits for two of three
    CHECK(HasRow(world, 0, 1) && !HasRow(world, 0, 2) && HasRow(world, 0, 3));
    const OperandGroup& group = own.call.groups[0];
    char* rows =
        Half(own.call, 0, own.rank.state()->epoch) + own.call.arrays[group.first_array].data;
    const int64_t bytes = world.groups[0].row_bytes[0];
    std::memset(rows + bytes, 0x55, bytes);  // has been read
    second.Send();
    own.TakeSome();  // waits for the third
    CHECK(HasRow(world, 0, 2));
    std::memset(rows + 2 * bytes, 0x55, bytes);
    own.TakeRest();
    for (Steps* steps : {&first, &second, &third}) steps->TakeRest();
    CHECK(world.IsFine());
    CheckDispatched(world);
  }
}

// A round in which all have been heard takes everything; those after it have nothing to wait for.
void LaterRoundsMayBeEmpty() {
  World world = OneRowEach(4);
  world.deadline_ns = 2'000'000'000;
  Steps own(world, 0), first(world, 1), second(world, 2), third(world, 3);
  world.Clear();
  for (Steps* steps : {&own, &first, &second, &third}) steps->Send();
  own.TakeSome();
  for (int from = 0; from < 4; ++from) CHECK(HasRow(world, 0, from));
  own.TakeSome();
  own.TakeSome();
  CHECK(own.rank.state()->ready == 0 && own.rank.state()->taken == 0b1110);
  for (Steps* steps : {&own, &first, &second, &third}) steps->TakeRest();
  CHECK(world.IsFine());
  CheckDispatched(world);
}

// All waits of a call have one deadline, and the last one says who did not come.
void AnAbsentRankIsNamed() {
  for (const int num_ranks : {2, 4}) {
    for (const int num_early : {1, 3}) {
      World world = OneRowEach(num_ranks);
      world.num_early = num_early;
      RunRanks(world);
      CHECK(world.IsFine());
      RunWithout(world, /*absent=*/1);
      for (int r = 0; r < num_ranks; ++r) {
        if (r == 1) continue;
        const ErrorRecord error = world.Take(r);
        CHECK(error.failure == Failure::kDeadline && error.peer == 1);
        CHECK(error.expected == 2 && error.seen == 1 && error.epoch == 2);
        CHECK(IsSpoiled(world, r));
      }
    }
  }
}

// The first wait has used up the time of all: the others add nothing to it.
void LaterWaitsBeginWithTheFirst() {
  World world = OneRowEach(2);
  Steps own(world, 0);
  Launch<PlanScratch>(1, 1, [&](const Block& b, PlanScratch* s) { Prepare(b, own.rank, s); });
  own.call.deadline_ns = 50'000'000;
  own.TakeSome();
  const uint64_t since = own.rank.state()->waiting_since;
  CHECK(since != 0 && own.rank.state()->ready == 0);
  own.TakeRest();
  CHECK(own.rank.state()->waiting_since == since);
  CHECK(world.Take(0).failure == Failure::kDeadline);
}

// A rejected plan, another program, and a rank that has given up: no round takes such rows, waits
// for the deadline because of them, or hides them.
void RejectedMessagesEndTheRounds() {
  for (const int what : {0, 1, 2}) {
    World world = OneRowEach(4);
    Steps own(world, 0), first(world, 1), second(world, 2), third(world, 3);
    if (what == 0) world.groups[0].plans[1].dst_rank[2] = -2;
    if (what == 1) first.call.program = 7;
    if (what == 2) first.rank.state()->broken = 1;
    world.Clear();
    for (Steps* steps : {&own, &first, &second}) steps->Send();  // the third one is late
    own.TakeSome();
    CHECK((own.rank.state()->ready & 0b1010) == 0);
    third.Send();
    own.TakeRest();
    const ErrorRecord error = world.Take(0);
    CHECK(error.peer == 1);
    CHECK(error.failure == (what == 0   ? Failure::kPeer
                            : what == 1 ? Failure::kProgram
                                        : Failure::kGone));
    CHECK(IsSpoiled(world, 0));
  }
}

// A rank with a rejected plan takes nothing early.
void OwnRejectedPlan() {
  World world = OneRowEach(2);
  world.groups[0].plans[0].seq_len[0] = -1;
  Steps own(world, 0), other(world, 1);
  world.Clear();
  other.Send();
  own.Send();
  own.TakeSome();
  CHECK(own.rank.state()->ready == 0 && !HasRow(world, 0, 1));
  own.TakeRest();
  CHECK(world.Take(0).failure == Failure::kLength && IsSpoiled(world, 0));
}

void SmallCallsHaveNoRounds() {
  const auto rounds = [](int num_ranks, int64_t megabytes, int num_local = 1) {
    Call call{};
    call.num_ranks = num_ranks;
    call.num_local = num_local;
    call.is_dispatch = true;
    call.num_groups = call.groups[0].num_arrays = 1;
    call.groups[0].capacity = megabytes << 10;
    call.arrays[0].in_row_bytes = 1 << 10;
    return NumEarly(call);
  };
  CHECK(rounds(8, 1) == 0 && rounds(8, 15) == 0);
  CHECK(rounds(8, 16) == 1 && rounds(8, 47) == 2 && rounds(8, 1000) == 2);
  CHECK(rounds(2, 1000) == 0 && rounds(3, 1000) == 1 && rounds(4, 1000) == 1);
  CHECK(rounds(16, 1000) == 3 && rounds(64, 1000) == 3);
  CHECK(rounds(8, 1000, 8) == 0);  // all ranks on one device
}

void TagsNameTheirSender() {
  for (const uint64_t epoch : {uint64_t{1}, (uint64_t{3} << 40) + 5, uint64_t{1} << 56}) {
    for (int sender = 0; sender < kMaxRanks; ++sender) {
      const uint64_t tag = TagOf(epoch, sender);
      const Tagged<Phase::kLast> own{&tag, epoch, uint64_t{1} << sender};
      CHECK(own.IsWritten(tag) && own.IsReady(tag));
      const Tagged<Phase::kLast> others{&tag, epoch, ~(uint64_t{1} << sender)};
      CHECK(others.IsWritten(tag) && !others.IsReady(tag));
      const Tagged<Phase::kLast> before{&tag, epoch + 2, ~uint64_t{0}};
      CHECK(!before.IsWritten(tag) && !before.IsReady(tag));
      CHECK(!own.IsReady(TagInPlace(epoch)) && own.IsWritten(TagInPlace(epoch)));
    }
  }
}

const Register kTests("test_early_rows", [](const Numbers& numbers) {
  SmallCallsHaveNoRounds();
  TagsNameTheirSender();
  RowsAreTakenAsTheirSendersSignal();
  LaterRoundsMayBeEmpty();
  AnAbsentRankIsNamed();
  LaterWaitsBeginWithTheFirst();
  RejectedMessagesEndTheRounds();
  OwnRejectedPlan();
  RandomPlans(numbers.Get(0, 4));
});

}  // namespace cpd::kernels::test_early_rows
