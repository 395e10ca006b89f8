// Exchanges in two calls on one device: the first starts the exchange on a stream of its own, the
// second makes the program's stream wait for it. Between them the program computes.
//
// Between the calls, the exchange uses memory of the program. That is safe only if the program
// keeps this memory until the second call: every array that the exchange uses is a result of the
// first call and an operand of the second. Compilers may drop the second call, or insert a copy
// between them. Therefore all calls of a program are announced, with the addresses of these arrays,
// before the program runs. An exchange whose second call has not been announced with the same
// addresses is complete at the end of its first call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace cpd {

// Streams and events of a device, or of a test. The host never waits.
class StreamOrder {
 public:
  virtual ~StreamOrder() = default;

  // A new event; nullptr if there is none.
  virtual void* MakeEvent() = 0;
  virtual bool Record(void* event, void* stream) = 0;
  virtual bool Wait(void* stream, void* event) = 0;
  virtual bool IsOver(void* event) = 0;
};

class ExchangePairs {
 public:
  using Addresses = std::vector<const void*>;  // of the arrays, in order

  explicit ExchangePairs(StreamOrder* order) : order_(order) {}

  // Before a program runs, for each call of the package: a program that failed between the two
  // calls has freed memory that its exchange still uses. What comes after it on its stream must not
  // use it. Waiting also for a program that another thread is enqueueing now is harmless.
  bool AwaitEnded(void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_in_flight_ == 0) return true;
    for (auto& [arrays, pair] : pairs_) {
      if (!pair.is_in_flight) continue;
      if (order_->IsOver(pair.end)) {
        pair.is_in_flight = false;
        --num_in_flight_;
      } else if (!order_->Wait(stream, pair.end)) {
        return false;
      }
    }
    return true;
  }

  // Before a program runs.
  bool AnnounceStart(const Addresses& arrays) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pairs_.size() >= kMostPairs) ForgetIdle();
    Pair& pair = pairs_[arrays];
    if (pair.has_run) {
      pair.num_starts = pair.num_dones = 0;
      pair.has_run = false;
    }
    ++pair.num_starts;
    for (void** event : {&pair.begin, &pair.end}) {
      if (*event != nullptr) continue;
      if (unused_events_.empty()) {
        *event = order_->MakeEvent();
        if (*event == nullptr) return false;
      } else {
        *event = unused_events_.back();
        unused_events_.pop_back();
      }
    }
    return true;
  }

  void AnnounceDone(const Addresses& arrays) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = pairs_.find(arrays); found != pairs_.end()) ++found->second.num_dones;
  }

  // Whether the exchange may go on after its first call.
  bool IsPair(const Addresses& arrays) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pairs_.find(arrays);
    return found != pairs_.end() && found->second.num_starts > 0 &&
           found->second.num_starts == found->second.num_dones;
  }

  // The first call of a pair. `launch` enqueues the exchange on `own`, after the earlier work of
  // `stream`. False if a step failed; then `stream` waits for what has been launched.
  bool Start(const Addresses& arrays, void* stream, void* own,
             const std::function<bool()>& launch) {
    std::lock_guard<std::mutex> lock(mutex_);
    Pair& pair = pairs_.at(arrays);
    pair.has_run = true;
    if (!order_->Record(pair.begin, stream) || !order_->Wait(own, pair.begin)) return false;
    const bool is_launched = launch();
    if (!order_->Record(pair.end, own)) return false;
    if (!is_launched) {
      order_->Wait(stream, pair.end);
      return false;
    }
    if (!pair.is_in_flight) ++num_in_flight_;
    pair.is_in_flight = true;
    ++num_started_;
    return true;
  }

  // The second call. Nothing is left to wait for if the exchange is complete.
  bool Done(const Addresses& arrays, void* stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pairs_.find(arrays);
    if (found == pairs_.end()) return true;
    Pair& pair = found->second;
    pair.has_run = true;
    if (!pair.is_in_flight) return true;
    pair.is_in_flight = false;
    --num_in_flight_;
    return order_->Wait(stream, pair.end);
  }

  // The number of exchanges that went on after their first call.
  int64_t num_started() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_started_;
  }

 private:
  // More than the pairs of any program. Pairs at addresses of earlier programs are then forgotten.
  static constexpr size_t kMostPairs = 1 << 14;

  struct Pair {
    int64_t num_starts = 0, num_dones = 0;  // announced for the next run
    bool has_run = false;                   // since they were announced
    bool is_in_flight = false;              // between its two calls
    void* begin = nullptr;                  // the earlier work of the program's stream
    void* end = nullptr;                    // the exchange
  };

  void ForgetIdle() {
    for (auto at = pairs_.begin(); at != pairs_.end();) {
      if (at->second.is_in_flight) {
        ++at;
        continue;
      }
      for (void* event : {at->second.begin, at->second.end}) {
        if (event != nullptr) unused_events_.push_back(event);
      }
      at = pairs_.erase(at);
    }
  }

  StreamOrder* const order_;
  std::mutex mutex_;
  std::map<Addresses, Pair> pairs_;
  std::vector<void*> unused_events_;
  int64_t num_in_flight_ = 0, num_started_ = 0;
};

}  // namespace cpd
