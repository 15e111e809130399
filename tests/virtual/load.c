/* Open-loop load on a redis server: requests arrive as a Poisson process whatever the server does.
 *
 *   load PORT RATE SECONDS LONGEST
 *
 * Sends GETs of 100 bytes and, 15 of 100 requests, LRANGEs of 300 items, over 16 connections in turn. A latency counts
 * from the request's intended arrival. Runs as SCHED_FIFO outside of the pods, so no pod delays an arrival. Prints one
 * line of JSON with latencies in microseconds; "wall_ms" and "load_ms" are the time and the CPU time since the generator's
 * start; "windows" has the p99 of each quarter of a second, by arrival; "longest" has the LONGEST longest requests as [arrival, latency] in seconds, the arrival on CLOCK_MONOTONIC, as
 * the kernel's trace has it with the clock "mono".
 *
 * tests/protection/generator.c has a histogram; here all latencies are kept, as a bench in virtual time has no noise that
 * would hide the histogram's steps.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 16
#define OPEN 4096 /* open requests of one connection, a power of two */
#define TIMER CONNECTIONS
#define PATIENCE_S 2 /* how long answers are waited for after the last arrival */
#define SHARE_OF_LISTS 0.15
#define WINDOW_S 0.25

static const char GET[] = "*2\r\n$3\r\nGET\r\n$1\r\nk\r\n";
static const char LIST[] = "*4\r\n$6\r\nLRANGE\r\n$1\r\nl\r\n$1\r\n0\r\n$3\r\n299\r\n";
/* "$100", 100 bytes; "*300", 300 times "$10" and 10 bytes; each of them with a line's end. */
enum { GET_ANSWER = 6 + 102, LIST_ANSWER = 6 + 300 * (5 + 12) };

struct request {
	double due;
	int answer; /* bytes of its answer */
};

struct connection {
	int fd;
	unsigned first, last; /* of the ring of open requests */
	int missing;          /* bytes of the first one's answer that are still to come */
	struct request open[OPEN];
};

struct measured {
	double due, latency;
};

static struct connection connections[CONNECTIONS];
static struct measured *measured;
static size_t measured_count, measured_limit;
static unsigned long sent, lost;

static void die(const char *text)
{
	perror(text);
	exit(1);
}

static double seconds_of(clockid_t clock)
{
	struct timespec time;
	clock_gettime(clock, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

static double now(void)
{
	return seconds_of(CLOCK_MONOTONIC);
}

static int connected(int port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
	if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address))
		die("connect");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
	return fd;
}

static void command(int fd, const char *text)
{
	char answer[64];
	if (send(fd, text, strlen(text), 0) != (ssize_t)strlen(text) || recv(fd, answer, sizeof answer, 0) <= 0 ||
	    answer[0] == '-')
		die("filling the server");
}

/* The value of GET and the list of LRANGE, written anew. */
static void fill(int fd)
{
	char text[128];
	command(fd, "DEL l\r\n");
	snprintf(text, sizeof text, "SET k %0100d\r\n", 0);
	command(fd, text);
	for (int item = 0; item < 300; item++) {
		snprintf(text, sizeof text, "RPUSH l item%06d\r\n", item);
		command(fd, text);
	}
}

static void request(struct connection *c, double due, bool list)
{
	const char *text = list ? LIST : GET;
	ssize_t length = strlen(text);
	if (c->last - c->first == OPEN || send(c->fd, text, length, MSG_NOSIGNAL) != length) {
		lost++;
		return;
	}
	struct request *new = &c->open[c->last % OPEN];
	*new = (struct request){due, list ? LIST_ANSWER : GET_ANSWER};
	if (c->last++ == c->first)
		c->missing = new->answer;
	sent++;
}

static void receive(struct connection *c)
{
	static char buffer[1 << 20];
	ssize_t got;
	while ((got = recv(c->fd, buffer, sizeof buffer, 0)) > 0) {
		double at = now();
		while (got > 0 && c->first != c->last) {
			if (got < c->missing) {
				c->missing -= got;
				break;
			}
			got -= c->missing;
			double due = c->open[c->first++ % OPEN].due;
			if (measured_count < measured_limit)
				measured[measured_count++] = (struct measured){due, at - due};
			c->missing = c->open[c->first % OPEN].answer;
		}
	}
}

static bool any_open(void)
{
	for (int i = 0; i < CONNECTIONS; i++)
		if (connections[i].first != connections[i].last)
			return true;
	return false;
}

static int by_latency(const void *left, const void *right)
{
	double a = ((const struct measured *)left)->latency, b = ((const struct measured *)right)->latency;
	return (a > b) - (a < b);
}

static int by_arrival(const void *left, const void *right)
{
	double a = ((const struct measured *)left)->due, b = ((const struct measured *)right)->due;
	return (a > b) - (a < b);
}

/* Of `count` latencies in ascending order. */
static double percentile_us(const struct measured *sorted, size_t count, double share)
{
	return count ? sorted[(size_t)((count - 1) * share)].latency * 1e6 : 0;
}

/* The same arrivals in each run: a window is comparable with the same one of another law. */
static void print_windows(void)
{
	qsort(measured, measured_count, sizeof *measured, by_arrival);
	double begin = measured_count ? measured[0].due : 0;
	for (size_t from = 0, to = 0; from < measured_count; from = to) {
		double end = begin + WINDOW_S * (floor((measured[from].due - begin) / WINDOW_S) + 1);
		while (to < measured_count && measured[to].due < end)
			to++;
		qsort(measured + from, to - from, sizeof *measured, by_latency);
		printf("%s%.0f", from ? ", " : "", percentile_us(measured + from, to - from, 0.99));
	}
}

static void wake_after(int timer, double seconds)
{
	/* Zero would stop the timer. */
	long ns = seconds < 1e-6 ? 1000 : (long)(seconds * 1e9);
	struct itimerspec after = {.it_value = {ns / 1000000000, ns % 1000000000}};
	timerfd_settime(timer, 0, &after, NULL);
}

static void watch(int epoll, int fd, unsigned number)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u32 = number};
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event))
		die("epoll_ctl");
}

static void run(double rate, double seconds)
{
	int epoll = epoll_create1(0), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	watch(epoll, timer, TIMER);
	for (unsigned i = 0; i < CONNECTIONS; i++)
		watch(epoll, connections[i].fd, i);
	srand48(7); /* the same arrivals in each run */
	double next = now() + 0.05, end = next + seconds;
	unsigned turn = 0;
	for (;;) {
		double at = now();
		if (at > end + PATIENCE_S || (next >= end && !any_open()))
			return;
		for (; next <= at && next < end; next -= log(1 - drand48()) / rate)
			request(&connections[turn++ % CONNECTIONS], next, drand48() < SHARE_OF_LISTS);
		wake_after(timer, next < end ? next - now() : 0.01);
		struct epoll_event events[CONNECTIONS + 1];
		int count = epoll_wait(epoll, events, CONNECTIONS + 1, -1);
		for (int i = 0; i < count; i++) {
			uint64_t expirations;
			if (events[i].data.u32 != TIMER)
				receive(&connections[events[i].data.u32]);
			else if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
				die("timer");
		}
	}
}

int main(int count, char **values)
{
	if (count != 5) {
		fprintf(stderr, "load PORT RATE SECONDS LONGEST\n");
		return 2;
	}
	double began = now();
	int port = atoi(values[1]), longest = atoi(values[4]);
	double rate = atof(values[2]), seconds = atof(values[3]);
	struct sched_param priority = {.sched_priority = 20};
	if (sched_setscheduler(0, SCHED_FIFO, &priority))
		die("SCHED_FIFO");
	measured_limit = rate * seconds * 1.3 + 1000;
	measured = calloc(measured_limit, sizeof *measured);
	for (int i = 0; i < CONNECTIONS; i++) {
		connections[i].fd = connected(port);
		if (i == 0)
			fill(connections[0].fd);
		fcntl(connections[i].fd, F_SETFL, O_NONBLOCK);
	}
	mlockall(MCL_CURRENT);
	run(rate, seconds);
	for (int i = 0; i < CONNECTIONS; i++)
		lost += connections[i].last - connections[i].first;
	printf("{\"windows\": [");
	print_windows();
	qsort(measured, measured_count, sizeof *measured, by_latency);
	printf("], \"sent\": %lu, \"answered\": %zu, \"lost\": %lu, ", sent, measured_count, lost);
	static const char *const names[] = {"p50", "p99", "p999", "max"};
	static const double shares[] = {0.5, 0.99, 0.999, 1};
	for (int i = 0; i < 4; i++)
		printf("\"%s_us\": %.0f, ", names[i], percentile_us(measured, measured_count, shares[i]));
	printf("\"wall_ms\": %.0f, \"load_ms\": %.0f, ", (now() - began) * 1e3, seconds_of(CLOCK_PROCESS_CPUTIME_ID) * 1e3);
	printf("\"longest\": [");
	for (int i = 0; i < longest && i < (int)measured_count; i++) {
		struct measured *m = &measured[measured_count - 1 - i];
		printf("%s[%.6f, %.6f]", i ? ", " : "", m->due, m->latency);
	}
	printf("]}\n");
	return 0;
}
