// A world whose ranks share one device and one launch: their plans and arrays are consecutive.
#pragma once

#include <vector>

#include "device_world.h"

namespace cpd::kernels {

// The memory of all ranks of a world, for its plans and arrays at the time.
struct OneLaunch {
  struct Fields {
    Seen<int32_t> num_recv_tokens, seq_len, dst_rank, src_offset;
    Seen<int64_t> dst_offset;
  };
  std::vector<Fields> fields;         // [group]
  std::vector<Seen<char>> in, out;    // [array]
  std::vector<Seen<uint64_t>> local;  // one
  Call call{};

  explicit OneLaunch(World& world) : call(world.MakeCall(0)) {
    call.num_local = world.num_ranks;
    fields.resize(world.groups.size());
    for (size_t p = 0; p < world.groups.size(); ++p) Append(world, p);
    LayOutChannel(&call);
    local.emplace_back(LayOutLocal(&call) / 8 + 1);
    call.local = reinterpret_cast<char*>(local[0].data());
    call.errors = world.errors.data();
  }
  OneLaunch(const OneLaunch&) = delete;

  // Fills the results with poison.
  void Clear() {
    for (auto& rows : out) std::memset(rows.data(), 0x7f, rows.size());
  }

  // Copies the results to those of the world's ranks.
  void Store(World* world) const {
    size_t at = 0;
    for (World::Made& group : world->groups) {
      for (auto& ranks : group.out) {
        const char* from = out[at++].data();
        for (auto& rows : ranks) {
          std::memcpy(rows.data(), from, rows.size());
          from += rows.size();
        }
      }
    }
  }

 private:
  template <typename All, typename One>
  static void Add(All* all, const One& one) {
    all->insert(all->end(), one.begin(), one.end());
  }

  void Append(const World& world, size_t p) {
    const World::Made& made = world.groups[p];
    OperandGroup& group = call.groups[p];
    Fields& all = fields[p];
    for (const Plan& plan : made.plans) {
      Add(&all.num_recv_tokens, plan.num_recv_tokens);
      Add(&all.seq_len, plan.seq_len);
      Add(&all.dst_rank, plan.dst_rank);
      Add(&all.dst_offset, plan.dst_offset);
      Add(&all.src_offset, plan.src_offset);
    }
    group.num_recv_tokens.data = all.num_recv_tokens.data();
    group.seq_len.data = all.seq_len.data();
    group.dst_rank.data = all.dst_rank.data();
    group.dst_offset.data = all.dst_offset.data();
    if (group.src_offset) group.src_offset.data = all.src_offset.data();
    group.has_all_views = true;
    for (size_t a = 0; a < made.x.size(); ++a) {
      in.emplace_back();
      out.emplace_back();
      for (const auto& rows : made.x[a]) Add(&in.back(), rows);
      for (const auto& rows : made.out[a]) Add(&out.back(), rows);
      Array& array = call.arrays[group.first_array + a];
      array.in = in.back().data();
      array.out = out.back().data();
    }
  }
};

}  // namespace cpd::kernels
