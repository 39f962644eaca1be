// What Mooncake's result codes mean to us. Pure functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvprism/io/object_store.h"

namespace kvprism::detail {

enum class MooncakeCall : std::uint8_t { kExists, kPut, kGet, kRemove };

// Result of one item. `expected` is the object's size in bytes (get only).
ItemResult mooncake_item(MooncakeCall call, std::int64_t code, std::uint64_t expected) noexcept;

// The pattern that finds exactly the keys that begin with `prefix`.
std::string mooncake_prefix_pattern(std::string_view prefix);

// The call may have returned while native code goes on with its memory: Mooncake waits 60 s for a
// transfer and does not cancel it, and a failed RPC does not say how far the transfer had come
// (R53).
bool mooncake_may_have_given_up(std::int64_t code, std::chrono::nanoseconds took) noexcept;

// The client is known to be of no use any more.
bool mooncake_client_is_lost(std::int64_t code) noexcept;

// The master did not answer.
bool mooncake_master_is_silent(std::int64_t code) noexcept;

// "-200 (no space)", for messages.
std::string mooncake_code_text(std::int64_t code);

}  // namespace kvprism::detail
