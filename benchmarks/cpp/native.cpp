#include "native.h"

#include <cstdio>
#include <cstdlib>

namespace kvprism::bench {
namespace {

[[noreturn]] void stop(const char* what, long code) {
  std::fprintf(stderr, "core_bench: %s returned %ld\n", what, code);
  std::exit(1);
}

// The library is open already: our own client did it, with the environment that it needs.
const mooncake::StoreFunctions& functions_of(const MooncakeOptions& options) {
  mooncake::OpenRequest request;
  request.path = find_mooncake_library(options);
  return mooncake::open_library(request).store;
}

// Below 0 is an error; what a get returns else is a count of bytes.
void check(const char* what, const std::vector<int>& codes, std::size_t items) {
  if (codes.size() != items) stop(what, static_cast<long>(codes.size()));
  for (const int code : codes) {
    if (code < 0) stop(what, code);
  }
}

}  // namespace

NativeBatch::NativeBatch(const ObjectBatch& batch) {
  std::size_t segment = 0;
  for (std::uint32_t item = 0; item < batch.keys.size(); ++item) {
    keys.push_back(batch.keys[item]);
    buffers.emplace_back();
    lengths.emplace_back();
    for (; segment < batch.ends[item]; ++segment) {
      buffers.back().push_back(batch.segments[segment].base);
      lengths.back().push_back(batch.segments[segment].length);
    }
  }
}

NativeStore::NativeStore(const MooncakeOptions& options, const std::vector<Region>& regions)
    : functions_(functions_of(options)), client_(functions_.create()) {
  const int code =
      functions_.setup_real(client_.get(), options.local_hostname, options.metadata_server,
                            static_cast<std::size_t>(options.global_segment_size),
                            static_cast<std::size_t>(options.local_buffer_size), options.protocol,
                            "", options.master, nullptr, "", false, "", "default", false, 0);
  if (code != 0) stop("setup", code);
  for (const Region& region : regions) {
    const int registered = functions_.register_buffer(client_.get(), region.base, region.length);
    if (registered != 0) stop("register_buffer", registered);
  }
}

NativeStore::~NativeStore() { functions_.tear_down_all(client_.get()); }

void NativeStore::put(const NativeBatch& batch) {
  static constexpr mooncake::ReplicateConfig kDefault;
  check("batch_put_from_multi_buffers",
        functions_.batch_put_from_multi_buffers(client_.get(), batch.keys, batch.buffers,
                                                batch.lengths, kDefault),
        batch.keys.size());
}

void NativeStore::get(const NativeBatch& batch) {
  check("batch_get_into_multi_buffers",
        functions_.batch_get_into_multi_buffers(client_.get(), batch.keys, batch.buffers,
                                                batch.lengths, false),
        batch.keys.size());
}

}  // namespace kvprism::bench
