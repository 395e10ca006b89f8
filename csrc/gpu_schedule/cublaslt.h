// cuBLASLt, opened on first use, and a cache of its algorithms.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gpu_schedule/lt_product.h"
#include "transport/transport.h"

namespace cpd {

// The resources of a device that a product uses.
struct LtResources {
  int device = 0;
  char* workspace = nullptr;  // aligned to 256 bytes; for one product at a time
  int64_t workspace_bytes = 0;
  lt::Stream stream = nullptr;
};

// All functions are thread-safe.
class CublasLt {
 public:
  static CublasLt& Get();  // never destroyed: CUDA may have been unloaded by then

  // Opens the library: by name, as JAX does, or from `path` in tests.
  Status Open(const std::string& op, const char* path = nullptr);

  // Opens the library and creates the handle of the current device. Both allocate, so call this
  // before any recording.
  Status Prepare(const std::string& op, int device);

  // Enqueues the product on the stream, with the algorithm that was first chosen for its shape, on
  // the current device. If the library has none, fails and enqueues nothing; if given, `is_missing`
  // tells whether that is why.
  Status Multiply(const std::string& op, const LtProduct& product, const LtResources& resources,
                  bool* is_missing = nullptr);

  int64_t num_chosen();  // cached algorithms

 private:
  struct Chosen {
    lt::Algorithm algorithm;
    int64_t workspace_bytes;
    std::string missing;  // why there is none; else empty
  };
  class Descriptors;

  Status HandleOf(const std::string& op, int device, lt::Handle* handle);
  Chosen Choose(lt::Handle handle, const LtProduct& product, const Descriptors& descriptors,
                const LtResources& resources);

  std::mutex mutex_;
  bool is_open_ = false;
  lt::Functions functions_ = {};
  std::map<int, lt::Handle> handles_;  // by device
  std::map<std::vector<int64_t>, Chosen> chosen_;
};

}  // namespace cpd
