// cuBLASLt, opened when it is first needed, and the algorithms that it has chosen.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gpu_schedule/lt_product.h"
#include "transport/transport.h"

namespace cpd {

// What a product uses of a device.
struct LtResources {
  int device = 0;
  char* workspace = nullptr;  // aligned to 256 bytes; of one product at a time
  int64_t workspace_bytes = 0;
  lt::Stream stream = nullptr;
};

// All functions may be called from any thread.
class CublasLt {
 public:
  static CublasLt& Get();  // never destroyed: CUDA may be gone by then

  // Opens the library; `path` is for tests, else it is found by its name, like JAX's own.
  Status Open(const std::string& op, const char* path = nullptr);

  // Opens it and makes the handle of a device, which is current: both allocate, so they come before
  // anything is recorded.
  Status Prepare(const std::string& op, int device);

  // Puts the product on the stream, with the algorithm that is first chosen for its shape. The
  // device is current.
  Status Multiply(const std::string& op, const LtProduct& product, const LtResources& resources);

  int64_t num_chosen();  // algorithms so far

 private:
  struct Chosen {
    lt::Algorithm algorithm;
    int64_t workspace_bytes;
  };
  class Descriptors;

  Status HandleOf(const std::string& op, int device, lt::Handle* handle);
  Status Choose(const std::string& op, lt::Handle handle, const LtProduct& product,
                const Descriptors& descriptors, const LtResources& resources, Chosen* chosen);

  std::mutex mutex_;
  bool is_open_ = false;
  lt::Functions functions_ = {};
  std::map<int, lt::Handle> handles_;  // by device
  std::map<std::vector<int64_t>, Chosen> chosen_;
};

}  // namespace cpd
