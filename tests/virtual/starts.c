/* Short-lived BestEffort pods, made and removed as a kubelet with containerd and runc does, without their CPU time.
 *
 *   runc EVERY_MS LIVES_MS FILE HIERARCHY...   a pod each EVERY_MS, which is removed LIVES_MS after it was complete
 *   runc first FILE                            a container's program
 *
 * A pod has a sandbox and a container. For each: the bundle, runc's directory with its FIFO, the groups with an init
 * process in them, the weight, runc's record, and 8 ms later the program. Between two steps it sleeps as long as was
 * recorded of runc on an idle machine: 20 ms from the first group to the record. The program appends a line to FILE: "1"
 * if it has the idle class at its first instruction, else "0". To be called runc: the agent takes a change by a program
 * of another name for a person's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BUNDLES "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
#define STATES "/run/containerd/runc/k8s.io"

enum { PATH = 512, LIVING = 64, EACH_POD = 2, STEP_US = 6000, LAST_US = 24000, APART_US = 50000 };

struct container {
	char id[65];
	pid_t init;
};

struct pod {
	char uid[37];
	struct container containers[EACH_POD];
	long long ends_us;
};

static char **hierarchies;
static int hierarchy_count;
static const char *first_file;

static void fail(const char *path)
{
	fprintf(stderr, "starts: %s: %s\n", path, strerror(errno));
	exit(1);
}

static const char *name(const char *format, ...)
{
	static char paths[8][PATH];
	static int last;
	char *path = paths[last++ % 8];
	va_list values;
	va_start(values, format);
	vsnprintf(path, PATH, format, values);
	va_end(values);
	return path;
}

static void put(const char *path, const char *text)
{
	int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	if (file < 0 || write(file, text, strlen(text)) < 0)
		fail(path);
	close(file);
}

static void make(const char *path)
{
	char part[PATH];
	snprintf(part, PATH, "%s", path);
	for (char *end = part + 1; (end = strchr(end, '/')) != NULL; *end++ = '/') {
		*end = 0;
		mkdir(part, 0755);
	}
	if (mkdir(part, 0755) != 0 && errno != EEXIST)
		fail(part);
}

static void copy(const char *from, const char *to)
{
	char text[256];
	int file = open(from, O_RDONLY | O_CLOEXEC);
	ssize_t size = file < 0 ? -1 : read(file, text, sizeof text - 1);
	if (size < 0)
		fail(from);
	close(file);
	text[size] = 0;
	put(to, text);
}

/* In all hierarchies; on v2 (a single one) a pod passes its controllers on. */
static void make_group(const char *path, int passes_on)
{
	char group[PATH];
	for (int i = 0; i < hierarchy_count; i++) {
		snprintf(group, PATH, "%s/%s", hierarchies[i], path);
		if (mkdir(group, 0755) != 0)
			fail(group);
		if (strstr(hierarchies[i], "cpuset") != NULL) {
			copy(name("%s/../cpuset.cpus", group), name("%s/cpuset.cpus", group));
			copy(name("%s/../cpuset.mems", group), name("%s/cpuset.mems", group));
		}
		if (hierarchy_count == 1 && passes_on)
			put(name("%s/cgroup.subtree_control", group), "+cpu +cpuset +memory +io +pids");
	}
}

static void set_weight(const char *group)
{
	for (int i = 0; i < hierarchy_count; i++) {
		const char *shares = name("%s/%s/cpu.shares", hierarchies[i], group);
		if (access(shares, F_OK) == 0)
			put(shares, "2");
		else if (hierarchy_count == 1)
			put(name("%s/%s/cpu.weight", hierarchies[i], group), "1");
	}
}

static void remove_group(const struct pod *pod, const char *below)
{
	for (int i = 0; i < hierarchy_count; i++)
		rmdir(name("%s/kubepods/besteffort/pod%s/%s", hierarchies[i], pod->uid, below));
}

static pid_t start_init(int *go)
{
	int ends[2];
	if (pipe2(ends, O_CLOEXEC) != 0)
		fail("pipe");
	pid_t init = fork();
	if (init == 0) {
		char byte;
		prctl(PR_SET_NAME, "runc:[2:INIT]");
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[1]);
		if (read(ends[0], &byte, 1) == 1)
			execl("/proc/self/exe", "job", "first", first_file, NULL);
		_exit(1);
	}
	close(ends[0]);
	*go = ends[1];
	return init;
}

static void start(struct container *self, const struct pod *pod, int number)
{
	static long long count;
	char group[PATH], note[2 * PATH];
	int go;
	snprintf(self->id, sizeof self->id, "%048llx%016llx", 0xc0ffeeLL, ++count);
	snprintf(group, PATH, "kubepods/besteffort/pod%s/%s", pod->uid, self->id);
	make(name("%s/%s", BUNDLES, self->id));
	snprintf(note, sizeof note,
		"{\"ociVersion\": \"1.0.2\", \"annotations\": {\"io.kubernetes.cri.container-type\": \"%s\","
		" \"io.kubernetes.cri.sandbox-id\": \"%s\", \"io.kubernetes.cri.sandbox-namespace\": \"batch\","
		" \"io.kubernetes.cri.sandbox-name\": \"job\", \"io.kubernetes.cri.sandbox-uid\": \"%s\"},"
		" \"linux\": {\"cgroupsPath\": \"/%s\", \"resources\": {\"cpu\": {\"shares\": 2}}}}",
		number ? "container" : "sandbox", pod->containers[0].id, pod->uid, group);
	put(name("%s/%s/config.json", BUNDLES, self->id), note);
	make(name("%s/%s", STATES, self->id));
	if (mkfifo(name("%s/%s/exec.fifo", STATES, self->id), 0622) != 0)
		fail("exec.fifo");
	usleep(STEP_US);
	self->init = start_init(&go);
	make_group(group, 0);
	usleep(STEP_US);
	for (int i = 0; i < hierarchy_count; i++)
		put(name("%s/%s/cgroup.procs", hierarchies[i], group), name("%d", self->init));
	usleep(STEP_US);
	set_weight(group);
	usleep(7 * STEP_US);
	snprintf(note, sizeof note,
		"{\"id\": \"%s\", \"init_process_pid\": %d, \"config\": {\"cgroups\": {\"path\": \"/%s\", \"cpu_shares\": 2}}}",
		self->id, self->init, group);
	put(name("%s/%s/state.new", STATES, self->id), note);
	if (rename(name("%s/%s/state.new", STATES, self->id), name("%s/%s/state.json", STATES, self->id)) != 0)
		fail("state.json");
	put(name("%s/%s/init.pid", BUNDLES, self->id), name("%d", self->init));
	usleep(LAST_US);
	unlink(name("%s/%s/exec.fifo", STATES, self->id));
	if (write(go, "", 1) != 1)
		fail("init");
	close(go);
}

static long long now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static void start_pod(struct pod *pod, long long lives_us)
{
	static int count;
	char group[PATH];
	snprintf(pod->uid, sizeof pod->uid, "33333333-3333-4333-8333-%012d", ++count);
	snprintf(group, PATH, "kubepods/besteffort/pod%s", pod->uid);
	make_group(group, 1);
	set_weight(group);
	for (int i = 0; i < EACH_POD; i++) {
		usleep(APART_US);
		start(&pod->containers[i], pod, i);
	}
	pod->ends_us = now_us() + lives_us;
}

static void end_pod(struct pod *pod)
{
	for (int i = EACH_POD; i-- > 0;) {
		struct container *self = &pod->containers[i];
		kill(self->init, SIGKILL);
		waitpid(self->init, NULL, 0);
		usleep(STEP_US);
		remove_group(pod, self->id);
		unlink(name("%s/%s/state.json", STATES, self->id));
		rmdir(name("%s/%s", STATES, self->id));
		unlink(name("%s/%s/config.json", BUNDLES, self->id));
		unlink(name("%s/%s/init.pid", BUNDLES, self->id));
		rmdir(name("%s/%s", BUNDLES, self->id));
		usleep(APART_US);
	}
	remove_group(pod, "");
}

static int first(const char *file)
{
	int out = open(file, O_WRONLY | O_CREAT | O_APPEND, 0644);
	if (out < 0 || write(out, sched_getscheduler(0) == SCHED_IDLE ? "1\n" : "0\n", 2) != 2)
		return 1;
	for (;;)
		pause();
}

static volatile sig_atomic_t ended;

static void end(int number)
{
	(void)number;
	ended = 1;
}

int main(int count, char **values)
{
	if (count == 3 && strcmp(values[1], "first") == 0)
		return first(values[2]);
	if (count < 5) {
		fprintf(stderr, "runc EVERY_MS LIVES_MS FILE HIERARCHY...\n");
		return 2;
	}
	long long every_us = atoll(values[1]) * 1000, lives_us = atoll(values[2]) * 1000;
	static struct pod living[LIVING];
	int from = 0, to = 0;
	first_file = values[3];
	hierarchies = values + 4;
	hierarchy_count = count - 4;
	signal(SIGTERM, end);
	make(BUNDLES);
	make(STATES);
	for (long long due = now_us(); !ended; due += every_us) {
		for (long long rest_us; !ended && (rest_us = due - now_us()) > 0;)
			usleep(rest_us);
		while (from < to && (to - from == LIVING || living[from % LIVING].ends_us <= now_us()))
			end_pod(&living[from++ % LIVING]);
		start_pod(&living[to++ % LIVING], lives_us);
	}
	while (from < to)
		end_pod(&living[from++ % LIVING]);
	return 0;
}
