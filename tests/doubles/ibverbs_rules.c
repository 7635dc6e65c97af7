/* Shows that each rule of the libibverbs double fires. Build and run, from the repository's root, with the two shared
 * objects of ibverbs.c's head, then those with -DIBVERBS_1_1 and -DMLX5_BEFORE_54:
 *
 *   gcc -std=c11 -O1 -g -Wall -Wextra -Werror -o ibverbs_rules tests/doubles/ibverbs_rules.c -ldl
 *   ./ibverbs_rules ./libibverbs_double.so ./libmlx5_double.so ./libibverbs_first.so ./libmlx5_first.so [RULE]
 *
 * Prints each rule's name. Exits with 1 and a sentence at the first rule that does not fire. Each rule runs in a
 * process of its own, which opens the double by dlopen with the rule's settings.
 */
#define _GNU_SOURCE
#include "ibverbs_double.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition, ...)                                                       \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s (", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                           \
            fprintf(stderr, ")\n");                                                 \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

enum {
    KIB = 1024,
    GPU = 64 * KIB,
    ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    DIRECT = 1,
};
#define IOVA 0x7f5500000000ull

static char *paths[4], log_path[64];

static struct {
    struct ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(struct ibv_device **);
    const char *(*get_device_name)(struct ibv_device *);
    struct ibv_context *(*open_device)(struct ibv_device *);
    int (*close_device)(struct ibv_context *);
    int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
    int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *);
    int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
    int (*query_pkey)(struct ibv_context *, uint8_t, int, __be16 *);
    int (*query_gid_ex)(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t);
    int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *);
    int (*dealloc_pd)(struct ibv_pd *);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
    int (*dereg_mr)(struct ibv_mr *);
    struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
    int (*destroy_cq)(struct ibv_cq *);
    struct ibv_srq *(*create_srq)(struct ibv_pd *, struct ibv_srq_init_attr *);
    int (*destroy_srq)(struct ibv_srq *);
    struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
    int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
    int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
    int (*destroy_qp)(struct ibv_qp *);
    struct ibv_ah *(*create_ah)(struct ibv_pd *, struct ibv_ah_attr *);
    int (*destroy_ah)(struct ibv_ah *);
    int (*fork_init)(void);
    int (*is_fork_initialized)(void);
    bool (*is_mlx5)(struct ibv_device *);
    struct ibv_mr *(*mlx5_reg)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int, int);
    int (*direct_path)(struct ibv_context *, char *, size_t);
    const struct tokenyard_ibverbs_counts *(*counts)(void);
    size_t (*records)(struct tokenyard_ibverbs_record *, size_t);
} lib;

static struct ibv_device **list;
static struct ibv_context *context;
static struct ibv_pd *pd;

static void *symbol(void *library, const char *name, bool must) {
    void *found = dlsym(library, name);
    CHECK(found || !must, "%s", name);
    return found;
}

static void load(const char *ibverbs, const char *mlx5, bool must) {
    void *library = dlopen(ibverbs, RTLD_NOW | RTLD_LOCAL), *other = dlopen(mlx5, RTLD_NOW | RTLD_LOCAL);
    CHECK(library && other, "%s", dlerror());
#define FIND(field, name, must) *(void **)&lib.field = symbol(library, name, must)
    FIND(get_device_list, "ibv_get_device_list", true);
    FIND(free_device_list, "ibv_free_device_list", true);
    FIND(get_device_name, "ibv_get_device_name", true);
    FIND(open_device, "ibv_open_device", true);
    FIND(close_device, "ibv_close_device", true);
    FIND(query_device, "ibv_query_device", true);
    FIND(query_port, "ibv_query_port", true);
    FIND(query_gid, "ibv_query_gid", true);
    FIND(query_pkey, "ibv_query_pkey", true);
    FIND(query_gid_ex, "_ibv_query_gid_ex", must);
    FIND(get_async_event, "ibv_get_async_event", true);
    FIND(alloc_pd, "ibv_alloc_pd", true);
    FIND(dealloc_pd, "ibv_dealloc_pd", true);
    FIND(reg_mr, "ibv_reg_mr", true);
    FIND(reg_mr_iova2, "ibv_reg_mr_iova2", must);
    FIND(reg_dmabuf_mr, "ibv_reg_dmabuf_mr", must);
    FIND(dereg_mr, "ibv_dereg_mr", true);
    FIND(create_cq, "ibv_create_cq", true);
    FIND(destroy_cq, "ibv_destroy_cq", true);
    FIND(create_srq, "ibv_create_srq", true);
    FIND(destroy_srq, "ibv_destroy_srq", true);
    FIND(create_qp, "ibv_create_qp", true);
    FIND(modify_qp, "ibv_modify_qp", true);
    FIND(query_qp, "ibv_query_qp", true);
    FIND(destroy_qp, "ibv_destroy_qp", true);
    FIND(create_ah, "ibv_create_ah", true);
    FIND(destroy_ah, "ibv_destroy_ah", true);
    FIND(fork_init, "ibv_fork_init", true);
    FIND(is_fork_initialized, "ibv_is_fork_initialized", must);
    FIND(counts, "tokenyard_ibverbs_counts", true);
    FIND(records, "tokenyard_ibverbs_records", true);
    *(void **)&lib.is_mlx5 = symbol(other, "mlx5dv_is_supported", true);
    *(void **)&lib.mlx5_reg = symbol(other, "mlx5dv_reg_dmabuf_mr", must);
    *(void **)&lib.direct_path = symbol(other, "mlx5dv_get_data_direct_sysfs_path", must);
#undef FIND
}

static void open_first(void) {
    int count = 0;
    list = lib.get_device_list(&count);
    CHECK(list && count > 0, "%d devices", count);
    context = lib.open_device(list[0]);
    CHECK(context && (pd = lib.alloc_pd(context)), "opening %s", list[0]->name);
}

#define REFUSED(rule) lib.counts()->refused[IBVERBS_##rule]
/* The call gives NULL, that errno, and counts one refusal by the rule. */
#define REFUSES(rule, number, call)                                                                             \
    do {                                                                                                        \
        uint64_t before = REFUSED(rule);                                                                        \
        errno = 0;                                                                                              \
        CHECK(!(call) && errno == (number), "errno %d, not %d", errno, (int)(number));                          \
        CHECK(REFUSED(rule) == before + 1, #rule " does not count it");                                         \
    } while (0)
/* Likewise where the call answers the errno. */
#define ANSWERS(rule, number, call)                                               \
    do {                                                                          \
        uint64_t before = REFUSED(rule);                                          \
        int answer = (call);                                                      \
        CHECK(answer == (number), "answer %d, not %d", answer, (int)(number));    \
        CHECK(REFUSED(rule) == before + 1, #rule " does not count it");           \
    } while (0)

static uint8_t *pages(size_t count) {
    uint8_t *found = mmap(NULL, count * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(found != MAP_FAILED, "mmap");
    return found;
}

static int dmabuf(const char *name, size_t bytes) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    CHECK(fd >= 0 && !ftruncate(fd, (off_t)bytes), "memfd_create");
    return fd;
}

static struct ibv_mr *good(struct ibv_mr *mr) {
    CHECK(mr, "registering fails with errno %d", errno);
    return mr;
}

static void drop(struct ibv_mr *mr) { CHECK(lib.dereg_mr(mr) == 0, "deregistering"); }

/* Times that a text is in the log. */
static int logged(const char *what) {
    FILE *file = fopen(log_path, "r");
    char line[2048];
    int found = 0;
    while (file && fgets(line, sizeof line, file)) {
        CHECK(line[0] == '{' && !strcmp(line + strlen(line) - 2, "}\n"), "a line of the log: %s", line);
        found += strstr(line, what) != NULL;
    }
    if (file)
        fclose(file);
    return found;
}

/* ---- devices --------------------------------------------------------------------------------------------------- */

static void devices_are_as_set(void) {
    int count = 0;
    list = lib.get_device_list(&count);
    CHECK(count == 3 && !list[3], "%d devices", count);
    CHECK(!strcmp(lib.get_device_name(list[0]), "mlx5_0") && !strcmp(list[2]->name, "bnxt_re0"), "names");
    CHECK(!strcmp(list[1]->ibdev_path, "/nowhere/class/infiniband/mlx5_1"), "%s", list[1]->ibdev_path);
    CHECK(lib.is_mlx5(list[1]) && !lib.is_mlx5(list[2]), "mlx5dv_is_supported");
    context = lib.open_device(list[1]);
    struct ibv_device *closed = list[0];
    lib.free_device_list(list);
    CHECK(!strcmp(lib.get_device_name(context->device), "mlx5_1"), "an open device stays");
    CHECK(!lib.get_device_name(closed) && lib.counts()->misuses == 1, "a device of a list that was freed");
    struct ibv_device_attr device;
    CHECK(!lib.query_device(context, &device) && device.phys_port_cnt == 1 && device.max_mr == 77 &&
          device.max_qp_wr == 500 && device.vendor_id == 0x2c9, "limits");
    struct ibv_port_attr port = {.port_cap_flags2 = 0xABCD};
    CHECK(!lib.query_port(context, 1, &port) && port.state == IBV_PORT_DOWN && port.active_mtu == IBV_MTU_1024, "port");
    CHECK(port.port_cap_flags2 == 0xABCD, "the exported call fills its old structure alone");
    ANSWERS(ARGUMENT, EINVAL, lib.query_port(context, 2, &port));
    CHECK(fcntl(context->async_fd, F_SETFL, O_NONBLOCK) == 0, "async_fd");
    struct ibv_async_event event;
    CHECK(lib.get_async_event(context, &event) == -1 && errno == EAGAIN, "no event");
    CHECK(lib.close_device(context) == 0 && logged("\"leak\"") == 0, "closing");
    CHECK(lib.close_device(context) == -1 && lib.counts()->misuses == 2, "closing twice");
}

static void no_device_is_an_empty_list(void) {
    int count = 9;
    CHECK(lib.get_device_list(&count) && count == 0, "%d devices", count);
}

static void gids_have_types(void) {
    open_first();
    struct ibv_port_attr port;
    struct ibv_gid_entry entry;
    union ibv_gid gid;
    static const union ibv_gid none;
    CHECK(!lib.query_port(context, 1, &port) && port.link_layer == IBV_LINK_LAYER_ETHERNET, "RoCE");
    CHECK(port.flags & IBV_QPF_GRH_REQUIRED && port.gid_tbl_len == 16, "RoCE needs a global route");
    for (uint32_t index = 0; index < 4; index++) {
        CHECK(!lib.query_gid_ex(context, 1, index, &entry, 0, sizeof entry), "GID %u", index);
        CHECK(entry.gid_type == (index % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1) && entry.ndev_ifindex,
              "GID %u has type %u", index, entry.gid_type);
        CHECK(!lib.query_gid(context, 1, (int)index, &gid) && !memcmp(&gid, &entry.gid, 16), "both calls agree");
    }
    CHECK(entry.gid.raw[10] == 0xff && entry.gid.raw[12] == 192, "the last has an IPv4 address");
    CHECK(lib.query_gid_ex(context, 1, 4, &entry, 0, sizeof entry) == ENODATA, "an empty entry");
    CHECK(!lib.query_gid(context, 1, 4, &gid) && !memcmp(&gid, &none, 16), "is zeros");
    ANSWERS(ARGUMENT, EINVAL, lib.query_gid_ex(context, 1, 16, &entry, 0, sizeof entry));
    ANSWERS(ARGUMENT, -1, lib.query_gid(context, 1, 16, &gid));
}

static void infiniband_has_one_gid(void) {
    open_first();
    struct ibv_port_attr port;
    struct ibv_gid_entry entry;
    CHECK(!lib.query_port(context, 1, &port) && port.link_layer == IBV_LINK_LAYER_INFINIBAND && port.lid == 1, "port");
    CHECK(!lib.query_gid_ex(context, 1, 0, &entry, 0, sizeof entry) && entry.gid_type == IBV_GID_TYPE_IB, "type");
    CHECK(lib.query_gid_ex(context, 1, 1, &entry, 0, sizeof entry) == ENODATA, "one alone");
}

static void ports_have_partitions(void) {
    open_first();
    struct ibv_port_attr port;
    union ibv_gid gid;
    __be16 key;
    CHECK(!lib.query_port(context, 1, &port) && port.pkey_tbl_len == 3, "%u keys", port.pkey_tbl_len);
    static const uint16_t keys[] = {0xffff, 0, 0x8001};
    for (int index = 0; index < 3; index++)
        CHECK(!lib.query_pkey(context, 1, index, &key) && be16toh(key) == keys[index], "key %d is %#x", index, be16toh(key));
    ANSWERS(ARGUMENT, -1, lib.query_pkey(context, 1, 3, &key));
    ANSWERS(ARGUMENT, -1, lib.query_pkey(context, 1, -1, &key));
    ANSWERS(ARGUMENT, -1, lib.query_pkey(context, 2, 0, &key));
    CHECK(!lib.query_gid(context, 1, 0, &gid) && gid.raw[0] == 0xfe && gid.raw[1] == 0xc0 && gid.raw[7] == 7, "prefix");
}

/* ---- registration ---------------------------------------------------------------------------------------------- */

static void memory_is_registered_and_recorded(void) {
    open_first();
    uint8_t *memory = pages(4);
    struct tokenyard_ibverbs_record record[3];
    struct ibv_mr *plain = good(lib.reg_mr(pd, memory + 100, 5000, ALL));
    struct ibv_mr *iova = good(lib.reg_mr_iova2(pd, memory, 4096, IOVA, ALL | IBV_ACCESS_RELAXED_ORDERING));
    struct ibv_mr *local = good(lib.reg_mr(pd, memory, 1, IBV_ACCESS_LOCAL_WRITE));
    CHECK(plain->addr == memory + 100 && plain->length == 5000 && plain->pd == pd && plain->context == context,
          "fields");
    CHECK(plain->rkey && plain->lkey != plain->rkey && !local->rkey && iova->lkey != plain->lkey, "keys");
    CHECK(lib.records(record, 3) == 3 && record[0].kind == IBVERBS_PLAIN && record[1].kind == IBVERBS_IOVA, "records");
    CHECK(record[1].iova == IOVA && record[1].address == (uintptr_t)memory && record[1].access & 1 << 20, "iova");
    drop(plain);
    CHECK(lib.records(record, 3) == 2 && record[0].lkey == iova->lkey, "a region that was deregistered");
    CHECK(logged("\"register\"") == 3 && logged("\"deregister\"") == 1 && logged("\"kind\":\"iova\"") == 1, "log");
    CHECK(lib.counts()->registered == 3 && lib.counts()->live_regions == 2, "counts");
}

static void access_is_checked(void) {
    open_first();
    uint8_t *memory = pages(1);
    REFUSES(ACCESS, EINVAL, lib.reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_WRITE));
    REFUSES(ACCESS, EINVAL, lib.reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_READ));
    REFUSES(ACCESS, EINVAL, lib.reg_mr(pd, memory, 8, 1 << 12));
    REFUSES(ACCESS, EOPNOTSUPP, lib.reg_mr(pd, memory, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
    int fd = dmabuf("gpu", GPU);
    REFUSES(ACCESS, EINVAL, lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, IBV_ACCESS_REMOTE_WRITE));
    REFUSES(ACCESS, EINVAL, lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, ALL | IBV_ACCESS_ON_DEMAND));
    REFUSES(ACCESS, EINVAL, lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, ALL | IBV_ACCESS_MW_BIND));
    good(lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, ALL | IBV_ACCESS_RELAXED_ORDERING));
    good(lib.reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_READ));
}

static void ranges_are_checked(void) {
    open_first();
    uint8_t *memory = pages(2);
    REFUSES(RANGE, EINVAL, lib.reg_mr(pd, memory, 0, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_mr(pd, memory, SIZE_MAX, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_mr(pd, memory, SIZE_MAX - (1ul << 40), ALL));
    REFUSES(PAGE_OFFSET, EINVAL, lib.reg_mr_iova2(pd, memory + 8, 100, IOVA, ALL));
    good(lib.reg_mr_iova2(pd, memory + 8, 100, IOVA + 8, ALL));
    good(lib.reg_mr_iova2(pd, memory + 8, 100, 8, ALL));
}

static void memory_must_be_mapped(void) {
    open_first();
    uint8_t *memory = pages(4);
    munmap(memory + 2 * 4096, 4096);
    good(lib.reg_mr(pd, memory, 8192, ALL));
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory + 8192, 8, ALL));
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory, 8193, ALL));
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory, 4 * 4096, ALL));
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, (void *)(uintptr_t)IOVA, 4096, ALL));
    CHECK(!mprotect(memory, 4096, PROT_NONE) && !mprotect(memory + 4096, 4096, PROT_READ), "mprotect");
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory, 8, IBV_ACCESS_REMOTE_READ));
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory + 4096, 8, IBV_ACCESS_LOCAL_WRITE));
    good(lib.reg_mr(pd, memory + 4096, 8, IBV_ACCESS_REMOTE_READ));
    CHECK(logged("\"rule\":\"unmapped\",\"errno\":14") == 6, "log");
}

static void peer_memory_takes_what_the_process_has_not(void) {
    open_first();
    uint8_t *memory = pages(2);
    struct tokenyard_ibverbs_record record;
    CHECK(!mprotect(memory + 4096, 4096, PROT_NONE), "mprotect");
    struct ibv_mr *gpu = good(lib.reg_mr(pd, (void *)(uintptr_t)IOVA, 1 << 20, ALL));
    CHECK(lib.records(&record, 1) == 1 && record.is_peer_memory, "a GPU's address");
    drop(gpu);
    good(lib.reg_mr(pd, memory + 4096, 4096, ALL)); /* as CUDA reserves addresses */
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory, 8192, ALL));
    CHECK(!mprotect(memory, 4096, PROT_READ), "mprotect");
    REFUSES(UNMAPPED, EFAULT, lib.reg_mr(pd, memory, 4096, ALL)); /* the process has it, so no peer does */
    good(lib.reg_mr(pd, memory, 4096, IBV_ACCESS_REMOTE_READ));
    CHECK(logged("\"peer_memory\":true") == 3, "log");
}

static void dmabufs_are_checked(void) {
    open_first();
    int fd = dmabuf("gpu", GPU), ends[2], file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct tokenyard_ibverbs_record record[2];
    CHECK(!pipe(ends) && file >= 0 && lseek(fd, 77, SEEK_SET) == 77, "setup");
    struct ibv_mr *whole = good(lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, ALL));
    good(lib.reg_dmabuf_mr(pd, 4096 + 16, GPU - 4096 - 16, IOVA + 16, fd, ALL));
    CHECK(lseek(fd, 0, SEEK_CUR) == 77, "the descriptor's place has changed");
    REFUSES(RANGE, EINVAL, lib.reg_dmabuf_mr(pd, 0, GPU + 1, IOVA, fd, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_dmabuf_mr(pd, 4096, GPU, IOVA, fd, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_dmabuf_mr(pd, GPU, 4096, IOVA, fd, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_dmabuf_mr(pd, 0, 0, IOVA, fd, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_dmabuf_mr(pd, 4096, SIZE_MAX, IOVA, fd, ALL));
    REFUSES(PAGE_OFFSET, EINVAL, lib.reg_dmabuf_mr(pd, 16, 4096, IOVA, fd, ALL));
    REFUSES(PAGE_OFFSET, EINVAL, lib.reg_dmabuf_mr(pd, 0, 4096, IOVA + 16, fd, ALL));
    REFUSES(FD, EINVAL, lib.reg_dmabuf_mr(pd, 0, 4096, IOVA, ends[0], ALL));
    REFUSES(FD, EINVAL, lib.reg_dmabuf_mr(pd, 0, 4096, IOVA, file, ALL));
    REFUSES(RANGE, EINVAL, lib.reg_dmabuf_mr(pd, 4096, SIZE_MAX, IOVA, -1, ALL)); /* before it is looked at */
    REFUSES(FD, EBADF, lib.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0)); /* as NCCL asks whether it is supported */
    close(fd);
    REFUSES(FD, EBADF, lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, ALL));
    CHECK(lib.records(record, 2) == 2 && record[0].fd_bytes == GPU && record[0].fd == fd, "size");
    CHECK(record[1].offset == 4112 && record[1].iova == IOVA + 16 && record[1].kind == IBVERBS_DMABUF, "offset");
    CHECK(whole->addr == NULL && logged("/memfd:gpu") >= 2, "names");
    drop(whole);
}

static void dmabufs_are_not_supported(void) {
    open_first();
    REFUSES(NO_DMABUF, EOPNOTSUPP, lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, dmabuf("gpu", GPU), ALL));
    REFUSES(NO_DMABUF, EOPNOTSUPP, lib.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0));
    /* The second device has an older kernel's answer; the third supports them. */
    struct ibv_pd *other = lib.alloc_pd(lib.open_device(list[1])), *third = lib.alloc_pd(lib.open_device(list[2]));
    REFUSES(NO_DMABUF, EPROTONOSUPPORT, lib.reg_dmabuf_mr(other, 0, GPU, IOVA, dmabuf("gpu", GPU), ALL));
    good(lib.reg_dmabuf_mr(third, 0, GPU, IOVA, dmabuf("gpu", GPU), ALL));
}

static void data_direct(void) {
    open_first();
    char path[64];
    struct tokenyard_ibverbs_record record[2];
    int fd = dmabuf("gpu", GPU);
    CHECK(!lib.direct_path(context, path, sizeof path) && !strncmp(path, "/devices/pci", 12), "path");
    ANSWERS(ARGUMENT, ENOSPC, lib.direct_path(context, path, strlen(path)));
    CHECK(!lib.direct_path(context, path, strlen(path) + 1), "the least room");
    struct ibv_mr *mr = good(lib.mlx5_reg(pd, 0, GPU, IOVA, fd, ALL, DIRECT));
    good(lib.mlx5_reg(pd, 0, GPU, IOVA, fd, ALL, 0));
    CHECK(lib.records(record, 2) == 2 && record[0].kind == IBVERBS_DATA_DIRECT && record[1].kind == IBVERBS_DMABUF,
          "kinds");
    REFUSES(DATA_DIRECT_IOVA, EOPNOTSUPP, lib.mlx5_reg(pd, 16, 4096, IOVA + 16, fd, ALL, DIRECT));
    REFUSES(ACCESS, EINVAL, lib.mlx5_reg(pd, 0, GPU, IOVA, fd, ALL, 2));
    REFUSES(RANGE, EINVAL, lib.mlx5_reg(pd, 0, GPU + 4096, IOVA, fd, ALL, DIRECT));
    good(lib.mlx5_reg(pd, 16, 4096, IOVA + 16, fd, ALL, 0));
    drop(mr);
    /* The second device has none; the third fails; the fourth is of another maker. */
    struct ibv_context *second = lib.open_device(list[1]), *fourth = lib.open_device(list[3]);
    ANSWERS(NO_DATA_DIRECT, ENODEV, lib.direct_path(second, path, sizeof path));
    REFUSES(NO_DATA_DIRECT, EINVAL, lib.mlx5_reg(lib.alloc_pd(second), 0, GPU, IOVA, fd, ALL, DIRECT));
    struct ibv_pd *third = lib.alloc_pd(lib.open_device(list[2]));
    REFUSES(NO_DATA_DIRECT, 524, lib.mlx5_reg(third, 0, GPU, IOVA, fd, ALL, DIRECT));
    good(lib.mlx5_reg(third, 0, GPU, IOVA, fd, ALL, 0));
    CHECK(lib.direct_path(fourth, path, sizeof path) == EOPNOTSUPP, "another maker's");
    CHECK(!lib.mlx5_reg(lib.alloc_pd(fourth), 0, GPU, IOVA, fd, ALL, 0) && errno == EOPNOTSUPP, "another maker's");
    static struct { struct ibv_context context; uint64_t rest[64]; } foreign = {.rest = {1, 1}};
    CHECK(lib.direct_path(&foreign.context, path, sizeof path) == EOPNOTSUPP, "a context of another library");
}

static void mappings_must_suit(void) {
    open_first();
    int host = dmabuf("gpu", GPU), pcie = dmabuf("gpu pcie", GPU);
    REFUSES(MAPPING, 524, lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, pcie, ALL));
    REFUSES(MAPPING, 524, lib.mlx5_reg(pd, 0, GPU, IOVA, pcie, ALL, 0));
    REFUSES(MAPPING, 524, lib.mlx5_reg(pd, 0, GPU, IOVA, host, ALL, DIRECT));
    good(lib.mlx5_reg(pd, 0, GPU, IOVA, pcie, ALL, DIRECT));
    good(lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, host, ALL));
}

static void locked_memory_is_limited(void) {
    open_first();
    uint8_t *memory = pages(4);
    struct ibv_mr *mr = good(lib.reg_mr(pd, memory + 8, 4096, ALL)); /* two pages of three */
    REFUSES(MEMLOCK, ENOMEM, lib.reg_mr(pd, memory, 8192, ALL));
    REFUSES(MEMLOCK, ENOMEM, lib.reg_mr(pd, (void *)(uintptr_t)IOVA, 8192, ALL)); /* counted before it is looked at */
    good(lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, dmabuf("gpu", GPU), ALL));
    good(lib.reg_mr(pd, memory, 8, ALL));
    drop(mr);
    good(lib.reg_mr(pd, memory, 8192, ALL));
}

static void no_memory_may_be_locked(void) {
    open_first();
    REFUSES(MEMLOCK, EPERM, lib.reg_mr(pd, pages(1), 8, ALL));
}

static void pages_of_a_region_are_limited(void) {
    open_first();
    uint8_t *memory = pages(4);
    int fd = dmabuf("gpu", GPU);
    good(lib.reg_mr(pd, memory, 8192, ALL));
    REFUSES(PAGES, ENOMEM, lib.reg_mr(pd, memory + 8, 8192, ALL));
    good(lib.reg_dmabuf_mr(pd, 4096, 8192, IOVA, fd, ALL));
    REFUSES(PAGES, EINVAL, lib.reg_dmabuf_mr(pd, 0, 8193, IOVA, fd, ALL));
}

static void regions_of_a_device_are_limited(void) {
    open_first();
    uint8_t *memory = pages(1);
    struct ibv_pd *same = lib.alloc_pd(lib.open_device(list[0])), *other = lib.alloc_pd(lib.open_device(list[1]));
    struct ibv_mr *mr = good(lib.reg_mr(pd, memory, 8, ALL));
    good(lib.reg_mr(same, memory, 8, ALL));
    REFUSES(REGIONS, ENOMEM, lib.reg_mr(pd, memory, 8, ALL));
    REFUSES(REGIONS, ENOMEM, lib.reg_dmabuf_mr(same, 0, GPU, IOVA, dmabuf("gpu", GPU), ALL));
    good(lib.reg_mr(other, memory, 8, ALL));
    drop(mr);
    good(lib.reg_mr(same, memory, 8, ALL));
}

static void keys_run_out(void) {
    open_first();
    uint8_t *memory = pages(1);
    int fd = dmabuf("gpu", GPU);
    struct ibv_mr *direct = good(lib.mlx5_reg(pd, 0, GPU, IOVA, fd, ALL, DIRECT)); /* two keys of three */
    REFUSES(KEYS, EAGAIN, lib.mlx5_reg(pd, 0, GPU, IOVA, fd, ALL, DIRECT));
    good(lib.reg_mr(pd, memory, 8, ALL));
    REFUSES(KEYS, EAGAIN, lib.reg_mr(pd, memory, 8, ALL));
    drop(direct);
    good(lib.reg_dmabuf_mr(pd, 0, GPU, IOVA, fd, ALL));
    good(lib.reg_mr(pd, memory, 8, ALL));
}

static void first_libraries_lack_what_came_later(void) {
    load(paths[2], paths[3], false);
    CHECK(!lib.reg_mr_iova2 && !lib.reg_dmabuf_mr && !lib.query_gid_ex && !lib.is_fork_initialized, "libibverbs");
    CHECK(!lib.mlx5_reg && !lib.direct_path && lib.is_mlx5, "libmlx5");
    open_first();
    good(lib.reg_mr(pd, pages(1), 8, ALL));
}

static void fork_must_be_prepared_first(void) {
    open_first();
    CHECK(lib.is_fork_initialized() == IBV_FORK_DISABLED, "at first");
    good(lib.reg_mr(pd, pages(1), 8, ALL));
    ANSWERS(ARGUMENT, EINVAL, lib.fork_init());
}

static void fork_is_prepared(void) {
    open_first();
    CHECK(!lib.fork_init() && lib.is_fork_initialized() == IBV_FORK_ENABLED && !lib.fork_init(), "twice");
}

static void fork_needs_nothing(void) {
    CHECK(lib.is_fork_initialized() == IBV_FORK_UNNEEDED && !lib.fork_init(), "a kernel that copies");
}

/* ---- queue pairs, and what is left ----------------------------------------------------------------------------- */

static struct ibv_qp *new_qp(enum ibv_qp_type type, struct ibv_cq *cq, struct ibv_srq *srq) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
                                    .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 1,
                                            .max_inline_data = 64}};
    struct ibv_qp *qp = lib.create_qp(pd, &init);
    CHECK(qp && qp->state == IBV_QPS_RESET && init.cap.max_recv_wr == (srq ? 0 : 4), "ibv_create_qp: %d", errno);
    return qp;
}

static struct ibv_qp_attr attributes(enum ibv_qp_state state) {
    return (struct ibv_qp_attr){
        .qp_state = state, .port_num = 1, .qp_access_flags = ALL, .path_mtu = IBV_MTU_4096, .dest_qp_num = 0x123,
        .rq_psn = 5, .sq_psn = 6, .max_dest_rd_atomic = 1, .max_rd_atomic = 1, .min_rnr_timer = 12, .timeout = 14,
        .retry_cnt = 6, .rnr_retry = 7, .qkey = 0x111,
        .ah_attr = {.port_num = 1, .is_global = 1, .grh = {.dgid.raw = {0xfe, 0x80}, .sgid_index = 1}}};
}

enum {
    INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
          IBV_QP_MIN_RNR_TIMER,
    RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
};

static int move(struct ibv_qp *qp, enum ibv_qp_state state, int mask) {
    struct ibv_qp_attr attr = attributes(state);
    return lib.modify_qp(qp, &attr, mask);
}

static void connect_qp(struct ibv_qp *qp) {
    CHECK(!move(qp, IBV_QPS_INIT, INIT) && !move(qp, IBV_QPS_RTR, RTR) && !move(qp, IBV_QPS_RTS, RTS), "to RTS");
}

static struct ibv_cq *new_cq(int entries) {
    struct ibv_cq *cq = lib.create_cq(context, entries, NULL, NULL, 0);
    CHECK(cq && cq->cqe >= entries, "ibv_create_cq");
    return cq;
}

static struct ibv_srq *new_srq(void) {
    struct ibv_srq_init_attr init = {.attr = {.max_wr = 2, .max_sge = 1}};
    struct ibv_srq *srq = lib.create_srq(pd, &init);
    CHECK(srq, "ibv_create_srq");
    return srq;
}

static void used_objects_are_busy(void) {
    open_first();
    struct ibv_cq *cq = new_cq(16);
    struct ibv_srq *srq = new_srq();
    struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, srq);
    struct ibv_mr *mr = good(lib.reg_mr(pd, pages(1), 8, ALL));
    struct ibv_qp_attr attr = attributes(0);
    struct ibv_ah *ah = lib.create_ah(pd, &attr.ah_attr);
    CHECK(ah, "ibv_create_ah");
    ANSWERS(BUSY, EBUSY, lib.destroy_cq(cq));
    ANSWERS(BUSY, EBUSY, lib.destroy_srq(srq));
    ANSWERS(BUSY, EBUSY, lib.dealloc_pd(pd));
    CHECK(!lib.destroy_qp(qp) && !lib.destroy_cq(cq), "in this order");
    ANSWERS(BUSY, EBUSY, lib.dealloc_pd(pd));
    CHECK(!lib.destroy_srq(srq), "in this order");
    ANSWERS(BUSY, EBUSY, lib.dealloc_pd(pd));
    CHECK(!lib.destroy_ah(ah), "in this order");
    ANSWERS(BUSY, EBUSY, lib.dealloc_pd(pd));
    drop(mr);
    CHECK(!lib.dealloc_pd(pd) && !lib.close_device(context), "in this order");
    CHECK(lib.counts()->leaks == 0 && lib.counts()->misuses == 0 && logged("\"leak\"") == 0, "nothing is left");
}

static void what_is_left_is_recorded(void) {
    open_first();
    struct ibv_cq *cq = new_cq(16);
    struct ibv_srq *srq = new_srq();
    struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, srq);
    struct ibv_mr *mr = good(lib.reg_mr(pd, pages(1), 8, ALL));
    struct ibv_qp_attr attr = attributes(0);
    CHECK(lib.create_ah(pd, &attr.ah_attr) && !lib.close_device(context), "closing");
    CHECK(lib.counts()->leaks == 6 && lib.counts()->live_regions == 0, "%d", (int)lib.counts()->leaks);
    CHECK(logged("\"leak\"") == 6 && logged("\"what\":\"pd\",\"count\":1") == 1, "log");
    CHECK(lib.dereg_mr(mr) == ENOENT && lib.destroy_qp(qp) == ENOENT && lib.dealloc_pd(pd) == ENOENT &&
          lib.destroy_cq(cq) == ENOENT && lib.destroy_srq(srq) == ENOENT && lib.counts()->misuses == 5,
          "objects that went with their context");
    CHECK(!lib.alloc_pd(context) && lib.counts()->misuses == 6, "a context that is closed");
}

static void what_is_left_at_the_end_is_recorded(void) {
    int status = 0;
    pid_t child = fork();
    if (!child) {
        open_first();
        good(lib.reg_mr(pd, pages(1), 8, ALL));
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "status %d", status);
    CHECK(logged("\"call\":\"exit\"") == 3 && logged("\"what\":\"region\"") == 2 && logged("\"what\":\"context\"") == 1,
          "log of another process");
}

static void gone_objects_are_not_used(void) {
    open_first();
    struct ibv_mr *mr = good(lib.reg_mr(pd, pages(1), 8, ALL));
    drop(mr);
    CHECK(lib.dereg_mr(mr) == ENOENT && lib.counts()->misuses == 1 && lib.counts()->deregistered == 1, "twice");
    CHECK(!lib.dealloc_pd(pd) && lib.dealloc_pd(pd) == ENOENT, "twice");
    CHECK(!lib.reg_mr(pd, pages(1), 8, ALL) && errno == ENOENT && lib.counts()->misuses == 3, "a domain that is gone");
    CHECK(logged("\"misuse\"") == 3, "log");
}

static void states_are_checked(void) {
    open_first();
    struct ibv_cq *cq = new_cq(16);
    struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL), *ud = new_qp(IBV_QPT_UD, cq, NULL);
    CHECK(qp->qp_num != ud->qp_num && qp->qp_num < 1 << 24, "numbers");
    ANSWERS(STATE, EINVAL, move(qp, IBV_QPS_RTR, RTR));
    ANSWERS(ARGUMENT, EINVAL, move(qp, IBV_QPS_INIT, INIT & ~IBV_QP_ACCESS_FLAGS));
    ANSWERS(ARGUMENT, EINVAL, move(qp, IBV_QPS_INIT, INIT | IBV_QP_QKEY));
    CHECK(!move(qp, IBV_QPS_INIT, INIT) && !move(qp, IBV_QPS_INIT, INIT), "INIT, twice");
    for (int flag = 1; flag < IBV_QP_RATE_LIMIT; flag *= 2)
        if (RTR & flag & ~IBV_QP_STATE)
            ANSWERS(ARGUMENT, EINVAL, move(qp, IBV_QPS_RTR, RTR & ~flag));
    struct ibv_qp_attr attr = attributes(IBV_QPS_RTR), asked;
    attr.ah_attr.is_global = 0;
    ANSWERS(ARGUMENT, EINVAL, lib.modify_qp(qp, &attr, RTR));
    attr = attributes(IBV_QPS_RTR), attr.ah_attr.grh.sgid_index = 4;
    ANSWERS(ARGUMENT, EINVAL, lib.modify_qp(qp, &attr, RTR));
    attr = attributes(IBV_QPS_RTR), attr.dest_qp_num = 1 << 24;
    ANSWERS(ARGUMENT, EINVAL, lib.modify_qp(qp, &attr, RTR));
    attr = attributes(IBV_QPS_RTR), attr.path_mtu = 6;
    ANSWERS(ARGUMENT, EINVAL, lib.modify_qp(qp, &attr, RTR));
    CHECK(!move(qp, IBV_QPS_RTR, RTR), "RTR");
    for (int flag = 1; flag < IBV_QP_RATE_LIMIT; flag *= 2)
        if (RTS & flag & ~IBV_QP_STATE)
            ANSWERS(ARGUMENT, EINVAL, move(qp, IBV_QPS_RTS, RTS & ~flag));
    CHECK(!move(qp, IBV_QPS_RTS, RTS), "RTS");
    ANSWERS(STATE, EINVAL, move(qp, IBV_QPS_INIT, INIT));
    ANSWERS(ARGUMENT, EINVAL, move(qp, IBV_QPS_ERR, IBV_QP_STATE | IBV_QP_SQ_PSN));
    struct ibv_qp_init_attr init;
    CHECK(!lib.query_qp(qp, &asked, IBV_QP_STATE, &init) && asked.qp_state == IBV_QPS_RTS && asked.sq_psn == 6 &&
          asked.dest_qp_num == 0x123 && init.cap.max_send_wr == 4, "ibv_query_qp");
    CHECK(!move(qp, IBV_QPS_ERR, IBV_QP_STATE) && !move(qp, IBV_QPS_RESET, IBV_QP_STATE), "ERR, RESET");
    connect_qp(qp);
    CHECK(!move(ud, IBV_QPS_INIT, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) &&
          !move(ud, IBV_QPS_RTR, IBV_QP_STATE) && !move(ud, IBV_QPS_RTS, IBV_QP_STATE | IBV_QP_SQ_PSN), "UD");
    struct ibv_qp_init_attr bad = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 501}};
    REFUSES(ARGUMENT, EINVAL, lib.create_qp(pd, &bad));
    bad = (struct ibv_qp_init_attr){.send_cq = cq, .qp_type = IBV_QPT_RC};
    REFUSES(ARGUMENT, EINVAL, lib.create_qp(pd, &bad));
    bad = (struct ibv_qp_init_attr){.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET};
    REFUSES(ARGUMENT, EOPNOTSUPP, lib.create_qp(pd, &bad));
    REFUSES(ARGUMENT, EINVAL, lib.create_cq(context, 0, NULL, NULL, 0));
    REFUSES(ARGUMENT, EINVAL, lib.create_cq(context, 1, NULL, NULL, 1));
}

static int post(struct ibv_qp *qp, uint64_t id, uint64_t address, uint32_t bytes, uint32_t lkey, unsigned flags) {
    struct ibv_sge sge = {.addr = address, .length = bytes, .lkey = lkey};
    struct ibv_send_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = flags | IBV_SEND_SIGNALED}, *bad = NULL;
    int error = context->ops.post_send(qp, &wr, &bad);
    CHECK(error ? bad == &wr : !bad, "bad_wr");
    return error;
}

static int receive(struct ibv_qp *qp, struct ibv_srq *srq, uint64_t id) {
    struct ibv_recv_wr wr = {.wr_id = id}, *bad = NULL;
    int error = srq ? context->ops.post_srq_recv(srq, &wr, &bad) : context->ops.post_recv(qp, &wr, &bad);
    CHECK(error ? bad == &wr : !bad, "bad_wr");
    return error;
}

static void expect(struct ibv_cq *cq, uint64_t id, enum ibv_wc_status status) {
    struct ibv_wc wc;
    CHECK(context->ops.poll_cq(cq, 1, &wc) == 1 && wc.wr_id == id && wc.status == status, "id %d, status %d",
          (int)wc.wr_id, wc.status);
}

static void posts_end_by_flushing(void) {
    open_first();
    struct ibv_cq *cq = new_cq(16);
    struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
    struct ibv_wc wc;
    uint8_t *memory = pages(2);
    uint64_t at = (uintptr_t)memory;
    uint32_t key = good(lib.reg_mr(pd, memory, 4096, ALL))->lkey;
    ANSWERS(STATE, EINVAL, post(qp, 1, at, 8, key, 0));
    ANSWERS(STATE, EINVAL, receive(qp, NULL, 1));
    connect_qp(qp);
    for (uint64_t id = 1; id <= 4; id++)
        CHECK(!post(qp, id, at, 8, key, 0) && !receive(qp, NULL, id + 10), "4 posts fit");
    ANSWERS(FULL, ENOMEM, post(qp, 5, at, 8, key, 0));
    ANSWERS(FULL, ENOMEM, receive(qp, NULL, 5));
    CHECK(context->ops.poll_cq(cq, 1, &wc) == 0, "nothing completes");
    CHECK(!move(qp, IBV_QPS_ERR, IBV_QP_STATE), "ERR");
    for (uint64_t id = 1; id <= 4; id++)
        expect(cq, id, IBV_WC_WR_FLUSH_ERR);
    for (uint64_t id = 11; id <= 14; id++)
        expect(cq, id, IBV_WC_WR_FLUSH_ERR);
    CHECK(!post(qp, 7, at, 8, key, 0) && !receive(qp, NULL, 8), "in the error state");
    expect(cq, 7, IBV_WC_WR_FLUSH_ERR);
    CHECK(!move(qp, IBV_QPS_RESET, IBV_QP_STATE) && context->ops.poll_cq(cq, 1, &wc) == 0, "RESET leaves nothing");
    connect_qp(qp);
    ANSWERS(ARGUMENT, ENOMEM, post(qp, 1, at, 65, 0, IBV_SEND_INLINE));
    CHECK(!post(qp, 1, at, 64, 0, IBV_SEND_INLINE), "inline data has no key");
}

static void keys_of_posts_are_checked(void) {
    open_first();
    struct ibv_cq *cq = new_cq(16);
    struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, NULL);
    struct ibv_mr *mr = good(lib.reg_dmabuf_mr(pd, 4096, 8192, IOVA, dmabuf("gpu", GPU), ALL));
    struct ibv_mr *foreign = good(lib.reg_mr(lib.alloc_pd(context), pages(1), 4096, ALL));
    struct { uint64_t at; uint32_t bytes, key; } wrong[] = {
        {IOVA + 8192, 1, mr->lkey}, {IOVA - 1, 8, mr->lkey}, {IOVA, 8193, mr->lkey}, {4096, 8, mr->lkey},
        {IOVA, 8, mr->rkey}, {(uintptr_t)foreign->addr, 8, foreign->lkey}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        connect_qp(qp);
        CHECK(!post(qp, 1, IOVA, 8192, mr->lkey, 0), "the whole region");
        ANSWERS(LOCAL_KEY, 0, post(qp, 2, wrong[i].at, wrong[i].bytes, wrong[i].key, 0));
        expect(cq, 2, IBV_WC_LOC_PROT_ERR);
        expect(cq, 1, IBV_WC_WR_FLUSH_ERR);
        CHECK(qp->state == IBV_QPS_ERR && !move(qp, IBV_QPS_RESET, IBV_QP_STATE), "the error state");
    }
}

static void queues_overrun(void) {
    open_first();
    struct ibv_cq *cq = new_cq(1);
    struct ibv_srq *srq = new_srq();
    struct ibv_qp *qp = new_qp(IBV_QPT_RC, cq, srq);
    struct ibv_wc wc[4];
    CHECK(cq->cqe == 1, "as small as was asked for");
    CHECK(!receive(NULL, srq, 1) && !receive(NULL, srq, 2), "two receives fit");
    ANSWERS(FULL, ENOMEM, receive(NULL, srq, 3));
    connect_qp(qp);
    ANSWERS(STATE, EINVAL, receive(qp, NULL, 3));
    for (uint64_t id = 1; id <= 3; id++)
        CHECK(!post(qp, id, 0, 0, 0, 0), "posts");
    ANSWERS(OVERRUN, 0, move(qp, IBV_QPS_ERR, IBV_QP_STATE));
    CHECK(context->ops.poll_cq(cq, 4, wc) == 2, "the third is lost");
}

static const struct rule {
    const char *name, *settings;
    void (*run)(void);
} rules[] = {
    {"devices_are_as_set", "DEVICES=mlx5_0,mlx5_1,bnxt_re0 SYSFS=/nowhere REGIONS=5,77 DEPTH=500 PORT=4,1 MTU=1024",
     devices_are_as_set},
    {"no_device_is_an_empty_list", "DEVICES=", no_device_is_an_empty_list},
    {"gids_have_types", "", gids_have_types},
    {"infiniband_has_one_gid", "LINK=infiniband", infiniband_has_one_gid},
    {"ports_have_partitions", "LINK=infiniband PKEYS=ffff+0+8001 PREFIX=fec0000000000007", ports_have_partitions},
    {"memory_is_registered_and_recorded", "", memory_is_registered_and_recorded},
    {"access_is_checked", "", access_is_checked},
    {"ranges_are_checked", "", ranges_are_checked},
    {"memory_must_be_mapped", "", memory_must_be_mapped},
    {"peer_memory_takes_what_the_process_has_not", "PEER_MEMORY=1 MEMLOCK=8192",
     peer_memory_takes_what_the_process_has_not},
    {"dmabufs_are_checked", "", dmabufs_are_checked},
    {"dmabufs_are_not_supported", "DEVICES=mlx5_0,mlx5_1,mlx5_2 DMABUF=0,93,1", dmabufs_are_not_supported},
    {"data_direct", "DEVICES=mlx5_0,mlx5_1,mlx5_2,efa_0 DATA_DIRECT=1,0,1 DATA_DIRECT_ERRNO=0,0,524", data_direct},
    {"mappings_must_suit", "DATA_DIRECT=1 MATCHING=1", mappings_must_suit},
    {"locked_memory_is_limited", "MEMLOCK=16383", locked_memory_is_limited},
    {"no_memory_may_be_locked", "MEMLOCK=0", no_memory_may_be_locked},
    {"pages_of_a_region_are_limited", "PAGES=2", pages_of_a_region_are_limited},
    {"regions_of_a_device_are_limited", "DEVICES=mlx5_0,mlx5_1 REGIONS=2", regions_of_a_device_are_limited},
    {"keys_run_out", "KEYS=3 DATA_DIRECT=1", keys_run_out},
    {"first_libraries_lack_what_came_later", "", first_libraries_lack_what_came_later},
    {"fork_must_be_prepared_first", "COPY_ON_FORK=0", fork_must_be_prepared_first},
    {"fork_is_prepared", "COPY_ON_FORK=0", fork_is_prepared},
    {"fork_needs_nothing", "", fork_needs_nothing},
    {"used_objects_are_busy", "", used_objects_are_busy},
    {"what_is_left_is_recorded", "", what_is_left_is_recorded},
    {"what_is_left_at_the_end_is_recorded", "", what_is_left_at_the_end_is_recorded},
    {"gone_objects_are_not_used", "", gone_objects_are_not_used},
    {"states_are_checked", "DEPTH=500", states_are_checked},
    {"posts_end_by_flushing", "", posts_end_by_flushing},
    {"keys_of_posts_are_checked", "", keys_of_posts_are_checked},
    {"queues_overrun", "", queues_overrun},
};

static void apply(const char *settings) {
    char copy[256], *rest;
    snprintf(copy, sizeof copy, "%s", settings);
    for (char *one = strtok_r(copy, " ", &rest); one; one = strtok_r(NULL, " ", &rest)) {
        char name[64];
        char *equals = strchr(one, '=');
        snprintf(name, sizeof name, "TOKENYARD_IBVERBS_%.*s", (int)(equals - one), one);
        setenv(name, equals + 1, 1);
    }
    setenv("TOKENYARD_IBVERBS_LOG", log_path, 1);
}

int main(int count, char **arguments) {
    int ran = 0;
    if (count < 5) {
        fprintf(stderr, "usage: ibverbs_rules IBVERBS MLX5 FIRST_IBVERBS FIRST_MLX5 [RULE]\n");
        return 2;
    }
    memcpy(paths, arguments + 1, sizeof paths);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        int status = 0;
        if (count > 5 && strcmp(arguments[5], rules[i].name))
            continue;
        snprintf(log_path, sizeof log_path, "/tmp/ibverbs_rules.%d", (int)getpid());
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            apply(rules[i].settings);
            load(paths[0], paths[1], true);
            rules[i].run();
            exit(0);
        }
        bool has_passed = waitpid(child, &status, 0) == child && status == 0;
        unlink(log_path);
        if (!has_passed) {
            fprintf(stderr, "%s: failed, status %#x\n", rules[i].name, status);
            return 1;
        }
        printf("%-48s fires\n", rules[i].name);
        ran++;
    }
    return ran ? 0 : 2;
}
