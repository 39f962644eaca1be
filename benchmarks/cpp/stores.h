// Saves and loads of a worker against the store's bare calls on prebuilt batches, and against
// memcpy.
#pragma once

#include <string>

#include "pairs.h"

namespace kvprism::bench {

void memory_store(Pairs& pairs);
// A real Mooncake, whose master listens at "host:port".
void mooncake_store(Pairs& pairs, const std::string& master);

}  // namespace kvprism::bench
