// An adverse copy engine for bulk copies on the host: loads happen when they are waited for, stores
// read their stage as late as they may, and all arrive at the end, in any order. Stops at what a
// GPU forbids, or would wait for without end.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

namespace cpd::kernels {

class AdverseEngine {
 public:
  static constexpr int64_t kChunkBytes = 48;  // small, so that small copies have many chunks
  static constexpr int kNumStages = 4;
  static constexpr int64_t kLeastBytes = 32;

  template <typename Scratch>
  static void Begin(Scratch* scratch) {
    Engine& engine = Here();
    Require(engine.groups.empty() && engine.open.empty(), "an engine begins with stores");
    engine = {};
    for (uint64_t& full : scratch->full) full = 0;
    std::memset(scratch->stages, 0x6e, sizeof scratch->stages);
  }

  template <typename Scratch>
  static void Load(Scratch* scratch, int stage, const char* from, int64_t bytes) {
    Engine& engine = Here();
    RequireFits(from, bytes);
    Require(engine.loads[stage].from == nullptr, "a stage is loaded twice");
    for (const OneStore& store : engine.open) Require(store.stage != stage, "a stage is stored");
    for (const auto& group : engine.groups) {
      for (const OneStore& store : group) {
        Require(store.has_read || store.stage != stage, "a stage is loaded before it is read");
      }
    }
    engine.loads[stage] = {from, bytes};
    std::memset(scratch->stages[stage], 0x6e, kChunkBytes);
  }

  template <typename Scratch>
  static void AwaitLoad(Scratch* scratch, int stage, uint32_t parity) {
    Engine& engine = Here();
    if (OneLoad& load = engine.loads[stage]; load.from != nullptr) {
      std::memcpy(scratch->stages[stage], load.from, load.bytes);
      engine.loaded[stage] = load.bytes;
      load = {};
      ++scratch->full[stage];
    }
    Require(scratch->full[stage] % 2 != parity, "a wait for a load that nobody started");
  }

  template <typename Scratch>
  static void Store(char* to, Scratch* scratch, int stage, int64_t bytes) {
    Engine& engine = Here();
    RequireFits(to, bytes);
    Require(engine.loads[stage].from == nullptr, "a store of a stage that is being loaded");
    Require(engine.loaded[stage] == bytes, "a store of other bytes than were loaded");
    engine.open.push_back({to, scratch->stages[stage], stage, bytes, false, {}});
  }

  static void CloseGroup() {
    Engine& engine = Here();
    engine.groups.push_back(std::move(engine.open));
    engine.open.clear();
    if (engine.rng() % 4 == 0) Read(engine.groups.size() - 1);  // some are early
  }

  template <int kNum>
  static void AwaitRead() {
    for (size_t group = 0; group + kNum < Here().groups.size(); ++group) Read(group);
  }

  static void AwaitStores() {
    Engine& engine = Here();
    Require(engine.open.empty(), "stores that belong to no group");
    AwaitRead<0>();
    std::vector<OneStore> all;
    for (auto& group : engine.groups) all.insert(all.end(), group.begin(), group.end());
    std::shuffle(all.begin(), all.end(), engine.rng);
    for (const OneStore& store : all) std::memcpy(store.to, store.read.data(), store.bytes);
    num_stores() += all.size();
    engine.groups.clear();
  }

  // Of all threads so far.
  static std::atomic<int64_t>& num_stores() {
    static std::atomic<int64_t> count{0};
    return count;
  }

 private:
  struct OneLoad {
    const char* from = nullptr;
    int64_t bytes = 0;
  };
  struct OneStore {
    char* to;
    const char* from;
    int stage;
    int64_t bytes;
    bool has_read;
    std::vector<char> read;
  };
  struct Engine {
    OneLoad loads[kNumStages];
    int64_t loaded[kNumStages] = {};
    std::vector<OneStore> open;
    std::vector<std::vector<OneStore>> groups;
    std::mt19937 rng{7};

    ~Engine() { Require(groups.empty() && open.empty(), "a block ended before its stores"); }
  };

  // One thread of each block calls it, and each kernel has new threads.
  static Engine& Here() {
    thread_local Engine engine;
    return engine;
  }

  static void Read(size_t group) {
    for (OneStore& store : Here().groups[group]) {
      if (!store.has_read) store.read.assign(store.from, store.from + store.bytes);
      store.has_read = true;
    }
  }

  static void RequireFits(const void* address, int64_t bytes) {
    Require(reinterpret_cast<uint64_t>(address) % 16 == 0, "an address that is not aligned");
    Require(bytes > 0 && bytes % 16 == 0 && bytes <= kChunkBytes, "bytes that do not fit");
  }

  static void Require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "bulk copy: %s\n", what);
    std::abort();
  }
};

}  // namespace cpd::kernels
