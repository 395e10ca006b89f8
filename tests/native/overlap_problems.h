// Problems of every schedule of an overlapped GEMM.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "gemm/overlap_problem.h"

namespace cpd {

inline OverlapProblem Problem(CommType type, CommMethod method, std::vector<int64_t> counts) {
  OverlapProblem problem;
  problem.config.type = type;
  problem.config.method = method;
  problem.rows = {1, *std::max_element(counts.begin(), counts.end()), counts};
  problem.m = 3;
  problem.n = 5;
  problem.k = 3;
  problem.aux_width = 4;
  problem.lhs_type = problem.rhs_type = problem.output_type = problem.aux_type =
      problem.partial_type = DataType::kF32;
  return problem;
}

inline std::vector<OverlapProblem> GatheringProblems(const std::vector<int64_t>& counts) {
  std::vector<OverlapProblem> problems;
  for (const bool to_aux : {false, true}) {
    OverlapProblem problem = Problem(CommType::kAllGather, CommMethod::kNone, counts);
    problem.gathers_to_aux = to_aux;
    problems.push_back(problem);
    problem.config.method = CommMethod::kRingExchange;
    if (counts.size() % 2 == 0) {
      problem.config.aggregate = true;
      problems.push_back(problem);
      problem.config.aggregate = false;
    }
    for (const bool copies : {true, false}) {
      problem.config.copies = copies;
      problem.config.atomic = problem.in_ring_order = false;
      problems.push_back(problem);
      problem.config.atomic = true;
      problems.push_back(problem);
      problem.in_ring_order = true;
      if (!to_aux) problems.push_back(problem);  // there it is for the own rows
    }
  }
  problems.push_back(Problem(CommType::kAllGather, CommMethod::kBulk, counts));
  return problems;
}

inline std::vector<OverlapProblem> ReducingProblems(const std::vector<int64_t>& counts) {
  constexpr CommType kType = CommType::kReduceScatter;
  std::vector<OverlapProblem> problems = {Problem(kType, CommMethod::kNone, counts),
                                          Problem(kType, CommMethod::kBulk, counts)};
  OverlapProblem pipeline = Problem(kType, CommMethod::kPipeline, counts);
  for (const int num_splits : {1, 3, 8}) {  // of 5 columns
    pipeline.config.num_splits = num_splits;
    pipeline.config.atomic = pipeline.config.overlap_first_gemm = false;
    problems.push_back(pipeline);
    pipeline.config.atomic = true;
    problems.push_back(pipeline);
    pipeline.config.overlap_first_gemm = true;  // without a meaning here
    problems.push_back(pipeline);
    pipeline.config.atomic = false;
    problems.push_back(pipeline);
  }
  OverlapProblem ring = Problem(kType, CommMethod::kRingExchange, counts);
  for (const bool copies : {true, false}) {
    ring.config.copies = copies;
    ring.config.atomic = ring.in_ring_order = false;
    problems.push_back(ring);
    ring.config.atomic = true;
    problems.push_back(ring);
    ring.in_ring_order = true;
    problems.push_back(ring);
  }
  return problems;
}

inline std::vector<OverlapProblem> AllProblems(const std::vector<int64_t>& counts) {
  std::vector<OverlapProblem> problems = GatheringProblems(counts);
  for (OverlapProblem& problem : ReducingProblems(counts)) problems.push_back(std::move(problem));
  return problems;
}

}  // namespace cpd
