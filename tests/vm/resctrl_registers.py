"""Give QEMU's emulated x86 CPU the registers of cache and bandwidth control. Works on an unpacked QEMU 7.2 source tree.

    resctrl_registers.py SOURCE

The registers store and do nothing. That is enough for an unmodified kernel to offer all of resctrl: files, refusals,
budgets of ids. At run time BYPASSD_VM_REGISTERS chooses the machine: intel, intel-l2 or amd, the shapes of the recorded
transcripts (tests/fixtures/resctrl); without it the CPU is QEMU's own.

Monitoring: an occupancy of two counts (AMD: none) for every id, traffic that grows with time, "Unavailable" for id 20
and "Error" for 21.

Source: Intel SDM volume 3, chapter "Debug, branch profile, TSC, and Intel RDT features"; AMD64 APM volume 2, chapter
"Platform quality of service extension"; CPUID leaves 7, 0xF, 0x10, 0x80000008, 0x80000020.
"""

import sys
from pathlib import Path
from string import Template
from typing import NamedTuple


class Leaf(NamedTuple):
    """What CPUID answers: eax, ebx, ecx, edx."""

    eax: int = 0
    ebx: int = 0
    ecx: int = 0
    edx: int = 0


class Machine(NamedTuple):
    """``leaves`` replace QEMU's answers, ``flags`` are added to them; ``occupancy`` in counts of 64 KiB."""

    leaves: dict[tuple[int, int], Leaf]
    flags: dict[int, int]
    occupancy: int


RMIDS = 32
L3_MONITORING, ALL_EVENTS = 1 << 1, 0b111
L3_CONTROL, L2_CONTROL, BANDWIDTH_CONTROL = 1 << 1, 1 << 2, 1 << 3
CODE_AND_DATA = LINEAR = 1 << 2
MONITORING, CONTROL = 1 << 12, 1 << 15
AMD_BANDWIDTH = 1 << 6


def _monitoring() -> dict[tuple[int, int], Leaf]:
    return {
        (0xF, 0): Leaf(ebx=RMIDS - 1, edx=L3_MONITORING),
        (0xF, 1): Leaf(ebx=65_536, ecx=RMIDS - 1, edx=ALL_EVENTS),
    }


def _cache(ways: int, groups: int, shared: int = 0) -> Leaf:
    return Leaf(eax=ways - 1, ebx=shared, ecx=CODE_AND_DATA, edx=groups - 1)


_INTEL = {
    **_monitoring(),
    (0x10, 0): Leaf(ebx=L3_CONTROL | BANDWIDTH_CONTROL),
    (0x10, 1): _cache(12, 8, 0xC00),
    # Throttled by at most 90 per cent.
    (0x10, 3): Leaf(eax=89, ecx=LINEAR, edx=7),
}
_AMD = {
    **_monitoring(),
    (0x10, 0): Leaf(ebx=L3_CONTROL),
    (0x10, 1): _cache(16, 16),
    # Bandwidth, bandwidth of slow memory, kinds of traffic to count; the first two in 11 bits and 16 classes.
    (0x80000020, 0): Leaf(ebx=0b1110),
    (0x80000020, 1): Leaf(eax=11, edx=15),
    (0x80000020, 2): Leaf(eax=11, edx=15),
    (0x80000020, 3): Leaf(ebx=2, ecx=0x7F),
}
MACHINES = {
    "intel": Machine(_INTEL, {7: MONITORING | CONTROL}, 2),
    "intel-l2": Machine(
        {**_INTEL, (0x10, 0): Leaf(ebx=L3_CONTROL | L2_CONTROL | BANDWIDTH_CONTROL), (0x10, 2): _cache(8, 4)},
        {7: MONITORING | CONTROL},
        2,
    ),
    "amd": Machine(_AMD, {7: MONITORING | CONTROL, 0x80000008: AMD_BANDWIDTH}, 0),
}

CODE = Template("""
/* Registers of cache and bandwidth control: they store and do nothing. */
#include "qemu/osdep.h"
#include "qemu/timer.h"
#include "cpu.h"
#include "bypassd-registers.h"

enum { SELECT = 0xc8d, COUNTER = 0xc8e, FIRST = 0xc80, LAST = 0xdff, AMD_FIRST = 0xc0000200, AMD_LAST = 0xc00004ff };

static const struct answer { int machine; uint32_t leaf, sub, eax, ebx, ecx, edx; } answers[] = {
$answers
};
static const struct flag { int machine; uint32_t leaf, ebx; } flags[] = {
$flags
};
static const char *const names[] = { $names };
static const uint64_t occupied[] = { $occupied };
static uint64_t stored[256][(LAST - FIRST + 1) + (AMD_LAST - AMD_FIRST + 1)];

static int machine(void)
{
    static int known = -2;
    if (known == -2) {
        const char *wanted = getenv("BYPASSD_VM_REGISTERS");
        known = -1;
        for (int i = 0; wanted && i < ARRAY_SIZE(names); i++) {
            known = strcmp(wanted, names[i]) ? known : i;
        }
    }
    return known;
}

static uint64_t *place(CPUX86State *env, uint32_t msr)
{
    uint64_t *own = stored[env_cpu(env)->cpu_index & 255];
    if (machine() < 0) {
        return NULL;
    }
    if (msr >= FIRST && msr <= LAST) {
        return own + (msr - FIRST);
    }
    if (msr >= AMD_FIRST && msr <= AMD_LAST) {
        return own + (LAST - FIRST + 1) + (msr - AMD_FIRST);
    }
    return NULL;
}

bool bypassd_write(CPUX86State *env, uint32_t msr, uint64_t value)
{
    uint64_t *to = place(env, msr);
    if (to) {
        *to = value;
    }
    return to != NULL;
}

bool bypassd_read(CPUX86State *env, uint32_t msr, uint64_t *value)
{
    uint64_t *from = place(env, msr);
    if (!from) {
        return false;
    }
    *value = *from;
    if (msr == COUNTER) {
        uint64_t selected = *place(env, SELECT), id = selected >> 32, event = selected & 0xff;
        uint64_t ms = qemu_clock_get_ns(QEMU_CLOCK_VIRTUAL) / 1000000;
        if (id == 20 || id == 21) {
            *value = id == 20 ? 1ull << 62 : 1ull << 63;
        } else if (event == 1) {
            *value = occupied[machine()];
        } else {
            *value = ((id + 1) * ms / (event == 3 ? 2 : 1)) & 0xffffff;
        }
    }
    return true;
}

void bypassd_cpuid(uint32_t leaf, uint32_t sub, uint32_t *eax, uint32_t *ebx, uint32_t *ecx, uint32_t *edx)
{
    int here = machine();
    if (here < 0) {
        return;
    }
    if (leaf == 0xf || leaf == 0x10 || leaf == 0x80000020) {
        *eax = *ebx = *ecx = *edx = 0;
    }
    for (int i = 0; i < ARRAY_SIZE(answers); i++) {
        if (answers[i].machine == here && answers[i].leaf == leaf && answers[i].sub == sub) {
            *eax = answers[i].eax;
            *ebx = answers[i].ebx;
            *ecx = answers[i].ecx;
            *edx = answers[i].edx;
        }
    }
    for (int i = 0; i < ARRAY_SIZE(flags); i++) {
        if (flags[i].machine == here && flags[i].leaf == leaf && sub == 0) {
            *ebx |= flags[i].ebx;
        }
    }
}
""")
HEADER = """
bool bypassd_write(CPUX86State *env, uint32_t msr, uint64_t value);
bool bypassd_read(CPUX86State *env, uint32_t msr, uint64_t *value);
void bypassd_cpuid(uint32_t leaf, uint32_t sub, uint32_t *eax, uint32_t *ebx, uint32_t *ecx, uint32_t *edx);
"""
INCLUDE = '#include "cpu.h"\n'
WRITE_HOOK = """    if (bypassd_write(env, env->regs[R_ECX], val)) {
        return;
    }
"""
READ_HOOK = """    if (bypassd_read(env, env->regs[R_ECX], &val)) {
        env->regs[R_EAX] = (uint32_t)val;
        env->regs[R_EDX] = (uint32_t)(val >> 32);
        return;
    }
"""
CPUID_HOOK = "    bypassd_cpuid(env->regs[R_EAX], env->regs[R_ECX], &eax, &ebx, &ecx, &edx);\n"
CPUID_DONE = "&eax, &ebx, &ecx, &edx);\n"
READ_BEGINS = "SVM_EXIT_MSR, 0, GETPC());\n\n"
WRITE_BEGINS = "((uint64_t)((uint32_t)env->regs[R_EDX]) << 32);\n\n    switch"
# File below target/i386/tcg, the text to find, what it becomes.
HOOKS = (
    ("misc_helper.c", CPUID_DONE, CPUID_DONE + CPUID_HOOK),
    ("misc_helper.c", INCLUDE, f'{INCLUDE}#include "sysemu/bypassd-registers.h"\n'),
    ("sysemu/misc_helper.c", WRITE_BEGINS, WRITE_BEGINS.replace("    switch", f"{WRITE_HOOK}\n    switch")),
    ("sysemu/misc_helper.c", READ_BEGINS, READ_BEGINS + READ_HOOK + "\n"),
    ("sysemu/misc_helper.c", INCLUDE, f'{INCLUDE}#include "bypassd-registers.h"\n'),
    ("sysemu/meson.build", "  'misc_helper.c',\n", "  'misc_helper.c',\n  'bypassd-registers.c',\n"),
)


def code() -> str:
    """The C file that holds the registers."""
    answers, flags = [], []
    for number, machine in enumerate(MACHINES.values()):
        for (leaf, sub), parts in machine.leaves.items():
            answers.append(f"    {{ {', '.join(map(hex, (number, leaf, sub, *parts)))} }},")
        flags += [f"    {{ {number}, {leaf:#x}, {ebx:#x} }}," for leaf, ebx in machine.flags.items()]
    return CODE.substitute(
        answers="\n".join(answers),
        flags="\n".join(flags),
        names=", ".join(f'"{name}"' for name in MACHINES),
        occupied=", ".join(str(machine.occupancy) for machine in MACHINES.values()),
    ).lstrip()


def main(source: Path) -> None:
    """Edit the tree; ends with the file's name where it does not look as expected."""
    place = source / "target" / "i386" / "tcg"
    for name, result, wanted in HOOKS:
        text = (place / name).read_text()
        if text.count(result) != 1:
            raise SystemExit(f"{place / name}: {text.count(result)} times instead of once: {result!r}")
        (place / name).write_text(text.replace(result, wanted))
    (place / "sysemu" / "bypassd-registers.c").write_text(code())
    (place / "sysemu" / "bypassd-registers.h").write_text(HEADER.lstrip())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
