/* Processes that use the CPU and nothing else.
 *
 *   work spin COUNT                 BE work: COUNT processes of integer arithmetic, without an end
 *   work periodic BUSY_US IDLE_US   a daemon: so much CPU time, then a sleep, in turn
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

static void periodic(int64_t busy_us, int64_t idle_us)
{
	struct timespec idle = {idle_us / 1000000, idle_us % 1000000 * 1000};
	for (;;) {
		int64_t end = cpu_time_us() + busy_us;
		while (cpu_time_us() < end)
			;
		nanosleep(&idle, NULL);
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
	if (count == 4 && strcmp(values[1], "periodic") == 0)
		periodic(atoll(values[2]), atoll(values[3]));
	fprintf(stderr, "work spin COUNT | work periodic BUSY_US IDLE_US\n");
	return 2;
}
