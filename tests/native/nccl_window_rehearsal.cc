// Exchanges through windows of NCCL, on the host: fakes of XLA's collectives extension and of NCCL
// drive the handlers, and the kernels run on threads. See test_nccl_window.py.
#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <thread>

#include "device.h"
#include "fake_nccl.h"
#include "ffi/cuda/nccl_window.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace cpd {
namespace {

namespace collectives = window::collectives;
using kernels::World;

FakeNccl* nccl = nullptr;

// ---- A fake of XLA's FFI, which has extensions where `kFindOffset` says.

// One call of a handler: its rank, and what XLA attaches to it.
struct FakeCall {
  int device = 0;
  collectives::Extension extension{};
  bool has_extension = true;
  std::string refuses;  // the function of the extension that fails
  FakeComm* comm = nullptr;
  std::vector<std::string> asked;                // in order
  std::vector<std::vector<int64_t>> partitions;  // of the last question
};

XLA_FFI_Error* Refusal(const char* why) { return new XLA_FFI_Error{why}; }

XLA_FFI_Error* Answer(const collectives::Extension* self, collectives::Args* args, const char* name,
                      size_t size) {
  auto* call = static_cast<FakeCall*>(self->state);
  call->asked.push_back(name);
  CHECK(args->struct_size == size && args->extension_start == nullptr);
  CHECK(args->group_mode == 3 && args->communication_id == 0);
  call->partitions.clear();
  for (size_t g = 0; g < args->num_groups; ++g) {
    const collectives::Group& group = args->groups[g];
    call->partitions.emplace_back(group.ids, group.ids + group.size);
  }
  return call->refuses == name ? Refusal("not this clique") : nullptr;
}

XLA_FFI_Error* RequestCommunicator(const collectives::Extension* self, collectives::Args* args) {
  return Answer(self, args, "request", sizeof *args - sizeof args->communicator);
}

XLA_FFI_Error* GetCommunicator(const collectives::Extension* self, collectives::Args* args) {
  if (XLA_FFI_Error* error = Answer(self, args, "get", sizeof *args)) return error;
  args->communicator = static_cast<FakeCall*>(self->state)->comm;
  return nullptr;
}

XLA_FFI_Error* FindExtension(collectives::FindArgs* args) {
  auto* call = reinterpret_cast<FakeCall*>(args->ctx);
  if (call->refuses == "find") return Refusal("no context");
  if (args->type == 129 && call->has_extension) args->extension = &call->extension.base;
  return nullptr;
}

// The oldest headers call the second function GetMessage, later ones GetDetails.
struct GetMessageArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_Error* error;
  const char* message;
};

// Functions by their place, so that any version of XLA's headers will do.
struct FakeApi {
  alignas(XLA_FFI_Api) char bytes[sizeof(XLA_FFI_Api) + 64] = {};

  XLA_FFI_Api* get() { return reinterpret_cast<XLA_FFI_Api*>(bytes); }
  template <typename Function>
  void Put(size_t offset, Function* function) {
    std::memcpy(bytes + offset, &function, sizeof function);
  }
  FakeApi() {
    XLA_FFI_Api* api = get();
    api->struct_size = collectives::kFindOffset + sizeof(void*);
    api->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, 0, 4};
    api->XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return Refusal(args->message);
    };
    Put(
        offsetof(XLA_FFI_Api, XLA_FFI_Error_Create) + sizeof(void*),
        +[](GetMessageArgs* args) { args->message = args->error->message.c_str(); });
    api->XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    api->XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args*) -> XLA_FFI_Error* { return nullptr; };
    api->XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
      args->device_ordinal = reinterpret_cast<FakeCall*>(args->ctx)->device;
      return nullptr;
    };
    Put(collectives::kFindOffset, &FindExtension);
  }
};

// Operands, results and attributes of one call.
class Frame {
 public:
  Frame() { call_.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE; }

  void AddArray(bool is_result, XLA_FFI_DataType type, std::vector<int64_t> dims, void* data) {
    dims_.push_back(std::move(dims));
    buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, data,
                        static_cast<int64_t>(dims_.back().size()), dims_.back().data()});
    (is_result ? rets_ : args_).push_back(&buffers_.back());
  }
  void Add(const char* name, int64_t number) {
    numbers_.push_back({number});
    scalars_.push_back({XLA_FFI_DataType_S64, numbers_.back().data()});
    Add(name, XLA_FFI_AttrType_SCALAR, &scalars_.back());
  }
  void Add(const char* name, std::vector<int64_t> list) {
    numbers_.push_back(std::move(list));
    arrays_.push_back({XLA_FFI_DataType_S64, numbers_.back().size(), numbers_.back().data()});
    Add(name, XLA_FFI_AttrType_ARRAY, &arrays_.back());
  }
  void Add(const char* name, const char* text) {
    spans_.push_back({text, std::strlen(text)});
    Add(name, XLA_FFI_AttrType_STRING, &spans_.back());
  }

  // The handler's error, or "".
  std::string Run(FakeApi* api, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                  FakeCall* of) {
    arg_types_.assign(args_.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(rets_.size(), XLA_FFI_RetType_BUFFER);
    call_.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    call_.api = api->get();
    call_.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(of);
    call_.stage = stage;
    call_.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args_.size()),
                  arg_types_.data(), args_.data()};
    call_.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets_.size()),
                  ret_types_.data(), rets_.data()};
    call_.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                   nullptr,
                   static_cast<int64_t>(types_.size()),
                   types_.data(),
                   names_.data(),
                   attrs_.data()};
    XLA_FFI_Error* error = handler(&call_);
    const std::string message = error ? error->message : "";
    delete error;
    return message;
  }

 private:
  void Add(std::string_view name, XLA_FFI_AttrType type, void* value) {
    spans_.push_back({name.data(), name.size()});
    const auto before = [](const XLA_FFI_ByteSpan* a, std::string_view b) {
      return std::string_view(a->ptr, a->len) < b;
    };
    const auto at = std::lower_bound(names_.begin(), names_.end(), name, before) - names_.begin();
    names_.insert(names_.begin() + at, &spans_.back());  // in order, as XLA has them
    types_.insert(types_.begin() + at, type);
    attrs_.insert(attrs_.begin() + at, value);
  }

  XLA_FFI_CallFrame call_{};
  std::deque<std::vector<int64_t>> dims_, numbers_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> attrs_, args_, rets_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

// ---- A device in host memory, and the ranks of a world.

struct HostDevice {
  static inline int num_resident = 0;

  static Status Use(const std::string&, int device, int64_t* entry, int* resident) {
    *entry = device;
    *resident = num_resident;
    return Status::Ok();
  }
  static Status MakeLocal(const std::string&, int64_t bytes, window::Local* local) {
    local->state = reinterpret_cast<char*>(new uint64_t[bytes / 8 + 1]());
    local->errors = local->errors_on_device = new kernels::ErrorRecord{};
    return Status::Ok();
  }
  static Status Fill(const std::string&, char* memory, int64_t bytes, const uint64_t (&words)[2]) {
    std::memset(memory, 0, bytes);
    std::memcpy(memory, words, sizeof words);
    return Status::Ok();
  }
  static Status Read(const std::string&, const char* from, uint64_t (&words)[2]) {
    std::memcpy(words, from, sizeof words);
    return Status::Ok();
  }
  static Status Launch(const std::string&, const kernels::Call& call, int, void*, window::Local*,
                       bool* is_over) {
    kernels::RunCall(call, 2, 3);
    *is_over = false;
    return Status::Ok();
  }
};

constexpr auto kRequest = XLA_FFI_ExecutionStage_PREPARE;
constexpr auto kMake = XLA_FFI_ExecutionStage_INITIALIZE;
constexpr auto kMove = XLA_FFI_ExecutionStage_EXECUTE;

// The ranks of a world are the second of two groups, on devices that follow those of the first.
// Their communicators are never destroyed: channels know them by their addresses, and a thread may
// wait for a rank that does not come.
struct Job {
  explicit Job(World* of) : world(of), clique(new FakeClique(of->num_ranks)), calls(of->num_ranks) {
    for (int r = 0; r < world->num_ranks; ++r) {
      calls[r].device = world->num_ranks + r;
      calls[r].comm = new FakeComm{clique, (r + 1) % world->num_ranks};  // NCCL counts otherwise
      calls[r].extension = {{sizeof(collectives::Extension), 129, 0, 1, nullptr},
                            &calls[r],
                            &RequestCommunicator,
                            &GetCommunicator};
    }
    for (const Target& target : window::Targets<HostDevice>()) {
      const bool is_dispatch = std::strstr(target.name, "dispatch.dispatch") != nullptr;
      if (is_dispatch == world->is_dispatch) stages = target;
    }
  }

  std::string Run(int r, XLA_FFI_ExecutionStage stage) {
    Frame frame;
    int32_t rank = r, group = 1;
    Write(r, &rank, &group, &frame);
    return frame.Run(&api,
                     stage == kRequest ? stages.prepare
                     : stage == kMake  ? stages.initialize
                                       : stages.execute,
                     stage, &calls[r]);
  }
  // One stage of all ranks; their errors.
  std::vector<std::string> Run(XLA_FFI_ExecutionStage stage) {
    std::vector<std::string> errors(world->num_ranks);
    std::vector<std::thread> threads;
    for (int r = 0; r < world->num_ranks; ++r) {
      threads.emplace_back([&, r] { errors[r] = Run(r, stage); });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
  void Succeed(XLA_FFI_ExecutionStage stage) {
    for (const std::string& error : Run(stage)) {
      if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
      CHECK(error.empty());
    }
  }

  World* world;
  FakeApi api;
  FakeClique* clique;
  std::vector<FakeCall> calls;
  Target stages{};
  int64_t deadline_ms = 60'000, buffer = 0;
  const char* memory = "window";

 private:
  void Write(int r, int32_t* rank, int32_t* group, Frame* frame) {
    const int n = world->num_ranks;
    const bool is_dispatch = world->is_dispatch;
    frame->AddArray(false, XLA_FFI_DataType_S32, {}, rank);
    frame->AddArray(false, XLA_FFI_DataType_S32, {}, group);
    std::map<const char*, std::vector<int64_t>> lists;
    for (World::Made& made : world->groups) {
      kernels::Plan& plan = made.plans[r];
      const std::vector<int64_t> targets{made.num_slots, made.num_replicas};
      frame->AddArray(false, XLA_FFI_DataType_S32, {n + 1}, plan.num_recv_tokens.data());
      frame->AddArray(false, XLA_FFI_DataType_S32, {made.num_slots}, plan.seq_len.data());
      frame->AddArray(false, XLA_FFI_DataType_S32, targets, plan.dst_rank.data());
      frame->AddArray(false, XLA_FFI_DataType_S64, targets, plan.dst_offset.data());
      if (world->use_src_offset) {
        frame->AddArray(false, XLA_FFI_DataType_U32, {made.num_slots}, plan.src_offset.data());
      }
      lists["has_src_offset"].push_back(world->use_src_offset);
      lists["has_weights"].push_back(0);
      lists["has_fingerprint"].push_back(0);
      lists["num_arrays"].push_back(static_cast<int64_t>(made.row_bytes.size()));
      lists["num_tokens"].push_back(made.num_tokens);
      lists["capacity"].push_back(made.capacity);
      lists["buffer"].push_back(buffer);
    }
    const auto type = is_dispatch ? XLA_FFI_DataType_U8 : XLA_FFI_DataType_F32;
    for (const bool is_result : {false, true}) {
      for (World::Made& made : world->groups) {
        for (size_t a = 0; a < made.row_bytes.size(); ++a) {
          const int64_t width = made.row_bytes[a] / (is_dispatch ? 1 : 4);
          const int64_t rows = is_dispatch == is_result ? made.capacity : made.num_tokens;
          frame->AddArray(is_result, type, {rows, width},
                          (is_result ? made.out : made.x)[a][r].data());
        }
      }
    }
    for (auto& [name, list] : lists) frame->Add(name, list);
    frame->Add("op", is_dispatch ? "dispatch" : "combine");
    frame->Add("axis", "cp");
    frame->Add("num_ranks", n);
    frame->Add("deadline_ms", deadline_ms);
    frame->Add("capacity_names", "");
    std::vector<int64_t> devices, partitions;
    for (int d = 0; d < 2 * n; ++d) devices.push_back(d), partitions.push_back(10 + d);
    frame->Add("device_table", devices);
    frame->Add("memory", memory);
    frame->Add("num_comm_sm", int64_t{0});
    frame->Add("site", int64_t{3});
    frame->Add("partitions", partitions);
  }
};

World WorldOf(int num_ranks, bool is_dispatch, kernels::Rng& rng) {
  World world;
  do {
    world = kernels::RandomWorld(rng, is_dispatch);
  } while (world.num_ranks != num_ranks);
  return world;
}

// ---- What is right.

void CheckRows(int seed) {
  kernels::Rng rng(seed);
  World world = kernels::RandomWorld(rng, seed % 2 == 0);
  Job job(&world);
  HostDevice::num_resident = seed % 3 == 0 ? 8 : 1000;  // small calls are one kernel
  nccl->blocks = seed % 5 != 0;
  const int allocated = nccl->num_allocated;
  job.Succeed(kRequest);
  for (int run = 0; run < 3; ++run) {  // halves take turns, and memory stays
    job.Succeed(kMake);
    world.Clear();
    job.Succeed(kMove);
    (world.is_dispatch ? kernels::CheckDispatched : kernels::CheckCombined)(world);
  }
  CHECK(nccl->num_allocated == allocated + world.num_ranks);
  std::vector<std::vector<int64_t>> partitions(2);
  for (int d = 0; d < 2 * world.num_ranks; ++d) partitions[d / world.num_ranks].push_back(10 + d);
  for (const FakeCall& call : job.calls) {
    const std::vector<std::string> all{"request", "get", "get", "get", "get", "get", "get"};
    CHECK(call.asked == all && call.partitions == partitions);
  }
  nccl->blocks = true;
}

// An invalid plan is an error of the next call, and of whoever asks first.
void CheckPlanErrors() {
  kernels::Rng rng(3);
  World world = WorldOf(2, true, rng);
  Job job(&world);
  job.Succeed(kRequest);
  job.Succeed(kMake);
  world.groups[0].plans[1].seq_len[0] = 2;
  world.groups[0].plans[1].dst_rank[0] = 9;
  job.Succeed(kMove);
  CHECK(kernels::IsSpoiled(world, 0) && kernels::IsSpoiled(world, 1));
  const std::string error = job.Run(kMove)[1];
  CHECK(error.find("dst_rank") != std::string::npos);
  std::string all;
  for (const std::string& one : window::Channels::Get().TakeErrors()) all += one;
  CHECK(all.find("rank 1") != std::string::npos);
  CHECK(window::Channels::Get().TakeErrors().empty());
}

// ---- What is wrong: each message begins with the operation, and says what to do.

struct Fault {
  const char* says;
  XLA_FFI_ExecutionStage stage;
  std::function<void(Job*)> plant;
  bool after_all_registered = false;  // otherwise rank 0 is alone
};

const Fault kFaults[] = {
    {"XLA's FFI 0.4 has no extensions, but windows need that of collectives. Upgrade jaxlib",
     kRequest, [](Job* job) { job->api.get()->struct_size = collectives::kFindOffset; }},
    {"no collectives extension here, but windows need it. Upgrade jaxlib", kRequest,
     [](Job* job) { job->calls[0].has_extension = false; }},
    {"does not look for extensions: no context. Pass another", kRequest,
     [](Job* job) { job->calls[0].refuses = "find"; }},
    {"has version 1.0 and 56 bytes, but windows need 0.1, or a later one of 0, and 56 bytes. Pass",
     kRequest,
     [](Job* job) {
       job->calls[0].extension.base.major_version = 1;
       job->calls[0].extension.base.minor_version = 0;
     }},
    {"has version 0.0 and", kMake,
     [](Job* job) { job->calls[0].extension.base.minor_version = 0; }},
    {"has version 0.1 and 40 bytes", kMove,
     [](Job* job) { job->calls[0].extension.base.struct_size = 40; }},
    {"has no communicator for the ranks: not this clique. Pass another", kRequest,
     [](Job* job) { job->calls[0].refuses = "request"; }},
    {"has no communicator for the ranks: not this clique. Pass another", kMake,
     [](Job* job) { job->calls[0].refuses = "get"; }},
    {"ncclMemAlloc of ", kMake, [](Job*) { nccl->fails = "ncclMemAlloc"; }},
    {"ncclCommWindowRegister failed: as asked. NCCL_DEBUG=WARN prints", kMake,
     [](Job*) { nccl->fails = "ncclCommWindowRegister"; }},
    {"ncclCommWindowRegister failed", kMake,
     [](Job*) { nccl->blocks = false, nccl->fails = "ncclCommGetAsyncError"; }},
    {"no symmetric memory on these GPUs, but windows need it. Pass another", kMake,
     [](Job*) { nccl->has_windows = false; }, true},
    {"ncclGetPeerDevicePointer failed", kMake,
     [](Job*) { nccl->fails = "ncclGetPeerDevicePointer"; }, true},
    {"reaches its rank 1 over the network, but windows need pointers (NVLink). Pass another", kMake,
     [](Job*) { nccl->unreached = 1; }, true},
    {"not all ranks came to this call within 0.03 s, three deadlines", kMake,
     [](Job* job) { job->deadline_ms = 10; }},
    {"not all ranks came to this call within 0.03 s, three deadlines", kMake,
     [](Job* job) { nccl->blocks = false, job->deadline_ms = 10; }},
    {"Call it through jax_cp_dispatch.", kRequest, [](Job* job) { job->memory = "slab"; }},
};

void CheckFaults() {
  for (const Fault& fault : kFaults) {
    kernels::Rng rng(11);
    World world = WorldOf(2, true, rng);
    Job job(&world);
    if (fault.stage != kRequest) job.Succeed(kRequest);
    if (fault.stage == kMove) job.Succeed(kMake);
    fault.plant(&job);
    const std::string error =
        fault.after_all_registered ? job.Run(fault.stage)[0] : job.Run(0, fault.stage);
    if (error.rfind("dispatch over axis 'cp': ", 0) != 0 ||
        error.find(fault.says) == std::string::npos) {
      std::fprintf(stderr, "wanted: %s\ngot: %s\n", fault.says, error.c_str());
      CHECK(false);
    }
    nccl->fails = "";
    nccl->blocks = nccl->has_windows = true;
    nccl->unreached = -1;
  }
}

// Ranks that register different calls at the same time notice it.
void CheckOtherCalls() {
  kernels::Rng rng(5);
  World one = WorldOf(2, true, rng), two = WorldOf(2, true, rng);
  Job first(&one), second(&two);
  second.calls[1].comm = first.calls[1].comm;
  std::string errors[2];
  std::thread other([&] { errors[1] = second.Run(1, kMake); });
  errors[0] = first.Run(0, kMake);
  other.join();
  for (const std::string& error : errors) {
    CHECK(error.find("makes another call. All ranks need to run the same programs") !=
          std::string::npos);
  }
}

// Another communicator of the same ranks, as XLA has after it has aborted the first, has its own
// channel.
void CheckNewCommunicator() {
  kernels::Rng rng(6);
  World world = WorldOf(3, false, rng);
  Job job(&world);
  job.Succeed(kMake);
  Job again(&world);
  CHECK(again.Run(0, kMove).find("with another communicator") != std::string::npos);
  again.Succeed(kMake);
  again.Succeed(kMove);
  kernels::CheckCombined(world);
}

}  // namespace
}  // namespace cpd

// `rehearsal [library]`: with the fake of NCCL at this path, all checks. Without, or if it is too
// old, the first stage is refused; prints the message.
int main(int argc, char** argv) {
  using namespace cpd;  // NOLINT
  void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : nullptr;
  if (library == nullptr || !window::Nccl::Get().why_not.empty()) {
    kernels::Rng rng(0);
    World world = WorldOf(2, true, rng);
    std::puts(Job(&world).Run(0, kRequest).c_str());
    return 0;
  }
  nccl = reinterpret_cast<FakeNccl* (*)()>(dlsym(library, "fake_nccl"))();
  for (int seed = 0; seed < 40; ++seed) CheckRows(seed);
  CheckPlanErrors();
  CheckFaults();
  CheckOtherCalls();
  CheckNewCommunicator();
  std::puts("ok");
}
