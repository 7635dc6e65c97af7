/* Fabrics, domains, address vectors and memory regions of the EFA double. */
#define _GNU_SOURCE
#include "efa.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
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
        ;
}
void unlock(struct domain *domain) { atomic_flag_clear_explicit(&domain->lock, memory_order_release); }

/* ---- memory regions -------------------------------------------------------------------------------------------- */

/* Keys are the numbers of registrations, scrambled by a multiplication modulo 2^32 so that a neighbouring key or an
 * index is never valid by chance. No number is used twice in a process. */
enum { CHUNK = 4096, CHUNKS = 4096 };
static struct region **chunks[CHUNKS];
static uint32_t next_number;
static pthread_mutex_t numbering = PTHREAD_MUTEX_INITIALIZER;
static const uint32_t SCRAMBLE = 0x9E3779B1u;

/* Of this process. Set with each domain: after a fork, the child's first domain comes before its first region; and
 * asking for it with each packet would be a system call. */
static _Atomic uint32_t first_number;

static uint32_t unscramble(uint32_t key) {
    uint32_t inverse = SCRAMBLE;
    for (int i = 0; i < 5; i++)
        inverse *= 2 - SCRAMBLE * inverse;
    return key * inverse - atomic_load_explicit(&first_number, memory_order_relaxed);
}

struct region *find_region(uint64_t key) {
    if (key > UINT32_MAX)
        return NULL;
    uint32_t number = unscramble((uint32_t)key);
    if (number >= __atomic_load_n(&next_number, __ATOMIC_ACQUIRE) || number / CHUNK >= CHUNKS)
        return NULL;
    return chunks[number / CHUNK][number % CHUNK];
}

static int close_region(struct fid *fid) {
    struct region *region = (struct region *)fid;
    uint32_t number = unscramble((uint32_t)region->fid.key);
    /* The domain's lock is held wherever bytes are moved, so nothing touches the region once this returns. */
    lock(region->domain);
    chunks[number / CHUNK][number % CHUNK] = NULL;
    region->domain->region_count--;
    region->domain->page_count -= region->pages;
    unlock(region->domain);
    if (region->is_mapped)
        munmap(region->mapping, region->bytes);
    free(region);
    return 0;
}

static struct fi_ops region_ops = {
    .size = sizeof region_ops, .close = close_region, .bind = no_bind, .control = no_control, .ops_open = no_ops_open};

/* fi_mr(3), fi_mr_dmabuf; declared here since headers of version 1.17 do not have it. */
struct dma_buf {
    int fd;
    uint64_t offset;
    size_t bytes;
    void *base;
};
#define MR_DMABUF (1ULL << 40) /* FI_MR_DMABUF, from version 1.20 */

int register_region(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr) {
    struct domain *domain = (struct domain *)fid;
    struct region *region = calloc(1, sizeof *region);
    int error = -FI_EINVAL;
    *mr = NULL;
    /* prov/efa/src/efa.h, EFA_MR_IOV_LIMIT: one range. */
    if (attr->iov_count != 1 || !attr->mr_iov)
        goto refused;
    region->domain = domain;
    region->access = attr->access;
    region->flags = flags;
    region->fd = -1;
    region->is_hmem = attr->iface != FI_HMEM_SYSTEM;
    region->is_dmabuf = flags & MR_DMABUF;
    /* fi_mr(3): the interface of device memory needs FI_MR_HMEM. */
    if (region->is_hmem && !(domain->mr_mode & FI_MR_HMEM))
        goto refused;
    if (region->is_dmabuf) {
        const struct dma_buf *buffer = (const struct dma_buf *)(const void *)attr->mr_iov;
        uint32_t api = domain->fabric->fid.api_version;
        if (api < FI_VERSION(1, 20) || !buffer->bytes || buffer->fd < 0)
            goto refused;
        /* A dma-buf tells its size by seeking to its end (Linux: Documentation/driver-api/dma-buf.rst). */
        off_t end = lseek(buffer->fd, 0, SEEK_END);
        if (end >= 0 && (buffer->offset > (uint64_t)end || buffer->bytes > (uint64_t)end - buffer->offset))
            goto refused;
        /* prov/efa/src/efa_mr.c, efa_mr_reg_ibv_mr: peers use base_addr + offset (all tags from v1.20.0). */
        region->base = (uint64_t)(uintptr_t)buffer->base + buffer->offset;
        region->bytes = buffer->bytes;
        region->fd = buffer->fd;
        region->fd_offset = buffer->offset;
        void *mapping = buffer->offset % 4096
            ? MAP_FAILED
            : mmap(NULL, buffer->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->fd, (off_t)buffer->offset);
        region->is_mapped = mapping != MAP_FAILED;
        region->mapping = region->is_mapped ? mapping : NULL;
    } else {
        region->base = (uint64_t)(uintptr_t)attr->mr_iov->iov_base;
        region->bytes = attr->mr_iov->iov_len;
        if (!region->base || !region->bytes || region->base + region->bytes < region->base)
            goto refused;
        if (!region->is_hmem) {
            /* The kernel pins the pages, so all must exist: -EFAULT (dmf-mxl/mxl issue 516 shows it). */
            uint64_t first = region->base & ~4095ull, last = region->base + region->bytes;
            if (msync((void *)(uintptr_t)first, last - first, MS_ASYNC)) {
                error = -FI_EFAULT;
                goto refused;
            }
            region->mapping = (uint8_t *)(uintptr_t)region->base;
        }
    }
    uint64_t page = config.page_bytes;
    region->pages = (region->base + region->bytes + page - 1) / page - region->base / page;
    error = -FI_ENOMEM;
    /* ofiwg/libfabric pull request 10402: a region that takes remote writes has at most 1 M pages. */
    if ((region->access & FI_REMOTE_WRITE) && region->pages > config.pages)
        goto refused;
    pthread_mutex_lock(&numbering);
    uint32_t number = next_number;
    bool fits = number / CHUNK < CHUNKS;
    lock(domain);
    /* ofiwg/libfabric issue 9739: the device has entries for some 24 M pages, and answers "cannot allocate memory". */
    fits = fits && domain->region_count < config.regions && domain->page_count + region->pages <= config.total_pages;
    if (fits && !chunks[number / CHUNK])
        fits = (chunks[number / CHUNK] = calloc(CHUNK, sizeof(struct region *)));
    if (fits) {
        domain->region_count++;
        domain->page_count += region->pages;
        chunks[number / CHUNK][number % CHUNK] = region;
        __atomic_store_n(&next_number, number + 1, __ATOMIC_RELEASE);
    }
    unlock(domain);
    pthread_mutex_unlock(&numbering);
    if (!fits)
        goto refused;
    region->fid.fid.fclass = FI_CLASS_MR;
    region->fid.fid.context = attr->context;
    region->fid.fid.ops = &region_ops;
    region->fid.key = (uint32_t)((number + atomic_load(&first_number)) * SCRAMBLE); /* FI_MR_PROV_KEY: requested_key is ignored */
    region->fid.mem_desc = region;
    *mr = &region->fid;
    return 0;
refused:
    if (region->is_mapped)
        munmap(region->mapping, region->bytes);
    free(region);
    refuse(RULE_REGIONS);
    return error;
}

EXPORT int tokenyard_double_region(uint64_t key, struct tokenyard_double_region *out);
int tokenyard_double_region(uint64_t key, struct tokenyard_double_region *out) {
    struct region *region = find_region(key);
    if (!region)
        return -1;
    off_t end = region->is_dmabuf ? lseek(region->fd, 0, SEEK_END) : 0;
    *out = (struct tokenyard_double_region){
        .base = region->base, .bytes = region->bytes, .access = region->access, .flags = region->flags,
        .fd_offset = region->fd_offset, .fd_bytes = end > 0 ? (uint64_t)end : 0, .fd = region->fd,
        .nic = (int32_t)region->domain->nic};
    return 0;
}

static int register_vector(struct fid *fid, const struct iovec *iov, size_t count, uint64_t access, uint64_t offset,
                           uint64_t key, uint64_t flags, struct fid_mr **mr, void *context) {
    struct fi_mr_attr attr = {.mr_iov = iov, .iov_count = count, .access = access, .offset = offset,
                              .requested_key = key, .context = context, .iface = FI_HMEM_SYSTEM};
    return register_region(fid, &attr, flags, mr);
}

static int register_buffer(struct fid *fid, const void *buffer, size_t bytes, uint64_t access, uint64_t offset,
                           uint64_t key, uint64_t flags, struct fid_mr **mr, void *context) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = bytes};
    return register_vector(fid, &iov, 1, access, offset, key, flags, mr, context);
}

static struct fi_ops_mr mr_calls = {
    .size = sizeof mr_calls, .reg = register_buffer, .regv = register_vector, .regattr = register_region};

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

/* ---- domains and fabrics --------------------------------------------------------------------------------------- */

static int close_domain(struct fid *fid) {
    free(fid);
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
    atomic_store(&first_number, (uint32_t)getpid() * 2654435761u);
    domain->fid.fid = (struct fid){.fclass = FI_CLASS_DOMAIN, .context = context, .ops = &domain_ops};
    domain->fid.ops = &domain_calls;
    domain->fid.mr = &mr_calls;
    domain->fabric = fabric;
    domain->nic = nic;
    domain->mr_mode = (uint64_t)info->domain_attr->mr_mode;
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
