/*
 * One rank of a job of processes, whose environment is as torchrun sets it: `ranks layer`, `ranks nodes` (each rank is
 * a node, over a simulated network), or `ranks dies`.
 */
#include <signal.h>
#include <time.h>

#include "layer.h"

static tokenyard_world_t *world;
static tokenyard_device_t *device;
static tokenyard_stream_t *stream;
static tokenyard_context_t *context;
static tokenyard_handle_t *handle;
static tokenyard_proxy_t *proxy;
static int rank, ranks;

static void wait_for_calls(void) {
  OK(tokenyard_stream_synchronize(stream, PATIENCE_MS));
  OK(tokenyard_context_check(context));
}

static void fused(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 4);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  wait_for_calls();
  compute_experts(m, rank, ranks, 4);
  OK(tokenyard_combine(context, stream, handle, &rows, &combined));
  wait_for_calls();
  check_sums(m, rank);
}

/* Halves, with indices of int64 whose rows have a gap, and the number of tokens in device memory. */
static void halves(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  tokenyard_sent_t *sent;
  tokenyard_combine_sent_t *combine_sent;
  OK(tokenyard_sent_create(&sent));
  OK(tokenyard_combine_sent_create(&combine_sent));
  tokens.index_type = TOKENYARD_INDEX_I64;
  tokens.topk_idx = VIEW(m->wide_idx);
  tokens.topk_idx_token_bytes = sizeof m->wide_idx[0];
  tokens.topk_idx_choice_bytes = sizeof m->wide_idx[0][0];
  tokens.device_count = view_of(&m->count, sizeof m->count);
  OK(tokenyard_dispatch_send(context, stream, &tokens, sent));
  REFUSED(tokenyard_dispatch_send(context, stream, &tokens, sent), TOKENYARD_INVALID_ARGUMENT, "receive that first");
  /* A refused half is as it was. */
  output.rows.bytes = 16;
  REFUSED(tokenyard_dispatch_recv(context, stream, sent, &output, handle), TOKENYARD_INVALID_ARGUMENT, "rows");
  output.rows = VIEW(m->rows);
  OK(tokenyard_dispatch_recv(context, stream, sent, &output, handle));
  wait_for_calls();
  compute_experts(m, rank, ranks, 1);
  OK(tokenyard_combine_send(context, stream, handle, &rows, combine_sent));
  OK(tokenyard_combine_recv(context, stream, combine_sent, &combined));
  REFUSED(tokenyard_combine_recv(context, stream, combine_sent, &combined), TOKENYARD_INVALID_ARGUMENT,
          "sent is empty");
  wait_for_calls();
  check_sums(m, rank);
  tokenyard_sent_destroy(sent);
  tokenyard_combine_sent_destroy(combine_sent);
}

/* Counts come first, and the output has exactly as many rows. */
static void counts_first(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 2);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  tokenyard_sent_t *sent;
  tokenyard_counts_t *counts;
  size_t experts[EXPERTS], sources[MOST_RANKS], count, i, fitting = 0;
  OK(tokenyard_sent_create(&sent));
  OK(tokenyard_dispatch_send_counts(context, stream, &tokens, sent));
  OK(tokenyard_dispatch_counts(context, sent, PATIENCE_MS, &counts));
  OK(tokenyard_counts_experts(counts, experts, EXPERTS, &count));
  for (i = 0; i < count; i++) fitting += (experts[i] + 1) / 2 * 2;
  OK(tokenyard_counts_sources(counts, sources, MOST_RANKS, &count));
  CHECK(count == (size_t)ranks);
  CHECK(ranks < 3 || sources[ranks - 1] == 0);
  OK(tokenyard_counts_fit(counts, output.layout, &output.layout));
  CHECK(output.layout.capacity == fitting && output.layout.align == 2);
  tokenyard_counts_destroy(counts);
  OK(tokenyard_dispatch_recv(context, stream, sent, &output, handle));
  wait_for_calls();
  compute_experts(m, rank, ranks, 2);
  OK(tokenyard_combine(context, stream, handle, &rows, &combined));
  wait_for_calls();
  check_sums(m, rank);
  tokenyard_sent_destroy(sent);
}

/* New rows by a handle: every element is negated, and lands where the first one was. */
static void again(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_new_rows_t new_rows = tokenyard_new_rows_init();
  tokenyard_placed_t placed = tokenyard_placed_init();
  float(*first)[HIDDEN] = malloc(sizeof m->rows);
  int t, i, c;
  CHECK(first != NULL);
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  wait_for_calls();
  memcpy(first, m->rows, sizeof m->rows);
  for (t = 0; t < MAX_TOKENS; t++)
    for (c = 0; c < HIDDEN; c++) m->x[t][c] = -m->x[t][c];
  new_rows.count = (size_t)m->count;
  new_rows.x = VIEW(m->x);
  placed.rows = VIEW(m->rows);
  OK(tokenyard_dispatch_again(context, stream, handle, &new_rows, &placed));
  wait_for_calls();
  for (i = 0; i < m->row_count; i++)
    for (c = 0; c < HIDDEN; c++) CHECK(m->rows[i][c] == -first[i][c]);
  for (t = 0; t < MAX_TOKENS; t++)
    for (c = 0; c < HIDDEN; c++) m->x[t][c] = -m->x[t][c];
  free(first);
}

/* An output that takes the rows for which it has room. */
static void drops(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  int rows = 0, local = 0, came, i;
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  wait_for_calls();
  came = m->row_count;
  output.layout.capacity = 2;
  output.drop_overflow = TOKENYARD_YES;
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  wait_for_calls();
  for (i = 0; i < EXPERTS; i++)
    if (owner(i, ranks) == rank) rows += m->expert_count[local++];
  CHECK(came > 2 && m->row_count == came && rows == 2);
}

/* Two graphs with one handle, since experts run on the host; replayed twice. */
static void graphs(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  tokenyard_graph_t *dispatch, *combine;
  int i;
  OK(tokenyard_stream_begin_capture(stream));
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  OK(tokenyard_stream_end_capture(stream, &dispatch));
  OK(tokenyard_stream_begin_capture(stream));
  OK(tokenyard_combine(context, stream, handle, &rows, &combined));
  OK(tokenyard_stream_end_capture(stream, &combine));
  for (i = 0; i < 2; i++) {
    OK(tokenyard_graph_launch(dispatch, stream));
    wait_for_calls();
    compute_experts(m, rank, ranks, 1);
    OK(tokenyard_graph_launch(combine, stream));
    wait_for_calls();
    check_sums(m, rank);
  }
  tokenyard_graph_destroy(dispatch);
  tokenyard_graph_destroy(combine);
}

/* What the environment says, by the caller. */
static void join(void) {
  tokenyard_bootstrap_t bootstrap = tokenyard_bootstrap_init();
  bootstrap.rank = (uint32_t)atoi(getenv("RANK"));
  bootstrap.local_rank = bootstrap.rank;
  bootstrap.ranks = (uint32_t)atoi(getenv("WORLD_SIZE"));
  bootstrap.address = getenv("MASTER_ADDR");
  bootstrap.port = (uint32_t)atoi(getenv("TOKENYARD_PORT"));
  bootstrap.timeout_ms = PATIENCE_MS;
  OK(tokenyard_world_join(&bootstrap, &world));
}

/* Each rank becomes a node of its own. */
static void split(void) {
  tokenyard_proxy_config_t config = tokenyard_proxy_config_init();
  tokenyard_world_t *whole = world;
  size_t sizes[MOST_RANKS] = {1, 1, 1, 1}, nodes[MOST_RANKS], count;
  OK(tokenyard_world_with_nodes(whole, sizes, (size_t)ranks, &world));
  tokenyard_world_destroy(whole);
  OK(tokenyard_world_nodes(world, nodes, MOST_RANKS, &count));
  CHECK(count == (size_t)ranks && nodes[0] == 1);
  REFUSED(tokenyard_proxy_create(world, &config, &proxy), TOKENYARD_INVALID_ARGUMENT, "argument network is 0");
  config.network = TOKENYARD_NETWORK_SIMULATED;
  config.seed = 7;
  config.silence_ms = PATIENCE_MS / 3;
  OK(tokenyard_proxy_create(world, &config, &proxy));
}

static void layer(struct memory *m) {
  tokenyard_context_info_t info = tokenyard_context_info_init();
  uint32_t locals[EXPERTS];
  size_t count, i, matrix[MOST_RANKS * MOST_RANKS];
  int32_t mine = 100 + rank, all[MOST_RANKS];
  fused(m);
  halves(m);
  counts_first(m);
  drops(m);
  again(m);
  graphs(m);
  OK(tokenyard_context_info(context, &info));
  CHECK(info.dispatches == 8 && info.combines == 4 && info.errors == 0 && info.rounds == 1 && info.sms == 2);
  OK(tokenyard_context_local_experts(context, locals, EXPERTS, &count));
  CHECK(count == info.local_experts);
  for (i = 0; i < count; i++) CHECK(owner((int)locals[i], ranks) == rank);
  OK(tokenyard_context_row_matrix(context, handle, matrix, (size_t)(ranks * ranks)));
  OK(tokenyard_barrier(context, stream));
  wait_for_calls();
  OK(tokenyard_world_all_gather(world, &mine, sizeof mine, all));
  for (i = 0; i < (size_t)ranks; i++) CHECK(all[i] == 100 + (int32_t)i);
}

/* The others form a world without the last rank. */
static void survive(const tokenyard_tokens_t *tokens, const tokenyard_output_t *output) {
  tokenyard_world_info_t info = tokenyard_world_info_init();
  tokenyard_world_t *regrouped;
  uint32_t members[MOST_RANKS] = {0, 1, 2, 3}, found[MOST_RANKS];
  size_t count, i;
  OK(tokenyard_world_regroup(world, 1, members, (size_t)ranks - 1, &regrouped));
  OK(tokenyard_world_info(regrouped, &info));
  CHECK(info.generation == 1 && info.ranks == (uint32_t)ranks - 1 && info.first_ranks == (uint32_t)ranks);
  OK(tokenyard_world_members(regrouped, found, MOST_RANKS, &count));
  CHECK(count == info.ranks);
  for (i = 0; i < count; i++) CHECK(found[i] == i);
  CHECK(tokenyard_dispatch(context, stream, tokens, output, handle) == TOKENYARD_GENERATION);
  OK(tokenyard_world_barrier(regrouped));
  tokenyard_world_destroy(regrouped);
}

/* The last rank dies without a word; the others are told so within the deadline. */
static void dies(struct memory *m) {
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_error_info_t info = tokenyard_error_info_init();
  tokenyard_status_t status = TOKENYARD_OK;
  time_t begin = time(NULL);
  if (rank == ranks - 1) raise(SIGKILL);
  OK(tokenyard_dispatch(context, stream, &tokens, &output, handle));
  (void)tokenyard_stream_synchronize(stream, PATIENCE_MS);
  while (status == TOKENYARD_OK && time(NULL) - begin < PATIENCE_MS / 1000) status = tokenyard_context_check(context);
  OK(tokenyard_last_error_info(&info));
  CHECK(status == TOKENYARD_PEER_LOST || status == TOKENYARD_TIMEOUT);
  CHECK(info.status == status && info.fatal == 1 && info.rank == rank && info.peer == ranks - 1 && info.epoch == 1);
  CHECK(strlen(info.name) > 0 && strcmp(info.message, tokenyard_last_error()) == 0);
  /* The context stays closed. */
  CHECK(tokenyard_dispatch(context, stream, &tokens, &output, handle) == status);
  survive(&tokens, &output);
}

int main(int count, char **arguments) {
  tokenyard_world_info_t info = tokenyard_world_info_init();
  tokenyard_config_t config;
  struct memory *m;
  void *block;
  const char *what = count == 2 ? arguments[1] : "";
  int lives = strcmp(what, "dies") != 0;
  CHECK(strcmp(what, "layer") == 0 || strcmp(what, "nodes") == 0 || !lives);
  CHECK(tokenyard_abi_version() == TOKENYARD_ABI_VERSION);
  if (lives) {
    OK(tokenyard_world_from_env(&world));
  } else {
    join();
  }
  OK(tokenyard_world_info(world, &info));
  rank = (int)info.rank;
  ranks = (int)info.ranks;
  CHECK(ranks <= MOST_RANKS && info.nodes == 1 && info.generation == 0);
  if (strcmp(what, "nodes") == 0) split();
  OK(tokenyard_device_cpu(&device));
  OK(tokenyard_stream_create(device, &stream));
  OK(tokenyard_handle_create(&handle));
  config = config_of(device);
  config.proxy = proxy;
  OK(tokenyard_context_create(world, &config, &context));
  m = memory_of(rank, ranks, &block);
  if (lives) {
    layer(m);
    OK(tokenyard_world_barrier(world));
  } else {
    dies(m);
  }
  /* In an order that is none. */
  tokenyard_world_destroy(world);
  tokenyard_device_destroy(device);
  tokenyard_proxy_destroy(proxy);
  tokenyard_context_destroy(context);
  tokenyard_stream_destroy(stream);
  tokenyard_handle_destroy(handle);
  tokenyard_handle_destroy(NULL);
  free(block);
  printf("rank %d of %d: all right\n", rank, ranks);
  return 0;
}
