// What both modules have: handlers by name, recorded spans, the version of XLA's interface.
#pragma once

#include <utility>
#include <vector>

#include "ffi/common.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "transport/team.h"

namespace cpd {

inline void BindTargets(nanobind::module_& m, std::vector<std::vector<Target>> all) {
  m.def(
      "registrations",
      [all = std::move(all)] {
        nanobind::dict targets;
        for (const std::vector<Target>& of_file : all) {
          for (const Target& target : of_file) {
            nanobind::dict stages;
            for (const auto& [stage, handler] : {std::pair{"instantiate", target.instantiate},
                                                 {"prepare", target.prepare},
                                                 {"initialize", target.initialize},
                                                 {"execute", target.execute}}) {
              if (handler == nullptr) continue;
              stages[stage] = nanobind::capsule(reinterpret_cast<void*>(handler));
            }
            targets[target.name] = stages;
          }
        }
        return targets;
      },
      "Target name -> stage name -> handler capsule.");
  m.def(
      "ffi_api_version", [] { return nanobind::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers that this was built with.");
}

template <typename Recorder>
void BindSpans(nanobind::module_& m) {
  m.def("start_spans", [] { Recorder::Get().Start(); });
  m.def(
      "stop_spans",
      [] {
        std::vector<RecordedSpan> recorded;
        {
          nanobind::gil_scoped_release release;  // it may wait for devices
          recorded = Recorder::Get().Stop();
        }
        nanobind::list spans;
        for (const RecordedSpan& span : recorded) {
          spans.append(nanobind::make_tuple(span.op, span.group, span.rank,
                                            span.kind == SpanKind::kCommunication, span.name,
                                            span.start_ns, span.duration_ns));
        }
        return spans;
      },
      "Returns (op, group, rank, is_communication, name, start in ns, duration in ns) of each.");
}

}  // namespace cpd
