// The second kernel of `dispatch` between devices that map each other's memory. Blocks push rows,
// signal each rank when everything for it has left, and meanwhile take rows of ranks that have
// signalled. It waits for nobody: what it does not take is left to Unpack, after Wait.
//
// A rank sends to the ranks behind it in turn (Rank::Turned), so in an exchange of equal parts each
// rank hears one other after another, and has taken all but the last part when that one signals.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/exchange.h"
#include "kernels/push.h"

namespace cpd::kernels {

struct PushTakeScratch {
  PushScratch push;
  uint32_t pushed[kMaxRanks];  // strips for each rank, not yet subtracted from `strips_left`
  uint32_t heard[kMaxRanks];   // whether a rank has signalled; then its rows may be read
  uint32_t num_heard;
  uint32_t reports;             // whether `pushed` is subtracted now
  uint32_t begun[kMaxThreads];  // strips of the result whose first row may be taken
  uint32_t num_begun;
  uint32_t num_ready[3];  // rows of a strip; one is added to, one is read, one is cleared
};

// One block's part of the kernel, as one of its threads sees it.
class PushTake {
 public:
  CPD_DEVICE PushTake(const Block& block, const Rank& rank, PushTakeScratch* scratch)
      : block_(block), rank_(rank), scratch_(*scratch) {}

  // Tells ranks that get no row, or all of them if the plan was rejected.
  CPD_DEVICE void Begin() {
    for (int r = block_.thread; r < kMaxRanks; r += block_.num_threads) {
      scratch_.pushed[r] = scratch_.heard[r] = 0;
    }
    if (block_.thread == 0) {
      scratch_.num_heard = scratch_.reports = 0;
      for (uint32_t& num : scratch_.num_ready) num = 0;
    }
    block_.Sync();
    for (int to = block_.thread; to < rank_.call.num_ranks; to += block_.num_threads) {
      if (block_.index == 0 && GetsNothing(to)) SignalTo<Mapped>(rank_, to);
    }
  }

  // Pushes strip `i` of this rank, after it has taken what is there.
  CPD_DEVICE void Step(int64_t i) {
    const Strip strip = StripAt(rank_, i);
    if (block_.thread == 0) scratch_.reports = IsForOthers(strip);
    Meet();
    for (int64_t t = strip.first_target; t < strip.end_target && block_.thread == 0; ++t) {
      if (strip.dst_rank[t] >= 0) ++scratch_.pushed[strip.dst_rank[t]];
      has_pushed_ = has_pushed_ || strip.dst_rank[t] >= 0;
    }
    PushStrip<Mapped>(block_, rank_, strip, &scratch_.push);
  }

  CPD_DEVICE void End() {
    if (block_.thread == 0) scratch_.reports = 1;
    Meet();
  }

 private:
  CPD_DEVICE bool GetsNothing(int to) const {
    if (rank_.state()->failed != kFine) return true;
    uint64_t num_rows = 0;
    for (int p = 0; p < rank_.call.num_groups; ++p) num_rows += rank_.sent(p)[to];
    return num_rows == 0;
  }

  // Whether a strip goes to a rank that none of those before it did since the last report. Where
  // strips are sorted by rank, a block so reports once for each. Run by the first thread.
  CPD_DEVICE bool IsForOthers(const Strip& strip) const {
    if (!has_pushed_) return false;
    for (int64_t t = strip.first_target; t < strip.end_target; ++t) {
      if (strip.dst_rank[t] >= 0 && scratch_.pushed[strip.dst_rank[t]] == 0) return true;
    }
    return false;
  }

  // Subtracts pushed strips; the last one for a rank signals. Its thread has acquired the
  // subtractions of all other blocks, each of which released the rows of its block. Then looks who
  // has signalled, and takes their rows.
  CPD_DEVICE void Meet() {
    const Call& call = rank_.call;
    State* state = rank_.state();
    block_.Sync();
    for (int r = block_.thread; r < call.num_ranks; r += block_.num_threads) {
      const uint64_t pushed = scratch_.reports ? scratch_.pushed[r] : 0;
      if (pushed > 0) {
        scratch_.pushed[r] = 0;
        if (AddAndFetch(&state->strips_left[r], 0 - pushed) == 0) SignalTo<Mapped>(rank_, r);
      }
      if (scratch_.heard[r] == 0 && Heard<Mapped>(rank_, r) >= state->epoch) {
        scratch_.heard[r] = 1;
        Append(&scratch_.num_heard);
      }
    }
    if (block_.thread == 0 && scratch_.reports) has_pushed_ = false;
    block_.Sync();
    const uint32_t num_heard = scratch_.num_heard;
    if (num_heard == num_heard_) return;
    num_heard_ = num_heard;
    for (int p = 0; p < call.num_groups; ++p) TakeGroup(call.groups[p]);
  }

  // Whether a row may be taken now. Other ranks may be writing tags, but not of such rows.
  CPD_DEVICE bool IsReady(const uint64_t* tag) const {
    const uint64_t value = LoadRelaxed(tag), epoch = rank_.state()->epoch;
    return (value & (kInPlace | kEpochOfTag)) == (epoch & kEpochOfTag) &&
           scratch_.heard[SenderOf(value)] != 0;
  }

  // Takes those of this block's strips of a result of which all rows are there.
  CPD_DEVICE void TakeGroup(const OperandGroup& group) {
    const int64_t num_strips = (group.capacity + group.rows_per_strip - 1) / group.rows_per_strip;
    uint64_t* tags = Tags(rank_.call, rank_.rank(), rank_.state()->epoch, group);
    const int64_t step = int64_t{block_.num_blocks} * block_.num_threads;
    for (int64_t first = block_.index; first < num_strips; first += step) {
      block_.Sync();  // the last ones have been read
      if (block_.thread == 0) scratch_.num_begun = 0;
      block_.Sync();
      const int64_t mine = first + int64_t{block_.thread} * block_.num_blocks;
      if (mine < num_strips && IsReady(tags + mine * group.rows_per_strip)) {
        scratch_.begun[Append(&scratch_.num_begun)] = static_cast<uint32_t>(mine);
      }
      block_.Sync();
      const uint32_t num = scratch_.num_begun;
      for (uint32_t k = 0; k < num; ++k) TakeStrip(group, tags, scratch_.begun[k]);
    }
  }

  CPD_DEVICE void TakeStrip(const OperandGroup& group, uint64_t* tags, int64_t strip) {
    const int64_t begin = strip * group.rows_per_strip, rest = group.capacity - begin;
    const int64_t n = rest < group.rows_per_strip ? rest : group.rows_per_strip;
    uint32_t num_ready = 0;
    for (int64_t r = block_.thread; r < n; r += block_.num_threads) {
      num_ready += IsReady(tags + begin + r);
    }
    AddOfAll(&scratch_.num_ready[turn_], num_ready);
    block_.Sync();
    const int last = turn_ == 0 ? 2 : turn_ - 1;
    if (block_.thread == 0) scratch_.num_ready[last] = 0;
    const bool is_whole = scratch_.num_ready[turn_] == n;
    turn_ = turn_ == 2 ? 0 : turn_ + 1;
    if (!is_whole) return;
    const char* half = Half(rank_.call, rank_.rank(), rank_.state()->epoch);
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = rank_.call.arrays[a];
      char* to = rank_.out(group, array) + begin * array.out_row_bytes;
      Copy(AllTakers(block_), half + array.data + begin * array.in_row_bytes, &to, 1,
           n * array.in_row_bytes);
    }
    // Another rank that wrongly writes such a row too writes the tag again: Unpack takes it again,
    // and finds the error.
    const uint64_t tag = TagInPlace(rank_.state()->epoch);
    for (int64_t r = block_.thread; r < n; r += block_.num_threads) {
      StoreRelaxed(&tags[begin + r], tag);
    }
  }

  const Block& block_;
  const Rank& rank_;
  PushTakeScratch& scratch_;
  uint32_t num_heard_ = 0;   // when rows were last taken
  bool has_pushed_ = false;  // whether `pushed` has any; of the first thread
  int turn_ = 0;             // of `num_ready`
};

CPD_DEVICE void RunPushTake(const Block& block, const Rank& rank, PushTakeScratch* scratch) {
  PushTake part(block, rank, scratch);
  part.Begin();
  const int64_t num_strips = NumStripsOf(rank);
  for (int64_t i = block.index; i < num_strips; i += block.num_blocks) part.Step(i);
  part.End();
}

}  // namespace cpd::kernels
