"""The producer: enqueue 40 jobs, and say which machine ran how many."""

from collections import Counter

from fleet import measure, mill

from tidemill import map_many

with mill:
    batch = mill.enqueue(map_many(measure, range(40)))
    print("sum", sum(batch.result(timeout=120, progress=True)))
    jobs = mill.jobs(task=measure, group=batch.id)
    for machine, count in sorted(Counter(job.attempts[-1].worker for job in jobs).items()):
        print(machine, "ran", count)
