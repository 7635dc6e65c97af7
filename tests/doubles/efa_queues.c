/* Completion and event queues of the EFA double. */
#include "efa.h"


/* A queue has as many entries as it was opened with. The device drops what finds no room, silently: ofiwg/libfabric
 * pull request 11337. What was in the queue by then can be read; nothing can after it: fi_cq(3), "overrun". */
void push_entry(struct cq *cq, const struct entry *entry) {
    if (cq->count == cq->size && !cq->overrun) {
        cq->overrun = true;
        fprintf(stderr, "EFA double: a completion queue of %zu entries overran; its further completions are lost\n",
                cq->size);
    }
    if (cq->overrun) {
        refuse(RULE_OVERRUN);
        return;
    }
    cq->entries[(cq->head + cq->count++) % cq->size] = *entry;
}

static void drop_first(struct cq *cq) {
    cq->head = (cq->head + 1) % cq->size;
    cq->count--;
}

/* The context that the caller gave is the provider's memory until the completion: fi_efa(7), FI_CONTEXT2 of efa-direct.
 * prov/efa/src/efa.h, efa_fill_context writes flags and address there; this double fills all of it. */
static void check_context(struct endpoint *endpoint, uint32_t index) {
    struct op *op = &endpoint->ops[index];
    uint64_t words[8];
    if (!endpoint->is_direct || !op->context)
        return;
    memcpy(words, op->context, sizeof words);
    for (uint64_t i = 0; i < 8; i++)
        if (words[i] != ((uint64_t)index << 32 | op->generation << 4 | i) * 0x9E3779B97F4A7C15u) {
            refuse(RULE_CONTEXT);
            fprintf(stderr, "EFA double: the fi_context2 at %p was overwritten while an operation owned it\n",
                    op->context);
            abort();
        }
}

static fi_addr_t reverse_lookup(const struct endpoint *endpoint, const struct name *name) {
    const struct av *av = endpoint->av;
    for (size_t i = 0; av && i < av->count; i++)
        if (av->used[i] && !memcmp(&av->names[i], name, sizeof *name))
            return i;
    return FI_ADDR_NOTAVAIL;
}

/* Passes over entries that nobody is told of. Operations without a context or without FI_COMPLETION take an entry of
 * the device's queue, but none of the caller's: efa_cq.c, efa_cq_handle_tx_completion. */
static struct entry *first_entry(struct cq *cq) {
    while (cq->count) {
        struct entry *entry = &cq->entries[cq->head];
        if (entry->endpoint && !(entry->kind == ENTRY_TX && !entry->status && entry->endpoint->ops[entry->op].silent))
            return entry;
        if (entry->endpoint)
            release_op(entry->endpoint, entry->op);
        drop_first(cq);
    }
    return NULL;
}

static void finish(struct cq *cq, const struct entry *entry) {
    if (entry->kind == ENTRY_TX) {
        check_context(entry->endpoint, entry->op);
        release_op(entry->endpoint, entry->op);
    }
    if (entry->kind == ENTRY_IMM && entry->serial > entry->endpoint->imms_reported)
        entry->endpoint->imms_reported = entry->serial;
    drop_first(cq);
}

static ssize_t read_from(struct fid_cq *fid, void *buffer, size_t count, fi_addr_t *sources) {
    static const size_t sizes[] = {
        [FI_CQ_FORMAT_CONTEXT] = sizeof(struct fi_cq_entry), [FI_CQ_FORMAT_MSG] = sizeof(struct fi_cq_msg_entry),
        [FI_CQ_FORMAT_DATA] = sizeof(struct fi_cq_data_entry),
        [FI_CQ_FORMAT_TAGGED] = sizeof(struct fi_cq_tagged_entry)};
    struct cq *cq = (struct cq *)fid;
    size_t done = 0;
    lock(cq->domain);
    for (size_t i = 0; i < cq->endpoint_count; i++)
        progress(cq->endpoints[i]);
    while (done < count) {
        struct entry *entry = first_entry(cq);
        if (!entry || entry->status)
            break;
        struct fi_cq_tagged_entry told = {.op_context = entry->context, .flags = entry->flags, .len = entry->bytes,
                                          .data = entry->data};
        memcpy((uint8_t *)buffer + done * sizes[cq->format], &told, sizes[cq->format]);
        if (sources)
            sources[done] = entry->kind == ENTRY_TX || !(entry->endpoint->caps & FI_SOURCE)
                ? FI_ADDR_NOTAVAIL
                : reverse_lookup(entry->endpoint, &entry->source);
        finish(cq, entry);
        done++;
    }
    bool is_error = first_entry(cq) || (cq->overrun && !cq->count && config.overrun_event);
    unlock(cq->domain);
    if (done)
        return (ssize_t)done;
    return is_error && count ? -FI_EAVAIL : -FI_EAGAIN;
}

static ssize_t read_plain(struct fid_cq *fid, void *buffer, size_t count) {
    return read_from(fid, buffer, count, NULL);
}

static ssize_t read_error(struct fid_cq *fid, struct fi_cq_err_entry *out, uint64_t flags) {
    struct cq *cq = (struct cq *)fid;
    (void)flags;
    lock(cq->domain);
    struct entry *entry = first_entry(cq);
    bool overran = !entry && cq->overrun && config.overrun_event;
    if (!overran && (!entry || !entry->status)) {
        unlock(cq->domain);
        return -FI_EAGAIN;
    }
    /* fi_cq(3): with err_data_size above 0 on entry (API 1.5 and later) the text goes to the caller's buffer, else to
     * the provider's. Newer versions add src_addr behind err_data_size; it is left alone. */
    char *text = out->err_data_size && out->err_data ? out->err_data : cq->text;
    size_t room = text == cq->text ? sizeof cq->text : out->err_data_size;
    uint32_t status = overran ? 0 : entry->status;
    out->op_context = overran ? NULL : entry->context;
    out->flags = overran ? 0 : entry->flags;
    out->len = overran ? 0 : entry->bytes;
    out->buf = NULL;
    out->data = overran ? 0 : entry->data;
    out->tag = 0;
    out->olen = 0;
    out->err = overran ? FI_EOVERRUN : errno_of_status(status);
    out->prov_errno = (int)status;
    int length = snprintf(text, room, "%s", overran ? "the queue overran" : text_of_status(status));
    out->err_data = text;
    out->err_data_size = (size_t)length + 1 < room ? (size_t)length + 1 : room;
    if (!overran)
        finish(cq, entry);
    unlock(cq->domain);
    return 1;
}

/* prov/efa/src/efa_cq.c, efa_cq_strerror: the error data if there is any, else the text of the status. */
static const char *error_text(struct fid_cq *fid, int number, const void *data, char *buffer, size_t bytes) {
    (void)fid;
    const char *text = data ? data : text_of_status((uint32_t)number);
    if (buffer && bytes)
        snprintf(buffer, bytes, "%s", text);
    return text;
}

static int close_cq(struct fid *fid) {
    struct cq *cq = (struct cq *)fid;
    if (cq->endpoint_count)
        return -FI_EBUSY; /* fi_cq(3): endpoints bound to it must be closed before */
    free(cq->entries);
    free(cq);
    return 0;
}
static int cq_bind(struct fid *fid, struct fid *other, uint64_t flags) {
    (void)fid, (void)other, (void)flags;
    return -FI_ENOSYS;
}
static int cq_control(struct fid *fid, int command, void *argument) {
    (void)fid, (void)command, (void)argument;
    return -FI_ENOSYS;
}
static ssize_t no_sread(struct fid_cq *fid, void *buffer, size_t count, const void *condition, int timeout) {
    (void)fid, (void)buffer, (void)count, (void)condition, (void)timeout;
    return -FI_ENOSYS;
}
static int no_signal(struct fid_cq *fid) {
    (void)fid;
    return -FI_ENOSYS;
}

static struct fi_ops cq_ops = {.size = sizeof cq_ops, .close = close_cq, .bind = cq_bind, .control = cq_control};
static struct fi_ops_cq cq_calls = {.size = sizeof cq_calls, .read = read_plain, .readfrom = read_from,
    .readerr = read_error, .sread = no_sread, .signal = no_signal, .strerror = error_text};

int open_cq(struct fid_domain *fid, struct fi_cq_attr *attr, struct fid_cq **out, void *context) {
    struct domain *domain = (struct domain *)fid;
    if (attr->wait_obj != FI_WAIT_NONE && attr->wait_obj != FI_WAIT_UNSPEC)
        return -FI_ENOSYS;
    /* fi_efa(7): FI_CQ_FORMAT_TAGGED on the fabric efa alone. */
    if (attr->format == FI_CQ_FORMAT_TAGGED && domain->fabric->is_direct)
        return -FI_ENOSYS;
    struct cq *cq = calloc(1, sizeof *cq);
    cq->domain = domain;
    cq->format = attr->format == FI_CQ_FORMAT_UNSPEC ? FI_CQ_FORMAT_CONTEXT : attr->format;
    cq->size = attr->size ? attr->size : config.cq_default;
    if (cq->size < domain->least_cq)
        cq->size = domain->least_cq;
    cq->entries = calloc(cq->size, sizeof *cq->entries);
    cq->fid.fid = (struct fid){.fclass = FI_CLASS_CQ, .context = context, .ops = &cq_ops};
    cq->fid.ops = &cq_calls;
    attr->size = cq->size; /* fi_cq(3): the size is told back */
    *out = &cq->fid;
    return 0;
}

/* ---- event queues ---------------------------------------------------------------------------------------------- */

/* prov/efa/src/efa_base_ep.c, efa_base_ep_write_eq_error: abort() if no event queue is bound, or if it is full. */
void eq_error(struct endpoint *endpoint, int error, int status) {
    struct eq *eq = endpoint->eq;
    if (!eq || eq->count == sizeof eq->errors / sizeof *eq->errors) {
        fprintf(stderr, "EFA double: error %d, status %d (%s) has no event queue to go to; aborting, as EFA does\n",
                error, status, text_of_status((uint32_t)status));
        abort();
    }
    eq->errors[(eq->head + eq->count++) % 64] = (struct fi_eq_err_entry){.err = error, .prov_errno = status};
}

static ssize_t eq_read(struct fid_eq *fid, uint32_t *event, void *buffer, size_t bytes, uint64_t flags) {
    (void)event, (void)buffer, (void)bytes, (void)flags;
    return ((struct eq *)fid)->count ? -FI_EAVAIL : -FI_EAGAIN;
}

static ssize_t eq_read_error(struct fid_eq *fid, struct fi_eq_err_entry *out, uint64_t flags) {
    struct eq *eq = (struct eq *)fid;
    if (!eq->count)
        return -FI_EAGAIN;
    *out = eq->errors[eq->head];
    if (!(flags & FI_PEEK)) {
        eq->head = (eq->head + 1) % 64;
        eq->count--;
    }
    return sizeof *out;
}

static const char *eq_text(struct fid_eq *fid, int number, const void *data, char *buffer, size_t bytes) {
    (void)fid, (void)data;
    if (buffer && bytes)
        snprintf(buffer, bytes, "%s", text_of_status((uint32_t)number));
    return text_of_status((uint32_t)number);
}

static int close_eq(struct fid *fid) {
    free(fid);
    return 0;
}

static struct fi_ops eq_ops = {.size = sizeof eq_ops, .close = close_eq, .bind = cq_bind, .control = cq_control};
static struct fi_ops_eq eq_calls = {
    .size = sizeof eq_calls, .read = eq_read, .readerr = eq_read_error, .strerror = eq_text};

int open_eq(struct fid_fabric *fid, struct fi_eq_attr *attr, struct fid_eq **out, void *context) {
    (void)fid, (void)attr;
    struct eq *eq = calloc(1, sizeof *eq);
    eq->fid.fid = (struct fid){.fclass = FI_CLASS_EQ, .context = context, .ops = &eq_ops};
    eq->fid.ops = &eq_calls;
    *out = &eq->fid;
    return 0;
}
