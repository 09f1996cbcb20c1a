"""A queue of messages, with a producer and two consumers."""

from __future__ import annotations

from datetime import timedelta

from shop.app import mill
from tidemill import Job, Message, QueueFull
from tidemill.typing import PutOptions

orders = mill.queue("orders", max_size=1000, rate="100/s")
urgent: PutOptions = {"priority": 10, "retries": 3, "ttr": timedelta(minutes=1)}


def order(item: str, count: int) -> Job[object] | None:
    try:
        return orders.put({"item": item, "count": count}, timeout=1, **urgent)
    except QueueFull:
        return None


def take_one() -> str:
    message: Message | None = orders.get(timeout=5)
    if message is None:
        return ""
    with message:
        return str(message.body["item"])


async def take_all() -> list[str]:
    taken: list[str] = []
    while message := await orders.aget(timeout=0):
        async with message:
            taken.append(str(message.body["item"]))
    return taken
