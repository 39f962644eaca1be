// A client whose calls block: what backend/blocking_store turns into an asynchronous store.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvprism/base/export.h"
#include "kvprism/io/object_store.h"

namespace kvprism {

// What a returned call left behind.
struct CallEnd {
  // False when the call gave up while native code may go on reading or writing the batch's memory
  // (Mooncake waits 60 s and does not cancel). Then the client counts as broken.
  bool quiet = true;
  // The client will not work again and must be replaced ("illegal client", a clogged queue).
  bool broken = false;
  // The service did not answer; the client may work again when it does.
  bool unreachable = false;
};

// One connection to a store. Calls of different kinds may come from different threads at once.
class KVPRISM_API BlockingClient {
 public:
  virtual ~BlockingClient();

  virtual StoreCapabilities capabilities() const = 0;
  virtual CallEnd exists(const ObjectBatch& batch, std::span<ItemResult> results) noexcept = 0;
  // As ObjectIndex::start_remove. A client that cannot remove answers kInvalid.
  virtual CallEnd remove(const ObjectBatch& batch, const Removal& removal,
                         std::span<ItemResult> results) noexcept;
  virtual CallEnd put(const ObjectBatch& batch, std::span<ItemResult> results) noexcept = 0;
  virtual CallEnd get(const ObjectBatch& batch, std::span<ItemResult> results) noexcept = 0;

  // Throws Error naming the region and the native code.
  virtual void register_region(const Region& region) = 0;
  // Nothing happens to a region that this client does not have: one that was made meanwhile.
  virtual void unregister_region(const Region& region) noexcept = 0;

  // After it has returned no native call touches any region of this client. May take seconds, or
  // hang with a hung peer.
  virtual void tear_down() noexcept = 0;
};

// Makes a connected client, or throws Error. Called again whenever a broken client is replaced.
using BlockingClientFactory = std::function<std::unique_ptr<BlockingClient>()>;

}  // namespace kvprism
