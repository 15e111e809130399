/*
 * The programs of the self-contained tree: bin/bypassd, bin/bypassctl, bin/state-dump and bin/bypassd-python are this.
 *
 * It runs the tree's own interpreter with the tree's own loader and C library, so that nothing of the host's is needed
 * and the tree may lie anywhere: the place is that of this file (/proc/self/exe). It uses no C library itself, so it
 * also runs where there is none. Linux on x86-64.
 *
 *   PREFIX/lib/ld-linux-x86-64.so.2 --inhibit-cache --library-path PREFIX/lib
 *       PREFIX/bin/python3.11 -I -OO -B PREFIX/lib/bypassd/run.py NAME ARGUMENTS...
 *
 * Source: ld.so(8). The names are the last part of argv[0]. Exit code 127: the tree is not whole.
 */

enum { READ_LINK = 89, WRITE = 1, EXECVE = 59, EXIT = 60 };
enum { PATH_ROOM = 4096, MOST_ARGUMENTS = 4096 };

static long call(long number, long first, long second, long third)
{
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second), "d"(third)
                     : "rcx", "r11", "memory");
    return result;
}

static unsigned long length(const char *text)
{
    unsigned long count = 0;
    while (text[count])
        count++;
    return count;
}

static int same(const char *one, const char *other)
{
    while (*one && *one == *other)
        one++, other++;
    return *one == *other;
}

static _Noreturn void fail(const char *text)
{
    static const char before[] = "bypassd: ";
    call(WRITE, 2, (long)before, sizeof before - 1);
    call(WRITE, 2, (long)text, (long)length(text));
    call(WRITE, 2, (long)"\n", 1);
    call(EXIT, 127, 0, 0);
    __builtin_unreachable();
}

static char prefix[PATH_ROOM];
static char room[4][PATH_ROOM + 64];
static const char *arguments[MOST_ARGUMENTS + 16];

/* prefix + tail in one of the rooms. */
static const char *below(int number, const char *tail)
{
    unsigned long start = length(prefix), count = length(tail);
    for (unsigned long i = 0; i < start; i++)
        room[number][i] = prefix[i];
    for (unsigned long i = 0; i <= count; i++)
        room[number][start + i] = tail[i];
    return room[number];
}

__attribute__((used)) static void launch(long *stack)
{
    long count = stack[0];
    const char **given = (const char **)(stack + 1);
    const char **environment = given + count + 1;

    long size = call(READ_LINK, (long)"/proc/self/exe", (long)prefix, PATH_ROOM - 1);
    if (size <= 0)
        fail("/proc is needed to find the installation");
    if (size >= PATH_ROOM - 1)
        fail("the path of the installation is too long");
    for (int parts = 0; size > 0 && parts < 2; size--)
        if (prefix[size - 1] == '/')
            parts++;
    prefix[size] = 0; /* without the last two parts: bin and the file */

    if (count < 1 || count > MOST_ARGUMENTS)
        fail("too many arguments");
    const char *name = given[0];
    for (const char *at = given[0]; *at; at++)
        if (*at == '/')
            name = at + 1;

    int next = 0;
    const char *loader = below(0, "/lib/ld-linux-x86-64.so.2");
    arguments[next++] = loader;
    arguments[next++] = "--inhibit-cache";
    arguments[next++] = "--library-path";
    arguments[next++] = below(1, "/lib");
    arguments[next++] = below(2, "/bin/python3.11");
    if (same(name, "bypassd") || same(name, "bypassctl") || same(name, "state-dump")) {
        arguments[next++] = "-I";
        arguments[next++] = "-OO";
        arguments[next++] = "-B";
        arguments[next++] = below(3, "/lib/bypassd/run.py");
        arguments[next++] = name;
    } else if (!same(name, "bypassd-python")) {
        fail("call it bypassd, bypassctl, state-dump or bypassd-python");
    }
    for (long i = 1; i < count; i++)
        arguments[next++] = given[i];
    arguments[next] = 0;
    call(EXECVE, (long)loader, (long)arguments, (long)environment);
    fail("the installation is not whole: its loader cannot be run");
}

__asm__(".globl _start\n_start:\n xor %rbp, %rbp\n mov %rsp, %rdi\n and $-16, %rsp\n call launch\n hlt\n");
