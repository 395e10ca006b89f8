// Random plans for the GPU kernels, the memory of some ranks, and the expected results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/call.h"
#include "seen.h"

namespace cpd::kernels {

using Rng = std::mt19937;

inline int64_t Draw(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

// One operand group of one rank, and the arrays that its ranks hold.
struct Plan {
  Seen<int32_t> num_recv_tokens, seq_len, dst_rank, src_offset;
  Seen<int64_t> dst_offset;
  Seen<int32_t> fingerprint = {};  // empty, or kFingerprintSize checksums
};

// A world of ranks with one channel; the same plans serve dispatch and combine.
struct World {
  struct Made {
    int64_t num_slots, num_replicas, num_tokens, capacity;
    std::vector<int64_t> row_bytes;
    std::vector<Plan> plans;                      // [rank]
    std::vector<std::vector<Seen<char>>> x, out;  // [array][rank]
  };
  int num_ranks;
  bool is_dispatch;
  std::vector<Made> groups;
  std::vector<Seen<uint64_t>> symmetric, local;
  Seen<ErrorRecord> errors;
  DataType in_type = DataType::kU8, out_type = DataType::kU8;
#ifdef CPD_TEST_ALLOCATOR
  uint64_t deadline_ns = 2'000'000'000;  // a GPU's ranks run at the same time
#else
  uint64_t deadline_ns = 20'000'000'000;  // threads may wait for a busy machine
#endif
  int num_blocks = 2, num_threads = 3;
  int64_t rows_per_strip = 3;
  bool use_src_offset = true;
  bool is_small = false;           // each call is one kernel
  std::vector<int> memory_groups;  // of each rank: the ranks whose memory it maps; empty: all

  bool IsRemote(int a, int b) const {
    return !memory_groups.empty() && memory_groups[a] != memory_groups[b];
  }

  Call MakeCall(int rank) {
    Call call{};
    call.num_ranks = num_ranks;
    call.first_rank = rank;
    call.num_local = 1;
    call.is_dispatch = is_dispatch;
    call.deadline_ns = deadline_ns;
    call.is_small = is_small;
    for (int r = 0; r < num_ranks; ++r) {
      call.pe[r] = IsRemote(rank, r) ? r : -1;
      call.has_network = call.has_network || IsRemote(0, r);
    }
    for (Made& made : groups) {
      OperandGroup& group = call.groups[call.num_groups++];
      Plan& plan = made.plans[rank];
      group.num_recv_tokens = {plan.num_recv_tokens.data(), IntType::kI32};
      group.seq_len = {plan.seq_len.data(), IntType::kI32};
      group.dst_rank = {plan.dst_rank.data(), IntType::kI32};
      group.dst_offset = {plan.dst_offset.data(), IntType::kI64};
      if (use_src_offset) group.src_offset = {plan.src_offset.data(), IntType::kU32};
      if (!plan.fingerprint.empty()) group.fingerprint = {plan.fingerprint.data(), IntType::kI32};
      group.num_slots = made.num_slots;
      group.num_replicas = made.num_replicas;
      group.num_tokens = made.num_tokens;
      group.capacity = made.capacity;
      group.rows_per_strip = group.rows_per_push = rows_per_strip;
      group.first_array = call.num_arrays;
      group.num_arrays = static_cast<int>(made.row_bytes.size());
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
      symmetric.assign(num_ranks, Seen<uint64_t>(bytes / 8 + 1));
      const int64_t staged = call.half_begin + 2 * call.half_bytes;
      for (auto& memory : symmetric) {  // poison
        std::memset(reinterpret_cast<char*>(memory.data()) + staged, 0x7f, bytes - staged);
      }
      local.assign(num_ranks, Seen<uint64_t>(local_bytes / 8 + 1));
      errors.assign(num_ranks, ErrorRecord{});
    }
    for (int r = 0; r < num_ranks; ++r) {
      const int seen = IsRemote(rank, r) ? rank : r;
      call.symmetric[r] = reinterpret_cast<char*>(symmetric[seen].data());
    }
    call.local = reinterpret_cast<char*>(local[rank].data());
    call.errors = &errors[rank];
    return call;
  }

  // Fills the results with poison.
  void Clear() {
    for (Made& group : groups) {
      for (auto& ranks : group.out) {
        for (auto& rows : ranks) std::memset(rows.data(), 0x7f, rows.size());
      }
    }
  }

  // The error of a rank since the last call.
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

struct GroupShape {
  int64_t num_slots, num_replicas, num_tokens;
  std::vector<int64_t> row_bytes;  // per array
  bool has_src_offset;
};

// A plan with everything that Metadata allows: holes, replicas, rows used twice, destinations in
// any order.
inline World::Made MakeGroup(Rng& rng, int num_ranks, const GroupShape& shape) {
  const auto& [num_slots, num_replicas, num_tokens, row_bytes, has_src_offset] = shape;
  World::Made group{num_slots, num_replicas, num_tokens, 0, row_bytes, {}, {}, {}};
  group.plans.resize(num_ranks);
  std::vector<int64_t> filled(num_ranks);
  for (int r = 0; r < num_ranks; ++r) {
    Plan& plan = group.plans[r];
    plan.num_recv_tokens.assign(num_ranks + 1, 0);
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
    Plan& plan = group.plans[r];
    for (int64_t s = 0; s < num_slots; ++s) {
      for (int64_t c = 0; c < num_replicas; ++c) {
        const int64_t dst = Draw(rng, -1, num_ranks - 1);
        const int64_t gap = Draw(rng, 0, 2);
        plan.dst_rank.push_back(dst);
        plan.dst_offset.push_back(dst < 0 ? -7 : filled[dst] + gap);
        if (dst < 0) continue;
        filled[dst] += gap + plan.seq_len[s];
        group.plans[dst].num_recv_tokens[r] += plan.seq_len[s];
        group.plans[dst].num_recv_tokens[num_ranks] += plan.seq_len[s];
      }
    }
  }
  group.capacity = *std::max_element(filled.begin(), filled.end()) + Draw(rng, 1, 5);
  return group;
}

inline void FillArrays(World* world, Rng& rng, bool small_floats = false) {
  for (World::Made& group : world->groups) {
    const int64_t in_rows = world->is_dispatch ? group.num_tokens : group.capacity;
    const int64_t out_rows = world->is_dispatch ? group.capacity : group.num_tokens;
    group.x.assign(group.row_bytes.size(), {});
    group.out.assign(group.row_bytes.size(), {});
    for (size_t a = 0; a < group.row_bytes.size(); ++a) {
      for (int r = 0; r < world->num_ranks; ++r) {
        Seen<char> rows(in_rows * group.row_bytes[a]);
        if (small_floats) {
          auto* values = reinterpret_cast<float*>(rows.data());
          std::normal_distribution<float> normal;
          for (size_t i = 0; i < rows.size() / 4; ++i) values[i] = normal(rng);
        } else {
          for (char& byte : rows) byte = static_cast<char>(Draw(rng, 0, 255));
        }
        group.x[a].push_back(std::move(rows));
        const int64_t out_row =
            group.row_bytes[a] / ElementBytes(world->in_type) * ElementBytes(world->out_type);
        group.out[a].push_back(Seen<char>(out_rows * out_row));
      }
    }
  }
}

// By definition: out[d][dst_offset + i] = x[s][src_offset + i].
inline void CheckDispatched(const World& world) {
  for (const World::Made& group : world.groups) {
    for (size_t a = 0; a < group.row_bytes.size(); ++a) {
      const int64_t bytes = group.row_bytes[a];
      std::vector<Seen<char>> wanted(world.num_ranks, Seen<char>(group.capacity * bytes));
      for (int r = 0; r < world.num_ranks; ++r) {
        const Plan& plan = group.plans[r];
        for (int64_t t = 0; t < group.num_slots * group.num_replicas; ++t) {
          const int64_t s = t / group.num_replicas;
          if (plan.dst_rank[t] < 0 || plan.seq_len[s] == 0) continue;
          std::memcpy(&wanted[plan.dst_rank[t]][plan.dst_offset[t] * bytes],
                      &group.x[a][r][plan.src_offset[s] * bytes], plan.seq_len[s] * bytes);
        }
      }
      for (int r = 0; r < world.num_ranks; ++r) CHECK(group.out[a][r] == wanted[r]);
    }
  }
}

// x[s][src_offset + i] = the float32 sum over slots, then replicas, from left to right.
inline void CheckCombined(const World& world) {
  for (const World::Made& group : world.groups) {
    for (size_t a = 0; a < group.row_bytes.size(); ++a) {
      const int64_t width = group.row_bytes[a] / 4;
      for (int r = 0; r < world.num_ranks; ++r) {
        const Plan& plan = group.plans[r];
        std::vector<float> wanted(group.num_tokens * width);
        std::vector<bool> has(group.num_tokens);
        for (int64_t t = 0; t < group.num_slots * group.num_replicas; ++t) {
          const int64_t s = t / group.num_replicas;
          if (plan.dst_rank[t] < 0) continue;
          const auto* y = reinterpret_cast<const float*>(group.x[a][plan.dst_rank[t]].data());
          for (int64_t i = 0; i < plan.seq_len[s]; ++i) {
            const int64_t row = plan.src_offset[s] + i;
            for (int64_t e = 0; e < width; ++e) {
              const float value = y[(plan.dst_offset[t] + i) * width + e];
              wanted[row * width + e] = has[row] ? wanted[row * width + e] + value : value;
            }
            has[row] = true;
          }
        }
        CHECK(std::memcmp(group.out[a][r].data(), wanted.data(), group.out[a][r].size()) == 0);
      }
    }
  }
}

// Whether every byte of a rank's results is 0xff, as a call that failed leaves them.
inline bool IsSpoiled(const World& world, int rank) {
  for (const World::Made& group : world.groups) {
    for (const auto& ranks : group.out) {
      for (const char byte : ranks[rank]) {
        if (static_cast<uint8_t>(byte) != 0xff) return false;
      }
    }
  }
  return true;
}

inline void CheckRows(const World& world) {
  world.is_dispatch ? CheckDispatched(world) : CheckCombined(world);
}

// All calls have succeeded, with the right rows.
inline void CheckMoved(World& world) {
  CHECK(world.IsFine());
  CheckRows(world);
}

// A rank has rejected its plan: all others name it, and no rank has a result.
inline void CheckRefused(World& world, int at, Failure failure) {
  for (int r = 0; r < world.num_ranks; ++r) {
    const ErrorRecord error = world.Take(r);
    CHECK(error.failure == (r == at ? failure : Failure::kPeer));
    CHECK(r == at || error.peer == at);
    CHECK(IsSpoiled(world, r));
  }
}

// `num_ranks`: 0: one to four.
inline World RandomWorld(Rng& rng, bool is_dispatch, int num_ranks = 0) {
  World world{};
  world.num_ranks = num_ranks > 0 ? num_ranks : static_cast<int>(Draw(rng, 1, 4));
  world.is_dispatch = is_dispatch;
  world.use_src_offset = Draw(rng, 0, 1);
  world.rows_per_strip = Draw(rng, 1, 9);
  world.num_blocks = static_cast<int>(Draw(rng, 1, 3));
  world.num_threads = static_cast<int>(Draw(rng, 1, 4));
  world.is_small = Draw(rng, 0, 2) == 0;
  if (!is_dispatch) world.in_type = world.out_type = DataType::kF32;
  const int64_t num_groups = Draw(rng, 1, 2);
  for (int64_t p = 0; p < num_groups; ++p) {
    std::vector<int64_t> row_bytes;
    const int64_t num_arrays = Draw(rng, 1, 3);
    for (int64_t a = 0; a < num_arrays; ++a) {
      row_bytes.push_back(is_dispatch ? Draw(rng, 1, 70) : 4 * Draw(rng, 1, 20));
    }
    world.groups.push_back(MakeGroup(
        rng, world.num_ranks,
        {Draw(rng, 1, 7), Draw(rng, 1, 3), Draw(rng, 1, 30), row_bytes, world.use_src_offset}));
  }
  FillArrays(&world, rng, !is_dispatch);
  return world;
}

inline World SmallWorld(int num_ranks, bool is_dispatch) {
  Rng rng(4);
  World world{};
  world.num_ranks = num_ranks;
  world.is_dispatch = is_dispatch;
  if (!is_dispatch) world.in_type = world.out_type = DataType::kF32;
  world.groups.push_back(MakeGroup(rng, num_ranks, {4, 2, 16, {32, 12}, true}));
  FillArrays(&world, rng, !is_dispatch);
  return world;
}

}  // namespace cpd::kernels
