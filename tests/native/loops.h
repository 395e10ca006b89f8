// Every rank sends shards of random length to every rank and gets them back, repeatedly, by any
// transport.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "dispatch/dispatch.h"
#include "ranks.h"

namespace cpd::loops {

// Rank r sends lengths[r][d] rows to rank d.
struct AllToAll {
  AllToAll(int rank, const std::vector<std::vector<int64_t>>& lengths)
      : num_ranks(static_cast<int>(lengths.size())), seq_len(lengths[rank]) {
    dst_rank.resize(num_ranks);
    std::iota(dst_rank.begin(), dst_rank.end(), 0);
    dst_offset.resize(num_ranks);
    num_recv_tokens.resize(num_ranks + 1);
    for (int d = 0; d < num_ranks; ++d) {
      for (int r = 0; r < rank; ++r) dst_offset[d] += lengths[r][d];
      num_recv_tokens[d] = lengths[d][rank];
      num_recv_tokens[num_ranks] += num_recv_tokens[d];
    }
  }

  std::unique_ptr<Contribution> Contribute(Direction direction, RowArray tokens,
                                           RowArray buffer) const {
    OperandGroup group;
    group.tokens = {tokens};
    group.buffers = {buffer};
    group.types = {{DataType::kF32, DataType::kF32}};
    group.num_slots = num_ranks;
    group.num_replicas = 1;
    group.dst_rank = {dst_rank.data(), IntType::kI64};
    group.dst_offset = {dst_offset.data(), IntType::kI64};
    group.seq_len = {seq_len.data(), IntType::kI64};
    if (!src_offset.empty()) group.src_offset = {src_offset.data(), IntType::kI64};
    group.num_recv_tokens = {num_recv_tokens.data(), IntType::kI64};
    auto rank = std::make_unique<DispatchContribution>();
    rank->direction = direction;
    rank->num_ranks = num_ranks;
    rank->groups = {group};
    return rank;
  }

  int num_ranks;
  std::vector<int64_t> seq_len, dst_rank, dst_offset, num_recv_tokens, src_offset;
};

inline RowArray Rows(std::vector<float>& x, int64_t row_floats) {
  const int64_t row_bytes = row_floats * 4;
  return {reinterpret_cast<char*>(x.data()), static_cast<int64_t>(x.size()) / row_floats,
          row_bytes};
}

// Dispatch and combine under the same keys, with random delays for each rank, while other groups do
// the same. `join` is called with the group, the rank, the direction and the rank's contribution.
template <typename Join>
void Run(int num_groups, int num_ranks, int num_rounds, int64_t row_floats, const Join& join) {
  constexpr int64_t kTokens = 16;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_groups * num_ranks; ++thread) {
    threads.emplace_back([=, &join] {
      const int rank = thread % num_ranks, group = thread / num_ranks;
      std::mt19937 pause(thread);
      std::vector<float> x(kTokens * row_floats), home(x), buffer(kTokens * num_ranks * row_floats);
      for (int round = 0; round < num_rounds; ++round) {
        std::mt19937 rng(round * 100 + group);  // the same plan on all ranks
        std::vector<std::vector<int64_t>> lengths(num_ranks, std::vector<int64_t>(num_ranks));
        for (auto& row : lengths) {
          for (int64_t& length : row) length = rng() % (kTokens / num_ranks + 1);
        }
        const AllToAll plan(rank, lengths);
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i + round) % 1000 + rank);
        std::fill(buffer.begin(), buffer.end(), -1);
        std::fill(home.begin(), home.end(), -1);
        for (const Direction direction : {Direction::kDispatch, Direction::kCombine}) {
          std::this_thread::sleep_for(std::chrono::microseconds(pause() % 200));
          const bool forth = direction == Direction::kDispatch;
          auto mine = plan.Contribute(direction, Rows(forth ? x : home, row_floats),
                                      Rows(buffer, row_floats));
          CHECK(join(group, rank, direction, std::move(mine)).get().ok());
        }
        const int64_t num_rows = std::accumulate(plan.seq_len.begin(), plan.seq_len.end(), 0);
        for (size_t i = 0; i < home.size(); ++i) {
          CHECK(home[i] == (static_cast<int64_t>(i) < num_rows * row_floats ? x[i] : 0));
        }
        const auto received = static_cast<size_t>(plan.num_recv_tokens[num_ranks] * row_floats);
        for (size_t i = received; i < buffer.size(); ++i) CHECK(buffer[i] == 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cpd::loops
