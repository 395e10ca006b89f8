// Plain values to bytes and back, for messages between processes of one host.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace cpd {

class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void PutText(std::string_view text) {
    Put<int64_t>(text.size());
    bytes_.append(text);
  }

  std::string Finish() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Every read returns whether there were enough bytes.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  bool Get(T* value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return true;
  }

  bool GetText(std::string_view* text) {
    int64_t size = 0;
    if (!Get(&size) || size < 0 || size > num_left()) return false;
    *text = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
  }

  int64_t num_left() const { return static_cast<int64_t>(bytes_.size()); }
  std::string_view rest() const { return bytes_; }

 private:
  std::string_view bytes_;
};

}  // namespace cpd
