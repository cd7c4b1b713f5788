"""Ways out of a sandbox, for the tests of every sandbox of ours, and the outside that shows whether one worked.

A runner is a function from a Python program to what it prints. An escape is a program that tries one way out. It got
out if it prints ``OUT`` or the secret of the outside, or if something outside is not as it was. Programs are run with
the names of :meth:`Outside.names` and of ``PREAMBLE``; those of one area are independent and share one start of a
sandbox. The same programs are run without any sandbox, one by one, against a process, a folder, a terminal, sockets
and shared memory of the test's own: there they must get out. What could harm the machine is called with arguments that
are invalid, so that the error says whether the kernel would have been willing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from support.outside import Outside

# CAP_SYS_MODULE, _RAWIO, _CHROOT, _PTRACE, _ADMIN, _BOOT and _TIME.
_CAPABILITIES = sum(1 << number for number in (16, 17, 18, 19, 21, 22, 25))

PREAMBLE = """\
import ctypes, fcntl, os, re, resource, signal, socket, struct, sys, termios, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
LIBRARY, NEW, NOWHERE = os.path.dirname(os.__file__), f"{FOLDER}/new", struct.pack("QQ", 4096, 8)
def call(number, *words):  # a system call of x86-64 by its number; what is pointed to is bytes or a buffer
    result = libc.syscall(number, *(ctypes.c_long(word) if isinstance(word, int) else word for word in words))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def out(*what):
    print("OUT", name, *what, flush=True)
def tried(number, *words):  # out where it is neither refused (EPERM, EACCES) nor missing (ESRCH, ENOSYS)
    try:
        out(call(number, *words))
    except OSError as error:
        if error.errno in (1, 3, 13, 38):
            raise
        out(error)
def show(content):  # the secret, if it is there
    content = content.encode() if isinstance(content, str) else content
    print(*re.findall(rb"secret-[0-9a-f]+", content))
def ends():  # of what wakes its owner: two sockets, or what the sandbox has open
    try:
        return [end.detach() for end in socket.socketpair()]
    except OSError:
        return 0, 1
def wake(r, w):
    for command, word in ((10, 9), (4, 0o20000)):  # F_SETSIG: SIGKILL; F_SETFL: O_ASYNC
        fcntl.fcntl(r, command, word)
    os.write(w, b"x")
"""
_EACH = """\
for name, program in PROGRAMS.items():
    try:
        exec(program)
    except BaseException as error:
        if BARE:  # the kernel has no such call, device, kind of socket or attribute
            device = str(getattr(error, "filename", "")).startswith("/dev/")
            lacks = getattr(error, "errno", 0) in ((2, 6, 19, 38, 93, 95, 97) if device else (38, 93, 95, 97))
            print("LACKS" if lacks else "refused", name, repr(error))
print("tried", len(PROGRAMS))
"""
_ONE_BY_ONE = """\
import ctypes, fcntl, os, re, resource, signal, socket, struct, sys, termios, time, traceback
for code in CODES:
    if (child := os.fork()) == 0:
        os.setsid()
        try:
            exec(code, {})
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


@dataclass(frozen=True)
class Escape:
    """A way out.

    Attributes:
        name: What is tried.
        program: Tries it.
        root: Without a sandbox it works only with capabilities of root.
        never: Why it is not tried without a sandbox; empty if it is.
    """

    name: str
    program: str
    root: bool = False
    never: str = ""


_SIGNALS = [
    Escape("kill", "os.kill(PID, 15)"),
    Escape("kill of a group", "os.killpg(PID, 15)"),
    Escape("tkill", "call(200, PID, 15)"),
    Escape("tgkill", "call(234, PID, PID, 15)"),
    Escape("rt_sigqueueinfo", "call(129, PID, 15, struct.pack('iii', 15, 0, -1) + bytes(116))"),
    Escape("rt_tgsigqueueinfo", "call(297, PID, PID, 15, struct.pack('iii', 15, 0, -1) + bytes(116))"),
    Escape("pidfd_send_signal", "signal.pidfd_send_signal(os.pidfd_open(PID), 15)"),
    Escape("pidfd_send_signal by /proc", "call(424, os.open(f'/proc/{PID}', os.O_RDONLY), 15, 0, 0)"),
    Escape("F_SETOWN", "r, w = ends()\nfcntl.fcntl(r, 8, PID)\nwake(r, w)"),
    Escape("F_SETOWN_EX", "r, w = ends()\nfcntl.fcntl(r, 15, struct.pack('ii', 1, PID))\nwake(r, w)"),
    Escape("FIOSETOWN", "r, w = ends()\nfcntl.ioctl(r, 0x8901, struct.pack('i', PID))\nwake(r, w)"),
    Escape(
        "F_NOTIFY",
        "r = os.open(LIBRARY, os.O_RDONLY)\nfcntl.fcntl(r, 8, PID)\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, 1026, 0x80000001)\nopen(os.__file__).read()",
    ),
    Escape(
        "F_SETLEASE",
        "r = os.open(FILE, os.O_RDONLY)\nfcntl.fcntl(r, 1024, 0)\nfcntl.fcntl(r, 8, PID)\nfcntl.fcntl(r, 10, 9)\n"
        "os.open(FILE, os.O_WRONLY | os.O_NONBLOCK)",
    ),
    Escape(
        "SIGEV_THREAD_ID",
        "call(222, 1, struct.pack('qiii', 0, 9, 4, PID) + bytes(44), ctypes.create_string_buffer(8))\nout()",
        never="the kernel takes only threads of the caller",
    ),
]
_OPEN_TERMINAL = "fd = os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY)\n"
_TERMINAL = [
    Escape("write to a terminal", f"{_OPEN_TERMINAL}os.write(fd, b'shown')"),
    Escape("TIOCSTI", f"{_OPEN_TERMINAL}fcntl.ioctl(fd, 0x5412, b'x')", root=True),
    Escape(
        "settings of a terminal", f"{_OPEN_TERMINAL}t = termios.tcgetattr(fd)\nt[3] ^= 8\ntermios.tcsetattr(fd, 0, t)"
    ),
    Escape("size of a terminal", f"{_OPEN_TERMINAL}fcntl.ioctl(fd, 0x5414, struct.pack('HHHH', 9, 9, 9, 9))"),
    Escape("TIOCSCTTY", f"{_OPEN_TERMINAL}fcntl.ioctl(fd, 0x540E, 0)\nout()"),
    Escape(
        "a terminal by what is open",  # TIOCSTI, TIOCSPGRP, TIOCNOTTY, TIOCLINUX
        "for fd in (0, 1, 2):\n for command in (0x5412, 0x5410, 0x5422, 0x541C):\n"
        "  if libc.ioctl(fd, command, b'\\3' + bytes(7)) == 0: out(fd, command)",
        never="only its own terminal could be meant",
    ),
    Escape("/dev/tty", "os.open('/dev/tty', os.O_RDWR)\nout()", never="the test has no terminal of its own"),
]

_ATTRIBUTES = [
    Escape(
        "FS_IOC_SETFLAGS",
        "fd = os.open(FILE, os.O_RDONLY)\nbefore, = struct.unpack('l', fcntl.ioctl(fd, 0x80086601, bytes(8)))\n"
        "fcntl.ioctl(fd, 0x40086602, struct.pack('l', before | 0x40))",
    ),
    Escape("FS_IOC_SETFLAGS of what is open", "fcntl.ioctl(1, 0x40086602, bytes(8))\nout()"),
    Escape(
        "FS_IOC_FSSETXATTR",
        "fd = os.open(FILE, os.O_RDONLY)\nfcntl.ioctl(fd, 0x401C5820, struct.pack('I', 0x80) + bytes(24))",
    ),
    Escape("file_setattr", "call(469, -100, FILE.encode(), struct.pack('Q', 0x80) + bytes(16), 24, 0)"),
    Escape("chmod", "os.chmod(FILE, 0o777)"),
    Escape("fchmod", "os.fchmod(os.open(FILE, os.O_RDONLY), 0o777)"),
    Escape("fchmodat", "os.chmod(os.path.basename(FILE), 0o777, dir_fd=os.open(FOLDER, os.O_RDONLY))"),
    Escape("fchmodat2", "call(452, -100, FILE.encode(), 0o777, 0)"),
    Escape("chown", "os.chown(FILE, os.getuid(), os.getgid())"),
    Escape("lchown", "os.lchown(FILE, os.getuid(), os.getgid())"),
    Escape("fchown", "os.fchown(os.open(FILE, os.O_RDONLY), os.getuid(), os.getgid())"),
    Escape("utimensat", "os.utime(FILE, (0, 0))"),
    Escape("futimens", "os.utime(os.open(FILE, os.O_RDONLY), (0, 0))"),
    Escape("utime", "call(132, FILE.encode(), bytes(16))"),
    Escape("utimes", "call(235, FILE.encode(), bytes(32))"),
    Escape("futimesat", "call(261, -100, FILE.encode(), bytes(32))"),
    Escape("setxattr", "os.setxattr(FILE, 'user.new', b'new')"),
    Escape("lsetxattr", "os.setxattr(FILE, 'user.new', b'new', follow_symlinks=False)"),
    Escape("fsetxattr", "os.setxattr(os.open(FILE, os.O_RDONLY), 'user.new', b'new')"),
    Escape("removexattr", "os.removexattr(FILE, 'user.kept')"),
    Escape("lremovexattr", "os.removexattr(FILE, 'user.kept', follow_symlinks=False)"),
    Escape("fremovexattr", "os.removexattr(os.open(FILE, os.O_RDONLY), 'user.kept')"),
    Escape("removexattrat", "call(466, -100, FILE.encode(), 0, b'user.kept')"),
]

_FILES = [
    Escape("write", "open(FILE, 'w').write('x')"),
    Escape("append", "os.write(os.open(FILE, os.O_WRONLY | os.O_APPEND), b'x')"),
    Escape("O_TRUNC", "os.open(FILE, os.O_RDONLY | os.O_TRUNC)"),
    Escape("O_CREAT", "os.open(NEW, os.O_CREAT)"),
    Escape("creat", "call(85, NEW.encode(), 0o600)"),
    Escape("open", "call(2, NEW.encode(), 0o101, 0o600)"),
    Escape("openat2", "call(437, -100, NEW.encode(), struct.pack('QQQ', 0o101, 0o600, 0), 24)"),
    Escape(
        "O_TMPFILE",
        "fd = os.open(FOLDER, 0o20200002, 0o600)\n"
        "call(265, -100, f'/proc/self/fd/{fd}'.encode(), -100, NEW.encode(), 0x400)",
    ),
    Escape("truncate", "os.truncate(FILE, 0)"),
    Escape("ftruncate", "os.ftruncate(os.open(FILE, os.O_RDWR), 0)"),
    Escape("mkdir", "os.mkdir(NEW)"),
    Escape("mkfifo", "os.mkfifo(NEW)"),
    Escape("mknod", "os.mknod(NEW, 0o20666, os.makedev(1, 3))", root=True),
    Escape("unlink", "os.unlink(FILE)"),
    Escape("rmdir", "os.rmdir(os.path.join(FOLDER, 'empty'))"),
    Escape("rename", "os.rename(FILE, NEW)"),
    Escape("renameat2", "call(316, -100, FILE.encode(), -100, NEW.encode(), 0)"),
    Escape("link", "os.link(FILE, NEW)"),
    Escape("linkat", "os.link(FILE, NEW, follow_symlinks=False)"),
    Escape(
        "link of an open file",
        "call(265, -100, f'/proc/self/fd/{os.open(FILE, os.O_RDONLY)}'.encode(), -100, NEW.encode(), 0x400)",
    ),
    Escape("symlink", "os.symlink('/', NEW)"),
    Escape("bind a socket", "socket.socket(socket.AF_UNIX).bind(NEW)"),
    Escape("copy_file_range", "call(326, os.open(FILE, 0), 0, os.open(NEW, 0o101), 0, 9, 0)"),
    Escape("core_pattern", "os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)\nout()", root=True),
]

_READING = [
    Escape("read a file", "show(open(FILE).read())"),
    Escape("read by /proc/self/root", "show(open(f'/proc/self/root{FILE}').read())"),
    Escape("read by a process's root", "show(open(f'/proc/{PID}/root{FILE}').read())", root=True),
    Escape("read by a process's folder", "show(open(f'/proc/{PID}/cwd/mine').read())", root=True),
    Escape("read by a process's file", "show(open(f'/proc/{PID}/fd/2').read())"),
    Escape("list a folder", "os.listdir(FOLDER)\nout()"),
    Escape(
        "open_by_handle_at",
        "handle = ctypes.create_string_buffer(struct.pack('I', 128) + bytes(132))\n"
        "call(303, -100, FILE.encode(), handle, ctypes.create_string_buffer(4), 0)\n"
        "show(os.read(call(304, os.open(FOLDER, os.O_RDONLY), handle, 0), 99))",
        root=True,
    ),
    Escape("environment of a process", "show(open(f'/proc/{PID}/environ').read())"),
    Escape("the caller's environment", "show(os.environ[f'ESCAPES_{MARK}'])"),
    Escape("environment of the parent", "if open(f'/proc/{os.getppid()}/environ').read(): out()"),
    Escape("memory of a process", "os.open(f'/proc/{PID}/mem', os.O_RDONLY)\nout()", root=True),
    Escape("maps of a process", "open(f'/proc/{PID}/maps').read()\nout()", root=True),
    Escape("POSIX shared memory", "show(open('/dev/shm/' + MARK).read())"),
    Escape("an inherited file", "for fd in range(3, 999):\n try: show(os.pread(fd, 99, 0))\n except OSError: pass"),
    Escape("a disk", "for disk in DISKS: os.open(disk, os.O_RDONLY) and out(disk)", root=True),
    Escape("/dev/mem", "os.open('/dev/mem', os.O_RDONLY)\nout()", root=True),
    Escape("/dev/kmsg", "os.open('/dev/kmsg', os.O_RDONLY)\nout()", root=True),
    Escape("/dev/kvm", "os.open('/dev/kvm', os.O_RDONLY)\nout()", root=True),
    Escape("/dev/fuse", "os.open('/dev/fuse', os.O_RDONLY)\nout()"),
    Escape("/dev/userfaultfd", "os.open('/dev/userfaultfd', os.O_RDONLY)\nout()", root=True),
    Escape("/dev/net/tun", "os.open('/dev/net/tun', os.O_RDONLY)\nout()", root=True),
    Escape("/dev/vsock", "os.open('/dev/vsock', os.O_RDONLY)\nout()", root=True),
    Escape("a clock's device", "os.open('/dev/rtc0', os.O_RDONLY)\nout()", root=True),
]

_DEVICES = [
    Escape("write /dev/mem", "os.open('/dev/mem', os.O_RDWR)\nout()", root=True),
    Escape("write /dev/kmsg", "os.open('/dev/kmsg', os.O_WRONLY)\nout()", root=True),
    Escape("write a disk", "for disk in DISKS: os.open(disk, os.O_RDWR) and out(disk)", never="not even opened"),
    Escape("write /dev/shm", "open(f'/dev/shm/{MARK}-new', 'w')"),
    Escape("change /dev/shm", "open(f'/dev/shm/{MARK}', 'w')"),
    Escape(
        "/dev/ptmx", "fd = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)\nif os.stat('/dev/pts').st_dev == PTS: out()"
    ),
    Escape("iopl", "tried(172, 3)", root=True),
    Escape("ioperm", "tried(173, 0x80, 1, 1)", root=True),
]

_MOUNTS = [
    Escape("mount", "tried(165, b'none', b'/', b'no-such-file-system', 0, 0)", root=True),
    Escape("umount2", "tried(166, LIBRARY.encode(), 8)", root=True),  # no mount point; without following a link
    Escape("pivot_root", "tried(155, b'/nowhere', b'/nowhere')", root=True),
    Escape("open_tree", "tried(428, -100, b'/', 1)", root=True),  # a copy, which goes with its descriptor
    Escape("move_mount", "tried(429, -1, b'', -1, b'', 0)", root=True),
    Escape("fsopen", "tried(430, b'tmpfs', 0)", root=True),
    Escape("fsmount", "tried(432, -1, 0, 0)", root=True),
    Escape("fspick", "tried(433, -100, b'/nowhere', 0)", root=True),
    Escape("swapon", "tried(167, b'/nowhere', 0)", root=True),
    Escape("chroot", "tried(161, b'/')", root=True),
]

_CHILD = "pid = call({})\nif pid == 0: os._exit(0)\nif pid > 0: out(os.waitpid(pid, 0))"
_NAMESPACES = [
    *(
        Escape(f"unshare {name}", f"tried(272, {flag:#x})", root=True)
        for name, flag in (
            ("user", 1 << 28), ("mounts", 1 << 17), ("network", 1 << 30), ("processes", 1 << 29), ("ipc", 1 << 27),
            ("host name", 1 << 26), ("groups", 1 << 25), ("time", 1 << 7),
        )
    ),
    Escape("clone with a user namespace", _CHILD.format("56, 0x10000011, 0, 0, 0, 0"), root=True),
    Escape(
        "clone3 with a user namespace",
        _CHILD.format("435, struct.pack('QQQQQQQQ', 1 << 28, 0, 0, 0, 17, 0, 0, 0), 64"),
        root=True,
    ),
    Escape("setns by a process", "tried(308, os.pidfd_open(PID), 0x4000000)", root=True),
    Escape("setns by a file", "tried(308, os.open(f'/proc/{PID}/ns/uts', os.O_RDONLY), 0)", root=True),
    Escape("host name", "tried(170, b'x', -1)", root=True),
    Escape("domain name", "tried(171, b'x', -1)", root=True),
]  # fmt: skip

_KEYRINGS = [
    Escape("add_key", "tried(248, b'user', b'slime-escape', b'x', 1, -2)"),  # into the process's own keyring
    Escape("request_key", "tried(249, b'user', b'slime-escape-none', 0, 0)"),
    Escape("keyctl", "tried(250, 0, -4, 0)"),
    Escape("a session's keyring", "tried(250, 1, 0)"),
]

_CLOCKS = [
    # Neither a time nor a zone: allowed or not, nothing is set.
    Escape("settimeofday", "tried(164, 0, 0)", root=True),
    # ADJ_SETOFFSET | ADJ_NANO by two billion nanoseconds, which are invalid.
    Escape(
        "adjtimex",
        "tried(159, struct.pack('I', 0x2100) + bytes(76) + struct.pack('q', 2 * 10**9) + bytes(200))",
        root=True,
    ),
    Escape(
        "clock_adjtime",
        "tried(305, 0, struct.pack('I', 0x2100) + bytes(76) + struct.pack('q', 2 * 10**9) + bytes(200))",
        root=True,
    ),
    Escape("clock_settime", "time.clock_settime(0, 0)\nout()", never="it could set the time"),
]

_PROCESSES = [
    Escape("ptrace", "tried(101, 0x4206, PID, 0, 0)", root=True),  # PTRACE_SEIZE, which stops nothing
    Escape("process_vm_readv", "tried(310, PID, NOWHERE, 1, NOWHERE, 1, 0)", root=True),
    Escape("process_vm_writev", "tried(311, PID, NOWHERE, 1, NOWHERE, 1, 0)", root=True),
    Escape("write a process's memory", "os.open(f'/proc/{PID}/mem', os.O_RDWR)\nout()", root=True),
    Escape("pidfd_getfd", "show(os.pread(call(438, os.pidfd_open(PID), 2, 0), 99, 0))", root=True),
    Escape("kcmp", "tried(312, os.getpid(), PID, 1, 0, 0)", root=True),
    Escape("process_madvise", "tried(440, os.pidfd_open(PID), 0, 0, 20, 0)", root=True),
    Escape("move_pages", "tried(279, PID, 0, 0, 0, 0, 0)"),
    Escape("migrate_pages", "tried(256, PID, 64, b'\\1' + bytes(7), b'\\1' + bytes(7))"),
    Escape("oom_score_adj", "open(f'/proc/{PID}/oom_score_adj', 'w').write('7')"),
    Escape("limits of a process", "resource.prlimit(PID, resource.RLIMIT_NOFILE, (60, 60))"),
    Escape("setpriority", "os.setpriority(os.PRIO_PROCESS, PID, 5)"),
    Escape("setpriority of a group", "os.setpriority(os.PRIO_PGRP, PID, 5)"),
    Escape("ioprio_set", "call(251, 1, PID, 3 << 13)"),
    Escape("sched_setaffinity", "os.sched_setaffinity(PID, CPUS)\nout()"),
    Escape("sched_setscheduler", "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))"),
    Escape("sched_setattr", "call(314, PID, struct.pack('IIQiIQQQ', 48, 3, 0, 0, 0, 0, 0, 0), 0)"),
    Escape("setpgid", "os.setpgid(0, 0)\nos.setpgid(0, os.getsid(PID))\nout()", never="it has a session of its own"),
    Escape(
        "a child that stays",
        "if os.fork() == 0:\n try:\n  os.setsid()\n  libc.prctl(15, MARK.encode(), 0, 0, 0)\n  time.sleep(60)\n"
        " finally: os._exit(0)",
    ),
    Escape(
        "exec",
        "try: child = os.fork()\nexcept OSError: child = None\n"
        "try:\n if not child: os.execv('/bin/sh', ['sh', '-c', f'echo > {NEW}'])\n os.waitpid(child, 0)\n"
        "finally:\n if child == 0: os._exit(0)",
    ),
    Escape("posix_spawn", "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', f'echo > {NEW}'], {}), 0)"),
    Escape(
        "exec of memory",
        "fd = os.memfd_create('x', 0)\nos.write(fd, f'#!/bin/sh\\necho > {NEW}\\n'.encode())\n"
        "empty = (ctypes.c_char_p * 2)(b'x', None)\ncall(322, fd, b'', empty, empty, 0x1000)",
    ),
    Escape(
        "a bomb of forks",
        "made = []\ntry:\n while len(made) < 256:\n  pid = os.fork()\n  if pid == 0: time.sleep(60), os._exit(0)\n"
        "  made.append(pid)\n else: out()\nfinally:\n for pid in made: os.kill(pid, 9), os.waitpid(pid, 0)",
    ),
]

_SHARED = [
    Escape(
        "SysV memory",
        "at = libc.shmat(call(29, KEY, 0, 0), 0, 0o10000)\nif at != 2**64 - 1: show(ctypes.string_at(at))",
    ),
    Escape(
        "write SysV memory", "at = libc.shmat(call(29, KEY, 0, 0), 0, 0)\nif at != 2**64 - 1: ctypes.memset(at, 0, 4)"
    ),
    Escape("SysV semaphores", "call(64, KEY, 1, 0o1600)"),
    Escape("SysV messages", "call(68, KEY, 0o1600)"),
    Escape("POSIX messages", "call(240, MARK.encode(), 0o102, 0o600, 0)"),
]

_SOCKETS = [
    Escape("TCP", "socket.create_connection(('127.0.0.1', TCP), 5)"),
    Escape("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))"),
    Escape("a Unix socket", "socket.socket(socket.AF_UNIX).connect(f'{FOLDER}/socket')"),
    Escape("an abstract Unix socket", "socket.socket(socket.AF_UNIX).connect('\\0' + MARK)"),
    Escape("raw packets", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nout()", root=True),
    Escape("raw IP", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nout()", root=True),
    Escape("vsock", "socket.socket(40, socket.SOCK_STREAM)\nout()"),
    Escape("the kernel's ciphers", "socket.socket(38, 5)\nout()"),
]

_KERNEL = [
    Escape("io_uring", "tried(425, 1, ctypes.create_string_buffer(120))", root=True),
    Escape("bpf", "tried(321, 0, struct.pack('IIII', 2, 4, 8, 1) + bytes(112), 128)", root=True),  # an array of one row
    Escape("perf_event_open", "tried(298, struct.pack('IIQ', 1, 128, 0) + bytes(112), 0, -1, -1, 0)", root=True),
    Escape("userfaultfd", "tried(323, 0)", root=True),
    Escape("fanotify", "tried(300, 0, 0)", root=True),
    Escape("init_module", "tried(175, b'', 0, b'')", root=True),
    Escape("finit_module", "tried(313, -1, b'', 0)", root=True),
    Escape("delete_module", "tried(176, 0, 0)", root=True),
    Escape("kexec_load", "tried(246, 0, 99999, 0, 0x7000)", root=True),
    Escape("kexec_file_load", "tried(320, -1, -1, 0, 0, 0x7000)", root=True),
    Escape("reboot", "tried(169, 0, 0, 0, 0)", root=True),  # without its magic numbers
    Escape("acct", "tried(163, b'/nowhere')", root=True),
    Escape("the kernel's log", "tried(103, 3, bytes(8), 8)", root=True),
    Escape(
        "poison memory",  # that is not there; a kernel that can poison none says EINVAL
        "try: call(28, 4096, 4096, 100)\nexcept OSError as error:\n"
        " print('LACKS', name) if error.errno == 22 and BARE else error.errno in (1, 22) or out(error)",
        root=True,
    ),
    Escape("vhangup", "tried(153)", never="it could end a session"),
]  # fmt: skip

AREAS: dict[str, list[Escape]] = {
    "signals": _SIGNALS, "terminal": _TERMINAL, "attributes": _ATTRIBUTES, "files": _FILES, "reading": _READING,
    "devices": _DEVICES, "mounts": _MOUNTS, "namespaces": _NAMESPACES, "keyrings": _KEYRINGS, "clocks": _CLOCKS,
    "processes": _PROCESSES, "shared memory": _SHARED, "sockets": _SOCKETS, "kernel": _KERNEL,
}  # fmt: skip

# Takes memory until it gets no more: what is reserved, or what is also used.
TAKE_RESERVED, TAKE_USED = (
    f"import mmap\nheld = []\ntry:\n    while True: held.append({piece})\n"
    "except (MemoryError, OSError):\n    print('held', len(held))\n    held.clear()\n    raise MemoryError from None"
    for piece in ("mmap.mmap(-1, 1 << 22)", "b'x' * (1 << 22)")
)


def program(escapes: Iterable[Escape], outside: Outside, *, bare: bool = False) -> str:
    """One program that tries them all."""
    names = {"BARE": bare, "PROGRAMS": {one.name: one.program for one in escapes}, **outside.names()}
    return "".join(f"{name} = {value!r}\n" for name, value in names.items()) + PREAMBLE + _EACH


def got_out(run: Callable[[str], str], escapes: list[Escape], outside: Outside) -> list[str]:
    """What of the outside is not as it was, and what the programs say, if it is not that all of them were refused."""
    printed = run(program(escapes, outside))
    wrong = outside.changes()
    if outside.secret_is_in(printed) or printed.split() != ["tried", str(len(escapes))]:
        wrong.append(printed)
    return wrong


def without_sandbox(tries: Iterable[tuple[Escape, Outside]]) -> str:
    """What programs print that nothing keeps in, each in a process and a session of its own."""
    codes = [program([escape], outside, bare=True) for escape, outside in tries]
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-I", "-S", "-c", f"CODES = {codes!r}\n{_ONE_BY_ONE}"]
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=100, close_fds=False,
            start_new_session=True, check=True,
        )  # fmt: skip
        output.seek(0)
        return output.read().decode(errors="replace")


def privileges() -> tuple[bool, bool]:
    """Whether this process has the capabilities that escapes of root need, and a filter of system calls around it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    capable = int(status["CapEff"], 16) & _CAPABILITIES == _CAPABILITIES
    return capable, int(status.get("Seccomp", "0")) != 0
