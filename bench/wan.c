// A slow line between two network namespaces, each with one TUN device, all of which ends with this process.
//
//   wan DELAY_US RATE_MBIT LOSS_PERCENT SEED QUEUE_BYTES
//
// Each way a packet waits for the line (RATE_MBIT, with what Ethernet adds to it), then travels for DELAY_US, and is
// lost on the way with LOSS_PERCENT.  What would wait behind more than QUEUE_BYTES is dropped.  The first line of the
// output names the two namespaces, for nsenter --net=...; their addresses are 198.18.0.1 and 198.18.0.2, a range that
// is reserved for measurements.  A second line, on SIGTERM, counts packets and CPU seconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
  MTU = 1500,
  FRAMING = 38,         // preamble, header, checksum and gap
  SMALLEST = 46,        // what Ethernet fills a packet up to
  BURST = 64,           // packets read from one side before the other has its turn
  DEVICE_QUEUE = 20000, // packets; the queue that counts is ours
  SLACK_NS = 50000,     // packets due this soon go with those that are due now
};

struct packet {
  int64_t due;
  uint32_t length;
  char content[];
};

struct direction {
  int from, to;
  char *ring; // packets one after the other; one of length 0 sends the reader back to the start
  size_t room, head, tail, used;
  int64_t line_free; // when the last bit of what waits has left
  uint64_t random;
  uint64_t sent, lost, dropped;
};

static volatile sig_atomic_t stopped;

static void stop(int signal) {
  (void)signal;
  stopped = 1;
}

static void check(int bad, const char *what) {
  if (!bad) return;
  fprintf(stderr, "wan: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static struct ifreq request(const char *name) {
  struct ifreq asked;
  memset(&asked, 0, sizeof asked);
  strncpy(asked.ifr_name, name, IFNAMSIZ - 1);
  return asked;
}

static void set_address(int control, const char *name, unsigned long what, const char *address) {
  struct ifreq asked = request(name);
  struct sockaddr_in *place = (struct sockaddr_in *)&asked.ifr_addr;
  place->sin_family = AF_INET;
  check(inet_pton(AF_INET, address, &place->sin_addr) != 1, address);
  check(ioctl(control, what, &asked) < 0, "cannot set an address");
}

static void set_up(int control, const char *name) {
  struct ifreq asked = request(name);
  asked.ifr_flags = IFF_UP | IFF_RUNNING;
  check(ioctl(control, SIOCSIFFLAGS, &asked) < 0, "cannot bring a device up");
}

// Moves this process into a new namespace and returns its end of the line.
static int new_end(const char *address, int *namespace) {
  check(unshare(CLONE_NEWNET) < 0, "cannot make a network namespace");
  *namespace = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  check(*namespace < 0, "/proc/self/ns/net");
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  check(device < 0, "/dev/net/tun");
  struct ifreq asked = request("wan");
  asked.ifr_flags = IFF_TUN | IFF_NO_PI;
  check(ioctl(device, TUNSETIFF, &asked) < 0, "cannot make a TUN device");
  int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  check(control < 0, "cannot make a socket");
  asked = request("wan");
  asked.ifr_qlen = DEVICE_QUEUE;
  check(ioctl(control, SIOCSIFTXQLEN, &asked) < 0, "cannot set the queue of a device");
  set_address(control, "wan", SIOCSIFADDR, address);
  set_address(control, "wan", SIOCSIFNETMASK, "255.255.255.0");
  set_up(control, "wan");
  set_up(control, "lo");
  close(control);
  return device;
}

static size_t size_of(uint32_t length) { return (sizeof(struct packet) + length + 7) & ~(size_t)7; }

// Where the next packet may be read to, or NULL if the ring is full.
static struct packet *place(struct direction *way) {
  size_t most = size_of(MTU);
  if (way->room - way->used < 2 * most) return NULL;
  if (way->room - way->tail < 2 * most) { // there is always space for the mark that sends the reader back
    ((struct packet *)(way->ring + way->tail))->length = 0;
    way->used += way->room - way->tail;
    way->tail = 0;
    if (way->room - way->used < 2 * most) return NULL;
  }
  return (struct packet *)(way->ring + way->tail);
}

static int is_lost(struct direction *way, uint64_t below) {
  way->random ^= way->random << 13;
  way->random ^= way->random >> 7;
  way->random ^= way->random << 17;
  return (way->random >> 11) < below;
}

static void take(struct direction *way, int64_t delay, double ns_per_byte, uint64_t loss, int64_t longest) {
  char spare[MTU];
  for (int taken = 0; taken < BURST; taken++) {
    struct packet *packet = place(way);
    ssize_t length = read(way->from, packet ? packet->content : spare, MTU);
    if (length <= 0) return;
    int64_t now = now_ns();
    if (way->line_free < now) way->line_free = now;
    if (packet == NULL || way->line_free - now > longest) {
      way->dropped++;
      continue;
    }
    way->line_free += (int64_t)(((length < SMALLEST ? SMALLEST : length) + FRAMING) * ns_per_byte);
    if (is_lost(way, loss)) {
      way->lost++;
      continue;
    }
    packet->due = way->line_free + delay;
    packet->length = (uint32_t)length;
    way->tail += size_of(packet->length);
    way->used += size_of(packet->length);
  }
}

// Hands over what is due and returns when the next packet is.
static int64_t deliver(struct direction *way, int64_t now) {
  while (way->used) {
    struct packet *packet = (struct packet *)(way->ring + way->head);
    if (packet->length == 0) {
      way->used -= way->room - way->head;
      way->head = 0;
      continue;
    }
    if (packet->due > now + SLACK_NS) return packet->due;
    if (write(way->to, packet->content, packet->length) == (ssize_t)packet->length) way->sent++;
    way->head += size_of(packet->length);
    way->used -= size_of(packet->length);
  }
  return INT64_MAX;
}

int main(int count, char **argument) {
  if (count != 6) {
    fprintf(stderr, "usage: wan DELAY_US RATE_MBIT LOSS_PERCENT SEED QUEUE_BYTES\n");
    return 2;
  }
  int64_t delay = atoll(argument[1]) * 1000;
  double ns_per_byte = 8000.0 / atof(argument[2]);
  uint64_t loss = (uint64_t)(atof(argument[3]) / 100 * (double)(1ull << 53));
  uint64_t seed = strtoull(argument[4], NULL, 10);
  size_t queue = strtoull(argument[5], NULL, 10);
  int64_t longest = (int64_t)((double)queue * ns_per_byte);

  prctl(PR_SET_PDEATHSIG, SIGTERM);
  prctl(PR_SET_TIMERSLACK, 1000);
  struct sigaction action = {.sa_handler = stop};
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGINT, &action, NULL);

  int namespaces[2], ends[2];
  ends[0] = new_end("198.18.0.1", &namespaces[0]);
  ends[1] = new_end("198.18.0.2", &namespaces[1]);
  struct direction ways[2];
  for (int i = 0; i < 2; i++) {
    // Twice what waits and what travels: small packets carry a header each.
    size_t room = 2 * (queue + (size_t)((double)delay / ns_per_byte)) + (1 << 20);
    room &= ~(size_t)7;
    ways[i] = (struct direction){.from = ends[i], .to = ends[1 - i], .ring = malloc(room), .room = room};
    ways[i].random = (seed + 1) * 0x9e3779b97f4a7c15ull + (uint64_t)i;
    check(ways[i].ring == NULL, "no memory");
  }
  printf("/proc/%d/fd/%d /proc/%d/fd/%d\n", getpid(), namespaces[0], getpid(), namespaces[1]);
  fflush(stdout);

  struct pollfd polled[2] = {{.fd = ends[0], .events = POLLIN}, {.fd = ends[1], .events = POLLIN}};
  while (!stopped) {
    int64_t next = INT64_MAX;
    for (int i = 0; i < 2; i++) {
      take(&ways[i], delay, ns_per_byte, loss, longest);
      int64_t due = deliver(&ways[i], now_ns());
      if (due < next) next = due;
    }
    int64_t wait = next - now_ns();
    if (wait < 0) wait = 0;
    struct timespec limit = {.tv_sec = wait / 1000000000, .tv_nsec = wait % 1000000000};
    ppoll(polled, 2, next == INT64_MAX ? NULL : &limit, NULL);
  }
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  double seconds = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
  seconds += (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
  for (int i = 0; i < 2; i++)
    printf("sent %lu lost %lu dropped %lu  ", (unsigned long)ways[i].sent, (unsigned long)ways[i].lost,
           (unsigned long)ways[i].dropped);
  printf("CPU %.2f\n", seconds);
  return 0;
}
