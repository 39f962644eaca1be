// What we call in Mooncake's store library, declared from facts: argument lists from the mangled
// names, result types and struct properties from running each build in builds.cpp or reading its
// machine code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvprism::mooncake {

// mooncake::RealClient and mooncake::TransferEngine, never completed: we only pass their addresses.
struct NativeClient;
struct NativeEngine;

using Strings = std::vector<std::string>;
using BufferLists = std::vector<std::vector<void*>>;
using LengthLists = std::vector<std::vector<std::size_t>>;

// Stands in for mooncake::ReplicateConfig, whose layout changes between versions: the first member
// is the number of replicas in all of them, and all-zero bytes are the default of every other
// member.
struct alignas(16) ReplicateConfig {
  std::size_t replica_num = 1;
  std::byte rest[1024 - sizeof(std::size_t)] = {};
};
static_assert(sizeof(ReplicateConfig) == 1024);

// The store client's functions. Results: 0 or a positive count is success, negative is a store
// error code. Members are called with the object first, which is what the Itanium C++ ABI does for
// non-virtual members.
struct StoreFunctions {
  std::shared_ptr<NativeClient> (*create)() = nullptr;
  int (*setup_real)(NativeClient*, const std::string& local_hostname,
                    const std::string& metadata_server, std::size_t global_segment_size,
                    std::size_t local_buffer_size, const std::string& protocol,
                    const std::string& rdma_devices, const std::string& master_server_addr,
                    const std::shared_ptr<NativeEngine>& engine, const std::string& ipc_socket_path,
                    bool enable_ssd_offload, const std::string& ssd_offload_path,
                    const std::string& tenant_id, bool enable_http_server, int http_port) = nullptr;
  int (*register_buffer)(NativeClient*, void* base, std::size_t bytes) = nullptr;
  int (*unregister_buffer)(NativeClient*, void* base) = nullptr;
  std::vector<int> (*batch_put_from_multi_buffers)(NativeClient*, const Strings& keys,
                                                   const BufferLists& buffers,
                                                   const LengthLists& lengths,
                                                   const ReplicateConfig& config) = nullptr;
  std::vector<int> (*batch_get_into_multi_buffers)(NativeClient*, const Strings& keys,
                                                   const BufferLists& buffers,
                                                   const LengthLists& lengths,
                                                   bool prefer_same_node) = nullptr;
  std::vector<int> (*batch_is_exist)(NativeClient*, const Strings& keys) = nullptr;
  std::int64_t (*get_size)(NativeClient*, const std::string& key) = nullptr;
  int (*remove)(NativeClient*, const std::string& key, bool force) = nullptr;
  // The number of objects removed. Skips what has a lease or is not complete, unless forced.
  long (*remove_by_regex)(NativeClient*, const std::string& pattern, bool force) = nullptr;
  int (*health_check)(NativeClient*) = nullptr;
  int (*tear_down_all)(NativeClient*) = nullptr;
};

// Store error codes that we tell apart.
enum StoreCode : int {
  kOk = 0,
  kInternalError = -1,
  kBufferOverflow = -10,
  kSegmentNotFound = -101,
  kClientNotFound = -103,
  kNoAvailableHandle = -200,
  kInvalidKey = -400,
  kWriteFail = -500,
  kInvalidParameters = -600,
  kIllegalClient = -601,
  kInvalidWrite = -700,
  kInvalidRead = -701,
  kInvalidReplica = -702,
  kReplicaNotReady = -703,
  kObjectNotFound = -704,
  kObjectExists = -705,
  kObjectHasLease = -706,
  kLeaseExpired = -707,
  kReplicaNotFound = -710,
  kReplicaGone = -712,
  kReplicaBusy = -714,
  kTransferFailed = -800,
  kChecksumMismatch = -801,
  kRpcFailed = -900,
  kRpcTimedOut = -901,
  kNotSupported = -1012,
  kTenantQuota = -1700,
};

}  // namespace kvprism::mooncake
