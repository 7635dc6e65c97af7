/* The libibverbs double: settings, log, devices, ports, protection domains. ibverbs.h says how the parts fit together.
 *
 * Build (each a line):
 *   gcc -std=c11 -O1 -g -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -o libibverbs_double.so
 *       tests/doubles/ibverbs.c tests/doubles/ibverbs_regions.c tests/doubles/ibverbs_queues.c
 *   gcc -std=c11 -O1 -g -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -o libmlx5_double.so
 *       tests/doubles/ibverbs_mlx5.c
 * -DIBVERBS_1_1 leaves out all of libibverbs that came after its first versions; -DMLX5_BEFORE_54 leaves data direct
 * out of libmlx5. Settings, all optional. Where several devices differ, a value is a list, 1,0 for instance: the first
 * is that of the first device, and the last that of all that remain.
 *
 *   TOKENYARD_IBVERBS_LOG=            file for lines of JSON (ibverbs_double.h)
 *   TOKENYARD_IBVERBS_DEVICES=mlx5_0  names, with commas; empty: no device; libmlx5 serves those named mlx5_*
 *   TOKENYARD_IBVERBS_SYSFS=/sys      folder of class/infiniband/NAME, the path of a device
 *   TOKENYARD_IBVERBS_LINK=ethernet   or infiniband
 *   TOKENYARD_IBVERBS_PREFIX=fe80000000000000   subnet prefix of the GID on infiniband, in hexadecimal
 *   TOKENYARD_IBVERBS_PKEYS=ffff      keys of the port's table of partitions, in hexadecimal, with + between them; 0: a
 *                                     place that is not set
 *   TOKENYARD_IBVERBS_NETDEV=lo       net device of the GIDs on ethernet
 *   TOKENYARD_IBVERBS_PORT=4          state of the port: 4 is active, 1 down
 *   TOKENYARD_IBVERBS_MTU=4096        active MTU: 256, 512, 1024, 2048, 4096
 *   TOKENYARD_IBVERBS_PART=4129       part number (ConnectX-7)
 *   TOKENYARD_IBVERBS_DEPTH=32768     most work requests of a queue
 *   TOKENYARD_IBVERBS_DMABUF=1        0: registration of dma-bufs fails with EOPNOTSUPP; any other: with that errno
 *   TOKENYARD_IBVERBS_DATA_DIRECT=0   1: the device has a data direct device
 *   TOKENYARD_IBVERBS_DATA_DIRECT_ERRNO=0   registration over data direct fails with that errno
 *   TOKENYARD_IBVERBS_MATCHING=0      1: mappings must suit the call, as on GB200: data direct takes dma-bufs alone
 *                                     that are mapped over PCIe, and all other registration those that are not. A memfd
 *                                     whose name has "pcie" stands for one that is mapped over PCIe.
 *   TOKENYARD_IBVERBS_PEER_MEMORY=0   1: a peer memory module is loaded
 *   TOKENYARD_IBVERBS_MEMLOCK=        bytes that the process may lock; none: no limit
 *   TOKENYARD_IBVERBS_PAGES=          4 KiB pages of one region; none: no limit
 *   TOKENYARD_IBVERBS_REGIONS=16777216 _KEYS=16777216   regions and keys of a device
 *   TOKENYARD_IBVERBS_COPY_ON_FORK=1  0: the kernel does not copy pinned memory when a process forks
 */
#define _GNU_SOURCE
#include "ibverbs.h"

#include <fcntl.h>
#include <net/if.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Macros of verbs.h that stand before the exported functions. */
#undef ibv_get_device_list
#undef ibv_query_port

struct tokenyard_ibverbs_counts counts = {.bytes = sizeof counts};
static pthread_mutex_t everything = PTHREAD_MUTEX_INITIALIZER;
static struct device *devices[MAX_DEVICES];
struct ah {
    struct ibv_ah ah;
    struct pd *pd;
    bool live;
    struct ah *next;
};

static struct context *contexts;
static struct pd *pds;
static struct ah *ahs;
static bool is_fork_safe, is_too_late;

void lock(void) { pthread_mutex_lock(&everything); }
void unlock(void) { pthread_mutex_unlock(&everything); }

EXPORT const struct tokenyard_ibverbs_counts *tokenyard_ibverbs_counts(void);
const struct tokenyard_ibverbs_counts *tokenyard_ibverbs_counts(void) { return &counts; }

/* ---- settings -------------------------------------------------------------------------------------------------- */

static const char *text(const char *name, const char *otherwise) {
    char key[64];
    snprintf(key, sizeof key, "TOKENYARD_IBVERBS_%s", name);
    const char *value = getenv(key);
    return value ? value : otherwise;
}

/* The value for a device of a list, whose last value is that of all further devices. */
static void value(const char *name, uint32_t device, const char *otherwise, char *out, size_t room) {
    const char *list = text(name, otherwise);
    if (!*list)
        list = otherwise;
    for (const char *comma; device && (comma = strchr(list, ',')); device--)
        list = comma + 1;
    snprintf(out, room, "%.*s", (int)strcspn(list, ","), list);
}

static uint64_t number(const char *name, uint32_t device, uint64_t otherwise) {
    char out[64];
    value(name, device, "", out, sizeof out);
    return *out ? strtoull(out, NULL, 0) : otherwise;
}

static struct settings read_settings(uint32_t device) {
    char link[64], prefix[64], keys[256];
    value("LINK", device, "ethernet", link, sizeof link);
    value("PREFIX", device, "fe80000000000000", prefix, sizeof prefix);
    value("PKEYS", device, "ffff", keys, sizeof keys);
    struct settings settings = {
        .dmabuf = (uint32_t)number("DMABUF", device, 1),
        .data_direct = (uint32_t)number("DATA_DIRECT", device, 0),
        .data_direct_errno = (uint32_t)number("DATA_DIRECT_ERRNO", device, 0),
        .matching = number("MATCHING", device, 0),
        .peer_memory = number("PEER_MEMORY", device, 0),
        .is_infiniband = !strcmp(link, "infiniband"),
        .port_state = (uint32_t)number("PORT", device, IBV_PORT_ACTIVE),
        .mtu = (uint32_t)number("MTU", device, 4096),
        .part = (uint32_t)number("PART", device, 4129),
        .depth = (uint32_t)number("DEPTH", device, 32768),
        .memlock = number("MEMLOCK", device, UINT64_MAX),
        .pages = number("PAGES", device, UINT64_MAX),
        .regions = number("REGIONS", device, 1 << 24),
        .keys = number("KEYS", device, 1 << 24),
        .prefix = strtoull(prefix, NULL, 16),
    };
    for (char *rest, *key = strtok_r(keys, "+", &rest); key && settings.pkeys < MAX_PKEYS;
         key = strtok_r(NULL, "+", &rest))
        settings.pkey[settings.pkeys++] = (uint16_t)strtoul(key, NULL, 16);
    return settings;
}

/* ---- log ------------------------------------------------------------------------------------------------------- */

void log_event(const char *event, const struct context *context, const char *call, const char *more) {
    const char *path = text("LOG", "");
    char line[1024];
    if (!*path)
        return;
    const char *device = context ? context->device->device.name : "";
    int length = snprintf(line, sizeof line - 2,
                          "{\"event\":\"%s\",\"pid\":%d,\"device\":\"%s\",\"call\":\"%s\"%s", event,
                          (int)getpid(), device, call, more);
    if (length > (int)sizeof line - 3)
        abort();
    memcpy(line + length, "}\n", 3);
    /* One write to a file opened with O_APPEND: lines of several processes stay whole. */
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line, (size_t)length + 2) != length + 2)
        abort();
    close(fd);
}

const char *rule_name(enum tokenyard_ibverbs_rule rule) {
    static const char *const names[] = {
#define NAME(upper, lower) #lower,
        TOKENYARD_IBVERBS_RULES(NAME)
#undef NAME
    };
    return names[rule];
}

int refuse(const struct context *context, const char *call, enum tokenyard_ibverbs_rule rule, int number,
           const char *why, ...) {
    char reason[512], more[640];
    va_list arguments;
    va_start(arguments, why);
    vsnprintf(reason, sizeof reason, why, arguments);
    va_end(arguments);
    __atomic_fetch_add(&counts.refused[rule], 1, __ATOMIC_RELAXED);
    snprintf(more, sizeof more, ",\"rule\":\"%s\",\"errno\":%d,\"why\":\"%s\"", rule_name(rule), number, reason);
    log_event("refuse", context, call, more);
    errno = number;
    return number;
}

int misuse(const char *call, const char *what) {
    char more[128];
    __atomic_fetch_add(&counts.misuses, 1, __ATOMIC_RELAXED);
    snprintf(more, sizeof more, ",\"what\":\"%s\"", what);
    log_event("misuse", NULL, call, more);
    errno = ENOENT;
    return ENOENT;
}

void leak(const struct context *context, const char *call, const char *what, uint64_t count) {
    char more[128];
    if (!count)
        return;
    counts.leaks += count;
    snprintf(more, sizeof more, ",\"what\":\"%s\",\"count\":%llu", what, (unsigned long long)count);
    log_event("leak", context, call, more);
}

/* ---- devices --------------------------------------------------------------------------------------------------- */

static void make_devices(void) {
    char names[1024];
    snprintf(names, sizeof names, "%s", text("DEVICES", "mlx5_0"));
    uint32_t index = 0;
    for (char *rest, *name = strtok_r(names, ",", &rest); name && index < MAX_DEVICES; index++) {
        char path[IBV_SYSFS_PATH_MAX];
        snprintf(path, sizeof path, "%s/class/infiniband/%s", text("SYSFS", "/sys"), name);
        /* A list or a context may still have a device that was set otherwise, so that stays as it is. */
        if (!devices[index] || strcmp(devices[index]->device.ibdev_path, path)) {
            struct device *device = devices[index] = calloc(1, sizeof *device);
            device->index = index;
            device->device.node_type = IBV_NODE_CA;
            device->device.transport_type = IBV_TRANSPORT_IB;
            snprintf(device->device.name, sizeof device->device.name, "%s", name);
            snprintf(device->device.dev_name, sizeof device->device.dev_name, "uverbs%u", index);
            snprintf(device->device.dev_path, sizeof device->device.dev_path, "%s/class/infiniband_verbs/uverbs%u",
                     text("SYSFS", "/sys"), index);
            memcpy(device->device.ibdev_path, path, sizeof path);
        }
        name = strtok_r(NULL, ",", &rest);
    }
    for (; index < MAX_DEVICES; index++)
        devices[index] = NULL;
}

EXPORT struct ibv_device **ibv_get_device_list(int *count) {
    lock();
    make_devices();
    int found = 0;
    struct ibv_device **list = calloc(MAX_DEVICES + 1, sizeof *list);
    for (; found < MAX_DEVICES && devices[found]; found++) {
        devices[found]->references++;
        list[found] = &devices[found]->device;
    }
    unlock();
    if (count)
        *count = found;
    return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list) {
    lock();
    for (struct ibv_device **entry = list; *entry; entry++)
        ((struct device *)*entry)->references--;
    unlock();
    free(list);
}

/* ibv_get_device_list(3): a device is valid until its list is freed, or while it is open. */
static bool is_valid(const struct ibv_device *device, const char *call) {
    bool has_references = ((const struct device *)device)->references;
    return has_references || !misuse(call, "device");
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device) {
    return is_valid(device, "ibv_get_device_name") ? device->name : NULL;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device) {
    if (!is_valid(device, "ibv_open_device"))
        return NULL;
    struct context *context = calloc(1, sizeof *context);
    lock();
    context->magic = IBVERBS_MAGIC;
    context->device = (struct device *)device;
    context->device->references++;
    context->settings = read_settings(context->device->index);
    context->mlx5 = strncmp(device->name, "mlx5", 4) ? NULL : &mlx5_calls;
    context->live = true;
    context->context.device = device;
    context->context.cmd_fd = -1;
    context->context.async_fd = eventfd(0, EFD_CLOEXEC); /* no event ever comes */
    context->context.num_comp_vectors = 1;
    pthread_mutex_init(&context->context.mutex, NULL);
    install_queue_calls(context);
    context->next = contexts;
    contexts = context;
    unlock();
    return &context->context;
}

/* Objects that are left. The kernel destroys them with the file that the context had open. */
static void leak_all(const struct context *context, const char *call) {
    uint64_t left = 0;
    leak_queues(context, call);
    leak_regions(context, call);
    for (struct ah *ah = ahs; ah; ah = ah->next)
        if (ah->live && ah->pd->context == context) {
            ah->live = false;
            left++;
        }
    leak(context, call, "ah", left);
    left = 0;
    for (struct pd *pd = pds; pd; pd = pd->next)
        if (pd->live && pd->context == context) {
            pd->live = false;
            left++;
        }
    leak(context, call, "pd", left);
}

/* ibv_open_device(3): closing does not release what was made by the context, and succeeds. rdma-core,
 * libibverbs/device.c: ibv_close_device always returns 0. So what is left is recorded as leaked. */
EXPORT int ibv_close_device(struct ibv_context *verbs) {
    struct context *context = (struct context *)verbs;
    lock();
    if (!context->live) {
        unlock();
        misuse("ibv_close_device", "context");
        return -1;
    }
    leak_all(context, "ibv_close_device");
    context->live = false;
    context->device->references--;
    close(verbs->async_fd);
    unlock();
    return 0;
}

__attribute__((destructor)) static void at_end(void) {
    for (const struct context *context = contexts; context; context = context->next)
        if (context->live) {
            leak_all(context, "exit");
            leak(context, "exit", "context", 1);
        }
}

EXPORT int ibv_query_device(struct ibv_context *verbs, struct ibv_device_attr *attr) {
    const struct context *context = (struct context *)verbs;
    const struct settings *settings = &context->settings;
    if (!context->live)
        return misuse("ibv_query_device", "context");
    *attr = (struct ibv_device_attr){
        .fw_ver = "28.43.1014",
        .node_guid = htobe64(0x0200000000000000ull + context->device->index + 1),
        .sys_image_guid = htobe64(0x0200000000000000ull + context->device->index + 1),
        .max_mr_size = UINT64_MAX,
        .page_size_cap = 0xfffffffffffff000ull,
        .vendor_id = 0x02c9,
        .vendor_part_id = settings->part,
        .max_qp = 131072,
        .max_qp_wr = (int)settings->depth,
        .device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN | IBV_DEVICE_SRQ_RESIZE,
        .max_sge = 30,
        .max_sge_rd = 30,
        .max_cq = 1 << 24,
        .max_cqe = 4194303,
        .max_mr = (int)settings->regions,
        .max_pd = 1 << 23,
        .max_qp_rd_atom = 16,
        .max_res_rd_atom = 16 * 131072,
        .max_qp_init_rd_atom = 16,
        .atomic_cap = IBV_ATOMIC_HCA,
        .max_ah = INT32_MAX,
        .max_srq = 1 << 23,
        .max_srq_wr = (int)settings->depth - 1,
        .max_srq_sge = 31,
        .max_pkeys = 128,
        .local_ca_ack_delay = 16,
        .phys_port_cnt = 1,
    };
    return 0;
}

static enum ibv_mtu mtu_of(uint32_t bytes) {
    enum ibv_mtu mtu = IBV_MTU_256;
    while (mtu < IBV_MTU_4096 && 256u << mtu <= bytes)
        mtu++;
    return mtu;
}

/* rdma-core, libibverbs/verbs.c: the exported function fills its structure up to `flags`; what follows belongs to
 * later versions. */
EXPORT int ibv_query_port(struct ibv_context *verbs, uint8_t port, struct _compat_ibv_port_attr *out) {
    const struct context *context = (struct context *)verbs;
    const struct settings *settings = &context->settings;
    if (!context->live)
        return misuse("ibv_query_port", "context");
    if (port != 1)
        return refuse(context, "ibv_query_port", IBVERBS_ARGUMENT, EINVAL, "port %u of 1", port);
    struct ibv_port_attr attr = {
        .state = settings->port_state,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = mtu_of(settings->mtu),
        .gid_tbl_len = 16,
        .max_msg_sz = 1u << 30,
        .pkey_tbl_len = (uint16_t)settings->pkeys,
        .lid = settings->is_infiniband ? (uint16_t)(context->device->index + 1) : 0,
        .sm_lid = settings->is_infiniband ? 1 : 0,
        .max_vl_num = 1,
        .active_width = 2, /* 4 lanes */
        .active_speed = 128, /* 100 Gbit/s each */
        .phys_state = settings->port_state == IBV_PORT_ACTIVE ? 5 : 3,
        .link_layer = settings->is_infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET,
        .flags = settings->is_infiniband ? 0 : IBV_QPF_GRH_REQUIRED,
    };
    memcpy(out, &attr, offsetof(struct ibv_port_attr, flags) + 1);
    return 0;
}

/* GIDs: on InfiniBand one; on ethernet a link-local and an IPv4 address, each as RoCE v1 and v2. */
static int find_gid(const struct context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry) {
    const struct settings *settings = &context->settings;
    uint8_t last = (uint8_t)(context->device->index + 1);
    if (port != 1 || index >= 16)
        return EINVAL;
    *entry = (struct ibv_gid_entry){.gid_index = index, .port_num = port};
    if (index >= (settings->is_infiniband ? 1 : 4))
        return ENODATA;
    if (index < 2) {
        static const uint8_t link_local[16] = {0xfe, 0x80, [8] = 2};
        memcpy(entry->gid.raw, link_local, 16);
    } else {
        static const uint8_t ipv4[16] = {[10] = 0xff, 0xff, 192, 0, 2}; /* of TEST-NET-1 */
        memcpy(entry->gid.raw, ipv4, 16);
    }
    if (settings->is_infiniband)
        entry->gid.global.subnet_prefix = htobe64(settings->prefix);
    entry->gid.raw[15] = last;
    if (settings->is_infiniband) {
        entry->gid_type = IBV_GID_TYPE_IB;
    } else {
        char netdev[IF_NAMESIZE];
        value("NETDEV", context->device->index, "lo", netdev, sizeof netdev);
        entry->gid_type = index % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
        entry->ndev_ifindex = if_nametoindex(netdev);
    }
    return 0;
}

/* rdma-core, libibverbs/verbs.c: an empty entry is a GID of zeros; an entry beyond the table is -1. */
EXPORT int ibv_query_gid(struct ibv_context *verbs, uint8_t port, int index, union ibv_gid *gid) {
    const struct context *context = (struct context *)verbs;
    struct ibv_gid_entry entry;
    if (!context->live) {
        misuse("ibv_query_gid", "context");
        return -1;
    }
    int error = find_gid(context, port, (uint32_t)index, &entry);
    if (error == ENODATA)
        memset(gid, 0, sizeof *gid);
    else if (error) {
        refuse(context, "ibv_query_gid", IBVERBS_ARGUMENT, error, "port %u, index %d", port, index);
        return -1;
    } else
        *gid = entry.gid;
    return 0;
}

/* ibv_query_pkey(3); rdma-core, libibverbs/verbs.c: an entry beyond the table is -1. The key is big-endian. */
EXPORT int ibv_query_pkey(struct ibv_context *verbs, uint8_t port, int index, __be16 *pkey) {
    const struct context *context = (struct context *)verbs;
    if (!context->live) {
        misuse("ibv_query_pkey", "context");
        return -1;
    }
    if (port != 1 || index < 0 || (uint32_t)index >= context->settings.pkeys) {
        refuse(context, "ibv_query_pkey", IBVERBS_ARGUMENT, EINVAL, "port %u, index %d", port, index);
        return -1;
    }
    *pkey = htobe16(context->settings.pkey[index]);
    return 0;
}

#ifndef IBVERBS_1_1
/* ibv_query_gid_ex(3): ENODATA for an empty entry; flags must be 0. */
EXPORT int _ibv_query_gid_ex(struct ibv_context *verbs, uint32_t port, uint32_t index, struct ibv_gid_entry *out,
                             uint32_t flags, size_t bytes) {
    const struct context *context = (struct context *)verbs;
    struct ibv_gid_entry entry;
    if (!context->live)
        return misuse("ibv_query_gid_ex", "context");
    int error = flags ? EINVAL : find_gid(context, port, index, &entry);
    if (error == ENODATA)
        return error;
    if (error)
        return refuse(context, "ibv_query_gid_ex", IBVERBS_ARGUMENT, error, "port %u, index %u, flags %u", port, index,
                      flags);
    memcpy(out, &entry, bytes < sizeof entry ? bytes : sizeof entry);
    return 0;
}

/* rdma-core, libibverbs/memory.c. */
EXPORT enum ibv_fork_status ibv_is_fork_initialized(void) {
    if (number("COPY_ON_FORK", 0, 1))
        return IBV_FORK_UNNEEDED;
    return is_fork_safe ? IBV_FORK_ENABLED : IBV_FORK_DISABLED;
}
#endif

/* rdma-core, libibverbs/memory.c: EINVAL once memory was registered without it. */
EXPORT int ibv_fork_init(void) {
    if (is_fork_safe || number("COPY_ON_FORK", 0, 1))
        return 0;
    if (is_too_late)
        return refuse(NULL, "ibv_fork_init", IBVERBS_ARGUMENT, EINVAL, "memory was registered before");
    is_fork_safe = true;
    return 0;
}

void use_of_memory_began(void) {
    if (!is_fork_safe)
        is_too_late = true;
}

EXPORT int ibv_get_async_event(struct ibv_context *verbs, struct ibv_async_event *event) {
    uint64_t ignored;
    (void)event;
    /* As with a device that has no event: it waits, or fails with EAGAIN where async_fd does not block. */
    ssize_t got = read(verbs->async_fd, &ignored, sizeof ignored);
    (void)got;
    return -1;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_SUCCESS: return "success";
    case IBV_WC_LOC_PROT_ERR: return "local protection error";
    case IBV_WC_WR_FLUSH_ERR: return "work request flushed";
    default: return "another status";
    }
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type type) {
    (void)type;
    return "an event, which this double never has";
}

/* ---- protection domains and address handles -------------------------------------------------------------------- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *verbs) {
    struct context *context = (struct context *)verbs;
    static uint32_t handles;
    if (!context->live) {
        misuse("ibv_alloc_pd", "context");
        return NULL;
    }
    struct pd *pd = calloc(1, sizeof *pd);
    lock();
    pd->context = context;
    pd->live = true;
    pd->pd.context = verbs;
    pd->pd.handle = ++handles;
    pd->next = pds;
    pds = pd;
    unlock();
    return &pd->pd;
}

/* kernel, drivers/infiniband/core/uverbs_std_types.c, uverbs_free_pd: EBUSY while anything uses the domain. */
EXPORT int ibv_dealloc_pd(struct ibv_pd *verbs) {
    struct pd *pd = (struct pd *)verbs;
    int error = 0;
    lock();
    if (!pd->live)
        error = misuse("ibv_dealloc_pd", "pd");
    else if (pd->users)
        error = refuse(pd->context, "ibv_dealloc_pd", IBVERBS_BUSY, EBUSY, "%u objects use the domain", pd->users);
    else
        pd->live = false;
    unlock();
    return error;
}

/* ibv_modify_qp(3) and ibv_create_ah(3): a global route is needed where the port says so (IBV_QPF_GRH_REQUIRED). */
int check_address_vector(const struct context *context, const char *call, const struct ibv_ah_attr *attr) {
    struct ibv_gid_entry entry;
    static const union ibv_gid none;
    if (attr->port_num != 1)
        return refuse(context, call, IBVERBS_ARGUMENT, EINVAL, "port %u of 1", attr->port_num);
    if (!attr->is_global && !context->settings.is_infiniband)
        return refuse(context, call, IBVERBS_ARGUMENT, EINVAL, "no global route on ethernet");
    if (!attr->is_global)
        return 0;
    if (find_gid(context, 1, attr->grh.sgid_index, &entry))
        return refuse(context, call, IBVERBS_ARGUMENT, EINVAL, "no GID at index %u", attr->grh.sgid_index);
    if (!memcmp(&attr->grh.dgid, &none, sizeof none))
        return refuse(context, call, IBVERBS_ARGUMENT, EINVAL, "a destination GID of zeros");
    return 0;
}

EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *verbs, struct ibv_ah_attr *attr) {
    struct pd *pd = (struct pd *)verbs;
    struct ah *ah = NULL;
    lock();
    if (!pd->live)
        misuse("ibv_create_ah", "pd");
    else if (!check_address_vector(pd->context, "ibv_create_ah", attr)) {
        ah = calloc(1, sizeof *ah);
        ah->ah = (struct ibv_ah){.context = &pd->context->context, .pd = verbs};
        ah->pd = pd;
        ah->live = true;
        ah->next = ahs;
        ahs = ah;
        pd->users++;
    }
    unlock();
    return ah ? &ah->ah : NULL;
}

EXPORT int ibv_destroy_ah(struct ibv_ah *verbs) {
    struct ah *ah = (struct ah *)verbs;
    int error = 0;
    lock();
    if (!ah->live)
        error = misuse("ibv_destroy_ah", "ah");
    else {
        ah->live = false;
        ah->pd->users--;
    }
    unlock();
    return error;
}
