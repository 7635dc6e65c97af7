// What tokenyard's verbs backend asks of RC queue pairs, shown between two processes on the devices that are named:
//
//   probe A B           payload, empty writes, linked and inline requests, a shared receive queue, cut and resumption
//   probe A B DEVICE    all this, then the net device DEVICE, of A or B, goes down and up while A writes
//
// A process of A writes into the memory of a process of B; they agree over a socket pair. Every check prints a line;
// the first that fails ends both with status 1. vm.sh --self-test runs it in the VM; it runs on any RoCE device.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
  REGION = 8 << 20,
  BLOCK = 64 << 10,
  BLOCKS = REGION / BLOCK,
  INLINE = 220,   // what the backend asks for; rxe grants it
  RECEIVES = 100, // fewer than BLOCKS: a writer that reuses a block waits until the reader has looked at it
  QUEUE = 256,    // requests of a send queue
  LIMIT_S = 60,   // of each wait: an emulated CPU that shares a loaded host is slow
};

static const char *side = "?";

static void fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "probe, %s: FAILED: ", side);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  exit(1);
}

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) fail("line %d: %s (errno: %s)", __LINE__, #condition, strerror(errno));                          \
  } while (0)

static void passed(const char *what) {
  printf("ok  %s\n", what);
  fflush(stdout);
}

static double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

// ---- the two processes

static int other; // the socket to the other process

static void tell(const void *data, size_t bytes) { CHECK(write(other, data, bytes) == (ssize_t)bytes); }

static void hear(void *data, size_t bytes) {
  struct pollfd ready = {.fd = other, .events = POLLIN};
  if (poll(&ready, 1, LIMIT_S * 1000) != 1) fail("the other process said nothing for %d s", LIMIT_S);
  CHECK(recv(other, data, bytes, MSG_WAITALL) == (ssize_t)bytes);
}

static void tell_number(uint32_t number) { tell(&number, sizeof number); }

static uint32_t hear_number(void) {
  uint32_t number;
  hear(&number, sizeof number);
  return number;
}

static void meet(void) {
  tell_number(0);
  hear_number();
}

// ---- a device

enum { PAIRS = 2 }; // queue pairs, on one shared receive queue

// What the other process must know to write here.
struct address {
  uint32_t number[PAIRS];
  union ibv_gid gid;
  uint64_t memory;
  uint32_t key;
};

static struct ibv_context *device;
static struct ibv_pd *domain;
static struct ibv_cq *sends, *receives;
static struct ibv_srq *shared;
static struct ibv_qp *pair[PAIRS];
static struct ibv_mr *region;
static unsigned char *memory;
static int gid_index;
static struct address mine, theirs;

// The RoCE v2 GID that is an IPv4 address. Its index is asked for again after a link came up: it may have moved.
static void find_gid(void) {
  struct ibv_port_attr port;
  CHECK(!ibv_query_port(device, 1, &port));
  static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
  for (gid_index = 0; gid_index < port.gid_tbl_len; gid_index++) {
    struct ibv_gid_entry entry;
    if (ibv_query_gid_ex(device, 1, gid_index, &entry, 0) || entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    if (memcmp(entry.gid.raw, mapped, sizeof mapped)) continue;
    mine.gid = entry.gid;
    return;
  }
  fail("no GID is a RoCE v2 one of an IPv4 address");
}

static void open_device(const char *name) {
  int count;
  struct ibv_device **list = ibv_get_device_list(&count);
  for (int i = 0; list && i < count; i++)
    if (!strcmp(ibv_get_device_name(list[i]), name)) device = ibv_open_device(list[i]);
  if (!device) fail("no device %s", name);
  CHECK(domain = ibv_alloc_pd(device));
  CHECK(sends = ibv_create_cq(device, PAIRS * QUEUE, NULL, NULL, 0));
  CHECK(receives = ibv_create_cq(device, RECEIVES, NULL, NULL, 0));
  struct ibv_srq_init_attr queue = {.attr = {.max_wr = RECEIVES, .max_sge = 1}};
  CHECK(shared = ibv_create_srq(domain, &queue));
  CHECK(memory = aligned_alloc(4096, REGION));
  memset(memory, 0, REGION);
  CHECK(region = ibv_reg_mr(domain, memory, REGION, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
  for (int i = 0; i < PAIRS; i++) {
    struct ibv_qp_init_attr init = {
        .send_cq = sends,
        .recv_cq = receives,
        .srq = shared,
        .cap = {.max_send_wr = QUEUE, .max_send_sge = 1, .max_inline_data = INLINE},
        .qp_type = IBV_QPT_RC,
    };
    CHECK(pair[i] = ibv_create_qp(domain, &init));
    CHECK(init.cap.max_inline_data >= INLINE);
    mine.number[i] = pair[i]->qp_num;
  }
  mine.memory = (uintptr_t)memory;
  mine.key = region->rkey;
  find_gid();
  CHECK(!fcntl(device->async_fd, F_SETFL, fcntl(device->async_fd, F_GETFL) | O_NONBLOCK));
}

static void post_receives(int count) {
  struct ibv_recv_wr receive = {0}, *bad;
  while (count--) CHECK(!ibv_post_srq_recv(shared, &receive, &bad));
}

static void set_state(int i, enum ibv_qp_state state) {
  struct ibv_qp_attr attr = {.qp_state = state};
  CHECK(!ibv_modify_qp(pair[i], &attr, IBV_QP_STATE));
}

// RESET to RTS. Both sides number packets from `first`, anew after each cut, so that no late packet is taken for a new
// one. With `timeout` 10 a write fails after 7 tries of 4 ms, 30 ms in all; retry_cnt 7 never gives up on rxe.
static void connect_pair(int i, uint32_t first, int timeout) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
  CHECK(!ibv_modify_qp(pair[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
  attr = (struct ibv_qp_attr){
      .qp_state = IBV_QPS_RTR,
      .path_mtu = IBV_MTU_4096,
      .dest_qp_num = theirs.number[i],
      .rq_psn = first,
      .max_dest_rd_atomic = 1,
      .min_rnr_timer = 12,
      .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = theirs.gid, .sgid_index = gid_index, .hop_limit = 4}},
  };
  CHECK(!ibv_modify_qp(pair[i], &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
  attr = (struct ibv_qp_attr){
      .qp_state = IBV_QPS_RTS, .timeout = timeout, .retry_cnt = 6, .rnr_retry = 7, .sq_psn = first, .max_rd_atomic = 1};
  CHECK(!ibv_modify_qp(pair[i], &attr,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct ibv_wc next_of(struct ibv_cq *queue) {
  struct ibv_wc done;
  int count;
  double start = now_s();
  while (!(count = ibv_poll_cq(queue, 1, &done)))
    if (now_s() - start > LIMIT_S) fail("no completion within %d s", LIMIT_S);
  CHECK(count == 1);
  return done;
}

// ---- writes and what comes of them

// The bytes of write `stamp`: no two stamps, and no two places, have the same.
static void fill(unsigned char *data, size_t bytes, uint32_t stamp) {
  for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)(i * 31 + (i >> 8) * 7 + stamp * 13 + 1);
}

static bool holds(const unsigned char *data, size_t bytes, uint32_t stamp) {
  for (size_t i = 0; i < bytes; i++)
    if (data[i] != (unsigned char)(i * 31 + (i >> 8) * 7 + stamp * 13 + 1)) return false;
  return true;
}

struct request {
  struct ibv_send_wr write;
  struct ibv_sge piece;
};

// A write with an immediate from and to the same offset of both regions.
static void prepare(struct request *request, size_t offset, size_t bytes, uint32_t immediate, int flags) {
  request->piece = (struct ibv_sge){.addr = (uintptr_t)memory + offset, .length = bytes, .lkey = region->lkey};
  request->write = (struct ibv_send_wr){
      .wr_id = immediate,
      .sg_list = &request->piece,
      .num_sge = bytes ? 1 : 0,
      .opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
      .send_flags = flags,
      .imm_data = htonl(immediate),
      .wr.rdma = {.remote_addr = theirs.memory + offset, .rkey = theirs.key},
  };
}

static void post(int i, size_t offset, size_t bytes, uint32_t immediate, int flags) {
  struct request request;
  struct ibv_send_wr *bad;
  prepare(&request, offset, bytes, immediate, flags);
  CHECK(!ibv_post_send(pair[i], &request.write, &bad));
}

static void sent(void) {
  struct ibv_wc done = next_of(sends);
  if (done.status) fail("a write ended with: %s", ibv_wc_status_str(done.status));
}

static void arrived(int i, uint32_t immediate, uint32_t bytes) {
  struct ibv_wc done = next_of(receives);
  if (done.status) fail("a receive ended with: %s", ibv_wc_status_str(done.status));
  CHECK(done.opcode == IBV_WC_RECV_RDMA_WITH_IMM && done.wc_flags & IBV_WC_WITH_IMM);
  if (ntohl(done.imm_data) != immediate) fail("immediate %u instead of %u", ntohl(done.imm_data), immediate);
  CHECK(done.byte_len == bytes);
  CHECK(done.qp_num == pair[i]->qp_num);
  post_receives(1);
}

static void payload(bool writer) {
  enum { OFFSET = 4096, BYTES = 100001, IMMEDIATE = 0xdeadbeef };
  if (writer) {
    fill(memory + OFFSET, BYTES, 1);
    post(0, OFFSET, BYTES, IMMEDIATE, IBV_SEND_SIGNALED);
    sent();
    meet();
    return;
  }
  arrived(0, IMMEDIATE, BYTES);
  CHECK(holds(memory + OFFSET, BYTES, 1));
  CHECK(!memory[OFFSET - 1] && !memory[OFFSET + BYTES]);
  passed("a write with an immediate: its bytes are there when the immediate is, and none beside them");
  meet();
}

static void empty(bool writer) {
  if (writer) {
    post(0, REGION, 0, 42, IBV_SEND_SIGNALED);
    sent();
    meet();
    return;
  }
  arrived(0, 42, 0);
  passed("an empty write with an immediate, at the region's end");
  meet();
}

static void linked(bool writer) {
  enum { COUNT = 8 };
  if (writer) {
    struct request requests[COUNT];
    struct ibv_send_wr *bad;
    for (int i = 0; i < COUNT; i++) {
      bool last = i == COUNT - 1;
      fill(memory + i * INLINE, INLINE, i);
      prepare(&requests[i], i * INLINE, INLINE, i, IBV_SEND_INLINE | (last ? IBV_SEND_SIGNALED : 0));
      requests[i].write.next = last ? NULL : &requests[i + 1].write;
    }
    CHECK(!ibv_post_send(pair[0], &requests[0].write, &bad));
    memset(memory, 0xff, COUNT * INLINE); // inline data was copied by the post
    sent();
    meet();
    return;
  }
  for (int i = 0; i < COUNT; i++) {
    arrived(0, i, INLINE);
    CHECK(holds(memory + i * INLINE, INLINE, i));
  }
  passed("8 linked requests of 220 inline bytes: one post, one completion");
  meet();
}

static void shared_queue(bool writer) {
  enum { ROUNDS = 300 }; // more than the queue has receives: reposted ones are used, by either queue pair
  for (int i = 0; i < ROUNDS; i++) {
    if (writer) {
      post(i % PAIRS, 0, 8, i, IBV_SEND_SIGNALED);
      sent();
    } else {
      arrived(i % PAIRS, i, 8);
    }
  }
  if (!writer) passed("two queue pairs on one shared receive queue, 300 writes by turns");
  meet();
}

// ---- cut and resumption

enum { MOST = 20000 }; // writes of a test

static unsigned char seen[MOST]; // how often an immediate arrived
static uint32_t taken;           // how many arrived in all

// Takes what has arrived. Receives that a cut queue pair held do not count: a shared queue keeps its own.
static void take(void) {
  struct ibv_wc done;
  while (ibv_poll_cq(receives, 1, &done) > 0) {
    if (done.status) continue;
    uint32_t immediate = ntohl(done.imm_data);
    CHECK(immediate < MOST);
    seen[immediate]++;
    if (!holds(memory + immediate % BLOCKS * BLOCK, BLOCK, immediate)) fail("write %u arrived torn", immediate);
    taken++;
    post_receives(1);
  }
}

// Takes until `count` have arrived.
static void take_until(uint32_t count) {
  double start = now_s();
  while (taken < count) {
    take();
    if (now_s() - start > LIMIT_S) fail("%u of %u writes arrived within %d s", taken, count, LIMIT_S);
  }
}

// Waits for `count` completions and returns how many were good; `first_error` becomes the status of the first that was
// not, unless there was one before.
static uint32_t end_of(uint32_t count, enum ibv_wc_status *first_error) {
  uint32_t good = 0;
  while (count--) {
    struct ibv_wc done = next_of(sends);
    if (!done.status) good++;
    else if (!*first_error) *first_error = done.status;
  }
  return good;
}

static void write_blocks(uint32_t from, uint32_t to) {
  for (uint32_t i = from; i < to; i++) {
    fill(memory + i % BLOCKS * BLOCK, BLOCK, i);
    post(0, i % BLOCKS * BLOCK, BLOCK, i, IBV_SEND_SIGNALED);
  }
}

static uint32_t late; // immediates that a queue pair took while it was being moved to ERR

// The reader: what has been taken by the end is final, and the writer goes on from it. ERR alone does not do: on rxe a
// packet that is being handled may still be taken after the move. RESET waits for it, and what was taken stays in the
// completion queue of rxe; mlx5 drops it there, so all that is in the queue is taken before. RESET only when the writer
// has stopped.
static void cut_reader(void) {
  set_state(0, IBV_QPS_ERR);
  take();
  uint32_t at_error = taken;
  meet();
  meet();
  take();
  set_state(0, IBV_QPS_RESET);
  take();
  uint32_t final = taken;
  late += final - at_error;
  usleep(2000);
  take();
  if (taken != final) fail("%u immediates arrived after the cut", taken - final);
  tell_number(taken);
}

// Both are in ERR or RESET, or idle, before either is reset: a write that comes in while a queue pair is on its way
// from RESET to RTR puts it into ERR, on rxe at least, and the next step is refused.
static void resume(uint32_t first, int timeout) {
  meet();
  set_state(0, IBV_QPS_RESET);
  connect_pair(0, first, timeout);
  meet();
}

static void exactly_once(uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (seen[i] != 1) fail("write %u arrived %u times", i, seen[i]);
}

static void cuts(bool writer) {
  enum { ROUNDS = 20, COUNT = 24, TIMEOUT = 14 };
  double resumed_s = 0;
  for (uint32_t round = 0; round < ROUNDS; round++) {
    if (writer) {
      enum ibv_wc_status error = 0;
      write_blocks(0, COUNT);
      meet();
      set_state(0, IBV_QPS_ERR);
      uint32_t good = end_of(COUNT, &error);
      meet();
      uint32_t count = hear_number();
      // An acknowledged write was taken. The converse does not hold: an acknowledgement may be lost with the pair.
      if (good > count) fail("%u writes were acknowledged, and %u taken", good, count);
      resume(1000 * round + 500, TIMEOUT);
      write_blocks(count, COUNT);
      error = 0;
      if (end_of(COUNT - count, &error) != COUNT - count) fail("after a cut: %s", ibv_wc_status_str(error));
    } else {
      memset(seen, 0, sizeof seen);
      taken = 0;
      take_until(round);
      double start = now_s();
      cut_reader();
      resume(1000 * round + 500, TIMEOUT);
      resumed_s += now_s() - start;
      take_until(COUNT);
      exactly_once(COUNT);
    }
    meet();
  }
  if (writer) return;
  char line[120];
  snprintf(line, sizeof line,
           "cut and resumed by count, %d times (%u writes taken after ERR): each of %d once; %.1f ms", ROUNDS, late,
           COUNT, resumed_s / ROUNDS * 1e3);
  passed(line);
}

// ---- a link that goes down

// Whether the event came within the time.
static bool event_comes(enum ibv_event_type wanted, int wait_ms) {
  struct pollfd ready = {.fd = device->async_fd, .events = POLLIN};
  struct ibv_async_event event;
  while (poll(&ready, 1, wait_ms) == 1 && !ibv_get_async_event(device, &event)) {
    enum ibv_event_type type = event.event_type;
    ibv_ack_async_event(&event);
    if (type == wanted) return true;
  }
  return false;
}

static void wait_event(enum ibv_event_type wanted) {
  if (!event_comes(wanted, LIMIT_S * 1000)) fail("no event %s within %d s", ibv_event_type_str(wanted), LIMIT_S);
}

static enum ibv_port_state port_state(void) {
  struct ibv_port_attr port;
  CHECK(!ibv_query_port(device, 1, &port));
  return port.state;
}

static pid_t set_link(const char *net_device, const char *state) {
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) {
    execlp("ip", "ip", "link", "set", "dev", net_device, state, NULL);
    _exit(127);
  }
  return child;
}

static bool ended(pid_t child) {
  int status;
  pid_t gone = waitpid(child, &status, WNOHANG);
  CHECK(gone >= 0);
  if (gone && status) fail("ip link set ended with status %d", status);
  return gone;
}

// The link goes down under a stream of writes, and more are posted while it is down: those cannot arrive, and must end
// with an error. After it is up again, all that the reader did not take are posted again.
static void link_down(bool writer, const char *net_device) {
  enum { WINDOW = 16, LATER = 100, TIMEOUT = 10 };
  resume(7, TIMEOUT);
  if (writer) {
    enum ibv_wc_status error = 0;
    uint32_t posted = 0, done = 0, good = 0;
    while (!event_comes(IBV_EVENT_PORT_ERR, 0)) {
      if (posted + WINDOW + LATER > MOST) fail("no event that the port is down after %u writes", posted);
      write_blocks(posted, posted + 1);
      if (++posted - done < WINDOW) continue;
      good += end_of(1, &error);
      done++;
    }
    CHECK(port_state() == IBV_PORT_DOWN);
    hear_number();
    write_blocks(posted, posted + WINDOW);
    posted += WINDOW;
    good += end_of(posted - done, &error);
    // The first when the far link is down, the second when the own one is.
    if (error != IBV_WC_RETRY_EXC_ERR && error != IBV_WC_LOC_QP_OP_ERR)
      fail("writes while the link is down: %s", ibv_wc_status_str(error));
    tell_number(good);
    wait_event(IBV_EVENT_PORT_ACTIVE);
    CHECK(port_state() == IBV_PORT_ACTIVE);
    meet();
    set_state(0, IBV_QPS_ERR);
    meet();
    uint32_t count = hear_number(), all = posted + LATER;
    CHECK(good <= count && count <= posted - WINDOW);
    find_gid();
    resume(7007, TIMEOUT);
    tell_number(all);
    error = 0;
    for (uint32_t i = count; i < all; i++) {
      write_blocks(i, i + 1);
      if (end_of(1, &error) != 1) fail("after link up: %s", ibv_wc_status_str(error));
    }
    meet();
    return;
  }
  memset(seen, 0, sizeof seen);
  taken = 0;
  take_until(10);
  pid_t child = set_link(net_device, "down");
  while (!ended(child)) take();
  wait_event(IBV_EVENT_PORT_ERR);
  CHECK(port_state() == IBV_PORT_DOWN);
  tell_number(0);
  uint32_t good = hear_number();
  child = set_link(net_device, "up");
  while (!ended(child)) take();
  wait_event(IBV_EVENT_PORT_ACTIVE);
  CHECK(port_state() == IBV_PORT_ACTIVE);
  take();
  uint32_t before = taken;
  cut_reader();
  find_gid();
  resume(7007, TIMEOUT);
  uint32_t all = hear_number();
  take_until(all);
  exactly_once(all);
  char line[160];
  snprintf(
      line, sizeof line,
      "link down and up: both ports told it; %u writes taken, %u of them acknowledged, before; then each of %u once",
      before, good, all);
  passed(line);
  meet();
}

static int run(bool writer, const char *name, const char *net_device) {
  side = writer ? "writer" : "reader";
  open_device(name);
  tell(&mine, sizeof mine);
  hear(&theirs, sizeof theirs);
  post_receives(RECEIVES);
  for (int i = 0; i < PAIRS; i++) connect_pair(i, 0, 14);
  meet();
  payload(writer);
  empty(writer);
  linked(writer);
  shared_queue(writer);
  cuts(writer);
  if (net_device) link_down(writer, net_device);
  return 0;
}

int main(int count, char **arguments) {
  if (count != 3 && count != 4) {
    fprintf(stderr, "usage: probe WRITING-DEVICE READING-DEVICE [NET-DEVICE]\n");
    return 2;
  }
  const char *net_device = count == 4 ? arguments[3] : NULL;
  int sockets[2];
  CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
  fflush(stdout);
  // Before any device is opened: verbs objects do not pass through a fork.
  pid_t child = fork();
  CHECK(child >= 0);
  other = sockets[child ? 0 : 1];
  close(sockets[child ? 1 : 0]);
  if (!child) return run(true, arguments[1], net_device);
  int result = run(false, arguments[2], net_device), status;
  CHECK(waitpid(child, &status, 0) == child);
  return result || status;
}
