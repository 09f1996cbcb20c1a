// Put an order into the tube "orders": npm install jackd, then node produce.mjs 17.
import Jackd from "jackd";

const queue = new Jackd();
await queue.connect({ host: "127.0.0.1", port: process.env.PORT ?? 11300 });
await queue.use("orders");
const number = await queue.put({ order: Number(process.argv[2]) }, { ttr: 60 });
console.log(`put ${number}`);
await queue.quit();
