// Calls of Mooncake under way, counted so that an exit can wait for them: it destroys Mooncake's
// static objects, whatever threads still use them.
#pragma once

namespace kvprism::detail {

// Lives for as long as one call. Threads: any.
class NativeCall {
 public:
  NativeCall() noexcept;
  ~NativeCall();
  NativeCall(const NativeCall&) = delete;
  NativeCall& operator=(const NativeCall&) = delete;

  // False once the process exits: nothing may be called any more.
  explicit operator bool() const noexcept { return allowed_; }

 private:
  bool allowed_;
};

// If the calling thread is the main one, its exit first ends native calls: none begins any more,
// and those under way have two seconds. With one that has not returned by then, the process ends
// with its status and the C streams flushed, but without the destructors and handlers that are
// left.
void end_native_calls_at_exit() noexcept;

}  // namespace kvprism::detail
