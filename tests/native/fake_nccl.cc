// A fake of NCCL in host memory: windows are the memory of all ranks. With FAKE_NCCL_IS_OLD, of a
// version without pointers to peers.
#include "fake_nccl.h"

#include <cstdlib>
#include <cstring>

using cpd::FakeClique, cpd::FakeComm;

namespace {

constexpr int kSuccess = 0, kFailed = 3, kInProgress = 7;

bool Fails(const char* name) { return fake_nccl()->fails == name; }

bool HasAll(const FakeClique& clique) {
  for (const void* memory : clique.memory) {
    if (memory == nullptr) return false;
  }
  return true;
}

// A window is the clique: each test registers once.
int End(FakeComm* comm) {
  *comm->window = fake_nccl()->has_windows ? comm->clique : nullptr;
  return kSuccess;
}

}  // namespace

extern "C" {

cpd::FakeNccl* fake_nccl() {
  static cpd::FakeNccl nccl;
  return &nccl;
}

const char* ncclGetErrorString(int result) { return result == kFailed ? "as asked" : "?"; }

int ncclMemAlloc(void** memory, size_t bytes) {
  if (Fails("ncclMemAlloc")) return kFailed;
  std::lock_guard<std::mutex> lock(fake_nccl()->mutex);
  ++fake_nccl()->num_allocated;
  *memory = std::aligned_alloc(4096, (bytes + 4095) & ~size_t{4095});
  std::memset(*memory, 0x7f, bytes);
  return kSuccess;
}

int ncclCommWindowRegister(void* of, void* memory, size_t, void** window, int flags) {
  if (Fails("ncclCommWindowRegister") || flags != 1) return kFailed;
  auto* comm = static_cast<FakeComm*>(of);
  FakeClique& clique = *comm->clique;
  comm->window = window;
  std::unique_lock<std::mutex> lock(clique.mutex);
  clique.memory[comm->rank] = memory;
  clique.changed.notify_all();
  if (!fake_nccl()->blocks) return kInProgress;
  clique.changed.wait(lock, [&] { return HasAll(clique); });
  return End(comm);
}

int ncclCommGetAsyncError(void* of, int* result) {
  if (Fails("ncclCommGetAsyncError")) return kFailed;
  auto* comm = static_cast<FakeComm*>(of);
  std::lock_guard<std::mutex> lock(comm->clique->mutex);
  *result = HasAll(*comm->clique) ? End(comm) : kInProgress;
  return kSuccess;
}

#ifndef FAKE_NCCL_IS_OLD
int ncclGetPeerDevicePointer(void* window, size_t offset, int peer, void** pointer) {
  if (Fails("ncclGetPeerDevicePointer")) return kFailed;
  void* memory = static_cast<FakeClique*>(window)->memory.at(peer);
  *pointer = peer == fake_nccl()->unreached ? nullptr : static_cast<char*>(memory) + offset;
  return kSuccess;
}
#endif

}  // extern "C"
