"""The task. A worker runs it: tidemill worker photos:mill."""

import asyncio

from tidemill import JobCancelled, Tidemill, this_job

mill = Tidemill()


@mill.task(timeout=600)
async def resize(count: int) -> str:
    """Resize so many photos, one after the other."""
    job = this_job(None)
    for number in range(count):
        if job and job.cancelled:
            raise JobCancelled(f"stopped after {number} photos")
        await asyncio.sleep(0.2)  # here you would resize a photo
        if job:
            job.progress(number + 1, count)
    return f"{count} photos resized"
