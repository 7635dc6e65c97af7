/* The libibverbs double: completion queues, shared receive queues, queue pairs. Sends are accepted and carry nothing:
 * they complete by a flush error once the queue pair is in the error state. */
#define _GNU_SOURCE
#include "ibverbs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SGE = 30, MAX_SRQ_SGE = 31, MAX_CQE = 4194303, MAX_INLINE = 928, MAX_RD_ATOMIC = 16 };

struct cq {
    struct ibv_cq cq;
    struct context *context;
    struct ibv_wc *entries;
    size_t head, count;
    uint32_t users; /* queue pairs, one for each of their queues */
    bool live;
    struct cq *next;
};

struct srq {
    struct ibv_srq srq;
    struct pd *pd;
    uint32_t room, posted, sges, users;
    bool live;
    struct srq *next;
};

struct post {
    uint64_t id;
    enum ibv_wc_opcode opcode;
};

struct queue {
    struct post *posts;
    uint32_t room, count, sges;
};

struct qp {
    struct ibv_qp qp;
    struct pd *pd;
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    struct queue sends, receives;
    bool live;
    struct qp *next;
};

static struct cq *cqs;
static struct srq *srqs;
static struct qp *qps;
static uint32_t qp_numbers;

/* ---- completion queues ----------------------------------------------------------------------------------------- */

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *verbs, int entries, void *cq_context,
                                    struct ibv_comp_channel *channel, int vector) {
    struct context *context = (struct context *)verbs;
    if (!context->live) {
        misuse("ibv_create_cq", "context");
        return NULL;
    }
    /* ibv_create_cq(3): the vector is below the context's number of vectors; the queue has at least `entries`. */
    if (entries < 1 || entries > MAX_CQE || vector < 0 || vector >= verbs->num_comp_vectors) {
        refuse(context, "ibv_create_cq", IBVERBS_ARGUMENT, EINVAL, "%d entries, vector %d", entries, vector);
        return NULL;
    }
    struct cq *cq = calloc(1, sizeof *cq);
    size_t room = 1;
    while (room <= (size_t)entries)
        room *= 2;
    cq->context = context;
    cq->live = true;
    cq->entries = calloc(room, sizeof *cq->entries);
    cq->cq = (struct ibv_cq){.context = verbs, .channel = channel, .cq_context = cq_context, .cqe = (int)room - 1};
    pthread_mutex_init(&cq->cq.mutex, NULL);
    pthread_cond_init(&cq->cq.cond, NULL);
    lock();
    cq->next = cqs;
    cqs = cq;
    unlock();
    return &cq->cq;
}

/* kernel, drivers/infiniband/core/verbs.c, ib_destroy_cq_user: EBUSY while a queue pair uses it. */
EXPORT int ibv_destroy_cq(struct ibv_cq *verbs) {
    struct cq *cq = (struct cq *)verbs;
    int error = 0;
    lock();
    if (!cq->live)
        error = misuse("ibv_destroy_cq", "cq");
    else if (cq->users)
        error = refuse(cq->context, "ibv_destroy_cq", IBVERBS_BUSY, EBUSY, "queue pairs use it");
    else {
        cq->live = false;
        free(cq->entries);
        cq->entries = NULL;
    }
    unlock();
    return error;
}

/* ibv_poll_cq(3): of a work request in error, only wr_id, status, qp_num and vendor_err are valid; so the rest is
 * filled with what a caller that reads it would stumble over. */
static void complete(struct ibv_cq *verbs, struct qp *qp, uint64_t id, enum ibv_wc_status status) {
    struct cq *cq = (struct cq *)verbs;
    if (cq->count > (size_t)cq->cq.cqe) {
        refuse(cq->context, "complete", IBVERBS_OVERRUN, 0, "a completion of queue pair %u is lost", qp->qp.qp_num);
        return;
    }
    struct ibv_wc *entry = &cq->entries[(cq->head + cq->count++) % ((size_t)cq->cq.cqe + 1)];
    memset(entry, 0xA5, sizeof *entry);
    entry->wr_id = id;
    entry->status = status;
    entry->qp_num = qp->qp.qp_num;
    entry->vendor_err = 0xF9;
}

static int poll_cq(struct ibv_cq *verbs, int room, struct ibv_wc *out) {
    struct cq *cq = (struct cq *)verbs;
    int found = 0;
    lock();
    if (!cq->live) {
        misuse("ibv_poll_cq", "cq");
        found = -1;
    }
    for (; cq->live && found < room && cq->count; cq->count--) {
        out[found++] = cq->entries[cq->head];
        cq->head = (cq->head + 1) % ((size_t)cq->cq.cqe + 1);
    }
    unlock();
    return found;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only) {
    (void)cq, (void)solicited_only;
    return 0;
}

/* rdma-core, providers/mlx5/cq.c, mlx5_cq_clean: a queue pair that is reset or destroyed leaves no completions. */
static void clean(struct ibv_cq *verbs, uint32_t number) {
    struct cq *cq = (struct cq *)verbs;
    size_t room = (size_t)cq->cq.cqe + 1, kept = 0;
    for (size_t i = 0; i < cq->count; i++) {
        struct ibv_wc *entry = &cq->entries[(cq->head + i) % room];
        if (entry->qp_num != number)
            cq->entries[(cq->head + kept++) % room] = *entry;
    }
    cq->count = kept;
}

/* ---- shared receive queues ------------------------------------------------------------------------------------- */

EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *verbs, struct ibv_srq_init_attr *init) {
    struct pd *pd = (struct pd *)verbs;
    struct srq *srq = NULL;
    lock();
    if (!pd->live)
        misuse("ibv_create_srq", "pd");
    else if (!init->attr.max_wr || init->attr.max_wr >= pd->context->settings.depth || init->attr.max_sge > MAX_SRQ_SGE)
        refuse(pd->context, "ibv_create_srq", IBVERBS_ARGUMENT, EINVAL, "%u receives of %u, %u entries of %d",
               init->attr.max_wr, pd->context->settings.depth - 1, init->attr.max_sge, MAX_SRQ_SGE);
    else {
        srq = calloc(1, sizeof *srq);
        srq->pd = pd;
        srq->room = init->attr.max_wr;
        srq->sges = init->attr.max_sge = init->attr.max_sge ? init->attr.max_sge : 1;
        srq->live = true;
        srq->srq = (struct ibv_srq){.context = verbs->context, .srq_context = init->srq_context, .pd = verbs};
        pthread_mutex_init(&srq->srq.mutex, NULL);
        pthread_cond_init(&srq->srq.cond, NULL);
        srq->next = srqs;
        srqs = srq;
        pd->users++;
    }
    unlock();
    return srq ? &srq->srq : NULL;
}

/* kernel, drivers/infiniband/core/verbs.c, ib_destroy_srq_user. */
EXPORT int ibv_destroy_srq(struct ibv_srq *verbs) {
    struct srq *srq = (struct srq *)verbs;
    int error = 0;
    lock();
    if (!srq->live)
        error = misuse("ibv_destroy_srq", "srq");
    else if (srq->users)
        error = refuse(srq->pd->context, "ibv_destroy_srq", IBVERBS_BUSY, EBUSY, "queue pairs use it");
    else {
        srq->live = false;
        srq->pd->users--;
    }
    unlock();
    return error;
}

/* ---- posts ----------------------------------------------------------------------------------------------------- */

/* A device finds a wrong key when it uses the entry. 0, or 1 if an entry is outside the region of its key. */
static int check_keys(const struct pd *pd, const char *call, const struct ibv_sge *list, int count) {
    for (int i = 0; i < count; i++)
        if (list[i].length && !covers(pd, list[i].lkey, list[i].addr, list[i].length)) {
            refuse(pd->context, call, IBVERBS_LOCAL_KEY, 0, "%u bytes at %#llx are not in the region of key %u",
                   list[i].length, (unsigned long long)list[i].addr, list[i].lkey);
            return 1;
        }
    return 0;
}

static int post_srq_recv(struct ibv_srq *verbs, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct srq *srq = (struct srq *)verbs;
    int error = 0;
    lock();
    if (!srq->live)
        error = misuse("ibv_post_srq_recv", "srq");
    for (; wr && !error; wr = error ? wr : wr->next) {
        if (wr->num_sge < 0 || (uint32_t)wr->num_sge > srq->sges)
            error = refuse(srq->pd->context, "ibv_post_srq_recv", IBVERBS_ARGUMENT, EINVAL, "%d entries of %u",
                           wr->num_sge, srq->sges);
        else if (srq->posted == srq->room)
            error = refuse(srq->pd->context, "ibv_post_srq_recv", IBVERBS_FULL, ENOMEM, "%u receives", srq->room);
        else {
            check_keys(srq->pd, "ibv_post_srq_recv", wr->sg_list, wr->num_sge);
            srq->posted++;
        }
    }
    if (error)
        *bad = wr;
    unlock();
    return error;
}

static void flush(struct queue *queue, struct ibv_cq *cq, struct qp *qp) {
    for (uint32_t i = 0; i < queue->count; i++)
        complete(cq, qp, queue->posts[i].id, IBV_WC_WR_FLUSH_ERR);
    queue->count = 0;
}

static void fail(struct qp *qp) {
    qp->qp.state = qp->attr.qp_state = IBV_QPS_ERR;
    flush(&qp->sends, qp->init.send_cq, qp);
    flush(&qp->receives, qp->init.recv_cq, qp);
}

static uint64_t bytes_of(const struct ibv_sge *list, int count) {
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += list[i].length;
    return bytes;
}

static int check_send(const struct qp *qp, const struct ibv_send_wr *wr) {
    const struct context *context = qp->pd->context;
    bool is_datagram = qp->qp.qp_type == IBV_QPT_UD;
    bool is_send = wr->opcode == IBV_WR_SEND || wr->opcode == IBV_WR_SEND_WITH_IMM;
    /* ibv_post_send(3), the table of operations for each transport; EINVAL for a wrong value, ENOMEM if full. */
    if (wr->opcode > IBV_WR_ATOMIC_FETCH_AND_ADD || (is_datagram && !is_send) ||
        (qp->qp.qp_type == IBV_QPT_UC && wr->opcode > IBV_WR_SEND_WITH_IMM))
        return refuse(context, "ibv_post_send", IBVERBS_ARGUMENT, EINVAL, "opcode %d", wr->opcode);
    if (is_datagram && !wr->wr.ud.ah)
        return refuse(context, "ibv_post_send", IBVERBS_ARGUMENT, EINVAL, "a datagram without an address handle");
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->sends.sges)
        return refuse(context, "ibv_post_send", IBVERBS_ARGUMENT, EINVAL, "%d entries of %u", wr->num_sge,
                      qp->sends.sges);
    if ((wr->send_flags & IBV_SEND_INLINE) && bytes_of(wr->sg_list, wr->num_sge) > qp->init.cap.max_inline_data)
        return refuse(context, "ibv_post_send", IBVERBS_ARGUMENT, ENOMEM, "more inline data than %u bytes",
                      qp->init.cap.max_inline_data);
    if (qp->sends.count == qp->sends.room)
        return refuse(context, "ibv_post_send", IBVERBS_FULL, ENOMEM, "%u sends", qp->sends.room);
    return 0;
}

static int post_send(struct ibv_qp *verbs, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct qp *qp = (struct qp *)verbs;
    int error = 0;
    lock();
    if (!qp->live)
        error = misuse("ibv_post_send", "qp");
    /* kernel, drivers/infiniband/sw/rxe/rxe_verbs.c, rxe_post_send: EINVAL before the queue pair may send. */
    else if (verbs->state < IBV_QPS_RTS)
        error = refuse(qp->pd->context, "ibv_post_send", IBVERBS_STATE, EINVAL, "state %d", verbs->state);
    for (; wr && !error; wr = error ? wr : wr->next) {
        error = check_send(qp, wr);
        if (error)
            break;
        qp->sends.posts[qp->sends.count++] = (struct post){.id = wr->wr_id};
        if (verbs->state == IBV_QPS_ERR)
            flush(&qp->sends, qp->init.send_cq, qp);
        else if (!(wr->send_flags & IBV_SEND_INLINE) &&
                 check_keys(qp->pd, "ibv_post_send", wr->sg_list, wr->num_sge)) {
            complete(qp->init.send_cq, qp, qp->sends.posts[--qp->sends.count].id, IBV_WC_LOC_PROT_ERR);
            fail(qp);
        }
    }
    if (error)
        *bad = wr;
    unlock();
    return error;
}

static int post_recv(struct ibv_qp *verbs, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct qp *qp = (struct qp *)verbs;
    int error = 0;
    lock();
    if (!qp->live)
        error = misuse("ibv_post_recv", "qp");
    else if (verbs->state == IBV_QPS_RESET || verbs->srq)
        error = refuse(qp->pd->context, "ibv_post_recv", IBVERBS_STATE, EINVAL, "state %d%s", verbs->state,
                       verbs->srq ? ", with a shared receive queue" : "");
    for (; wr && !error; wr = error ? wr : wr->next) {
        if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->receives.sges)
            error = refuse(qp->pd->context, "ibv_post_recv", IBVERBS_ARGUMENT, EINVAL, "%d entries of %u", wr->num_sge,
                           qp->receives.sges);
        else if (qp->receives.count == qp->receives.room)
            error = refuse(qp->pd->context, "ibv_post_recv", IBVERBS_FULL, ENOMEM, "%u receives", qp->receives.room);
        else {
            check_keys(qp->pd, "ibv_post_recv", wr->sg_list, wr->num_sge);
            qp->receives.posts[qp->receives.count++] = (struct post){.id = wr->wr_id};
            if (verbs->state == IBV_QPS_ERR)
                flush(&qp->receives, qp->init.recv_cq, qp);
        }
    }
    if (error)
        *bad = wr;
    unlock();
    return error;
}

void install_queue_calls(struct context *context) {
    context->context.ops.poll_cq = poll_cq;
    context->context.ops.req_notify_cq = req_notify_cq;
    context->context.ops.post_srq_recv = post_srq_recv;
    context->context.ops.post_send = post_send;
    context->context.ops.post_recv = post_recv;
}

/* ---- queue pairs ----------------------------------------------------------------------------------------------- */

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *verbs, struct ibv_qp_init_attr *init) {
    struct pd *pd = (struct pd *)verbs;
    struct ibv_qp_cap *cap = &init->cap;
    struct qp *qp = NULL;
    lock();
    uint32_t depth = pd->context->settings.depth;
    struct cq *send_cq = (struct cq *)init->send_cq, *recv_cq = (struct cq *)init->recv_cq;
    if (!pd->live)
        misuse("ibv_create_qp", "pd");
    else if (!send_cq || !recv_cq)
        refuse(pd->context, "ibv_create_qp", IBVERBS_ARGUMENT, EINVAL, "no completion queue");
    else if (!send_cq->live || !recv_cq->live || (init->srq && !((struct srq *)init->srq)->live))
        misuse("ibv_create_qp", "cq or srq");
    else if (init->qp_type != IBV_QPT_RC && init->qp_type != IBV_QPT_UC && init->qp_type != IBV_QPT_UD)
        refuse(pd->context, "ibv_create_qp", IBVERBS_ARGUMENT, EOPNOTSUPP, "type %d", init->qp_type);
    /* Objects of a queue pair belong to one context (kernel, uverbs: a handle is looked up in its file). */
    else if (send_cq->context != pd->context || recv_cq->context != pd->context ||
             (init->srq && ((struct srq *)init->srq)->pd->context != pd->context))
        refuse(pd->context, "ibv_create_qp", IBVERBS_ARGUMENT, EINVAL, "objects of another context");
    else if (cap->max_send_wr > depth || (!init->srq && cap->max_recv_wr > depth) || cap->max_send_sge > MAX_SGE ||
             cap->max_recv_sge > MAX_SGE || cap->max_inline_data > MAX_INLINE)
        refuse(pd->context, "ibv_create_qp", IBVERBS_ARGUMENT, EINVAL,
               "%u sends, %u receives of %u; %u and %u entries of %d; %u bytes inline of %d", cap->max_send_wr,
               cap->max_recv_wr, depth, cap->max_send_sge, cap->max_recv_sge, MAX_SGE, cap->max_inline_data,
               MAX_INLINE);
    else {
        qp = calloc(1, sizeof *qp);
        qp->pd = pd;
        qp->live = true;
        /* ibv_create_qp(3): the values of cap become the actual ones. */
        cap->max_recv_wr = init->srq ? 0 : cap->max_recv_wr;
        cap->max_recv_sge = init->srq ? 0 : cap->max_recv_sge;
        qp->init = *init;
        qp->sends = (struct queue){.room = cap->max_send_wr, .sges = cap->max_send_sge};
        qp->receives = (struct queue){.room = cap->max_recv_wr, .sges = cap->max_recv_sge};
        qp->sends.posts = calloc(qp->sends.room + 1, sizeof *qp->sends.posts);
        qp->receives.posts = calloc(qp->receives.room + 1, sizeof *qp->receives.posts);
        qp->qp = (struct ibv_qp){.context = verbs->context, .qp_context = init->qp_context, .pd = verbs,
                                 .send_cq = init->send_cq, .recv_cq = init->recv_cq, .srq = init->srq,
                                 .qp_num = 0x100 + qp_numbers++ % 0xfffe00, .state = IBV_QPS_RESET,
                                 .qp_type = init->qp_type};
        pthread_mutex_init(&qp->qp.mutex, NULL);
        pthread_cond_init(&qp->qp.cond, NULL);
        qp->next = qps;
        qps = qp;
        pd->users++, send_cq->users++, recv_cq->users++;
        if (init->srq)
            ((struct srq *)init->srq)->users++;
    }
    unlock();
    return qp ? &qp->qp : NULL;
}

static void let_go(struct qp *qp) {
    clean(qp->init.send_cq, qp->qp.qp_num), clean(qp->init.recv_cq, qp->qp.qp_num);
    qp->pd->users--, ((struct cq *)qp->init.send_cq)->users--, ((struct cq *)qp->init.recv_cq)->users--;
    if (qp->init.srq)
        ((struct srq *)qp->init.srq)->users--;
    free(qp->sends.posts), free(qp->receives.posts);
    qp->live = false;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *verbs) {
    struct qp *qp = (struct qp *)verbs;
    int error = 0;
    lock();
    if (!qp->live)
        error = misuse("ibv_destroy_qp", "qp");
    else
        let_go(qp);
    unlock();
    return error;
}

/* Attributes that a change of state must and may have: ibv_modify_qp(3), and kernel,
 * drivers/infiniband/core/verbs.c, qp_state_table. From each state there is also a way to reset and to the error state,
 * which takes no further attribute. */
struct change {
    enum ibv_qp_type type;
    enum ibv_qp_state from, to;
    int must, may;
};

enum {
    TO_INIT = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    TO_INIT_UD = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
    TO_RTR_UC = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
    TO_RTR_RC = TO_RTR_UC | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    TO_RTS_RC = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
    MAY_RTR = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
    MAY_RTS_UC = IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE,
    MAY_RTS_RC = MAY_RTS_UC | IBV_QP_MIN_RNR_TIMER,
    MAY_RTS_UD = IBV_QP_CUR_STATE | IBV_QP_QKEY,
};

static const struct change changes[] = {
    {IBV_QPT_RC, IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT, 0},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_INIT, 0, TO_INIT},
    {IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR_RC, MAY_RTR},
    {IBV_QPT_RC, IBV_QPS_RTR, IBV_QPS_RTS, TO_RTS_RC, MAY_RTS_RC},
    {IBV_QPT_RC, IBV_QPS_RTS, IBV_QPS_RTS, 0, MAY_RTS_RC},
    {IBV_QPT_UC, IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT, 0},
    {IBV_QPT_UC, IBV_QPS_INIT, IBV_QPS_INIT, 0, TO_INIT},
    {IBV_QPT_UC, IBV_QPS_INIT, IBV_QPS_RTR, TO_RTR_UC, MAY_RTR},
    {IBV_QPT_UC, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, MAY_RTS_UC},
    {IBV_QPT_UC, IBV_QPS_RTS, IBV_QPS_RTS, 0, MAY_RTS_UC},
    {IBV_QPT_UD, IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT_UD, 0},
    {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_INIT, 0, TO_INIT_UD},
    {IBV_QPT_UD, IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPT_UD, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, MAY_RTS_UD},
    {IBV_QPT_UD, IBV_QPS_RTS, IBV_QPS_RTS, 0, MAY_RTS_UD},
};

static int check_change(const struct qp *qp, enum ibv_qp_state to, int mask) {
    const struct context *context = qp->pd->context;
    int given = mask & ~IBV_QP_STATE, must = -1, may = 0;
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        must = 0;
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        if (changes[i].type == qp->qp.qp_type && changes[i].from == qp->qp.state && changes[i].to == to)
            must = changes[i].must, may = changes[i].may;
    if (must < 0)
        return refuse(context, "ibv_modify_qp", IBVERBS_STATE, EINVAL, "from state %d to %d", qp->qp.state, to);
    if ((given & must) != must || (given & ~(must | may)))
        return refuse(context, "ibv_modify_qp", IBVERBS_ARGUMENT, EINVAL,
                      "from state %d to %d the mask %#x must have %#x and may have %#x", qp->qp.state, to, given, must,
                      may);
    return 0;
}

static int check_values(const struct qp *qp, const struct ibv_qp_attr *attr, int mask) {
    const struct context *context = qp->pd->context;
    const char *wrong = NULL;
    /* The fields' widths, and a path MTU that the port has: InfiniBand Architecture Specification volume 1, chapters
     * 9.7 and 11.2.5. */
    if ((mask & IBV_QP_PORT) && attr->port_num != 1)
        wrong = "port_num";
    else if ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index >= context->settings.pkeys)
        wrong = "pkey_index";
    else if ((mask & IBV_QP_PATH_MTU) && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096 ||
                                          128u << attr->path_mtu > context->settings.mtu))
        wrong = "path_mtu";
    else if ((mask & IBV_QP_DEST_QPN) && attr->dest_qp_num >> 24)
        wrong = "dest_qp_num";
    else if ((mask & IBV_QP_TIMEOUT) && attr->timeout > 31)
        wrong = "timeout";
    else if ((mask & IBV_QP_RETRY_CNT) && attr->retry_cnt > 7)
        wrong = "retry_cnt";
    else if ((mask & IBV_QP_RNR_RETRY) && attr->rnr_retry > 7)
        wrong = "rnr_retry";
    else if ((mask & IBV_QP_MIN_RNR_TIMER) && attr->min_rnr_timer > 31)
        wrong = "min_rnr_timer";
    else if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) && attr->max_rd_atomic > MAX_RD_ATOMIC)
        wrong = "max_rd_atomic";
    else if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && attr->max_dest_rd_atomic > MAX_RD_ATOMIC)
        wrong = "max_dest_rd_atomic";
    if (wrong)
        return refuse(context, "ibv_modify_qp", IBVERBS_ARGUMENT, EINVAL, "%s is out of range", wrong);
    return mask & IBV_QP_AV ? check_address_vector(context, "ibv_modify_qp", &attr->ah_attr) : 0;
}

static void keep(struct ibv_qp_attr *kept, const struct ibv_qp_attr *attr, int mask) {
#define KEEP(flag, field) \
    if (mask & IBV_QP_##flag) \
        kept->field = attr->field
    KEEP(ACCESS_FLAGS, qp_access_flags);
    KEEP(PKEY_INDEX, pkey_index);
    KEEP(PORT, port_num);
    KEEP(QKEY, qkey);
    KEEP(AV, ah_attr);
    KEEP(PATH_MTU, path_mtu);
    KEEP(TIMEOUT, timeout);
    KEEP(RETRY_CNT, retry_cnt);
    KEEP(RNR_RETRY, rnr_retry);
    KEEP(RQ_PSN, rq_psn);
    KEEP(MAX_QP_RD_ATOMIC, max_rd_atomic);
    KEEP(MIN_RNR_TIMER, min_rnr_timer);
    KEEP(SQ_PSN, sq_psn);
    KEEP(MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    KEEP(DEST_QPN, dest_qp_num);
#undef KEEP
}

EXPORT int ibv_modify_qp(struct ibv_qp *verbs, struct ibv_qp_attr *attr, int mask) {
    struct qp *qp = (struct qp *)verbs;
    lock();
    enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : verbs->state;
    int error = qp->live ? check_change(qp, to, mask) : misuse("ibv_modify_qp", "qp");
    if (!error)
        error = check_values(qp, attr, mask);
    if (!error) {
        keep(&qp->attr, attr, mask);
        verbs->state = qp->attr.qp_state = to;
        if ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index) {
            char more[32];
            snprintf(more, sizeof more, ",\"key\":\"%04x\"", qp->pd->context->settings.pkey[attr->pkey_index]);
            log_event("partition", qp->pd->context, "ibv_modify_qp", more);
        }
        if (to == IBV_QPS_ERR)
            fail(qp);
        if (to == IBV_QPS_RESET) {
            qp->sends.count = qp->receives.count = 0;
            clean(verbs->send_cq, verbs->qp_num), clean(verbs->recv_cq, verbs->qp_num);
            memset(&qp->attr, 0, sizeof qp->attr);
        }
    }
    unlock();
    return error;
}

EXPORT int ibv_query_qp(struct ibv_qp *verbs, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    struct qp *qp = (struct qp *)verbs;
    int error = 0;
    (void)mask; /* ibv_query_qp(3): more may be given than was asked for */
    lock();
    if (!qp->live)
        error = misuse("ibv_query_qp", "qp");
    else {
        *attr = qp->attr;
        attr->qp_state = attr->cur_qp_state = verbs->state;
        attr->cap = qp->init.cap;
        *init = qp->init;
    }
    unlock();
    return error;
}

void leak_queues(const struct context *context, const char *call) {
    uint64_t left[3] = {0};
    for (struct qp *qp = qps; qp; qp = qp->next)
        if (qp->live && qp->pd->context == context)
            let_go(qp), left[0]++;
    for (struct srq *srq = srqs; srq; srq = srq->next)
        if (srq->live && srq->pd->context == context)
            srq->live = false, srq->pd->users--, left[1]++;
    for (struct cq *cq = cqs; cq; cq = cq->next)
        if (cq->live && cq->context == context) {
            free(cq->entries);
            cq->entries = NULL;
            cq->live = false, cq->count = 0, left[2]++;
        }
    leak(context, call, "qp", left[0]);
    leak(context, call, "srq", left[1]);
    leak(context, call, "cq", left[2]);
}
