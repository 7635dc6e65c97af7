/*
 * A small layer, and what it must give, computed here alone: experts differ, weights differ, and all numbers are small
 * multiples of 1/8, so that sums in fp32 are exact in any order.
 */
#ifndef TOKENYARD_TESTS_LAYER_H
#define TOKENYARD_TESTS_LAYER_H

#include <stdint.h>

#include "check.h"

enum {
  HIDDEN = 64,
  EXPERTS = 7,
  TOP_K = 3,
  MAX_TOKENS = 5,
  MOST_RANKS = 4,
  MOST_ROWS = MOST_RANKS * MAX_TOKENS * TOP_K
};

/* Rank 0 has most tokens, and with three ranks the last one has none. */
static inline int tokens_of(int rank, int ranks) { return rank > 1 && rank == ranks - 1 ? 0 : MAX_TOKENS - rank; }

static inline float element(int rank, int token, int column) { return (float)(1 + rank * 3 + token * 2 + column % 7); }

/* Distinct experts of a token; one choice in five is none. */
static inline int expert(int rank, int token, int k) {
  return (rank + token + k) % 5 == 4 ? -1 : (rank * 2 + token * 3 + k * 2) % EXPERTS;
}

static inline float weight(int rank, int token, int k) { return (float)(1 + (rank + 2 * token + 3 * k) % 6) / 8; }

/* What expert `e` makes of an element. */
static inline float computed(int e, float x, int column) { return (float)(e + 1) * x + (float)(e * 2 + column % 3); }

/* The rank of an expert, by consecutive experts. */
static inline int owner(int e, int ranks) { return e * ranks / EXPERTS; }

/* Rows that a rank gets of an expert, in the order of (source, token): by source and token; returns how many. */
static inline int rows_of(int e, int ranks, int (*rows)[2]) {
  int rank, token, k, count = 0;
  for (rank = 0; rank < ranks; rank++)
    for (token = 0; token < tokens_of(rank, ranks); token++)
      for (k = 0; k < TOP_K; k++)
        if (expert(rank, token, k) == e) {
          rows[count][0] = rank;
          rows[count][1] = token;
          count++;
        }
  return count;
}

/* The sum that combine must give. */
static inline float sum_of(int rank, int token, int column) {
  float sum = 0;
  int k;
  for (k = 0; k < TOP_K; k++) {
    int e = expert(rank, token, k);
    if (e >= 0) sum += weight(rank, token, k) * computed(e, element(rank, token, column), column);
  }
  return sum;
}

/* The memory of one rank, which the CPU device reads and writes where it is. */
struct memory {
  float x[MAX_TOKENS][HIDDEN];
  float rows[MOST_ROWS][HIDDEN];
  float out[MAX_TOKENS][HIDDEN];
  int32_t topk_idx[MAX_TOKENS][TOP_K];
  int64_t wide_idx[MAX_TOKENS][TOP_K + 1];
  float topk_weight[MAX_TOKENS][TOP_K];
  int32_t expert_count[EXPERTS];
  int32_t expert_offset[EXPERTS + 1];
  int32_t source[MOST_ROWS][2];
  int32_t row_count;
  int32_t count;
};

static inline tokenyard_view_t view_of(void *pointer, size_t bytes) {
  tokenyard_view_t view;
  view.pointer = pointer;
  view.bytes = bytes;
  return view;
}

#define VIEW(array) view_of((array), sizeof(array))

/* Memory that is 64-byte aligned. */
static inline struct memory *memory_of(int rank, int ranks, void **block) {
  struct memory *m;
  int t, k, c;
  *block = malloc(sizeof *m + 64);
  CHECK(*block != NULL);
  m = (struct memory *)(((uintptr_t)*block + 63) / 64 * 64);
  memset(m, 0, sizeof *m);
  m->count = tokens_of(rank, ranks);
  for (t = 0; t < MAX_TOKENS; t++) {
    for (c = 0; c < HIDDEN; c++) m->x[t][c] = element(rank, t, c);
    for (k = 0; k < TOP_K; k++) {
      m->topk_idx[t][k] = expert(rank, t, k);
      m->wide_idx[t][k] = expert(rank, t, k);
      m->topk_weight[t][k] = weight(rank, t, k);
    }
  }
  return m;
}

static inline tokenyard_config_t config_of(const tokenyard_device_t *device) {
  tokenyard_config_t config = tokenyard_config_init();
  config.device = device;
  config.hidden = HIDDEN;
  config.experts = EXPERTS;
  config.top_k = TOP_K;
  config.max_tokens_per_rank = MAX_TOKENS;
  config.format = TOKENYARD_FORMAT_FP32;
  config.combine_dtype = TOKENYARD_DTYPE_FP32;
  config.sms = 2;
  config.timeout_ms = PATIENCE_MS / 2;
  return config;
}

static inline tokenyard_tokens_t tokens_in(struct memory *m) {
  tokenyard_tokens_t tokens = tokenyard_tokens_init();
  tokens.count = (size_t)m->count;
  tokens.x = VIEW(m->x);
  tokens.topk_idx = VIEW(m->topk_idx);
  tokens.topk_weight = VIEW(m->topk_weight);
  return tokens;
}

static inline tokenyard_output_t output_in(struct memory *m, uint32_t align) {
  tokenyard_output_t output = tokenyard_output_init();
  output.layout.kind = TOKENYARD_LAYOUT_CONTIGUOUS;
  output.layout.align = align;
  output.layout.capacity = MOST_ROWS;
  output.rows = VIEW(m->rows);
  output.expert_count = VIEW(m->expert_count);
  output.expert_offset = VIEW(m->expert_offset);
  output.source = VIEW(m->source);
  output.row_count = view_of(&m->row_count, sizeof m->row_count);
  return output;
}

static inline tokenyard_rows_t rows_in(struct memory *m) {
  tokenyard_rows_t rows = tokenyard_rows_init();
  rows.rows = VIEW(m->rows);
  return rows;
}

static inline tokenyard_combined_t combined_in(struct memory *m) {
  tokenyard_combined_t combined = tokenyard_combined_init();
  combined.dtype = TOKENYARD_DTYPE_FP32;
  combined.out = VIEW(m->out);
  return combined;
}

/* Compares every row that was dispatched with what this rank must have, and computes the experts in place. */
static inline void compute_experts(struct memory *m, int rank, int ranks, int align) {
  int e, local = 0, at = 0, i, c, wanted[MOST_ROWS][2];
  for (e = 0; e < EXPERTS; e++) {
    int count;
    if (owner(e, ranks) != rank) continue;
    count = rows_of(e, ranks, wanted);
    CHECK(m->expert_count[local] == count && m->expert_offset[local] == at);
    for (i = 0; i < count; i++) {
      CHECK(m->source[at + i][0] == wanted[i][0] && m->source[at + i][1] == wanted[i][1]);
      for (c = 0; c < HIDDEN; c++) {
        float *place = &m->rows[at + i][c];
        CHECK(*place == element(wanted[i][0], wanted[i][1], c));
        *place = computed(e, *place, c);
      }
    }
    local++;
    at += (count + align - 1) / align * align;
  }
  CHECK(m->expert_offset[local] == at && m->row_count == at);
}

/* Compares every sum, and clears what a call has written. */
static inline void check_sums(struct memory *m, int rank) {
  int t, c;
  for (t = 0; t < MAX_TOKENS; t++)
    for (c = 0; c < HIDDEN; c++) CHECK(m->out[t][c] == (t < m->count ? sum_of(rank, t, c) : 0));
  memset(m->out, 0, sizeof m->out);
  memset(m->rows, 0, sizeof m->rows);
  memset(m->expert_count, 0, sizeof m->expert_count);
}

#endif
