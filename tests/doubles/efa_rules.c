/* Shows that each rule of the EFA double fires. Build and run, from the repository's root:
 *
 *   gcc -std=c11 -O1 -g -Wall -Wextra -Werror -fvisibility=hidden -shared -fPIC -o libefa_double.so \
 *       tests/doubles/efa{,_objects,_regions,_queues,_endpoint,_post,_link,_wire}.c
 *   gcc -std=c11 -O1 -g -Wall -Wextra -Werror -o efa_rules tests/doubles/efa_rules{,_memory,_rig}.c -ldl
 *   ./efa_rules ./libefa_double.so [RULE]
 *
 * Prints each rule's name. Exits with 1 and a sentence at the first rule that does not fire. Each rule runs in
 * processes of its own, one for each rank, which open the double by dlopen with the rule's settings.
 */
#define _GNU_SOURCE
#include "efa_rules_rig.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- one process ----------------------------------------------------------------------------------------------- */

static void infos(int rank) {
    (void)rank;
    struct fi_info *all, *direct, *hints = lib.dupinfo(NULL);
    unsigned infos = 0, directs = 0;
    CHECK(lib.getinfo(FI_VERSION(2, 1), NULL, NULL, 0, NULL, &all) == 0, "fi_getinfo without hints fails");
    for (struct fi_info *info = all; info; info = info->next) {
        infos++;
        directs += !strcmp(info->fabric_attr->name, "efa-direct");
    }
    CHECK(infos == 8 && directs == 4, "4 NICs must give 4 infos of each fabric");
    CHECK(lib.getinfo(FI_VERSION(9, 0), NULL, NULL, 0, NULL, &direct) == -FI_ENOSYS,
          "a version beyond the library's is taken");
    hints->caps = FI_MSG | FI_RMA;
    hints->domain_attr->mr_mode = MODES;
    hints->fabric_attr->name = strdup("efa-direct");
    CHECK(lib.getinfo(FI_VERSION(2, 1), NULL, NULL, 0, hints, &direct) == -FI_ENODATA,
          "efa-direct without FI_CONTEXT2");
    hints->mode = FI_CONTEXT2;
    hints->domain_attr->mr_mode &= ~FI_MR_LOCAL;
    CHECK(lib.getinfo(FI_VERSION(2, 1), NULL, NULL, 0, hints, &direct) == -FI_ENODATA,
          "efa-direct without FI_MR_LOCAL");
    hints->domain_attr->mr_mode |= FI_MR_LOCAL;
    CHECK(lib.getinfo(FI_VERSION(2, 1), NULL, NULL, 0, hints, &direct) == 0, "efa-direct with all modes");
    CHECK(!strcmp(direct->domain_attr->name, "rdmap0s0-rdm") && direct->next, "domains are not named by NIC");
    CHECK(direct->domain_attr->cq_data_size == 4 && direct->domain_attr->mr_key_size == 4, "4 bytes of data and key");
    CHECK(direct->tx_attr->rma_iov_limit == 1 && direct->tx_attr->inject_size == 32 && direct->tx_attr->size == 4096 &&
          direct->ep_attr->max_msg_size == 1 << 30, "limits of efa-direct");
    CHECK((direct->domain_attr->mr_mode & MODES) == (MODES & ~FI_MR_HMEM), "FI_MR_HMEM only with FI_HMEM");
    hints->domain_attr->cq_data_size = 8;
    struct fi_info *none;
    CHECK(lib.getinfo(FI_VERSION(2, 1), NULL, NULL, 0, hints, &none) == -FI_ENODATA, "8 bytes of CQ data are granted");
    lib.freeinfo(all), lib.freeinfo(direct), lib.freeinfo(hints);
}

/* fi_domain_attr of version 1.17 ends with its page; reading on would fault. */
static void old_infos_are_not_read_beyond_their_end(int rank) {
    (void)rank;
    uint8_t *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(!mprotect(pages + 4096, 4096, PROT_NONE) && lib.version() == FI_VERSION(1, 17), "setup");
    struct fi_info hints = {.domain_attr = (struct fi_domain_attr *)(void *)(pages + 4096 - 192)};
    struct fi_info *copy = lib.dupinfo(&hints), *found;
    hints.domain_attr->mr_mode = MODES;
    CHECK(lib.getinfo(FI_VERSION(1, 17), NULL, NULL, 0, &hints, &found) == 0, "hints of version 1.17");
    CHECK(!strcmp(found->fabric_attr->name, "efa"), "version 1.17 has no efa-direct");
    lib.freeinfo(found), lib.freeinfo(copy);
}

static void regions_are_limited(int rank) {
    (void)rank;
    struct side side = {0};
    struct fid_mr *mr[8];
    static uint8_t memory[64 << 12];
    open_side(&side, 0, "efa-direct", 0); /* registers one region of 64 KiB */
    CHECK(register_at(&side, memory, 32 << 12, FI_REMOTE_WRITE, &mr[0]) == -FI_ENOMEM, "33 pages of at most 17");
    CHECK(register_at(&side, memory, 32 << 12, FI_SEND, &mr[0]) == 0, "the page limit is for remote writes alone");
    CHECK(register_at(&side, memory, 32 << 12, FI_SEND, &mr[1]) == -FI_ENOMEM, "more pages than the device has in all");
    CHECK(register_at(&side, memory, 100, FI_SEND, &mr[1]) == 0, "a third region");
    CHECK(register_at(&side, memory, 100, FI_SEND, &mr[2]) == -FI_ENOMEM, "a fourth region of 3");
    CHECK(mr[1]->fid.ops->close(&mr[1]->fid) == 0 && register_at(&side, memory, 100, FI_SEND, &mr[1]) == 0,
          "a closed region makes room");
    void *gone = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(gone, 4096);
    mr[1]->fid.ops->close(&mr[1]->fid);
    CHECK(register_at(&side, gone, 4096, FI_SEND, &mr[1]) == -FI_EFAULT, "memory that does not exist");
    CHECK(COUNTS->refused[RULE_REGIONS] == 4, "refusals are counted");
}

static void endpoints_are_limited(int rank) {
    (void)rank;
    struct side a = {0}, b = {0}, c = {.may_fail = true};
    open_side(&a, 1, "efa-direct", 0);
    open_side(&b, 1, "efa-direct", 0);
    open_side(&c, 1, "efa-direct", 0);
    CHECK(c.enabled == -FI_ENOMEM, "a third queue pair of 2 on a NIC");
    close_side(&a);
    struct side d = {0}, e = {0};
    open_side(&d, 1, "efa-direct", 0);
    open_side(&e, 2, "efa-direct", 0);
}

static void posts_are_checked(int rank) {
    (void)rank;
    struct side side = {0};
    open_side(&side, 0, "efa-direct", 0);
    fi_addr_t self = insert_name(&side, side.name);
    struct iovec iov[2] = {{side.memory, 64}, {side.memory + 64, 64}};
    void *desc[2] = {side.desc, side.desc};
    struct fi_rma_iov to = {.addr = side.base + 4096, .len = 64, .key = side.key};
    struct fi_msg_rma write = {.msg_iov = iov, .desc = desc, .iov_count = 2, .addr = self, .rma_iov = &to,
                               .rma_iov_count = 1, .context = new_context()};
    CHECK(side.ep->rma->writemsg(side.ep, &write, 0) == -FI_EINVAL, "a write of two buffers");
    write.iov_count = 1;
    write.desc = NULL;
    CHECK(side.ep->rma->writemsg(side.ep, &write, 0) == -FI_EINVAL, "a write without a descriptor");
    write.desc = desc;
    CHECK(side.ep->rma->writemsg(side.ep, &write, FI_INJECT) == -FI_EINVAL, "an injected write of 64 bytes");
    CHECK(side.ep->rma->writemsg(side.ep, &write, FI_FENCE) == -FI_EINVAL, "a fence");
    write.addr = self + 1;
    CHECK(side.ep->rma->writemsg(side.ep, &write, 0) == -FI_EINVAL, "an address that is not in the vector");
    write.addr = self;
    iov[0].iov_len = 16;
    write.desc = NULL;
    if (lib.version() < FI_VERSION(2, 6)) {
        CHECK(side.ep->rma->writemsg(side.ep, &write, FI_INJECT) == -FI_EINVAL, "an inline write before version 2.6");
        iov[0].iov_len = 0;
        CHECK(side.ep->rma->writemsg(side.ep, &write, 0) == -FI_EINVAL, "an empty write without a descriptor");
        iov[0].iov_len = 16;
        write.desc = desc;
    }
    CHECK(side.ep->rma->writemsg(side.ep, &write, write.desc ? 0 : FI_INJECT) == 0, "a write of 16 bytes");
    write.desc = desc;
    expect_done(&side, "the write of 16 bytes");
    iov[0].iov_len = 8192;
    write.context = new_context();
    CHECK(side.ep->rma->writemsg(side.ep, &write, 0) == 0, "posting a write beyond the largest");
    expect_error(&side, 6, FI_EMSGSIZE, "a write of more bytes than the device writes");
    CHECK(COUNTS->refused[RULE_ARGUMENT] == (lib.version() < FI_VERSION(2, 6) ? 7 : 5), "refusals are counted");
}

static void options(int rank) {
    (void)rank;
    struct side side = {.before_enable = true};
    bool truth = true;
    size_t bytes = sizeof truth, retry = 0;
    open_side(&side, 0, "efa-direct", 0);
    struct fid *fid = &side.ep->fid;
    CHECK(!side.ep->ops->getopt(fid, FI_OPT_ENDPOINT, EMULATED_WRITE, &truth, &bytes) && !truth,
          "direct is not emulated");
    truth = false;
    CHECK(side.ep->ops->setopt(fid, FI_OPT_ENDPOINT, UNSOLICITED, &truth, 1) == -FI_EOPNOTSUPP,
          "unsolicited receive is turned off without FI_RX_CQ_DATA");
    truth = true;
    CHECK(side.ep->ops->setopt(fid, FI_OPT_ENDPOINT, WRITE_IN_ORDER, &truth, 1) == -FI_EOPNOTSUPP, "order is promised");
    CHECK(side.ep->ops->setopt(fid, FI_OPT_ENDPOINT, FI_OPT_EFA_RNR_RETRY, &retry, sizeof retry) == 0,
          "before enabling");
    CHECK(side.ep->fid.ops->control(fid, FI_ENABLE, NULL) == 0, "enabling");
    CHECK(side.ep->ops->setopt(fid, FI_OPT_ENDPOINT, FI_OPT_EFA_RNR_RETRY, &retry, sizeof retry) == -FI_EINVAL,
          "after");
    CHECK(side.ep->ops->cancel(fid, NULL) == -FI_ENOSYS, "fi_cancel on efa-direct");
}

static void context_is_the_providers(int rank) {
    (void)rank;
    struct side side = {0};
    open_side(&side, 0, "efa-direct", 0);
    fi_addr_t self = insert_name(&side, side.name);
    struct fi_context2 *context = new_context();
    put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, context);
    memset(context, 0, sizeof *context); /* the rank must die of this by abort() */
    expect_done(&side, "");
}

static void completions_without_context_are_silent(int rank) {
    (void)rank;
    struct side side = {0};
    open_side(&side, 0, "efa-direct", 0);
    fi_addr_t self = insert_name(&side, side.name);
    put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, NULL);
    struct fi_cq_data_entry entry;
    CHECK(poll_side(&side, &entry, NULL, 60) == 0, "a write without a context completes with an entry");
    CHECK(COUNTS->payload_bytes == 8, "the write is carried out");
}

static void full_at_depth(int rank) {
    (void)rank;
    struct side side = {0};
    open_side(&side, 0, "efa-direct", 0);
    fi_addr_t self = insert_name(&side, side.name);
    for (int i = 0; i < 8; i++)
        CHECK(put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, new_context()) == 0, "8 posts fit");
    for (int i = 0; i < 100; i++)
        CHECK(put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, new_context()) == -FI_EAGAIN,
              "the ninth does not");
    expect_done(&side, "one completion");
    CHECK(put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, new_context()) == 0, "its place is free again");
}

static void overrun_loses_completions_for_good(int rank) {
    (void)rank;
    struct side side = {0};
    struct fi_cq_data_entry entry;
    open_side(&side, 0, "efa-direct", 4);
    fi_addr_t self = insert_name(&side, side.name);
    for (int i = 0; i < 8; i++)
        put(&side, self, 0, 8, side.base + 64, side.key, FI_REMOTE_CQ_DATA, 7, new_context());
    int read = 0;
    while (poll_side(&side, &entry, NULL, 60) > 0)
        read++;
    CHECK(read < 16 && COUNTS->refused[RULE_OVERRUN] > 0, "16 completions passed through a queue of 4");
    put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, new_context());
    struct fi_cq_err_entry error = {0};
    int answer = poll_side(&side, &entry, &error, 60);
    if (getenv("TOKENYARD_EFA_OVERRUN_EVENT"))
        CHECK(answer == -1 && error.err == FI_EOVERRUN, "no FI_EOVERRUN");
    else
        CHECK(answer == 0, "the queue works again");
}

static void local_key_and_close(int rank) {
    (void)rank;
    struct side side = {0}, other = {0};
    struct fid_mr *mr;
    open_side(&side, 0, "efa-direct", 0);
    open_side(&other, 1, "efa-direct", 0);
    fi_addr_t self = insert_name(&side, side.name);
    void *own = side.desc;
    side.desc = other.desc;
    put(&side, self, 0, 64, side.base, side.key, 0, 0, new_context());
    expect_error(&side, 5, FI_EINVAL, "a source registered with another NIC");
    CHECK(register_at(&side, side.memory, 64, FI_SEND, &mr) == 0, "registering");
    side.desc = mr->mem_desc;
    put(&side, self, 60, 64, side.base, side.key, 0, 0, new_context());
    expect_error(&side, 5, FI_EINVAL, "a source beyond its region");
    put(&side, self, 0, 64, side.base, side.key, 0, 0, new_context());
    mr->fid.ops->close(&mr->fid);
    expect_error(&side, 5, FI_EINVAL, "a source whose region was closed");
    side.desc = own;
    put(&side, self, 0, 64, side.base, side.key, 0, 0, new_context());
    expect_done(&side, "a good write after them");
}

/* ---- two processes: rank 0 writes, rank 1 is written ----------------------------------------------------------- */

static void initiator_must_be_known(int rank) {
    struct side side = {0};
    open_side(&side, 0, "efa-direct", 0);
    fi_addr_t peers[3];
    share(&side, rank, 0), barrier();
    if (rank == 0) {
        exchange(&side, 2, rank, peers);
        write_to(&side, peers, 1, 8, 0);
        expect_error(&side, 14, FI_ENOTCONN, "a write of an unknown peer");
        barrier(), barrier();
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "a write of a known peer");
        barrier(), barrier();
        write_to(&side, peers, 1, 8, 0);
        expect_error(&side, 14, FI_ENOTCONN, "a write of a peer that was removed");
        finish(&side);
    } else {
        pump_until_barrier(&side);
        exchange(&side, 2, rank, peers);
        barrier();
        pump_until_barrier(&side);
        CHECK(side.av->ops->remove(side.av, &peers[0], 1, 0) == 0, "removing");
        barrier();
        finish(&side);
    }
}

static void targets_are_checked(int rank) {
    struct side side = {0}, other = {0};
    struct fid_mr *mr;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    open_side(&other, 1, "efa-direct", 0);
    CHECK(register_at(&side, side.memory, 64, FI_SEND, &mr) == 0, "registering");
    rig->words[rank][0] = other.key, rig->words[rank][1] = mr->key, rig->words[rank][2] = other.base;
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        const uint64_t base = rig->side[1][0].base, key = rig->side[1][0].key, end = base + MEMORY;
        const struct { uint64_t address, key; uint32_t bytes; bool good; const char *what; } cases[] = {
            {base, key, 0, true, "an empty write at a region's begin"},
            {end - 1, key, 0, true, "an empty write at its last byte"},
            {end, key, 0, false, "an empty write at its end"},
            {base, key + 1, 0, false, "an empty write with a wrong key"},
            {base - 1, key, 8, false, "a write before the region"},
            {end - 7, key, 8, false, "a write beyond the region"},
            {end - 8, key, 8, true, "a write of its last bytes"},
            {rig->words[1][2], rig->words[1][0], 8, false, "a key of another NIC"},
            {base, rig->words[1][1], 8, false, "a region without FI_REMOTE_WRITE"},
            {base, key | 1ull << 32, 8, false, "a key of more than 32 bits"},
        };
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            put(&side, peers[1], 0, cases[i].bytes, cases[i].address, cases[i].key, 0, 0, new_context());
            if (cases[i].good)
                expect_done(&side, cases[i].what);
            else
                expect_error(&side, 7, FI_EINVAL, cases[i].what);
        }
        uint8_t name[32];
        memcpy(name, rig->side[1][0].name, sizeof name);
        name[20] ^= 1; /* the queue pair's number is right, its key is that of an older one */
        put(&side, insert_name(&side, name), 0, 8, base, key, 0, 0, new_context());
        expect_error(&side, 9, FI_ENOTCONN, "a write to an older queue pair with this number");
    }
    finish(&side);
}

static void batches_must_be_closed(int rank) {
    struct side side = {0};
    struct fi_cq_data_entry entry;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank == 0) {
        for (int i = 0; i < 15; i++)
            write_to(&side, peers, 1, 8, FI_MORE);
        CHECK(poll_side(&side, &entry, NULL, 60) == 0 && COUNTS->doorbells == 0, "a batch left open is rung by itself");
        write_to(&side, peers, 1, 8, 0);
        for (int i = 0; i < 16; i++)
            expect_done(&side, "the batch, once closed");
        struct tokenyard_double_peer peer;
        CHECK(!lib.peer(0, rig->side[1][0].name, &peer) && peer.posts == 16 && peer.doorbells == 1,
              "16 writes, one doorbell");
        for (int i = 0; i < 65; i++)
            write_to(&side, peers, 2, 8, FI_MORE);
        CHECK(COUNTS->doorbells == 2, "a full batch rings");
        CHECK(put(&side, peers[2] + 9, 0, 8, 0, 0, 0, 0, new_context()) == -FI_EINVAL && COUNTS->doorbells == 3,
              "a refused post rings for those before it");
        for (int i = 0; i < 65; i++)
            expect_done(&side, "all of them");
        CHECK(COUNTS->operations_swapped > 0, "writes leave in the order of their posts");
    }
    finish(&side);
}

static void more_on_efa_is_never_rung(int rank) {
    struct side side = {0};
    struct fi_cq_data_entry entry;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank == 0) {
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "the first write to peer 1");
        write_to(&side, peers, 2, 8, FI_MORE); /* waits for the handshake, and keeps its flag */
        write_to(&side, peers, 1, 8, 0);       /* closes the batch, before it is there */
        expect_done(&side, "the write that closes the batch");
        CHECK(poll_side(&side, &entry, NULL, 100) == 0, "FI_MORE before the handshake is rung");
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "a later write"), expect_done(&side, "and the forgotten one with it");
    }
    finish(&side);
}

static void sixteen_wait_for_handshakes(int rank) {
    struct side side = {0};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank == 0) {
        fi_addr_t self = insert_name(&side, side.name);
        for (int i = 0; i < 16; i++)
            CHECK(write_to(&side, peers, 1 + i % 2, 8, 0) == 0, "16 wait for handshakes");
        for (int to = 1; to < 3; to++)
            CHECK(write_to(&side, peers, to, 8, 0) == -FI_EAGAIN, "a seventeenth does, too");
        CHECK(put(&side, self, 0, 8, side.base, side.key, 0, 0, new_context()) == 0, "a write to itself waits");
        for (int i = 0; i < 17; i++)
            expect_done(&side, "what waited");
        for (int i = 0; i < 17; i++)
            CHECK(write_to(&side, peers, 1 + i % 2, 8, 0) == 0, "a handshake that was made is waited for again");
        for (int i = 0; i < 17; i++)
            expect_done(&side, "what did not wait");
    }
    finish(&side);
}

/* What waits for the handshake of a peer that died never completes, and takes the place of others for good. */
static void handshake_of_the_dead_is_nobodys(int rank) {
    struct side side = {0};
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error = {.op_context = &side};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank == 1)
        raise(SIGKILL);
    if (rank == 0) {
        write_to(&side, peers, 2, 8, 0);
        expect_done(&side, "a write to the living");
        for (int i = 0; i < 3; i++)
            CHECK(write_to(&side, peers, 1, 8, 0) == 0, "posting to the dead");
        if (lib.version() < FI_VERSION(2, 1))
            CHECK(poll_side(&side, &entry, &error, PATIENCE_MS) == -1 && !error.op_context && error.prov_errno == 15,
                  "the handshake's error has a context, or is none");
        else
            expect_event(&side, 15, FI_EHOSTUNREACH, "the handshake's error");
        for (int i = 3; i < 16; i++)
            CHECK(write_to(&side, peers, 1, 8, 0) == 0, "posting to the dead again");
        CHECK(write_to(&side, peers, 1, 8, 0) == -FI_EAGAIN, "a seventeenth");
        CHECK(poll_side(&side, &entry, NULL, 60) == 0, "a write that waited for the dead completes");
        CHECK(side.av->ops->remove(side.av, &peers[1], 1, 0) == 0, "removing the dead");
        CHECK(write_to(&side, &(fi_addr_t[]){0, insert_name(&side, rig->side[1][0].name)}[0], 1, 8, 0) == -FI_EAGAIN,
              "removing a peer makes room");
        write_to(&side, peers, 2, 8, 0);
        expect_done(&side, "a write to the living, whose handshake was made before");
    }
    finish(&side);
}

static void dead_after_the_handshake(int rank) {
    struct side side = {0};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "a write to the living");
        barrier();
        while (!rig->dead[1])
            usleep(200);
        write_to(&side, peers, 1, 8, 0);
        expect_error(&side, 4124, FI_ECONNABORTED, "a write to the dead");
    } else {
        pump_until_barrier(&side);
        raise(SIGKILL);
    }
    finish(&side);
}

static void shm_is_turned_off(int rank) {
    struct side side = {.before_enable = true, .remote_alone = rank == 2};
    bool truth = true;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    int permitted = side.ep->ops->setopt(&side.ep->fid, FI_OPT_ENDPOINT, SHARED_MEMORY, &truth, 1);
    CHECK(permitted == (getenv("FI_EFA_ENABLE_SHM_TRANSFER") ? -FI_EINVAL : 0), "the option answers %d", permitted);
    truth = false;
    if (rank == 1)
        CHECK(side.ep->ops->setopt(&side.ep->fid, FI_OPT_ENDPOINT, SHARED_MEMORY, &truth, 1) == 0, "turning it off");
    enable_side(&side);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    bool uses_shm = rank == 0 && !permitted;
    CHECK(write_to(&side, peers, (rank + 1) % 3, 8, 0) == (uses_shm ? -FI_EOPNOTSUPP : 0),
          "rank %d: a write to a peer of this host", rank);
    if (!uses_shm)
        expect_done(&side, "a write by the device");
    finish(&side);
}

/* By libibverbs' sessions; by itself the provider refuses what does not fit, and rings for the rest. */
static void overfull_batch_is_rolled_back(int rank) {
    (void)rank;
    struct side side = {0};
    struct fi_cq_data_entry entry;
    bool by_itself = lib.version() >= FI_VERSION(2, 3) && !getenv("FI_EFA_USE_DATA_PATH_DIRECT");
    open_side(&side, 0, "efa-direct", 0);
    fi_addr_t self = insert_name(&side, side.name);
    for (int i = 0; i < 5; i++)
        CHECK(put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, new_context()) == 0, "5 of 8");
    for (int i = 0; i < 5; i++)
        CHECK(put(&side, self, 0, 8, side.base + 64, side.key, FI_MORE, 0, new_context()) ==
              (i < 3 || !by_itself ? 0 : -FI_EAGAIN), "post %d of a batch of 6 into a room for 3", i);
    CHECK(put(&side, self, 0, 8, side.base + 64, side.key, 0, 0, new_context()) == -FI_EAGAIN, "the batch's last");
    for (int i = 0; i < (by_itself ? 8 : 5); i++)
        expect_done(&side, "what was posted before");
    CHECK(poll_side(&side, &entry, NULL, 60) == 0, "a post of the batch that was rolled back completes");
    for (int i = 0; i < 8; i++)
        CHECK(put(&side, self, 0, 8, side.base + 64, side.key, i < 7 ? FI_MORE : 0, 0, new_context()) == 0, "8 of 8");
    for (int i = 0; i < 8; i++)
        expect_done(&side, "a batch that fits");
}

/* The device delivers while the target sleeps: AUTO. Two write 10 immediates each, which complete there, into a queue
 * of `room`. */
static void sleep_while_20_arrive(int rank, int room) {
    struct side side = {0};
    struct fi_cq_data_entry entry;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", rank == 0 ? (size_t)room : 0);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank > 0) {
        for (int i = 0; i < 10; i++)
            CHECK(write_to(&side, peers, 0, 8, FI_REMOTE_CQ_DATA) == 0, "posting");
        for (int i = 0; i < 10; i++)
            expect_done(&side, "a write to a process that sleeps");
        barrier(), barrier();
        write_to(&side, peers, 0, 8, FI_REMOTE_CQ_DATA);
        expect_done(&side, "a write after the sleep");
    } else {
        barrier();
        CHECK(COUNTS->immediates == 20 && COUNTS->refused[RULE_OVERRUN] == (room < 20 ? 20u - (unsigned)room : 0),
              "%d immediates, %d lost", (int)COUNTS->immediates, (int)COUNTS->refused[RULE_OVERRUN]);
        for (int i = 0; i < (room < 20 ? room : 20); i++)
            expect_done(&side, "an immediate that found room");
        barrier();
        for (int i = 0; i < 2 && room >= 20; i++)
            expect_done(&side, "an immediate after the sleep");
    }
    if (room < 20) {
        barrier();
        bool is_empty = poll_side(&side, &entry, NULL, 60) == 0;
        CHECK(rank > 0 || (is_empty && COUNTS->refused[RULE_OVERRUN] == 22 - (unsigned)room), "the queue works again");
    }
    finish(&side);
}

static void overrun_while_the_target_sleeps(int rank) { sleep_while_20_arrive(rank, 12); }
static void queue_with_room_keeps_what_comes(int rank) { sleep_while_20_arrive(rank, 20); }

static void emulated_writes_stall(int rank) {
    struct side side = {.api = FI_VERSION(1, 17), .no_hmem = true};
    struct fi_cq_data_entry entry;
    bool truth = false;
    size_t bytes = sizeof truth;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    CHECK(!side.ep->ops->getopt(&side.ep->fid, FI_OPT_ENDPOINT, EMULATED_WRITE, &truth, &bytes) && truth,
          "API 1.17 does not emulate writes");
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "an emulated write");
        for (int i = 0; i < 300; i++)
            CHECK(write_to(&side, peers, 1, 8, 0) == 0, "posting");
        for (int i = 0; i < 240; i++)
            expect_done(&side, "an emulated write that found room in the pool");
        CHECK(poll_side(&side, &entry, NULL, 80) == 0 && COUNTS->refused[RULE_STALL] == 60, "the pool has no end");
    }
    finish(&side);
}

static void emulated_error_goes_to_the_event_queue(int rank) {
    struct side side = {.api = FI_VERSION(1, 17), .no_hmem = true};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        put(&side, peers[1], 0, 8, rig->side[1][0].base, 12345, 0, 0, new_context());
    } else {
        expect_event(&side, 4111, FI_EACCES, "an emulated write to no region");
    }
    finish(&side);
}

static void abort_without_event_queue(int rank) {
    struct side side = {.api = FI_VERSION(1, 17), .no_hmem = true, .no_eq = true};
    fi_addr_t peers[3];
    struct fi_cq_data_entry entry;
    open_side(&side, 0, "efa", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0)
        put(&side, peers[1], 0, 8, rig->side[1][0].base, 12345, 0, 0, new_context());
    for (uint64_t end = milliseconds() + PATIENCE_MS; !rig->dead[1] && milliseconds() < end;)
        poll_side(&side, &entry, NULL, 5); /* rank 1 must die by abort() */
}

static void unsolicited_must_agree(int rank) {
    struct side side = {.rx_cq_data = rank == 1};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        write_to(&side, peers, 1, 8, FI_REMOTE_CQ_DATA);
        expect_error(&side, 18, FI_EINVAL, "an immediate to a side that wants receives for them");
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "a write without an immediate");
    }
    finish(&side);
}

static void unsolicited_must_agree_on_efa(int rank) {
    struct side side = {.before_enable = true};
    bool truth = rank == 0;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa", 0);
    CHECK(side.ep->ops->setopt(&side.ep->fid, FI_OPT_ENDPOINT, UNSOLICITED, &truth, 1) == 0, "the option");
    enable_side(&side);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0)
        CHECK(write_to(&side, peers, 1, 8, FI_REMOTE_CQ_DATA) == -FI_EOPNOTSUPP, "an immediate to a side that differs");
    finish(&side);
}

static void unsolicited_error_has_no_context(int rank) {
    struct side side = {0};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        write_to(&side, peers, 1, 8, FI_REMOTE_CQ_DATA);
        expect_error(&side, 12, FI_EREMOTEIO, "the write");
    } else {
        struct fi_cq_data_entry entry;
        struct fi_cq_err_entry error = {.op_context = &side};
        CHECK(poll_side(&side, &entry, &error, PATIENCE_MS) == -1 && !error.op_context &&
              (error.flags & FI_REMOTE_CQ_DATA),
              "the target's error has a context");
    }
    finish(&side);
}

static void closed_region_fails_late_writes_only(int rank) {
    struct side side = {0};
    struct fid_mr *mr;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    CHECK(register_at(&side, side.memory, 4096, FI_REMOTE_WRITE, &mr) == 0, "registering");
    rig->words[rank][0] = mr->key;
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        barrier();
        put(&side, peers[1], 0, 8, rig->side[1][0].base, rig->words[1][0], 0, 0, new_context());
        expect_error(&side, 7, FI_EINVAL, "a write to a closed region");
        for (int i = 0; i < 10; i++)
            write_to(&side, peers, 1, 8, 0), expect_done(&side, "a write to another region");
    } else {
        mr->fid.ops->close(&mr->fid);
        barrier();
    }
    finish(&side);
}

static void killed_peer_is_unreachable(int rank) {
    struct side side = {0};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank == 2)
        raise(SIGKILL);
    if (rank == 1) {
        finish(&side);
        return;
    }
    usleep(30000);
    uint64_t begin = milliseconds();
    write_to(&side, peers, 2, 8, 0);
    write_to(&side, peers, 1, 8, 0);
    int done = 0;
    for (int i = 0; i < 2; i++) { /* the living may be paused for longer than the dead is waited for */
        struct fi_cq_data_entry entry;
        struct fi_cq_err_entry error = {0};
        int answer = poll_side(&side, &entry, &error, PATIENCE_MS);
        CHECK(answer == 1 || (answer == -1 && error.prov_errno == 15 && error.err == FI_EHOSTUNREACH),
              "answer %d, status %d", answer, error.prov_errno);
        done += answer == 1;
    }
    CHECK(done == 1, "%d writes of 2 completed, one of them to the dead", done);
    CHECK(milliseconds() - begin >= 180, "a dead peer is noticed at once");
    finish(&side);
}

static void reopened_endpoint_has_another_number(int rank) {
    struct side side = {0};
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "a write to the first");
        barrier(), barrier();
        write_to(&side, peers, 1, 8, 0);
        expect_error(&side, 9, FI_ENOTCONN, "a write to the old name");
        exchange(&side, 2, rank, peers);
        write_to(&side, peers, 1, 8, 0);
        expect_done(&side, "a write to the new name");
    } else {
        pump_until_barrier(&side);
        struct side again = {0};
        close_side(&side);
        open_side(&again, 0, "efa-direct", 0);
        CHECK(memcmp(again.name, rig->side[1][0].name, 32), "the same name again");
        share(&again, rank, 0), exchange(&again, 2, rank, peers);
        barrier();
        side = again;
    }
    finish(&side);
}

static void progress_is_manual(int rank) {
    struct side side = {0};
    struct fi_cq_data_entry entry;
    fi_addr_t peers[3];
    open_side(&side, 0, "efa-direct", 0);
    share(&side, rank, 0), barrier(), exchange(&side, 2, rank, peers), barrier();
    if (rank == 0) {
        side.memory[0] = 1;
        write_to(&side, peers, 1, 8, 0);
        barrier(); /* nobody has polled */
        barrier();
        CHECK(poll_side(&side, &entry, NULL, 60) == 0, "it completes though the target does not poll");
        barrier();
        expect_done(&side, "the write");
    } else {
        barrier();
        usleep(30000);
        CHECK(side.memory[4096] == 0, "bytes arrive though nobody polls");
        barrier();
        barrier();
        while (side.memory[4096] == 0)
            poll_side(&side, &entry, NULL, 1);
    }
    finish(&side);
}

static void messages_need_receives(int rank) {
    struct side side = {.before_enable = true};
    size_t retry = rank == 1 ? 7 : 3;
    fi_addr_t peers[3];
    struct fi_cq_data_entry entry;
    open_side(&side, 0, "efa-direct", 0);
    if (rank == 2)
        CHECK(!side.ep->ops->setopt(&side.ep->fid, FI_OPT_ENDPOINT, FI_OPT_EFA_RNR_RETRY, &retry, sizeof retry),
              "retries");
    enable_side(&side);
    share(&side, rank, 0), barrier(), exchange(&side, 3, rank, peers), barrier();
    if (rank == 2) {
        send_to(&side, peers[0], 100);
        expect_error(&side, 10, FI_ENORX, "a message that finds no receive, with 3 tries");
        barrier();
    } else if (rank == 1) {
        barrier();
        memset(side.memory, 0x77, 5000);
        send_to(&side, peers[0], 5000);
        expect_done(&side, "a message that waited for a receive");
        send_to(&side, peers[0], 100);
        expect_error(&side, 11, FI_EMSGSIZE, "a receive too short");
        send_to(&side, peers[0], 9000);
        expect_error(&side, 6, FI_EMSGSIZE, "a message longer than the MTU");
    } else {
        pump_until_barrier(&side);
        CHECK(poll_side(&side, &entry, NULL, 60) == 0, "a message without a receive");
        CHECK(side.ep->msg->recv(side.ep, side.memory, 8000, NULL, 0, new_context()) == -FI_EINVAL, "no descriptor");
        CHECK(side.ep->msg->recv(side.ep, side.memory, 8000, side.desc, 0, new_context()) == 0, "posting a receive");
        CHECK(poll_side(&side, &entry, NULL, PATIENCE_MS) == 1 && entry.len == 5000 && side.memory[4999] == 0x77,
              "the message");
        CHECK(side.ep->msg->recv(side.ep, side.memory, 50, side.desc, 0, new_context()) == 0, "posting a receive");
    }
    finish(&side);
}

static void data_of_three_on_four_nics(int rank) { data_test(rank, 3, false); }
static void data_with_a_kill(int rank) { data_test(rank, 3, true); }

static const struct rule rules[] = {
    {"infos", 1, "", infos, -1},
    {"old_infos_are_not_read_beyond_their_end", 1, "VERSION=1.17", old_infos_are_not_read_beyond_their_end, -1},
    {"regions_are_limited", 1, "REGIONS=3 PAGES=17 TOTAL_PAGES=60", regions_are_limited, -1},
    {"endpoints_are_limited", 1, "QPS=2", endpoints_are_limited, -1},
    {"posts_are_checked", 1, "MAX_RDMA=8000", posts_are_checked, -1},
    {"posts_are_checked_by_2.6", 1, "VERSION=2.6 MAX_RDMA=8000", posts_are_checked, -1},
    {"options", 1, "VERSION=2.4", options, -1},
    {"context_is_the_providers", 1, "", context_is_the_providers, 0},
    {"completions_without_context_are_silent", 1, "", completions_without_context_are_silent, -1},
    {"full_at_depth", 1, "DEPTH=8", full_at_depth, -1},
    {"overrun_loses_completions_for_good", 1, "", overrun_loses_completions_for_good, -1},
    {"overrun_is_told_if_asked", 1, "OVERRUN_EVENT=1", overrun_loses_completions_for_good, -1},
    {"local_key_and_close", 1, "", local_key_and_close, -1},
    {"initiator_must_be_known", 2, "", initiator_must_be_known, -1},
    {"targets_are_checked", 2, "", targets_are_checked, -1},
    {"batches_must_be_closed", 3, "", batches_must_be_closed, -1},
    {"more_on_efa_is_never_rung", 3, "", more_on_efa_is_never_rung, -1},
    {"sixteen_wait_for_handshakes", 3, "", sixteen_wait_for_handshakes, -1},
    {"handshake_of_the_dead_is_nobodys", 3, "UNREACHABLE_MS=200", handshake_of_the_dead_is_nobodys, -1},
    {"handshake_of_the_dead_before_2.1", 3, "VERSION=2.0 UNREACHABLE_MS=200", handshake_of_the_dead_is_nobodys, -1},
    {"dead_after_the_handshake", 2, "UNREACHABLE_MS=200", dead_after_the_handshake, -1},
    {"shm_is_turned_off", 3, "LOCAL=1", shm_is_turned_off, -1},
    {"shm_is_turned_off_for_all", 3, "LOCAL=1 FI_EFA_ENABLE_SHM_TRANSFER=0", shm_is_turned_off, -1},
    {"overfull_batch_is_rung", 1, "DEPTH=8", overfull_batch_is_rolled_back, -1},
    {"overfull_batch_is_rolled_back", 1, "DEPTH=8 VERSION=2.2", overfull_batch_is_rolled_back, -1},
    {"overfull_batch_of_2.4_is_rolled_back", 1, "DEPTH=8 FI_EFA_USE_DATA_PATH_DIRECT=0",
     overfull_batch_is_rolled_back, -1},
    {"overrun_while_the_target_sleeps", 3, "AUTO=1", overrun_while_the_target_sleeps, -1},
    {"queue_with_room_keeps_what_comes", 3, "AUTO=1", queue_with_room_keeps_what_comes, -1},
    {"emulated_writes_stall", 2, "", emulated_writes_stall, -1},
    {"emulated_error_goes_to_the_event_queue", 2, "", emulated_error_goes_to_the_event_queue, -1},
    {"abort_without_event_queue", 2, "", abort_without_event_queue, 1},
    {"unsolicited_must_agree", 2, "", unsolicited_must_agree, -1},
    {"unsolicited_must_agree_on_efa", 2, "VERSION=2.4", unsolicited_must_agree_on_efa, -1},
    {"unsolicited_error_has_no_context", 2, "FAIL_UNSOLICITED=1", unsolicited_error_has_no_context, -1},
    {"closed_region_fails_late_writes_only", 2, "", closed_region_fails_late_writes_only, -1},
    {"killed_peer_is_unreachable", 3, "UNREACHABLE_MS=200", killed_peer_is_unreachable, -1},
    {"reopened_endpoint_has_another_number", 2, "", reopened_endpoint_has_another_number, -1},
    {"progress_is_manual", 2, "", progress_is_manual, -1},
    {"messages_need_receives", 3, "", messages_need_receives, -1},
    {"data_of_three_on_four_nics", 3, "", data_of_three_on_four_nics, -1},
    {"data_with_a_kill", 3, "UNREACHABLE_MS=200", data_with_a_kill, -1},
    {"data_with_a_kill_of_a_running_device", 3, "AUTO=1 UNREACHABLE_MS=200", data_with_a_kill, -1},
};

int main(int count, char **arguments) {
    return run_rules(rules, sizeof rules / sizeof *rules, count, arguments);
}
