#include "kvprism/backend/blocking_client.h"

namespace kvprism {

BlockingClient::~BlockingClient() = default;

}  // namespace kvprism
