// The registry of dispatch buffers without Python: admission, uses in flight and destroyed buffers,
// also from several threads at once.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "dispatch/dispatch_buffers.h"
#include "native_test.h"

namespace cpd::test_dispatch_buffers {

using std::chrono::milliseconds;

bool Refused(const Status& status, const char* text) {
  if (status.code == StatusCode::kInvalidArgument &&
      status.message.find(text) != std::string::npos) {
    return true;
  }
  std::fprintf(stderr, "'%s' is not in '%s'\n", text, status.message.c_str());
  return false;
}

constexpr DispatchBufferLimits kLimits{/*capacity=*/8, /*row_bytes=*/32, /*num_groups=*/2,
                                       milliseconds(1500)};

struct Call {
  int64_t group = 0;
  int64_t num_rows = 8;
  int64_t row_bytes = 32;
};

Status Acquire(DispatchBuffers& registry, int64_t id, const Call& call = {}) {
  return registry.Acquire(id, "move", call.group, call.num_rows, call.row_bytes);
}

int64_t Create(DispatchBuffers& registry) {
  int64_t id = 0;
  CHECK(registry.Create("create", kLimits, &id).ok());
  return id;
}

DispatchBufferEntry Find(DispatchBuffers& registry, int64_t id) {
  DispatchBufferEntry entry;
  CHECK(registry.Find("find", id, &entry).ok());
  return entry;
}

void OneRegistryPerProcess() { CHECK(&DispatchBuffers::Get() == &DispatchBuffers::Get()); }

void UnknownIsNotDestroyed() {
  DispatchBuffers registry;
  CHECK(Refused(Acquire(registry, 1), "move: there is no buffer 1; none has been created"));
  CHECK(Create(registry) == 1);
  CHECK(Create(registry) == 2);
  for (const int64_t id : {int64_t{0}, int64_t{-1}, int64_t{3}, INT64_MIN, INT64_MAX}) {
    const std::string text = "no buffer " + std::to_string(id) + "; ids so far are 1 to 2";
    CHECK(Refused(Acquire(registry, id), text.c_str()));
    CHECK(Refused(registry.Grow("grow", id, 1, 1, 1), text.c_str()));
    CHECK(Refused(registry.Destroy("destroy", id), text.c_str()));
    registry.Release(id);
  }
  CHECK(registry.Destroy("destroy", 2).ok());
  DispatchBufferEntry entry;
  CHECK(Refused(Acquire(registry, 2), "move: buffer 2 has been destroyed"));
  CHECK(Refused(registry.Grow("grow", 2, 1, 1, 1), "grow: buffer 2 has been destroyed"));
  CHECK(Refused(registry.Destroy("destroy", 2), "destroy: buffer 2 has been destroyed"));
  CHECK(Refused(registry.Find("find", 2, &entry), "find: buffer 2 has been destroyed"));
  CHECK(Create(registry) == 3);
}

void LimitsThatNoCallHasAreRefused() {
  DispatchBuffers registry;
  const auto refused = [&](const DispatchBufferLimits& limits, const char* text) {
    int64_t id = 0;
    return Refused(registry.Create("create", limits, &id), text) && registry.List().empty();
  };
  constexpr int64_t kHuge = int64_t{1} << 62;
  const std::string text = "create: capacity is " + std::to_string(kHuge) + "; it needs to be bel";
  CHECK(refused({kHuge, 1, 1, milliseconds(1)}, text.c_str()));
  for (const DispatchBufferLimits& limits : {DispatchBufferLimits{0, 1, 1, milliseconds(1)},
                                             DispatchBufferLimits{-1, 1, 1, milliseconds(1)},
                                             DispatchBufferLimits{1, 0, 1, milliseconds(1)},
                                             DispatchBufferLimits{1, 1, 0, milliseconds(1)},
                                             DispatchBufferLimits{1, 1, 1, milliseconds(0)},
                                             DispatchBufferLimits{1, 1, 1, milliseconds(kHuge)}}) {
    CHECK(refused(limits, "create: capacity, row_bytes, deadline and groups need to be positive"));
  }
  CHECK(Refused(registry.Grow("grow", Create(registry), kHuge, 1, 1), "grow: capacity is 4611"));
}

void LimitsHoldAndGrow() {
  DispatchBuffers registry;
  const int64_t id = Create(registry);
  CHECK(Refused(Acquire(registry, id, {0, 9}), "9 rows do not fit buffer 1, whose capacity is 8"));
  CHECK(Refused(Acquire(registry, id, {2}), "in group 2 but buffer 1 is for groups=2"));
  CHECK(Refused(Acquire(registry, id, {-1}), "in group -1"));
  CHECK(Find(registry, id).num_calls == 0);
  CHECK(Find(registry, id).num_in_use == 0);

  CHECK(registry.Grow("grow", id, 9, 1, 3).ok());
  CHECK(Acquire(registry, id, {2, 9}).ok());
  CHECK(Acquire(registry, id, {0, 1}).ok());  // compiled for less than the actual capacity
  CHECK(registry.Grow("grow", id, 1, 1, 1).ok());
  CHECK(Acquire(registry, id, {1, 9, 64}).ok());  // wider rows
  const DispatchBufferEntry entry = Find(registry, id);
  CHECK(entry.limits.capacity == 9);
  CHECK(entry.limits.num_groups == 3);
  CHECK(entry.limits.row_bytes == 64);
  CHECK(entry.num_calls == 3);
  CHECK(entry.num_in_use == 3);
}

void WhatIsInUseStays() {
  DispatchBuffers registry;
  const int64_t idle = Create(registry), id = Create(registry);
  CHECK(Acquire(registry, id).ok());
  CHECK(Refused(registry.Destroy("destroy", id), "destroy: buffer 2 is in use by 1 call in"));
  CHECK(Acquire(registry, id).ok());
  CHECK(Refused(registry.Destroy("destroy", id), "buffer 2 is in use by 2 calls in flight"));
  CHECK(Refused(registry.DestroyAll("all"), "use buffers 2 (2 calls); none has been destroyed"));
  CHECK(registry.List().size() == 2);
  CHECK(Acquire(registry, idle).ok());
  CHECK(Refused(registry.DestroyAll("all"), "use buffers 1 (1 call), 2 (2 calls); none"));
  registry.Release(idle);
  registry.Release(id);
  registry.Release(id);
  registry.Release(id);  // one too many counts nothing
  CHECK(Find(registry, id).num_in_use == 0);
  CHECK(Find(registry, id).num_calls == 2);
  CHECK(registry.Destroy("destroy", id).ok());
  CHECK(registry.DestroyAll("all").ok());
  CHECK(registry.DestroyAll("all").ok());
  CHECK(registry.List().empty());
  CHECK(Refused(Acquire(registry, idle), "buffer 1 has been destroyed"));
}

// Calls use one buffer after another while other threads grow them and try to destroy them all: no
// call is inside a destroyed buffer, and none enters one.
void CallsAgainstDestruction() {
  constexpr int kCallers = 4, kBuffers = 50;
  DispatchBuffers registry;
  std::atomic<int64_t> current{Create(registry)};
  std::vector<std::atomic<int>> inside(kBuffers + 1);
  std::atomic<bool> over{false};
  std::atomic<int64_t> num_entered{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int64_t call = 0; !over; ++call) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(100));  // so at times no buffer is in use
        const int64_t id = current;
        const Status status = Acquire(registry, id, {caller % 2, call % 9, call});
        if (!status.ok()) {
          CHECK(Refused(status, "has been destroyed"));
          continue;
        }
        ++inside[id];
        ++num_entered;
        std::this_thread::yield();
        --inside[id];
        registry.Release(id);
      }
    });
  }
  for (int64_t id = 1; id <= kBuffers; ++id) {
    CHECK(current == id);
    while (num_entered < 20 * id) std::this_thread::yield();
    CHECK(registry.Grow("grow", id, 16, 1, 2).ok());
    CHECK(registry.List().size() == 1);
    for (Status status{StatusCode::kInternal, ""}; !status.ok();) {
      std::this_thread::yield();
      status = id % 2 ? registry.Destroy("destroy", id) : registry.DestroyAll("all");
      CHECK(status.ok() || Refused(status, id % 2 ? "is in use by" : "none has been destroyed"));
    }
    CHECK(inside[id] == 0);
    CHECK(Refused(Acquire(registry, id), "has been destroyed"));
    if (id < kBuffers) current = Create(registry);
  }
  over = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(registry.List().empty());
}

const Register kTests("test_dispatch_buffers", [](const Numbers&) {
  OneRegistryPerProcess();
  UnknownIsNotDestroyed();
  LimitsThatNoCallHasAreRefused();
  LimitsHoldAndGrow();
  WhatIsInUseStays();
  CallsAgainstDestruction();
});

}  // namespace cpd::test_dispatch_buffers
