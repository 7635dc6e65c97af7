/* The EFA double: exported calls, settings, infos. efa.h tells how the parts fit together.
 *
 * Build (one line):
 *   gcc -std=c11 -O2 -g -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -o libefa_double.so
 *       tests/doubles/efa.c tests/doubles/efa_*.c
 * (but not efa_rules*.c, the program that shows each rule to fire). Settings, all optional:
 *
 *   TOKENYARD_EFA_NICS=4            NICs, named rdmap0s0, rdmap1s0 ...
 *   TOKENYARD_EFA_VERSION=2.4       version that the library claims; fabric efa-direct from 2.1
 *   TOKENYARD_EFA_DIRECT=1          0: no efa-direct
 *   TOKENYARD_EFA_DEVICE=0xefa1     device; 0xefa0 and 0xefa1 emulate writes if asked for an API below 1.18
 *   TOKENYARD_EFA_RDMA=1            0: the device has no RDMA write (as on p4d): no FI_RMA on efa-direct, emulated else
 *   TOKENYARD_EFA_DEPTH=4096 _RECEIVES=8192 _CQ=12288 _BATCH=64 _QPS=256 _REGIONS=262144
 *   TOKENYARD_EFA_PAGES=1048576 _TOTAL_PAGES=25165824 _PAGE=4096 _MAX_RDMA=1073741824 _MTU=8928 _POOL=240
 *   TOKENYARD_EFA_UNREACHABLE_MS=300  silence of a dead peer after which writes to it fail
 *   TOKENYARD_EFA_KILLED=0          status of writes to a killed process; 0: 13 if it has answered before, else 15
 *   TOKENYARD_EFA_SEED=1 _REORDER=1 _DUPLICATES=50 _DELAYS=50   disturbances, per 1000 packets and polls
 *   TOKENYARD_EFA_FAIL_UNSOLICITED=N  the N-th immediate that arrives becomes an error without a context
 *   TOKENYARD_EFA_OVERRUN_EVENT=0   1: reads of an overrun queue end with FI_EOVERRUN, as fi_cq(3) says
 *   TOKENYARD_EFA_AUTO=0            1: packets of efa-direct move while nobody polls, by a thread for each domain
 *   TOKENYARD_EFA_LOCAL=0           1: peers are of this host, so the fabric efa takes shm unless it is turned off
 *   TOKENYARD_EFA_SLOTS=32 _PACKET=4096   packets of a link, and their bytes
 *   TOKENYARD_EFA_GPUS=1            0: no CUDA device
 *   TOKENYARD_EFA_P2P=1             0: device and GPUs do not reach each other
 *   TOKENYARD_EFA_DMABUF=1          0: the device takes no dma-buf; N: registrations by dma-buf fail with that errno
 *   TOKENYARD_EFA_PEER_MEMORY=1     0: the kernel registers no GPU memory by address; N: it answers that errno
 *   TOKENYARD_EFA_DMABUF_OFFSET=0   1: dma-bufs at any offset and start, as the source takes them
 *   TOKENYARD_EFA_UNFLUSHED=0       1: writes to a GPU are seen once its endpoint has read from that GPU
 *   TOKENYARD_EFA_LOG=              file for lines of JSON: registrations, refused ones, and reads (efa_double.h)
 *   TOKENYARD_EFA_DIR=/dev/shm _SCOPE=<user id>   where files are; processes of one scope reach each other
 *   FI_EFA_USE_DEVICE_RDMA, FI_EFA_USE_UNSOLICITED_WRITE_RECV, FI_EFA_USE_DATA_PATH_DIRECT,
 *   FI_EFA_ENABLE_SHM_TRANSFER      as in fi_efa(7)
 *   FI_HMEM_DISABLE_P2P             as in fi_mr(3)
 */
#define _GNU_SOURCE
#include "efa.h"

#include <ctype.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define FI_RX_CQ_DATA_MODE (1ULL << 56)

struct config config;
struct tokenyard_double_counts counts = {.bytes = sizeof counts};

EXPORT const struct tokenyard_double_counts *tokenyard_double_counts(void);
const struct tokenyard_double_counts *tokenyard_double_counts(void) { return &counts; }

static uint64_t number(const char *name, uint64_t otherwise) {
    char key[64];
    snprintf(key, sizeof key, "TOKENYARD_EFA_%s", name);
    const char *text = getenv(key);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

/* fi_efa(7), FI_EFA_USE_DEVICE_RDMA: 1/true/yes/on and 0/false/no/off. -1: not set. */
static int truth(const char *name) {
    const char *text = getenv(name);
    if (!text || !*text)
        return -1;
    return !strcmp(text, "1") || !strcasecmp(text, "true") || !strcasecmp(text, "yes") || !strcasecmp(text, "on");
}

static void read_config(void) {
    unsigned major = 2, minor = 4;
    const char *version = getenv("TOKENYARD_EFA_VERSION"), *directory = getenv("TOKENYARD_EFA_DIR");
    const char *scope = getenv("TOKENYARD_EFA_SCOPE"), *log = getenv("TOKENYARD_EFA_LOG");
    if (version)
        sscanf(version, "%u.%u", &major, &minor);
    config.version = FI_VERSION(major, minor);
    config.nics = (uint32_t)number("NICS", 4);
    if (config.nics > EFA_MAX_NICS)
        config.nics = EFA_MAX_NICS;
    config.qps = (uint32_t)number("QPS", EFA_MAX_QPS);
    if (config.qps > EFA_MAX_QPS)
        config.qps = EFA_MAX_QPS;
    config.regions = (uint32_t)number("REGIONS", 262144);
    config.depth = (uint32_t)number("DEPTH", 4096); /* p5; 2048 on p6-b300: kvcache-ai/Mooncake pull request 3296 */
    config.receives = (uint32_t)number("RECEIVES", 8192);
    if (config.depth < 1 || config.depth > 32768 || config.receives < 1)
        abort();
    /* prov/efa/src/efa.h, EFA_DEF_CQ_SIZE: 1024 at tag v2.1.0, 12288 since pull request 11337. */
    config.cq_default = (uint32_t)number("CQ", config.version < FI_VERSION(2, 4) ? 1024 : 12288);
    config.batch = (uint32_t)number("BATCH", 64);
    config.slots = (uint32_t)number("SLOTS", 32);
    config.packet = ((uint32_t)number("PACKET", 4096) + 63) & ~63u;
    config.part_id = (uint32_t)number("DEVICE", 0xefa1);
    config.pages = number("PAGES", 1 << 20);
    config.total_pages = number("TOTAL_PAGES", 24 << 20);
    config.page_bytes = number("PAGE", 4096);
    config.max_rdma = number("MAX_RDMA", 1 << 30);
    config.mtu = number("MTU", 8928);
    config.pool = (uint32_t)number("POOL", 240);
    config.unreachable_ms = (uint32_t)number("UNREACHABLE_MS", 300);
    config.killed_status = (uint32_t)number("KILLED", 0);
    config.rdma = number("RDMA", 1);
    /* prov/efa/src/efa_prov.c: tag v2.1.0 is the first with the fabric efa-direct. */
    config.direct = number("DIRECT", 1) && config.version >= FI_VERSION(2, 1);
    config.overrun_event = number("OVERRUN_EVENT", 0);
    config.unsolicited = truth("FI_EFA_USE_UNSOLICITED_WRITE_RECV") != 0;
    config.is_auto = number("AUTO", 0);
    /* fi_efa(7); tag v2.3.0 is the first with it. */
    config.data_path = truth("FI_EFA_USE_DATA_PATH_DIRECT") != 0 && config.version >= FI_VERSION(2, 3);
    config.shm_transfer = truth("FI_EFA_ENABLE_SHM_TRANSFER") != 0;
    config.is_local = number("LOCAL", 0);
    config.reorder = number("REORDER", 1);
    config.duplicates = (uint32_t)number("DUPLICATES", 50);
    config.delays = (uint32_t)number("DELAYS", 50);
    if (config.delays > 900)
        config.delays = 900;
    config.fail_unsolicited = number("FAIL_UNSOLICITED", 0);
    config.gpus = number("GPUS", 1);
    config.dmabuf = (uint32_t)number("DMABUF", 1);
    config.peer_memory = (uint32_t)number("PEER_MEMORY", 1);
    config.dmabuf_offset = number("DMABUF_OFFSET", 0);
    config.unflushed = number("UNFLUSHED", 0);
    /* prov/efa/src/efa_hmem.c, efa_hmem_info_check_p2p_support_cuda: a buffer of the first GPU is registered as a
     * dma-buf, else by its address. fi_mr(3): FI_HMEM_DISABLE_P2P forbids it. */
    config.p2p_disabled = truth("FI_HMEM_DISABLE_P2P") == 1;
    config.p2p = config.gpus && number("P2P", 1) && (config.dmabuf || config.peer_memory) && !config.p2p_disabled;
    config.seed = number("SEED", 1);
    snprintf(config.directory, sizeof config.directory, "%s", directory ? directory : "/dev/shm");
    snprintf(config.log, sizeof config.log, "%s", log ? log : "");
    if (scope)
        snprintf(config.scope, sizeof config.scope, "%s", scope);
    else
        snprintf(config.scope, sizeof config.scope, "%u", (unsigned)getuid());
}

void load_config(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_config);
}

/* splitmix64. */
uint64_t next_random(uint64_t *state) {
    uint64_t word = (*state += 0x9E3779B97F4A7C15u);
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

bool chance(uint64_t *state, uint32_t per_mille) { return per_mille && next_random(state) % 1000 < per_mille; }

uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now); /* answered without a system call */
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void gid_of_nic(uint32_t nic, uint8_t *gid) {
    static const uint8_t prefix[15] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0xe, 0xfa, 0xd0, 0xb, 0x1e, 0, 0};
    memcpy(gid, prefix, sizeof prefix);
    gid[15] = (uint8_t)(nic + 1);
}

uint32_t nic_of_gid(const uint8_t *gid) {
    uint8_t first[16];
    gid_of_nic(0, first);
    return memcmp(first, gid, 15) || !gid[15] || gid[15] > config.nics ? UINT32_MAX : gid[15] - 1u;
}

void add(uint64_t *count, uint64_t more) { __atomic_fetch_add(count, more, __ATOMIC_RELAXED); }

void refuse(enum tokenyard_double_rule rule) { add(&counts.refused[rule], 1); }

void log_event(const char *event, uint32_t nic, const char *call, const char *more, ...) {
    char line[1024];
    if (!*config.log)
        return;
    int length = snprintf(line, sizeof line, "{\"event\":\"%s\",\"pid\":%d,\"device\":\"rdmap%us0\",\"call\":\"%s\"", event,
                          (int)getpid(), nic, call);
    va_list arguments;
    va_start(arguments, more);
    length += vsnprintf(line + length, sizeof line - (size_t)length, more, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 3)
        abort();
    memcpy(line + length, "}\n", 3);
    /* One write to a file opened with O_APPEND: lines of several processes stay whole. */
    int fd = open(config.log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || write(fd, line, (size_t)length + 2) != length + 2)
        abort();
    close(fd);
}

/* prov/efa/src/efa_errno.h, to_fi_errno. */
int errno_of_status(uint32_t status) {
    switch (status) {
    case 0: return 0;
    case 1: return FI_ECANCELED;
    case 2: case 3: case 4: case 5: case 7: case 18: return FI_EINVAL;
    case 6: case 11: return FI_EMSGSIZE;
    case 8: case 13: case 4124: case 4126: return FI_ECONNABORTED;
    case 9: case 14: return FI_ENOTCONN;
    case 10: return FI_ENORX;
    case 12: return FI_EREMOTEIO;
    case 15: return FI_EHOSTUNREACH;
    case 4105: return FI_ENOMEM;
    default: return FI_EOTHER;
    }
}

const char *text_of_status(uint32_t status) {
    static const char *const texts[] = {
        "no error", "flushed, as the queue pair was destroyed", "internal error of the local queue pair",
        "operation not supported", "bad local address handle", "bad local key, access or address",
        "message longer than the device sends", "bad remote key, access or address", "peer reset the connection",
        "no such queue pair at the peer", "peer has no receive posted", "receive of the peer is too short",
        "peer answered with an unexpected status", "peer does not respond any more",
        "peer has no address handle of this side", "peer never responded", "", "", "peer lacks a feature",
    };
    if (status < sizeof texts / sizeof *texts)
        return texts[status];
    switch (status) {
    case 4111: return "remote address of an emulated operation is not valid";
    case 4124: return "peer does not respond any more, after a handshake";
    case 4126: return "peer does not respond, and made no handshake";
    default: return "unknown status";
    }
}

/* ---- exported calls of libfabric ------------------------------------------------------------------------------- */

EXPORT uint32_t fi_version(void) {
    load_config();
    return config.version;
}

EXPORT const char *fi_strerror(int number) {
    switch (number) {
    case FI_ENOCQ: return "Missing or unavailable completion queue";
    case FI_ENOAV: return "Missing or unavailable address vector";
    case FI_EOVERRUN: return "Queue has been overrun";
    case FI_ENORX: return "Receiver not ready";
    case FI_EAVAIL: return "Error available";
    case FI_ETOOSMALL: return "Provided buffer is too small";
    case FI_EOPBADSTATE: return "Operation not permitted in current state";
    case FI_EBADFLAGS: return "Flags not supported";
    case FI_ENOEQ: return "Missing or unavailable event queue";
    case FI_EOTHER: return "Unspecified error";
    default: return strerror(number);
    }
}

/* Bytes of fi_domain_attr that a caller of the claimed version gives. include/rdma/fabric.h by tag: 192 bytes before
 * v1.20.0, 200 at v1.20.0, 208 at v2.0.0, 224 at v2.5.0. Infos made here have room for more, so that a caller with
 * newer headers finds zeros.
 */
static size_t domain_attr_bytes(void) {
    if (config.version < FI_VERSION(1, 20))
        return 192;
    if (config.version < FI_VERSION(2, 0))
        return 200;
    return config.version < FI_VERSION(2, 5) ? 208 : 224;
}
enum { DOMAIN_ATTR_ROOM = 320 };

static char *copy_text(const char *text) { return text ? strdup(text) : NULL; }

static void *copy_bytes(const void *bytes, size_t count) {
    void *copy = bytes && count ? malloc(count) : NULL;
    return copy ? memcpy(copy, bytes, count) : NULL;
}

static int close_nic(struct fid *fid) {
    struct fid_nic *nic = (struct fid_nic *)fid;
    free(nic->device_attr->name);
    free(nic->device_attr->device_id);
    free(nic->device_attr->device_version);
    free(nic->device_attr->vendor_id);
    free(nic->device_attr->driver);
    free(nic->device_attr->firmware);
    free(nic->link_attr->address);
    free(nic->link_attr->network_type);
    free(nic->device_attr);
    free(nic->bus_attr);
    free(nic->link_attr);
    free(nic);
    return 0;
}

static struct fi_ops nic_ops = {.size = sizeof nic_ops, .close = close_nic};

static struct fid_nic *new_nic(const struct fid_nic *from) {
    struct fid_nic *nic = calloc(1, sizeof *nic);
    nic->fid.fclass = FI_CLASS_NIC;
    nic->fid.ops = &nic_ops;
    nic->device_attr = calloc(1, sizeof *nic->device_attr);
    nic->bus_attr = calloc(1, sizeof *nic->bus_attr);
    nic->link_attr = calloc(1, sizeof *nic->link_attr);
    if (from) {
        *nic->bus_attr = *from->bus_attr;
        *nic->link_attr = *from->link_attr;
        nic->device_attr->name = copy_text(from->device_attr->name);
        nic->device_attr->device_id = copy_text(from->device_attr->device_id);
        nic->device_attr->device_version = copy_text(from->device_attr->device_version);
        nic->device_attr->vendor_id = copy_text(from->device_attr->vendor_id);
        nic->device_attr->driver = copy_text(from->device_attr->driver);
        nic->device_attr->firmware = copy_text(from->device_attr->firmware);
        nic->link_attr->address = copy_text(from->link_attr->address);
        nic->link_attr->network_type = copy_text(from->link_attr->network_type);
    }
    return nic;
}

EXPORT struct fi_info *fi_dupinfo(const struct fi_info *info) {
    load_config();
    struct fi_info *copy = calloc(1, sizeof *copy);
    if (info) {
        *copy = *info;
        copy->next = NULL;
        copy->src_addr = copy_bytes(info->src_addr, info->src_addrlen);
        copy->dest_addr = copy_bytes(info->dest_addr, info->dest_addrlen);
    }
    copy->tx_attr = calloc(1, sizeof *copy->tx_attr);
    copy->rx_attr = calloc(1, sizeof *copy->rx_attr);
    copy->ep_attr = calloc(1, sizeof *copy->ep_attr);
    copy->domain_attr = calloc(1, DOMAIN_ATTR_ROOM);
    copy->fabric_attr = calloc(1, sizeof *copy->fabric_attr);
    copy->nic = info && info->nic ? new_nic(info->nic) : NULL;
    if (!info)
        return copy;
    if (info->tx_attr)
        *copy->tx_attr = *info->tx_attr;
    if (info->rx_attr)
        *copy->rx_attr = *info->rx_attr;
    if (info->ep_attr) {
        *copy->ep_attr = *info->ep_attr;
        copy->ep_attr->auth_key = copy_bytes(info->ep_attr->auth_key, info->ep_attr->auth_key_size);
    }
    if (info->domain_attr) {
        /* Raw bytes, as the caller's structure may be longer than that of the headers at hand. */
        memcpy((uint8_t *)copy->domain_attr, (const uint8_t *)info->domain_attr, domain_attr_bytes());
        copy->domain_attr->name = copy_text(info->domain_attr->name);
        copy->domain_attr->auth_key = copy_bytes(info->domain_attr->auth_key, info->domain_attr->auth_key_size);
    }
    if (info->fabric_attr) {
        *copy->fabric_attr = *info->fabric_attr;
        copy->fabric_attr->name = copy_text(info->fabric_attr->name);
        copy->fabric_attr->prov_name = copy_text(info->fabric_attr->prov_name);
    }
    return copy;
}

EXPORT void fi_freeinfo(struct fi_info *info) {
    while (info) {
        struct fi_info *next = info->next;
        if (info->nic)
            info->nic->fid.ops->close(&info->nic->fid);
        if (info->ep_attr)
            free(info->ep_attr->auth_key);
        if (info->domain_attr) {
            free(info->domain_attr->name);
            free(info->domain_attr->auth_key);
        }
        if (info->fabric_attr) {
            free(info->fabric_attr->name);
            free(info->fabric_attr->prov_name);
        }
        free(info->src_addr);
        free(info->dest_addr);
        free(info->tx_attr);
        free(info->rx_attr);
        free(info->ep_attr);
        free(info->domain_attr);
        free(info->fabric_attr);
        free(info);
        info = next;
    }
}

/* Whether memory of GPUs can be offered. prov/efa/src/efa_prov_info.c, efa_prov_info_direct_set_hmem_flags: efa-direct
 * needs p2p. efa_user_info.c, efa_user_info_should_support_hmem: from API 1.18 the fabric efa copies by CUDA where it
 * must; below, it needs a device with RDMA, and that p2p is not forbidden. */
static bool offers_hmem(uint32_t api, bool is_direct) {
    if (is_direct)
        return config.p2p;
    return config.gpus &&
           (api >= FI_VERSION(1, 18) || (!config.p2p_disabled && config.rdma && uses_device_rdma(api)));
}

/* prov/efa/src/efa_prov_info.c, efa_prov_info_alloc (efa-direct) and efa_prov_info_alloc_for_rdm (efa). */
static struct fi_info *describe(uint32_t version, uint32_t nic, bool is_direct) {
    struct fi_info *info = fi_dupinfo(NULL);
    const uint64_t rma = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    const uint64_t common = FI_MSG | FI_SEND | FI_RECV | FI_SOURCE | FI_LOCAL_COMM | FI_REMOTE_COMM;
    char text[64];
    info->caps = common | (config.rdma || !is_direct ? rma : 0) | (offers_hmem(version, is_direct) ? FI_HMEM : 0);
    if (!is_direct)
        info->caps |= FI_TAGGED | FI_ATOMIC | FI_MULTI_RECV | FI_DIRECTED_RECV;
    info->mode = is_direct ? FI_CONTEXT2 : 0; /* fi_efa(7), Modes */
    info->addr_format = FI_ADDR_EFA;
    info->src_addrlen = EFA_NAME_BYTES;
    info->src_addr = calloc(1, EFA_NAME_BYTES);
    gid_of_nic(nic, info->src_addr);
    info->tx_attr->caps = info->caps & (FI_MSG | FI_SEND | FI_RMA | FI_READ | FI_WRITE | FI_HMEM);
    info->tx_attr->mode = info->mode;
    info->tx_attr->op_flags = FI_INJECT | FI_COMPLETION | FI_TRANSMIT_COMPLETE | FI_DELIVERY_COMPLETE;
    info->tx_attr->msg_order = is_direct ? 0 : FI_ORDER_SAS;
    info->tx_attr->inject_size = is_direct ? 32 : 1024; /* inline_buf_size of the device: 32 bytes */
    info->tx_attr->size = config.depth;
    info->tx_attr->iov_limit = 2;
    info->tx_attr->rma_iov_limit = 1; /* efa-direct takes one buffer of a write: efa_fabric_comparison.md, FI_RMA */
    info->rx_attr->caps = info->caps & (FI_MSG |
                                        FI_RECV | FI_RMA | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_SOURCE | FI_HMEM);
    info->rx_attr->mode = info->mode;
    info->rx_attr->op_flags = FI_COMPLETION;
    info->rx_attr->msg_order = info->tx_attr->msg_order;
    info->rx_attr->size = config.receives;
    info->rx_attr->iov_limit = is_direct ? 1 : 2;
    info->ep_attr->type = FI_EP_RDM;
    info->ep_attr->protocol = FI_PROTO_EFA;
    info->ep_attr->protocol_version = is_direct ? 1 : 4;
    /* fi_efa(7): messages of efa-direct have at most the MTU, writes the device's largest RDMA; max_msg_size is the
     * larger of both. */
    info->ep_attr->max_msg_size = is_direct ? (config.rdma ? config.max_rdma : config.mtu) : SIZE_MAX;
    info->ep_attr->tx_ctx_cnt = info->ep_attr->rx_ctx_cnt = 1;
    struct fi_domain_attr *domain = info->domain_attr;
    snprintf(text, sizeof text, "rdmap%us0-rdm", nic);
    domain->name = strdup(text);
    domain->threading = FI_THREAD_SAFE;
    domain->control_progress = domain->data_progress = is_direct ? FI_PROGRESS_AUTO : FI_PROGRESS_MANUAL;
    domain->resource_mgmt = FI_RM_ENABLED;
    domain->av_type = FI_AV_TABLE;
    domain->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | (is_direct ? FI_MR_LOCAL : 0) |
                      (info->caps & FI_HMEM ? FI_MR_HMEM : 0);
    domain->mr_key_size = 4; /* sizeof of ibv_sge.lkey */
    domain->cq_data_size = 4;
    domain->cq_cnt = 512;
    domain->ep_cnt = config.qps;
    domain->tx_ctx_cnt = domain->rx_ctx_cnt = config.qps;
    domain->max_ep_tx_ctx = domain->max_ep_rx_ctx = 1;
    domain->mr_iov_limit = 1;
    domain->caps = FI_LOCAL_COMM | FI_REMOTE_COMM;
    domain->mr_cnt = config.regions;
    info->fabric_attr->name = strdup(is_direct ? "efa-direct" : "efa");
    info->fabric_attr->prov_name = strdup("efa");
    info->fabric_attr->prov_version = config.version;
    info->fabric_attr->api_version = version;
    info->nic = new_nic(NULL);
    struct fi_device_attr *device = info->nic->device_attr;
    snprintf(text, sizeof text, "rdmap%us0", nic);
    device->name = strdup(text);
    snprintf(text, sizeof text, "0x%x", config.part_id);
    device->device_id = strdup(text);
    device->device_version = strdup("0");
    device->vendor_id = strdup("0x1d0f");
    device->driver = strdup("efa");
    device->firmware = strdup("double");
    info->nic->bus_attr->bus_type = FI_BUS_PCI;
    info->nic->bus_attr->attr.pci = (struct fi_pci_attr){.domain_id = 0, .bus_id = (uint8_t)nic, .device_id = 0};
    snprintf(text, sizeof text, "EFA-fe80::efa:d00b:1e00:%x", nic + 1);
    info->nic->link_attr->address = strdup(text);
    info->nic->link_attr->mtu = config.mtu;
    info->nic->link_attr->speed = 100000000000u;
    info->nic->link_attr->state = FI_LINK_UP;
    info->nic->link_attr->network_type = strdup("Ethernet");
    return info;
}

/* Whether an info serves the hints: fi_getinfo(3), and prov/efa/src/efa_user_info.c. Fields of fi_domain_attr beyond
 * those of version 1.17 are never read. */
static bool serves(struct fi_info *info, const struct fi_info *hints, bool is_direct) {
    if (!hints)
        return true;
    if (hints->caps & ~info->caps)
        return false;
    if (info->mode & ~hints->mode) /* efa-direct: FI_CONTEXT2 */
        return false;
    if (hints->addr_format != FI_FORMAT_UNSPEC && hints->addr_format != FI_ADDR_EFA)
        return false;
    const struct fi_fabric_attr *fabric = hints->fabric_attr;
    if (fabric && fabric->name && strcmp(fabric->name, info->fabric_attr->name))
        return false;
    if (fabric && fabric->prov_name && strcmp(fabric->prov_name, "efa"))
        return false;
    const struct fi_ep_attr *ep = hints->ep_attr;
    if (ep && ((ep->type != FI_EP_UNSPEC && ep->type != FI_EP_RDM) || ep->max_msg_size > info->ep_attr->max_msg_size))
        return false;
    /* efa_user_info_alter_direct: without FI_RMA, only messages bound the size. */
    if (is_direct && hints->caps && !(hints->caps & FI_RMA)) {
        if (ep && ep->max_msg_size > config.mtu)
            return false;
        info->ep_attr->max_msg_size = config.mtu;
    }
    const struct fi_tx_attr *tx = hints->tx_attr;
    const struct fi_rx_attr *rx = hints->rx_attr;
    if (tx && (tx->size > info->tx_attr->size || tx->inject_size > info->tx_attr->inject_size ||
               tx->iov_limit > info->tx_attr->iov_limit || tx->rma_iov_limit > info->tx_attr->rma_iov_limit ||
               (tx->msg_order & ~info->tx_attr->msg_order) || (tx->caps & ~info->caps)))
        return false;
    if (rx && (rx->size > info->rx_attr->size || rx->iov_limit > info->rx_attr->iov_limit ||
               (rx->msg_order & ~info->rx_attr->msg_order) || (rx->caps & ~info->caps)))
        return false;
    const struct fi_domain_attr *domain = hints->domain_attr;
    if (domain) {
        if (domain->name && strcmp(domain->name, info->domain_attr->name))
            return false;
        /* FI_MR_HMEM is needed only with FI_HMEM: efa_user_info_alter_direct. */
        int needed = info->domain_attr->mr_mode & ~(hints->caps & FI_HMEM ? 0 : FI_MR_HMEM);
        if (needed & ~domain->mr_mode)
            return false;
        if (domain->cq_data_size > info->domain_attr->cq_data_size ||
            domain->mr_key_size > info->domain_attr->mr_key_size)
            return false;
        if (domain->data_progress == FI_PROGRESS_AUTO && !is_direct)
            return false;
        if (domain->threading != FI_THREAD_UNSPEC)
            info->domain_attr->threading = domain->threading;
    }
    if (hints->caps) {
        info->caps &= hints->caps | FI_LOCAL_COMM | FI_REMOTE_COMM;
        /* fi_getinfo(3): a direction that is named excludes those that are not. prov/util/src/util_attr.c,
         * ofi_get_caps. */
        const uint64_t rma = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        if ((hints->caps & FI_RMA) && !(hints->caps & rma))
            info->caps |= rma;
        if ((hints->caps & FI_MSG) && !(hints->caps & (FI_SEND | FI_RECV)))
            info->caps |= FI_SEND | FI_RECV;
    }
    if (!(hints->caps & FI_HMEM)) {
        info->caps &= ~FI_HMEM;
        info->domain_attr->mr_mode &= ~FI_MR_HMEM;
    }
    info->tx_attr->caps &= info->caps;
    info->rx_attr->caps &= info->caps;
    if (is_direct && (hints->mode & FI_RX_CQ_DATA_MODE)) {
        info->mode |= FI_RX_CQ_DATA_MODE;
        info->rx_attr->mode |= FI_RX_CQ_DATA_MODE;
    }
    /* efa_user_info_alter_direct: without unsolicited receives, writes with data need FI_RX_CQ_DATA. */
    if (is_direct && !config.unsolicited && (hints->caps & FI_RMA) && !(hints->mode & FI_RX_CQ_DATA_MODE))
        return false;
    /* efa_user_info.c, efa_get_user_info: asked for remote communication alone, the fabric efa leaves the other out. */
    if (!is_direct && (hints->caps & FI_REMOTE_COMM) && !(hints->caps & FI_LOCAL_COMM))
        info->caps &= ~FI_LOCAL_COMM;
    if (!is_direct && domain && (domain->mr_mode & FI_MR_LOCAL))
        info->domain_attr->mr_mode |= FI_MR_LOCAL;
    if (tx && tx->size)
        info->tx_attr->size = tx->size;
    if (rx && rx->size)
        info->rx_attr->size = rx->size;
    if (tx && tx->op_flags)
        info->tx_attr->op_flags = tx->op_flags;
    return true;
}

EXPORT int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                      const struct fi_info *hints, struct fi_info **out) {
    struct fi_info **last = out;
    (void)node;
    (void)service;
    (void)flags;
    load_config();
    *out = NULL;
    if (FI_MAJOR(version) > FI_MAJOR(config.version) || version > config.version)
        return -FI_ENOSYS; /* fi_getinfo(3): the version asked for is newer than the library */
    /* prov/efa/src/efa_prov.c lists all infos of efa-direct first. */
    for (int is_direct = config.direct; is_direct >= 0; is_direct--)
        for (uint32_t nic = 0; nic < config.nics; nic++) {
            struct fi_info *info = describe(version, nic, is_direct);
            if (!serves(info, hints, is_direct)) {
                fi_freeinfo(info);
                continue;
            }
            *last = info;
            last = &info->next;
        }
    return *out ? 0 : -FI_ENODATA;
}
