// The transport within one process, without XLA and Python: ranks are threads, under a load that a
// JAX program cannot reproduce.
#include <numeric>

#include "dispatch/dispatch.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_transport {

using std::chrono::milliseconds;

// Every rank sends shard d, of random length, to rank d with dispatch and returns it with combine,
// repeatedly under the same keys, while other groups do the same.
void LoopsOfGroups(int num_ranks, int num_groups, int num_rounds) {
  constexpr int kTokens = 64;
  const int64_t capacity = int64_t{kTokens} * num_ranks;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_ranks * num_groups; ++thread) {
    threads.emplace_back([=] {
      const int rank = thread % num_ranks, group = thread / num_ranks;
      std::mt19937 pause(thread);
      Helpers helpers(thread);
      constexpr int kRowFloats = 1 << 9;  // a round has several pieces of work
      std::vector<float> x(kTokens * kRowFloats), home(x), buffer(capacity * kRowFloats);
      for (int round = 0; round < num_rounds; ++round) {
        std::mt19937 rng(round * 100 + group);  // the same plan on all ranks
        std::vector<std::vector<uint32_t>> lengths(num_ranks, std::vector<uint32_t>(num_ranks));
        for (auto& row : lengths) {
          for (uint32_t& length : row) length = rng() % (kTokens / num_ranks + 1);
        }
        std::vector<int32_t> dst_rank(num_ranks);
        std::iota(dst_rank.begin(), dst_rank.end(), 0);
        std::vector<uint32_t> dst_offset(num_ranks), src_offset(num_ranks),
            num_recv_tokens(num_ranks + 1);
        for (int d = 0; d < num_ranks; ++d) {
          for (int r = 0; r < rank; ++r) dst_offset[d] += lengths[r][d];
          for (int e = 0; e < d; ++e) src_offset[d] += lengths[rank][e];
          num_recv_tokens[d] = lengths[d][rank];
          num_recv_tokens[num_ranks] += num_recv_tokens[d];
        }
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng() % 1000 + rank);

        const auto move = [&](bool forth, std::vector<float>& tokens) {
          OperandGroup operands;
          const int64_t row_bytes = kRowFloats * sizeof(float);
          operands.tokens = {{reinterpret_cast<char*>(tokens.data()), kTokens, row_bytes}};
          operands.buffers = {{reinterpret_cast<char*>(buffer.data()), capacity, row_bytes}};
          operands.types = {{DataType::kF32, DataType::kF32}};
          operands.num_slots = num_ranks;
          operands.num_replicas = 1;
          operands.dst_rank = {dst_rank.data(), IntType::kI32};
          operands.dst_offset = {dst_offset.data(), IntType::kU32};
          operands.seq_len = {lengths[rank].data(), IntType::kU32};
          operands.src_offset = {src_offset.data(), IntType::kU32};
          operands.num_recv_tokens = {num_recv_tokens.data(), IntType::kU32};
          auto mine = std::make_unique<DispatchContribution>();
          mine->groups = {operands};
          Exchange exchange{"loop", {100, forth, group}, num_ranks, milliseconds(60000), {}};
          exchange.planner = [forth](const auto& ranks, WorkList* work) {
            return forth ? PlanDispatch("loop", ranks, work) : PlanCombine("loop", ranks, work);
          };
          std::this_thread::sleep_for(std::chrono::microseconds(pause() % 300));
          const Status status = Join(exchange, rank, std::move(mine), std::ref(helpers)).get();
          CHECK(status.ok());
        };
        std::fill(buffer.begin(), buffer.end(), -1);
        std::fill(home.begin(), home.end(), -1);
        move(true, x);
        const size_t num_received = num_recv_tokens[num_ranks] * kRowFloats;
        for (size_t i = num_received; i < buffer.size(); ++i) CHECK(buffer[i] == 0);
        move(false, home);
        const auto& sent = lengths[rank];
        const size_t num_sent = std::accumulate(sent.begin(), sent.end(), 0u) * kRowFloats;
        for (size_t i = 0; i < x.size(); ++i) CHECK(home[i] == (i < num_sent ? x[i] : 0));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const Register kTests("test_transport", [](const Numbers&) {
  LoopsOfGroups(2, 1, 40);
  LoopsOfGroups(4, 2, 10);
  LoopsOfGroups(1, 3, 10);
});

}  // namespace cpd::test_transport
