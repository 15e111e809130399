/* The physical limit beside which the agent is measured: the same watch and the same writes, bare.
 *
 *   watchwrite RUNC_ROOT BUNDLES LOG FILE=VALUE...
 *
 * For every container directory that appears in RUNC_ROOT it prepares (reads BUNDLES/<id>/config.json for
 * linux.cgroupsPath, cgroupfs driver) and waits for state.json to be renamed into it. On that event it writes VALUE to
 * FILE, where "%s" in FILE stands for the cgroup path: "/sys/fs/cgroup/cpu%s/cpu.shares=2". Pause containers are left
 * alone, as the agent leaves them. LOG gets one line a container:
 *
 *   <id> <ns when the event was in hand> <ns when the last write had returned> <number of failed writes>
 *
 * Times are CLOCK_MONOTONIC. "ready" is printed once the root is watched; SIGTERM ends it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#define MAX_FILES 16
#define MAX_WATCHES 65536
#define ID_SIZE 80

struct container {
	char id[ID_SIZE];
	char path[MAX_FILES][512]; /* empty: not prepared, or a pause container */
	int known;                 /* state.json has been answered once */
};

static struct container *by_watch[MAX_WATCHES];
static const char *file[MAX_FILES], *value[MAX_FILES];
static int files, notify;
static const char *root, *bundles;
static FILE *logfile;

static long long now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static char *slurp(const char *path)
{
	size_t size = 0, room = 1 << 16;
	char *all = malloc(room);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;
	if (fd < 0 || !all) {
		free(all);
		return 0;
	}
	while ((n = read(fd, all + size, room - size - 1)) > 0)
		if ((size += (size_t)n) + 1 >= room && !(all = realloc(all, room *= 2)))
			break;
	close(fd);
	if (all)
		all[size] = 0;
	return all;
}

static void prepare(struct container *c)
{
	char config[PATH_MAX];
	snprintf(config, sizeof config, "%s/%s/config.json", bundles, c->id);
	char *json = slurp(config);
	if (!json)
		return;
	char *found = strstr(json, "\"cgroupsPath\":\"");
	if (found && !strstr(json, "\"io.kubernetes.cri.container-type\":\"sandbox\"")) {
		found += strlen("\"cgroupsPath\":\"");
		found[strcspn(found, "\"")] = 0;
		for (int i = 0; i < files; i++) {
			const char *hole = strstr(file[i], "%s");
			snprintf(c->path[i], sizeof c->path[i], "%.*s%s%s", (int)(hole - file[i]), file[i], found, hole + 2);
		}
	}
	free(json);
}

static void apply(struct container *c, long long signal_ns)
{
	int failed = 0;
	if (!c->path[0][0])
		return;
	for (int i = 0; i < files; i++) {
		int fd = open(c->path[i], O_WRONLY | O_CLOEXEC);
		if (fd < 0 || write(fd, value[i], strlen(value[i])) < 0)
			failed++;
		if (fd >= 0)
			close(fd);
	}
	long long done = now();
	fprintf(logfile, "%s %lld %lld %d\n", c->id, signal_ns, done, failed);
	fflush(logfile);
}

static void add(const char *id)
{
	char directory[PATH_MAX], state[PATH_MAX + 16];
	if (strlen(id) >= ID_SIZE)
		return;
	snprintf(directory, sizeof directory, "%s/%s", root, id);
	int watch = inotify_add_watch(notify, directory, IN_MOVED_TO | IN_ONLYDIR);
	if (watch < 0 || watch >= MAX_WATCHES)
		return;
	if (by_watch[watch])
		return;
	struct container *c = calloc(1, sizeof *c);
	if (!c)
		exit(1);
	strcpy(c->id, id);
	by_watch[watch] = c;
	prepare(c);
	/* Watch first, then look: a state.json that came in between is not lost. */
	snprintf(state, sizeof state, "%s/state.json", directory);
	if (access(state, F_OK) == 0 && !c->known) {
		c->known = 1;
		apply(c, now());
	}
}

int main(int argc, char **argv)
{
	if (argc < 5) {
		fprintf(stderr, "usage: watchwrite RUNC_ROOT BUNDLES LOG FILE=VALUE...\n");
		return 2;
	}
	root = argv[1];
	bundles = argv[2];
	logfile = fopen(argv[3], "w");
	for (int i = 4; i < argc && files < MAX_FILES; i++) {
		char *equal = strchr(argv[i], '=');
		if (!equal || !strstr(argv[i], "%s")) {
			fprintf(stderr, "%s: expected FILE=VALUE with %%s in FILE\n", argv[i]);
			return 2;
		}
		*equal = 0;
		file[files] = argv[i];
		value[files++] = equal + 1;
	}
	notify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	int poll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event wanted = {.events = EPOLLIN};
	int top = inotify_add_watch(notify, root, IN_CREATE | IN_ONLYDIR);
	if (!logfile || notify < 0 || poll < 0 || top < 0 || epoll_ctl(poll, EPOLL_CTL_ADD, notify, &wanted)) {
		perror(root);
		return 1;
	}
	puts("ready");
	fflush(stdout);

	char buffer[65536] __attribute__((aligned(8)));
	for (;;) {
		struct epoll_event event;
		if (epoll_wait(poll, &event, 1, -1) < 0) {
			if (errno == EINTR)
				continue;
			return 1;
		}
		ssize_t got = read(notify, buffer, sizeof buffer);
		long long signal_ns = now();
		for (char *at = buffer; at < buffer + got;) {
			struct inotify_event *e = (struct inotify_event *)at;
			at += sizeof *e + e->len;
			if (e->wd == top && e->mask & IN_CREATE) {
				add(e->name);
			} else if (e->wd >= 0 && e->wd < MAX_WATCHES && by_watch[e->wd]) {
				struct container *c = by_watch[e->wd];
				if (e->mask & IN_IGNORED) {
					free(c);
					by_watch[e->wd] = 0;
				} else if (e->mask & IN_MOVED_TO && !strcmp(e->name, "state.json") && !c->known) {
					c->known = 1;
					apply(c, signal_ns);
				}
			}
		}
	}
}
