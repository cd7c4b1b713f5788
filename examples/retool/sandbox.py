"""Runs Python code that a model wrote, in a process of its own that can compute and print, and little else.

    >>> run_python("print(sum(range(10)))")
    '45'

The process has limits of CPU time, memory and output, and is killed with its group after a time limit. A seccomp
filter lets through only the system calls that computing, printing and importing need: none that starts a process or a
thread, opens a socket, sends a signal, or makes, changes or removes a file. Landlock, where the kernel has it (Linux
5.13), lets it read nothing but the interpreter and the system's libraries. It works without privileges, on Linux on
x86-64.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import traceback

SECONDS, MEMORY, OUTPUT = 5.0, 1 << 29, 1 << 16  # of wall clock; bytes of address space; bytes that are printed
LONGEST, SHOWN = 10_000, 1000  # characters of the code; of the output, as the model is shown it

# x86-64's numbers of the system calls that are allowed. Every other one fails with EPERM.
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "readv": 19, "writev": 20, "access": 21, "sched_yield": 24, "mremap": 25, "dup": 32, "nanosleep": 35,
    "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79, "readlink": 89,
    "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107,
    "getegid": 108, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204,
    "getdents64": 217, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "newfstatat": 262, "readlinkat": 267, "getrandom": 318, "statx": 332,
}  # fmt: skip
# Of three, what is asked for is looked at, too: they can also send signals, type into a terminal, change attributes of
# files, and, for root, mark memory of the machine as broken. Number of the call: the argument's place, what it may be.
_COMMANDS = {
    16: (1, (0x5401, 0x5450, 0x5451)),  # ioctl: TCGETS, which isatty asks, FIONCLEX, FIOCLEX
    72: (1, (1, 2, 3, 1030)),  # fcntl: F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
    28: (2, (0, 1, 2, 3, 4, 8, 14, 15)),  # madvise: what allocators ask for
}
_OPENAT, _OPEN_TO_WRITE = 257, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_AUDIT_ARCH_X86_64 = 0xC000003E
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of a BPF program
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050001  # what it returns; the last is EPERM
_CAPSET, _CAPABILITY_VERSION_3 = 126, 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 1, 22, 38, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls
_READ_FILE, _READ_DIR, _ALL_ACCESS = 1 << 2, 1 << 3, (1 << 13) - 1  # as its first version has them


def run_python(code: str, *, seconds: float = SECONDS) -> str:
    """What the code prints, and the error that ended it; shortened, for the model to read.

    Raises:
        OSError: The code cannot be shut in on this machine.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise OSError(f"the sandbox knows Linux on x86-64 only, and this is {sys.platform} on {platform.machine()}")
    if len(code) > LONGEST:
        return f"error: the code is longer than {LONGEST} characters"
    late = False
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd="/",
            env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(code.encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        output.seek(0)
        written = output.read()
    text = written.decode(errors="replace").strip()
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n…\n{text[-SHOWN // 2 :]}"
    if late:
        text += f"\nerror: it took more than {seconds:g} s"
    elif len(written) >= OUTPUT:
        text += f"\nerror: it printed more than {OUTPUT} bytes"
    elif status < 0:
        text += f"\nerror: it was ended by {signal.Signals(-status).name}"
    return text.strip() or "error: nothing was printed"


def _inside() -> None:
    """The life of the process: read the code, give up what it must not do, run it."""
    code = sys.stdin.buffer.read().decode()
    _limit_resources()
    _limit_reads()
    _drop_capabilities()
    _limit_calls()
    try:
        exec(compile(code, "<python>", "exec"), {"__name__": "__main__"})
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this file's
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        traceback.print_exception(type(error), error, frames, limit=-1)


def _limit_resources() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # who started this had ended before
        sys.exit("nobody waits for this code; it was not run")
    seconds = int(SECONDS) + 1
    for kind, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, OUTPUT),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (most, most))


def _limit_reads() -> None:
    """Landlock: only the interpreter and the system's libraries can be read. Without it, every file of this user."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    rights = ctypes.c_uint64(_ALL_ACCESS)
    ruleset = _syscall(_CREATE_RULESET, ctypes.byref(rights), ctypes.sizeof(rights), 0)
    if ruleset < 0:  # no such kernel
        return
    for directory in {sys.prefix, sys.base_prefix, "/usr/lib", "/usr/share", "/lib", "/lib64"}:
        with contextlib.suppress(FileNotFoundError):
            parent = os.open(directory, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("<Qi", _READ_FILE | _READ_DIR, parent)
            _syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0)
            os.close(parent)
    if _syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError("Landlock refuses to restrict this process")
    os.close(ruleset)


def _drop_capabilities() -> None:
    """Root's: they would let it read files of other users, where Landlock is missing."""
    header, none = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    if _syscall(_CAPSET, ctypes.c_char_p(header), ctypes.c_char_p(none)) != 0:
        raise OSError("the kernel does not take this process's capabilities")


def _limit_calls() -> None:
    """The filter of system calls, which cannot be taken off again."""
    program = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH_X86_64), (_RETURN, 0, 0, _KILL),  # no other numbering of calls
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 4, _OPENAT), (_LOAD, 0, 0, 32), (_ANY_BIT, 0, 1, _OPEN_TO_WRITE),  # the flags are argument 2
        (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    for number, (argument, commands) in _COMMANDS.items():
        program += [(_EQUAL, 0, len(commands) + 3, number), (_LOAD, 0, 0, 16 + 8 * argument)]
        program += [(_EQUAL, len(commands) - place, 0, command) for place, command in enumerate(commands)]
        program += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    for number in _ALLOWED.values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _REFUSE))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *instruction) for instruction in program))
    _prctl(_PR_SET_SECCOMP, _FILTER, struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code)))


def _prctl(option: int, *arguments: int | bytes) -> None:
    words = [ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_ulong(word) for word in arguments]
    words += [ctypes.c_ulong(0)] * (4 - len(words))
    if ctypes.CDLL(None, use_errno=True).prctl(option, *words) != 0:
        raise OSError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}; the code was not run")


def _syscall(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


if __name__ == "__main__":
    _inside()
