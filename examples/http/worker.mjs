// Run tasks in Node: node worker.mjs. It knows "shop.resize", and takes it from the queue "images".
import { setTimeout as sleep } from "node:timers/promises";

const server = process.env.SERVER ?? "http://127.0.0.1:8333";
const ttr = Number(process.env.TTR ?? 30); // another worker gets what we hold, if we are silent so long

const tasks = {
  async "shop.resize"({ args: [name], kwargs: { width = 640, seconds = 0 } }, { signal, heartbeat }) {
    await heartbeat({ progress: 0, total: 1, log: [`resizing ${name} in Node`] });
    await sleep(seconds * 1000, undefined, { signal }); // here you would work
    return `${name} at ${width}`;
  },
};

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch(`${server}/v1/${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = reply.status === 204 ? {} : await reply.json();
  if (!reply.ok) throw new Error(answer.detail);
  return answer;
}

// Results that come while a request is on its way go together in the next one.
let batch, sent = Promise.resolve();
async function complete(receipt, result) {
  if (!batch) {
    const results = [];
    const send = () => (batch = undefined, post("complete", { results }));
    batch = { results, answer: sent.then(send) };
    sent = batch.answer.catch(() => {}); // each job of the batch hears of the error
  }
  const { results, answer } = batch;
  const place = results.push({ receipt, result }) - 1;
  return (await answer).done[place];
}

async function run(job) {
  const say = (what, body) => post(`reservations/${job.receipt}/${what}`, body);
  const ending = new AbortController();
  const heartbeat = async (news = {}) => {
    const { stop } = await say("heartbeat", { ttr, ...news });
    if (stop) ending.abort(stop); // it is cancelled, or beyond its timeout
  };
  // A heartbeat that is refused says that the job is lost: somebody else may have it by now.
  const beats = setInterval(() => heartbeat().catch(() => ending.abort("lost")), ttr * 333);
  try {
    const result = await tasks[job.task](job, { signal: ending.signal, heartbeat });
    if (!(await complete(job.receipt, result))) console.error(`${job.id} was lost: another worker may have it`);
  } catch (error) {
    const why = ending.signal.reason;
    if (why === "cancelled") await say("stopped", {});
    else if (why === "timeout") await say("fail", { error: "it ran past its timeout" });
    else if (why !== "lost") await say("fail", { error: `${error}`, traceback: error.stack ?? "" });
  } finally {
    clearInterval(beats);
  }
}

for (;;) {
  try {
    const wish = { tasks: Object.keys(tasks), queues: ["images"], count: 4, timeout: 30 };
    const { jobs } = await post("tasks/reserve", wish);
    await Promise.all(jobs.map(run));
  } catch (error) {
    console.error(`${error}`); // the server is away: what we hold stays ours for its ttr
    await sleep(1000);
  }
}
