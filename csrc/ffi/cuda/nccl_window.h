// Exchanges through windows of NCCL: a call asks XLA for the communicator of its ranks before the
// program runs, and registers the memory of its channel there; kernels are those of other mapped
// memory. Needs no CUDA: nccl_window.cc and a test on the host include it. Has not run on a GPU.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/errors.h"
#include "ffi/common.h"
#include "ffi/cuda/dispatch_call.h"
#include "kernels/prepare.h"
#include "kernels/small.h"
#include "transport/transport.h"
#include "xla/ffi/api/ffi.h"

namespace cpd::window {

// What a handler asks XLA by.
struct CallContext {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* ctx;
};

}  // namespace cpd::window

namespace xla::ffi {

template <>
struct CtxDecoding<cpd::window::CallContext> {
  using Type = cpd::window::CallContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine&) {
    return Type{api, ctx};
  }
};

}  // namespace xla::ffi

namespace cpd::window {

namespace ffi = xla::ffi;

// ---- XLA's collectives extension, which jaxlib has since 0.11.2. The package is built with older
// headers, so what it uses is declared here. Minor versions only append to these structs, which
// tests/native/test_nccl_window.py compares with XLA's.

namespace collectives {

constexpr int64_t kExtension = 129;
constexpr int32_t kMajorVersion = 0, kLeastMinorVersion = 1;
constexpr int32_t kFlattenedId = 3;  // groups name devices by their numbers in the program

struct ExtensionBase {
  size_t struct_size;
  int64_t type;
  int32_t major_version, minor_version;
  const ExtensionBase* next;
};
struct FindArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* ctx;
  int64_t type;
  const ExtensionBase* extension;  // out
};
using Find = XLA_FFI_Error* (*)(FindArgs*);
// `Find` is the member of XLA_FFI_Api behind the last one of the oldest headers.
constexpr size_t kFindOffset = offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*);

struct Group {
  const int64_t* ids;
  size_t size;
};
struct Args {
  size_t struct_size;
  void* extension_start;
  int32_t group_mode;
  const Group* groups;
  size_t num_groups;
  int64_t communication_id;
  void* communicator;  // out: an ncclComm_t, which XLA owns; a request ends before it
};
struct Extension {
  ExtensionBase base;
  void* state;
  XLA_FFI_Error* (*request_communicator)(const Extension*, Args*);  // while preparing
  XLA_FFI_Error* (*get_communicator)(const Extension*, Args*);      // later
};

}  // namespace collectives

constexpr char kInstead[] = ". Pass another implementation, such as 'xla'.";
constexpr char kUpgrade[] =
    ". Upgrade jaxlib and its CUDA plugin to 0.11.2 or newer, or pass implementation='xla'.";

inline Status ToStatus(const std::string& op, const char* what, const CallContext& context,
                       XLA_FFI_Error* error) {
  if (error == nullptr) return Status::Ok();
  const std::string message = ffi::internal::GetErrorMessage(context.api, error);
  ffi::internal::DestroyError(context.api, error);
  return Status::Internal(op, ": XLA ", what, ": ", message, kInstead);
}

inline Status FindExtension(const std::string& op, const CallContext& context,
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

// ---- A channel: memory of NCCL in a window, and this rank's own.

// Kernels write here, and the host reads errors.
struct Local {
  char* state = nullptr;
  kernels::ErrorRecord* errors_on_device = nullptr;
  kernels::ErrorRecord* errors = nullptr;
  void* done = nullptr;  // the end of the last call
};

struct Channel {
  std::vector<char*> memory;  // by rank
  Local local;
  int num_groups = 0;
  std::mutex mutex;  // held while a call is enqueued

  std::string TakeError(const std::string& op) {
    kernels::ErrorRecord* record = local.errors;
    const uint64_t raised = __atomic_load_n(&record->raised, __ATOMIC_ACQUIRE);
    if (raised == record->reported) return "";
    std::string text = Describe(op, *record, static_cast<int>(memory.size()), num_groups);
    __atomic_store_n(&record->reported, raised, __ATOMIC_RELEASE);
    return text;
  }
};

// By layout, registered buffers, device and communicator. They stay until the process ends: peers
// write here.
struct Channels {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Channel>> made;

  static Channels& Get() {
    static auto* all = new Channels;
    return *all;
  }
  // Errors that no call has reported yet.
  std::vector<std::string> TakeErrors() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::string> errors;
    for (auto& [key, channel] : made) {
      std::string error = channel ? channel->TakeError("jax_cp_dispatch") : "";
      if (!error.empty()) errors.push_back(std::move(error));
    }
    return errors;
  }
};

// Registers memory, with all ranks. A communicator that blocks does so on a thread, which stays if
// a rank does not come; one that does not block is asked until it is done.
inline Status Register(const std::string& op, void* comm, std::chrono::milliseconds deadline,
                       void* memory, int64_t bytes, void** window) {
  const Nccl& nccl = Nccl::Get();
  const auto end = std::chrono::steady_clock::now() + deadline;
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
                      ": not all ranks came to this call within ", deadline.count() / 1000.0,
                      " s, three deadlines, which a first call has. One runs another program, has "
                      "ended, or is slower; pass a longer deadline.");
  }
  *window = *made;
  Status status = nccl.Check(op, "ncclCommWindowRegister", result);
  if (!status.ok() || *window != nullptr) return status;
  return Status::Invalid(op, ": NCCL has no symmetric memory on these GPUs, but windows need it",
                         kInstead);
}

// Makes a channel of `bytes`, with all ranks and in the same order on all of them. NCCL may count
// the ranks in another order, so each writes its rank, and which call it makes, in front of its
// memory before it registers this; registration ends after all ranks have begun it.
template <typename Device>
Status MakeChannel(const DispatchCall& read, const kernels::Call& call, void* comm, int64_t bytes,
                   Channel* channel) {
  constexpr int kFirstCallDeadlines = 3;  // ranks may still compile; as in cuda/channels.h
  constexpr int64_t kFront = 256;         // bytes
  const Nccl& nccl = Nccl::Get();
  const std::string& op = read.op;
  uint64_t words[2] = {call.program, static_cast<uint64_t>(call.first_rank)};
  const int64_t all = kFront + bytes;
  void *memory = nullptr, *window = nullptr;
  Status status = Device::MakeLocal(op, call.local_bytes, &channel->local);
  const std::string what = "ncclMemAlloc of " + std::to_string(all) + " bytes";
  if (status.ok()) status = nccl.Check(op, what.c_str(), nccl.MemAlloc(&memory, all));
  if (status.ok()) status = Device::Fill(op, static_cast<char*>(memory), all, words);
  if (status.ok()) {
    status = Register(op, comm, kFirstCallDeadlines * read.deadline, memory, all, &window);
  }
  channel->num_groups = call.num_groups;
  channel->memory.assign(call.num_ranks, nullptr);
  for (int peer = 0; peer < call.num_ranks && status.ok(); ++peer) {
    void* pointer = nullptr;
    const int result = nccl.GetPeerDevicePointer(window, 0, peer, &pointer);
    status = nccl.Check(op, "ncclGetPeerDevicePointer", result);
    if (!status.ok()) return status;
    if (pointer == nullptr) {
      return Status::Invalid(op, ": NCCL reaches its rank ", peer,
                             " over the network, but windows need pointers (NVLink)", kInstead);
    }
    status = Device::Read(op, static_cast<char*>(pointer), words);
    if (!status.ok()) return status;
    const auto num_ranks = static_cast<uint64_t>(call.num_ranks);
    if (words[0] != call.program || words[1] >= num_ranks || channel->memory[words[1]]) {
      return Status::Invalid(op, ": NCCL's rank ", peer, " makes another call",
                             ". All ranks need to run the same programs in the same order.");
    }
    channel->memory[words[1]] = static_cast<char*>(pointer) + kFront;
  }
  return status;
}

// ---- A call, in three stages: it asks for a communicator, makes its channel, and moves rows.

struct Options : CudaOptions {
  Counts partitions;  // the numbers in the program of the devices in `device_table`

  Status Read(Direction direction, const ffi::Dictionary& attributes, DispatchCall* read) {
    AttributeReader reader(attributes);
    ReadOptions(&reader, &call);
    GpuOptions::Read(&reader);
    reader.Read("partitions", &partitions);
    Status status = reader.Finish();
    if (status.ok()) status = ReadCudaAttributes(direction, call, read);
    if (!status.ok()) return status;
    const size_t num_devices = partitions.size();
    if (memory != "window" || num_devices == 0 || num_devices % read->num_ranks != 0 ||
        num_devices != device_table.size()) {
      return NotOurs(read->op, num_devices, " partitions in memory '", memory, "'");
    }
    const std::string& why_not = Nccl::Get().why_not;
    return why_not.empty() ? status : Status::Invalid(read->op, ": ", why_not, kInstead);
  }

  // Requests the communicator of the ranks, or gets it, if there is a place for it. XLA's
  // collectives use it too. A program that requests one meets all devices once it is initialized.
  Status Ask(const std::string& op, const CallContext& context, void** communicator) const {
    const collectives::Extension* extension = nullptr;
    Status status = FindExtension(op, context, &extension);
    if (!status.ok()) return status;
    const auto size = static_cast<size_t>(call.num_ranks);
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
};

struct Stage {
  CallContext context;
  bool executes;  // otherwise it prepares the program
  int32_t device;
  void* stream;
};

// Everything that determines the memory of a channel, equal on all ranks.
inline std::string LayoutOf(const kernels::Call& call, const std::vector<int64_t>& devices) {
  std::string layout = call.is_dispatch ? "dispatch," : "combine,";
  const auto add = [&](int64_t number) { layout += std::to_string(number) + ","; };
  std::for_each(devices.begin(), devices.end(), add);
  for (int p = 0; p < call.num_groups; ++p) {
    const kernels::OperandGroup& group = call.groups[p];
    add(group.num_arrays);
    for (const int64_t n : {group.capacity, group.num_slots, group.num_replicas}) add(n);
  }
  for (int a = 0; a < call.num_arrays; ++a) add(call.arrays[a].in_row_bytes);
  return layout;
}

// `Device` is what a call needs of CUDA, and a test has on the host: Use makes a device current,
// and returns its entry in the table of devices and the blocks that it runs at once; Fill clears
// memory and sets its first two words, Read reads them, and both are done when they return; Launch
// enqueues a call behind the last one, and says whether it has waited for it.
template <typename Device>
Status Move(Direction direction, const Stage& at, const int32_t* rank_operand,
            const ffi::RemainingArgs& args, const ffi::RemainingRets& results,
            const ffi::Dictionary& attributes) {
  Options options;
  DispatchCall read;
  RankLocation location;
  int64_t entry = 0;
  int num_resident = 0;
  void* comm = nullptr;
  Status status = options.Read(direction, attributes, &read);
  const std::string& op = read.op;
  if (status.ok()) status = Device::Use(op, at.device, &entry, &num_resident);
  const Counts& table = options.device_table;
  if (status.ok()) status = LocateRanks(op, entry, read.num_ranks, table, &location);
  if (status.ok()) status = options.Ask(op, at.context, &comm);
  if (!status.ok()) return status;

  kernels::Call call{};
  call.num_local = 1;
  call.first_rank = location.rank;
  call.rank_operand = rank_operand;
  const int num_blocks = kernels::NumMoveBlocks(options.num_comm_sm, num_resident, false);
  status = ReadCudaOperands(options.call, args, results, num_blocks, &read, &call);
  if (!status.ok()) return status;
  kernels::ChooseSmall(&call, num_resident);
  const int64_t bytes = kernels::LayOutChannel(&call);
  kernels::LayOutLocal(&call);
  const std::string layout = LayoutOf(call, location.devices);
  call.program = kernels::ProgramWord(HashOf(layout), options.site);
  std::string key = layout;
  const auto add = [&](uint64_t number) { key += std::to_string(number) + "/"; };
  std::for_each(options.call.buffer.begin(), options.call.buffer.end(), add);
  add(at.device);
  add(reinterpret_cast<uintptr_t>(comm));
  Channels& all = Channels::Get();
  std::unique_lock<std::mutex> lock(all.mutex);
  std::unique_ptr<Channel>& place = all.made[key];
  Channel* channel = place.get();
  lock.unlock();  // registration meets ranks that may be devices of this process
  if (!at.executes) {
    if (channel != nullptr) return status;
    auto made = std::make_unique<Channel>();
    status = MakeChannel<Device>(read, call, comm, bytes, made.get());
    lock.lock();
    if (status.ok()) place = std::move(made);
    return status;
  }
  if (channel == nullptr) {
    return Status::Internal(op,
                            ": XLA runs this call with another communicator than it has "
                            "initialized it with. Compile the program again.");
  }
  std::copy(channel->memory.begin(), channel->memory.end(), call.symmetric);
  call.local = channel->local.state;
  call.errors = channel->local.errors_on_device;
  // An error of an earlier call. Taken before the launch, after which this call may raise its own.
  // Launched even then: the other ranks run this call too, and wait for this one.
  std::string message = channel->TakeError(op);
  bool is_over = false;
  const std::lock_guard<std::mutex> enqueues(channel->mutex);
  status = Device::Launch(op, call, num_blocks, at.stream, &channel->local, &is_over);
  if (!status.ok()) return status;
  if (is_over && message.empty()) message = channel->TakeError(op);
  return message.empty() ? Status::Ok() : Status::Invalid(message);
}

inline ffi::Error Request(CallContext context, ffi::Dictionary attributes) {
  return ToError(Caught([&] {
    Options options;
    DispatchCall read;
    const Status status = options.Read(Direction::kDispatch, attributes, &read);
    return status.ok() ? options.Ask(read.op, context, nullptr) : status;
  }));
}
inline auto BindRequest() {
  return ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().Ctx<CallContext>().Attrs();
}

template <typename Device, Direction kDirection>
struct Handlers {
  using Rank = ffi::BufferR0<ffi::S32>;  // place on the axis, on the device

  template <bool kExecutes>
  static ffi::Error MoveIn(CallContext context, int32_t device, void* stream, Rank rank, Rank,
                           ffi::RemainingArgs args, ffi::RemainingRets results,
                           ffi::Dictionary attributes) {
    return ToError(Caught([&] {
      return Move<Device>(kDirection, {context, kExecutes, device, stream}, rank.typed_data(), args,
                          results, attributes);
    }));
  }
  template <ffi::ExecutionStage kStage>
  static auto BindMove() {
    return ffi::Ffi::Bind<kStage>()
        .template Ctx<CallContext>()
        .template Ctx<ffi::DeviceOrdinal>()
        .template Ctx<ffi::PlatformStream<void*>>()
        .template Arg<Rank>()
        .template Arg<Rank>()  // group
        .RemainingArgs()
        .RemainingRets()
        .Attrs();
  }

  static Target TargetOf(const char* name) {
    using ffi::ExecutionStage;
    return {.name = name,
            .execute = Handle<MoveIn<true>, BindMove<ExecutionStage::kExecute>>,
            .initialize = Handle<MoveIn<false>, BindMove<ExecutionStage::kInitialize>>,
            .prepare = Handle<Request, BindRequest>};
  }
};

template <typename Device>
std::vector<Target> Targets() {
  return {Handlers<Device, Direction::kDispatch>::TargetOf("jax_cp_dispatch.dispatch_window"),
          Handlers<Device, Direction::kCombine>::TargetOf("jax_cp_dispatch.combine_window")};
}

}  // namespace cpd::window
