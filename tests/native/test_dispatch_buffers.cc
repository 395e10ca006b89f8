// The registry of dispatch buffers without Python: ids, uses in flight and destroyed buffers,
// also from several threads at once.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "dispatch/dispatch_buffers.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_dispatch_buffers {

bool Refused(const Status& status, const char* text) {
  return status.code == StatusCode::kInvalidArgument && Contains(status, text);
}

int64_t NumInUse(DispatchBuffers& registry, int64_t id) {
  BufferUsage usage;
  CHECK(registry.Find("find", id, &usage).ok());
  return usage.num_in_use;
}

void OneRegistryPerProcess() { CHECK(&DispatchBuffers::Get() == &DispatchBuffers::Get()); }

void UnknownIsNotDestroyed() {
  DispatchBuffers registry;
  CHECK(Refused(registry.Acquire(1, "move"), "move: there is no buffer 1; none has been created"));
  CHECK(registry.Create() == 1);
  CHECK(registry.Create() == 2);
  for (const int64_t id : {int64_t{0}, int64_t{-1}, int64_t{3}, INT64_MIN, INT64_MAX}) {
    const std::string text = "no buffer " + std::to_string(id) + "; ids so far are 1 to 2";
    CHECK(Refused(registry.Acquire(id, "move"), text.c_str()));
    CHECK(Refused(registry.Destroy("destroy", id), text.c_str()));
    registry.Release(id);
  }
  CHECK(registry.Destroy("destroy", 2).ok());
  BufferUsage usage;
  CHECK(Refused(registry.Acquire(2, "move"), "move: buffer 2 has been destroyed"));
  CHECK(Refused(registry.Destroy("destroy", 2), "destroy: buffer 2 has been destroyed"));
  CHECK(Refused(registry.Find("find", 2, &usage), "find: buffer 2 has been destroyed"));
  CHECK(registry.Create() == 3);
}

void WhatIsInUseStays() {
  DispatchBuffers registry;
  const int64_t idle = registry.Create(), id = registry.Create();
  CHECK(registry.Acquire(id, "move").ok());
  CHECK(Refused(registry.Destroy("destroy", id), "destroy: buffer 2 is in use by 1 call in"));
  CHECK(registry.Acquire(id, "move").ok());
  CHECK(Refused(registry.Destroy("destroy", id), "buffer 2 is in use by 2 calls in flight"));
  CHECK(Refused(registry.DestroyAll("all"), "use buffers 2 (2 calls); none has been destroyed"));
  CHECK(registry.List().size() == 2);
  CHECK(registry.Acquire(idle, "move").ok());
  CHECK(Refused(registry.DestroyAll("all"), "use buffers 1 (1 call), 2 (2 calls); none"));
  registry.Release(idle);
  registry.Release(id);
  registry.Release(id);
  registry.Release(id);  // one too many counts nothing
  CHECK(NumInUse(registry, id) == 0);
  CHECK(registry.Destroy("destroy", id).ok());
  CHECK(registry.DestroyAll("all").ok());
  CHECK(registry.DestroyAll("all").ok());
  CHECK(registry.List().empty());
  CHECK(Refused(registry.Acquire(idle, "move"), "buffer 1 has been destroyed"));
}

// Calls use one buffer after another while another thread tries to destroy them: no
// call is inside a destroyed buffer, and none enters one.
void CallsAgainstDestruction() {
  constexpr int kCallers = 4, kBuffers = 50;
  DispatchBuffers registry;
  std::atomic<int64_t> current{registry.Create()};
  std::vector<std::atomic<int>> inside(kBuffers + 1);
  std::atomic<bool> over{false};
  std::atomic<int64_t> num_entered{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      while (!over) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(100));  // so at times no buffer is in use
        const int64_t id = current;
        const Status status = registry.Acquire(id, "move");
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
    CHECK(registry.List().size() == 1);
    for (Status status{StatusCode::kInternal, ""}; !status.ok();) {
      std::this_thread::yield();
      status = id % 2 ? registry.Destroy("destroy", id) : registry.DestroyAll("all");
      CHECK(status.ok() || Refused(status, id % 2 ? "is in use by" : "none has been destroyed"));
    }
    CHECK(inside[id] == 0);
    CHECK(Refused(registry.Acquire(id, "move"), "has been destroyed"));
    if (id < kBuffers) current = registry.Create();
  }
  over = true;
  for (std::thread& caller : callers) caller.join();
  CHECK(registry.List().empty());
}

const Register kTests("test_dispatch_buffers", [](const Numbers&) {
  OneRegistryPerProcess();
  UnknownIsNotDestroyed();
  WhatIsInUseStays();
  CallsAgainstDestruction();
});

}  // namespace cpd::test_dispatch_buffers
