"""Watch a store: measure its rules every few seconds, and send alerts when they begin and end.

One thread measures, another sends. So a webhook that does not answer delays no measurement. An
alert that could not be sent is sent again after the next measurement.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading

from tidemill.alerts import state
from tidemill.alerts.measure import Value, check_measurable, measure
from tidemill.alerts.rules import Rules
from tidemill.alerts.send import SendFailed, send
from tidemill.alerts.state import Alert
from tidemill.app import Tidemill
from tidemill.brokers.contract.history_rows import join_name
from tidemill.core.clock import clock
from tidemill.errors import TidemillError

log = logging.getLogger("tidemill.alerts")


class Watch:
    """Watches one store by the rules of a file."""

    def __init__(self, mill: Tidemill, rules: Rules) -> None:
        """Check the rules. Raises FeatureMissing for values that the store does not know."""
        check_measurable(mill, rules.rules)
        self._mill = mill
        self._rules = rules
        self._host = socket.gethostname()
        self._above: dict[str, float] = {}  # the machine time since which a value breaks its rule
        self._outbox: queue.SimpleQueue[tuple[str, Alert] | None] = queue.SimpleQueue()
        self._sending: set[str] = set()  # keys of alerts that wait in the outbox or are being sent
        self._stop = threading.Event()
        self._is_store_away = False
        self._threads = [
            threading.Thread(target=work, name=f"tidemill-alerts-{name}", daemon=True)
            for name, work in (("measure", self._measure), ("send", self._send))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop both threads, and wait until the current try to send has ended."""
        self._stop.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(self._rules.send.timeout + 1.0)

    def _measure(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except TidemillError as error:
                if not self._is_store_away:
                    log.error("the rules cannot be measured: %s; trying again", error)
                self._is_store_away = True
            except Exception:
                log.exception("the watch met an error, and goes on")
            else:
                self._is_store_away = False
            self._stop.wait(self._rules.every)

    def look(self) -> None:
        known = state.alerts(self._mill)
        now = clock.wall()
        for value in measure(self._mill, self._rules.rules):
            key = join_name(value.rule.name, value.queue)
            alert = known.pop(key, None)
            if key not in self._sending:
                self._judge(value, key, alert, now)
        for key, alert in known.items():  # alerts whose queue or rule is gone
            if key not in self._sending:
                self._end(alert, now)

    def _judge(self, value: Value, key: str, alert: Alert | None, now: float) -> None:
        if not value.is_above:
            self._above.pop(key, None)
            if alert is not None:
                self._end(alert, now)
            return
        since = self._above.setdefault(key, clock.machine())
        if alert is not None and not alert.ended:
            alert.measured(value)
            if not alert.told:
                self._tell("begin", alert)
            elif self._rules.remind and now - alert.told_at >= self._rules.remind:
                self._tell("reminder", alert)
        elif clock.machine() - since >= value.rule.lasting:
            began = alert or state.begun(value, now)
            began.ended, began.when = 0.0, value.rule.when
            began.measured(value)
            state.keep(self._mill, began)
            if not began.told:  # the beginning of this alert was not sent before
                log.warning("alert: %s", began.text)
                self._tell("begin", began)

    def _end(self, alert: Alert, now: float) -> None:
        if not alert.ended:
            alert.ended = now
            log.info("the alert is over: %s", alert.text)
            state.keep(self._mill, alert)
        if alert.told:
            self._tell("end", alert)
        else:  # the beginning of the alert was never sent
            state.forget(self._mill, alert)

    def _tell(self, event: str, alert: Alert) -> None:
        self._sending.add(alert.key)
        self._outbox.put((event, alert))

    def _send(self) -> None:
        while (item := self._outbox.get()) is not None and not self._stop.is_set():
            event, alert = item
            try:
                self._send_one(event, alert)
            except SendFailed as error:
                log.error("the alert %r cannot be sent: %s; trying again", alert.rule, error)
            except TidemillError as error:  # the message was sent, and will be sent again
                log.error("the alert %r cannot be noted as sent: %s", alert.rule, error)
            except Exception:
                log.exception("the watch met an error, and goes on")
            finally:
                self._sending.discard(alert.key)

    def _send_one(self, event: str, alert: Alert) -> None:
        now = clock.wall()
        message = alert.message(event, now, self._mill.broker.url, self._host)
        send(self._rules.send, message, self._stop)
        if event == "end":
            state.forget(self._mill, alert)
        else:
            alert.told, alert.told_at = event, now
            state.keep(self._mill, alert)
