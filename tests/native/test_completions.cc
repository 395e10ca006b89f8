// The threads that complete calls: completions wait for each other, and threads may be refused.
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>

#include "native_test.h"
#include "ranks.h"
#include "transport/completion_pool.h"

// Thread creation that fails on demand; sanitizers need the symbol for themselves.
static std::atomic<bool> refuse_threads{false};
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kCanRefuseThreads = false;
#else
constexpr bool kCanRefuseThreads = true;
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  static const auto create =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return refuse_threads ? EAGAIN : create(thread, attributes, start, argument);
}
#endif

namespace cpd::test_completions {

using std::chrono::milliseconds;

// The rest of a rank's program may wait for the rest of another's.
void CompletionsWaitForEachOther() {
  constexpr int kRanks = 8;
  std::vector<std::promise<void>> ended(kRanks);
  std::atomic<int> num_left{kRanks};
  std::promise<void> all;
  std::shared_future<void> everyone = all.get_future();
  const Exchange exchange = ExchangeOf(1, kRanks, kNothingToDo);
  for (int rank = 0; rank < kRanks; ++rank) {
    InProcessTransport().Join(exchange, rank, nullptr,
                              [&, rank](const Status&) {
                                if (--num_left == 0) all.set_value();
                                everyone.wait();
                                ended[rank].set_value();
                              },
                              0, {});
  }
  for (auto& one : ended) one.get_future().wait();
}

// Tasks never wait for busy threads; idle threads are reused, and end when there is nothing to do.
void ThePoolGrowsAndShrinks() {
  constexpr int kTasks = 6;
  static auto* pool = new CompletionPool(std::chrono::hours(1));  // its threads outlive this
  std::map<std::thread::id, int> num_rounds;                      // by thread
  std::mutex mutex;
  const auto has_worked_again = [&] {
    std::lock_guard<std::mutex> lock(mutex);
    return std::any_of(num_rounds.begin(), num_rounds.end(),
                       [](const auto& thread) { return thread.second > 1; });
  };
  while (!has_worked_again()) {
    std::atomic<int> num_left{kTasks};
    std::promise<void> all;
    std::shared_future<void> everyone = all.get_future();
    std::vector<std::promise<void>> done(kTasks);
    for (auto& one : done) {
      pool->Run([&] {
        {
          std::lock_guard<std::mutex> lock(mutex);
          ++num_rounds[std::this_thread::get_id()];
        }
        if (--num_left == 0) all.set_value();
        everyone.wait();
        one.set_value();
      });
    }
    for (auto& one : done) one.get_future().wait();
  }
  CHECK(pool->num_threads() >= kTasks);
  static auto* small = new CompletionPool(milliseconds(10));
  std::promise<void> done;
  small->Run([&] { done.set_value(); });
  done.get_future().wait();
  while (small->num_threads() > 0) std::this_thread::sleep_for(milliseconds(1));
}

// First in a process, when the pool has no thread yet, and again when it has some.
void CompletesWithoutNewThreads(int64_t run_id) {
  InProcessTransport();
  const Exchange exchange = ExchangeOf(run_id, 4, kNothingToDo);
  refuse_threads = true;
  for (auto& status : JoinAll(exchange)) CHECK(status.get().ok());
  refuse_threads = false;
}

const Register kTests("test_completions", [](const Numbers&) {
  if (kCanRefuseThreads) CompletesWithoutNewThreads(20);
  CompletionsWaitForEachOther();
  if (kCanRefuseThreads) CompletesWithoutNewThreads(21);
  ThePoolGrowsAndShrinks();
});

}  // namespace cpd::test_completions
