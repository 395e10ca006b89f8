// Exchanges in two calls on one device: their announcement, and the order of their streams.
#include "gpu_schedule/exchange_pairs.h"

#include <utility>

namespace cpd {
namespace {

// More than the pairs of any program. Pairs at addresses of earlier programs are then forgotten.
constexpr size_t kMostPairs = 1 << 14;

}  // namespace

bool ExchangePairs::AnnounceStart(const Addresses& arrays, void* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!WaitForEnded(stream)) return false;
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

void ExchangePairs::AnnounceDone(const Addresses& arrays) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = pairs_.find(arrays); found != pairs_.end()) ++found->second.num_dones;
}

bool ExchangePairs::IsPair(const Addresses& arrays) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pairs_.find(arrays);
  return found != pairs_.end() && found->second.num_starts > 0 &&
         found->second.num_starts == found->second.num_dones;
}

bool ExchangePairs::Start(const Addresses& arrays, void* stream, void* own,
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

bool ExchangePairs::Done(const Addresses& arrays, void* stream) {
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

int64_t ExchangePairs::num_started() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_started_;
}

// A program that failed between the two calls has freed memory that its exchange still uses; what
// comes after it on its stream must not. Waiting also for a program that another thread is
// enqueueing now is harmless.
bool ExchangePairs::WaitForEnded(void* stream) {
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

void ExchangePairs::ForgetIdle() {
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

}  // namespace cpd
