"""Count the words of files, some at a time: python words.py FILE… A second run redoes nothing."""

import sys
from pathlib import Path

from tidemill import Key, Retries, Tidemill, as_completed

mill = Tidemill()


@mill.task(retries=Retries(2, never=UnicodeError), expects=(UnicodeError,))
def count_words(path: str) -> int:
    return len(Path(path).read_text().split())


def main(paths: list[str]) -> None:
    jobs = {}
    with mill.batch():  # one commit for all
        for path in paths:
            key = Key(f"{path} of {Path(path).stat().st_mtime_ns}", hold=3600)
            # For an hour, a file that has not changed is not counted again: its old job stands.
            jobs[path] = count_words.using(key=key).enqueue(path)
    with mill.worker(concurrency=4):
        for _ in as_completed(jobs.values(), progress=True):
            pass
    for path, job in jobs.items():
        print(job.result() if job.state == "succeeded" else job.error, path)


if __name__ == "__main__":
    with mill:
        main(sys.argv[1:])
