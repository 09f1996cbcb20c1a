"""Exits and signals that end the process."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time

from abuse.catalogue import ASYNCIO, MAIN, SUCCEEDS, THREADS, blocks, dies, fails, misdeed


@misdeed("`sys.exit()`", fails("SystemExit"))
def exits() -> None:
    sys.exit()


@misdeed("`KeyboardInterrupt` raised by the task", fails("KeyboardInterrupt"))
def raises_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


@misdeed("`GeneratorExit` raised by the task", fails("GeneratorExit"))
def raises_generator_exit() -> None:
    raise GeneratorExit


@misdeed("`asyncio.CancelledError` raised by the task", fails("CancelledError"))
def raises_cancelled_error() -> None:
    raise asyncio.CancelledError


@misdeed("`os._exit(0)`", dies("exited with code 0"))
def exits_at_once() -> None:
    os._exit(0)


@misdeed("`os._exit(3)`", dies("exited with code 3"))
def exits_at_once_with_code() -> None:
    os._exit(3)


@misdeed("`os.abort()`", dies("SIGABRT"))
def aborts() -> None:
    os.abort()


@misdeed("a read of address 0", dies("SIGSEGV"))
def reads_null() -> None:
    ctypes.string_at(0)


@misdeed("SIGKILL to its own process", dies("SIGKILL"))
def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(5)


@misdeed("SIGKILL to its own process group", dies("SIGKILL"))
def kills_group() -> None:
    os.kill(0, signal.SIGKILL)
    time.sleep(5)


@misdeed("SIGSTOP to its own process", blocks(gil=True), timeout=1)
def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)


@misdeed("SIGTERM to its own process")
def terminates_itself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@misdeed("SIGINT to its own process")
def interrupts_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@misdeed("`_thread.interrupt_main()`")
def interrupts_main() -> None:
    _thread.interrupt_main()


@misdeed("SIGHUP to its own process", dies("SIGHUP"))
def hangs_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(5)


@misdeed("SIGPIPE to its own process")
def breaks_pipe() -> None:
    os.kill(os.getpid(), signal.SIGPIPE)


@misdeed("SIGXCPU, as at a limit of processor time", dies("SIGXCPU"))
def uses_up_processor_time() -> None:
    os.kill(os.getpid(), signal.SIGXCPU)
    time.sleep(5)


@misdeed("`faulthandler.dump_traceback_later(exit=True)`", dies("exited with code 1"))
def exits_by_faulthandler() -> None:
    faulthandler.dump_traceback_later(0.1, exit=True)
    time.sleep(10)


def _in_thread(name: str) -> None:
    function = {"exit": sys.exit, "raise": _raises}[name]
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _raises() -> None:
    raise ValueError("in a thread of the task")


@misdeed("`sys.exit()` in a thread of the task")
def exits_in_thread() -> None:
    _in_thread("exit")


@misdeed("an exception in a thread of the task")
def raises_in_thread() -> None:
    _in_thread("raise")


@misdeed("a thread that outlives the job")
def thread_left() -> None:
    threading.Thread(target=time.sleep, args=(60,)).start()


@misdeed("a daemon thread that outlives the job and computes")
def daemon_thread_left() -> None:
    def compute() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            sum(range(1000))

    threading.Thread(target=compute, daemon=True).start()


@misdeed("an `atexit` function that hangs")
def atexit_hangs() -> None:
    atexit.register(time.sleep, 60)


@misdeed("an `atexit` function that raises")
def atexit_raises() -> None:
    atexit.register(_raises)


_IN_MAIN_THREAD = {THREADS: fails("ValueError"), ASYNCIO: fails("ValueError"), MAIN: SUCCEEDS}


@misdeed("SIGTERM, SIGINT and SIGHUP ignored from now on", _IN_MAIN_THREAD)
def ignores_signals() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


@misdeed("SIGALRM ignored from now on", _IN_MAIN_THREAD, probe="timeout")
def ignores_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _alarmed(signum: int, frame: object) -> None:
    raise TimeoutError("the alarm of the task")


@misdeed(
    "`signal.alarm` whose handler raises in the task",
    {THREADS: fails("ValueError"), ASYNCIO: fails("ValueError"), MAIN: fails("TimeoutError")},
    probe="timeout",
)
def alarm_raises() -> None:
    signal.signal(signal.SIGALRM, _alarmed)
    signal.alarm(1)
    time.sleep(5)


@misdeed("`signal.setitimer` whose handler raises after the job", _IN_MAIN_THREAD, probe="timeout")
def timer_raises_later() -> None:
    signal.signal(signal.SIGALRM, _alarmed)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.02)


@misdeed("a timer of processor time whose handler raises after the job", _IN_MAIN_THREAD)
def profile_timer_raises_later() -> None:
    signal.signal(signal.SIGPROF, _alarmed)
    signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)


@misdeed("handlers of SIGCHLD, SIGPIPE and SIGUSR2 that raise", _IN_MAIN_THREAD)
def handlers_raise() -> None:
    for signum in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR2):
        signal.signal(signum, _alarmed)


@misdeed(
    "`signal.set_wakeup_fd` of a descriptor that is closed then", _IN_MAIN_THREAD, probe="timeout"
)
def wakeup_descriptor_closed() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    os.close(read)
    os.close(write)


@misdeed("all signals blocked in the thread of the job")
def blocks_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@misdeed("`faulthandler.unregister` of the worker's signal", probe="dump")
def faulthandler_unregistered() -> None:
    faulthandler.unregister(signal.SIGUSR1)


@misdeed("`faulthandler.register` of the worker's signal for the task's own file", probe="dump")
def faulthandler_registered() -> None:
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
