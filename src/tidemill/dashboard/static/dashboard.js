// The script of all pages: live news, keys, charts, copying, and questions before an action.
// Each page works without this script.
"use strict";
(function () {
  const root = document.documentElement.dataset.root;
  const all = (query, from) => Array.from((from || document).querySelectorAll(query));
  const one = (query) => document.querySelector(query);

  // -- time zone ---------------------------------------------------------------------------------
  // The server writes times in the zone of a cookie. Without a cookie and a zone of the site, the
  // zone is that of the browser.

  const page = document.documentElement.dataset;
  const browserZone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";

  function setZone(name) {
    document.cookie = `tidemill_zone=${name}; path=${root || "/"}; max-age=31536000; samesite=strict`;
  }

  function nextZone() {
    const zones = [...new Set([page.siteZone || "UTC", "UTC", browserZone])];
    setZone(zones[(zones.indexOf(page.zone) + 1) % zones.length]);
    location.href = location.pathname + location.search;
  }

  // -- live news ---------------------------------------------------------------------------------
  // An event says that something has changed. The page then requests its own URL, and replaces the
  // element #live. With data-every="2" the page asks every 2 seconds; with data-still it never asks.

  // While no answer comes, the page says from when it is.

  const LEAST_BETWEEN = 1000;
  const PATIENCE = 5000; // for an answer
  let paused = sessionStorage.getItem("tidemill-paused") === "yes";
  let source = null;
  let polling = null;
  let asked = 0;
  let waiting = null;
  let lost = false;
  let heard = Date.now(); // when the latest answer came
  let unanswered = 0; // when the first request since then was sent

  function isBusy() {
    const focus = document.activeElement;
    const isTyping = focus && focus.closest("#live") && focus.matches("input:not([type=checkbox]), textarea, select");
    return Boolean(isTyping || one("#live dialog[open]") || one("#live details.hold[open]"));
  }

  function refresh() {
    const live = one("#live");
    if (!live || "still" in live.dataset || paused || document.hidden) return;
    const wait = asked + LEAST_BETWEEN - Date.now();
    if (wait > 0 || isBusy()) {
      waiting = waiting || setTimeout(() => { waiting = null; refresh(); }, Math.max(wait, 500));
      return;
    }
    asked = Date.now();
    unanswered = unanswered || asked;
    htmx.ajax("GET", location.pathname + location.search, {
      target: "#live", select: "#live", swap: "morph:outerHTML", headers: { "X-Live": "1" },
    }).catch(() => {});
  }

  // While the page is paused, an answer to an earlier request does not change the page.
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (paused && event.detail.target.id === "live") event.detail.shouldSwap = false;
  });

  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.target.id !== "live" || !event.detail.successful) return;
    heard = Date.now();
    unanswered = 0;
    const zone = event.detail.xhr.getResponseHeader("X-Zone");
    if (zone && zone !== page.zone) {
      page.zone = one(".zone").textContent = zone;
      draw(true);
    }
    show("live");
  });

  function connect() {
    if (source || paused || document.hidden) return;
    if (document.documentElement.dataset.live !== "sse" || !window.EventSource) {
      poll();
      return;
    }
    source = new EventSource(root + "/live");
    source.addEventListener("open", () => {
      show("live");
      if (lost) refresh();
      lost = false;
    });
    source.addEventListener("changed", refresh);
    source.addEventListener("error", () => {
      show("lost");
      lost = true;
      if (source && source.readyState === EventSource.CLOSED) {
        source = null;
        poll();
      }
    });
  }

  function poll() {
    if (!lost) show("live");
    polling = polling || setInterval(refresh, 2000);
  }

  function disconnect() {
    if (source) source.close();
    clearInterval(polling);
    source = polling = null;
  }

  function show(state) {
    const button = one("[data-live-switch]");
    if (!button) return;
    button.dataset.state = paused ? "paused" : state;
    button.setAttribute("aria-pressed", String(!paused));
    one(".live-text").textContent = paused ? "Paused" : state === "lost" ? "as of " + time(heard) : "Live";
  }

  function time(moment) {
    return new Date(moment).toLocaleTimeString("en-GB", { timeZone: page.zone });
  }

  function togglePause() {
    paused = !paused;
    sessionStorage.setItem("tidemill-paused", paused ? "yes" : "no");
    if (paused) disconnect();
    else { connect(); refresh(); }
    show("live");
  }

  document.addEventListener("visibilitychange", () => {
    unanswered = 0;
    if (document.hidden) disconnect();
    else { connect(); refresh(); }
  });
  setInterval(() => {
    if (unanswered && Date.now() - unanswered > PATIENCE) show("lost");
    const live = one("#live");
    const every = live ? Number(live.dataset.every || 10) : 10;
    if (Date.now() - asked >= every * 1000) refresh();
  }, 1000);

  // -- selection of rows -------------------------------------------------------------------------
  // Rows with data-row move with j and k, are selected with x, and open with Enter.

  let at = -1;
  const rows = () => all("[data-row]");

  function move(step) {
    const list = rows();
    if (!list.length) return;
    at = Math.max(0, Math.min(list.length - 1, at + step));
    list.forEach((row, n) => row.classList.toggle("at", n === at));
    const link = list[at].querySelector("a");
    if (link) link.focus({ preventScroll: true });
    list[at].scrollIntoView({ block: "nearest" });
  }

  function select() {
    const row = rows()[at];
    const box = row && row.querySelector("input[type=checkbox]");
    if (box) {
      box.checked = !box.checked;
      box.dispatchEvent(new Event("change", { bubbles: true }));
    }
  }

  // -- keys --------------------------------------------------------------------------------------

  let went = 0;
  const actions = {
    "/": () => { const field = one("#search"); if (field) { field.focus(); field.select(); } },
    p: togglePause,
    j: () => move(1),
    k: () => move(-1),
    x: select,
    "?": () => { location.href = one("[data-help]").href; },
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      if (document.activeElement) document.activeElement.blur();
      return;
    }
    if (event.target.closest("input:not([type=checkbox]), textarea, select, dialog")) return;
    if (Date.now() - went < 1500) {
      went = 0;
      const link = one(`nav [data-key="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        location.href = link.href;
        return;
      }
    }
    if (event.key === "g") { went = Date.now(); return; }
    const button = one(`[data-press="${CSS.escape(event.key)}"]`);
    const action = button ? () => button.click() : actions[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });

  // -- clicks ------------------------------------------------------------------------------------

  document.addEventListener("click", (event) => {
    const target = event.target.closest("button, a, input");
    if (!target) return;
    if ("copy" in target.dataset) copy(target);
    if ("liveSwitch" in target.dataset) togglePause();
    if ("zoneSwitch" in target.dataset) nextZone();
    if ("themeSwitch" in target.dataset) { one("[data-theme-name]").textContent = window.tidemillTheme(); draw(true); }
    if ("toggle" in target.dataset) {
      const open = document.getElementById(target.dataset.toggle).classList.toggle("open");
      target.setAttribute("aria-expanded", String(open));
    }
    if ("open" in target.dataset) document.getElementById(target.dataset.open).showModal();
    if ("close" in target.dataset) target.closest("dialog").close();
    if ("all" in target.dataset) {
      all(`input[type=checkbox][name="${CSS.escape(target.dataset.all)}"]`).forEach((box) => { box.checked = target.checked; });
      target.dispatchEvent(new Event("selected", { bubbles: true }));
    }
  });

  async function copy(button) {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.classList.add("done");
      setTimeout(() => button.classList.remove("done"), 1200);
    } catch (_) {
      button.classList.add("failed");
    }
  }

  document.addEventListener("submit", (event) => {
    const question = (event.submitter && event.submitter.dataset.ask) || event.target.dataset.ask;
    if (question && !window.confirm(question)) event.preventDefault();
  });
  document.addEventListener("change", () => {
    const count = one("[data-selected-count]");
    if (count) count.textContent = String(all("[data-row] input[type=checkbox]:checked").length);
  });

  // -- charts ------------------------------------------------------------------------------------
  // <div class="chart" data-chart='{"at": [...], "lines": [{"name", "values", "color"}], "unit"}'>
  // color is the name of a variable in dashboard.css, such as "succeeded".

  const charts = new Map();
  const probe = document.createElement("span");  // a canvas cannot read light-dark(…)

  function style(name) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }

  function text(value, unit) {
    if (value == null) return "–";
    if (unit === "s") return value === 0 ? "0" : value < 1 ? `${+(value * 1000).toPrecision(3)} ms` : value < 60 ? `${+value.toFixed(1)} s` : value < 3600 ? `${+(value / 60).toFixed(1)} min` : `${+(value / 3600).toFixed(1)} h`;
    return `${Number(value.toFixed(2)).toLocaleString("en")}${unit || ""}`;
  }

  // Formats of the time axis, by the seconds between ticks. The second format is for a new day.
  const CLOCK = [
    [86400, "{YYYY}-{MM}-{DD}", null, null, null, null, null, null, 1],
    [3600, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
    [1, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{YYYY}-{MM}-{DD}", null, null, null, 1],
  ];

  // data.marks: [{"at", "name"}] are upright lines with names, such as the deploys of releases.
  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = style("--soft");
    ctx.textAlign = "left";
    ctx.setLineDash([4, 4]);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    let free = -Infinity;
    for (const mark of marks) {
      const x = Math.round(plot.valToPos(mark.at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (x > free) {
        const width = ctx.measureText(mark.name).width;
        const fits = x + 4 + width <= bbox.left + bbox.width;
        ctx.fillText(mark.name, fits ? x + 4 : x - 4 - width, bbox.top + 12 * devicePixelRatio);
        free = x + 8 + width;
      }
    }
    ctx.restore();
  }

  // The places of values without a neighbour: no line leads to them, so a point shows them.
  function lonely(plot, series) {
    const values = plot.data[series];
    const found = [];
    values.forEach((value, at) => {
      if (value != null && values[at - 1] == null && values[at + 1] == null) found.push(at);
    });
    return found.length ? found : null;
  }

  // The distances between ticks of an axis of seconds.
  const SPANS = [0.001, 0.01, 0.1].flatMap((unit) => [unit, 2 * unit, 5 * unit]).concat(
    [1, 2, 5, 10, 15, 30], [1, 2, 5, 10, 15, 30].map((minutes) => 60 * minutes),
    [1, 2, 3, 6, 12, 24, 48, 96, 168].map((hours) => 3600 * hours));

  const COUNTS = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((zeros) => [1, 2, 5].map((digit) => digit * 10 ** zeros));

  function settings(data, width, height) {
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    return {
      width, height,
      tzDate: (at) => uPlot.tzDate(new Date(at * 1000), page.zone),
      hooks: { draw: [(plot) => drawMarks(plot, data.marks || [])] },
      cursor: { points: { size: 7 }, drag: { x: false, y: false } },
      legend: { live: true },
      axes: [{ ...axis, size: 36, values: CLOCK }, { ...axis, size: 64, incrs: data.unit === "s" ? SPANS : COUNTS, values: (_, ticks) => ticks.map((tick) => text(tick, data.unit)) }],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      series: [
        { label: "\u00a0", value: (_, at) => (at == null ? "" : new Date(at * 1000).toLocaleString("sv", { timeZone: page.zone })) },
        ...data.lines.map((line) => ({
          label: line.name, stroke: style(`--${line.color}`), width: 2, spanGaps: false,
          fill: line.fill ? style(`--${line.color}-soft`) : undefined, dash: line.dash, points: { show: false, filter: lonely, size: 5 },
          value: (plot, value) => (plot.cursor.idx == null ? "" : text(value, data.unit)),
        })),
      ],
    };
  }

  function draw(again) {
    if (!window.uPlot) return;
    for (const [place, chart] of charts) {
      if (!place.isConnected) { chart.plot.destroy(); charts.delete(place); }
    }
    for (const place of all(".chart[data-chart]")) {
      const old = charts.get(place);
      if (old && old.text === place.dataset.chart && !again && old.plot.root.isConnected) continue;
      const data = JSON.parse(place.dataset.chart);
      const values = [data.at, ...data.lines.map((line) => line.values)];
      if (old && !again && old.plot.root.isConnected && old.lines === data.lines.length) {
        old.plot.setData(values);
        old.text = place.dataset.chart;
        continue;
      }
      if (old) old.plot.destroy();
      place.replaceChildren();
      const height = Number(place.dataset.height || 200);
      const plot = new uPlot(settings(data, place.clientWidth, height), values, place);
      charts.set(place, { plot, text: place.dataset.chart, lines: data.lines.length });
    }
  }

  window.addEventListener("resize", () => {
    for (const [place, chart] of charts) chart.plot.setSize({ width: place.clientWidth, height: chart.plot.height });
    reach();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));

  // Make each box that can scroll focusable, so that keys can scroll the box.
  function reach() {
    for (const box of all(".scroll")) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }

  // Restore the changes that the script made to the page, after each update.
  document.addEventListener("htmx:load", () => draw(false));
  document.addEventListener("htmx:afterSettle", () => {
    draw(false);
    reach();
    if (at >= 0) rows().forEach((row, n) => row.classList.toggle("at", n === at));
    document.dispatchEvent(new CustomEvent("tidemill:news"));
  });

  addEventListener("DOMContentLoaded", () => {
    if (window.Idiomorph) {
      Idiomorph.defaults.ignoreActiveValue = true;
      Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name) => name !== "tabindex";
      Idiomorph.defaults.callbacks.beforeNodeMorphed = (old, next) => {
        if (!(old instanceof Element) || !(next instanceof Element)) return true;
        if (old.matches("details") && old.open) next.setAttribute("open", "");
        if (old.matches("input[type=checkbox]") && old.id === next.id) next.checked = old.checked;
        if (old.matches(".chart[data-chart]") && next.matches(".chart[data-chart]")) {
          old.dataset.chart = next.dataset.chart;
          return false;
        }
        return true;
      };
    }
    const name = one("[data-theme-name]");
    if (name) name.textContent = document.documentElement.dataset.theme;
    const isFirst = !page.siteZone && !document.cookie.includes("tidemill_zone=");
    if (isFirst) setZone(browserZone);
    draw(false);
    reach();
    connect();
    if (isFirst) refresh();
    show("live");
  });
})();
