/* The libibverbs double: a shared object that presents itself as libibverbs.so.1, with NICs that register memory.
 *
 * It moves no bytes. It holds a caller to what kernel, driver and device refuse when memory is registered: plainly, by
 * dma-buf and by dma-buf over data direct. Queue pairs go through their states, and sends are accepted; they complete
 * by flush errors alone. Each rule that the double enforces cites the document that states the rule.
 *
 *   ibverbs.c           settings, log, devices, ports, protection domains, address handles
 *   ibverbs_regions.c   registration
 *   ibverbs_queues.c    completion queues, shared receive queues, queue pairs
 *   ibverbs_mlx5.c      a second shared object, libmlx5: data direct
 *
 * "rdma-core" is its tree of August 2026 (commit 691953d8); "kernel" is Linux 6.12 and later.
 */
#ifndef TOKENYARD_DOUBLE_IBVERBS_H
#define TOKENYARD_DOUBLE_IBVERBS_H

#include "ibverbs_double.h"

#include <infiniband/verbs.h>

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define IBVERBS_MAGIC 0x7661726420696264ull

enum {
    MAX_DEVICES = 32,
    PAGE = 4096, /* the kernel's PAGE_SIZE, which the rules of registration compare with */
    NOT_SUPPORTED = 524, /* the kernel's ENOTSUPP, which strerror does not know */
};

/* From the environment, for each device its own (ibverbs.c). A context keeps what was set when it was opened. */
/* Places of a port's table of partitions. */
#define MAX_PKEYS 32

struct settings {
    uint32_t dmabuf;            /* 1: supported; 0: EOPNOTSUPP; else that errno */
    uint32_t data_direct;       /* 1: the device has it */
    uint32_t data_direct_errno; /* not 0: what registration over data direct fails with */
    bool matching;              /* mappings must suit the call */
    bool peer_memory, is_infiniband;
    uint32_t port_state, mtu, part, depth;
    uint64_t memlock, pages, regions, keys, prefix;
    uint16_t pkey[MAX_PKEYS];
    uint32_t pkeys;
};

struct device {
    struct ibv_device device;
    uint32_t index, references; /* lists and contexts that have it */
    uint64_t regions, keys;     /* in use */
};

struct context {
    struct ibv_context context;
    uint64_t magic;
    const struct mlx5_calls *mlx5; /* NULL: a device of another maker */
    struct device *device;
    struct settings settings;
    bool live;
    struct context *next;
};

struct pd {
    struct ibv_pd pd;
    struct context *context;
    uint32_t users; /* regions, queue pairs, shared receive queues, address handles */
    bool live;
    struct pd *next;
};

struct region {
    struct ibv_mr mr;
    struct pd *pd;
    struct tokenyard_ibverbs_record record;
    char call[32], fd_name[96];
    uint64_t locked; /* pages that count against the limit of locked memory */
    uint32_t keys;
    bool live;
    struct region *next;
};

/* What libmlx5 finds behind a context of a device mlx5_*, as the driver's own table. */
struct mlx5_calls {
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                    int access, int mlx5_access);
    int (*get_data_direct_sysfs_path)(struct ibv_context *context, char *buffer, size_t bytes);
};

/* ibverbs.c */
extern struct tokenyard_ibverbs_counts counts;
void lock(void);
void unlock(void);
/* Appends a line of JSON: event, process, device and call, then `more`, which begins with a comma where it is not
 * empty. */
void log_event(const char *event, const struct context *context, const char *call, const char *more);
/* Counts and records a refusal; returns the error number, to which errno is set. */
int refuse(const struct context *context, const char *call, enum tokenyard_ibverbs_rule rule, int number,
           const char *why, ...) __attribute__((format(printf, 5, 6)));
const char *rule_name(enum tokenyard_ibverbs_rule rule);
/* Records the use of an object that is gone; returns ENOENT, to which errno is set. */
int misuse(const char *call, const char *what);
void leak(const struct context *context, const char *call, const char *what, uint64_t count);
int check_address_vector(const struct context *context, const char *call, const struct ibv_ah_attr *attr);

/* ibverbs_regions.c */
extern const struct mlx5_calls mlx5_calls;
bool covers(const struct pd *pd, uint32_t lkey, uint64_t address, uint64_t bytes);
void leak_regions(const struct context *context, const char *call);
void use_of_memory_began(void);

/* ibverbs_queues.c */
void install_queue_calls(struct context *context);
void leak_queues(const struct context *context, const char *call);

#endif
