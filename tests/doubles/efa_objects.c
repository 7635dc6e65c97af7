/* Fabrics, domains and address vectors of the EFA double. */
#define _GNU_SOURCE
#include "efa.h"

#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static int no_bind(struct fid *fid, struct fid *other, uint64_t flags) {
    (void)fid, (void)other, (void)flags;
    return -FI_ENOSYS;
}
static int no_control(struct fid *fid, int command, void *argument) {
    (void)fid, (void)command, (void)argument;
    return -FI_ENOSYS;
}
static int no_ops_open(struct fid *fid, const char *name, uint64_t flags, void **ops, void *context) {
    (void)fid, (void)name, (void)flags, (void)ops, (void)context;
    return -FI_EINVAL;
}

void lock(struct domain *domain) {
    while (atomic_flag_test_and_set_explicit(&domain->lock, memory_order_acquire))
        if (config.is_auto)
            sched_yield(); /* the device's thread may wait for a processor */
}
void unlock(struct domain *domain) { atomic_flag_clear_explicit(&domain->lock, memory_order_release); }

/* ---- address vectors ------------------------------------------------------------------------------------------- */

static int insert(struct fid_av *fid, const void *addresses, size_t count, fi_addr_t *out, uint64_t flags,
                  void *context) {
    struct av *av = (struct av *)fid;
    int inserted = 0;
    (void)flags, (void)context;
    lock(av->domain);
    for (size_t i = 0; i < count; i++) {
        struct name name;
        fi_addr_t at = FI_ADDR_NOTAVAIL;
        memcpy(&name, (const uint8_t *)addresses + i * sizeof name, sizeof name);
        name.pad = 0, name.unused = 0;
        /* prov/efa/src/efa_av.c, efa_av_is_valid_address refuses an empty GID, and the device makes no address handle
         * for a GID that it cannot route. The entry is then FI_ADDR_NOTAVAIL, and not counted: fi_av(3). */
        if (nic_of_gid(name.gid) != UINT32_MAX) {
            size_t place = SIZE_MAX;
            for (size_t n = 0; n < av->count; n++) {
                if (av->used[n] && !memcmp(&av->names[n], &name, sizeof name)) {
                    place = n; /* the same address again has the same fi_addr */
                    break;
                }
                if (!av->used[n] && place == SIZE_MAX)
                    place = n;
            }
            if (place == SIZE_MAX) {
                if (av->count == av->room) {
                    av->room = av->room ? av->room * 2 : 64;
                    av->names = realloc(av->names, av->room * sizeof *av->names);
                    av->used = realloc(av->used, av->room * sizeof *av->used);
                }
                place = av->count++;
            }
            av->names[place] = name;
            av->used[place] = true;
            av->version++;
            at = place;
            inserted++;
        }
        if (out)
            out[i] = at;
    }
    unlock(av->domain);
    return inserted;
}

static int av_remove(struct fid_av *fid, fi_addr_t *addresses, size_t count, uint64_t flags) {
    struct av *av = (struct av *)fid;
    int answer = 0;
    (void)flags;
    lock(av->domain);
    for (size_t i = 0; i < count; i++) {
        if (addresses[i] >= av->count || !av->used[addresses[i]]) {
            answer = -FI_EINVAL;
            continue;
        }
        av->used[addresses[i]] = false;
        av->version++;
        for (size_t n = 0; n < av->domain->endpoint_count; n++)
            if (av->domain->endpoints[n]->av == av)
                forget_queued(av->domain->endpoints[n], &av->names[addresses[i]]);
    }
    unlock(av->domain);
    return answer;
}

static int lookup(struct fid_av *fid, fi_addr_t address, void *name, size_t *bytes) {
    struct av *av = (struct av *)fid;
    if (address >= av->count || !av->used[address])
        return -FI_EINVAL;
    size_t given = *bytes;
    memcpy(name, &av->names[address], given < sizeof(struct name) ? given : sizeof(struct name));
    *bytes = sizeof(struct name);
    return 0;
}

static const char *address_text(struct fid_av *fid, const void *address, char *text, size_t *bytes) {
    const struct name *name = address;
    (void)fid;
    int length = snprintf(text, *bytes, "fi_addr_efa://nic%u:%u:%u", nic_of_gid(name->gid), name->qpn, name->qkey);
    *bytes = (size_t)length + 1;
    return text;
}

static int close_av(struct fid *fid) {
    struct av *av = (struct av *)fid;
    free(av->names);
    free(av->used);
    free(av);
    return 0;
}

static struct fi_ops av_ops = {
    .size = sizeof av_ops, .close = close_av, .bind = no_bind, .control = no_control, .ops_open = no_ops_open};
static struct fi_ops_av av_calls = {
    .size = sizeof av_calls, .insert = insert, .remove = av_remove, .lookup = lookup, .straddr = address_text};

int open_av(struct fid_domain *fid, struct fi_av_attr *attr, struct fid_av **out, void *context) {
    /* fi_efa(7): FI_AV_TABLE, and FI_AV_MAP is served as a table; FI_EVENT is not supported. Named vectors neither. */
    if (attr && ((attr->flags & FI_EVENT) || attr->name))
        return -FI_ENOSYS;
    struct av *av = calloc(1, sizeof *av);
    av->domain = (struct domain *)fid;
    av->fid.fid = (struct fid){.fclass = FI_CLASS_AV, .context = context, .ops = &av_ops};
    av->fid.ops = &av_calls;
    if (attr && attr->type == FI_AV_MAP)
        attr->type = FI_AV_TABLE;
    *out = &av->fid;
    return 0;
}

/* ---- the device ------------------------------------------------------------------------------------------------ */

/* TOKENYARD_EFA_AUTO. fi_efa(7), Progress: efa-direct has FI_PROGRESS_AUTO. The device sends and takes packets, and
 * writes completions, whether its process polls or sleeps; only a completion queue with room keeps them. The fabric efa
 * is left to polls, since its provider's handshakes and messages go by the process that polls. */
static void *run_device(void *argument) {
    struct domain *domain = argument;
    const struct timespec pause = {.tv_nsec = 50000};
    while (!atomic_load(&domain->is_closing)) {
        lock(domain);
        for (size_t i = 0; i < domain->endpoint_count; i++)
            progress(domain->endpoints[i]);
        unlock(domain);
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* The device begins with the first endpoint, and ends with the domain. Its thread takes no signal. */
void attach(struct endpoint *endpoint) {
    struct domain *domain = endpoint->domain;
    lock(domain);
    domain->endpoints[domain->endpoint_count++] = endpoint;
    unlock(domain);
    if (!config.is_auto || !endpoint->is_direct || domain->has_device)
        return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    domain->has_device = !pthread_create(&domain->device, NULL, run_device, domain);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!domain->has_device)
        abort();
}

/* Under the domain's lock. */
void detach(struct endpoint *endpoint) {
    struct domain *domain = endpoint->domain;
    for (size_t i = 0; i < domain->endpoint_count; i++)
        if (domain->endpoints[i] == endpoint) {
            domain->endpoints[i] = domain->endpoints[--domain->endpoint_count];
            return;
        }
}

/* ---- domains and fabrics --------------------------------------------------------------------------------------- */

static int close_domain(struct fid *fid) {
    struct domain *domain = (struct domain *)fid;
    atomic_store(&domain->is_closing, true);
    if (domain->has_device)
        pthread_join(domain->device, NULL);
    free(domain);
    return 0;
}

static struct fi_ops domain_ops = {
    .size = sizeof domain_ops, .close = close_domain, .bind = no_bind, .control = no_control, .ops_open = no_ops_open};
static struct fi_ops_domain domain_calls = {
    .size = sizeof domain_calls, .av_open = open_av, .cq_open = open_cq, .endpoint = open_endpoint};

static int open_domain(struct fid_fabric *fid, struct fi_info *info, struct fid_domain **out, void *context) {
    struct fabric *fabric = (struct fabric *)fid;
    unsigned nic;
    if (!info->domain_attr || !info->domain_attr->name || sscanf(info->domain_attr->name, "rdmap%us0", &nic) != 1 ||
        nic >= config.nics)
        return -FI_ENODATA;
    sweep();
    struct domain *domain = calloc(1, sizeof *domain);
    number_regions();
    domain->fid.fid = (struct fid){.fclass = FI_CLASS_DOMAIN, .context = context, .ops = &domain_ops};
    domain->fid.ops = &domain_calls;
    domain->fid.mr = &region_calls;
    domain->fabric = fabric;
    domain->nic = nic;
    domain->has_hmem = info->caps & FI_HMEM; /* efa_mr.c reads util_domain.info_domain_caps */
    /* rdm/efa_rdm_domain.c, rdm_cq_size: queues of the fabric efa have room for all posts and receives of an
     * endpoint. */
    if (!fabric->is_direct && info->tx_attr && info->rx_attr)
        domain->least_cq = info->tx_attr->size + info->rx_attr->size;
    domain->random = config.seed * 0x9E3779B97F4A7C15u + (uint64_t)getpid() * 31 + nic;
    atomic_flag_clear(&domain->lock);
    *out = &domain->fid;
    return 0;
}

static int close_fabric(struct fid *fid) {
    free(fid);
    return 0;
}

static struct fi_ops fabric_ops = {
    .size = sizeof fabric_ops, .close = close_fabric, .bind = no_bind, .control = no_control, .ops_open = no_ops_open};
static struct fi_ops_fabric fabric_calls = {.size = sizeof fabric_calls, .domain = open_domain, .eq_open = open_eq};

EXPORT int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context) {
    load_config();
    if (!attr || !attr->name || (strcmp(attr->name, "efa") && strcmp(attr->name, "efa-direct")))
        return -FI_ENODATA;
    if (!strcmp(attr->name, "efa-direct") && !config.direct)
        return -FI_ENODATA;
    struct fabric *fabric = calloc(1, sizeof *fabric);
    fabric->fid.fid = (struct fid){.fclass = FI_CLASS_FABRIC, .context = context, .ops = &fabric_ops};
    fabric->fid.ops = &fabric_calls;
    fabric->fid.api_version = attr->api_version;
    fabric->is_direct = !strcmp(attr->name, "efa-direct");
    *out = &fabric->fid;
    return 0;
}
