/* The EFA double: a shared object that presents itself as libfabric with the provider `efa`.
 *
 * It stands in for the device and its provider where no EFA device exists. Packets move through files that processes
 * map from one directory. Each rule that the double enforces cites the document that states the rule.
 *
 *   initiator: fi_writemsg -> staged -> doorbell -> pending -> (cq_read) packets -> link ring
 *   target:    (cq_read) link ring -> checks -> its own memory -> completion queue, answer -> link's answer ring
 *   initiator: (cq_read) answer ring -> completion queue
 *
 * A read's packets are empty when they leave. The target fills them in, and the initiator takes the bytes from there.
 *
 * A process writes its own memory only. So closing a region ends all access to it at once, and a killed process leaves
 * nothing half done in another. Shared memory holds no lock: each ring has one producer and one consumer, and a queue
 * pair's table of links takes entries by one compare-and-swap each.
 *
 * Not shown, since a caller that keeps to the documents cannot tell:
 *   - errors of the answer to a handshake, which are passed over or need a fault of the provider (efa_wire.c,
 *     fail_handshake);
 *   - shm within the fabric efa, which nothing here holds for (efa_post.c): its posts are refused with
 *     TOKENYARD_EFA_LOCAL=1, and peers are those of other hosts without;
 *   - the fabric efa between polls (efa_objects.c, run_device).
 * A batch that overfills the queue is rolled back where the provider does so (efa_post.c). A caller sees it only if it
 * posts to a queue that it knows to be full.
 *
 * All paths of libfabric's source below are of its tree of August 2026 (after tag v2.6.0) if no tag is named.
 */
#ifndef TOKENYARD_DOUBLE_EFA_H
#define TOKENYARD_DOUBLE_EFA_H

#include "efa_double.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EFA_MAX_NICS = 32,
    EFA_MAX_LINKS = 1024, /* initiators that one queue pair takes in its life at once */
    EFA_MAX_IOV = 2,
    EFA_MAX_QPS = 256, /* of a NIC: ofiwg/libfabric issue 9356 */
    EFA_NAME_BYTES = 32, /* prov/efa/src/efa_av.h, struct efa_ep_addr: 16 + 2 + 2 + 4, and a pointer */
};

/* Endpoint names, as struct efa_ep_addr lays them out. */
struct name {
    uint8_t gid[16];
    uint16_t qpn;
    uint16_t pad;
    uint32_t qkey;
    uint64_t unused;
};
_Static_assert(sizeof(struct name) == EFA_NAME_BYTES, "an EFA address has 32 bytes");

/* Settings, from the environment (efa.c). */
struct config {
    uint32_t version;       /* that fi_version answers */
    uint32_t nics, qps, regions, depth, receives, cq_default, batch, slots, packet, part_id;
    uint64_t pages, total_pages, page_bytes, max_rdma, mtu;
    uint32_t unreachable_ms, killed_status, pool;
    bool reorder, rdma, direct, overrun_event, unsolicited, is_auto;
    bool data_path, shm_transfer, is_local; /* data_path: the provider writes to the device's queues by itself */
    uint32_t duplicates, delays; /* per 1000 */
    uint64_t fail_unsolicited;   /* this arrival of an immediate, counted from 1, becomes an error; 0: none */
    bool gpus, p2p, p2p_disabled, dmabuf_offset, unflushed; /* p2p: device and GPUs reach each other */
    uint32_t dmabuf, peer_memory; /* 1: works; 0: the device cannot; else the errno of registrations */
    uint64_t seed;
    char directory[128], scope[48], log[256];
};
extern struct config config;
extern struct tokenyard_double_counts counts;

/* ---- shared between processes ---------------------------------------------------------------------------------- */

struct owner {
    int32_t pid;
    uint32_t unused;
    uint64_t started; /* as /proc/PID/stat tells, so that a new process with the same number is another owner */
};

/* One file for each queue pair. The owner makes it; initiators add claims. */
struct shared_qp {
    _Atomic uint32_t ready; /* 1 once all other fields are valid; 2 once the queue pair is closed */
    uint32_t nic;
    struct owner owner;
    struct name name;
    uint32_t unsolicited;
    _Atomic uint32_t claimed;                /* changes after each claim */
    /* 0, or nic << 32 | qpn << 1 | 1 of an initiator whose link file is ready. */
    _Atomic uint64_t claims[EFA_MAX_LINKS];
};

enum packet_kind { PACKET_WRITE = 1, PACKET_SEND, PACKET_READ };
enum {
    PACKET_IMM = 1,
    PACKET_DUPLICATE = 2,
    PACKET_EMULATED = 4,
    PACKET_EMPTY = 8,   /* memory out of reach */
    PACKET_SERVED = 16, /* of a read: the target has put the bytes here, for the initiator to take */
};

struct packet {
    uint16_t kind, flags;
    uint32_t op, use; /* the initiator's slot, and the number of its use */
    uint32_t packets;        /* of this operation, duplicates not counted */
    uint64_t total, offset;  /* bytes of the operation; this packet's place in it */
    uint64_t address, key;
    uint32_t bytes, imm;
    uint8_t data[];
};

struct answer {
    uint16_t op, status;
    uint32_t use;
};

/* One file for each initiator and target. `sent` and `answers_taken` belong to the initiator, the others to the
 * target. A store with release order to `sent` or `answered` publishes the entries before it. */
struct shared_link {
    struct owner owner; /* the initiator's process */
    struct name initiator;
    uint32_t depth, slots, packet, unsolicited;
    _Alignas(64) _Atomic uint64_t sent;
    _Atomic uint32_t initiator_closed;
    _Alignas(64) _Atomic uint64_t taken;
    _Alignas(64) _Atomic uint64_t answered;
    _Atomic uint32_t target_closed, known; /* known: the target has answered the handshake */
    _Alignas(64) _Atomic uint64_t answers_taken;
    _Alignas(64) uint8_t rest[]; /* answers[depth], then the packets */
};

/* ---- of this process ------------------------------------------------------------------------------------------- */

struct domain;
struct endpoint;
struct link_out;

enum region_kind { REGION_HOST, REGION_ADDRESS /* of a GPU */, REGION_DMABUF };

struct region {
    struct fid_mr fid;
    struct domain *domain;
    uint64_t base, bytes, pages, access;
    uint8_t *mapping; /* where the processor finds the bytes; NULL: it does not reach them, and no byte is moved */
    bool is_hmem, is_mapped, is_copied; /* is_copied: the device does not reach it */
    int fd, hmem_device;
    uint32_t kind, iface;
    uint64_t fd_offset, fd_bytes, flags, requested_key;
    char fd_name[96];
};

struct av {
    struct fid_av fid;
    struct domain *domain;
    struct name *names;
    bool *used;
    size_t count, room;
    uint64_t version; /* changes with each insertion and removal */
};

enum entry_kind { ENTRY_TX, ENTRY_RECEIVE, ENTRY_IMM };

struct entry {
    struct endpoint *endpoint; /* NULL: of a closed one, to be passed over */
    void *context;
    uint64_t flags, data;
    size_t bytes;
    struct name source;
    uint64_t serial; /* of an immediate: how many came to the endpoint before it, and it */
    uint32_t op;
    uint16_t kind, status;
};

struct cq {
    struct fid_cq fid;
    struct domain *domain;
    enum fi_cq_format format;
    struct entry *entries;
    size_t size, head, count;
    bool overrun;
    struct endpoint *endpoints[64];
    size_t endpoint_count;
    char text[256];
};

struct eq {
    struct fid_eq fid;
    struct fi_eq_err_entry errors[64];
    size_t head, count;
};

enum op_state { OP_FREE, OP_QUEUED, OP_STAGED, OP_ACTIVE, OP_STALLED, OP_DONE };

struct op {
    uint8_t state, kind;
    bool silent, has_imm, emulated, is_inline;
    uint32_t generation, use, tries;
    struct link_out *link;
    struct { const uint8_t *base; size_t bytes; struct region *region; uint64_t key; } pieces[EFA_MAX_IOV];
    uint32_t piece_count, imm;
    uint64_t total, address, key, flags;
    void *context;
    uint32_t packets, sent, first, step;
    uint8_t *inline_bytes;
};

struct link_out {
    struct endpoint *endpoint;
    struct name peer;
    uint32_t peer_nic;
    struct shared_link *shared;
    struct shared_qp *peer_qp;
    size_t shared_bytes;
    struct answer *answers;
    uint8_t *packets;
    uint64_t reaped; /* packets that the target has taken, and whose bytes, if of a read, are in their place */
    uint32_t *pending, pending_count, *queued, queued_count, outstanding, reads;
    bool is_open, is_gone, found, rung;
    enum { HANDSHAKE_NONE, HANDSHAKE_BY_MESSAGE, HANDSHAKE_ASKED, HANDSHAKE_FAILED } handshake; /* of the fabric efa */
    uint64_t checked_ms, dead_ms; /* dead_ms: when the peer's process was found dead, or 0 */
    struct tokenyard_double_peer *record;
    struct link_out *next;
};

struct receive {
    void *buffer, *context;
    size_t bytes;
};

struct arrival {
    uint32_t use, left;
    struct receive into; /* of a message */
    bool has_receive, is_answered;
    uint64_t settled; /* of a read: packets that it made visible */
};

struct link_in {
    struct shared_link *shared;
    size_t shared_bytes;
    struct answer *answers;
    uint8_t *packets;
    struct arrival *arrivals; /* by the initiator's slot */
    uint64_t av_version, last_offset, answered;
    bool is_known;
    uint32_t place; /* in the table of claims */
};

struct endpoint {
    struct fid_ep fid;
    struct domain *domain;
    struct av *av;
    struct cq *tx_cq, *rx_cq;
    struct eq *eq;
    bool is_direct, is_enabled, is_emulated, is_unsolicited, takes_cq_data, is_selective, is_homogeneous;
    bool has_shm, uses_shm; /* for peers of this host */
    bool has_overfilled; /* a post of the batch that is open found the queue full: efa_post.c */
    uint64_t caps, tx_flags;
    size_t rnr_retry, inject;
    uint32_t depth, receives, next_use;
    struct name name;
    char path[256];
    struct shared_qp *qp;
    struct op *ops;
    uint8_t *inline_bytes;
    uint32_t *free, free_count, *staged, staged_count, emulated_count, handshaking;
    struct receive *posted;
    uint32_t posted_head, posted_count, claims_seen;
    struct link_out *links, **by_address;
    size_t by_address_room;
    struct link_in *in[EFA_MAX_LINKS];
    size_t in_count;
    struct late *late; /* efa_regions.c */
    size_t late_count, late_room;
    uint64_t imms, imms_reported;
};

struct fabric {
    struct fid_fabric fid;
    bool is_direct;
};

struct domain {
    struct fid_domain fid;
    struct fabric *fabric;
    uint32_t nic;
    uint64_t region_count, page_count;
    bool has_hmem;
    size_t least_cq;
    atomic_flag lock; /* of this process alone; a killed peer cannot hold it */
    uint64_t random;
    struct endpoint *endpoints[EFA_MAX_QPS]; /* enabled ones, for the device's thread */
    size_t endpoint_count;
    pthread_t device;
    bool has_device;
    _Atomic bool is_closing;
};

/* efa.c */
void load_config(void);
uint64_t next_random(uint64_t *state);
bool chance(uint64_t *state, uint32_t per_mille);
uint64_t now_ms(void);
void gid_of_nic(uint32_t nic, uint8_t *gid);
uint32_t nic_of_gid(const uint8_t *gid);
void add(uint64_t *count, uint64_t more); /* of counts, which all threads have */
void refuse(enum tokenyard_double_rule rule);
int errno_of_status(uint32_t status);
const char *text_of_status(uint32_t status);
__attribute__((format(printf, 4, 5)))
void log_event(const char *event, uint32_t nic, const char *call, const char *more, ...);

/* efa_objects.c */
void lock(struct domain *domain);
void unlock(struct domain *domain);
void attach(struct endpoint *endpoint);
void detach(struct endpoint *endpoint);
int open_av(struct fid_domain *fid, struct fi_av_attr *attr, struct fid_av **av, void *context);

/* efa_regions.c */
extern struct fi_ops_mr region_calls;
struct region *find_region(uint64_t key);
void number_regions(void);
void keep_late(struct endpoint *endpoint, const struct link_in *link, struct region *region,
               const struct packet *packet);
void end_late(struct endpoint *endpoint, const struct link_in *link, const struct packet *packet, uint64_t serial);
uint64_t settle_late(struct endpoint *endpoint, int device);

/* efa_queues.c */
int open_cq(struct fid_domain *fid, struct fi_cq_attr *attr, struct fid_cq **cq, void *context);
int open_eq(struct fid_fabric *fid, struct fi_eq_attr *attr, struct fid_eq **eq, void *context);
void push_entry(struct cq *cq, const struct entry *entry);
void eq_error(struct endpoint *endpoint, int error, int status);

/* efa_endpoint.c */
int open_endpoint(struct fid_domain *fid, struct fi_info *info, struct fid_ep **ep, void *context);
void release_op(struct endpoint *endpoint, uint32_t index);
bool uses_device_rdma(uint32_t api);
void forget_queued(struct endpoint *endpoint, const struct name *peer);

/* efa_post.c */
extern struct fi_ops_msg message_calls;
extern struct fi_ops_rma rma_calls;
void stage_op(struct endpoint *endpoint, uint32_t index, uint64_t flags);

/* efa_link.c */
int open_qp(struct endpoint *endpoint);
void close_qp(struct endpoint *endpoint);
struct link_out *link_to(struct endpoint *endpoint, fi_addr_t address);
bool try_open_link(struct link_out *link);
bool is_owner_dead(const struct owner *owner);
void take_claims(struct endpoint *endpoint);
void drop_link_in(struct endpoint *endpoint, size_t index);
void sweep(void);

/* efa_wire.c */
void progress(struct endpoint *endpoint);

#endif
