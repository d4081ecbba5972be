// Unpacks the charts, draws them in the colours of the theme, and serves selects, table and print.
// What is drawn is decided where the page is made; nothing here knows one chart from another.
"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const charts = new Map(); // key -> {content, plot, note, group}
  const arrays = {}; // of all charts, by name
  const coarse = matchMedia("(pointer: coarse)").matches;
  const PRINT_WIDTH = 690; // CSS pixels between the margins of an A4 page

  const FONT = getComputedStyle(root).getPropertyValue("--sans");
  // What all plots have in common: no frame, hair lines, their words in the surrounding page.
  const PLOT = {
    margin: { l: 38, r: 10, t: 8, b: 38 },
    paper_bgcolor: "var(--surface)",
    plot_bgcolor: "var(--surface)",
    font: { family: FONT, size: 12, color: "var(--muted)" },
    hoverlabel: {
      bgcolor: "var(--surface)",
      bordercolor: "var(--line-strong)",
      font: { family: FONT, size: 12.5, color: "var(--ink)" },
      align: "left",
    },
    showlegend: false,
    legend: { orientation: "h", x: 0, y: 1.03, yanchor: "bottom", traceorder: "normal" },
    dragmode: false,
  };
  const AXIS = {
    title: { font: { size: 12 }, standoff: 6 },
    gridcolor: "var(--grid)",
    zeroline: false,
    showline: false,
    ticks: "",
    fixedrange: true,
    automargin: true,
    spikecolor: "var(--line-strong)",
    spikethickness: 1,
    spikedash: "solid",
  };

  async function unpack(id) {
    const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // ---- colours -----------------------------------------------------------------------------
  let palette = null;
  const VARIABLE = /^var\((--[a-z0-9-]+)\)$/;

  function colours(value) {
    if (typeof value === "string") {
      const name = VARIABLE.exec(value)?.[1];
      if (!name) return value;
      palette ??= getComputedStyle(root);
      return palette.getPropertyValue(name).trim() || value;
    }
    if (Array.isArray(value)) {
      // Lists of numbers hold no colour, and are the bulk of the page.
      return typeof value.at(-1) === "number" ? value : value.map(colours);
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, colours(one)]));
    }
    return value;
  }

  // ---- drawing -----------------------------------------------------------------------------
  // "@one" is that array, "@one-@other" their difference.
  function array(reference) {
    const [one, other] = reference.split("-").map((name) => arrays[name.slice(1)]);
    if (!other) return one;
    const gap = (a, b) => (a == null || b == null ? null : a - b);
    return one.map((row, i) => row.map((value, j) => gap(value, other[i]?.[j])));
  }

  function merged(trace, change) {
    const result = { ...trace };
    for (const [key, value] of Object.entries(change)) {
      if (typeof value === "string" && value.startsWith("@")) result[key] = array(value);
      else if (value && typeof value === "object" && !Array.isArray(value)) {
        result[key] = merged(result[key] || {}, value);
      } else result[key] = value;
    }
    return result;
  }

  function viewOf(chart) {
    const picked = [...chart.group.querySelectorAll("select[data-choice]")].map((s) => s.value);
    return chart.content.views[picked.join(",")];
  }

  // `afresh`: at once, without the animation from what was there before.
  function draw(chart, afresh) {
    const { content, plot, note } = chart;
    const view = viewOf(chart);
    let data = content.data;
    if (view) {
      note.textContent = view.note;
      plot.hidden = view.data.length === 0;
      if (plot.hidden) return Promise.resolve();
      data = data.map((trace, i) => merged(trace, view.data[i] || {}));
    }
    const shape = merged(PLOT, view ? merged(content.layout, view.layout) : content.layout);
    for (const axis of ["xaxis", "yaxis"]) if (shape[axis]) shape[axis] = merged(AXIS, shape[axis]);
    const layout = { ...colours(shape), width: plot.clientWidth };
    const config = { displayModeBar: false, responsive: false, doubleClick: "reset" };
    if (coarse) layout.dragmode = false;
    if (afresh) Plotly.purge(plot);
    return Plotly.react(plot, data.map(colours), layout, config);
  }

  function drawAll() {
    palette = null;
    for (const chart of charts.values()) draw(chart, true);
  }

  const frame = () => new Promise((done) => setTimeout(done));

  async function start() {
    const [library, packed] = await Promise.all([unpack("library"), unpack("charts")]);
    const script = document.createElement("script");
    script.textContent = library;
    document.head.append(script);
    for (const content of JSON.parse(packed)) {
      Object.assign(arrays, content.arrays);
      const plot = byId(`chart-${content.key}`);
      const note = byId(`chart-${content.key}-note`);
      charts.set(content.key, { content, plot, note, group: plot.closest("[data-group]") });
    }
    for (const chart of charts.values()) {
      await draw(chart);
      await frame(); // the page answers while the rest is drawn
    }
    root.dataset.ready = "yes";
  }

  function trouble(error) {
    const old = typeof DecompressionStream === "undefined";
    byId("trouble").hidden = false;
    byId("trouble").textContent = old
      ? "The charts need a browser of 2023 or later; the tables below work in this one too."
      : `The charts could not be drawn: ${error.message}`;
    root.classList.add("plain");
    root.dataset.ready = "no";
  }

  // ---- selects, saving, resizing, theme, print ------------------------------------------------
  document.addEventListener("change", (event) => {
    if (!event.target.matches("select[data-choice]")) return;
    const group = event.target.closest("[data-group]");
    for (const chart of charts.values()) if (chart.group === group) draw(chart);
  });

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-save]");
    const chart = button && charts.get(button.dataset.save);
    if (!chart || chart.plot.hidden) return;
    const filename = `moemerge-${button.dataset.save}`;
    const { clientWidth: width, clientHeight: height } = chart.plot;
    Plotly.downloadImage(chart.plot, { format: "png", filename, width, height, scale: 3 });
  });

  let waiting = null;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar comes and goes
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => root.classList.contains("printing") || drawAll(), 120);
  });

  root.addEventListener("theme", drawAll);

  let screenTheme = "light";
  let folded = [];
  addEventListener("beforeprint", () => {
    screenTheme = root.dataset.theme;
    folded = [...document.querySelectorAll("details:not([open])")];
    root.dataset.theme = "light";
    root.classList.add("printing");
    root.style.setProperty("--print-width", `${PRINT_WIDTH}px`);
    for (const one of folded) one.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
    root.classList.remove("printing");
    root.dataset.theme = screenTheme;
    drawAll();
  });

  // ---- the table -----------------------------------------------------------------------------
  const table = byId("rows");
  const headers = [...table.tHead.rows[0].cells];

  function sortBy(header) {
    const column = headers.indexOf(header);
    const text = header.dataset.kind === "text";
    // Numbers start with the largest: that is what one looks for. Text and layers start at the top.
    const first = text || header.dataset.key === "layer" ? "ascending" : "descending";
    const second = first === "ascending" ? "descending" : "ascending";
    const order = header.getAttribute("aria-sort") === first ? second : first;
    const sign = order === "ascending" ? 1 : -1;
    const rows = [...table.tBodies[0].rows].map((row) => [row.cells[column].dataset.v, row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); // gaps stay at the end
      return sign * (text ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
    });
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    table.tBodies[0].append(...rows.map(([, row]) => row));
    byId("sorted").textContent = `Sorted by ${header.textContent.trim()}, ${order}`;
  }
  table.tHead.addEventListener("click", (event) => {
    const header = event.target.closest("th");
    if (header) sortBy(header);
  });

  function csv() {
    const quoted = (value) => {
      // A spreadsheet would run a label that begins like a formula.
      const plain = /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value;
      return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
    };
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((c) => c.dataset.v));
    const lines = [headers.map((header) => header.dataset.key), ...rows];
    return lines.map((line) => line.map(quoted).join(",")).join("\r\n") + "\r\n";
  }
  byId("csv").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "moemerge-diagnosis.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  const copy = byId("copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(byId("command").textContent);
      copy.textContent = "Copied";
    } catch (refused) {
      // A page from disk may not have the clipboard: select it, Ctrl+C is one key away.
      getSelection().selectAllChildren(byId("command"));
      copy.textContent = "Selected";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });

  start().catch(trouble).finally(holdLoad());
})();
