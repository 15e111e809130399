/* Programs that live off memory; run inside the embedded node's containers.
 *
 *   memory touch FILE MIB PAUSE_US   asks for so much again and again, touches every page and gives it back; appends two
 *                                    doubles to FILE each time: when it began (CLOCK_MONOTONIC) and how long it took
 *   memory grow FILE CEILING_MIB     a child asks for more and more and touches it all, and a new one takes its place when
 *                                    it is killed, as a kubelet's restarts do
 *
 * FILE of "grow" holds five 8-byte numbers: whether there is to be a child (written from outside), the bytes that the
 * present one has touched, the most that any one had, how many were killed, and how many reached the ceiling. That is the
 * tests' own safety: nobody may get there.
 *
 * Small pages on purpose: a huge one would be one fault for 512.
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096L
#define MIB (1L << 20)

enum { WANTED, NOW, MOST, KILLED, REACHED, NUMBERS };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Memory that is not there yet; NULL when the kernel gives no more addresses. */
static volatile char *ask(long bytes)
{
	void *found = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (found == MAP_FAILED)
		return 0;
	madvise(found, bytes, MADV_NOHUGEPAGE);
	return found;
}

static void fill(volatile char *memory, long bytes)
{
	for (long at = 0; at < bytes; at += PAGE)
		memory[at] = 1;
}

static int touch(const char *path, long bytes, long pause_us)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
	if (fd < 0) {
		perror(path);
		return 1;
	}
	for (;;) {
		double record[2] = {now(), 0};
		volatile char *memory = ask(bytes);
		if (!memory)
			return 1;
		fill(memory, bytes);
		record[1] = now() - record[0];
		munmap((void *)memory, bytes);
		if (write(fd, record, sizeof record) != sizeof record)
			return 1;
		usleep(pause_us);
	}
}

static _Noreturn void swallow(volatile int64_t *numbers, long ceiling)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (long had = 0; had < ceiling; had += MIB) {
		volatile char *memory = ask(MIB);
		if (!memory)
			break;
		fill(memory, MIB);
		numbers[NOW] = had + MIB;
		if (numbers[NOW] > numbers[MOST])
			numbers[MOST] = numbers[NOW];
	}
	_exit(0);
}

static int grow(const char *path, long ceiling)
{
	int fd = open(path, O_RDWR | O_CREAT, 0644);
	volatile int64_t *numbers = MAP_FAILED;
	if (fd >= 0 && !ftruncate(fd, NUMBERS * sizeof(int64_t)))
		numbers = mmap(0, NUMBERS * sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (numbers == MAP_FAILED) {
		perror(path);
		return 1;
	}
	for (;;) {
		pid_t child;
		int status;
		while (!numbers[WANTED])
			usleep(1000);
		numbers[NOW] = 0;
		child = fork();
		if (child == 0)
			swallow(numbers, ceiling);
		if (child < 0)
			return 1;
		while (waitpid(child, &status, WNOHANG) == 0) {
			if (!numbers[WANTED]) {
				kill(child, SIGKILL);
				waitpid(child, &status, 0);
				status = -1;
				break;
			}
			usleep(1000);
		}
		numbers[NOW] = 0;
		if (status == -1)
			continue;
		numbers[WIFSIGNALED(status) ? KILLED : REACHED]++;
	}
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
	if (argc == 5 && !strcmp(argv[1], "touch") && atol(argv[3]) > 0)
		return touch(argv[2], atol(argv[3]) * MIB, atol(argv[4]));
	if (argc == 4 && !strcmp(argv[1], "grow") && atol(argv[3]) > 0)
		return grow(argv[2], atol(argv[3]) * MIB);
	fprintf(stderr, "usage: memory touch FILE MIB PAUSE_US | grow FILE CEILING_MIB\n");
	return 2;
}
