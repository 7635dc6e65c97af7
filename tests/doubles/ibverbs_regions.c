/* The libibverbs double: registration of memory. The order of the rules is the kernel's. */
#define _GNU_SOURCE
#include "ibverbs.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef ibv_reg_mr
#undef ibv_reg_mr_iova

/* kernel, include/uapi/rdma/ib_user_ioctl_verbs.h, enum ib_uverbs_access_flags. */
enum {
    REMOTE = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
    RELAXED_ORDERING = 1 << 20,
    OF_DMABUF = IBV_ACCESS_LOCAL_WRITE | REMOTE | RELAXED_ORDERING,
    OF_MEMORY = 0x3ff | 0x3ff00000,
    ZERO_BASED = 1 << 5,
    ON_DEMAND = 1 << 6,
};

static struct region *regions, **last_region = &regions;
static uint64_t locked_pages, number_of_regions;

/* What one call asks for. */
struct request {
    struct pd *pd;
    const char *call;
    struct tokenyard_ibverbs_record record;
    char fd_name[96];
    uint64_t locked;
    uint32_t keys;
};

static void describe(char *out, size_t room, const char *fd_name, const struct tokenyard_ibverbs_record *record) {
    static const char *const kinds[] = {"plain", "iova", "dmabuf", "data_direct"};
    snprintf(out, room,
             ",\"kind\":\"%s\",\"address\":%" PRIu64 ",\"fd\":%d,\"fd_bytes\":%" PRIu64 ",\"fd_name\":\"%s\""
             ",\"offset\":%" PRIu64 ",\"length\":%" PRIu64 ",\"iova\":%" PRIu64 ",\"access\":%u,\"peer_memory\":%s",
             kinds[record->kind], record->address, record->fd, record->fd_bytes, fd_name, record->offset,
             record->length, record->iova, record->access, record->is_peer_memory ? "true" : "false");
}

static void log_region(const char *event, const char *call, const struct region *region) {
    char fields[512], more[640];
    describe(fields, sizeof fields, region->fd_name, &region->record);
    snprintf(more, sizeof more, ",\"what\":\"region\",\"region\":%" PRIu64 ",\"lkey\":%u,\"rkey\":%u%s",
             region->record.number, region->record.lkey, region->record.rkey, fields);
    log_event(event, region->pd->context, call, more);
}

static struct ibv_mr *refused(const struct request *request, enum tokenyard_ibverbs_rule rule, int number) {
    char fields[512], more[640];
    counts.refused[rule]++;
    describe(fields, sizeof fields, request->fd_name, &request->record);
    snprintf(more, sizeof more, ",\"rule\":\"%s\",\"errno\":%d%s", rule_name(rule), number, fields);
    log_event("refuse", request->pd->context, request->call, more);
    errno = number;
    return NULL;
}

static uint64_t pages_of(uint64_t start, uint64_t length) {
    return (start % PAGE + length + PAGE - 1) / PAGE; /* no overflow: `length` was checked */
}

/* How much of the range the kernel could pin: -1 nothing, 0 a part, 1 all. pin_user_pages needs pages of the process
 * that may be read, and written if the NIC writes. Mappings of devices have no such pages (NVIDIA/gdrcopy issue 266:
 * EFAULT). */
static int mapped(uint64_t first, uint64_t end, bool write) {
    FILE *maps = fopen("/proc/self/maps", "re");
    uint64_t at = first, from, to;
    bool some = false;
    char line[512], mode[8], path[256];
    while (maps && at < end && fgets(line, sizeof line, maps)) {
        *path = 0;
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %7s %*s %*s %*s %255s", &from, &to, mode, path) < 3)
            continue;
        bool is_device = !strncmp(path, "/dev/", 5) && strncmp(path, "/dev/shm/", 9) && strncmp(path, "/dev/zero", 9) &&
                         strncmp(path, "/dev/hugepages", 14);
        if (is_device || mode[0] != 'r' || (write && mode[1] != 'w') || to <= first || from >= end)
            continue;
        some = true;
        if (from <= at)
            at = to;
    }
    if (maps)
        fclose(maps);
    return at >= end ? 1 : some ? 0 : -1;
}

/* kernel, include/rdma/ib_verbs.h, ib_check_mr_access; ibv_reg_mr(3). 0, or an errno. */
static int check_access(uint32_t access, uint32_t supported) {
    if (access & ~supported)
        return EINVAL;
    if ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(access & IBV_ACCESS_LOCAL_WRITE))
        return EINVAL;
    return access & ON_DEMAND ? EOPNOTSUPP : 0;
}

/* kernel, drivers/infiniband/hw/mlx5/mr.c, mlx5_ib_reg_user_mr and reg_create: a key for each region; data direct
 * takes two, one for the data direct device and one that crosses to it. */
static struct ibv_mr *finish(struct request *request) {
    struct context *context = request->pd->context;
    struct device *device = context->device;
    /* drivers/net/ethernet/mellanox/mlx5/core/cmd.c, cmd_status_to_err: "limits exceeded" is ENOMEM, "no resources"
     * EAGAIN. */
    if (device->regions >= context->settings.regions)
        return refused(request, IBVERBS_REGIONS, ENOMEM);
    if (device->keys + request->keys > context->settings.keys)
        return refused(request, IBVERBS_KEYS, EAGAIN);
    device->regions++;
    device->keys += request->keys;
    locked_pages += request->locked;
    request->pd->users++;
    use_of_memory_began();

    struct region *region = calloc(1, sizeof *region);
    struct tokenyard_ibverbs_record *record = &request->record;
    record->number = ++number_of_regions;
    record->nic = device->index;
    /* Keys of a process differ, the two of a region do, and a neighbour of a key is none. Only a region that peers may
     * reach has a remote key (kernel, drivers/infiniband/sw/rxe/rxe_mr.c), so none is 0 otherwise. */
    record->lkey = (uint32_t)(record->number * 2) * 0x9E3779B1u;
    record->rkey = record->access & REMOTE ? (uint32_t)(record->number * 2 + 1) * 0x9E3779B1u : 0;
    region->record = *record;
    region->pd = request->pd;
    region->locked = request->locked;
    region->keys = request->keys;
    region->live = true;
    memcpy(region->fd_name, request->fd_name, sizeof region->fd_name);
    snprintf(region->call, sizeof region->call, "%s", request->call);
    /* rdma-core, libibverbs/verbs.c, ibv_reg_dmabuf_mr: addr is the offset. */
    region->mr = (struct ibv_mr){
        .context = &context->context,
        .pd = &request->pd->pd,
        .addr = (void *)(uintptr_t)(record->kind >= IBVERBS_DMABUF ? record->offset : record->address),
        .length = record->length,
        .handle = (uint32_t)record->number,
        .lkey = record->lkey,
        .rkey = record->rkey,
    };
    *last_region = region;
    last_region = &region->next;
    counts.registered++;
    counts.live_regions++;
    log_region("register", request->call, region);
    return &region->mr;
}

/* ---- memory of the process ------------------------------------------------------------------------------------- */

/* The rules of kernel, drivers/infiniband/core/uverbs_cmd.c, ib_uverbs_reg_mr, then of core/umem.c, ib_umem_get. */
static struct ibv_mr *reg_memory(struct request *request) {
    const struct settings *settings = &request->pd->context->settings;
    const struct tokenyard_ibverbs_record *record = &request->record;
    uint64_t first = record->address & ~(uint64_t)(PAGE - 1), end = record->address + record->length;
    if (record->address % PAGE != record->iova % PAGE)
        return refused(request, IBVERBS_PAGE_OFFSET, EINVAL);
    int error = check_access(record->access, OF_MEMORY);
    if (error)
        return refused(request, IBVERBS_ACCESS, error);
    if (end < record->address || end > UINT64_MAX - PAGE)
        return refused(request, IBVERBS_RANGE, EINVAL);
    uint64_t pages = pages_of(record->address, record->length);
    end = first + pages * PAGE;
    if (!pages)
        return refused(request, IBVERBS_RANGE, EINVAL);
    bool write = record->access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC |
                                   IBV_ACCESS_MW_BIND);
    int part = mapped(first, end, write);
    /* Peer memory (MLNX_OFED, and nvidia-peermem): what the kernel cannot pin is offered to the module, which takes
     * whole ranges of its device alone. Such pages are not locked memory of the process. */
    request->record.is_peer_memory = settings->peer_memory && mapped(first, end, false) == -1;
    if (!request->record.is_peer_memory) {
        if (!settings->memlock)
            return refused(request, IBVERBS_MEMLOCK, EPERM);
        if (locked_pages + pages > settings->memlock / PAGE)
            return refused(request, IBVERBS_MEMLOCK, ENOMEM);
        if (part != 1)
            return refused(request, IBVERBS_UNMAPPED, EFAULT);
        request->locked = pages;
    }
    if (pages > settings->pages)
        return refused(request, IBVERBS_PAGES, ENOMEM);
    request->keys = 1;
    return finish(request);
}

static struct ibv_mr *reg(const char *call, enum tokenyard_ibverbs_kind kind, struct ibv_pd *verbs, void *address,
                          size_t length, uint64_t iova, uint32_t access) {
    struct request request = {.pd = (struct pd *)verbs, .call = call,
                              .record = {.kind = kind, .address = (uintptr_t)address, .length = length, .iova = iova,
                                         .access = access, .fd = -1}};
    struct ibv_mr *mr = NULL;
    lock();
    if (!request.pd->live)
        misuse(call, "pd");
    else
        mr = reg_memory(&request);
    unlock();
    return mr;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    return reg("ibv_reg_mr", IBVERBS_PLAIN, pd, address, length, (uintptr_t)address, (uint32_t)access);
}

EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access) {
    return reg("ibv_reg_mr_iova", IBVERBS_IOVA, pd, address, length, iova, (uint32_t)access);
}

#ifndef IBVERBS_1_1
EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova,
                                       unsigned access) {
    return reg("ibv_reg_mr_iova2", IBVERBS_IOVA, pd, address, length, iova, access);
}
#endif

/* ---- dma-bufs -------------------------------------------------------------------------------------------------- */

/* kernel, drivers/dma-buf/dma-buf.c, dma_buf_get: EBADF for what is not open, EINVAL for what is no dma-buf. Its size
 * is found by seeking to its end (dma_buf_llseek), which moves the place of a memfd, so that is put back. */
static int find_dmabuf(struct request *request) {
    struct tokenyard_ibverbs_record *record = &request->record;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", record->fd);
    ssize_t bytes = record->fd < 0 ? -1 : readlink(path, request->fd_name, sizeof request->fd_name - 1);
    if (bytes < 0)
        return EBADF;
    request->fd_name[bytes] = 0;
    for (char *c = request->fd_name; *c; c++)
        if (*c < ' ' || *c == '"' || *c == '\\')
            *c = '_';
    /* dma_buf_dynamic_dname: "/dmabuf:" and the exporter's name. */
    if (strncmp(request->fd_name, "/dmabuf:", 8) && strncmp(request->fd_name, "/memfd:", 7))
        return EINVAL;
    off_t place = lseek(record->fd, 0, SEEK_CUR), end = lseek(record->fd, 0, SEEK_END);
    if (place >= 0)
        lseek(record->fd, place, SEEK_SET);
    if (end < 0)
        return EINVAL;
    record->fd_bytes = (uint64_t)end;
    return 0;
}

/* A memfd whose name has "pcie" stands for what cuMemGetHandleForAddressRange exports with
 * CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE. */
static bool is_pcie(const struct request *request) { return strstr(request->fd_name, "pcie"); }

/* The rules of kernel, drivers/infiniband/core/uverbs_std_types_mr.c, UVERBS_METHOD_REG_DMABUF_MR, then of
 * hw/mlx5/mr.c, mlx5_ib_reg_user_mr_dmabuf, then of core/umem_dmabuf.c, ib_umem_dmabuf_get. */
static struct ibv_mr *reg_dmabuf(struct request *request) {
    struct context *context = request->pd->context;
    const struct settings *settings = &context->settings;
    struct tokenyard_ibverbs_record *record = &request->record;
    bool is_direct = record->kind == IBVERBS_DATA_DIRECT;
    /* A driver without reg_user_mr_dmabuf; an older kernel answers EPROTONOSUPPORT (NVIDIA/nccl issue 778). */
    if (settings->dmabuf != 1)
        return refused(request, IBVERBS_NO_DMABUF, settings->dmabuf ? (int)settings->dmabuf : EOPNOTSUPP);
    if (record->offset % PAGE != record->iova % PAGE)
        return refused(request, IBVERBS_PAGE_OFFSET, EINVAL);
    int error = check_access(record->access, OF_DMABUF);
    if (error)
        return refused(request, IBVERBS_ACCESS, error);
    /* hw/mlx5/umr.h, mlx5r_umr_can_load_pas: EINVAL where the device cannot translate that many pages. */
    if (record->length / PAGE >= settings->pages && pages_of(record->offset, record->length) > settings->pages)
        return refused(request, IBVERBS_PAGES, EINVAL);
    /* reg_user_mr_dmabuf_by_data_direct: "the IOVA must be page aligned"; EINVAL without a data direct device. */
    if (is_direct && record->iova % PAGE)
        return refused(request, IBVERBS_DATA_DIRECT_IOVA, EOPNOTSUPP);
    if (is_direct && !settings->data_direct)
        return refused(request, IBVERBS_NO_DATA_DIRECT, EINVAL);
    if (record->offset + record->length < record->offset)
        return refused(request, IBVERBS_RANGE, EINVAL);
    error = find_dmabuf(request);
    if (error)
        return refused(request, IBVERBS_FD, error);
    if (record->offset + record->length > record->fd_bytes)
        return refused(request, IBVERBS_RANGE, EINVAL);
    if (!pages_of(record->offset, record->length))
        return refused(request, IBVERBS_RANGE, EINVAL);
    if (is_direct && settings->data_direct_errno)
        return refused(request, IBVERBS_NO_DATA_DIRECT, (int)settings->data_direct_errno);
    /* openucx/ucx pull request 11571: on GB200 a mapping that does not suit the call ends with error 524.
     * linux-rdma/rdma-core pull request 1633: data direct must have the PCIe mapping. */
    if (settings->matching && is_pcie(request) != is_direct)
        return refused(request, IBVERBS_MAPPING, NOT_SUPPORTED);
    request->keys = is_direct ? 2 : 1;
    return finish(request);
}

static struct ibv_mr *reg_fd(const char *call, enum tokenyard_ibverbs_kind kind, struct ibv_pd *verbs, uint64_t offset,
                             size_t length, uint64_t iova, int fd, uint32_t access, int flags) {
    struct request request = {.pd = (struct pd *)verbs, .call = call,
                              .record = {.kind = kind, .offset = offset, .length = length, .iova = iova, .fd = fd,
                                         .access = access}};
    struct ibv_mr *mr = NULL;
    lock();
    if (!request.pd->live)
        misuse(call, "pd");
    else if (flags & ~1) /* uverbs_get_flags32 of MLX5_IB_ATTR_REG_DMABUF_MR_ACCESS_FLAGS */
        refused(&request, IBVERBS_ACCESS, EINVAL);
    else
        mr = reg_dmabuf(&request);
    unlock();
    return mr;
}

#ifndef IBVERBS_1_1
EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                        int access) {
    return reg_fd("ibv_reg_dmabuf_mr", IBVERBS_DMABUF, pd, offset, length, iova, fd, (uint32_t)access, 0);
}
#endif

/* ---- of libmlx5 ------------------------------------------------------------------------------------------------ */

static struct ibv_mr *mlx5_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                         int access, int mlx5_access) {
    /* mlx5dv_reg_dmabuf_mr(3): MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT is 1. */
    return reg_fd("mlx5dv_reg_dmabuf_mr", mlx5_access & 1 ? IBVERBS_DATA_DIRECT : IBVERBS_DMABUF, pd, offset, length,
                  iova, fd, (uint32_t)access, mlx5_access);
}

/* mlx5dv_get_data_direct_sysfs_path(3): ENODEV, ENOSPC. The path is that below /sys, of a made-up PCI device. */
static int mlx5_get_data_direct_sysfs_path(struct ibv_context *verbs, char *buffer, size_t bytes) {
    struct context *context = (struct context *)verbs;
    char path[64];
    if (!context->live)
        return misuse("mlx5dv_get_data_direct_sysfs_path", "context");
    if (!context->settings.data_direct)
        return refuse(context, "mlx5dv_get_data_direct_sysfs_path", IBVERBS_NO_DATA_DIRECT, ENODEV,
                      "the device has no data direct device");
    int length = snprintf(path, sizeof path, "/devices/pci%04x:00/%04x:00:00.0", context->device->index + 0xd0,
                          context->device->index + 0xd0);
    if ((size_t)length >= bytes)
        return refuse(context, "mlx5dv_get_data_direct_sysfs_path", IBVERBS_ARGUMENT, ENOSPC, "%zu bytes for %d", bytes,
                      length + 1);
    memcpy(buffer, path, (size_t)length + 1);
    return 0;
}

const struct mlx5_calls mlx5_calls = {
    .reg_dmabuf_mr = mlx5_reg_dmabuf_mr,
    .get_data_direct_sysfs_path = mlx5_get_data_direct_sysfs_path,
};

/* ---- registered regions ---------------------------------------------------------------------------------------- */

static void release(struct region *region) {
    struct device *device = region->pd->context->device;
    device->regions--;
    device->keys -= region->keys;
    locked_pages -= region->locked;
    region->pd->users--;
    region->live = false;
    counts.live_regions--;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr) {
    struct region *region = (struct region *)mr;
    int error = 0;
    lock();
    if (!region->live)
        error = misuse("ibv_dereg_mr", "region");
    else {
        release(region);
        counts.deregistered++;
        log_region("deregister", "ibv_dereg_mr", region);
    }
    unlock();
    return error;
}

void leak_regions(const struct context *context, const char *call) {
    for (struct region *region = regions; region; region = region->next)
        if (region->live && region->pd->context == context) {
            release(region);
            counts.leaks++;
            log_region("leak", call, region);
        }
}

bool covers(const struct pd *pd, uint32_t lkey, uint64_t address, uint64_t bytes) {
    for (const struct region *region = regions; region; region = region->next)
        if (region->live && region->record.lkey == lkey) {
            uint64_t base = region->record.access & ZERO_BASED ? 0 : region->record.iova;
            return region->pd == pd && address >= base && bytes <= region->record.length &&
                   address - base <= region->record.length - bytes;
        }
    return false;
}

EXPORT size_t tokenyard_ibverbs_records(struct tokenyard_ibverbs_record *out, size_t room);
size_t tokenyard_ibverbs_records(struct tokenyard_ibverbs_record *out, size_t room) {
    size_t count = 0;
    lock();
    for (const struct region *region = regions; region; region = region->next)
        if (region->live && count++ < room)
            out[count - 1] = region->record;
    unlock();
    return count;
}
