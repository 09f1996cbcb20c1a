"""The app in the pictures of the README: a shop, with a shop's troubles. ``take.py`` runs it."""

from __future__ import annotations

import random
import time

from tidemill import Retries, Tidemill, this_job

mill = Tidemill()


class Declined(Exception):
    """The bank refuses a payment."""


@mill.task(queue="images", timeout=30)
def thumbnail(path: str, width: int = 640) -> str:
    _work(0.12)
    return f"thumbs/{width}/{path}"


@mill.task(queue="mail", retries=Retries(4, delay=2))
def send_mail(to: str, template: str) -> str:
    _work(0.25)
    if random.random() < 0.05:
        raise ConnectionResetError("mail.example.com closed the connection")
    return "250 OK"


@mill.task(queue="orders", retries=Retries(1, delay=2), timeout=60)
def charge(order: int, euros: float) -> str:
    _work(0.4)
    if random.random() < 0.06:
        raise Declined(f"card of order {order} is declined: insufficient funds")
    return f"receipt-{order}"


@mill.task(queue="reports")
def archive(report: str) -> None:
    _work(0.1)


@mill.task(queue="reports", timeout=600)
def monthly_report(month: str) -> str:
    pages = 240
    for page in range(pages):
        time.sleep(0.5)
        this_job().progress(page + 1, pages)
    return f"{month}.pdf"


@mill.task(queue="orders", retries=Retries(3, delay=1, jitter=False), timeout=2)
def ship(order: int, carrier: str) -> str:
    """Fail twice, in two ways, then succeed: a trail worth a picture."""
    attempt = this_job().attempt
    this_job().log(f"asking {carrier} for a label")
    if attempt == 1:
        raise ConnectionError(f"{carrier} does not answer")
    if attempt == 2:
        _wait_for_label(order)
    _work(0.3)
    return f"label-{order}.pdf"


def _wait_for_label(order: int) -> None:
    while True:  # past the timeout
        time.sleep(0.05)


def _work(seconds: float) -> None:
    """Wait as long as real work would, now shorter, now longer."""
    time.sleep(random.uniform(0.5, 1.5) * seconds)
