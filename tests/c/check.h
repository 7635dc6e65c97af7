/* What the tests in C have in common: a call that does not do what is expected ends the program with its line. */
#ifndef TOKENYARD_TESTS_CHECK_H
#define TOKENYARD_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tokenyard.h>

/* Every wait of these tests ends by then. */
#define PATIENCE_MS 30000

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                  \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

#define OK(call)                                                                                                       \
  do {                                                                                                                 \
    tokenyard_status_t status_ = (call);                                                                               \
    if (status_ != TOKENYARD_OK) {                                                                                     \
      fprintf(stderr, "%s:%d: %s is %d: %s\n", __FILE__, __LINE__, #call, (int)status_, tokenyard_last_error());       \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

/* The call is refused with this status and this text in its message. */
#define REFUSED(call, wanted, text)                                                                                    \
  do {                                                                                                                 \
    tokenyard_status_t status_ = (call);                                                                               \
    if (status_ != (wanted) || strstr(tokenyard_last_error(), (text)) == NULL) {                                       \
      fprintf(stderr, "%s:%d: %s is %d: %s\n", __FILE__, __LINE__, #call, (int)status_, tokenyard_last_error());       \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

#endif
