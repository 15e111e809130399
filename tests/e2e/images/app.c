/* The program of every test container.
 *
 *   app OUT MODE [ARGUMENT] [FILE...]
 *
 * Its first act, before anything else, is to read FILEs (control files of its own cgroup), its own CPU affinity and its
 * scheduling policy, so that what it prints is what held at its first instruction. The report goes to OUT ("-": none), renamed into place.
 * Times are CLOCK_MONOTONIC nanoseconds: the same clock as on the host.
 *
 * MODE  sleep          until SIGTERM
 *       burn N         N processes that want a whole CPU each
 *       exit CODE      at once
 *       eat MIB        touch that much memory, then sleep
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_FILES 32
#define MAX_TEXT 256

static char text[MAX_FILES][MAX_TEXT];

static long long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* One line, without its newline; "!" where the file cannot be read (a controller that is not mounted). */
static void read_line(const char *path, char *into)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, into, MAX_TEXT - 1);
	if (fd >= 0)
		close(fd);
	if (n < 0) {
		strcpy(into, "!");
		return;
	}
	into[n] = 0;
	into[strcspn(into, "\n")] = 0;
}

static void report(const char *out, long long first, long long done, int policy, const cpu_set_t *cpus, char **file,
		   int files)
{
	char temporary[512];
	snprintf(temporary, sizeof temporary, "%s.new", out);
	FILE *f = fopen(temporary, "w");
	if (!f) {
		perror(temporary);
		return;
	}
	fprintf(f, "first_ns\t%lld\nread_ns\t%lld\npolicy\t%d\naffinity\t", first, done, policy);
	const char *comma = "";
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, cpus)) {
			fprintf(f, "%s%d", comma, cpu);
			comma = ",";
		}
	fputc('\n', f);
	for (int i = 0; i < files; i++)
		fprintf(f, "%s\t%s\n", file[i], text[i]);
	fclose(f);
	rename(temporary, out);
}

static void stop(int number)
{
	(void)number;
	_exit(0);
}

static void sleep_for_ever(void)
{
	for (;;) {
		pause();
		while (waitpid(-1, 0, WNOHANG) > 0)
			;
	}
}

int main(int argc, char **argv)
{
	cpu_set_t cpus;
	long long first = now();
	int named = argc > 2 && strcmp(argv[2], "sleep") ? 4 : 3; /* where FILEs begin: every other mode has an argument */
	int files = argc > named ? argc - named : 0;
	if (files > MAX_FILES)
		files = MAX_FILES;
	for (int i = 0; i < files; i++)
		read_line(argv[named + i], text[i]);
	sched_getaffinity(0, sizeof cpus, &cpus);
	int policy = sched_getscheduler(0);
	long long done = now();

	if (argc < 3 || (named == 4 && argc < 4)) {
		fprintf(stderr, "usage: app OUT sleep|burn N|exit CODE|eat MIB [FILE...]\n");
		return 2;
	}
	/* Process 1 of a pid namespace ignores signals without a handler. */
	signal(SIGTERM, stop);
	if (strcmp(argv[1], "-"))
		report(argv[1], first, done, policy, &cpus, argv + named, files);

	long argument = named == 4 ? atol(argv[3]) : 0;
	if (!strcmp(argv[2], "exit"))
		return (int)argument;
	if (!strcmp(argv[2], "burn"))
		for (long i = 0; i < argument; i++)
			if (fork() == 0) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				for (volatile unsigned long work = 0;; work++)
					;
			}
	if (!strcmp(argv[2], "eat")) {
		size_t size = (size_t)argument << 20;
		/* Or the compiler sees that nobody reads it, and leaves all of it away. */
		volatile char *memory = malloc(size);
		if (!memory)
			return 3;
		for (size_t at = 0; at < size; at += 4096)
			memory[at] = 1;
	}
	sleep_for_ever();
}
