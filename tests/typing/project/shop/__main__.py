"""Runs the shop once, in one process: ``python -m shop``."""

from __future__ import annotations

import asyncio

from shop import orders, workflows
from shop.app import mill
from tidemill.testing import worker


def main() -> None:
    with mill, worker(mill):
        assert workflows.schedules()
        counts = [job.result(timeout=30) for job in workflows.jobs()]
        sent = [job.result(timeout=30) for job in workflows.invoices()]
        cents, priced = workflows.basket(["fig", "plum"])
        results = workflows.flow().result(timeout=30)
        rates = asyncio.run(workflows.rates())
        orders.order("fig", 2)
        print(counts, sent, cents, priced.result(timeout=30), results, rates, orders.take_one())
        print(asyncio.run(orders.take_all()))
        assert not workflows.failures()


if __name__ == "__main__":
    main()
