// Turns clients whose calls block into an asynchronous store: the only room that starts threads
// (decision 11).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvprism/backend/blocking_client.h"
#include "kvprism/base/error.h"
#include "kvprism/base/export.h"
#include "kvprism/io/object_store.h"
#include "kvprism/run/instant.h"

namespace kvprism {

struct BlockingStoreOptions {
  std::size_t queue_limit = 256;  // operations waiting, per kind (put, get, exists)
  Duration stuck_after =
      seconds(65);  // a call that takes longer is given up; Mooncake's own wait is 60 s
  Duration setup_timeout = seconds(15);  // how long the constructor waits for the first client
  // How long add_region and remove_region wait: RDMA locks the memory, some GB a second.
  Duration region_timeout = seconds(120);
  Duration probe_interval = seconds(1);  // between questions to a service that did not answer
  Duration first_retry =
      milliseconds(100);             // pause after a failure to make a client; doubles each time
  Duration max_retry = seconds(10);  // longest pause
  std::uint32_t max_attempts = 0;    // consecutive failures before giving up for good; 0: never
  std::uint32_t max_retired =
      8;  // retired clients that still have calls; at the limit none is made
  Duration close_budget = seconds(5);  // of the destructor
};

// Everything that is wrong with the options.
KVPRISM_API std::vector<Problem> validate_blocking_store_options(
    const BlockingStoreOptions& options);

struct BlockingStoreCounters {
  std::uint64_t put_calls = 0;
  std::uint64_t put_items = 0;
  std::uint64_t put_bytes = 0;
  std::uint64_t get_calls = 0;
  std::uint64_t get_items = 0;
  std::uint64_t get_bytes = 0;
  std::uint64_t exists_calls = 0;
  std::uint64_t exists_items = 0;
  std::uint64_t remove_calls = 0;
  std::uint64_t queue_full = 0;       // starts refused because a queue was full
  std::uint64_t circuit_open = 0;     // operations ended without a call: no client, a service that
                                      // does not answer, or a late call before it
  std::uint64_t probes = 0;           // questions to a service that did not answer
  std::uint64_t expired = 0;          // operations not started by their deadline
  std::uint64_t late_calls = 0;       // calls that outlasted their operation's deadline
  std::uint64_t stuck_calls = 0;      // calls given up after stuck_after
  std::uint64_t unquiet_calls = 0;    // calls that returned while native code may go on
  std::uint64_t failed_attempts = 0;  // clients that could not be made
  std::uint64_t replacements = 0;     // clients made after the first
  std::uint64_t unquiet_now = 0;      // operations with an outcome that are not quiet
  std::uint64_t retired_now = 0;      // clients being torn down, also unused ones, with calls, or
                                      // given up unmade
  bool usable = false;                // a client is there that answers: the circuit is closed
};

// Each kind of call has one thread per client ("kvp-put", "kvp-get", "kvp-look"). A client whose
// call came back unquiet or broken, or did not come back within stuck_after, is retired: its
// waiting operations end as kUnavailable, a new client is made (thread "kvp-make"), gets all
// regions, and takes over. The retired client is torn down (thread "kvp-grave") once its calls have
// returned; only then do its unfinished operations become quiet. While no client is usable,
// operations end at once as kUnavailable (R51); so do those of a kind whose call has outlasted its
// deadline, until that call returns: a service that is slow costs nobody a wait. After a call that
// the service did not answer all kinds end at once, and one question in probe_interval is asked
// until it is answered. A client that replaces another must have answered a question first; one
// that is not made within setup_timeout and region_timeout together counts as retired until it is,
// and another is made. With one side closed no client is made unless the other has been used.
// One log line tells each change. Thread "kvp-care" watches deadlines.
//
// Ownership: owns its clients and threads; the factory must stay callable. The destructor waits for
// close_budget and leaves hung threads behind with the state they need: memory of unquiet
// operations must then stay mapped. Threads: the store's calls and the index's calls from one
// thread at a time each; both may run beside each other. add_region and remove_region wait for
// native calls (thread "kvp-region") and for a client that is being made, at most region_timeout
// each; a client that is not done by then is retired, and the memory must stay mapped until
// retired_now is 0. counters() and wait_for_completion() from any thread. Errors: the constructor
// throws the factory's Error, or kTimedOut after setup_timeout; a late client is torn down.
// add_region throws kTimedOut. In a forked child nothing starts, polls or waits.
class KVPRISM_API BlockingStore final : public ObjectStore, public ObjectIndex {
 public:
  explicit BlockingStore(BlockingClientFactory factory, BlockingStoreOptions options = {});
  ~BlockingStore() override;
  BlockingStore(const BlockingStore&) = delete;
  BlockingStore& operator=(const BlockingStore&) = delete;

  StoreCapabilities capabilities() const override;
  void add_region(const Region& region) override;
  void remove_region(const Region& region) override;
  bool start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override;
  bool start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                 Instant deadline) override;
  // Called for every completion of either side.
  void set_wakeup(Wakeup wakeup) override;
  bool poll_store(Instant now, Completion& out) override;
  // Gives all regions back, for which it takes up to half a second beyond the budget. When both
  // sides are closed the client is torn down within what is left of it. Regions that a client,
  // present, retired or given up, may still have count as unquiet, also in later calls.
  CloseReport close_store(Duration budget) override;

  bool start_exists(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                    Instant deadline) override;
  bool start_remove(OpId op, std::unique_ptr<ObjectBatch>& batch, const Removal& removal,
                    Instant now, Instant deadline) override;
  bool poll_index(Instant now, Completion& out) override;
  CloseReport close_index(Duration budget) override;

  // Waits until poll_store or poll_index has something, for at most `budget`. True when it has.
  bool wait_for_completion(Duration budget);

  BlockingStoreCounters counters() const;

 private:
  struct Core;
  std::shared_ptr<Core> core_;
};

}  // namespace kvprism
