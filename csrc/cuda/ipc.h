// Slabs of memory that other processes of the same host map through CUDA IPC handles.
#pragma once

#include <cstdint>
#include <string>

#include "transport/transport.h"

namespace cpd {

Status MakeIpcSlab(int device, int64_t bytes, uint64_t* address, std::string* handle);
Status OpenIpcSlab(int device, const std::string& handle, uint64_t* address);
// Undo these; other processes close a slab before its own process frees it.
Status CloseIpcSlab(int device, uint64_t address);
Status FreeIpcSlab(int device, uint64_t address);

}  // namespace cpd
