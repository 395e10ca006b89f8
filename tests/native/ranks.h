// The common part of the native tests: checks, and ranks that join an exchange as XLA's handlers
// do.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "transport/transports.h"

namespace cpd {

inline bool Contains(const Status& status, const char* text) {
  if (status.message.find(text) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in '%s'\n", text, status.message.c_str());
  return false;
}

// Tasks that another thread runs later, or never, as in the thread pool of a busy process.
class Helpers {
 public:
  explicit Helpers(uint32_t seed) : rng_(seed) {}
  ~Helpers() {
    for (std::thread& thread : threads_) thread.join();
  }
  void operator()(std::function<void()> task) {
    if (rng_() % 4 == 0) return;
    threads_.emplace_back([task = std::move(task), pause = rng_() % 200] {
      std::this_thread::sleep_for(std::chrono::microseconds(pause));
      task();
    });
  }

 private:
  std::mt19937 rng_;
  std::vector<std::thread> threads_;
};

// A completion, and the future of its status.
inline std::pair<Completion, std::future<Status>> Promised() {
  auto done = std::make_shared<std::promise<Status>>();
  std::future<Status> status = done->get_future();
  return {[done](const Status& result) { done->set_value(result); }, std::move(status)};
}

inline std::future<Status> Join(const Exchange& exchange, int rank,
                                std::unique_ptr<Contribution> contribution = nullptr,
                                const Scheduler& scheduler = {}) {
  auto [completion, status] = Promised();
  InProcessTransport().Join(exchange, rank, std::move(contribution), std::move(completion),
                            scheduler ? 2 : 0, scheduler);
  return std::move(status);
}

inline Exchange ExchangeOf(int64_t run_id, int num_ranks, Planner planner,
                           std::chrono::milliseconds deadline = std::chrono::seconds(20)) {
  return {"test", {run_id, 1, 0}, num_ranks, deadline, std::move(planner)};
}

inline const Planner kNothingToDo = [](const auto&, WorkList*) { return Status::Ok(); };

inline std::vector<std::future<Status>> JoinAll(const Exchange& exchange) {
  std::vector<std::future<Status>> ranks;
  for (int rank = 0; rank < exchange.num_ranks; ++rank) ranks.push_back(Join(exchange, rank));
  return ranks;
}

inline std::future<Status> Refuse(const Exchange& exchange, const Status& reason) {
  auto [completion, status] = Promised();
  InProcessTransport().Refuse(exchange, reason, std::move(completion));
  return std::move(status);
}

}  // namespace cpd
