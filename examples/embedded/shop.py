# shop.py
from tidemill import Tidemill

mill = Tidemill()  # jobs live in .tidemill beside your pyproject.toml


@mill.task(retries=5, timeout=30)
def thumbnail(path: str, width: int = 640) -> str:
    return f"{path} at {width}"


if __name__ == "__main__":
    job = thumbnail.enqueue("a.png", width=320)  # durable when this returns
    print(job.result(timeout=10))
