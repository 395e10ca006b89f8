// The frame in which XLA passes arrays and attributes to a handler.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace cpd {

// Operands and results, in their order.
class Frame {
 public:
  void AddArg(XLA_FFI_Buffer* buffer) { args_.push_back(buffer); }
  void AddResult(XLA_FFI_Buffer* buffer) { rets_.push_back(buffer); }

  XLA_FFI_Args raw_args() {
    arg_types_.assign(args_.size(), XLA_FFI_ArgType_BUFFER);
    return {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args_.size()),
            arg_types_.data(), args_.data()};
  }
  XLA_FFI_Rets raw_results() {
    ret_types_.assign(rets_.size(), XLA_FFI_RetType_BUFFER);
    return {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets_.size()),
            ret_types_.data(), rets_.data()};
  }
  xla::ffi::RemainingArgs args() { return {&(raw_args_ = raw_args()), 0}; }
  xla::ffi::RemainingRets results() { return {&(raw_rets_ = raw_results()), 0}; }

 private:
  std::vector<void*> args_, rets_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
  XLA_FFI_Args raw_args_;
  XLA_FFI_Rets raw_rets_;
};

// Attributes, sorted by name, each with a type: that of its value, or what `type_of` makes of it.
class Attributes {
 public:
  using TypeOf = std::function<XLA_FFI_DataType(XLA_FFI_DataType)>;

  explicit Attributes(TypeOf type_of = [](XLA_FFI_DataType type) { return type; })
      : type_of_(std::move(type_of)) {}

  void Add(const char* name, int64_t value) { AddScalar(name, XLA_FFI_DataType_S64, value); }
  void Add(const char* name, bool value) { AddScalar(name, XLA_FFI_DataType_PRED, value); }
  void Add(const char* name, std::string_view value) {
    spans_.push_back({value.data(), value.size()});
    Append(name, XLA_FFI_AttrType_STRING, &spans_.back());
  }
  void Add(const char* name, std::vector<int64_t> value) {
    numbers_.push_back(std::move(value));
    arrays_.push_back(
        {type_of_(XLA_FFI_DataType_S64), numbers_.back().size(), numbers_.back().data()});
    Append(name, XLA_FFI_AttrType_ARRAY, &arrays_.back());
  }

  size_t size() const { return all_.size(); }
  void Remove(size_t i) { all_.erase(all_.begin() + i); }

  XLA_FFI_Attrs raw() {
    std::sort(all_.begin(), all_.end(),
              [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
    names_.clear(), types_.clear(), values_.clear();
    for (Attribute& attribute : all_) {
      attribute.span = {attribute.name.data(), attribute.name.size()};
      names_.push_back(&attribute.span);
      types_.push_back(attribute.type);
      values_.push_back(attribute.value);
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(all_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  struct Attribute {
    std::string name;
    XLA_FFI_AttrType type;
    void* value;
    XLA_FFI_ByteSpan span;
  };

  void AddScalar(const char* name, XLA_FFI_DataType type, int64_t value) {
    numbers_.push_back({value});
    scalars_.push_back({type_of_(type), numbers_.back().data()});
    Append(name, XLA_FFI_AttrType_SCALAR, &scalars_.back());
  }
  void Append(const char* name, XLA_FFI_AttrType type, void* value) {
    all_.push_back({name, type, value, {}});
  }

  const TypeOf type_of_;
  std::vector<Attribute> all_;
  std::deque<std::vector<int64_t>> numbers_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
};

}  // namespace cpd
