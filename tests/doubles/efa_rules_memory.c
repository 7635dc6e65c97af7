/* Rules of GPU memory and of reads; part of efa_rules.c's program. */
#define _GNU_SOURCE
#include "efa_rules_rig.h"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* What a GPU's memory looks like to this process: an address at which nothing is mapped. */
#define NOWHERE ((uint8_t *)0x700000000000)
enum { GPU = 64 << 10, LOCAL = FI_SEND | FI_WRITE | FI_READ };

static int gpu_memory(const char *name) {
    int fd = memfd_create(name, MFD_CLOEXEC);
    CHECK(fd >= 0 && !ftruncate(fd, GPU), "memfd");
    return fd;
}

static uint8_t byte_at(int fd, off_t offset) {
    uint8_t byte;
    CHECK(pread(fd, &byte, 1, offset) == 1, "pread");
    return byte;
}

/* ---- offers ---------------------------------------------------------------------------------------------------- */

static int offer(uint32_t api, const char *fabric, uint64_t caps, uint64_t modes, struct fi_info **info) {
    struct fi_info *hints = lib.dupinfo(NULL);
    hints->caps = caps;
    hints->mode = FI_CONTEXT2;
    hints->domain_attr->mr_mode = (int)modes;
    hints->fabric_attr->name = strdup(fabric);
    int answer = lib.getinfo(api, NULL, NULL, 0, hints, info);
    lib.freeinfo(hints);
    return answer;
}

static const uint64_t RMA = FI_MSG | FI_RMA;

static void gpus_are_offered_if_asked_for(int rank) {
    (void)rank;
    const char *fabrics[] = {"efa-direct", "efa"};
    struct fi_info *info;
    for (int i = 0; i < 2; i++) {
        CHECK(offer(FI_VERSION(2, 1), fabrics[i], RMA | FI_HMEM, MODES & ~FI_MR_HMEM, &info) == -FI_ENODATA,
              "FI_HMEM without FI_MR_HMEM");
        CHECK(offer(FI_VERSION(2, 1), fabrics[i], RMA | FI_HMEM, MODES, &info) == 0, "FI_HMEM");
        CHECK((info->caps & FI_HMEM) && (info->tx_attr->caps & FI_HMEM) && (info->rx_attr->caps & FI_HMEM) &&
              (info->domain_attr->mr_mode & FI_MR_HMEM), "FI_HMEM is not in the offer");
        lib.freeinfo(info);
        CHECK(offer(FI_VERSION(2, 1), fabrics[i], RMA, MODES, &info) == 0, "without FI_HMEM");
        CHECK(!((info->caps | info->tx_attr->caps | info->rx_attr->caps) & FI_HMEM) &&
              !(info->domain_attr->mr_mode & FI_MR_HMEM), "FI_HMEM is offered unasked");
        CHECK(info->caps & FI_READ && info->caps & FI_REMOTE_READ, "FI_RMA alone has all directions");
        lib.freeinfo(info);
        CHECK(offer(FI_VERSION(2, 1), fabrics[i], RMA | FI_WRITE | FI_REMOTE_WRITE, MODES, &info) == 0, "writes");
        CHECK(!(info->caps & (FI_READ | FI_REMOTE_READ)) && !(info->tx_attr->caps & FI_READ),
              "reads are offered where writes alone are named");
        lib.freeinfo(info);
    }
    CHECK(lib.getinfo(FI_VERSION(2, 1), NULL, NULL, 0, NULL, &info) == 0 && (info->caps & FI_HMEM),
          "without hints all is offered");
    lib.freeinfo(info);
    CHECK(offer(FI_VERSION(1, 17), "efa", RMA | FI_HMEM, MODES, &info) == -FI_ENODATA,
          "API 1.17 uses no RDMA of this device, and so reaches no GPU");
}

static void gpus_need_p2p_on_efa_direct(int rank) {
    (void)rank;
    struct fi_info *info;
    struct side side = {.api = FI_VERSION(1, 18)};
    struct fid_mr *mr;
    if (getenv("TOKENYARD_EFA_QPS")) /* stands for a switch of libfabric's, which has another prefix */
        setenv("FI_HMEM_DISABLE_P2P", "1", 1);
    CHECK(offer(FI_VERSION(2, 1), "efa-direct", RMA | FI_HMEM, MODES, &info) == -FI_ENODATA, "efa-direct without p2p");
    CHECK(offer(FI_VERSION(2, 1), "efa-direct", RMA, MODES, &info) == 0, "efa-direct for memory of the host");
    lib.freeinfo(info);
    int expected = getenv("FI_HMEM_DISABLE_P2P") ? -FI_ENODATA : 0;
    CHECK(offer(FI_VERSION(1, 17), "efa", RMA | FI_HMEM, MODES, &info) == expected, "API 1.17 on efa");
    open_side(&side, 0, "efa", 0); /* with FI_HMEM: efa copies by CUDA */
    CHECK(register_gpu(&side, NOWHERE, GPU, FI_REMOTE_WRITE, &mr) == 0 && mr->key > UINT32_MAX,
          "the device registers memory that it does not reach");
    mr->fid.ops->close(&mr->fid);
    int mode = FI_HMEM_P2P_REQUIRED;
    CHECK(side.ep->ops->setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &mode, sizeof mode) ==
          -FI_EOPNOTSUPP, "p2p is promised");
}

static void no_gpus(int rank) {
    (void)rank;
    struct side side = {.no_hmem = true};
    struct fi_info *info;
    struct fid_mr *mr;
    CHECK(offer(FI_VERSION(2, 1), "efa-direct", RMA | FI_HMEM, MODES, &info) == -FI_ENODATA, "efa-direct without GPUs");
    CHECK(offer(FI_VERSION(2, 1), "efa", RMA | FI_HMEM, MODES, &info) == -FI_ENODATA, "efa without GPUs");
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_gpu(&side, side.memory, 4096, FI_REMOTE_WRITE, &mr) == -FI_ENOSYS, "memory of a GPU without GPUs");
}

/* ---- registration ---------------------------------------------------------------------------------------------- */

static void gpu_memory_without_hmem_is_the_systems(int rank) {
    (void)rank;
    struct side side = {.no_hmem = true};
    struct fid_mr *mr;
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_gpu(&side, NOWHERE, GPU, FI_REMOTE_WRITE, &mr) == -FI_EFAULT, "memory that has no pages");
    CHECK(register_dma_buf(&side, gpu_memory("gpu"), 0, GPU, NOWHERE, &mr) == -FI_EBADFLAGS,
          "a dma-buf without FI_HMEM");
    void *reserved = mmap(NULL, GPU, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(register_at(&side, reserved, GPU, FI_SEND, &mr) == -FI_EFAULT, "memory that may not be read");
    CHECK(!mprotect(reserved, GPU, PROT_READ) && register_at(&side, reserved, GPU, FI_REMOTE_WRITE, &mr) == -FI_EFAULT,
          "memory that may not be written");
    CHECK(register_at(&side, reserved, GPU, FI_SEND, &mr) == 0, "memory that is only read");
    CHECK(COUNTS->refused[RULE_REGIONS] == 4, "refusals are counted");
}

static void gpu_memory_by_address(int rank) {
    (void)rank;
    struct side side = {0};
    struct fid_mr *mr, *mapped;
    const char *peer_memory = getenv("TOKENYARD_EFA_PEER_MEMORY"), *dma_buf = getenv("TOKENYARD_EFA_DMABUF");
    open_side(&side, 0, "efa-direct", 0);
    int answer = register_gpu(&side, NOWHERE, GPU, FI_REMOTE_WRITE, &mr);
    if (lib.version() >= FI_VERSION(2, 5) && !(dma_buf && !strcmp(dma_buf, "0"))) {
        CHECK(answer == (dma_buf ? -FI_EIO : 0), "the provider's own dma-buf: %d", answer);
        return;
    }
    if (peer_memory) {
        CHECK(answer == (strcmp(peer_memory, "0") ? -FI_ENOMEM : -FI_EFAULT), "without peer memory: %d", answer);
        CHECK(register_dma_buf(&side, gpu_memory("gpu"), 0, GPU, NOWHERE, &mr) == 0, "a dma-buf then");
        return;
    }
    CHECK(answer == 0, "by peer memory: %d", answer);
    fi_addr_t self = insert_name(&side, side.name);
    put(&side, self, 0, 32, (uint64_t)(uintptr_t)NOWHERE + 8, mr->key, 0, 0, new_context());
    expect_done(&side, "a write to memory that nobody finds");
    uint8_t *memory = mmap(NULL, GPU, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(register_gpu(&side, memory, GPU, FI_REMOTE_WRITE, &mapped) == 0, "memory that is mapped");
    memset(side.memory, 0x5a, 32);
    put(&side, self, 0, 32, (uint64_t)(uintptr_t)memory + 8, mapped->key, 0, 0, new_context());
    expect_done(&side, "a write to memory that is mapped");
    CHECK(memory[8] == 0x5a && memory[39] == 0x5a && !memory[40], "its bytes");
    if (dma_buf)
        CHECK(register_dma_buf(&side, gpu_memory("gpu"), 0, GPU, NOWHERE, &mr) == -FI_EOPNOTSUPP,
              "a device that takes no dma-buf");
}

static void device_refuses_dma_bufs(int rank) {
    (void)rank;
    struct side side = {0};
    struct fid_mr *mr;
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_dma_buf(&side, gpu_memory("gpu"), 0, GPU, NOWHERE, &mr) == -FI_EIO, "a dma-buf");
}

static void dma_bufs_are_checked(int rank) {
    (void)rank;
    struct side side = {0}, old = {.api = FI_VERSION(1, 19)};
    struct fid_mr *mr;
    FILE *file = tmpfile();
    bool any_offset = getenv("TOKENYARD_EFA_DMABUF_OFFSET");
    int gpu = gpu_memory("gpu"), named = gpu_memory("gpu@700000000000"), odd = gpu_memory("odd");
    CHECK(!ftruncate(odd, GPU + 100) && file && !ftruncate(fileno(file), GPU), "files");
    open_side(&side, 0, "efa-direct", 0);
    open_side(&old, 1, "efa", 0);
    const struct { struct side *side; int fd; uint64_t offset; size_t bytes; uint8_t *base; int answer; const char *what; }
    cases[] = {
        {&old, gpu, 0, GPU, NOWHERE, FI_EBADFLAGS, "a dma-buf of API 1.19"},
        {&side, 987, 0, GPU, NOWHERE, FI_EBADF, "a descriptor that is not open"},
        {&side, -1, 0, GPU, NOWHERE, FI_EBADF, "no descriptor"},
        {&side, fileno(file), 0, GPU, NOWHERE, FI_EINVAL, "a file"},
        {&side, gpu, 0, GPU + 1, NOWHERE, FI_EINVAL, "more than the descriptor has"},
        {&side, gpu, 0, 0, NOWHERE, FI_EINVAL, "nothing"},
        {&side, gpu, 0, GPU, NOWHERE + 8, FI_EINVAL, "a start within a page"},
        {&side, odd, 0, GPU, NOWHERE, FI_EINVAL, "an export of a broken number of pages"},
        {&side, gpu, 4096, 4096, NOWHERE, any_offset ? 0 : FI_EINVAL, "an offset"},
        {&side, named, 0, GPU, NOWHERE + 4096, any_offset ? 0 : FI_EINVAL, "another start than that of the export"},
        {&side, named, 0, GPU, NOWHERE, 0, "the export"},
        {&side, named, 0, GPU, NULL, 0, "the export, without an address"},
        {&side, gpu, 0, 100, NOWHERE, 0, "a part of the export"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int answer = register_dma_buf(cases[i].side, cases[i].fd, cases[i].offset, cases[i].bytes, cases[i].base, &mr);
        CHECK(answer == -cases[i].answer, "%s: %d", cases[i].what, answer);
    }
    struct { int fd; uint64_t offset; size_t bytes; void *base; } buffer = {gpu, 0, GPU, NOWHERE};
    struct fi_mr_attr attr = {.mr_iov = (void *)&buffer, .iov_count = 2, .access = FI_SEND, .iface = FI_HMEM_CUDA};
    CHECK(side.domain->mr->regattr(&side.domain->fid, &attr, DMABUF, &mr) == -FI_EINVAL, "two ranges");
    attr.iov_count = 1;
    CHECK(side.domain->mr->regattr(&side.domain->fid, &attr, DMABUF | 1ULL << 50, &mr) == -FI_EBADFLAGS, "a flag");
    attr.iface = FI_HMEM_ROCR;
    CHECK(side.domain->mr->regattr(&side.domain->fid, &attr, DMABUF, &mr) == -FI_ENOSYS, "another maker's GPU");
    attr.iface = 99;
    CHECK(side.domain->mr->regattr(&side.domain->fid, &attr, DMABUF, &mr) == -FI_EINVAL, "no interface");
}

static bool is_logged(const char *path, const char *const *words) {
    FILE *file = fopen(path, "r");
    char line[1024];
    bool is_found = false;
    while (file && !is_found && fgets(line, sizeof line, file)) {
        CHECK(line[0] == '{' && !strcmp(line + strlen(line) - 2, "}\n"), "a line of the log: %s", line);
        is_found = true;
        for (const char *const *word = words; *word; word++)
            is_found &= strstr(line, *word) != NULL;
    }
    if (file)
        fclose(file);
    return is_found;
}

#define LOGGED(path, ...) is_logged(path, (const char *const[]){__VA_ARGS__, NULL})

static void registrations_are_recorded(int rank) {
    (void)rank;
    char path[64], key[32];
    struct side side = {0};
    struct fid_mr *mr, *none;
    snprintf(path, sizeof path, "/tmp/efa_rules.%d", (int)getpid());
    setenv("TOKENYARD_EFA_LOG", path, 1);
    open_side(&side, 2, "efa-direct", 0);
    int fd = gpu_memory("gpu");
    CHECK(register_dma_buf(&side, fd, 0, 8192, NOWHERE, &mr) == 0, "registering");
    struct tokenyard_double_region region;
    CHECK(lib.region(mr->key, &region) == 0 && region.fd == fd && region.fd_bytes == GPU &&
          region.base == (uint64_t)(uintptr_t)NOWHERE, "the region");
    snprintf(key, sizeof key, "\"key\":%llu}", (unsigned long long)mr->key);
    const char *fields = "\"kind\":\"dmabuf\",\"iface\":\"cuda\",\"hmem_device\":0,\"fd\":";
    const char *rest = "\"fd_bytes\":65536,\"fd_name\":\"/memfd:gpu (deleted)\",\"offset\":0,\"length\":8192,"
                       "\"base\":123145302310912,\"access\":";
    CHECK(LOGGED(path, "{\"event\":\"register\",", "\"device\":\"rdmap2s0\",\"call\":\"fi_mr_regattr\"", fields, rest,
                 "\"requested_key\":77", key), "the registration");
    CHECK(!LOGGED(path, "{\"event\":\"deregister\","), "nothing is closed");
    close(fd);
    mr->fid.ops->close(&mr->fid);
    CHECK(LOGGED(path, "{\"event\":\"deregister\",", fields, rest, key), "its end");
    CHECK(register_dma_buf(&side, -1, 0, 8192, NOWHERE, &none) == -FI_EBADF, "no descriptor");
    CHECK(LOGGED(path, "{\"event\":\"refuse\",", "\"rule\":\"regions\",\"errno\":9"), "the refusal");
    CHECK(LOGGED(path, "\"call\":\"fi_mr_reg\"", "\"kind\":\"host\",\"iface\":\"system\""), "memory of the host");
    unlink(path);
}

/* ---- bytes ----------------------------------------------------------------------------------------------------- */

/* From GPU to GPU of two processes, by addresses that neither has mapped. */
static void gpus_of_two_processes(int rank) {
    struct side side = {0};
    struct fid_mr *mr;
    fi_addr_t peers[3];
    int fd = gpu_memory("gpu");
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_dma_buf(&side, fd, 0, GPU, NOWHERE, &mr) == 0, "registering");
    close(dup(fd));
    rig->words[rank][0] = mr->key;
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        for (int i = 0; i < 20000; i++) {
            uint8_t byte = (uint8_t)(i * 7 | 1);
            CHECK(pwrite(fd, &byte, 1, 100 + i) == 1, "pwrite");
        }
        struct iovec iov = {.iov_base = NOWHERE + 100, .iov_len = 20000};
        struct fi_rma_iov target = {.addr = (uint64_t)(uintptr_t)NOWHERE + 5000, .len = 20000, .key = rig->words[1][0]};
        void *desc = mr->mem_desc;
        struct fi_msg_rma write = {.msg_iov = &iov, .desc = &desc, .iov_count = 1, .addr = peers[1], .data = 5,
                                   .rma_iov = &target, .rma_iov_count = 1, .context = new_context()};
        iov.iov_len = 16;
        CHECK(side.ep->rma->writemsg(side.ep, &write, FI_INJECT) == -FI_EINVAL, "no inline writes at this version");
        iov.iov_len = 20000;
        CHECK(side.ep->rma->writemsg(side.ep, &write, FI_REMOTE_CQ_DATA) == 0, "posting");
        expect_done(&side, "the write");
    } else {
        struct fi_cq_data_entry entry;
        CHECK(poll_side(&side, &entry, NULL, PATIENCE_MS) == 1 && entry.data == 5, "the immediate");
        for (int i = 0; i < 20000; i++)
            CHECK(byte_at(fd, 5000 + i) == (uint8_t)(i * 7 | 1), "byte %d", i);
        CHECK(!byte_at(fd, 4999) && !byte_at(fd, 25000), "a byte beside");
    }
    finish(&side);
}

static void reads_bring_bytes(int rank) {
    struct side side = {0};
    struct fid_mr *local, *remote;
    struct fi_cq_data_entry entry;
    fi_addr_t peers[3];
    static uint8_t memory[2][40000];
    open_side(&side, 0, getenv("TOKENYARD_EFA_POOL") ? "efa" : "efa-direct", 0);
    for (size_t i = 0; i < sizeof memory[1]; i++)
        memory[1][i] = (uint8_t)(i * 11 + (size_t)rank * 3);
    CHECK(register_at(&side, memory[0], sizeof memory[0], FI_READ, &local) == 0 &&
          register_at(&side, memory[1], sizeof memory[1], FI_REMOTE_READ, &remote) == 0, "registering");
    rig->words[rank][0] = remote->key, rig->words[rank][1] = (uint64_t)(uintptr_t)memory[1];
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    for (int round = 0; rank == 0 && round < 60; round++) {
        int from = round % 2;
        size_t bytes = 1 + (size_t)(round * 7919) % 30000, at = (size_t)(round * 101) % 10000;
        memset(memory[0], 0xee, sizeof memory[0]);
        CHECK(get(&side, peers[from], memory[0] + at, bytes, local->mem_desc, rig->words[from][1] + at,
                  rig->words[from][0]) == 0, "posting");
        CHECK(poll_side(&side, &entry, NULL, PATIENCE_MS) == 1 && (entry.flags & FI_READ) && (entry.flags & FI_RMA),
              "the read of round %d", round);
        for (size_t i = 0; i < sizeof memory[0]; i++) {
            bool is_read = i >= at && i < at + bytes;
            CHECK(memory[0][i] == (is_read ? (uint8_t)(i * 11 + (size_t)from * 3) : 0xee), "byte %zu of round %d", i,
                  round);
        }
    }
    if (rank == 0) { /* several at once, among writes */
        memset(memory[0], 0xee, sizeof memory[0]);
        for (int i = 0; i < 40; i++) {
            CHECK(get(&side, peers[1], memory[0] + i * 1000, 1000, local->mem_desc, rig->words[1][1] + (uint64_t)i * 1000,
                      rig->words[1][0]) == 0, "posting");
            write_to(&side, peers, 1, 5000, 0);
        }
        for (int i = 0; i < 80; i++)
            expect_done(&side, "a read or a write");
        for (size_t i = 0; i < sizeof memory[0]; i++)
            CHECK(memory[0][i] == (uint8_t)(i * 11 + 3), "byte %zu of many reads", i);
        CHECK(get(&side, peers[1], memory[0], 0, local->mem_desc, rig->words[1][1], rig->words[1][0]) == 0, "posting");
        expect_done(&side, "a read of nothing");
    }
    finish(&side);
}

static void reads_are_checked(int rank) {
    struct side side = {0};
    struct fid_mr *local, *other;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_at(&side, side.memory, 4096, FI_READ | FI_REMOTE_READ, &local) == 0, "registering");
    CHECK(register_at(&side, side.memory, 4096, LOCAL & ~FI_READ, &other) == 0, "registering");
    rig->words[rank][0] = local->key;
    share(&side, rank, 0), barrier();
    if (rank == 0) {
        exchange(&side, 2, rank, peers);
        uint64_t base = rig->side[1][0].base, key = rig->words[1][0];
        CHECK(get(&side, peers[1], side.memory, 8, local->mem_desc, base, key) == 0, "posting");
        expect_error(&side, 14, FI_ENOTCONN, "a read of a peer that does not know this side");
        barrier(), barrier();
        CHECK(get(&side, peers[1], side.memory, 8, NULL, base, key) == -FI_EINVAL, "a read without a descriptor");
        struct iovec iov[2] = {{side.memory, 8}, {side.memory + 8, 8}};
        void *desc[2] = {local->mem_desc, local->mem_desc};
        CHECK(side.ep->rma->readv(side.ep, iov, desc, 2, peers[1], base, key, new_context()) == -FI_EINVAL,
              "a read into two buffers");
        struct fi_rma_iov from[2] = {{base, 8, key}, {base, 8, key}};
        struct fi_msg_rma read = {.msg_iov = iov, .desc = desc, .iov_count = 1, .addr = peers[1], .rma_iov = from,
                                  .rma_iov_count = 2, .context = new_context()};
        CHECK(side.ep->rma->readmsg(side.ep, &read, 0) == -FI_EINVAL, "a read of two ranges");
        read.rma_iov_count = 1;
        CHECK(side.ep->rma->readmsg(side.ep, &read, 0) == 0, "posting");
        expect_done(&side, "a good read");
        get(&side, peers[1], side.memory, 8, other->mem_desc, base, key);
        expect_error(&side, 5, FI_EINVAL, "a read into a region without FI_READ");
        get(&side, peers[1], side.memory + 4092, 8, local->mem_desc, base, key);
        expect_error(&side, 5, FI_EINVAL, "a read beyond the buffer's region");
        memset(side.memory, 0x33, 8);
        get(&side, peers[1], side.memory, 8, local->mem_desc, base, rig->side[1][0].key);
        expect_error(&side, 7, FI_EINVAL, "a read of a region without FI_REMOTE_READ");
        CHECK(side.memory[0] == 0x33 && side.memory[7] == 0x33, "a refused read writes to its buffer");
        get(&side, peers[1], side.memory, 8, local->mem_desc, base + 4089, key);
        expect_error(&side, 7, FI_EINVAL, "a read beyond the region");
        get(&side, peers[1], side.memory, 4096, local->mem_desc, base, key);
        expect_error(&side, 6, FI_EMSGSIZE, "a read of more than the device reads");
    } else {
        pump_until_barrier(&side);
        exchange(&side, 2, rank, peers);
        barrier();
    }
    finish(&side);
}

static void reads_must_be_asked_for(int rank) {
    struct side side = {.rma = rank ? FI_READ | FI_WRITE : FI_WRITE | FI_REMOTE_WRITE};
    struct fid_mr *mr;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_at(&side, side.memory, 4096, FI_READ | FI_REMOTE_READ, &mr) == 0, "registering");
    rig->words[rank][0] = mr->key;
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        CHECK(get(&side, peers[1], side.memory, 8, mr->mem_desc, rig->side[1][0].base, rig->words[1][0]) ==
              -FI_EOPNOTSUPP, "a read of an endpoint without FI_READ");
    } else {
        get(&side, peers[1], side.memory, 8, mr->mem_desc, side.base, mr->key);
        expect_error(&side, 7, FI_EINVAL, "a read from an endpoint without FI_REMOTE_READ");
    }
    finish(&side);
}

/* Immediates overtake their bytes on the way to a GPU, and a read of that GPU brings the bytes. */
static void unflushed_writes_are_not_seen(int rank) {
    struct side side = {0};
    struct fid_mr *gpu, *second, *local;
    struct fi_cq_data_entry entry;
    fi_addr_t peers[3];
    int fd = gpu_memory("gpu");
    static uint8_t flush[8];
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_dma_buf(&side, fd, 0, GPU, NOWHERE, &gpu) == 0, "registering");
    struct iovec iov = {.iov_base = NOWHERE + GPU, .iov_len = GPU};
    struct fi_mr_attr attr = {.mr_iov = &iov, .iov_count = 1, .access = FI_REMOTE_READ, .iface = FI_HMEM_CUDA,
        .device.cuda = 1};
    CHECK(side.domain->mr->regattr(&side.domain->fid, &attr, 0, &second) == 0, "registering");
    CHECK(register_at(&side, flush, sizeof flush, FI_READ | FI_REMOTE_READ, &local) == 0, "registering");
    rig->words[rank][0] = gpu->key;
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    const uint64_t base = (uint64_t)(uintptr_t)NOWHERE;
    if (rank == 0) {
        memset(side.memory, 1, 10000);
        put(&side, peers[1], 0, 10000, base, rig->words[1][0], FI_REMOTE_CQ_DATA, 1, new_context());
        expect_done(&side, "the first write");
        barrier(), barrier();
        put(&side, peers[1], 0, 10000, base + 10000, rig->words[1][0], FI_REMOTE_CQ_DATA, 2, new_context());
        put(&side, peers[1], 0, 10000, base + 20000, rig->words[1][0], 0, 0, new_context());
        write_to(&side, peers, 1, 8, 0); /* to memory of the host, which is seen at once */
        for (int i = 0; i < 3; i++)
            expect_done(&side, "the later writes");
        barrier();
    } else {
        pump_until_barrier(&side); /* hands out nothing that matters: poll_side drops what it reads */
        CHECK(!byte_at(fd, 0) && !byte_at(fd, 9999), "bytes are seen before a read");
        get(&side, peers[1], flush, 8, local->mem_desc, (uint64_t)(uintptr_t)flush, local->key);
        expect_done(&side, "a read of the host");
        get(&side, peers[1], flush, 8, local->mem_desc, base + GPU, second->key);
        expect_done(&side, "a read of another GPU");
        CHECK(!byte_at(fd, 0) && !byte_at(fd, 9999), "bytes are seen before their GPU is read");
        get(&side, peers[1], flush, 1, local->mem_desc, base + 9999, gpu->key);
        expect_done(&side, "a read of the GPU");
        CHECK(byte_at(fd, 0) == 1 && byte_at(fd, 9999) == 1 && flush[0] == 1, "a read brings nothing");
        /* A read that is carried out after a write has arrived, but before its immediate was handed out. Polling for no
         * entries moves packets, and hands out nothing. */
        barrier();
        while (rig->arrived[0] < 5)
            side.cq->ops->read(side.cq, &entry, 0);
        get(&side, peers[1], flush, 1, local->mem_desc, base + 10000, gpu->key);
        for (int i = 0; i < 200; i++)
            side.cq->ops->read(side.cq, &entry, 0);
        CHECK(!byte_at(fd, 10000) && byte_at(fd, 20000) == 1 && side.memory[4096] == 1,
              "a write is seen whose immediate nobody has, or writes without one are not");
        bool has_imm = false, has_read = false;
        while (!has_imm || !has_read) {
            CHECK(poll_side(&side, &entry, NULL, PATIENCE_MS) == 1, "an immediate and a read");
            has_imm |= (entry.flags & FI_REMOTE_CQ_DATA) != 0, has_read |= (entry.flags & FI_READ) != 0;
        }
        CHECK(!byte_at(fd, 10000), "an older read counts for a write that was reported after it");
        get(&side, peers[1], flush, 1, local->mem_desc, base + 10000, gpu->key);
        expect_done(&side, "a read after the immediate");
        CHECK(byte_at(fd, 10000) == 1 && byte_at(fd, 19999) == 1 && byte_at(fd, 29999) == 1, "all is seen");
        barrier();
    }
    barrier();
    finish(&side);
}

const struct rule memory_rules[] = {
    {"gpus_are_offered_if_asked_for", 1, "", gpus_are_offered_if_asked_for, -1},
    {"gpus_need_p2p_on_efa_direct", 1, "P2P=0 DEVICE=0xefa2", gpus_need_p2p_on_efa_direct, -1},
    {"gpus_need_a_way_to_be_registered", 1, "DMABUF=0 PEER_MEMORY=0 DEVICE=0xefa2", gpus_need_p2p_on_efa_direct, -1},
    {"p2p_may_be_forbidden", 1, "QPS=256 DEVICE=0xefa2", gpus_need_p2p_on_efa_direct, -1},
    {"no_gpus", 1, "GPUS=0", no_gpus, -1},
    {"gpu_memory_without_hmem_is_the_systems", 1, "", gpu_memory_without_hmem_is_the_systems, -1},
    {"gpu_memory_by_address", 1, "", gpu_memory_by_address, -1},
    {"gpu_memory_needs_peer_memory", 1, "PEER_MEMORY=0", gpu_memory_by_address, -1},
    {"peer_memory_may_refuse", 1, "PEER_MEMORY=12", gpu_memory_by_address, -1},
    {"provider_exports_from_2.5", 1, "VERSION=2.5 PEER_MEMORY=0", gpu_memory_by_address, -1},
    {"provider_exports_in_vain", 1, "VERSION=2.5 DMABUF=5", gpu_memory_by_address, -1},
    {"device_without_dma_buf", 1, "DMABUF=0", gpu_memory_by_address, -1},
    {"device_without_dma_buf_of_2.5", 1, "VERSION=2.5 DMABUF=0", gpu_memory_by_address, -1},
    {"device_refuses_dma_bufs", 1, "DMABUF=5", device_refuses_dma_bufs, -1},
    {"dma_bufs_are_checked", 1, "", dma_bufs_are_checked, -1},
    {"dma_bufs_at_any_offset", 1, "DMABUF_OFFSET=1", dma_bufs_are_checked, -1},
    {"registrations_are_recorded", 1, "", registrations_are_recorded, -1},
    {"gpus_of_two_processes", 2, "", gpus_of_two_processes, -1},
    {"reads_bring_bytes", 2, "SLOTS=4 DUPLICATES=300", reads_bring_bytes, -1},
    {"reads_bring_bytes_in_order", 2, "REORDER=0", reads_bring_bytes, -1},
    {"reads_of_the_fabric_efa", 2, "POOL=240", reads_bring_bytes, -1},
    {"reads_are_checked", 2, "MAX_RDMA=2048", reads_are_checked, -1},
    {"reads_must_be_asked_for", 2, "", reads_must_be_asked_for, -1},
    {"unflushed_writes_are_not_seen", 2, "UNFLUSHED=1", unflushed_writes_are_not_seen, -1},
};
const size_t memory_rule_count = sizeof memory_rules / sizeof *memory_rules;
