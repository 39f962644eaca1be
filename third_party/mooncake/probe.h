// Verdicts on library builds that are in no row: made by kvprism-mooncake-probe, a process of its
// own, and cached.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace kvprism::mooncake {

// The word of a verdict that lets a library be used.
inline constexpr std::string_view kVerdictOk = "ok";

// JSON string literal, with quotes.
std::string json_quote(std::string_view text);

// The value of "verdict" in a line that the probe printed; empty when there is none.
std::string verdict_word(std::string_view line);

// File of the cached verdict on a library with this SHA-256, under $XDG_CACHE_HOME/kvprism or
// ~/.cache/kvprism. Empty when neither folder is known.
std::string verdict_path(std::string_view sha256);

// The cached line, or empty.
std::string read_verdict(std::string_view sha256);

// False when it could not be written; a cache that fails is no error.
bool write_verdict(std::string_view sha256, std::string_view line);

// Path of the probe program: KVPRISM_MOONCAKE_PROBE, beside this library, or on PATH. Empty when
// there is none.
std::string find_probe();

// Runs the probe and returns the line it printed. Throws Error: kNotFound (no probe), kTimedOut,
// kUnavailable.
std::string run_probe(const std::string& library, const std::string& master,
                      std::chrono::seconds limit);

}  // namespace kvprism::mooncake
