/* Files that processes share: one for each queue pair, one for each pair of initiator and target.
 *
 * A file names its owner's process and the time that it began, so a killed process is told from a new one with its
 * number. What a killed process left is removed when a domain is opened next.
 */
#define _GNU_SOURCE
#include "efa.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* State and begin of a process, from /proc/PID/stat: the third and the 22nd field. 0: there is none, or a zombie. */
static uint64_t begin_of(int32_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t bytes = read(fd, text, sizeof text - 1);
    close(fd);
    text[bytes > 0 ? bytes : 0] = 0;
    char *at = strrchr(text, ')');
    if (!at || !at[1] || at[2] == 'Z' || at[2] == 'X')
        return 0;
    at++;
    for (int field = 3; field < 22 && at; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

bool is_owner_dead(const struct owner *owner) { return begin_of(owner->pid) != owner->started; }

static struct owner self(void) {
    int32_t pid = (int32_t)getpid();
    return (struct owner){.pid = pid, .started = begin_of(pid)};
}

static void path_of_qp(char *path, size_t bytes, uint32_t nic, uint32_t qpn) {
    snprintf(path, bytes, "%s/tyefa-%s-q%u-%u", config.directory, config.scope, nic, qpn);
}

static void path_of_link(char *path, size_t bytes, uint32_t nic, uint32_t qpn, uint32_t to_nic, uint32_t to_qpn) {
    snprintf(path, bytes, "%s/tyefa-%s-l%u-%u-%u-%u", config.directory, config.scope, nic, qpn, to_nic, to_qpn);
}

/* Removes files of dead processes; counts the queue pairs of living ones on a NIC. */
static uint32_t sweep_and_count(uint32_t nic) {
    char prefix[80], of_nic[16];
    uint32_t living = 0;
    DIR *directory = opendir(config.directory);
    if (!directory)
        return 0;
    snprintf(prefix, sizeof prefix, "tyefa-%s-", config.scope);
    snprintf(of_nic, sizeof of_nic, "q%u-", nic);
    for (struct dirent *file; (file = readdir(directory));) {
        const char *rest = file->d_name + strlen(prefix);
        if (strncmp(file->d_name, prefix, strlen(prefix)) || (*rest != 'q' && *rest != 'l'))
            continue;
        int fd = openat(dirfd(directory), file->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        struct owner owner = {0};
        struct stat status = {0};
        off_t at = *rest == 'q' ? (off_t)offsetof(struct shared_qp, owner) : (off_t)offsetof(struct shared_link, owner);
        bool is_told = pread(fd, &owner, sizeof owner, at) == sizeof owner && owner.pid;
        fstat(fd, &status);
        close(fd);
        /* A file without an owner is being made, or its maker was killed. */
        if (is_told ? is_owner_dead(&owner) : time(NULL) - status.st_mtime > 10)
            unlinkat(dirfd(directory), file->d_name, 0);
        else
            living += !strncmp(rest, of_nic, strlen(of_nic));
    }
    closedir(directory);
    return living;
}

void sweep(void) { sweep_and_count(0); }

static void *map_file(const char *path, int flags, size_t *bytes) {
    int fd = open(path, flags | O_RDWR | O_CLOEXEC, 0600);
    struct stat status;
    if (fd < 0)
        return NULL;
    bool fits = flags & O_CREAT ? !ftruncate(fd, (off_t)*bytes)
                                : !fstat(fd, &status) && status.st_size > 0 && (*bytes = (size_t)status.st_size);
    void *at = fits ? mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    return at == MAP_FAILED ? NULL : at;
}

int open_qp(struct endpoint *endpoint) {
    static _Atomic uint32_t next;
    static _Atomic uint32_t base;
    uint32_t nic = endpoint->domain->nic, random[2];
    size_t bytes = sizeof(struct shared_qp);
    if (sweep_and_count(nic) >= config.qps) {
        refuse(RULE_QPS);
        return -FI_ENOMEM; /* ibv_create_qp of a device that has no queue pair left */
    }
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return -FI_EIO;
    uint32_t none = 0;
    atomic_compare_exchange_strong(&base, &none, random[0] | 1);
    for (int tries = 0; tries < 65536 && !endpoint->qp; tries++) {
        uint32_t qpn = (atomic_load(&base) + atomic_fetch_add(&next, 1)) & 0xffff; /* new with every endpoint */
        if (!qpn)
            continue;
        path_of_qp(endpoint->path, sizeof endpoint->path, nic, qpn);
        endpoint->qp = map_file(endpoint->path, O_CREAT | O_EXCL, &bytes);
        endpoint->name.qpn = (uint16_t)qpn;
    }
    if (!endpoint->qp)
        return -FI_ENOMEM;
    gid_of_nic(nic, endpoint->name.gid);
    endpoint->name.qkey = random[1];
    endpoint->qp->nic = nic;
    endpoint->qp->owner = self();
    endpoint->qp->name = endpoint->name;
    endpoint->qp->unsolicited = endpoint->is_unsolicited;
    atomic_store_explicit(&endpoint->qp->ready, 1, memory_order_release);
    return 0;
}

/* ---- initiator ------------------------------------------------------------------------------------------------- */

static struct tokenyard_double_peer *record_of(uint32_t nic, const struct name *peer, bool may_add) {
    static struct {
        uint32_t nic;
        struct name name;
        struct tokenyard_double_peer counts;
    } records[4096];
    static _Atomic uint32_t used;
    static struct tokenyard_double_peer overflow;
    uint32_t count = atomic_load(&used);
    for (uint32_t i = 0; i < count; i++)
        if (records[i].nic == nic && !memcmp(&records[i].name, peer, sizeof *peer))
            return &records[i].counts;
    if (!may_add || count == 4096)
        return may_add ? &overflow : NULL;
    uint32_t at = atomic_fetch_add(&used, 1) % 4096;
    records[at].nic = nic;
    records[at].name = *peer;
    return &records[at].counts;
}

EXPORT int tokenyard_double_peer(uint32_t nic, const void *name, struct tokenyard_double_peer *out);
int tokenyard_double_peer(uint32_t nic, const void *name, struct tokenyard_double_peer *out) {
    struct name peer;
    memcpy(&peer, name, sizeof peer);
    peer.pad = 0, peer.unused = 0;
    struct tokenyard_double_peer *record = record_of(nic, &peer, false);
    if (!record)
        return -1;
    *out = *record;
    return 0;
}

static size_t round_64(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static void lay_out(struct shared_link *shared, struct answer **answers, uint8_t **packets) {
    *answers = (struct answer *)(void *)shared->rest;
    *packets = shared->rest + round_64(shared->depth * sizeof(struct answer));
}

struct link_out *link_to(struct endpoint *endpoint, fi_addr_t address) {
    const struct name *name = &endpoint->av->names[address];
    if (address >= endpoint->by_address_room) {
        size_t room = (size_t)address + 64;
        struct link_out **table = realloc(endpoint->by_address, room * sizeof *table);
        if (!table)
            return NULL;
        memset(table + endpoint->by_address_room, 0, (room - endpoint->by_address_room) * sizeof *table);
        endpoint->by_address = table;
        endpoint->by_address_room = room;
    }
    struct link_out *link = endpoint->by_address[address];
    if (link && !memcmp(&link->peer, name, sizeof *name))
        return link;
    for (link = endpoint->links; link; link = link->next)
        if (!memcmp(&link->peer, name, sizeof *name))
            return endpoint->by_address[address] = link;
    link = calloc(1, sizeof *link);
    link->endpoint = endpoint;
    link->peer = *name;
    link->peer_nic = nic_of_gid(name->gid);
    link->pending = calloc(endpoint->depth, sizeof *link->pending);
    link->queued = calloc(endpoint->depth, sizeof *link->queued);
    link->record = record_of(endpoint->domain->nic, name, true);
    link->next = endpoint->links;
    endpoint->links = link;
    try_open_link(link);
    return endpoint->by_address[address] = link;
}

/* Makes the ring to the peer, and claims a place in the peer's table. False: not yet, or the peer is gone. */
bool try_open_link(struct link_out *link) {
    struct endpoint *endpoint = link->endpoint;
    char path[256];
    if (link->is_open || link->is_gone)
        return link->is_open;
    if (!link->peer_qp) {
        size_t bytes;
        path_of_qp(path, sizeof path, link->peer_nic, link->peer.qpn);
        link->peer_qp = map_file(path, 0, &bytes);
    }
    struct shared_qp *qp = link->peer_qp;
    uint32_t ready = qp ? atomic_load_explicit(&qp->ready, memory_order_acquire) : 2;
    if (ready == 2 || (ready == 1 && qp->name.qkey != link->peer.qkey)) {
        link->is_gone = true; /* status 9: no such queue pair */
        return false;
    }
    if (ready == 0 || is_owner_dead(&qp->owner))
        return false;
    uint32_t nic = endpoint->domain->nic, slot_bytes = (uint32_t)sizeof(struct packet) + config.packet;
    link->shared_bytes = sizeof(struct shared_link) + round_64(endpoint->depth * sizeof(struct answer)) +
                         (size_t)config.slots * slot_bytes;
    path_of_link(path, sizeof path, nic, endpoint->name.qpn, link->peer_nic, link->peer.qpn);
    unlink(path); /* of an earlier queue pair with this number */
    link->shared = map_file(path, O_CREAT | O_EXCL, &link->shared_bytes);
    if (!link->shared)
        return false;
    link->shared->owner = self();
    link->shared->initiator = endpoint->name;
    link->shared->depth = endpoint->depth;
    link->shared->slots = config.slots;
    link->shared->packet = config.packet;
    link->shared->unsolicited = endpoint->is_unsolicited;
    lay_out(link->shared, &link->answers, &link->packets);
    uint64_t claim = (uint64_t)nic << 32 | (uint64_t)endpoint->name.qpn << 1 | 1;
    for (uint32_t i = 0; i < EFA_MAX_LINKS && !link->is_open; i++) {
        uint64_t none = 0;
        link->is_open = atomic_compare_exchange_strong(&qp->claims[i], &none, claim);
    }
    if (!link->is_open) {
        munmap(link->shared, link->shared_bytes);
        link->shared = NULL;
        unlink(path);
        return false;
    }
    atomic_fetch_add_explicit(&qp->claimed, 1, memory_order_release);
    return true;
}

/* ---- target ---------------------------------------------------------------------------------------------------- */

void drop_link_in(struct endpoint *endpoint, size_t index) {
    struct link_in *link = endpoint->in[index];
    end_late(endpoint, link, NULL, 0);
    atomic_store(&link->shared->target_closed, 1);
    atomic_store(&endpoint->qp->claims[link->place], 0);
    munmap(link->shared, link->shared_bytes);
    free(link->arrivals);
    free(link);
    endpoint->in[index] = endpoint->in[--endpoint->in_count];
}

void take_claims(struct endpoint *endpoint) {
    struct shared_qp *qp = endpoint->qp;
    uint32_t claimed = atomic_load_explicit(&qp->claimed, memory_order_acquire);
    if (claimed == endpoint->claims_seen)
        return;
    endpoint->claims_seen = claimed;
    for (size_t i = endpoint->in_count; i-- > 0;)
        if (is_owner_dead(&endpoint->in[i]->shared->owner))
            drop_link_in(endpoint, i);
    for (uint32_t place = 0; place < EFA_MAX_LINKS; place++) {
        uint64_t claim = atomic_load(&qp->claims[place]);
        bool is_taken = !claim;
        for (size_t i = 0; i < endpoint->in_count && !is_taken; i++)
            is_taken = endpoint->in[i]->place == place;
        if (is_taken)
            continue;
        char path[256];
        path_of_link(path, sizeof path, (uint32_t)(claim >> 32), (uint32_t)(claim >> 1) & 0xffff, qp->nic,
                     endpoint->name.qpn);
        struct link_in *link = calloc(1, sizeof *link);
        link->shared = map_file(path, 0, &link->shared_bytes);
        unlink(path);
        if (!link->shared) { /* its maker was killed, and the file swept */
            free(link);
            atomic_store(&qp->claims[place], 0);
            continue;
        }
        lay_out(link->shared, &link->answers, &link->packets);
        link->arrivals = calloc(link->shared->depth, sizeof *link->arrivals);
        link->av_version = UINT64_MAX;
        link->place = place;
        endpoint->in[endpoint->in_count++] = link;
        atomic_store_explicit(&link->shared->known, 1, memory_order_release);
    }
}

/* After this, nothing of the queue pair exists. Packets that it sent may still arrive elsewhere. */
void close_qp(struct endpoint *endpoint) {
    atomic_store(&endpoint->qp->ready, 2);
    unlink(endpoint->path);
    take_claims(endpoint);
    while (endpoint->in_count)
        drop_link_in(endpoint, endpoint->in_count - 1);
    while (endpoint->links) {
        struct link_out *link = endpoint->links;
        endpoint->links = link->next;
        if (link->shared) {
            atomic_store(&link->shared->initiator_closed, 1);
            munmap(link->shared, link->shared_bytes);
        }
        if (link->peer_qp)
            munmap(link->peer_qp, sizeof *link->peer_qp);
        free(link->pending);
        free(link->queued);
        free(link);
    }
    munmap(endpoint->qp, sizeof *endpoint->qp);
    endpoint->qp = NULL;
}
