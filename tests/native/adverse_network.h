// An adverse network between ranks that are threads of the host. Puts and gets happen only at
// Quiet, in any order, with the contents of their sources at that time. A signal comes late, and
// what came before it is visible only to a rank that asks for the signal.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "kernels/block.h"

namespace cpd::kernels {

class AdverseNetwork {
 public:
  static constexpr bool kHasNetwork = true;

  // The channels of the ranks, of `bytes` each; `seed` sets the order of events.
  static void Start(std::vector<char*> memory, int64_t bytes, unsigned seed) {
    Instance() = std::make_unique<AdverseNetwork>(std::move(memory), bytes, seed);
  }
  // Delivers what is in transit; then the memory may be freed.
  static void Stop() { Instance().reset(); }
  // Delivers the signals that have been sent.
  static void DeliverSignals() { Instance()->SendAll(); }
  // What has been asked for so far.
  static int64_t num_puts() { return Instance()->num_puts_; }
  static int64_t num_gets() { return Instance()->num_gets_; }
  // Binds the calling thread to this rank. On GPUs each rank is a process.
  static void Enter(int rank) { ThisRank() = rank; }

  // ---- The interface of a fabric, as in csrc/kernels/plan.h.

  static void Put(const Block& block, char* to, const char* from, int64_t bytes, int pe) {
    block.Sync();
    if (block.thread == 0) Instance()->AddPut(to, from, bytes, pe);
    block.Sync();
  }
  static void Get(const Block& block, char* to, const char* from, int64_t bytes, int pe) {
    block.Sync();
    if (block.thread == 0) Instance()->AddGet(to, from, bytes, pe);
    block.Sync();
  }
  static void Quiet() { Instance()->QuietHere(); }
  static void PutSignal(void* to, const void* from, int64_t bytes, uint64_t* signal, uint64_t value,
                        int pe) {
    Instance()->AddSignal(to, from, bytes, signal, value, pe);
  }
  static void SetSignal(uint64_t* signal, uint64_t value, int pe) {
    Instance()->AddSignal(nullptr, nullptr, 0, signal, value, pe);
  }
  static void Observe(uint64_t* signal, uint64_t value) { Instance()->ShowTo(signal, value); }

  AdverseNetwork(std::vector<char*> memory, int64_t bytes, unsigned seed)
      : memory_(std::move(memory)), bytes_(bytes), rng_(seed), ranks_(memory_.size()) {
    postman_ = std::thread([this] { Deliver(); });
  }
  ~AdverseNetwork() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    postman_.join();
  }

 private:
  struct Message {  // to an address at a rank, unless it is only a signal
    char* to;
    const char* from;
    int64_t bytes;
    uint64_t* signal;
    uint64_t value;
    int pe;
  };
  struct Arrival {  // which no rank has asked for yet
    char* to;
    std::vector<char> bytes;
  };
  struct OfRank {
    std::vector<std::function<void()>> pending;  // puts and gets
    std::vector<Message> signals;
    std::vector<Arrival> arrivals;
  };

  static std::unique_ptr<AdverseNetwork>& Instance() {
    static auto& instance = *new std::unique_ptr<AdverseNetwork>;
    return instance;
  }

  static int& ThisRank() {
    thread_local int rank = -1;
    return rank;
  }

  // The calling rank: the addresses that it passes are in its own channel.
  int RankOf(const void* address, int64_t bytes) const {
    const auto* at = static_cast<const char*>(address);
    for (size_t r = 0; r < memory_.size(); ++r) {
      if (at >= memory_[r] && at + bytes <= memory_[r] + bytes_) return static_cast<int>(r);
    }
    std::abort();  // no symmetric memory
  }
  template <typename T>
  T* At(T* address, int from, int pe) const {
    const int64_t offset = reinterpret_cast<const char*>(address) - memory_[from];
    return reinterpret_cast<T*>(memory_[pe] + offset);
  }

  void Arrive(int pe, char* to, const char* from, int64_t bytes) {
    ranks_[pe].arrivals.push_back({to, std::vector<char>(from, from + bytes)});
  }

  void AddPut(char* to, const char* from, int64_t bytes, int pe) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int rank = RankOf(to, bytes);
    if (RankOf(from, bytes) != rank || rank == pe) std::abort();
    ++num_puts_;
    ranks_[rank].pending.push_back([=] { Arrive(pe, At(to, rank, pe), from, bytes); });
  }

  void AddGet(char* to, const char* from, int64_t bytes, int pe) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int rank = RankOf(to, bytes);
    if (RankOf(from, bytes) != rank || rank == pe) std::abort();
    ++num_gets_;
    ranks_[rank].pending.push_back([=] { std::memcpy(to, At(from, rank, pe), bytes); });
  }

  void AddSignal(void* to, const void* from, int64_t bytes, uint64_t* signal, uint64_t value,
                 int pe) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int rank = RankOf(signal, 8);
    if (bytes > 0 && (RankOf(to, bytes) != rank || RankOf(from, bytes) != rank)) std::abort();
    ranks_[rank].signals.push_back(
        {static_cast<char*>(to), static_cast<const char*>(from), bytes, signal, value, pe});
    changed_.notify_all();
  }

  void QuietHere() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& here = ranks_[ThisRank()];
    std::shuffle(here.pending.begin(), here.pending.end(), rng_);
    for (const auto& operation : here.pending) operation();
    here.pending.clear();
    while (!here.signals.empty()) Send(ThisRank());
  }

  // One of the signals of a rank, with its data; signals to different ranks come in any order.
  void Send(int rank) {
    auto& signals = ranks_[rank].signals;
    const auto chosen = signals.begin() + rng_() % signals.size();
    const Message message = *chosen;
    signals.erase(chosen);
    for (const Message& other : signals) {  // two in transit to one word might overtake each other
      if (other.pe == message.pe && other.signal == message.signal) std::abort();
    }
    if (message.bytes > 0) {
      Arrive(message.pe, At(message.to, rank, message.pe), message.from, message.bytes);
    }
    __atomic_store_n(At(message.signal, rank, message.pe), message.value, __ATOMIC_RELEASE);
  }

  void SendAll() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t r = 0; r < ranks_.size(); ++r) {
      while (!ranks_[r].signals.empty()) Send(static_cast<int>(r));
    }
  }

  void ShowTo(uint64_t* signal, uint64_t value) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (__atomic_load_n(signal, __ATOMIC_ACQUIRE) < value) std::abort();
    auto& arrivals = ranks_[RankOf(signal, 8)].arrivals;
    for (const Arrival& arrival : arrivals) {
      std::memcpy(arrival.to, arrival.bytes.data(), arrival.bytes.size());
    }
    arrivals.clear();
  }

  void Deliver() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      std::vector<int> with_signals;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        if (!ranks_[r].signals.empty()) with_signals.push_back(static_cast<int>(r));
      }
      if (!with_signals.empty()) {
        Send(with_signals[rng_() % with_signals.size()]);
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      } else if (is_over_) {
        return;
      } else {
        changed_.wait(lock);
      }
    }
  }

  const std::vector<char*> memory_;
  const int64_t bytes_;
  std::mt19937 rng_;
  std::vector<OfRank> ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread postman_;
  bool is_over_ = false;
  int64_t num_puts_ = 0, num_gets_ = 0;
};

}  // namespace cpd::kernels
