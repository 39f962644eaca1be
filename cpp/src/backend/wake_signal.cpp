#include "kvprism/backend/wake_signal.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/bounded_wait.h"

namespace kvprism {

struct WakeSignal::Cell {
  std::mutex mutex;
  std::condition_variable changed;
  bool notified = false;

  void notify() noexcept {
    {
      const std::lock_guard lock(mutex);
      notified = true;
    }
    changed.notify_one();
  }
};

namespace {

// Cells are used again but never freed: a stray wakeup then reaches another signal's cell and is
// harmless there.
template <class Cell>
class CellPool {
 public:
  Cell* take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      all_.push_back(std::make_unique<Cell>());
      idle_.reserve(all_.size());
      return all_.back().get();
    }
    Cell* const cell = idle_.back();
    idle_.pop_back();
    return cell;
  }
  void give(Cell* cell) noexcept {
    const std::lock_guard lock(mutex_);
    idle_.push_back(cell);
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Cell>> all_;
  std::vector<Cell*> idle_;
};

template <class Cell>
CellPool<Cell>& pool() {
  // Outlives static destruction, because threads of a native library may.
  static auto* const instance = new CellPool<Cell>();
  return *instance;
}

}  // namespace

WakeSignal::WakeSignal() : cell_(pool<Cell>().take()) {
  const std::lock_guard lock(cell_->mutex);
  cell_->notified = false;
}

WakeSignal::~WakeSignal() { pool<Cell>().give(cell_); }

void WakeSignal::notify() noexcept { cell_->notify(); }

bool WakeSignal::wait(Duration longest) noexcept {
  std::unique_lock lock(cell_->mutex);
  cell_->changed.wait_for(lock, detail::bounded(longest), [&] { return cell_->notified; });
  const bool notified = cell_->notified;
  cell_->notified = false;
  return notified;
}

Wakeup WakeSignal::wakeup() const noexcept {
  return {[](void* cell) { static_cast<Cell*>(cell)->notify(); }, cell_};
}

}  // namespace kvprism
