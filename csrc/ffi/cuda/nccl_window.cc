// Windows of NCCL: XLA's communicator of the ranks of a call, and memory that is registered there.
#include "ffi/cuda/nccl_window.h"

#include <dlfcn.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>

#include "cuda/memory.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

constexpr char kInstead[] = ". Pass another implementation, such as 'xla'.";
constexpr char kUpgrade[] =
    ". Upgrade jaxlib and its CUDA plugin to 0.11.2 or newer, or pass implementation='xla'.";

Status ToStatus(const std::string& op, const char* what, const CallContext& context,
                XLA_FFI_Error* error) {
  if (error == nullptr) return Status::Ok();
  const std::string message = ffi::internal::GetErrorMessage(context.api, error);
  ffi::internal::DestroyError(context.api, error);
  return Status::Internal(op, ": XLA ", what, ": ", message, kInstead);
}

Status FindExtension(const std::string& op, const CallContext& context,
                     const collectives::Extension** found) {
  using namespace collectives;  // NOLINT: here only
  const XLA_FFI_Api& api = *context.api;
  if (api.struct_size < kFindOffset + sizeof(Find)) {
    const XLA_FFI_Api_Version& version = api.api_version;
    return Status::Invalid(op, ": XLA's FFI ", version.major_version, ".", version.minor_version,
                           " has no extensions, but windows need that of collectives", kUpgrade);
  }
  FindArgs args{sizeof args, nullptr, context.ctx, kExtension, nullptr};
  const auto& find =
      *reinterpret_cast<const Find*>(reinterpret_cast<const char*>(&api) + kFindOffset);
  Status status = ToStatus(op, "does not look for extensions", context, find(&args));
  if (!status.ok()) return status;
  const ExtensionBase* base = args.extension;
  if (base == nullptr) {
    return Status::Invalid(op, ": XLA has no collectives extension here, but windows need it",
                           kUpgrade);
  }
  if (base->major_version != kMajorVersion || base->minor_version < kLeastMinorVersion ||
      base->struct_size < sizeof(Extension)) {
    return Status::Invalid(op, ": XLA's collectives extension has version ", base->major_version,
                           ".", base->minor_version, " and ", base->struct_size,
                           " bytes, but windows need 0.1, or a later one of 0, and ",
                           sizeof(Extension), " bytes", kInstead);
  }
  *found = reinterpret_cast<const Extension*>(base);
  return status;
}

// ---- NCCL, by name: the one that XLA opens.

class Nccl {
 public:
  static constexpr int kSuccess = 0, kInProgress = 7;
  static constexpr int kSymmetric = 1;  // a flag of windows

  const char* (*GetErrorString)(int result);
  int (*MemAlloc)(void** memory, size_t bytes);
  int (*CommWindowRegister)(void* comm, void* memory, size_t bytes, void** window, int flags);
  int (*CommGetAsyncError)(void* comm, int* result);
  int (*GetPeerDevicePointer)(void* window, size_t offset, int peer, void** pointer);
  std::string why_not;  // why it cannot be used here

  static const Nccl& Get() {
    static const auto* nccl = new Nccl;
    return *nccl;
  }

  Status Check(const std::string& op, const char* name, int result) const {
    if (result == kSuccess) return Status::Ok();
    return Status::Internal(op, ": ", name, " failed: ", GetErrorString(result),
                            ". NCCL_DEBUG=WARN prints NCCL's reason", kInstead);
  }

 private:
  Nccl() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = dlerror();
      why_not = std::string("NCCL cannot be opened (") + (why ? why : "no reason") +
                "); it comes with jax[cuda13]";
      return;
    }
    const char* missing = nullptr;
    const auto find = [&](const char* name, auto* function) {
      void* found = dlsym(library, name);
      if (found == nullptr) missing = name;
      *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(found);
    };
    find("ncclGetErrorString", &GetErrorString);
    find("ncclMemAlloc", &MemAlloc);
    find("ncclCommWindowRegister", &CommWindowRegister);
    find("ncclCommGetAsyncError", &CommGetAsyncError);
    find("ncclGetPeerDevicePointer", &GetPeerDevicePointer);
    if (missing == nullptr) return;
    why_not = std::string("NCCL has no ") + missing +
              ", but windows need 2.29 or newer (nvidia-nccl-cu13)";
  }
};

// Registers memory, with all ranks. A communicator that blocks does so on a thread, which stays if
// a rank does not come; one that does not block is asked until it is done.
Status Register(const SlabRequest& request, void* comm, void* memory, int64_t bytes,
                void** window) {
  const Nccl& nccl = Nccl::Get();
  const std::string& op = request.op;
  const auto end = std::chrono::steady_clock::now() + request.deadline;
  const auto made = std::make_shared<void*>(nullptr);
  std::packaged_task<int()> begin([&nccl, comm, memory, bytes, made] {
    return nccl.CommWindowRegister(comm, memory, bytes, made.get(), Nccl::kSymmetric);
  });
  std::future<int> begun = begin.get_future();
  std::thread(std::move(begin)).detach();
  int result = Nccl::kInProgress;
  if (begun.wait_until(end) == std::future_status::ready) result = begun.get();
  while (result == Nccl::kInProgress && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const int asked = nccl.CommGetAsyncError(comm, &result);
    if (asked != Nccl::kSuccess) result = asked;
  }
  if (result == Nccl::kInProgress) {
    return Status::Of(StatusCode::kDeadlineExceeded, op,
                      ": not all ranks came to this call within ",
                      request.deadline.count() / 1000.0,
                      " s, three deadlines, which a first call has. One runs another program, has "
                      "ended, or is slower; pass a longer deadline.");
  }
  *window = *made;
  Status status = nccl.Check(op, "ncclCommWindowRegister", result);
  if (!status.ok() || *window != nullptr) return status;
  return Status::Invalid(op, ": NCCL has no symmetric memory on these GPUs, but windows need it",
                         kInstead);
}

}  // namespace

const std::string& WhyNoNccl() { return Nccl::Get().why_not; }

Status AskForCommunicator(const std::string& op, const CudaOptions& options,
                          const CallContext& context, void** communicator) {
  const Counts& partitions = options.partitions;
  const auto size = static_cast<size_t>(options.call.num_ranks);
  if (!options.in_window() || partitions.size() == 0 || partitions.size() % size != 0 ||
      partitions.size() != options.device_table.size()) {
    return NotOurs(op, partitions.size(), " partitions in memory '", options.memory, "'");
  }
  if (!WhyNoNccl().empty()) return Status::Invalid(op, ": ", WhyNoNccl(), kInstead);
  const collectives::Extension* extension = nullptr;
  Status status = FindExtension(op, context, &extension);
  if (!status.ok()) return status;
  std::vector<collectives::Group> groups;
  for (size_t at = 0; at < partitions.size(); at += size) {
    groups.push_back({partitions.begin() + at, size});
  }
  const bool requests = communicator == nullptr;
  using Args = collectives::Args;
  const size_t bytes = requests ? offsetof(Args, communicator) : sizeof(Args);
  Args args{bytes, nullptr, collectives::kFlattenedId, groups.data(), groups.size(), 0, nullptr};
  const auto ask = requests ? extension->request_communicator : extension->get_communicator;
  status = ToStatus(op, "has no communicator for the ranks", context, ask(extension, &args));
  if (!requests) *communicator = args.communicator;
  return status;
}

// NCCL may count the ranks in another order, so each writes its rank, and which call it makes, in
// front of its memory before it registers this; registration ends after all ranks have begun it.
Status RegisterWindow(const SlabRequest& request, const kernels::Call& call, void* communicator,
                      std::vector<char*>* memory) {
  constexpr int64_t kFront = 256;  // bytes
  const Nccl& nccl = Nccl::Get();
  const std::string& op = request.op;
  uint64_t words[2] = {call.program, static_cast<uint64_t>(call.first_rank)};
  const int64_t all = kFront + request.bytes;
  void *own = nullptr, *window = nullptr;
  const std::string what = "ncclMemAlloc of " + std::to_string(all) + " bytes";
  Status status = nccl.Check(op, what.c_str(), nccl.MemAlloc(&own, all));
  if (status.ok()) status = ClearOnDevice(op, static_cast<char*>(own), all);
  if (status.ok()) status = CopyOnDevice(op, own, words, sizeof words);
  if (status.ok()) status = Register(request, communicator, own, all, &window);
  memory->assign(call.num_ranks, nullptr);
  for (int peer = 0; peer < call.num_ranks && status.ok(); ++peer) {
    void* pointer = nullptr;
    const int result = nccl.GetPeerDevicePointer(window, 0, peer, &pointer);
    status = nccl.Check(op, "ncclGetPeerDevicePointer", result);
    if (!status.ok()) return status;
    if (pointer == nullptr) {
      return Status::Invalid(op, ": NCCL reaches its rank ", peer,
                             " over the network, but windows need pointers (NVLink)", kInstead);
    }
    status = CopyOnDevice(op, words, pointer, sizeof words);
    if (!status.ok()) return status;
    const auto num_ranks = static_cast<uint64_t>(call.num_ranks);
    if (words[0] != call.program || words[1] >= num_ranks || (*memory)[words[1]]) {
      return Status::Invalid(op, ": NCCL's rank ", peer, " makes another call",
                             ". All ranks need to run the same programs in the same order.");
    }
    (*memory)[words[1]] = static_cast<char*>(pointer) + kFront;
  }
  return status;
}

}  // namespace cpd
