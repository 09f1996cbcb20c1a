// A browser for plain pages: node page_reader.mjs URL [BUTTON TEXT]…
// For each pair it presses the button with this label, and waits until the page shows the text.
import { setTimeout as sleep } from "node:timers/promises";

const [, , url, ...steps] = process.argv;
const page = await (await fetch(url)).text();

class Element {
  children = [];
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((part) => part.textContent ?? part).join(""); }
}

const byId = {};
for (const [, , id, , text] of page.matchAll(/<(\w+) id="(\w+)"( [^>]*)?>([^<]*)/g)) {
  byId[id] = new Element();
  byId[id].textContent = text;
}
globalThis.document = { getElementById: (id) => byId[id], createElement: () => new Element() };
const real = globalThis.fetch;
globalThis.fetch = (path, options) => real(new URL(path, url), options);

function* elements(of = Object.values(byId)) {
  for (const each of of) {
    if (!(each instanceof Element)) continue;
    yield each;
    yield* elements(each.children);
  }
}

async function until(what, found) {
  for (const end = Date.now() + 60_000; Date.now() < end; await sleep(50)) {
    const it = found();
    if (it) return it;
  }
  console.error(`the page has no ${what}: ${text()}`);
  process.exit(1);
}

const text = () => Object.values(byId).map((each) => each.textContent).join("\n");
const button = (label) => [...elements()].find((each) => each.onclick && !each.disabled && each.textContent === label);

new Function(page.match(/<script>(.*)<\/script>/s)[1])();
for (let at = 0; at < steps.length; at += 2) {
  if (steps[at]) (await until(`button ${steps[at]}`, () => button(steps[at]))).onclick();
  await until(steps[at + 1], () => new RegExp(steps[at + 1]).test(text()));
  console.log(text());
}
process.exit(0);
