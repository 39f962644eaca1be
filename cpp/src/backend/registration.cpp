#include "registration.h"

#include <algorithm>
#include <string>

namespace kvprism::detail {

std::vector<Problem> check_registration(std::span<const std::uint64_t> lengths,
                                        const RegistrationFacts& facts) {
  std::vector<Problem> problems;
  const std::uint64_t devices = std::max<std::uint32_t>(1, facts.devices);
  std::uint64_t bytes = 0;
  for (const std::uint64_t length : lengths) bytes += length;
  // Compared without a product, which could overflow.
  if (!facts.privileged && bytes > facts.lock_limit / devices) {
    const std::string times =
        devices == 1 ? "" : " for each of " + std::to_string(devices) + " devices";
    problems.push_back(
        {"memory lock limit", std::to_string(facts.lock_limit) + " bytes",
         "at least " + std::to_string(bytes) + " bytes, which RDMA must lock" + times,
         "raise it with `ulimit -l unlimited`; in a container start it with `--ulimit memlock=-1` "
         "or the capability IPC_LOCK"});
  }
  return problems;
}

// No device is known to take less at once; what it tells of itself only libibverbs reads.
std::uint64_t effective_region_bytes(std::string_view protocol, std::uint64_t wanted) noexcept {
  constexpr std::uint64_t kRdma = std::uint64_t{2} << 30;
  return wanted == 0 && protocol == "rdma" ? kRdma : wanted;
}

std::vector<Region> cut_region(const Region& region, std::uint64_t max_region_bytes) {
  const std::uint64_t most = max_region_bytes == 0 ? region.length : max_region_bytes;
  std::vector<Region> pieces;
  for (std::uint64_t at = 0; at < region.length; at += most) {
    pieces.push_back(
        {region.base + at, std::min<std::uint64_t>(most, region.length - at), region.device});
  }
  return pieces;
}

void append_cut(const Region& region, std::uint64_t max_region_bytes, const Segment& segment,
                std::vector<Segment>& out) {
  std::byte* base = segment.base;
  std::uint64_t left = segment.length;
  while (max_region_bytes != 0) {
    const auto offset = static_cast<std::uint64_t>(base - region.base);
    const std::uint64_t room = max_region_bytes - offset % max_region_bytes;
    if (left <= room) break;
    out.push_back({base, room});
    base += room;
    left -= room;
  }
  out.push_back({base, left});
}

}  // namespace kvprism::detail
