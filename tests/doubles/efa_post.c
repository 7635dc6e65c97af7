/* Posting: what the provider checks at once, and when it rings the doorbell.
 *
 * A post on efa-direct becomes an entry of the device's send queue. An entry posted with FI_MORE waits there until a
 * post without FI_MORE, a full batch or a refused post rings the doorbell: prov/efa/src/efa_data_path_direct_entry.h,
 * efa_data_path_direct_post_write. No time limit and no poll rings it.
 *
 * Below version 2.3, and with FI_EFA_USE_DATA_PATH_DIRECT=0, efa-direct posts by libibverbs. A batch is a session of it
 * then, from ibv_wr_start to ibv_wr_complete in the post without FI_MORE: prov/efa/src/efa_data_path_ops.h,
 * efa_ibv_post_write. What finds the queue full fails the session, silently if it has FI_MORE, and the last post rolls
 * all of it back, with -FI_EAGAIN and no completion: rdma-core, providers/efa/verbs.c, efa_send_wr_complete. A caller
 * that counts its posts and never posts to a full queue does not see it. The fabric efa counts for its callers, and
 * answers -FI_EAGAIN before it posts: rdm/efa_rdm_pke.c and efa_rdm_ope.c, efa_outstanding_tx_ops.
 */
#include "efa.h"

enum { MAX_HANDSHAKING = 16 }; /* EFA_RDM_MAX_QUEUED_OPE_BEFORE_HANDSHAKE, pull request 10135 */

static bool posts_by_sessions(const struct endpoint *endpoint) { return endpoint->is_direct && !config.data_path; }

static void ring(struct endpoint *endpoint) {
    if (!endpoint->staged_count)
        return;
    uint32_t doorbells = (endpoint->staged_count + config.batch - 1) / config.batch;
    add(&counts.doorbells, doorbells);
    add(&counts.nic_doorbells[endpoint->domain->nic], doorbells);
    for (uint32_t i = 0; i < endpoint->staged_count; i++) {
        uint32_t index = endpoint->staged[i];
        struct op *op = &endpoint->ops[index];
        struct link_out *link = op->link;
        if (!link->rung) {
            link->rung = true;
            link->record->doorbells++;
        }
        /* ai-dynamo/nixl issue 1656: emulated writes take buffers of a pool that ends at some 240 in flight. Those
         * beyond it are never carried out. */
        if (op->emulated && endpoint->emulated_count >= config.pool) {
            op->state = OP_STALLED;
            refuse(RULE_STALL);
            continue;
        }
        endpoint->emulated_count += op->emulated;
        op->state = OP_ACTIVE;
        link->pending[link->pending_count++] = index;
    }
    for (uint32_t i = 0; i < endpoint->staged_count; i++)
        endpoint->ops[endpoint->staged[i]].link->rung = false;
    endpoint->staged_count = 0;
}

void stage_op(struct endpoint *endpoint, uint32_t index, uint64_t flags) {
    /* ofiwg/libfabric pull request 11515: the queue stages at most max_batch entries; the next one rings first. */
    if (endpoint->staged_count >= config.batch && !posts_by_sessions(endpoint))
        ring(endpoint);
    endpoint->ops[index].state = OP_STAGED;
    endpoint->staged[endpoint->staged_count++] = index;
    if (!(flags & FI_MORE))
        ring(endpoint);
}

static void own_context(struct endpoint *endpoint, uint32_t index) {
    struct op *op = &endpoint->ops[index];
    uint64_t words[8];
    if (!endpoint->is_direct || !op->context)
        return;
    for (uint64_t i = 0; i < 8; i++)
        words[i] = ((uint64_t)index << 32 | op->generation << 4 | i) * 0x9E3779B97F4A7C15u;
    memcpy(op->context, words, sizeof words);
}

/* A refused post rings for the entries before it: efa_data_path_direct_post_write. A session stays open. */
static ssize_t refused(struct endpoint *endpoint, enum tokenyard_double_rule rule, int error) {
    if (endpoint->is_enabled && !posts_by_sessions(endpoint))
        ring(endpoint);
    refuse(rule);
    unlock(endpoint->domain);
    return -error;
}

/* A post of a session that has found the queue full. */
static ssize_t roll_back(struct endpoint *endpoint, uint64_t flags) {
    endpoint->has_overfilled = flags & FI_MORE;
    if (endpoint->has_overfilled) {
        unlock(endpoint->domain);
        return 0;
    }
    while (endpoint->staged_count) {
        uint32_t index = endpoint->staged[--endpoint->staged_count];
        endpoint->ops[index].link->outstanding--;
        endpoint->ops[index].link->reads -= endpoint->ops[index].kind == PACKET_READ;
        release_op(endpoint, index);
    }
    return refused(endpoint, RULE_FULL, FI_EAGAIN);
}

struct post {
    const struct iovec *iov;
    void **desc;
    size_t count;
    fi_addr_t to;
    uint64_t address, key, data, flags;
    void *context;
    uint16_t kind;
};

static ssize_t post(struct fid_ep *fid, const struct post *post) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    bool is_write = post->kind == PACKET_WRITE, is_read = post->kind == PACKET_READ, is_rma = is_write || is_read;
    uint64_t total = 0;
    lock(endpoint->domain);
    if (!endpoint->is_enabled)
        return refused(endpoint, RULE_ARGUMENT, FI_EOPBADSTATE);
    /* efa_rma.c, efa_rma_check_cap; rdm/efa_rdm_ep.h, efa_rdm_ep_cap_check_rma. Both look at FI_RMA alone; FI_READ is
     * fi_getinfo(3)'s word. */
    if (is_rma && (!(endpoint->caps & FI_RMA) || (is_read && !(endpoint->caps & FI_READ))))
        return refused(endpoint, RULE_ARGUMENT, FI_EOPNOTSUPP);
    /* efa_fabric_comparison.md, FI_RMA: efa-direct takes one buffer of a write or read; messages, and the fabric efa,
     * two. */
    if (post->count > (is_rma && endpoint->is_direct ? 1u : EFA_MAX_IOV) || (post->flags & FI_FENCE))
        return refused(endpoint, RULE_ARGUMENT, FI_EINVAL);
    for (size_t i = 0; i < post->count; i++)
        total += post->iov[i].iov_len;
    /* ofiwg/libfabric pull request 12858: before version 2.6 efa-direct has no inline writes, only inline messages. */
    size_t inject = is_write && endpoint->is_direct && config.version < FI_VERSION(2, 6) ? 0 : endpoint->inject;
    bool is_inline = total && total <= inject && !is_read;
    bool is_hmem = false;
    for (size_t i = 0; post->desc && i < post->count; i++)
        is_hmem |= post->desc[i] && find_region(((struct fid_mr *)post->desc[i])->key) &&
                   ((struct region *)post->desc[i])->is_hmem;
    /* efa_rma.c, efa_rma_post_write: FI_INJECT beyond the inline size, or from device memory. The fabric efa has its
     * own limit, and otherwise carries the bytes by itself. Reads have no use for the flag: efa_rma_post_read. */
    if ((post->flags & FI_INJECT) && !is_read && total > inject)
        return refused(endpoint, RULE_ARGUMENT, FI_EINVAL);
    if ((post->flags & FI_INJECT) && !is_read && is_hmem)
        return refused(endpoint, RULE_ARGUMENT, FI_ENOSYS);
    is_inline = is_inline && !is_hmem && (endpoint->is_direct || (post->flags & FI_INJECT));
    /* The same: FI_MR_LOCAL, unless the bytes are inline or, from version 2.5, there are none (pull request 11890). */
    bool needs_region = endpoint->is_direct && !is_inline && (total || config.version < FI_VERSION(2, 5));
    for (size_t i = 0; needs_region && i < post->count; i++)
        if (!post->desc || !post->desc[i])
            return refused(endpoint, RULE_ARGUMENT, FI_EINVAL);
    /* The provider asserts that the address is in the vector; a release build would follow a null pointer. */
    struct av *av = endpoint->av;
    if (post->to >= av->count || !av->used[post->to])
        return refused(endpoint, RULE_ARGUMENT, FI_EINVAL);
    /* fi_efa(7), FI_EFA_TX_SIZE; efa_post_send_validate: ENOMEM of a full queue becomes -FI_EAGAIN. A slot is free
     * again once its completion has been read. */
    if (posts_by_sessions(endpoint) && (endpoint->has_overfilled || !endpoint->free_count))
        return roll_back(endpoint, post->flags);
    if (!endpoint->free_count)
        return refused(endpoint, RULE_FULL, FI_EAGAIN);
    struct link_out *link = link_to(endpoint, post->to);
    if (!link)
        return refused(endpoint, RULE_FULL, FI_EAGAIN);
    /* ofiwg/libfabric pull request 10657: on the fabric efa the handshake tells whether the peer takes immediates
     * without a receive; if only this side does, the write is refused. */
    if (!endpoint->is_direct && is_write && (post->flags & FI_REMOTE_CQ_DATA) && endpoint->is_unsolicited &&
        !endpoint->is_emulated && link->peer_qp && !link->peer_qp->unsolicited)
        return refused(endpoint, RULE_FEATURE, FI_EOPNOTSUPP);
    /* rdm/efa_rdm_ep_utils.c, efa_rdm_ep_enforce_handshake_for_txe: at most 16 operations of an endpoint wait for
     * handshakes, with whatever peers. Writes and reads to itself need none: efa_rdm_rma_post_write, is_self. Neither do
     * messages, nor peers that are said to be alike: fi_efa(7), FI_OPT_EFA_HOMOGENEOUS_PEERS. */
    bool is_self = !memcmp(&endpoint->name, &link->peer, sizeof link->peer);
    bool needs_handshake = !endpoint->is_direct && !endpoint->is_homogeneous && !is_self && is_rma && !link->found;
    if (needs_handshake && endpoint->handshaking == MAX_HANDSHAKING)
        return refused(endpoint, RULE_FULL, FI_EAGAIN);
    /* rdm/efa_rdm_rma.c and efa_rdm_msg.c hand operations to a peer of the same host to the provider shm, unless the
     * capabilities (FI_REMOTE_COMM alone), FI_OPT_SHARED_MEMORY_PERMITTED or FI_EFA_ENABLE_SHM_TRANSFER forbid it.
     * Nothing that this double shows holds there, so it carries none. Its peers count as those of other hosts if
     * TOKENYARD_EFA_LOCAL does not say otherwise. */
    if (config.is_local && endpoint->uses_shm && !is_self)
        return refused(endpoint, RULE_FEATURE, FI_EOPNOTSUPP);
    uint32_t index = endpoint->free[--endpoint->free_count];
    struct op *op = &endpoint->ops[index];
    uint8_t *store = op->inline_bytes;
    *op = (struct op){.kind = (uint8_t)post->kind, .generation = op->generation, .use = ++endpoint->next_use,
                      .link = link, .total = total,
                      .address = post->address, .key = post->key, .flags = post->flags, .imm = (uint32_t)post->data,
                      .has_imm = !is_read && (post->flags & FI_REMOTE_CQ_DATA), .is_inline = is_inline, .inline_bytes = store,
                      .emulated = is_rma && endpoint->is_emulated, .context = post->context};
    /* efa.h, efa_fill_context: without a context or FI_COMPLETION nobody is told of the completion (on efa-direct). */
    op->silent = !(post->flags & FI_COMPLETION) || (endpoint->is_direct && !post->context);
    if (is_inline)
        for (size_t i = 0, at = 0; i < post->count; at += post->iov[i++].iov_len)
            memcpy(store + at, post->iov[i].iov_base, post->iov[i].iov_len);
    for (size_t i = 0; i < post->count && !is_inline && total; i++) {
        struct region *region = post->desc ? post->desc[i] : NULL;
        op->pieces[op->piece_count].base = post->iov[i].iov_base;
        op->pieces[op->piece_count].bytes = post->iov[i].iov_len;
        op->pieces[op->piece_count].region = region;
        op->pieces[op->piece_count++].key = region ? region->fid.key : 0;
    }
    if (!op->silent)
        own_context(endpoint, index);
    /* Packets leave in the order first, first + step, ... modulo their number; step shares no factor with it. */
    op->packets = total ? (uint32_t)((total + config.packet - 1) / config.packet) : 1;
    op->step = 1;
    if (config.reorder && op->packets > 1) {
        op->first = (uint32_t)(next_random(&endpoint->domain->random) % op->packets);
        for (;;) {
            uint32_t a = 1 + (uint32_t)(next_random(&endpoint->domain->random) % op->packets), b = op->packets;
            op->step = a;
            while (b) {
                uint32_t rest = a % b;
                a = b;
                b = rest;
            }
            if (a == 1)
                break;
        }
    }
    /* A message asks for the handshake, too. An operation asks only if none has: efa_rdm_ep_trigger_handshake. */
    if (!is_rma && link->handshake == HANDSHAKE_NONE)
        link->handshake = HANDSHAKE_BY_MESSAGE;
    link->outstanding++;
    link->reads += is_read;
    link->record->posts++;
    add(&counts.posts, 1);
    add(&counts.nic_posts[endpoint->domain->nic], 1);
    /* ofiwg/libfabric pull request 12623: on the fabric efa, operations wait for the handshake with the peer, and keep
     * their FI_MORE. They are staged when the handshake ends; if all of them have FI_MORE, nothing rings for them. */
    if (needs_handshake) {
        op->state = OP_QUEUED;
        link->queued[link->queued_count++] = index;
        endpoint->handshaking++;
        link->handshake = link->handshake ? link->handshake : HANDSHAKE_ASKED;
    } else {
        stage_op(endpoint, index, post->flags);
    }
    unlock(endpoint->domain);
    return 0;
}

static uint64_t message_flags(struct fid_ep *fid) {
    return ((struct endpoint *)fid)->is_selective ? 0 : FI_COMPLETION; /* util_ep.tx_msg_flags */
}

static uint64_t plain_flags(struct fid_ep *fid) {
    return ((struct endpoint *)fid)->tx_flags | message_flags(fid);
}

static ssize_t write_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
    if (message->rma_iov_count != 1)
        return -FI_EINVAL; /* tx_attr.rma_iov_limit is 1 */
    return post(fid, &(struct post){.iov = message->msg_iov, .desc = message->desc, .count = message->iov_count,
        .to = message->addr, .address = message->rma_iov->addr, .key = message->rma_iov->key, .data = message->data,
        .flags = flags | message_flags(fid), .context = message->context, .kind = PACKET_WRITE});
}

static ssize_t write_buffer(struct fid_ep *fid, const void *buffer, size_t bytes, void *desc, fi_addr_t to,
                            uint64_t address, uint64_t key, void *context) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = bytes};
    return post(fid, &(struct post){.iov = &iov, .desc = &desc, .count = 1, .to = to, .address = address, .key = key,
        .flags = plain_flags(fid), .context = context, .kind = PACKET_WRITE});
}

static ssize_t write_data(struct fid_ep *fid, const void *buffer, size_t bytes, void *desc, uint64_t data, fi_addr_t to,
                          uint64_t address, uint64_t key, void *context) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = bytes};
    return post(fid, &(struct post){.iov = &iov, .desc = &desc, .count = 1, .to = to, .address = address, .key = key,
        .data = data, .flags = plain_flags(fid) | FI_REMOTE_CQ_DATA, .context = context, .kind = PACKET_WRITE});
}

static ssize_t read_message(struct fid_ep *fid, const struct fi_msg_rma *message, uint64_t flags) {
    if (message->rma_iov_count != 1)
        return -FI_EINVAL; /* tx_attr.rma_iov_limit is 1 */
    return post(fid, &(struct post){.iov = message->msg_iov, .desc = message->desc, .count = message->iov_count,
        .to = message->addr, .address = message->rma_iov->addr, .key = message->rma_iov->key,
        .flags = flags | message_flags(fid), .context = message->context, .kind = PACKET_READ});
}

static ssize_t read_vector(struct fid_ep *fid, const struct iovec *iov, void **desc, size_t count, fi_addr_t from,
                           uint64_t address, uint64_t key, void *context) {
    return post(fid, &(struct post){.iov = iov, .desc = desc, .count = count, .to = from, .address = address,
        .key = key, .flags = plain_flags(fid), .context = context, .kind = PACKET_READ});
}

static ssize_t read_buffer(struct fid_ep *fid, void *buffer, size_t bytes, void *desc, fi_addr_t from,
                           uint64_t address, uint64_t key, void *context) {
    struct iovec iov = {.iov_base = buffer, .iov_len = bytes};
    return read_vector(fid, &iov, &desc, 1, from, address, key, context);
}

struct fi_ops_rma rma_calls = {.size = sizeof rma_calls, .writemsg = write_message, .write = write_buffer,
                               .writedata = write_data, .readmsg = read_message, .readv = read_vector,
                               .read = read_buffer};

static ssize_t send_message(struct fid_ep *fid, const struct fi_msg *message, uint64_t flags) {
    return post(fid, &(struct post){.iov = message->msg_iov, .desc = message->desc, .count = message->iov_count,
        .to = message->addr, .data = message->data, .flags = flags | message_flags(fid),
        .context = message->context, .kind = PACKET_SEND});
}

static ssize_t send_buffer(struct fid_ep *fid, const void *buffer, size_t bytes, void *desc, fi_addr_t to,
                           void *context) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = bytes};
    return post(fid, &(struct post){.iov = &iov, .desc = &desc, .count = 1, .to = to, .flags = plain_flags(fid),
        .context = context, .kind = PACKET_SEND});
}

static ssize_t inject_buffer(struct fid_ep *fid, const void *buffer, size_t bytes, fi_addr_t to) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = bytes};
    return post(fid, &(struct post){.iov = &iov, .count = 1, .to = to, .flags = FI_INJECT, .kind = PACKET_SEND});
}

static ssize_t receive(struct fid_ep *fid, const struct fi_msg *message, uint64_t flags) {
    struct endpoint *endpoint = (struct endpoint *)fid;
    (void)flags;
    lock(endpoint->domain);
    if (!endpoint->is_enabled)
        return refused(endpoint, RULE_ARGUMENT, FI_EOPBADSTATE);
    if (message->iov_count != 1)
        return refused(endpoint, RULE_ARGUMENT, FI_EINVAL); /* rx_attr.iov_limit is 1 on efa-direct */
    /* fi_efa(7), Memory registration modes: FI_MR_LOCAL on efa-direct. */
    if (endpoint->is_direct && message->msg_iov->iov_len && (!message->desc || !message->desc[0]))
        return refused(endpoint, RULE_ARGUMENT, FI_EINVAL);
    if (endpoint->posted_count == endpoint->receives)
        return refused(endpoint, RULE_FULL, FI_EAGAIN); /* fi_efa(7), FI_EFA_RX_SIZE */
    uint32_t at = (endpoint->posted_head + endpoint->posted_count++) % endpoint->receives;
    endpoint->posted[at] = (struct receive){
        .buffer = message->msg_iov->iov_base, .bytes = message->msg_iov->iov_len, .context = message->context};
    unlock(endpoint->domain);
    return 0;
}

static ssize_t receive_buffer(struct fid_ep *fid, void *buffer, size_t bytes, void *desc, fi_addr_t from,
                              void *context) {
    struct iovec iov = {.iov_base = buffer, .iov_len = bytes};
    struct fi_msg message = {.msg_iov = &iov, .desc = &desc, .iov_count = 1, .addr = from, .context = context};
    return receive(fid, &message, 0);
}

struct fi_ops_msg message_calls = {.size = sizeof message_calls, .recv = receive_buffer, .recvmsg = receive,
    .send = send_buffer, .sendmsg = send_message, .inject = inject_buffer};
