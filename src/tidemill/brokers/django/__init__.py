"""``django://alias``: the broker in a database of a Django project.

This broker applies the rules of ``memory://`` to rows. Each call is one transaction: it reads the
rows that it needs, runs the rules, and writes the rows that changed (:mod:`.jobs`). Puts of plain
jobs, and the choice of the next jobs, have special statements, since these calls are the most
frequent (:mod:`.put`, :mod:`.claim`).
"""

from tidemill.brokers.django.broker import DjangoBroker, open_url
from tidemill.brokers.django.settings import check_url

__all__ = ["DjangoBroker", "check_url", "open_url"]
