// Reads the attributes of a custom call by name.
#include "ffi/attributes.h"

namespace cpd {

void AttributeReader::Read(std::string_view name, std::string* value) {
  std::string_view text;
  Read(name, &text);
  *value = text;
}

void AttributeReader::Read(std::string_view name, std::vector<int64_t>* value) {
  Counts counts;
  Read(name, &counts);
  value->assign(counts.begin(), counts.end());
}

Status AttributeReader::Finish() const {
  if (wrong_.empty() && attributes_.size() == num_read_) return Status::Ok();
  const std::string what = wrong_.empty()
                               ? std::to_string(attributes_.size()) + " were given instead of " +
                                     std::to_string(num_read_)
                               : std::string(wrong_) + " is missing or has another type";
  return Status::Invalid(
      "jax_cp_dispatch: the attributes are not those of this version's primitives: ", what,
      ". Call it through jax_cp_dispatch.");
}

void RankOptions::Read(AttributeReader* attributes) {
  attributes->Read("op", &op);
  attributes->Read("axis", &axis);
  attributes->Read("num_ranks", &num_ranks);
  attributes->Read("deadline_ms", &deadline_ms);
}

}  // namespace cpd
