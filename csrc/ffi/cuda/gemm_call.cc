// One call of the GEMM handler on a GPU: its attributes, its arrays rank by rank, and the problem
// they describe. Needs no CUDA.
#include "ffi/cuda/gemm_call.h"

#include "ffi/common.h"

namespace ffi = xla::ffi;

namespace cpd {
namespace {

// Whether a buffer for all ranks has a dimension of ranks, or is a single unused element.
bool HoldsRanks(const ffi::AnyBuffer& all, int64_t num_ranks) {
  const auto dims = all.dimensions();
  return (dims.size() > 1 && dims[0] == num_ranks) || NumElements(all) == 1;
}

Status LayScratch(const std::string& op, CudaGemmCall* call) {
  for (const GemmBuffers& of_rank : call->buffers) {
    const int64_t given = NumBytes(of_rank.workspace);
    auto* data = static_cast<char*>(of_rank.workspace.untyped_data());
    const int64_t need = GemmScratch::Lay(call->problem, data, &call->scratch.emplace_back());
    if (given >= need) continue;
    return Status::Invalid(op, ": the workspace has ", given, " bytes but the call needs ", need,
                           ". Call it through jax_cp_dispatch.");
  }
  return Status::Ok();
}

}  // namespace

Status ReadOptions(const ffi::Dictionary& attributes, CudaGemmOptions* options) {
  AttributeReader reader(attributes);
  ReadOptions(&reader, &options->call);
  options->Read(&reader);
  reader.Read("gemm_priority", &options->gemm_priority);
  reader.Read("comm_priority", &options->comm_priority);
  reader.Read("set_sm_margin", &options->set_sm_margin);
  reader.Read("tf32", &options->tf32);
  reader.Read("use_split_accumulator", &options->use_split_accumulator);
  return reader.Finish();
}

BufferView::BufferView(const ffi::AnyBuffer& all, int64_t rank, int64_t num_ranks)
    : raw_(std::make_unique<XLA_FFI_Buffer>()) {
  const auto dims = all.dimensions();
  dims_.assign(dims.begin(), dims.end());
  int64_t offset = 0;
  // An unused array is one element for all ranks together.
  if (dims_.size() > 1 && dims_[0] == num_ranks) {
    dims_.erase(dims_.begin());
    offset = rank * (NumBytes(all) / num_ranks);
  }
  *raw_ = {};
  raw_->struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  raw_->dtype = static_cast<XLA_FFI_DataType>(all.element_type());
  raw_->data = static_cast<char*>(all.untyped_data()) + offset;
  raw_->rank = static_cast<int64_t>(dims_.size());
  raw_->dims = dims_.data();
}

std::string CudaGemmOptions::op() const { return overlaps() ? call.OverAxis() : call.op; }

Status CheckRanksOnGpu(const std::string& op, const CudaGemmOptions& options) {
  if (options.num_ranks() < 1) return NotOurs(op, "there are no ranks");
  if (options.num_ranks() <= kernels::kMaxRanks) return Status::Ok();
  return Status::Invalid(op, ": on GPUs at most ", kernels::kMaxRanks,
                         " ranks overlap. Pass implementation='xla'.");
}

Status ReadGemmCall(const std::string& op, const CudaGemmOptions& options,
                    const ffi::RemainingArgs& args, const ffi::RemainingRets& results,
                    bool has_all_ranks, CudaGemmCall* call) {
  std::vector<ffi::AnyBuffer> all;
  Status status = ReadArrays(op, args, results, &all);
  if (!status.ok()) return status;
  const int64_t num_local = has_all_ranks ? options.num_ranks() : 1;
  for (const ffi::AnyBuffer& buffer : all) {
    if (!has_all_ranks || HoldsRanks(buffer, num_local)) continue;
    return NotOurs(op, "one has no dimension of ranks");
  }
  for (int64_t rank = 0; rank < num_local; ++rank) {
    std::vector<ffi::AnyBuffer> own = all;
    for (ffi::AnyBuffer& buffer : own) {
      if (has_all_ranks) buffer = call->views.emplace_back(buffer, rank, num_local).get();
    }
    call->buffers.push_back(BuffersOf(own));
  }
  GemmOptions described = options.call;
  described.comm_overlap_id = -1;  // the workspace is scratch, not a buffer
  const GemmBuffers& first = call->buffers[0];
  status = Describe(op, described, first, &call->problem);
  if (!status.ok()) return status;
  if (call->problem.scaling == Scaling::kBlocks) {
    if (options.overlaps()) {
      return Status::Invalid(op,
                             ": on GPUs products with MXFP8 do not overlap. Pass "
                             "implementation='xla'.");
    }
    if (first.lhs_swizzled.element_type() != ffi::U8 ||
        first.rhs_swizzled.element_type() != ffi::U8) {
      return NotOurs(op, "there is no space for swizzled scales");
    }
  }
  return LayScratch(op, call);
}

}  // namespace cpd
