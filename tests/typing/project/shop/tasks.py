"""Tasks: sync and async, a method, one with a schedule, and hooks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shop.app import mill
from tidemill import Ended, Key, Limit, Retries, When, this_job


@dataclass
class Invoice:
    customer: str
    cents: int


@mill.task
def price(item: str, count: int = 1) -> int:
    return len(item) * 100 * count


@mill.task(queue="mail", retries=2, key=lambda invoice: f"invoice {invoice.customer}")
def send(invoice: Invoice) -> str:
    job = this_job(None)
    if job is not None:
        job.progress(1, 1)
    return f"{invoice.customer}: {invoice.cents / 100:.2f}"


@mill.task(limit=Limit("9/s", key=lambda currency: currency), retries=Retries(3, 1), tags=["net"])
async def rate(currency: str) -> float:
    await asyncio.sleep(0)
    return 1.0 if currency == "EUR" else 1.5


@mill.task
def total(prices: list[int]) -> int:
    return sum(prices)


@mill.task
def discounted(cents: int, percent: int) -> int:
    return cents * (100 - percent) // 100


@mill.task
def alert(ended: Ended, whom: str = "ops") -> None:
    print(f"{whom}: {ended.id} ended as {ended.state}: {ended.error}")


@mill.task(schedule=When(cron="0 3 * * *", zone="Europe/Berlin"), key=Key("sweep"))
def sweep() -> int:
    return 0


@dataclass
class Report:
    """A class with a task of its own: its instance travels as an argument."""

    title: str

    @mill.task(name="shop.report")
    def build(self, year: int) -> str:
        return f"{self.title} {year}"
