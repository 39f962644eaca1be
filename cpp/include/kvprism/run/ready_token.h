// Proof that the bytes of a save are there: host memory already written, or a device event to ask
// (R12).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "kvprism/base/error.h"

namespace kvprism {

enum class ReadyState : std::uint8_t { kReady, kPending, kFailed };

// Something that can be asked, without waiting, whether the writes before it have finished.
// Threads: query() is called from the thread that pumps the worker.
class ReadySource {
 public:
  virtual ~ReadySource() = default;
  virtual ReadyState query() noexcept = 0;
};

// C functions of a device runtime, e.g. cudaEventQuery and cudaErrorNotReady: `query` answers 0 for
// done, `not_ready` for not yet, anything else for an error. `destroy` may be null. `bind`, e.g.
// cudaSetDevice, makes the event's device the calling thread's before each of them and answers 0;
// without it a runtime that keeps a device per thread may set up a context on the first one.
struct DeviceEventApi {
  int (*query)(void* event) = nullptr;
  int not_ready = 0;
  void (*destroy)(void* event) = nullptr;
  int (*bind)(int device) = nullptr;
  int device = 0;
};

// There is no default: a save without a token does not compile.
// Ownership: shares its source. Threads: value.
class ReadyToken {
 public:
  // The caller has synchronised: the bytes are in memory now.
  static ReadyToken host() noexcept { return ReadyToken(nullptr); }
  // `event` was recorded after the writes; it is owned by the token when `api.destroy` is set.
  // Throws Error (kInvalidArgument) without a `query`; the event is then still the caller's.
  static ReadyToken device_event(void* event, DeviceEventApi api) {
    if (api.query == nullptr) {
      fail(ErrorCode::kInvalidArgument, "ready token",
           {"query", "null", "the address of a function", {}});
    }
    return ReadyToken(std::make_shared<EventSource>(event, api));
  }
  static ReadyToken source(std::shared_ptr<ReadySource> source) noexcept {
    return ReadyToken(std::move(source));
  }
  // The writes were not made, e.g. the step has failed: jobs with it end as failed, and no call is
  // made for them. So the scheduler hears of a plan that must not run.
  static ReadyToken failed();

  ReadyState query() const noexcept { return source_ ? source_->query() : ReadyState::kReady; }

 private:
  class FailedSource final : public ReadySource {
   public:
    ReadyState query() noexcept override { return ReadyState::kFailed; }
  };

  class EventSource final : public ReadySource {
   public:
    EventSource(void* event, DeviceEventApi api) noexcept : event_(event), api_(api) {}
    ~EventSource() override {
      if (api_.destroy == nullptr) return;
      bind();
      api_.destroy(event_);
    }
    EventSource(const EventSource&) = delete;
    EventSource& operator=(const EventSource&) = delete;
    ReadyState query() noexcept override {
      if (!bind()) return ReadyState::kFailed;
      const int answer = api_.query(event_);
      if (answer == 0) return ReadyState::kReady;
      return answer == api_.not_ready ? ReadyState::kPending : ReadyState::kFailed;
    }

   private:
    bool bind() const noexcept { return api_.bind == nullptr || api_.bind(api_.device) == 0; }

    void* event_;
    DeviceEventApi api_;
  };

  explicit ReadyToken(std::shared_ptr<ReadySource> source) noexcept : source_(std::move(source)) {}

  std::shared_ptr<ReadySource> source_;  // null: ready
};

inline ReadyToken ReadyToken::failed() { return ReadyToken(std::make_shared<FailedSource>()); }

}  // namespace kvprism
