/* Packets: what the device does, within the caller's fi_cq_read.
 *
 * fi_efa(7), Progress: the fabric efa progresses by hand. efa-direct is said to progress by itself, with the device;
 * this double moves packets of both in fi_cq_read alone, which is the harder case for a caller that waits. With
 * TOKENYARD_EFA_AUTO those of efa-direct move between its calls, too, which is the harder case for completion queues.
 *
 * The device (SRD) orders nothing: packets of an operation and operations to a peer overtake each other, and a packet
 * that was sent again may land twice. It never lands after the operation has completed at either side.
 */
#include "efa.h"

enum { PACKETS_A_POLL = 32, WINDOW = 16 };

/* ---- initiator ------------------------------------------------------------------------------------------------- */

static void complete(struct endpoint *endpoint, uint32_t index, uint32_t status) {
    static const enum tokenyard_double_rule rules[] = {
        [5] = RULE_LOCAL_KEY, [6] = RULE_LENGTH, [7] = RULE_REMOTE_ADDRESS, [9] = RULE_DEST_QPN, [10] = RULE_RNR,
        [11] = RULE_RECEIVE_SHORT, [12] = RULE_UNSOLICITED_ERROR, [13] = RULE_UNRESPONSIVE, [14] = RULE_UNKNOWN_PEER,
        [15] = RULE_UNRESPONSIVE, [18] = RULE_FEATURE};
    struct op *op = &endpoint->ops[index];
    /* prov/efa/src/efa_cq.c, efa_cq_read_entry_common. No length: it says nothing of a sent operation. */
    struct entry entry = {.endpoint = endpoint, .context = op->context, .op = index, .kind = ENTRY_TX,
                          .status = (uint16_t)status,
                          .flags = op->kind == PACKET_WRITE  ? FI_RMA | FI_WRITE
                                   : op->kind == PACKET_READ ? FI_RMA | FI_READ
                                                             : FI_SEND | FI_MSG};
    if (status)
        refuse(status < sizeof rules / sizeof *rules ? rules[status] : RULE_UNRESPONSIVE);
    endpoint->emulated_count -= op->emulated && op->state == OP_ACTIVE;
    op->state = OP_DONE;
    op->link->outstanding--;
    op->link->reads -= op->kind == PACKET_READ;
    push_entry(endpoint->tx_cq, &entry);
}

/* The packet that asks for a handshake is the provider's own, and so is its error: rdm/efa_rdm_ope.c,
 * efa_rdm_txe_handle_error. From tag v2.1.0 it goes to the event queue; before it is a completion without a context.
 * The packet is not sent again, so what waits for the handshake never completes, and nothing names it: efa_rdm_ep_utils.c,
 * efa_rdm_ep_trigger_handshake, and efa_rdm_ope.c, efa_rdm_ope_repost_ope_queued_before_handshake.
 *
 * The other way, an error of the answer to a peer that is gone is passed over (rdm/efa_rdm_pke_cmd.c,
 * efa_rdm_pke_handle_tx_error: statuses 8, 9, 13, 15, 4124, 4126). Other errors of an answer need a fault of the
 * provider (4113, 4114) or memory of its own that is not registered, so they are not shown here. */
static void fail_handshake(struct link_out *link, uint32_t status) {
    struct endpoint *endpoint = link->endpoint;
    link->handshake = HANDSHAKE_FAILED;
    refuse(status == 9 ? RULE_DEST_QPN : RULE_UNRESPONSIVE);
    if (config.version >= FI_VERSION(2, 1)) {
        eq_error(endpoint, errno_of_status(status), (int)status);
        return;
    }
    struct entry entry = {.endpoint = endpoint, .kind = ENTRY_RECEIVE, .status = (uint16_t)status,
                          .flags = FI_RMA | FI_WRITE};
    push_entry(endpoint->tx_cq, &entry);
}

static void fail_link(struct link_out *link, uint32_t status) {
    struct endpoint *endpoint = link->endpoint;
    /* rdm/efa_rdm_cq.c, efa_rdm_cq_process_prov_errno. */
    if (!endpoint->is_direct && status == 13)
        status = link->found ? 4124 : 4126;
    if (link->handshake == HANDSHAKE_ASKED && !link->found)
        fail_handshake(link, status);
    link->pending_count = 0;
    for (uint32_t i = 0; i < endpoint->depth; i++) {
        struct op *op = &endpoint->ops[i];
        if (op->link == link && (op->state == OP_ACTIVE || op->state == OP_STALLED))
            complete(endpoint, i, status);
    }
}

static void forget_pending(struct link_out *link, uint32_t place) {
    if (config.reorder) {
        link->pending[place] = link->pending[--link->pending_count];
        return;
    }
    link->pending_count--;
    memmove(link->pending + place, link->pending + place + 1, (link->pending_count - place) * sizeof *link->pending);
}

/* Status 5: the buffer must lie in a region of the same device that is still registered, and that has the access.
 * efa_errno.h. A read needs FI_READ there: fi_mr(3). The device would take any access by which it writes. */
static uint32_t check_source(const struct endpoint *endpoint, const struct op *op) {
    if (endpoint->is_direct && op->total > (op->kind == PACKET_SEND ? config.mtu : config.max_rdma))
        return 6;
    for (uint32_t i = 0; i < op->piece_count; i++) {
        struct region *region = op->pieces[i].region;
        if (!region)
            continue;
        uint64_t at = (uint64_t)(uintptr_t)op->pieces[i].base;
        if (find_region(op->pieces[i].key) != region || region->domain != endpoint->domain || at < region->base ||
            op->pieces[i].bytes > region->bytes || at - region->base > region->bytes - op->pieces[i].bytes)
            return 5;
        if (op->kind == PACKET_READ && !(region->access & FI_READ))
            return 5;
    }
    return 0;
}

/* The source is read when a packet leaves, and again when it is sent again: it is the device's until the completion. */
static bool read_source(const struct op *op, uint64_t offset, uint8_t *to, uint32_t bytes) {
    if (op->is_inline) {
        memcpy(to, op->inline_bytes + offset, bytes);
        return true;
    }
    for (uint32_t i = 0; i < op->piece_count && bytes; i++) {
        if (offset >= op->pieces[i].bytes) {
            offset -= op->pieces[i].bytes;
            continue;
        }
        struct region *region = op->pieces[i].region;
        const uint8_t *base = op->pieces[i].base;
        if (region && !region->mapping)
            return false;
        if (region)
            base = region->mapping + ((uint64_t)(uintptr_t)base - region->base);
        uint32_t part = op->pieces[i].bytes - offset < bytes ? (uint32_t)(op->pieces[i].bytes - offset) : bytes;
        memcpy(to, base + offset, part);
        to += part, bytes -= part, offset = 0;
    }
    return true;
}

/* Puts bytes that a read brought where they belong. */
static void write_back(const struct op *op, uint64_t offset, const uint8_t *from, uint32_t bytes) {
    for (uint32_t i = 0; i < op->piece_count && bytes; i++) {
        if (offset >= op->pieces[i].bytes) {
            offset -= op->pieces[i].bytes;
            continue;
        }
        struct region *region = op->pieces[i].region;
        uint8_t *base = (uint8_t *)(uintptr_t)op->pieces[i].base;
        if (region)
            base = region->mapping ? region->mapping + ((uint64_t)(uintptr_t)base - region->base) : NULL;
        uint32_t part = op->pieces[i].bytes - offset < bytes ? (uint32_t)(op->pieces[i].bytes - offset) : bytes;
        if (base)
            memcpy(base + offset, from, part);
        from += part, bytes -= part, offset = 0;
    }
}

static struct packet *slot_of(uint8_t *packets, const struct shared_link *shared, uint64_t number) {
    return (struct packet *)(void *)(packets + (number % shared->slots) * (sizeof(struct packet) + shared->packet));
}

static void send_packet(struct link_out *link, uint32_t index, uint32_t packet, bool is_duplicate) {
    struct op *op = &link->endpoint->ops[index];
    uint64_t sent = atomic_load_explicit(&link->shared->sent, memory_order_relaxed);
    struct packet *slot = slot_of(link->packets, link->shared, sent);
    uint64_t offset = (uint64_t)packet * config.packet, left = op->total - offset;
    *slot = (struct packet){.kind = op->kind, .op = index, .use = op->use, .packets = op->packets, .total = op->total,
                            .offset = offset, .address = op->address, .key = op->key, .imm = op->imm,
                            .bytes = left < config.packet ? (uint32_t)left : config.packet,
                            .flags = (uint16_t)((op->has_imm ? PACKET_IMM : 0) | (op->emulated ? PACKET_EMULATED : 0) |
                                                (is_duplicate ? PACKET_DUPLICATE : 0))};
    if (op->kind != PACKET_READ && !read_source(op, offset, slot->data, slot->bytes))
        slot->flags |= PACKET_EMPTY;
    add(&counts.packets_sent, 1);
    add(&counts.duplicates_sent, is_duplicate);
    atomic_store_explicit(&link->shared->sent, sent + 1, memory_order_release);
}

static uint64_t room(const struct link_out *link) {
    return config.slots - (atomic_load_explicit(&link->shared->sent, memory_order_relaxed) - link->reaped);
}

static void take_bytes(struct link_out *link, const struct packet *slot) {
    const struct op *op = &link->endpoint->ops[slot->op];
    bool is_current = op->state == OP_ACTIVE && op->use == slot->use;
    /* A region that was closed since is not written. The operation completes as if it had been: the device's answer is
     * on its way. */
    if (slot->kind == PACKET_READ && is_current && (slot->flags & PACKET_SERVED) && !(slot->flags & PACKET_EMPTY) &&
        !check_source(link->endpoint, op))
        write_back(op, slot->offset, slot->data, slot->bytes);
}

/* Packets that the target has taken make room. */
static void reap(struct link_out *link) {
    uint64_t taken = atomic_load_explicit(&link->shared->taken, memory_order_acquire);
    for (; link->reads && link->reaped < taken; link->reaped++)
        take_bytes(link, slot_of(link->packets, link->shared, link->reaped));
    link->reaped = taken;
}


static void transmit(struct link_out *link) {
    struct endpoint *endpoint = link->endpoint;
    uint64_t *random = &endpoint->domain->random;
    for (int budget = PACKETS_A_POLL; budget && link->pending_count && room(link) >= 2; budget--) {
        uint32_t window = link->pending_count < WINDOW ? link->pending_count : WINDOW;
        uint32_t place = config.reorder ? (uint32_t)(next_random(random) % window) : 0;
        uint32_t index = link->pending[place];
        struct op *op = &endpoint->ops[index];
        uint32_t status = check_source(endpoint, op);
        if (status) {
            forget_pending(link, place);
            complete(endpoint, index, status);
            continue;
        }
        for (uint32_t i = 0; i < window; i++)
            if (endpoint->ops[link->pending[i]].use < op->use) {
                add(&counts.operations_swapped, 1);
                break;
            }
        if (chance(random, config.duplicates)) {
            uint64_t again = op->sent ? next_random(random) % op->sent : 0;
            send_packet(link, index, (uint32_t)((op->first + again * op->step) % op->packets), true);
        }
        send_packet(link, index, (uint32_t)((op->first + (uint64_t)op->sent * op->step) % op->packets), false);
        if (++op->sent == op->packets)
            forget_pending(link, place);
    }
}

static void take_answers(struct link_out *link) {
    struct endpoint *endpoint = link->endpoint;
    uint64_t taken = atomic_load_explicit(&link->shared->answers_taken, memory_order_relaxed);
    uint64_t answered = atomic_load_explicit(&link->shared->answered, memory_order_acquire);
    reap(link); /* after that load: the packets of what is answered count as taken */
    for (; taken < answered; taken++) {
        struct answer answer = link->answers[taken % endpoint->depth];
        struct op *op = &endpoint->ops[answer.op];
        if (op->link != link || op->state != OP_ACTIVE || op->use != answer.use)
            continue;
        for (uint32_t i = 0; i < link->pending_count && op->sent < op->packets; i++)
            if (link->pending[i] == answer.op) {
                forget_pending(link, i);
                break;
            }
        /* fi_efa(7), FI_OPT_EFA_RNR_RETRY; 7 is without end (EFA_RNR_INFINITE_RETRY). */
        if (answer.status == 10 && (endpoint->rnr_retry >= 7 || op->tries++ < endpoint->rnr_retry)) {
            op->use = ++endpoint->next_use;
            op->sent = 0;
            link->pending[link->pending_count++] = answer.op;
            continue;
        }
        complete(endpoint, answer.op, answer.status);
    }
    atomic_store_explicit(&link->shared->answers_taken, taken, memory_order_release);
}

/* Peers that are gone. efa_errno.h: 9 if the queue pair does not exist, 13 if a peer that had answered does not any
 * more, 15 if it never did. Statuses 13 and 15 come only after the device has tried for a while. */
static void look_for_end(struct link_out *link) {
    if (link->outstanding == (link->handshake == HANDSHAKE_ASKED ? 0 : link->queued_count))
        return;
    if (link->is_gone) {
        fail_link(link, 9);
        return;
    }
    uint64_t now = now_ms();
    if (now - link->checked_ms < 1 + config.unreachable_ms / 8)
        return;
    link->checked_ms = now;
    if (link->peer_qp && is_owner_dead(&link->peer_qp->owner) && atomic_load(&link->peer_qp->ready) != 2) {
        link->dead_ms = link->dead_ms ? link->dead_ms : now;
        if (now - link->dead_ms >= config.unreachable_ms)
            fail_link(link, config.killed_status ? config.killed_status : link->found ? 13 : 15);
    }
}

static void drive(struct link_out *link) {
    struct endpoint *endpoint = link->endpoint;
    if (!link->outstanding)
        return;
    if (link->is_open || try_open_link(link)) {
        bool is_closed = atomic_load_explicit(&link->shared->target_closed, memory_order_acquire) ||
                         atomic_load_explicit(&link->peer_qp->ready, memory_order_acquire) == 2;
        link->found |= atomic_load_explicit(&link->shared->known, memory_order_acquire);
        take_answers(link);
        if (is_closed)
            link->is_gone = true;
        if (link->found && link->queued_count) {
            for (uint32_t i = 0; i < link->queued_count; i++)
                stage_op(endpoint, link->queued[i], endpoint->ops[link->queued[i]].flags);
            endpoint->handshaking -= link->queued_count;
            link->queued_count = 0;
        }
        if (!link->is_gone)
            transmit(link);
    }
    look_for_end(link);
}

/* ---- target ---------------------------------------------------------------------------------------------------- */

static void answer(struct link_in *link, const struct packet *packet, uint32_t status) {
    link->arrivals[packet->op].is_answered = true;
    link->answers[link->answered++ % link->shared->depth] =
        (struct answer){.op = (uint16_t)packet->op, .status = (uint16_t)status, .use = packet->use};
}

/* fi_efa(7), LIMITATIONS: the target must have inserted the initiator's address. The device looks for an address handle
 * (ofiwg/libfabric issue 11054); this double holds to the document's word, the whole address. */
static bool is_known_peer(struct endpoint *endpoint, struct link_in *link) {
    struct av *av = endpoint->av;
    if (link->av_version != av->version) {
        link->av_version = av->version;
        link->is_known = false;
        for (size_t i = 0; i < av->count && !link->is_known; i++)
            link->is_known = av->used[i] && !memcmp(&av->names[i], &link->shared->initiator, sizeof(struct name));
    }
    return link->is_known;
}

/* Status 7: efa_errno.h. The whole write or read must lie in one region with that remote access, of the queue pair's own
 * device. An endpoint is read if it has FI_REMOTE_READ: fi_getinfo(3). Writes of no bytes are checked, too (ofiwg/libfabric pull request 11890 gives them a key of their own at the
 * source, none at the target), and their address must lie within the region. */
static struct region *target_of(const struct endpoint *endpoint, const struct packet *packet) {
    struct region *region = find_region(packet->key);
    uint64_t access = packet->kind == PACKET_READ ? FI_REMOTE_READ : FI_REMOTE_WRITE;
    if (!region || region->domain != endpoint->domain || !(region->access & access))
        return NULL;
    if (packet->kind == PACKET_READ && !(endpoint->caps & FI_REMOTE_READ))
        return NULL;
    uint64_t at = packet->address - region->base;
    if (packet->address < region->base || at >= region->bytes || packet->total > region->bytes - at)
        return NULL;
    return region;
}

static bool take_receive(struct endpoint *endpoint, struct receive *out) {
    if (!endpoint->posted_count)
        return false;
    *out = endpoint->posted[endpoint->posted_head];
    endpoint->posted_head = (endpoint->posted_head + 1) % endpoint->receives;
    endpoint->posted_count--;
    return true;
}

static uint32_t arrive_imm(struct endpoint *endpoint, struct link_in *link, const struct packet *packet) {
    static _Atomic uint64_t arrived;
    struct entry entry = {.endpoint = endpoint, .kind = ENTRY_IMM, .data = packet->imm, .bytes = packet->total,
                          .source = link->shared->initiator, .flags = FI_REMOTE_CQ_DATA | FI_RMA | FI_REMOTE_WRITE};
    /* ofiwg/libfabric pull request 10036: an unsolicited write takes no receive, and its completion has no context. */
    if (!endpoint->is_unsolicited) {
        struct receive receive;
        if (!take_receive(endpoint, &receive))
            return 10;
        entry.context = receive.context;
    }
    if (atomic_fetch_add(&arrived, 1) + 1 == config.fail_unsolicited) {
        /* Pull requests 10771 and 12208: an error of an unsolicited receive has a NULL context. */
        entry.status = 12;
        entry.context = NULL;
        push_entry(endpoint->rx_cq, &entry);
        return 12;
    }
    add(&counts.immediates, 1);
    entry.serial = ++endpoint->imms;
    push_entry(endpoint->rx_cq, &entry);
    return 0;
}

/* The device reads at once all that arrived before, which its own queues and PCIe keep in order. */
static void serve(struct endpoint *endpoint, const struct region *region, struct packet *packet,
                  struct arrival *arrival) {
    bool is_last = !(packet->flags & PACKET_DUPLICATE) && arrival->left == 1;
    if (region->is_hmem)
        arrival->settled += settle_late(endpoint, region->hmem_device);
    const uint8_t *from = region->mapping ? region->mapping + (packet->address - region->base) : NULL;
    if (from)
        memcpy(packet->data, from + packet->offset, packet->bytes);
    packet->flags |= PACKET_SERVED | (from ? 0 : PACKET_EMPTY);
    if (is_last)
        log_event("read", endpoint->domain->nic, "fi_read", ",\"key\":%llu,\"length\":%llu,\"settled\":%llu",
                  (unsigned long long)packet->key, (unsigned long long)packet->total, (unsigned long long)arrival->settled);
}

static void arrive(struct endpoint *endpoint, struct link_in *link, struct packet *packet) {
    struct arrival *arrival = &link->arrivals[packet->op];
    bool is_read = packet->kind == PACKET_READ, is_write = packet->kind == PACKET_WRITE, is_rma = is_read || is_write;
    bool is_emulated = packet->flags & PACKET_EMULATED;
    struct region *region = NULL;
    if (arrival->use != packet->use)
        *arrival = (struct arrival){.use = packet->use, .left = packet->packets};
    if (arrival->is_answered)
        return;
    if (is_rma && (endpoint->is_direct || endpoint->is_homogeneous) && !is_known_peer(endpoint, link)) {
        answer(link, packet, 14);
        return;
    }
    if (is_write && endpoint->is_direct && (packet->flags & PACKET_IMM) && link->shared->unsolicited &&
        !endpoint->is_unsolicited) {
        answer(link, packet, 18); /* efa_errno.h, REMOTE_ERROR_FEATURE_MISMATCH */
        return;
    }
    if (is_rma && !(region = target_of(endpoint, packet))) {
        if (!is_emulated) {
            answer(link, packet, 7);
            return;
        }
        /* ai-dynamo/nixl pull request 2278 shows it: the target's provider finds the address of an emulated write
         * wrong, error 13, status 4111, and nothing to tell but its event queue. The initiator never hears. */
        arrival->is_answered = true;
        eq_error(endpoint, FI_EACCES, 4111);
        return;
    }
    if (!is_rma && !arrival->has_receive) {
        if (!take_receive(endpoint, &arrival->into)) {
            answer(link, packet, 10);
            return;
        }
        arrival->has_receive = true;
        if (packet->total > arrival->into.bytes) {
            answer(link, packet, 11);
            return;
        }
    }
    uint8_t *to = is_write ? region->mapping : is_read ? NULL : arrival->into.buffer;
    bool has_bytes = to && !(packet->flags & PACKET_EMPTY) && packet->bytes;
    if (is_read)
        serve(endpoint, region, packet, arrival);
    else if (has_bytes && is_write && region->is_hmem && config.unflushed)
        keep_late(endpoint, link, region, packet);
    else if (has_bytes)
        memcpy(to + (is_write ? packet->address - region->base : 0) + packet->offset, packet->data, packet->bytes);
    add(&counts.packets_placed, 1);
    add(&counts.out_of_order, packet->offset < link->last_offset);
    link->last_offset = packet->offset;
    if (packet->flags & PACKET_DUPLICATE) {
        add(&counts.duplicates_placed, 1);
        return;
    }
    add(&counts.payload_bytes, packet->bytes);
    if (--arrival->left)
        return;
    uint32_t status = 0;
    if (packet->kind == PACKET_SEND) {
        struct entry entry = {.endpoint = endpoint, .kind = ENTRY_RECEIVE, .context = arrival->into.context,
                              .flags = FI_RECV | FI_MSG | (packet->flags & PACKET_IMM ? FI_REMOTE_CQ_DATA : 0),
                              .data = packet->imm, .bytes = packet->total, .source = link->shared->initiator};
        add(&counts.messages, 1);
        push_entry(endpoint->rx_cq, &entry);
    } else if (packet->flags & PACKET_IMM) {
        status = arrive_imm(endpoint, link, packet);
    }
    if (is_write && config.unflushed)
        end_late(endpoint, link, packet, packet->flags & PACKET_IMM && !status ? endpoint->imms : 0);
    answer(link, packet, status);
}

static void take_packets(struct endpoint *endpoint, size_t index) {
    struct link_in *link = endpoint->in[index];
    struct shared_link *shared = link->shared;
    bool is_closed = atomic_load_explicit(&shared->initiator_closed, memory_order_acquire);
    uint64_t taken = atomic_load_explicit(&shared->taken, memory_order_relaxed);
    uint64_t sent = atomic_load_explicit(&shared->sent, memory_order_acquire);
    for (int budget = PACKETS_A_POLL; budget && taken < sent; budget--) {
        arrive(endpoint, link, slot_of(link->packets, shared, taken));
        atomic_store_explicit(&shared->taken, ++taken, memory_order_release);
        atomic_store_explicit(&shared->answered, link->answered, memory_order_release); /* take_answers reads it first */
    }
    if (is_closed && taken == sent)
        drop_link_in(endpoint, index);
}

void progress(struct endpoint *endpoint) {
    if (!endpoint->is_enabled || chance(&endpoint->domain->random, config.delays))
        return;
    take_claims(endpoint);
    size_t count = endpoint->in_count, first = count ? next_random(&endpoint->domain->random) % count : 0;
    for (size_t i = count; i-- > 0;) {
        size_t index = config.reorder ? (first + i) % count : i;
        if (index < endpoint->in_count)
            take_packets(endpoint, index);
    }
    for (struct link_out *link = endpoint->links; link; link = link->next)
        drive(link);
}
