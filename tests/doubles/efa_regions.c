/* Memory regions of the EFA double: what registers, where the bytes of a region are, and when they are visible.
 *
 * A region of host memory is where its address says. A region of GPU memory is nowhere for the processor: its bytes are
 * those of its dma-buf, for which tests give a memfd that this double maps by itself. Without one the bytes are at the
 * address if the process has it mapped, else nowhere: such regions are recorded, and no byte moves.
 */
#define _GNU_SOURCE
#include "efa.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { PAGE = 4096, IFACES = FI_HMEM_SYNAPSEAI + 1 };

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

/* ---- keys ------------------------------------------------------------------------------------------------------ */

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

void number_regions(void) { atomic_store(&first_number, (uint32_t)getpid() * 2654435761u); }

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

/* Gives the region its key. False: the NIC has no room for it. */
static bool give_key(struct region *region) {
    struct domain *domain = region->domain;
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
    /* FI_MR_PROV_KEY: requested_key is ignored. */
    region->fid.key = (uint32_t)((number + atomic_load(&first_number)) * SCRAMBLE) | (uint64_t)region->is_copied << 32;
    return fits;
}

/* ---- log ------------------------------------------------------------------------------------------------------- */

static void log_region(const char *event, const char *call, const struct region *region, const char *more) {
    static const char *const kinds[] = {"host", "address", "dmabuf"};
    static const char *const ifaces[IFACES] = {"system", "cuda", "rocr", "ze", "neuron", "synapseai"};
    log_event(event, region->domain->nic, call,
              ",\"fabric\":\"%s\",\"kind\":\"%s\",\"iface\":\"%s\",\"hmem_device\":%d,\"fd\":%d,\"fd_bytes\":%" PRIu64
              ",\"fd_name\":\"%s\",\"offset\":%" PRIu64 ",\"length\":%" PRIu64 ",\"base\":%" PRIu64
              ",\"access\":%" PRIu64 ",\"flags\":%" PRIu64 ",\"requested_key\":%" PRIu64 "%s",
              region->domain->fabric->is_direct ? "efa-direct" : "efa", kinds[region->kind], ifaces[region->iface],
              region->hmem_device, region->fd, region->fd_bytes, region->fd_name, region->fd_offset, region->bytes,
              region->base, region->access, region->flags, region->requested_key, more);
}

static void log_key(const char *event, const char *call, const struct region *region) {
    char key[64];
    snprintf(key, sizeof key, ",\"region\":%u,\"key\":%" PRIu64, unscramble((uint32_t)region->fid.key),
             region->fid.key);
    log_region(event, call, region, key);
}

/* ---- registration ---------------------------------------------------------------------------------------------- */

static int close_region(struct fid *fid) {
    struct region *region = (struct region *)fid;
    uint32_t number = unscramble((uint32_t)region->fid.key);
    /* The domain's lock is held wherever bytes are moved, so nothing touches the region once this returns. */
    lock(region->domain);
    chunks[number / CHUNK][number % CHUNK] = NULL;
    region->domain->region_count--;
    region->domain->page_count -= region->pages;
    unlock(region->domain);
    log_key("deregister", "fi_close", region);
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

/* Whether the kernel could pin the range: all pages are of the process, and may be read, or written if the device
 * writes. Mappings of devices have no such pages. */
static bool can_be_pinned(uint64_t base, uint64_t bytes, bool write) {
    FILE *maps = fopen("/proc/self/maps", "re");
    uint64_t at = base, from, to;
    char line[512], mode[8], path[256];
    while (maps && at < base + bytes && fgets(line, sizeof line, maps)) {
        *path = 0;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*s %*s %*s %255s", &from, &to, mode, path) < 3)
            continue;
        bool is_device = !strncmp(path, "/dev/", 5) && strncmp(path, "/dev/shm/", 9) && strncmp(path, "/dev/zero", 9) &&
                         strncmp(path, "/dev/hugepages", 14);
        if (!is_device && mode[0] == 'r' && (!write || mode[1] == 'w') && from <= at && at < to)
            at = to;
    }
    if (maps)
        fclose(maps);
    return at >= base + bytes;
}

/* prov/efa/src/efa_mr.c, efa_mr_ofi_to_ibv_access: with these the device writes to the region. */
static bool is_written(uint64_t access) { return !access || (access & (FI_RECV | FI_READ | FI_REMOTE_WRITE)); }

/* Registration by FI_MR_DMABUF. Kernel: drivers/infiniband/core/umem_dmabuf.c, ib_umem_dmabuf_get; uverbs_std_types_mr.c,
 * the handler of UVERBS_METHOD_REG_DMABUF_MR. 0, or an errno. */
static int take_dma_buf(struct region *region, const struct dma_buf *buffer) {
    char link[64];
    uint64_t base = (uint64_t)(uintptr_t)buffer->base;
    region->fd = buffer->fd;
    region->fd_offset = buffer->offset;
    region->bytes = buffer->bytes;
    /* prov/efa/src/efa_mr.c, efa_mr_reg_ibv_mr: peers use base_addr + offset (all tags from v1.20.0 to v2.6.0). */
    region->base = base + buffer->offset;
    snprintf(link, sizeof link, "/proc/self/fd/%d", buffer->fd);
    ssize_t length = readlink(link, region->fd_name, sizeof region->fd_name - 1);
    for (ssize_t i = 0; i < length; i++)
        if (strchr("\"\\", region->fd_name[i]))
            region->fd_name[i] = '_';
    /* A dma-buf tells its size by seeking to its end (Linux: Documentation/driver-api/dma-buf.rst). */
    off_t end = length > 0 ? lseek(buffer->fd, 0, SEEK_END) : 0;
    region->fd_bytes = end > 0 ? (uint64_t)end : 0;
    /* efa_mr_reg_ibv_dmabuf_mr fails without an errno where libibverbs or the device lacks dma-bufs; efa_mr_reg_impl
     * makes it ENOTSUP. */
    if (config.dmabuf != 1)
        return config.dmabuf ? (int)config.dmabuf : EOPNOTSUPP;
    if (buffer->fd < 0 || length <= 0)
        return EBADF; /* dma_buf_get */
    if (!strstr(region->fd_name, "/memfd:") && !strstr(region->fd_name, "dmabuf"))
        return EINVAL;
    if (!buffer->bytes || buffer->offset > region->fd_bytes || buffer->bytes > region->fd_bytes - buffer->offset)
        return EINVAL;
    if (base % PAGE != 0 || region->base + region->bytes < region->base)
        return EINVAL; /* the offset within a page must be that of the address */
    /* CUDA, cuMemGetHandleForAddressRange: address and size of what is exported are multiples of the page size. */
    if (region->fd_bytes % PAGE)
        return EINVAL;
    /* The rest is stricter than the source. fi_mr(3) calls base_addr the start of the memory behind the dma-buf. Before
     * tag v2.5.0 the provider's own registration of a range passed the offset 0 whatever the range's place in the
     * dma-buf (2dd33ce29), and it exported what cuMemGetAddressRange told, not the range (9aaff69fa). Callers keep clear
     * of all this by exporting from the range's start, and registering at offset 0. A memfd whose name ends with '@' and
     * an address in hex tells that start. */
    const char *start = strrchr(region->fd_name, '@');
    if (!config.dmabuf_offset && (buffer->offset || (start && base && strtoull(start + 1, NULL, 16) != base)))
        return EINVAL;
    void *mapping = buffer->offset % PAGE
        ? MAP_FAILED
        : mmap(NULL, buffer->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->fd, (off_t)buffer->offset);
    region->is_mapped = mapping != MAP_FAILED;
    region->mapping = region->is_mapped ? mapping : NULL;
    return 0;
}

/* Registration of GPU memory by its address. prov/efa/src/efa_mr.c, efa_mr_reg_ibv_mr: before version 2.5 ibv_reg_mr,
 * for which the kernel needs peer memory (EFAULT without, as for all memory without pages). From 2.5 the provider
 * exports a dma-buf by itself unless the device takes none; what goes wrong then is final for CUDA. 0, or an errno. */
static int take_address_of_gpu(void) {
    if (config.version >= FI_VERSION(2, 5) && config.dmabuf)
        return config.dmabuf == 1 ? 0 : (int)config.dmabuf;
    if (config.peer_memory == 1)
        return 0;
    return config.peer_memory ? (int)config.peer_memory : EFAULT;
}

static int take_range(struct region *region, const struct iovec *iov) {
    region->base = (uint64_t)(uintptr_t)iov->iov_base;
    region->bytes = iov->iov_len;
    if (!region->base || !region->bytes || region->base + region->bytes < region->base)
        return EINVAL;
    bool is_pinned = can_be_pinned(region->base, region->bytes, is_written(region->access));
    if (region->is_hmem) {
        int error = take_address_of_gpu();
        if (error)
            return error;
    } else if (!is_pinned) {
        /* The kernel pins the pages, so all must exist: -EFAULT (dmf-mxl/mxl issue 516 shows it). */
        return EFAULT;
    }
    region->mapping = is_pinned ? (uint8_t *)(uintptr_t)region->base : NULL;
    return 0;
}

/* Checks in the order of prov/efa/src/efa_mr.c: efa_mr_regattr_validate, efa_mr_hmem_setup, efa_mr_reg_ibv_mr. 0, or an
 * errno. */
static int take(struct region *region, const struct fi_mr_attr *attr) {
    struct domain *domain = region->domain;
    bool is_dmabuf = region->flags & MR_DMABUF;
    uint64_t known = FI_HMEM_DEVICE_ONLY | (domain->fabric->fid.api_version >= FI_VERSION(1, 20) ? MR_DMABUF : 0);
    if (region->flags & ~known)
        return FI_EBADFLAGS;
    /* EFA_MR_IOV_LIMIT: one range. */
    if (!attr->mr_iov || attr->iov_count > 1 || (!is_dmabuf && !attr->iov_count))
        return EINVAL;
    if ((unsigned)attr->iface >= IFACES)
        return EINVAL;
    if (attr->iface != FI_HMEM_SYSTEM && !(attr->iface == FI_HMEM_CUDA && config.gpus))
        return ENOSYS; /* the library found no such device */
    /* Without FI_HMEM the memory is taken for the system's: fi_mr(3), iface. efa_mr_hmem_setup warns only, and
     * registering by address then fails as for memory that has no pages. */
    region->iface = domain->has_hmem ? (uint32_t)attr->iface : FI_HMEM_SYSTEM;
    region->is_hmem = region->iface != FI_HMEM_SYSTEM;
    region->hmem_device = region->is_hmem ? attr->device.cuda : 0;
    region->kind = is_dmabuf ? REGION_DMABUF : region->is_hmem ? REGION_ADDRESS : REGION_HOST;
    /* rdm/efa_rdm_mr.c, efa_rdm_mr_reg_impl: without p2p the fabric efa registers nothing with the device. It gives a
     * key of more than 32 bits, and copies by CUDA, which this double does not have: operations fail. */
    region->is_copied = region->is_hmem && !config.p2p;
    /* fi_mr(3), FI_MR_DMABUF: only usable for domains opened with FI_HMEM. The source does not look. */
    if (is_dmabuf && !domain->has_hmem)
        return FI_EBADFLAGS;
    if (region->is_copied) {
        region->base = (uint64_t)(uintptr_t)(is_dmabuf ? 0 : attr->mr_iov->iov_base);
        region->bytes = is_dmabuf ? 0 : attr->mr_iov->iov_len;
        return give_key(region) ? 0 : ENOMEM;
    }
    int error = is_dmabuf ? take_dma_buf(region, (const struct dma_buf *)(const void *)attr->mr_iov)
                          : take_range(region, attr->mr_iov);
    if (error)
        return error;
    uint64_t page = config.page_bytes;
    region->pages = (region->base + region->bytes + page - 1) / page - region->base / page;
    /* ofiwg/libfabric pull request 10402: a region that takes remote writes has at most 1 M pages. */
    if ((region->access & FI_REMOTE_WRITE) && region->pages > config.pages)
        return ENOMEM;
    return give_key(region) ? 0 : ENOMEM;
}

static int register_region(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr,
                           const char *call) {
    struct region *region = calloc(1, sizeof *region);
    *mr = NULL;
    region->domain = (struct domain *)fid;
    region->access = attr->access;
    region->requested_key = attr->requested_key;
    region->flags = flags;
    region->fd = -1;
    int error = take(region, attr);
    if (error) {
        char more[64];
        snprintf(more, sizeof more, ",\"rule\":\"regions\",\"errno\":%d", error);
        log_region("refuse", call, region, more);
        refuse(RULE_REGIONS);
        if (region->is_mapped)
            munmap(region->mapping, region->bytes);
        free(region);
        return -error;
    }
    region->fid.fid.fclass = FI_CLASS_MR;
    region->fid.fid.context = attr->context;
    region->fid.fid.ops = &region_ops;
    region->fid.mem_desc = region;
    log_key("register", call, region);
    *mr = &region->fid;
    return 0;
}

EXPORT int tokenyard_double_region(uint64_t key, struct tokenyard_double_region *out);
int tokenyard_double_region(uint64_t key, struct tokenyard_double_region *out) {
    struct region *region = find_region(key);
    if (!region)
        return -1;
    *out = (struct tokenyard_double_region){
        .base = region->base, .bytes = region->bytes, .access = region->access, .flags = region->flags,
        .fd_offset = region->fd_offset, .fd_bytes = region->fd_bytes, .fd = region->fd,
        .nic = (int32_t)region->domain->nic};
    return 0;
}

static int register_attributes(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr) {
    return register_region(fid, attr, flags, mr, "fi_mr_regattr");
}

static int register_vector(struct fid *fid, const struct iovec *iov, size_t count, uint64_t access, uint64_t offset,
                           uint64_t key, uint64_t flags, struct fid_mr **mr, void *context) {
    struct fi_mr_attr attr = {.mr_iov = iov, .iov_count = count, .access = access, .offset = offset,
                              .requested_key = key, .context = context, .iface = FI_HMEM_SYSTEM};
    return register_region(fid, &attr, flags, mr, "fi_mr_regv");
}

static int register_buffer(struct fid *fid, const void *buffer, size_t bytes, uint64_t access, uint64_t offset,
                           uint64_t key, uint64_t flags, struct fid_mr **mr, void *context) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)buffer, .iov_len = bytes};
    struct fi_mr_attr attr = {.mr_iov = &iov, .iov_count = 1, .access = access, .offset = offset,
                              .requested_key = key, .context = context, .iface = FI_HMEM_SYSTEM};
    return register_region(fid, &attr, flags, mr, "fi_mr_reg");
}

struct fi_ops_mr region_calls = {
    .size = sizeof region_calls, .reg = register_buffer, .regv = register_vector, .regattr = register_attributes};

/* ---- bytes that are not visible yet ------------------------------------------------------------------------------ */

/* TOKENYARD_EFA_UNFLUSHED. A NIC's writes to a GPU pass through PCIe's queues, and its completion to the host's memory
 * may be seen before they are carried out: NVIDIA's GPUDirect RDMA document, "Synchronization and memory ordering". A
 * read by the same NIC pushes them ahead: PCIe, ordering rules. So bytes for a GPU are kept here until an endpoint reads
 * from that GPU. A read that was carried out before the host saw a write's immediate says nothing of that write. */
struct late {
    struct region *region;
    uint64_t key, offset, serial; /* serial: of the write's immediate; 0: it has none; UINT64_MAX: it is not whole */
    const struct link_in *link;
    uint32_t op, use, bytes;
    uint8_t *data;
};

void keep_late(struct endpoint *endpoint, const struct link_in *link, struct region *region,
               const struct packet *packet) {
    if (endpoint->late_count == endpoint->late_room) {
        endpoint->late_room = endpoint->late_room ? endpoint->late_room * 2 : 64;
        endpoint->late = realloc(endpoint->late, endpoint->late_room * sizeof *endpoint->late);
    }
    struct late *late = &endpoint->late[endpoint->late_count++];
    *late = (struct late){.region = region, .key = region->fid.key, .serial = UINT64_MAX, .link = link,
                          .offset = packet->address - region->base + packet->offset, .op = packet->op,
                          .use = packet->use, .bytes = packet->bytes, .data = malloc(packet->bytes)};
    memcpy(late->data, packet->data, packet->bytes);
}

void end_late(struct endpoint *endpoint, const struct link_in *link, const struct packet *packet, uint64_t serial) {
    for (size_t i = endpoint->late_count; i-- > 0;) {
        struct late *late = &endpoint->late[i];
        if (late->link == link && late->serial == UINT64_MAX &&
            (!packet || (late->op == packet->op && late->use == packet->use)))
            late->serial = serial;
    }
}

/* Writes what a read of this GPU pushes ahead; of all GPUs if `device` is -1. How many packets that were. */
uint64_t settle_late(struct endpoint *endpoint, int device) {
    uint64_t kept = 0, count = endpoint->late_count;
    for (size_t i = 0; i < count; i++) {
        struct late *late = &endpoint->late[i];
        bool is_open = find_region(late->key) == late->region;
        if (is_open && device != -1 &&
            (late->serial > endpoint->imms_reported || late->region->hmem_device != device)) {
            endpoint->late[kept++] = *late;
            continue;
        }
        if (is_open)
            memcpy(late->region->mapping + late->offset, late->data, late->bytes);
        free(late->data);
    }
    endpoint->late_count = kept;
    return count - kept;
}
