/* Open-loop load on a real server, with each latency counted from the request's intended time.
 *
 *   generator PROTOCOL PORT RATE CONNECTIONS WARMUP SECONDS SEED [TARGET]
 *
 * PROTOCOL   redis (how many members two of TARGET sets share; without TARGET GET and, one of ten, SET), http (GET
 *            TARGET, compressed where the server does so), postgres (the sum of a thousand rows by their keys, database and
 *            user TARGET)
 * RATE       requests a second, Poisson arrivals; they do not wait for answers
 *
 * A request goes out on the connection with the fewest open ones, at once, whatever the server does. A late answer, and
 * a generator that was itself late, count in full: there is no coordinated omission. "late" reports the generator's own
 * part (from the intended time to the system call), which must be small for a figure to mean anything. A request should
 * cost the server several times what it costs the generator: one that needs most of a CPU makes the server wait for it,
 * and from Linux 6.12 on is itself stopped for 50 ms of a second. It asks for real-time priority and reports whether it
 * got it, and the CPU that it used. One line of JSON on standard output; times in microseconds.
 *
 * Source: G. Tene, "How NOT to Measure Latency"; wrk2.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define OPEN 16384	/* open requests of one connection, a power of two */
#define IN 65536
#define OUT (1 << 20)
#define SUB 64		/* parts of each doubling in the histogram: 1.6 % */
#define BUCKETS (40 * SUB)
#define KEYS 100000
#define WINDOWS 4096
/* A quarter of a second: what disturbs the machine for some milliseconds is in few of them. */
#define WINDOW_NS 250000000u

enum protocol { REDIS, HTTP, POSTGRES };

struct histogram {
	uint64_t counts[BUCKETS], total, max;
	double sum;
};

struct connection {
	int fd, writing;
	uint32_t first, last;		/* ring of intended times */
	uint64_t due[OPEN];
	char in[IN];
	size_t have;
	char *out;
	size_t begin, end;
	size_t skip;			/* bytes of an HTTP body that are still to come */
};

static enum protocol protocol;
static const char *target = "/";
static uint64_t seed, sent, answered, errors, dropped, measured_from, measured_to;
static struct histogram latencies, late, window;
static double windows[WINDOWS];
static unsigned window_count;

static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static uint64_t dice(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed;
}

static void die(const char *text)
{
	perror(text);
	exit(1);
}

static unsigned bucket(uint64_t value)
{
	if (value < SUB)
		return value;
	unsigned octave = 63 - __builtin_clzll(value);
	unsigned index = (octave - 5) * SUB + ((value >> (octave - 6)) & (SUB - 1));
	return index < BUCKETS ? index : BUCKETS - 1;
}

static double upper(unsigned index)
{
	if (index < SUB)
		return index;
	unsigned octave = index / SUB + 5;
	return ldexp(1.0 + (index % SUB + 1.0) / SUB, octave);
}

static void note(struct histogram *h, uint64_t value)
{
	h->counts[bucket(value)]++;
	h->total++;
	h->sum += value;
	if (value > h->max)
		h->max = value;
}

static double percentile(const struct histogram *h, double share)
{
	uint64_t wanted = ceil(h->total * share), seen = 0;
	for (unsigned i = 0; i < BUCKETS; i++) {
		seen += h->counts[i];
		if (seen >= wanted && seen)
			return fmin(upper(i), h->max) / 1000.0;
	}
	return 0;
}

static void finished(struct connection *c, uint64_t at)
{
	if (c->first == c->last) {
		errors++;
		return;
	}
	uint64_t due = c->due[c->first++ % OPEN];
	answered++;
	if (due >= measured_from && due < measured_to) {
		note(&latencies, at - due);
		note(&window, at - due);
	}
}

/* How many bytes the first answer in the buffer takes; 0: it is not whole. */
static size_t whole_redis(const char *text, size_t have)
{
	const char *end = memmem(text, have, "\r\n", 2);
	if (!end)
		return 0;
	size_t line = end - text + 2;
	if (text[0] == '-')
		errors++;
	if (text[0] != '$')
		return line;
	long length = strtol(text + 1, 0, 10);
	if (length < 0)
		return line;
	return have >= line + length + 2 ? line + length + 2 : 0;
}

/* The end of a body in chunks that begins at ``at``; 0: it is not whole. */
static size_t whole_chunks(const char *text, size_t have, size_t at)
{
	for (;;) {
		const char *line = memmem(text + at, have - at, "\r\n", 2);
		if (!line)
			return 0;
		size_t size = 0;
		for (const char *digit = text + at; digit < line && isxdigit((unsigned char)*digit) && size <= IN; digit++)
			size = size * 16 + (*digit <= '9' ? *digit - '0' : (*digit | 32) - 'a' + 10);
		at = line - text + 2 + size + 2;
		if (at > have)
			return 0;
		if (!size)
			return at;
	}
}

static size_t whole_http(struct connection *c, const char *text, size_t have)
{
	const char *end = memmem(text, have, "\r\n\r\n", 4);
	if (!end)
		return 0;
	size_t head = end - text + 4;
	const char *field = memmem(text, head, "ength: ", 7);
	int wrong = !!memcmp(text, "HTTP/1.1 200", 12);
	if (!field && memmem(text, head, "ncoding: chunked", 16)) {
		size_t whole = whole_chunks(text, have, head);
		errors += whole && wrong;
		return whole;
	}
	errors += wrong || !field;
	c->skip = field ? strtoul(field + 7, 0, 10) : 0;
	return head;
}

static size_t whole_postgres(const char *text, size_t have, int *ready)
{
	uint32_t length;
	if (have < 5)
		return 0;
	memcpy(&length, text + 1, 4);
	length = ntohl(length) + 1;
	if (have < length)
		return 0;
	*ready = text[0] == 'Z';
	if (text[0] == 'E')
		errors++;
	return length;
}

static void take(struct connection *c)
{
	for (;;) {
		ssize_t got = read(c->fd, c->in + c->have, IN - c->have);
		if (got < 0 && errno == EAGAIN)
			return;
		if (got <= 0)
			die("connection");
		c->have += got;
		uint64_t at = now();
		size_t used = 0;
		for (;;) {
			size_t left = c->have - used, size;
			if (protocol == HTTP && c->skip) {
				size = left < c->skip ? left : c->skip;
				used += size;
				c->skip -= size;
				if (c->skip)
					break;
				finished(c, at);
				continue;
			}
			if (!left)
				break;
			int ready = protocol == REDIS;
			if (protocol == REDIS)
				size = whole_redis(c->in + used, left);
			else if (protocol == HTTP)
				size = whole_http(c, c->in + used, left);
			else
				size = whole_postgres(c->in + used, left, &ready);
			if (!size)
				break;
			used += size;
			if (ready || (protocol == HTTP && !c->skip))
				finished(c, at);
		}
		memmove(c->in, c->in + used, c->have - used);
		c->have -= used;
		if (c->have == IN)
			die("an answer is larger than the buffer");
	}
}

static void give(struct connection *c, int epoll)
{
	while (c->begin < c->end) {
		ssize_t put = send(c->fd, c->out + c->begin, c->end - c->begin, MSG_NOSIGNAL);
		if (put < 0 && errno == EAGAIN)
			break;
		if (put < 0)
			die("connection");
		c->begin += put;
	}
	if (c->begin == c->end)
		c->begin = c->end = 0;
	int writing = c->begin < c->end;
	if (writing != c->writing) {
		struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = c};
		if (epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event))
			die("epoll");
		c->writing = writing;
	}
}

static size_t request(char *to, size_t room)
{
	unsigned key = dice() % KEYS;
	if (protocol == HTTP)
		return snprintf(to, room, "GET %s HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n", target);
	if (protocol == POSTGRES) {
		char text[128];
		uint32_t size = 1 + snprintf(text, sizeof text, "SELECT sum(abalance) FROM pgbench_accounts WHERE aid "
					     "BETWEEN %u AND %u", key + 1, key + 1000);
		uint32_t length = htonl(size + 4);
		to[0] = 'Q';
		memcpy(to + 1, &length, 4);
		memcpy(to + 5, text, size);
		return size + 5;
	}
	unsigned sets = atoi(target);
	if (sets > 1) {
		unsigned other = (key + 1 + dice() % (sets - 1)) % sets;
		return snprintf(to, room, "*4\r\n$10\r\nSINTERCARD\r\n$1\r\n2\r\n$6\r\ns:%04u\r\n$6\r\ns:%04u\r\n",
				key % sets, other);
	}
	if (dice() % 10 == 0)
		return snprintf(to, room, "*3\r\n$3\r\nSET\r\n$10\r\nkey:%06u\r\n$256\r\n%0256u\r\n", key, key);
	return snprintf(to, room, "*2\r\n$3\r\nGET\r\n$10\r\nkey:%06u\r\n", key);
}

static void issue(struct connection *all, unsigned count, uint64_t due, int epoll)
{
	static unsigned turn;
	struct connection *best = 0;
	for (unsigned i = 0; i < count; i++) {
		struct connection *c = &all[(turn + i) % count];
		if (!best || c->last - c->first < best->last - best->first)
			best = c;
		if (best->last == best->first)
			break;
	}
	turn++;
	if (best->last - best->first >= OPEN || best->end + 1024 > OUT) {
		dropped++;
		return;
	}
	best->due[best->last++ % OPEN] = due;
	best->end += request(best->out + best->end, OUT - best->end);
	give(best, epoll);
	sent++;
	if (due >= measured_from && due < measured_to)
		note(&late, now() - due);
}

static void read_until_ready(int fd)
{
	char head[5], rest[4096];
	for (;;) {
		uint32_t length;
		if (recv(fd, head, 5, MSG_WAITALL) != 5)
			die("the server's greeting");
		memcpy(&length, head + 1, 4);
		length = ntohl(length) - 4;
		if (head[0] == 'E' || length > sizeof rest || (length && recv(fd, rest, length, MSG_WAITALL) != (ssize_t)length))
			die("the server refused the login");
		if (head[0] == 'Z')
			return;
	}
}

static void login(int fd)
{
	char message[256];
	uint32_t length = 8, number = htonl(196608);
	length += sprintf(message + length, "user%c%s%cdatabase%c%s%c", 0, target, 0, 0, target, 0) + 1;
	message[length - 1] = 0;
	uint32_t sized = htonl(length);
	memcpy(message, &sized, 4);
	memcpy(message + 4, &number, 4);
	if (write(fd, message, length) != (ssize_t)length)
		die("login");
	read_until_ready(fd);
}

static void connect_to(struct connection *c, int port, int epoll)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
	int one = 1;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address))
		die("connect");
	setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (protocol == POSTGRES)
		login(c->fd);
	fcntl(c->fd, F_SETFL, O_NONBLOCK);
	c->out = malloc(OUT);
	if (!c->out || epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event))
		die("epoll");
}

static void next_window(void)
{
	if (window_count < WINDOWS)
		windows[window_count++] = window.total ? percentile(&window, 0.99) : -1;
	memset(&window, 0, sizeof window);
}

static void wait_until(int timer, uint64_t at)
{
	struct itimerspec when = {.it_value = {.tv_sec = at / 1000000000u, .tv_nsec = at % 1000000000u}};
	if (timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, 0))
		die("timer");
}

int main(int argc, char **argv)
{
	if (argc < 8) {
		fprintf(stderr, "usage: generator PROTOCOL PORT RATE CONNECTIONS WARMUP SECONDS SEED [TARGET]\n");
		return 2;
	}
	protocol = !strcmp(argv[1], "redis") ? REDIS : !strcmp(argv[1], "http") ? HTTP : POSTGRES;
	double rate = atof(argv[3]), warmup = atof(argv[5]), seconds = atof(argv[6]);
	unsigned count = atoi(argv[4]);
	seed = strtoull(argv[7], 0, 10) * 2654435769u + 88172645463325252u;
	if (argc > 8)
		target = argv[8];
	struct sched_param priority = {.sched_priority = 50};
	int realtime = !sched_setscheduler(0, SCHED_FIFO, &priority);
	mlockall(MCL_CURRENT | MCL_FUTURE);
	int epoll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	struct connection *all = calloc(count, sizeof *all);
	struct epoll_event tick = {.events = EPOLLIN, .data.ptr = 0}, events[64];
	if (epoll < 0 || timer < 0 || !all || epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &tick))
		die("set-up");
	for (unsigned i = 0; i < count; i++)
		connect_to(&all[i], atoi(argv[2]), epoll);
	uint64_t begin = now() + 1000000, due = begin;
	measured_from = begin + warmup * 1e9;
	measured_to = measured_from + seconds * 1e9;
	uint64_t window_end = measured_from + WINDOW_NS, stop = measured_to + 5000000000u;
	wait_until(timer, due);
	for (;;) {
		uint64_t at = now();
		while (due < measured_to && due <= at) {
			issue(all, count, due, epoll);
			due += -log((dice() % (1u << 30) + 1.0) / (1u << 30)) / rate * 1e9 + 1;
			at = now();
		}
		while (at >= window_end && window_end <= measured_to) {
			next_window();
			window_end += WINDOW_NS;
		}
		/* At the end late answers are waited for, as they count. */
		if (at >= stop || (due >= measured_to && answered >= sent))
			break;
		wait_until(timer, due < measured_to ? due : at + 10000000);
		int got = epoll_wait(epoll, events, 64, -1);
		for (int i = 0; i < got; i++) {
			struct connection *c = events[i].data.ptr;
			uint64_t expirations;
			if (!c) {
				if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
					die("timer");
				continue;
			}
			if (events[i].events & EPOLLOUT)
				give(c, epoll);
			take(c);
		}
	}
	if (window.total)
		next_window();
	/* What was never answered was at least as late as the end. */
	uint64_t open = 0, end = now();
	for (unsigned i = 0; i < count; i++)
		for (; all[i].first != all[i].last; all[i].first++, open++)
			if (all[i].due[all[i].first % OPEN] >= measured_from)
				note(&latencies, end - all[i].due[all[i].first % OPEN]);
	struct rusage used;
	getrusage(RUSAGE_SELF, &used);
	double cpu = (used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6)
		/ ((end - begin) / 1e9);
	printf("{\"count\": %llu, \"rate\": %.1f, \"errors\": %llu, \"dropped\": %llu, \"unanswered\": %llu, \"realtime\": %s, "
	       "\"mean\": %.1f, \"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f, \"late_p99\": %.1f, "
	       "\"cpu\": %.3f, \"windows_p99\": [",
	       (unsigned long long)latencies.total, latencies.total / seconds, (unsigned long long)errors,
	       (unsigned long long)dropped, (unsigned long long)open, realtime ? "true" : "false",
	       latencies.total ? latencies.sum / latencies.total / 1000 : 0, percentile(&latencies, 0.5),
	       percentile(&latencies, 0.9), percentile(&latencies, 0.99), percentile(&latencies, 0.999),
	       latencies.max / 1000.0, percentile(&late, 0.99), cpu);
	for (unsigned i = 0; i < window_count; i++)
		printf("%s%.1f", i ? ", " : "", windows[i]);
	printf("]}\n");
	return 0;
}
