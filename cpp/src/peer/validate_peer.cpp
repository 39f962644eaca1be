#include "kvprism/peer/validate_peer.h"

#include <string>

namespace kvprism {

std::vector<Problem> validate_peer(const Projection& projection) {
  ProblemList problems;
  if (projection.num_transfer_groups() == 0) {
    problems.add("groups", "none is transferable", "at least one group to transfer",
                 "set enable_kv_transfer of what a peer needs");
  }
  for (const TransferIndex index : indices<TransferIndex>(projection.num_transfer_groups())) {
    const ResolvedGroup& group = projection.group(index);
    if (group.traits.peer != PeerRule::kNone) continue;
    problems.add("groups[" + std::to_string(raw(group.id)) + "].enable_kv_transfer", "true",
                 "false for kind '" + group.spec.kind + "'", "nothing of it travels to a peer");
  }
  return problems.problems();
}

}  // namespace kvprism
