#include "store/give_back.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "kvprism/base/error.h"

namespace kvprism::detail {

void give_regions_back(ObjectStore& store, std::span<const Region> regions) {
  const std::exception_ptr first = std::current_exception();
  bool late = false;
  std::vector<Problem> more;
  for (auto region = regions.rbegin(); region != regions.rend(); ++region) {
    // Whatever the reason, a store that has not taken it back may still have it.
    try {
      store.remove_region(*region);
    } catch (const Error& undo) {
      late = true;
      more.insert(more.end(), undo.problems().begin(), undo.problems().end());
    } catch (const std::exception& undo) {
      late = true;
      more.push_back({"region", undo.what(), "an end of unregistering memory", {}});
    }
  }
  if (!late && more.empty()) std::rethrow_exception(first);
  try {
    std::rethrow_exception(first);
  } catch (const Error& error) {
    std::vector<Problem> all = error.problems();
    all.insert(all.end(), more.begin(), more.end());
    throw Error(late ? ErrorCode::kTimedOut : error.code(), error.subject(), std::move(all));
  } catch (const std::exception& error) {
    more.insert(more.begin(), {"registration", error.what(), "an end without an exception", {}});
    throw Error(late ? ErrorCode::kTimedOut : ErrorCode::kUnavailable, "store worker",
                std::move(more));
  }
}

}  // namespace kvprism::detail
