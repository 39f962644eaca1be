#include "backend/native_thread.h"

#include <pthread.h>

#include <initializer_list>

namespace kvprism::detail {

BlockedSignals::BlockedSignals() noexcept {
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) {
    sigdelset(&blocked, own);
  }
  pthread_sigmask(SIG_SETMASK, &blocked, &before_);
}

BlockedSignals::~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

void name_thread(const char* name) noexcept { pthread_setname_np(pthread_self(), name); }

}  // namespace kvprism::detail
