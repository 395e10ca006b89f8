// `combine`: the rows that are summed to one row of their owner, and the kernels that sum them.
#pragma once

#include <type_traits>

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"
#include "kernels/plan.h"
#include "kernels/push.h"
#include "kernels/unpack.h"

namespace cpd::kernels {

// ---- The rows that are summed to one row of their owner, and where ranks hold them.

// Rows [begin, end) of the owner, as one rank holds them: row r is its row r + shift.
struct Source {
  int64_t begin, end;
  int64_t shift;
  // Half of its channel; for fetched rows, the start of the owner's; nullptr: the rows are in `in`
  // of this device.
  const char* half;
};

// If a strip of rows has more sources, they are looked up row by row, which is slow.
constexpr int kMaxSources = 256;
// If all rows of a block have at most so many, they are gathered once.
constexpr int kFewSources = 16;

struct SumScratch {
  int64_t scan[2 * kMaxThreads];
  Source sources[kMaxSources];
};

// A strip of an owner's rows, [begin, end), and their sources; maybe also those of rows nearby.
struct OwnedStrip {
  int64_t begin, end;
  const Source* gathered;
  int64_t num_gathered;

  // Whether all rows have the same single source, or none.
  CPD_DEVICE bool IsWhole() const {
    if (num_gathered > kMaxSources) return false;
    int num = 0;
    CPD_NO_UNROLL
    for (int64_t s = 0; s < num_gathered; ++s) {
      const Source& source = gathered[s];
      if (source.begin >= end || source.end <= begin) continue;
      if (++num > 1 || source.begin > begin || source.end < end) return false;
    }
    return true;
  }
};

// One row of an owner, or the first of several, and the gathered sources of its strip.
struct OwnedRow {
  int64_t row;
  const Source* gathered;
  int64_t num_gathered;
  char* to;

  CPD_DEVICE bool IsIn(const Source& source) const {
    return row >= source.begin && row < source.end;
  }
};

// The sources of an owner's rows, in the order of slots, then replicas.
template <typename Fabric>
struct Sources {
  const Rank& rank;
  const OperandGroup& group;

  // Read again where they are needed: registers are scarce.
  CPD_DEVICE const Slot& SlotAt(int64_t s) const { return rank.slots(group)[s]; }
  CPD_DEVICE int64_t Target(const IntArray& field, int64_t s, int64_t c) const {
    return rank.Field(group, field,
                      group.num_slots * group.num_replicas)[s * group.num_replicas + c];
  }

  // `num_fetched`: remote replicas of the slot before this one.
  CPD_DEVICE Source At(int64_t s, int64_t c, int64_t num_fetched) const {
    const Slot slot = SlotAt(s);
    const int64_t dst = Target(group.dst_rank, s, c);
    if (IsRemote<Fabric>(rank.call, dst)) {
      const int64_t first = rank.first_fetched(group)[s] + num_fetched * slot.num_rows;
      return {slot.src_row, slot.src_row + slot.num_rows, first - slot.src_row, rank.channel()};
    }
    const int64_t shift = Target(group.dst_offset, s, c) - slot.src_row;
    if (rank.IsHere(dst)) {
      return {slot.src_row, slot.src_row + slot.num_rows,
              shift + rank.IndexHere(dst) * group.capacity, nullptr};
    }
    return {slot.src_row, slot.src_row + slot.num_rows, shift,
            Half(rank.call, static_cast<int>(dst), rank.state()->epoch)};
  }

  // Calls visit(source) for each source in slots [first, last) that overlaps rows [begin, end).
  template <typename Visit>
  CPD_DEVICE void ForEach(int64_t first, int64_t last, int64_t begin, int64_t end,
                          Visit visit) const {
    for (int64_t s = first; s < last; ++s) {
      const Slot slot = SlotAt(s);
      if (slot.num_rows == 0 || slot.src_row >= end || slot.src_row + slot.num_rows <= begin) {
        continue;
      }
      int64_t num_fetched = 0;
      for (int64_t c = 0; c < group.num_replicas; ++c) {
        const int64_t dst = Target(group.dst_rank, s, c);
        if (dst < 0) continue;
        visit(At(s, c, num_fetched));
        num_fetched += IsRemote<Fabric>(rank.call, dst);
      }
    }
  }

  // Calls visit(source) for each source of one row, in order.
  template <typename Visit>
  CPD_DEVICE void ForEachOf(const OwnedRow& owned, Visit visit) const {
    if (owned.num_gathered > kMaxSources) {
      ForEach(0, group.num_slots, owned.row, owned.row + 1, visit);
      return;
    }
    CPD_NO_UNROLL
    for (int64_t s = 0; s < owned.num_gathered; ++s) {
      if (owned.IsIn(owned.gathered[s])) visit(owned.gathered[s]);
    }
  }

  CPD_DEVICE const char* RowOf(const Source& source, const Array& array, int64_t row) const {
    if (source.half == nullptr) return array.in + (row + source.shift) * array.in_row_bytes;
    const bool is_fetched = Fabric::kHasNetwork && source.half == rank.channel();
    return source.half + (is_fetched ? array.staged : array.data) +
           (row + source.shift) * array.in_row_bytes;
  }

  // Gathers the sources of rows [begin, end) in `scratch`; returns their number, even if they do
  // not fit. Threads may still read those gathered before when others begin.
  CPD_DEVICE int64_t Gather(const Block& block, int64_t begin, int64_t end,
                            SumScratch* scratch) const {
    const Share mine = ShareOf(block, group.num_slots);
    int64_t count = 0, total;
    ForEach(mine.begin, mine.end, begin, end, [&](const Source&) { ++count; });
    int64_t at = SumBefore(block, count, scratch->scan, &total);
    if (total <= kMaxSources) {
      ForEach(mine.begin, mine.end, begin, end,
              [&](const Source& source) { scratch->sources[at++] = source; });
    }
    block.Sync();
    return total;
  }
};

// ---- The second and the fourth kernel of `combine`: every rank exposes its rows in its channel,
// and the owners pull and sum them. Rows of ranks of the same device are read where they are.

// Where rows of a group lie in a channel: those of each array at `base` plus its offset.
struct RowsInChannel {
  int64_t num_rows;
  char* base;
  int64_t Array::* offset;
};

// Copies the first rows of a group into this rank's own channel.
CPD_DEVICE void CopyIn(const Block& block, const Rank& rank, const OperandGroup& group,
                       const RowsInChannel& rows) {
  const int64_t num_rows = rows.num_rows;
  for (int64_t begin = block.index * group.rows_per_strip; begin < num_rows;
       begin += block.num_blocks * group.rows_per_strip) {
    const int64_t n =
        num_rows - begin < group.rows_per_strip ? num_rows - begin : group.rows_per_strip;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = rank.call.arrays[a];
      char* to = rows.base + array.*rows.offset + begin * array.in_row_bytes;
      Copy(block, rank.in(group, array) + begin * array.in_row_bytes, &to, 1,
           n * array.in_row_bytes);
    }
  }
}

// Exposes y to other devices: copies it into this rank's channel.
CPD_DEVICE void Stage(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if (state.failed != kFine) return;
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    CopyIn(block, rank, group,
           {group.capacity, Half(call, rank.rank(), state.epoch), &Array::data});
  }
}

// Small integers, added in one word: no carry leaves the highest bit of any.
template <uint32_t kHighest>
struct Packed {
  uint32_t word;

  friend CPD_DEVICE Packed operator+(Packed a, Packed b) {
    return {((a.word & ~kHighest) + (b.word & ~kHighest)) ^ ((a.word ^ b.word) & kHighest)};
  }
};

// Adds up 16 bytes of input at a time, kInFlight times per thread.
template <typename In, typename Acc, typename Out, typename Fabric>
CPD_DEVICE void SumVectors(const Block& takers, const Sources<Fabric>& sources, const Array& array,
                           const OwnedRow& owned) {
  constexpr int kWide = 16 / sizeof(In);
  using Wide = Elements<In, kWide>;
  const int64_t count = array.in_row_bytes / 16, step = takers.num_threads;
  CPD_NO_UNROLL
  for (int64_t i = takers.thread; i < count; i += kInFlight * step) {
    Acc sums[kInFlight][kWide] = {};
    bool is_first = true;
    CPD_NO_UNROLL
    for (int64_t s = 0; s < owned.num_gathered; ++s) {
      const Source& source = owned.gathered[s];
      if (!owned.IsIn(source)) continue;
      const char* row = Global(sources.RowOf(source, array, owned.row));
      const auto* from = reinterpret_cast<const Wide*>(row) + i;
      Wide values[kInFlight] = {};
      CPD_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (i + k * step < count) values[k] = from[k * step];
      }
      CPD_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        CPD_UNROLL
        for (int e = 0; e < kWide; ++e) {
          const auto value = static_cast<Acc>(values[k].items[e]);
          sums[k][e] = is_first ? value : static_cast<Acc>(sums[k][e] + value);  // keeps -0
        }
      }
      is_first = false;
    }
    auto* to = reinterpret_cast<Elements<Out, kWide>*>(owned.to) + i;
    CPD_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (i + k * step >= count) continue;
      Elements<Out, kWide> sum;
      CPD_UNROLL
      for (int e = 0; e < kWide; ++e) {
        if constexpr (std::is_same_v<Acc, Out>) {
          sum.items[e] = sums[k][e];
        } else {
          sum.items[e] = Round<Out>(sums[k][e]);
        }
      }
      to[k * step] = sum;
    }
  }
}

// Adds up element by element: rows without alignment, or with more sources than are gathered.
template <typename In, typename Acc, typename Out, typename Fabric>
CPD_DEVICE void SumElements(const Block& takers, const Sources<Fabric>& sources, const Array& array,
                            const OwnedRow& owned) {
  const int64_t count = array.in_row_bytes / static_cast<int64_t>(sizeof(In));
  CPD_NO_UNROLL
  for (int64_t i = takers.thread; i < count; i += takers.num_threads) {
    Acc sum{};
    bool is_first = true;
    sources.ForEachOf(owned, [&](const Source& source) {
      const char* row = Global(sources.RowOf(source, array, owned.row));
      const auto value = static_cast<Acc>(reinterpret_cast<const In*>(row)[i]);
      sum = is_first ? value : static_cast<Acc>(sum + value);
      is_first = false;
    });
    reinterpret_cast<Out*>(owned.to)[i] = Round<Out>(sum);
  }
}

// `Wide` replaces all three types where rows are aligned, if it is given.
template <typename In, typename Acc, typename Out, typename Wide = void, typename Fabric>
CPD_DEVICE void SumRow(const Block& takers, const Sources<Fabric>& sources, const Array& array,
                       const OwnedRow& owned, bool is_wide) {
  if (!is_wide) {
    SumElements<In, Acc, Out>(takers, sources, array, owned);
  } else if constexpr (std::is_void_v<Wide>) {
    SumVectors<In, Acc, Out>(takers, sources, array, owned);
  } else {
    SumVectors<Wide, Wide, Wide>(takers, sources, array, owned);
  }
}

template <typename... Arguments>
CPD_DEVICE void SumByType(DataType in, DataType out, const Arguments&... arguments) {
  const bool widen = in != out;
  switch (in) {
    case DataType::kBF16:
      return widen ? SumRow<BF16, float, float>(arguments...)
                   : SumRow<BF16, float, BF16>(arguments...);
    case DataType::kF16:
      return widen ? SumRow<F16, float, float>(arguments...)
                   : SumRow<F16, float, F16>(arguments...);
    case DataType::kF32: return SumRow<float, float, float>(arguments...);
    case DataType::kF64: return SumRow<double, double, double>(arguments...);
    case DataType::kI8:
    case DataType::kU8:  // integers wrap, signed or not
      return SumRow<uint8_t, uint8_t, uint8_t, Packed<0x80808080>>(arguments...);
    case DataType::kI16:
    case DataType::kU16:
      return SumRow<uint16_t, uint16_t, uint16_t, Packed<0x80008000>>(arguments...);
    case DataType::kI32:
    case DataType::kU32: return SumRow<uint32_t, uint32_t, uint32_t>(arguments...);
    case DataType::kI64:
    case DataType::kU64: return SumRow<uint64_t, uint64_t, uint64_t>(arguments...);
    case DataType::kE4M3:
    case DataType::kE5M2:
    case DataType::kOther: return;  // rejected by the handler
  }
}

// Pulls a strip of one array. The sources of a row are found once; most rows have one, whose bits
// they keep. A strip of one source is pulled like one long row.
template <typename Fabric>
CPD_DEVICE void PullRows(const Block& block, const Sources<Fabric>& sources, const Array& array,
                         const OwnedStrip& strip) {
  const bool is_whole = array.in_type == array.out_type && strip.IsWhole();
  const Block takers = is_whole ? AllTakers(block) : RowTakers(block, array.in_row_bytes);
  const int64_t rows = is_whole ? strip.end - strip.begin : 1;
  if (takers.index >= takers.num_blocks) return;
  char* out = sources.rank.out(sources.group, array);
  const uint64_t places = reinterpret_cast<uint64_t>(array.in) | reinterpret_cast<uint64_t>(out);
  const bool is_wide =
      strip.num_gathered <= kMaxSources && array.in_row_bytes % 16 == 0 && places % 16 == 0;
  CPD_NO_UNROLL
  for (int64_t row = strip.begin + takers.index; row < strip.end; row += takers.num_blocks * rows) {
    const OwnedRow owned{row, strip.gathered, strip.num_gathered, out + row * array.out_row_bytes};
    const char* from = nullptr;
    int num = 0;
    sources.ForEachOf(owned, [&](const Source& source) {
      if (num++ == 0) from = sources.RowOf(source, array, row);
    });
    char* to = owned.to;
    if (num == 0) {
      Fill(takers, to, 0, rows * array.out_row_bytes);
    } else if (num == 1 && array.in_type == array.out_type) {
      Copy(takers, Global(from), &to, 1, rows * array.in_row_bytes);
    } else {
      SumByType(array.in_type, array.out_type, takers, sources, array, owned, is_wide);
    }
  }
}

// Each block pulls one run of rows, of different ranks at the same time, in strips.
template <typename Fabric = Mapped>
CPD_DEVICE void Pull(const Block& block, const Rank& rank, SumScratch* scratch) {
  const Call& call = rank.call;
  if (rank.state()->failed != kFine) {
    Spoil(block, rank);
    return;
  }
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    const Sources<Fabric> sources{rank, group};
    const Share mine = ShareOf(block.index, block.num_blocks, group.num_tokens);
    int64_t num_gathered = sources.Gather(block, mine.begin, mine.end, scratch);
    const bool has_few = num_gathered <= kFewSources;
    for (int64_t begin = mine.begin; begin < mine.end; begin += group.rows_per_strip) {
      const int64_t end =
          begin + group.rows_per_strip < mine.end ? begin + group.rows_per_strip : mine.end;
      if (!has_few) num_gathered = sources.Gather(block, begin, end, scratch);
      for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
        PullRows(block, sources, call.arrays[a], {begin, end, scratch->sources, num_gathered});
      }
    }
  }
}

// ---- Additional steps for ranks that reach each other over a network: dispatch puts its rows,
// combine gets them. The network cannot access XLA's arrays, so both use the staging area.

// A strip that goes to or comes from one remote rank.
struct RemoteStrip : Strip {
  int rank;
  int64_t row;         // of that rank
  int64_t num_before;  // remote replicas of the slot before this one
};

template <typename Fabric, typename Move>
CPD_DEVICE void ForEachRemoteStrip(const Block& block, const Rank& rank, Move move) {
  ForEachStrip(block, rank, [&](const Strip& strip) {
    int64_t num_before = 0;
    for (int64_t t = strip.first_target; t < strip.end_target; ++t) {
      const int64_t dst = strip.dst_rank[t];
      if (dst < 0 || !IsRemote<Fabric>(rank.call, dst)) continue;
      move(RemoteStrip{strip, static_cast<int>(dst), strip.dst_offset[t] + strip.begin,
                       num_before++});
    }
  });
}

// Before Put: stages x, and the tags of one put.
CPD_DEVICE void StageToPut(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if (state.failed != kFine) return;
  auto* tags = reinterpret_cast<uint64_t*>(rank.channel() + call.staged_tags);
  for (int i = block.index * block.num_threads + block.thread; i < kTagRun;
       i += block.num_blocks * block.num_threads) {
    tags[i] = TagOf(state.epoch, rank.rank());
  }
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    CopyIn(block, rank, group, {group.staged_rows, rank.channel(), &Array::staged});
  }
}

// Puts rows and tags into the channels of remote ranks. They have arrived after Quiet.
template <typename Fabric>
CPD_DEVICE void Put(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  ForEachRemoteStrip<Fabric>(block, rank, [&](const RemoteStrip& strip) {
    const OperandGroup& group = strip.group;
    char* half = Half(call, strip.rank, rank.state()->epoch);
    const int64_t src_row = rank.slots(group)[strip.slot].src_row + strip.begin;
    for (int64_t r = 0; r < strip.num_rows; r += kTagRun) {
      const int64_t n = strip.num_rows - r < kTagRun ? strip.num_rows - r : kTagRun;
      Fabric::Put(block, half + group.tags + 8 * (strip.row + r), rank.channel() + call.staged_tags,
                  8 * n, call.pe[strip.rank]);
    }
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      Fabric::Put(block, half + array.data + strip.row * array.in_row_bytes,
                  rank.channel() + array.staged + src_row * array.in_row_bytes,
                  strip.num_rows * array.in_row_bytes, call.pe[strip.rank]);
    }
  });
}

// After the wait: gets the rows of remote ranks to where Pull reads them. They have arrived after
// Quiet.
template <typename Fabric>
CPD_DEVICE void Fetch(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  ForEachRemoteStrip<Fabric>(block, rank, [&](const RemoteStrip& strip) {
    const OperandGroup& group = strip.group;
    const char* half = Half(call, strip.rank, rank.state()->epoch);
    const int64_t row = rank.first_fetched(group)[strip.slot] +
                        strip.num_before * rank.slots(group)[strip.slot].num_rows + strip.begin;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      const Array& array = call.arrays[a];
      Fabric::Get(block, rank.channel() + array.staged + row * array.in_row_bytes,
                  half + array.data + strip.row * array.in_row_bytes,
                  strip.num_rows * array.in_row_bytes, call.pe[strip.rank]);
    }
  });
}

}  // namespace cpd::kernels
