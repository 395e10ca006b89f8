// Random calls of a group of ranks, and their results by a scalar oracle.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "dispatch/dispatch.h"

namespace cpd::stress {

using Rng = std::mt19937;

inline int64_t Draw(Rng& rng, int64_t low, int64_t high) {  // both included
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

// One row of metadata, in one of the types that a program may use.
struct Integers {
  std::vector<int64_t> values;
  std::vector<char> bytes;
  IntType type = IntType::kI32;

  IntArray View(Rng& rng, bool is_signed) {
    constexpr IntType kTypes[] = {IntType::kI32, IntType::kI64, IntType::kU32, IntType::kU64};
    type = kTypes[Draw(rng, 0, is_signed ? 1 : 3)];
    const bool is_wide = type == IntType::kI64 || type == IntType::kU64;
    const size_t width = is_wide ? 8 : 4;
    bytes.resize(std::max<size_t>(1, values.size()) * width);
    for (size_t i = 0; i < values.size(); ++i) {  // little endian
      std::memcpy(&bytes[i * width], &values[i], width);
    }
    return {bytes.data(), type};
  }
};

// One rank's share of one operand group, with the expected contents after the exchange.
struct RankOperands {
  Integers dst_rank, dst_offset, seq_len, src_offset, num_recv_tokens;
  IntArray dst_rank_view, dst_offset_view, seq_len_view, src_offset_view, num_recv_view;
  std::vector<std::vector<int32_t>> tokens, buffers, expected;  // per array
};

struct RandomGroup {
  int64_t num_slots, num_replicas, num_tokens, capacity;
  std::vector<int64_t> row_elements;  // per array
  std::vector<RankOperands> ranks;
};

// One call of one group of ranks.
struct Call {
  bool is_dispatch;
  std::vector<RandomGroup> groups;
};

inline void DrawMetadata(Rng& rng, int num_ranks, RandomGroup* group) {
  group->num_slots = Draw(rng, 0, 5);
  group->num_replicas = Draw(rng, 1, 3);
  group->num_tokens = Draw(rng, 1, 40);
  group->ranks.resize(num_ranks);
  const bool has_src_offset = Draw(rng, 0, 1);
  std::vector<int64_t> filled(num_ranks);
  for (int r = 0; r < num_ranks; ++r)
    group->ranks[r].num_recv_tokens.values.assign(num_ranks + 1, 0);
  for (int r = 0; r < num_ranks; ++r) {
    RankOperands& mine = group->ranks[r];
    int64_t next = 0;
    for (int64_t slot = 0; slot < group->num_slots; ++slot) {
      const int64_t start = has_src_offset ? Draw(rng, 0, group->num_tokens) : next;
      const int64_t length = Draw(rng, 0, group->num_tokens - start);
      next += length;
      mine.seq_len.values.push_back(length);
      mine.src_offset.values.push_back(start);
      for (int64_t c = 0; c < group->num_replicas; ++c) {
        const int64_t dst = Draw(rng, -1, num_ranks - 1);
        mine.dst_rank.values.push_back(dst);
        if (dst < 0) {
          mine.dst_offset.values.push_back(0);
          continue;
        }
        filled[dst] += Draw(rng, 0, 3) == 0 ? Draw(rng, 0, 3) : 0;  // rows without a source
        mine.dst_offset.values.push_back(filled[dst]);
        filled[dst] += length;
        group->ranks[dst].num_recv_tokens.values[r] += length;
        group->ranks[dst].num_recv_tokens.values[num_ranks] += length;
      }
    }
  }
  group->capacity = *std::max_element(filled.begin(), filled.end()) + Draw(rng, 0, 8);
  for (RankOperands& mine : group->ranks) {
    mine.dst_rank_view = mine.dst_rank.View(rng, true);
    mine.dst_offset_view = mine.dst_offset.View(rng, false);
    mine.seq_len_view = mine.seq_len.View(rng, false);
    if (has_src_offset) mine.src_offset_view = mine.src_offset.View(rng, false);
    mine.num_recv_view = mine.num_recv_tokens.View(rng, false);
  }
}

// The definition of both operations, one element at a time.
inline void Expect(bool is_dispatch, RandomGroup* group) {
  for (size_t a = 0; a < group->row_elements.size(); ++a) {
    const int64_t width = group->row_elements[a];
    for (size_t src = 0; src < group->ranks.size(); ++src) {
      RankOperands& mine = group->ranks[src];
      for (int64_t slot = 0; slot < group->num_slots; ++slot) {
        for (int64_t c = 0; c < group->num_replicas; ++c) {
          const int64_t at = slot * group->num_replicas + c;
          if (mine.dst_rank.values[at] < 0) continue;
          RankOperands& theirs = group->ranks[mine.dst_rank.values[at]];
          const int64_t home = mine.src_offset.values[slot] * width;
          const int64_t away = mine.dst_offset.values[at] * width;
          for (int64_t i = 0; i < mine.seq_len.values[slot] * width; ++i) {
            if (is_dispatch) {
              theirs.expected[a][away + i] = mine.tokens[a][home + i];
            } else {
              mine.expected[a][home + i] += theirs.buffers[a][away + i];
            }
          }
        }
      }
    }
  }
}

inline Call DrawCall(Rng& rng, int num_ranks) {
  Call call;
  call.is_dispatch = Draw(rng, 0, 1);
  call.groups.resize(Draw(rng, 1, 2));
  for (RandomGroup& group : call.groups) {
    DrawMetadata(rng, num_ranks, &group);
    const int64_t num_arrays = Draw(rng, 1, 2);
    for (int64_t a = 0; a < num_arrays; ++a) {
      group.row_elements.push_back(Draw(rng, 0, 20) == 0 ? 2048 : Draw(rng, 1, 50));
    }
    for (RankOperands& mine : group.ranks) {
      for (const int64_t width : group.row_elements) {
        mine.tokens.emplace_back(group.num_tokens * width);
        mine.buffers.emplace_back(group.capacity * width);
        auto& in = call.is_dispatch ? mine.tokens.back() : mine.buffers.back();
        auto& out = call.is_dispatch ? mine.buffers.back() : mine.tokens.back();
        for (int32_t& element : in) element = static_cast<int32_t>(Draw(rng, -1000000, 1000000));
        mine.expected.emplace_back(out.size());
      }
    }
    Expect(call.is_dispatch, &group);
  }
  return call;
}

}  // namespace cpd::stress
