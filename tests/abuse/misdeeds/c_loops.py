"""The event loop."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from abuse.app import LEAK
from abuse.catalogue import SUCCEEDS, End, blocks, fails, misdeed, times_out

_left: list[Any] = []


async def _exit() -> None:
    sys.exit(3)


@misdeed("`sys.exit()` in a subtask", End("failed"))
async def subtask_exits() -> None:
    await asyncio.create_task(_exit())


@misdeed("`sys.exit()` in a subtask that nobody awaits", End(""))
async def subtask_left_exits() -> None:
    _left.append(asyncio.create_task(_exit()))
    await asyncio.sleep(0.2)


async def _interrupt() -> None:
    raise KeyboardInterrupt


@misdeed("`KeyboardInterrupt` in a subtask", End("failed"))
async def subtask_interrupts() -> None:
    await asyncio.create_task(_interrupt())


@misdeed("`sys.exit()` in a callback of the loop", End(""))
async def callback_exits() -> None:
    asyncio.get_running_loop().call_soon(sys.exit)
    await asyncio.sleep(0.2)


@misdeed("an exception in a callback of the loop", SUCCEEDS)
async def callback_raises() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.1)


@misdeed("`loop.stop()`", End(""))
async def loop_stopped() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.2)


@misdeed("`loop.close()`", fails("RuntimeError"))
async def loop_closed() -> None:
    asyncio.get_running_loop().close()


# If the thread closes the loop before the worker runs the loop again, the process gives up.
@misdeed("`loop.stop()`, then `loop.close()` from a thread", End("", dies=True))
async def loop_stopped_and_closed() -> None:
    loop = asyncio.get_running_loop()
    loop.stop()

    def close() -> None:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            try:
                loop.close()
                return
            except RuntimeError:
                time.sleep(0)

    loop.run_in_executor(None, close)
    await asyncio.sleep(0.5)


async def _nothing() -> None:
    pass


@misdeed("`asyncio.run()` inside the loop", fails("RuntimeError"))
async def runs_another_loop() -> None:
    coroutine = _nothing()
    try:
        asyncio.run(coroutine)
    finally:
        coroutine.close()


@misdeed("all tasks of the loop cancelled", End(""), spoils=True)
async def cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0.1)


@misdeed("an exception handler of the loop that raises", SUCCEEDS)
async def loop_handler_raises() -> None:
    def handler(loop: object, context: object) -> None:
        raise SystemError("the handler")

    asyncio.get_running_loop().set_exception_handler(handler)
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.1)


@misdeed("a task factory of the loop that raises", SUCCEEDS)
async def task_factory_raises() -> None:
    def factory(loop: object, coroutine: Any, **options: Any) -> Any:
        coroutine.close()
        raise SystemError("the factory")

    asyncio.get_running_loop().set_task_factory(factory)


@misdeed("the loop's default executor shut down", SUCCEEDS)
async def executor_shut_down() -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, time.sleep, 0.01)
    await loop.shutdown_default_executor()


@misdeed("`asyncio.set_event_loop(None)`", SUCCEEDS)
async def event_loop_unset() -> None:
    asyncio.set_event_loop(None)


@misdeed("a new event loop policy", SUCCEEDS)
async def policy_replaced() -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())


@misdeed("a subtask that outlives the job", SUCCEEDS)
async def subtask_left() -> None:
    _left.append(asyncio.create_task(asyncio.sleep(60)))


@misdeed("a coroutine that nobody awaits", SUCCEEDS)
async def never_awaited() -> None:
    _nothing()


@misdeed("an `asyncio.sleep` past the timeout", times_out(), timeout=1)
async def sleeps_too_long() -> None:
    await asyncio.sleep(30)


@misdeed("an endless loop that swallows its cancellation", blocks(), timeout=1)
async def swallows_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(30)
        except BaseException:
            continue


@misdeed("`time.sleep` past the timeout inside the loop", blocks(gil=True), timeout=1)
async def blocks_loop() -> None:
    time.sleep(60)


@misdeed("a subtask that cancels the job")
async def cancelled_by_subtask() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    try:
        await asyncio.sleep(5)
    except asyncio.CancelledError:
        task.uncancel()


@misdeed("a context variable that is set")
async def context_variable_set() -> None:
    LEAK.set("from the misdeed")
