// Runs the schedule of an overlapped GEMM that the handlers have accepted; for the fuzzers.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "gemm/gemm.h"
#include "gemm/plan_overlap.h"

namespace cpd {

// An accepted description can be run, and ends.
inline void RunSchedule(const OverlapProblem& problem, int64_t buffer_id,
                        const std::vector<std::unique_ptr<Contribution>>& ranks) {
  Exchange exchange;
  exchange.op = "fuzz";
  exchange.key = {};
  exchange.num_ranks = problem.num_ranks();
  exchange.deadline = std::chrono::seconds(40);  // no rank is late, so this is a deadlock
  WorkList work;
  const auto gemm = [](const GemmTask& task) { RunGemm(task, /*num_threads=*/1); };
  if (!PlanOverlap(exchange, problem, buffer_id, gemm, ranks, &work).ok()) __builtin_trap();
  const auto run = [&work] {
    std::vector<std::thread> threads;
    for (int64_t task = 0; task < work.num_tasks; ++task) {
      threads.emplace_back([&work, task] { work.run(task); });
    }
    for (std::thread& thread : threads) thread.join();
  };
  if (work.gate) {
    work.gate(run);
  } else {
    run();
  }
  if (const Status status = work.outcome(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message.c_str());
    __builtin_trap();
  }
}

}  // namespace cpd
