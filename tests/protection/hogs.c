/* Best-effort work of one kind, as much as fits, counted in small units: hogs KIND FILE PROCESSES [MORE...]
 *
 *   int, float       arithmetic in registers
 *   stream           memory copies far beyond every cache (64 MiB to 64 MiB in each process)
 *   forks            short-lived children, each of which does a little work
 *   read  FILE       random page-cache reads over a file
 *   write DIRECTORY  appends of 1 MiB, each made durable; the file starts anew at 256 MiB
 *   tcp              64 KiB messages over loopback
 *   run   PROGRAM... runs a program again and again; a run is a unit
 *
 * FILE holds one 8-byte counter per process.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK (64 << 20)

static volatile uint64_t *counter;
volatile double result;

static void die(const char *text)
{
	perror(text);
	_exit(1);
}

static void integers(void)
{
	static volatile uint32_t value = 1;
	for (;; ++*counter)
		for (int i = 0; i < 200000; i++)
			value = value * 1103515245u + 12345u;
}

static void floats(void)
{
	for (;; ++*counter) {
		double a = 1.0, b = 1.1, c = 1.2, d = 1.3;
		for (int i = 0; i < 200000; i++) {
			a = a * 0.999999 + 0.1;
			b = b * 0.999998 + 0.2;
			c = c * 0.999997 + 0.3;
			d = d * 0.999996 + 0.4;
		}
		result = a + b + c + d;
	}
}

static void stream(void)
{
	char *from = malloc(BLOCK), *to = malloc(BLOCK);
	if (!from || !to)
		die("memory");
	memset(from, 1, BLOCK);
	for (;;)
		for (size_t at = 0; at < BLOCK; at += 1 << 20, ++*counter)
			memcpy(to + at, from + at, 1 << 20);
}

static void forks(void)
{
	for (;; ++*counter) {
		pid_t child = fork();
		if (!child) {
			static volatile uint32_t value = 1;
			for (int i = 0; i < 20000; i++)
				value = value * 1103515245u + 12345u;
			_exit(0);
		}
		if (child > 0)
			waitpid(child, 0, 0);
	}
}

static void reads(const char *path, unsigned seed)
{
	static char page[65536];
	int file = open(path, O_RDONLY | O_CLOEXEC);
	struct stat status;
	if (file < 0 || fstat(file, &status))
		die(path);
	for (uint64_t dice = seed * 2654435769u + 1;; ++*counter) {
		dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
		if (pread(file, page, sizeof page, dice % (status.st_size - sizeof page)) < 0)
			die(path);
	}
}

static void writes(const char *directory, unsigned slot)
{
	static char block[1 << 20];
	char path[4096];
	snprintf(path, sizeof path, "%s/flood-%u", directory, slot);
	int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (file < 0)
		die(path);
	for (uint64_t at = 0;; ++*counter, at = (at + sizeof block) % (256 << 20))
		if (pwrite(file, block, sizeof block, at) < 0 || fdatasync(file))
			die(path);
}

static void tcp(void)
{
	static char message[65536];
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t size = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1) ||
	    getsockname(listener, (struct sockaddr *)&address, &size))
		die("listen");
	if (!fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (connect(other, (struct sockaddr *)&address, size))
			die("connect");
		while (send(other, message, sizeof message, MSG_NOSIGNAL) > 0)
			;
		_exit(0);
	}
	int connection = accept(listener, 0, 0);
	for (;; ++*counter)
		if (recv(connection, message, sizeof message, MSG_WAITALL) <= 0)
			die("recv");
}

static void run(char **command)
{
	for (;; ++*counter) {
		pid_t child = fork();
		if (!child) {
			int null = open("/dev/null", O_RDWR);
			dup2(null, 0), dup2(null, 1), dup2(null, 2);
			execvp(command[0], command);
			_exit(127);
		}
		int status = 0;
		if (child < 0 || waitpid(child, &status, 0) < 0 || status) {
			fprintf(stderr, "%s: status %d\n", command[0], status);
			_exit(1);
		}
	}
}

int main(int argc, char **argv)
{
	if (argc < 4) {
		fprintf(stderr, "usage: hogs KIND FILE PROCESSES [MORE...]\n");
		return 2;
	}
	const char *kind = argv[1];
	unsigned processes = atoi(argv[3]), slot = 0;
	int file = open(argv[2], O_RDWR | O_CREAT, 0600);
	if (file < 0 || ftruncate(file, processes * 8))
		die(argv[2]);
	counter = mmap(0, processes * 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (counter == MAP_FAILED)
		die(argv[2]);
	while (slot + 1 < processes) {
		pid_t child = fork();
		if (child)
			slot++;
		else {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			break;
		}
	}
	counter += slot;
	if (!strcmp(kind, "int"))
		integers();
	else if (!strcmp(kind, "float"))
		floats();
	else if (!strcmp(kind, "stream"))
		stream();
	else if (!strcmp(kind, "forks"))
		forks();
	else if (!strcmp(kind, "read") && argc > 4)
		reads(argv[4], slot + 1);
	else if (!strcmp(kind, "write") && argc > 4)
		writes(argv[4], slot);
	else if (!strcmp(kind, "tcp"))
		tcp();
	else if (!strcmp(kind, "run") && argc > 4)
		run(argv + 4);
	fprintf(stderr, "unknown kind %s\n", kind);
	return 2;
}
