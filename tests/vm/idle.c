/* What the kernel's idle classes do, measured: the first and only program of a machine that tests/vm/idle.sh boots.
 *
 * Prints a JSON object a line: what is inherited, what the group's files accept, and for each form of the idle class
 * how long an online thread waits after its wake-ups, and how much CPU time BE work gets. The machine has one CPU and
 * its clock counts instructions, so times are the kernel's doing and the same on every host. With two CPUs: where a
 * thread that wakes up is placed; with more: the same where some CPUs are kept free from BE work.
 *
 * From the environment, which is the kernel's command line: LAYOUT v1 or v2; CASES, names with commas; WAKES, a number;
 * FEATURES, a name for the scheduler's file of that name.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define RESET_ON_FORK 0x40000000
#define MOST 20000
#define HOGS 2
#define CPUS 64
#define SERVICE_NS 900000
#define MS 1000000LL

static bool v2;
static int wakes = 2000;
static const char *layout;
static char release[65];

static void die(const char *text)
{
	printf("{\"error\": \"%s\", \"errno\": %d}\n", text, errno);
	fflush(stdout);
	if (getpid() == 1)
		reboot(RB_AUTOBOOT);
	_exit(1);
}

static int64_t clock_ns(clockid_t id)
{
	struct timespec now;
	clock_gettime(id, &now);
	return now.tv_sec * 1000 * MS + now.tv_nsec;
}

static void sleep_until(int64_t ns)
{
	struct timespec at = {ns / (1000 * MS), ns % (1000 * MS)};
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL))
		;
}

/* Groups, by their path below the mount. */

#define BURSTABLE "kubepods/burstable"
#define BESTEFFORT "kubepods/besteffort"

static const char *file_of(const char *group, const char *name)
{
	static char path[256];
	snprintf(path, sizeof(path), "/cg/%s/%s", group, name);
	return path;
}

/* 0, or the error's number. */
static int write_to(const char *group, const char *name, const char *text)
{
	int fd = open(file_of(group, name), O_WRONLY);
	if (fd < 0)
		return errno;
	int error = write(fd, text, strlen(text)) < 0 ? errno : 0;
	close(fd);
	return error;
}

static const char *read_from(const char *group, const char *name)
{
	static char text[4096];
	int fd = open(file_of(group, name), O_RDONLY);
	if (fd < 0)
		return NULL;
	ssize_t length = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (length < 0)
		return NULL;
	text[length] = 0;
	text[strcspn(text, "\n")] = 0;
	return text;
}

static void make_group(const char *group)
{
	if (mkdir(file_of(group, ""), 0755))
		die(group);
}

static void pass_on(const char *group)
{
	if (v2 && write_to(group, "cgroup.subtree_control", "+cpu"))
		die("subtree_control");
}

static const char *weight_file(void)
{
	return v2 ? "cpu.weight" : "cpu.shares";
}

/* The kubelet's own weights: a CPU requested, and nothing requested. */
static void set_weight(const char *group, bool least)
{
	if (write_to(group, weight_file(), v2 ? (least ? "1" : "39") : (least ? "2" : "1024")))
		die("weight");
}

static void join(const char *group)
{
	if (write_to(group, "cgroup.procs", "0"))
		die("join");
}

/* Facts of one call each. */

static int policy_of(pid_t pid)
{
	return sched_getscheduler(pid) & ~RESET_ON_FORK;
}

static int set_idle(pid_t pid)
{
	struct sched_param none = {0};
	return sched_setscheduler(pid, SCHED_IDLE, &none) ? errno : 0;
}

static void *policy_of_thread(void *result)
{
	*(int *)result = policy_of(0);
	return NULL;
}

static int exit_code(pid_t pid)
{
	int status;
	if (waitpid(pid, &status, 0) < 0)
		die("wait");
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void inherited(void)
{
	int *thread = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pid = fork();
	if (!pid) {
		pthread_t other;
		set_idle(0);
		pthread_create(&other, NULL, policy_of_thread, thread);
		pthread_join(other, NULL);
		pid = fork();
		if (!pid)
			_exit(policy_of(0));
		thread[1] = exit_code(pid);
		pid = fork();
		if (!pid) {
			execl("/init", "init", "policy", NULL);
			_exit(99);
		}
		thread[2] = exit_code(pid);
		/* As the user of a container without CAP_SYS_NICE. */
		if (setgid(1000) || setuid(1000))
			_exit(99);
		struct sched_param none = {0};
		thread[3] = sched_setscheduler(0, SCHED_OTHER, &none) ? errno : 0;
		_exit(0);
	}
	exit_code(pid);
	printf("{\"release\": \"%s\", \"fact\": \"inherited\", \"thread\": %s, \"fork\": %s, \"exec\": %s, \"leaves_unprivileged\": %s}\n",
	       release, thread[0] == SCHED_IDLE ? "true" : "false", thread[1] == SCHED_IDLE ? "true" : "false",
	       thread[2] == SCHED_IDLE ? "true" : "false", thread[3] ? "false" : "true");
}

static void group_files(void)
{
	const char *pod = BURSTABLE "/be";
	bool idle = read_from(pod, "cpu.idle") != NULL;
	printf("{\"release\": \"%s\", \"layout\": \"%s\", \"fact\": \"group\", \"idle\": %s", release, layout, idle ? "true" : "false");
	set_weight(pod, true);
	printf(", \"least\": %s", read_from(pod, weight_file()));
	write_to(pod, weight_file(), "1");
	printf(", \"of_one\": %s", read_from(pod, weight_file()));
	set_weight(pod, false);
	if (idle) {
		printf(", \"set\": %d", write_to(pod, "cpu.idle", "1"));
		printf(", \"weight_idle\": %s", read_from(pod, weight_file()));
		printf(", \"weight_write\": %d", write_to(pod, weight_file(), "50"));
		printf(", \"unset\": %d", write_to(pod, "cpu.idle", "0"));
		printf(", \"weight_after\": %s", read_from(pod, weight_file()));
		set_weight(pod, false);
	}
	printf("}\n");
}

/* The forms, and what they are tried against. */

struct form {
	const char *name, *be, *online;
	bool least, threads, group;
	/* Of besteffort: a percentage of the CPU in each period; 0: none. */
	int quota, period_us;
};

static const struct form forms[] = {
	{"besteffort", BESTEFFORT "/be", BURSTABLE "/online", true, false, false, 0, 0},
	{"besteffort threads", BESTEFFORT "/be", BURSTABLE "/online", true, true, false, 0, 0},
	{"besteffort group", BESTEFFORT "/be", BURSTABLE "/online", true, false, true, 0, 0},
	{"besteffort both", BESTEFFORT "/be", BURSTABLE "/online", true, true, true, 0, 0},
	{"besteffort quota", BESTEFFORT "/be", BURSTABLE "/online", .least = true, .quota = 40, .period_us = 100000},
	{"besteffort small quota", BESTEFFORT "/be", BURSTABLE "/online", .least = true, .quota = 10, .period_us = 100000},
	{"besteffort long quota", BESTEFFORT "/be", BURSTABLE "/online", .least = true, .quota = 40, .period_us = 1000000},
	{"besteffort group quota", BESTEFFORT "/be", BURSTABLE "/online", .least = true, .group = true, .quota = 40, .period_us = 100000},
	{"beside equal", BURSTABLE "/be", BURSTABLE "/online", false, false, false, 0, 0},
	{"beside equal threads", BURSTABLE "/be", BURSTABLE "/online", false, true, false, 0, 0},
	{"beside", BURSTABLE "/be", BURSTABLE "/online", true, false, false, 0, 0},
	{"beside threads", BURSTABLE "/be", BURSTABLE "/online", true, true, false, 0, 0},
	{"beside group", BURSTABLE "/be", BURSTABLE "/online", true, false, true, 0, 0},
	{"beside both", BURSTABLE "/be", BURSTABLE "/online", true, true, true, 0, 0},
	{"above", BURSTABLE "/be", "kubepods/guaranteed", true, false, false, 0, 0},
	{"above threads", BURSTABLE "/be", "kubepods/guaranteed", true, true, false, 0, 0},
	{"above group", BURSTABLE "/be", "kubepods/guaranteed", true, false, true, 0, 0},
	{"above both", BURSTABLE "/be", "kubepods/guaranteed", true, true, true, 0, 0},
};

static pid_t hogs[HOGS];
static int online_cpus;
static int64_t *results;

static const char *container_of(const char *pod)
{
	static char path[128];
	snprintf(path, sizeof(path), "%s/c", pod);
	return path;
}

static void pin(int cpu)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		die("affinity");
}

static void set_quota(int percent, int period_us)
{
	char period[32], quota[32];
	snprintf(period, sizeof(period), "%d", period_us);
	snprintf(quota, sizeof(quota), v2 ? (percent ? "%d %s" : "max") : (percent ? "%d" : "-1"), percent * period_us / 100, period);
	if ((!v2 && percent && write_to(BESTEFFORT, "cpu.cfs_period_us", period)) ||
	    write_to(BESTEFFORT, v2 ? "cpu.max" : "cpu.cfs_quota_us", quota))
		die("quota");
}

static pid_t start_hog(const char *pod, bool threads, int cpu)
{
	pid_t pid = fork();
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		join(container_of(pod));
		pin(cpu);
		if (threads && set_idle(0))
			die("SCHED_IDLE");
		for (volatile uint32_t value = 1;; value = value * 1103515245u + 12345u)
			;
	}
	return pid;
}

static void end(pid_t pid)
{
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

/* BE work in a form, with its first process on a CPU; false where this kernel does not have the form. */
static bool start(const struct form *form, int cpu)
{
	if (form->group && !read_from(form->be, "cpu.idle"))
		return false;
	set_weight(form->be, form->least);
	if (form->group && write_to(form->be, "cpu.idle", "1"))
		die("cpu.idle");
	if (form->quota)
		set_quota(form->quota, form->period_us);
	for (int i = 0; i < HOGS; i++)
		hogs[i] = start_hog(form->be, form->threads, cpu);
	sleep_until(clock_ns(CLOCK_MONOTONIC) + 100 * MS);
	return true;
}

static void stop(const struct form *form)
{
	for (int i = 0; i < HOGS; i++)
		end(hogs[i]);
	if (form->quota)
		set_quota(0, 0);
	if (form->group)
		write_to(form->be, "cpu.idle", "0");
}

static void schedstat(const char *who, int64_t *ran, int64_t *waited)
{
	char path[64];
	snprintf(path, sizeof(path), "/proc/%s/schedstat", who);
	FILE *file = fopen(path, "r");
	if (!file || fscanf(file, "%ld %ld", ran, waited) != 2)
		die("schedstat");
	fclose(file);
}

static int64_t hogs_ran(void)
{
	int64_t sum = 0, ran, waited;
	for (int i = 0; i < HOGS; i++) {
		char who[16];
		snprintf(who, sizeof(who), "%d", hogs[i]);
		schedstat(who, &ran, &waited);
		sum += ran;
	}
	return sum;
}

static int by_size(const void *left, const void *right)
{
	int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
	return (a > b) - (a < b);
}

/* A server that works SERVICE_NS of CPU time at each wake-up and sleeps up to pause_ns after it: how late each of its
 * wake-ups is, and what it ran and waited in the run queue in all. */
static void serve(const char *pod, int64_t pause_ns)
{
	int64_t next, before[2], after[2];
	join(container_of(pod));
	prctl(PR_SET_TIMERSLACK, 1);
	srandom(1);
	next = clock_ns(CLOCK_MONOTONIC) + 20 * MS;
	schedstat("thread-self", &before[0], &before[1]);
	for (int i = 0; i < wakes; i++) {
		sleep_until(next);
		results[i] = clock_ns(CLOCK_MONOTONIC) - next;
		for (int64_t end = clock_ns(CLOCK_THREAD_CPUTIME_ID) + SERVICE_NS; clock_ns(CLOCK_THREAD_CPUTIME_ID) < end;)
			;
		next = clock_ns(CLOCK_MONOTONIC) + pause_ns / 10 + random() % pause_ns;
	}
	schedstat("thread-self", &after[0], &after[1]);
	results[MOST] = after[0] - before[0];
	results[MOST + 1] = after[1] - before[1];
	_exit(0);
}

static void spin(const char *pod, int64_t ns)
{
	join(container_of(pod));
	for (int64_t end = clock_ns(CLOCK_MONOTONIC) + ns; clock_ns(CLOCK_MONOTONIC) < end;)
		;
	_exit(0);
}

/* A load of the online pod beside what runs: a JSON object. */
static void loaded(const char *name, const char *pod, int64_t pause_ns, int64_t tick, bool beside)
{
	int64_t began = clock_ns(CLOCK_MONOTONIC), ran = beside ? hogs_ran() : 0;
	pid_t server = fork();
	if (!server)
		serve(pod, pause_ns);
	if (exit_code(server))
		die("server");
	int64_t took = clock_ns(CLOCK_MONOTONIC) - began, served = results[MOST], waited = results[MOST + 1];
	int at_once = 0, in_tick = 0;
	qsort(results, wakes, sizeof(*results), by_size);
	for (int i = 0; i < wakes; i++) {
		at_once += results[i] < tick / 10;
		in_tick += results[i] < tick;
	}
	printf(", \"%s\": {\"load\": %.2f, \"at_once\": %.4f, \"in_a_tick\": %.4f", name, (double)served / took,
	       (double)at_once / wakes, (double)in_tick / wakes);
	printf(", \"p99\": %.3f, \"most\": %.3f, \"waited\": %.4f", (double)results[wakes * 99 / 100] / tick,
	       (double)results[wakes - 1] / tick, (double)waited / (served + waited));
	if (beside)
		printf(", \"be_of_the_rest\": %.3f", (double)(hogs_ran() - ran) / (took - served));
	printf("}");
}

/* BE work's share of the CPU beside an online pod that sleeps, or is always busy. */
static double share_of_be(const char *pod, int64_t ns, bool busy)
{
	int64_t began = clock_ns(CLOCK_MONOTONIC), ran = hogs_ran();
	if (busy) {
		pid_t pid = fork();
		if (!pid)
			spin(pod, ns);
		if (exit_code(pid))
			die("busy");
	} else
		sleep_until(began + ns);
	return (double)(hogs_ran() - ran) / (clock_ns(CLOCK_MONOTONIC) - began);
}

static void measure(const struct form *form, int64_t tick)
{
	const char *online = form ? form->online : BURSTABLE "/online";
	if (form && !start(form, 0))
		return;
	printf("{\"release\": \"%s\", \"layout\": \"%s\", \"form\": \"%s\"", release, layout, form ? form->name : "alone");
	printf(", \"tick_us\": %ld, \"wakes\": %d", tick / 1000, wakes);
	if (form)
		printf(", \"be_beside_sleeping\": %.3f", share_of_be(online, 1000 * MS, false));
	loaded("light", online, 5 * MS, tick, form);
	loaded("heavy", online, MS / 2, tick, form);
	if (form) {
		printf(", \"be_beside_busy\": %.4f", share_of_be(online, 4000 * MS, true));
		stop(form);
	}
	printf("}\n");
	fflush(stdout);
}

/* A thread that ran on CPU 0, where a usual thread runs, and may run on all: how often it wakes up on another one. */
static double elsewhere(const char *pod)
{
	pid_t server = fork();
	if (!server) {
		join(container_of(pod));
		for (int i = 0; i < wakes; i++) {
			cpu_set_t all;
			pin(0);
			CPU_ZERO(&all);
			for (int cpu = 0; cpu < online_cpus; cpu++)
				CPU_SET(cpu, &all);
			sched_setaffinity(0, sizeof(all), &all);
			sleep_until(clock_ns(CLOCK_MONOTONIC) + MS + random() % (2 * MS));
			results[i] = sched_getcpu();
		}
		_exit(0);
	}
	if (exit_code(server))
		die("server");
	int other = 0;
	for (int i = 0; i < wakes; i++)
		other += results[i] != 0;
	return (double)other / wakes;
}

/* A usual thread on CPU 0, and BE work on each of the others but the last ones, of which `kept` are free from it: on
 * which CPUs does a thread run that wakes up? */
static void place(const struct form *form, int kept)
{
	pid_t all[CPUS];
	if (form->group && !read_from(form->be, "cpu.idle"))
		return;
	set_weight(form->be, form->least);
	if (form->group && write_to(form->be, "cpu.idle", "1"))
		die("cpu.idle");
	all[0] = start_hog("kubepods/guaranteed", false, 0);
	for (int cpu = 1; cpu < online_cpus - kept; cpu++)
		all[cpu] = start_hog(form->be, form->threads, cpu);
	/* Until the averages of the CPUs' use have settled. */
	sleep_until(clock_ns(CLOCK_MONOTONIC) + 3000 * MS);
	printf("{\"release\": \"%s\", \"layout\": \"%s\", \"form\": \"%s\", \"wakes\": %d, \"cpus\": %d, \"kept\": %d", release,
	       layout, form->name, wakes, online_cpus, kept);
	printf(", \"placed\": %.3f}\n", elsewhere(form->online));
	fflush(stdout);
	for (int cpu = 0; cpu < online_cpus - kept; cpu++)
		end(all[cpu]);
	if (form->group)
		write_to(form->be, "cpu.idle", "0");
}

static bool chosen(const char *name)
{
	const char *cases = getenv("CASES");
	char wanted[256], one[64];
	if (!cases || !*cases)
		return true;
	snprintf(wanted, sizeof(wanted), ",%s,", cases);
	snprintf(one, sizeof(one), ",%s,", name);
	for (char *space; (space = strchr(one, ' '));)
		*space = '-';
	return strstr(wanted, one) != NULL;
}

static void make_tree(void)
{
	const char *inner[] = {"kubepods", BURSTABLE, BESTEFFORT, BURSTABLE "/online", BURSTABLE "/be", BESTEFFORT "/be", "kubepods/guaranteed"};
	if (v2 ? mount("cg", "/cg", "cgroup2", 0, NULL) : mount("cg", "/cg", "cgroup", 0, "cpu"))
		die("cgroup");
	pass_on("");
	for (size_t i = 0; i < sizeof(inner) / sizeof(*inner); i++) {
		make_group(inner[i]);
		pass_on(inner[i]);
		set_weight(inner[i], !strcmp(inner[i], BESTEFFORT) || !strcmp(inner[i], BESTEFFORT "/be"));
		if (i > 2)
			make_group(container_of(inner[i]));
	}
}

int main(int count, char **arguments)
{
	struct utsname name;
	struct timespec tick;
	if (count > 1 && !strcmp(arguments[1], "policy"))
		return policy_of(0);
	mkdir("/dev", 0755);
	mkdir("/proc", 0755);
	mount("dev", "/dev", "devtmpfs", 0, NULL);
	mount("proc", "/proc", "proc", 0, NULL);
	int console = open("/dev/ttyS0", O_RDWR);
	dup2(console, 1);
	dup2(console, 2);
	layout = getenv("LAYOUT") && !strcmp(getenv("LAYOUT"), "v1") ? "v1" : "v2";
	v2 = !strcmp(layout, "v2");
	if (getenv("WAKES"))
		wakes = atoi(getenv("WAKES"));
	if (wakes < 1 || wakes > MOST)
		die("WAKES");
	uname(&name);
	snprintf(release, sizeof(release), "%s", name.release);
	clock_getres(CLOCK_MONOTONIC_COARSE, &tick);
	results = mmap(NULL, (MOST + 2) * sizeof(*results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (results == MAP_FAILED)
		die("mmap");
	mkdir("/cg", 0755);
	if (getenv("FEATURES")) {
		mount("debug", "/cg", "debugfs", 0, NULL);
		if (write_to("sched", "features", getenv("FEATURES")))
			die("FEATURES");
		umount("/cg");
	}
	make_tree();
	online_cpus = sysconf(_SC_NPROCESSORS_ONLN);
	bool placing = online_cpus > 1;
	if (online_cpus > CPUS)
		die("CPUS");
	/* What the kernel still does after its boot is no part of it. Costs nothing: an idle machine's clock jumps. */
	if (!placing)
		sleep_until(clock_ns(CLOCK_MONOTONIC) + 20000 * MS);
	if (!placing && chosen("facts")) {
		inherited();
		group_files();
	}
	if (!placing && chosen("alone"))
		measure(NULL, tick.tv_nsec);
	for (size_t i = 0; i < sizeof(forms) / sizeof(*forms); i++)
		if (chosen(forms[i].name)) {
			if (placing && !forms[i].quota)
				for (int kept = 0; kept < online_cpus / 2; kept = kept ? 2 * kept : 1)
					place(&forms[i], kept);
			else if (!placing)
				measure(&forms[i], tick.tv_nsec);
		}
	printf("{\"end\": true}\n");
	fflush(stdout);
	tcdrain(1);
	sync();
	reboot(RB_AUTOBOOT);
	return 1;
}
