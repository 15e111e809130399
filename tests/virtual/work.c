/* Processes that use the CPU and nothing else.
 *
 *   work spin COUNT                 BE work: COUNT processes of integer arithmetic, without an end
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
#include <sys/wait.h>
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
		for (int left = atoi(values[2]); left > 1; left--)
			if (fork() == 0)
				break;
		spin();
	}
	if (count == 5 && strcmp(values[1], "periodic") == 0)
		return periodic(atoll(values[2]), atoll(values[3]), values[4]);
	fprintf(stderr, "work spin COUNT | work periodic BUSY_US IDLE_US FILE\n");
	return 2;
}
