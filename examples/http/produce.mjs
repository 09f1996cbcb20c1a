// Put an order into the queue "orders": node produce.mjs 17.
const server = process.env.SERVER ?? "http://127.0.0.1:8333";

const reply = await fetch(`${server}/v1/queues/orders/messages`, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify({ order: Number(process.argv[2]) }),
});
const answer = await reply.json();
if (!reply.ok) throw new Error(answer.detail);
console.log(`put ${answer.id}`);
