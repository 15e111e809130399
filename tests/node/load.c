/* What runs inside the demo's real containers; tests/node/work.py is the same for ordinary processes.
 *
 *   load serve SOCKET MICROSECONDS   answers requests, each with that much work
 *   load burn FILE PROCESSES         wants that many CPUs for ever; counts units of work
 *   load beat FILE PERCENT           works that share of the time; counts units of work
 *   load once FILE UNITS             does that many units, then waits for its end
 *   load pause                       waits for its end
 *
 * A request's work is a number of loop rounds, found once at the start: a slower CPU (a busy sibling, a cold cache)
 * shows in the latency, which work measured in CPU time would hide. FILE holds one 8-byte counter per process.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNIT_ROUNDS 500000L
#define REQUEST 8

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* The volatile keeps the compiler from taking the loop away. */
static void work(long rounds)
{
	static volatile uint32_t value = 1;
	for (long i = 0; i < rounds; i++)
		value = value * 1103515245u + 12345u;
}

static long rounds_for(double microseconds)
{
	const long probe = 100000;
	double best = 1e9;
	for (int i = 0; i < 40; i++) {
		double began = now();
		work(probe);
		double took = now() - began;
		if (took < best)
			best = took;
	}
	long rounds = probe * (microseconds / 1e6) / best;
	return rounds > 0 ? rounds : 1;
}

static int serve(const char *path, double microseconds)
{
	long rounds = rounds_for(microseconds);
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char request[REQUEST];
	int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* Bound beside and renamed: who sees the socket can connect to it. */
	snprintf(address.sun_path, sizeof address.sun_path, "%s.new", path);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4) ||
	    rename(address.sun_path, path)) {
		perror(path);
		return 1;
	}
	for (;;) {
		int connection = accept(listener, 0, 0);
		while (connection >= 0 && recv(connection, request, REQUEST, MSG_WAITALL) == REQUEST) {
			work(rounds);
			if (send(connection, request, REQUEST, MSG_NOSIGNAL) != REQUEST)
				break;
		}
		if (connection >= 0)
			close(connection);
	}
}

static volatile int64_t *counters(const char *path, long slots)
{
	int fd = open(path, O_RDWR | O_CREAT, 0644);
	void *memory = MAP_FAILED;
	if (fd >= 0 && !ftruncate(fd, slots * sizeof(int64_t)))
		memory = mmap(0, slots * sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED) {
		perror(path);
		exit(1);
	}
	return memory;
}

static _Noreturn void wait_for_end(void)
{
	for (;;) {
		pause();
		while (waitpid(-1, 0, WNOHANG) > 0)
			;
	}
}

static _Noreturn void burn(const char *path, long processes)
{
	volatile int64_t *counter = counters(path, processes);
	long slot = 0;
	for (long child = 1; child < processes; child++)
		if (fork() == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			slot = child;
			break;
		}
	for (;;) {
		work(UNIT_ROUNDS);
		counter[slot]++;
	}
}

static _Noreturn void beat(const char *path, long percent)
{
	volatile int64_t *counter = counters(path, 1);
	for (;;) {
		double began = now();
		work(UNIT_ROUNDS);
		(*counter)++;
		usleep((now() - began) * 1e6 * (100 - percent) / percent);
	}
}

static _Noreturn void once(const char *path, long units)
{
	volatile int64_t *counter = counters(path, 1);
	while (*counter < units) {
		work(UNIT_ROUNDS);
		(*counter)++;
	}
	wait_for_end();
}

static void stop(int number)
{
	(void)number;
	_exit(0);
}

int main(int argc, char **argv)
{
	/* Process 1 of a pid namespace ignores signals without a handler. */
	signal(SIGTERM, stop);
	if (argc == 2 && !strcmp(argv[1], "pause"))
		wait_for_end();
	if (argc == 4 && !strcmp(argv[1], "serve"))
		return serve(argv[2], atof(argv[3]));
	if (argc == 4 && atol(argv[3]) > 0) {
		if (!strcmp(argv[1], "burn"))
			burn(argv[2], atol(argv[3]));
		if (!strcmp(argv[1], "beat"))
			beat(argv[2], atol(argv[3]));
		if (!strcmp(argv[1], "once"))
			once(argv[2], atol(argv[3]));
	}
	fprintf(stderr, "usage: load serve SOCKET MICROSECONDS | burn FILE N | beat FILE PERCENT | once FILE N | pause\n");
	return 2;
}
