"""The task asks an LLM over HTTP; main() enqueues a batch of prompts and gathers the answers."""

import os

import httpx

from tidemill import Fail, Limit, Retries, Retry, Tidemill, map_many

URL = os.environ.get("LLM_URL", "http://127.0.0.1:8401/v1/complete")
KEY = os.environ.get("LLM_KEY", "none")

mill = Tidemill()


@mill.task(
    timeout=60,
    retries=Retries(10, delay=1),
    limit=Limit("10/s", burst=2, concurrency=4),  # over all workers and machines together
)
async def ask(prompt: str) -> str:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(timeout=30) as client:
        reply = await client.post(URL, json={"prompt": prompt}, headers=headers)
    if reply.status_code == 429:  # the API has too many requests, and says when to come again
        raise Retry("the API is busy", delay=float(reply.headers.get("Retry-After", "1")))
    if reply.is_client_error:  # the same request would fail again
        raise Fail(f"{reply.status_code}: {reply.text}")
    reply.raise_for_status()  # an error of the API: retried with backoff
    text: str = reply.json()["text"]
    return text


def main() -> None:
    prompts = [f"Describe the photo {number}.jpg" for number in range(40)]
    batch = mill.enqueue(map_many(ask, prompts))
    answers = batch.result(timeout=600, return_exceptions=True, progress=True)
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{prompt}: {answer}")


if __name__ == "__main__":
    with mill:
        main()
