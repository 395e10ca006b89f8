// One rank's contribution to an overlapped GEMM, and the parts of it that other processes read.
#include "gemm/overlap_contribution.h"

#include <algorithm>

namespace cpd {

OverlapContribution::OverlapContribution(const OverlapProblem& problem, RankMemory memory)
    : memory_(memory),
      operands_(OperandsForPeers(problem)),
      buffer_bytes_(BufferBytes(problem)),
      shared_(operands_.size()) {}

std::vector<OverlapContribution::Operand> OverlapContribution::OperandsForPeers(
    const OverlapProblem& p) {
  const bool gathers = p.config.type == CommType::kAllGather;
  if (p.config.is_bulk()) {
    const int64_t rows = p.rows.num_batches * (gathers ? p.rows.capacity : p.rows.total());
    return {{&RankMemory::aux_in, rows * p.aux_width * ElementBytes(p.aux_type)}};
  }
  // Without copies the GEMM of a reduce-scatter multiplies the operands of all ranks.
  const bool multiplies_all =
      !gathers && p.config.method == CommMethod::kRingExchange && !p.config.copies;
  std::vector<Operand> operands;
  if (gathers || multiplies_all) {
    operands = {{&RankMemory::lhs, OwnLhsRows(p) * p.k * ElementBytes(p.lhs_type)},
                {&RankMemory::lhs_scales, ScalesBytes(p, /*of_lhs=*/true)}};
  }
  if (multiplies_all) {
    operands.push_back({&RankMemory::rhs, p.k * p.n * ElementBytes(p.rhs_type)});
    operands.push_back({&RankMemory::rhs_scales, ScalesBytes(p, /*of_lhs=*/false)});
  }
  return operands;
}

std::vector<SharedArray> OverlapContribution::SharedArrays() {
  std::vector<SharedArray> arrays;
  for (size_t i = 0; i < operands_.size(); ++i) {
    arrays.push_back({&shared_[i], operands_[i].num_bytes});
  }
  arrays.push_back({&shared_buffer_, buffer_bytes_});
  return arrays;
}

RankMemory OverlapContribution::Share(WorkList* work) const {
  constexpr int64_t kPieceBytes = 1 << 20;  // copied at a time
  RankMemory memory = memory_;
  for (size_t i = 0; i < operands_.size(); ++i) {
    const auto [place, num_bytes] = operands_[i];
    if (memory.is_elsewhere) {
      memory.*place = shared_[i];
      continue;
    }
    for (int64_t begin = 0; begin < num_bytes; begin += kPieceBytes) {
      work->staging.push_back(
          {shared_[i] + begin, memory.*place + begin, std::min(kPieceBytes, num_bytes - begin)});
    }
  }
  memory.buffer = shared_buffer_;
  if (!memory.is_elsewhere && buffer_bytes_ > 0) {
    work->written.push_back({shared_buffer_, buffer_bytes_});
  }
  return memory;
}

}  // namespace cpd
