// The description of a product for cuBLASLt.
#include "gpu_schedule/lt_product.h"

#include <optional>

namespace cpd {
namespace {

std::optional<lt::Type> TypeOf(DataType type) {
  switch (type) {
    case DataType::kE4M3:
      return lt::kR8FE4M3;
    case DataType::kE5M2:
      return lt::kR8FE5M2;
    case DataType::kBF16:
      return lt::kR16BF;
    case DataType::kF16:
      return lt::kR16F;
    case DataType::kF32:
      return lt::kR32F;
    default:
      return std::nullopt;
  }
}

// The table of types in cublasLtMatmul(): operands of one type give this type or float32; 8-bit
// operands may differ, and give any wider type.
bool HasTypes(DataType a, DataType b, DataType c) {
  if (IsByteFloat(a) && IsByteFloat(b)) {
    const bool is_wider = c == DataType::kBF16 || c == DataType::kF16 || c == DataType::kF32;
    return is_wider && !(a == DataType::kE5M2 && b == a);
  }
  return a == b && TypeOf(a) && (c == a || c == DataType::kF32);
}

LtMatrix Lay(const Matrix& matrix, int64_t rows, int64_t columns) {
  // Lines of the matrix are columns for cuBLASLt.
  const auto num_lines = static_cast<uint64_t>(matrix.transposed ? columns : rows);
  const auto length = static_cast<uint64_t>(matrix.transposed ? rows : columns);
  return {TypeOf(matrix.type).value_or(lt::kR32F),
          length,
          num_lines,
          matrix.pitch,
          matrix.data,
          matrix.scales.data};
}

}  // namespace

int AlignmentOf(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<int>(bits & -bits);
}

bool LtHasEpilogue(const GemmTask& task) {
  const Epilogue& e = task.epilogue;
  if (e.is_empty()) return true;
  if (IsByteFloat(task.a.type)) return !e.gelu && task.c_type != DataType::kF32;
  if (task.c_type != task.a.type) return false;
  if (!e.gelu) return true;
  // Its tanh may be an approximation with fewer bits than float32.
  if (task.c_type == DataType::kF32) return false;
  const char* aux = e.gelu_input ? e.gelu_input : e.pre_gelu;
  if (e.gelu_input && e.bias) return false;
  return aux == nullptr || (task.c_pitch % 8 == 0 && AlignmentOf(aux) >= 16);
}

std::vector<int64_t> LtProduct::Key() const {
  std::vector<int64_t> key{compute_type,      transposes_a,     transposes_b,     has_block_scales,
                           accumulates_fast,  epilogue,         aux_pitch,        num_sms,
                           AlignmentOf(bias), AlignmentOf(aux), ignores_alignment};
  for (const LtMatrix* x : {&a, &b, &d}) {
    for (const int64_t number :
         {static_cast<int64_t>(x->type), static_cast<int64_t>(x->rows),
          static_cast<int64_t>(x->columns), x->pitch, static_cast<int64_t>(AlignmentOf(x->data))}) {
      key.push_back(number);
    }
  }
  return key;
}

Status DescribeLtProduct(const std::string& op, const GemmTask& task, const LtOptions& options,
                         LtProduct* product) {
  const auto refuse = [&](const std::string& what) {
    return Status::Invalid(op, ": on GPUs ", what, ". Pass implementation='xla'.");
  };
  if (!task.more.empty()) return refuse("a product cannot read the operands of several ranks");
  const bool is_narrow = IsByteFloat(task.a.type);
  const DataType c_type = LtHasEpilogue(task) ? task.c_type : DataType::kF32;
  if (!HasTypes(task.a.type, task.b.type, c_type)) {
    return refuse("cuBLASLt does not support these types of operands and result");
  }
  LtProduct& p = *product;
  p = {};
  p.a = Lay(task.b, task.k, task.n);
  p.b = Lay(task.a, task.m, task.k);
  p.transposes_a = task.b.transposed;
  p.transposes_b = task.a.transposed;
  p.d = {TypeOf(c_type).value_or(lt::kR32F),
         static_cast<uint64_t>(task.n),
         static_cast<uint64_t>(task.m),
         task.c_pitch,
         task.c,
         nullptr};
  p.num_sms = options.num_sms;
  if (options.tf32 && task.a.type == DataType::kF32) p.compute_type = lt::kCompute32FFastTF32;
  if (is_narrow) {
    p.has_block_scales = task.a.scales.is_blocks;
    p.accumulates_fast = !options.use_split_accumulator;
    if (!p.transposes_a || p.transposes_b) {
      return refuse("8-bit operands need the contracted dimension to be the last of each");
    }
    if (task.k % 16 != 0 || task.n % 16 != 0 || AlignmentOf(task.a.data) < 16 ||
        AlignmentOf(task.b.data) < 16 || AlignmentOf(task.c) < 16) {
      return refuse("8-bit operands need contracted sizes and columns in multiples of 16, here " +
                    std::to_string(task.k) + " and " + std::to_string(task.n));
    }
  }
  if (task.epilogue.is_empty() || !LtHasEpilogue(task)) return Status::Ok();
  const Epilogue& e = task.epilogue;
  p.epilogue = e.bias ? uint32_t{lt::kBias} : 0;
  p.bias = e.bias;
  if (!e.gelu) return Status::Ok();
  p.aux = e.gelu_input ? e.gelu_input : e.pre_gelu;
  p.aux_pitch = p.aux ? task.c_pitch : 0;
  p.epilogue |= e.gelu_input ? lt::kDGelu : lt::kGelu;
  if (p.aux) p.epilogue |= lt::kAux;
  return Status::Ok();
}

}  // namespace cpd
