// The Mooncake client apart from what finds its library and its master.
#pragma once

#include <memory>

#include "kvprism/backend/blocking_client.h"
#include "kvprism/backend/mooncake_client.h"
#include "mooncake/library.h"
#include "preflight.h"

namespace kvprism::detail {

// A connected client. `master` asks whether the one that `options` name accepts connections.
std::unique_ptr<BlockingClient> make_mooncake_client(const mooncake::Library& library,
                                                     const MooncakeOptions& options,
                                                     std::shared_ptr<Knock> master);

// As mooncake_client_factory, with the resolver of the master's name.
BlockingClientFactory mooncake_client_factory(MooncakeOptions options, Knock::LookUp look_up);

}  // namespace kvprism::detail
