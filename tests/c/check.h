/* What the tests in C say when something is not so. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

#define CHECK_TEXT(found, wanted)                                                                \
  do {                                                                                           \
    const char* const found_ = (found);                                                          \
    if (strcmp(found_, (wanted)) != 0) {                                                         \
      fprintf(stderr, "%s:%d: \"%s\"\n  is not \"%s\"\n", __FILE__, __LINE__, found_, (wanted)); \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (0)

/* A call that must succeed. */
#define OK(call)                                                                                   \
  do {                                                                                             \
    kvprism_error* error = NULL;                                                                   \
    const kvprism_status status_ = (call);                                                         \
    if (status_ != KVPRISM_OK || error != NULL) {                                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, kvprism_error_message(error)); \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

/* A call that must fail with `wanted` and `text`. */
#define FAILS(call, wanted, text)                                          \
  do {                                                                     \
    kvprism_error* error = NULL;                                           \
    const kvprism_status status_ = (call);                                 \
    CHECK_TEXT(kvprism_error_message(error), text);                        \
    CHECK(status_ == (wanted) && kvprism_error_status(error) == (wanted)); \
    kvprism_error_free(error);                                             \
  } while (0)
