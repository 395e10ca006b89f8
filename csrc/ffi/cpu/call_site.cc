// Where a custom call is in its program: there its ranks meet.
#include "ffi/cpu/call_site.h"

#include <algorithm>
#include <atomic>
#include <map>

#include "transport/transports.h"

namespace cpd {
namespace {

// Call sites of the programs that are being compiled, by signature. XLA creates those of a program
// in an order that depends only on the program.
std::mutex call_sites_mutex;
auto& num_call_sites = *new std::map<std::string, uint64_t>;

uint64_t NumberAmongEquals(const std::string& signature) {
  std::lock_guard<std::mutex> lock(call_sites_mutex);
  return num_call_sites[signature]++;
}

}  // namespace

void CallSite::Read(AttributeReader* attributes, int64_t num_ranks) {
  std::vector<int64_t> processes;
  attributes->Read("transport", &transport_);
  attributes->Read("signature", &signature_);
  attributes->Read("processes", &processes);
  static std::atomic<int64_t> next_uid{1};
  uid_ = processes.empty() ? next_uid++
                           : static_cast<int64_t>(HashOf(
                                 signature_ + "/" + std::to_string(NumberAmongEquals(signature_))));
  const auto group_size = static_cast<size_t>(std::max<int64_t>(num_ranks, 1));
  for (size_t i = 0; group_size <= processes.size() - i; i += group_size) {
    processes_.emplace_back(processes.begin() + i, processes.begin() + i + group_size);
  }
}

void EndPrograms() {
  std::lock_guard<std::mutex> lock(call_sites_mutex);
  num_call_sites.clear();
}

Status CallSite::Describe(const CallingRank& calling, Exchange* exchange,
                          Transport** transport) const {
  const int64_t group = calling.group;
  exchange->key = {calling.run_id, uid_, group};
  exchange->signature = signature_;
  if (transport_ == "in_process") {
    *transport = &InProcessTransport();
    return Status::Ok();
  }
  if (transport_ != "shared_memory") {
    return Status::Invalid(exchange->op, ": there is no transport '", transport_,
                           "' between CPU devices. Call it through jax_cp_dispatch.");
  }
  if (group < 0 || group >= static_cast<int64_t>(processes_.size())) {
    return Status::Invalid(exchange->op, ": this rank is in group ", group,
                           " but the program is for ", processes_.size(),
                           " groups. Every other mesh axis must be manual where this is called.");
  }
  exchange->processes = &processes_[group];
  *transport = SharedMemoryTransport();
  if (*transport != nullptr) return Status::Ok();
  return Status::Invalid(
      exchange->op,
      ": the program spans processes, but this process has not joined the others. Call "
      "jax_cp_dispatch.initialize() before the program is compiled.");
}

}  // namespace cpd
