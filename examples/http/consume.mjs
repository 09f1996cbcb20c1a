// Take orders from the queue "orders", for ever: node consume.mjs.
const server = process.env.SERVER ?? "http://127.0.0.1:8333";

async function ask(path, body) {
  const reply = await fetch(`${server}/v1/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.detail);
  return answer;
}

for (;;) {
  const { jobs } = await ask("reserve", { queues: ["orders"], count: 10, timeout: 30 });
  for (const job of jobs) console.log(`order ${job.body.order}`); // ours for their time to run
  await ask("ack", { receipts: jobs.map((job) => job.receipt) }); // done: forget them
}
