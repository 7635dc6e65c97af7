/* What a test can ask the EFA double, besides libfabric's own calls. Symbols of the shared object, found by dlsym:
 *
 *   const struct tokenyard_double_counts *tokenyard_double_counts(void);
 *   int tokenyard_double_peer(uint32_t nic, const void *name, struct tokenyard_double_peer *out);
 *   int tokenyard_double_region(uint64_t key, struct tokenyard_double_region *out);
 *
 * And what it appends to the file that TOKENYARD_EFA_LOG names: a JSON object a line, each with `event`, `pid`, `device`
 * ("rdmap0s0") and `call`.
 *
 *   register, deregister  region (number in the process), key, and what was registered:
 *                         fabric, kind ("host"; of a GPU "address", "dmabuf"), iface ("system", "cuda"), hmem_device,
 *                         fd, fd_bytes, fd_name ("/memfd:NAME (deleted)"), offset, length, base (what peers name the
 *                         first byte), access and flags (numbers of libfabric), requested_key
 *   refuse                rule ("regions"), errno, and what was to be registered
 *   read                  at the side that is read, once it is done: key, length, settled (packets of writes to the GPU
 *                         that it made visible; always 0 without TOKENYARD_EFA_UNFLUSHED)
 */
#ifndef TOKENYARD_EFA_DOUBLE_H
#define TOKENYARD_EFA_DOUBLE_H

#include <stdint.h>

/* Rules that refuse or fail something. `refused` counts by rule. */
enum tokenyard_double_rule {
    RULE_FULL,                /* 0: -FI_EAGAIN at the transmit or receive depth */
    RULE_ARGUMENT,            /* 1: a post refused at once */
    RULE_LOCAL_KEY,           /* 2: status 5 */
    RULE_LENGTH,              /* 3: status 6 */
    RULE_REMOTE_ADDRESS,      /* 4: status 7 */
    RULE_DEST_QPN,            /* 5: status 9 */
    RULE_RNR,                 /* 6: status 10 */
    RULE_RECEIVE_SHORT,       /* 7: status 11 */
    RULE_UNRESPONSIVE,        /* 8: status 13 or 15 */
    RULE_UNKNOWN_PEER,        /* 9: status 14 */
    RULE_FEATURE,             /* 10: status 18, or -FI_EOPNOTSUPP */
    RULE_OVERRUN,             /* 11: completions lost by an overrun queue */
    RULE_STALL,               /* 12: emulated writes beyond the pool */
    RULE_REGIONS,             /* 13: registrations refused */
    RULE_QPS,                 /* 14: endpoints refused */
    RULE_CONTEXT,             /* 15: an operation's context was overwritten while the provider owned it */
    RULE_UNSOLICITED_ERROR,   /* 16: errors made by TOKENYARD_EFA_FAIL_UNSOLICITED */
    RULE_COUNT
};

/* Counted in this process since it loaded the library. */
struct tokenyard_double_counts {
    uint64_t bytes; /* of this structure */
    uint64_t posts, doorbells, packets_sent, packets_placed, duplicates_sent, duplicates_placed;
    uint64_t out_of_order;   /* packets placed whose offset is below that of the packet before */
    uint64_t operations_swapped; /* packets sent for an operation while an older one to that peer had packets left */
    uint64_t payload_bytes, immediates, messages;
    uint64_t refused[RULE_COUNT];
    uint64_t nic_posts[32], nic_doorbells[32];
};

struct tokenyard_double_peer {
    uint64_t posts, doorbells; /* doorbells that released at least one post to this peer */
};

struct tokenyard_double_region {
    uint64_t base, bytes, access, flags;
    uint64_t fd_offset, fd_bytes; /* of a dma-buf: offset registered, and the size that its descriptor tells, or 0 */
    int32_t fd, nic;
};

#endif
