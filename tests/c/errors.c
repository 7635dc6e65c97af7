/* What is refused, with its status and what its message names; on one rank. */
#define _POSIX_C_SOURCE 200809L
#include <sys/wait.h>
#include <unistd.h>

#include "layer.h"

static tokenyard_world_t *world;
static tokenyard_device_t *device;
static tokenyard_stream_t *stream;
static tokenyard_context_t *context;
static tokenyard_handle_t *handle;

static int32_t gathers_never(void *user, const char *what, const void *mine, size_t bytes, void *all, uint64_t time) {
  (void)user, (void)what, (void)mine, (void)bytes, (void)all, (void)time;
  return 1;
}

static void counts_up(void *user) { ++*(size_t *)user; }

/* A struct of a later version, which has a field more. */
struct later {
  tokenyard_rows_t rows;
  uint64_t more;
};

static void nothing_is_reported_before_anything_failed(void) {
  tokenyard_error_info_t info = tokenyard_error_info_init();
  CHECK(strcmp(tokenyard_last_error(), "") == 0);
  OK(tokenyard_last_error_info(&info));
  CHECK(info.status == TOKENYARD_OK && info.rank == -1 && info.peer == -1 && strcmp(info.message, "") == 0);
  CHECK(tokenyard_last_error_info(NULL) == TOKENYARD_INVALID_ARGUMENT);
  CHECK(strcmp(tokenyard_version(), "") != 0);
}

static void pointers_that_are_null(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  tokenyard_device_t *no_device;
  const tokenyard_status_t invalid = TOKENYARD_INVALID_ARGUMENT;
  REFUSED(tokenyard_dispatch(NULL, stream, &tokens, &output, handle), invalid, "argument context is NULL");
  REFUSED(tokenyard_dispatch(context, NULL, &tokens, &output, handle), invalid, "argument stream is NULL");
  REFUSED(tokenyard_dispatch(context, stream, NULL, &output, handle), invalid, "argument tokens is NULL");
  REFUSED(tokenyard_dispatch(context, stream, &tokens, NULL, handle), invalid, "argument output is NULL");
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, NULL), invalid, "argument handle is NULL");
  REFUSED(tokenyard_combine(context, stream, NULL, &rows, &combined), invalid, "argument handle is NULL");
  REFUSED(tokenyard_combine(context, stream, handle, &rows, &combined), invalid, "argument handle is empty");
  REFUSED(tokenyard_device_cpu(NULL), invalid, "argument device is NULL");
  REFUSED(tokenyard_stream_synchronize(NULL, 1), invalid, "argument stream is NULL");
  REFUSED(tokenyard_world_barrier(NULL), invalid, "argument world is NULL");
  REFUSED(tokenyard_world_threads(1, NULL), invalid, "argument worlds is NULL");
  REFUSED(tokenyard_context_check(NULL), invalid, "argument context is NULL");
  tokens.x.pointer = NULL;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument x is");
  tokens.x.bytes = 0;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument x is");
  tokens = tokens_in(m);
  tokens.topk_weight = view_of(NULL, 0);
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument topk_weight is");
  /* What was made is NULL after a failure. */
  no_device = device;
  CHECK(tokenyard_device_cuda(SIZE_MAX, &no_device) != TOKENYARD_OK && no_device == NULL);
}

static void structs_of_other_sizes_and_places(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_combined_t combined = combined_in(m);
  struct later later;
  char bytes[sizeof tokens + 8];
  void *odd = bytes + 8 - (uintptr_t)bytes % 8 + 4;
  const tokenyard_status_t invalid = TOKENYARD_INVALID_ARGUMENT;
  tokens.size = 0;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument tokens is of size 0");
  tokens.size = sizeof tokens - 8;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument tokens is of size");
  tokens.size = 0xa5a5a5a5;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument tokens is of size");
  REFUSED(tokenyard_dispatch(context, stream, (tokenyard_tokens_t *)odd, &output, handle), invalid,
          "must be a multiple of 8");
  tokens = tokens_in(m);
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  memset(&later, 0, sizeof later);
  later.rows = rows_in(m);
  later.rows.size = sizeof later;
  later.more = 1;
  REFUSED(tokenyard_combine(context, stream, handle, &later.rows, &combined), invalid,
          "a field is set that this library does not know");
  later.more = 0;
  OK(tokenyard_combine(context, stream, handle, &later.rows, &combined));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  OK(tokenyard_context_check(context));
}

static void values_that_are_none(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_config_t config = config_of(device);
  tokenyard_context_t *other;
  tokenyard_stream_t *borrowed;
  tokenyard_world_t *no_world;
  const tokenyard_status_t invalid = TOKENYARD_INVALID_ARGUMENT;
  tokens.index_type = 77;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument index_type is 77");
  tokens = tokens_in(m);
  tokens.quantize = 3;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument quantize is 3");
  tokens = tokens_in(m);
  tokens.pitch_bytes = 24;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "pitch_bytes");
  tokens = tokens_in(m);
  output.layout.kind = 0;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument layout.kind is 0");
  output = output_in(m, 1);
  output.expert_offset = output.expert_count;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "expert_offset");
  output = output_in(m, 1);
  output.drop_overflow = 9;
  REFUSED(tokenyard_dispatch(context, stream, &tokens, &output, handle), invalid, "argument drop_overflow is 9");
  combined.reserved = 1;
  REFUSED(tokenyard_combine(context, stream, handle, &rows, &combined), invalid, "argument reserved is 1");
  config.format = 99;
  REFUSED(tokenyard_context_create(world, &config, &other), invalid, "argument format is 99");
  CHECK(other == NULL);
  config = config_of(device);
  config.hidden = 3;
  REFUSED(tokenyard_context_create(world, &config, &other), TOKENYARD_INVALID_CONFIG, "configuration hidden is 3");
  REFUSED(tokenyard_stream_from_raw(device, NULL, &borrowed), invalid, "cu_stream");
  REFUSED(tokenyard_world_with_timeout(world, 0, &no_world), invalid, "argument timeout_ms is 0");
  REFUSED(tokenyard_stream_synchronize(NULL, 1), invalid, "stream");
}

/* Lengths that are refused are not those of the caller's memory: nothing of it is read or written. */
static void lengths_beyond_memory(void) {
  const size_t huge = (size_t)1 << 46;
  const uint32_t ranks[1] = {0};
  const size_t sizes[1] = {1};
  tokenyard_config_t config = config_of(device);
  tokenyard_tuning_t tuning = tokenyard_tuning_init();
  tokenyard_over_t over = tokenyard_over_init();
  tokenyard_context_t *none;
  tokenyard_world_t *no_world;
  tokenyard_buffer_t *buffer;
  tokenyard_host_buffer_t *host;
  unsigned char bytes[16];
  int32_t numbers[4] = {1, 2, 3, 4};
  size_t released = 0;
  const tokenyard_status_t invalid = TOKENYARD_INVALID_ARGUMENT, unusable = TOKENYARD_INVALID_CONFIG;
  config.placement = ranks;
  config.experts = huge;
  REFUSED(tokenyard_context_create(world, &config, &none), unusable, "configuration experts is");
  config = config_of(device);
  config.tuning = &tuning;
  tuning.replica_table = ranks;
  tuning.replica_table_count = huge;
  REFUSED(tokenyard_context_create(world, &config, &none), unusable, "configuration replica_table is");
  REFUSED(tokenyard_world_with_nodes(world, sizes, huge, &no_world), unusable, "configuration nodes is");
  REFUSED(tokenyard_world_regroup(world, 1, ranks, huge, &no_world), unusable, "configuration members is");
  over.all_gather = gathers_never;
  over.release = counts_up;
  over.user = &released;
  REFUSED(tokenyard_world_regroup_over(world, 1, ranks, huge, &over, &no_world), unusable, "configuration members is");
  CHECK(released == 1);
  REFUSED(tokenyard_world_regroup_over(world, 1, NULL, 1, &over, &no_world), invalid, "argument members is NULL");
  CHECK(released == 1);
  OK(tokenyard_buffer_create(device, 8, &buffer));
  OK(tokenyard_host_buffer_create(device, 8, &host));
  memset(bytes, 7, sizeof bytes);
  REFUSED(tokenyard_buffer_read(buffer, 0, bytes, sizeof bytes), invalid, "stay within the buffer's 8 bytes");
  REFUSED(tokenyard_buffer_read(buffer, 0, bytes, huge), invalid, "stay within the buffer's 8 bytes");
  REFUSED(tokenyard_host_buffer_read_i32(host, 0, numbers, 4), invalid, "stay within the buffer's 2 numbers");
  REFUSED(tokenyard_host_buffer_read_i32(host, 0, numbers, huge), invalid, "stay within the buffer's 2 numbers");
  CHECK(bytes[0] == 7 && bytes[15] == 7 && numbers[0] == 1 && numbers[3] == 4);
  tokenyard_buffer_destroy(buffer);
  tokenyard_host_buffer_destroy(host);
}

/* A text that is refused may be a secret, and logs have messages. */
static void texts_that_are_none(void) {
  tokenyard_bootstrap_t bootstrap = tokenyard_bootstrap_init();
  tokenyard_world_t *none;
  bootstrap.ranks = 1;
  bootstrap.token = "secret\xff";
  REFUSED(tokenyard_world_join(&bootstrap, &none), TOKENYARD_INVALID_ARGUMENT, "argument token is 7 bytes");
  CHECK(strstr(tokenyard_last_error(), "secret") == NULL);
  bootstrap.token = "secret";
  bootstrap.reserved = 1;
  REFUSED(tokenyard_world_join(&bootstrap, &none), TOKENYARD_INVALID_ARGUMENT, "argument reserved is 1");
}

/* The output has room for fewer rows than come; the next call works. */
static void an_output_that_is_too_small(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  tokenyard_error_info_t info = tokenyard_error_info_init();
  int wanted[MOST_ROWS][2], e, needed = 0;
  for (e = 0; e < EXPERTS; e++) needed += rows_of(e, 1, wanted);
  output.layout.capacity = (uint64_t)needed - 1;
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  CHECK(tokenyard_context_check(context) == TOKENYARD_CAPACITY);
  OK(tokenyard_last_error_info(&info));
  CHECK(info.status == TOKENYARD_CAPACITY && info.fatal == 0 && info.rank == 0 && info.peer == -1);
  CHECK(info.needed == (uint64_t)needed && info.given == (uint64_t)needed - 1 && info.epoch > 0);
  OK(tokenyard_combine(context, stream, handle, &rows, &combined));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  CHECK(tokenyard_context_check(context) == TOKENYARD_INCOMPLETE);
  output.layout.capacity = (uint64_t)needed;
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  OK(tokenyard_context_check(context));
  compute_experts(m, 0, 1, 1);
  OK(tokenyard_combine(context, stream, handle, &rows, &combined));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  OK(tokenyard_context_check(context));
  check_sums(m, 0);
}

static int32_t says_yes(void *user) {
  (void)user;
  return 1;
}

static void waits(void *user) {
  tokenyard_world_t *worlds[2];
  (void)user;
  OK(tokenyard_world_threads(2, worlds));
  /* The other one never comes. */
  REFUSED(tokenyard_world_barrier(worlds[0]), TOKENYARD_INTERRUPTED, "interrupted");
  tokenyard_world_destroy(worlds[0]);
  tokenyard_world_destroy(worlds[1]);
}

static void an_interrupt_ends_a_wait(void) {
  tokenyard_interrupt_t *interrupt;
  OK(tokenyard_interrupt_create(says_yes, NULL, &interrupt));
  OK(tokenyard_interrupt_during(interrupt, waits, NULL));
  REFUSED(tokenyard_interrupt_during(interrupt, NULL, NULL), TOKENYARD_INVALID_ARGUMENT, "work is NULL");
  tokenyard_interrupt_destroy(interrupt);
}

static void memory_of_the_library(void) {
  tokenyard_buffer_t *buffer;
  tokenyard_host_buffer_t *host;
  tokenyard_view_t view, from;
  unsigned char bytes[4] = {1, 2, 3, 4}, read[4] = {0, 0, 0, 0};
  int32_t numbers[2] = {5, 6};
  void *pointer;
  OK(tokenyard_buffer_create(device, 8, &buffer));
  OK(tokenyard_buffer_fill(buffer, 7));
  OK(tokenyard_buffer_write(buffer, 4, bytes, 4));
  OK(tokenyard_buffer_view(buffer, 0, 4, &view));
  OK(tokenyard_buffer_view(buffer, 4, 4, &from));
  OK(tokenyard_stream_copy(stream, view, from));
  OK(tokenyard_stream_fill(stream, from, 9));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  OK(tokenyard_buffer_read(buffer, 0, read, 4));
  CHECK(memcmp(read, bytes, 4) == 0);
  OK(tokenyard_buffer_read(buffer, 4, read, 4));
  CHECK(read[0] == 9 && read[3] == 9);
  REFUSED(tokenyard_buffer_read(buffer, 5, read, 4), TOKENYARD_INVALID_ARGUMENT, "offset");
  REFUSED(tokenyard_buffer_view(buffer, 8, 1, &view), TOKENYARD_INVALID_ARGUMENT, "offset");
  OK(tokenyard_host_buffer_create(device, 8, &host));
  OK(tokenyard_host_buffer_read_i32(host, 0, numbers, 2));
  CHECK(numbers[0] == 0 && numbers[1] == 0);
  REFUSED(tokenyard_host_buffer_read_i32(host, 1, numbers, 2), TOKENYARD_INVALID_ARGUMENT, "first");
  OK(tokenyard_host_buffer_pointer(host, &pointer));
  CHECK(pointer != NULL);
  tokenyard_buffer_destroy(buffer);
  tokenyard_host_buffer_destroy(host);
}

/* A call that the child enqueues never runs, as it has no thread of the device: nothing waits for that. */
static void a_fork_that_destroys_its_copies(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  int status = 0;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(5);
    (void)tokenyard_dispatch(context, stream, &tokens, &output, handle);
    tokenyard_handle_destroy(handle);
    tokenyard_context_destroy(context);
    tokenyard_stream_destroy(stream);
    tokenyard_device_destroy(device);
    tokenyard_world_destroy(world);
    OK(tokenyard_device_cpu(&device));
    tokenyard_device_destroy(device);
    _exit(0);
  }
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  OK(tokenyard_context_check(context));
}

int main(void) {
  tokenyard_config_t config;
  struct memory *m;
  void *block;
  nothing_is_reported_before_anything_failed();
  OK(tokenyard_world_threads(1, &world));
  OK(tokenyard_device_cpu(&device));
  OK(tokenyard_stream_create(device, &stream));
  OK(tokenyard_handle_create(&handle));
  config = config_of(device);
  OK(tokenyard_context_create(world, &config, &context));
  m = memory_of(0, 1, &block);
  pointers_that_are_null(m);
  structs_of_other_sizes_and_places(m);
  values_that_are_none(m);
  lengths_beyond_memory();
  texts_that_are_none();
  an_output_that_is_too_small(m);
  an_interrupt_ends_a_wait();
  memory_of_the_library();
  a_fork_that_destroys_its_copies(m);
  tokenyard_handle_destroy(handle);
  tokenyard_context_destroy(context);
  tokenyard_stream_destroy(stream);
  tokenyard_device_destroy(device);
  tokenyard_world_destroy(world);
  free(block);
  printf("errors: all right\n");
  return 0;
}
