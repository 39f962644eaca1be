#include "kvprism/backend/blocking_client.h"

#include <algorithm>

namespace kvprism {

BlockingClient::~BlockingClient() = default;

CallEnd BlockingClient::remove(const ObjectBatch&, const Removal&,
                               std::span<ItemResult> results) noexcept {
  std::fill(results.begin(), results.end(), ItemResult{ItemStatus::kInvalid, 0});
  return {};
}

}  // namespace kvprism
