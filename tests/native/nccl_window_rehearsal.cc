// The handlers of exchanges between GPUs, on the host: in memory of a CUDA runtime that is a fake,
// and through windows of NCCL, with fakes of that and of XLA's collectives extension. The kernels
// run on threads. See test_nccl_window.py.
#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <thread>

#include "cuda/kernels.h"
#include "device.h"
#include "fake_nccl.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/nccl_window.h"
#include "ffi_frame.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace cpd {

// ---- The kernels, at once.

cudaError_t LaunchCall(const kernels::Call& call, int, cudaStream_t) {
  kernels::RunCall(call, 2, 3);
  return cudaSuccess;
}

cudaError_t LaunchHold(const kernels::HeldFields&, cudaStream_t) { return cudaSuccess; }

cudaError_t LaunchCopy(char* to, const char* from, int64_t num_bytes, int, cudaStream_t) {
  std::memcpy(to, from, num_bytes);
  return cudaSuccess;
}

namespace {

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
  CallBetweenGpus* state = nullptr;
  int64_t run_id = 0;
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
    api->XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      args->state = reinterpret_cast<FakeCall*>(args->ctx)->state;
      return nullptr;
    };
    api->XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
      args->run_id = reinterpret_cast<FakeCall*>(args->ctx)->run_id;
      return nullptr;
    };
    Put(collectives::kFindOffset, &FindExtension);
  }
};

// Arrays and attributes of one call.
struct CallFrame {
  Frame arrays;
  Attributes attributes;
  std::deque<std::vector<int64_t>> dims;
  std::deque<XLA_FFI_Buffer> buffers;

  void AddArray(bool is_result, XLA_FFI_DataType type, std::vector<int64_t> of_array, void* data) {
    dims.push_back(std::move(of_array));
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, data,
                       static_cast<int64_t>(dims.back().size()), dims.back().data()});
    is_result ? arrays.AddResult(&buffers.back()) : arrays.AddArg(&buffers.back());
  }

  // The handler's error, or "".
  std::string Run(FakeApi* api, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                  FakeCall* of) {
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = api->get();
    frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(of);
    frame.stage = stage;
    frame.args = arrays.raw_args();
    frame.rets = arrays.raw_results();
    frame.attrs = attributes.raw();
    XLA_FFI_Error* error = handler(&frame);
    const std::string message = error ? error->message : "";
    delete error;
    return message;
  }
};

// ---- The ranks of a world. Small calls, of devices that run many blocks at once, are one kernel.

constexpr int kManyBlocks = 16;  // from this device on

constexpr auto kRequest = XLA_FFI_ExecutionStage_PREPARE;
constexpr auto kMake = XLA_FFI_ExecutionStage_INITIALIZE;
constexpr auto kMove = XLA_FFI_ExecutionStage_EXECUTE;

// The ranks of a world are the second of two groups, on devices that follow those of the first.
// Their communicators are never destroyed: channels know them by their addresses, and a thread may
// wait for a rank that does not come.
struct Job {
  explicit Job(World* of, const char* memory = "window", int first_device = 0)
      : world(of),
        memory(memory),
        first_device(first_device),
        clique(new FakeClique(of->num_ranks)),
        calls(of->num_ranks) {
    for (int r = 0; r < world->num_ranks; ++r) {
      calls[r].device = first_device + world->num_ranks + r;
      calls[r].state = &state;
      calls[r].comm = new FakeComm{clique, (r + 1) % world->num_ranks};  // NCCL counts otherwise
      calls[r].extension = {{sizeof(collectives::Extension), 129, 0, 1, nullptr},
                            &calls[r],
                            &RequestCommunicator,
                            &GetCommunicator};
    }
    const std::string name = world->is_dispatch ? "dispatch" : "combine";
    for (const Target& target : CudaDispatchTargets()) {
      if (target.name == "jax_cp_dispatch." + name + (in_window() ? "_window" : "")) {
        stages = target;
      }
    }
  }

  bool in_window() const { return std::strcmp(memory, "window") == 0; }

  std::string Run(int r, XLA_FFI_ExecutionStage stage) {
    CallFrame frame;
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
    static int64_t run_id = 0;
    if (stage == kMake) ++run_id;
    for (FakeCall& call : calls) call.run_id = run_id;
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
  const char* memory;
  int first_device;
  FakeApi api;
  CallBetweenGpus state;
  FakeClique* clique;
  std::vector<FakeCall> calls;
  Target stages{};
  int64_t deadline_ms = 60'000, buffer = 0, num_partitions = 2 * world->num_ranks;

 private:
  void Write(int r, int32_t* rank, int32_t* group, CallFrame* frame) {
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
    Attributes& attributes = frame->attributes;
    for (auto& [name, list] : lists) attributes.Add(name, list);
    attributes.Add("op", std::string_view(is_dispatch ? "dispatch" : "combine"));
    attributes.Add("axis", std::string_view("cp"));
    attributes.Add("num_ranks", int64_t{n});
    attributes.Add("deadline_ms", deadline_ms);
    attributes.Add("capacity_names", std::string_view());
    std::vector<int64_t> devices, partitions;
    for (int d = 0; d < 2 * n; ++d) devices.push_back(first_device + d);
    for (int64_t d = 0; d < num_partitions; ++d) partitions.push_back(10 + d);
    attributes.Add("device_table", devices);
    attributes.Add("memory", std::string_view(memory));
    attributes.Add("num_comm_sm", int64_t{0});
    attributes.Add("site", int64_t{3});
    if (in_window()) attributes.Add("partitions", partitions);
  }
};

// ---- What is right.

void CheckCalls(int seed) {
  kernels::Rng rng(seed);
  World world = kernels::RandomWorld(rng, seed % 2 == 0);
  Job job(&world, seed % 4 < 2 ? "window" : "devices", seed % 3 == 0 ? 0 : kManyBlocks);
  nccl->blocks = seed % 5 != 0;
  const int allocated = nccl->num_allocated;
  if (job.in_window()) job.Succeed(kRequest);
  for (int run = 0; run < 3; ++run) {  // halves take turns, and memory stays
    job.Succeed(kMake);
    world.Clear();
    job.Succeed(kMove);
    kernels::CheckRows(world);
  }
  nccl->blocks = true;
  CHECK(nccl->num_allocated == allocated + (job.in_window() ? world.num_ranks : 0));
  if (!job.in_window()) return;
  std::vector<std::vector<int64_t>> partitions(2);
  for (int d = 0; d < 2 * world.num_ranks; ++d) partitions[d / world.num_ranks].push_back(10 + d);
  for (const FakeCall& call : job.calls) {
    const std::vector<std::string> all{"request", "get", "get", "get", "get", "get", "get"};
    CHECK(call.asked == all && call.partitions == partitions);
  }
}

// An invalid plan is an error of the next call, and of whoever asks first.
void CheckPlanErrors() {
  kernels::Rng rng(3);
  World world = kernels::RandomWorld(rng, true, 2);
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
  for (const std::string& one : ChannelRegistry::Get().TakeErrors()) all += one;
  CHECK(all.find("rank 1") != std::string::npos);
  CHECK(ChannelRegistry::Get().TakeErrors().empty());
}

// A destroyed buffer serves no call any more, in a window either.
void CheckDestroyedBuffers() {
  kernels::Rng rng(4);
  World world = kernels::RandomWorld(rng, true, 2);
  Job job(&world);
  job.buffer = 7;
  job.Succeed(kMake);
  job.Succeed(kMove);
  ChannelRegistry::Get().Release(7);
  for (const std::string& error : job.Run(kMove)) {
    CHECK(error.find("buffer 7 has been destroyed") != std::string::npos);
  }
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
    {"allocating a channel's state failed: as asked", kMake,
     [](Job*) { fake_allocations_left = 0; }},
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
    {"3 partitions in memory 'window'. Call it through jax_cp_dispatch.", kRequest,
     [](Job* job) { job->num_partitions = 3; }},
};

void CheckFaults() {
  for (const Fault& fault : kFaults) {
    kernels::Rng rng(11);
    World world = kernels::RandomWorld(rng, true, 2);
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
    fake_allocations_left = 1 << 30;
  }
}

// A call whose devices have too little memory leaves none of it taken, nor frees it twice, and may
// be run again.
void CheckFullDevices() {
  kernels::Rng rng(7);
  World world = kernels::RandomWorld(rng, true, 2);
  for (int left = 0; left < 6; ++left) {  // two for each rank's own state, then one of each rank
    Job job(&world, "devices", 100 + 10 * left);
    fake_allocations_left = left;
    CHECK(job.Run(0, kMake).find(": allocating ") != std::string::npos);
    fake_allocations_left = 1 << 30;
    job.Succeed(kMake);
  }
}

// Ranks that register different calls at the same time notice it.
void CheckOtherCalls() {
  kernels::Rng rng(5);
  World one = kernels::RandomWorld(rng, true, 2), two = kernels::RandomWorld(rng, true, 2);
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
  World world = kernels::RandomWorld(rng, false, 3);
  Job job(&world);
  job.Succeed(kMake);
  Job again(&world);
  CHECK(again.Run(0, kMove).find("with another communicator") != std::string::npos);
  again.Succeed(kMake);
  again.Succeed(kMove);
  kernels::CheckRows(world);
}

}  // namespace

cudaError_t NumResidentBlocks(int* num_blocks) {
  *num_blocks = fake_device < kManyBlocks ? 8 : 1000;
  return cudaSuccess;
}

}  // namespace cpd

// `rehearsal [library]`: with the fake of NCCL at this path, all checks. Without, or if it is too
// old, the first stage is refused; prints the message.
int main(int argc, char** argv) {
  using namespace cpd;  // NOLINT
  void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : nullptr;
  CallBetweenGpus::id.type_id = 1;  // as XLA registers it
  if (library == nullptr || !WhyNoNccl().empty()) {
    kernels::Rng rng(0);
    World world = kernels::RandomWorld(rng, true, 2);
    std::puts(Job(&world).Run(0, kRequest).c_str());
    return 0;
  }
  nccl = reinterpret_cast<FakeNccl* (*)()>(dlsym(library, "fake_nccl"))();
  for (int seed = 0; seed < 40; ++seed) CheckCalls(seed);
  CheckPlanErrors();
  CheckDestroyedBuffers();
  CheckFaults();
  CheckFullDevices();
  CheckOtherCalls();
  CheckNewCommunicator();
  std::puts("ok");
}
