// The C interface from C++: ranks are threads, of a world of threads and of a world over an all-gather of this program.
// Layouts other than the contiguous one, payloads, masks, formats by call, placements, in-place output.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "layer.h"

namespace {

template <typename T, void (*destroy)(T *)> struct Destroyed {
  void operator()(T *object) const { destroy(object); }
};
template <typename T, void (*destroy)(T *)> using Owned = std::unique_ptr<T, Destroyed<T, destroy>>;

using World = Owned<tokenyard_world_t, tokenyard_world_destroy>;
using Device = Owned<tokenyard_device_t, tokenyard_device_destroy>;
using Stream = Owned<tokenyard_stream_t, tokenyard_stream_destroy>;
using Context = Owned<tokenyard_context_t, tokenyard_context_destroy>;
using Handle = Owned<tokenyard_handle_t, tokenyard_handle_destroy>;
using HostBuffer = Owned<tokenyard_host_buffer_t, tokenyard_host_buffer_destroy>;

/// An all-gather of threads, such as an engine has one of its own.
class Gathering {
public:
  explicit Gathering(int ranks) : ranks_(ranks) {}

  void gather(int rank, const void *mine, size_t bytes, void *all) {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned round = round_;
    gathered_.resize(bytes * static_cast<size_t>(ranks_));
    if (bytes > 0) memcpy(gathered_.data() + bytes * static_cast<size_t>(rank), mine, bytes);
    if (++here_ == ranks_) {
      here_ = 0;
      result_ = gathered_;
      round_++;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
    if (bytes > 0) memcpy(all, result_.data(), result_.size());
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> gathered_, result_;
  const int ranks_;
  int here_ = 0;
  unsigned round_ = 0;
};

struct User {
  Gathering *gathering;
  int rank;
  bool released;
};

extern "C" int32_t all_gather(void *user, const char *what, const void *mine, size_t bytes, void *all,
                              uint64_t timeout) {
  User *own = static_cast<User *>(user);
  CHECK(strlen(what) > 0 && timeout > 0);
  own->gathering->gather(own->rank, mine, bytes, all);
  return 0;
}

extern "C" void release(void *user) { static_cast<User *>(user)->released = true; }

extern "C" int32_t fails(void *, const char *, const void *, size_t, void *, uint64_t) { return 42; }

/// What a rank needs; it is let go in an order that is none.
struct Rank {
  int rank, ranks;
  World world;
  Device device;
  Stream stream;
  Context context;
  Handle handle;

  Rank(World given, void (*change)(tokenyard_config_t &)) : world(std::move(given)) {
    tokenyard_world_info_t info = tokenyard_world_info_init();
    OK(tokenyard_world_info(world.get(), &info));
    rank = static_cast<int>(info.rank);
    ranks = static_cast<int>(info.ranks);
    tokenyard_device_t *made_device;
    OK(tokenyard_device_cpu(&made_device));
    device.reset(made_device);
    tokenyard_stream_t *made_stream;
    OK(tokenyard_stream_create(device.get(), &made_stream));
    stream.reset(made_stream);
    tokenyard_handle_t *made_handle;
    OK(tokenyard_handle_create(&made_handle));
    handle.reset(made_handle);
    tokenyard_config_t config = config_of(device.get());
    change(config);
    tokenyard_context_t *made_context;
    OK(tokenyard_context_create(world.get(), &config, &made_context));
    context.reset(made_context);
  }

  void wait() const {
    OK(tokenyard_stream_synchronize(stream.get(), PATIENCE_MS));
    OK(tokenyard_context_check(context.get()));
  }
};

void keep(tokenyard_config_t &) {}

/// Dispatch, experts and combine, as the program in C does it.
void layer(World world) {
  Rank own(std::move(world), keep);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  OK(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()));
  own.wait();
  compute_experts(m, own.rank, own.ranks, 1);
  OK(tokenyard_combine(own.context.get(), own.stream.get(), own.handle.get(), &rows, &combined));
  own.wait();
  check_sums(m, own.rank);
  OK(tokenyard_world_barrier(own.world.get()));
  free(block);
}

void with_payload(tokenyard_config_t &config) {
  static tokenyard_tuning_t tuning = [] {
    tokenyard_tuning_t made = tokenyard_tuning_init();
    made.payload_words = 2;
    made.dispatch_payload_words = 2;
    made.ll_tokens = TOKENYARD_ZERO;
    return made;
  }();
  config.tuning = &tuning;
}

/// One row for each (source, token), which this rank sums itself; words go beside the tokens and come back.
void by_token(World world) {
  Rank own(std::move(world), with_payload);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  float words[MAX_TOKENS][2], row_words[MOST_ROWS][2], back[MAX_TOKENS][2];
  int32_t experts[MOST_ROWS][TOP_K];
  float weights[MOST_ROWS][TOP_K];
  for (int t = 0; t < MAX_TOKENS; t++) {
    words[t][0] = static_cast<float>(own.rank * 100 + t);
    words[t][1] = -1;
    back[t][0] = back[t][1] = 0;
  }
  tokenyard_tokens_t tokens = tokens_in(m);
  tokens.payload_words = 2;
  tokens.payload = VIEW(words);
  tokenyard_output_t output = output_in(m, 1);
  output.layout.kind = TOKENYARD_LAYOUT_TOKEN;
  output.layout.capacity = MOST_RANKS * MAX_TOKENS;
  output.expert_offset = view_of(nullptr, 0);
  output.token_experts = VIEW(experts);
  output.token_weights = VIEW(weights);
  output.payload = VIEW(row_words);
  OK(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()));
  own.wait();
  uint32_t locals[EXPERTS];
  size_t count;
  OK(tokenyard_context_local_experts(own.context.get(), locals, EXPERTS, &count));
  for (int row = 0; row < m->row_count; row++) {
    const int source = m->source[row][0], token = m->source[row][1];
    CHECK(row_words[row][0] == static_cast<float>(source * 100 + token) && row_words[row][1] == -1);
    for (int c = 0; c < HIDDEN; c++) {
      const float x = m->rows[row][c];
      CHECK(x == element(source, token, c));
      float sum = 0;
      for (int k = 0; k < TOP_K; k++) {
        if (experts[row][k] < 0) continue;
        const int e = static_cast<int>(locals[experts[row][k]]);
        CHECK(e == expert(source, token, k) && weights[row][k] == weight(source, token, k));
        sum += weights[row][k] * computed(e, x, c);
      }
      m->rows[row][c] = sum;
    }
    row_words[row][0] = 1; // summed: how many ranks had the token
  }
  tokenyard_rows_t rows = rows_in(m);
  rows.payload_words = 2;
  rows.payload = VIEW(row_words);
  tokenyard_combined_t combined = combined_in(m);
  combined.payload = VIEW(back);
  OK(tokenyard_combine(own.context.get(), own.stream.get(), own.handle.get(), &rows, &combined));
  own.wait();
  for (int t = 0; t < m->count; t++) {
    bool on[MOST_RANKS] = {};
    float ranks_of = 0;
    for (int k = 0; k < TOP_K; k++) {
      const int e = expert(own.rank, t, k);
      if (e >= 0 && !on[owner(e, own.ranks)]) {
        on[owner(e, own.ranks)] = true;
        ranks_of += 1;
      }
    }
    CHECK(back[t][0] == ranks_of && back[t][1] == -ranks_of);
  }
  check_sums(m, own.rank);
  OK(tokenyard_world_barrier(own.world.get()));
  free(block);
}

void weights_with_combine(tokenyard_config_t &config) { config.weights = TOKENYARD_WEIGHTS_COMBINE; }

/// Room for the most rows of each expert, counts in host memory, weights with combine, sums added to what is there.
void masked(World world) {
  Rank own(std::move(world), weights_with_combine);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  const int per_expert = own.ranks * MAX_TOKENS;
  std::vector<float> space(static_cast<size_t>(EXPERTS * per_expert * HIDDEN) + 16);
  float *places = space.data() + (16 - reinterpret_cast<uintptr_t>(space.data()) / 4 % 16);
  tokenyard_host_buffer_t *host;
  OK(tokenyard_host_buffer_create(own.device.get(), (EXPERTS + 1) * 4, &host));
  const HostBuffer kept(host);
  tokenyard_tokens_t tokens = tokens_in(m);
  tokens.topk_weight = view_of(nullptr, 0);
  tokenyard_output_t output = tokenyard_output_init();
  output.layout.kind = TOKENYARD_LAYOUT_MASKED;
  output.layout.capacity = static_cast<uint64_t>(per_expert);
  output.rows = view_of(places, static_cast<size_t>(EXPERTS * per_expert * HIDDEN) * 4);
  output.expert_count = VIEW(m->expert_count);
  OK(tokenyard_host_buffer_view(host, &output.host_counts));
  OK(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()));
  own.wait();
  int local = 0;
  for (int e = 0; e < EXPERTS; e++) {
    if (owner(e, own.ranks) != own.rank) continue;
    int wanted[MOST_ROWS][2];
    int32_t count;
    OK(tokenyard_host_buffer_read_i32(host, static_cast<size_t>(local), &count, 1));
    CHECK(count == rows_of(e, own.ranks, wanted) && count == m->expert_count[local]);
    for (int i = 0; i < count; i++)
      for (int c = 0; c < HIDDEN; c++) {
        float &place = places[(local * per_expert + i) * HIDDEN + c];
        CHECK(place == element(wanted[i][0], wanted[i][1], c));
        place = computed(e, place, c);
      }
    local++;
  }
  tokenyard_rows_t rows = tokenyard_rows_init();
  rows.rows = output.rows;
  rows.topk_weight = VIEW(m->topk_weight);
  tokenyard_combined_t combined = combined_in(m);
  combined.accumulate = TOKENYARD_YES;
  for (int t = 0; t < m->count; t++)
    for (int c = 0; c < HIDDEN; c++) m->out[t][c] = 1000;
  OK(tokenyard_combine(own.context.get(), own.stream.get(), own.handle.get(), &rows, &combined));
  own.wait();
  for (int t = 0; t < m->count; t++)
    for (int c = 0; c < HIDDEN; c++) CHECK(m->out[t][c] == 1000 + sum_of(own.rank, t, c));
  OK(tokenyard_world_barrier(own.world.get()));
  free(block);
}

void masking(tokenyard_config_t &config) { config.missing_ranks = TOKENYARD_MISSING_MASKED; }

/// Rank 0 goes on without rank 1, and rank 1 without rank 0: each keeps the terms of its own experts.
void without_the_other(World world) {
  Rank own(std::move(world), masking);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  tokenyard_view_t mask;
  OK(tokenyard_context_rank_mask(own.context.get(), &mask));
  CHECK(mask.bytes == static_cast<size_t>(own.ranks) * 4);
  REFUSED(tokenyard_context_mask_rank(own.context.get(), static_cast<uint32_t>(own.rank)), TOKENYARD_INVALID_ARGUMENT,
          "this rank");
  OK(tokenyard_context_mask_rank(own.context.get(), static_cast<uint32_t>(1 - own.rank)));
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  tokenyard_rows_t rows = rows_in(m);
  tokenyard_combined_t combined = combined_in(m);
  OK(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()));
  OK(tokenyard_combine(own.context.get(), own.stream.get(), own.handle.get(), &rows, &combined));
  own.wait();
  for (int i = 0; i < m->row_count; i++) CHECK(m->source[i][0] == own.rank);
  for (int t = 0; t < m->count; t++)
    for (int c = 0; c < HIDDEN; c++) {
      float sum = 0;
      for (int k = 0; k < TOP_K; k++) {
        const int e = expert(own.rank, t, k);
        if (e >= 0 && owner(e, own.ranks) == own.rank) sum += weight(own.rank, t, k) * element(own.rank, t, c);
      }
      CHECK(m->out[t][c] == sum);
    }
  size_t silent;
  OK(tokenyard_context_silent_ranks(own.context.get(), nullptr, 0, &silent));
  CHECK(silent == 0);
  free(block);
}

constexpr int WIDE = 256;

void with_fp8(tokenyard_config_t &config) {
  static const tokenyard_call_format_t fp8 = [] {
    tokenyard_call_format_t made;
    memset(&made, 0, sizeof made);
    made.hidden = WIDE;
    made.max_tokens = MAX_TOKENS;
    made.format = TOKENYARD_FORMAT_FP8_F32;
    made.combine_dtype = TOKENYARD_DTYPE_FP32;
    return made;
  }();
  config.other_formats = &fp8;
  config.other_formats_count = 1;
}

unsigned char byte_of(int rank, int token, int column) {
  return static_cast<unsigned char>((rank * 31 + token * 7 + column) % 120);
}

float scale_of(int rank, int token, int block) { return static_cast<float>(1 + rank * 100 + token * 10 + block); }

/// A call of another format than the context's: fp8 rows of other columns, whose scales lie without gaps.
void of_another_format(World world) {
  Rank own(std::move(world), with_fp8);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  alignas(64) static thread_local unsigned char x[MAX_TOKENS][WIDE], rows[MOST_ROWS][WIDE];
  float scales[MAX_TOKENS][WIDE / 128], row_scales[MOST_ROWS][WIDE / 128];
  for (int t = 0; t < MAX_TOKENS; t++) {
    for (int c = 0; c < WIDE; c++) x[t][c] = byte_of(own.rank, t, c);
    for (int b = 0; b < WIDE / 128; b++) scales[t][b] = scale_of(own.rank, t, b);
  }
  tokenyard_tokens_t tokens = tokens_in(m);
  tokens.format = TOKENYARD_FORMAT_FP8_F32;
  tokens.hidden = WIDE;
  tokens.x = VIEW(x);
  tokens.scales = VIEW(scales);
  tokenyard_output_t output = output_in(m, 1);
  output.rows = VIEW(rows);
  output.scales = VIEW(row_scales);
  const auto check = [&](int sign) {
    own.wait();
    CHECK(m->row_count > 0);
    for (int i = 0; i < m->row_count; i++) {
      const int source = m->source[i][0], token = m->source[i][1];
      for (int c = 0; c < WIDE; c++) CHECK(rows[i][c] == byte_of(source, token, c));
      for (int b = 0; b < WIDE / 128; b++)
        CHECK(row_scales[i][b] == static_cast<float>(sign) * scale_of(source, token, b));
    }
  };
  OK(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()));
  check(1);
  // Again with other scales, by halves.
  for (int t = 0; t < MAX_TOKENS; t++)
    for (int b = 0; b < WIDE / 128; b++) scales[t][b] = -scales[t][b];
  tokenyard_new_rows_t new_rows = tokenyard_new_rows_init();
  new_rows.count = tokens.count;
  new_rows.x = VIEW(x);
  new_rows.scales = VIEW(scales);
  tokenyard_placed_t placed = tokenyard_placed_init();
  placed.rows = VIEW(rows);
  placed.scales = VIEW(row_scales);
  tokenyard_sent_again_t *sent;
  OK(tokenyard_sent_again_create(&sent));
  REFUSED(tokenyard_dispatch_again_send(own.context.get(), own.stream.get(), own.handle.get(), &new_rows, sent),
          TOKENYARD_INVALID_ARGUMENT, "scale_row_stride_bytes is 0");
  new_rows.scale_row_stride_bytes = sizeof scales[0];
  new_rows.scale_column_stride_bytes = sizeof scales[0][0];
  OK(tokenyard_dispatch_again_send(own.context.get(), own.stream.get(), own.handle.get(), &new_rows, sent));
  OK(tokenyard_dispatch_again_recv(own.context.get(), own.stream.get(), sent, &placed));
  check(-1);
  tokenyard_sent_again_destroy(sent);
  OK(tokenyard_world_barrier(own.world.get()));
  free(block);
}

void placed_backwards(tokenyard_config_t &config) {
  static const uint32_t ranks_of[EXPERTS] = {1, 1, 1, 0, 0, 0, 0};
  static tokenyard_tuning_t tuning = [] {
    tokenyard_tuning_t made = tokenyard_tuning_init();
    made.in_place_rows = MOST_ROWS;
    return made;
  }();
  config.placement = ranks_of;
  config.tuning = &tuning;
}

/// Experts where the caller places them, and rows in the context's own memory.
void in_place(World world) {
  Rank own(std::move(world), placed_backwards);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  uint32_t locals[EXPERTS];
  size_t count;
  OK(tokenyard_context_local_experts(own.context.get(), locals, EXPERTS, &count));
  CHECK(count == (own.rank == 0 ? 4U : 3U) && locals[0] == (own.rank == 0 ? 3U : 0U));
  tokenyard_in_place_t place = tokenyard_in_place_init();
  OK(tokenyard_context_in_place(own.context.get(), &place));
  CHECK(place.layout.capacity == MOST_ROWS && place.scales.pointer == nullptr && place.pitch_bytes == HIDDEN * 4);
  tokenyard_tokens_t tokens = tokens_in(m);
  tokenyard_output_t output = output_in(m, 1);
  REFUSED(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()),
          TOKENYARD_INVALID_ARGUMENT, "in_place()");
  output.rows = place.rows;
  output.layout = place.layout;
  OK(tokenyard_dispatch(own.context.get(), own.stream.get(), &tokens, &output, own.handle.get()));
  own.wait();
  auto *rows = static_cast<float(*)[HIDDEN]>(place.rows.pointer);
  for (size_t local = 0, at = 0; local < count; local++) {
    int wanted[MOST_ROWS][2];
    CHECK(m->expert_count[local] == rows_of(static_cast<int>(locals[local]), own.ranks, wanted));
    for (int i = 0; i < m->expert_count[local]; i++, at++)
      for (int c = 0; c < HIDDEN; c++) {
        CHECK(rows[at][c] == element(wanted[i][0], wanted[i][1], c));
        rows[at][c] = computed(static_cast<int>(locals[local]), rows[at][c], c);
      }
  }
  tokenyard_rows_t computed_rows = tokenyard_rows_init();
  computed_rows.rows = place.rows;
  tokenyard_combined_t combined = combined_in(m);
  OK(tokenyard_combine(own.context.get(), own.stream.get(), own.handle.get(), &computed_rows, &combined));
  own.wait();
  check_sums(m, own.rank);
  OK(tokenyard_world_barrier(own.world.get()));
  free(block);
}

/// What the check of an interrupt finds.
struct Counting {
  tokenyard_context_t *context;
  tokenyard_sent_t *sent;
  std::atomic<bool> *asked;
};

/// Asks for the counts for which the thread waits already: refused, where it would wait for itself.
extern "C" int32_t asks_again(void *user) {
  const Counting *own = static_cast<Counting *>(user);
  tokenyard_counts_t *counts;
  REFUSED(tokenyard_dispatch_counts(own->context, own->sent, PATIENCE_MS, &counts), TOKENYARD_INVALID_ARGUMENT,
          "argument sent is in use by a call of this thread");
  own->asked->store(true);
  return 0;
}

extern "C" void wait_for_counts(void *user) {
  const Counting *own = static_cast<Counting *>(user);
  tokenyard_counts_t *counts;
  OK(tokenyard_dispatch_counts(own->context, own->sent, PATIENCE_MS, &counts));
  tokenyard_counts_destroy(counts);
}

/// Rank 1 sends only after rank 0's check was asked.
void counts_with_a_check(World world) {
  static std::atomic<bool> asked{false};
  Rank own(std::move(world), keep);
  void *block;
  memory *m = memory_of(own.rank, own.ranks, &block);
  tokenyard_sent_t *sent;
  OK(tokenyard_sent_create(&sent));
  const tokenyard_tokens_t tokens = tokens_in(m);
  const tokenyard_output_t output = output_in(m, 1);
  if (own.rank == 1)
    while (!asked) std::this_thread::yield();
  OK(tokenyard_dispatch_send_counts(own.context.get(), own.stream.get(), &tokens, sent));
  if (own.rank == 0) {
    Counting counting{own.context.get(), sent, &asked};
    tokenyard_interrupt_t *interrupt;
    OK(tokenyard_interrupt_create(asks_again, &counting, &interrupt));
    OK(tokenyard_interrupt_during(interrupt, wait_for_counts, &counting));
    tokenyard_interrupt_destroy(interrupt);
  }
  OK(tokenyard_dispatch_recv(own.context.get(), own.stream.get(), sent, &output, own.handle.get()));
  own.wait();
  tokenyard_sent_destroy(sent);
  OK(tokenyard_world_barrier(own.world.get()));
  free(block);
}

/// Runs each rank on a thread of its own.
void run(size_t ranks, void (*rank)(World)) {
  std::vector<tokenyard_world_t *> worlds(ranks);
  OK(tokenyard_world_threads(ranks, worlds.data()));
  std::vector<std::thread> threads;
  for (tokenyard_world_t *world : worlds) threads.emplace_back([=] { rank(World(world)); });
  for (std::thread &thread : threads) thread.join();
}

/// Worlds over an all-gather of this program.
void run_over(int ranks) {
  Gathering gathering(ranks);
  std::vector<User> users;
  for (int rank = 0; rank < ranks; rank++) users.push_back({&gathering, rank, false});
  std::vector<std::thread> threads;
  for (User &user : users) {
    threads.emplace_back([&user, ranks] {
      tokenyard_over_t over = tokenyard_over_init();
      over.rank = static_cast<uint32_t>(user.rank);
      over.ranks = static_cast<uint32_t>(ranks);
      over.all_gather = all_gather;
      over.release = release;
      over.user = &user;
      tokenyard_world_t *world;
      OK(tokenyard_world_over(&over, &world));
      layer(World(world));
    });
  }
  for (std::thread &thread : threads) thread.join();
  for (const User &user : users) CHECK(user.released);
  User lonely{&gathering, 0, false};
  tokenyard_over_t over = tokenyard_over_init();
  over.ranks = 2;
  over.all_gather = fails;
  over.release = release;
  over.user = &lonely;
  tokenyard_world_t *world;
  REFUSED(tokenyard_world_over(&over, &world), TOKENYARD_BOOTSTRAP, "returned 42");
  CHECK(world == nullptr && lonely.released);
}

struct Leaving {
  tokenyard_world_t *world;
  int released;
};

extern "C" int32_t leaves(void *user, const char *, const void *mine, size_t bytes, void *all, uint64_t) {
  Leaving *own = static_cast<Leaving *>(user);
  tokenyard_world_t *world = own->world;
  own->world = nullptr;
  tokenyard_world_destroy(world); // NULL while the world is formed
  CHECK(own->released == 0);
  memcpy(all, mine, bytes);
  return 0;
}

extern "C" void has_left(void *user) { static_cast<Leaving *>(user)->released++; }

/// A world that is destroyed during its collective goes once the collective is over.
void destroyed_meanwhile() {
  Leaving leaving{nullptr, 0};
  tokenyard_over_t over = tokenyard_over_init();
  over.ranks = 1;
  over.all_gather = leaves;
  over.release = has_left;
  over.user = &leaving;
  OK(tokenyard_world_over(&over, &leaving.world));
  OK(tokenyard_world_barrier(leaving.world));
  CHECK(leaving.world == nullptr && leaving.released == 1);
}

} // namespace

int main() {
  run(3, layer);
  run(2, by_token);
  run(3, masked);
  run(2, without_the_other);
  run(2, of_another_format);
  run(2, in_place);
  run(2, counts_with_a_check);
  run_over(2);
  destroyed_meanwhile();
  printf("threads: all right\n");
  return 0;
}
