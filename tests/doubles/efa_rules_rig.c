/* See efa_rules_rig.h. */
#define _GNU_SOURCE
#include "efa_rules_rig.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct library lib;
struct rig *rig;
static int own_rank;

uint64_t milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* ---- processes ------------------------------------------------------------------------------------------------- */

static bool is_met(uint64_t count) {
    for (int rank = 0; rank < rig->ranks; rank++)
        if (rig->arrived[rank] < count && !rig->dead[rank])
            return false;
    return true;
}

void barrier(void) {
    uint64_t count = ++rig->arrived[own_rank];
    while (!is_met(count))
        usleep(200);
}

void pump_until_barrier(struct side *side) {
    uint64_t count = ++rig->arrived[own_rank];
    struct fi_cq_data_entry entry;
    while (!is_met(count))
        poll_side(side, &entry, NULL, 2);
}

void finish(struct side *side) {
    pump_until_barrier(side);
    close_side(side);
}

static void *symbol(void *handle, const char *name) {
    void *found = dlsym(handle, name);
    CHECK(found, "the library has no %s", name);
    return found;
}

static void load(const char *path, const char *settings) {
    char text[256], *rest;
    snprintf(text, sizeof text, "%s", settings);
    for (char *word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char key[64], *value = strchr(word, '=');
        snprintf(key, sizeof key, "%s%.*s", strncmp(word, "FI_", 3) ? "TOKENYARD_EFA_" : "", (int)(value - word), word);
        setenv(key, value + 1, 1);
    }
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle, "%s", dlerror());
    lib.version = (uint32_t(*)(void))symbol(handle, "fi_version");
    *(void **)&lib.getinfo = symbol(handle, "fi_getinfo");
    *(void **)&lib.freeinfo = symbol(handle, "fi_freeinfo");
    *(void **)&lib.dupinfo = symbol(handle, "fi_dupinfo");
    *(void **)&lib.fabric = symbol(handle, "fi_fabric");
    *(void **)&lib.counts = symbol(handle, "tokenyard_double_counts");
    *(void **)&lib.peer = symbol(handle, "tokenyard_double_peer");
    *(void **)&lib.region = symbol(handle, "tokenyard_double_region");
    CHECK(lib.counts()->bytes == sizeof(struct tokenyard_double_counts), "another layout of the counts");
}

/* Whether each rank ended as it should: with 0, by abort() where the rule says so, by SIGKILL if it killed itself. */
static bool run_rule(const struct rule *rule, const char *path) {
    pid_t ranks[RANKS];
    bool is_good = true;
    memset(rig, 0, sizeof *rig);
    rig->ranks = rule->ranks;
    for (int rank = 0; rank < rule->ranks; rank++) {
        ranks[rank] = fork();
        if (ranks[rank] == 0) {
            own_rank = rank;
            if (rule->aborts >= 0 && !freopen("/dev/null", "w", stderr))
                exit(1);
            alarm(4 * PATIENCE_MS / 1000);
            load(path, rule->settings);
            rule->run(rank);
            exit(0);
        }
    }
    for (int left = rule->ranks; left; left--) {
        int status, rank = 0;
        pid_t pid = wait(&status);
        while (ranks[rank] != pid)
            rank++;
        bool aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
        bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        bool as_it_should = rank == rule->aborts ? aborted : killed || (WIFEXITED(status) && !WEXITSTATUS(status));
        if (!as_it_should) {
            fprintf(stderr, "%s: rank %d ended with status %#x\n", rule->name, rank, (unsigned)status);
            for (int other = 0; is_good && other < rule->ranks; other++)
                if (other != rank)
                    kill(ranks[other], SIGKILL);
            is_good = false;
        }
        if (killed || aborted)
            rig->dead[rank] = true;
    }
    return is_good;
}

static int left_files(void) {
    int files = 0;
    char prefix[64];
    DIR *directory = opendir("/dev/shm");
    snprintf(prefix, sizeof prefix, "tyefa-%s-", getenv("TOKENYARD_EFA_SCOPE"));
    for (struct dirent *file; (file = readdir(directory));)
        files += !strncmp(file->d_name, prefix, strlen(prefix));
    closedir(directory);
    return files;
}

static void opens_and_closes(int rank) {
    struct side side = {0};
    (void)rank;
    open_side(&side, 0, "efa-direct", 0);
    close_side(&side);
}

int run_rules(const struct rule *rules, size_t rule_count, int count, char **arguments) {
    static const struct rule last = {"killed_processes_leave_no_file", 1, "", opens_and_closes, -1};
    char scope[32];
    if (count < 2) {
        fprintf(stderr, "usage: %s LIBRARY [RULE]\n", arguments[0]);
        return 2;
    }
    snprintf(scope, sizeof scope, "rules%d", (int)getpid());
    setenv("TOKENYARD_EFA_SCOPE", scope, 1);
    rig = mmap(NULL, sizeof *rig, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < rule_count + memory_rule_count; i++) {
        const struct rule *rule = i < rule_count ? &rules[i] : &memory_rules[i - rule_count];
        if (count > 2 && strcmp(arguments[2], rule->name))
            continue;
        uint64_t begin = milliseconds();
        if (!run_rule(rule, arguments[1])) {
            run_rule(&last, arguments[1]);
            printf("%s does NOT fire\n", rule->name);
            return 1;
        }
        printf("%-48s fires (%d ms)\n", rule->name, (int)(milliseconds() - begin));
        fflush(stdout);
    }
    int before = left_files();
    if (!run_rule(&last, arguments[1]) || left_files()) {
        printf("%s does NOT fire: %d files before, %d after the next start\n", last.name, before, left_files());
        return 1;
    }
    printf("%-48s fires (%d files before)\n", last.name, before);
    return 0;
}

/* ---- one side -------------------------------------------------------------------------------------------------- */

struct fi_context2 *new_context(void) {
    static struct fi_context2 contexts[8192];
    static unsigned next;
    return &contexts[next++ % 8192];
}

void open_side(struct side *side, uint32_t nic, const char *fabric, size_t cq_size) {
    static uint8_t memories[16][MEMORY] __attribute__((aligned(4096)));
    static int used;
    struct side choices = {.api = side->api, .may_fail = side->may_fail, .before_enable = side->before_enable,
                           .no_eq = side->no_eq, .rx_cq_data = side->rx_cq_data, .no_hmem = side->no_hmem,
                           .rma = side->rma, .remote_alone = side->remote_alone};
    struct fi_info *hints = lib.dupinfo(NULL), *info;
    char domain[32];
    *side = choices;
    if (!side->api)
        side->api = FI_VERSION(2, 1) < lib.version() ? FI_VERSION(2, 1) : lib.version();
    snprintf(domain, sizeof domain, "rdmap%us0-rdm", nic);
    hints->caps = FI_MSG | FI_RMA | FI_SOURCE | side->rma | (side->no_hmem ? 0 : FI_HMEM) |
                  (side->remote_alone ? FI_REMOTE_COMM : 0);
    hints->mode = FI_CONTEXT2 | (side->rx_cq_data ? 1ULL << 56 : 0);
    hints->domain_attr->mr_mode = MODES;
    hints->domain_attr->name = strdup(domain);
    hints->fabric_attr->name = strdup(fabric);
    CHECK(lib.getinfo(side->api, NULL, NULL, 0, hints, &info) == 0, "no info for %s of %s", domain, fabric);
    CHECK(lib.fabric(info->fabric_attr, &side->fabric, NULL) == 0, "fi_fabric");
    CHECK(side->fabric->ops->domain(side->fabric, info, &side->domain, NULL) == 0, "fi_domain");
    struct fi_av_attr av = {.type = FI_AV_TABLE};
    CHECK(side->domain->ops->av_open(side->domain, &av, &side->av, NULL) == 0, "fi_av_open");
    struct fi_cq_attr cq = {.size = cq_size, .format = FI_CQ_FORMAT_DATA};
    CHECK(side->domain->ops->cq_open(side->domain, &cq, &side->cq, NULL) == 0, "fi_cq_open");
    struct fi_eq_attr eq = {0};
    CHECK(side->fabric->ops->eq_open(side->fabric, &eq, &side->eq, NULL) == 0, "fi_eq_open");
    CHECK(side->domain->ops->endpoint(side->domain, info, &side->ep, NULL) == 0, "fi_endpoint");
    struct fi_ops *ops = side->ep->fid.ops;
    CHECK(ops->bind(&side->ep->fid, &side->cq->fid, FI_TRANSMIT | FI_RECV) == 0, "binding the completion queue");
    CHECK(ops->bind(&side->ep->fid, &side->av->fid, 0) == 0, "binding the vector");
    CHECK(side->no_eq || ops->bind(&side->ep->fid, &side->eq->fid, 0) == 0, "binding the event queue");
    side->memory = memories[used++ % 16];
    memset(side->memory, 0, MEMORY);
    CHECK(register_at(side, side->memory, MEMORY, FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE, &side->mr) == 0,
          "registering");
    side->desc = side->mr->mem_desc;
    side->base = (uint64_t)(uintptr_t)side->memory;
    side->key = side->mr->key;
    lib.freeinfo(hints), lib.freeinfo(info);
    if (!side->before_enable)
        enable_side(side);
}

void enable_side(struct side *side) {
    size_t bytes = sizeof side->name;
    side->enabled = side->ep->fid.ops->control(&side->ep->fid, FI_ENABLE, NULL);
    CHECK(side->may_fail || side->enabled == 0, "fi_enable answers %d", side->enabled);
    CHECK(side->ep->cm->getname(&side->ep->fid, side->name, &bytes) == 0 && bytes == 32, "fi_getname");
}

void close_side(struct side *side) {
    struct fid *fids[] = {&side->ep->fid, &side->mr->fid, &side->av->fid, &side->cq->fid,
                          &side->eq->fid, &side->domain->fid, &side->fabric->fid};
    for (size_t i = 0; i < sizeof fids / sizeof *fids; i++)
        CHECK(fids[i]->ops->close(fids[i]) == 0, "closing object %zu", i);
}

int register_at(struct side *side, void *memory, size_t bytes, uint64_t access, struct fid_mr **mr) {
    return side->domain->mr->reg(&side->domain->fid, memory, bytes, access, 0, 0, 0, mr, NULL);
}

int register_gpu(struct side *side, void *address, size_t bytes, uint64_t access, struct fid_mr **mr) {
    struct iovec iov = {.iov_base = address, .iov_len = bytes};
    struct fi_mr_attr attr = {.mr_iov = &iov, .iov_count = 1, .access = access, .iface = FI_HMEM_CUDA};
    return side->domain->mr->regattr(&side->domain->fid, &attr, 0, mr);
}

int register_dma_buf(struct side *side, int fd, uint64_t offset, size_t bytes, void *base, struct fid_mr **mr) {
    struct { int fd; uint64_t offset; size_t bytes; void *base; } buffer = {fd, offset, bytes, base};
    struct fi_mr_attr attr = {.mr_iov = (void *)&buffer, .iov_count = 1, .iface = FI_HMEM_CUDA, .requested_key = 77,
        .access = FI_SEND | FI_WRITE | FI_REMOTE_WRITE | FI_READ | FI_REMOTE_READ};
    return side->domain->mr->regattr(&side->domain->fid, &attr, DMABUF, mr);
}

fi_addr_t insert_name(struct side *side, const void *name) {
    fi_addr_t address;
    CHECK(side->av->ops->insert(side->av, name, 1, &address, 0, NULL) == 1, "fi_av_insert");
    return address;
}

void share(struct side *side, int rank, int nic) {
    memcpy(rig->side[rank][nic].name, side->name, 32);
    rig->side[rank][nic].base = side->base;
    rig->side[rank][nic].key = side->key;
}

void exchange(struct side *side, int ranks, int rank, fi_addr_t *peers) {
    (void)rank;
    for (int other = 0; other < ranks; other++)
        peers[other] = insert_name(side, rig->side[other][0].name);
}

ssize_t put(struct side *side, fi_addr_t to, size_t offset, size_t bytes, uint64_t address, uint64_t key,
            uint64_t flags,
            uint64_t data, void *context) {
    struct iovec iov = {.iov_base = side->memory + offset, .iov_len = bytes};
    struct fi_rma_iov target = {.addr = address, .len = bytes, .key = key};
    struct fi_msg_rma write = {.msg_iov = &iov, .desc = &side->desc, .iov_count = 1, .addr = to, .rma_iov = &target,
                               .rma_iov_count = 1, .context = context, .data = data};
    return side->ep->rma->writemsg(side->ep, &write, flags);
}

ssize_t get(struct side *side, fi_addr_t from, void *buffer, size_t bytes, void *desc, uint64_t address, uint64_t key) {
    return side->ep->rma->read(side->ep, buffer, bytes, desc, from, address, key, new_context());
}

ssize_t write_to(struct side *side, const fi_addr_t *peers, int to, size_t bytes, uint64_t flags) {
    return put(side, peers[to], 0, bytes, rig->side[to][0].base + 4096, rig->side[to][0].key, flags, 7, new_context());
}

void send_to(struct side *side, fi_addr_t to, size_t bytes) {
    struct iovec iov = {.iov_base = side->memory, .iov_len = bytes};
    struct fi_msg message = {.msg_iov = &iov, .desc = &side->desc, .iov_count = 1, .addr = to,
        .context = new_context()};
    CHECK(side->ep->msg->sendmsg(side->ep, &message, 0) == 0, "posting a message");
}

int poll_side(struct side *side, struct fi_cq_data_entry *entry, struct fi_cq_err_entry *error, unsigned timeout_ms) {
    struct fi_cq_err_entry ignored = {0};
    uint64_t end = milliseconds() + timeout_ms;
    error = error ? error : &ignored;
    for (unsigned turn = 0;; turn++) {
        ssize_t answer = side->cq->ops->read(side->cq, entry, 1);
        if (answer == 1)
            return 1;
        if (answer == -FI_EAVAIL) {
            error->err_data_size = 0;
            CHECK(side->cq->ops->readerr(side->cq, error, 0) == 1, "no error to read");
            return -1;
        }
        CHECK(answer == -FI_EAGAIN, "fi_cq_read answers %zd", answer);
        if (turn % 16 == 15) {
            if (milliseconds() >= end)
                return 0;
            sched_yield();
        }
    }
}

void expect_done(struct side *side, const char *what) {
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error = {0};
    int answer = poll_side(side, &entry, &error, PATIENCE_MS);
    CHECK(answer == 1, "%s: %s, status %d", what, answer ? "failed" : "nothing came", error.prov_errno);
}

void expect_event(struct side *side, int status, int number, const char *what) {
    struct fi_eq_err_entry error = {0};
    struct fi_cq_data_entry entry;
    uint64_t end = milliseconds() + PATIENCE_MS;
    while (side->eq->ops->read(side->eq, NULL, NULL, 0, 0) != -FI_EAVAIL) {
        CHECK(poll_side(side, &entry, NULL, 1) == 0, "%s: a completion", what);
        CHECK(milliseconds() < end, "%s: no event", what);
    }
    CHECK(side->eq->ops->readerr(side->eq, &error, 0) == sizeof error && error.prov_errno == status &&
          error.err == number, "%s: status %d, errno %d", what, error.prov_errno, error.err);
}

void expect_error(struct side *side, int status, int number, const char *what) {
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error = {0};
    int answer = poll_side(side, &entry, &error, PATIENCE_MS);
    CHECK(answer == -1 && error.prov_errno == status && error.err == number, "%s: answer %d, status %d, errno %d", what,
          answer, error.prov_errno, error.err);
    const char *text = side->cq->ops->strerror(side->cq, error.prov_errno, error.err_data, NULL, 0);
    CHECK(text && *text && side->cq->ops->readerr(side->cq, &error, 0) == -FI_EAGAIN, "one error is there twice");
}

/* ---- data between three ranks on four NICs --------------------------------------------------------------------- */

enum { ROUNDS = 30, SLOT = 10000, SLOTS_AT = 32768, ACK = 1 << 27 };

static uint8_t byte_of(int from, int nic, int round, size_t i) {
    return (uint8_t)(((unsigned)from * 37 + (unsigned)nic * 101 + (unsigned)round * 13 + i * 7) | 1);
}

static size_t bytes_of(int from, int nic, int round) {
    return 1 + (size_t)((unsigned)round * 2654435761u + (unsigned)from * 40503u + (unsigned)nic * 977u) % (SLOT - 1);
}

/* Each rank writes to each other one on each NIC, a round at a time: the target checks the bytes when their immediate
 * has come, clears them, and acknowledges by an immediate. What arrives twice after that is found in the next round. */
void data_test(int rank, int ranks, bool kill_last) {
    static struct fi_context2 contexts[NICS][RANKS];
    struct side sides[NICS] = {0};
    fi_addr_t peers[NICS][RANKS];
    int round[NICS][RANKS] = {{0}}, received[NICS][RANKS] = {{0}}, unacknowledged[NICS][RANKS] = {{0}};
    bool failed[NICS][RANKS] = {{false}}, sending[NICS][RANKS] = {{false}};
    for (int nic = 0; nic < NICS; nic++) {
        open_side(&sides[nic], (uint32_t)nic, "efa-direct", 0);
        share(&sides[nic], rank, nic);
    }
    barrier();
    for (int nic = 0; nic < NICS; nic++)
        for (int other = 0; other < ranks; other++)
            peers[nic][other] = insert_name(&sides[nic], rig->side[other][nic].name);
    barrier();
    uint64_t end = milliseconds() + 2 * PATIENCE_MS;
    for (bool is_done = false; !is_done;) {
        CHECK(milliseconds() < end, "rank %d: the rounds do not end", rank);
        is_done = true;
        for (int nic = 0; nic < NICS; nic++) {
            struct side *side = &sides[nic];
            for (int to = 0; to < ranks; to++) {
                bool is_dying = kill_last && to == ranks - 1;
                if (to == rank)
                    continue;
                is_done &= is_dying ? failed[nic][to] || (rig->dead[to] && !sending[nic][to])
                                    : round[nic][to] == ROUNDS && received[nic][to] == ROUNDS;
                if (kill_last && rank == ranks - 1 && round[nic][to] == ROUNDS / 3)
                    raise(SIGKILL);
                if (round[nic][to] == ROUNDS || unacknowledged[nic][to] || sending[nic][to] || failed[nic][to])
                    continue;
                size_t bytes = bytes_of(rank, nic, round[nic][to]), at = (size_t)to * SLOT;
                for (size_t i = 0; i < bytes; i++)
                    side->memory[at + i] = byte_of(rank, nic, round[nic][to], i);
                ssize_t answer = put(side, peers[nic][to], at, bytes,
                    rig->side[to][nic].base + SLOTS_AT + (uint64_t)rank * SLOT, rig->side[to][nic].key,
                    FI_REMOTE_CQ_DATA,
                    (uint64_t)rank << 28 | (uint64_t)round[nic][to], &contexts[nic][to]);
                CHECK(answer == 0, "posting answers %zd", answer);
                unacknowledged[nic][to] = 1;
                sending[nic][to] = true;
            }
            struct fi_cq_data_entry entry;
            struct fi_cq_err_entry error = {0};
            int answer = poll_side(side, &entry, &error, 0);
            if (answer == -1) {
                CHECK(kill_last && (error.prov_errno == 13 || error.prov_errno == 15), "status %d", error.prov_errno);
                failed[nic][ranks - 1] = true;
            }
            if (answer != 1)
                continue;
            if (!(entry.flags & FI_REMOTE_CQ_DATA)) {
                sending[nic][(struct fi_context2 *)entry.op_context - contexts[nic]] = false;
                continue;
            }
            CHECK(!entry.op_context, "an unsolicited completion has a context");
            int from = (int)(entry.data >> 28), at_round = (int)(entry.data & (ACK - 1));
            CHECK(from < ranks && from != rank, "an immediate of rank %d", from);
            if (entry.data & ACK) {
                CHECK(at_round == round[nic][from], "an acknowledgement of another round");
                round[nic][from]++;
                unacknowledged[nic][from] = 0;
                continue;
            }
            uint8_t *slot = side->memory + SLOTS_AT + (size_t)from * SLOT;
            size_t bytes = bytes_of(from, nic, at_round);
            CHECK(at_round == received[nic][from] && entry.len == bytes, "another round, or length");
            for (size_t i = 0; i < SLOT; i++)
                CHECK(slot[i] == (i < bytes ? byte_of(from, nic, at_round, i) : 0), "byte %zu of %zu of round %d", i,
                      bytes, at_round);
            memset(slot, 0, SLOT);
            received[nic][from]++;
            put(side, peers[nic][from], (size_t)rank * SLOT, 8, rig->side[from][nic].base + 62776,
                rig->side[from][nic].key,
                FI_REMOTE_CQ_DATA, (uint64_t)rank << 28 | ACK | (uint64_t)at_round, NULL);
        }
    }
    CHECK(COUNTS->out_of_order > 0 && COUNTS->duplicates_placed > 0, "packets came in order, or once");
    uint64_t count = ++rig->arrived[rank];
    struct fi_cq_data_entry entry;
    while (!is_met(count))
        for (int nic = 0; nic < NICS; nic++)
            poll_side(&sides[nic], &entry, NULL, 0);
    for (int nic = 0; nic < NICS; nic++)
        close_side(&sides[nic]);
}
