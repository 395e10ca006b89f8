// Compares what csrc/ffi/cuda/nccl_window.h declares of XLA's collectives extension with XLA's own
// headers. Compiled only, with headers of jaxlib 0.11.2 or newer.
#include "ffi/cuda/nccl_window.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace ours = cpd::collectives;

#define SAME_PLACE(our_struct, our_field, their_struct, their_field)                     \
  static_assert(offsetof(our_struct, our_field) == offsetof(their_struct, their_field)); \
  static_assert(sizeof(our_struct::our_field) == sizeof(their_struct::their_field));     \
  static_assert(std::is_pointer_v<decltype(our_struct::our_field)> ==                    \
                std::is_pointer_v<decltype(their_struct::their_field)>)

static_assert(ours::kExtension == XLA_FFI_Extension_Collectives);
static_assert(ours::kMajorVersion == XLA_FFI_Extension_Collectives_MajorVersion);
static_assert(ours::kLeastMinorVersion <= XLA_FFI_Extension_Collectives_MinorVersion);
static_assert(ours::kFlattenedId == XLA_FFI_GROUP_FLATTENED_ID);

static_assert(ours::kFindOffset == offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension));
static_assert(sizeof(ours::FindArgs) == XLA_FFI_InvokeContext_FindExtension_Args_STRUCT_SIZE);
SAME_PLACE(ours::FindArgs, extension_start, XLA_FFI_InvokeContext_FindExtension_Args,
           extension_start);
SAME_PLACE(ours::FindArgs, ctx, XLA_FFI_InvokeContext_FindExtension_Args, ctx);
SAME_PLACE(ours::FindArgs, type, XLA_FFI_InvokeContext_FindExtension_Args, extension_type);
SAME_PLACE(ours::FindArgs, extension, XLA_FFI_InvokeContext_FindExtension_Args, extension);

static_assert(sizeof(ours::ExtensionBase) == sizeof(XLA_FFI_Extension));
static_assert(offsetof(ours::ExtensionBase, major_version) ==
              offsetof(XLA_FFI_Extension, id) + offsetof(XLA_FFI_ExtensionId, major_version));
static_assert(offsetof(ours::ExtensionBase, minor_version) ==
              offsetof(XLA_FFI_Extension, id) + offsetof(XLA_FFI_ExtensionId, minor_version));
SAME_PLACE(ours::ExtensionBase, next, XLA_FFI_Extension, next);
SAME_PLACE(ours::Extension, state, XLA_FFI_Collectives_Extension, state);
SAME_PLACE(ours::Extension, request_communicator, XLA_FFI_Collectives_Extension,
           request_communicator);
SAME_PLACE(ours::Extension, get_communicator, XLA_FFI_Collectives_Extension, get_communicator);
static_assert(sizeof(ours::Extension) <= XLA_FFI_Collectives_Extension_STRUCT_SIZE);

static_assert(sizeof(ours::Group) == sizeof(XLA_FFI_ReplicaGroup));
SAME_PLACE(ours::Group, size, XLA_FFI_ReplicaGroup, size);
static_assert(sizeof(ours::Args) == XLA_FFI_Communicator_Get_Args_STRUCT_SIZE);
static_assert(offsetof(ours::Args, communicator) == XLA_FFI_Communicator_Request_Args_STRUCT_SIZE);
SAME_PLACE(ours::Args, extension_start, XLA_FFI_Communicator_Request_Args, extension_start);
SAME_PLACE(ours::Args, group_mode, XLA_FFI_Communicator_Request_Args, group_mode);
SAME_PLACE(ours::Args, groups, XLA_FFI_Communicator_Request_Args, groups);
SAME_PLACE(ours::Args, num_groups, XLA_FFI_Communicator_Request_Args, num_groups);
SAME_PLACE(ours::Args, communication_id, XLA_FFI_Communicator_Request_Args, communication_id);
SAME_PLACE(ours::Args, group_mode, XLA_FFI_Communicator_Get_Args, group_mode);
SAME_PLACE(ours::Args, groups, XLA_FFI_Communicator_Get_Args, groups);
SAME_PLACE(ours::Args, communication_id, XLA_FFI_Communicator_Get_Args, communication_id);
SAME_PLACE(ours::Args, communicator, XLA_FFI_Communicator_Get_Args, communicator);
