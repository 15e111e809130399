/* Processes that use the CPU, or the CPU and memory.
 *
 *   work spin COUNT                 BE work: COUNT processes of integer arithmetic, without an end
 *   work touch COUNT MIB            BE work: COUNT processes that share MIB equally. Each writes to every cache line of an
 *                                   array, and once for each eighth of it allocates that much, touches it and frees it
 *   work periodic BUSY_US IDLE_US FILE
 *                                   a daemon: so much CPU time in each period of BUSY_US + IDLE_US, from its begin on;
 *                                   a late turn is done nevertheless. Appends a line to FILE for each turn:
 *                                   microseconds from the begin of its period to the end of the work
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static int64_t cpu_time_us(void)
{
	struct timespec used;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
	return used.tv_sec * 1000000LL + used.tv_nsec / 1000;
}

/* The multiplier is Knuth's; the volatile keeps the compiler from leaving the loop out. */
static void spin(void)
{
	volatile uint64_t value = 1;
	for (;;)
		value = value * 6364136223846793005ULL + 1442695040888963407ULL;
}

enum { LINE = 64, PARTS = 8 };

static unsigned char *pages(size_t bytes)
{
	void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mapped == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return mapped;
}

static void touch_lines(volatile unsigned char *begin, size_t bytes)
{
	for (size_t at = 0; at < bytes; at += LINE)
		begin[at]++;
}

/* The kernel zeroes and frees pages all the time, as it does for a program that allocates; a spinner never enters it. */
static void touch(size_t bytes)
{
	size_t part = bytes / PARTS;
	unsigned char *array = pages(bytes);
	for (;;)
		for (size_t i = 0; i < PARTS; i++) {
			touch_lines(array + i * part, part);
			unsigned char *again = pages(part);
			touch_lines(again, part);
			munmap(again, part);
		}
}

/* COUNT processes, this one among them. */
static void multiply(int processes)
{
	for (; processes > 1; processes--)
		if (fork() == 0)
			return;
}

static int64_t now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static int periodic(int64_t busy_us, int64_t idle_us, const char *file)
{
	FILE *turns = fopen(file, "a");
	if (turns == NULL) {
		perror(file);
		return 1;
	}
	setvbuf(turns, NULL, _IOLBF, 0);
	for (int64_t due = now_us();; due += busy_us + idle_us) {
		struct timespec until = {due / 1000000, due % 1000000 * 1000};
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
		int64_t end = cpu_time_us() + busy_us;
		while (cpu_time_us() < end)
			;
		fprintf(turns, "%lld\n", (long long)(now_us() - due));
	}
}

int main(int count, char **values)
{
	if (count == 3 && strcmp(values[1], "spin") == 0) {
		multiply(atoi(values[2]));
		spin();
	}
	if (count == 4 && strcmp(values[1], "touch") == 0 && atoi(values[2]) > 0) {
		multiply(atoi(values[2]));
		touch(((size_t)atoll(values[3]) << 20) / atoi(values[2]));
	}
	if (count == 5 && strcmp(values[1], "periodic") == 0)
		return periodic(atoll(values[2]), atoll(values[3]), values[4]);
	fprintf(stderr, "work spin COUNT | work touch COUNT MIB | work periodic BUSY_US IDLE_US FILE\n");
	return 2;
}
