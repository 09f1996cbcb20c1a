// Take orders from the tube "orders", for ever: npm install jackd, then node consume.mjs.
import Jackd from "jackd";

const queue = new Jackd();
await queue.connect({ host: "127.0.0.1", port: process.env.PORT ?? 11300 });
await queue.watch("orders");
await queue.ignore("default"); // which each client watches until it says so
for (;;) {
  const { id, payload } = await queue.reserve(); // ours for its time to run
  console.log(`order ${JSON.parse(payload).order}`);
  await queue.delete(id); // done; release would give it back, bury keep it for a human
}
