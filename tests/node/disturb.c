/* Online services that can be disturbed, and their disturbers; run inside the embedded node's containers.
 *
 *   disturb think FILE WORK_US PERIOD_US    works so long at each period
 *   disturb reread FILE MIB PERIOD_US       reads some random pages of a file of that size, through the page cache
 *   disturb fetch FILE MIB PERIOD_US        reads one random block of a file of that size, past the page cache
 *
 * Each appends two doubles to FILE for every turn: when it was due (CLOCK_MONOTONIC) and how long after that it was done.
 * A turn that is late by a second is given up and counts as one second, as a caller would.
 *
 *   disturb spin FILE PROCESSES             wants so many CPUs
 *   disturb hoard FILE MIB                  wants so much memory, and touches all of it again and again
 *   disturb flood FILE MIB PROCESSES        so many write random megabytes of a file, past the page cache
 *
 * FILE holds one 8-byte number, whether to disturb; it is written from outside. All files are beside FILE.
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
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096L
#define MIB (1L << 20)
#define PAGES_A_TURN 32

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void sleep_until(double when)
{
	struct timespec t = {(time_t)when, (long)((when - (time_t)when) * 1e9)};
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0))
		;
}

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static _Noreturn void fail(const char *what)
{
	perror(what);
	_exit(1);
}

/* Keep the CPU busy without touching memory. */
static volatile unsigned sink;
static void work(long rounds)
{
	unsigned value = 1;
	for (long round = 0; round < rounds; round++)
		value = value * 1103515245u + 12345u;
	sink = value;
}

/* How many rounds take that long on an undisturbed CPU: the fastest of several tries. */
static long rounds_for(double us)
{
	double best = 1e9;
	for (int try = 0; try < 40; try++) {
		double began = now();
		work(200000);
		if (now() - began < best)
			best = now() - began;
	}
	return (long)(200000 * us / 1e6 / best) + 1;
}

/* A file of so many MiB beside FILE, on the disk. */
static int data_file(const char *path, long mib, int flags)
{
	char name[4096];
	snprintf(name, sizeof name, "%s.data", path);
	int fd = open(name, O_RDWR | O_CREAT, 0644);
	char *block = calloc(1, MIB);
	struct stat found;
	if (fd < 0 || !block || fstat(fd, &found))
		fail(name);
	memset(block, 1, MIB);
	for (long at = found.st_size / MIB; at < mib; at++)
		if (pwrite(fd, block, MIB, at * MIB) != MIB)
			fail(name);
	if (fsync(fd))
		fail(name);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	free(block);
	close(fd);
	fd = open(name, O_RDWR | flags);
	if (fd < 0)
		fail(name);
	return fd;
}

static int serve(const char *mode, const char *path, long size, double period_s)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
	int think = !strcmp(mode, "think"), reread = !strcmp(mode, "reread");
	int data = think ? -1 : data_file(path, size, reread ? 0 : O_DIRECT);
	long rounds = think ? rounds_for(size) : 0, pages = think ? 1 : size * (MIB / PAGE);
	uint64_t seed = 88172645463325252ull;
	void *block;
	if (fd < 0 || posix_memalign(&block, PAGE, PAGE))
		fail(path);
	/* What is read again and again stays in the cache for as long as it may; so each page is read more than once. */
	for (long page = 0; reread && page < 3 * pages; page++)
		if (pread(data, block, PAGE, page % pages * PAGE) != PAGE)
			fail("read");
	for (double due = now();; due += period_s) {
		sleep_until(due);
		double record[2] = {due, 1.0};
		if (now() - due < 1.0) {
			if (think)
				work(rounds);
			for (int page = 0; !think && page < (reread ? PAGES_A_TURN : 1); page++)
				if (pread(data, block, PAGE, (long)(next_random(&seed) % pages) * PAGE) != PAGE)
					fail("read");
			record[1] = now() - due;
		}
		if (write(fd, record, sizeof record) != sizeof record)
			fail(path);
	}
}

static _Noreturn void disturb(const char *mode, const char *path, long size, int number)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!strcmp(mode, "spin"))
		for (;;)
			work(1000000);
	if (!strcmp(mode, "hoard")) {
		volatile char *memory = mmap(0, size * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED)
			fail("memory");
		for (;;) {
			for (long at = 0; at < size * MIB; at += PAGE)
				memory[at] += 1;
			usleep(1000);
		}
	}
	int data = data_file(path, size, O_DIRECT);
	uint64_t seed = 88172645463325252ull + number;
	void *block;
	if (posix_memalign(&block, PAGE, MIB))
		fail("memory");
	for (;;)
		if (pwrite(data, block, MIB, (long)(next_random(&seed) % size) * MIB) != MIB)
			fail("write");
}

static int obey(const char *mode, const char *path, long size, int processes)
{
	int fd = open(path, O_RDWR | O_CREAT, 0644);
	volatile int64_t *wanted = MAP_FAILED;
	pid_t children[64];
	if (fd >= 0 && !ftruncate(fd, sizeof *wanted))
		wanted = mmap(0, sizeof *wanted, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (wanted == MAP_FAILED || processes < 1 || processes > 64)
		fail(path);
	if (!strcmp(mode, "flood"))
		close(data_file(path, size, 0));
	for (;;) {
		while (!*wanted)
			usleep(2000);
		for (int number = 0; number < processes; number++) {
			children[number] = fork();
			if (children[number] == 0)
				disturb(mode, path, size, number);
			if (children[number] < 0)
				fail("fork");
		}
		while (*wanted)
			usleep(2000);
		for (int number = 0; number < processes; number++) {
			kill(children[number], SIGKILL);
			waitpid(children[number], 0, 0);
		}
	}
}

static void end(int number)
{
	(void)number;
	_exit(0);
}

int main(int count, char **words)
{
	if (count != 5) {
		fprintf(stderr, "usage: disturb MODE FILE SIZE PERIOD_US|PROCESSES\n");
		return 2;
	}
	const char *mode = words[1];
	long size = atol(words[3]), last = atol(words[4]);
	signal(SIGTERM, end);
	if (!strcmp(mode, "think") || !strcmp(mode, "reread") || !strcmp(mode, "fetch"))
		return serve(mode, words[2], size, last / 1e6);
	return obey(mode, words[2], size, (int)last);
}
