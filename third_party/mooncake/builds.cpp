// The known builds. Every row was looked at: the file's build-id, its symbols, and the machine code
// of the functions we call, compared with the build that our tests run.
#include <array>

#include "kvprism/backend/mooncake_client.h"

namespace kvprism {
namespace {

constexpr std::string_view kNonCuda = "mooncake-transfer-engine-non-cuda";
constexpr std::string_view kCuda12 = "mooncake-transfer-engine";
constexpr std::string_view kCuda13 = "mooncake-transfer-engine-cuda13";

// clang-format off
constexpr std::array kRows = {
    MooncakeAbiRow{kNonCuda, "0.3.13.post1", "cp310", "mooncake/store.so", "e9ef101806243d9256788c3c9109449544cc30cb", true},
    MooncakeAbiRow{kNonCuda, "0.3.13.post1", "cp311", "mooncake/store.so", "3a026f69c7464448ebce55f9cc629e4493d4d435", true},
    MooncakeAbiRow{kNonCuda, "0.3.13.post1", "cp312", "mooncake/store.so", "ac3308f9f2fa2901232d9a7e4f5ab505729cad27", true},
    MooncakeAbiRow{kNonCuda, "0.3.13.post1", "cp313", "mooncake/store.so", "fd6a15f94d72940e71fc3579fafc632fa4bad6d7", true},
    MooncakeAbiRow{kCuda12, "0.3.13.post1", "cp310", "mooncake/store.so", "d330aebd3eace1032ec9c25e2aaa2592993b5f39", false},
    MooncakeAbiRow{kCuda12, "0.3.13.post1", "cp311", "mooncake/store.so", "bfb595e4addf8939e7ae47d5f2111f40ce8b20a0", false},
    MooncakeAbiRow{kCuda12, "0.3.13.post1", "cp312", "mooncake/store.so", "80da890b3187ed3a82aedcadcc97984a6819a8b7", false},
    MooncakeAbiRow{kCuda12, "0.3.13.post1", "cp313", "mooncake/store.so", "506870215033dc7983bd970d8f43a6016fceb857", false},
    MooncakeAbiRow{kCuda13, "0.3.14", "cp310", "mooncake/_store.cpython-310-x86_64-linux-gnu.so", "1743f1cb2f6284662af70f7fd779ef04878cb415", false},
    MooncakeAbiRow{kCuda13, "0.3.14", "cp311", "mooncake/_store.cpython-311-x86_64-linux-gnu.so", "9c42307c1ec7aa45c0decdf0d55acf2a40be6bea", false},
    MooncakeAbiRow{kCuda13, "0.3.14", "cp312", "mooncake/_store.cpython-312-x86_64-linux-gnu.so", "22896e6a4452cc7916db62bc6522b73b52156109", false},
    MooncakeAbiRow{kCuda13, "0.3.14", "cp313", "mooncake/_store.cpython-313-x86_64-linux-gnu.so", "14fab539608a6c5db6ec3a9893d8bb4737509a1b", false},
    MooncakeAbiRow{kCuda13, "0.3.14", "cp314", "mooncake/_store.cpython-314-x86_64-linux-gnu.so", "3e26562e18c8bcb1ee9beeee526f0bf828a7ee2f", false},
};
// clang-format on

}  // namespace

std::span<const MooncakeAbiRow> known_mooncake_builds() noexcept { return kRows; }

}  // namespace kvprism
