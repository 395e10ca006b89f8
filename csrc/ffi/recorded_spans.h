// Recorded spans in the form that Python receives.
#pragma once

#include <vector>

#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "transport/spans.h"

namespace cpd {

// (op, group, rank, is_communication, name, start in ns, duration in ns)
inline nanobind::list ToPython(const std::vector<RecordedSpan>& recorded) {
  nanobind::list spans;
  for (const RecordedSpan& span : recorded) {
    spans.append(nanobind::make_tuple(span.op, span.group, span.rank,
                                      span.kind == SpanKind::kCommunication, span.name,
                                      span.start_ns, span.duration_ns));
  }
  return spans;
}

}  // namespace cpd
