// Memory of several GPUs of this process, which read and write each other's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// A GPU: the number of its process, and in this process CUDA's number of the GPU.
struct DeviceEntry {
  int64_t process;
  int device;

  static DeviceEntry From(int64_t packed) {
    return {packed >> 16, static_cast<int>(packed & 0xffff)};
  }
};

// Memory on GPUs of this process. For N ranks on one GPU, N blocks there.
Status AllocateOnDevices(const std::string& op, const std::vector<DeviceEntry>& devices,
                         int64_t bytes, std::vector<char*>* memory);
// Clears memory of the current device.
Status ClearOnDevice(const std::string& op, char* memory, int64_t bytes);
void FreeOnDevices(const std::vector<DeviceEntry>& devices, const std::vector<char*>& memory);

}  // namespace cpd
