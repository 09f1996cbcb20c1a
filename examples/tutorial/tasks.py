import time

from tidemill import JobCancelled, Retries, Tidemill, this_job

mill = Tidemill()


@mill.task
def greet(name: str) -> str:
    return f"Hello, {name}!"


@mill.task(retries=Retries(3, delay=2))
def fetch(url: str) -> str:
    job = this_job(None)
    if job and job.attempt < 3:
        raise ConnectionError(f"no answer from {url}")
    return "200 OK"


@mill.task(timeout=600)
def resize(count: int) -> str:
    job = this_job(None)
    for number in range(count):
        if job and job.cancelled:
            raise JobCancelled(f"stopped after {number} photos")
        time.sleep(0.5)  # here you would resize a photo
        if job:
            job.progress(number + 1, count)
    return f"{count} photos resized"


@mill.task(schedule="* * * * *")
def tidy() -> str:
    return "tidied up"
