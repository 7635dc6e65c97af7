/* What the rules of efa_rules.c are tried with: processes, barriers between them, and one side of a connection. */
#ifndef TOKENYARD_EFA_RULES_RIG_H
#define TOKENYARD_EFA_RULES_RIG_H

#include "efa_double.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEMORY = 64 << 10, RANKS = 3, NICS = 4 };
#define MODES (FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL | FI_MR_HMEM)
#define DMABUF (1ULL << 40)
/* Options of include/rdma/fi_ext.h at tag v2.6.0 that headers of version 1.17 lack. */
enum { EMULATED_WRITE = -(0xefa << 16) + 2, WRITE_IN_ORDER = EMULATED_WRITE + 4, UNSOLICITED = EMULATED_WRITE + 6 };
enum { SHARED_MEMORY = 11 };
/* For what must come. A machine may pause a process for seconds. */
enum { PATIENCE_MS = 30000 };

#define CHECK(condition, ...)                                                                          \
    do {                                                                                               \
        if (!(condition)) {                                                                            \
            fprintf(stderr, "%s:%d: not so: %s (", __FILE__, __LINE__, #condition);                    \
            fprintf(stderr, __VA_ARGS__);                                                              \
            fprintf(stderr, ")\n");                                                                    \
            exit(1);                                                                                   \
        }                                                                                              \
    } while (0)

struct library {
    uint32_t (*version)(void);
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const struct tokenyard_double_counts *(*counts)(void);
    int (*peer)(uint32_t, const void *, struct tokenyard_double_peer *);
    int (*region)(uint64_t, struct tokenyard_double_region *);
};
extern struct library lib;
#define COUNTS lib.counts()

/* Memory of all ranks of a rule. */
struct rig {
    _Atomic uint64_t arrived[RANKS];
    _Atomic bool dead[RANKS];
    int ranks;
    uint64_t words[RANKS][4];
    struct { uint8_t name[32]; uint64_t base, key; } side[RANKS][NICS];
};
extern struct rig *rig;

/* An endpoint with all that belongs to it. The first fields choose how it is opened. */
struct side {
    uint32_t api;
    bool may_fail, before_enable, no_eq, rx_cq_data, no_hmem, remote_alone;
    uint64_t rma; /* directions asked for; 0: none is named */
    int enabled;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_eq *eq;
    struct fid_ep *ep;
    struct fid_mr *mr;
    void *desc;
    uint8_t *memory, name[32];
    uint64_t base, key;
};

struct rule {
    const char *name;
    int ranks;
    const char *settings; /* NAME=VALUE ..., each for TOKENYARD_EFA_NAME, or FI_NAME=VALUE as it is */
    void (*run)(int rank);
    int aborts; /* the rank that must end by abort(), or -1 */
};

uint64_t milliseconds(void);
void barrier(void);
void pump_until_barrier(struct side *side);
void finish(struct side *side);
struct fi_context2 *new_context(void);
/* Opens a side; one that was not filled before must be all zeros but for the choices. */
void open_side(struct side *side, uint32_t nic, const char *fabric, size_t cq_size);
void enable_side(struct side *side);
void close_side(struct side *side);
int register_at(struct side *side, void *memory, size_t bytes, uint64_t access, struct fid_mr **mr);
fi_addr_t insert_name(struct side *side, const void *name);
void share(struct side *side, int rank, int nic);
void exchange(struct side *side, int ranks, int rank, fi_addr_t *peers);
ssize_t put(struct side *side, fi_addr_t to, size_t offset, size_t bytes, uint64_t address, uint64_t key,
            uint64_t flags,
            uint64_t data, void *context);
ssize_t write_to(struct side *side, const fi_addr_t *peers, int to, size_t bytes, uint64_t flags);
void send_to(struct side *side, fi_addr_t to, size_t bytes);
int poll_side(struct side *side, struct fi_cq_data_entry *entry, struct fi_cq_err_entry *error, unsigned timeout_ms);
void expect_done(struct side *side, const char *what);
void expect_event(struct side *side, int status, int error, const char *what);
void expect_error(struct side *side, int status, int error, const char *what);
int register_gpu(struct side *side, void *address, size_t bytes, uint64_t access, struct fid_mr **mr);
int register_dma_buf(struct side *side, int fd, uint64_t offset, size_t bytes, void *base, struct fid_mr **mr);
ssize_t get(struct side *side, fi_addr_t from, void *buffer, size_t bytes, void *desc, uint64_t address, uint64_t key);
void data_test(int rank, int ranks, bool kill_last);
/* efa_rules_memory.c */
extern const struct rule memory_rules[];
extern const size_t memory_rule_count;
int run_rules(const struct rule *rules, size_t rule_count, int count, char **arguments);

#endif
