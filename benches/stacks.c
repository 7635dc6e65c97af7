// Samples the call stack of one thread, for benches/python_stacks.py: a thread of its own signals it every so many
// microseconds, and the signal's handler notes the stack, while sampling is on.
//
//     cc -O2 -shared -fPIC -o stacks.so benches/stacks.c -lpthread -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST = 400000, DEPTH = 40, OF_HANDLER = 2 };

typedef struct {
  int call, depth;
  void *frames[DEPTH];
} Sample;

static Sample *samples;
static volatile int taken, call_now;
static pthread_t sampled;
static long period_ns;

static void take(int signal) {
  (void)signal;
  if (call_now == 0 || taken == MOST) return;
  Sample *sample = &samples[taken];
  sample->depth = backtrace(sample->frames, DEPTH);
  sample->call = call_now;
  taken++;
}

static void *tick(void *unused) {
  const struct timespec period = {0, period_ns};
  for (;;) {
    nanosleep(&period, NULL);
    if (call_now != 0) pthread_kill(sampled, SIGPROF);
  }
  return unused;
}

// Samples the thread that calls this. Returns 0, or -1 where there is no memory or no thread.
int stacks_start(int period_us) {
  void *first[1];
  backtrace(first, 1); // loads what it needs, which a signal's handler must not
  samples = malloc(sizeof(Sample) * MOST);
  if (samples == NULL) return -1;
  struct sigaction action = {0};
  action.sa_handler = take;
  action.sa_flags = SA_RESTART;
  sigaction(SIGPROF, &action, NULL);
  sampled = pthread_self();
  period_ns = period_us * 1000L;
  pthread_t ticking;
  return pthread_create(&ticking, NULL, tick, NULL) == 0 ? 0 : -1;
}

// The call that runs from now on, from 1; 0: none.
void stacks_of(int call) { call_now = call; }

// A line a sample: the call, then frames from the innermost: library, function if it is exported, offset in the
// library. Returns how many, or -1 where the file cannot be written.
int stacks_write(const char *path) {
  call_now = 0;
  FILE *file = fopen(path, "w");
  if (file == NULL) return -1;
  for (int i = 0; i < taken; i++) {
    fprintf(file, "%d", samples[i].call);
    for (int j = OF_HANDLER; j < samples[i].depth; j++) {
      Dl_info info;
      char *frame = samples[i].frames[j];
      if (!dladdr(frame, &info) || info.dli_fname == NULL) continue;
      const char *slash = strrchr(info.dli_fname, '/');
      fprintf(file, "\t%s:%s+%lx", slash ? slash + 1 : info.dli_fname, info.dli_sname ? info.dli_sname : "?",
              (unsigned long)(frame - (char *)info.dli_fbase));
    }
    fputc('\n', file);
  }
  return fclose(file) == 0 ? taken : -1;
}
