#include "sim/flight_watch.h"

#include <numeric>

namespace kvprism::sim {
namespace {

std::uint64_t bytes_of(const ObjectBatch& batch) {
  return std::accumulate(
      batch.segments.begin(), batch.segments.end(), std::uint64_t{0},
      [](std::uint64_t sum, const Segment& segment) { return sum + segment.length; });
}

}  // namespace

bool FlightWatch::start_put(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                            Instant deadline) {
  const std::uint64_t bytes = bytes_of(*batch);
  const std::size_t objects = batch->keys.size();
  // What has ended and may never be quiet holds up nobody: one object then goes alone.
  const bool alone = open_ == 0 && objects == 1;
  if (limit_ != 0 && in_flight_ + bytes > limit_ && !alone && broken_.empty()) {
    broken_ = "a put of " + std::to_string(objects) + " objects with " + std::to_string(bytes) +
              " bytes beside " + std::to_string(in_flight_) + " in flight, of at most " +
              std::to_string(limit_);
  }
  if (!store_->start_put(op, batch, now, deadline)) return false;
  bytes_.emplace(op, bytes);
  in_flight_ += bytes;
  ++open_;
  return true;
}

bool FlightWatch::start_get(OpId op, std::unique_ptr<ObjectBatch>& batch, Instant now,
                            Instant deadline) {
  const std::uint64_t bytes = bytes_of(*batch);
  if (!store_->start_get(op, batch, now, deadline)) return false;
  bytes_.emplace(op, bytes);
  in_flight_ += bytes;
  ++open_;
  return true;
}

bool FlightWatch::poll_store(Instant now, Completion& out) {
  if (!store_->poll_store(now, out)) return false;
  if (out.outcome) --open_;
  if (const auto call = bytes_.find(out.op); out.quiet && call != bytes_.end()) {
    in_flight_ -= call->second;
    bytes_.erase(call);
  }
  return true;
}

}  // namespace kvprism::sim
