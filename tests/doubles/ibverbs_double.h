/* What a test can ask the libibverbs double, besides the calls of libibverbs. Symbols of the shared object, found by
 * dlsym:
 *
 *   const struct tokenyard_ibverbs_counts *tokenyard_ibverbs_counts(void);
 *   size_t tokenyard_ibverbs_records(struct tokenyard_ibverbs_record *out, size_t room);
 *
 * The second gives the regions that are registered now, oldest first, and returns their number.
 *
 * TOKENYARD_IBVERBS_LOG names a file to which each process appends a line of JSON for each of these events:
 *
 *   register, deregister   a region; deregister repeats all fields of register
 *   refuse                 a call that failed, with its rule and errno; a registration with all its arguments
 *   partition              a queue pair of another P_Key than that of index 0, with the key in hexadecimal
 *   leak                   what was left at ibv_close_device or at the end of the process; a region with all its fields
 *   misuse                 a call with an object that is gone, and the object's kind
 */
#ifndef TOKENYARD_IBVERBS_DOUBLE_H
#define TOKENYARD_IBVERBS_DOUBLE_H

#include <stdbool.h>
#include <stdint.h>

/* Rules that refuse or fail something, with their names in the log. `refused` counts by rule. */
#define TOKENYARD_IBVERBS_RULES(RULE)                                                                        \
    RULE(ACCESS, access)                     /* access flags: EINVAL; on-demand paging: EOPNOTSUPP */        \
    RULE(PAGE_OFFSET, page_offset)           /* iova and start differ within the page: EINVAL */             \
    RULE(RANGE, range)                       /* length 0, beyond the dma-buf, or past 2^64: EINVAL */        \
    RULE(FD, fd)                             /* closed: EBADF; neither dma-buf nor memfd: EINVAL */          \
    RULE(NO_DMABUF, no_dmabuf)               /* EOPNOTSUPP, or the errno that is set */                      \
    RULE(NO_DATA_DIRECT, no_data_direct)     /* EINVAL, path ENODEV; or the errno that is set */             \
    RULE(DATA_DIRECT_IOVA, data_direct_iova) /* iova is not page-aligned: EOPNOTSUPP */                      \
    RULE(MAPPING, mapping)                   /* the dma-buf's mapping does not suit the call: 524 */         \
    RULE(UNMAPPED, unmapped)                 /* the process has no such memory: EFAULT */                    \
    RULE(MEMLOCK, memlock)                   /* ENOMEM; EPERM where nothing may be locked */                 \
    RULE(PAGES, pages)                       /* of one region: ENOMEM; of a dma-buf: EINVAL */               \
    RULE(REGIONS, regions)                   /* of the device: ENOMEM */                                     \
    RULE(KEYS, keys)                         /* of the device: EAGAIN */                                     \
    RULE(BUSY, busy)                         /* an object that others need: EBUSY */                         \
    RULE(ARGUMENT, argument)                 /* other arguments: mostly EINVAL */                            \
    RULE(STATE, state)                       /* a queue pair's state: EINVAL */                              \
    RULE(FULL, full)                         /* a queue: ENOMEM */                                           \
    RULE(LOCAL_KEY, local_key)               /* a post outside the region of its key */                      \
    RULE(OVERRUN, overrun)                   /* completions that found their queue full, and are lost */

enum tokenyard_ibverbs_rule {
#define TOKENYARD_IBVERBS_RULE(upper, lower) IBVERBS_##upper,
    TOKENYARD_IBVERBS_RULES(TOKENYARD_IBVERBS_RULE)
#undef TOKENYARD_IBVERBS_RULE
    IBVERBS_RULES
};

/* Counted in this process since it loaded the library. */
struct tokenyard_ibverbs_counts {
    uint64_t bytes; /* of this structure */
    uint64_t registered, deregistered, live_regions, leaks, misuses;
    uint64_t refused[IBVERBS_RULES];
};

enum tokenyard_ibverbs_kind {
    IBVERBS_PLAIN,       /* ibv_reg_mr */
    IBVERBS_IOVA,        /* ibv_reg_mr_iova2 */
    IBVERBS_DMABUF,      /* ibv_reg_dmabuf_mr, or mlx5dv_reg_dmabuf_mr without data direct */
    IBVERBS_DATA_DIRECT, /* mlx5dv_reg_dmabuf_mr with data direct */
};

struct tokenyard_ibverbs_record {
    uint64_t number;                 /* of the registration in this process, from 1 */
    uint64_t address;                /* plain and iova alone */
    uint64_t offset, fd_bytes;       /* dma-bufs alone; fd_bytes: the size that the descriptor gave */
    uint64_t length, iova;
    uint32_t kind, access, lkey, rkey, nic;
    int32_t fd;
    bool is_peer_memory;
};

#endif
