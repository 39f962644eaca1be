// Memory that clients may touch: each present and later client has all regions.
#include <algorithm>
#include <string>
#include <utility>

#include "backend/blocking_core.h"
#include "backend/native_thread.h"
#include "kvprism/base/error.h"

namespace kvprism {

using namespace detail;  // NOLINT(google-build-using-namespace)

namespace {

constexpr const char* kStillThere =
    "the memory must stay mapped until the client is gone (retired_now is 0)";

Error late(const Region& region, std::string expected, Duration limit, std::string hint) {
  return Error(ErrorCode::kTimedOut, std::string(kSubject),
               {{"region", std::to_string(region.length) + " bytes",
                 std::move(expected) + " within " + std::to_string(limit.ns / 1'000'000) + " ms",
                 std::move(hint)}});
}

// How a native call ended; guarded by the core's mutex.
struct Change {
  bool done = false;
  std::exception_ptr error;
};

}  // namespace

bool BlockingStore::Core::begin_regions(Lock& lock, TimePoint end) {
  const bool free = changed.wait_until(lock, end, [&] { return !regions_busy; });
  if (free) regions_busy = true;
  return free;
}

void BlockingStore::Core::end_regions() {
  regions_busy = false;
  changed.notify_all();
}

std::exception_ptr BlockingStore::Core::change_region(Lock& lock,
                                                      std::shared_ptr<Generation> generation,
                                                      const Region& region, bool add,
                                                      TimePoint end) {
  const auto change = std::make_shared<Change>();
  Worker& helper = helpers.emplace_back();
  try {
    helper.thread = start_thread(
        "kvp-region", [core = shared_from_this(), generation, region, add, change, &helper] {
          std::exception_ptr error;
          try {
            add ? generation->client->register_region(region)
                : generation->client->unregister_region(region);
          } catch (...) {
            error = std::current_exception();
          }
          const Lock held(core->mutex);
          change->done = true;
          change->error = std::move(error);
          --generation->busy;
          helper.done = true;
          core->care_wakes.notify_all();
          core->changed.notify_all();
        });
  } catch (const std::exception& why) {
    helpers.pop_back();
    return std::make_exception_ptr(no_thread(why));
  }
  ++generation->busy;
  changed.wait_until(lock, end, [&] { return change->done; });
  if (change->done) return change->error;
  const char* what = add ? "registering memory" : "unregistering memory";
  retire(generation, std::string(what) + " takes too long");
  return std::make_exception_ptr(
      late(region, std::string("an end of ") + what, options.region_timeout, kStillThere));
}

std::exception_ptr BlockingStore::Core::change_present(Lock& lock, const Region& region, bool add,
                                                       TimePoint end) {
  const std::shared_ptr<Generation> client = current;
  unreleased.reserve(unreleased.size() + 1);
  std::exception_ptr error = change_region(lock, client, region, add, end);
  // Given up in the middle of it, a client may have the region for as long as it is there.
  if (error != nullptr && client != current) remember_unreleased(region);
  return error;
}

bool BlockingStore::Core::is_unreleased(const Region& region) const {
  return std::find(unreleased.begin(), unreleased.end(), region) != unreleased.end();
}

void BlockingStore::Core::remember_unreleased(const Region& region) {
  if (!is_unreleased(region)) unreleased.push_back(region);
}

std::uint64_t BlockingStore::Core::release_regions(Lock& lock, TimePoint end) {
  // From here on no client is given them.
  unreleased.reserve(unreleased.size() + regions.regions().size());
  for (const Region& region : regions.regions()) unreleased.push_back(region);
  for (const Region& region : unreleased) regions.erase(region);
  if (unreleased.empty()) return 0;
  // With both sides closed the clients go, and the regions with them.
  if (closed[kIndex]) return unreleased.size();
  if (!begin_regions(lock, end)) return unreleased.size();
  // A client that is slow at this is given up; one that a short budget cuts off is not.
  const TimePoint limit = std::max(end, after(Clock::now(), milliseconds(500)));
  std::vector<Region> left;  // with the present client
  // A copy: without the mutex others may come here too.
  for (const Region& region : std::vector<Region>(unreleased)) {
    const std::shared_ptr<Generation> client = current;
    if (client == nullptr) break;
    const bool failed = change_region(lock, client, region, false, limit) != nullptr;
    if (failed && client == current) left.push_back(region);
  }
  end_regions();
  // Those on their way out, or never finished, may have any of them.
  if (changed.wait_until(lock, end, [&] { return counters.retired_now == 0; }))
    unreleased = std::move(left);
  return unreleased.size();
}

void BlockingStore::add_region(const Region& region) {
  const auto refuse = [&](ErrorCode code, std::string expected) {
    fail(code, kSubject,
         {"region", std::to_string(region.length) + " bytes", std::move(expected), {}});
  };
  Core& core = *core_;
  if (core.in_child()) refuse(ErrorCode::kClosed, "the process that made the store");
  if (region.base == nullptr || region.length == 0) {
    refuse(ErrorCode::kInvalidArgument, "an address and a positive length");
  }
  const TimePoint end = after(Clock::now(), core.options.region_timeout);
  Lock lock(core.mutex);
  if (!core.begin_regions(lock, end)) {
    throw late(region, "an end of another registration, of a new client perhaps,",
               core.options.region_timeout, "the service accepts connections but does not answer");
  }
  std::exception_ptr error;
  try {
    if (core.closed[kStore]) refuse(ErrorCode::kClosed, "an open store");
    core.use(kStore);
    switch (core.regions.fit(region)) {
      case RegionTable::Fit::kEqual:
        break;
      case RegionTable::Fit::kOverlap:
        refuse(ErrorCode::kInvalidArgument, "no overlap with another region");
        break;
      case RegionTable::Fit::kNew:
        if (core.current == nullptr) refuse(ErrorCode::kUnavailable, "a usable client");
        error = core.change_present(lock, region, true, end);
        if (error == nullptr) {
          core.regions.insert(region);
          std::erase(core.unreleased, region);
        }
        break;
    }
  } catch (...) {
    error = std::current_exception();
  }
  core.end_regions();
  if (error != nullptr) std::rethrow_exception(error);
}

void BlockingStore::remove_region(const Region& region) {
  Core& core = *core_;
  if (core.in_child()) return;
  const TimePoint end = after(Clock::now(), core.options.region_timeout);
  Lock lock(core.mutex);
  // From here on no client is given it, and until it is taken back it is not forgotten.
  core.unreleased.reserve(core.unreleased.size() + 1);
  const bool again = core.is_unreleased(region);
  const bool fresh = core.regions.erase(region);
  if (fresh) core.remember_unreleased(region);
  // What an earlier attempt could not take back is tried again.
  const bool known = fresh || again;
  if (!core.begin_regions(lock, end)) {
    throw late(region, "an end of another registration, of a new client perhaps,",
               core.options.region_timeout, "the service accepts connections but does not answer");
  }
  std::exception_ptr error;
  try {
    if (known && core.current != nullptr) error = core.change_present(lock, region, false, end);
  } catch (...) {
    error = std::current_exception();
  }
  core.end_regions();
  if (error == nullptr && !again) std::erase(core.unreleased, region);
  if (error == nullptr && again) {
    // The client that it was not taken back from may be on its way out.
    if (core.changed.wait_until(lock, end, [&] { return core.counters.retired_now == 0; })) {
      std::erase(core.unreleased, region);
    } else {
      error = std::make_exception_ptr(late(region, "an end of a client that may have it",
                                           core.options.region_timeout, kStillThere));
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace kvprism
