// Mooncake's own functions on lists made before: what a program costs that knows nothing of us.
#pragma once

#include <string>
#include <vector>

#include "kvprism/backend/mooncake_client.h"
#include "kvprism/io/object_store.h"
#include "mooncake/library.h"

namespace kvprism::bench {

// The lists of one call.
struct NativeBatch {
  explicit NativeBatch(const ObjectBatch& batch);

  mooncake::Strings keys;
  mooncake::BufferLists buffers;
  mooncake::LengthLists lengths;
};

// A client of its own beside ours, in the same library. Ends the program when a call fails.
class NativeStore {
 public:
  NativeStore(const MooncakeOptions& options, const std::vector<Region>& regions);
  ~NativeStore();
  NativeStore(const NativeStore&) = delete;
  NativeStore& operator=(const NativeStore&) = delete;

  void put(const NativeBatch& batch);
  void get(const NativeBatch& batch);

 private:
  const mooncake::StoreFunctions& functions_;
  std::shared_ptr<mooncake::NativeClient> client_;
};

}  // namespace kvprism::bench
